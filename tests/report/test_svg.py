"""Figures inside a page: text as text, the page's colours, tooltips, nothing that could act."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from curvatlas.figures import style
from curvatlas.report import svg

HOSTILE = "<script>alert(1)</script>&\"'\x00\ud800"


def _picture(name: str = "λmax") -> Any:
    figure = style.new_figure(4.4, 3.1)
    axes = figure.add_subplot()
    axes.plot([1, 2, 3], [0.5, 62.6, 7.0], "o-", color=style.BLUE, label=name)
    axes.set(xlabel="step", ylabel="eigenvalue", title=name)
    axes.legend()
    return figure


def _map(size: int) -> Any:
    figure = style.new_figure(4.4, 3.1)
    axes = figure.add_subplot()
    values = np.arange(float(size * size)).reshape(size, size)
    values[0, 0] = np.nan
    image = axes.imshow(values, interpolation="none")
    style.tooltip(image, [[f"{i} × {j}" for j in range(size)] for i in range(size)])
    return figure


def _parsed(figure: Any, alt: str = "what it shows") -> Any:
    return ElementTree.fromstring(svg.embed(figure, alt=alt))


def test_text_stays_text_and_the_picture_says_what_it_shows() -> None:
    root = _parsed(_picture())
    assert {"λmax", "step", "eigenvalue"} <= {"".join(e.itertext()) for e in root.iter("text")}
    assert root.get("role") == "img"
    assert root.get("aria-label") == "what it shows"


def test_colours_are_the_pages_and_no_font_or_background_is_fixed() -> None:
    text = svg.embed(_picture(), alt="")
    assert "var(--c0,#0072b2)" in text
    assert "font-family" not in text
    assert "<style" not in text
    root = ElementTree.fromstring(text)
    assert all("var(--ink" in e.get("style", "") for e in root.iter("text"))
    first = next(root.iter("path"))
    assert "fill:none" in first.get("style", "")


def test_points_say_their_numbers_when_pointed_at() -> None:
    titles = [e.text for e in _parsed(_picture()).iter("title")]
    assert titles[1] == "λmax: step 2, eigenvalue 62.6"
    assert len(titles) == 3


def test_the_answering_areas_lie_on_the_marks() -> None:
    root = _parsed(_picture())
    drawn = [(float(e.get("x")), float(e.get("y"))) for e in root.iter("use")]
    for area in root.iter("circle"):
        x, y = float(area.get("cx")), float(area.get("cy"))
        assert min(abs(x - a) + abs(y - b) for a, b in drawn) < 0.2


def test_bars_say_their_names() -> None:
    figure = style.new_figure(4.4, 3.1)
    axes = figure.add_subplot()
    axes.barh(range(2), [3.0, 4.5], label="share")
    style.name_axis(axes.yaxis, ["query", "key"])
    axes.set_xlabel("norm")
    titles = [e.text for e in _parsed(figure).iter("title")]
    assert titles == ["share: norm 3, query", "share: norm 4.5, key"]


def test_cells_of_a_map_are_shapes_with_words_and_many_cells_are_pixels() -> None:
    small = _parsed(_map(4))
    assert [e.text for e in small.iter("title")][:5] == [
        "0 × 0",
        "0 × 1",
        "0 × 2",
        "0 × 3",
        "1 × 0",
    ]
    assert not list(small.iter("image"))
    large = svg.embed(_map(300), alt="")
    assert "<image" in large
    assert len(large) < 400_000


def test_names_of_a_model_stay_inert() -> None:
    text = svg.embed(_picture(HOSTILE), alt=HOSTILE, classes='x" onload="alert(1)')
    assert "<script" not in text
    root = ElementTree.fromstring(text)
    assert root.get("class", "").endswith('x" onload="alert(1)')
    assert not any(name.startswith("on") for e in root.iter() for name in e.attrib)


def test_the_same_figure_gives_the_same_text_and_others_other_identifiers() -> None:
    def identifiers(text: str) -> set[str]:
        return {e.get("id") for e in ElementTree.fromstring(text).iter()} - {None}

    one, again, other = (svg.embed(_picture(name), alt="") for name in ("a", "a", "b"))
    assert one == again
    assert identifiers(one)
    assert not identifiers(one) & identifiers(other)


def test_every_reference_has_its_target() -> None:
    root = _parsed(_picture())
    known = {e.get("id") for e in root.iter()}
    for element in root.iter():
        for name in ("href", "clip-path"):
            reference = element.get(name, "").removeprefix("url(").rstrip(")")
            assert not reference or reference[1:] in known


@pytest.mark.parametrize("count", [100, 5000])
def test_thousands_of_marks_are_raster(count: int) -> None:
    figure = style.new_figure(4.4, 3.1)
    figure.add_subplot().plot(range(count), range(count), "o")
    assert bool(list(_parsed(figure).iter("image"))) == (count > 2500)
