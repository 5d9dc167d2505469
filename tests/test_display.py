"""Results in a notebook: short text, a small table with a picture, axes of one's own, frames."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Any

import pytest
import torch

import curvatlas as ca
from curvatlas import display, results
from curvatlas.results import Result

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def problem() -> ca.Problem:
    torch.manual_seed(0)
    model = ca.zoo.GPT(
        ca.zoo.GPTConfig(vocabulary=7, context=5, d_model=8, n_heads=2, n_layers=2, d_ff=12)
    ).double()
    tokens = torch.randint(0, 7, (3, 6))
    return ca.Problem(model, "cross_entropy", (tokens[:, :-1], tokens[:, 1:]))


@pytest.fixture(scope="module")
def atlas(problem: ca.Problem) -> ca.Atlas:
    return ca.atlas(problem)


def test_every_result_has_the_short_representation() -> None:
    for module in pkgutil.walk_packages(ca.__path__, "curvatlas."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    kinds = [kind for kind in results._registry.values() if kind.__module__.startswith("curvatlas")]
    assert len(kinds) > 60
    assert all(kind.__repr__ is Result.__repr__ for kind in kinds)


def test_an_atlas_is_a_few_lines_and_a_table_with_a_picture(atlas: ca.Atlas) -> None:
    assert len(repr(atlas)) < 1200
    assert repr(atlas).splitlines()[0] == str(atlas).splitlines()[0]
    page = atlas._repr_html_()
    assert "<table>" in page
    assert "data:image/png;base64," in page
    assert "<th style='text-align:left'>quantity</th>" in page
    assert f"{len(atlas.table()) - 14} more: .table()" in page


def test_text_in_a_table_is_escaped() -> None:
    table = display.Table.of([{"<i>": "<script>"}, {"<i>": 2}])
    page = display.as_html("<b>", "a & b", table, None)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_figure_shows_itself_in_a_notebook_without_magic(atlas: ca.Atlas) -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    data, _ = formatters.DisplayFormatter().format(atlas.plot())
    assert data["image/png"].startswith(PNG)


def test_one_panel_is_drawn_on_the_axes_given(problem: ca.Problem) -> None:
    import matplotlib.pyplot as pyplot

    pairs = ca.eigenpairs(ca.Hessian(problem), k=2)
    figure, (left, right) = pyplot.subplots(1, 2)
    try:
        assert pairs.plot(ax=right) is figure
        assert right.has_data()
        assert not left.has_data()
        assert len(figure.axes) == 2
    finally:
        pyplot.close(figure)


def test_several_panels_take_the_place_of_the_axes_given(atlas: ca.Atlas) -> None:
    import matplotlib.pyplot as pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    try:
        atlas.plot(ax=right, view="role")
        (part,) = figure.subfigs
        assert len(part.axes) >= 3
        figure.draw_without_rendering()
        assert min(axes.get_position().x0 for axes in part.axes) > left.get_position().x0
    finally:
        pyplot.close(figure)


def test_axes_are_forgotten_after_the_picture(problem: ca.Problem) -> None:
    import matplotlib.pyplot as pyplot

    pairs = ca.eigenpairs(ca.Hessian(problem), k=2)
    figure, ax = pyplot.subplots()
    pairs.plot(ax=ax)
    pyplot.close(figure)
    assert pairs.plot() is not figure


def test_a_result_without_a_picture_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"has no picture: print it, or take \.to_dataframe"):
        ca.fits.power_law(torch.arange(1.0, 6.0), torch.arange(1.0, 6.0) ** 2).plot()


# --- tables ------------------------------------------------------------------------------


def test_a_table_is_aligned_with_intervals_beside_their_numbers() -> None:
    records = [{"name": "query", "value": 2.0, "low": 1.5, "high": 2.5}, {"name": "a", "value": 3}]
    table = display.Table.of(records[:1] * 2)
    assert str(table).splitlines() == ["name   value", *["query  2 [1.5, 2.5]"] * 2]
    assert display.Table.of(records)["low"] == [1.5, None]


def test_a_single_row_is_written_from_top_to_bottom() -> None:
    table = display.Table.of([{"trace": 1.25, "trace_low": 1.0, "trace_high": 1.5, "exact": False}])
    rows = [["trace", "1.25 [1, 1.5]"], ["exact", "False"]]
    assert table.written()[1:] == rows


def test_eigenpairs_are_a_row_a_value_with_its_interval(problem: ca.Problem) -> None:
    pytest.importorskip("pandas")
    pairs = ca.eigenpairs(ca.Hessian(problem), k=3)
    frame = pairs.to_dataframe()
    assert len(frame) == 3
    assert frame["values"].tolist() == pairs.values.tolist()
    assert frame["low"].tolist() == pairs.interval[0].tolist()


def test_an_atlas_is_a_row_an_entry_of_every_map(atlas: ca.Atlas) -> None:
    pytest.importorskip("pandas")
    frame = atlas.to_dataframe()
    chosen = frame[(frame["view"] == "role") & (frame["quantity"] == "frobenius")]
    chosen = chosen[(chosen["part"] == "outer") & (chosen["row"] == "key")]
    value = chosen[chosen["column"] == "value"]["value"].item()
    assert value == atlas.view("role", part="outer")["key", "value"]


def test_parts_are_rows_and_a_single_estimate_is_one(problem: ca.Problem) -> None:
    pytest.importorskip("pandas")
    flow = ca.CurvaturePropagationAnalyzer(problem.model).analyze_curvature_flow(
        *next(iter(problem.data))
    )
    frame: Any = flow.to_dataframe()
    assert len(frame) == len(flow.sublayers)
    estimate = ca.trace(ca.Hessian(problem))
    row = estimate.to_dataframe()
    assert len(row) == 1
    assert row["value"].item() == estimate.value
    assert (row["low"].item(), row["high"].item()) == estimate.interval


def test_a_missing_pandas_is_an_error_with_the_cure(
    atlas: ca.Atlas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"curvatlas\[notebooks\]"):
        atlas.to_dataframe()
