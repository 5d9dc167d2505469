"""Two or more measured states side by side: what changed, and whether the change is real.

A state is one stage of a run: the model of ``analyze``, or "initial" and "trained" of the demo.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from curvatlas.files import write_bytes
from curvatlas.report.reading import HEADLINES, Measured, Stage, stages_of
from curvatlas.report.words import ratio, with_interval
from curvatlas.results import Result
from curvatlas.runs.loading import LoadedRun, load

LARGEST = 5
_MATTERS = 0.01  # of the largest block: smaller ones change by factors that mean nothing
REAL, WITHIN, OTHER_DATA = "real", "within error", "on other data"


@dataclass(frozen=True, kw_only=True)
class StateChange(Result):
    """One quantity in the first and the last state."""

    name: str
    before: Measured
    after: Measured
    size: float  # |log of the ratio|; one more where the sign changes
    verdict: str  # "real", "within error", or "on other data": no interval covers the samples

    def __str__(self) -> str:
        shown = [with_interval(m.value, m.interval) for m in (self.before, self.after)]
        factor = ratio(self.before.value, self.after.value)
        return f"{self.name}: {' → '.join(shown)}{f' ({factor})' if factor else ''}, {self.verdict}"


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """States in order of time, their headline numbers, and every change, the largest first."""

    states: tuple[str, ...]
    same_data: bool
    options: dict[str, tuple[str, str]]  # of the first and the last run, where they differ
    rows: dict[str, tuple[Measured, ...]]  # headline → one number a state
    changes: tuple[StateChange, ...]
    page: str | None = None  # where it was written

    @property
    def largest(self) -> tuple[StateChange, ...]:
        """The five largest changes of headline numbers; roles are in ``changes`` and the maps."""
        return tuple(c for c in self.changes if c.name in self.rows)[:LARGEST]

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
    comparison = compared(states, same_data=len(prints) == 1, options=_differing(loaded))
    if output is None:
        return comparison
    from curvatlas.report.page import comparison_page

    target = Path(output)
    if target.suffix.lower() not in (".html", ".htm"):
        target = target / "comparison.html"
    page = comparison_page(comparison, states, loaded[-1])
    write_bytes(target, page.html().encode("utf-8"))
    return replace(comparison, page=str(target))


def _states(runs: Sequence[LoadedRun]) -> list[Stage]:
    """Every stage of every run, the oldest run first, each with the label that tells it apart."""
    states: list[Stage] = []
    ordered = sorted(runs, key=lambda run: run.manifest.created)
    names = _short_names([str(run.path) for run in ordered])
    for run, name in zip(ordered, names, strict=True):
        for stage in stages_of(run.results):
            words = stage.name if stage.label else ""
            label = f"{name}, {words}" if words and len(runs) > 1 else words or name
            states.append(replace(stage, label=label))
    return states


def _short_names(paths: list[str]) -> list[str]:
    """The last parts of the paths that tell them apart."""
    parts = [Path(path).parts for path in paths]
    for depth in range(1, max(len(p) for p in parts) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(paths)):
            break
    return [f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, 1)]


def _differing(runs: Sequence[LoadedRun]) -> dict[str, tuple[str, str]]:
    """Options of the oldest and the newest run that are not the same."""
    ordered = sorted(runs, key=lambda run: run.manifest.created)
    one, two = ordered[0].manifest.options, ordered[-1].manifest.options
    keys = [key for key in {**one, **two} if one.get(key) != two.get(key)]
    return {key: (str(one.get(key)), str(two.get(key))) for key in keys}


def compared(
    states: Sequence[Stage], *, same_data: bool, options: dict[str, tuple[str, str]] | None = None
) -> Comparison:
    """Every headline in every state, and the changes from the first to the last."""
    read = {name: tuple(map(reader, states)) for name, reader in HEADLINES.items()}
    rows = {name: values for name, values in read.items() if sum(map(_is_known, values)) > 1}
    pairs = [(name, values[0], values[-1]) for name, values in rows.items()]
    pairs += list(_by_role(states[0], states[-1]))
    changes = [
        StateChange(
            name=name,
            before=before,
            after=after,
            size=_size(before.value, after.value),
            verdict=verdict(before, after, same_data),
        )
        for name, before, after in pairs
        if _is_known(before) and _is_known(after)
    ]
    return Comparison(
        states=tuple(state.label for state in states),
        same_data=same_data,
        options=options or {},
        rows=rows,
        changes=tuple(sorted(changes, key=lambda change: -change.size)),
    )


def _is_known(measured: Measured) -> bool:
    return measured.value is not None


def _by_role(before: Stage, after: Stage) -> Iterator[tuple[str, Measured, Measured]]:
    """The blocks of H on the diagonal, by role, where they matter in either state."""
    here, there = before.within_roles(), after.within_roles()
    tops = [max((m.value or 0.0 for m in one.values()), default=0.0) for one in (here, there)]
    for role in (name for name in here if name in there):
        values = [one[role].value or 0.0 for one in (here, there)]
        matters = any(v >= _MATTERS * top for v, top in zip(values, tops, strict=True))
        if min(values) > 0 and matters:
            yield f"‖H‖_F within {role}", here[role], there[role]


def _size(before: float | None, after: float | None) -> float:
    if before is None or after is None or before == after:
        return 0.0
    if before == 0 or after == 0:
        return math.inf
    return abs(math.log(abs(after / before))) + (1.0 if before * after < 0 else 0.0)


def verdict(before: Measured, after: Measured, same_data: bool) -> str:
    """Real where the difference exceeds what both intervals allow together."""
    a, b = before.value, after.value
    if a is None or b is None:
        return WITHIN
    low, high = (before, after) if a <= b else (after, before)
    allowed = math.hypot(
        _reach(low.value, low.interval, 1),
        _reach(high.value, high.interval, 0),
        1e-9 * max(abs(a), abs(b)),
    )
    if abs(b - a) <= allowed:
        return WITHIN
    if same_data:
        return REAL
    if before.data_interval is None or after.data_interval is None:
        return OTHER_DATA
    scatter = _reach(low.value, low.data_interval, 1), _reach(high.value, high.data_interval, 0)
    return REAL if abs(b - a) > math.hypot(allowed, *scatter) else WITHIN


def _reach(value: float | None, interval: tuple[float, float] | None, end: int) -> float:
    """How far the upper (1) or lower (0) end lies from the value."""
    return 0.0 if interval is None else abs(interval[end] - (value or 0.0))
