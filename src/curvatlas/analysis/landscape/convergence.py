r"""How the loss landscape settles as samples are added, with the control that tells what it means.

>>> found = landscape_convergence(problem)                                        # doctest: +SKIP
>>> print(found)                                                                  # doctest: +SKIP

At fixed weights L_{k+1} − L_k = (ℓ_{k+1} − L_k)/(k+1): a slope of −1 is arithmetic. What is about
curvature is the size of the differences of Hessians, how it compares with the Hessian itself, and
from which k on the landscape is stable to a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from curvatlas.analysis.landscape.line import Displacement, flat_displacement
from curvatlas.fits import Array, PowerLaw, power_law
from curvatlas.linear_operator import LinearOperator, Tags
from curvatlas.operators.curvature import Hessian
from curvatlas.operators.per_sample import (
    SampleQuantities,
    sample_losses,
    sample_quantities,
    subset,
    weighted_losses,
)
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Interval, Result
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.norms import spectral_norm
from curvatlas.spectra.summary import compare_densities

_PER_DECADE = 8
FIRST = 10  # fits start here: below, single samples decide
FEWEST_SIZES = 4  # numbers of samples that a fit with an interval takes
_AT_ONCE = 1024  # samples whose vectors are in memory together
_SHARE = 0.05  # of ‖θ‖: length of the default displacement
_BOUND_SAMPLES = 6  # whose Hessian norms are computed for M


# --- what is returned -----------------------------------------------------------------------------


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
    """Loss and curvature differences against k, with bounds and null controls.

    What takes derivatives is None where only losses were asked for (``curvature=False``).
    """

    samples: int
    orders: int
    parameters: int
    displacement_norm: float
    difference: Curve  # |L_{k+1}(w) − L_k(w)|
    terms: dict[str, Curve]  # of the same at w*: value, gradient, curvature, rest
    null: Curve  # noise with the moments of the losses
    against_null: dict[str, float]  # difference of exponents and its p-value
    hessian: Curve | None  # ‖H_{k+1} − H_k‖_F
    hessian_null: Curve | None
    hessian_against_null: dict[str, float] | None
    heterogeneity: float | None  # root mean square of ‖h_i − H‖_F over ‖H‖_F
    probe_error: float | None  # relative standard error of the level of the Hessian curve
    stable_loss: StableSize
    stable_hessian: StableSize | None
    bounds: Bounds | None
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

    def _rows(self) -> list[dict[str, Any]]:
        """A row a curve and number of samples."""
        curves = {"change of the loss": self.difference, "noise control": self.null, **self.terms}
        more = {"change of the Hessian": self.hessian, "control of it": self.hessian_null}
        curves |= {name: curve for name, curve in more.items() if curve is not None}
        return [{"curve": name, **row} for name, c in curves.items() for row in c._rows()]

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
            str(self.stable_loss),
        ]
        if self.hessian is not None and self.hessian_null is not None:
            lines += [
                f"‖H(k+1) − H(k)‖_F {self.hessian.fit}",
                f"  noise alone       {self.hessian_null.fit}",
                f"  samples differ from the mean Hessian by {self.heterogeneity:.3g} of its norm "
                f"(probes ± {self.probe_error:.1%})",
                str(self.stable_hessian),
            ]
        return "\n".join(lines)


# --- the analysis ---------------------------------------------------------------------------------


def landscape_convergence(
    problem: Problem,
    *,
    displacement: Displacement | None = None,
    orders: int = 40,
    limit: int | None = None,
    outliers: int = 4,
    probes: int = 6,
    tolerance: float = 1e-3,
    curvature_tolerance: float = 1e-2,
    spectra: int = 4,
    spectrum_samples: int = 1024,
    curvature: bool = True,
    seed: int = 0,
) -> LandscapeConvergence:
    """Loss and curvature differences against the number of samples k, over random orders.

    displacement: from w* (the present weights) to the w at which losses are compared (default: a
        random direction, 5 % of ‖θ‖ long).
    limit: most samples;  orders: random orders of them.
    outliers, probes: ‖H_{k+1} − H_k‖_F is exact on the ``outliers`` top eigenvectors and sampled by
        ``probes`` vectors on the rest; each sample costs outliers + probes + 1 Hessian products.
    tolerance, curvature_tolerance: relative to L_n and ‖H_n‖_F, for the smallest stable k.
    spectra: sizes k (up to ``spectrum_samples``) whose spectra are compared with the last one.
    curvature: False takes two forward passes a sample and nothing else: losses at w and at w*, for
        k in the hundred thousands. Their difference then is one term, not three.
    """
    if not isinstance(problem, Problem):
        raise TypeError(
            f"landscape_convergence takes a Problem, got a {type(problem).__name__}: "
            "ca.Problem(model, loss, data)."
        )
    if orders < 5 or outliers < 0 or probes < 2:
        raise ValueError("need orders ≥ 5, outliers ≥ 0 and probes ≥ 2.")
    move = _displacement(problem, displacement, seed)
    if not curvature:
        return _of_losses(problem, move, orders, limit, tolerance, seed)
    directions = _directions(problem, move, outliers, probes, spectrum_samples, seed)
    quantities = sample_quantities(problem, directions, limit=limit)
    samples = _enough(len(quantities.losses))
    there = sample_losses(moved(problem, 1.0, move), limit=samples)
    terms = {
        "difference": there,
        "value": quantities.losses,
        "gradient": quantities.slopes[:, -1],
        "curvature": quantities.curvatures[:, -1, -1] / 2,
    }
    terms["rest"] = there - terms["value"] - terms["gradient"] - terms["curvature"]
    bins = Bins(samples)
    losses, stable_loss = _loss_curves(terms, quantities.counts, bins, orders, tolerance, seed)
    hessian, stable_hessian, ratio, probe_error = _hessian_curves(
        quantities, outliers, probes, bins, orders, curvature_tolerance, seed
    )
    return LandscapeConvergence(
        samples=samples,
        orders=orders,
        parameters=problem.size,
        displacement_norm=float(move.norm()),
        difference=losses["difference"],
        terms={name: losses[name] for name in ("value", "gradient", "curvature", "rest")},
        null=losses["null"],
        against_null=differ(losses["difference"], losses["null"]),
        hessian=hessian[0],
        hessian_null=hessian[1],
        hessian_against_null=differ(*hessian),
        heterogeneity=ratio,
        probe_error=probe_error,
        stable_loss=stable_loss,
        stable_hessian=stable_hessian,
        bounds=_bounds(problem, move, quantities, bins),
        spectra=_spectra(problem, min(samples, spectrum_samples), spectra, seed),
        products=samples * directions.shape[1],
    )


def _enough(samples: int) -> int:
    if samples < 20:
        raise ValueError(f"convergence with k needs at least 20 samples, got {samples}.")
    return samples


def _of_losses(
    problem: Problem, move: Tensor, orders: int, limit: int | None, tolerance: float, seed: int
) -> LandscapeConvergence:
    """The part of the analysis that takes no derivative."""
    counts, here = weighted_losses(problem, limit=limit)
    samples = _enough(len(here))
    there = sample_losses(moved(problem, 1.0, move), limit=samples)
    terms = {"difference": there, "value": here, "rest": there - here}
    losses, stable = _loss_curves(terms, counts, Bins(samples), orders, tolerance, seed)
    return LandscapeConvergence(
        samples=samples,
        orders=orders,
        parameters=problem.size,
        displacement_norm=float(move.norm()),
        difference=losses["difference"],
        terms={name: losses[name] for name in ("value", "rest")},
        null=losses["null"],
        against_null=differ(losses["difference"], losses["null"]),
        hessian=None,
        hessian_null=None,
        hessian_against_null=None,
        heterogeneity=None,
        probe_error=None,
        stable_loss=stable,
        stable_hessian=None,
        bounds=None,
        spectra=(),
        products=0,
    )


def _displacement(problem: Problem, displacement: Displacement | None, seed: int) -> Tensor:
    if displacement is not None:
        return flat_displacement(problem, displacement)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(problem.size, generator=generator, dtype=torch.float64, device="cpu")
    drawn = drawn.to(problem.parameters)
    scaled: Tensor = _SHARE * drawn / drawn.norm() * problem.parameters.norm()
    return scaled


def _directions(
    problem: Problem, move: Tensor, outliers: int, probes: int, most: int, seed: int
) -> Tensor:
    """Columns (P, outliers + probes + 1): top eigenvectors, Gaussian probes beyond, the move."""
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = torch.randn(
        problem.size, probes, generator=generator, dtype=torch.float64, device="cpu"
    ).to(move)
    columns = [drawn, move[:, None]]
    if outliers:
        # any orthonormal columns give an unbiased norm: a rough basis from some samples will do
        some = subset(problem, torch.arange(min(most, 256)))
        top = eigenpairs(Hessian(some), k=outliers, which="magnitude", tol=1e-2, seed=seed).vectors
        columns = [top, drawn - top @ (top.T @ drawn), move[:, None]]
    return torch.cat(columns, dim=1)


def moved(problem: Problem, share: float, move: Tensor) -> Problem:
    """The problem with its weights moved by share · move; the user's model stays as it is."""
    model = problem.copied_model()
    named = dict(model.named_parameters())
    with torch.no_grad():
        pieces = problem.layout.split(move)
        for name, piece in zip(problem.layout.names, pieces, strict=True):
            named[name].add_(piece.squeeze(0), alpha=share)
    return problem.with_model(model)


def _loss_curves(
    terms: dict[str, Tensor], counts: Tensor, bins: Bins, orders: int, tolerance: float, seed: int
) -> tuple[dict[str, Curve], StableSize]:
    samples = len(counts)
    rows: dict[str, list[Array]] = {name: [] for name in (*terms, "null")}
    draw = matched_noise(terms["difference"], seed + 2)
    level = tolerance * abs(float((counts * terms["difference"]).sum() / counts.sum()))
    firsts: list[int | None] = []
    for order in random_orders(samples, orders, seed):
        for name, values in terms.items():
            series = differences(values, counts, order).abs().numpy()
            rows[name].append(bins.mean(series))
            if name == "difference":
                firsts.append(first_stable(series, level))
        rows["null"].append(bins.mean(differences(draw(), counts, order).abs().numpy()))
    curves = {
        name: curve(name, np.stack(over_orders), bins.centres) for name, over_orders in rows.items()
    }
    return curves, stable_size("loss", firsts, level, samples)


def _hessian_curves(
    quantities: SampleQuantities,
    outliers: int,
    probes: int,
    bins: Bins,
    orders: int,
    tolerance: float,
    seed: int,
) -> tuple[tuple[Curve, Curve], StableSize, float, float]:
    """‖H_{k+1} − H_k‖_F (root mean square over a bin) for the samples and for noise like them."""
    width = outliers + probes
    upper = torch.triu_indices(width, width)
    sketches = quantities.curvatures[:, upper[0], upper[1]]  # (n, e): a kilobyte a sample stays
    weights = _square_weights(upper, outliers, probes)
    counts = quantities.counts
    mean = (counts[:, None] * sketches).sum(0) / counts.sum()
    norm = float((weights * mean**2).sum().clamp_min(0).sqrt())
    spread = (sketches**2).mean(0) - 2 * mean * sketches.mean(0) + mean**2  # about the mean Hessian
    deviation = float((weights * spread).sum().clamp_min(0).sqrt())
    rows: tuple[list[Array], list[Array]] = ([], [])
    draw = matched_vectors(sketches, seed + 3)
    firsts: list[int | None] = []
    for order in track(random_orders(len(counts), orders, seed), "orders", total=orders):
        for place, vectors in enumerate((sketches.__getitem__, draw)):
            square = squared_steps(vectors, counts, order, weights)
            rows[place].append(np.sqrt(bins.mean(square)))
            if place == 0:
                firsts.append(first_stable(np.sqrt(square), tolerance * norm))
    names = ("‖H(k+1) − H(k)‖_F", "noise with the same moments")
    real, null = (curve(n, np.stack(r), bins.centres) for n, r in zip(names, rows, strict=True))
    stable = stable_size("Hessian", firsts, tolerance * norm, len(counts))
    error = _probe_error(spread, upper, outliers, probes)
    return (real, null), stable, deviation / max(norm, 1e-300), error


def _square_weights(upper: Tensor, outliers: int, probes: int) -> Tensor:
    r"""ω with ‖A‖_F² ≈ Σ_e ω_e s_e² over the entries s of WᵀAW, W = [V, QZ], Q = I − VVᵀ.

    ‖A‖_F² = ‖VᵀAV‖² + 2‖QAV‖² + ‖QAQ‖²; the second by Gaussian z on one side, the third by pairs of
    different z on both: each unbiased.
    """
    rows, columns = upper
    weights = torch.zeros(rows.numel(), dtype=torch.float64)
    inside = columns < outliers
    weights[inside] = torch.where(rows[inside] == columns[inside], 1.0, 2.0).double()
    weights[(rows < outliers) & (columns >= outliers)] = 2.0 / probes
    pair = (rows >= outliers) & (columns > rows)
    weights[pair] = 2.0 / (probes * (probes - 1))
    return weights


def _probe_error(squares: Tensor, upper: Tensor, outliers: int, probes: int) -> float:
    """Relative standard error of the level of ‖h_i − H‖_F that the probes cause (jackknife).

    squares: (e,) mean squares of the entries of Wᵀ(h_i − H)W over samples.
    """
    if probes < 3:
        return float("nan")
    rows, columns = upper
    levels = []
    for left_out in range(outliers, outliers + probes):
        keep = (rows != left_out) & (columns != left_out)
        names = torch.stack([rows[keep], columns[keep]])
        # the entries that remain are those of a sketch with one probe fewer
        names = names - (names > left_out).long()
        weights = _square_weights(names, outliers, probes - 1)
        levels.append(float((weights * squares[keep]).sum().clamp_min(0).sqrt()))
    array = np.array(levels)
    spread = np.sqrt((probes - 1) / probes * ((array - array.mean()) ** 2).sum())
    return float(spread / max(array.mean(), 1e-300))


def _bounds(problem: Problem, move: Tensor, quantities: SampleQuantities, bins: Bins) -> Bounds:
    """Theorem 7 as printed and as corrected, with M from the samples with the largest curvature."""
    strongest = (
        quantities.curvatures.flatten(1)
        .norm(dim=1)
        .topk(min(_BOUND_SAMPLES, len(quantities.losses)))
    )
    norms = []
    for share in (0.0, 0.5, 1.0):
        there = problem if share == 0 else moved(problem, share, move)
        norms.append(
            max(
                spectral_norm(
                    Hessian(subset(there, index[None]), checks=False), rtol=0.02, max_products=40
                ).value
                for index in strongest.indices
            )
        )
    largest, length = float(quantities.losses.max()), float(move.norm())
    gradient = float(quantities.gradient_norms.max())
    k = bins.centres
    return Bounds(
        printed=torch.from_numpy((2 * largest + norms[0] * length**2) / k),
        corrected=torch.from_numpy((largest + 2 * gradient * length + max(norms) * length**2) / k),
        largest_loss=largest,
        largest_gradient=gradient,
        hessian_at_optimum=norms[0],
        hessian_on_segment=max(norms),
        hessian_samples=len(strongest.indices),
    )


class _OneMore(LinearOperator):
    """H_{k+1} − H_k = (h_{k+1} − H_k) c_{k+1}/C_{k+1}."""

    def __init__(self, before: Hessian, sample: Hessian) -> None:
        super().__init__(
            before.shape, dtype=before.dtype, device=before.device, tags=Tags(symmetric=True)
        )
        counts = before.problem.total_count, sample.problem.total_count
        self._share = counts[1] / sum(counts)
        self._before, self._sample = before, sample

    def _columns(self, columns: Tensor) -> Tensor:
        image: Tensor = self._share * (self._sample @ columns - self._before @ columns)
        return image


def _spectra(problem: Problem, most: int, count: int, seed: int) -> tuple[SpectrumAt, ...]:
    """Distance to the spectrum of ``most`` samples, and ‖H_{k+1} − H_k‖₂, at a few k."""
    if count < 1 or most < 16:
        return ()
    sizes = [most // 2**j for j in range(count + 1) if most // 2**j >= 4]
    order = torch.randperm(most, generator=torch.Generator().manual_seed(seed), device="cpu")
    reference, rows = None, []
    for size in track(sizes, "spectra", total=len(sizes)):
        operator = Hessian(subset(problem, order[:size]))
        density = spectral_density(operator, max_products=64, seed=seed)
        top = eigenpairs(operator, k=1, which="largest", tol=1e-3, seed=seed)
        reference = reference or density
        apart = compare_densities(density, reference)
        step = None
        if size < most:
            one = Hessian(subset(problem, order[size : size + 1]), checks=False)
            step = spectral_norm(_OneMore(operator, one), rtol=0.05, seed=seed, max_products=60)
        rows.append(
            SpectrumAt(
                k=size,
                wasserstein=apart.wasserstein,
                wasserstein_interval=apart.interval,
                largest=top.value,
                negative_mass=density.negative_mass,
                effective_rank=density.effective_rank,
                step_norm=None if step is None else step.value,
                step_norm_interval=None if step is None else step.interval,
            )
        )
    return tuple(reversed(rows))


# --- running means over random orders: how much one more sample changes them ----------------------
#
#     V_k = Σ_{i≤k} c_i v_i / C_k,   V_{k+1} − V_k = c_{k+1} (v_{k+1} − V_k) / C_{k+1}
#
# for values v_i with weights c_i. This identity alone gives a slope of −1 in k for any values at
# all, so every curve comes with that of independent noise of the same mean, variance and skewness.


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
        means: Array = np.bincount(self.place, series) / self.sizes
        return means


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
    squares_of_all: Array = np.empty(len(order) - 1)
    sums, total = torch.zeros_like(weights), 0.0
    for start in range(0, len(order), _AT_ONCE):
        chosen = order[start : start + _AT_ONCE]
        shares, vectors = counts[chosen], rows(chosen)
        totals = total + shares.cumsum(0)
        weighted = shares[:, None] * vectors
        running = sums + weighted.cumsum(0)
        before = (
            torch.cat([sums[None], running[:-1]]) / (totals - shares).clamp_min(1e-300)[:, None]
        )
        steps = shares[:, None] * (vectors - before) / totals[:, None]
        squares = (weights * steps**2).sum(1).numpy()
        first = 1 if start == 0 else 0  # the first sample is no step
        squares_of_all[max(start - 1, 0) : start - 1 + len(chosen)] = squares[first:]
        sums, total = running[-1], float(totals[-1])
    return squares_of_all


def curve(name: str, rows: Array, k: Array) -> Curve:
    """Mean over orders with intervals, and the power law with a goodness-of-fit test.

    rows: (orders, bins) at the numbers of samples k (bins,)
    """
    orders = len(rows)
    mean = rows.mean(0)
    error = rows.std(0, ddof=1) / np.sqrt(orders)
    half = stats.t.ppf(0.975, orders - 1) * error
    chosen = (k >= FIRST) & (mean > 0) & (error > 0)
    fit = None
    if chosen.sum() >= FEWEST_SIZES:
        relative = (error / mean)[chosen]
        fit = power_law(k[chosen], mean[chosen], log_errors=relative, repeats=orders)
    return Curve(
        name=name,
        k=torch.from_numpy(k.astype(np.float64)),
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
    spectrum = torch.linalg.eigh(covariance)
    factor = spectrum.eigenvalues.clamp_min(0).sqrt()[:, None] * spectrum.eigenvectors.T

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
