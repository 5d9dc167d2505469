"""Training: the loss while the weights were learnt."""

from __future__ import annotations

from typing import Any

from curvatlas.report.charts import Series, chart
from curvatlas.report.contents import Contents, Section, as_number, numbers
from curvatlas.report.markup import Markup, join, number, tag
from curvatlas.report.scales import linear_scale, log_scale

_MOST_POINTS = 400


def training(contents: Contents) -> Section | None:
    parts = []
    for entry in contents.entries:
        history = entry.content.get("history", entry.content)
        if isinstance(history, dict) and history.get("kind") == "TrainingHistory":
            parts.append(_history(history))
    if not any(parts):
        return None
    return Section(identifier="training", title="Training", body=join(*parts))


def _history(history: dict[str, Any]) -> Markup | None:
    losses = numbers(history.get("losses"))
    if len(losses) < 2:
        return None
    every = -(-len(losses) // _MOST_POINTS)
    # the mean of each stretch: a thinned curve would show noise, not the course
    means = [sum(p) / len(p) for p in (losses[i : i + every] for i in range(0, len(losses), every))]
    positive = min(means) > 0
    series = Series(
        name="training loss",
        x=[float(index * every) for index in range(len(means))],
        y=means,
        style="line",
    )
    picture = chart(
        [series],
        x_scale=linear_scale([0.0, float(len(losses))], zero=True),
        y_scale=log_scale(means) if positive else linear_scale(means),
        x_label="step",
        y_label="loss",
        title="Training loss",
        description="Of each batch." if every == 1 else f"Mean over {every} steps at a time.",
    )
    accuracy, loss = (as_number(history.get(f"validation_{k}")) for k in ("accuracy", "loss"))
    outcome = "" if loss is None else f" Held-out loss {number(loss)}"
    outcome += "" if accuracy is None or loss is None else f", accuracy {accuracy:.1%}"
    text = tag("p", f"{len(losses):,} steps.{outcome + '.' if outcome else ''}")
    return join(text, picture)
