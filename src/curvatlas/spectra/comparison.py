r"""How different two spectra are.

W1 = ∫ |F_a(x) − F_b(x)| dx on the quadrature nodes, in the units of the eigenvalues;
JS = ½ KL(a‖m) + ½ KL(b‖m), m = (a + b)/2, in nats (0 … ln 2), of the two smoothed on one axis:
it depends on the smoothing, which is the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from curvatlas.results import Result
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.estimate import Interval
from curvatlas.spectra.krylov import Array
from curvatlas.spectra.quadrature import wasserstein

_POINTS = 2048
_WIDTH = 0.08  # of the kernel on the asinh axis


@dataclass(frozen=True, kw_only=True)
class DensityComparison(Result):
    """Distances of two spectra."""

    wasserstein: float
    interval: Interval  # 95 %, of the Wasserstein distance, from the errors of both densities
    jensen_shannon: float  # nats
    scale: str

    @property
    def value(self) -> float:
        return self.wasserstein

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"W1 = {self.wasserstein:.3g} [{low:.3g}, {high:.3g}], "
            f"Jensen-Shannon = {self.jensen_shannon:.3g} nats (scale: {self.scale})"
        )


def compare_densities(
    first: SpectralDensity,
    second: SpectralDensity,
    *,
    scale: Literal["none", "largest"] = "none",
) -> DensityComparison:
    """Wasserstein-1 and Jensen-Shannon of two spectra.

    scale="largest" divides each spectrum by its largest |eigenvalue| first: blocks are then
    compared in shape, not in size.
    """
    if scale not in ("none", "largest"):
        raise ValueError(f'scale must be "none" or "largest", got {scale!r}.')
    (a, wa, ea), (b, wb, eb) = (_scaled(d, scale) for d in (first, second))
    distance = wasserstein(a, wa, b, wb)
    error = ea + eb  # the triangle inequality
    return DensityComparison(
        wasserstein=distance,
        interval=(max(distance - error, 0.0), distance + error),
        jensen_shannon=_jensen_shannon(a, wa, b, wb),
        scale=scale,
    )


def _scaled(density: SpectralDensity, scale: str) -> tuple[Array, Array, float]:
    nodes, weights = density.nodes.numpy(), density.weights.numpy()
    largest = float(np.abs(nodes).max()) if scale == "largest" else 1.0
    largest = largest or 1.0
    return nodes / largest, weights, density.wasserstein_error / largest


def _jensen_shannon(a: Array, wa: Array, b: Array, wb: Array) -> float:
    unit = (float(np.abs(a) @ wa) + float(np.abs(b) @ wb)) / 2 or 1.0
    ya, yb = np.arcsinh(a / unit), np.arcsinh(b / unit)
    low, high = min(ya.min(), yb.min()) - 5 * _WIDTH, max(ya.max(), yb.max()) + 5 * _WIDTH
    axis = np.linspace(low, high, _POINTS)
    p, q = _on_axis(axis, ya, wa), _on_axis(axis, yb, wb)
    middle = (p + q) / 2
    return max((_divergence(p, middle) + _divergence(q, middle)) / 2, 0.0)


def _on_axis(axis: Array, y: Array, weights: Array) -> Array:
    curve = np.exp(-0.5 * ((axis[:, None] - y[None, :]) / _WIDTH) ** 2) @ weights
    result: Array = curve / curve.sum()
    return result


def _divergence(p: Array, q: Array) -> float:
    held = p > 0
    return float(p[held] @ np.log(p[held] / q[held]))
