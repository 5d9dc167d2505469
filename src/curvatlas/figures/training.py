"""Pictures of training: a monitored run, a diagnosed trajectory, sharpness by layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

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

    from curvatlas.analysis.conditioning import EffectiveConditioning
    from curvatlas.analysis.diagnostics import ConvergenceTrajectory
    from curvatlas.article import LayerWiseCurvature
    from curvatlas.training.snapshot import CurvatureHistory


def history_figure(history: CurvatureHistory) -> Figure:
    """Panels on one axis of steps; the second is the optimizer's own edge, dashed its threshold."""
    figure = new_figure(8, 11)
    loss, own, sharp, trace, negative = figure.subplots(5, 1, sharex=True)
    steps = history.series("step")
    loss.plot(steps, history.series("loss"), color=BLUE)
    for axes, name in ((sharp, "sharpness"), (trace, "trace"), (negative, "negative_mass")):
        low, high = ([pair[end] for pair in history.series(f"{name}_interval")] for end in (0, 1))
        label = "λmax" if axes is sharp else None
        band(axes, steps, history.series(name), low, high, color=BLUE, alpha=0.25, label=label)
    sharp.plot(steps, history.series("most_negative"), color=ORANGE, label="λmin")
    metric = history.snapshots[-1].metric.partition(" (")[0] if history.snapshots else "plain"
    name = "λmax(H)" if metric == "plain" else f"λmax(P⁻¹H), {metric}"
    known = [(s.step, s.edge, s.edge_threshold) for s in history.snapshots if s.edge is not None]
    own.plot([k for k, _, _ in known], [edge for _, edge, _ in known], color=BLUE, label=name)
    limits = [(k, limit) for k, _, limit in known if limit is not None and math.isfinite(limit)]
    if limits:
        own.plot(*zip(*limits, strict=True), "--", color=GREY, label="threshold")
    for axes in (own, sharp):
        axes.legend(frameon=False)
    if known and min(edge for _, edge, _ in known) > 0:
        own.set_yscale("log")
    own.set_ylabel("own edge")
    loss.set_ylabel("loss")
    sharp.set_ylabel("eigenvalues of H")
    trace.set_ylabel("tr H (95 %)")
    negative.set(ylabel="share of λ < 0 (95 %)", xlabel="training step")
    for event in history.events:
        loss.axvline(event.step, color=ORANGE, alpha=0.4, linewidth=1)
    return figure


def film_figure(history: CurvatureHistory, *, view: str, part: str) -> Figure:
    """‖H_ab‖_F of every map of a run, one panel a step, on one logarithmic colour scale."""
    frames = [(s.step, s.maps.view(view, part=part)) for s in history.snapshots if s.maps]
    if not frames:
        raise ValueError("this history has no maps: use Monitor(maps=True).")
    columns = min(len(frames), 4)
    rows = -(-len(frames) // columns)
    figure = new_figure(2.2 + 2.6 * columns, 1.2 + 2.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    top = max(float(frame.values.max()) for _, frame in frames)
    picture: Any = None
    for place, axes in enumerate(grid.flat):
        if place >= len(frames):
            axes.axis("off")
            continue
        step, frame = frames[place]
        shown = (frame.values / top).clamp_min(1e-4).log10()
        picture = axes.imshow(shown.numpy(), vmin=-4, vmax=0, cmap="viridis")
        names, every = frame.names, -(-len(frame.names) // 16)
        ticks = range(0, len(names), every)
        axes.set_title(f"step {step}", fontsize=9)
        axes.set_xticks(ticks, [names[k] for k in ticks], rotation=90, fontsize=6)
        axes.set_yticks(ticks, [names[k] for k in ticks] if not place % columns else [])
        axes.tick_params(labelsize=6)
    figure.colorbar(picture, ax=grid, label=f"log₁₀ of the norm over the largest ({top:.3g})")
    return figure


def trajectory_figure(trajectory: ConvergenceTrajectory) -> Figure:
    """Loss and gradient norm, sharpness against 2/η, conditioning."""
    figure = new_figure(12, 3.6)
    a, b, c = figure.subplots(1, 3)
    a.plot(trajectory.losses.tolist(), label="loss of the batch", color=BLUE)
    a.plot(trajectory.gradient_norms.tolist(), label="gradient norm", color=ORANGE, linewidth=0.8)
    a.set_ylabel("loss, gradient norm (loss / parameter)")
    top = [look.largest for look in trajectory.looks]
    error = error_bars(top, [look.largest_interval for look in trajectory.looks])
    b.errorbar(
        trajectory.look_steps, top, yerr=error, fmt="o-", color=BLUE, label="λmax (certified)"
    )
    edge = 2 * (1 + trajectory.momentum) / trajectory.learning_rate
    b.axhline(edge, color=ORANGE, linestyle="--", label="edge of stability")
    b.set_ylabel("sharpness (loss / parameter²)")
    kappa = [look.condition_number for look in trajectory.looks]
    error = error_bars(kappa, [look.interval for look in trajectory.looks], reach=9)
    c.errorbar(trajectory.look_steps, kappa, yerr=error, fmt="o-", color=GREEN, label="95 %")
    c.set_ylabel("condition number λmax / mean |λ|")
    for axes in (a, b, c):
        axes.set(xlabel="step", yscale="log")
        axes.legend(fontsize=8)
    return tidy_log_axes(figure)


def conditioning_figure(conditioning: EffectiveConditioning) -> Figure:
    """Sharpness of every layer with its certified interval, and the edge 2/η."""
    figure = new_figure(6.5, 3.6)
    axes = figure.add_subplot()
    values = [layer.sharpness for layer in conditioning.layers]
    error = error_bars(values, [layer.interval for layer in conditioning.layers])
    axes.bar(range(len(values)), values, yerr=error, color=BLUE, capsize=3)
    axes.axhline(conditioning.largest, color="black", linewidth=1, label="whole model")
    if conditioning.learning_rate:
        axes.axhline(2 / conditioning.learning_rate, color=ORANGE, linestyle="--", label="2/η")
    axes.set_xticks(range(len(values)), [layer.name for layer in conditioning.layers], rotation=30)
    axes.set(ylabel="λmax (loss / parameter²)", yscale="log", title="sharpness by layer")
    axes.legend(fontsize=8)
    return tidy_log_axes(figure)


def layers_figure(curvature: LayerWiseCurvature) -> Figure:
    """Largest eigenvalue of every sublayer as bars."""
    figure = new_figure(7, 3.8)
    axes = figure.add_subplot()
    names = [f"{'' if c.layer is None else c.layer} {c.sublayer}" for c in curvature.layers]
    axes.bar(range(len(names)), [c.top_eigenvalue for c in curvature.layers])
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set(ylabel="largest eigenvalue", title="curvature by layer")
    return figure
