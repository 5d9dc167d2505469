"""Training: the loss while the weights were learnt, and every number recorded over steps."""

from __future__ import annotations

from typing import Any

from curvatlas.report.charts import (
    Series,
    chart,
    fitting_scale,
    linear_scale,
    log_scale,
    symlog_scale,
)
from curvatlas.report.contents import (
    Contents,
    Section,
    as_number,
    capitalised,
    numbers,
    quantity,
    stage_heading,
)
from curvatlas.report.markup import Markup, join, number, tag

_MOST_POINTS = 400


def training(contents: Contents) -> Section | None:
    parts = []
    for entry in contents.entries:
        history = entry.content.get("history", entry.content)
        if isinstance(history, dict) and history.get("kind") == "TrainingHistory":
            parts.append(_history(history))
    if not any(parts):
        return None
    return Section("training", "Training", join(*parts))


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
    outcome = "" if loss is None else f" On held-out samples: loss {number(loss)}"
    outcome += "" if accuracy is None or loss is None else f", accuracy {accuracy:.1%}"
    text = tag("p", f"{len(losses):,} steps.{outcome + '.' if outcome else ''}")
    return join(text, picture)


_MOST_FIGURES = 12
_MOST_EVENTS = 30
_MOST_LINES = 6


def dynamics(contents: Contents) -> Section | None:
    """Results with a list of records that carry a ``step``: numbers become curves with their
    ``<name>_interval``, ``events`` a list in words."""
    bodies = []
    for entry in contents.entries:
        records = _records(entry.content)
        if records:
            bodies.append(
                join(stage_heading(entry.stage), _figures(records), _events(entry.content))
            )
    if not bodies:
        return None
    return Section("dynamics", "Training dynamics", join(*bodies))


def _records(content: dict[str, Any]) -> list[dict[str, Any]]:
    for value in content.values():
        if (
            isinstance(value, list)
            and len(value) > 1
            and all(
                isinstance(record, dict) and as_number(record.get("step")) is not None
                for record in value
            )
        ):
            return value
    return []


def _figures(records: list[dict[str, Any]]) -> Markup:
    names = [
        key
        for key in dict.fromkeys(key for record in records for key in record)
        if key != "step"
        and not key.endswith("_threshold")
        and sum(quantity(r, key)[0] is not None for r in records) > 1
    ]
    pictures = [_figure(records, name) for name in names[:_MOST_FIGURES]]
    pictures += [_by_part(records, name) for name in _parted(records)]
    return tag("div", pictures, class_="pair")


def _parted(records: list[dict[str, Any]]) -> list[str]:
    """Fields that hold a number for each role (or other part) in at least two records."""

    def holds_parts(value: Any) -> bool:
        return isinstance(value, dict) and any(as_number(v) is not None for v in value.values())

    names = dict.fromkeys(key for record in records for key in record)
    return [n for n in names if sum(holds_parts(r.get(n)) for r in records) > 1]


def _by_part(records: list[dict[str, Any]], name: str) -> Markup:
    """One line a part; the parts with the largest numbers when there are too many to tell apart."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        for part, raw in (record.get(name) or {}).items():
            value = as_number(raw)
            if value is not None:
                lines.setdefault(part, []).append((as_number(record["step"]) or 0.0, value))
    largest = sorted(lines, key=lambda part: -max(abs(v) for _, v in lines[part]))[:_MOST_LINES]
    series = [
        Series(
            name=part.replace("_", " "),
            x=[x for x, _ in lines[part]],
            y=[y for _, y in lines[part]],
            style="line",
            colour=index,
        )
        for index, part in enumerate(largest)
    ]
    words = name.replace("_", " ")
    shown = f"the {len(largest)} largest of {len(lines)}" if len(lines) > len(largest) else "all"
    return chart(
        series,
        x_scale=linear_scale,
        y_scale=fitting_scale,
        x_label="step",
        y_label=words,
        title=capitalised(words),
        description=f"Over training steps, {shown}.",
    )


def _figure(records: list[dict[str, Any]], name: str) -> Markup:
    steps, values, intervals = [], [], []
    for record in records:
        value, interval = quantity(record, name)
        if value is not None:
            steps.append(as_number(record["step"]) or 0.0)
            values.append(value)
            intervals.append(interval or (value, value))
    words = name.replace("_", " ")
    series = [Series(name=words, x=steps, y=values, intervals=intervals)]
    limits = [quantity(record, f"{name}_threshold")[0] for record in records]
    if any(limit is not None for limit in limits):
        pairs = [(r, limit) for r, limit in zip(records, limits, strict=True) if limit is not None]
        x, y = [as_number(r["step"]) or 0.0 for r, _ in pairs], [limit for _, limit in pairs]
        series.append(Series(name="threshold", x=x, y=y, style="line", colour=1))
    signed = min(values) < 0 < max(values) and max(map(abs, values)) > 1e3 * min(map(abs, values))
    return chart(
        series,
        x_scale=linear_scale,
        y_scale=symlog_scale if signed else fitting_scale,
        x_label="step",
        y_label=words,
        title=capitalised(words),
        description="Over training steps.",
    )


def _events(content: dict[str, Any]) -> Markup | None:
    events = content.get("events")
    if not isinstance(events, list) or not events:
        return None
    items = [tag("li", _words(event)) for event in events[:_MOST_EVENTS]]
    return join(tag("h3", "Events"), tag("ul", items))


def _words(event: Any) -> str:
    if isinstance(event, dict):
        shown = (f"{k.replace('_', ' ')}: {v}" for k, v in event.items() if k != "kind")
        return ", ".join(shown)
    return str(event)
