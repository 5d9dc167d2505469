from __future__ import annotations

import numpy as np
import pytest
import torch

import curvatlas as ca
from spectra.spectrum_operators import (
    DenseOperator,
    SpectrumOperator,
    most_misses,
    rotated,
    spectra,
)


def right_hand_sides(n: int, count: int) -> torch.Tensor:
    return torch.randn(n, count, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("psd", [True, False])
@pytest.mark.parametrize("damping", [0.1, 2.0])
def test_solutions_agree_with_the_dense_solve(psd: bool, damping: float) -> None:
    values = spectra()["rank_deficient" if psd else "hessian_like"]
    matrix, n = rotated(values), len(values)
    b = right_hand_sides(n, 3)
    found = ca.solve(DenseOperator(matrix, psd=psd), b, damping=damping, rtol=1e-9)
    want = torch.linalg.solve(matrix + damping * torch.eye(n, dtype=torch.float64), b)
    assert found.converged
    assert found.method == ("conjugate gradients" if psd else "MINRES")
    assert torch.allclose(found.value, want, atol=1e-6 * float(want.abs().max()))
    assert found.value.shape == (n, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_singular_operator_without_damping_gives_least_squares(dtype: torch.dtype) -> None:
    values = spectra()["rank_deficient"]
    matrix, b = rotated(values).to(dtype), right_hand_sides(len(values), 1)[:, 0].to(dtype)
    found = ca.solve(DenseOperator(matrix, psd=True), b, rtol=1e-6)  # b lies outside the range
    least = torch.linalg.lstsq(matrix.double(), b.double(), driver="gelsd", rcond=1e-6).solution
    assert not found.converged
    assert found.method == "MINRES"
    unreached = float((b - matrix.double() @ least).norm() / b.norm())
    assert found.residual == pytest.approx(unreached, rel=1e-3)


def test_products_are_counted() -> None:
    op = SpectrumOperator(spectra()["flat"], psd=True)
    found = ca.solve(op, torch.ones(400, dtype=torch.float64))
    assert found.products == op.products


def test_negative_curvature_stops_conjugate_gradients_with_a_word() -> None:
    values = spectra()["hessian_like"]
    found = ca.solve(SpectrumOperator(values), right_hand_sides(800, 1)[:, 0], method="cg")
    assert not found.converged
    assert "negative curvature" in found.message


def test_a_right_hand_side_outside_the_range_is_said() -> None:
    found = ca.solve(SpectrumOperator(torch.zeros(70)), torch.ones(70))
    assert not found.converged
    assert "range" in found.message


def test_an_exhausted_budget_is_said() -> None:
    values = torch.linspace(1e-4, 1, 500, dtype=torch.float64)
    found = ca.solve(SpectrumOperator(values), right_hand_sides(500, 1)[:, 0], max_products=10)
    assert not found.converged
    assert found.products <= 10
    assert "exhausted" in found.message


@pytest.mark.parametrize("radius", [0.1, 3.0, 1e6])
@pytest.mark.parametrize("name", ["hessian_like", "flat"])
def test_the_trust_region_step_satisfies_its_optimality_conditions(
    name: str, radius: float
) -> None:
    values = spectra()[name]
    matrix, n = rotated(values), len(values)
    gradient = right_hand_sides(n, 1)[:, 0]
    step = ca.newton_step(DenseOperator(matrix), gradient, radius=radius, rtol=1e-6)
    s, lam = step.value, step.multiplier
    assert float(s.norm()) <= radius * (1 + 1e-9)
    left = matrix @ s + lam * s + gradient
    assert float(left.norm()) <= 2e-6 * float(gradient.norm()) + 1e-9 * radius
    assert lam >= max(0.0, -float(values.min())) - 1e-6 * float(values.abs().max())
    if lam > 0:
        assert float(s.norm()) == pytest.approx(radius, rel=1e-6)
    model = float(gradient @ s + 0.5 * s @ matrix @ s)
    assert step.decrease == pytest.approx(-model, rel=1e-6)


def test_the_log_determinant_covers_the_truth() -> None:
    values = spectra()["power_law"]
    truth = float((values + 0.05).log().sum())
    covered = 0
    for seed in range(60):
        found = ca.log_determinant(SpectrumOperator(values, psd=True), damping=0.05, seed=seed)
        covered += found.interval[0] <= truth <= found.interval[1]
    assert covered >= 60 - most_misses(60)


def test_the_log_determinant_of_an_indefinite_operator_names_the_damping_needed() -> None:
    values = spectra()["hessian_like"]
    with pytest.raises(ValueError, match="take damping above"):
        ca.log_determinant(SpectrumOperator(values), damping=0.1)


def test_quadratic_forms_lie_between_certain_bounds() -> None:
    values = spectra()["rank_deficient"]
    b = right_hand_sides(400, 1)[:, 0]
    for damping in (1e-3, 0.1, 3.0):
        for budget in (3, 6, 100):
            found = ca.quadratic_form(
                SpectrumOperator(values, psd=True), b, damping=damping, max_products=budget
            )
            truth = float((b**2 / (values + damping)).sum())
            assert found.interval[0] <= truth <= found.interval[1], (damping, budget, found)
        assert found.converged


def test_other_functions_of_the_operator_can_be_integrated() -> None:
    values = spectra()["power_law"]
    b = right_hand_sides(600, 1)[:, 0]
    found = ca.quadratic_form(SpectrumOperator(values), b, function=np.exp, rtol=1e-8)
    assert found.value == pytest.approx(float((b**2 * values.exp()).sum()), rel=1e-7)
    trace = ca.trace_function(SpectrumOperator(values), np.exp)
    assert trace.value == pytest.approx(float(values.exp().sum()), rel=0.02)


def test_the_inverse_diagonal_lies_in_its_intervals() -> None:
    values = spectra()["rank_deficient"]
    matrix = rotated(values)
    found = ca.inverse_diagonal(DenseOperator(matrix, psd=True), damping=0.5, rtol=0.05)
    truth = torch.linalg.inv(matrix + 0.5 * torch.eye(400, dtype=torch.float64)).diagonal()
    low, high = found.interval
    assert float(((low <= truth) & (truth <= high)).double().mean()) >= 0.9
    assert float((found.values - truth).norm() / truth.norm()) <= 0.08
