"""What the figures share: colours, sizes, axes that can be read, marks that say what they show.

A figure is made of panels of one size, drawn a third of a page wide each: letters, ticks and labels
are made for that. ``draws`` registers the one drawing function of a result class.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from curvatlas.display import new_figure as new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Array = np.ndarray[Any, np.dtype[np.float64]]

# A page exchanges these for its own (report/svg.py), so that a picture follows its dark mode.
INK, MUTED, GRID, PAPER = "#1b2530", "#667080", "#d5dae0", "#ffffff"
# of Okabe and Ito: told apart by colour-blind readers
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
YELLOW, SKY = "#e69f00", "#56b4e9"
SERIES = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY)
EXCHANGED = {
    INK: "ink", "#000000": "ink", MUTED: "muted", GRID: "grid", PAPER: "paper",
    **{colour: f"c{index}" for index, colour in enumerate(SERIES)},
}  # fmt: skip
COLOURS = "viridis"  # survives colour blindness and grey printing
SHADING = 0.18  # opacity under a line and between the ends of an interval
MOST_CELLS = 2500  # of a map that are shapes with tooltips; more are one raster image
PathLike = str | os.PathLike[str]

_PANEL = (4.4, 3.1)  # inches
_LETTERS, _SMALL = 9.5, 9.0  # points: of labels; of ticks and legends
_ROW_OF_LEGEND = 1.35 * _SMALL  # points
_LETTERS_ACROSS = 50  # of a legend above a panel
_LONGEST_NAME = 22  # letters beside an axis; tooltips have the whole name
_COUNTED = ("step", "training step", "batch", "rank")  # axes of whole numbers
_APART = {"x": 0.38, "y": 0.26}  # inches between the middles of two labels of an axis
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")

# --- which function draws which result -----------------------------------------------------------

DRAWINGS: dict[str, Callable[..., Figure]] = {}  # kind of result → its drawing function
STAGED: set[str] = set()  # kinds of which several are drawn into one picture


F = TypeVar("F", bound=Callable[..., Any])


def draws(*kinds: str, stages: bool = False) -> Callable[[F], F]:
    """The function draws results of these kinds. With ``stages`` it takes {words: result, …}."""

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def drawn(result: Any, *choice: Any, **options: Any) -> Any:
            if stages and not isinstance(result, Mapping):
                result = {"": result}
            return finish(function(result, *choice, **options))

        for kind in kinds:
            if kind in DRAWINGS:
                raise ValueError(f"{kind} has a drawing function already.")
            DRAWINGS[kind] = drawn
        STAGED.update(kinds if stages else ())
        return drawn  # type: ignore[return-value]

    return decorated


# --- panels and their axes -----------------------------------------------------------------------


def panels(
    columns: int = 1, rows: int = 1, *, width: float = 1.0, height: float = 1.0, **options: Any
) -> tuple[Figure, list[Any]]:
    """A figure and its axes, row by row; width and height in panels of the usual size."""
    figure = new_figure(columns * width * _PANEL[0], rows * height * _PANEL[1])
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def finish(figure: Figure) -> Figure:
    """Sizes of letters, labels that can be read and do not collide, no box; returns the figure."""
    from matplotlib.text import Text
    from matplotlib.ticker import MaxNLocator

    axes: Any
    for axes in figure.axes:
        axes.tick_params(labelsize=_SMALL, which="both")
        axes.tick_params(which="both", color=MUTED, labelcolor=INK)
        axes.tick_params(which="minor", length=2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set_size(_LETTERS)
            if axis.get_scale() in ("log", "symlog"):
                _label_powers(axis)
            elif axis.get_label_text() in _COUNTED:
                axis.set_major_locator(MaxNLocator(6, integer=True))
            if hasattr(axis, "letters"):
                axis.set_tick_params(labelsize=axis.letters)
        for text in axes.findobj(Text):
            text.set_parse_math(False)  # a name may hold a dollar sign
            text.set_text(printable(text.get_text()))
        axes.title.set(size=_LETTERS, x=0.0, ha="left")
    return figure


def saved(figure: Figure, path: PathLike | None) -> Figure:
    finish(figure)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
    return figure


def _label_powers(axis: Any) -> None:
    """Fixed ticks of a logarithmic axis: round numbers that keep their distance from each other.

    Matplotlib's own labels collide around the zero of a symmetric axis, and between two powers of
    ten there are none, so that no value could be read off.
    """
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter

    low, high = sorted(float(end) for end in axis.get_view_interval())
    signed = axis.get_scale() == "symlog"
    smallest = float(axis.get_transform().linthresh) if signed else low
    reach = max(abs(low), abs(high))
    if not (0 < smallest < reach and math.isfinite(reach)):
        return
    exponents = range(math.floor(math.log10(smallest)), math.ceil(math.log10(reach)) + 1)

    def steps(*factors: int) -> list[float]:
        """Largest first, on both sides of zero."""
        sizes = [f * 10.0**k for k in reversed(exponents) for f in factors]
        both = [sign * size for size in sizes for sign in ((1, -1) if signed else (1,))]
        return [value for value in both if low <= value <= high and abs(value) >= smallest]

    place = axis.get_transform().transform
    ends = place(np.array([low, high]))
    box = axis.axes.bbox
    inches = (box.width if axis.axis_name == "x" else box.height) / axis.axes.figure.dpi
    apart = _APART[axis.axis_name] * (ends[1] - ends[0]) / max(inches, 1e-9)
    chosen: list[float] = []
    decades = [0.0, *steps(1)] if signed and low <= 0 <= high else steps(1)
    for candidates in (decades, steps(2, 5), steps(3, 7), list(np.linspace(low, high, 4)[1:3])):
        enough = 3 if candidates is decades or len(exponents) < 3 else 2
        if candidates is decades or len(chosen) < enough:
            for value in candidates:
                if all(abs(place(value) - place(other)) >= apart for other in chosen):
                    chosen.append(float(value))
    chosen.sort()
    axis.set_major_locator(FixedLocator(chosen))
    axis.set_major_formatter(FixedFormatter([power_label(value) for value in chosen]))
    fine = steps(1, 2, 3, 4, 5, 6, 7, 8, 9) if len(exponents) < 8 else steps(1)
    axis.set_minor_locator(FixedLocator([value for value in fine if value not in chosen]))
    axis.set_minor_formatter(NullFormatter())


def power_label(value: float) -> str:
    """As short as an axis needs: ``0.001``, ``2000``, ``10⁻⁴``, ``2×10⁷``."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return (f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}").replace("-", "−")
    mantissa, exponent = f"{abs(value):.2e}".split("e")
    factor = mantissa.rstrip("0").rstrip(".")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return ("−" if value < 0 else "") + (power if factor == "1" else f"{factor}×{power}")


def legend(axes: Any, title: str = "") -> None:
    """Above the panel, where it hides nothing: as many columns as its words leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    if title:
        axes.set_title(title)
    if not labels:
        return
    across = _LETTERS_ACROSS * axes.bbox.width / axes.figure.dpi / 3.4
    columns = max(int(across // (max(map(len, labels)) + 5)), 1)
    rows = -(-len(labels) // columns)
    marks = [(h.shading, h) if hasattr(h, "shading") else h for h in handles]  # as they are drawn
    axes.legend(
        marks, labels, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns,
        fontsize=_SMALL, frameon=False, borderaxespad=0.1, borderpad=0.2, handlelength=1.6,
        columnspacing=1.2, labelspacing=0.25, labelcolor=INK,
    )  # fmt: skip
    if title:
        axes.set_title(title, pad=5 + rows * _ROW_OF_LEGEND)


# --- names ---------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Without the characters that neither a font nor XML has: names come from anywhere."""
    return _UNPRINTABLE.sub("\ufffd", text)


def short_names(names: Sequence[str]) -> list[str]:
    """Parts of a model in a word or two, without the number of the block they are in."""
    short = [
        re.sub(r"^blocks\.\d+\.(?=.)", "", name).replace("embedding.", "").replace("_", " ")
        for name in names
    ]
    return [n if len(n) <= _LONGEST_NAME else f"…{n[1 - _LONGEST_NAME :]}" for n in short]


def layers_of(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """(block or part, first, last + 1) of runs of names that belong together."""
    runs: list[tuple[str, int, int]] = []
    for place, name in enumerate(names):
        parts = name.split(".")
        layer = parts[1] if parts[0] == "blocks" and len(parts) > 2 else parts[0]
        start = runs.pop()[1] if runs and runs[-1][0] == layer else place
        runs.append((layer, start, place + 1))
    return runs


def name_axis(
    axis: Any, names: Sequence[str], *, most: int = 40, turned: float = 0, size: float = _SMALL
) -> None:
    """Names at 0, 1, 2 …; of more than ``most`` every second, third … is written."""
    every = max(-(-len(names) // most), 1)
    shown = range(0, len(names), every)
    text: dict[str, Any] = {"rotation": turned}
    if turned and axis.axis_name == "x":
        text |= {"ha": "right" if turned < 90 else "center", "rotation_mode": "anchor"}
        text |= {"va": "center"} if turned == 90 else {}
        text |= {"ha": "right"}
    axis.set_ticks(shown, [printable(names[place]) for place in shown], **text)
    axis.set_ticks([], minor=True)
    axis.names, axis.letters = list(names), size  # tooltips know every name


# --- marks ---------------------------------------------------------------------------------------


def tooltip(artist: Any, texts: Any) -> None:
    """What a page shows when a mark of this artist is pointed at.

    A text a point of a line or collection, a text for a bar, or a matrix of texts for a map's
    cells. Points and bars with a label in the legend have tooltips without this.
    """
    artist.tooltips = texts


def plain_numbers(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def shade(index: int, count: int) -> tuple[float, float, float]:
    """The colour of one of several ordered lines, from blue to orange."""
    share = index / max(count - 1, 1)
    return 0.1 + 0.75 * share, 0.45, 0.7 - 0.5 * share


def band(
    axes: Any, x: Any, values: Any, low: Any, high: Any, *,
    color: Any = None, style: str = "o-", **options: Any,
) -> Any:  # fmt: skip
    """A line of points with its interval as a band."""
    x, values, low, high = (np.asarray(plain_numbers(side)) for side in (x, values, low, high))
    options = {"markersize": 4, "linewidth": 1.3, **options}
    (line,) = axes.plot(x, values, style, color=color, **options)
    line.shading = axes.fill_between(
        x, low, high, color=line.get_color(), alpha=SHADING, linewidth=0
    )
    return line


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


def points(
    axes: Any, x: Any, values: Any, intervals: Any, *, color: Any, label: str = "",
    joined: bool = True, reach: float = math.inf, **options: Any,
) -> None:  # fmt: skip
    """Points with their intervals as bars; labelled without the bars, as the legend draws them."""
    values = [float(value) for value in values]
    options = {"marker": "o", "markersize": 4.5, "linewidth": 1.3, **options}
    if not joined:
        options["linestyle"] = "none"
    axes.plot(x, values, color=color, label=label or "_", zorder=3, **options)
    error = error_bars(values, intervals, reach=reach)
    axes.errorbar(x, values, yerr=error, fmt="none", ecolor=color, elinewidth=1, capsize=2)


def lying_bars(
    axes: Any, names: Sequence[str], values: Any, intervals: Any = None, *,
    color: Any = BLUE, label: str = "", most: int = 30, shift: float = 0.0, width: float = 0.7,
    logarithmic: bool = False,
) -> None:  # fmt: skip
    """Named bars from top to bottom, with intervals; those of ``most`` names at most."""
    names, values = list(names)[:most], [float(value) for value in values][:most]
    error = None if intervals is None else error_bars(values, list(intervals)[:most])
    axes.barh(
        np.arange(len(names)) + shift, values, height=width, xerr=error, color=color,
        error_kw={"ecolor": INK, "elinewidth": 1}, label=label or "_", log=logarithmic,
    )  # fmt: skip
    if logarithmic and any(value > 0 for value in values):
        axes.set_xlim(left=min(value for value in values if value > 0) / 2)
    name_axis(axes.yaxis, short_names(names))
    axes.set_ylim(max(len(names), 1) - 0.4, -0.6)


def heat_map(
    axes: Any,
    values: Array,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    alive: Any = None,
    limits: tuple[float, float] | None = None,
    logarithmic: bool = True,
    decades: float = 5.0,
    notes: Any = None,
    colours: str = COLOURS,
) -> Any:
    """Colours of a matrix; grey where it is not ``alive``. Cells say their numbers on a page.

    Shown are ``decades`` below the largest; ``notes`` (row, column) adds words to a cell.
    """
    import matplotlib
    from matplotlib.colors import LogNorm, Normalize

    values = np.asarray(values, dtype=np.float64)
    alive = np.isfinite(values) if alive is None else np.asarray(alive, dtype=bool)
    if logarithmic:
        alive = alive & (values > 0)
    if limits is None:
        limits = colour_limits(values[alive], logarithmic=logarithmic, decades=decades)
    norm: Any = LogNorm(*limits) if logarithmic else Normalize(*limits)
    image = axes.imshow(
        np.ma.masked_where(~alive, values), norm=norm, aspect="auto", interpolation="none",
        cmap=matplotlib.colormaps[colours].resampled(64).with_extremes(bad=GRID),
    )  # fmt: skip
    tooltip(
        image,
        [
            [
                f"{row} × {column}: {values[i, j]:.4g}" + (notes(i, j) if notes else "")
                for j, column in enumerate(columns)
            ]
            for i, row in enumerate(rows)
        ]
        if values.size <= MOST_CELLS
        else None,
    )
    axes.spines[:].set_visible(False)
    axes.tick_params(length=2)
    return image


def colour_limits(
    *matrices: Any, logarithmic: bool = True, decades: float = 5.0
) -> tuple[float, float]:
    """Ends of one scale of colours for all these matrices, at most so many decades of it."""
    shown = np.concatenate([np.asarray(m, dtype=np.float64).reshape(-1) for m in matrices])
    shown = shown[np.isfinite(shown) & ((shown > 0) | (not logarithmic))]
    if not shown.size:
        return (1e-1, 1.0) if logarithmic else (0.0, 1.0)
    low, high = float(shown.min()), float(shown.max())
    if logarithmic:
        low = max(low, high / 10**decades)
        return (low, high) if high > low else (low / 2, high * 2)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def colour_bar(figure: Any, image: Any, axes: Any, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, label=label, aspect=25, pad=0.02)
    bar.outline.set_visible(False)
