"""What was analysed: the model, its parameters by role, the data."""

from __future__ import annotations

from typing import Any

from curvatlas.report.charts import Series, chart
from curvatlas.report.contents import Contents, Section, as_number, stage_words
from curvatlas.report.markup import Markup, join, number, table, tag
from curvatlas.report.scales import Scale, linear_scale


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
        sizes[str(entry.get("role"))] = sizes.get(str(entry.get("role")), 0) + size
    if not sizes:
        return None
    names = list(sizes)
    picture = None
    if len(names) <= 14:
        top = linear_scale(sizes.values(), zero=True)
        series = Series(
            name="parameters",
            x=list(range(len(names))),
            y=[float(sizes[name]) for name in names],
            style="bars",
            labels=[f"{name}: {sizes[name]:,} parameters" for name in names],
        )
        picture = chart(
            [series],
            x_scale=Scale(kind="linear", low=-0.6, high=len(names) - 0.4),
            y_scale=top,
            x_label="role",
            y_label="parameters",
            title="Parameters by role",
            description="How many parameters each role has, summed over layers.",
            x_names=names,
        )
    total = sum(sizes.values())
    rows: list[list[object]] = [[name, size, f"{size / total:.1%}"] for name, size in sizes.items()]
    numbers = table(["role", "parameters", "share"], rows, caption="Parameters by role")
    return tag("div", picture, tag("div", numbers), class_="pair")
