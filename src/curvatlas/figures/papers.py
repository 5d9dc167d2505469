"""Figures of the papers, drawn as the papers draw them, from the panels a reproduction holds."""

from __future__ import annotations

import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.style import (
    COLOURS,
    MUTED,
    band,
    colour_bar,
    draws,
    error_bars,
    legend,
    name_axis,
    panels,
    plain_numbers,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.studies.papers.reproduction import Mark, Panel, Reproduction

_SHARED: dict[str, dict[str, Any]] = {
    "none": {},
    "x": {"sharex": True},
    "y": {"sharey": True},
    "both": {"sharex": True, "sharey": True},
    "columns": {"sharex": True, "sharey": "row"},
}
_FAINT = 0.35  # opacity
_LETTERS_AN_INCH = 13  # of what stands above the panels
_BAR = 0.4  # of the place of a name


@draws("Reproduction")
def draw_reproduction(result: Reproduction) -> Figure:
    """Every panel at its place; above them what it is, from what data, and the verdict."""
    if not result.panels:
        raise TypeError(f"{result.id} is a statement without a picture: print it.")
    columns = min(result.columns, len(result.panels))
    rows = -(-len(result.panels) // columns)
    images = [panel.image is not None for panel in result.panels]
    height = 1.3 if any(images) else 1.0
    figure, axes = panels(columns, rows, height=height, **_SHARED[result.shared])
    image: Any = None
    for axis, panel in zip(axes, result.panels, strict=False):
        if panel.image is None:
            _marks(axis, panel)
        else:
            image = _image(axis, panel)
    for axis in axes[len(result.panels) :]:
        axis.set_axis_off()
    if all(images):  # one scale for all
        colour_bar(figure, image, axes[: len(result.panels)], result.panels[0].ylabel)
    across = int(_LETTERS_AN_INCH * figure.get_figwidth())
    words = [f"{result.id}: {result.verdict}", result.setting]
    told = "\n".join(line for text in words for line in textwrap.wrap(text, across))
    figure.suptitle(told, fontsize=9, color=MUTED)
    return figure


def _marks(axis: Any, panel: Panel) -> None:
    for mark in panel.marks:
        _mark(axis, mark)
    # A panel without a mark has nothing that a logarithm could show.
    if any(bool((mark.x > 0).any()) for mark in panel.marks) or panel.xscale == "linear":
        axis.set_xscale(panel.xscale)
    if any(bool((mark.y > 0).any()) for mark in panel.marks):
        axis.set_yscale(panel.yscale)
    if not panel.marks:
        axis.set_xticks([])
        axis.set_yticks([])
    for place in panel.dotted if panel.marks else ():
        axis.axvline(place, color=MUTED, linewidth=0.9, linestyle=":")
    if panel.blocks:
        name_axis(axis.xaxis, panel.blocks, turned=90, size=8)
    if panel.note:
        axis.text(
            0.5, 0.5, panel.note, transform=axis.transAxes, ha="center", va="center", color=MUTED
        )
    axis.set_xlabel(panel.xlabel)
    axis.set_ylabel(panel.ylabel)
    legend(axis, panel.title)


def _mark(axis: Any, mark: Mark) -> None:
    x, y = plain_numbers(mark.x), plain_numbers(mark.y)
    how: dict[str, Any] = {"color": mark.colour, "label": mark.label or "_"}
    how |= {"alpha": _FAINT} if mark.faint else {}
    if mark.style == "columns":
        if mark.low is not None and mark.high is not None:
            ends = list(zip(mark.low.tolist(), mark.high.tolist(), strict=True))
            how |= {"yerr": error_bars(y.tolist(), ends), "error_kw": {"ecolor": MUTED}}
        axis.bar(x, y, _BAR, **how)
    elif mark.style in ("bars", "steps"):
        axis.stairs(y, x, fill=mark.style == "bars", linewidth=1.2, **how)
    elif mark.style == "dashed":
        axis.plot(x, y, linestyle="--", linewidth=1.0, **how)
    elif mark.style == "line" or mark.low is None or mark.high is None:
        points = {} if mark.style == "line" else {"marker": "o", "markersize": 3}
        axis.plot(x, y, linewidth=1.3, **points, **how)
    else:
        band(axis, x, y, mark.low, mark.high, markersize=3, **how)


def _image(axis: Any, panel: Panel) -> Any:
    """A matrix of colours with dashed lines between its blocks."""
    values = np.asarray(plain_numbers(panel.image))
    low, high = panel.limits or (float(values.min()), float(values.max()))
    image = axis.imshow(values, vmin=low, vmax=high, cmap=COLOURS, interpolation="nearest")
    edges = [0, *panel.borders, len(values)]
    for border in panel.borders:
        axis.axhline(border - 0.5, color="white", linewidth=0.7, linestyle="--")
        axis.axvline(border - 0.5, color="white", linewidth=0.7, linestyle="--")
    middles = [(first + last) / 2 - 0.5 for first, last in pairwise(edges)]
    wide = [last - first > len(values) / 30 for first, last in pairwise(edges)]
    shown = [
        (m, n) for m, n, w in zip(middles, panel.blocks, wide, strict=False) if w
    ]  # names that have room
    axis.set_xticks([m for m, _ in shown], [n for _, n in shown], rotation=90)
    axis.set_yticks([m for m, _ in shown], [n for _, n in shown])
    axis.set_title(panel.title)
    return image
