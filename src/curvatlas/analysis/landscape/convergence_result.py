"""What the analysis of convergence with the number of samples returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from curvatlas.figures.landscape import convergence_figure
from curvatlas.fits import Array, PowerLaw, power_law
from curvatlas.results import Result

# -------------------------------------------------------------------------------------------------
# Running means over random orders: how much one more sample changes them.
#
# For values v_i with weights c_i in a random order, V_k = Σ_{i≤k} c_i v_i / C_k and, exactly,
#
#     V_{k+1} − V_k = c_{k+1} (v_{k+1} − V_k) / C_{k+1}.
#
# This identity alone gives a slope of −1 in k for any values at all. So every curve here comes
# with
# the same curve of independent noise that has the values' mean, variance and skewness.
# -------------------------------------------------------------------------------------------------


Interval = tuple[float, float]
_PER_DECADE = 8
_FIRST = 10  # fits start here: below, single samples decide
_AT_ONCE = 1024  # samples whose vectors are in memory together


@dataclass(frozen=True, kw_only=True)
class Curve(Result):
    """A quantity against the number of samples, over random orders."""

    name: str
    k: Tensor  # (bins,) samples after the step, averaged over the bin as 1/k is
    mean: Tensor  # (bins,)
    low: Tensor  # (bins,) 95 % interval of the mean over orders
    high: Tensor  # (bins,)
    fit: PowerLaw | None  # None when there are too few bins beyond k = 10
    orders: int

    @property
    def value(self) -> float:
        """The fitted exponent (nan without a fit)."""
        return float("nan") if self.fit is None else self.fit.exponent

    @property
    def interval(self) -> Interval:
        return (float("nan"), float("nan")) if self.fit is None else self.fit.interval

    def __str__(self) -> str:
        return f"{self.name}: {'too short to fit' if self.fit is None else self.fit}"


@dataclass(frozen=True, kw_only=True)
class StableSize(Result):
    """The smallest k after which no single sample moves the quantity by more than a tolerance."""

    quantity: str
    tolerance: float  # absolute
    value: float | None  # median over orders; None: not reached within the data
    interval: tuple[float | None, float | None]  # 95 % of orders; None: beyond the data
    reached: float  # share of orders that reached it
    samples: int

    def __str__(self) -> str:
        if self.value is None:
            return (
                f"{self.quantity}: not stable to {self.tolerance:.3g} within {self.samples} samples"
            )
        low, high = self.interval
        upper = "beyond the data" if high is None else f"{high:.0f}"
        return (
            f"{self.quantity}: stable to {self.tolerance:.3g} from k = {self.value:.0f} "
            f"[{low:.0f}, {upper}] on"
        )


class Bins:
    """Logarithmic bins of k = 2 … n (samples after the step)."""

    def __init__(self, samples: int) -> None:
        edges = np.unique(
            np.round(np.geomspace(2, samples + 1, 2 + int(_PER_DECADE * np.log10(samples)))).astype(
                int
            )
        )
        self.edges = edges
        after = np.arange(2, samples + 1)
        self.place = np.searchsorted(edges, after, side="right") - 1  # bin of each k
        self.sizes = np.bincount(self.place, minlength=len(edges) - 1)
        self.centres: Array = self.sizes / np.bincount(self.place, 1 / after)

    def mean(self, series: Array) -> Array:
        """Mean of a series over k = 2 … n within each bin."""
        found: Array = np.bincount(self.place, series) / self.sizes
        return found


def random_orders(samples: int, count: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randperm(samples, generator=generator, device="cpu")


def differences(values: Tensor, counts: Tensor, order: Tensor) -> Tensor:
    """V_{k+1} − V_k for k = 1 … n − 1: values (n,) → (n − 1,)."""
    weights, ordered = counts[order], values[order]
    totals = weights.cumsum(0)
    running = (weights * ordered).cumsum(0) / totals
    return weights[1:] * (ordered[1:] - running[:-1]) / totals[1:]


def squared_steps(
    rows: Callable[[Tensor], Tensor], counts: Tensor, order: Tensor, weights: Tensor
) -> Array:
    """Σ_e ω_e (V_{k+1} − V_k)_e² for k = 1 … n − 1, of vectors V (e,).

    rows: sample numbers (m,) → their vectors (m, e); a slice of the order at a time, so that no
    array of all samples' vectors is made for any order.
    """
    found: Array = np.empty(len(order) - 1)
    sums, total = torch.zeros_like(weights), 0.0
    for start in range(0, len(order), _AT_ONCE):
        chosen = order[start : start + _AT_ONCE]
        own, vectors = counts[chosen], rows(chosen)
        totals = total + own.cumsum(0)
        weighted = own[:, None] * vectors
        running = sums + weighted.cumsum(0)
        before = torch.cat([sums[None], running[:-1]]) / (totals - own).clamp_min(1e-300)[:, None]
        steps = own[:, None] * (vectors - before) / totals[:, None]
        squares = (weights * steps**2).sum(1).numpy()
        first = 1 if start == 0 else 0  # the first sample is no step
        found[max(start - 1, 0) : start - 1 + len(chosen)] = squares[first:]
        sums, total = running[-1], float(totals[-1])
    return found


def curve(name: str, rows: Array, bins: Bins) -> Curve:
    """Mean over orders with intervals, and the power law with a goodness-of-fit test.

    rows: (orders, bins)
    """
    orders = len(rows)
    mean = rows.mean(0)
    error = rows.std(0, ddof=1) / np.sqrt(orders)
    half = stats.t.ppf(0.975, orders - 1) * error
    chosen = (bins.centres >= _FIRST) & (mean > 0) & (error > 0)
    fit = None
    if chosen.sum() >= 4:
        relative = (error / mean)[chosen]
        fit = power_law(bins.centres[chosen], mean[chosen], log_errors=relative, repeats=orders)
    return Curve(
        name=name,
        k=torch.from_numpy(bins.centres.copy()),
        mean=torch.from_numpy(mean),
        low=torch.from_numpy(np.maximum(mean - half, 0)),
        high=torch.from_numpy(mean + half),
        fit=fit,
        orders=orders,
    )


def stable_size(
    quantity: str, firsts: list[int | None], tolerance: float, samples: int
) -> StableSize:
    """From the k of each order (None: not reached): median and 95 % range over orders."""
    reached = [f for f in firsts if f is not None]
    ordered = np.sort([np.inf if f is None else float(f) for f in firsts])
    low, middle, high = (
        float(np.quantile(ordered, q, method="nearest")) for q in (0.025, 0.5, 0.975)
    )

    def finite(value: float) -> float | None:
        return value if np.isfinite(value) else None

    return StableSize(
        quantity=quantity,
        tolerance=tolerance,
        value=finite(middle),
        interval=(finite(low), finite(high)),
        reached=len(reached) / len(firsts),
        samples=samples,
    )


def first_stable(series: Array, tolerance: float) -> int | None:
    """Smallest k with every later step within tolerance; the last tenth must hold for a claim."""
    over = np.flatnonzero(series > tolerance)
    if not len(over):
        return 1
    last = int(over[-1]) + 2  # series[j] is the step from j + 1 to j + 2 samples
    return last if last <= 0.9 * (len(series) + 1) else None


def matched_noise(values: Tensor, seed: int) -> Callable[[], Tensor]:
    """Independent draws with the mean, variance and skewness of ``values`` (Pearson type III)."""
    random = np.random.default_rng(seed)
    array = values.numpy()
    mean, deviation = float(array.mean()), float(array.std())
    skew = float(stats.skew(array)) if deviation > 0 else 0.0
    size = len(array)

    def draw() -> Tensor:
        if deviation == 0:
            return torch.full((size,), mean, dtype=torch.float64)
        if abs(skew) < 1e-3:
            noise = random.standard_normal(size)
        else:
            shape = 4 / skew**2
            noise = np.sign(skew) * (random.gamma(shape, 1.0, size) - shape) / np.sqrt(shape)
        return torch.from_numpy(mean + deviation * noise)

    return draw


def matched_vectors(values: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    """Independent Gaussian rows with the mean and covariance of the rows of ``values`` (n, e).

    The function returned draws as many rows as it is given numbers of samples.
    """
    generator = torch.Generator().manual_seed(seed)
    mean = values.mean(0)
    covariance = values.T @ values / len(values) - mean[:, None] * mean  # (e, e)
    found = torch.linalg.eigh(covariance)
    factor = found.eigenvalues.clamp_min(0).sqrt()[:, None] * found.eigenvectors.T

    def draw(chosen: Tensor) -> Tensor:
        noise = torch.randn(
            len(chosen), len(factor), generator=generator, dtype=torch.float64, device="cpu"
        )
        drawn: Tensor = mean + noise @ factor
        return drawn

    return draw


def differ(first: Curve, second: Curve) -> dict[str, Any]:
    """Difference of two fitted exponents with its p-value."""
    if first.fit is None or second.fit is None:
        return {"difference": float("nan"), "p_value": float("nan")}
    errors = [(f.interval[1] - f.interval[0]) / 2 / 2.1 for f in (first.fit, second.fit)]
    gap = first.fit.exponent - second.fit.exponent
    spread = float(np.hypot(errors[0], errors[1]))
    return {"difference": gap, "p_value": float(2 * stats.norm.sf(abs(gap) / max(spread, 1e-12)))}


@dataclass(frozen=True, kw_only=True)
class Bounds(Result):
    """Theorem 7 at the k of the curves.

    printed: (2L + M‖Δ‖²)/k with M at w*; corrected: (L + 2γ‖Δ‖ + M‖Δ‖²)/k with the largest sample
    gradient γ and M on the segment. M is the largest Hessian norm among a few samples, those with
    the largest curvature: an estimate of the theorem's constant from below.
    """

    printed: Tensor  # (bins,)
    corrected: Tensor  # (bins,)
    largest_loss: float  # L
    largest_gradient: float  # γ
    hessian_at_optimum: float
    hessian_on_segment: float
    hessian_samples: int


@dataclass(frozen=True, kw_only=True)
class SpectrumAt(Result):
    """The spectrum of H_k against that of the largest k."""

    k: int
    wasserstein: float  # W1 to the spectrum of the most samples, in units of eigenvalues
    wasserstein_interval: Interval  # 95 %
    largest: float  # λmax of H_k
    negative_mass: float
    effective_rank: float
    step_norm: float | None  # ‖H_{k+1} − H_k‖₂ for one more sample
    step_norm_interval: Interval | None


@dataclass(frozen=True, kw_only=True)
class LandscapeConvergence(Result):
    """Loss and curvature differences against k, with bounds and null controls."""

    samples: int
    orders: int
    parameters: int
    displacement_norm: float
    difference: Curve  # |L_{k+1}(w) − L_k(w)|
    terms: dict[str, Curve]  # of the same at w*: value, gradient, curvature, rest
    null: Curve  # noise with the moments of the losses
    against_null: dict[str, float]  # difference of exponents and its p-value
    hessian: Curve  # ‖H_{k+1} − H_k‖_F
    hessian_null: Curve
    hessian_against_null: dict[str, float]
    heterogeneity: float  # root mean square of ‖h_i − H‖_F over ‖H‖_F
    probe_error: float  # relative standard error of the level of the Hessian curve
    stable_loss: StableSize
    stable_hessian: StableSize
    bounds: Bounds
    spectra: tuple[SpectrumAt, ...]
    products: int  # per-sample Hessian products

    @property
    def value(self) -> float:
        """Exponent of |L_{k+1} − L_k|."""
        return self.difference.value

    @property
    def interval(self) -> Interval:
        return self.difference.interval

    @property
    def verdict(self) -> str:
        """Whether the slope says anything that noise does not."""
        p = self.against_null["p_value"]
        if p != p:
            return "too few samples to fit an exponent"
        if p > 0.01:
            return (
                "the slope is that of independent noise with the same moments "
                f"(difference {self.against_null['difference']:+.3f}, p = {p:.2g}): it follows "
                "from averaging and is no evidence about curvature"
            )
        return (
            f"the slope differs from that of independent noise by "
            f"{self.against_null['difference']:+.3f} (p = {p:.1g})"
        )

    def __str__(self) -> str:
        shares = ", ".join(
            f"{name} {float(c.mean[-1] / self.difference.mean[-1].clamp_min(1e-300)):.2g}"
            for name, c in self.terms.items()
        )
        lines = [
            f"{self.samples} samples, {self.orders} random orders, {self.parameters} parameters, "
            f"‖w − w*‖ = {self.displacement_norm:.3g}",
            f"|L(k+1) − L(k)| {self.difference.fit}",
            f"  noise alone    {self.null.fit}",
            f"  {self.verdict}",
            f"  terms relative to it at the largest k: {shares}",
            f"‖H(k+1) − H(k)‖_F {self.hessian.fit}",
            f"  noise alone       {self.hessian_null.fit}",
            f"  samples differ from the mean Hessian by {self.heterogeneity:.3g} of its norm "
            f"(probes ± {self.probe_error:.1%})",
            str(self.stable_loss),
            str(self.stable_hessian),
        ]
        return "\n".join(lines)

    def plot(self) -> Any:
        """Losses with bounds and control, the decomposition, Hessians with control, spectra."""
        return convergence_figure(self)
