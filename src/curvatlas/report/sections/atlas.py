"""Where curvature lives (the atlas of roles, layers and blocks) and how it travels back."""

from __future__ import annotations

import math
from typing import Any

from curvatlas.report.charts import (
    Scale,
    Series,
    cell_table,
    chart,
    common_limits,
    heatmap,
    log_scale,
)
from curvatlas.report.contents import (
    PARTS,
    Contents,
    Entry,
    Section,
    as_interval,
    as_number,
    matrix,
    numbers,
    stage_heading,
    stage_words,
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
    limits = {view: _limits(entries, view) for view in _VIEWS}
    bodies = [
        join(stage_heading(entry.stage), _atlas(entry.content, f"atlas{index}", limits))
        for index, entry in enumerate(entries)
    ]
    lead = tag(
        "p",
        "Each cell is the Frobenius norm of one block of the matrix: how strongly two groups of "
        "weights curve the loss together. Choose H, or its parts H_o and H_f; the colours of one "
        "view mean the same in all three, and at every stage.",
    )
    return Section("atlas", "Atlas of curvature", join(lead, *bodies))


def _limits(entries: list[Entry], view: str) -> tuple[float, float]:
    """One colour scale for a view in all parts and stages."""
    maps = [entry.content.get("maps") or {} for entry in entries]
    found = [m[key] for m in maps for part in PARTS if (key := f"{view}/frobenius/{part}") in m]
    return common_limits([matrix(entry.get("values")) for entry in found], signed=False)


def _atlas(
    content: dict[str, Any], identifier: str, limits: dict[str, tuple[float, float]]
) -> Markup:
    maps = content.get("maps") or {}
    accuracy = as_number(content.get("error")) or 0.0
    worst = as_number(content.get("worst_error"))
    method = "Exact"
    if content.get("method") == "sketch":
        method = f"Entries ± {accuracy:.0%} (root mean square of the standard errors"
        known = worst is not None and math.isfinite(worst)
        method += f"; the worst above 1 % of the largest ± {worst:.0%})" if known else ")"
    panels = {}
    for view, (title, description) in _VIEWS.items():
        chosen = {part: maps[key] for part in PARTS if (key := f"{view}/frobenius/{part}") in maps}
        if chosen and len(next(iter(chosen.values())).get("names") or ()) > 1:
            panels[title] = _view(
                chosen, title, f"{description} {method}.", f"{identifier}-{view}", limits[view]
            )
    label = "Groups whose curvature is mapped"
    pictures = switch(identifier, panels, label=label) if panels else None
    return join(pictures, _ranking(content), _shares(content), _traces(maps))


def _view(
    chosen: dict[str, dict[str, Any]],
    title: str,
    description: str,
    identifier: str,
    limits: tuple[float, float],
) -> Markup:
    matrices = {part: matrix(entry.get("values")) for part, entry in chosen.items()}
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
            notes=interval_notes(entry, len(names)),
            bar=f"Frobenius norm of the blocks of {PARTS[part]}",
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


def interval_notes(entry: dict[str, Any], size: int) -> list[list[str | None]] | None:
    low, high = matrix(entry.get("low")), matrix(entry.get("high"))
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
    names, values = entry.get("names") or [], matrix(entry.get("values"))
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
    caption = "The blocks that curve most; a pair counts with its transpose, so twice"
    return table(["block", "Frobenius norm", "share of ‖H‖²"], rows, caption=caption)


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
        tag(
            "p",
            "The share of the squared Frobenius norm that lies in diagonal blocks. Blocks off the "
            "diagonal stand twice in the matrix, and count twice.",
            class_="basis",
        ),
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
    total: list[object] = ["all roles"]
    for entry in chosen.values():
        sides = [numbers(entry.get(end)) for end in ("low", "values", "high")]
        low, value, high = (sum(side) for side in sides)
        reach = math.hypot(*((b - a) / 2 for a, b in zip(sides[0], sides[2], strict=True)))
        exact = low == high or reach < 1e-9 * max(abs(value), 1e-300)
        total.append(with_interval(value, None if exact else (value - reach, value + reach)))
    return tag("details", tag("summary", "Traces by role"), table(head, [*rows, total]))


# --- propagation ---------------------------------------------------------------------------------

_TERMS = {"total": "total", "passed_on": "passed on", "created_here": "created here"}


def propagation(contents: Contents) -> Section | None:
    entries = contents.of_kind("CurvatureFlow")
    if not entries:
        return None
    scale = log_scale([end for entry in entries for end in _ends(entry.content)])
    stream = log_scale([number for entry in entries for number in _stream_numbers(entry.content)])
    bodies = [
        join(stage_heading(entry.stage), _flow(entry.content, scale, stream)) for entry in entries
    ]
    lead = tag(
        "p",
        "The second derivative of the loss at the input of each sublayer has two sources: what "
        "later sublayers had and this one passes on, and what it creates by its own bending. The "
        "axes are the same at every stage; a hollow mark below the axis is a zero.",
    )
    together = _stages(entries, scale) if len(entries) > 1 else None
    return Section("propagation", "Propagation", join(lead, together, *bodies))


def _sublayers(content: dict[str, Any], key: str = "sublayers") -> list[dict[str, Any]]:
    return [entry for entry in content.get(key) or [] if isinstance(entry, dict)]


def _ends(content: dict[str, Any]) -> list[float]:
    """Every number that the charts of a flow by sublayer show."""
    found = []
    for entry in _sublayers(content):
        for term in _TERMS:
            value, interval = _norm(entry, term)
            found += [v for v in (value, *(interval or ())) if v is not None]
    return found


def _stream_numbers(content: dict[str, Any]) -> list[float]:
    """Every number that the chart of a flow by activation shows."""
    found = []
    for entry in _sublayers(content, "activations"):
        value, interval = _norm(entry, "total")
        slope = as_number(entry.get("gradient_scale"))
        found += [v for v in (value, slope, *(interval or ())) if v is not None]
    return found


def _flow(content: dict[str, Any], scale: Scale, stream: Scale) -> Markup:
    sublayers = _sublayers(content)
    pictures = [_terms(sublayers, scale), _stream(_sublayers(content, "activations"), stream)]
    exact = "exactly, by matrices" if content.get("method") == "dense" else "by random probes"
    said = tag(
        "p",
        f"Computed {exact}, on {content.get('samples')} samples; targets: {content.get('target')}.",
    )
    return join(tag("div", pictures, class_="pair"), said, _flow_table(sublayers))


def _stages(entries: list[Entry], scale: Scale) -> Markup:
    """The totals of every stage in the stages' colours."""
    series, names = [], []
    for colour, entry in enumerate(entries):
        sublayers = _sublayers(entry.content)
        names = [str(one.get("name")) for one in sublayers]
        words = stage_words(entry.stage) or "total"
        series.append(_by_place(words, names, [_norm(one, "total") for one in sublayers], colour))
    return _by_sublayer(
        series, names, scale, "Curvature by sublayer at every stage", "The total at each input."
    )


def _by_place(
    words: str, names: list[str], measured: list[tuple[float | None, Any]], colour: int
) -> Series:
    there = [
        (float(index), value, interval or (value, value))
        for index, (value, interval) in enumerate(measured)
        if value is not None
    ]
    return Series(
        name=words,
        x=[x for x, _, _ in there],
        y=[y for _, y, _ in there],
        intervals=[interval for _, _, interval in there],
        colour=colour,
        labels=[
            f"{names[int(x)]}, {words}: {with_interval(y, interval)}" for x, y, interval in there
        ],
    )


def _by_sublayer(
    series: list[Series], names: list[str], scale: Scale, title: str, description: str
) -> Markup:
    return chart(
        series,
        x_scale=Scale(kind="linear", low=-0.5, high=len(names) - 0.5),
        y_scale=scale,
        x_label="sublayer, from the embedding to the head",
        y_label="Frobenius norm",
        title=title,
        description=description,
        x_names=[name.removeprefix("blocks.") for name in names],
    )


def _terms(sublayers: list[dict[str, Any]], scale: Scale) -> Markup | None:
    names = [str(entry.get("name")) for entry in sublayers]
    series = [
        _by_place(words, names, [_norm(entry, key) for entry in sublayers], colour + 2)
        for colour, (key, words) in enumerate(_TERMS.items())
    ]
    series = [one for one in series if any(one.y)]
    if not series:
        return None
    description = "The norm at each sublayer's input, and its two terms."
    return _by_sublayer(series, names, scale, "Curvature by sublayer", description)


def _stream(activations: list[dict[str, Any]], scale: Scale) -> Markup | None:
    if len(activations) < 2:
        return None
    names = [str(entry.get("name")) for entry in activations]
    slopes = [(as_number(entry.get("gradient_scale")), None) for entry in activations]
    curvature = [_norm(entry, "total") for entry in activations]
    series = [
        _by_place(what, names, values, colour)
        for what, values, colour in (("curvature", curvature, 2), ("gradient norm", slopes, 5))
    ]
    return chart(
        series,
        x_scale=Scale(kind="linear", low=-0.5, high=len(names) - 0.5),
        y_scale=scale,
        x_label="activation, from the embedding to the head",
        y_label="norm",
        title="Curvature and gradient by depth",
        description="At every activation of the network.",
        x_names=[name.removeprefix("blocks.") for name in names],
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
