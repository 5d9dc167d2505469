"""Every result that draws: one drawing function, the same numbers in figure, table and page."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from curvatlas import figures, results
from curvatlas.figures import style
from curvatlas.report import svg
from result_samples import drawn_kinds, sample

KINDS = drawn_kinds()


@functools.cache
def _drawn(kind: str) -> tuple[Any, Any]:
    """A result and its figure: each is drawn once for all tests here."""
    result = sample(kind)
    return result, result.plot()


@functools.cache
def _on_page(kind: str) -> Any:
    return ElementTree.fromstring(svg.embed(_drawn(kind)[1], alt=f"a picture of {kind}"))


def _numbers_in(figure: Any) -> Iterator[float]:
    """Coordinates of every mark, and the values behind the colours of maps."""
    for axes in figure.axes:
        for line in axes.lines:
            yield from np.asarray(line.get_xydata(), dtype=float).flat
        for bar in (patch for patch in axes.patches if hasattr(patch, "get_width")):
            yield from (abs(bar.get_width()), bar.get_width(), bar.get_height())
        for image in axes.images:
            yield from np.ma.masked_invalid(image.get_array()).compressed().astype(float)


def _digits(value: float) -> str:
    """What a tooltip says of a number."""
    return f"{value:.4g}"


def _numeric_columns(table: Any) -> dict[str, list[float]]:
    columns = {}
    for name in table.columns:
        values = [v for v in table[name] if isinstance(v, float) and math.isfinite(v) and v]
        if values and len(values) >= len(table) / 2:
            columns[name] = values
    return columns


def _shown_columns(kind: str, numbers: set[str]) -> list[str]:
    """Columns of the table that are in ``numbers``: all, one part of three, or twenty of many."""
    table = _drawn(kind)[0].table()
    found = []
    for name, values in _numeric_columns(table).items():
        known = sum(_digits(v) in numbers or _digits(100 * v) in numbers for v in values)
        if known >= min(max(1, 0.3 * len(values)), 20):
            found.append(name)
    return found


def test_every_class_that_draws_has_exactly_one_drawing_function() -> None:
    known = set(results._registry)
    assert set(KINDS) <= known
    assert len(KINDS) > 30
    overrides = [name for name, kind in results._registry.items() if "plot" in vars(kind)]
    assert not overrides
    with pytest.raises(ValueError, match="has a drawing function already"):
        style.draws(KINDS[0])(print)


@pytest.mark.parametrize("kind", KINDS)
def test_the_figure_draws_the_numbers_of_the_table(kind: str) -> None:
    drawn = {_digits(number) for number in _numbers_in(_drawn(kind)[1])}
    assert _shown_columns(kind, drawn), _drawn(kind)[0].table().columns


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_says_the_numbers_of_the_table(kind: str) -> None:
    root = _on_page(kind)
    words = " ".join("".join(e.itertext()) for tag in ("title", "text") for e in root.iter(tag))
    said = {
        _digits(float(word))
        for word in words.replace("−", "-").replace(",", " ").replace("[", " ").split()
        if word.isascii()
        and word.replace(".", "").replace("-", "").replace("e", "").replace("+", "").isdigit()
        and word[-1] not in "e-+"
    }
    assert _shown_columns(kind, said), sorted(said)[:20]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_an_axis_keep_apart(kind: str) -> None:
    figure = _drawn(kind)[1]
    figure.draw_without_rendering()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            boxes = [
                label.get_window_extent()
                for label in axis.get_ticklabels()
                if label.get_text() and label.get_visible() and label.get_rotation() in (0, 90)
            ]
            low, high = ("x0", "x1") if axis.axis_name == "x" else ("y0", "y1")
            boxes.sort(key=lambda box: getattr(box, low))
            for one, two in pairwise(boxes):
                assert getattr(one, high) <= getattr(two, low) + 1.5, (kind, axis.axis_name)


@pytest.mark.parametrize("kind", sorted(style.STAGED))
def test_stages_are_drawn_together_under_their_words(kind: str) -> None:
    together = figures.draw({"at the start": sample(kind, 1), "after training": sample(kind, 2)})
    texts = {
        text.get_text()
        for axes in together.axes
        for text in [
            *(axes.get_legend().get_texts() if axes.get_legend() else ()),
            axes.title, *axes.get_yticklabels(),
        ]
    }  # fmt: skip
    assert any("at the start" in text for text in texts), texts
    assert any("after training" in text for text in texts), texts


def test_results_of_two_kinds_are_not_one_picture() -> None:
    with pytest.raises(ValueError, match="results of one kind"):
        figures.draw({"a": sample("Estimate"), "b": sample("Eigenpairs")})
