from __future__ import annotations

import numpy as np
import pytest
import torch

import curvatlas as ca
from curvatlas.spectra.quadrature import gauss, mass_below, wasserstein
from spectra.spectrum_operators import (
    DenseOperator,
    SpectrumOperator,
    most_misses,
    rotated,
    spectra,
)


def distance(found: object, values: torch.Tensor) -> float:
    n = len(values)
    return wasserstein(
        found.nodes.numpy(),
        found.weights.numpy(),
        values.numpy(),
        np.full(n, 1 / n),  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize("name", ["hessian_like", "heavy_tailed", "power_law", "degenerate"])
def test_more_products_come_nearer_to_the_spectrum_and_the_error_is_bounded(name: str) -> None:
    values = spectra()[name]
    errors = []
    for products in (60, 120, 240):
        trials = [
            ca.spectral_density(SpectrumOperator(values), max_products=products, seed=s)
            for s in range(4)
        ]
        true = [distance(t, values) for t in trials]
        errors.append(float(np.mean(true)))
        inside = [d <= t.wasserstein_error for d, t in zip(true, trials, strict=True)]
        assert all(inside), (name, products)  # 0.42 ± 0.08 of the bound at most, over 20 seeds each
    assert errors[2] < errors[0], errors
    assert errors[1] < 0.25 * float(values.abs().mean()), errors


def test_deflation_comes_nearer_than_plain_quadrature() -> None:
    values = spectra()["hessian_like"]

    def mean_distance(**options: int) -> float:
        runs = [
            ca.spectral_density(SpectrumOperator(values), max_products=120, seed=s, **options)
            for s in range(4)
        ]
        return float(np.mean([distance(r, values) for r in runs]))

    assert mean_distance() < 0.6 * mean_distance(deflate=0, probes=4, steps=30)


@pytest.mark.parametrize("name", ["hessian_like", "heavy_tailed", "degenerate"])
def test_mass_and_effective_rank_intervals_cover_the_truth(name: str) -> None:
    values = spectra()[name]
    negative = float((values < 0).double().mean())
    rank = float(values.abs().sum() ** 2 / (values**2).sum())
    trials = 50
    covered = np.zeros(2)
    for seed in range(trials):
        found = ca.spectral_density(SpectrumOperator(values), max_products=100, seed=seed)
        low, high = found.negative_mass_interval
        first, last = found.effective_rank_interval
        covered += [low <= negative <= high, first <= rank <= last]
    assert (covered >= trials - most_misses(trials, counts=2)).all(), (name, covered)


def test_outliers_have_their_exact_weight() -> None:
    values = spectra()["hessian_like"]
    found = ca.spectral_density(SpectrumOperator(values), max_products=150)
    top = float(values.max())
    near = (found.nodes - top).abs() < 1e-6 * top
    assert float(found.weights[near].sum()) == pytest.approx(1 / len(values), rel=1e-9)


def test_weights_and_the_drawn_curve_have_unit_mass() -> None:
    values = spectra()["heavy_tailed"]
    found = ca.spectral_density(SpectrumOperator(values), max_products=100)
    assert float(found.weights.sum()) == pytest.approx(1.0, abs=1e-12)
    assert float(torch.trapezoid(found.density, found.grid)) == pytest.approx(1.0, abs=1e-9)
    assert bool((found.density >= 0).all())
    assert bool((found.nodes.diff() >= 0).all())
    assert found.plot().axes


def test_float32_makes_no_ghosts() -> None:
    values = spectra()["hessian_like"]
    single = ca.spectral_density(SpectrumOperator(values.float()), max_products=150)
    assert distance(single, values) <= 1.5 * single.wasserstein_error
    far = single.nodes > 0.5 * float(values.max())
    assert float(single.weights[far].sum()) == pytest.approx(
        float((values > 0.5 * values.max()).double().mean()), rel=1e-3
    )


def test_a_psd_operator_has_no_negative_mass() -> None:
    values = spectra()["rank_deficient"]
    found = ca.spectral_density(SpectrumOperator(values, psd=True), max_products=100)
    assert found.negative_mass == 0.0
    assert found.negative_mass_interval == (0.0, 0.0)


def test_small_operators_are_decomposed_exactly() -> None:
    values = torch.linspace(-1, 2, 90, dtype=torch.float64)
    found = ca.spectral_density(SpectrumOperator(values))
    assert found.exact
    assert torch.allclose(found.nodes, values, atol=1e-12)
    assert found.negative_mass == pytest.approx(float((values < 0).double().mean()))


def test_the_zero_operator_sits_at_zero() -> None:
    found = ca.spectral_density(SpectrumOperator(torch.zeros(400)), max_products=60)
    assert float(found.nodes.abs().max()) == 0.0
    assert found.effective_rank == 0.0


def test_nan_and_too_small_budgets_are_refused() -> None:
    values = torch.ones(400)
    with pytest.raises(ValueError, match="raise max_products"):
        ca.spectral_density(SpectrumOperator(values), max_products=50, probes=10, steps=10)
    values[0] = torch.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        ca.spectral_density(SpectrumOperator(values), max_products=60)


@pytest.mark.parametrize(
    ("options", "products"),
    [
        ({"probes": 10, "steps": 100}, 1000),
        ({"probes": 4, "steps": 30}, 240),
        ({"steps": 120}, 360),
        ({"deflate": 400}, 460),
        ({"probes": 100}, 400),
        ({"probes": 10, "steps": 100, "reorthogonalise": False}, 1000),
    ],
    ids=str,
)
def test_explicit_effort_is_the_budget(options: dict[str, int], products: int) -> None:
    values = torch.linspace(-1, 2, 1100, dtype=torch.float64)
    found = ca.spectral_density(SpectrumOperator(values), **options)
    assert found.products == products
    assert found.converged
    assert distance(found, values) <= found.wasserstein_error


def test_a_tiny_budget_is_marked_and_claims_little() -> None:
    values = torch.linspace(-1, 2, 900, dtype=torch.float64)
    for products in (1, 3, 9):
        found = ca.spectral_density(SpectrumOperator(values), max_products=products)
        assert not found.converged
        assert "NOT converged" in str(found)
        assert found.effective_rank_interval[0] <= 675 <= found.effective_rank_interval[1]
        assert distance(found, values) <= found.wasserstein_error


def test_a_non_symmetric_operator_is_refused_by_measurement() -> None:
    matrix = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)).double()
    with pytest.raises(ValueError, match="not symmetric"):
        ca.spectral_density(DenseOperator(matrix, symmetric=True), max_products=60)


def test_radau_brackets_the_true_mass_below_zero() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        points = random.normal(size=60)
        masses = random.dirichlet(np.ones(60))
        alphas, betas = lanczos(points, masses, 8)
        low, high = mass_below(alphas, betas, 0.0)
        true = masses[points < 0].sum()
        assert low - 1e-10 <= true <= high + 1e-10
        nodes, weights = gauss(alphas, betas)
        for power in range(15):
            want = masses @ points**power
            assert weights @ nodes**power == pytest.approx(want, rel=1e-6, abs=1e-6)


def lanczos(points: np.ndarray, masses: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    basis = [np.sqrt(masses)]
    alphas, betas = [], []
    for _ in range(steps):
        image = points * basis[-1]
        alphas.append(basis[-1] @ image)
        for _ in range(2):
            for row in basis:
                image = image - row * (row @ image)
        betas.append(np.linalg.norm(image))
        basis.append(image / betas[-1])
    return np.array(alphas), np.array(betas)


def test_comparison_is_zero_for_the_same_and_exact_for_a_shift() -> None:
    values = torch.linspace(0, 1, 100, dtype=torch.float64)
    first = ca.spectral_density(SpectrumOperator(values))
    moved = ca.spectral_density(SpectrumOperator(values + 0.25))
    same = ca.compare_densities(first, first)
    assert same.wasserstein == 0.0
    assert same.jensen_shannon == 0.0
    apart = ca.compare_densities(first, moved)
    assert apart.wasserstein == pytest.approx(0.25, rel=1e-9)
    assert 0 < apart.jensen_shannon <= np.log(2)
    scaled = ca.spectral_density(SpectrumOperator(3 * values))
    assert ca.compare_densities(first, scaled, scale="largest").wasserstein == pytest.approx(0.0)


def test_a_rotated_matrix_has_the_density_of_its_eigenvalues() -> None:
    values = spectra()["hessian_like"]
    found = ca.spectral_density(DenseOperator(rotated(values)), max_products=200)
    assert distance(found, values) <= found.wasserstein_error
