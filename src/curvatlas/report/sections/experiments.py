"""The papers' experiments on this model: growth with a scale."""

from __future__ import annotations

from typing import Any

from curvatlas.report.charts import Series, chart, log_scale
from curvatlas.report.contents import (
    PARTS,
    Contents,
    Section,
    as_interval,
    as_number,
    numbers,
    with_interval,
)
from curvatlas.report.markup import Markup, join, switch, table, tag

_MOST_LINES = 6
_MOST_ROWS = 60


def growth(contents: Contents) -> Section | None:
    """Exponents of every block, and the norms of each role's largest block along the scale."""
    bodies = [_growth(entry.content) for entry in contents.of_kind("Growth")]
    if not any(bodies):
        return None
    return Section("growth", "Growth", join(*bodies))


def _growth(content: dict[str, Any]) -> Markup | None:
    names, laws = content.get("names"), content.get("laws")
    scales, window = numbers(content.get("scales")), as_interval(content.get("window"))
    if not isinstance(names, list) or not isinstance(laws, dict) or not scales or window is None:
        return None
    shown = [name for name in names if not str(name).endswith("bias")][:_MOST_ROWS]
    rows: list[list[object]] = [
        [name, *(_exponent(laws.get(part, {}).get(name)) for part in PARTS)] for name in shown
    ]
    scaled = str(content.get("scaled"))
    intro = tag(
        "p",
        f"How the Frobenius norm of every block grows when {scaled} are multiplied by t: exponents "
        f"with 95 % intervals for t from {window[0]:g} to {window[1]:g}. Without norms and with "
        "small logits theory gives, for the activations that enter the first block, 6 (query, key) "
        "and 2 (value, output, feed-forward) of H_o, and 5 (query, key) of H_f.",
    )
    panels = {PARTS[part]: _curves(content, part, shown, scales, scaled) for part in PARTS}
    return join(
        intro,
        switch(f"growth-{scaled}", panels, label="Part of the Hessian"),
        table(["block", *PARTS.values()], rows, caption="Exponents of the Frobenius norms"),
        tag("p", f"The first {_MOST_ROWS} blocks.") if len(shown) == _MOST_ROWS else None,
    )


def _exponent(law: Any) -> str:
    if not isinstance(law, dict):
        return "zero"
    return with_interval(as_number(law.get("exponent")), as_interval(law.get("interval")))


def _curves(
    content: dict[str, Any], part: str, shown: list[str], scales: list[float], scaled: str
) -> Markup:
    """One line a role: its block in the first layer that has it."""
    table_of = content.get("norms", {}).get(part)
    places: dict[str, int] = {}
    for name, role in zip(content["names"], content.get("roles", []), strict=False):
        if name in shown:
            places.setdefault(str(role), content["names"].index(name))
    columns = {}
    for role, place in places.items():
        values = [as_number(row[place]) for row in table_of] if isinstance(table_of, list) else []
        if values and all(value is not None and value > 0 for value in values):
            columns[role] = [value for value in values if value is not None]
    first = ("query", "key", "value", "output", "up", "down")
    ordered = sorted(columns, key=lambda role: first.index(role) if role in first else len(first))
    series = [
        Series(name=role, x=scales, y=columns[role], style="line", colour=index)
        for index, role in enumerate(ordered[:_MOST_LINES])
    ]
    if not series:
        return tag("p", "This part vanishes.")
    return chart(
        series,
        x_scale=log_scale,
        y_scale=log_scale,
        x_label=f"{scaled} × t",
        y_label=f"‖{PARTS[part]}‖ of the block",
        title=f"Growth of {PARTS[part]}",
        description="Norms of the first layer's blocks along the scale.",
    )
