"""The atlas: where curvature lives, over pairs of roles, of layers and of blocks."""

from __future__ import annotations

from typing import Any

from curvatlas.report.contents import PARTS, Contents, Section, as_number, stage_words
from curvatlas.report.heatmap import Matrix, cell_table, common_limits, heatmap
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
    bodies = []
    for index, entry in enumerate(entries):
        words = stage_words(entry.stage)
        heading = tag("h3", words[0].upper() + words[1:]) if words else None
        bodies.append(join(heading, _atlas(entry.content, f"atlas{index}")))
    lead = tag(
        "p",
        "Each cell is the Frobenius norm of one block of the matrix: how strongly two groups of "
        "weights curve the loss together. Choose H, or its parts H_o and H_f; the colours of one "
        "view mean the same in all three.",
    )
    return Section(identifier="atlas", title="Atlas of curvature", body=join(lead, *bodies))


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
    whole = sum(square for square, _, _ in squares)
    return [
        (str(names[i]) if i == j else f"{names[i]} × {names[j]}", values[i][j] or 0.0, s / whole)
        for s, i, j in sorted(squares, reverse=True)
        if whole > 0
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
            found = shares.get(f"{view}/{part}")
            if isinstance(found, list) and len(found) == 3:
                value, low, high = (as_number(v) or 0.0 for v in found)
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
