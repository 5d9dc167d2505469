"""What the analysis of convergence with the number of samples returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from curvatlas.analysis.convergence_orders import Curve, StableSize
from curvatlas.results import Result
from curvatlas.ticks import tidy_log_axes

Interval = tuple[float, float]
_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#d55e00", "#009e73", "#777777"


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
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11.5, 8.0), layout="constrained")
        (a, b), (c, d) = figure.subplots(2, 2)
        self._plot_losses(a)
        for (name, found), colour in zip(
            self.terms.items(), (_BLUE, _GREEN, _ORANGE, _GREY), strict=True
        ):
            _band(b, found, colour, f"{name} term")
        _band(b, self.difference, "black", "all")
        b.set(title="exact decomposition at w*", ylabel="mean |term| (loss)")
        _band(c, self.hessian, _BLUE, f"samples, {_slope(self.hessian)}")
        _band(c, self.hessian_null, _GREY, f"noise control, {_slope(self.hessian_null)}", "--")
        steps = [s for s in self.spectra if s.step_norm is not None]
        if steps:
            c.plot([s.k for s in steps], [s.step_norm for s in steps], "s", color=_GREEN,
                   label="spectral norm, one order")  # fmt: skip
        c.set(title="one more sample: change of the Hessian",
              ylabel="‖H(k+1) − H(k)‖_F (loss / parameter²)")  # fmt: skip
        self._plot_spectra(d)
        for axes in (a, b, c):
            axes.set(xlabel="samples k", xscale="log", yscale="log")
        for axes in (a, b, c, d):
            axes.legend(fontsize=7)
        return tidy_log_axes(figure)

    def _plot_losses(self, axes: Any) -> None:
        _band(axes, self.difference, _BLUE, f"samples, {_slope(self.difference)}")
        _band(axes, self.null, _GREY, f"noise control, {_slope(self.null)}", "--")
        k = self.difference.k.tolist()
        axes.plot(k, self.bounds.printed.tolist(), color=_ORANGE, label="bound as printed")
        axes.plot(k, self.bounds.corrected.tolist(), ":", color=_ORANGE, label="corrected bound")
        axes.set(title="one more sample: change of the loss", ylabel="mean |L(k+1) − L(k)| (loss)")

    def _plot_spectra(self, axes: Any) -> None:
        rows = self.spectra[:-1]  # the last is the reference itself
        if rows:
            middle = [s.wasserstein for s in rows]
            error = [
                [max(m - s.wasserstein_interval[0], 0) for m, s in zip(middle, rows, strict=True)],
                [max(s.wasserstein_interval[1] - m, 0) for m, s in zip(middle, rows, strict=True)],
            ]
            axes.errorbar([s.k for s in rows], middle, yerr=error, fmt="o-", color=_BLUE,
                          label="W1 to the spectrum of the most samples (95 %)")  # fmt: skip
            axes.plot([s.k for s in self.spectra], [s.largest for s in self.spectra], "s--",
                      color=_ORANGE, label="λmax of H(k)")  # fmt: skip
            axes.set(xscale="log", yscale="log")
        else:
            axes.plot([], [], label="no spectra were asked for")
        axes.set(title="spectrum against k", xlabel="samples k",
                 ylabel="eigenvalue units (loss / parameter²)")  # fmt: skip


def _band(axes: Any, curve: Curve, colour: str, label: str, style: str = "-") -> None:
    k = curve.k.tolist()
    axes.plot(k, curve.mean.tolist(), style, color=colour, linewidth=1.2, label=label)
    axes.fill_between(k, curve.low.tolist(), curve.high.tolist(), color=colour, alpha=0.2)


def _slope(curve: Curve) -> str:
    if curve.fit is None:
        return "no fit"
    low, high = curve.fit.interval
    return f"∝ k^{curve.fit.exponent:.2f} [{low:.2f}, {high:.2f}]"
