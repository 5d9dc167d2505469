"""Budgets of a few products, two parameters, half precision, numbers at the ends of the range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from spectra.spectrum_operators import DenseOperator, SpectrumOperator, most_misses

ESTIMATES: dict[str, Callable[..., Any]] = {
    "eigenpairs": lambda op, **o: ca.eigenpairs(op, k=1, **o),
    "both": lambda op, **o: ca.eigenpairs(op, k=3, which="both", **o),
    "spectral_density": ca.spectral_density,
    "trace": ca.trace,
    "diagonal": ca.diagonal,
    "frobenius_norm": ca.frobenius_norm,
    "spectral_norm": ca.spectral_norm,
    "solve": lambda op, **o: ca.solve(op, ones(op), damping=9.0, **o),
    "log_determinant": lambda op, **o: ca.log_determinant(op, damping=9.0, **o),
    "quadratic_form": lambda op, **o: ca.quadratic_form(op, ones(op), damping=9.0, **o),
    "inverse_diagonal": lambda op, **o: ca.inverse_diagonal(op, damping=9.0, **o),
    "newton_step": lambda op, **o: ca.newton_step(op, ones(op), radius=0.1, **o),
}


def ones(op: ca.LinearOperator) -> Tensor:
    return torch.linspace(0.5, 1.5, op.shape[0], dtype=op.dtype)


def bulk(n: int = 300) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
@pytest.mark.parametrize("name", list(ESTIMATES))
def test_a_budget_of_a_few_products_is_kept_and_the_result_marked(name: str, budget: int) -> None:
    operator = SpectrumOperator(bulk())
    if name in ("log_determinant", "inverse_diagonal") and budget < 4:
        with pytest.raises(ValueError, match="too few"):
            ESTIMATES[name](operator, max_products=budget)
        return
    found = ESTIMATES[name](operator, max_products=budget)
    assert operator.products == found.products <= budget
    assert not found.converged or name in ("quadratic_form", "newton_step", "solve")
    assert np.isfinite(np.asarray(found.value)).all()
    if not isinstance(found.value, Tensor):
        low, high = (np.asarray(end).ravel()[0] for end in found.interval)
        assert low <= found.value <= high


def test_one_product_gives_intervals_that_allow_for_anything() -> None:
    values = bulk()
    values[0] = 200.0  # one product hardly sees it
    operator, held = SpectrumOperator(values), 0
    for seed in range(40):
        low, high = ca.frobenius_norm(operator, max_products=1, seed=seed).interval
        held += low <= float(values.norm()) <= high
        entries = ca.diagonal(operator, max_products=1, seed=seed)
        assert bool(torch.isinf(entries.interval[1]).all())
        assert entries.relative_error == np.inf
    assert held >= 40 - most_misses(40)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", list(ESTIMATES))
def test_half_precision_is_refused_with_the_way_out(name: str, dtype: torch.dtype) -> None:
    operator = SpectrumOperator(bulk().to(dtype))
    with pytest.raises(ValueError, match=r"float32 or float64, got torch\.\w+float16|float16"):
        ESTIMATES[name](operator)


class Few(nn.Module):
    """A model of one or two parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.7, 0.9, size))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, : len(self.weight)] * self.weight).tanh().sum(1, keepdim=True)


@pytest.mark.parametrize("size", [1, 2])
def test_one_and_two_parameters_have_everything_exactly(size: int) -> None:
    random = torch.Generator().manual_seed(size)
    x, y = torch.randn(8, 2, generator=random), torch.randn(8, 1, generator=random)
    operator = ca.Hessian(ca.Problem(Few(size).double(), "mse", (x.double(), y.double())))
    matrix = operator.dense()
    shifted = matrix + 9.0 * torch.eye(size, dtype=torch.float64)
    assert ca.trace(operator).value == pytest.approx(float(matrix.trace()))
    found = ca.log_determinant(operator, damping=9.0)
    assert found.exact
    assert found.products == size
    assert found.value == pytest.approx(float(torch.logdet(shifted)), rel=1e-12)
    entries = ca.inverse_diagonal(operator, damping=9.0)
    assert entries.products == size
    torch.testing.assert_close(entries.values, torch.linalg.inv(shifted).diagonal())
    step = ca.newton_step(operator, ones(operator), radius=1e-3)
    assert float(step.value.norm()) == pytest.approx(1e-3, rel=1e-6)
    with pytest.raises(ValueError, match="between 1 and the operator's size"):
        ca.eigenpairs(operator, k=size + 1)


@pytest.mark.parametrize("shift", [0.0, 1e-36, -0.3])
def test_the_trust_region_is_found_when_every_eigenvalue_is_the_same(shift: float) -> None:
    operator = SpectrumOperator(torch.full((30,), shift, dtype=torch.float64))
    step = ca.newton_step(operator, ones(operator), radius=0.2)
    assert float(step.value.norm()) == pytest.approx(0.2, rel=1e-6)
    assert float(step.value @ ones(operator)) < 0


def test_numbers_near_the_ends_of_the_range_are_not_lost() -> None:
    values = bulk(40).abs()
    small = SpectrumOperator(1e-240 * values)
    assert ca.frobenius_norm(small).value == pytest.approx(1e-240 * float(values.norm()))
    rank = float(values.sum() ** 2 / values.square().sum())
    assert ca.spectral_density(small).effective_rank == pytest.approx(rank)
    assert np.isfinite(ca.log_determinant(SpectrumOperator(1e-240 * bulk()), damping=1.0).value)


def test_a_solve_cut_short_is_not_called_converged_at_ten_times_the_tolerance() -> None:
    operator = SpectrumOperator(torch.linspace(1, 40, 300, dtype=torch.float64), psd=True)
    whole = ca.solve(operator, ones(operator), rtol=1e-4)
    for budget in range(2, whole.products + 1):
        found = ca.solve(operator, ones(operator), rtol=1e-4, max_products=budget)
        assert found.products <= budget
        assert found.converged == (found.residual <= 1e-4), budget


def test_an_overflowing_norm_is_named() -> None:
    large = SpectrumOperator((1e24 * bulk().abs()).float())
    with pytest.raises(FloatingPointError, match=r"overflows torch\.float32: compute in float64"):
        ca.eigenpairs(large, k=2)
    with pytest.raises(FloatingPointError, match=r"overflows torch\.float32|NaN or infinity"):
        ca.solve(large, ones(large))


def test_a_small_spread_over_batches_is_not_called_none() -> None:
    matrix = torch.diag(bulk(80))

    class Alike(DenseOperator):
        def per_batch(self) -> list[tuple[float, ca.LinearOperator]]:
            return [(0.5, DenseOperator(matrix)), (0.5, DenseOperator(matrix.flip(0, 1)))]

    for seed in range(6):
        interval = ca.trace(Alike((matrix + matrix.flip(0, 1)) / 2), seed=seed).data_interval
        assert interval is not None
        assert interval[1] > interval[0]


SKEW = torch.randn(100, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "budget": (lambda: ca.trace(SpectrumOperator(bulk()), max_products=1.5), "whole number"),  # type: ignore[arg-type]
    "tolerance": (lambda: ca.trace(SpectrumOperator(bulk()), rtol="1 %"), "between 0 and 1"),  # type: ignore[arg-type]
    "seed": (lambda: ca.eigenpairs(SpectrumOperator(bulk()), seed=0.5), "whole number of 64 bits"),  # type: ignore[arg-type]
    "storage": (
        lambda: ca.eigenpairs(SpectrumOperator(bulk()), storage=torch.int8),
        "floating-point type",
    ),
    "damping": (
        lambda: ca.log_determinant(SpectrumOperator(bulk()), damping=float("nan")),
        "damping must be a finite number",
    ),
    "right-hand side": (
        lambda: ca.solve(SpectrumOperator(bulk()), torch.tensor(1.0)),
        r"b must be a tensor \(300,\)",
    ),
    "function": (
        lambda: ca.trace_function(SpectrumOperator(bulk()), np.log),
        "not finite at the eigenvalue",
    ),
    "constant": (
        lambda: ca.trace_function(SpectrumOperator(bulk()), lambda _: 1.0),  # type: ignore[arg-type, return-value]
        "one number for each",
    ),
    "singular form": (
        lambda: ca.quadratic_form(SpectrumOperator(0 * bulk()), bulk()),
        "not finite at the eigenvalue 0",
    ),
    "singular inverse": (
        lambda: ca.inverse_diagonal(SpectrumOperator(0 * bulk()), damping=0.0),
        "singular: take damping",
    ),
    "endless step": (
        lambda: ca.newton_step(SpectrumOperator(bulk()), bulk().abs(), radius=float("inf")),
        "negative curvature.*finite radius",
    ),
    "skew form": (
        lambda: ca.quadratic_form(DenseOperator(SKEW), SKEW[0], damping=100.0),
        "not symmetric",
    ),
    "skew step": (
        lambda: ca.newton_step(DenseOperator(SKEW), SKEW[0], radius=1.0),
        "not symmetric",
    ),
    "skew determinant": (
        lambda: ca.log_determinant(DenseOperator(SKEW), damping=100.0),
        "not symmetric",
    ),
    "skew inverse": (
        lambda: ca.inverse_diagonal(DenseOperator(SKEW), damping=100.0),
        "not symmetric",
    ),
    "skew density": (lambda: ca.spectral_density(DenseOperator(SKEW)), "not symmetric"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_input_is_refused_in_one_clear_line(name: str) -> None:
    call, words = WRONG[name]
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
