"""n products tell everything of n columns: no estimate takes more, and the answer is then exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas import results
from curvatlas.spectra.exact import Completion
from spectra.spectrum_operators import DenseOperator, SpectrumOperator, rotated

DAMPING = 1e-3


def ramp(n: int, *, psd: bool = False) -> Tensor:
    """A matrix that is hard to sample: a flat spectrum, its trace zero unless psd."""
    return rotated(torch.linspace(0.0 if psd else -1.0, 1.0, n, dtype=torch.float64))


def shifted(matrix: Tensor) -> Tensor:
    return matrix + DAMPING * torch.eye(len(matrix), dtype=torch.float64)


def cube(values: np.ndarray) -> np.ndarray:
    return values**3


# Name → (estimate, truth of the matrix, whether the matrix is psd).
ESTIMATES: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Any], bool]] = {
    "trace": (ca.trace, lambda a: a.trace(), False),
    "frobenius_norm": (
        lambda op, **o: ca.frobenius_norm(op, rtol=1e-4, **o),
        lambda a: a.norm(),
        False,
    ),
    "diagonal": (ca.diagonal, lambda a: a.diagonal(), False),
    "trace_function": (
        lambda op, **o: ca.trace_function(op, cube, **o),
        lambda a: (a @ a @ a).trace(),
        False,
    ),
    "log_determinant": (
        lambda op, **o: ca.log_determinant(op, damping=DAMPING, rtol=1e-3, **o),
        lambda a: torch.logdet(shifted(a)),
        True,
    ),
    "inverse_diagonal": (
        lambda op, **o: ca.inverse_diagonal(op, damping=DAMPING, rtol=0.02, **o),
        lambda a: torch.linalg.inv(shifted(a)).diagonal(),
        True,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [97, 300])
@pytest.mark.parametrize("name", list(ESTIMATES))
def test_a_small_operator_is_read_when_the_estimate_would_take_as_many_products(
    name: str, n: int, dtype: torch.dtype
) -> None:
    estimate, truth_of, psd = ESTIMATES[name]
    matrix = ramp(n, psd=psd)
    operator = DenseOperator(matrix.to(dtype), psd=psd)
    found = estimate(operator)
    assert found.exact
    assert found.converged
    assert found.products == operator.products == n
    low, high = (torch.as_tensor(end, dtype=torch.float64) for end in found.interval)
    truth = truth_of(matrix)
    assert bool(((low <= truth) & (truth <= high)).all())
    # Rounding only: the inverse magnifies it by its condition number of a thousand.
    width = float((high - low).abs().max()) / float(torch.as_tensor(truth).abs().max() + n**0.5)
    assert width <= (1e6 if name == "inverse_diagonal" else 2e3) * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", list(ESTIMATES))
def test_no_estimate_takes_more_products_than_columns(name: str) -> None:
    estimate, _, psd = ESTIMATES[name]
    for n in (70, 250):
        operator = DenseOperator(ramp(n, psd=psd), psd=psd)
        found = estimate(operator, max_products=3 * n)
        assert found.products == operator.products <= n


@pytest.mark.parametrize("name", ["trace", "frobenius_norm", "diagonal", "trace_function"])
def test_an_easy_quantity_is_estimated_in_fewer(name: str, tmp_path: Path) -> None:
    values = torch.linspace(1.0, 1.02, 400, dtype=torch.float64)
    operator = DenseOperator(rotated(values))
    found = {
        "trace": lambda: ca.trace(operator),
        "frobenius_norm": lambda: ca.frobenius_norm(operator),
        "diagonal": lambda: ca.diagonal(operator),
        "trace_function": lambda: ca.trace_function(operator, cube, rtol=0.05),
    }[name]()
    assert found.converged is True
    assert not found.exact
    assert found.products < 300
    assert results.same(results.load(found.save(tmp_path / "estimate")), found)


@pytest.mark.parametrize("name", list(ESTIMATES))
def test_a_large_operator_has_a_default_budget(name: str) -> None:
    estimate, _, psd = ESTIMATES[name]
    n = 1500
    values = torch.linspace(0.0 if psd else -1.0, 1.0, n, dtype=torch.float64)
    operator = SpectrumOperator(values, psd=psd)
    found = estimate(operator)
    most = {"trace_function": 600, "log_determinant": 600, "inverse_diagonal": 2000}
    assert found.products == operator.products <= most.get(name, 300)
    assert not found.exact


def test_a_trace_that_is_zero_reaches_its_tolerance_against_the_sum_of_magnitudes() -> None:
    values = torch.linspace(-1, 1, 8_000, dtype=torch.float64)
    found = ca.trace(SpectrumOperator(values), rtol=0.2)
    assert found.converged
    assert found.error <= 0.2 * 0.1 * float(values.abs().sum())
    assert abs(found.value) <= 2 * found.error
    function = ca.trace_function(SpectrumOperator(values), np.sin, rtol=0.2)
    assert function.converged


def test_the_trace_of_a_large_operator_reserves_no_square_of_its_size() -> None:
    operator = SpectrumOperator(torch.ones(2_000_000, dtype=torch.float32))
    found = ca.trace(operator, rtol=0.01)  # 2e6 × 2e6 numbers would be 16 TB
    assert found.converged
    assert found.value == pytest.approx(2e6, rel=1e-3)


def test_a_resumed_run_reads_the_same_columns(tmp_path: Path) -> None:
    values = torch.linspace(-1, 1, 200, dtype=torch.float64)
    for estimate in (ca.trace, ca.frobenius_norm, ca.diagonal):
        whole = estimate(SpectrumOperator(values), rtol=1e-4)
        file = tmp_path / estimate.__name__
        # Broken off while sampling (20) and while reading what is left (120).
        for stop in (20, 120):
            with pytest.raises(KeyboardInterrupt):
                estimate(SpectrumOperator(values, fail_at=stop), rtol=1e-4, checkpoint=file)
        again = estimate(SpectrumOperator(values), rtol=1e-4, checkpoint=file)
        assert again.exact
        assert again.products == whole.products == 200
        assert torch.equal(torch.as_tensor(again.value), torch.as_tensor(whole.value))


def test_a_completed_basis_is_orthonormal_whatever_was_multiplied() -> None:
    random = torch.Generator().manual_seed(0)
    matrix = ramp(60)
    directions = torch.randn(60, 20, generator=random, dtype=torch.float64)
    directions[:, 7] = directions[:, 3] * 2.0  # no new direction
    directions[:, 8] = 0.0
    operator = DenseOperator(matrix)
    known = Completion(operator, directions, matrix @ directions)
    assert known.missing == 42
    basis, images = (torch.cat(parts, 1) for parts in zip(*known.blocks(), strict=True))
    assert operator.products == 42
    torch.testing.assert_close(basis.T @ basis, torch.eye(60, dtype=torch.float64))
    torch.testing.assert_close(images @ basis.T, matrix)


def test_an_invariant_start_makes_a_quadratic_form_exact() -> None:
    values = torch.tensor([3.0] * 50 + [-1.0] * 70, dtype=torch.float64)
    b = torch.linspace(1, 2, 120, dtype=torch.float64)
    found = ca.quadratic_form(SpectrumOperator(values), b, damping=2.0)
    assert found.exact
    assert found.products == 2
    truth = float((b * b / (values + 2.0)).sum())
    assert found.interval[0] <= truth <= found.interval[1]
