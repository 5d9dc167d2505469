r"""The numbers people quote about a spectrum, each with its definition.

sharpness              λ_max
critical learning rate 2 / λ_max, above which gradient descent on the quadratic model diverges
spectral gap           λ_1 − λ_2
stable rank            ‖A‖_F² / ‖A‖₂²
effective rank         (Σ|λ|)² / Σλ²
negative mass          share of eigenvalues below zero
condition number       max|λ| / q, q the ``quantile`` of |λ| over the non-null part; exact: the
                       smallest |λ| there. Null: |λ| ≤ 100 eps max|λ|
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from curvatlas.operators.base import LinearOperator
from curvatlas.results import Result
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.density_small import QUANTILE
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.estimate import Estimate, Interval
from curvatlas.spectra.flat_directions import flat_directions
from curvatlas.spectra.norms import frobenius_norm
from curvatlas.spectra.requirements import require_symmetric
from curvatlas.spectra.trace import trace


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
    condition_number: float  # of the non-null part
    condition_interval: Interval  # at least 95 %: none to all of what lies at zero may be null
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

    def __str__(self) -> str:
        low, high = self.stable_rank_interval
        flat = ", ".join(self.null_space) if self.null_space else "none found"
        kind = "smallest" if self.condition_quantile == 0 else f"{self.condition_quantile:.0%} of"
        return "\n".join(
            [
                f"sharpness λmax          {self.sharpness:.5g}  (λmin {self.smallest:.4g})",
                f"critical learning rate  {self.critical_learning_rate:.4g}",
                f"spectral gap            {self.spectral_gap:.4g}",
                f"{self.trace}",
                f"{self.frobenius}",
                f"stable rank             {self.stable_rank:.3g} [{low:.3g}, {high:.3g}]",
                f"effective rank          {self.effective_rank:.3g}",
                f"negative mass           {self.negative_mass:.1%}",
                f"condition number        {self.condition_number:.3g} ({kind} non-null |λ|)",
                f"flat directions         {flat}",
                f"products                {self.products}",
            ]
        )

    def plot(self) -> Any:
        """The spectral density."""
        return self.density.plot()


def curvature_summary(
    op: LinearOperator, *, k: int = 5, max_products: int = 300, rtol: float = 0.05, seed: int = 0
) -> CurvatureSummary:
    """All derived numbers; max_products: for the density, the others stop by themselves."""
    n = require_symmetric(op, "curvature_summary")
    k = min(k, n)
    ends = eigenpairs(op, k=max(k, min(2, n)), which="both", seed=seed)
    total = trace(op, rtol=rtol, seed=seed, max_products=max(max_products, 100))
    size = frobenius_norm(op, rtol=rtol, seed=seed, max_products=max(max_products, 100))
    density = spectral_density(op, max_products=max_products, seed=seed)
    found = flat_directions(op, norm=ends.norm)
    top, low, high = (float(t[0]) for t in (ends.values, *ends.interval))
    norm, square = ends.norm, size.value**2
    condition, bracket, quantile, null = _condition(density, torch.finfo(op.dtype).eps)
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
        condition_interval=bracket,
        condition_quantile=quantile,
        null_share=null,
        null_space=tuple(str(direction) for direction in found.directions),
        eigenpairs=ends,
        density=density,
        products=ends.products + total.products + size.products + density.products + found.products,
        converged=ends.converged and total.converged and size.converged,
    )


def _rate(top: float) -> float:
    return 2.0 / top if top > 0 else float("inf")


def _ratio(interval: Interval, norm: float) -> Interval:
    return (interval[0] ** 2 / norm**2, interval[1] ** 2 / norm**2) if norm else (0.0, 0.0)


def _condition(density: SpectralDensity, eps: float) -> tuple[float, Interval, float, float]:
    """(condition number, its interval, quantile used, null share)."""
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
