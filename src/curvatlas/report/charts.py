"""Static SVG figures that report.js makes interactive: charts of curves, and heat maps.

Marks are drawn in the coordinates of the plotting area and carry what a reader sees on hover; the
axes tell their scale in data attributes. Without JavaScript the figure is complete and readable.

Why no chart library is bundled (weighed again in November 2026, minified sizes): Plotly's cartesian
bundle, 1.5 MB, is the smallest of its bundles that draws heat maps; Vega with Vega-Lite, 0.77 MB,
compiles its expressions by ``Function`` and would need ``unsafe-eval`` in the page's content
policy; Observable Plot with D3, 0.49 MB, has no zoom of its own. All of them draw nothing without
JavaScript, and a page that is printed, mailed or read in a viewer that runs no scripts would be
empty. Ours adds 16 kB of script to a page that is complete without it; hover, zoom, keyboard and
tables are tested in a browser (tests/report/test_browser.py).
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from curvatlas.report.markup import Markup, join, json_block, number, superscript, table, tag

# --- axes: report.js holds the same functions, so that a zoomed figure gets new ticks ------------

Kind = Literal["linear", "log", "symlog"]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A numeric axis. symlog is asinh(v / threshold): linear near zero, logarithmic far away."""

    kind: Kind
    low: float
    high: float
    threshold: float = 1.0

    def warp(self, value: float) -> float:
        """The value in the space in which the axis is even."""
        if self.kind == "log":
            return math.log10(max(value, 1e-300))
        return math.asinh(value / self.threshold) if self.kind == "symlog" else value

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        low, high = self.warp(self.low), self.warp(self.high)
        return (self.warp(value) - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """About five round numbers within the axis, with their labels."""
        if self.kind == "linear":
            values = _round_numbers(self.low, self.high)
        else:
            values = self._within((1,))
            if len(values) < 3:
                values = self._within((1, 2, 5))
            if len(values) < 3:
                values = _round_numbers(self.low, self.high)
        return [(value, tick_label(value)) for value in _thinned(values)]

    def _within(self, factors: tuple[int, ...]) -> list[float]:
        """Multiples of powers of ten on the axis; on both sides of zero for symlog."""
        reach = max(abs(self.low), abs(self.high))
        smallest = self.low if self.kind == "log" else self.threshold
        exponents = range(math.floor(math.log10(smallest)), math.floor(math.log10(reach)) + 1)
        powers = [factor * 10.0**exponent for exponent in exponents for factor in factors]
        if self.kind == "symlog":
            powers = [power for power in powers if power >= self.threshold]
            powers = [-power for power in reversed(powers)] + [0.0] + powers
        return [power for power in powers if self.low <= power <= self.high]


def tick_label(value: float) -> str:
    """As short as an axis needs: ``0.01``, ``2000``, ``10⁻⁴``, ``2×10⁷``."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.6g}".replace("-", "−")
    mantissa, exponent = f"{abs(value):.5e}".split("e")
    factor = mantissa.rstrip("0").rstrip(".")
    power = f"10{superscript(int(exponent))}"
    sign = "−" if value < 0 else ""
    return f"{sign}{power}" if factor == "1" else f"{sign}{factor}×{power}"


def linear_scale(values: Iterable[float], *, zero: bool = False) -> Scale:
    """Fits the values, with a little room; ``zero`` puts the origin on the axis."""
    low, high = _range(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(kind="linear", low=low if zero and low == 0 else low - room, high=high + room)


def log_scale(values: Iterable[float]) -> Scale:
    """Fits the positive values, with a little room."""
    low, high = _range([v for v in values if v > 0] or [1.0])
    room = 10 ** (0.05 * math.log10(high / low)) if high > low else 2.0
    return Scale(kind="log", low=low / room, high=high * room)


def symlog_scale(values: Iterable[float], *, decades: float = 3.0) -> Scale:
    """Shows ``decades`` powers of ten on each side of zero, below them linearly."""
    low, high = _range(values)
    reach = max(abs(low), abs(high)) or 1.0
    threshold = reach / 10**decades
    low, high = min(low, -threshold), max(high, threshold)
    scale = Scale(kind="symlog", low=low, high=high, threshold=threshold)
    room = 0.04 * (scale.warp(high) - scale.warp(low))
    return Scale(
        kind="symlog",
        low=math.sinh(scale.warp(low) - room) * threshold,
        high=math.sinh(scale.warp(high) + room) * threshold,
        threshold=threshold,
    )


def fitting_scale(values: Sequence[float]) -> Scale:
    """Logarithmic where the values are positive and far apart, else linear."""
    wide = min(values) > 0 and max(values) > 20 * min(values)
    return log_scale(values) if wide else linear_scale(values)


def _range(values: Iterable[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 1.0)


def _round_numbers(low: float, high: float) -> list[float]:
    span = high - low
    if not span > 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / 4))
    for factor in (1, 2, 5, 10):
        if span / (step * factor) <= 6:
            step *= factor
            break
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _thinned(values: list[float], most: int = 7) -> list[float]:
    """Every second, third … value, zero kept, when there are more than ``most``."""
    if len(values) <= most:
        return values
    every = math.ceil(len(values) / most)
    anchor = values.index(0.0) if 0.0 in values else 0
    return [value for index, value in enumerate(values) if (index - anchor) % every == 0]


# --- curves --------------------------------------------------------------------------------------

WIDTH, HEIGHT = 480, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 12, 50
AREA_WIDTH, AREA_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

_MOST_DOTS = 100
_MOST_NAMES = 28  # slanted names that fit under the axis; of more every second, third … is shown

Style = Literal["line", "points", "both", "stems", "bars", "area"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Numbers drawn in one colour (and dash, for grey printers). Intervals are (low, high)."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "both"
    intervals: Sequence[tuple[float, float]] | None = None
    colour: int = 0
    labels: Sequence[str] | None = None  # what hovering says; default: x and y


def chart(
    series: Sequence[Series],
    *,
    x_scale: Scale | Callable[[list[float]], Scale],
    y_scale: Scale | Callable[[list[float]], Scale],
    x_label: str,
    y_label: str,
    title: str,
    description: str,
    x_names: Sequence[str] | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> Markup:
    """One figure with its caption and legend; ``description`` says in words what it shows.

    x_scale, y_scale: an axis, or what makes one of all the series' numbers.
    x_names: names for x = 0, 1, 2 … instead of numbers. marks: what happened at some x, in words.
    """
    if not isinstance(x_scale, Scale):
        x_scale = x_scale([x for one in series for x in one.x])
    if not isinstance(y_scale, Scale):
        ends = [end for one in series for pair in one.intervals or () for end in pair]
        y_scale = y_scale([y for one in series for y in one.y] + ends)
    words = (x_label, y_label)
    curves = [_marks(one, x_scale, y_scale, words, x_names) for one in series]
    zero = join(_zero_lines(x_scale, y_scale), _happenings(marks, x_scale))
    # slanted names reach further down the longer they are
    extra = min(8 + 3.6 * max(map(len, x_names), default=0), 110) if x_names else 0
    picture = _frame(
        join(zero, curves),
        axis("x", x_scale, x_names),
        axis("y", y_scale, None),
        _axis_titles(x_label, y_label, extra),
        title=f"{title}. {description}",
        x_scale=x_scale,
        y_scale=y_scale,
        extra=extra,
    )
    return figure(picture, title=title, description=description, legend=_legend(series))


def figure(
    picture: Markup,
    *,
    title: str,
    description: str,
    legend: Markup | None = None,
    wide: bool = False,
) -> Markup:
    """The frame that report.js looks for: caption, picture, legend, a place for hover text."""
    return tag(
        "figure",
        tag("figcaption", tag("strong", title), " ", tag("span", description)),
        picture,
        legend,
        class_="chart wide" if wide else "chart",
        tabindex=0,
        role="group",
        aria_label=title,
    )


def axis(which: str, scale: Scale, names: Sequence[str] | None) -> Markup:
    """Tick marks and labels: round numbers, or names at 0, 1, 2 …"""
    size = AREA_WIDTH if which == "x" else AREA_HEIGHT
    if names is not None:
        every = math.ceil(len(names) / _MOST_NAMES)
        shown = list(enumerate(names))[::every]
        places = [(scale.place(index) * size, name) for index, name in shown]
    else:
        places = [(scale.place(v) * size, label) for v, label in scale.ticks()]
    if which == "y":
        places = [(size - place, label) for place, label in places]
    slanted = names is not None
    ticks = [_tick(which, place, label, slanted) for place, label in places]
    return tag("g", ticks, class_=f"axis {which}", data_kind="names" if slanted else scale.kind)


def _tick(which: str, place: float, label: str, slanted: bool) -> Markup:
    if which == "y":
        inner = tag("path", d="M0,0H-5") + tag("text", label, x=-9, dy="0.32em", text_anchor="end")
        moved = f"translate(0,{place:.2f})"
    else:
        turned = {"transform": "rotate(-38)", "x": -6, "y": 13, "text_anchor": "end"}
        words = turned if slanted else {"y": 19, "text_anchor": "middle"}
        inner = tag("path", d="M0,0V5") + tag("text", label, **words)
        moved = f"translate({place:.2f},{AREA_HEIGHT})"
    return tag("g", Markup(inner), class_="tick", transform=moved, data_at=f"{place:.2f}")


def _axis_titles(x_label: str, y_label: str, extra: float) -> Markup:
    x = tag("text", x_label, x=AREA_WIDTH / 2, y=AREA_HEIGHT + 41 + extra, text_anchor="middle")
    turned = f"translate({-_LEFT + 13},{AREA_HEIGHT / 2}) rotate(-90)"
    return tag("g", x, tag("text", y_label, transform=turned, text_anchor="middle"), class_="title")


def _frame(
    marks: Markup, *axes: Markup, title: str, x_scale: Scale, y_scale: Scale, extra: float
) -> Markup:
    area = f"M0,0H{AREA_WIDTH}V{AREA_HEIGHT}H0Z"
    return tag(
        "svg",
        tag("title", title),
        tag(
            "g",
            tag("path", d=area, class_="area"),
            # a nested svg clips what is zoomed out of the area, without identifiers to collide
            tag(
                "svg",
                tag("g", marks, class_="marks"),
                width=AREA_WIDTH,
                height=AREA_HEIGHT,
                class_="clip",
            ),
            axes,
            transform=f"translate({_LEFT},{_TOP})",
            class_="plot",
            data_width=AREA_WIDTH,
            data_height=AREA_HEIGHT,
            **scale_attributes("x", x_scale),
            **scale_attributes("y", y_scale),
        ),
        viewBox=f"0 0 {WIDTH} {HEIGHT + extra:.0f}",
        role="img",
        aria_label=title,
    )


def scale_attributes(which: str, scale: Scale) -> dict[str, object]:
    """What report.js needs to make new ticks when the figure is zoomed."""
    return {
        f"data_{which}_kind": scale.kind,
        f"data_{which}_low": repr(scale.low),
        f"data_{which}_high": repr(scale.high),
        f"data_{which}_threshold": repr(scale.threshold),
    }


def _zero_lines(x_scale: Scale, y_scale: Scale) -> Markup:
    lines = []
    if x_scale.kind == "symlog" and x_scale.low < 0 < x_scale.high:
        x = x_scale.place(0) * AREA_WIDTH
        lines.append(tag("path", d=f"M{x:.2f},0V{AREA_HEIGHT}", class_="zero"))
    if y_scale.kind != "log" and y_scale.low < 0 < y_scale.high:
        y = AREA_HEIGHT * (1 - y_scale.place(0))
        lines.append(tag("path", d=f"M0,{y:.2f}H{AREA_WIDTH}", class_="zero"))
    return join(*lines)


def _happenings(marks: Sequence[tuple[float, str]], x_scale: Scale) -> Markup:
    """A line across the chart for each, which says on hover what it was."""
    lines = []
    for x, words in marks:
        if x_scale.low <= x <= x_scale.high:
            place = f"{x_scale.place(x) * AREA_WIDTH:.2f}"
            line = tag("path", d=f"M{place},0V{AREA_HEIGHT}", class_="happening")
            dot = tag(
                "path",
                tag("title", words),
                d=f"M{place},7h0",
                class_="dot happened",
                data_x=place,
                data_y=7,
            )
            lines.append(join(line, dot))
    return join(*lines)


def _marks(
    series: Series,
    x_scale: Scale,
    y_scale: Scale,
    words: tuple[str, str],
    x_names: Sequence[str] | None,
) -> Markup:
    def across(value: float) -> float:
        return x_scale.place(value) * AREA_WIDTH

    def down(value: float) -> float:
        return AREA_HEIGHT * (1 - y_scale.place(value))

    def drawable(x: float, y: float) -> bool:
        fits = (x > 0 or x_scale.kind != "log") and (y > 0 or y_scale.kind != "log")
        return fits and math.isfinite(x) and math.isfinite(y)

    def where(x: float) -> str:
        named = x_names is not None and x == int(x) and 0 <= x < len(x_names)
        return x_names[int(x)] if x_names and named else f"{words[0]} {number(x)}"

    labels = series.labels or [
        f"{series.name}: {words[1]} {number(y)} at {where(x)}"
        for x, y in zip(series.x, series.y, strict=True)
    ]
    points = list(enumerate(zip(series.x, series.y, strict=True)))
    places = [(across(x), down(y), index) for index, (x, y) in points if drawable(x, y)]
    floor = down(0.0) if y_scale.kind != "log" and y_scale.low <= 0 else float(AREA_HEIGHT)
    shapes: list[Markup] = []
    path = "L".join(f"{x:.2f},{y:.2f}" for x, y, _ in places)
    if series.style == "area" and places:
        closed = f"M{places[0][0]:.2f},{floor:.2f}L{path}L{places[-1][0]:.2f},{floor:.2f}Z"
        shapes.append(tag("path", d=closed, class_="fill"))
    if series.style in ("line", "both", "area") and len(places) > 1:
        shapes.append(tag("path", d=f"M{path}", class_="line"))
    if series.intervals is not None:
        for x, _, index in places:
            low, high = series.intervals[index]
            if math.isfinite(low) and math.isfinite(high):
                low = max(low, y_scale.low) if y_scale.kind == "log" else low
                shapes.append(
                    tag("path", d=f"M{x:.2f},{down(low):.2f}V{down(high):.2f}", class_="interval")
                )
    # Zero has no place on a logarithmic axis: it stands below it, hollow.
    for index, (x, y) in points:
        if y == 0 and y_scale.kind == "log" and math.isfinite(x):
            place = across(x)
            shapes.append(
                tag(
                    "path",
                    tag("title", labels[index]),
                    d=f"M{place - 5:.2f},{AREA_HEIGHT - 9}h10l-5,8z",
                    class_="dot nought",
                    data_x=f"{place:.2f}",
                    data_y=AREA_HEIGHT - 5,
                )
            )
    # Every point of a long curve would make the page heavy: a hundred can be hovered over.
    every = -(-len(places) // _MOST_DOTS) if series.style in ("line", "area") else 1
    for x, y, index in places[::every]:
        if series.style in ("stems", "bars"):
            d = f"M{x:.2f},{floor:.2f}V{y:.2f}"
            kind = "stem" if series.style == "stems" else "bar"
            shapes.append(tag("path", d=d, class_=kind))
        # A stroke of no length with round ends is a dot that zooming does not stretch.
        hidden = " hidden-dot" if series.style in ("line", "area", "bars") else ""
        shapes.append(
            tag(
                "path",
                tag("title", labels[index]),
                d=f"M{x:.2f},{y:.2f}h0",
                class_=f"dot{hidden}",
                data_x=f"{x:.2f}",
                data_y=f"{y:.2f}",
            )
        )
    return tag("g", shapes, class_=f"series c{series.colour % 6}")


def _legend(series: Sequence[Series]) -> Markup | None:
    if len(series) < 2:
        return None
    items = [
        tag(
            "li",
            tag("span", class_="key", aria_hidden="true"),
            one.name,
            class_=f"c{one.colour % 6}",
        )
        for one in series
    ]
    return tag("ul", items, class_="legend")


# --- heat maps: one pixel a cell, named rows and columns, a colour bar --------------------------

# Colours that survive colour blindness, dark screens and grey printers: samples of viridis and of
# a blue-white-red scale, evenly spaced; in between linear.
_SEQUENTIAL = (
    "440154",
    "472d7b",
    "3b528b",
    "2c728e",
    "21918c",
    "28ae80",
    "5ec962",
    "addc30",
    "fde725",
)
_DIVERGING = (
    "053061",
    "2166ac",
    "4393c3",
    "92c5de",
    "f7f7f7",
    "f4a582",
    "d6604d",
    "b2182b",
    "67001f",
)
_MISSING = (150, 150, 150)  # grey, for what was not computed
_ZERO = (236, 233, 226)  # paper, for what is zero: no logarithm reaches it

RGB = tuple[int, int, int]


_CELL_LIMITS = (14, 34)  # smallest and largest side of a cell, in the figure's units
_WIDEST = 620
_BAR_WIDTH, _BAR_HEIGHT = 300, 12
_LABEL_WIDTH = 7.4  # of one character of a label
_MOST_LABELS = 64  # beyond that only every second, third … row is named

Matrix = Sequence[Sequence[float | None]]


def heatmap(
    values: Matrix,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    description: str,
    identifier: str,
    signed: bool = False,
    limits: tuple[float, float] | None = None,
    notes: Sequence[Sequence[str | None]] | None = None,
    bar: str = "",
) -> Markup:
    """One heat map. ``signed``: diverging colours around zero, else a logarithmic scale.

    None and NaN are cells that were not computed (grey), zeros have a colour of their own beside
    the logarithmic scale. ``bar`` says what the colours mean. ``limits`` fixes the colour scale, so
    that several maps can be compared. ``notes`` are added to what hovering says, such as an
    interval.
    """
    scale = _colour_scale(values, signed, limits)
    side = min(max(_WIDEST / max(len(columns), 1), _CELL_LIMITS[0]), _CELL_LIMITS[1])
    width, height = side * len(columns), side * len(rows)
    left = 14 + _LABEL_WIDTH * max((len(name) for name in rows), default=0)
    bottom = 18 + 0.78 * _LABEL_WIDTH * max((len(name) for name in columns), default=0)
    pixels = [[_colour(value, scale, signed) for value in row] for row in values]
    image = tag(
        "image",
        href=_png(pixels),
        width=f"{width:.2f}",
        height=f"{height:.2f}",
        preserveAspectRatio="none",
        class_="cells",
    )
    full_width = left + width + 14
    full_height = 8 + height + bottom
    picture = tag(
        "svg",
        tag("title", f"{title}. {description}"),
        tag(
            "g",
            tag(
                "svg",
                tag("g", image, class_="marks"),
                width=f"{width:.2f}",
                height=f"{height:.2f}",
                class_="clip",
            ),
            _names("y", rows, side, height),
            _names("x", columns, side, height),
            transform=f"translate({left:.1f},8)",
            class_="plot",
            data_width=f"{width:.2f}",
            data_height=f"{height:.2f}",
            data_cells=identifier,
        ),
        viewBox=f"0 0 {full_width:.0f} {full_height:.0f}",
        # Labels stay readable: the picture is never shrunk far, narrow screens scroll it.
        style=f"max-width:{1.35 * full_width:.0f}px;min-width:{min(0.85 * full_width, 900):.0f}px",
        role="img",
        aria_label=f"{title}. {description}",
    )
    data = {
        "rows": list(rows),
        "columns": list(columns),
        "values": [[_plain(value) for value in row] for row in values],
        "notes": [list(row) for row in notes] if notes is not None else None,
    }
    scrolling = tag("div", picture, class_="scroll")
    computed = [v for row in values for v in row]
    key = _colour_bar(
        scale,
        signed,
        bar,
        zeros=not signed and 0.0 in computed,
        missing=any(v is None or not math.isfinite(v) for v in computed),
    )
    return figure(
        Markup(key + scrolling + json_block(identifier, data)),
        title=title,
        description=description,
        wide=True,
    )


def thumbnail(values: Matrix, *, title: str, limits: tuple[float, float]) -> Markup:
    """A heat map without names, for small multiples."""
    scale = _colour_scale(values, False, limits)
    pixels = [[_colour(value, scale, False) for value in row] for row in values]
    image = tag("img", src=_png(pixels), alt=title, width=104, height=104)
    return tag("figure", image, tag("figcaption", title), class_="thumbnail")


def common_limits(matrices: Sequence[Matrix], *, signed: bool) -> tuple[float, float]:
    """Limits that make several maps comparable; one of zeros alone has none of its own."""
    telling = [m for m in matrices if any(v for row in m for v in row)]
    scales = [_colour_scale(matrix, signed, None) for matrix in telling or matrices]
    return min(s.low for s in scales), max(s.high for s in scales)


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _colour_scale(values: Matrix, signed: bool, limits: tuple[float, float] | None) -> Scale:
    computed = [v for row in values for v in row if v is not None and math.isfinite(v)]
    if signed:
        reach = max((abs(v) for v in computed), default=0.0) or 1.0
        low, high = limits or (-reach, reach)
        return Scale(kind="linear", low=low, high=high)
    scale = log_scale(computed)
    # Below a millionth of the largest all cells look alike, so the colours are spent above it.
    low, high = limits or (max(scale.low, scale.high * 1e-6), scale.high)
    return Scale(kind="log", low=low, high=high)


def _colour(value: float | None, scale: Scale, signed: bool) -> RGB:
    if value is None or not math.isfinite(value):
        return _MISSING
    if signed:
        return _ramp(_DIVERGING, scale.place(value))
    return _ramp(_SEQUENTIAL, scale.place(value)) if value > 0 else _ZERO


def _names(which: str, names: Sequence[str], side: float, height: float) -> Markup:
    every = math.ceil(len(names) / _MOST_LABELS)
    ticks = []
    for index, name in enumerate(names):
        if index % every:
            continue
        place = (index + 0.5) * side
        if which == "y":
            label = tag("text", name, x=-7, dy="0.32em", text_anchor="end")
            moved = f"translate(0,{place:.2f})"
        else:
            label = tag("text", name, transform="rotate(-48)", x=-6, y=9, text_anchor="end")
            moved = f"translate({place:.2f},{height:.2f})"
        ticks.append(tag("g", label, class_="tick", transform=moved, data_at=f"{place:.2f}"))
    return tag("g", ticks, class_=f"axis {which}", data_kind="names")


def _colour_bar(scale: Scale, signed: bool, title: str, *, zeros: bool, missing: bool) -> Markup:
    """Above the map and outside of what scrolls, so that it stays in view on a phone."""
    samples = _DIVERGING if signed else _SEQUENTIAL
    pixels = [[_ramp(samples, column / 127) for column in range(128)]]
    bar = tag(
        "image",
        href=_png(pixels),
        x=12,
        width=_BAR_WIDTH,
        height=_BAR_HEIGHT,
        preserveAspectRatio="none",
    )
    ticks = [
        tag(
            "text",
            label,
            x=f"{12 + _BAR_WIDTH * scale.place(v):.1f}",
            y=_BAR_HEIGHT + 15,
            text_anchor="middle",
        )
        for v, label in scale.ticks()
        if 0 <= scale.place(v) <= 1
    ]
    picture = tag(
        "svg", bar, ticks, viewBox=f"0 0 {_BAR_WIDTH + 24} {_BAR_HEIGHT + 20}", aria_hidden="true"
    )
    swatches = [
        tag("span", tag("span", class_=f"swatch {word}"), said)
        for word, said, there in (
            ("nought", "zero", zeros),
            ("missing", "not computed", missing),
        )
        if there
    ]
    return tag(
        "div",
        tag("span", title, class_="bar-title") if title else None,
        picture,
        swatches,
        class_="colour-bar",
    )


def cell_table(
    values: Matrix, *, rows: Sequence[str], columns: Sequence[str], caption: str
) -> Markup:
    """The numbers of a small map, for readers who do not see it."""
    body: list[list[object]] = [
        [name, *(number(v) if v is not None else "–" for v in row)]
        for name, row in zip(rows, values, strict=True)
    ]
    return table(["", *columns], body, caption=caption)


def _png(pixels: list[list[RGB]]) -> Markup:
    """A picture of one pixel a cell as a data address (PNG, 8-bit RGB)."""
    height, width = len(pixels), len(pixels[0]) if pixels else 0
    raw = b"".join(b"\x00" + bytes(channel for p in row for channel in p) for row in pixels)

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    content += chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return Markup("data:image/png;base64," + base64.b64encode(content).decode())


def _ramp(samples: tuple[str, ...], place: float) -> RGB:
    if not math.isfinite(place):
        return _MISSING
    position = min(max(place, 0.0), 1.0) * (len(samples) - 1)
    index = min(int(position), len(samples) - 2)
    share = position - index
    one, two = bytes.fromhex(samples[index]), bytes.fromhex(samples[index + 1])
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(one, two, strict=True))
    return red, green, blue
