r"""Power laws with intervals and a test of whether they fit.

    y = C xᵃ                        power_law
    y = C Nᵃ Dᵇ                     plane_power_law
    L = E + A/N^α + B/D^β           scaling_law

Residuals are taken in log space. Runs at the same sizes (several seeds) are one point, their mean
logarithm; how far they scatter enters the intervals of the last two. The last is robust (Huber),
and its intervals are where the profiled sum of squares rises by Student's quantile.
"""

from __future__ import annotations

import math
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
    weights: Array | None = None,
) -> Fits:
    """Fit ``model`` to each row of ``log_targets`` (B, n) from ``start`` (p,) or (B, p).

    weights: (n,) of the points, in place of Huber's.

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
    given = None if weights is None else np.broadcast_to(weights, residuals.shape)
    weights = _huber(residuals, size) if given is None else given
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
        weights = _huber(residuals, size) if given is None else given
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


@dataclass(frozen=True)
class Cells:
    """Runs gathered by their sizes: mean logarithm of each cell, and how far its runs scatter."""

    sizes: tuple[Array, ...]  # (n,) each
    log_means: Array  # (n,)
    counts: Array  # (n,) runs of each
    within: float  # Σ (log y − cell's mean)²
    within_freedom: int  # Σ (runs − 1); 0 where no cell was repeated

    @property
    def seed_scatter(self) -> float | None:
        """Standard deviation of log y between runs at the same sizes."""
        if not self.within_freedom:
            return None
        return math.sqrt(self.within / self.within_freedom)

    def reach(self, square: float, freedom: int) -> float:
        """Half the 95 % interval of a mean of one run, by residuals Σ runs · r² = ``square``.

        The wider of two: the scatter of cells around the law, which also holds what the law misses,
        and that scatter pooled with the runs' own, known from more of them.
        """
        left, inside = max(freedom, 1), self.within_freedom
        reaches = [float(stats.t.ppf(0.975, left)) * math.sqrt(square / left)]
        if inside:
            pooled = (square + self.within) / (left + inside)
            reaches.append(float(stats.t.ppf(0.975, left + inside)) * math.sqrt(pooled))
        return max(reaches)

    def lack_of_fit(self, square: float, freedom: int) -> float | None:
        """p-value of the law against the scatter between seeds; None without repeated runs."""
        if not self.within_freedom or freedom < 1 or not self.within > 0:
            return None
        ratio = (square / freedom) / (self.within / self.within_freedom)
        return float(stats.f.sf(ratio, freedom, self.within_freedom))


def gathered(values: Array, *sizes: Array) -> Cells:
    """Runs at equal sizes as one cell each."""
    keys, places, counts = np.unique(
        np.stack(sizes, axis=1), axis=0, return_inverse=True, return_counts=True
    )
    places = places.reshape(-1)
    logs = np.log(values)
    means = np.bincount(places, weights=logs) / counts
    within = float(((logs - means[places]) ** 2).sum())
    return Cells(tuple(keys.T), means, counts.astype(np.float64), within, len(logs) - len(counts))


_PROFILE = np.geomspace(0.25, 64.0, 28)  # standard errors from the fit at which it is profiled


def profile_interval(
    model: LogModel,
    fitted: Fits,
    log_values: Array,
    *,
    index: int,
    weights: Array,
    reach: float,
) -> Interval:
    """95 % interval of a parameter: where the best Σ w r² with it held there exceeds the minimum
    by ``reach``²; infinite on a side where it never does.

    weights: (n,) of the points, Huber's included. Unlike a standard error this follows the bend of
    the sum of squares: a floor and an exponent may stand in for each other.
    """
    best, error = fitted.parameters[0], float(fitted.errors[0, index])
    error = min(max(error, 1e-6), 1.0)
    offsets = error * np.concatenate([-_PROFILE[::-1], _PROFILE])
    held = best[index] + offsets
    others = [k for k in range(len(best)) if k != index]

    def with_held(theta: Array) -> tuple[Array, Array]:
        whole = np.insert(theta, index, held, axis=1)
        values, jacobian = model(whole)
        return values, jacobian[..., others]

    # Move the others along as the normal equations say, so that every refit starts near its end.
    _, jacobian = model(fitted.parameters[:1])
    normal = (jacobian[0] * weights[:, None]).T @ jacobian[0]
    slopes = np.linalg.lstsq(normal[np.ix_(others, others)], -normal[others, index], rcond=1e-8)[0]
    steps = np.clip(np.outer(offsets, slopes), -2.0, 2.0)
    targets = np.repeat(log_values[None], len(held), axis=0)
    squares = [
        (fit(with_held, targets, start, weights=weights).residuals ** 2 * weights).sum(1)
        for start in (best[others] + steps, np.broadcast_to(best[others], steps.shape))
    ]
    least = float((fitted.residuals[0] ** 2 * weights).sum())
    rises = np.sqrt(np.maximum(np.minimum(*squares) - least, 0.0))
    middle = len(_PROFILE)
    low = _crossing(-offsets[:middle][::-1], rises[:middle][::-1], reach)
    high = _crossing(offsets[middle:], rises[middle:], reach)
    return float(best[index] - low), float(best[index] + high)


def _crossing(distances: Array, rises: Array, reach: float) -> float:
    """Where the root of the rise, nearly a straight line from zero, comes to ``reach``."""
    xs, ys = np.r_[0.0, distances], np.r_[0.0, np.maximum.accumulate(rises)]
    beyond = np.flatnonzero(ys > reach)
    if not len(beyond):
        return float("inf")
    k = beyond[0]
    share = (reach - ys[k - 1]) / max(ys[k] - ys[k - 1], 1e-300)
    return float(xs[k - 1] + share * (xs[k] - xs[k - 1]))


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


# --- phases and second descents -------------------------------------------------------------------

_KNOTS = 60  # places of the bend that are tried
_NULL_DRAWS = 999  # curves without the effect, for a p-value


@dataclass(frozen=True, kw_only=True)
class TwoPhases(Result):
    """A curve as two straight lines that meet, y = a + b min(x, τ) + c max(x − τ, 0)."""

    change: float  # τ
    change_interval: Interval  # 95 %
    rate_before: float  # b
    rate_after: float  # c
    share_before: float  # of the whole way |y| goes, how much lies before τ
    p_value: float  # of one straight line, noise as correlated as the residuals

    @property
    def value(self) -> float:
        return self.change

    @property
    def slows_down(self) -> bool:
        """Two phases at 1 %, the first of them the faster one."""
        return self.p_value < 0.01 and abs(self.rate_before) > abs(self.rate_after)

    def __str__(self) -> str:
        low, high = self.change_interval
        return (
            f"bend at {self.change:.4g} [{low:.4g}, {high:.4g}] (95 %): {self.rate_before:+.3g} "
            f"before, {self.rate_after:+.3g} after, {self.share_before:.0%} of the way before "
            f"(against one line p = {self.p_value:.2g})"
        )


def two_phases(x: Any, y: Any, *, seed: int = 0) -> TwoPhases:
    """Where the slope of y changes most, and whether one straight line would do.

    The p-value comes from lines with Gaussian noise of the residuals' correlation between
    neighbours, searched for a bend in the same way: looking for the best bend is no evidence.
    """
    xs, ys = (np.asarray(list(v), dtype=np.float64) for v in (x, y))
    keep = np.isfinite(xs) & np.isfinite(ys)
    xs, ys = xs[keep], ys[keep]
    count = len(xs)
    if count < 7:
        raise ValueError(f"two phases take 7 or more points of a curve, got {count}.")
    ones = np.ones(count)

    def broken(tau: float) -> Array:
        return np.stack([ones, np.minimum(xs, tau), np.maximum(xs - tau, 0)], 1)

    def squares(curves: Array, knots: Array) -> tuple[Array, Array]:
        """Of one line (k,), and of two with each bend (knots, k), for curves (n, k)."""
        one = (curves * (_remainder(np.stack([ones, xs], 1)) @ curves)).sum(0)
        bent = np.stack([_remainder(broken(tau)) for tau in knots])
        return one, (curves * (bent @ curves)).sum(1)

    # few for the many curves of the null, many for where the bend is
    few, many = (np.linspace(xs[1], xs[-2], k) for k in (_KNOTS, 10 * _KNOTS))
    *_, straight = _weighted(np.stack([ones, xs], 1), ys, ones)
    correlation = _neighbours(straight)  # under the null; a bend only makes it larger
    one, two = (part[..., 0] for part in squares(ys[:, None], few))
    drawn_one, drawn_two = squares(_correlated(count, correlation, seed), few)
    floor = 1e-24 * float(ys @ ys) + 1e-300
    gain = float(one) / max(float(two.min()), floor)
    null = drawn_one / np.maximum(drawn_two.min(0), 1e-300)
    two = squares(ys[:, None], many)[1][:, 0]
    tau = float(many[two.argmin()])
    (_, before, after), _, residuals = _weighted(broken(tau), ys, ones)
    # Neighbours that go together say less than their number: their sum of squares counts for less.
    correlation = _neighbours(residuals)
    room = max(float(two.min()), floor) * (1 + correlation) / (1 - correlation)
    limit = two.min() + room * float(stats.f.ppf(0.95, 1, count - 4)) / (count - 4)
    inside = many[two <= limit]
    ways = abs(before) * (tau - xs[0]), abs(after) * (xs[-1] - tau)
    return TwoPhases(
        change=tau,
        change_interval=(float(inside.min()), float(inside.max())),
        rate_before=float(before),
        rate_after=float(after),
        share_before=float(ways[0] / max(sum(ways), 1e-300)),
        p_value=float((1 + (null >= gain).sum()) / (1 + len(null))),
    )


def _remainder(design: Array) -> Array:
    """I − X X⁺: what least squares leaves of a curve."""
    kept, _ = np.linalg.qr(design)
    return np.asarray(np.eye(len(design)) - kept @ kept.T)


def _neighbours(residuals: Array) -> float:
    """Correlation of neighbouring residuals, without the bias that fitting them brings."""
    square = float(residuals @ residuals)
    raw = float(residuals[1:] @ residuals[:-1]) / square if square > 0 else 0.0
    return float(np.clip(raw + (1 + 3 * raw) / len(residuals), 0.0, 0.9))


def _correlated(count: int, correlation: float, seed: int) -> Array:
    """(count, draws) Gaussian series whose neighbours are so correlated."""
    random = np.random.default_rng(seed)
    fresh = random.standard_normal((count, _NULL_DRAWS))
    series = np.empty_like(fresh)
    series[0] = fresh[0]
    for k in range(1, count):
        series[k] = correlation * series[k - 1] + np.sqrt(1 - correlation**2) * fresh[k]
    return series


@dataclass(frozen=True, kw_only=True)
class SecondDescent(Result):
    """The best place for "falls, rises, falls again" in a curve that was measured over seeds."""

    start: int  # numbers of the points: before the rise, at its top, after the second fall
    top: int
    end: int
    rise: float  # of y from start to top
    fall: float  # of y from top to end
    rise_interval: Interval  # 95 %
    fall_interval: Interval
    p_value: float  # of a curve that only falls, or falls and then rises

    @property
    def value(self) -> float:
        return self.rise


def second_descent(curves: Any, *, seed: int = 0) -> SecondDescent:
    """Does a curve rise and then fall again by more than its seeds scatter?  curves: (seeds, n).

    The score is the smaller of the two steps, rise and fall, in standard errors, at the best place.
    Without a second descent one of the two is noise on a flat stretch, so that the largest rise
    in flat curves of as many seeds and points is what chance gives.
    """
    values = np.asarray(curves, dtype=np.float64)
    if values.ndim != 2 or values.shape[0] < 2:
        raise ValueError("a second descent is judged by the scatter between 2 or more seeds.")
    if values.shape[1] < 3 or not np.isfinite(values).all():
        raise ValueError("a second descent takes 3 or more points, all finite.")
    seeds, points = values.shape
    random = np.random.default_rng(seed)
    null = random.standard_normal((_NULL_DRAWS, seeds, points))
    rises = _steps(null)[0].max((1, 2))
    steps, differences, errors = (part[0] for part in _steps(values[None]))
    before = steps.max(0)  # (n,) of the best rise that ends here
    falls = np.full((points, points), -np.inf)
    upper = np.triu_indices(points, 1)
    falls[upper] = -differences[upper] / errors[upper]
    scores = np.minimum(before, falls.max(1))
    top = int(scores.argmax())
    start, end = int(steps[:, top].argmax()), int(falls[top].argmax())
    reach = float(stats.t.ppf(0.975, points * (seeds - 1)))
    rise, fall = float(differences[start, top]), float(-differences[top, end])
    half = reach * float(errors[start, top]), reach * float(errors[top, end])
    return SecondDescent(
        start=start,
        top=top,
        end=end,
        rise=rise,
        fall=fall,
        rise_interval=(rise - half[0], rise + half[0]),
        fall_interval=(fall - half[1], fall + half[1]),
        p_value=float((1 + (rises >= scores[top]).sum()) / (1 + len(rises))),
    )


def _steps(values: Array) -> tuple[Array, Array, Array]:
    """y_j − y_i over its error for i < j (else −∞), y_j − y_i, and the errors; (k, seeds, n) in."""
    seeds, points = values.shape[1:]
    means, own = values.mean(1), values.var(1, ddof=1)
    # A point's own few seeds may agree by chance: never less than the curve's average.
    square = np.maximum(own, own.mean(1, keepdims=True)) / seeds
    differences = means[:, None, :] - means[:, :, None]
    errors = np.sqrt(np.maximum(square[:, None, :] + square[:, :, None], 1e-300))
    earlier = np.triu(np.ones((points, points), dtype=bool), 1)
    return np.where(earlier, differences / errors, -np.inf), differences, errors


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


def _sandwich(design: Array, weights: Array, residuals: Array, unit: Array) -> Array:
    """Covariance of weighted least squares by every point's own residual (HC3)."""
    leverage = weights * ((design @ unit) * design).sum(1)
    pulled = weights * residuals / np.maximum(1 - leverage, 1e-3)
    meat = (design * pulled[:, None]).T @ (design * pulled[:, None])
    return np.asarray(unit @ meat @ unit)


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
    r"""L(N, D) = E + A/N^α + B/D^β with 95 % intervals from the profiled sum of squares."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    E_interval: Interval
    alpha_interval: Interval
    beta_interval: Interval
    scatter: float  # of log L around the law
    points: int  # pairs of sizes
    replicas: tuple[tuple[float, ...], ...]  # bootstrap (E, A, B, α, β), for derived quantities
    parameters_range: Interval
    samples_range: Interval
    runs: int = 0
    seed_scatter: float | None = None  # of log L between runs at the same sizes
    p_value: float | None = None  # of the law against that scatter; small: it misses something

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
            f"scatter {self.scatter:.1%}, {self.points} pairs of sizes{_between(self)}"
        )


def scaling_law(
    parameters: Any, samples: Any, losses: Any, *, replicas: int = 400, seed: int = 0
) -> ScalingLaw:
    """Robust fit of E + A/N^α + B/D^β over a grid of runs; runs at equal sizes are repeats."""
    n, d, y = as_arrays(parameters, samples, losses)
    cells = gathered(y, n, d)
    n, d = cells.sizes
    points = len(cells.counts)
    if points < 7 or min(len(np.unique(n)), len(np.unique(d))) < 3:
        raise ValueError(
            "the scaling law has 5 parameters: give at least 7 pairs of sizes, 3 of models and 3 "
            f"of data, got {points} with {len(np.unique(n))} and {len(np.unique(d))}."
        )
    scales = [float(np.exp(np.log(v).mean())) for v in (n, d)]
    logs = [np.log(v / s) for v, s in zip((n, d), scales, strict=True)]
    model = _sum_of_powers(logs)
    fitted = fit(model, cells.log_means[None], _start(logs, np.exp(cells.log_means)))
    copies = bootstrap(model, fitted, cells.log_means, count=replicas, seed=seed)

    def natural(row: Array) -> tuple[float, ...]:
        e, a, b, alpha, beta = row
        factors = (np.exp(a) * scales[0] ** alpha, np.exp(b) * scales[1] ** beta)
        return tuple(float(v) for v in (np.exp(e), *factors, alpha, beta))

    best = natural(fitted.parameters[0])
    left = points - 5
    # one run's variance by the robust scale, which is that of a cell's mean
    square = float(fitted.scale[0] ** 2) * left * float(cells.counts.mean())
    weights = cells.counts * fitted.weights[0]
    reach = cells.reach(square, left)

    def interval(index: int) -> Interval:
        return profile_interval(
            model, fitted, cells.log_means, index=index, weights=weights, reach=reach
        )

    floor = interval(0)
    return ScalingLaw(
        E=best[0],
        A=best[1],
        B=best[2],
        alpha=best[3],
        beta=best[4],
        E_interval=(float(np.exp(floor[0])), float(np.exp(min(floor[1], 700.0)))),
        alpha_interval=interval(3),
        beta_interval=interval(4),
        scatter=float(fitted.scale[0]),
        points=points,
        replicas=tuple(natural(row) for row in copies.parameters),
        parameters_range=(float(n.min()), float(n.max())),
        samples_range=(float(d.min()), float(d.max())),
        runs=len(y),
        seed_scatter=cells.seed_scatter,
        p_value=cells.lack_of_fit(square, left),
    )


def _between(law: ScalingLaw | PlanePowerLaw) -> str:
    """How many runs there were, and what their seeds say of the law."""
    if law.seed_scatter is None:
        return ""
    text = f", {law.runs} runs, {law.seed_scatter:.1%} between seeds"
    return text if law.p_value is None else f"{text}; lack of fit p = {law.p_value:.2g}"


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
    # F-test against the scatter between seeds, or without repeated runs of bending and interaction
    p_value: float | None  # small: no power law
    scatter: float  # of log y around the law
    covariance: tuple[tuple[float, ...], ...]  # of (log factor, a, b)
    points: int  # pairs of sizes
    runs: int = 0
    seed_scatter: float | None = None  # of log y between runs at the same sizes

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
        test = _between(self)
        if self.seed_scatter is None and self.p_value is not None:
            test = f"; lack of fit p = {self.p_value:.2g}"
        return (
            f"∝ N^{self.by_parameters:.3f} [{a:.3f}, {b:.3f}] · D^{self.by_samples:.3f} "
            f"[{c:.3f}, {d:.3f}] (scatter {self.scatter:.1%}{test})"
        )


def plane_power_law(parameters: Any, samples: Any, y: Any) -> PlanePowerLaw:
    """Least squares in logarithms over a grid of sizes; runs at equal sizes are repeats."""
    n, d, values = as_arrays(parameters, samples, y)
    cells = gathered(values, n, d)
    n, d = cells.sizes
    count = len(cells.counts)
    if count < 4 or len(np.unique(n)) < 2 or len(np.unique(d)) < 2:
        raise ValueError(
            "a power law in two sizes needs 4 pairs of sizes, 2 of each, got "
            f"{count} with {len(np.unique(n))} and {len(np.unique(d))}."
        )
    centre = np.array([np.log(n).mean(), np.log(d).mean()])
    u, v, target = np.log(n) - centre[0], np.log(d) - centre[1], cells.log_means
    design = np.stack([np.ones(count), u, v], axis=1)
    if np.linalg.matrix_rank(design, tol=1e-6) < 3:
        raise ValueError("N and D grow together: their exponents cannot be told apart.")
    estimate, unit, residuals = _weighted(design, target, cells.counts)
    square = float((cells.counts * residuals**2).sum())
    left = count - 3
    reach = cells.reach(square, left)
    # back to log factor at N = D = 1
    shift = np.eye(3)
    shift[0, 1:] = -centre
    student = float(stats.t.ppf(0.975, left))
    robust = shift @ _sandwich(design, cells.counts, residuals, unit) @ shift.T
    unit = shift @ unit @ shift.T
    # small data scatter more: where the cells' own residuals say so, the interval is wider
    half = np.maximum(reach * np.sqrt(np.diag(unit)), student * np.sqrt(np.diag(robust)))
    p_value = cells.lack_of_fit(square, left)
    if p_value is None and count > 7 and min(len(np.unique(n)), len(np.unique(d))) > 2:
        wider = np.concatenate([design, np.stack([u * u, v * v, u * v], axis=1)], axis=1)
        *_, rest = _weighted(wider, target, cells.counts)
        unexplained = float((cells.counts * rest**2).sum())
        ratio = (square - unexplained) / 3 / max(unexplained / (count - 6), 1e-300)
        p_value = float(stats.f.sf(ratio, 3, count - 6))
    _, a, b = estimate
    wide = half / student / np.sqrt(np.diag(unit))
    covariance = unit * np.outer(wide, wide)  # as ``draws`` reads it
    return PlanePowerLaw(
        factor=float(np.exp(shift[0] @ estimate)),
        by_parameters=float(a),
        by_samples=float(b),
        parameters_interval=(float(a - half[1]), float(a + half[1])),
        samples_interval=(float(b - half[2]), float(b + half[2])),
        p_value=p_value,
        scatter=float(np.sqrt((residuals**2).sum() / left)),
        covariance=tuple(tuple(float(x) for x in row) for row in covariance),
        points=count,
        runs=len(values),
        seed_scatter=cells.seed_scatter,
    )
