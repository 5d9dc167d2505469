"""Heat maps: a picture of one pixel a cell, with named rows and columns and a colour bar."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

from curvatlas.report.charts import Scale, figure, linear_scale, log_scale
from curvatlas.report.markup import Markup, json_block, number, table, tag

# -------------------------------------------------------------------------------------------------
# Colours that survive colour blindness, dark screens and grey printers, and small pictures.
# -------------------------------------------------------------------------------------------------


# Samples of viridis and of a blue-white-orange scale, evenly spaced; in between linear.
_SEQUENTIAL = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30",
               "fde725")  # fmt: skip
_DIVERGING = ("053061", "2166ac", "4393c3", "92c5de", "f7f7f7", "f4a582", "d6604d", "b2182b",
              "67001f")  # fmt: skip
_MISSING = (150, 150, 150)

RGB = tuple[int, int, int]


def sequential(place: float) -> RGB:
    """0 → dark violet, 1 → yellow."""
    return _between(_SEQUENTIAL, place)


def diverging(place: float) -> RGB:
    """0 → blue, ½ → white, 1 → red."""
    return _between(_DIVERGING, place)


def missing() -> RGB:
    """Grey, for what was not computed."""
    return _MISSING


def png(pixels: list[list[RGB]]) -> Markup:
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


def _between(samples: tuple[str, ...], place: float) -> RGB:
    if not math.isfinite(place):
        return _MISSING
    position = min(max(place, 0.0), 1.0) * (len(samples) - 1)
    index = min(int(position), len(samples) - 2)
    share = position - index
    one, two = bytes.fromhex(samples[index]), bytes.fromhex(samples[index + 1])
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(one, two, strict=True))
    return red, green, blue


_CELL_LIMITS = (14, 34)  # smallest and largest side of a cell, in the figure's units
_WIDEST = 620
_BAR_WIDTH, _GAP = 14, 18
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
) -> Markup:
    """One heat map. ``signed``: diverging colours around zero, else a logarithmic scale.

    None and NaN are cells that were not computed (grey). ``limits`` fixes the colour scale, so that
    several maps can be compared. ``notes`` are added to what hovering says, such as an interval.
    """
    scale = _colour_scale(values, signed, limits)
    side = min(max(_WIDEST / max(len(columns), 1), _CELL_LIMITS[0]), _CELL_LIMITS[1])
    width, height = side * len(columns), side * len(rows)
    left = 14 + _LABEL_WIDTH * max((len(name) for name in rows), default=0)
    bottom = 18 + 0.78 * _LABEL_WIDTH * max((len(name) for name in columns), default=0)
    pixels = [[_colour(value, scale, signed) for value in row] for row in values]
    image = tag(
        "image", href=png(pixels), width=f"{width:.2f}", height=f"{height:.2f}",
        preserveAspectRatio="none", class_="cells",
    )  # fmt: skip
    total_width = left + width + _GAP + _BAR_WIDTH + 64
    total_height = 8 + height + bottom
    picture = tag(
        "svg",
        tag("title", f"{title}. {description}"),
        tag(
            "g",
            tag("svg", tag("g", image, class_="marks"), width=f"{width:.2f}",
                height=f"{height:.2f}", class_="clip"),
            _names("y", rows, side, height),
            _names("x", columns, side, height),
            transform=f"translate({left:.1f},8)",
            class_="plot",
            data_width=f"{width:.2f}",
            data_height=f"{height:.2f}",
            data_cells=identifier,
        ),
        _colour_bar(scale, signed, left + width + _GAP, height),
        viewBox=f"0 0 {total_width:.0f} {total_height:.0f}",
        style=_width(total_width),
        role="img",
        aria_label=f"{title}. {description}",
    )  # fmt: skip
    data = {
        "rows": list(rows),
        "columns": list(columns),
        "values": [[_plain(value) for value in row] for row in values],
        "notes": [list(row) for row in notes] if notes is not None else None,
    }
    scrolling = tag("div", picture, class_="scroll")
    return figure(
        Markup(scrolling + json_block(identifier, data)),
        title=title,
        description=description,
        wide=True,
    )


def _width(natural: float) -> str:
    """Labels stay readable: the picture is never shrunk far, narrow screens scroll it."""
    return f"max-width:{1.35 * natural:.0f}px;min-width:{min(0.85 * natural, 900):.0f}px"


def common_limits(matrices: Sequence[Matrix], *, signed: bool) -> tuple[float, float]:
    """Limits that make several maps comparable."""
    scales = [_colour_scale(matrix, signed, None) for matrix in matrices]
    return min(s.low for s in scales), max(s.high for s in scales)


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _colour_scale(values: Matrix, signed: bool, limits: tuple[float, float] | None) -> Scale:
    known = [v for row in values for v in row if v is not None and math.isfinite(v)]
    if signed:
        reach = max((abs(v) for v in known), default=0.0) or 1.0
        low, high = limits or (-reach, reach)
        return Scale(kind="linear", low=low, high=high)
    positive = [v for v in known if v > 0]
    if not positive:
        return linear_scale([0.0, 1.0])
    scale = log_scale(positive)
    # Below a millionth of the largest all cells look alike, so the colours are spent above it.
    low, high = limits or (max(scale.low, scale.high * 1e-6), scale.high)
    return Scale(kind="log", low=low, high=high)


def _colour(value: float | None, scale: Scale, signed: bool) -> RGB:
    if value is None or not math.isfinite(value):
        return missing()
    if signed:
        return diverging(scale.place(value))
    return sequential(scale.place(value) if value > 0 or scale.kind == "linear" else 0.0)


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


def _colour_bar(scale: Scale, signed: bool, left: float, height: float) -> Markup:
    height = max(height, 90)
    ramp = diverging if signed else sequential
    pixels = [[ramp(1 - row / 63)] for row in range(64)]
    bar = tag("image", href=png(pixels), width=_BAR_WIDTH, height=f"{height:.1f}",
              preserveAspectRatio="none")  # fmt: skip
    ticks = [
        tag("text", label, x=_BAR_WIDTH + 5, y=f"{height * (1 - scale.place(v)):.1f}", dy="0.32em")
        for v, label in scale.ticks()
        if 0 <= scale.place(v) <= 1
    ]
    return tag("g", bar, ticks, transform=f"translate({left:.1f},8)", class_="colour-bar")


def cell_table(
    values: Matrix, *, rows: Sequence[str], columns: Sequence[str], caption: str
) -> Markup:
    """The numbers of a small map, for readers who do not see it."""
    body: list[list[object]] = [
        [name, *(number(v) if v is not None else "–" for v in row)]
        for name, row in zip(rows, values, strict=True)
    ]
    return table(["", *columns], body, caption=caption)
