r"""Power laws with intervals and a test of whether they fit.

    y = C xᵃ                        power_law
    y = E + A x^{−α}                saturating_power_law
    L = E + A/N^α + B/D^β           scaling_law

Residuals are taken in log space; the last two are robust (Huber) with bootstrap intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from curvatlas.analysis.fits_least_squares import (
    Array,
    Fits,
    LogModel,
    as_arrays,
    bootstrap,
    fit,
    studentized_interval,
)
from curvatlas.results import Result

Interval = tuple[float, float]
_GRID = np.array([0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0])


@dataclass(frozen=True, kw_only=True)
class PowerLaw(Result):
    """y = factor · x^exponent."""

    exponent: float
    interval: Interval  # 95 %, of the exponent
    factor: float
    factor_interval: Interval  # 95 %
    p_value: float | None  # of the goodness-of-fit test; small: no power law
    test: str  # "chi-square" with known errors, "curvature" (F-test of a log² term) without
    points: int
    scatter: float  # standard deviation of the log residuals
    range: Interval  # of x

    @property
    def value(self) -> float:
        return self.exponent

    @property
    def fits(self) -> bool:
        """Not rejected at 1 %."""
        return self.p_value is None or self.p_value > 0.01

    def __call__(self, x: Any) -> Any:
        return self.factor * np.asarray(x, dtype=np.float64) ** self.exponent

    def __str__(self) -> str:
        low, high = self.interval
        test = "" if self.p_value is None else f"; {self.test} test p = {self.p_value:.2g}"
        return f"∝ x^{self.exponent:.3f} [{low:.3f}, {high:.3f}] ({self.points} points{test})"


def power_law(
    x: Any, y: Any, *, log_errors: Any | None = None, repeats: int | None = None
) -> PowerLaw:
    """Least squares in logarithms.

    ``log_errors``: standard errors of log y, which weigh the points and allow a χ² test (found from
    so many ``repeats``; None: known); without them the interval is Student's and the test asks
    whether log y bends in log x.
    """
    xs, ys = as_arrays(x, y)
    count = len(xs)
    if count < 3 or len(np.unique(xs)) < 2:
        raise ValueError(f"a power law needs 3 points at 2 places, got {count}.")
    weights = np.ones(count)
    if log_errors is not None:
        errors = np.maximum(np.asarray([float(e) for e in log_errors]), 1e-12)
        weights = 1 / errors**2
    centre = float((weights * np.log(xs)).sum() / weights.sum())
    design = np.stack([np.ones(count), np.log(xs) - centre], axis=1)
    estimate, covariance, residuals = _weighted(design, np.log(ys), weights)
    left = count - 2
    square = float((weights * residuals**2).sum())
    if log_errors is not None:
        # overdispersed points widen the interval, lucky ones do not narrow it
        covariance = covariance * max(1.0, square / left)
        scores = np.sqrt(weights) * residuals
        p_value: float | None = float(stats.chi2.sf((_gaussian(scores, repeats) ** 2).sum(), left))
        test = "chi-square"
    else:
        covariance = covariance * square / left
        p_value, test = _bend_test(design, np.log(ys), square), "curvature"
    quantile = float(stats.t.ppf(0.975, left))
    half = quantile * np.sqrt(np.diag(covariance))
    level_error = quantile * np.sqrt(covariance[0, 0] + centre**2 * covariance[1, 1])
    level = estimate[0] - centre * estimate[1]
    return PowerLaw(
        exponent=float(estimate[1]),
        interval=(float(estimate[1] - half[1]), float(estimate[1] + half[1])),
        factor=float(np.exp(level)),
        factor_interval=(float(np.exp(level - level_error)), float(np.exp(level + level_error))),
        p_value=p_value,
        test=test,
        points=count,
        scatter=float(np.sqrt((residuals**2).sum() / left)),
        range=(float(xs.min()), float(xs.max())),
    )


def _weighted(design: Array, target: Array, weights: Array) -> tuple[Array, Array, Array]:
    covariance: Array = np.linalg.inv(design.T @ (weights[:, None] * design)).astype(np.float64)
    estimate = covariance @ (design.T @ (weights * target))
    return estimate, covariance, target - design @ estimate


def _gaussian(scores: Array, repeats: int | None) -> Array:
    """Student scores (errors estimated from ``repeats``) as Gaussian ones of equal probability."""
    if repeats is None:
        return scores
    tail = stats.t.sf(np.abs(scores), repeats - 1)
    found: Array = stats.norm.isf(np.maximum(tail, 1e-300))
    return found


def _bend_test(design: Array, target: Array, square: float) -> float | None:
    """p-value of a log² term; None with fewer than five points."""
    if len(target) < 5:
        return None
    wider = np.concatenate([design, design[:, 1:] ** 2], axis=1)
    *_, residuals = _weighted(wider, target, np.ones(len(target)))
    left = len(target) - 3
    rest = float((residuals**2).sum())
    if rest <= 1e-24 * max(float((target**2).sum()), 1e-300):
        return 1.0 if square <= 4 * rest + 1e-24 else 0.0
    return float(stats.f.sf((square - rest) / (rest / left), 1, left))


@dataclass(frozen=True, kw_only=True)
class SaturatingPowerLaw(Result):
    """y = floor + amplitude · x^(−exponent)."""

    floor: float
    floor_interval: Interval
    amplitude: float
    exponent: float
    interval: Interval  # 95 % bootstrap, of the exponent
    scatter: float
    points: int
    replicas: int
    range: Interval

    @property
    def value(self) -> float:
        return self.exponent

    def __call__(self, x: Any) -> Any:
        return self.floor + self.amplitude * np.asarray(x, dtype=np.float64) ** -self.exponent

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.floor:.4g} + {self.amplitude:.4g}·x^−{self.exponent:.3f} [{low:.3f}, "
            f"{high:.3f}] ({self.points} points, {self.replicas} bootstrap replicas)"
        )


def saturating_power_law(
    x: Any, y: Any, *, replicas: int = 400, seed: int = 0
) -> SaturatingPowerLaw:
    """Robust fit of a power law that levels off, with bootstrap intervals."""
    xs, ys = as_arrays(x, y)
    if len(xs) < 5:
        raise ValueError(f"a saturating power law has 3 parameters: give 5 points, got {len(xs)}.")
    scale = float(np.exp(np.log(xs).mean()))
    model = _sum_of_powers([np.log(xs / scale)])
    fitted = fit(model, np.log(ys)[None], _start([np.log(xs / scale)], ys))
    copies = bootstrap(model, fitted, np.log(ys), count=replicas, seed=seed)
    log_floor, log_amplitude, exponent = fitted.parameters[0]
    low, high = _interval(fitted, copies, 2)
    floors = _interval(fitted, copies, 0)
    return SaturatingPowerLaw(
        floor=float(np.exp(log_floor)),
        floor_interval=(float(np.exp(floors[0])), float(np.exp(min(floors[1], 700.0)))),
        amplitude=float(np.exp(log_amplitude) * scale**exponent),
        exponent=float(exponent),
        interval=(low, high),
        scatter=float(fitted.scale[0]),
        points=len(xs),
        replicas=replicas,
        range=(float(xs.min()), float(xs.max())),
    )


@dataclass(frozen=True, kw_only=True)
class ScalingLaw(Result):
    r"""L(N, D) = E + A/N^α + B/D^β with 95 % bootstrap intervals."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    E_interval: Interval
    alpha_interval: Interval
    beta_interval: Interval
    scatter: float  # of log L
    points: int
    replicas: tuple[tuple[float, ...], ...]  # bootstrap (E, A, B, α, β), for derived quantities
    parameters_range: Interval
    samples_range: Interval

    @property
    def value(self) -> float:
        return self.beta

    @property
    def interval(self) -> Interval:
        return self.beta_interval

    def __call__(self, parameters: Any, samples: Any) -> Any:
        n, d = (np.asarray(v, dtype=np.float64) for v in (parameters, samples))
        return self.E + self.A * n**-self.alpha + self.B * d**-self.beta

    def __str__(self) -> str:
        return (
            f"L = {self.E:.4g} + {self.A:.4g}/N^{self.alpha:.3f} + {self.B:.4g}/D^{self.beta:.3f}; "
            f"α ∈ [{self.alpha_interval[0]:.3f}, {self.alpha_interval[1]:.3f}], "
            f"β ∈ [{self.beta_interval[0]:.3f}, {self.beta_interval[1]:.3f}] (95 %), "
            f"scatter {self.scatter:.1%}, {self.points} runs"
        )


def scaling_law(
    parameters: Any, samples: Any, losses: Any, *, replicas: int = 400, seed: int = 0
) -> ScalingLaw:
    """Robust fit of E + A/N^α + B/D^β over a grid of runs, with bootstrap intervals."""
    n, d, y = as_arrays(parameters, samples, losses)
    if len(y) < 7 or min(len(np.unique(n)), len(np.unique(d))) < 3:
        raise ValueError(
            "the scaling law has 5 parameters: give at least 7 runs with 3 sizes of model and 3 of "
            f"data, got {len(y)} with {len(np.unique(n))} and {len(np.unique(d))}."
        )
    scales = [float(np.exp(np.log(v).mean())) for v in (n, d)]
    logs = [np.log(v / s) for v, s in zip((n, d), scales, strict=True)]
    model = _sum_of_powers(logs)
    fitted = fit(model, np.log(y)[None], _start(logs, y))
    copies = bootstrap(model, fitted, np.log(y), count=replicas, seed=seed)

    def natural(row: Array) -> tuple[float, ...]:
        e, a, b, alpha, beta = row
        factors = (np.exp(a) * scales[0] ** alpha, np.exp(b) * scales[1] ** beta)
        return tuple(float(v) for v in (np.exp(e), *factors, alpha, beta))

    best = natural(fitted.parameters[0])
    floors = _interval(fitted, copies, 0)
    return ScalingLaw(
        E=best[0], A=best[1], B=best[2], alpha=best[3], beta=best[4],
        E_interval=(float(np.exp(floors[0])), float(np.exp(min(floors[1], 700.0)))),
        alpha_interval=_interval(fitted, copies, 3),
        beta_interval=_interval(fitted, copies, 4),
        scatter=float(fitted.scale[0]),
        points=len(y),
        replicas=tuple(natural(row) for row in copies.parameters),
        parameters_range=(float(n.min()), float(n.max())),
        samples_range=(float(d.min()), float(d.max())),
    )  # fmt: skip


def _interval(fitted: Fits, copies: Fits, index: int) -> Interval:
    return studentized_interval(
        float(fitted.parameters[0, index]),
        float(fitted.errors[0, index]),
        copies.parameters[:, index],
        copies.errors[:, index],
        left=fitted.residuals.shape[1] - fitted.parameters.shape[1],
    )


def _sum_of_powers(logs: list[Array]) -> LogModel:
    """log(e^{θ₀} + Σ_j e^{θ_j − a_j x_j}) with parameters (θ₀, θ_1…, a_1…)."""
    count = len(logs)

    def model(theta: Array) -> tuple[Array, Array]:
        terms = [np.repeat(theta[:, :1], len(logs[0]), axis=1)]
        for j, x in enumerate(logs):
            terms.append(theta[:, 1 + j, None] - theta[:, 1 + count + j, None] * x)
        stacked = np.clip(np.stack(terms, axis=-1), -300, 300)  # (B, n, 1 + count)
        top = stacked.max(-1, keepdims=True)
        shares = np.exp(stacked - top)
        total = shares.sum(-1, keepdims=True)
        values = (top + np.log(total))[..., 0]
        shares = shares / total
        slopes = [-shares[..., 1 + j] * x for j, x in enumerate(logs)]
        return values, np.concatenate([shares, np.stack(slopes, axis=-1)], axis=-1)

    return model


def _start(logs: list[Array], y: Array) -> Array:
    """The best of a grid of exponents, with non-negative factors for each."""
    from scipy.optimize import nnls

    best, found = np.inf, np.zeros(1 + 2 * len(logs))
    floor = 1e-4 * y.min()
    for exponents in np.stack(np.meshgrid(*[_GRID] * len(logs)), -1).reshape(-1, len(logs)):
        columns = [np.ones(len(y))]
        columns += [np.exp(-a * x) for a, x in zip(exponents, logs, strict=True)]
        # relative residuals: the fit is in log space
        factors, cost = nnls(np.stack(columns, 1) / y[:, None], np.ones(len(y)))
        if cost < best:
            best, found = cost, np.r_[np.log(np.maximum(factors, floor)), exponents]
    return found
