"""For the day there is a GPU: the same numbers as on the CPU, no waiting, and a table to paste.

``make gpu-test`` runs these. Synchronisations are those that CUDA itself reports
(``torch.cuda.set_sync_debug_mode``); the stand-in device counts the same on any machine
(``test_host_waits``).
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas import zoo
from curvatlas.errors import NonFiniteError

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
OPERATORS = {"H": ca.Hessian, "H_o": ca.GaussNewton, "H_f": ca.FunctionalHessian}
SIZES = {
    "0.1 M": zoo.GPTConfig(vocabulary=64, context=64, d_model=64, n_heads=4, n_layers=2),
    "10 M": zoo.GPTConfig(vocabulary=4096, context=256, d_model=320, n_heads=5, n_layers=6),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str
    difference: float  # ‖GPU − CPU‖ / ‖CPU‖
    milliseconds: float  # of one product, the median of several
    megabytes: float  # peak beyond what was there before the product
    synchronisations: float  # of one product, or of one Lanczos step

    def __str__(self) -> str:
        return (
            f"| {self.what} | {self.difference:.1e} | {self.milliseconds:.2f} | "
            f"{self.megabytes:.1f} | {self.synchronisations:g} |"
        )


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    if rows:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        print(f"\n\n{name}, torch {torch.__version__}\n")
        print("| | difference to the CPU | ms | MB beside | synchronisations |")
        print("|---|---|---|---|---|")
        print(*rows, sep="\n")


def problem_on(device: str, size: str) -> ca.Problem:
    torch.manual_seed(0)
    config = SIZES[size]
    model = zoo.GPT(config).eval()
    tokens = torch.randint(0, config.vocabulary, (2, config.context + 1))
    data = (tokens[:, :-1].to(device), tokens[:, 1:].to(device))
    return ca.Problem(copy.deepcopy(model).to(device), "cross_entropy", data)


def synchronisations(work: Callable[[], object], device: str) -> int:
    """How often the host waits for CUDA while ``work`` runs; elsewhere never."""
    if device == "cpu":
        work()
        return 0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measured(what: str, op: ca.LinearOperator, expected: Tensor, v: Tensor, device: str) -> Row:
    """A product after the first ones: its numbers, time, memory and synchronisations."""
    product = op @ v
    for _ in range(2):  # the hand-written passes are recorded in the second
        op @ v
    seconds = []
    for _ in range(5):
        wait(device)
        start = time.perf_counter()
        op @ v
        wait(device)
        seconds.append(time.perf_counter() - start)
    beside = 0
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        op @ v
        beside = torch.cuda.max_memory_allocated() - before
    error = product.cpu() - expected
    return Row(
        what=what,
        difference=float(error.norm() / expected.norm()),
        milliseconds=1e3 * sorted(seconds)[2],
        megabytes=beside / 1e6,
        synchronisations=synchronisations(lambda: op @ v, device),
    )


def row_of(part: str, engine: str, size: str, device: str) -> Row:
    here, there = (
        OPERATORS[part](problem_on(place, size), engine=engine)  # type: ignore[arg-type]
        for place in ("cpu", device)
    )
    v = torch.randn(here.shape[0], generator=torch.Generator().manual_seed(1))
    return measured(f"{part} v, {engine}, {size}", there, here @ v, v.to(device), device)


def test_the_table_can_be_made_without_a_gpu() -> None:
    """The same lines with the CPU in the place of the GPU."""
    row = row_of("H", "tangent", "0.1 M", "cpu")
    assert row.difference < 1e-6
    assert str(row).startswith("| H v, tangent, 0.1 M | ")
    assert row.milliseconds > 0


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("engine", ["tangent", "autograd"])
@pytest.mark.parametrize("part", OPERATORS)
def test_products_are_those_of_the_cpu_without_waiting(
    part: str, engine: str, size: str, table: list[Row]
) -> None:
    row = row_of(part, engine, size, "cuda")
    table.append(row)
    assert row.difference < 1e-3  # float32, TF32 off: another order of sums
    assert row.synchronisations == 0


@pytest.mark.gpu
@on_gpu
def test_lanczos_steps_wait_once_in_eight(table: list[Row]) -> None:
    from curvatlas.spectra.krylov import KrylovBasis

    op = ca.GaussNewton(problem_on("cuda", "0.1 M"))
    basis = KrylovBasis(op, 40)
    basis.add_random(torch.Generator().manual_seed(0))
    basis.advance(8)
    count = synchronisations(lambda: basis.advance(8), "cuda")
    values = ca.eigenpairs(op, k=2, data_error=False).values
    here = ca.eigenpairs(ca.GaussNewton(problem_on("cpu", "0.1 M")), k=2, data_error=False).values
    difference = float((values - here).norm() / here.norm())
    table.append(
        Row(
            what="Lanczos step, 0.1 M",
            difference=difference,
            milliseconds=float("nan"),
            megabytes=float("nan"),
            synchronisations=count / 8,
        )
    )
    assert count <= 1
    assert difference < 1e-3


@pytest.mark.gpu
@on_gpu
def test_weights_changed_through_data_are_noticed_on_a_gpu() -> None:
    """Either in time, or by NaN and an error: never by old numbers."""
    problem = problem_on("cuda", "0.1 M")
    op = ca.Hessian(problem)
    v = torch.randn(problem.size, device="cuda")
    op @ v
    next(problem.model.parameters()).data.mul_(1.5)
    product = op @ v
    if bool(product.isnan().any()):
        with pytest.raises(NonFiniteError, match="changed in a way"):
            op.confirm()
        product = op @ v
    changed = problem_on("cpu", "0.1 M")
    next(changed.model.parameters()).data.mul_(1.5)
    expected = ca.Hessian(changed) @ v.cpu()
    assert float((product.cpu() - expected).norm() / expected.norm()) < 1e-3
