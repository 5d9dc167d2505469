"""An operator that is tagged symmetric and is not: its own products give it away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import curvatlas as ca
from spectra.spectrum_operators import DenseOperator, rotated


def start(op: ca.LinearOperator) -> Tensor:
    random = torch.Generator().manual_seed(9)
    return torch.randn(op.shape[0], generator=random, dtype=torch.float64).to(op.dtype)


ESTIMATES: dict[str, Callable[[ca.LinearOperator, int], Any]] = {
    "eigenpairs": lambda op, seed: ca.eigenpairs(op, k=3, seed=seed),
    "both ends": lambda op, seed: ca.eigenpairs(op, k=3, which="both", seed=seed),
    "restarts": lambda op, seed: ca.eigenpairs(
        op, k=3, memory=16 * op.shape[0] * op.dtype.itemsize, tol=1e-6, seed=seed
    ),
    "spectral_norm": lambda op, seed: ca.spectral_norm(op, seed=seed),
    "spectral_density": lambda op, seed: ca.spectral_density(op, max_products=80, seed=seed),
    "probes alone": lambda op, seed: ca.spectral_density(op, max_products=80, deflate=0, seed=seed),
    "three vectors": lambda op, seed: ca.spectral_density(
        op, max_products=80, reorthogonalise=False, seed=seed
    ),
    "trace": lambda op, seed: ca.trace(op, rtol=0.1, seed=seed),
    "frobenius_norm": lambda op, seed: ca.frobenius_norm(op, rtol=0.1, seed=seed),
    "diagonal": lambda op, seed: ca.diagonal(op, rtol=0.1, seed=seed),
    "log_determinant": lambda op, seed: ca.log_determinant(
        op, damping=9.0, max_products=250, seed=seed
    ),
    "quadratic_form": lambda op, _: ca.quadratic_form(op, start(op), damping=9.0),
    "inverse_diagonal": lambda op, seed: ca.inverse_diagonal(op, damping=9.0, seed=seed),
    "curvature_summary": lambda op, seed: ca.curvature_summary(op, max_products=80, seed=seed),
}


def nearly_symmetric(n: int, share: float, seed: int) -> Tensor:
    """‖A − Aᵀ‖_F = share · ‖A‖_F."""
    random = torch.Generator().manual_seed(seed)
    values = 0.1 * torch.randn(n, generator=random, dtype=torch.float64)
    values[:6] += torch.linspace(1, 4, 6, dtype=torch.float64)
    matrix = rotated(values, seed)
    noise = torch.randn(n, n, generator=random, dtype=torch.float64)
    skew = noise - noise.T
    return matrix + 0.5 * share * matrix.norm() / skew.norm() * skew


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", list(ESTIMATES))
def test_one_percent_of_asymmetry_is_refused(name: str, dtype: torch.dtype) -> None:
    for n in (40, 400):
        for seed in range(3):
            operator = DenseOperator(nearly_symmetric(n, 0.01, seed).to(dtype))
            with pytest.raises(ValueError, match="not symmetric") as caught:
                ESTIMATES[name](operator, seed)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", list(ESTIMATES))
def test_a_symmetric_operator_with_its_rounding_is_not(name: str, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for seed in range(3):
        operator = DenseOperator(nearly_symmetric(300, 100 * eps, seed).to(dtype))
        ESTIMATES[name](operator, seed)


def test_an_operator_that_claims_nothing_is_not_checked() -> None:
    matrix = nearly_symmetric(200, 0.5, 0)
    operator = DenseOperator(matrix, symmetric=False)
    assert ca.trace(operator).value == pytest.approx(float(matrix.trace()), rel=1e-6)
    assert ca.frobenius_norm(operator).value == pytest.approx(float(matrix.norm()), rel=0.02)
