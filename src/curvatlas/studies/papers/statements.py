"""Numbered claims of the papers: the statements of ``curvatlas.theory`` by their ids there."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from curvatlas.figures.style import SERIES
from curvatlas.studies.papers.reproduction import (
    CONFIRMED,
    ONLY,
    REFUTED,
    UNDECIDED,
    Finding,
    Mark,
    Panel,
    Reproduction,
    tensor,
)
from curvatlas.theory.statements import (
    CORRECTED,
    FALSE,
    HOLDS,
    Outcome,
    Statement,
    statements_by_paper_id,
)

if TYPE_CHECKING:
    from curvatlas.studies.papers.exhibits import Ask

_VERDICTS = {HOLDS: CONFIRMED, CORRECTED: f"{ONLY} as corrected", FALSE: REFUTED}
_LOG_LOG: dict[str, Any] = {"xscale": "log", "yscale": "log"}
_SECONDS = 0.5  # of one statement, on two cores


@dataclass(frozen=True)
class Claim:
    """A numbered claim of a paper."""

    id: str
    shows: str
    claim: str
    source: str
    seconds: float


@functools.cache
def claims() -> tuple[Claim, ...]:
    """Every numbered claim that statements test."""
    return tuple(
        Claim(
            id=name,
            shows=found[0].title,
            claim=found[0].formula,
            source=found[0].source,
            seconds=_SECONDS * len(found),
        )
        for name, found in statements_by_paper_id().items()
    )


def of_statements(name: str, ask: Ask) -> Reproduction:
    """The statements of one id, measured now: claim, erratum, verdict, the pictures of their
    series."""
    found = statements_by_paper_id()[name]
    outcomes = [one.run(full=ask.full, seed=ask.seed) for one in found]
    return Reproduction(
        id=name,
        shows=found[0].title,
        source=found[0].source,
        claim=found[0].formula,
        findings=tuple(map(judged, found, outcomes)),
        panels=tuple(p for s, o in zip(found, outcomes, strict=True) for p in _panels(s, o)),
        columns=2,
        setting=f"tested by {found[0].tested_by}",
        notes=tuple(_errata(found)),
    )


def judged(statement: Statement, outcome: Outcome) -> Finding:
    """A statement's outcome as a finding."""
    error = outcome.numbers.get("error", math.nan)
    value = float(error) if isinstance(error, (int, float)) else math.nan
    return Finding(
        what=statement.title,
        value=value,
        low=value,
        high=value,
        paper="as printed",
        accepted=(-math.inf, math.inf),
        verdict=_VERDICTS.get(outcome.verdict, UNDECIDED),
        told=outcome.figure,
    )


def _errata(found: Sequence[Statement]) -> list[str]:
    told = [f"assumptions: {s.assumptions}" for s in found if s.assumptions != "none"]
    return [*told, *(f"counterexample: {s.counterexample}" for s in found if s.counterexample)]


def _panels(statement: Statement, outcome: Outcome) -> list[Panel]:
    """Curves of a statement's series on their axes; other pictures are those of ``verify``."""
    series, scales = outcome.series, _LOG_LOG
    if "panels" in series:
        curves_of, x = series["panels"], series["scales"]
    elif "curves" in series:
        curves_of, x = {statement.title: series["curves"]}, series["x"]
        scales = series
    else:
        return []
    return [
        Panel(
            title=title,
            xlabel=series.get("xlabel", "scale t"),
            ylabel=series.get("ylabel", "Frobenius norm"),
            xscale=scales.get("xscale", "linear"),
            yscale=scales.get("yscale", "linear"),
            marks=tuple(
                Mark(x=tensor(x), y=tensor(values), label=label, colour=colour)
                for (label, values), colour in zip(curves.items(), SERIES * 4, strict=False)
            ),
        )
        for title, curves in curves_of.items()
    ]
