"""Labels of logarithmic axes: enough of them, none over another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from curvatlas.figures.style import finish, power_label, short_names


def _labels(low: float, high: float) -> list[tuple[str, float, float]]:
    """(text, left, right) of the shown labels of an x axis from low to high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    axes.plot([low, high], [1, 1])
    axes.set(xscale="log", xlim=(low, high))
    finish(figure)
    figure.draw_without_rendering()
    ticks = [*axes.xaxis.get_major_ticks(), *axes.xaxis.get_minor_ticks()]
    boxes = [
        (tick.label1.get_text(), tick.label1.get_window_extent())
        for tick in ticks
        if tick.label1.get_text() and low <= tick.get_loc() <= high
    ]
    return sorted(((t, b.x0, b.x1) for t, b in boxes), key=lambda entry: entry[1])


@pytest.mark.parametrize(("low", "high"), [(20, 90), (100, 400), (3, 128), (1, 1000), (1e-9, 1e5)])
def test_labels_are_there_and_do_not_overlap(low: float, high: float) -> None:
    found = _labels(low, high)
    assert len(found) >= 2, found
    for (_, _, end), (_, start, _) in pairwise(found):
        assert end < start


def test_a_linear_axis_is_left_alone() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes: Any = figure.add_subplot()
    axes.plot([0, 4], [0, 1])
    before = axes.xaxis.get_major_locator()
    finish(figure)
    assert axes.xaxis.get_major_locator() is before


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.001, "0.001"), (62.6, "62.6"), (-2e3, "−2000"), (2e7, "2×10⁷"), (1e-4, "10⁻⁴")],
)
def test_a_label_is_as_short_as_the_number_allows(value: float, text: str) -> None:
    assert power_label(value) == text


def test_names_are_short_and_keep_their_end() -> None:
    names = ["blocks.3.norm1.gamma", "embedding.patch", "a_very_long_name.of_a_parameter.weight"]
    assert short_names(names) == ["norm1.gamma", "patch", "…of a parameter.weight"]
