"""What was analysed: the model, its parameters by role, the data."""

from __future__ import annotations

from typing import Any

from curvatlas.report.contents import Contents, Section, as_number, stage_words
from curvatlas.report.markup import Markup, join, number, table, tag

_MOST_ROLES = 14


def subject(contents: Contents) -> Section | None:
    entries = contents.of_kind("Subject")
    if not entries:
        return None
    first = entries[0].content
    lead = tag(
        "p",
        tag("strong", first.get("name")),
        f" is a {first.get('model')} with ",
        tag("strong", f"{int(as_number(first.get('parameters')) or 0):,} parameters"),
        f", measured on {first.get('data')} in {first.get('dtype')} on {first.get('device')}.",
    )
    rows: list[list[object]] = [
        [stage_words(entry.stage) or "as given", *_numbers(entry.content)] for entry in entries
    ]
    losses = table(
        ["weights", str(first.get("loss_name") or "loss"), "gradient norm", "targets", "batches"],
        rows,
        caption="The loss at which curvature was measured",
    )
    return Section(
        identifier="subject",
        title="What was analysed",
        body=join(lead, losses, _roles(first)),
    )


def _numbers(content: dict[str, Any]) -> list[object]:
    keys = ("loss", "gradient_norm", "targets", "batches")
    return [number(as_number(content.get(key)) or 0.0, 4) for key in keys]


def _roles(content: dict[str, Any]) -> Markup | None:
    sizes: dict[str, int] = {}
    for entry in content.get("roles") or []:
        size = int(as_number(entry.get("parameters")) or 0)
        role = str(entry.get("role")).removesuffix("_bias")  # a bias counts with its weight
        sizes[role] = sizes.get(role, 0) + size
    total, largest = sum(sizes.values()), max(sizes.values(), default=0)
    if not total:
        return None
    rows: list[list[object]] = []
    for role, size in sorted(sizes.items(), key=lambda item: -item[1])[:_MOST_ROLES]:
        bar = tag("span", class_="share", style=f"width:{100 * size / largest:.1f}%")
        rows.append([role, f"{size:,}", f"{size / total:.1%}", bar])
    left_out = len(sizes) - len(rows)
    more = tag("p", f"and {left_out} smaller roles.") if left_out else None
    head: list[object] = ["role", "parameters", "share", ""]
    return join(table(head, rows, caption="Parameters by role, biases with their weights"), more)
