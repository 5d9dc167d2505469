r"""Robust least squares for many data sets at once: the engine of the bootstrap.

Levenberg-Marquardt with Huber weights on residuals in log space, batched over the leading axis, so
that a few hundred bootstrap fits cost little more than one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
# parameters (B, p) → log model (B, n) and its Jacobian (B, n, p)
LogModel = Callable[[Array], tuple[Array, Array]]

_HUBER = 1.345  # 95 % efficiency for Gaussian residuals


@dataclass(frozen=True)
class Fits:
    """Parameters (B, p), their standard errors (B, p), residuals (B, n) and weights (B, n)."""

    parameters: Array
    errors: Array
    residuals: Array
    weights: Array
    scale: Array  # (B,) robust standard deviation of the residuals


def fit(
    model: LogModel,
    log_targets: Array,
    start: Array,
    *,
    robust: bool = True,
    iterations: int = 60,
) -> Fits:
    """Fit ``model`` to each row of ``log_targets`` (B, n) from ``start`` (p,) or (B, p)."""
    rows, count = log_targets.shape
    theta = np.broadcast_to(start, (rows, start.shape[-1])).copy()
    size = theta.shape[1]
    damping = np.full(rows, 1e-2)
    values, jacobian = model(theta)
    residuals = values - log_targets
    weights = _huber(residuals, size) if robust else np.ones_like(residuals)
    cost = (weights * residuals**2).sum(1)
    for _ in range(iterations):
        weighted = (jacobian * weights[..., None]).transpose(0, 2, 1)  # (B, p, n)
        normal = weighted @ jacobian
        gradient = (weighted @ residuals[..., None])[..., 0]
        diagonal = np.einsum("bii->bi", normal)
        damped = normal + np.einsum(
            "b,bi,ij->bij", damping, diagonal + 1e-12 * diagonal.max(1, keepdims=True), np.eye(size)
        )
        step = np.linalg.solve(damped + 1e-300 * np.eye(size), -gradient[..., None])[..., 0]
        step = np.clip(step, -2.0, 2.0)
        trial = theta + step
        new_values, new_jacobian = model(trial)
        new_residuals = new_values - log_targets
        new_cost = (weights * new_residuals**2).sum(1)
        better = new_cost <= cost
        theta[better] = trial[better]
        residuals[better] = new_residuals[better]
        jacobian[better] = new_jacobian[better]
        damping = np.where(better, damping / 4, damping * 6)
        if robust:
            weights = _huber(residuals, size)
        cost = (weights * residuals**2).sum(1)
        if (np.abs(step).max(1)[better] < 1e-9).all() and better.all():
            break
        if (damping > 1e12).all():
            break
    return _with_errors(theta, residuals, jacobian, weights, count, size)


def _with_errors(
    theta: Array, residuals: Array, jacobian: Array, weights: Array, count: int, size: int
) -> Fits:
    # Huber's asymptotic variance: σ² = (Σψ²/(n − p)) / mean(ψ')², ψ = w r, with his small-sample
    # factor; the plain weighted sum is too small because the largest residuals count for less.
    normal = jacobian.transpose(0, 2, 1) @ jacobian
    inside = np.maximum((weights >= 1.0).mean(1), 0.25)
    factor = 1 + size / count * (1 - inside) / inside
    variance = ((weights * residuals) ** 2).sum(1) / max(count - size, 1) * (factor / inside) ** 2
    diagonal = np.maximum(np.einsum("bii->bi", normal), 1e-300)
    root = np.sqrt(diagonal)
    # pseudo-inverse of the correlation form: directions the data do not fix get huge errors
    correlation = normal / root[:, :, None] / root[:, None, :]
    inverse = np.linalg.inv(correlation + 1e-12 * np.eye(size)) / root[:, :, None] / root[:, None]
    errors = np.sqrt(np.maximum(np.einsum("bii->bi", inverse), 0) * variance[:, None])
    return Fits(theta, errors, residuals, weights, np.sqrt(variance))


def _huber(residuals: Array, size: int) -> Array:
    count = residuals.shape[1]
    spread = np.median(np.abs(residuals), axis=1) / 0.6745
    spread *= np.sqrt(count / max(count - size, 1))  # the fit has absorbed some of the scatter
    limit = _HUBER * np.maximum(spread, 1e-9)[:, None]
    weights: Array = np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-300))
    return weights


def bootstrap(
    model: LogModel, fitted: Fits, log_values: Array, *, count: int, seed: int, robust: bool = True
) -> Fits:
    """``count`` refits to fitted values plus resampled residuals, centred and widened.

    Residuals of a p-parameter fit to n points are too small by √(1 − p/n): they are divided by it.
    """
    random = np.random.default_rng(seed)
    residuals = -fitted.residuals[0]  # data − model
    size, points = fitted.parameters.shape[1], len(residuals)
    widened = (residuals - residuals.mean()) * np.sqrt(points / max(points - size, 1))
    drawn = widened[random.integers(0, points, (count, points))]
    return fit(
        model, log_values[None] + fitted.residuals + drawn, fitted.parameters[0], robust=robust
    )


def studentized_interval(
    value: float, error: float, replicas: Array, errors: Array, *, left: int, widest: float = 4.0
) -> tuple[float, float]:
    """95 % bootstrap-t interval; quantiles are kept near Student's.

    left: degrees of freedom of the fit, n − p.
    """
    scores = (replicas - value) / np.maximum(errors, 1e-300)
    scores = scores[np.isfinite(scores)]
    student = float(stats.t.ppf(0.975, max(left, 1)))
    low, high = np.quantile(scores, [0.025, 0.975]) if len(scores) else (-student, student)
    shortest = (1.96 + student) / 2  # covers 95 % in trials; either end alone misses by 2 %
    low = -float(np.clip(-low, shortest, student * widest))
    high = float(np.clip(high, shortest, student * widest))
    return value - high * error, value - low * error


def as_arrays(*series: Any) -> list[Array]:
    """Sequences or tensors as float arrays of one length, all positive and finite."""
    arrays = [np.asarray([float(v) for v in one], dtype=np.float64) for one in series]
    length = len(arrays[0])
    for array in arrays:
        if len(array) != length:
            raise ValueError(f"the series have different lengths: {[len(a) for a in arrays]}.")
        if not (np.isfinite(array).all() and (array > 0).all()):
            raise ValueError("power laws need positive finite numbers: leave out the others.")
    return arrays
