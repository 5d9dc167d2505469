r"""Gradient noise: how large a batch is worth its cost.

With per-sample gradients g_i of mean G and covariance Σ (McCandlish et al. 2018):

    simple noise scale  tr Σ / ‖G‖²,      critical batch size  tr(HΣ) / (GᵀHG).

‖G‖² and GᵀHG are estimated without the bias that the noise adds to the square of a mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from curvatlas.fits import Array
from curvatlas.operators.curvature import Hessian
from curvatlas.operators.per_sample import sample_gradients
from curvatlas.problem import Problem
from curvatlas.results import Interval, Result


@dataclass(frozen=True, kw_only=True)
class GradientNoise(Result):
    """Noise scales in samples; infinite where the mean gradient drowns in the noise."""

    value: float  # critical batch size, by curvature
    interval: Interval  # 95 %, jackknife over samples
    simple: float  # tr Σ / ‖G‖²
    simple_interval: Interval
    samples: int
    gradient_norm: float
    products: int

    def __str__(self) -> str:
        (a, b), (c, d) = self.interval, self.simple_interval
        return (
            f"critical batch size {self.value:.3g} [{a:.3g}, {b:.3g}], simple noise scale "
            f"{self.simple:.3g} [{c:.3g}, {d:.3g}] samples, from {self.samples} samples"
        )


def gradient_noise(problem: Problem, *, samples: int = 48) -> GradientNoise:
    """Noise scale and critical batch size at the present weights."""
    gradients = sample_gradients(problem, samples)  # (n, P)
    count = len(gradients)
    if count < 4:
        raise ValueError(f"gradient noise needs at least 4 samples, got {count}.")
    operator = Hessian(problem)
    bent = (operator @ gradients.T.contiguous()).T  # (n, P)
    plain = (gradients @ gradients.T).cpu().double().numpy()  # g_i·g_j
    curved = (gradients @ bent.T).cpu().double().numpy()  # g_i·H g_j
    simple, simple_interval = _ratio(plain)
    critical, interval = _ratio(curved)
    return GradientNoise(
        value=critical,
        interval=interval,
        simple=simple,
        simple_interval=simple_interval,
        samples=count,
        gradient_norm=float(gradients.mean(0).norm()),
        products=operator.products,
    )


def _ratio(products: Array) -> tuple[float, Interval]:
    """(tr of the covariance) / (square of the mean) from the matrix g_i·A g_j, with jackknife."""
    count = len(products)
    value = _from_sums(float(np.trace(products)), float(products.sum()), count)
    rows, diagonal = products.sum(1), np.diag(products)
    total, trace = float(products.sum()), float(np.trace(products))
    left_out = np.array(
        [
            _from_sums(trace - diagonal[i], total - 2 * rows[i] + diagonal[i], count - 1)
            for i in range(count)
        ]
    )
    if not math.isfinite(value) or not np.isfinite(left_out).all():
        return value, (0.0, math.inf)
    logs = np.log(left_out)
    error = math.sqrt((count - 1) / count * float(((logs - logs.mean()) ** 2).sum()))
    factor = math.exp(float(stats.t.ppf(0.975, count - 1)) * error)
    return value, (value / factor, value * factor)


def _from_sums(trace: float, total: float, count: int) -> float:
    square = (total - trace) / (count * (count - 1))  # unbiased ‖G‖² or GᵀHG: pairs i ≠ j
    noise = trace / count - square
    return noise / square if square > 0 and noise > 0 else math.inf
