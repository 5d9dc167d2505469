"""Findings in plain words, the verdicts on theorems, and recommendations: each with its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from curvatlas.analysis.diagnostics import ADAPTIVE
from curvatlas.report.contents import (
    Contents,
    Section,
    as_interval,
    as_number,
    capitalised,
    eigenvalues,
    quantity,
    stage_heading,
    stage_words,
    with_interval,
)
from curvatlas.report.markup import Markup, join, number, sentence, table, tag
from curvatlas.report.sections.atlas import ranked_blocks


def findings(contents: Contents) -> Section | None:
    sentences = [
        *_losses(contents),
        *_sharpness(contents),
        *_saddles(contents),
        *_traces(contents),
        *_dominating(contents),
        *_growth(contents),
    ]
    if not sentences:
        return None
    items = [tag("li", sentence) for sentence in sentences]
    return Section("findings", "Findings", tag("ul", items, class_="findings"))


def _at(stage: str) -> str:
    words = stage_words(stage)
    return f"{capitalised(words)}, the" if words else "The"


def _losses(contents: Contents) -> Iterator[Markup]:
    entries = contents.of_kind("Subject")
    if len(entries) < 2:
        return
    first, last = entries[0].content, entries[-1].content
    before, after = as_number(first.get("loss")), as_number(last.get("loss"))
    if before is None or after is None:
        return
    where = f" on {first.get('data')}" if first.get("data") == last.get("data") else ""
    yield sentence(
        f"Training took the loss{where} from {{}} to {{}}.", number(before), number(after)
    )


def _largest(contents: Contents, stage: str) -> tuple[float, tuple[float, float]] | None:
    content = contents.find("Eigenpairs", stage=stage, part="total")
    pairs = list(eigenvalues(content)) if content else []
    return max(pairs, default=None)


def _sharpness(contents: Contents) -> Iterator[Markup]:
    seen = []
    for stage in contents.stages("Eigenpairs"):
        top = _largest(contents, stage)
        if top is None:
            continue
        value, interval = top
        seen.append((stage, value, interval))
        step = ""
        if value > 0:
            limit = number(2 / value)
            step = f" Plain gradient descent is stable along it for steps below 2/λmax = {limit}."
        shown = f"λmax = {with_interval(value, interval)}"
        yield sentence(f"{_at(stage)} sharpest direction has curvature {{}}.{step}", shown)
    if len(seen) >= 2:
        (_, before, low), (_, after, high) = seen[0], seen[-1]
        apart = low[1] < high[0] or high[1] < low[0]
        if not apart:
            text = "The change of λmax over training lies within its uncertainty."
        elif before > 0 and after > 0:
            text = f"λmax changed by a factor of {number(after / before)} over training."
        else:
            text = f"λmax went from {number(before)} to {number(after)} over training."
        yield tag("span", text)


def _place(contents: Contents, stage: str) -> str:
    """What steps along the negative curvature have shown the point to be; empty: none were taken"""
    for entry in contents.of_kind("Advice"):
        advice = entry.content
        given = [one.get("trial") for one in advice.get("recommendations") or []]
        for trial in [*given, *(advice.get("ruled_out") or [])]:
            if entry.stage == stage and trial and "negative" in str(trial.get("direction")):
                return str(trial.get("place"))
    return ""


def _saddles(contents: Contents) -> Iterator[Markup]:
    for stage in contents.stages("Eigenpairs"):
        content = contents.find("Eigenpairs", stage=stage, part="total")
        pairs = list(eigenvalues(content)) if content else []
        if not pairs or content is None or content.get("which") not in ("both", "smallest"):
            continue
        value, interval = min(pairs)
        if interval[1] < 0:
            place = _place(contents, stage)
            yield sentence(
                f"{_at(stage)} loss also curves downwards: the most negative eigenvalue is {{}}"
                f"{f'; {place}' if place else ''}.",
                with_interval(value, interval),
            )
        elif interval[0] >= 0:
            yield tag("span", f"{_at(stage)} loss shows no downward curvature.")
        else:
            yield tag(
                "span",
                f"{_at(stage)} smallest eigenvalue is {with_interval(value, interval)}: its sign "
                "cannot be told from zero.",
            )


def _traces(contents: Contents) -> Iterator[Markup]:
    entries = contents.of_quantity("trace")
    for stage in dict.fromkeys(entry.stage for entry in entries):
        traces = {e.part: quantity(e.content) for e in entries if e.stage == stage}
        if "total" not in traces or traces["total"][0] is None:
            continue
        parts = ""
        if "outer" in traces and "functional" in traces:
            parts = (
                f": {with_interval(*traces['outer'])} from the outer-product part H_o and "
                f"{with_interval(*traces['functional'])} from the functional part H_f"
            )
        total = f"tr H = {with_interval(*traces['total'])}"
        yield sentence(f"{_at(stage)} total curvature is {{}}{parts}.", total)


def _dominating(contents: Contents) -> Iterator[Markup]:
    for entry in contents.of_kind("Atlas"):
        blocks = ranked_blocks(entry.content)
        if blocks:
            name, _, share = blocks[0]
            twice = " (counted with its transpose)" if " × " in name else ""
            yield sentence(
                f"{_at(entry.stage)} block that curves most is {{}}, with about {share:.0%} of the "
                f"squared norm of H{twice}.",
                name,
            )


def amplification(content: dict[str, Any]) -> tuple[float | None, tuple[float, float] | None]:
    """Curvature at the first activation over that at the last, and its interval."""
    norms = [
        as_number((one.get("measures") or {}).get("total", {}).get("norm"))
        for one in content.get("activations") or []
    ]
    if len(norms) < 2 or not norms[0] or not norms[-1]:
        return None, None
    return norms[0] / norms[-1], as_interval(content.get("amplification_interval"))


def _growth(contents: Contents) -> Iterator[Markup]:
    for entry in contents.of_kind("CurvatureFlow"):
        value, interval = amplification(entry.content)
        if value is not None:
            yield sentence(
                f"{_at(entry.stage)} curvature at the embedding is {{}} that at the last "
                "activation.",
                f"{with_interval(value, interval)} times",
            )


def verdicts(contents: Contents) -> Section | None:
    """Statements of the papers: what holds, what holds corrected, what is false as printed."""
    statements: list[dict[str, Any]] = []
    for entry in contents.of_kind("Verification"):
        statements += [one for one in entry.content.get("entries") or [] if isinstance(one, dict)]
    if not statements:
        return None
    counts: dict[str, int] = {}
    for one in statements:
        counts[str(one.get("verdict"))] = counts.get(str(one.get("verdict")), 0) + 1
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    otherwise = [one for one in statements if one.get("verdict") != one.get("recorded")]
    alarm = None
    if otherwise:
        names = ", ".join(str(one.get("name")) for one in otherwise)
        alarm = tag("p", f"Not as recorded on this machine: {names}.", class_="caution")
    rows = [_row(one) for one in statements]
    return Section(
        "verdicts",
        "Theorems and claims",
        join(
            tag("p", f"{len(statements)} statements tested on this machine: {summary}."),
            alarm,
            table(["statement", "verdict", "measured", "source"], rows),
        ),
    )


def _row(one: dict[str, Any]) -> list[object]:
    statement = join(tag("span", one.get("title")), tag("br"), tag("code", one.get("formula")))
    marked = tag("strong", one.get("verdict"))
    return [statement, marked, str(one.get("figure")), str(one.get("source"))]


_ADVICE = ("advice", "recommendation", "title", "action", "name")


def recommendations(contents: Contents) -> Section | None:
    """Every record of a list called ``recommendations`` that brings its evidence; no other."""
    bodies = []
    for entry in contents.entries:
        listed = entry.content.get("recommendations")
        situation = entry.content.get("situation")
        supported = [
            one
            for one in (listed if isinstance(listed, list) else [])
            if isinstance(one, dict) and one.get("evidence")
        ]
        said = _situation(situation) if isinstance(situation, dict) else None
        if supported or said:
            items = [_item(one) for one in supported]
            nothing = tag("p", "Nothing that was measured asks for a change.")
            body = tag("ul", items, class_="findings") if items else nothing
            tried = [
                tag("li", f"Not advised, {one.get('sentence')}.")
                for one in entry.content.get("ruled_out") or []
            ]
            ruled_out = tag("ul", tried, class_="findings") if tried else None
            bodies.append(join(stage_heading(entry.stage), said, body, ruled_out))
    if not bodies:
        return None
    return Section("recommendations", "Recommendations", join(*bodies))


def _situation(situation: dict[str, Any]) -> Markup:
    """What the advice takes for granted, so that a reader can see whether it is meant for them."""
    trained = situation.get("trained")
    state = "trained" if trained else "not trained yet"
    state = "trained or not (it could not be told)" if trained is None else state
    because = f" ({situation['because']})" if situation.get("because") else ""
    rate = as_number(situation.get("learning_rate"))
    optimizer = situation.get("optimizer")
    using = f"{optimizer}{f' at rate {number(rate)}' if rate is not None else ''}"
    told = f"optimizer: {using}" if optimizer else "optimizer not named (--optimizer, --lr)"
    edge = ""
    if str(optimizer).lower() in ADAPTIVE:
        edge = (
            f" Where {optimizer} becomes unstable is decided by the Hessian seen through its own "
            "scaling, which a monitor of the training measures (curvatlas train, ca.Monitor)."
        )
    return tag("p", f"For a model that is {state}{because}; {told}.{edge}", class_="basis")


def _item(one: dict[str, Any]) -> Markup:
    advice = capitalised(next((str(one[key]) for key in _ADVICE if one.get(key)), ""))
    strength = f" ({one['strength']} evidence)" if one.get("strength") else ""
    evidence = one["evidence"]
    if isinstance(evidence, list):
        evidence = "; ".join(str(item) for item in evidence)
    value, interval = quantity(one)
    measured = ""
    if value is not None and one.get("measure"):
        threshold = as_number(one.get("threshold"))
        beyond = "" if threshold is None else f"; the rule speaks from {number(threshold)}"
        measured = f"{one['measure']} = {with_interval(value, interval)}{beyond}"
    told = {
        "Evidence": evidence,
        "Measured": measured,
        "What would change": one.get("effect"),
        "To check": one.get("check"),
    }
    lines = [(tag("br"), f"{word}: {text}.") for word, text in told.items() if text]
    return tag("li", tag("strong", advice), strength, *lines)
