"""The papers' experiments on one model: growth with a scale, sinks, how good Gauss-Newton is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from curvatlas.figures.style import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    error_bars,
    new_figure,
    shade,
    tidy_log_axes,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.studies.gauss_newton import GaussNewtonQuality
    from curvatlas.studies.growth import Growth
    from curvatlas.studies.sinks import Sinks, SinkStudy

_SYMBOLS = {"total": "H", "outer": "H_o", "functional": "H_f"}
_MOST_PANELS = 12
_ATTENTION = ("query", "key", "value", "output")


def growth_curves(result: Growth, *, part: str = "outer") -> Figure:
    """‖H_bb‖_F against the scale, one panel a role and one line a layer, with the fitted laws."""
    roles = [role for role in dict.fromkeys(result.roles) if not role.endswith("bias")]
    roles = roles[:_MOST_PANELS]
    columns = min(len(roles), 4)
    rows = math.ceil(len(roles) / columns)
    figure = new_figure(3.1 * columns, 2.5 * rows)
    panels: Any = figure.subplots(rows, columns, squeeze=False)
    for axes, role in zip(panels.flat, roles, strict=False):
        places = [i for i, own in enumerate(result.roles) if own == role]
        for index, place in enumerate(places):
            _growth_line(axes, result, part, place, shade(index, len(places)))
        axes.set(xscale="log", yscale="log", title=role, xlabel=f"{result.scaled} × t")
        axes.axvspan(*result.window, color="0.93", zorder=0)
        axes.legend(fontsize=6)
    for axes in panels.flat[len(roles) :]:
        axes.set_visible(False)
    figure.suptitle(f"‖{_SYMBOLS[part]}‖_F of every role while {result.scaled} are scaled")
    return tidy_log_axes(figure)


def _growth_line(axes: Any, result: Growth, part: str, place: int, colour: Any) -> None:
    values = result.norms[part][:, place].tolist()
    if max(values) <= 0:
        return
    name, layer = result.names[place], result.layers[place]
    law = result.laws[part][name]
    label = name if layer is None else f"layer {layer}"
    label += "" if law is None else f": {law.exponent:.2f}"
    axes.plot(result.scales, values, "o-", color=colour, markersize=3, linewidth=0.9, label=label)


def sink_curves(result: Sinks) -> Figure:
    """λmax over bulk, norms of the attention roles along the sink, and heads against their mass."""
    figure = new_figure(12.6, 3.6)
    left, middle, right = figure.subplots(1, 3)
    biases = [level.bias for level in result.levels]
    ratios = [level.ratio for level in result.levels]
    bars = error_bars(ratios, [level.ratio_interval for level in result.levels], reach=9)
    left.errorbar(biases, ratios, yerr=bars, fmt="o-", color=BLUE, capsize=2)
    left.set(yscale="log", ylabel="λmax / bulk", title=f"{result.verdict} with the sink")
    weights = [i for i, name in enumerate(result.names) if name.split(".")[-1] in _ATTENTION]
    for place in weights[:_MOST_PANELS]:
        values = [float(level.norms["total"][place, 0]) for level in result.levels]
        role = result.names[place].split(".")[-1]
        colour = (BLUE, ORANGE, GREEN, PINK)[_ATTENTION.index(role)]
        middle.plot(biases, values, "o-", markersize=3, color=colour, linewidth=0.9)
    for role, colour in zip(_ATTENTION, (BLUE, ORANGE, GREEN, PINK), strict=True):
        middle.plot([], [], color=colour, label=role)
    middle.set(yscale="log", ylabel="‖H‖_F of the block", title="every layer's attention")
    middle.legend(fontsize=7)
    for axes in (left, middle):
        axes.set_xlabel("bias on the first token's logits")
    for role, colour in zip(_ATTENTION, (BLUE, ORANGE, GREEN, PINK), strict=True):
        rows = [head for head in result.heads if role in head.norms]
        values = [head.norms[role]["total"] for head in rows]
        right.plot([h.mass for h in rows], values, "o", markersize=3, color=colour, label=role)
    right.set(xlabel="sink mass of the head", ylabel="‖H‖_F of the head", title="heads as they are")
    if result.heads:
        right.set_yscale("log")
    return tidy_log_axes(figure)


def sink_seeds(study: SinkStudy) -> Figure:
    """λmax over bulk along the sink, one line a seed."""
    figure = new_figure(5.4, 3.8)
    axes = figure.add_subplot()
    for seed, run in zip(study.seeds, study.runs, strict=True):
        biases = [level.bias for level in run.levels]
        axes.plot(biases, run.ratios, "o-", markersize=3, label=f"seed {seed}: {run.verdict}")
    axes.set(yscale="log", xlabel="bias on the first token's logits", ylabel="λmax / bulk")
    axes.set_title(f"sinks stretch the spectrum: {study.verdict}")
    axes.legend(fontsize=7)
    return tidy_log_axes(figure)


def quality_figure(result: GaussNewtonQuality) -> Figure:
    """Shares of H_f by role, distances of the approximations, and what they condition."""
    figure = new_figure(12.6, 3.6)
    left, middle, right = figure.subplots(1, 3)
    roles = list(result.functional_share)
    shares = [result.functional_share[role].value for role in roles]
    ends = [result.functional_share[role].interval for role in roles]
    left.barh(roles, shares, xerr=error_bars(shares, ends), color=BLUE)
    left.invert_yaxis()
    left.tick_params(axis="y", labelsize=6)
    left.set(xlabel="‖H_f‖ / ‖H‖", title=f"λmax(H_o) / λmax(H) = {result.ratio:.2f}")
    names = [n for n, one in result.approximations.items() if one.to_hessian is not None]
    for shift, colour, label in ((-0.2, ORANGE, "to H"), (0.2, GREEN, "to H_o")):
        distances: Any = [
            result.approximations[n].to_hessian
            if label == "to H"
            else result.approximations[n].to_outer
            for n in names
        ]
        values = [d.value for d in distances]
        bars = error_bars(values, [d.interval for d in distances])
        places = [i + shift for i in range(len(names))]
        middle.barh(places, values, height=0.36, xerr=bars, color=colour, label=label)
    middle.set_yticks(range(len(names)), names)
    middle.invert_yaxis()
    middle.set(xlabel="‖P − A‖ / ‖A‖", title="distance")
    middle.legend(fontsize=7)
    every = [n for n, one in result.approximations.items() if one.condition_hessian is not None]
    kappas = [result.approximations[n].condition_hessian for n in every]
    right.barh(every, kappas, color=PINK)
    right.invert_yaxis()
    right.set(xlabel=f"κ of P⁻¹|H|, damped by {result.damping:g} ‖H‖", title="as a preconditioner")
    if every:
        right.set_xscale("log")
    return tidy_log_axes(figure)
