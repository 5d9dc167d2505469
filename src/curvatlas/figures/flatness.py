"""Pictures of flatness: layers, bounds beside losses, what rescaling changes, correlations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvatlas.figures.style import BLUE, GREEN, GREY, ORANGE, error_bars, log_map, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.analysis.landscape.flatness import Flatness, Invariance
    from curvatlas.studies.generalisation import Generalisation

_MOST_LAYERS = 24  # bars with a name


def flatness_figure(found: Flatness) -> Figure:
    """Relative flatness by layer; sharpness against its quadratic model; bounds and losses."""
    figure = new_figure(11.0, 4.2)
    layers, rises, bounds = figure.subplots(1, 3)
    relative = found.relative_flatness
    if relative is not None:
        names = sorted(relative.values, key=lambda n: -abs(relative.values[n]))[:_MOST_LAYERS]
        values = [relative.values[n] for n in names]
        error = error_bars(values, [relative.intervals[n] for n in names])
        layers.barh(range(len(names)), values, xerr=error, color=BLUE, ecolor=GREY)
        layers.set_yticks(range(len(names)), names, fontsize=7)
        layers.invert_yaxis()
    layers.set(title="relative flatness by layer", xlabel="κ (loss)")
    for place, one in enumerate((found.sam, found.asam)):
        first = place == 0
        rises.bar(place - 0.2, one.value, 0.4, color=BLUE, label="found by ascent" * first)
        rises.bar(place + 0.2, one.quadratic, 0.4, color=GREY, label="quadratic model" * first)
    radii = [f"{one.quantity}, ρ = {one.radius:g}" for one in (found.sam, found.asam)]
    rises.set_xticks((0, 1), radii)
    rises.set(title="largest rise of the loss", ylabel="loss")
    rises.legend(fontsize=8)
    for place, bound in enumerate(b for b in (found.isotropic, found.diagonal) if b is not None):
        first = place == 0
        bars = [
            ("training samples, with noise", bound.loss, BLUE),
            ("test samples, with noise", bound.test_loss, GREEN),
            ("bound", bound.value, ORANGE),
        ]
        for k, (label, value, color) in enumerate(bars):
            if value is not None:
                bounds.bar(place + 0.25 * (k - 1), value, 0.25, color=color, label=label * first)
        bounds.set_xticks((0, 1), ("isotropic", "diagonal"))
    bounds.axhline(found.loss, color="black", linewidth=0.8, label="training loss, no noise")
    bounds.set(title="PAC-Bayes", ylabel="loss")
    bounds.set_ylim(top=1.45 * bounds.get_ylim()[1])  # room for the legend
    bounds.legend(fontsize=7)
    return figure


def invariance_figure(found: Invariance) -> Figure:
    """log10 of the relative change of every measure under every rescaling."""
    measures = list(found.before)
    changes = np.array([found.change(name) for name in measures])
    figure = new_figure(2.5 + 0.9 * len(found.rescalings), 1.6 + 0.32 * len(measures))
    axes = figure.add_subplot()
    image = log_map(axes, np.maximum(changes, 1e-16), np.isfinite(changes), limits=(-16, 1))
    axes.set_yticks(range(len(measures)), [name.replace("_", " ") for name in measures])
    axes.set_xticks(range(len(found.rescalings)), found.rescalings, rotation=40, ha="right")
    for row, column in np.argwhere(changes <= found.tolerance):
        axes.text(column, row, "same", ha="center", va="center", color="white", fontsize=7)
    axes.set_title("change under rescalings that keep the function")
    figure.colorbar(image, ax=axes, label="log10 of the relative change")
    return figure


def generalisation_figure(found: Generalisation) -> Figure:
    """Kendall's τ of each measure with the gap, its interval and the shuffled control's."""
    rows = sorted(found.correlations, key=lambda row: -row.value)
    figure = new_figure(7.2, 1.2 + 0.34 * len(rows))
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        axes.plot(row.control, (place, place), color="0.85", linewidth=9, solid_capstyle="butt")
        clear = row.interval[0] > 0 or row.interval[1] < 0
        axes.errorbar(
            row.value,
            place,
            xerr=error_bars([row.value], [row.interval]),
            fmt="o",
            color=BLUE if clear else GREY,
        )
    axes.axvline(0.0, color="black", linewidth=0.7)
    axes.set_yticks(range(len(rows)), [row.measure for row in rows])
    axes.invert_yaxis()
    axes.set(xlim=(-1, 1), xlabel="Kendall's τ with the generalisation gap (95 %)")
    axes.set_title(f"{found.dataset}, {len(found.models)} models; grey: gaps shuffled")
    return figure
