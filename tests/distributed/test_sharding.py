"""Wrapped models are accepted or refused; sharded bases equal whole ones; kills lose nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import curvatlas as ca
import forked
import oracles
from distributed import workers
from distributed.test_data_parallel import free_port, start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have left the products of wrapped models, and the refusals."""
    folder = tmp_path_factory.mktemp("wrapped")
    start(workers.wrapped_models, folder, "")
    return folder


@pytest.mark.parametrize("name", [*workers.WRAPPED, "accelerate"])
def test_a_wrapped_model_gives_the_bare_models_products(wrapped: Path, name: str) -> None:
    first, second = (torch.load(wrapped / f"{name} {r}.pt", weights_only=True) for r in (0, 1))
    model, data = workers.model_and_data()
    problem = ca.Problem(model, "cross_entropy", data)
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(problem.size, 2, dtype=torch.float64, generator=generator)
    want = {
        "gradient": problem.gradient(),
        "H": ca.Hessian(problem) @ columns,
        "H_o": ca.GaussNewton(problem) @ columns,
    }
    for quantity, value in want.items():
        assert torch.equal(first[quantity], second[quantity]), quantity
        assert oracles.relative_error(first[quantity], value) < 1e-12, quantity


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensor parallel", "tensor-parallel parameters give wrong second derivatives"),
        ("fsdp and tensor parallel", "tensor-parallel parameters give wrong second derivatives"),
        ("fsdp1 inside", "FSDP1-wrapped models cannot be differentiated twice"),
        ("other replicas", "rank 1 has other weights than rank 0 (head.weight)"),
    ],
)
def test_what_cannot_be_gathered_is_refused_by_its_name(
    wrapped: Path, name: str, words: str
) -> None:
    for rank in (0, 1):
        assert words in (wrapped / f"{name} {rank}.txt").read_text()


def test_sharded_lanczos_equals_one_process_and_resumes(tmp_path: Path) -> None:
    start(workers.sharded_eigenpairs, tmp_path, "stop")
    assert (tmp_path / "state").exists()
    start(workers.sharded_eigenpairs, tmp_path, "resume")
    parts = [torch.load(tmp_path / f"part{r}.pt", weights_only=True) for r in (0, 1)]
    model, data = workers.model_and_data()
    operator = ca.Hessian(ca.Problem(model, "cross_entropy", data))
    whole = ca.eigenpairs(operator, k=3, which="both", tol=1e-9)
    assert int(parts[0]["products"]) < whole.products  # the first part was not computed again
    scale = float(whole.values.abs().max())
    assert torch.equal(parts[0]["values"], parts[1]["values"])
    assert float((parts[0]["values"] - whole.values).abs().max()) < 1e-10 * scale
    assert parts[0]["vectors"].shape[0] < operator.shape[0]  # each process holds its part only
    vectors = torch.cat([part["vectors"] for part in parts])
    overlap = (vectors * whole.vectors).sum(0).abs()
    assert float((overlap - 1).abs().max()) < 1e-8
    # The sharded checkpoint of two processes is read by one.
    alone = ca.Hessian(ca.Problem(model, "cross_entropy", data))
    again = ca.eigenpairs(
        alone, k=3, which="both", tol=1e-9, shard=True, checkpoint=tmp_path / "state"
    )
    assert alone.products == 0
    assert float((again.values - whole.values).abs().max()) < 1e-10 * scale


@pytest.mark.parametrize("killed", [(1,), (0, 1)])
def test_killed_processes_leave_what_was_computed(killed: tuple[int, ...], tmp_path: Path) -> None:
    arguments = (2, free_port(), str(tmp_path), "")
    group = forked.ranks(workers.slow_eigenpairs, arguments, join=False)
    deadline = time.monotonic() + 120
    while not (tmp_path / "state").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    for rank in killed:
        os.kill(int((tmp_path / f"pid{rank}").read_text()), signal.SIGKILL)
    for process in group.processes:
        process.join(60)
        assert process.exitcode not in (None, 0)  # stopped, neither hanging nor pretending
    # One process goes on with what two had computed.
    model, data = workers.model_and_data()
    operator = ca.Hessian(ca.Problem(model, "cross_entropy", data))
    found = ca.eigenpairs(operator, k=3, tol=1e-9, checkpoint=tmp_path / "state")
    fresh = ca.Hessian(ca.Problem(model, "cross_entropy", data))
    whole = ca.eigenpairs(fresh, k=3, tol=1e-9)
    assert operator.products < fresh.products
    assert float((found.values - whole.values).abs().max()) < 1e-9 * float(whole.values.max())
