"""One trial of every public interval: does it hold the truth of a chosen spectrum?

A trial takes a seed and gives the share covered (entries of a diagonal count one by one), the half
width relative to the truth, and whether the result called itself exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.quadrature import wasserstein

from .chosen_spectra import ChosenSpectrum, Sampled, rotation

Trial = Callable[[int], tuple[float, float, bool]]  # seed → share covered, relative width, exact
CERTAIN = ("eigenvalues", "quadratic")  # by a residual, or by two quadrature rules
# One-sided, by the triangle inequality, or with room for what cannot be told (whether what lies at
# zero is null or small): at least 95 % is promised, and more is no fault.
BOUNDS = ("density", "spectral", "within", "negative", "condition", "distance", "quadratic-exp")
DAMPING = 0.05


def trace(values: Tensor) -> Trial:
    truth = float(values.sum())
    return lambda seed: _held(ca.trace(ChosenSpectrum(values), rtol=0.05, seed=seed), truth)


def frobenius(values: Tensor) -> Trial:
    truth = float(values.norm())
    return lambda seed: _held(
        ca.frobenius_norm(ChosenSpectrum(values), rtol=0.05, seed=seed), truth
    )


def spectral(values: Tensor) -> Trial:
    truth = float(values.abs().max())

    def trial(seed: int) -> tuple[float, float, bool]:
        return _held(ca.spectral_norm(ChosenSpectrum(values), rtol=0.01, seed=seed), truth)

    return trial


def diagonal(values: Tensor) -> Trial:
    """Entry by entry: the share of entries covered."""
    operator = ChosenSpectrum(values, basis=rotation(len(values)))
    truth = operator.matrix().diagonal()

    def trial(seed: int) -> tuple[float, float, bool]:
        found = ca.diagonal(operator, rtol=0.2, seed=seed, max_products=len(values) // 2)
        low, high = found.interval
        inside = ((low <= truth) & (truth <= high)).double().mean()
        return float(inside), float((high - low).norm() / 2 / truth.norm()), found.exact

    return trial


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


def spectrum_within(values: Tensor) -> Trial:
    """The 95 % bound on where the whole spectrum lies, of a run for the largest eigenvalue."""
    ends = float(values.min()), float(values.max())

    def trial(seed: int) -> tuple[float, float, bool]:
        found = ca.eigenpairs(ChosenSpectrum(values), k=1, tol=1e-2, seed=seed)
        low, high = found.spectrum_within
        return float(low <= ends[0] and ends[1] <= high), (high - low) / 2, found.exact

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


def log_det(values: Tensor) -> Trial:
    positive = values.abs()
    truth = float((positive + DAMPING).log().sum())

    def trial(seed: int) -> tuple[float, float, bool]:
        operator = ChosenSpectrum(positive, psd=True)
        return _held(
            ca.log_determinant(operator, damping=DAMPING, rtol=0.02, seed=seed, max_products=600),
            truth,
        )

    return trial


def quadratic(values: Tensor) -> Trial:
    """bᵀ(A + λI)⁻¹ b of a positive semidefinite matrix: the interval is certain."""
    positive = values.abs()

    def trial(seed: int) -> tuple[float, float, bool]:
        b = torch.randn(len(values), generator=_random(seed), dtype=torch.float64)
        truth = float((b * b / (positive + DAMPING)).sum())
        operator = ChosenSpectrum(positive, psd=True)
        found = ca.quadratic_form(operator, b, damping=DAMPING, rtol=1e-3, max_products=40)
        return _held(found, truth)

    return trial


def trace_of_root(values: Tensor) -> Trial:
    """tr (A + λI)^½ of a positive semidefinite matrix: any function, not the logarithm alone."""
    positive = values.abs()
    truth = float((positive + DAMPING).sqrt().sum())

    def trial(seed: int) -> tuple[float, float, bool]:
        found = ca.trace_function(
            ChosenSpectrum(positive, psd=True), lambda x: np.sqrt(np.maximum(x + DAMPING, 0.0)),
            rtol=0.02, seed=seed, max_products=600,
        )  # fmt: skip
        return _held(found, truth)

    return trial


def quadratic_exponential(values: Tensor) -> Trial:
    """bᵀ exp(−A/‖A‖) b of an indefinite matrix: no bound is known, the interval is a guess."""
    scaled = values / values.abs().max()

    def trial(seed: int) -> tuple[float, float, bool]:
        b = torch.randn(len(values), generator=_random(seed), dtype=torch.float64)
        truth = float((b * b * (-scaled).exp()).sum())
        found = ca.quadratic_form(
            ChosenSpectrum(scaled), b, function=lambda x: np.exp(-x), rtol=1e-3, max_products=40
        )
        return _held(found, truth)

    return trial


def inverse_diagonal(values: Tensor) -> Trial:
    """Entry by entry: the share of entries covered."""
    operator = ChosenSpectrum(values.abs(), psd=True, basis=rotation(len(values)))
    damping = 0.1 * float(values.abs().mean())
    inverse = (operator.basis / (operator.values + damping)) @ operator.basis.T
    truth = inverse.diagonal()

    def trial(seed: int) -> tuple[float, float, bool]:
        found = ca.inverse_diagonal(
            operator, damping=damping, rtol=0.2, seed=seed, max_products=2000
        )
        low, high = found.interval
        inside = ((low <= truth) & (truth <= high)).double().mean()
        return float(inside), float((high - low).norm() / 2 / truth.norm()), found.exact

    return trial


def eigenvalues(values: Tensor) -> Trial:
    """Each interval contains an eigenvalue, by its residual."""

    def trial(seed: int) -> tuple[float, float, bool]:
        found = ca.eigenpairs(ChosenSpectrum(values), k=3, which="both", seed=seed)
        low, high = found.interval
        inside = (values >= low[:, None]) & (values <= high[:, None])
        width = float((high - low).max()) / 2 / float(values.abs().max())
        return float(inside.any(1).all()), width, found.exact

    return trial


def data_trace(values: Tensor) -> Trial:
    """Batches are drawn anew in every trial: does the interval hold the trace of all data?"""
    return _data(values, lambda op, seed: ca.trace(op, rtol=0.01, seed=seed), float(values.sum()))


def data_frobenius(values: Tensor) -> Trial:
    norm = float(values.norm())
    return _data(values, lambda op, seed: ca.frobenius_norm(op, rtol=0.02, seed=seed), norm)


def data_sharpness(values: Tensor) -> Trial:
    def find(op: Sampled, seed: int) -> Any:
        return ca.eigenpairs(op, k=1, seed=seed)

    return _data(values, find, float(values.max()))


def _data(values: Tensor, find: Callable[[Sampled, int], Any], truth: float) -> Trial:
    def trial(seed: int) -> tuple[float, float, bool]:
        low, high = (
            float(np.ravel(end)[0]) for end in find(Sampled(values, seed), seed).data_interval
        )
        return float(low <= truth <= high), (high - low) / 2 / abs(truth), False

    return trial


PARTS: dict[str, tuple[str, Callable[[Tensor], Trial]]] = {
    "trace": ("trace", trace),
    "diagonal": ("diagonal, entry by entry", diagonal),
    "frobenius": ("Frobenius norm", frobenius),
    "spectral": ("spectral norm", spectral),
    "eigenvalues": ("three eigenvalues at each end", eigenvalues),
    "negative": ("share of eigenvalues below zero", negative_mass),
    "clear": ("share of eigenvalues below minus the resolution", clear_negative_mass),
    "condition": ("5 % quantile of |λ|, hence the condition number", condition_number),
    "rank": ("effective rank", effective_rank),
    "within": ("bound on the whole spectrum", spectrum_within),
    "distance": ("W1 between two spectra", spectra_distance),
    "density": ("bound on the density's W1", density_distance),
    "logdet": ("log-determinant", log_det),
    "trace-root": ("trace of another function", trace_of_root),
    "inverse-diagonal": ("diagonal of the inverse, entry by entry", inverse_diagonal),
    "quadratic-exp": ("quadratic form of another function", quadratic_exponential),
    "quadratic": ("quadratic form of the inverse", quadratic),
    "data-trace": ("data interval of the trace", data_trace),
    "data-frobenius": ("data interval of the Frobenius norm", data_frobenius),
    "data-sharpness": ("data interval of λmax", data_sharpness),
}


def _held(found: Any, truth: float) -> tuple[float, float, bool]:
    low, high = found.interval
    return float(low <= truth <= high), (high - low) / 2 / max(abs(truth), 1e-300), found.exact


_densities: dict[tuple[int, int], tuple[Tensor, SpectralDensity]] = {}


def _density(values: Tensor, seed: int) -> SpectralDensity:
    """One computation serves the three intervals it reports."""
    key = id(values), seed
    if key not in _densities:
        operator = ChosenSpectrum(values)
        found = ca.spectral_density(operator, max_products=150, seed=seed)
        _densities[key] = values, found  # the values are held: an id belongs to what is alive
    return _densities[key][1]


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
