"""Pictures of the landscape: Taylor terms, predicted training, convergence, flatness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from curvatlas.figures.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    ORANGE,
    band,
    draws,
    legend,
    lying_bars,
    name_axis,
    panels,
    points,
    shade,
    short_names,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.analysis.landscape.convergence import Curve, LandscapeConvergence
    from curvatlas.analysis.landscape.flatness import Flatness
    from curvatlas.analysis.landscape.taylor_result import (
        CriticalLearningRate,
        ObservedCurvature,
        PredictedTrajectory,
        TaylorExpansion,
    )
    from curvatlas.studies.generalisation import Generalisation
    from curvatlas.studies.retraining import RetrainedConvergence

_TERMS = ("constant", "linear", "quadratic", "cubic", "remainder")


@draws("TaylorExpansion")
def draw_expansion(expansion: TaylorExpansion) -> Figure:
    """Size of each term, with the remainder and its bound."""
    figure, (axes,) = panels()
    values = [float(getattr(expansion, name)) for name in _TERMS]
    for sign, colour in ((1, BLUE), (-1, ORANGE)):
        places = [place for place, value in enumerate(values) if (value < 0) == (sign < 0)]
        if places:
            label = "positive" if sign > 0 else "negative"
            axes.bar(places, [abs(values[place]) for place in places], color=colour, label=label)
    if expansion.remainder_bound:
        axes.plot([3.6, 4.4], [expansion.remainder_bound] * 2, color=INK, label="bound")
    name_axis(axes.xaxis, _TERMS)
    unit = "difference of losses" if expansion.compared else "loss"
    axes.set(ylabel=f"|term| (units of the {unit})", yscale="log")
    legend(axes)
    return figure


@draws("PredictedTrajectory")
def draw_predicted(predicted: PredictedTrajectory) -> Figure:
    """Gradient descent, predicted and real: the loss over the steps."""
    figure, (axes,) = panels()
    end = len(predicted.losses) - 1 if predicted.horizon is None else predicted.horizon
    axes.plot(predicted.losses[: end + 1].tolist(), label="quadratic model", color=BLUE)
    if end < len(predicted.losses) - 1:
        beyond = range(end, len(predicted.losses))
        label = f"beyond its horizon ({predicted.tolerance:.0%})"
        axes.plot(beyond, predicted.losses[end:].tolist(), ":", label=label, color=BLUE)
        axes.axvline(end, color=BLUE, linewidth=0.7)
    if predicted.actual is not None:
        axes.plot(predicted.actual.tolist(), "--", label="real run", color=ORANGE)
    if predicted.exact_steps < len(predicted.losses) - 1:
        axes.axvline(predicted.exact_steps, color=MUTED, linestyle=":", label="exact up to here")
    if not predicted.converges and float(predicted.losses.min()) > 0:
        axes.set_yscale("log")
    elif predicted.actual is not None and end < len(predicted.losses) - 1:
        # a model that runs away beyond its horizon would flatten all that is real
        shown = torch.cat([predicted.losses[: end + 1], predicted.actual])
        reach = float(shown.max() - shown.min()) or 1.0
        axes.set_ylim(float(shown.min()) - reach, float(shown.max()) + reach)
    share = predicted.learning_rate / predicted.critical_learning_rate
    axes.set(xlabel="step", ylabel="loss")
    legend(axes, f"η = {predicted.learning_rate:.3g} = {share:.2f} × critical")
    return figure


@draws("CriticalLearningRate")
def draw_critical_rate(critical: CriticalLearningRate) -> Figure:
    """Growth of a deviation against the rate, and the loss of the runs below and above."""
    figure, (growth, runs) = panels(2)
    growth.plot(critical.ratios, critical.expected, "--", color=MUTED, label="quadratic model")
    growth.plot(critical.ratios, critical.growth, "o", color=BLUE, label="measured in training")
    growth.axhline(1.0, color=GRID, linewidth=0.8)
    growth.axvline(1.0, color=ORANGE, linewidth=0.9, label="critical")
    growth.set(xlabel="learning rate / critical", ylabel="growth a step of a deviation")
    legend(growth, f"critical η = {critical.value:.4g}")
    for place, (ratio, losses) in enumerate(zip(critical.ratios, critical.losses, strict=True)):
        colour = shade(place, len(critical.ratios))
        runs.plot(losses.tolist(), color=colour, label=f"{ratio:.2f} × critical")
    runs.set(xlabel="step", ylabel="loss")
    least = min(float(losses.min()) for losses in critical.losses)
    if least > 0 and max(float(losses.max()) for losses in critical.losses) > 10 * least:
        runs.set_yscale("log")
    legend(runs, "gradient descent at those rates")
    return figure


@draws("ObservedCurvature")
def draw_observed(observed: ObservedCurvature) -> Figure:
    """Curvature along a trajectory."""
    figure, (axes,) = panels()
    series = observed.directional if observed.source == "weights" else observed.values
    axes.plot(
        range(len(series)), series.tolist(), "o-", color=BLUE, markersize=4, label="at each step"
    )
    axes.ticklabel_format(axis="y", useOffset=False)
    low, high = observed.interval
    axes.axhspan(low, high, color=BLUE, alpha=0.15, linewidth=0, label="95 % of the estimate")
    axes.set(xlabel="step", ylabel="curvature (loss / parameter²)")
    legend(axes)
    return figure


@draws("LandscapeConvergence")
def draw_convergence(convergence: LandscapeConvergence) -> Figure:
    """Losses with bounds and control, the decomposition, Hessians with control, spectra."""
    hessian, hessian_null = convergence.hessian, convergence.hessian_null
    figure, (a, b, *others) = panels(2, 1 if hessian is None else 2)
    _draw_curve(a, convergence.difference, BLUE, f"samples, {_slope(convergence.difference)}")
    _draw_curve(a, convergence.null, MUTED, f"noise control, {_slope(convergence.null)}", "--")
    k, bounds = convergence.difference.k.tolist(), convergence.bounds
    if bounds is not None:
        a.plot(k, bounds.printed.tolist(), color=ORANGE, label="bound as printed")
        a.plot(k, bounds.corrected.tolist(), ":", color=ORANGE, label="corrected bound")
    a.set_ylabel("mean |L(k+1) − L(k)| (loss)")
    colours = (BLUE, GREEN, ORANGE, MUTED)
    for (name, curve), colour in zip(convergence.terms.items(), colours, strict=False):
        _draw_curve(b, curve, colour, f"{name} term")
    _draw_curve(b, convergence.difference, INK, "all")
    b.set_ylabel("mean |term| (loss)")
    titles = ["one more sample: change of the loss", "exact decomposition at w*"]
    if hessian is not None and hessian_null is not None:
        _draw_curve(others[0], hessian, BLUE, f"samples, {_slope(hessian)}")
        _draw_curve(others[0], hessian_null, MUTED, f"noise control, {_slope(hessian_null)}", "--")
        _draw_step_norms(others[0], convergence)
        _draw_spectra(others[1], convergence)
        titles += ["one more sample: change of the Hessian", "spectrum against k"]
    for axes in (a, b, *others[:1]):
        axes.set(xlabel="samples k", xscale="log", yscale="log")
    for axes, title in zip((a, b, *others), titles, strict=True):
        legend(axes, title)
    return figure


_RETRAINED = {
    "retrained": (BLUE, "-"),
    "control": (ORANGE, "-"),
    "followed": (GREEN, "-"),
    "fixed": (INK, ":"),
    "noise": (MUTED, "--"),
}


@draws("RetrainedConvergence")
def draw_retrained(found: RetrainedConvergence) -> Figure:
    """The minimum, trained again: how one more sample moves it, by optimizer and schedule."""
    rows = list(dict.fromkeys(cell.optimizer for cell in found.cells))
    columns = list(dict.fromkeys(cell.schedule for cell in found.cells))
    figure, grid = panels(len(columns), len(rows), width=1.1, sharex=True, sharey=True)
    for cell in found.cells:
        axes = grid[rows.index(cell.optimizer) * len(columns) + columns.index(cell.schedule)]
        for name, (colour, style) in _RETRAINED.items():
            curve = cell.curves[name]
            if len(curve.k) and bool((curve.mean > 0).all()):
                _draw_curve(axes, curve, colour, f"{name}, {_slope(curve)}", style)
        flag = "" if cell.converged == 1 else f" ({1 - cell.converged:.0%} NOT at a minimum)"
        axes.set(xscale="log", yscale="log", xlabel="samples k", ylabel="mean change of the loss")
        legend(axes, f"{cell.optimizer}, {cell.schedule}{flag}")
    return figure


def _draw_step_norms(axes: Any, convergence: LandscapeConvergence) -> None:
    steps = [s for s in convergence.spectra if s.step_norm is not None]
    if steps:
        norms = [s.step_norm for s in steps]
        axes.plot([s.k for s in steps], norms, "s", color=GREEN, label="spectral norm, one order")
    axes.set_ylabel("‖H(k+1) − H(k)‖ (loss / parameter²)")


def _draw_curve(axes: Any, curve: Curve, color: str, label: str, style: str = "-") -> None:
    band(axes, curve.k, curve.mean, curve.low, curve.high, color=color, label=label, style=style)


def _slope(curve: Curve) -> str:
    if curve.fit is None:
        return "no fit"
    low, high = curve.fit.interval
    return f"∝ k^{curve.fit.exponent:.2f} [{low:.2f}, {high:.2f}]"


def _draw_spectra(axes: Any, convergence: LandscapeConvergence) -> None:
    rows = convergence.spectra[:-1]  # the last is the reference itself
    if rows:
        intervals = [s.wasserstein_interval for s in rows]
        label = "W1 to the spectrum of the most samples"
        points(
            axes, [s.k for s in rows], [s.wasserstein for s in rows], intervals,
            color=BLUE, label=label,
        )  # fmt: skip
        largest = [s.largest for s in convergence.spectra]
        places = [s.k for s in convergence.spectra]
        axes.plot(places, largest, "s--", color=ORANGE, markersize=4, label="λmax of H(k)")
        axes.set(xscale="log", yscale="log")
    else:
        axes.plot([], [], label="no spectra were asked for")
    axes.set(xlabel="samples k", ylabel="eigenvalue units (loss / parameter²)")


# --- flatness ------------------------------------------------------------------------------------


@draws("Flatness")
def draw_flatness(found: Flatness) -> Figure:
    """Relative flatness by layer; sharpness against its quadratic model; bounds and losses."""
    figure, (layers, rises, bounds) = panels(3)
    relative = found.relative_flatness
    if relative is not None:
        names = sorted(relative.values, key=lambda n: -abs(relative.values[n]))
        values = [relative.values[n] for n in names]
        lying_bars(layers, names, values, [relative.intervals[n] for n in names], most=16)
    layers.set_xlabel("κ (loss)")
    layers.set_title("relative flatness by layer")
    both = (found.sam, found.asam)
    rises.bar([-0.2, 0.8], [o.value for o in both], 0.4, color=BLUE, label="found by ascent")
    rises.bar([0.2, 1.2], [o.quadratic for o in both], 0.4, color=MUTED, label="quadratic model")
    name_axis(rises.xaxis, [f"{one.quantity}, ρ = {one.radius:g}" for one in both])
    rises.set_ylabel("loss")
    legend(rises, "largest rise of the loss")
    proven = {
        name: bound
        for name, bound in (("isotropic", found.isotropic), ("diagonal", found.diagonal))
        if bound is not None
    }
    bars = (("training samples, with noise", "loss", BLUE),
            ("test samples, with noise", "test_loss", GREEN),
            ("bound", "value", ORANGE))  # fmt: skip
    for k, (label, field, color) in enumerate(bars):
        values = [getattr(bound, field) for bound in proven.values()]
        drawn = [(i + 0.25 * (k - 1), v) for i, v in enumerate(values) if v is not None]
        if drawn:
            bounds.bar(*zip(*drawn, strict=True), 0.25, color=color, label=label)
    if proven:
        name_axis(bounds.xaxis, list(proven))
    bounds.axhline(found.loss, color=INK, linewidth=0.8, label="training loss, no noise")
    bounds.set_ylabel("loss")
    legend(bounds, "PAC-Bayes")
    return figure


@draws("Generalisation")
def draw_generalisation(found: Generalisation) -> Figure:
    """Kendall's τ of each measure with the gap, its interval and the shuffled control's."""
    rows = sorted(found.correlations, key=lambda row: -row.value)
    figure, (axes,) = panels(width=1.3, height=max(0.7, 0.3 + 0.075 * len(rows)))
    for place, row in enumerate(rows):
        label = "gaps shuffled" if place == 0 else "_"
        axes.plot(row.control, (place, place), color=GRID, linewidth=8, label=label)
        clear = row.interval[0] > 0 or row.interval[1] < 0
        colour = BLUE if clear else MUTED
        points(axes, [row.value], [place], [(place, place)], color=colour)
        axes.plot(row.interval, (place, place), color=colour, linewidth=1.2, zorder=2)
    axes.axvline(0.0, color=MUTED, linewidth=0.7)
    name_axis(axes.yaxis, short_names([row.measure for row in rows]))
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(-1, 1))
    axes.set_xlabel("Kendall's τ with the generalisation gap (95 %)")
    legend(axes, f"{found.dataset}, {len(found.models)} models")
    return figure
