"""Pictures of training: a monitored run, a diagnosed one, sharpness by layer, smaller models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from curvatlas.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    band,
    draws,
    legend,
    lying_bars,
    panels,
    points,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.analysis.conditioning import EffectiveConditioning
    from curvatlas.analysis.diagnostics import ConvergenceTrajectory
    from curvatlas.training.compression import QuantizationTable
    from curvatlas.training.pruning import Pruning
    from curvatlas.training.snapshot import CurvatureHistory


@draws("CurvatureHistory")
def draw_history(history: CurvatureHistory) -> Figure:
    """Loss, the optimizer's own edge (dashed its threshold), eigenvalues, trace."""
    figure, (loss, own, sharp, trace) = panels(4, width=0.82)
    steps = history.series("step")
    loss.plot(steps, history.series("loss"), color=BLUE)
    for axes, name in ((sharp, "sharpness"), (trace, "trace")):
        low, high = ([pair[end] for pair in history.series(f"{name}_interval")] for end in (0, 1))
        label = "λmax" if axes is sharp else "_"
        band(axes, steps, history.series(name), low, high, color=BLUE, label=label)
    sharp.plot(steps, history.series("most_negative"), color=ORANGE, label="λmin")
    metric = history.snapshots[-1].metric.partition(" (")[0] if history.snapshots else "plain"
    name = "λmax(H)" if metric == "plain" else f"λmax(P⁻¹H), {metric}"
    known = [(s.step, s.edge, s.edge_threshold) for s in history.snapshots if s.edge is not None]
    places, edges = [k for k, _, _ in known], [edge for _, edge, _ in known]
    own.plot(places, edges, "o-", color=BLUE, markersize=4, label=name)
    limits = [(k, limit) for k, _, limit in known if limit is not None and math.isfinite(limit)]
    if limits:
        own.plot(*zip(*limits, strict=True), "--", color=MUTED, label="threshold")
    for axes in (own, sharp):
        legend(axes)
    if known and min(edge for _, edge, _ in known) > 0:
        own.set_yscale("log")
    own.set_ylabel("own edge")
    loss.set_ylabel("loss")
    sharp.set_ylabel("eigenvalues of H")
    trace.set_ylabel("tr H (95 %)")
    for axes in (loss, own, sharp, trace):
        axes.set_xlabel("training step")
    for event in history.events:
        loss.axvline(event.step, color=ORANGE, alpha=0.4, linewidth=1)
    return figure


@draws("ConvergenceTrajectory")
def draw_trajectory(trajectory: ConvergenceTrajectory) -> Figure:
    """Loss and gradient norm, sharpness against the edge, conditioning."""
    figure, (a, b, c) = panels(3)
    a.plot(trajectory.losses.tolist(), label="loss of the batch", color=BLUE)
    a.plot(trajectory.gradient_norms.tolist(), label="gradient norm", color=ORANGE, linewidth=0.8)
    a.set_ylabel("loss, gradient norm (loss / parameter)")
    looks, steps = trajectory.looks, trajectory.look_steps
    top = [look.largest for look in looks]
    intervals = [look.largest_interval for look in looks]
    points(b, steps, top, intervals, color=BLUE, label="λmax (certified)")
    edge = 2 * (1 + trajectory.momentum) / trajectory.learning_rate
    b.axhline(edge, color=ORANGE, linestyle="--", label="edge of stability")
    b.set_ylabel("sharpness (loss / parameter²)")
    kappa, intervals = [look.condition_number for look in looks], [look.interval for look in looks]
    points(c, steps, kappa, intervals, color=GREEN, label="95 %", reach=9)
    c.set_ylabel("condition number λmax / mean |λ|")
    for axes in (a, b, c):
        axes.set(xlabel="step", yscale="log")
        legend(axes)
    return figure


@draws("EffectiveConditioning")
def draw_conditioning(conditioning: EffectiveConditioning) -> Figure:
    """Sharpness of every layer with its certified interval, and the edge 2/η."""
    layers = conditioning.layers
    figure, (axes,) = panels(height=max(0.7, 0.3 + 0.07 * len(layers)))
    intervals = [layer.interval for layer in layers]
    names, values = [layer.name for layer in layers], [layer.sharpness for layer in layers]
    lying_bars(axes, names, values, intervals, logarithmic=True)
    axes.axvline(conditioning.largest, color=INK, linewidth=1, label="whole model")
    if conditioning.learning_rate:
        axes.axvline(2 / conditioning.learning_rate, color=ORANGE, linestyle="--", label="2/η")
    axes.set_xlabel("λmax (loss / parameter²)")
    legend(axes)
    return figure


# --- smaller models ------------------------------------------------------------------------------


@draws("Pruning")
def draw_pruning(found: Pruning) -> Figure:
    """The share of every part that goes; the loss on the way to the pruned weights."""
    figure, (bars, line) = panels(2)
    shares = [100 * share for share in found.part_sparsity.values()]
    lying_bars(bars, list(found.part_sparsity), shares)
    bars.axvline(100 * found.sparsity, color=MUTED, linestyle="--", label="all parts together")
    bars.set_xlabel("removed, %")
    legend(bars, f"{found.method}, {found.sparsity:.0%} of the weights")
    draw_segment(line, found)
    return figure


def draw_segment(axes: Any, found: Any) -> None:
    """φ(t) on the way to the new weights, and the predicted rise with its interval."""
    places, losses = (side.tolist() for side in found.segment)
    axes.plot(places, losses, "o-", color=BLUE, markersize=4, label="loss, measured")
    ends = [tuple(found.loss_before + end for end in found.predicted_interval)]
    value = found.loss_before + found.predicted_rise
    points(axes, [1.0], [value], ends, color=ORANGE, label="predicted", marker="s", joined=False)
    axes.set(xlabel="share of the change", ylabel="loss")
    words = "" if found.in_quadratic_range else " (outside the quadratic range)"
    legend(axes, f"on the way{words}")


@draws("QuantizationTable")
def draw_rounding(found: QuantizationTable) -> Figure:
    """Rise of the loss against bits a weight: measured (filled) and predicted (open)."""
    figure, (axes,) = panels()
    ways = {"nearest": (MUTED, "s"), "curvature": (BLUE, "o")}
    for rounding in dict.fromkeys(row.rounding for row in found.rows):
        colour, marker = ways[rounding]
        rows = [row for row in found.rows if row.rounding == rounding]
        bits = [row.bits_per_weight for row in rows]
        series: Any = (("measured", [row.rise for row in rows], {}),
                  ("predicted", [row.predicted_rise for row in rows],
                   {"fillstyle": "none", "markersize": 9}))  # fmt: skip
        for words, rises, look in series:
            label = f"{rounding}, {words}"
            axes.plot(bits, rises, marker, color=colour, label=label, **look)
    reach = max([abs(row.rise) for row in found.rows] + [1e-12])
    axes.set_yscale("symlog", linthresh=reach / 1e3)
    axes.axhline(0, color=MUTED, linewidth=0.7)
    axes.set(xlabel="bits a weight, scales included", ylabel="rise of the loss")
    axes.margins(x=0.1)
    legend(axes)
    return figure
