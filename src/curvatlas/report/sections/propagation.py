"""Propagation: how curvature moves from the loss back through the sublayers."""

from __future__ import annotations

from typing import Any

from curvatlas.report.charts import Scale, Series, chart, linear_scale, log_scale
from curvatlas.report.contents import (
    Contents,
    Section,
    as_interval,
    as_number,
    stage_words,
    with_interval,
)  # fmt: skip
from curvatlas.report.markup import Markup, join, number, table, tag

_TERMS = {"total": "total", "passed_on": "passed on", "created_here": "created here"}
_MOST_NAMES = 12  # sublayers named under the axis; more are numbered and named on hover


def propagation(contents: Contents) -> Section | None:
    entries = contents.of_kind("CurvatureFlow")
    if not entries:
        return None
    bodies = []
    for entry in entries:
        words = stage_words(entry.stage)
        heading = tag("h3", words[0].upper() + words[1:]) if words else None
        bodies.append(join(heading, _flow(entry.content)))
    lead = tag(
        "p",
        "The second derivative of the loss at the input of each sublayer has two sources: what "
        "later sublayers had and this one passes on, and what it creates by its own bending.",
    )
    return Section(identifier="propagation", title="Propagation", body=join(lead, *bodies))


def _flow(content: dict[str, Any]) -> Markup:
    sublayers = [e for e in content.get("sublayers") or [] if isinstance(e, dict)]
    activations = [e for e in content.get("activations") or [] if isinstance(e, dict)]
    pictures = [_terms(sublayers), _stream(activations)]
    said = tag(
        "p",
        f"Computed {content.get('method')} on {content.get('samples')} samples; "
        f"targets: {content.get('target')}.",
    )
    return join(tag("div", pictures, class_="pair"), said, _table(sublayers))


def _terms(sublayers: list[dict[str, Any]]) -> Markup | None:
    names = [str(entry.get("name")) for entry in sublayers]
    series = []
    for colour, (key, words) in enumerate(_TERMS.items()):
        x, y, intervals, labels = [], [], [], []
        for index, entry in enumerate(sublayers):
            value, interval = _norm(entry, key)
            if value is not None and value > 0:
                x.append(float(index))
                y.append(value)
                intervals.append(interval or (value, value))
                labels.append(f"{names[index]}, {words}: {with_interval(value, interval)}")
        if y:
            series.append(
                Series(name=words, x=x, y=y, intervals=intervals, colour=colour, labels=labels)
            )
    if not series:
        return None
    few = len(names) <= _MOST_NAMES
    return chart(
        series,
        x_scale=Scale(kind="linear", low=-0.5, high=len(names) - 0.5),
        y_scale=log_scale([v for one in series for v in one.y]),
        x_label="sublayer, from the embedding to the head",
        y_label="Frobenius norm",
        title="Curvature by sublayer",
        description="The norm at each sublayer's input, and its two terms.",
        x_names=[name.removeprefix("blocks.") for name in names] if few else None,
    )


def _stream(activations: list[dict[str, Any]]) -> Markup | None:
    if len(activations) < 2:
        return None
    names = [str(entry.get("name")) for entry in activations]
    curvature = [_norm(entry, "total")[0] or 0.0 for entry in activations]
    slopes = [as_number(entry.get("gradient_scale")) or 0.0 for entry in activations]
    places = [float(index) for index in range(len(names))]
    series = [
        Series(name=what, x=places, y=values, colour=colour,
               labels=[f"{n}, {what}: {number(v)}" for n, v in zip(names, values, strict=True)])
        for colour, (what, values) in enumerate(
            (("curvature", curvature), ("gradient norm", slopes))
        )
    ]  # fmt: skip
    return chart(
        series,
        x_scale=linear_scale(places),
        y_scale=log_scale([*curvature, *slopes]),
        x_label="activation, from the embedding to the head",
        y_label="norm",
        title="Curvature and gradient by depth",
        description="At every activation of the network.",
    )


def _norm(entry: dict[str, Any], term: str) -> tuple[float | None, Any]:
    measure = (entry.get("measures") or {}).get(term)
    if not isinstance(measure, dict):
        return None, None
    return as_number(measure.get("norm")), as_interval(measure.get("norm_interval"))


def _table(sublayers: list[dict[str, Any]]) -> Markup:
    rows: list[list[object]] = []
    for entry in sublayers:
        terms = [with_interval(*_norm(entry, key)) for key in _TERMS]
        factor = as_number(entry.get("amplification"))
        interval = as_interval(entry.get("amplification_interval"))
        rows.append([str(entry.get("name")), *terms, with_interval(factor, interval)])
    head: list[object] = ["sublayer", *_TERMS.values(), "amplification"]
    return tag("details", tag("summary", "The numbers"), table(head, rows))
