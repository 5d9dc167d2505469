"""The page of measured stages: one section a question, stages as columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from curvatlas.figures import draw, stages as drawing
from curvatlas.report.comparing import REAL, Comparison, StateChange, compared
from curvatlas.report.findings import block_name, cards, gauss_newton_words, short_names, verdict
from curvatlas.report.layout import Account, Fold, Picture, Section, Table, cut, table
from curvatlas.report.reading import HEADLINES, Measured, Stage, informative
from curvatlas.report.words import (
    PARTS,
    brackets,
    capitalised,
    number,
    percent,
    ratio,
    with_interval,
)
from curvatlas.spectra.density_result import SpectralDensity

T = TypeVar("T")
_LABELLED = 8  # rows of a table of blocks or changes


def survey(
    stages: Sequence[Stage], *, same_data: bool = True, comparison: Comparison | None = None
) -> Account | None:
    """What was measured of the Hessian at one or several states of a model."""
    if not any(_holds_curvature(stage) for stage in stages):
        return None
    makers = (_sharpness, _weights, _depth, _gauss_newton)
    sections = [section for make in makers if (section := make(stages)) is not None]
    if len(stages) > 1:
        comparison = comparison or compared(stages, same_data=same_data)
        sections += _changes(comparison, stages)
    sections += _certainty(stages[-1])
    return Account(
        verdict=verdict(stages),
        cards=cards(stages),
        pictures=tuple(_overview(stages)),
        sections=tuple(sections),
    )


def _holds_curvature(stage: Stage) -> bool:
    kinds = (stage.ends, stage.atlas, stage.flow, stage.trace().value, stage.density)
    return any(kind is not None for kind in kinds)


def _by_label(
    stages: Sequence[Stage], read: Callable[[Stage], T | None], otherwise: str = ""
) -> dict[str, T]:
    """What the stages that have it hold, by the stage's words."""
    there = [(stage.label or otherwise, read(stage)) for stage in stages]
    return {label: value for label, value in there if value is not None}


def _overview(stages: Sequence[Stage]) -> Iterator[Picture]:
    """The pictures of the first screen."""
    densities = _by_label(stages, lambda s: s.density, "H")
    if densities:
        tops = (f"{label} up to {number(float(d.nodes[-1]))}" for label, d in densities.items())
        yield Picture(
            "Spectrum of the Hessian",
            f"Density of the eigenvalues of H: {', '.join(tops)}; most eigenvalues lie near zero.",
            partial(draw, densities),
            "A few large outliers, a bulk at zero",
        )
    atlases = _by_label(stages, lambda s: s.atlas)
    if atlases:
        label, atlas = list(atlases.items())[-1]
        block = [block_name(atlas, one) for one in atlas.ranking(1)] or ["–"]
        yield Picture(
            f"Where it lives, {label}" if label else "Where it lives",
            f"Map of the Frobenius norms of the blocks of H; the largest is {block[0]}.",
            partial(atlas.plot, part="total"),
            "Which weights curve with which others",
        )
    flows = _by_label(stages, lambda s: s.flow)
    if flows:
        factor = list(flows.values())[-1].amplification
        grown = f"× {number(factor)}" if math.isfinite(factor) else "from nothing"
        yield Picture(
            "How it travels back",
            "Curvature at the input of every sublayer, from the embedding to the head: "
            f"it grows {grown} on the way back.",
            partial(draw, flows),
            f"{grown} from the head to the embedding",
        )


# --- tables whose columns are stages --------------------------------------------------------------


def stage_table(
    caption: str,
    stages: Sequence[Stage],
    rows: Mapping[str, Callable[[Stage], Measured]],
    show: Callable[[Measured], str] = lambda measured: with_interval(
        measured.value, measured.widest
    ),
) -> Table | None:
    """One row a quantity, one column a stage, and how the last compares to the first."""
    several = len(stages) > 1
    cells = []
    for name, read in rows.items():
        values = [read(stage) for stage in stages]
        if any(value.value is not None for value in values):
            compare = [ratio(values[0].value, values[-1].value)] if several else []
            cells.append([name, *map(show, values), *compare])
    head = ["", *(stage.label or "measured" for stage in stages), *(["ratio"] if several else [])]
    return table(caption, head, cells)


def _as_share(measured: Measured) -> str:
    if measured.value is None:
        return "–"
    low, high = (percent(end) for end in measured.interval or (measured.value, measured.value))
    return percent(measured.value) + ("" if low == high else f" [{low}, {high}]")


# --- one section a question -----------------------------------------------------------------------


def _sharpness(stages: Sequence[Stage]) -> Section | None:
    ends = _by_label(stages, lambda s: s.ends, "H")
    rows = stage_table(
        "Curvature of the loss",
        stages,
        {
            "λmax": Stage.largest,
            "λmin": Stage.smallest,
            "total curvature tr H": Stage.trace,
            "‖H‖_F": Stage.norm,
            "effective rank of H": HEADLINES["effective rank of H"],
        },
    )
    if rows is None:
        return None
    tops = [(stage.label, top) for stage in stages if (top := stage.largest().value) is not None]
    answer = "The ends of the spectrum were not measured in this run."
    if tops:
        (label, first), (_, last) = tops[0], tops[-1]
        factor = ratio(first, last) if len(tops) > 1 else ""
        answer = f"The sharpest direction has curvature {number(last)}"
        answer += f" ({number(first)} {label}, {factor})" if factor else ""
        if last > 0:
            answer += (
                f"; plain gradient descent is stable along it for steps below 2/λmax = "
                f"{number(2 / last)}"
            )
        answer += "."
    told = [f"{number(top)} {label}".strip() for label, top in tops]
    picture = Picture(
        "The outermost eigenvalues",
        f"The largest and smallest eigenvalues of H; the largest: {', '.join(told)}.",
        partial(draw, ends),
        "Bars: 95 % over the data where that was measured",
    )
    return Section(
        key="sharpness",
        question="How sharp is it?",
        answer=answer,
        picture=picture if ends else None,
        table=rows,
    )


def _weights(stages: Sequence[Stage]) -> Section | None:
    atlases = _by_label(stages, lambda s: s.atlas, "H")
    if not atlases:
        return None
    label, last = list(atlases.items())[-1]
    when = f" {label}" if len(atlases) > 1 else ""
    shares = [{(b.row, b.column): b.share for b in one.ranking(None)} for one in atlases.values()]
    ranked = last.ranking(_LABELLED)
    rows = []
    for block in ranked:
        there = [one.get((block.row, block.column)) for one in shares]
        cells = ["–" if share is None else percent(share) for share in there]
        rows.append(
            [block_name(last, block), *cells, with_interval(block.frobenius, block.interval)]
        )
    answer = "No block of H can be told from zero."
    if ranked:
        top, share = block_name(last, ranked[0]), percent(ranked[0].share)
        answer = f"{capitalised(top)} carries the most{when}: {share} of ‖H‖²"
        diagonal = next(s.diagonal_share() for s in reversed(stages) if s.atlas is not None)
        if informative("share of ‖H‖²", diagonal):
            answer += f"; {_as_share(diagonal)} lies on diagonal blocks, the rest couples different"
            answer += " weights"
        answer += "."
    maps = [
        Picture(
            f"{symbol} {label}".strip(),
            f"Map of the blocks of {symbol} over pairs of roles {label}".strip(),
            partial(one.plot, part=part),
        )
        for part, symbol in PARTS.items()
        for label, one in atlases.items()
        if f"role/frobenius/{part}" in one.maps and (one is last) != (part == "total")
    ]
    title = "The maps of H and of its parts: H_o, at fixed slopes of the network, and H_f, from its"
    return Section(
        key="weights",
        question="Which weights carry it?",
        answer=answer,
        picture=Picture(
            "What every role takes part in",
            "Share of the squared norm of H by role.",
            partial(drawing.draw_shares, atlases),
            "Rows of a role over ‖H‖²; biases count with their weights",
        ),
        table=table(
            "The largest blocks, as shares of ‖H‖² (a pair counts twice)",
            ["block", *(atlases if when else ["share of ‖H‖²"]), f"norm{when}"],
            rows,
        ),
        folds=(Fold(f"{title} own bending", pictures=tuple(maps)),) if maps else (),
    )


def _depth(stages: Sequence[Stage]) -> Section | None:
    flows = _by_label(stages, lambda s: s.flow)
    if not flows:
        return None
    label, last = list(flows.items())[-1]
    names = short_names([entry.name for entry in last.sublayers])
    norms = [{entry.name: entry.norm for entry in flow.sublayers} for flow in flows.values()]
    rows = []
    for entry in last.sublayers:
        values = [one.get(entry.name) for one in norms]
        compare = [ratio(values[0], values[-1])] if len(flows) > 1 else []
        created = entry.measures["created_here"].norm
        share = percent(created / entry.norm) if entry.norm > 0 else "–"
        rows.append([names[entry.name], *values, *compare, share])
    head = ["input of", *((label or "curvature") for label in flows)]
    head += ["ratio"] if len(flows) > 1 else []
    whole, folds = cut(table("Curvature at each sublayer's input", [*head, "created there"], rows))
    within = brackets(last.amplification_interval)
    peak = max(last.sublayers, key=lambda entry: entry.measures["created_here"].norm)
    factor = " ".join(filter(None, [number(last.amplification), within]))
    grown = f"Curvature at the embedding is {factor} times that at"
    if not math.isfinite(last.amplification):
        grown = "There is no curvature at"
    return Section(
        key="depth",
        question="Where in depth?",
        answer=f"{grown} the last activation{f' {label}' if label else ''}; {names[peak.name]} "
        "creates the most by its own bending.",
        picture=Picture(
            "Created and passed on",
            f"Curvature created and passed on by every sublayer; {peak.name} creates most.",
            partial(draw, flows, quantity="both"),
            "What a sublayer creates by its own bending, and what it passes on",
        ),
        table=whole,
        folds=folds,
    )


def _gauss_newton(stages: Sequence[Stage]) -> Section | None:
    last = stages[-1]
    words, when = gauss_newton_words(last), f", {last.label}" if last.label else ""
    if not words:
        return None
    shares = {
        "λmax of H_o, as a share of that of H": Stage.outer_sharpness,
        "‖H_f‖ / ‖H‖, what is left out": Stage.missed_share,
    }
    traces = {name: HEADLINES[name] for name in ("tr H", "tr H_o", "tr H_f")}
    caption = "H = H_o + H_f: H_o is the Gauss-Newton part, H_f the network's own bending"
    both = [stage_table(caption, stages, shares, _as_share), stage_table(caption, stages, traces)]
    known = [one for one in both if one is not None]
    densities = {symbol: last.first(SpectralDensity, part) for part, symbol in PARTS.items()}
    measured = {symbol: one for symbol, one in densities.items() if one is not None}
    picture = Picture(
        f"The parts of H{when}",
        "Densities of the eigenvalues of H, of its Gauss-Newton part H_o and of H_f.",
        partial(draw, measured, first_colour=2),
        "Where H and H_o lie on each other, Gauss-Newton says it all",
    )
    return Section(
        key="gauss-newton",
        question="Is Gauss-Newton enough?",
        answer=f"{words}{when}.",
        picture=picture if measured else None,
        table=Table(
            caption=caption,
            head=known[0].head,
            rows=tuple(row for one in known for row in one.rows),
        ),
    )


def _changes(comparison: Comparison, stages: Sequence[Stage]) -> Iterator[Section]:
    first, last = stages[0], stages[-1]
    head = ["", first.label, last.label, "ratio", "verdict"]

    def cells(change: StateChange) -> list[str]:
        ends = (change.before, change.after)
        factor = ratio(*(end.value for end in ends))
        return [change.name, *map(str, ends), factor, change.verdict]

    telling = [
        cells(change)
        for change in comparison.changes
        if all(informative(change.name, one) for one in (change.before, change.after))
    ]
    if not telling:
        return
    differ = [[name, *pair] for name, pair in comparison.options.items()]
    more = {
        "Every change": table("", head, telling),
        "Settings that differ": table("", ["setting", "first", "last"], differ),
        "Every state side by side": stage_table("", stages, HEADLINES) if stages[2:] else None,
    }
    real = [change for change in comparison.changes if change.verdict == REAL]
    data = (
        "on the same data, so a change is real when it exceeds what both intervals allow"
        if comparison.same_data
        else "on different data: a change is real when it also exceeds the scatter of the samples"
    )
    picture = None
    if first.atlas is not None and last.atlas is not None:
        picture = Picture(
            f"Factor of change, {first.label} → {last.label}",
            "Factor by which the block of every pair of roles changed.",
            partial(drawing.draw_change, first.atlas, last.atlas),
            "White: within error",
        )
    yield Section(
        key="changes",
        question="What changed?",
        answer=f"{len(real)} of {len(comparison.changes)} numbers really changed between "
        f"“{first.label}” and “{last.label}”, measured {data}.",
        picture=picture,
        table=table("The largest changes", head, telling[:_LABELLED]),
        folds=tuple(Fold(title, tables=(one,)) for title, one in more.items() if one is not None),
    )


_CHECKED: dict[str, Callable[[Stage], Measured]] = {
    "λmax": Stage.largest,
    "λmin": Stage.smallest,
    "tr H": Stage.trace,
    "‖H‖_F": Stage.norm,
    "effective rank": HEADLINES["effective rank of H"],
    "negative share": HEADLINES["share of negative eigenvalues"],
    "head to embedding": Stage.growth,
}


def _certainty(stage: Stage) -> Iterator[Section]:
    known = {name: m for name, read in _CHECKED.items() if (m := read(stage)).value is not None}
    if not known:
        return
    rows, errors = [], []
    for name, m in known.items():
        halves = [_half(m.value or 0.0, ends) for ends in (m.interval, m.data_interval)]
        rows.append([name, number(m.value or 0.0), *halves])
        if set(halves) - {"–", "exact"}:
            errors.append((name, m.value or 0.0, m.interval, m.data_interval))
    subject = stage.subject
    why = f" {capitalised(subject.basis)}" if subject is not None and subject.basis else ""
    told = "how far other samples would move these numbers was not measured"
    if any(m.data_interval is not None for m in known.values()):
        told = "both are given below; the larger one is shown everywhere on this page"
    elif subject is not None and subject.batches < 2:
        told = (
            "all samples came in one batch, so their scatter was not measured: other samples would "
            "move every number further than the brackets say"
        )
    when = f" {stage.label}" if stage.label else ""
    picture = Picture(
        f"Both errors{when}",
        "Half-widths of the 95 % intervals of the measurement and of the data, in percent.",
        partial(drawing.draw_errors, errors),
        "Right of the dotted line a number is not known",
    )
    yield Section(
        key="certainty",
        question="How sure is this?",
        answer=f"Measured on {subject.data if subject is not None else 'the data of this run'}."
        f"{why} An estimate has the error of its probes and that of the data: {told}.",
        picture=picture if errors else None,
        table=table(
            f"Half the 95 % interval{when}",
            ["", "value", "of the measurement", "of the data"],
            rows,
        ),
    )


def _half(value: float, interval: tuple[float, float] | None) -> str:
    if interval is None:
        return "–"
    half = (interval[1] - interval[0]) / 2
    if half <= 1e-6 * abs(value or 1.0):
        return "exact"
    share = half / abs(value) if value else float("inf")
    return f"± {number(half, 2)} ({percent(share)})"
