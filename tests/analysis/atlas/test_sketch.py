"""Probes of the sketch: unbiased, inside their intervals, better along learnt directions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from curvatlas.analysis.atlas.sketch import Directions, Energy, coded_probes, energy_of, pooled

SIZE, TRIALS = 100, 400
SPECTRA = {
    "rank one": np.r_[1.0, np.zeros(SIZE - 1)],
    "exponential": np.exp(-np.arange(SIZE) / 3),
    "slow exponential": np.exp(-np.arange(SIZE) / 10),
    "inverse": 1 / np.arange(1, SIZE + 1),
    "inverse root": np.arange(1, SIZE + 1) ** -0.5,
    "nearly flat": 1 - 0.5 * np.arange(SIZE) / SIZE,
}


def grams(singular: np.ndarray, probes: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    basis = np.linalg.qr(generator.standard_normal((TRIALS, len(singular), probes)))[0]
    images = singular[:, None] * basis
    return np.swapaxes(images, 1, 2) @ images


def two_sided(singular: np.ndarray, probes: int) -> Energy:
    sides = [energy_of(grams(singular, probes, seed), len(singular)) for seed in (0, 1)]
    return pooled(sides, [0.5, 0.5])


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("probes", [4, 8])
def test_the_squared_norm_lies_in_its_interval_nineteen_times_in_twenty(
    name: str, probes: int
) -> None:
    truth = (SPECTRA[name] ** 2).sum()
    for energy in (
        energy_of(grams(SPECTRA[name], probes, 3), SIZE),
        two_sided(SPECTRA[name], probes),
    ):
        low, high = energy.interval()
        covered = np.mean((low <= truth) & (truth <= high))
        # 400 trials scatter by 0.011 around 0.95
        assert covered > 0.95 - 3 * 0.011


@pytest.mark.parametrize("name", SPECTRA)
def test_the_largest_singular_value_lies_in_its_bracket(name: str) -> None:
    truth = SPECTRA[name].max() ** 2
    low, high = two_sided(SPECTRA[name], 6).spectral_interval()
    assert np.mean((low <= truth * (1 + 1e-12)) & (truth <= high * (1 + 1e-12))) > 0.92


@pytest.mark.parametrize("name", SPECTRA)
def test_value_and_variance_are_unbiased(name: str) -> None:
    truth = (SPECTRA[name] ** 2).sum()
    energy = energy_of(grams(SPECTRA[name], 6, 5), SIZE)
    scatter = energy.value.std(ddof=1)
    assert abs(energy.value.mean() - truth) < 4 * scatter / np.sqrt(TRIALS)
    # the variance estimate leans to the safe side, never below
    assert energy.variance.mean() > 0.8 * scatter**2


def test_as_many_probes_as_dimensions_are_exact() -> None:
    singular = SPECTRA["inverse"][:5]
    energy = energy_of(grams(singular, 5, 0), 5)
    low, high = energy.interval()
    assert np.allclose(energy.value, (singular**2).sum(), rtol=1e-12)
    assert np.allclose(low, high)
    assert np.allclose(energy.seen, singular.max() ** 2, rtol=1e-12)
    assert np.allclose(energy.fourth, (singular**4).sum(), rtol=1e-12)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonal(size: int, seed: int) -> Tensor:
    draw = torch.randn(size, size, generator=generator(seed), dtype=torch.float64)
    return torch.linalg.qr(draw).Q


def energies(matrix: Tensor, basis: Tensor, probes: int, trials: int) -> Tensor:
    """Estimates of ‖matrix‖_F² from ``trials`` independent sets of probes."""
    drawn = [coded_probes(basis, probes, generator(seed)) for seed in range(trials)]
    return torch.stack([(matrix @ x).pow(2).sum() for x in drawn])


def test_probes_are_orthogonal_and_isotropic_on_average() -> None:
    size, count = 12, 4
    for known in (0, 5, 10, 12):
        basis = orthogonal(size, 0)[:, :known]
        total = torch.zeros(size, size, dtype=torch.float64)
        for seed in range(400):
            x = coded_probes(basis, count, generator(seed))
            inner = x.T @ x
            assert torch.allclose(inner, inner.diagonal().diag(), atol=1e-12), known
            assert float(inner.trace()) == pytest.approx(size), known
            total += x @ x.T / 400
        assert float((total - torch.eye(size, dtype=torch.float64)).abs().max()) < 0.25, known


def test_the_energy_is_exact_in_the_eigenbasis() -> None:
    basis = orthogonal(20, 1)
    values = torch.linspace(1, 3, 20, dtype=torch.float64)
    matrix = orthogonal(20, 2) * values @ basis.T
    found = energies(matrix, basis, probes=3, trials=5)
    assert torch.allclose(found, values.square().sum().expand(5), rtol=1e-12)


def test_a_partly_known_basis_stays_unbiased_and_makes_less_noise() -> None:
    size, probes, trials = 60, 4, 300
    values = torch.arange(1, size + 1, dtype=torch.float64) ** -0.8
    basis = orthogonal(size, 3)
    matrix = orthogonal(size, 4) * values @ basis.T
    truth = float(values.square().sum())
    learnt = energies(matrix, basis[:, :8], probes, trials)
    isotropic = energies(matrix, basis[:, :0], probes, trials)
    for found in (learnt, isotropic):
        error = float(found.std()) / trials**0.5
        assert abs(float(found.mean()) - truth) < 4 * error
    assert float(learnt.std()) < 0.4 * float(isotropic.std())


@pytest.mark.parametrize("size", [80, 700])  # the whole covariance, and leading directions only
def test_the_leading_directions_of_many_samples_are_found(size: int) -> None:
    directions = Directions(size, dtype=torch.float64, device=torch.device("cpu"))
    assert directions.basis().shape == (size, 0)
    true = torch.linalg.qr(torch.randn(size, 6, generator=generator(5), dtype=torch.float64)).Q
    scales = torch.tensor([8.0, 7.0, 6.0, 5.0, 4.0, 3.0], dtype=torch.float64)
    for seed in range(40):
        draw = torch.randn(3, 6, generator=generator(seed), dtype=torch.float64)
        noise = torch.randn(3, size, generator=generator(100 + seed), dtype=torch.float64)
        directions.add((draw * scales) @ true.T + 0.3 / size**0.5 * noise)
    basis = directions.basis()
    assert torch.allclose(
        basis.T @ basis, torch.eye(basis.shape[1], dtype=torch.float64), atol=1e-10
    )
    inside = torch.linalg.svdvals(basis[:, :6].T @ true)
    assert float(inside.min()) > 0.99


def test_nothing_is_kept_of_a_large_block_without_memory_for_it() -> None:
    directions = Directions(700, dtype=torch.float64, device=torch.device("cpu"), kept=3)
    directions.add(torch.ones(2, 700, dtype=torch.float64))
    assert directions.basis().shape == (700, 0)


@pytest.mark.parametrize("decay", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("samples", [2, 8, 40])  # from a poor basis to a good one
def test_intervals_of_learnt_probes_hold_nineteen_times_in_twenty(
    decay: float, samples: int
) -> None:
    size, probes, trials = 40, 5, 200
    values = torch.arange(1, size + 1, dtype=torch.float64) ** -decay
    covered = []
    for trial in range(trials):
        rows = torch.randn(samples, size, generator=generator(trial), dtype=torch.float64)
        directions = Directions(size, dtype=torch.float64, device=torch.device("cpu"))
        directions.add(rows * values)  # samples of the row space of diag(values)
        x = coded_probes(directions.basis(), probes, generator(1000 + trial))
        q = x * (probes / size) ** 0.5
        images = (values[:, None] * q).numpy()
        found = energy_of(images.T @ images, size, longest=float(q.square().sum(0).max()))
        low, high = found.interval()
        covered.append(low <= float(values.square().sum()) <= high)
    # 200 trials scatter by 0.015 around 0.95
    assert sum(covered) > (0.95 - 3 * 0.015) * trials
