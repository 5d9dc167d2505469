"""Markup escapes by construction; scales put numbers where they belong."""

from __future__ import annotations

import html
import json
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, strategies as st

from curvatlas.report.charts import linear_scale, log_scale, symlog_scale, tick_label
from curvatlas.report.markup import Markup, join, json_block, number, table, tag


class _Collector(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.data = ""

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(name)
        self.attributes += attributes

    def handle_data(self, data: str) -> None:
        self.data += data


@given(st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc"))))
def test_any_text_stays_text(value: str) -> None:
    page = _Collector()
    page.feed(tag("p", value, title=value))
    page.close()
    assert page.elements == ["p"]
    assert page.data == value
    assert page.attributes == [("title", value)]


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
))  # fmt: skip
def test_inlined_json_comes_back_and_cannot_end_its_element(value: object) -> None:
    block = json_block("x", {"value": value, "attack": "</script><script>alert(1)</script><!--"})
    opening, closing = '<script type="application/json" id="x">', "</script>"
    content = block.removeprefix(opening).removesuffix(closing)
    assert "<" not in content
    assert json.loads(content)["value"] == value


def test_markup_is_not_escaped_twice() -> None:
    inner = tag("b", "a < b")
    assert tag("p", inner) == "<p><b>a &lt; b</b></p>"
    assert join("x & y", inner, None, ["z"]) == "x &amp; y<b>a &lt; b</b>z"
    assert isinstance(join("x"), Markup)


def test_an_element_needs_a_name() -> None:
    with pytest.raises(ValueError, match="no name"):
        tag("p onload=alert(1)")


def test_a_table_escapes_every_cell() -> None:
    hostile = "<script>alert(1)</script>"
    page = table([hostile, hostile], [[hostile, 1.5], [hostile, 2.5]], caption=hostile)
    assert "<script" not in page
    assert html.unescape(page).count(hostile) >= 4


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (1.5, "1.5"),
        (0.012345, "0.0123"),
        (-12345.6, "−12,346"),
        (1.5e-7, "1.50×10⁻⁷"),
        (-2.5e9, "−2.50×10⁹"),
        (float("inf"), "∞"),
        (float("nan"), "not a number"),
    ],
)
def test_numbers_are_short_and_plain(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.01, "0.01"), (-2000.0, "−2000"), (1e-4, "10⁻⁴"), (-2e7, "−2×10⁷")],
)
def test_tick_labels_are_short(value: float, shown: str) -> None:
    assert tick_label(value) == shown


_numbers = st.floats(min_value=-1e12, max_value=1e12).filter(lambda v: v == 0 or abs(v) > 1e-12)


@given(st.lists(_numbers, min_size=2, max_size=20))
def test_every_value_lies_on_its_axis_in_order(values: list[float]) -> None:
    positive = [abs(v) + 1e-9 for v in values]
    scales = [
        (linear_scale(values), values),
        (log_scale(positive), positive),
        (symlog_scale(values), values),
    ]
    for scale, shown in scales:
        places = [scale.place(v) for v in sorted(shown)]
        assert all(-1e-6 <= place <= 1 + 1e-6 for place in places)
        assert places == sorted(places)
        ticks = scale.ticks()
        assert 1 <= len(ticks) <= 8
        assert all(-1e-6 <= scale.place(v) <= 1 + 1e-6 for v, _ in ticks)


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e8))
def test_labels_say_the_number_they_stand_for(low: float, ratio: float) -> None:
    for scale in (linear_scale([low, low * ratio]), log_scale([low, low * ratio])):
        for value, label in scale.ticks():
            assert _read(label) == pytest.approx(value, rel=1e-4, abs=1e-12 * scale.high)


def _read(label: str) -> float:
    plain = label.translate(str.maketrans("−⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "--0123456789"))
    match = re.fullmatch(r"(-?)(?:([\d.]+)×)?10(-?\d+)", plain)
    if match and (match[2] or any(c in label for c in "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")):
        sign = -1 if match[1] else 1
        return sign * float(match[2] or 1) * math.pow(10, int(match[3]))
    return float(plain)
