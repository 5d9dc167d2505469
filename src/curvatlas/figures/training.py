"""The picture of a training run: loss, sharpness, trace and negative mass over the steps."""

from __future__ import annotations

from typing import Any

from curvatlas.training.snapshot import CurvatureHistory

_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#666666"  # told apart by colour-blind readers


def history_figure(history: CurvatureHistory) -> Any:
    """Four panels on one axis of steps; the dashed line is 2/η, the edge of stability."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    loss, sharp, trace, negative = figure.subplots(4, 1, sharex=True)
    steps = history.series("step")
    loss.plot(steps, history.series("loss"), color=_BLUE)
    loss.set_ylabel("loss")
    intervals = history.series("sharpness_interval")
    sharp.plot(steps, history.series("sharpness"), color=_BLUE, label="λmax")
    sharp.fill_between(
        steps, [i[0] for i in intervals], [i[1] for i in intervals], color=_BLUE, alpha=0.25
    )
    sharp.plot(steps, history.series("most_negative"), color=_ORANGE, label="λmin")
    rates = history.series("learning_rate")
    if steps and all(rate for rate in rates):
        sharp.plot(steps, [2 / rate for rate in rates], "--", color=_GREY, label="2/η")
    sharp.set_ylabel("eigenvalues of H")
    sharp.legend(frameon=False)
    intervals = history.series("trace_interval")
    trace.plot(steps, history.series("trace"), color=_BLUE)
    trace.fill_between(
        steps, [i[0] for i in intervals], [i[1] for i in intervals], color=_BLUE, alpha=0.25
    )
    trace.set_ylabel("tr H (95 %)")
    intervals = history.series("negative_mass_interval")
    negative.plot(steps, history.series("negative_mass"), color=_BLUE)
    negative.fill_between(
        steps, [i[0] for i in intervals], [i[1] for i in intervals], color=_BLUE, alpha=0.25
    )
    negative.set_ylabel("share of λ < 0 (95 %)")
    negative.set_xlabel("training step")
    for event in history.events:
        loss.axvline(event.step, color=_ORANGE, alpha=0.4, linewidth=1)
    return figure
