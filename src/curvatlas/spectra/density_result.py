"""What ``spectral_density`` returns, and how its intervals are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.results import Result
from curvatlas.spectra.density_negative import negative_shares
from curvatlas.spectra.density_small import QUANTILE, small_magnitude
from curvatlas.spectra.estimate import Interval
from curvatlas.spectra.krylov import Array
from curvatlas.spectra.probe_brackets import FEWEST_STEPS, Probes, zero_of
from curvatlas.spectra.quadrature import rule, wasserstein
from curvatlas.spectra.smoothing import smooth

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
        low, high = self.negative_mass_interval
        clear = f"{self.clear_negative_mass:.1%} clearly, below {-self.resolution:.2g}"
        first, last = self.effective_rank_interval
        kind = "exact" if self.exact else f"W1 error ≤ {self.wasserstein_error:.2g} at 95 %"
        return (
            f"spectrum of {self.size} eigenvalues in [{float(self.nodes[0]):.4g}, "
            f"{float(self.nodes[-1]):.4g}], mean {self.mean:.3g}; "
            f"negative {self.negative_mass:.1%} [{low:.1%}, {high:.1%}] ({clear}); "
            f"effective rank {self.effective_rank:.3g} [{first:.3g}, {last:.3g}]; "
            f"{kind}, {self.products} products" + ("" if self.converged else ", NOT converged")
        )

    def plot(self) -> Any:
        """Density on a symmetric logarithmic axis: bulk and outliers in one picture."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3.8), layout="constrained")
        axes = figure.add_subplot()
        typical = max(float((self.weights * self.nodes.abs()).sum()), 1e-300)
        # per unit of the drawn axis, so that areas in the picture are shares of eigenvalues
        drawn = self.density * torch.sqrt(self.grid**2 + typical**2)
        axes.fill_between(self.grid.tolist(), drawn.tolist(), alpha=0.4)
        axes.set_xscale("symlog", linthresh=typical)
        axes.set_yscale("log")
        top = float(drawn.max())
        axes.set_ylim(top / (20.0 * self.size), 2 * top)
        axes.axvline(0.0, color="0.6", linewidth=0.8)
        axes.set(xlabel="eigenvalue", ylabel="density", title=f"{self.size} eigenvalues")
        return figure


def exact_density(values: Tensor, products: int, *, psd: bool) -> SpectralDensity:
    """The density of known eigenvalues."""
    nodes = values.double().numpy()
    n = len(nodes)
    floor = zero_of(nodes, np.finfo(np.float64).eps)
    negative = 0.0 if psd else float((nodes < -floor).mean())
    largest = np.abs(nodes).max()
    relative = np.abs(nodes) / largest if largest > 0 else nodes
    rank = float(relative.sum() ** 2 / (relative**2).sum()) if largest > 0 else 0.0
    weights = np.full(n, 1.0 / n)
    held = np.sort(np.abs(nodes)[np.abs(nodes) > floor])
    small = float(held[max(math.ceil(QUANTILE * len(held)) - 1, 0)]) if len(held) else 0.0
    grid, density = smooth(nodes, [], n)
    return SpectralDensity(
        nodes=torch.from_numpy(nodes.copy()), weights=torch.from_numpy(weights),
        grid=torch.from_numpy(grid), density=torch.from_numpy(density),
        negative_mass=negative, negative_mass_interval=(negative, negative), resolution=floor,
        clear_negative_mass=negative, clear_negative_mass_interval=(negative, negative),
        small_magnitude=small, small_magnitude_interval=(small, small),
        effective_rank=rank, effective_rank_interval=(rank * (1 - 1e-12), rank * (1 + 1e-12)),
        mean=float(nodes.mean()), wasserstein_error=float(64 * 2e-16 * np.abs(nodes).max()),
        size=n, products=products, converged=True, exact=True,
    )  # fmt: skip


def summarise(
    *, size: int, outliers: Array, coupling: float, alphas: Array, betas: Array, eps: float,
    products: int, psd: bool,
) -> SpectralDensity:  # fmt: skip
    """Put outliers (j,) and probe recurrences (m, s) together."""
    m = len(alphas)
    share = (size - len(outliers)) / size
    scale = max(float(np.abs(outliers).max(initial=0.0)), float(np.abs(alphas).max()))
    rules = _rules(alphas, betas, scale, eps, size)
    nodes = np.concatenate([outliers, *(x for x, _ in rules)])
    weights = np.concatenate([np.full(len(outliers), 1 / size), *(w * share / m for _, w in rules)])
    order = np.argsort(nodes, kind="stable")
    nodes, weights = nodes[order], weights[order] / weights.sum()
    grid, density = smooth(outliers, rules, size)
    fewer = max(alphas.shape[1] - max(alphas.shape[1] // 4, 1), 1)  # how far the rules still move
    coarse = _rules(alphas[:, :fewer], betas[:, :fewer], scale, eps, size)
    resolution = share * wasserstein(*_mean_rule(rules), *_mean_rule(coarse))
    few = alphas.shape[1] < FEWEST_STEPS
    if few:  # a rule of so few nodes says nothing of its own error: β is the spread it leaves open
        resolution += share * float(np.abs(betas[:, -1]).mean())
    scatter = share * _scatter(rules)
    probes = Probes(size, outliers, alphas, betas, scale, eps)
    negative = negative_shares(probes, psd=psd)
    small, small_interval = small_magnitude(probes, nodes, weights)
    rank, rank_interval = _effective_rank(size, outliers, rules, coarse)
    if few:
        rank_interval = (min(rank, 1.0), float(size))
    return SpectralDensity(
        nodes=torch.from_numpy(nodes), weights=torch.from_numpy(weights),
        grid=torch.from_numpy(grid), density=torch.from_numpy(density),
        negative_mass=negative.negative, negative_mass_interval=negative.negative_interval,
        resolution=negative.resolution, clear_negative_mass=negative.clear,
        clear_negative_mass_interval=negative.clear_interval,
        small_magnitude=small, small_magnitude_interval=small_interval,
        effective_rank=rank, effective_rank_interval=rank_interval,
        mean=float(nodes @ weights),
        wasserstein_error=resolution + scatter + 2 * coupling / size + 64 * eps * scale,
        size=size, products=products, converged=m > 1 and not few, exact=False,
    )  # fmt: skip


Rule = tuple[Array, Array]


def _rules(alphas: Array, betas: Array, scale: float, eps: float, size: int) -> list[Rule]:
    """The rule of every probe."""
    return [rule(a, b, scale, eps, size) for a, b in zip(alphas, betas, strict=True)]


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
    return _quantile(m) * float(spread[:-1] @ np.diff(points))


def _distribution(part: Rule, points: Array) -> Array:
    nodes, weights = part
    total = np.concatenate([[0.0], np.cumsum(weights)])
    result: Array = total[np.searchsorted(nodes, points, side="right")]
    return result


def _effective_rank(
    size: int, outliers: Array, rules: list[Rule], coarse: list[Rule]
) -> tuple[float, Interval]:
    """n (Σ w|θ|)² / Σ wθ², with the chance of the probes and the resolution of their rules."""

    def rank(some: list[Rule]) -> float:
        nodes, weights = _mean_rule(some)
        rest = size - len(outliers)
        magnitude = np.abs(outliers).sum() + rest * float(weights @ np.abs(nodes))
        square = (outliers**2).sum() + rest * float(weights @ nodes**2)
        return float(magnitude**2 / square) if square > 0 else 0.0

    value, m, rest = rank(rules), len(rules), size - len(outliers)
    if m < 2 or value == 0.0:
        return value, (min(value, 1.0), float(size))
    nodes, weights = _mean_rule(rules)
    magnitude = np.abs(outliers).sum() + rest * float(weights @ np.abs(nodes))
    square = (outliers**2).sum() + rest * float(weights @ nodes**2)
    # To first order log rank is the integral of this function, and a probe's integral of any
    # function has the variance 2/(d + 2) times that of the function over the spectrum.
    slope = 2 * rest * np.abs(nodes) / magnitude - rest * nodes**2 / square
    scatter = 2 / (rest + 2) / m * max(float(weights @ slope**2 - (weights @ slope) ** 2), 0.0)
    # |θ| is not a polynomial: the rules are biased where the spectrum crosses zero, by about 1/s²,
    # so that the last quarter of the steps moved them by 0.8 of what is left.
    bias = 1.3 * (value - rank(coarse))
    error = float(np.hypot(_NORMAL * np.sqrt(scatter) * value, bias)) + 1e-9 * value
    return value, (max(value - error, 0.0), min(value + error, float(size)))


def _quantile(m: int) -> float:
    return float(student.ppf(0.975, m - 1))
