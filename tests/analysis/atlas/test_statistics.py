"""Estimates from random probes: unbiased, and inside their intervals as often as promised."""

from __future__ import annotations

import numpy as np
import pytest

from curvatlas.analysis.atlas.sketch import Energy, energy_of, pooled

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
