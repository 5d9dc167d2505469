"""Pictures of the landscape: Taylor terms, predicted training, convergence with samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from curvatlas.figures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    band,
    error_bars,
    new_figure,
    tidy_log_axes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.analysis.landscape.convergence import Curve, LandscapeConvergence
    from curvatlas.analysis.landscape.taylor_result import (
        CriticalLearningRate,
        ObservedCurvature,
        PredictedTrajectory,
        TaylorExpansion,
    )
    from curvatlas.studies.retraining import RetrainedConvergence

_TERMS = ("constant", "linear", "quadratic", "cubic", "remainder")


def expansion_figure(expansion: TaylorExpansion) -> Figure:
    """Size of each term, with the remainder and its bound."""
    figure = new_figure(6.2, 3.6)
    axes = figure.add_subplot()
    values = [float(getattr(expansion, name)) for name in _TERMS]
    colours = [BLUE if value >= 0 else ORANGE for value in values]
    axes.bar(range(5), [abs(value) for value in values], color=colours)
    if expansion.remainder_bound:
        axes.plot([3.6, 4.4], [expansion.remainder_bound] * 2, color="black", label="bound")
        axes.legend(fontsize=8)
    axes.set_xticks(range(5), _TERMS)
    unit = "difference of losses" if expansion.compared else "loss"
    axes.set(ylabel=f"|term| (units of the {unit})", yscale="log")
    axes.set_title("Taylor terms (blue positive, orange negative)")
    return tidy_log_axes(figure)


def predicted_figure(predicted: PredictedTrajectory) -> Figure:
    """Predicted and real loss against steps."""
    figure = new_figure(6.2, 3.6)
    axes = figure.add_subplot()
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
        axes.axvline(predicted.exact_steps, color="0.6", linestyle=":", label="exact up to here")
    if not predicted.converges and float(predicted.losses.min()) > 0:
        axes.set_yscale("log")
    elif predicted.actual is not None and end < len(predicted.losses) - 1:
        # a model that runs away beyond its horizon would flatten all that is real
        shown = torch.cat([predicted.losses[: end + 1], predicted.actual])
        reach = float(shown.max() - shown.min()) or 1.0
        axes.set_ylim(float(shown.min()) - reach, float(shown.max()) + reach)
    share = predicted.learning_rate / predicted.critical_learning_rate
    axes.set(xlabel="step", ylabel="loss")
    axes.set_title(f"η = {predicted.learning_rate:.3g} = {share:.2f} × critical")
    axes.legend(fontsize=8)
    return tidy_log_axes(figure)


def critical_rate_figure(critical: CriticalLearningRate) -> Figure:
    """Growth of a deviation against the rate, and the loss of the runs below and above."""
    figure = new_figure(10.0, 3.8)
    growth, runs = figure.subplots(1, 2)
    growth.plot(critical.ratios, critical.expected, "--", color=GREY, label="quadratic model")
    growth.plot(critical.ratios, critical.growth, "o", color=BLUE, label="measured in training")
    growth.axhline(1.0, color="0.5", linewidth=0.7)
    growth.axvline(1.0, color=ORANGE, linewidth=0.9, label="critical")
    growth.set(xlabel="learning rate / critical", ylabel="growth a step of a deviation")
    growth.set_title(f"critical η = {critical.value:.4g}")
    for ratio, losses in zip(critical.ratios, critical.losses, strict=True):
        runs.plot(losses.tolist(), label=f"{ratio:.2f} × critical")
    runs.set(xlabel="step", ylabel="loss", title="gradient descent at those rates")
    least = min(float(losses.min()) for losses in critical.losses)
    if least > 0 and max(float(losses.max()) for losses in critical.losses) > 10 * least:
        runs.set_yscale("log")
    for axes in (growth, runs):
        axes.legend(fontsize=8)
    return tidy_log_axes(figure)


def observed_figure(observed: ObservedCurvature) -> Figure:
    """Curvature along a trajectory."""
    figure = new_figure(6.2, 3.6)
    axes = figure.add_subplot()
    series = observed.directional if observed.source == "weights" else observed.values
    axes.plot(range(len(series)), series.tolist(), "o-", markersize=3, label="at each step")
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.axhspan(*observed.interval, alpha=0.2, label="95 % of the estimate")
    axes.set(xlabel="step", ylabel="curvature (loss / parameter²)")
    axes.legend(fontsize=8)
    return figure


def convergence_figure(convergence: LandscapeConvergence) -> Figure:
    """Losses with bounds and control, the decomposition, Hessians with control, spectra."""
    hessian, hessian_null = convergence.hessian, convergence.hessian_null
    figure = new_figure(11.5, 8.0 if hessian is not None else 4.2)
    a, b, *others = figure.subplots(1 if hessian is None else 2, 2).flat
    _draw_curve(a, convergence.difference, BLUE, f"samples, {_slope(convergence.difference)}")
    _draw_curve(a, convergence.null, GREY, f"noise control, {_slope(convergence.null)}", "--")
    k, bounds = convergence.difference.k.tolist(), convergence.bounds
    if bounds is not None:
        a.plot(k, bounds.printed.tolist(), color=ORANGE, label="bound as printed")
        a.plot(k, bounds.corrected.tolist(), ":", color=ORANGE, label="corrected bound")
    a.set(title="one more sample: change of the loss", ylabel="mean |L(k+1) − L(k)| (loss)")
    colours = (BLUE, GREEN, ORANGE, GREY)
    for (name, curve), colour in zip(convergence.terms.items(), colours, strict=False):
        _draw_curve(b, curve, colour, f"{name} term")
    _draw_curve(b, convergence.difference, "black", "all")
    b.set(title="exact decomposition at w*", ylabel="mean |term| (loss)")
    if hessian is not None and hessian_null is not None:
        _draw_curve(others[0], hessian, BLUE, f"samples, {_slope(hessian)}")
        _draw_curve(others[0], hessian_null, GREY, f"noise control, {_slope(hessian_null)}", "--")
        _draw_step_norms(others[0], convergence)
        _draw_spectra(others[1], convergence)
    for axes in (a, b, *others[:1]):
        axes.set(xlabel="samples k", xscale="log", yscale="log")
    for axes in (a, b, *others):
        axes.legend(fontsize=7)
    return tidy_log_axes(figure)


_RETRAINED = {
    "retrained": (BLUE, "-"),
    "control": (ORANGE, "-"),
    "followed": (GREEN, "-"),
    "fixed": ("black", ":"),
    "noise": (GREY, "--"),
}


def retrained_figure(found: RetrainedConvergence) -> Figure:
    """Changes of the minimum with one more sample: a row an optimizer, a column a schedule."""
    rows = list(dict.fromkeys(cell.optimizer for cell in found.cells))
    columns = list(dict.fromkeys(cell.schedule for cell in found.cells))
    figure = new_figure(5.4 * len(columns), 3.4 * len(rows))
    grid = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
    for cell in found.cells:
        axes = grid[rows.index(cell.optimizer)][columns.index(cell.schedule)]
        for name, (colour, style) in _RETRAINED.items():
            curve = cell.curves[name]
            if len(curve.k) and bool((curve.mean > 0).all()):
                _draw_curve(axes, curve, colour, f"{name}, {_slope(curve)}", style)
        flag = "" if cell.converged == 1 else f" ({1 - cell.converged:.0%} NOT at a minimum)"
        axes.set(title=f"{cell.optimizer}, {cell.schedule}{flag}", xscale="log", yscale="log")
        axes.set(xlabel="samples k", ylabel="mean change of the loss")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6.5)
    return tidy_log_axes(figure)


def _draw_step_norms(axes: Any, convergence: LandscapeConvergence) -> None:
    steps = [s for s in convergence.spectra if s.step_norm is not None]
    if steps:
        norms = [s.step_norm for s in steps]
        axes.plot([s.k for s in steps], norms, "s", color=GREEN, label="spectral norm, one order")
    axes.set(title="one more sample: change of the Hessian")
    axes.set_ylabel("‖H(k+1) − H(k)‖_F (loss / parameter²)")


def _draw_curve(axes: Any, curve: Curve, color: str, label: str, style: str = "-") -> None:
    options: Any = {"color": color, "label": label, "style": style, "linewidth": 1.2}
    band(axes, curve.k, curve.mean, curve.low, curve.high, **options)


def _slope(curve: Curve) -> str:
    if curve.fit is None:
        return "no fit"
    low, high = curve.fit.interval
    return f"∝ k^{curve.fit.exponent:.2f} [{low:.2f}, {high:.2f}]"


def _draw_spectra(axes: Any, convergence: LandscapeConvergence) -> None:
    rows = convergence.spectra[:-1]  # the last is the reference itself
    if rows:
        distances = [s.wasserstein for s in rows]
        error = error_bars(distances, [s.wasserstein_interval for s in rows])
        label = "W1 to the spectrum of the most samples (95 %)"
        axes.errorbar([s.k for s in rows], distances, yerr=error, fmt="o-", color=BLUE, label=label)
        largest = [s.largest for s in convergence.spectra]
        axes.plot(
            [s.k for s in convergence.spectra], largest, "s--", color=ORANGE, label="λmax of H(k)"
        )
        axes.set(xscale="log", yscale="log")
    else:
        axes.plot([], [], label="no spectra were asked for")
    axes.set(title="spectrum against k", xlabel="samples k")
    axes.set_ylabel("eigenvalue units (loss / parameter²)")
