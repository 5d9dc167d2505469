"""How far the quadratic model holds, how the loss settles with samples, and the laws of scaling."""

from __future__ import annotations

import math
from typing import Any

from curvatlas.report.charts import Series, chart, fitting_scale, linear_scale, log_scale
from curvatlas.report.contents import (
    Contents,
    Section,
    as_interval,
    as_number,
    capitalised,
    numbers,
    quantity,
    with_interval,
)
from curvatlas.report.markup import Markup, join, number, sentence, switch, table, tag

_EVIDENCE = 0.01  # p-value above which a slope is that of noise


def landscape(contents: Contents) -> Section | None:
    sentences = [
        tag("li", sentence)
        for kind, say in _SENTENCES.items()
        for entry in contents.of_kind(kind)
        if (sentence := say(entry.content)) is not None
    ]
    pictures = [
        picture
        for kind, draw in _PICTURES.items()
        for entry in contents.of_kind(kind)
        for picture in draw(entry.content)
    ]
    again = contents.of_kind("RetrainedConvergence")
    if not sentences and not pictures and not again:
        return None
    expansions = [_expansion(entry.content) for entry in contents.of_kind("TaylorExpansion")]
    retrained = [_retrained(entry.content) for entry in again]
    return Section(
        "landscape",
        "Landscape",
        join(
            tag("ul", sentences, class_="findings") if sentences else None,
            tag("div", pictures, class_="pair") if pictures else None,
            *expansions,
            *retrained,
        ),
    )


def _rate(content: dict[str, Any]) -> Markup | None:
    value = as_number(content.get("value"))
    ratios, growth = numbers(content.get("ratios")), numbers(content.get("growth"))
    if value is None:
        return None
    agrees = all((g > 1) == (r > 1) for r, g in zip(ratios, growth, strict=False))
    tried = ", ".join(number(ratio) for ratio in ratios)
    said = (
        f" Training at {tried} times this rate {'confirms' if agrees else 'does NOT confirm'} it."
        if ratios
        else ""
    )
    return sentence(
        f"Plain gradient descent becomes unstable at the learning rate {{}}.{said}",
        with_interval(value, as_interval(content.get("interval"))),
    )


def _radius(content: dict[str, Any]) -> Markup | None:
    radius, accuracy = as_number(content.get("radius")), as_number(content.get("accuracy"))
    if radius is None or accuracy is None:
        return None
    measured = as_number(content.get("measured_radius"))
    fails = f"; it was seen to fail at {number(measured)}" if measured is not None else ""
    return sentence(
        f"The model of order {content.get('order')} predicts the change of the loss within "
        f"{accuracy:.1%} for steps up to {{}}{fails}.",
        number(radius),
    )


def _verdict(content: dict[str, Any]) -> Markup | None:
    tested = content.get("against_null")
    tested = tested if isinstance(tested, dict) else {}
    p, difference = as_number(tested.get("p_value")), as_number(tested.get("difference"))
    exponent = as_number(_fit_of(content.get("difference")).get("exponent"))
    if p is None or math.isnan(p) or difference is None or exponent is None:
        return None
    words = (
        "that of independent noise with the same moments: it follows from averaging and is no "
        "evidence about curvature"
        if p > _EVIDENCE
        else f"different from that of independent noise by {number(difference)}"
    )
    return sentence(
        f"One more sample changes the loss like k to the power {{}}, {words} (p = {number(p)}).",
        number(exponent),
    )


def _fit_of(curve: Any) -> dict[str, Any]:
    """The power law of a curve; empty where too few points were there to fit."""
    fit = curve.get("fit") if isinstance(curve, dict) else None
    return fit if isinstance(fit, dict) else {}


def _horizon(content: dict[str, Any]) -> Markup | None:
    """How many of the predicted steps hold; None for runs of old versions, which did not ask."""
    horizon, tolerance = as_number(content.get("horizon")), as_number(content.get("tolerance"))
    predicted = numbers(content.get("losses"))
    if horizon is None or tolerance is None or not predicted:
        return None
    last = len(predicted) - 1
    beyond = " Beyond that the quadratic model is no forecast." if horizon < last else ""
    return sentence(
        f"The quadratic model predicts gradient descent within {tolerance:.0%} of the change of "
        f"the loss for {{}} of {last} steps.{beyond}",
        number(horizon),
    )


def _trajectory(content: dict[str, Any]) -> list[Markup]:
    predicted, actual = numbers(content.get("losses")), numbers(content.get("actual"))
    if len(predicted) < 2:
        return []
    horizon = as_number(content.get("horizon"))
    end = len(predicted) - 1 if horizon is None else int(horizon)
    series = [_steps("quadratic model", predicted[: end + 1], 0)]
    if end < len(predicted) - 1:
        # what runs away beyond the horizon would flatten the part that is real
        shown = predicted[: end + 1] + actual
        reach = max(shown) - min(shown)
        low, high = min(shown) - reach, max(shown) + reach
        beyond = predicted[end:]
        kept = next((i for i, v in enumerate(beyond) if not low <= v <= high), len(beyond))
        series.append(_steps("beyond its horizon", beyond[:kept], 2, first=end))
    if actual:
        series.append(_steps("real run", actual, 1))
    rate = as_number(content.get("learning_rate"))
    told = f" with learning rate {number(rate)}" if rate is not None else ""
    return [
        chart(
            series,
            x_scale=linear_scale([float(step) for step in range(len(predicted))]),
            y_scale=fitting_scale,
            x_label="step",
            y_label="loss",
            title="Gradient descent, predicted and real",
            description=f"What the quadratic model predicts{told}, and what training does.",
        )
    ]


def _steps(name: str, values: list[float], colour: int, first: int = 0) -> Series:
    steps = [float(first + step) for step in range(len(values))]
    return Series(name=name, x=steps, y=values, colour=colour)


def _convergence(content: dict[str, Any]) -> list[Markup]:
    bounds = content.get("bounds")
    bounds = bounds if isinstance(bounds, dict) else {}
    curves = {
        "samples": content.get("difference"),
        "noise control": content.get("null"),
    }
    series = [_curve(name, curve, i) for i, (name, curve) in enumerate(curves.items())]
    places = _positive(curves["samples"])[0]
    for word in ("printed", "corrected"):
        values = numbers(bounds.get(word))
        if places and len(values) == len(places):
            series.append(
                Series(name=f"bound, {word}", x=places, y=values, style="line", colour=len(series))
            )
    pictures = [
        _log_chart(
            series,
            "mean |L(k+1) − L(k)|",
            "One more sample: the loss",
            "How much one more sample changes the loss, beside noise with the same moments.",
        )
    ]
    hessians = [
        _curve("samples", content.get("hessian"), 0),
        _curve("noise control", content.get("hessian_null"), 1),
    ]
    pictures.append(
        _log_chart(
            hessians,
            "‖H(k+1) − H(k)‖",
            "One more sample: the Hessian",
            "How much one more sample changes the Hessian, in the Frobenius norm.",
        )
    )
    return [picture for picture in pictures if picture is not None]


def _curve(name: str, curve: Any, colour: int) -> Series:
    places, means, intervals = _positive(curve)
    return Series(name=name, x=places, y=means, intervals=intervals, colour=colour)


def _positive(curve: Any) -> tuple[list[float], list[float], list[tuple[float, float]]]:
    """k, mean and interval of the points that a logarithmic axis can show."""
    curve = curve if isinstance(curve, dict) else {}
    columns = [numbers(curve.get(key)) for key in ("k", "mean", "low", "high")]
    rows = [row for row in zip(*columns, strict=False) if row[0] > 0 and row[1] > 0]
    intervals = [(max(low, mean * 1e-3), high) for _, mean, low, high in rows]
    return [row[0] for row in rows], [row[1] for row in rows], intervals


def _log_chart(series: list[Series], y_label: str, title: str, description: str) -> Markup | None:
    drawn = [one for one in series if len(one.x) > 1 and min(one.y) > 0]
    if not drawn:
        return None
    return chart(
        drawn,
        x_scale=log_scale,
        y_scale=log_scale,
        x_label="samples k",
        y_label=y_label,
        title=title,
        description=description,
    )


def _expansion(content: dict[str, Any]) -> Markup | None:
    rows: list[list[object]] = []
    for key, words in _TERMS.items():
        value = as_number(content.get(key))
        if value is not None:
            rows.append([words, number(value)])
    norm = as_number(content.get("displacement_norm"))
    told = f" for a step of length {number(norm)}" if norm is not None else ""
    return table(["term", "loss"], rows, caption=f"Taylor expansion{told}") if rows else None


_RETRAINED = ("retrained", "control", "followed", "fixed", "noise")
_MOST_CELLS = 6  # panels of a switch


def _retrained(content: dict[str, Any]) -> Markup | None:
    """Exponents of every optimizer and schedule, and the curves of the first ones."""
    cells = [cell for cell in content.get("cells") or [] if isinstance(cell, dict)]
    if not cells:
        return None
    rows: list[list[object]] = []
    panels: dict[str, Markup] = {}
    for cell in cells:
        name = f"{cell.get('optimizer')}, {cell.get('schedule')}"
        curves = cell.get("curves") or {}
        share = as_number(cell.get("converged")) or 0.0
        flag = "all" if share == 1 else f"{share:.0%}: the others are left out"
        laws = [_fit_of(curves.get(key)) for key in _RETRAINED]
        laws.append(_fit_of(cell.get("gap")))
        exponents = [
            with_interval(as_number(law.get("exponent")), as_interval(law.get("interval")))
            if law
            else "–"
            for law in laws
        ]
        rows.append([name, *exponents, flag])
        drawn = _log_chart(
            [_curve(key, curves.get(key), i) for i, key in enumerate(_RETRAINED)],
            "mean change of the loss",
            f"One more sample: the minimum ({name})",
            "How much one more sample changes the loss at the minimum, beside its controls.",
        )
        if drawn is not None and len(panels) < _MOST_CELLS:
            panels[name] = drawn
    intro = tag(
        "p",
        "The model trained again for every number of samples k, and brought to a minimum. "
        "retrained: trained from the start on k + 1 samples; control: trained again on the same k; "
        "followed: the minimum of k moved by the new sample; fixed: the weights of k; noise: "
        "averaging alone. Where retrained lies on the control, training again decides, not the "
        "sample.",
    )
    head: list[object] = ["optimizer, schedule", *_RETRAINED, "gap", "at a minimum"]
    return join(
        tag("h3", "The minimum, trained again"),
        intro,
        switch("retrained", panels, label="Optimizer and schedule") if panels else None,
        table(head, rows, caption="Exponents in k [95 % interval]"),
    )


_TERMS = {
    "constant": "loss before the step",
    "linear": "linear term",
    "quadratic": "quadratic term",
    "cubic": "cubic term",
    "remainder": "remainder",
    "actual": "loss after the step",
}
_SENTENCES = {
    "CriticalLearningRate": _rate,
    "TrustRadius": _radius,
    "PredictedTrajectory": _horizon,
    "LandscapeConvergence": _verdict,
}
_PICTURES = {"PredictedTrajectory": _trajectory, "LandscapeConvergence": _convergence}


# --- scaling --------------------------------------------------------------------------------------

_AXES = {"parameters": ("parameters N", "samples"), "samples": ("samples D", "parameters")}
_MOST_QUANTITIES = 4
_MOST_GROUPS = 6


def scaling(contents: Contents) -> Section | None:
    """Grids of runs with their laws, and other results whose rows have two sizes."""
    bodies = [
        _runs(entry.content) if entry.kind == "ScalingGrid" else _grid(entry.content)
        for entry in contents.entries
        if _rows(entry.content) or entry.kind == "ScalingGrid"
    ]
    if not bodies:
        return None
    return Section("scaling", "Data and scaling", join(*bodies))


def _runs(content: dict[str, Any]) -> Markup:
    """Means over seeds with the laws through them, phases of training, what was left out."""
    findings = [tag("li", words) for words in [*content["findings"], *content["notes"]]]
    pictures = [
        _law_figure(name, points, content["curves"].get(name, []))
        for name, points in content["points"].items()
        if len(points) > 1
    ]
    looks = [cell for cell in content["cells"] if cell.get("looks") and not cell["failure"]]
    if looks:
        pictures += [_training(looks, content["phases"], name) for name in _LOOKED_AT]
    return join(
        tag("ul", findings, class_="findings"),
        tag("div", pictures, class_="pair"),
        _fits(content),
    )


def _law_figure(name: str, points: list[dict[str, Any]], curves: list[dict[str, Any]]) -> Markup:
    series = []
    sizes = sorted({point["parameters"] for point in points})
    for colour, size in enumerate(sizes[:_MOST_GROUPS]):
        line = [point for point in points if point["parameters"] == size]
        series.append(
            Series(
                name=f"N = {size}",
                x=[float(point["samples"]) for point in line],
                y=[float(point["value"]) for point in line],
                intervals=[as_interval(p["interval"]) or (p["value"], p["value"]) for p in line],
                style="points",
                colour=colour,
            )
        )
        series += [
            Series(
                name=f"law at N = {size}",
                x=numbers(curve["samples"]),
                y=numbers(curve["values"]),
                style="line",
                colour=colour,
            )
            for curve in curves
            if curve["parameters"] == size
        ]
    words = name.replace("_", " ")
    return chart(
        series,
        x_scale=log_scale,
        y_scale=log_scale,
        x_label="samples D",
        y_label=words,
        title=f"{capitalised(words)} against samples",
        description="Geometric means over seeds with 95 % intervals, and the law fitted to all "
        "sizes at once.",
    )


_LOOKED_AT = {"sharpness": "λmax on a few samples", "training_loss": "training loss"}


def _training(cells: list[dict[str, Any]], phases: dict[str, dict[str, Any]], name: str) -> Markup:
    """A quantity over the training of one run a model size, with the place where runs bend."""
    chosen: dict[int, dict[str, Any]] = {}
    for cell in cells:
        kept = chosen.setdefault(cell["parameters"], cell)
        if cell["samples"] > kept["samples"]:
            chosen[cell["parameters"]] = cell
    found = phases.get(name)
    marks = [] if found is None else [(float(found["change"]), "runs bend here (median)")]
    return chart(
        [
            Series(
                name=f"N = {size}, D = {cell['samples']}",
                x=[step / cell["steps"] for step in numbers(cell["looks"]["steps"])],
                y=numbers(cell["looks"][name]),
                colour=colour,
            )
            for colour, (size, cell) in enumerate(sorted(chosen.items())[:_MOST_GROUPS])
        ],
        x_scale=linear_scale,
        y_scale=log_scale,
        x_label="share of the steps",
        y_label=_LOOKED_AT[name],
        title=f"{capitalised(name.replace('_', ' '))} over training",
        description="One run of every model size, on the most data.",
        marks=marks,
    )


def _rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    rows = content.get("rows")
    if not isinstance(rows, list) or len(rows) < 2:
        return []
    sized = [
        isinstance(row, dict) and all(as_number(row.get(key)) is not None for key in _AXES)
        for row in rows
    ]
    return rows if all(sized) else []


def _grid(content: dict[str, Any]) -> Markup:
    rows = _rows(content)
    names = [
        key
        for key in rows[0]
        if key not in _AXES and all((quantity(row, key)[0] or 0.0) > 0 for row in rows)
    ]
    pictures = [
        _figure(rows, name, axis, label, group)
        for name in names[:_MOST_QUANTITIES]
        for axis, (label, group) in _AXES.items()
        if len({row[axis] for row in rows}) > 1
    ]
    return join(tag("div", pictures, class_="pair"), _fits(content))


def _figure(rows: list[dict[str, Any]], name: str, axis: str, label: str, group: str) -> Markup:
    words = name.replace("_", " ")
    sizes = sorted({as_number(row[group]) or 0.0 for row in rows})
    series = []
    for colour, size in enumerate(sizes[:_MOST_GROUPS]):
        chosen = sorted(
            (row for row in rows if as_number(row[group]) == size),
            key=lambda row: as_number(row[axis]) or 0.0,
        )
        quantities = [quantity(row, name) for row in chosen]
        series.append(
            Series(
                name=f"{group} {number(size)}",
                x=[as_number(row[axis]) or 0.0 for row in chosen],
                y=[value or 0.0 for value, _ in quantities],
                intervals=[
                    interval or (value or 0.0, value or 0.0) for value, interval in quantities
                ],
                colour=colour,
            )
        )
    return chart(
        series,
        x_scale=log_scale,
        y_scale=log_scale,
        x_label=label,
        y_label=words,
        title=f"{capitalised(words)} against {axis}",
        description="Both axes logarithmic: a power law is a straight line.",
    )


def _fits(content: dict[str, Any]) -> Markup | None:
    fits = content.get("fits")
    if not isinstance(fits, dict):
        return None
    rows: list[list[object]] = []
    for name, fit in fits.items():
        if isinstance(fit, dict):
            for key in fit:
                value, interval = quantity(fit, key)
                if value is not None and not key.endswith("_interval"):
                    rows.append(
                        [f"{name}: {key}".replace("_", " "), with_interval(value, interval)]
                    )
    if not rows:
        return None
    return table(["fit", "value [95 % interval]"], rows, caption="Fitted laws")
