"""One trial of every interval that a spectral density carries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

import curvatlas as ca
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.quadrature import wasserstein

from .chosen_spectra import ChosenSpectrum

Trial = Callable[[int], tuple[float, float, bool]]  # seed → share covered, relative width, exact


def negative_mass(values: Tensor) -> Trial:
    truth = float((values < -1e-10 * values.abs().max()).double().mean())

    def trial(seed: int) -> tuple[float, float, bool]:
        found = _density(values, seed)
        low, high = found.negative_mass_interval
        return float(low <= truth <= high), (high - low) / 2, found.exact

    return trial


def clear_negative_mass(values: Tensor) -> Trial:
    """Below minus the resolution that the density states."""

    def trial(seed: int) -> tuple[float, float, bool]:
        found = _density(values, seed)
        truth = float((values < -found.resolution).double().mean())
        low, high = found.clear_negative_mass_interval
        return float(low <= truth <= high), (high - low) / 2, found.exact

    return trial


def condition_number(values: Tensor) -> Trial:
    """max|λ| over the 5 % quantile of what is not null; an infinite end counts as a wide one."""
    sizes = values.abs().sort().values
    held = sizes[sizes > 1e-10 * sizes[-1]]
    truth = float(held[max(int(np.ceil(0.05 * len(held))) - 1, 0)])

    def trial(seed: int) -> tuple[float, float, bool]:
        found = _density(values, seed)
        low, high = found.small_magnitude_interval
        slack = 1e-9 * high
        inside = low - slack <= truth <= high + slack
        return float(inside), (high - low) / 2 / truth, found.exact

    return trial


def spectra_distance(values: Tensor) -> Trial:
    """W1 between this spectrum and the same one stretched and shifted, from two densities."""
    other = 1.3 * values + 0.1 * values.abs().mean()
    flat = np.full(len(values), 1 / len(values))
    truth = wasserstein(values.numpy(), flat, other.numpy(), flat)

    def trial(seed: int) -> tuple[float, float, bool]:
        first, second = _density(values, seed), _density(other, seed + 1)
        low, high = ca.compare_densities(first, second).interval
        return float(low <= truth <= high), (high - low) / 2 / truth, first.exact

    return trial


def effective_rank(values: Tensor) -> Trial:
    truth = float(values.abs().sum() ** 2 / values.square().sum())

    def trial(seed: int) -> tuple[float, float, bool]:
        found = _density(values, seed)
        low, high = found.effective_rank_interval
        return float(low <= truth <= high), (high - low) / 2 / truth, found.exact

    return trial


def density_distance(values: Tensor) -> Trial:
    """The bound on W1 is one-sided, and a bound: it should hold nearly always."""
    truth, flat = values.numpy(), np.full(len(values), 1 / len(values))

    def trial(seed: int) -> tuple[float, float, bool]:
        found = _density(values, seed)
        reached = wasserstein(found.nodes.numpy(), found.weights.numpy(), truth, flat)
        scale = float(np.abs(truth).mean())
        return (
            float(reached <= found.wasserstein_error),
            found.wasserstein_error / scale,
            found.exact,
        )

    return trial


_densities: dict[tuple[int, int], tuple[Tensor, SpectralDensity]] = {}


def _density(values: Tensor, seed: int) -> SpectralDensity:
    """One computation serves the three intervals it reports."""
    key = id(values), seed
    if key not in _densities:
        operator = ChosenSpectrum(values)
        found = ca.spectral_density(operator, max_products=150, seed=seed)
        _densities[key] = values, found  # the values are held: an id belongs to what is alive
    return _densities[key][1]
