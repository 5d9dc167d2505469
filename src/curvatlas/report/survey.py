"""The page of measured stages: one section a question, stages as columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from curvatlas.figures import stages as drawing
from curvatlas.report.comparing import REAL, Comparison, compared
from curvatlas.report.findings import block_name, cards, gauss_newton_words, short_names, verdict
from curvatlas.report.layout import Account, Fold, Picture, Section, Table, cut, table
from curvatlas.report.measured import (
    HEADLINES,
    Measured,
    informative,
    largest,
    missed_share,
    norm,
    outer_sharpness,
    smallest,
    trace,
)
from curvatlas.report.reading import Stage
from curvatlas.report.words import (
    PARTS,
    brackets,
    capitalised,
    listed,
    number,
    percent,
    ratio,
    with_interval,
)
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.eigen_result import Eigenpairs

T = TypeVar("T")
_LABELLED = 8  # rows of a table of blocks


def survey(
    stages: Sequence[Stage], *, same_data: bool = True, comparison: Comparison | None = None
) -> Account | None:
    """What was measured of the Hessian at one or several states of a model."""
    measured = [stage for stage in stages if stage.results]
    if not any(_holds_curvature(stage) for stage in measured):
        return None
    makers = (_sharpness, _weights, _depth, _gauss_newton)
    sections = [section for make in makers if (section := make(measured)) is not None]
    if len(measured) > 1:
        comparison = comparison or compared(measured, same_data=same_data)
        sections += _changes(comparison, measured)
    sections += _certainty(measured)
    return Account(
        verdict=verdict(measured),
        cards=cards(measured),
        pictures=tuple(_overview(measured)),
        sections=tuple(sections),
    )


def _holds_curvature(stage: Stage) -> bool:
    kinds = (stage.ends, stage.atlas, stage.flow, stage.trace(), stage.first(SpectralDensity))
    return any(kind is not None for kind in kinds)


def _by_label(
    stages: Sequence[Stage], read: Callable[[Stage], T | None], otherwise: str
) -> dict[str, T]:
    """What the stages that have it hold, by the stage's words."""
    there = [(stage.label or otherwise, read(stage)) for stage in stages]
    return {label: value for label, value in there if value is not None}


def _overview(stages: Sequence[Stage]) -> Iterator[Picture]:
    """The pictures of the first screen."""
    densities = _by_label(stages, lambda s: s.first(SpectralDensity), "H")
    if densities:
        tops = ", ".join(
            f"{label} up to {number(float(d.nodes[-1]))}" for label, d in densities.items()
        )
        yield Picture(
            title="Spectrum of the Hessian",
            caption="A few large outliers, a bulk at zero",
            alt=f"Density of the eigenvalues of H: {tops}; most eigenvalues lie near zero.",
            draw=lambda: drawing.stage_spectra(densities),
        )
    mapped = [stage for stage in stages if stage.atlas is not None]
    if mapped:
        last, atlas = mapped[-1], mapped[-1].atlas
        assert atlas is not None
        first = atlas.ranking(1)
        block = block_name(atlas, first[0]) if first else "–"
        yield Picture(
            title=f"Where it lives{f', {last.label}' if last.label else ''}",
            caption="Which weights curve with which others",
            alt=f"Map of the Frobenius norms of the blocks of H; the largest is {block}.",
            draw=lambda: drawing.stage_map(atlas),
        )
    flows = _by_label(stages, lambda s: s.flow, "")
    if flows:
        factor = list(flows.values())[-1].amplification
        grown = f"× {number(factor)}" if math.isfinite(factor) else "from nothing"
        yield Picture(
            title="How it travels back",
            caption=f"{grown} from the head to the embedding",
            alt="Curvature at the input of every sublayer, from the embedding to the head: "
            f"it grows {grown} on the way back.",
            draw=lambda: drawing.stage_flow(flows),
        )


# --- tables whose columns are stages --------------------------------------------------------------


def stage_table(
    caption: str,
    stages: Sequence[Stage],
    rows: Mapping[str, Callable[[Stage], Measured]],
    show: Callable[[Measured], str] | None = None,
) -> Table | None:
    """One row a quantity, one column a stage, and how the last compares to the first."""
    cells: list[list[object]] = []
    for name, read in rows.items():
        values = [read(stage) for stage in stages]
        if all(value.value is None for value in values):
            continue
        said = [(show or _shown)(value) for value in values]
        compare = [ratio(values[0].value, values[-1].value)] if len(stages) > 1 else []
        cells.append([name, *said, *compare])
    head = ["", *(stage.label or "measured" for stage in stages)]
    return table(caption, [*head, *(["ratio"] if len(stages) > 1 else [])], cells)


def _shown(measured: Measured) -> str:
    return with_interval(measured.value, measured.widest)


def _as_share(measured: Measured) -> str:
    if measured.value is None:
        return "–"
    low, high = measured.interval or (measured.value, measured.value)
    within = "" if percent(low) == percent(high) else f" [{percent(low)}, {percent(high)}]"
    return f"{percent(measured.value)}{within}"


# --- one section a question -----------------------------------------------------------------------


def _sharpness(stages: Sequence[Stage]) -> Section | None:
    ends = _by_label(stages, lambda s: s.ends, "H")
    densities = [stage.first(SpectralDensity) for stage in stages]
    traces = [stage.trace() for stage in stages]
    if not ends and not any(densities) and not any(traces):
        return None
    rows = {
        "λmax": largest,
        "λmin": smallest,
        "total curvature tr H": trace("total"),
        "‖H‖_F": norm("total"),
        "effective rank of H": HEADLINES["effective rank of H"],
    }
    picture = Picture(
        title="The outermost eigenvalues",
        caption="Bars: 95 % over the data where that was measured",
        alt=f"The largest and smallest eigenvalues of H: {_tops(stages)}.",
        draw=lambda: drawing.stage_eigenvalues(ends),
    )
    return Section(
        key="sharpness",
        question="How sharp is it?",
        short="Sharpness",
        answer=_sharpness_answer(stages),
        picture=picture if ends else None,
        table=stage_table("Curvature of the loss", stages, rows),
        folds=tuple(_eigenvalue_folds(stages)),
    )


def _tops(stages: Sequence[Stage]) -> str:
    values = [(stage.label, largest(stage).value) for stage in stages]
    return listed([f"{number(v)} {label}".strip() for label, v in values if v is not None] or ["–"])


def _sharpness_answer(stages: Sequence[Stage]) -> str:
    tops = [largest(stage) for stage in stages]
    known = [top.value for top in tops if top.value is not None]
    if not known:
        return "The ends of the spectrum were not measured in this run."
    factor = ratio(known[0], known[-1]) if len(known) > 1 else ""
    changed = f" ({number(known[0])} {stages[0].label}, {factor})" if factor else ""
    step = (
        f"; plain gradient descent is stable along it for steps below 2/λmax = "
        f"{number(2 / known[-1])}"
        if known[-1] > 0
        else ""
    )
    return f"The sharpest direction has curvature {number(known[-1])}{changed}{step}."


def _eigenvalue_folds(stages: Sequence[Stage]) -> Iterator[Fold]:
    rows: list[list[object]] = []
    for part, symbol in PARTS.items():
        for stage in stages:
            pairs = stage.first(Eigenpairs, part)
            if pairs is None:
                continue
            order = pairs.values.double().argsort(descending=True)
            low, high = pairs.interval
            shown = " · ".join(
                with_interval(float(pairs.values[i]), (float(low[i]), float(high[i])))
                for i in order
            )
            name = f"{symbol} {stage.label}".strip()
            rows.append([name, shown, pairs.products, pairs.completeness])
    head = ["matrix", "eigenvalues", "products", "certainty"]
    every = table("Each interval contains an eigenvalue for certain", head, rows)
    if every is not None:
        yield Fold(title="Every eigenvalue that was computed", tables=(every,))


def _weights(stages: Sequence[Stage]) -> Section | None:
    atlases = _by_label(stages, lambda s: s.atlas, "H")
    if not atlases:
        return None
    last = list(atlases.values())[-1]
    ranked = last.ranking(_LABELLED)
    several = len(atlases) > 1
    shares = {
        label: {(b.row, b.column): b for b in atlas.ranking(None)}
        for label, atlas in atlases.items()
    }
    rows: list[list[object]] = []
    for block in ranked:
        key = (block.row, block.column)
        there = [shares[label].get(key) for label in atlases]
        cells = ["–" if one is None else percent(one.share) for one in there]
        norm_words = with_interval(block.frobenius, block.interval)
        rows.append([block_name(last, block), *cells, norm_words])
    labels = [label if several else "share of ‖H‖²" for label in atlases]
    head = ["block", *labels, "norm" + (f" {list(atlases)[-1]}" if several else "")]
    top = ranked[0] if ranked else None
    roles = "–" if top is None else block_name(last, top)
    diagonal = HEADLINES["share of ‖H‖² on diagonal blocks"](
        next(stage for stage in reversed(stages) if stage.atlas is not None)
    )
    rest = ""
    if informative("share of ‖H‖² on diagonal blocks", diagonal):
        rest = (
            f"; {_as_share(diagonal)} lies on diagonal blocks, the rest couples different weights"
        )
    where = f" {list(atlases)[-1]}" if several else ""
    return Section(
        key="weights",
        question="Which weights carry it?",
        short="Weights",
        answer=f"{capitalised(roles)} carries the most{where}: "
        f"{percent(top.share) if top else '–'} of ‖H‖²{rest}.",
        picture=Picture(
            title="What every role takes part in",
            caption="Rows of a role over ‖H‖²; biases count with their weights",
            alt=f"Share of the squared norm of H by role; the largest block is {roles}.",
            draw=lambda: drawing.stage_roles(atlases),
        ),
        table=table("The largest blocks, as shares of ‖H‖² (a pair counts twice)", head, rows),
        folds=tuple(_map_folds(stages)),
    )


def _map_folds(stages: Sequence[Stage]) -> Iterator[Fold]:
    atlases = _by_label(stages, lambda s: s.atlas, "H")
    last = list(atlases)[-1]
    pictures = []
    for part, symbol in PARTS.items():
        for label, atlas in atlases.items():
            if f"role/frobenius/{part}" in atlas.maps and (label == last) != (part == "total"):
                title = f"{symbol} {label}" if len(atlases) > 1 else symbol
                pictures.append(
                    Picture(
                        title=title,
                        alt=f"Map of the blocks of {title} over pairs of roles.",
                        draw=lambda atlas=atlas, part=part: drawing.stage_map(atlas, part=part),  # type: ignore[misc]
                    )
                )
    if pictures:
        yield Fold(
            title="The maps of H and of its parts: H_o, at fixed slopes of the network, and H_f, "
            "from its own bending",
            pictures=tuple(pictures),
        )
    traces = [_role_traces(stage) for stage in stages]
    tables = tuple(one for one in traces if one is not None)
    if tables:
        yield Fold(title="Traces by role", tables=tables)


def _role_traces(stage: Stage) -> Table | None:
    if stage.atlas is None:
        return None
    maps = {part: stage.atlas.maps.get(f"role/trace/{part}") for part in PARTS}
    known = {part: chosen for part, chosen in maps.items() if chosen is not None}
    if not known:
        return None
    names = next(iter(known.values())).names
    rows = [
        [name, *(with_interval(m[name], m.interval_of(name)) for m in known.values())]
        for name in names
    ]
    head = ["role", *(f"tr {PARTS[part]}" for part in known)]
    return table(f"Traces by role {stage.label}".strip(), head, rows)


def _depth(stages: Sequence[Stage]) -> Section | None:
    flows = _by_label(stages, lambda s: s.flow, "")
    if not flows:
        return None
    last = list(flows.values())[-1]
    peak = max(last.sublayers, key=lambda entry: entry.measures["created_here"].norm)
    names = short_names([entry.name for entry in last.sublayers])
    rows: list[list[object]] = []
    for entry in last.sublayers:
        cells: list[object] = [names[entry.name]]
        norms = [
            flow[entry.name].norm if _has(flow, entry.name) else None for flow in flows.values()
        ]
        cells += [None if n is None else number(n) for n in norms]
        cells += [ratio(norms[0], norms[-1])] if len(norms) > 1 else []
        created = entry.measures["created_here"].norm
        cells.append(percent(created / entry.norm) if entry.norm > 0 else "–")
        rows.append(cells)
    head = ["input of", *((label or "curvature") for label in flows)]
    head += ["ratio"] if len(flows) > 1 else []
    whole, folds = cut(table("Curvature at each sublayer's input", [*head, "created there"], rows))
    within = brackets(last.amplification, last.amplification_interval)
    within = f" {within}" if within else ""
    label = list(flows)[-1]
    grown = f"Curvature at the embedding is {number(last.amplification)}{within} times that at"
    if not math.isfinite(last.amplification):
        grown = "There is no curvature at"
    return Section(
        key="depth",
        question="Where in depth?",
        short="Depth",
        answer=f"{grown} the last activation{f' {label}' if label else ''}; {names[peak.name]} "
        "creates the most by its own bending.",
        picture=Picture(
            title="Created and passed on",
            caption="What a sublayer creates by its own bending, and what it passes on",
            alt=f"Curvature created and passed on by every sublayer; {peak.name} creates most.",
            draw=lambda: drawing.stage_terms(flows),
        ),
        table=whole,
        folds=folds,
    )


def _has(flow: Any, name: str) -> bool:
    return any(entry.name == name for entry in flow.sublayers)


def _gauss_newton(stages: Sequence[Stage]) -> Section | None:
    words = gauss_newton_words(stages[-1])
    if not words:
        return None
    rows = {
        "λmax of H_o, as a share of that of H": outer_sharpness,
        "‖H_f‖ / ‖H‖, what is left out": missed_share,
    }
    shares = stage_table("", stages, rows, _as_share)
    traces = stage_table(
        "", stages, {f"tr {symbol}": trace(part) for part, symbol in PARTS.items()}
    )
    both = [one for one in (shares, traces) if one is not None]
    merged = Table(
        caption="H = H_o + H_f: H_o is the Gauss-Newton part, H_f the network's own bending",
        head=both[0].head,
        rows=tuple(row for one in both for row in one.rows),
    )
    last = stages[-1]
    densities = {
        symbol: density
        for part, symbol in PARTS.items()
        if (density := last.first(SpectralDensity, part)) is not None
    }
    return Section(
        key="gauss-newton",
        question="Is Gauss-Newton enough?",
        short="Gauss-Newton",
        answer=f"{words}{f' ({last.label})' if last.label else ''}.",
        picture=Picture(
            title=f"The parts of H{f', {last.label}' if last.label else ''}",
            caption="Where H and H_o lie on each other, Gauss-Newton says it all",
            alt="Densities of the eigenvalues of H, of its Gauss-Newton part H_o and of H_f.",
            draw=lambda: drawing.stage_spectra(densities, first_colour=2),
        )
        if densities
        else None,
        table=merged,
    )


def _changes(comparison: Comparison, stages: Sequence[Stage]) -> Iterator[Section]:
    if not comparison.changes:
        return
    real = [change for change in comparison.changes if change.verdict == REAL]
    first, last = stages[0], stages[-1]
    rows: list[list[object]] = []
    for change in comparison.changes:
        if all(informative(change.name, one) for one in (change.before, change.after)):
            before, after = change.before, change.after
            cells = [_shown(before), _shown(after), ratio(before.value, after.value)]
            rows.append([change.name, *cells, change.verdict])
    head = ["", first.label, last.label, "ratio", "verdict"]
    whole = table("Every change, the largest first", head, rows)
    top = (
        Table(caption="The largest changes", head=tuple(head), rows=whole.rows[:7])
        if whole
        else None
    )
    data = (
        "on the same data, so a change is real when it exceeds what both intervals allow"
        if comparison.same_data
        else "on different data: a change is real when it also exceeds the scatter of the samples"
    )
    picture = None
    if first.atlas is not None and last.atlas is not None:
        one, two = first.atlas, last.atlas
        picture = Picture(
            title=f"Factor of change, {first.label} → {last.label}",
            caption="White: within error",
            alt="Factor by which the block of every pair of roles changed.",
            draw=lambda: drawing.map_change(one, two),
        )
    folds = [Fold(title="Every change", tables=(whole,))] if whole else []
    if comparison.options:
        differ = [[name, *pair] for name, pair in comparison.options.items()]
        settings = table("Settings that differ", ["setting", "first", "last"], differ)
        folds += [Fold(title="Settings that differ", tables=(settings,))] if settings else []
    if len(stages) > 2:
        every = stage_table("Every state", stages, HEADLINES)
        folds += [Fold(title="Every state side by side", tables=(every,))] if every else []
    yield Section(
        key="changes",
        question="What changed?",
        short="What changed",
        answer=f"{len(real)} of {len(comparison.changes)} numbers really changed between "
        f"“{first.label}” and “{last.label}”, measured {data}.",
        picture=picture,
        table=top,
        folds=tuple(folds),
    )


_CHECKED: dict[str, Callable[[Stage], Measured]] = {
    "λmax": largest,
    "λmin": smallest,
    "tr H": trace("total"),
    "‖H‖_F": norm("total"),
    "effective rank": HEADLINES["effective rank of H"],
    "negative share": HEADLINES["share of negative eigenvalues"],
    "head to embedding": HEADLINES["curvature at the embedding over that at the last activation"],
}


def _certainty(stages: Sequence[Stage]) -> Iterator[Section]:
    stage = stages[-1]
    read = {name: reader(stage) for name, reader in _CHECKED.items()}
    known = {name: m for name, m in read.items() if m.value is not None}
    if not known:
        return
    rows = [
        [name, number(m.value or 0.0), _half(m, m.interval), _half(m, m.data_interval)]
        for name, m in known.items()
    ]
    errors = [
        (name, m.value or 0.0, m.interval, m.data_interval)
        for name, m in known.items()
        if any(_half(m, ends) not in ("–", "exact") for ends in (m.interval, m.data_interval))
    ]
    data = [m for m in known.values() if m.data_interval is not None]
    subject = stage.subject
    used = f"{subject.data}" if subject is not None else "the data of this run"
    why = f" {capitalised(subject.basis)}" if subject is not None and subject.basis else ""
    if data:
        told = "both are given below; the larger one is shown everywhere on this page"
    elif subject is not None and subject.batches < 2:
        told = (
            "all samples came in one batch, so their scatter was not measured: other samples would "
            "move every number further than the brackets say"
        )
    else:
        told = "how far other samples would move these numbers was not measured"
    where = f" {stage.label}" if stage.label else ""
    yield Section(
        key="certainty",
        question="How sure is this?",
        short="How sure",
        answer=f"Measured on {used}.{why} An estimate has the error of its probes and that of "
        f"the data: {told}.",
        picture=Picture(
            title=f"Both errors{where}",
            caption="Right of the dotted line a number is not known",
            alt="Half-widths of the 95 % intervals of the measurement and of the data, in percent.",
            draw=lambda: drawing.both_errors(errors),
        )
        if errors
        else None,
        table=table(
            f"Half the 95 % interval{where}",
            ["", "value", "of the measurement", "of the data"],
            rows,
        ),
    )


def _half(measured: Measured, interval: tuple[float, float] | None) -> str:
    if interval is None:
        return "–"
    half = (interval[1] - interval[0]) / 2
    if half <= 1e-6 * abs(measured.value or 1.0):
        return "exact"
    share = half / abs(measured.value) if measured.value else float("inf")
    return f"± {number(half, 2)} ({percent(share)})"
