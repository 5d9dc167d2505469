"""The papers' experiments on this model: growth with a scale, sinks, Gauss-Newton."""

from __future__ import annotations

import math
from typing import Any

from curvatlas.report.charts import Series, chart, linear_scale, log_scale
from curvatlas.report.contents import (
    PARTS,
    Contents,
    Section,
    as_interval,
    as_number,
    numbers,
    quantity,
    with_interval,
)
from curvatlas.report.markup import Markup, join, number, sentence, switch, table, tag

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


def sinks(contents: Contents) -> Section | None:
    """λmax over bulk along the sink, of one model or of several seeds, and the heads."""
    runs = contents.of_kind("Sinks")
    if not runs:
        return None
    several = len(runs) > 1
    series = []
    for index, entry in enumerate(runs):
        levels = [level for level in entry.content.get("levels", []) if isinstance(level, dict)]
        ratios = [_ratio(level) for level in levels]
        if levels and all(ratio is not None for ratio, _ in ratios):
            series.append(
                Series(
                    name=entry.stage if several else "λmax / bulk",
                    x=[as_number(level.get("bias")) or 0.0 for level in levels],
                    y=[ratio or 0.0 for ratio, _ in ratios],
                    # an open end is drawn one decade long
                    intervals=None
                    if several
                    else [(low, min(high, 10 * (ratio or 0.0))) for ratio, (low, high) in ratios],
                    colour=index,
                )
            )
    intro = tag(
        "p",
        "A bias is added to the logit of the first token in every head. The bulk is the mean |λ| "
        "of the 90 % of the eigenvalues of H over the attention parameters nearest to zero.",
    )
    claims = [entry.content.get("claim") for entry in contents.of_kind("SinkStudy")]
    told = [
        tag("p", tag("strong", str(claim.get("verdict"))), f": {claim.get('statement')}.")
        for claim in claims
        if isinstance(claim, dict)
    ]
    picture = None
    if series:
        picture = chart(
            series,
            x_scale=linear_scale,
            y_scale=log_scale,
            x_label="bias on the first token's logits",
            y_label="λmax / bulk",
            title="The spectrum along the sink",
            description="Largest eigenvalue over the bulk.",
        )
    bodies = [_levels(runs[0].content), _heads(runs[0].content)] if not several else []
    return Section("sinks", "Attention sinks", join(intro, *told, picture, *bodies))


def _ratio(level: dict[str, Any]) -> tuple[float | None, tuple[float, float]]:
    """λmax / bulk with its interval."""
    top, bulk = as_number(level.get("largest")), as_number(level.get("bulk"))
    if top is None or not bulk:
        return None, (0.0, 0.0)
    tops = as_interval(level.get("largest_interval")) or (top, top)
    bulks = as_interval(level.get("bulk_interval")) or (bulk, bulk)
    high = tops[1] / bulks[0] if bulks[0] > 0 else math.inf
    return top / bulk, (max(tops[0], 0.0) / bulks[1], high)


def _levels(content: dict[str, Any]) -> Markup:
    rows: list[list[object]] = []
    for level in content.get("levels", []):
        masses = [m for row in level.get("mass", []) for m in numbers(row)]
        ratio, ends = _ratio(level)
        rows.append(
            [
                f"{as_number(level.get('bias')) or 0.0:g}",
                sum(masses) / len(masses) if masses else None,
                as_number(level.get("loss")),
                with_interval(*quantity(level, "largest")),
                with_interval(*quantity(level, "bulk")),
                with_interval(ratio, ends),
            ]
        )
    head: list[object] = ["bias", "mass on the first token", "loss", "λmax", "bulk", "λmax / bulk"]
    return table(head, rows, caption="Spectrum along the sink")


def _heads(content: dict[str, Any]) -> Markup | None:
    heads = [head for head in content.get("heads", []) if isinstance(head, dict)]
    if not heads:
        return None
    roles = list(dict.fromkeys(role for head in heads for role in head.get("norms", {})))
    rows: list[list[object]] = [
        [
            f"layer {head.get('layer')} head {head.get('head')}",
            as_number(head.get("mass")),
            *(as_number(head["norms"].get(role, {}).get("total")) for role in roles),
        ]
        for head in heads[:_MOST_ROWS]
    ]
    correlations = [
        tag("li", f"{role}, {PARTS.get(part, part)}: {with_interval(*quantity(found))}")
        for role, parts in (content.get("correlations") or {}).items()
        for part, found in parts.items()
    ]
    return join(
        table(
            ["head", "sink mass", *(f"‖H‖ of its {role}" for role in roles)],
            rows,
            caption="The model's own heads, strongest sink first",
        ),
        tag("p", "Rank correlation of sink mass and norm over heads:") if correlations else None,
        tag("ul", correlations) if correlations else None,
    )


_NAMES = {
    "gauss_newton": "Gauss-Newton H_o",
    "block_diagonal": "block diagonal of H_o",
    "ekfac": "EKFAC",
    "kfac": "KFAC",
    "adam": "Adam's diagonal",
    "identity": "nothing",
}


def gauss_newton(contents: Contents) -> Section | None:
    """What Gauss-Newton and its approximations miss, and how that compares with an MLP."""
    bodies = [_quality(entry.content) for entry in contents.of_kind("GaussNewtonQuality")]
    bodies += [_comparison(entry.content) for entry in contents.of_kind("GaussNewtonComparison")]
    if not bodies:
        return None
    return Section("gauss-newton", "How good is Gauss-Newton", join(*bodies))


def _condition(one: dict[str, Any], key: str) -> object:
    """A condition number: exact, with its interval, or as the lower bound it is."""
    value, interval = quantity(one, key)
    if value is None or interval is None:
        return value
    if one.get(f"{key}_is_bound"):
        return f"≥ {number(value)}"
    return with_interval(value, interval)


def _quality(content: dict[str, Any]) -> Markup:
    top, outer = (as_number(content.get(key)) for key in ("largest", "largest_outer"))
    shares = content.get("functional_share") or {}
    ratio = None if not top or outer is None else outer / top
    whole = with_interval(*quantity(shares.get("model") or {}))
    rows: list[list[object]] = []
    for name, one in (content.get("approximations") or {}).items():
        row: list[object] = [_NAMES.get(name, name)]
        for key in ("to_hessian", "to_outer"):
            distance = one.get(key)
            row.append(with_interval(*quantity(distance)) if distance else "–")
        row += [_condition(one, f"condition_{which}") for which in ("hessian", "outer")]
        rows.append(row)
    roles: list[list[object]] = [
        [role, with_interval(*quantity(share))] for role, share in shares.items() if role != "model"
    ]
    head: list[object] = ["P", "distance to H", "distance to H_o", "κ of P⁻¹|H|", "κ of P⁻¹H_o"]
    damping = as_number(content.get("damping")) or 0.0
    return join(
        tag("p", sentence("λmax(H_o) / λmax(H) is {}.", with_interval(ratio, None))),
        tag("p", sentence("Gauss-Newton leaves out ‖H_f‖ / ‖H‖ = {}.", whole)),
        table(head, rows, caption=f"What stands in for the Hessian (damping {damping:g})"),
        table(["role", "‖H_f‖ / ‖H‖"], roles, caption="What Gauss-Newton leaves out, by role"),
    )


def _comparison(content: dict[str, Any]) -> Markup:
    rows_of = content.get("rows") or {}
    quantities = list(dict.fromkeys(q for row in rows_of.values() for q in row))
    rows: list[list[object]] = [
        [
            name,
            *(
                with_interval(as_number(row[q].get("mean")), as_interval(row[q].get("interval")))
                for q in quantities
            ),
        ]
        for name, row in rows_of.items()
    ]
    claims: list[list[object]] = [
        [
            str(one.get("statement")),
            tag("strong", str(one.get("verdict"))),
            with_interval(
                as_number(one["value"].get("mean")), as_interval(one["value"].get("interval"))
            ),
        ]
        for one in content.get("claims", [])
    ]
    return join(
        table(["", *quantities], rows, caption="A Transformer and an MLP of equal size"),
        table(["claim", "verdict", "Transformer − MLP"], claims, caption="Worse than for MLPs?"),
    )
