"""Training: the loss while the weights were learnt, and every number recorded over steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from curvatlas.report.charts import (
    Series,
    chart,
    common_limits,
    fitting_scale,
    heatmap,
    linear_scale,
    log_scale,
    symlog_scale,
    thumbnail,
)
from curvatlas.report.contents import (
    PARTS,
    Contents,
    Section,
    as_interval,
    as_number,
    capitalised,
    matrix,
    numbers,
    quantity,
    stage_heading,
    with_interval,
)
from curvatlas.report.markup import Markup, join, number, sentence, switch, table, tag
from curvatlas.report.sections.atlas import interval_notes
from curvatlas.training.alarms import YOUNG

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
        x_label="training step",
        y_label="loss of the batch",
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


# field of a record → title, label of the axis, what it shows; other fields are called by their name
_CHARTS = {
    "loss": ("Loss", "loss on the monitor's data", "Of the data that curvature was measured on."),
    "learning_rate": ("Learning rate", "learning rate η", "As the optimizer had it."),
    "sharpness": ("Sharpness", "λmax of H", "The sharpest direction; bars are certain bounds."),
    "edge": (
        "The optimizer's own edge of stability",
        "λmax(P⁻¹H)",
        "H as the optimizer's scaling P sees it: above the dashed line its own updates grow.",
    ),
    "most_negative": (
        "Most negative curvature",
        "λmin of H",
        "Below 0 it curves downwards.",
    ),
    "trace": ("Total curvature", "tr H", "Bars are 95 % intervals of the probes."),
    "negative_mass": (
        "Negative eigenvalues",
        "share below zero",
        "Bars are 95 % intervals of the probes.",
    ),
    "gradient_norm": ("Gradient norm", "‖∇L‖", "On the monitor's data."),
    "gradient_alignment": (
        "Gradient in the sharpest directions",
        "share of ‖∇L‖²",
        "One: the gradient lies in the top eigenspace.",
    ),
    "drift": ("Turning of the sharpest directions", "1 − overlap", "Since the snapshot before."),
    "role_sharpness": ("Sharpness by role", "λmax of H[role, role]", "A point where measured."),
    "role_trace": ("Curvature by role", "tr H[role, role]", "A point where measured."),
    "role_gradient": ("Gradient by role", "‖∇L‖ of the role", "A point where measured."),
}
_BOOKKEEPING = (
    "step",
    "products",
    "seconds",
    "map_seconds",
    "rounding",
    "edge_is_law",
    "rate_limited",
)


def _labels(name: str) -> tuple[str, str, str]:
    words = name.replace("_", " ")
    return _CHARTS.get(name, (capitalised(words), words, "Over training steps."))


def dynamics(contents: Contents) -> Section | None:
    """Results with a list of records that carry a ``step``: numbers become curves with their
    ``<name>_interval`` and ``<name>_threshold``, ``events`` a list in words."""
    bodies: list[Markup] = []
    for entry in contents.entries:
        records = _records(entry.content)
        if records:
            events = _events(entry.content)
            said = [tag("li", one) for one in _course(records)]
            course = tag("ul", said, class_="findings") if said else None
            figures = _figures(records, _marks(entry.content))
            film = _film(records, f"film{len(bodies)}")
            bodies.append(join(stage_heading(entry.stage), course, events, film, figures))
    bodies += [_early_blocks(entry.content) for entry in contents.of_kind("EarlyBlocks")]
    if not bodies:
        return None
    return Section("dynamics", "Training dynamics", join(*bodies))


def _course(records: list[dict[str, Any]]) -> Iterator[Markup]:
    """What the curves say, in words: where loss, sharpness and the optimizer's edge went."""
    first, last = records[0], records[-1]
    for name, words in (("loss", "The loss"), ("sharpness", "λmax of H"), ("trace", "tr H")):
        ends = [quantity(record, name) for record in (first, last)]
        if any(value is None for value, _ in ends):
            continue
        before, after = (with_interval(*end) for end in ends)
        steps = f"over steps {first['step']} to {last['step']}"
        yield sentence(f"{words} went from {{}} to {{}} {steps}.", before, after)
    metric, _, reason = str(last.get("metric") or "").partition(" (")
    if metric == "plain" and reason:
        plain = "The edge of stability is the one of plain gradient descent: {}."
        yield sentence(plain, reason.removesuffix(")"))
    ratios = [
        (value / limit, record["step"])
        for record in records
        if (value := quantity(record, "edge")[0]) is not None
        and (record["step"] >= YOUNG or value == quantity(record, "sharpness")[0])
        and (limit := quantity(record, "edge_threshold")[0])
    ]
    over = [step for ratio, step in ratios if ratio > 1]
    if over:
        yield sentence(
            f"The optimizer was beyond its edge of stability in {{}} snapshots, first at step "
            f"{over[0]}.",
            f"{len(over)} of {len(ratios)}",
        )
    elif ratios:
        nearest, step = max(ratios)
        yield sentence(
            f"The optimizer stayed below its edge of stability: nearest at step {step}, with {{}} "
            "of it.",
            f"{nearest:.0%}",
        )


def _marks(content: dict[str, Any]) -> list[tuple[float, str]]:
    """Where events happened, for the charts."""
    events = content.get("events")
    found = []
    for event in events if isinstance(events, list) else []:
        step = as_number(event.get("step")) if isinstance(event, dict) else None
        if step is not None:
            found.append((step, _words(event)))
    return found[:_MOST_EVENTS]


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


def _figures(records: list[dict[str, Any]], marks: list[tuple[float, str]]) -> Markup:
    there = dict.fromkeys(key for record in records for key in record)
    names = [
        key
        for key in sorted(there, key=lambda k: list(_CHARTS).index(k) if k in _CHARTS else 99)
        if key not in _BOOKKEEPING
        and not key.endswith("_threshold")
        and not any(_holds_parts(r.get(key)) for r in records)
        and sum(quantity(r, key)[0] is not None for r in records) > 1
    ]
    pictures = [_figure(records, name, marks) for name in names[:_MOST_FIGURES]]
    pictures += [_by_part(records, name) for name in _parted(records)]
    return tag("div", pictures, class_="pair")


def _parted(records: list[dict[str, Any]]) -> list[str]:
    """Fields that hold a number for each role (or other part) in at least two records."""

    names = dict.fromkeys(key for record in records for key in record)
    return [n for n in names if sum(_holds_parts(r.get(n)) for r in records) > 1]


def _holds_parts(value: Any) -> bool:
    """A number for each part; an estimate is a dictionary too, but has a kind or an interval."""
    if not isinstance(value, dict) or "kind" in value or "interval" in value:
        return False
    return any(as_number(v) is not None for v in value.values())


def _by_part(records: list[dict[str, Any]], name: str) -> Markup:
    """One line a part; the parts with the largest numbers when there are too many to tell apart."""
    lines: dict[str, list[tuple[float, float]]] = {}
    newest: dict[str, float] = {}
    for record in records:
        for part, raw in (record.get(name) or {}).items():
            value = as_number(raw)
            # A role that was not measured again carries its last number: that is no point.
            if value is not None and newest.get(part) != value:
                newest[part] = value
                lines.setdefault(part, []).append((as_number(record["step"]) or 0.0, value))
    largest = sorted(lines, key=lambda part: -max(abs(v) for _, v in lines[part]))[:_MOST_LINES]
    series = [
        Series(
            name=part.replace("_", " "),
            x=[x for x, _ in lines[part]],
            y=[y for _, y in lines[part]],
            colour=index,
        )
        for index, part in enumerate(largest)
    ]
    title, label, description = _labels(name)
    shown = f"The {len(largest)} largest of {len(lines)}." if len(lines) > len(largest) else ""
    return chart(
        series,
        x_scale=linear_scale,
        y_scale=fitting_scale,
        x_label="training step",
        y_label=label,
        title=title,
        description=f"{description} {shown}".strip(),
    )


def _figure(records: list[dict[str, Any]], name: str, marks: list[tuple[float, str]]) -> Markup:
    steps, values, intervals = [], [], []
    for record in records:
        value, interval = quantity(record, name)
        if value is not None:
            steps.append(as_number(record["step"]) or 0.0)
            values.append(value)
            intervals.append(interval or (value, value))
    title, label, description = _labels(name)
    series = [Series(name=title.lower(), x=steps, y=values, intervals=intervals)]
    limits = [quantity(record, f"{name}_threshold")[0] for record in records]
    if any(limit is not None for limit in limits):
        pairs = [(r, limit) for r, limit in zip(records, limits, strict=True) if limit is not None]
        x, y = [as_number(r["step"]) or 0.0 for r, _ in pairs], [limit for _, limit in pairs]
        series.append(Series(name="where it becomes unstable", x=x, y=y, style="line", colour=1))
    signed = min(values) < 0 < max(values) and max(map(abs, values)) > 1e3 * min(map(abs, values))
    # The values decide, not the ends of their intervals: a share near one half stays linear.
    fitting = log_scale if min(values) > 0 and max(values) > 20 * min(values) else linear_scale
    return chart(
        series,
        x_scale=linear_scale,
        y_scale=symlog_scale if signed else fitting,
        x_label="training step",
        y_label=label,
        title=title,
        description=description,
        marks=marks,
    )


_MOST_FRAMES = 16
_FILM_VIEWS = {"role": "roles", "layer": "layers"}


def _film(records: list[dict[str, Any]], identifier: str) -> Markup | None:
    """The maps over training: a slider through the steps, all of them small beside each other."""
    mapped = [r for r in records if isinstance(r.get("maps"), dict) and r["maps"].get("maps")]
    mapped = mapped[:: -(-len(mapped) // _MOST_FRAMES)] if mapped else []
    panels = {}
    for view, words in _FILM_VIEWS.items():
        for part, symbol in PARTS.items():
            frames = [(r, r["maps"]["maps"].get(f"{view}/frobenius/{part}")) for r in mapped]
            shown = [(r, frame) for r, frame in frames if isinstance(frame, dict)]
            if len(shown) > 1 and len(shown[0][1].get("names") or ()) > 1:
                name = f"{identifier}-{view}-{part}"
                panels[f"{symbol} over {words}"] = _reel(shown, symbol, words, name)
    if not panels:
        return None
    lead = tag(
        "p",
        "Frobenius norms of the blocks at the steps that were mapped; colours mean the "
        "same at every step.",
    )
    return join(tag("h3", "Maps over training"), lead, switch(identifier, panels, label="Map"))


def _reel(
    frames: list[tuple[dict[str, Any], dict[str, Any]]], symbol: str, words: str, identifier: str
) -> Markup:
    matrices = [matrix(frame.get("values")) for _, frame in frames]
    limits = common_limits(matrices, signed=False)
    small, large = [], []
    for index, ((record, frame), values) in enumerate(zip(frames, matrices, strict=True)):
        title = f"step {number(as_number(record['step']) or 0.0, 6)}"
        names = [str(name) for name in frame.get("names") or ()]
        small.append(thumbnail(values, title=title, limits=limits))
        picture = heatmap(
            values,
            rows=names,
            columns=names,
            title=f"{symbol} over {words}, {title}",
            description="With 95 % intervals.",
            bar=f"Frobenius norm of the blocks of {symbol}",
            identifier=f"{identifier}-{index}",
            limits=limits,
            notes=interval_notes(frame, len(names)),
        )
        large.append(tag("div", picture, class_="frame"))
    slider = tag(
        "input", type="range", min=0, max=len(frames) - 1, value=0, aria_label="Step of training"
    )
    return tag("div", tag("div", small, class_="multiples"), slider, large, class_="film")


_CORRELATIONS = {
    "per_weight": "tr H_bb / n and change of a weight",
    "dominance": "‖H_bb‖_F and distance of the block",
    "size_alone": "size of the block and distance (control)",
}


def _early_blocks(content: dict[str, Any]) -> Markup:
    rows: list[list[object]] = []
    for key, words in _CORRELATIONS.items():
        entry = content.get(key) or {}
        value, interval = quantity(entry)
        null = as_interval(entry.get("null"))
        p_value = as_number(entry.get("p_value"))
        shuffled = "" if null is None else f"{null[0]:.2f} … {null[1]:.2f}"
        rows.append([words, with_interval(value, interval), shuffled, p_value])
    lead = (
        f"Over {len(content.get('names') or ())} blocks: curvature at step {content.get('step')}, "
    )
    lead += f"movement until step {content.get('until')}."
    head: list[object] = ["Spearman's ρ of", "ρ (95 %)", "shuffled blocks (95 %)", "p"]
    title = tag("h3", "Do early dominant blocks predict which weights move?")
    answer = content.get("answer")
    said = tag("p", f"{capitalised(answer)}.") if isinstance(answer, str) else None
    return join(title, said, tag("p", lead), table(head, rows))


def _events(content: dict[str, Any]) -> Markup | None:
    events = content.get("events")
    if not isinstance(events, list) or not events:
        return None
    items = [tag("li", _words(event)) for event in events[:_MOST_EVENTS]]
    return join(tag("h3", "Events"), tag("ul", items))


def _words(event: Any) -> str:
    if isinstance(event, dict) and isinstance(event.get("message"), str):
        name = str(event.get("name") or "event").replace("_", " ")
        kind = "alarm " if event.get("alarm") else ""
        words = f"Step {event.get('step')}, {kind}{name}: {event['message']}"
        rate = as_interval(event.get("false_alarm_rate"))
        return (
            words if rate is None else f"{words} (false in at most {rate[1]:.0%} of healthy runs)"
        )
    if isinstance(event, dict):
        shown = (f"{k.replace('_', ' ')}: {v}" for k, v in event.items() if k != "kind")
        return ", ".join(shown)
    return str(event)
