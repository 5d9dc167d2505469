r"""Power laws with intervals and a test of whether they fit.

    y = C xᵃ                        power_law
    y = C Nᵃ Dᵇ                     plane_power_law
    L = E + A/N^α + B/D^β           scaling_law

Residuals are taken in log space; the last is robust (Huber) with bootstrap intervals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from curvatlas.results import Interval, Result

Array = NDArray[np.float64]
# parameters (B, p) → log model (B, n) and its Jacobian (B, n, p)
LogModel = Callable[[Array], tuple[Array, Array]]

_HUBER = 1.345  # 95 % efficiency for Gaussian residuals
_GRID = np.array([0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0])  # exponents to start from


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
    iterations: int = 60,
) -> Fits:
    """Fit ``model`` to each row of ``log_targets`` (B, n) from ``start`` (p,) or (B, p).

    Levenberg-Marquardt with Huber weights on residuals in log space, all rows at once: 400 refits
    of a scaling law take 0.4 s, and 2.8 s one by one with scipy.optimize.least_squares, whose Huber
    loss also keeps the scale that is estimated anew here in every iteration.
    """
    rows, count = log_targets.shape
    theta = np.broadcast_to(start, (rows, start.shape[-1])).copy()
    size = theta.shape[1]
    damping = np.full(rows, 1e-2)
    values, jacobian = model(theta)
    residuals = values - log_targets
    weights = _huber(residuals, size)
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
        # Without a floor the matrix of two parameters that say the same is singular.
        damping = np.where(better, np.maximum(damping / 4, 1e-10), damping * 6)
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


def bootstrap(model: LogModel, fitted: Fits, log_values: Array, *, count: int, seed: int) -> Fits:
    """``count`` refits to fitted values plus resampled residuals, centred and widened.

    scipy.stats.bootstrap resamples the points themselves, which would tear holes into a grid of
    sizes. Residuals of a p-parameter fit to n points are too small by √(1 − p/n): they are divided
    by it.
    """
    random = np.random.default_rng(seed)
    residuals = -fitted.residuals[0]  # data − model
    size, points = fitted.parameters.shape[1], len(residuals)
    widened = (residuals - residuals.mean()) * np.sqrt(points / max(points - size, 1))
    drawn = widened[random.integers(0, points, (count, points))]
    return fit(model, log_values[None] + fitted.residuals + drawn, fitted.parameters[0])


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


def mean_reach(values: Any) -> float:
    """Half of the 95 % interval of a mean of independent values (Student); infinite for one."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return float("inf")
    return float(stats.t.ppf(0.975, len(array) - 1) * array.std(ddof=1) / len(array) ** 0.5)


def share_interval(hits: int, trials: int) -> Interval:
    """95 % interval of a share from ``hits`` of ``trials`` (Clopper and Pearson)."""
    low = stats.beta.ppf(0.025, hits, trials - hits + 1) if hits else 0.0
    high = stats.beta.ppf(0.975, hits + 1, trials - hits) if hits < trials else 1.0
    return float(low), float(high)


def rank_correlation(
    x: Any, y: Any, *, seed: int = 0, draws: int = 2000
) -> tuple[float, Interval, Interval, float]:
    """Spearman's ρ, its 95 % bootstrap interval, the 95 % range and p-value of shuffled pairs."""
    random = np.random.default_rng(seed)
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    value = float(_row_correlations(a[None], b[None])[0])
    chosen = random.integers(0, len(a), (draws, len(a)))
    resampled = _row_correlations(a[chosen], b[chosen])
    shuffled = _row_correlations(
        np.broadcast_to(a, (draws, len(a))), random.permuted(np.tile(b, (draws, 1)), axis=1)
    )
    low, high = np.nanquantile(resampled, [0.025, 0.975])
    null = np.nanquantile(shuffled, [0.025, 0.975])
    p_value = (1 + int((np.abs(shuffled) >= abs(value) - 1e-12).sum())) / (draws + 1)
    return value, (float(low), float(high)), (float(null[0]), float(null[1])), p_value


def _row_correlations(x: Array, y: Array) -> Array:
    """Correlations of the ranks in each pair of rows, (B, n) → (B,); NaN where all are equal."""
    a, b = (stats.rankdata(rows, axis=1) for rows in (x, y))
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1)))


def line_slope(x: Any, y: Any) -> tuple[float, Interval]:
    """Slope of y over x (at least 3 points) with its 95 % interval."""
    fitted = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, len(x) - 2)) * float(fitted.stderr)
    slope = float(fitted.slope)
    return slope, (slope - half, slope + half)


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
    """Estimate, its covariance at unit variance, and residuals of weighted least squares."""
    covariance: Array = np.linalg.inv(design.T @ (weights[:, None] * design)).astype(np.float64)
    estimate = covariance @ (design.T @ (weights * target))
    return estimate, covariance, target - design @ estimate


def _gaussian(scores: Array, repeats: int | None) -> Array:
    """Student scores (errors estimated from ``repeats``) as Gaussian ones of equal probability."""
    if repeats is None:
        return scores
    tail = stats.t.sf(np.abs(scores), repeats - 1)
    gaussian: Array = stats.norm.isf(np.maximum(tail, 1e-300))
    return gaussian


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
        E=best[0],
        A=best[1],
        B=best[2],
        alpha=best[3],
        beta=best[4],
        E_interval=(float(np.exp(floors[0])), float(np.exp(min(floors[1], 700.0)))),
        alpha_interval=_interval(fitted, copies, 3),
        beta_interval=_interval(fitted, copies, 4),
        scatter=float(fitted.scale[0]),
        points=len(y),
        replicas=tuple(natural(row) for row in copies.parameters),
        parameters_range=(float(n.min()), float(n.max())),
        samples_range=(float(d.min()), float(d.max())),
    )


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

    best, start = np.inf, np.zeros(1 + 2 * len(logs))
    floor = 1e-4 * y.min()
    for exponents in np.stack(np.meshgrid(*[_GRID] * len(logs)), -1).reshape(-1, len(logs)):
        columns = [np.ones(len(y))]
        columns += [np.exp(-a * x) for a, x in zip(exponents, logs, strict=True)]
        # relative residuals: the fit is in log space
        factors, cost = nnls(np.stack(columns, 1) / y[:, None], np.ones(len(y)))
        if cost < best:
            best, start = cost, np.r_[np.log(np.maximum(factors, floor)), exponents]
    return start


@dataclass(frozen=True, kw_only=True)
class PlanePowerLaw(Result):
    """y = factor · N^by_parameters · D^by_samples."""

    factor: float
    by_parameters: float
    by_samples: float
    parameters_interval: Interval  # 95 %, Student
    samples_interval: Interval  # 95 %, Student
    p_value: float | None  # F-test of bending and interaction terms; small: no power law
    scatter: float  # of log y
    covariance: tuple[tuple[float, ...], ...]  # of (log factor, a, b)
    points: int

    @property
    def value(self) -> float:
        return self.by_samples

    @property
    def interval(self) -> Interval:
        return self.samples_interval

    def __call__(self, parameters: Any, samples: Any) -> Any:
        n, d = (np.asarray(v, dtype=np.float64) for v in (parameters, samples))
        return self.factor * n**self.by_parameters * d**self.by_samples

    def draws(self, count: int, seed: int) -> Array:
        """(count, 3) plausible (log factor, a, b): Student with the fit's degrees of freedom."""
        random = np.random.default_rng(seed)
        centre = np.array([np.log(self.factor), self.by_parameters, self.by_samples])
        root = np.linalg.cholesky(np.array(self.covariance) + 1e-18 * np.eye(3))
        left = max(self.points - 3, 1)
        wide = np.sqrt(left / random.chisquare(left, count))[:, None]
        drawn: Array = centre + wide * (random.standard_normal((count, 3)) @ root.T)
        return drawn

    def __str__(self) -> str:
        (a, b), (c, d) = self.parameters_interval, self.samples_interval
        test = "" if self.p_value is None else f"; lack of fit p = {self.p_value:.2g}"
        return (
            f"∝ N^{self.by_parameters:.3f} [{a:.3f}, {b:.3f}] · D^{self.by_samples:.3f} "
            f"[{c:.3f}, {d:.3f}] (scatter {self.scatter:.1%}{test})"
        )


def plane_power_law(parameters: Any, samples: Any, y: Any) -> PlanePowerLaw:
    """Least squares in logarithms over a grid of sizes."""
    n, d, values = as_arrays(parameters, samples, y)
    count = len(values)
    if count < 4 or len(np.unique(n)) < 2 or len(np.unique(d)) < 2:
        raise ValueError(
            f"a power law in two sizes needs 4 runs at 2 sizes of each, got {count} runs."
        )
    centre = np.array([np.log(n).mean(), np.log(d).mean()])
    u, v, target = np.log(n) - centre[0], np.log(d) - centre[1], np.log(values)
    design = np.stack([np.ones(count), u, v], axis=1)
    estimate, square = _solve(design, target)
    left = count - 3
    covariance = np.linalg.inv(design.T @ design) * square / left
    # back to log factor at N = D = 1
    shift = np.eye(3)
    shift[0, 1:] = -centre
    covariance = shift @ covariance @ shift.T
    half = float(stats.t.ppf(0.975, left)) * np.sqrt(np.diag(covariance))
    wider = np.concatenate([design, np.stack([u * u, v * v, u * v], axis=1)], axis=1)
    p_value = None
    if count > 7 and min(len(np.unique(n)), len(np.unique(d))) > 2:
        rest = _solve(wider, target)[1]
        ratio = (square - rest) / 3 / max(rest / (count - 6), 1e-300)
        p_value = float(stats.f.sf(ratio, 3, count - 6))
    _, a, b = estimate
    return PlanePowerLaw(
        factor=float(np.exp(shift[0] @ estimate)),
        by_parameters=float(a),
        by_samples=float(b),
        parameters_interval=(float(a - half[1]), float(a + half[1])),
        samples_interval=(float(b - half[2]), float(b + half[2])),
        p_value=p_value,
        scatter=float(np.sqrt(square / left)),
        covariance=tuple(tuple(float(x) for x in row) for row in covariance),
        points=count,
    )


def _solve(design: Array, target: Array) -> tuple[Array, float]:
    estimate: Array = np.linalg.lstsq(design, target, rcond=None)[0].astype(np.float64)
    return estimate, float(((target - design @ estimate) ** 2).sum())
