"""Flatness: measures, layers, bounds beside losses, rescalings; what it says of generalisation."""

from __future__ import annotations

from typing import Any

from curvatlas.report.contents import (
    Contents,
    Section,
    as_interval,
    as_number,
    quantity,
    with_interval,
)
from curvatlas.report.markup import Markup, join, number, sentence, table, tag

_MOST_LAYERS = 30


def flatness(contents: Contents) -> Section | None:
    entries = [e for e in contents.of_kind("Flatness") if not e.stage.startswith("rescaled")]
    tables = [_changes(entry.content) for entry in contents.of_kind("Invariance")]
    if not entries and not tables:
        return None
    bodies = [body for entry in entries for body in _body(entry.content)]
    return Section("flatness", "Flatness", join(*bodies, *tables))


def _body(content: dict[str, Any]) -> list[Markup | None]:
    bounds = [content.get(name) for name in ("isotropic", "diagonal")]
    sentences = [
        _rise(content.get("sam")),
        _rise(content.get("asam")),
        *(_bound(bound) for bound in bounds if isinstance(bound, dict)),
    ]
    said = [tag("li", one) for one in sentences if one is not None]
    return [tag("ul", said, class_="findings") if said else None, _table(content), _layers(content)]


def _rise(content: Any) -> Markup | None:
    content = content if isinstance(content, dict) else {}
    value, radius = as_number(content.get("value")), as_number(content.get("radius"))
    stationary, margin = as_number(content.get("stationarity")), as_number(content.get("margin"))
    if value is None or radius is None or stationary is None or margin is None:
        return None
    local = stationary <= 1e-2 and margin <= 1e-3
    state = "a certified local maximum" if local else "NOT certified as a maximum"
    adaptive = content.get("quantity") == "ASAM"
    where = "relative to each weight's size" if adaptive else "in the weights"
    return sentence(
        f"Within a distance of {number(radius)} {where} the loss rises by at most {{}} "
        f"({content.get('quantity')} sharpness: {state}; {content.get('agreeing')} of "
        f"{content.get('starts')} starts agree).",
        number(value),
    )


def _bound(content: dict[str, Any]) -> Markup | None:
    value, loss = as_number(content.get("value")), as_number(content.get("loss"))
    confidence = as_number(content.get("confidence"))
    if value is None or loss is None or confidence is None:
        return None
    test = as_number(content.get("test_loss"))
    seen = "" if test is None else f", and {number(test)} on the test samples"
    return sentence(
        f"With {content.get('posterior')} noise on the weights the loss on new samples is below "
        f"{{}} ({confidence:.0%}); it is {number(loss)} on the training samples{seen}.",
        number(value),
    )


_ROWS = {
    "sharpness": "λmax of H",
    "trace": "tr H",
    "effective_rank": "effective rank of H",
    "sam": "SAM sharpness",
    "asam": "ASAM sharpness",
    "fisher_rao": "Fisher–Rao norm",
    "relative_flatness": "relative flatness, all layers",
    "isotropic": "PAC-Bayes bound, isotropic noise",
    "diagonal": "PAC-Bayes bound, diagonal noise",
    "log_volume": "log-volume",
}


def _table(content: dict[str, Any]) -> Markup | None:
    rows: list[list[object]] = []
    for key, words in _ROWS.items():
        field = content.get(key)
        if isinstance(field, dict) and key == "relative_flatness":
            value, interval = as_number(field.get("total")), as_interval(field.get("interval"))
        else:
            value, interval = quantity(content, key)
        if value is not None:
            rows.append([words, with_interval(value, interval)])
    loss, test = as_number(content.get("loss")), as_number(content.get("test_loss"))
    if loss is not None and test is not None:
        rows.append(["generalisation gap: test loss − training loss", number(test - loss)])
    return table(["measure", "value [95 % interval]"], rows, caption="Flatness") if rows else None


def _layers(content: dict[str, Any]) -> Markup | None:
    field = content.get("relative_flatness")
    values = field.get("values") if isinstance(field, dict) else None
    if not isinstance(field, dict) or not isinstance(values, dict):
        return None
    intervals = field.get("intervals")
    intervals = intervals if isinstance(intervals, dict) else {}
    known = {name: v for name, raw in values.items() if (v := as_number(raw)) is not None}
    names = sorted(known, key=lambda name: -abs(known[name]))[:_MOST_LAYERS]
    rows: list[list[object]] = [
        [name, with_interval(known[name], as_interval(intervals.get(name)))] for name in names
    ]
    if not rows:
        return None
    return table(["layer", "κ [95 % interval]"], rows, caption="Relative flatness by layer")


def _changes(content: dict[str, Any]) -> Markup | None:
    """One row a measure, one column a rescaling: the relative change, or that there is none."""
    names, before = content.get("rescalings"), content.get("before")
    after, verdicts = content.get("after"), content.get("verdicts")
    if not (
        isinstance(names, list) and all(isinstance(d, dict) for d in (before, after, verdicts))
    ):
        return None
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert isinstance(verdicts, dict)
    rows: list[list[object]] = []
    for measure, raw in before.items():
        start = as_number(raw)
        cells = list(zip(after.get(measure) or [], verdicts.get(measure) or [], strict=False))
        if start is None or len(cells) != len(names):
            continue
        words = _ROWS.get(measure, measure.replace("_", " "))
        row: list[object] = [words]
        for value, verdict in cells:
            change = abs((as_number(value) or 0.0) - start) / max(abs(start), 1e-300)
            row.append("same" if verdict == "invariant" else f"{number(change)} ({verdict})")
        rows.append(row)
    refused = [tag("li", str(note)) for note in content.get("refused") or []]
    return join(
        table(
            ["measure", *map(str, names)],
            rows,
            caption="Relative change under rescalings that leave the function as it is",
        ),
        tag("ul", refused) if refused else None,
    )


# --- generalisation -------------------------------------------------------------------------------


def generalisation(contents: Contents) -> Section | None:
    """Rank correlations of every measure with the gap, and the models they are of."""
    studies: list[Markup | None] = [
        _study(entry.content) for entry in contents.of_kind("Generalisation")
    ]
    if not studies:
        done = [entry.content for entry in contents.of_kind("StudiedModel")]
        studies = [_models(done)] if done else []
    if not studies:
        return None
    return Section("generalisation", "Flatness and generalisation", join(*studies))


def _study(content: dict[str, Any]) -> Markup:
    models = [model for model in content.get("models") or [] if isinstance(model, dict)]
    found = [row for row in content.get("correlations") or [] if isinstance(row, dict)]
    found.sort(key=lambda row: -abs(as_number(row.get("value")) or 0.0))
    rows: list[list[object]] = []
    for row in found:
        interval = as_interval(row.get("interval")) or (-1.0, 1.0)
        told = with_interval(as_number(row.get("value")), interval)
        clear = interval[0] > 0 or interval[1] < 0
        low, high = as_interval(row.get("control")) or (-1.0, 1.0)
        rows.append(
            [
                str(row.get("measure")),
                tag("strong", told) if clear else told,
                f"{low:+.2f} to {high:+.2f}",
                as_number(row.get("p_value")),
            ]
        )
    left_out = [tag("li", str(one)) for one in content.get("left_out") or []]
    intro = (
        f"{len(models)} models trained on {content.get('dataset')}: Kendall's τ of each measure "
        "with the gap, test loss − training loss. Intervals are over models drawn with "
        "replacement; bold where they do not hold zero; beside them what shuffled gaps give."
    )
    return join(
        tag("p", intro),
        table(
            ["measure", "τ with the gap [95 % interval]", "gaps shuffled, 95 %", "p"],
            rows,
            caption="Which measures order the models as their gaps do",
        ),
        _models(models),
        tag("ul", left_out) if left_out else None,
    )


def _models(models: list[dict[str, Any]]) -> Markup | None:
    """One row a model: how it was made and what it reached."""
    if not models:
        return None
    names = list(models[0].get("options") or {})
    ends = ("train_loss", "test_loss", "train_error", "test_error")
    rows: list[list[object]] = [
        [
            *(as_number((model.get("options") or {}).get(name)) for name in names),
            *(as_number(model.get(end)) for end in ends),
        ]
        for model in models
    ]
    head: list[object] = [word.replace("_", " ") for word in (*names, *ends)]
    return table(head, rows, caption="The models")
