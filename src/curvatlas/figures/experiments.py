"""The papers' experiments on one model: growth with a scale, sinks, how good Gauss-Newton is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from curvatlas.figures.drawing import new_figure, shade, tidy_log_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.studies.growth import Growth

_SYMBOLS = {"total": "H", "outer": "H_o", "functional": "H_f"}
_MOST_PANELS = 12


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
