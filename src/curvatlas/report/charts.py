"""Static SVG figures that report.js makes interactive: lines, points, intervals, stems, bars.

Marks are drawn in the coordinates of the plotting area and carry what a reader sees on hover; the
axes tell their scale in data attributes. Without JavaScript the figure is complete and readable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from curvatlas.report.markup import Markup, join, number, tag
from curvatlas.report.scales import Scale

WIDTH, HEIGHT = 480, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 12, 50
AREA_WIDTH, AREA_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

_MOST_DOTS = 100
_NAME_ROOM = 62  # below the axis, when places have slanted names instead of numbers

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
    x_scale: Scale,
    y_scale: Scale,
    x_label: str,
    y_label: str,
    title: str,
    description: str,
    x_names: Sequence[str] | None = None,
) -> Markup:
    """One figure with its caption and legend; ``description`` says in words what it shows.

    ``x_names``: names for x = 0, 1, 2 … instead of numbers.
    """
    marks = [_marks(one, x_scale, y_scale) for one in series]
    zero = _zero_lines(x_scale, y_scale)
    picture = _frame(
        join(zero, marks),
        axis("x", x_scale, x_names),
        axis("y", y_scale, None),
        _axis_titles(x_label, y_label, _NAME_ROOM if x_names else 0),
        title=f"{title}. {description}",
        x_scale=x_scale,
        y_scale=y_scale,
        extra=_NAME_ROOM if x_names else 0,
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
        places = [(scale.place(index) * size, name) for index, name in enumerate(names)]
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


def _axis_titles(x_label: str, y_label: str, extra: int) -> Markup:
    x = tag("text", x_label, x=AREA_WIDTH / 2, y=AREA_HEIGHT + 41 + extra, text_anchor="middle")
    turned = f"translate({-_LEFT + 13},{AREA_HEIGHT / 2}) rotate(-90)"
    return tag("g", x, tag("text", y_label, transform=turned, text_anchor="middle"), class_="title")


def _frame(
    marks: Markup, *axes: Markup, title: str, x_scale: Scale, y_scale: Scale, extra: int
) -> Markup:
    area = f"M0,0H{AREA_WIDTH}V{AREA_HEIGHT}H0Z"
    return tag(
        "svg",
        tag("title", title),
        tag(
            "g",
            tag("path", d=area, class_="area"),
            # a nested svg clips what is zoomed out of the area, without identifiers to collide
            tag("svg", tag("g", marks, class_="marks"), width=AREA_WIDTH, height=AREA_HEIGHT,
                class_="clip"),
            axes,
            transform=f"translate({_LEFT},{_TOP})",
            class_="plot",
            data_width=AREA_WIDTH,
            data_height=AREA_HEIGHT,
            **scale_attributes("x", x_scale),
            **scale_attributes("y", y_scale),
        ),
        viewBox=f"0 0 {WIDTH} {HEIGHT + extra}",
        role="img",
        aria_label=title,
    )  # fmt: skip


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


def _marks(series: Series, x_scale: Scale, y_scale: Scale) -> Markup:
    def across(value: float) -> float:
        return x_scale.place(value) * AREA_WIDTH

    def down(value: float) -> float:
        return AREA_HEIGHT * (1 - y_scale.place(value))

    def drawable(x: float, y: float) -> bool:
        fits = (x > 0 or x_scale.kind != "log") and (y > 0 or y_scale.kind != "log")
        return fits and math.isfinite(x) and math.isfinite(y)

    labels = series.labels or [
        f"{series.name}: {number(x)}, {number(y)}" for x, y in zip(series.x, series.y, strict=True)
    ]
    places = [
        (across(x), down(y), index)
        for index, (x, y) in enumerate(zip(series.x, series.y, strict=True))
        if drawable(x, y)
    ]
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
            tag("path", tag("title", labels[index]), d=f"M{x:.2f},{y:.2f}h0",
                class_=f"dot{hidden}", data_x=f"{x:.2f}", data_y=f"{y:.2f}")
        )  # fmt: skip
    return tag("g", shapes, class_=f"series c{series.colour % 6}")


def _legend(series: Sequence[Series]) -> Markup | None:
    if len(series) < 2:
        return None
    items = [
        tag("li", tag("span", class_="key", aria_hidden="true"), one.name,
            class_=f"c{one.colour % 6}")
        for one in series
    ]  # fmt: skip
    return tag("ul", items, class_="legend")
