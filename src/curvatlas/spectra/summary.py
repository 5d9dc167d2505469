r"""The numbers people quote about a spectrum, each with its definition.

sharpness              λ_max
critical learning rate 2 / λ_max, above which gradient descent on the quadratic model diverges
spectral gap           λ_1 − λ_2
stable rank            ‖A‖_F² / ‖A‖₂²
effective rank         (Σ|λ|)² / Σλ²
negative mass          share of eigenvalues below zero
condition number       λ_max / mean|λ|: how far the sharpest direction stands above the others
quantile condition     max|λ| / q, q the ``quantile`` of |λ| over the non-null part; exact: the
                       smallest |λ| there. Null: |λ| ≤ 100 eps max|λ|
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvatlas.anatomy import Anatomy
from curvatlas.linear_operator import LinearOperator
from curvatlas.results import Number, Result
from curvatlas.spectra.checkpoint import generator
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.density_result import QUANTILE, SpectralDensity
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.estimate import Estimate, Interval
from curvatlas.spectra.krylov import Array
from curvatlas.spectra.norms import frobenius_norm
from curvatlas.spectra.quadrature import wasserstein
from curvatlas.spectra.requirements import require_symmetric
from curvatlas.spectra.trace import trace
from curvatlas.spectra.vectors import VectorSpace

_AT_ONCE = 16  # directions multiplied together


def flat_directions(op: LinearOperator, norm: float) -> tuple[tuple[str, ...], int]:
    """Slices of an operator's parameters along which it is exactly zero, and the products it took.

    A key bias shifts all logits of a row alike and softmax does not see it; a shift of all class
    logits is invisible to cross-entropy; a shift of everything a LayerNorm reads is removed by it.
    Each slice of the anatomy is tested with two directions v: a random one in it (is all of it
    flat?) and one that adds the same random row to all its output features (is its output shift
    flat?). v is flat if ‖A v‖ ≤ 100 eps ‖A‖: since v is random in its space, the whole space is
    then flat with probability one. Nothing for operators without a ``problem``.
    """
    problem = getattr(op, "problem", None)
    if problem is None or op.shape[0] != problem.size:
        return (), 0
    space, tested = VectorSpace.of(op), 0
    flat: dict[str, str] = {}  # name of the slice → what of it is flat
    candidates = _candidates(problem.anatomy)
    while group := list(islice(candidates, _AT_ONCE)):
        columns = torch.zeros(space.length, len(group), dtype=op.dtype, device=op.device)
        for i, (piece, _, direction) in enumerate(group):
            unit = direction / direction.norm()
            here, places = space.places(torch.as_tensor(piece.indices, device="cpu"))
            columns[places, i] = unit[here].to(op.device, op.dtype)
        sizes = space.norms(space.times(op, columns))
        tested += len(group)
        for (piece, described, _), size in zip(group, sizes.tolist(), strict=True):
            if size <= 100 * torch.finfo(op.dtype).eps * norm:
                flat.setdefault(piece.name, described)
    return tuple(flat.values()), tested


def _candidates(anatomy: Anatomy) -> Iterator[tuple[Any, str, Tensor]]:
    """(slice, what is tested of it, the direction in it), drawn when its turn comes."""
    random = generator(0)
    for piece in anatomy:
        draw = torch.randn(piece.size, generator=random, dtype=torch.float64, device="cpu")
        yield piece, piece.name, draw
        outputs = piece.shape[-1] if piece.transposed else piece.shape[0]
        inputs = piece.size // outputs
        if outputs > 1:
            row = torch.randn(inputs, generator=random, dtype=torch.float64, device="cpu")
            same = row.expand(outputs, inputs)
            same = same.T if piece.transposed else same
            yield piece, f"{piece.name} (output shift)", same.reshape(-1)


@dataclass(frozen=True, kw_only=True)
class Participation(Result):
    """Mass m_r = Σ_{i ∈ r} v_i² of k eigenvectors v in every group r of parameters.

    The participation ratio 1 / Σ_r m_r² is 1 for a single group, and their number for all evenly.
    """

    groups: tuple[str, ...]
    mass: Tensor  # (k, groups), rows sum to one
    ratio: Tensor  # (k,) over groups
    entries: Tensor  # (k,) over single entries, 1 / Σ v⁴

    def __str__(self) -> str:
        lines = []
        for i, row in enumerate(self.mass):
            top = row.argsort(descending=True)[:3].tolist()
            named = ", ".join(f"{self.groups[j]} {float(row[j]):.0%}" for j in top)
            lines.append(f"v{i + 1}: {float(self.ratio[i]):.2g} groups ({named})")
        return "\n".join(lines)


def participation(
    vectors: Tensor, anatomy: Anatomy, *, by: Literal["role", "sublayer", "layer", "slice"] = "role"
) -> Participation:
    """vectors: (n,) or (n, k) columns of the whole flat vector."""
    if by not in ("role", "sublayer", "layer", "slice"):
        raise ValueError(f'by must be "role", "sublayer", "layer" or "slice", got {by!r}.')
    columns = (vectors.unsqueeze(-1) if vectors.ndim == 1 else vectors).detach().cpu().double()
    if columns.shape[0] != anatomy.size:
        raise ValueError(f"vectors have {columns.shape[0]} rows, the anatomy {anatomy.size}.")
    squares = columns.pow(2)
    squares = squares / squares.sum(0)
    masses: dict[str, Tensor] = {}
    for piece in anatomy:
        key = piece.name if by == "slice" else str(getattr(piece, by))
        part = squares[torch.as_tensor(piece.indices, device="cpu")].sum(0)
        masses[key] = masses[key] + part if key in masses else part
    mass = torch.stack(list(masses.values()), 1)
    return Participation(
        groups=tuple(masses),
        mass=mass,
        ratio=1 / mass.pow(2).sum(1),
        entries=1 / squares.pow(2).sum(0),
    )


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
        return (
            f"W1 = {Number(self.wasserstein, *self.interval)}, "
            f"Jensen-Shannon = {self.jensen_shannon:.3g} nats (scale: {self.scale})"
        )


def compare_densities(
    first: SpectralDensity,
    second: SpectralDensity,
    *,
    scale: Literal["none", "largest"] = "none",
) -> DensityComparison:
    """Wasserstein-1 and Jensen-Shannon of two spectra.

    W1 = ∫ |F_a(x) − F_b(x)| dx on the quadrature nodes, in the units of the eigenvalues;
    JS = ½ KL(a‖m) + ½ KL(b‖m), m = (a + b)/2, in nats (0 … ln 2), of the two smoothed on one axis:
    it depends on the smoothing, which is the same for both.

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


@dataclass(frozen=True, kw_only=True)
class CurvatureSummary(Result):
    """Derived numbers of one operator; the estimates they come from are kept."""

    sharpness: float
    sharpness_interval: Interval  # certified by the residual
    smallest: float
    critical_learning_rate: float  # inf where no eigenvalue is positive
    critical_learning_rate_interval: Interval
    spectral_gap: float
    trace: Estimate
    frobenius: Estimate
    stable_rank: float
    stable_rank_interval: Interval
    effective_rank: float
    effective_rank_interval: Interval
    negative_mass: float
    negative_mass_interval: Interval
    condition_number: float  # λmax / mean|λ|
    condition_interval: Interval  # 95 %
    quantile_condition: float  # max|λ| over a small |λ| of the non-null part
    quantile_interval: Interval  # at least 95 %: none to all of what lies at zero may be null
    condition_quantile: float  # 0: the smallest |λ| itself
    null_share: float  # eigenvalues that are zero to rounding
    null_space: tuple[str, ...]  # parameters and shifts found exactly flat
    eigenpairs: Eigenpairs
    density: SpectralDensity
    products: int
    converged: bool

    @property
    def value(self) -> float:
        """The sharpness."""
        return self.sharpness

    @property
    def interval(self) -> Interval:
        """Of the sharpness."""
        return self.sharpness_interval

    def _rows(self) -> list[dict[str, Any]]:
        """One row of all numbers."""
        return self._one_row()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        flat = ", ".join(self.null_space) if self.null_space else "none found"
        gap = self.eigenpairs.gap if len(self.eigenpairs) > 1 else "none"
        kind = "smallest" if self.condition_quantile == 0 else f"{self.condition_quantile:.0%} of"
        return [
            f"sharpness λmax          {Number(self.sharpness, *self.sharpness_interval)}  "
            f"(λmin {self.eigenpairs.number(-1)})",
            f"critical learning rate  "
            f"{Number(self.critical_learning_rate, *self.critical_learning_rate_interval)}",
            f"spectral gap            {gap}",
            f"{self.trace}",
            f"{self.frobenius}",
            f"stable rank             {Number(self.stable_rank, *self.stable_rank_interval)}",
            f"effective rank          {Number(self.effective_rank, *self.effective_rank_interval)}",
            f"negative mass           {Number(self.negative_mass, *self.negative_mass_interval):%}",
            f"condition number        "
            f"{Number(self.condition_number, *self.condition_interval)} (λmax / mean|λ|)",
            f"quantile condition      "
            f"{Number(self.quantile_condition, *self.quantile_interval)} ({kind} non-null |λ|)",
            f"flat directions         {flat}",
            f"products                {self.products}",
        ]


def curvature_summary(
    op: LinearOperator,
    *,
    k: int = 5,
    max_products: int = 300,
    rtol: float = 0.05,
    seed: int = 0,
    shard: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> CurvatureSummary:
    """All derived numbers; max_products: for the density, the others stop by themselves.

    shard: as of ``eigenpairs``, whose vectors are the only ones of the result. checkpoint: how the
    names of the estimates' own checkpoints begin.
    """
    n = require_symmetric(op, "curvature_summary")

    def kept(what: str) -> str | None:
        return None if checkpoint is None else f"{checkpoint}-{what}.safetensors"

    both = {"which": "both", "seed": seed, "shard": shard, "checkpoint": kept("pairs")}
    ends = eigenpairs(op, k=max(min(k, n), min(2, n)), **both)  # type: ignore[arg-type]
    total = trace(op, rtol=rtol, seed=seed, checkpoint=kept("trace"))
    size = frobenius_norm(op, rtol=rtol, seed=seed, checkpoint=kept("frobenius"))
    density = condition_density(
        op, max_products=max_products, seed=seed, checkpoint=kept("density")
    )
    flat, tested = flat_directions(op, ends.norm)
    top, low, high = (float(t[0]) for t in (ends.values, *ends.interval))
    norm, square = ends.norm, size.value**2
    condition, condition_interval = condition_number((low, top, high), density)
    spread, bracket, quantile, null = _quantile_condition(density, torch.finfo(op.dtype).eps)
    return CurvatureSummary(
        sharpness=top,
        sharpness_interval=(low, high),
        smallest=float(ends.values[-1]),
        critical_learning_rate=_rate(top),
        critical_learning_rate_interval=(_rate(high), _rate(low)),
        spectral_gap=float(ends.values[0] - ends.values[1]) if len(ends.values) > 1 else top,
        trace=total,
        frobenius=size,
        stable_rank=square / norm**2 if norm else 0.0,
        stable_rank_interval=_ratio(size.interval, norm),
        effective_rank=density.effective_rank,
        effective_rank_interval=density.effective_rank_interval,
        negative_mass=density.negative_mass,
        negative_mass_interval=density.negative_mass_interval,
        condition_number=condition,
        condition_interval=condition_interval,
        quantile_condition=spread,
        quantile_interval=bracket,
        condition_quantile=quantile,
        null_share=null,
        null_space=flat,
        eigenpairs=ends,
        density=density,
        products=ends.products + total.products + size.products + density.products + tested,
        converged=ends.converged and total.converged and size.converged,
    )


def _rate(top: float) -> float:
    return 2.0 / top if top > 0 else float("inf")


def _ratio(interval: Interval, norm: float) -> Interval:
    return (interval[0] ** 2 / norm**2, interval[1] ** 2 / norm**2) if norm else (0.0, 0.0)


EXACT_UP_TO = 512  # parameters up to which every eigenvalue is cheaper to have than to estimate


def condition_density(op: LinearOperator, *, max_products: int, **options: Any) -> SpectralDensity:
    """The density behind a condition number: exact for small models, else of ``max_products``."""
    size = op.shape[0]
    effort = max(size, max_products) if size <= EXACT_UP_TO else max_products
    return spectral_density(op, max_products=effort, **options)


def condition_number(
    largest: tuple[float, float, float], density: SpectralDensity
) -> tuple[float, Interval]:
    """κ = λmax / mean|λ| with its 95 % interval; largest: low end, value, high end of λmax.

    An exact density knows λmax itself, to rounding.
    """
    low, value, high = (float(density.nodes.max()),) * 3 if density.exact else largest
    mean = float((density.weights * density.nodes.abs()).sum())
    error = density.wasserstein_error  # |mean|λ| − estimate| ≤ W1
    top = high / (mean - error) if mean > error else float("inf")
    return value / max(mean, 1e-300), (max(low, 0.0) / max(mean + error, 1e-300), top)


def _quantile_condition(
    density: SpectralDensity, eps: float
) -> tuple[float, Interval, float, float]:
    """(quantile condition, its interval, quantile used, null share)."""
    sizes, weights = density.nodes.abs().numpy(), density.weights.numpy()
    largest = float(sizes.max())
    held = sizes > 100 * eps * largest
    null = 1.0 - float(weights[held].sum())
    if not held.any():
        return float("nan"), (0.0, float("inf")), 0.0, 1.0
    if density.exact:
        value = largest / float(sizes[held].min())
        return value, (value, value), 0.0, null
    low, high = density.small_magnitude_interval
    interval = largest / high, largest / low if low > 0 else float("inf")
    return largest / density.small_magnitude, interval, QUANTILE, null
