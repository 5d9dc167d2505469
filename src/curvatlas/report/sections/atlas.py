"""Where curvature lives (the atlas of roles, layers and blocks) and how it travels back."""

from __future__ import annotations

from typing import Any

from curvatlas.report.charts import (
    Matrix,
    Scale,
    Series,
    cell_table,
    chart,
    common_limits,
    heatmap,
    linear_scale,
    log_scale,
)
from curvatlas.report.contents import (
    PARTS,
    Contents,
    Section,
    as_interval,
    as_number,
    stage_heading,
    with_interval,
)
from curvatlas.report.markup import Markup, join, number, switch, table, tag

_VIEWS = {
    "role": ("roles", "Summed over layers: which kinds of weights curve, and with which others."),
    "layer": ("layers", "Summed over the roles of each layer."),
    "block": ("blocks", "Every role of every layer against every other."),
}
_MOST_NOTES = 2500  # cells that carry their interval; larger maps say the common error instead
_MOST_IN_TABLE = 14  # rows of a map that is also given as a table
_RANKED = 8


def atlas(contents: Contents) -> Section | None:
    entries = contents.of_kind("Atlas")
    if not entries:
        return None
    bodies = [
        join(stage_heading(entry.stage), _atlas(entry.content, f"atlas{index}"))
        for index, entry in enumerate(entries)
    ]
    lead = tag(
        "p",
        "Each cell is the Frobenius norm of one block of the matrix: how strongly two groups of "
        "weights curve the loss together. Choose H, or its parts H_o and H_f; the colours of one "
        "view mean the same in all three.",
    )
    return Section("atlas", "Atlas of curvature", join(lead, *bodies))


def _atlas(content: dict[str, Any], identifier: str) -> Markup:
    maps = content.get("maps") or {}
    accuracy = as_number(content.get("error")) or 0.0
    method = "Exact" if content.get("method") == "dense" else f"Entries ± {accuracy:.0%} (rms)"
    panels = {}
    for view, (title, description) in _VIEWS.items():
        chosen = {part: maps[key] for part in PARTS if (key := f"{view}/frobenius/{part}") in maps}
        if chosen and len(next(iter(chosen.values())).get("names") or ()) > 1:
            panels[title] = _view(chosen, title, f"{description} {method}.", f"{identifier}-{view}")
    label = "Groups whose curvature is mapped"
    pictures = switch(identifier, panels, label=label) if panels else None
    return join(pictures, _ranking(content), _shares(content), _traces(maps))


def _view(
    chosen: dict[str, dict[str, Any]], title: str, description: str, identifier: str
) -> Markup:
    matrices = {part: _matrix(entry.get("values")) for part, entry in chosen.items()}
    limits = common_limits(list(matrices.values()), signed=False)
    panels = {}
    for part, entry in chosen.items():
        names = [str(name) for name in entry.get("names") or ()]
        picture = heatmap(
            matrices[part],
            rows=names,
            columns=names,
            title=f"{PARTS[part]} over {title}",
            description=description,
            identifier=f"{identifier}-{part}",
            limits=limits,
            notes=_notes(entry, len(names)),
        )
        numbers = None
        if len(names) <= _MOST_IN_TABLE:
            caption = f"Frobenius norms of {PARTS[part]} over {title}"
            numbers = tag(
                "details",
                tag("summary", "The numbers"),
                cell_table(matrices[part], rows=names, columns=names, caption=caption),
                class_="matrix",
            )
        panels[PARTS[part]] = join(picture, numbers)
    return switch(identifier, panels, label="Matrix that is mapped")


def _matrix(values: Any) -> Matrix:
    if not isinstance(values, list):
        return []
    return [[as_number(v) for v in row] if isinstance(row, list) else [] for row in values]


def _notes(entry: dict[str, Any], size: int) -> list[list[str | None]] | None:
    low, high = _matrix(entry.get("low")), _matrix(entry.get("high"))
    if size * size > _MOST_NOTES or len(low) != size or len(high) != size:
        return None
    return [
        [
            None if a is None or b is None or a == b else f"[{number(a)}, {number(b)}]"
            for a, b in zip(row, other, strict=True)
        ]
        for row, other in zip(low, high, strict=True)
    ]


def ranked_blocks(content: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(name or pair, Frobenius norm, share of ‖H‖²) of the blocks of H, the largest first."""
    entry = (content.get("maps") or {}).get("block/frobenius/total")
    if not isinstance(entry, dict):
        return []
    names, values = entry.get("names") or [], _matrix(entry.get("values"))
    squares = [
        ((v or 0.0) ** 2 * (1 if i == j else 2), i, j)
        for i, row in enumerate(values)
        for j, v in enumerate(row)
        if j >= i
    ]
    total = sum(square for square, _, _ in squares)
    return [
        (str(names[i]) if i == j else f"{names[i]} × {names[j]}", values[i][j] or 0.0, s / total)
        for s, i, j in sorted(squares, reverse=True)
        if total > 0
    ]


def _ranking(content: dict[str, Any]) -> Markup | None:
    rows: list[list[object]] = [
        [name, norm, f"{share:.1%}"] for name, norm, share in ranked_blocks(content)[:_RANKED]
    ]
    if not rows:
        return None
    return table(
        ["block", "Frobenius norm", "share of ‖H‖²"], rows, caption="The blocks that curve most"
    )


def _shares(content: dict[str, Any]) -> Markup | None:
    shares = content.get("diagonal_share") or {}
    rows: list[list[object]] = []
    for view, name in (("block", "blocks"), ("layer", "layers"), ("role", "roles")):
        for part, symbol in PARTS.items():
            share = shares.get(f"{view}/{part}")
            if isinstance(share, list) and len(share) == 3:
                value, low, high = (as_number(v) or 0.0 for v in share)
                shown = f"{value:.1%} [{low:.1%}, {high:.1%}]"
                rows.append([f"{symbol}, diagonal {name}", shown])
    if not rows:
        return None
    return tag(
        "details",
        tag("summary", "How block-diagonal is the curvature?"),
        table(["part", "share of the squared norm"], rows),
    )


def _traces(maps: dict[str, Any]) -> Markup | None:
    chosen = {p: maps[key] for p in PARTS if (key := f"role/trace/{p}") in maps}
    if not chosen:
        return None
    names = next(iter(chosen.values())).get("names") or []
    rows: list[list[object]] = []
    for index, name in enumerate(names):
        row: list[object] = [str(name)]
        for entry in chosen.values():
            low, value, high = (
                as_number(side[index]) if isinstance(side, list) and index < len(side) else None
                for side in (entry.get("low"), entry.get("values"), entry.get("high"))
            )
            shown = "–" if value is None else number(value)
            if None not in (low, high) and low != high:
                shown += f" [{number(low or 0.0)}, {number(high or 0.0)}]"
            row.append(shown)
        rows.append(row)
    head: list[object] = ["role", *(f"tr {PARTS[part]}" for part in chosen)]
    return tag("details", tag("summary", "Traces by role"), table(head, rows))


# --- propagation ---------------------------------------------------------------------------------

_TERMS = {"total": "total", "passed_on": "passed on", "created_here": "created here"}
_MOST_NAMES = 12  # sublayers named under the axis; more are numbered and named on hover


def propagation(contents: Contents) -> Section | None:
    entries = contents.of_kind("CurvatureFlow")
    if not entries:
        return None
    bodies = [join(stage_heading(entry.stage), _flow(entry.content)) for entry in entries]
    lead = tag(
        "p",
        "The second derivative of the loss at the input of each sublayer has two sources: what "
        "later sublayers had and this one passes on, and what it creates by its own bending.",
    )
    return Section("propagation", "Propagation", join(lead, *bodies))


def _flow(content: dict[str, Any]) -> Markup:
    sublayers = [e for e in content.get("sublayers") or [] if isinstance(e, dict)]
    activations = [e for e in content.get("activations") or [] if isinstance(e, dict)]
    pictures = [_terms(sublayers), _stream(activations)]
    said = tag(
        "p",
        f"Computed {content.get('method')} on {content.get('samples')} samples; "
        f"targets: {content.get('target')}.",
    )
    return join(tag("div", pictures, class_="pair"), said, _flow_table(sublayers))


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
        y_scale=log_scale,
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
        Series(
            name=what,
            x=places,
            y=values,
            colour=colour,
            labels=[f"{n}, {what}: {number(v)}" for n, v in zip(names, values, strict=True)],
        )
        for colour, (what, values) in enumerate(
            (("curvature", curvature), ("gradient norm", slopes))
        )
    ]
    return chart(
        series,
        x_scale=linear_scale,
        y_scale=log_scale,
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


def _flow_table(sublayers: list[dict[str, Any]]) -> Markup:
    rows: list[list[object]] = []
    for entry in sublayers:
        terms = [with_interval(*_norm(entry, key)) for key in _TERMS]
        factor = as_number(entry.get("amplification"))
        interval = as_interval(entry.get("amplification_interval"))
        rows.append([str(entry.get("name")), *terms, with_interval(factor, interval)])
    head: list[object] = ["sublayer", *_TERMS.values(), "amplification"]
    return tag("details", tag("summary", "The numbers"), table(head, rows))
