"""Data and scaling: every measured quantity against model size and against data size.

Any result with ``rows`` that carry ``parameters`` and ``samples`` is drawn; its ``fits`` (power
laws with intervals) are listed beside.
"""

from __future__ import annotations

from typing import Any

from curvatlas.report.charts import Series, chart
from curvatlas.report.contents import Contents, Section, as_number, quantity, with_interval
from curvatlas.report.markup import Markup, join, number, table, tag
from curvatlas.report.scales import log_scale

_AXES = {"parameters": ("parameters N", "samples"), "samples": ("samples D", "parameters")}
_MOST_QUANTITIES = 4
_MOST_GROUPS = 6


def scaling(contents: Contents) -> Section | None:
    bodies = [_grid(entry.content) for entry in contents.entries if _rows(entry.content)]
    if not bodies:
        return None
    return Section(identifier="scaling", title="Data and scaling", body=join(*bodies))


def _rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    rows = content.get("rows")
    if not isinstance(rows, list) or len(rows) < 2:
        return []
    sized = [
        isinstance(row, dict) and all(as_number(row.get(key)) is not None for key in _AXES)
        for row in rows
    ]
    return rows if all(sized) else []


def _grid(content: dict[str, Any]) -> Markup:
    rows = _rows(content)
    names = [
        key
        for key in rows[0]
        if key not in _AXES and all((quantity(row, key)[0] or 0.0) > 0 for row in rows)
    ]
    pictures = [
        _figure(rows, name, axis, label, group)
        for name in names[:_MOST_QUANTITIES]
        for axis, (label, group) in _AXES.items()
        if len({row[axis] for row in rows}) > 1
    ]
    return join(tag("div", pictures, class_="pair"), _fits(content))


def _figure(rows: list[dict[str, Any]], name: str, axis: str, label: str, group: str) -> Markup:
    words = name.replace("_", " ")
    sizes = sorted({as_number(row[group]) or 0.0 for row in rows})
    series = []
    for colour, size in enumerate(sizes[:_MOST_GROUPS]):
        chosen = sorted(
            (row for row in rows if as_number(row[group]) == size),
            key=lambda row: as_number(row[axis]) or 0.0,
        )
        found = [quantity(row, name) for row in chosen]
        series.append(
            Series(
                name=f"{group} {number(size)}",
                x=[as_number(row[axis]) or 0.0 for row in chosen],
                y=[value or 0.0 for value, _ in found],
                intervals=[interval or (value or 0.0, value or 0.0) for value, interval in found],
                colour=colour,
            )
        )
    return chart(
        series,
        x_scale=log_scale([x for one in series for x in one.x]),
        y_scale=log_scale([y for one in series for y in one.y]),
        x_label=label,
        y_label=words,
        title=f"{words[0].upper()}{words[1:]} against {axis}",
        description="Both axes logarithmic: a power law is a straight line.",
    )


def _fits(content: dict[str, Any]) -> Markup | None:
    fits = content.get("fits")
    if not isinstance(fits, dict):
        return None
    rows: list[list[object]] = []
    for name, fit in fits.items():
        if isinstance(fit, dict):
            for key in fit:
                value, interval = quantity(fit, key)
                if value is not None and not key.endswith("_interval"):
                    rows.append(
                        [f"{name}: {key}".replace("_", " "), with_interval(value, interval)]
                    )
    if not rows:
        return None
    return table(["fit", "value [95 % interval]"], rows, caption="Fitted laws")
