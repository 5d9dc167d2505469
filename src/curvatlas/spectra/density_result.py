"""What ``spectral_density`` returns, and how its intervals are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.results import Number, Result
from curvatlas.spectra.estimate import Interval
from curvatlas.spectra.krylov import Array
from curvatlas.spectra.quadrature import Probes, Rule, wasserstein, zero_of

QUANTILE = 0.05  # of |λ| over eigenvalues that are not null: the small end of the spectrum
_HALVINGS = 14  # of the logarithm of a magnitude: to a fifth of a percent
_POINTS = 1024  # of the curve
_WIDTH = 0.04  # standard deviation of the curve's kernel on the asinh axis
_SPACINGS = 2.0  # of the nodes around zero: from there on the rules tell what is below
_NORMAL = 1.96


@dataclass(frozen=True, kw_only=True)
class SpectralDensity(Result):
    """The spectrum as a discrete measure, and a smooth curve of it for drawing.

    Integrate with ``nodes`` and ``weights``; ``grid`` and ``density`` are blurred on purpose.
    """

    nodes: Tensor  # (q,) ascending
    weights: Tensor  # (q,) summing to one
    grid: Tensor  # (g,) points, denser around zero
    density: Tensor  # (g,) of unit integral
    negative_mass: float  # share of eigenvalues below zero
    # At least 95 %: it allows for what cannot be told, whether the eigenvalues nearer to zero than
    # ``resolution`` are null, small and positive, or small and negative.
    negative_mass_interval: Interval
    resolution: float = math.nan  # two spacings of the quadrature's nodes around zero
    clear_negative_mass: float = math.nan  # share of eigenvalues below −resolution
    clear_negative_mass_interval: Interval = (0.0, 1.0)  # 95 %
    small_magnitude: float = math.nan  # the 5 % quantile of |λ| over eigenvalues that are not null
    small_magnitude_interval: Interval = (0.0, math.inf)  # at least 95 %, as above
    effective_rank: float  # (Σ|λ|)² / Σλ²
    effective_rank_interval: Interval  # 95 %
    mean: float  # Σλ / n
    wasserstein_error: float  # 95 % bound on the W1 distance to the true spectrum
    size: int
    products: int
    converged: bool
    exact: bool

    @property
    def value(self) -> float:
        """The share of negative eigenvalues."""
        return self.negative_mass

    @property
    def interval(self) -> Interval:
        """Of the share of negative eigenvalues, 95 %."""
        return self.negative_mass_interval

    def __str__(self) -> str:
        negative = Number(self.negative_mass, *self.negative_mass_interval, exact=self.exact)
        rank = Number(self.effective_rank, *self.effective_rank_interval, exact=self.exact)
        # two measures at W1 distance w have means within w of each other
        reach = self.wasserstein_error
        mean = Number(self.mean, self.mean - reach, self.mean + reach, exact=self.exact)
        share = Number(self.clear_negative_mass, *self.clear_negative_mass_interval)
        clear = f"{share:%} clearly, below {-self.resolution:.2g}"
        kind = "exact" if self.exact else f"W1 error ≤ {self.wasserstein_error:.2g} at 95 %"
        return (
            f"spectrum of {self.size} eigenvalues in [{float(self.nodes[0]):.4g}, "
            f"{float(self.nodes[-1]):.4g}], mean {mean}; negative {negative:%} ({clear}); "
            f"effective rank {rank}; "
            f"{kind}, {self.products} products" + ("" if self.converged else ", NOT converged")
        )


def exact_density(values: Tensor, products: int, *, psd: bool) -> SpectralDensity:
    """The density of known eigenvalues."""
    nodes = values.double().numpy()
    n = len(nodes)
    floor = zero_of(nodes, np.finfo(np.float64).eps)
    negative = 0.0 if psd else float((nodes < -floor).mean())
    largest = np.abs(nodes).max()
    relative = np.abs(nodes) / largest if largest > 0 else nodes
    rank = float(relative.sum() ** 2 / (relative**2).sum()) if largest > 0 else 0.0
    held = np.sort(np.abs(nodes)[np.abs(nodes) > floor])
    small = float(held[max(math.ceil(QUANTILE * len(held)) - 1, 0)]) if len(held) else 0.0
    grid, density = smooth(nodes, [], n)
    return SpectralDensity(
        nodes=torch.from_numpy(nodes.copy()),
        weights=torch.from_numpy(np.full(n, 1.0 / n)),
        grid=torch.from_numpy(grid),
        density=torch.from_numpy(density),
        negative_mass=negative,
        negative_mass_interval=(negative, negative),
        resolution=floor,
        clear_negative_mass=negative,
        clear_negative_mass_interval=(negative, negative),
        small_magnitude=small,
        small_magnitude_interval=(small, small),
        effective_rank=rank,
        effective_rank_interval=(rank * (1 - 1e-12), rank * (1 + 1e-12)),
        mean=float(nodes.mean()),
        wasserstein_error=float(64 * 2e-16 * largest),
        size=n,
        products=products,
        converged=True,
        exact=True,
    )


def summarise(
    *,
    size: int,
    outliers: Array,
    coupling: float,
    alphas: Array,
    betas: Array,
    eps: float,
    products: int,
    psd: bool,
) -> SpectralDensity:
    """Put outliers (j,) and probe recurrences (m, s) together."""
    scale = max(float(np.abs(outliers).max(initial=0.0)), float(np.abs(alphas).max()))
    probes = Probes(size, outliers, alphas, betas, scale, eps)
    m, share = len(alphas), probes.share
    rules, coarse = probes.rules(probes.steps), probes.rules(probes.fewer)
    nodes = np.concatenate([outliers, *(x for x, _ in rules)])
    weights = np.concatenate([np.full(len(outliers), 1 / size), *(w * share / m for _, w in rules)])
    order = np.argsort(nodes, kind="stable")
    nodes, weights = nodes[order], weights[order] / weights.sum()
    grid, density = smooth(outliers, rules, size)
    moved = share * wasserstein(*_mean_rule(rules), *_mean_rule(coarse))
    if probes.few:  # β is the spread that so few nodes leave open
        moved += share * float(np.abs(betas[:, -1]).mean())
    negative = negative_shares(probes, psd=psd)
    small, small_interval = small_magnitude(probes, nodes, weights)
    rank, rank_interval = _effective_rank(probes, rules, coarse)
    return SpectralDensity(
        nodes=torch.from_numpy(nodes),
        weights=torch.from_numpy(weights),
        grid=torch.from_numpy(grid),
        density=torch.from_numpy(density),
        negative_mass=negative.negative,
        negative_mass_interval=negative.negative_interval,
        resolution=negative.resolution,
        clear_negative_mass=negative.clear,
        clear_negative_mass_interval=negative.clear_interval,
        small_magnitude=small,
        small_magnitude_interval=small_interval,
        effective_rank=rank,
        effective_rank_interval=rank_interval,
        mean=float(nodes @ weights),
        wasserstein_error=moved + share * _scatter(rules) + 2 * coupling / size + 64 * eps * scale,
        size=size,
        products=products,
        converged=m > 1 and not probes.few,
        exact=False,
    )


def _mean_rule(rules: list[Rule]) -> Rule:
    nodes = np.concatenate([x for x, _ in rules])
    weights = np.concatenate([w for _, w in rules]) / len(rules)
    return nodes, weights


def _scatter(rules: list[Rule]) -> float:
    """95 % bound of ∫ |F̄ − F| from the scatter of the probes' distribution functions."""
    m = len(rules)
    if m < 2:
        nodes, weights = rules[0]
        return float(np.abs(nodes) @ weights)  # one probe cannot tell: the whole scale
    points = np.sort(np.concatenate([x for x, _ in rules]))
    functions = np.stack([_distribution(part, points) for part in rules])
    spread = functions.std(0, ddof=1) / np.sqrt(m)
    return float(student.ppf(0.975, m - 1)) * float(spread[:-1] @ np.diff(points))


def _distribution(part: Rule, points: Array) -> Array:
    nodes, weights = part
    total = np.concatenate([[0.0], np.cumsum(weights)])
    result: Array = total[np.searchsorted(nodes, points, side="right")]
    return result


def _effective_rank(
    probes: Probes, rules: list[Rule], coarse: list[Rule]
) -> tuple[float, Interval]:
    """n (Σ w|θ|)² / Σ wθ², with the chance of the probes and the resolution of their rules."""
    outliers, m, rest = probes.outliers, len(rules), probes.rest

    def moments(some: list[Rule]) -> tuple[float, float]:
        """Σ|λ| and Σλ²."""
        nodes, weights = _mean_rule(some)
        magnitude = np.abs(outliers).sum() + rest * float(weights @ np.abs(nodes))
        return magnitude, (outliers**2).sum() + rest * float(weights @ nodes**2)

    def rank(magnitude: float, square: float) -> float:
        return float(magnitude**2 / square) if square > 0 else 0.0

    magnitude, square = moments(rules)
    value = rank(magnitude, square)
    if m < 2 or value == 0.0 or probes.few:
        return value, (min(value, 1.0), float(probes.size))
    nodes, weights = _mean_rule(rules)
    # To first order log rank is the integral of this function, and a probe's integral of any
    # function has the variance 2/(d + 2) times that of the function over the spectrum.
    slope = 2 * rest * np.abs(nodes) / magnitude - rest * nodes**2 / square
    scatter = 2 / (rest + 2) / m * max(float(weights @ slope**2 - (weights @ slope) ** 2), 0.0)
    # |θ| is not a polynomial: the rules are biased where the spectrum crosses zero, by about 1/s²,
    # so that the last quarter of the steps moved them by 0.8 of what is left.
    bias = 1.3 * (value - rank(*moments(coarse)))
    error = float(np.hypot(_NORMAL * np.sqrt(scatter) * value, bias)) + 1e-9 * value
    return value, (max(value - error, 0.0), min(value + error, float(probes.size)))


# --- a smooth curve of a discrete measure ---------------------------------------------------------


def smooth(outliers: Array, rules: list[tuple[Array, Array]], size: int) -> tuple[Array, Array]:
    """(grid, density) with unit integral over the grid.

    outliers: single eigenvalues of weight 1/size; rules: Gauss rules that share the rest. Kernels
    are Gaussian in y = asinh(x/c), c the mean |node|: near zero they resolve the bulk, far out they
    widen in proportion, so that an outlier is neither a spike nor lost. A node of a rule stands for
    the eigenvalues up to halfway to its neighbours, so its kernel is at least that wide.
    """
    share = (size - len(outliers)) / size / max(len(rules), 1)
    nodes = np.concatenate([outliers, *(x for x, _ in rules)])
    weights = np.concatenate([np.full(len(outliers), 1 / size), *(w * share for _, w in rules)])
    scale = float(np.abs(nodes) @ weights) or 1.0
    y = np.arcsinh(nodes / scale)
    cells = [_cells(np.arcsinh(x / scale)) for x, _ in rules]
    widths = np.maximum(np.concatenate([np.zeros(len(outliers)), *cells]), _WIDTH)
    axis = np.linspace(y.min() - 5 * _WIDTH, y.max() + 5 * _WIDTH, _POINTS)
    kernel = np.exp(-0.5 * ((axis[:, None] - y) / widths) ** 2) / widths
    grid = scale * np.sinh(axis)
    density = kernel @ weights / (scale * np.cosh(axis))
    area = float((density[1:] + density[:-1]) @ np.diff(grid) / 2)
    return grid, density / area


def _cells(nodes: Array) -> Array:
    """Half the distance to the nearer neighbour (s,), zero for a single node."""
    if len(nodes) < 2:
        return np.zeros(len(nodes))
    gaps = np.diff(nodes)
    cells: Array = np.minimum(np.r_[gaps, gaps[-1]], np.r_[gaps[0], gaps]) / 2
    return cells


# --- the small end of |λ| -------------------------------------------------------------------------


def small_magnitude(probes: Probes, nodes: Array, weights: Array) -> tuple[float, Interval]:
    """Which magnitude 5 % of the eigenvalues that are not null stay below, and its interval.

    nodes (q,) and weights (q,) give the value. N(x), the share with |λ| ≤ x, is bracketed by the
    rules with nodes at x and −x. Which part of what lies at zero is null cannot be told: with none
    of it null the quantile is lowest, with all of it highest. Between the two, and the chance of
    the probes, it lies with at least 95 %.
    """
    sizes = np.abs(nodes)
    held = sizes > probes.zero
    if not held.any():
        return 0.0, (0.0, 0.0)
    order = np.argsort(sizes[held])
    share = np.cumsum(weights[held][order]) / weights[held].sum()
    at = min(int(np.searchsorted(share, QUANTILE)), int(held.sum()) - 1)
    value = float(sizes[held][order][at])
    least, most = np.clip(_within(probes, probes.zero), 0.0, 1.0)
    least = least if probes.ended else 0.0  # only then is a node at zero a null space
    levels = [null + (1 - null) * QUANTILE for null in (least, most)]
    low = _first(probes, lambda x: _within(probes, x)[1] >= levels[0])[0]
    high = _first(probes, lambda x: _within(probes, x)[0] >= levels[1])[1]
    return float(np.clip(value, low, high)), (low, high)


def _within(probes: Probes, x: float) -> tuple[float, float]:
    """Bounds of the share with |λ| ≤ x, at 95 %."""
    right, left = (probes.around(point, probes.steps).mean(0) for point in (x, -x))
    outside = float((np.abs(probes.outliers) <= x).sum()) / probes.size
    bounds = []
    for mass, sign in ((right[0] - left.sum(), -1), (right.sum() - left[0], 1)):
        inside = float(np.clip(mass, 0.0, 1.0))
        bounds.append(outside + probes.share * inside + sign * probes.error(inside, 0.0))
    return bounds[0], bounds[1]


def _first(probes: Probes, reached: Callable[[float], bool]) -> tuple[float, float]:
    """Around the least x with ``reached(x)``, which stays true above it."""
    low, high = np.log(probes.zero), np.log(4 * probes.scale)
    if reached(float(np.exp(low))):
        return 0.0, probes.zero
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if reached(float(np.exp(middle))):
            high = middle
        else:
            low = middle
    return float(np.exp(low)), float(np.exp(high))


# --- how many eigenvalues are negative ------------------------------------------------------------


@dataclass(frozen=True)
class NegativeShares:
    """Shares of all eigenvalues.

    A rule of s nodes does not see the sign of what lies nearer to zero than its nodes to each
    other. So two shares are reported: what is clearly below, at that resolution, with an interval
    that chance decides; and what is below zero, from what is clear plus a part, none to all, of
    what stays at zero.
    """

    negative: float
    negative_interval: Interval
    resolution: float  # τ: two spacings of the nodes around zero
    clear: float  # below −τ
    clear_interval: Interval


def negative_shares(probes: Probes, *, psd: bool) -> NegativeShares:
    """Both shares with their 95 % intervals."""
    if psd:
        return NegativeShares(0.0, (0.0, 0.0), probes.zero, 0.0, (0.0, 0.0))
    spacing = 0.0 if probes.ended else probes.spacing()
    if probes.few:  # so few nodes resolve no more than the spread they leave open
        spacing = max(spacing, float(np.abs(probes.betas[:, -1]).max()))
    resolution = max(_SPACINGS * spacing, probes.zero)
    negative, interval = _below_zero(probes, spacing)
    clear, clear_interval = _below(probes, -resolution)
    return NegativeShares(negative, interval, resolution, clear, clear_interval)


def _below(probes: Probes, point: float) -> tuple[float, Interval]:
    """Share below a point where the density is smooth at the rules' resolution."""
    fine, coarse = (probes.around(point, steps) for steps in (probes.steps, probes.fewer))
    middle = [float((rule[:, 0] + rule[:, 1] / 2).mean()) for rule in (fine, coarse)]
    error = probes.error(middle[0], middle[0] - middle[1])
    if probes.few:
        error += probes.share * float(fine[:, 1].mean()) / 2
    share = float((probes.outliers < point).sum()) / probes.size + probes.share * middle[0]
    return float(np.clip(share, 0, 1)), (max(share - error, 0.0), min(share + error, 1.0))


def _below_zero(probes: Probes, spacing: float) -> tuple[float, Interval]:
    """Share below zero: of w, the part that shrinks with the steps, as 1/s, is a smooth spectrum.

    Of that part a half lies below, or as much as the densities left and right of zero say: between
    the two. The part that stays, a null space or a peak too narrow to be split, lies below with
    none to all of it. So the interval holds in 95 % at the worst, and in more when the truth is
    inside the span of what cannot be told.
    """
    steps, fewer = probes.steps, probes.fewer
    fine, coarse = (probes.around(0.0, count) for count in (steps, fewer))
    wide, narrow = float(coarse[:, 1].mean()), float(fine[:, 1].mean())
    # w(s) = a + c/s at both: what is left as 1/s goes to nothing
    peak = (steps * narrow - fewer * wide) / (steps - fewer) if steps > fewer else narrow
    peak = float(np.clip(peak, 0.0, narrow)) if not probes.few else narrow
    ends = []
    for split in sorted((0.5, _left_of_zero(probes, spacing))):
        masses = [
            float((rule[:, 0] + np.maximum(rule[:, 1] - peak, 0.0) * split).mean())
            for rule in (fine, coarse)
        ]
        ends.append((masses[0], probes.error(masses[0], masses[0] - masses[1])))
    sure = float((probes.outliers < -probes.zero).sum()) / probes.size
    low = sure + probes.share * ends[0][0]
    high = sure + probes.share * (ends[1][0] + peak)
    middle = float(np.clip((low + high) / 2, 0, 1))
    return middle, (max(low - ends[0][1], 0.0), min(high + ends[1][1], 1.0))


def _left_of_zero(probes: Probes, spacing: float) -> float:
    """The density left of zero, of the sum of both sides, one to two spacings away."""
    if spacing == 0.0:
        return 0.5
    below = []
    for point in (-2 * spacing, -spacing, spacing, 2 * spacing):
        rule = probes.around(point, probes.steps)
        below.append(float((rule[:, 0] + rule[:, 1] / 2).mean()))
    left, right = max(below[1] - below[0], 0.0), max(below[3] - below[2], 0.0)
    return left / (left + right) if left + right > 0.0 else 0.5
