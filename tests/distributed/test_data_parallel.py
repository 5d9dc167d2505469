"""Two gloo processes give the one-process result, and fail together."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import curvatlas as ca
import forked
import oracles
from curvatlas import runs
from distributed import workers


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(worker: Callable[..., Any], folder: Path, mode: str) -> None:
    forked.ranks(worker, (2, free_port(), str(folder), mode))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["own", "shared"])
def test_two_processes_with_uneven_shards_equal_one_process(mode: str, tmp_path: Path) -> None:
    start(workers.products, tmp_path, mode)
    first, second = (torch.load(tmp_path / f"rank{r}.pt", weights_only=True) for r in (0, 1))
    model, data = workers.model_and_data()
    problem = ca.Problem(model, "cross_entropy", data)
    columns = torch.randn(
        problem.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    want = {
        "gradient": problem.gradient(),
        "value": torch.tensor(problem.value()),
        **{
            kind.__name__: kind(problem) @ columns
            for kind in (ca.Hessian, ca.GaussNewton, ca.FunctionalHessian, ca.Fisher)
        },
    }
    for name, value in want.items():
        assert torch.equal(first[name], second[name]), name
        assert oracles.relative_error(first[name], value) < 1e-12, name


@pytest.mark.slow
def test_a_survey_accounts_for_the_samples_of_all_processes(tmp_path: Path) -> None:
    start(workers.survey, tmp_path, "")
    model, data = workers.model_and_data()
    problem = ca.Problem(model, "cross_entropy", data)
    ca.survey(problem, output=tmp_path / "alone", **workers.SURVEYED)
    both, alone = (runs.load(tmp_path / name)["model.propagation"] for name in ("run", "alone"))
    assert both.samples == alone.samples
    assert both.loss == pytest.approx(problem.value(), rel=1e-12)
    for got, want in zip(both.activations, alone.activations, strict=True):
        assert got.norm == pytest.approx(want.norm, rel=1e-9)


@pytest.mark.slow
def test_a_failing_rank_stops_every_rank_with_a_message(tmp_path: Path) -> None:
    start(workers.failing, tmp_path, "")
    assert "head.weight" in (tmp_path / "rank1.txt").read_text()
    assert "1 of 2 processes failed" in (tmp_path / "rank0.txt").read_text()
