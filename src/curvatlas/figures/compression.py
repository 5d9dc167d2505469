"""Pictures of pruning and rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.style import BLUE, GREY, ORANGE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.training.compression import QuantizationTable
    from curvatlas.training.pruning import Pruning

_MOST_PARTS = 40  # bars with a name


def pruning_figure(found: Pruning) -> Figure:
    """The share of every part that goes; the loss on the way to the pruned weights."""
    figure = new_figure(9.0, 4.4)
    bars, line = figure.subplots(1, 2)
    names = list(found.part_sparsity)[:_MOST_PARTS]
    shares = [100 * found.part_sparsity[name] for name in names]
    bars.barh(range(len(names)), shares, color=BLUE)
    bars.set_yticks(range(len(names)), names, fontsize=6)
    bars.invert_yaxis()
    bars.axvline(100 * found.sparsity, color=GREY, linestyle="--", label="all parts together")
    bars.set(title=f"{found.method}, {found.sparsity:.0%} of the weights", xlabel="removed, %")
    bars.legend(fontsize=7)
    draw_segment(line, found)
    return figure


def draw_segment(axes: Any, found: Any) -> None:
    """φ(t) on the way to the new weights, and the predicted rise with its interval."""
    points, losses = (side.tolist() for side in found.segment)
    axes.plot(points, losses, "o-", color=BLUE, label="loss, measured")
    predicted = found.loss_before + found.predicted_rise
    low, high = (found.loss_before + end for end in found.predicted_interval)
    error = np.array([[max(predicted - low, 0.0)], [max(high - predicted, 0.0)]])
    label = "predicted from the start, with interval"
    axes.errorbar([1.0], [predicted], yerr=error, fmt="s", color=ORANGE, capsize=4, label=label)
    words = "" if found.in_quadratic_range else " (outside the quadratic range)"
    axes.set(xlabel="share of the change", ylabel="loss", title=f"on the way{words}")
    axes.legend(fontsize=7)


def quantization_figure(found: QuantizationTable) -> Figure:
    """Rise of the loss against bits a weight: measured (filled) and predicted (open)."""
    figure = new_figure(6.4, 4.2)
    axes = figure.subplots()
    ways = {"nearest": (GREY, "s"), "curvature": (BLUE, "o")}
    for rounding in dict.fromkeys(row.rounding for row in found.rows):
        colour, marker = ways[rounding]
        rows = [row for row in found.rows if row.rounding == rounding]
        bits = [row.bits_per_weight for row in rows]
        axes.plot(
            bits, [row.rise for row in rows], marker, color=colour, label=f"{rounding}, measured"
        )
        axes.plot(
            bits,
            [row.predicted_rise for row in rows],
            marker,
            color=colour,
            fillstyle="none",
            markersize=9,
            label=f"{rounding}, predicted",
        )
    reach = max([abs(row.rise) for row in found.rows] + [1e-12])
    axes.set_yscale("symlog", linthresh=reach / 1e3)
    axes.set(xlabel="bits a weight, scales included", ylabel="rise of the loss")
    axes.set_title("rounding by groups")
    axes.legend(fontsize=7)
    return figure
