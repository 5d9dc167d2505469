"""What the figures share: colours, sizes, axes that can be read, marks that say what they show."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from curvatlas.display import new_figure as new_figure
from curvatlas.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Array = np.ndarray[Any, np.dtype[np.float64]]

# A page exchanges these for its own (report/svg.py), so that a picture follows its dark mode.
INK, MUTED, GRID, PAPER = "#1b2530", "#667080", "#d5dae0", "#ffffff"
# of Okabe and Ito: told apart by colour-blind readers
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
YELLOW, SKY = "#e69f00", "#56b4e9"
GREY = MUTED
SERIES = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY)
EXCHANGED = {
    INK: "ink", "#000000": "ink", MUTED: "muted", GRID: "grid", PAPER: "paper",
    **{colour: f"c{index}" for index, colour in enumerate(SERIES)},
}  # fmt: skip
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")
PathLike = str | os.PathLike[str]
_FEW_DECADES = 2.0  # below this, 1, 2 and 5 of every decade are labelled


def tidy_log_axes(figure: Figure) -> Figure:
    """Label decades, or 1, 2, 5 where there are few; returns the figure.

    Matplotlib labels every minor tick of an axis shorter than a decade, over each other.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
            low, high = sorted(axis.get_view_interval())
            if axis.get_scale() == "log" and low > 0 and math.log10(high / low) < _FEW_DECADES:
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return figure


def saved(figure: Figure, path: PathLike | None) -> Figure:
    tidy_log_axes(figure)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
    return figure


def tooltip(artist: Any, texts: Any) -> None:
    """What a page shows when a mark of this artist is pointed at.

    A text a point of a line or collection, a text for a bar, or a matrix of texts for a map's
    cells. Points and bars with a label in the legend have tooltips without this.
    """
    artist.tooltips = texts


def printable(text: str) -> str:
    """Without the characters that neither a font nor XML has: names come from anywhere."""
    return _UNPRINTABLE.sub("\ufffd", text)


def clean_texts(figure: Any) -> None:
    """Names of a model's parameters are drawn without what no font has."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(printable(text.get_text()))


def mapping(value: Result | Mapping[str, Any]) -> Mapping[str, Any]:
    return value.to_dict() if isinstance(value, Result) else value


def plain_numbers(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def shade(index: int, count: int) -> tuple[float, float, float]:
    """The colour of one of several ordered lines, from blue to orange."""
    share = index / max(count - 1, 1)
    return 0.1 + 0.75 * share, 0.45, 0.7 - 0.5 * share


def band(
    axes: Any,
    x: Any,
    values: Any,
    low: Any,
    high: Any,
    *,
    color: Any = None,
    alpha: float = 0.2,
    line_alpha: float = 1.0,
    style: str = "-",
    **options: Any,
) -> None:
    """A line with its interval as a band."""
    x, values, low, high = (np.asarray(plain_numbers(side)) for side in (x, values, low, high))
    (line,) = axes.plot(x, values, style, color=color, alpha=line_alpha, **options)
    axes.fill_between(x, low, high, color=line.get_color(), alpha=alpha * line_alpha)


def error_bars(
    values: Sequence[float], intervals: Sequence[tuple[float, float]], *, reach: float = math.inf
) -> list[list[float]]:
    """Distances to both ends as matplotlib takes them, never negative.

    reach: the upper ones at most so many times the value, so that an open interval stays drawable.
    """
    pairs = list(zip(values, intervals, strict=True))
    return [
        [max(v - low, 0.0) for v, (low, _) in pairs],
        [min(max(high - v, 0.0), reach * abs(v)) for v, (_, high) in pairs],
    ]


def thinned(names: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    """Every k-th place and its name, so that at most ``most`` are written."""
    places = list(range(0, len(names), max(-(-len(names) // most), 1)))
    return places, [names[i] for i in places]


def name_axis(axis: Any, names: Sequence[str], *, most: int = 40, **text: Any) -> None:
    """Names at 0, 1, 2 …; of more than ``most`` every second, third … is written."""
    places, labels = thinned(names, most)
    axis.set_ticks(places, [printable(label) for label in labels], **text)
    axis.names = list(names)  # tooltips know them all


def log_map(
    axes: Any,
    values: Array,
    alive: Any,
    *,
    limits: tuple[float | None, float | None] = (None, None),
    aspect: str = "auto",
) -> Any:
    """log10 of a matrix, grey where it is not ``alive``."""
    import matplotlib

    exponents = np.where(alive, np.log10(np.where(alive, values, 1.0)), np.nan)
    # survives colour blindness and grey printing
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="0.8")
    low, high = limits
    return axes.imshow(
        exponents, cmap=colours, vmin=low, vmax=high, interpolation="nearest", aspect=aspect
    )
