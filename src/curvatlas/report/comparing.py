"""Two or more measured states side by side: what changed, and whether the change is real.

A state is one stage of a run: the model of ``analyze``, or "initial" and "trained" of the demo.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from curvatlas.files import write_bytes
from curvatlas.report.charts import Matrix, common_limits, heatmap
from curvatlas.report.contents import (
    PARTS,
    Contents,
    Section,
    as_interval,
    as_number,
    contents_of,
    eigenvalues,
    named_matrix,
    quantity,
    stage_words,
    with_interval,
)
from curvatlas.report.html import page_of
from curvatlas.report.markup import Markup, join, number, sentence, switch, table, tag
from curvatlas.report.sections.atlas import propagation
from curvatlas.report.sections.findings import amplification
from curvatlas.report.sections.spectrum import spectrum
from curvatlas.results import Interval, Result
from curvatlas.runs.loading import LoadedRun, load

LARGEST = 5
_MATTERS = 0.01  # of the largest block: smaller ones change by factors that mean nothing
REAL, WITHIN, OTHER_DATA = "real", "within error", "on other data"


@dataclass(frozen=True, kw_only=True)
class Measured(Result):
    """One number of one state; None where it was not measured."""

    value: float | None
    interval: Interval | None  # 95 %, of the measurement; None: exact
    data_interval: Interval | None = None  # 95 %, of the sampling of the data


@dataclass(frozen=True, kw_only=True)
class HeadlineRow(Result):
    """One quantity in every state, in order of time."""

    name: str
    values: tuple[Measured, ...]


@dataclass(frozen=True, kw_only=True)
class StateChange(Result):
    """One quantity in the first and the last state."""

    name: str
    before: Measured
    after: Measured
    size: float  # |log of the ratio|; one more where the sign changes
    verdict: str  # "real", "within error", or "on other data": no interval covers the samples

    def __str__(self) -> str:
        return f"{self.name}: {_change(self.before, self.after)}, {self.verdict}"


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """States in order of time, their headline numbers, and every change, the largest first."""

    states: tuple[str, ...]
    same_data: bool
    options: dict[str, tuple[str, str]]  # of the first and the last run, where they differ
    rows: tuple[HeadlineRow, ...]
    changes: tuple[StateChange, ...]
    page: str | None = None  # where it was written

    @property
    def largest(self) -> tuple[StateChange, ...]:
        """The five largest changes of headline numbers; roles are in ``changes`` and the maps."""
        headlines = {row.name for row in self.rows}
        return tuple(c for c in self.changes if c.name in headlines)[:LARGEST]

    def __str__(self) -> str:
        lines = [
            " → ".join(self.states) + ("" if self.same_data else " (measured on different data)"),
            *(f"option {name}: {a} → {b}" for name, (a, b) in self.options.items()),
            f"the {len(self.largest)} largest changes:",
            *(f"  {i}. {change}" for i, change in enumerate(self.largest, 1)),
        ]
        return "\n".join([*lines, *([f"page: {self.page}"] if self.page else [])])


def compare(
    runs: Sequence[LoadedRun | str | os.PathLike[str]] | LoadedRun | str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
) -> Comparison:
    """Compare runs, given as loaded or by their folders, in order of time.

    A run with two stages, such as the demo's, may be compared with itself. output: a file ending in
    .html or a folder for the page with everything side by side; None writes none.

        print(ca.compare(["runs/before", "runs/after"], output="comparison.html"))
    """
    given = [runs] if isinstance(runs, (LoadedRun, str, os.PathLike)) else list(runs)
    loaded = [run if isinstance(run, LoadedRun) else load(run) for run in given]
    states = _states(loaded)
    if len(states) < 2:
        raise ValueError(
            "a comparison needs two states: give two runs, or one with an initial and a trained "
            "stage (curvatlas compare RUN RUN)."
        )
    prints = {run.manifest.fingerprints.get("data") for run in loaded}
    comparison = _compared(states, same_data=len(prints) == 1, options=_differing(loaded))
    if output is None:
        return comparison
    target = Path(output)
    if target.suffix.lower() not in (".html", ".htm"):
        target = target / "comparison.html"
    write_bytes(target, _page(comparison, states, loaded[-1]).encode("utf-8"))
    return replace(comparison, page=str(target))


@dataclass(frozen=True)
class _State:
    label: str
    contents: Contents  # its results alone, their stage called by the label


def _states(runs: Sequence[LoadedRun]) -> list[_State]:
    """Every stage of every run, the oldest run first."""
    states: list[_State] = []
    ordered = sorted(runs, key=lambda run: run.manifest.created)
    names = _short_names([str(run.path) for run in ordered])
    for run, name in zip(ordered, names, strict=True):
        contents = contents_of(run)
        stages = contents.stages("Subject") or contents.stages(*(e.kind for e in contents.entries))
        for stage in stages:
            words = stage if stage_words(stage) else ""
            label = f"{name}, {words}" if words and len(runs) > 1 else words or name
            entries = tuple(replace(e, label=label) for e in contents.entries if e.stage == stage)
            states.append(_State(label, replace(contents, entries=entries)))
    return states


def _short_names(paths: list[str]) -> list[str]:
    """The last parts of the paths that tell them apart."""
    parts = [Path(path).parts for path in paths]
    for depth in range(1, max(len(p) for p in parts) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(paths)):
            break
    return [f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, 1)]


# --- numbers --------------------------------------------------------------------------------------


def _subject(key: str) -> Callable[[Contents], Measured]:
    def read(contents: Contents) -> Measured:
        entries = contents.of_kind("Subject")
        return Measured(
            value=as_number(entries[0].content.get(key)) if entries else None, interval=None
        )

    return read


def _end(last: bool) -> Callable[[Contents], Measured]:
    def read(contents: Contents) -> Measured:
        for entry in contents.of_kind("Eigenpairs"):
            pairs = sorted(eigenvalues(entry.content))
            both = entry.content.get("which") in ("both", "largest" if last else "smallest")
            if entry.part == "total" and pairs and both:
                value, interval = pairs[-1 if last else 0]
                return Measured(value=value, interval=interval)
        return Measured(value=None, interval=None)

    return read


def _trace(part: str) -> Callable[[Contents], Measured]:
    def read(contents: Contents) -> Measured:
        for entry in contents.of_quantity("trace"):
            if entry.part == part:
                value, interval = quantity(entry.content)
                data = as_interval(entry.content.get("data_interval"))
                return Measured(value=value, interval=interval, data_interval=data)
        return Measured(value=None, interval=None)

    return read


def _of_density(key: str) -> Callable[[Contents], Measured]:
    def read(contents: Contents) -> Measured:
        for entry in contents.of_kind("SpectralDensity"):
            if entry.part == "total":
                value, interval = quantity(entry.content, key)
                return Measured(value=value, interval=interval)
        return Measured(value=None, interval=None)

    return read


def _norm(contents: Contents) -> Measured:
    for entry in contents.of_kind("Atlas"):
        value, low, high = (_single(entry.content, end) for end in ("values", "low", "high"))
        if value is not None and low is not None and high is not None:
            return Measured(value=value, interval=(low, high))
    return Measured(value=None, interval=None)


def _single(content: dict[str, Any], end: str) -> float | None:
    entry = (content.get("maps") or {}).get("model/frobenius/total")
    values = named_matrix(entry, end)[1] if isinstance(entry, dict) else []
    return values[0][0] if values and values[0] else None


def _share(contents: Contents) -> Measured:
    for entry in contents.of_kind("Atlas"):
        share = (entry.content.get("diagonal_share") or {}).get("block/total")
        if isinstance(share, list) and len(share) == 3:
            value, low, high = (as_number(v) for v in share)
            if value is not None and low is not None and high is not None:
                return Measured(value=value, interval=(low, high))
    return Measured(value=None, interval=None)


def _growth(contents: Contents) -> Measured:
    for entry in contents.of_kind("CurvatureFlow"):
        value, interval = amplification(entry.content)
        return Measured(value=value, interval=interval)
    return Measured(value=None, interval=None)


HEADLINES: dict[str, Callable[[Contents], Measured]] = {
    "loss": _subject("loss"),
    "gradient norm": _subject("gradient_norm"),
    "λmax of H, the sharpest direction": _end(last=True),
    "λmin of H, the most negative": _end(last=False),
    "tr H": _trace("total"),
    "tr H_o": _trace("outer"),
    "tr H_f": _trace("functional"),
    "‖H‖_F": _norm,
    "share of ‖H‖² on diagonal blocks": _share,
    "share of negative eigenvalues": _of_density("negative_mass"),
    "effective rank of H": _of_density("effective_rank"),
    "curvature at the embedding over that at the last activation": _growth,
}


def _differing(runs: Sequence[LoadedRun]) -> dict[str, tuple[str, str]]:
    """Options of the oldest and the newest run that are not the same."""
    ordered = sorted(runs, key=lambda run: run.manifest.created)
    one, two = ordered[0].manifest.options, ordered[-1].manifest.options
    keys = [key for key in {**one, **two} if one.get(key) != two.get(key)]
    return {key: (str(one.get(key)), str(two.get(key))) for key in keys}


def _compared(
    states: Sequence[_State], *, same_data: bool, options: dict[str, tuple[str, str]]
) -> Comparison:
    rows = []
    for name, read in HEADLINES.items():
        values = tuple(read(state.contents) for state in states)
        if sum(value.value is not None for value in values) > 1:
            rows.append(HeadlineRow(name=name, values=values))
    pairs = [(row.name, row.values[0], row.values[-1]) for row in rows]
    pairs += list(_by_role(states[0].contents, states[-1].contents))
    changes = [
        StateChange(
            name=name,
            before=before,
            after=after,
            size=_size(before.value, after.value),
            verdict=_verdict(before, after, same_data),
        )
        for name, before, after in pairs
        if before.value is not None and after.value is not None
    ]
    return Comparison(
        states=tuple(state.label for state in states),
        same_data=same_data,
        options=options,
        rows=tuple(rows),
        changes=tuple(sorted(changes, key=lambda change: -change.size)),
    )


def _by_role(before: Contents, after: Contents) -> Iterator[tuple[str, Measured, Measured]]:
    """The blocks of H on the diagonal, by role, where they matter in either state."""
    measured = []
    for contents in (before, after):
        atlases = contents.of_kind("Atlas")
        entry = (atlases[0].content.get("maps") or {}).get("role/frobenius/total") if atlases else 0
        if not isinstance(entry, dict):
            return
        names, values = named_matrix(entry)
        low, high = named_matrix(entry, "low")[1], named_matrix(entry, "high")[1]
        measured.append(
            {
                name: Measured(value=values[i][i], interval=as_interval([low[i][i], high[i][i]]))
                for i, name in enumerate(names)
            }
        )
    largest = [max((m.value or 0.0 for m in one.values()), default=0.0) for one in measured]
    for role, here in measured[0].items():
        there = measured[1].get(role)
        if there is None:
            continue
        pair = zip((here, there), largest, strict=True)
        if all((m.value or 0.0) > 0 for m in (here, there)) and any(
            (m.value or 0.0) >= _MATTERS * top for m, top in pair
        ):
            yield f"‖H‖_F within {role}", here, there


def _size(before: float | None, after: float | None) -> float:
    if before is None or after is None or before == after:
        return 0.0
    if before == 0 or after == 0:
        return math.inf
    return abs(math.log(abs(after / before))) + (1.0 if before * after < 0 else 0.0)


def _verdict(before: Measured, after: Measured, same_data: bool) -> str:
    """Real where the difference exceeds what both intervals allow together."""
    a, b = before.value, after.value
    if a is None or b is None:
        return WITHIN
    low, high = (before, after) if a <= b else (after, before)
    above, below = _reach(low, 1), _reach(high, 0)
    allowed = math.hypot(above, below, 1e-9 * max(abs(a), abs(b)))
    if abs(b - a) <= allowed:
        return WITHIN
    if same_data:
        return REAL
    if before.data_interval is None or after.data_interval is None:
        return OTHER_DATA
    scatter = (_reach(low, 1, low.data_interval), _reach(high, 0, high.data_interval))
    return REAL if abs(b - a) > math.hypot(allowed, *scatter) else WITHIN


def _reach(measured: Measured, end: int, interval: Interval | None = None) -> float:
    """How far the upper (1) or lower (0) end lies from the value."""
    chosen = interval or measured.interval
    return 0.0 if chosen is None else abs(chosen[end] - (measured.value or 0.0))


def _change(before: Measured, after: Measured) -> str:
    a, b = before.value, after.value
    shown = f"{with_interval(a, before.interval)} → {with_interval(b, after.interval)}"
    if a is None or b is None or a == 0 or a * b < 0:
        return shown
    ratio = b / a
    factor = f"× {number(ratio)}" if not 0.5 < ratio < 2 else f"{ratio - 1:+.1%}".replace("-", "−")
    return f"{shown} ({factor})"


# --- the page -------------------------------------------------------------------------------------


def _page(comparison: Comparison, states: Sequence[_State], last: LoadedRun) -> str:
    manifest = contents_of(last).manifest
    entries = tuple(entry for state in states for entry in state.contents.entries)
    merged = Contents(manifest=manifest, entries=entries)
    sections = [
        _changes_section(comparison),
        _headline_section(comparison, states),
        spectrum(merged),
        _maps_section(states),
        propagation(merged),
    ]
    title = f"Comparison of {' and '.join(comparison.states[-2:])}"
    if len(comparison.states) > 2:
        title = f"Comparison of {len(comparison.states)} states"
    shown = [section for section in sections if section is not None]
    return page_of(title, f"{manifest['updated']} · {len(states)} states", shown, manifest)


def _changes_section(comparison: Comparison) -> Section:
    items = [
        tag(
            "li",
            sentence(f"{change.name}: {{}}, ", _change(change.before, change.after)),
            tag("strong", change.verdict, class_=f"verdict {change.verdict.split()[0]}"),
            ".",
        )
        for change in comparison.largest
    ]
    data = (
        "Both were measured on the same data, so that a change is real when it exceeds what the "
        "95 % intervals of both allow together."
        if comparison.same_data
        else "They were measured on different data: a change is real when it also exceeds the "
        "scatter of the samples; where that was not measured, the verdict says so."
    )
    first, last = comparison.states[0], comparison.states[-1]
    lead = tag("p", f"From “{first}” to “{last}”. {data}")
    return Section(
        "findings", "The largest changes", join(lead, tag("ol", items, class_="findings"))
    )


def _headline_section(comparison: Comparison, states: Sequence[_State]) -> Section:
    changes = {change.name: change for change in comparison.changes}
    rows: list[list[object]] = []
    for row in comparison.rows:
        change = changes.get(row.name)
        values = [with_interval(m.value, m.interval) for m in row.values]
        rows.append([row.name, *values, "–" if change is None else change.verdict])
    head: list[object] = ["quantity", *(state.label for state in states), "first to last"]
    others: list[list[object]] = [
        [change.name, _change(change.before, change.after), change.verdict]
        for change in comparison.changes
    ]
    every = tag(
        "details",
        tag("summary", "Every change, the largest first"),
        table(["quantity", "change", "verdict"], others),
    )
    settings: list[list[object]] = [[name, a, b] for name, (a, b) in comparison.options.items()]
    differ = None
    if settings:
        caption = "Settings that differ between the first and the last run"
        differ = table(["setting", "first", "last"], settings, caption=caption)
    return Section("headlines", "Side by side", join(table(head, rows), every, differ))


def _maps_section(states: Sequence[_State]) -> Section | None:
    """One view, every state on one colour scale, then the factor of change."""
    panels: dict[str, Markup] = {}
    for part, symbol in PARTS.items():
        maps: dict[str, dict[str, Any]] = {}
        for state in states:
            for entry in state.contents.of_kind("Atlas")[:1]:
                content = entry.content.get("maps") or {}
                found = content.get(f"role/frobenius/{part}")
                if isinstance(found, dict):
                    maps[state.label] = found
        if len(maps) > 1:
            panels[symbol] = _maps(maps, symbol, f"compare-{part}")
    if not panels:
        return None
    lead = tag(
        "p",
        "The Frobenius norm of every pair of roles, all states in the same colours; then the "
        "factor from the first to the last. White cells have not changed beyond their intervals.",
    )
    body = switch("compare-maps", panels, label="Matrix that is mapped")
    return Section("maps", "Maps and their difference", join(lead, body))


def _maps(maps: dict[str, dict[str, Any]], symbol: str, identifier: str) -> Markup:
    matrices = {label: named_matrix(entry) for label, entry in maps.items()}
    limits = common_limits([m for _, m in matrices.values()], signed=False)
    pictures = [
        heatmap(
            values,
            rows=names,
            columns=names,
            title=f"{symbol}, {label}",
            description="Summed over layers.",
            identifier=f"{identifier}-{index}",
            limits=limits,
            bar="Frobenius norm",
        )
        for index, (label, (names, values)) in enumerate(matrices.items())
    ]
    (first, here), *_, (last, there) = maps.items()
    names = [name for name in named_matrix(here)[0] if name in named_matrix(there)[0]]
    factors, notes = _factors(here, there, names)
    pictures.append(
        heatmap(
            factors,
            rows=names,
            columns=names,
            title=f"{symbol}: factor from {first} to {last}",
            description="Logarithm to base 10 of the factor; white where it is within error.",
            identifier=f"{identifier}-factor",
            signed=True,
            notes=notes,
            bar="log₁₀ of the factor",
        )
    )
    return tag("div", pictures, class_="pair maps")


def _factors(
    here: dict[str, Any], there: dict[str, Any], names: Sequence[str]
) -> tuple[Matrix, list[list[str | None]]]:
    ends = []
    for entry in (here, there):
        order, values = named_matrix(entry)
        low, high = (named_matrix(entry, end)[1] for end in ("low", "high"))
        place = [order.index(name) for name in names]
        ends.append([[(values[i][j], low[i][j], high[i][j]) for j in place] for i in place])
    factors: list[list[float | None]] = []
    notes: list[list[str | None]] = []
    for rows in zip(*ends, strict=True):
        factors.append([])
        notes.append([])
        for (a, a_low, a_high), (b, b_low, b_high) in zip(*rows, strict=True):
            if a is None or b is None or a <= 0 or b <= 0:
                factors[-1].append(None if (a or 0.0) != (b or 0.0) else 0.0)
                notes[-1].append("zero in both" if a == b else "zero in one of them")
                continue
            before = Measured(value=a, interval=as_interval([a_low, a_high]))
            after = Measured(value=b, interval=as_interval([b_low, b_high]))
            verdict = _verdict(before, after, True)
            factors[-1].append(math.log10(b / a) if verdict == REAL else 0.0)
            notes[-1].append(f"(× {number(b / a)}, {verdict})")
    return factors, notes
