"""A matplotlib figure as a piece of a page: text as text, the page's colours, tooltips on marks.

The same figure that ``plot()`` returns is written once by matplotlib and then changed where a page
wants more than a file: colours become the page's variables (``--ink``, ``--muted``, ``--grid``,
``--paper``, ``--c0`` …, each with the printed colour as its fallback), cells of a map become shapes
instead of pixels, and marks say what they show when they are pointed at.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup

from curvatlas.figures import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Element = ElementTree.Element[str]

_MOST_MARKS = 2500  # of an artist; more are one raster image without tooltips
_MOST_TOOLTIPS = 400  # of one line of points: closer together nobody can point at them
_ALONG_CURVE = 40  # tooltips of a line without points
_SHOWN_SIZE = 1.2  # pixels of a page a point (1/72 inch): 9-point text is 11 pixels high
_WIDE = 600.0  # points, from which a picture keeps its size on a small screen and scrolls there
_REACH = 6.0  # radius around a point, in points, that answers to the pointer
_LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_COLOUR = re.compile("|".join(style.EXCHANGED))
_REFERENCE = re.compile(r"#([\w.-]+)")


def embed(figure: Figure, *, alt: str, classes: str = "") -> Markup:
    """The figure as one inline ``<svg>``; ``alt`` says in words what it shows.

    The same figure gives the same text. ``classes`` are added to the element's own, ``picture``.
    """
    cells = _prepared(figure)
    buffer = io.StringIO()
    options: Any = {"format": "svg", "transparent": True, "metadata": {"Date": None, "Creator": ""}}
    with laid_out(figure):
        figure.savefig(buffer, dpi=144, **options)  # dpi is that of the parts that are raster
    root = ElementTree.fromstring(buffer.getvalue())
    _without_namespaces(root)
    for child in list(root):
        # a style sheet would reach the whole page
        if child.tag == "metadata" or child.find("style") is not None:
            root.remove(child)
    for name, image in cells.items():
        _draw_cells(root, name, image)
    defined = {element for definitions in root.iter("defs") for element in definitions.iter()}
    for element in root.iter():
        _restyle(element, defined=element in defined)
    _say_once(root, {element.get("id"): element for element in defined})
    root.extend(_hit_areas(figure))
    width, height = figure.get_size_inches() * 72
    root.attrib = {
        "class": " ".join(filter(None, ["picture", "wide" if width > _WIDE else "", classes])),
        "viewBox": f"0 0 {width:g} {height:g}",
        "preserveAspectRatio": "xMinYMin",
        "width": f"{_SHOWN_SIZE * width:.0f}",
        "height": f"{_SHOWN_SIZE * height:.0f}",
        "role": "img",
        "aria-label": style.printable(alt),
    }
    _make_identifiers_unique(root)
    root.tail = None
    # made by a serialiser that escapes every text and attribute
    return Markup(ElementTree.tostring(root, encoding="unicode"))


@contextmanager
def laid_out(figure: Figure) -> Iterator[None]:
    """The figure laid out once for all files: while it has an engine it is drawn twice to be saved.

    Text stays text, and the same numbers give the same file: no dates, no random identifiers.
    """
    import matplotlib

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "curvatlas",
        "figure.autolayout": False,
        "figure.constrained_layout.use": False,
    }
    engine = figure.get_layout_engine()
    with matplotlib.rc_context(settings):
        if engine is not None:
            engine.execute(figure)
            figure.set_layout_engine(None)
        yield
    figure.set_layout_engine(engine)


# --- before matplotlib writes -------------------------------------------------------------------


def _prepared(figure: Any) -> dict[str, Any]:
    """Marks in their thousands are to be raster; returns the maps to be drawn as shapes."""
    style.finish(figure)
    cells: dict[str, Any] = {}
    for axes in figure.axes:
        for line in axes.lines:
            if line.get_marker() not in ("None", "", " ", None):
                line.set_rasterized(len(line.get_xdata()) > _MOST_MARKS)
        for image in axes.images:
            if getattr(image, "tooltips", None) and image.get_array().size <= style.MOST_CELLS:
                name = f"cells{len(cells)}"
                image.set_gid(name)
                cells[name] = image
    return cells


# --- after matplotlib has written ---------------------------------------------------------------


def _without_namespaces(root: Element) -> None:
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {k.rpartition("}")[2]: v for k, v in element.attrib.items()}
        element.text = (element.text or "").strip() if element.tag != "text" else element.text
        element.tail = None


def _draw_cells(root: Element, name: str, image: Any) -> None:
    """A shape with its tooltip a cell, in the place of the image."""
    parents = {child: parent for parent in root.iter() for child in parent}
    picture = next((e for e in root.iter("image") if e.get("id") == name), None)
    if picture is None:  # outside of the axes
        return
    group = ElementTree.Element(
        "g", {"transform": picture.get("transform", ""), "shape-rendering": "crispEdges"}
    )
    colours = image.to_rgba(image.get_array(), bytes=True)
    missing = np.ma.getmaskarray(np.ma.masked_invalid(image.get_array()))
    for row, texts in enumerate(image.tooltips):
        for column, text in enumerate(texts):
            red, green, blue, _ = (int(channel) for channel in colours[row, column])
            colour = f"#{red:02x}{green:02x}{blue:02x}" if not missing[row, column] else style.GRID
            shape = _titled("path", text, d=f"M{column} {row}h1v1h-1z")
            shape.set(*(("style", f"fill:{colour}") if colour == style.GRID else ("fill", colour)))
            group.append(shape)
    parent = parents[picture]
    parent[list(parent).index(picture)] = group


def _titled(tag: str, text: str, **attributes: str) -> Element:
    element = ElementTree.Element(tag, attributes)
    title = ElementTree.SubElement(element, "title")
    title.text = style.printable(str(text))
    return element


def _restyle(element: Element, *, defined: bool) -> None:
    """Shorter numbers, the page's font and colours; what is black by default gets the ink."""
    for name in ("d", "x", "y", "width", "height"):
        if name in element.attrib:
            text = re.sub(r" ?\n? ?([MLCQz]) ?", r"\1", element.attrib[name])
            element.attrib[name] = _LONG_NUMBER.sub(_rounded, text)
    turn = element.get("transform", "")
    if turn.startswith("rotate(-0 "):
        del element.attrib["transform"]
    elif turn.startswith(("rotate", "translate")):
        element.attrib["transform"] = _LONG_NUMBER.sub(_rounded, turn)
    parts = [part.partition(":") for part in element.get("style", "").split(";") if part.strip()]
    said = {name.strip(): value.strip() for name, _, value in parts}
    said.pop("font-family", None)
    if "font" in said:  # how some versions of matplotlib write size, weight and family
        words = said.pop("font").split()
        said |= {"font-size": next((w for w in words if w.endswith("px")), "10px")}
        said |= {"font-weight": "bold"} if "bold" in words or "700" in words else {}
    if not defined and element.tag in ("path", "use", "text") and "fill" not in element.attrib:
        said.setdefault("fill", style.INK)
    written = ";".join(f"{name}:{value}" for name, value in said.items())
    if written:
        element.attrib["style"] = _COLOUR.sub(
            lambda found: f"var(--{style.EXCHANGED[found[0]]},{found[0]})", written
        )


def _say_once(root: Element, definitions: dict[str | None, Element]) -> None:
    """Marks do not repeat what their definition says; what is not closed is not filled."""
    for element in root.iter("use"):
        definition = definitions[element.get("href", "")[1:]]
        known = definition.get("style", "").split(";")
        kept = [part for part in element.get("style", "").split(";") if part not in known]
        if "z" not in definition.get("d", ""):
            kept = [part for part in kept if not part.startswith("fill:")]
        element.attrib.pop("style", None)
        if kept:
            element.set("style", ";".join(kept))


def _rounded(number: re.Match[str]) -> str:
    """To a tenth of a point, which no screen shows."""
    return f"{float(number[0]):.1f}".removesuffix(".0")


def _make_identifiers_unique(root: Element) -> None:
    """Only identifiers that are referred to stay, with a prefix of this picture's own."""
    prefix = "p" + hashlib.sha1(ElementTree.tostring(root)).hexdigest()[:8]
    names = ("href", "clip-path", "mask", "style")
    used = {
        found
        for element in root.iter()
        for name in names
        if element.tag != "image"
        for found in _REFERENCE.findall(element.get(name, ""))
    }
    numbers: dict[str, str] = {}
    for element in root.iter():
        identifier = element.attrib.pop("id", None)
        if identifier is not None and identifier in used:
            element.set("id", numbers.setdefault(identifier, f"{prefix}-{len(numbers)}"))
    for element in root.iter():
        for name in names if element.tag != "image" else ():
            if name in element.attrib:
                element.set(
                    name,
                    _REFERENCE.sub(
                        lambda found: f"#{numbers.get(found[1], found[1])}", element.attrib[name]
                    ),
                )


# --- what answers to the pointer ----------------------------------------------------------------


def _hit_areas(figure: Any) -> Iterator[Element]:
    """Unseen shapes above the marks, each with the words that a pointer shows."""
    scale = 72 / figure.dpi
    height = figure.get_size_inches()[1] * 72
    hidden = {"class": "tip", "fill": "none", "pointer-events": "all"}
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        for artist, label, lying in _marks(axes):
            texts = getattr(artist, "tooltips", None)
            if hasattr(artist, "get_xy") and hasattr(artist, "get_width"):
                text = texts or _told(axes, label, *_end_of_bar(artist, lying))
                ends = np.nan_to_num(artist.get_window_extent().get_points())
                box = axes.bbox.get_points()
                (x0, y0), (x1, y1) = np.clip(ends, box[0], box[1]) * scale
                place = {"x": f"{x0:.1f}", "y": f"{height - y1:.1f}"}
                size = {"width": f"{x1 - x0:.1f}", "height": f"{y1 - y0:.1f}"}
                yield _titled("rect", text, **place, **size, **hidden)
                continue
            points = _points(artist)
            places = axes.transData.transform(points)
            for index in _pointed_at(artist, places, axes.bbox.padded(1)):
                (x, y), (across, up) = points[index], places[index]
                text = texts[index] if texts is not None else _told(axes, label, x, y)
                place = {"cx": f"{across * scale:.1f}", "cy": f"{height - up * scale:.1f}"}
                yield _titled("circle", text, **place, r=f"{_REACH:g}", **hidden)


def _marks(axes: Any) -> Iterator[tuple[Any, str, bool]]:
    """Artists whose marks have something to say, the word of the legend, whether a bar lies."""
    labels: dict[Any, str] = {}
    lying = set()
    for container in axes.containers:
        artists = container.patches if hasattr(container, "patches") else container[:1]
        labels |= {artist: str(container.get_label()) for artist in artists if artist is not None}
        if getattr(container, "orientation", "") == "horizontal":
            lying |= set(artists)
    for artist in (*axes.lines, *axes.collections, *axes.patches):
        label = labels.get(artist, str(artist.get_label()))
        line = hasattr(artist, "get_marker") and artist.get_transform() == axes.transData
        if hasattr(artist, "tooltips") or artist in labels or line:
            yield artist, "" if label[:1] == "_" else label, artist in lying


def _pointed_at(artist: Any, places: Any, box: Any) -> list[int]:
    """Which points have tooltips: all that are marked, some along a curve, no ends of a rule."""
    seen = [i for i, (x, y) in enumerate(places) if box.contains(x, y)]  # never of NaN
    if not hasattr(artist, "get_marker") or artist.get_marker() not in ("None", "", " "):
        return seen if len(seen) <= _MOST_TOOLTIPS else []
    return seen[:: -(-len(seen) // _ALONG_CURVE)] if len(seen) > 2 else []


def _points(artist: Any) -> Any:
    if hasattr(artist, "get_xydata"):
        return np.asarray(artist.get_xydata(), dtype=np.float64)
    return np.asarray(artist.get_offsets(), dtype=np.float64)


def _end_of_bar(bar: Any, lying: bool) -> tuple[float, float]:
    """The middle of a bar's far end, in the data's coordinates."""
    x, y, width, height = bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()
    return (x + width, y + height / 2) if lying else (x + width / 2, y + height)


def _told(axes: Any, label: str, x: float, y: float) -> str:
    """A point in words: what it is, where, how much."""
    across, up = (
        _place(axis, value) for axis, value in ((axes.xaxis, float(x)), (axes.yaxis, float(y)))
    )
    return f"{label}: {across}, {up}" if label else f"{across}, {up}"


def _place(axis: Any, value: float) -> str:
    names = getattr(axis, "names", None)
    if names is not None and 0 <= round(value) < len(names) and abs(value - round(value)) < 0.5:
        return str(names[round(value)])
    label = axis.get_label_text()
    return f"{label} {value:.4g}" if label else f"{value:.4g}"
