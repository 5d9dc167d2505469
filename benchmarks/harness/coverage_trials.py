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

from .chosen_spectra import ChosenSpectrum, Sampled, rotation
from .coverage_density import (
    Trial,
    clear_negative_mass,
    condition_number,
    density_distance,
    effective_rank,
    negative_mass,
    spectra_distance,
)

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


def spectrum_within(values: Tensor) -> Trial:
    """The 95 % bound on where the whole spectrum lies, of a run for the largest eigenvalue."""
    ends = float(values.min()), float(values.max())

    def trial(seed: int) -> tuple[float, float, bool]:
        found = ca.eigenpairs(ChosenSpectrum(values), k=1, tol=1e-2, seed=seed)
        low, high = found.spectrum_within
        return float(low <= ends[0] and ends[1] <= high), (high - low) / 2, found.exact

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


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
