"""Pruning and rounding: what goes where, and the rise of the loss, predicted beside measured."""

from __future__ import annotations

from typing import Any

from curvatlas.report.charts import Series, chart, linear_scale, symlog_scale
from curvatlas.report.contents import (
    Contents,
    Section,
    as_interval,
    as_number,
    matrix,
    with_interval,
)
from curvatlas.report.markup import Markup, join, number, sentence, table, tag

_MOST_ROWS = 60
_RANGE = {True: "yes", False: "outside the quadratic range"}


def compression(contents: Contents) -> Section | None:
    """Prunings side by side, tables by part, roundings by groups, bits for a size."""
    prunings = [entry.content for entry in contents.of_kind("Pruning")]
    tables = [entry.content for entry in contents.of_kind("CostTable")]
    grids = [entry.content for entry in contents.of_kind("QuantizationTable")]
    bits = [entry.content for entry in contents.of_kind("BitAllocation")]
    body = join(
        _prunings(prunings),
        *(_on_the_way(one) for one in prunings[:1]),
        *(_by_group(one) for one in grids),
        *(_costs(one) for one in tables),
        *(_bits(one) for one in bits),
    )
    return Section("compression", "Pruning and rounding", body) if body else None


def _prunings(prunings: list[dict[str, Any]]) -> Markup | None:
    rows: list[list[object]] = []
    for one in prunings:
        rise, share = _rise(one), as_number(one.get("sparsity"))
        if rise is None or share is None:
            continue
        rows.append([f"{one.get('method')}, layers by {one.get('layers')}", f"{share:.1%}", *rise])
    if not rows:
        return None
    said = [
        tag("li", _verdict(one))
        for one in prunings
        if isinstance(one.get("in_quadratic_range"), bool)
    ]
    head: list[object] = ["weights chosen by", "removed", *_HEAD]
    return join(
        tag("ul", said, class_="findings"),
        table(head, rows, caption="Pruning: rise of the loss on the same samples"),
    )


_HEAD: list[object] = [
    "gᵀδ + ½ δᵀHδ [interval]",
    "measured rise",
    "quadratic model holds",
]


def _rise(content: dict[str, Any]) -> list[object] | None:
    """Predicted with its interval, measured, whether the prediction is one."""
    predicted, interval = (
        as_number(content.get("predicted_rise")),
        as_interval(content.get("predicted_interval")),
    )
    before, after = as_number(content.get("loss_before")), as_number(content.get("loss_after"))
    if predicted is None or before is None or after is None:
        return None
    inside = content.get("in_quadratic_range") is True
    return [with_interval(predicted, interval), number(after - before), _RANGE[inside]]


def _verdict(content: dict[str, Any]) -> Markup:
    before, after = as_number(content.get("loss_before")), as_number(content.get("loss_after"))
    share = as_number(content.get("sparsity")) or 0.0
    held = (
        "as the derivatives at the weights predict"
        if content.get("in_quadratic_range")
        else "outside the quadratic range: derivatives at the weights do not tell it"
    )
    return sentence(
        f"Without {share:.0%} of the weights ({content.get('method')}) the loss goes from {{}} to "
        f"{{}}, {held}.",
        number(before or 0.0, 4),
        number(after or 0.0, 4),
    )


def _on_the_way(content: dict[str, Any]) -> Markup | None:
    """The loss on the segment and the prediction; the share that every part loses."""
    segment = matrix(content.get("segment"))
    predicted, interval = (
        as_number(content.get("predicted_rise")),
        as_interval(content.get("predicted_interval")),
    )
    before = as_number(content.get("loss_before"))
    if len(segment) != 2 or predicted is None or interval is None or before is None:
        return None
    points, losses = ([value or 0.0 for value in side] for side in segment)
    series = [
        Series(name="loss, measured", x=points, y=losses),
        Series(
            name="predicted at the end",
            x=[points[-1]],
            y=[before + predicted],
            intervals=[(before + interval[0], before + interval[1])],
            style="points",
            colour=1,
        ),
    ]
    line = chart(
        series,
        x_scale=linear_scale,
        y_scale=linear_scale,
        x_label="share of the change",
        y_label="loss",
        title="The loss on the way to the pruned weights",
        description="A quadratic model is a prediction only while the curve is a parabola.",
    )
    shares = content.get("part_sparsity")
    if not isinstance(shares, dict) or not shares:
        return line
    names = [str(name) for name in shares][:_MOST_ROWS]
    values = [100 * (as_number(shares[name]) or 0.0) for name in names]
    bars = chart(
        [Series(name="removed, %", x=list(range(len(names))), y=values, labels=names)],
        x_scale=linear_scale,
        y_scale=linear_scale,
        x_label="part",
        y_label="removed, %",
        title="What every part loses",
        description="Parts with little curvature lose more of their weights.",
        x_names=names,
    )
    return join(line, bars)


def _by_group(content: dict[str, Any]) -> Markup | None:
    rows: list[list[object]] = []
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for row in content.get("rows") or []:
        rise = _rise(row) if isinstance(row, dict) else None
        bits = as_number(row.get("bits_per_weight")) if rise is not None else None
        if rise is None or bits is None:
            continue
        group = row.get("group")
        scale = "a row" if group is None else f"{group} inputs"
        rows.append([f"{row.get('bits')} bits", scale, row.get("rounding"), number(bits), *rise])
        measured = (as_number(row["loss_after"]) or 0.0) - (as_number(row["loss_before"]) or 0.0)
        predicted = as_number(row["predicted_rise"]) or 0.0
        lines.setdefault(str(row.get("rounding")), []).append((bits, measured, predicted))
    if not rows:
        return None
    series = [
        Series(
            name=f"{way}, {word}",
            x=[point[0] for point in points],
            y=[point[place] for point in points],
            style="points",
            colour=2 * index + place - 1,
        )
        for index, (way, points) in enumerate(lines.items())
        for place, word in ((1, "measured"), (2, "predicted"))
    ]
    picture = chart(
        series,
        x_scale=linear_scale,
        y_scale=symlog_scale,
        x_label="bits a weight, scales included",
        y_label="rise of the loss",
        title="Rounding by groups",
        description="Nearest, and by curvature: weights still free take up the errors.",
    )
    head: list[object] = ["rounded to", "one scale for", "rounding", "bits a weight", *_HEAD]
    return join(picture, table(head, rows, caption="Rounding all weights, by groups"))


def _costs(content: dict[str, Any]) -> Markup | None:
    rows: list[list[object]] = []
    for row in (content.get("rows") or [])[:_MOST_ROWS]:
        predicted, measured = as_number(row.get("predicted")), as_number(row.get("measured"))
        if predicted is None or measured is None:
            continue
        changed = as_number(row.get("changed")) or 0.0
        bits = row.get("bits")
        rows.append(
            [
                str(row.get("name")),
                "–" if bits is None else bits,
                row.get("weights"),
                f"{changed:.1%}",
                number(predicted),
                number(measured),
            ]
        )
    if not rows:
        return None
    head: list[object] = ["part", "bits", "weights", "changed", "predicted", "measured"]
    what = f"{content.get('what')}: every {content.get('by')} alone, rise of the loss"
    return table(head, rows, caption=what)


def _bits(content: dict[str, Any]) -> Markup | None:
    used, measured = as_number(content.get("used")), as_number(content.get("measured"))
    alike = as_number(content.get("uniform_measured"))
    if used is None or measured is None or alike is None:
        return None
    said = sentence(
        f"With {used:.2f} bits a weight, given out by curvature, the loss rises by {{}}; with "
        f"{content.get('uniform_bits')} bits everywhere by {{}}.",
        number(measured),
        number(alike),
    )
    table_of_parts = _costs({**content, "what": "bits for a size", "by": "part"})
    return join(tag("p", said), table_of_parts)
