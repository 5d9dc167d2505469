"""A figure, table or claim of a paper, made again: our numbers beside the paper's, and a verdict.

A ``Finding`` is one number of ours with its interval and the range of values that count as the
paper's: confirmed where the whole interval lies inside of that range, refuted where all of it lies
outside, undecided in between. The findings together give the verdict of the ``Reproduction``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from curvatlas.results import Interval, Number, Result

CONFIRMED, REFUTED, UNDECIDED = "confirmed", "refuted", "undecided"
ONLY = "true only"  # how a verdict begins that holds in a part of what is claimed
Style = Literal["points", "line", "dashed", "bars", "steps", "columns"]
Scale = Literal["linear", "log", "symlog"]


@dataclass(frozen=True, kw_only=True)
class Finding(Result):
    """One number or statement of ours beside the paper's."""

    what: str
    value: float
    low: float
    high: float
    paper: str  # as the paper has it: "1.98", "largest of Q, K, V"
    accepted: Interval  # values that count as the paper's
    verdict: str
    where: str = ""  # the regime, of a claim that may hold in one and not in another
    told: str = ""  # in words, of what is no single number

    @property
    def ours(self) -> str:
        """Our number with its interval, or our words."""
        return self.told or str(Number(self.value, self.low, self.high))

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.what}{where}: {self.ours}, the paper {self.paper}: {self.verdict}"


def finding(
    what: str,
    value: float,
    interval: Interval | None = None,
    *,
    paper: str,
    accepted: Interval,
    where: str = "",
) -> Finding:
    """A number of ours judged by the values that count as the paper's; no interval: it is exact."""
    low, high = interval or (value, value)
    first, last = accepted
    if first <= low and high <= last:
        verdict = CONFIRMED
    elif high < first or last < low:
        verdict = REFUTED
    else:  # also where a number is NaN
        verdict = UNDECIDED
    return Finding(
        what=what,
        value=value,
        low=low,
        high=high,
        paper=paper,
        accepted=accepted,
        verdict=verdict,
        where=where,
    )


def near(
    what: str,
    value: float,
    interval: Interval | None = None,
    *,
    paper: float,
    within: float,
    where: str = "",
) -> Finding:
    """A number of ours, the paper's ``paper`` ± ``within``."""
    accepted = (paper - within, paper + within)
    return finding(what, value, interval, paper=f"{paper:g}", accepted=accepted, where=where)


def within_factor(
    what: str,
    value: float,
    interval: Interval | None = None,
    *,
    paper: float,
    factor: float = 2.0,
    where: str = "",
) -> Finding:
    """A positive number of ours, the paper's times or over ``factor`` at most."""
    accepted = (paper / factor, paper * factor)
    return finding(what, value, interval, paper=f"{paper:.2g}", accepted=accepted, where=where)


def joint_verdict(findings: Sequence[Finding]) -> str:
    """What the findings say together.

    A claim that holds wholly in some regimes (``where``) and fails in others is "true only where"
    the former; one that fails anywhere else is refuted.
    """
    if not findings:
        return UNDECIDED
    regimes: dict[str, set[str]] = {}
    for one in findings:
        regimes.setdefault(one.where, set()).add(one.verdict)
    verdicts = set().union(*regimes.values())
    if verdicts == {CONFIRMED}:
        return CONFIRMED
    partial = [one.verdict for one in findings if one.verdict.startswith(ONLY)]
    if verdicts <= {CONFIRMED, *partial}:
        return partial[0]
    if REFUTED not in verdicts:
        return UNDECIDED
    good = [where for where, found in regimes.items() if where and found == {CONFIRMED}]
    return f"{ONLY} where {'; '.join(good)}" if good else REFUTED


# --- pictures as values ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mark(Result):
    """A line, points, a guide or a histogram in a panel."""

    x: Tensor  # of a histogram (bars, steps) the edges, one more than y; of columns their places
    y: Tensor
    low: Tensor | None = None  # the ends of the intervals of y
    high: Tensor | None = None
    label: str = ""
    colour: str = "#0072b2"
    style: Style = "points"
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel(Result):
    """One panel of a figure: marks on two axes, or the image of a matrix."""

    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    xscale: Scale = "linear"
    yscale: Scale = "linear"
    marks: tuple[Mark, ...] = ()
    dotted: tuple[float, ...] = ()  # vertical lines
    note: str = ""  # written into the panel
    image: Tensor | None = None  # (rows, columns)
    limits: Interval | None = None  # of the colours
    borders: tuple[int, ...] = ()  # where a block of the matrix ends
    blocks: tuple[str, ...] = ()  # their names; without an image those of the places 0, 1 … of x


# --- the result -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reproduction(Result):
    """A figure or claim of a paper: what it says, what was measured here, and the verdict.

    ``print`` shows the findings, ``.plot()`` draws the figure as the paper does, ``.table()`` has
    our numbers beside the paper's.
    """

    id: str = ""  # this and the next three: filled in from the list of exhibits
    shows: str = ""
    source: str = ""
    claim: str = ""
    findings: tuple[Finding, ...]
    panels: tuple[Panel, ...] = ()
    columns: int = 1  # of panels
    shared: Literal["none", "x", "y", "both", "columns"] = "none"  # axes of the panels
    setting: str = ""  # model and data
    smaller: tuple[str, ...] = ()  # what was made smaller than in the paper
    notes: tuple[str, ...] = ()
    full: bool = False
    seed: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Confirmed, refuted, undecided, or true only where …"""
        return joint_verdict(self.findings)

    def finding(self, what: str) -> Finding:
        """The finding called ``what``."""
        for one in self.findings:
            if one.what == what:
                return one
        names = ", ".join(one.what for one in self.findings)
        raise KeyError(f"{self.id} has no finding {what!r}: it has {names}.")

    def _derived(self) -> dict[str, Any]:
        return {"verdict": self.verdict}

    def _rows(self) -> list[dict[str, Any]]:
        """A row a finding."""
        return [
            {
                "what": one.what,
                "where": one.where,
                "here": one.value,
                "low": one.low,
                "high": one.high,
                "paper": one.paper,
                "verdict": one.verdict,
                "told": one.told,
            }
            for one in self.findings
        ]

    def __str__(self) -> str:
        lines = [
            f"{self.id}: {self.verdict}",
            f"  {self.shows} ({self.source})",
            f"  the paper: {self.claim}",
        ]
        lines += [f"  here: {self.setting}"] if self.setting else []
        lines += [f"  {one}" for one in self.findings]
        if self.smaller:
            lines.append(f"  smaller than the paper: {'; '.join(self.smaller)} (--full: its own)")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def together(name: str, parts: Sequence[Reproduction]) -> Reproduction:
    """The parts of one figure (3a, 3b) as one result: findings keep the part they belong to."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def tag(part: Reproduction) -> str:
        return part.id.rpartition("fig")[2]

    return replace(
        first,
        id=name,
        shows="; ".join(f"{tag(part)}: {part.shows}" for part in parts),
        claim="; ".join(f"{tag(part)}: {part.claim}" for part in parts),
        findings=tuple(
            replace(one, where=f"{tag(part)}{', ' if one.where else ''}{one.where}")
            for part in parts
            for one in part.findings
        ),
        panels=tuple(
            replace(panel, title=f"{tag(part)} {panel.title}")
            for part in parts
            for panel in part.panels
        ),
        columns=max(part.columns for part in parts),
        shared="none",
        setting="; ".join(dict.fromkeys(part.setting for part in parts)),
        smaller=tuple(dict.fromkeys(line for part in parts for line in part.smaller)),
        notes=tuple(dict.fromkeys(line for part in parts for line in part.notes)),
        numbers={tag(part): part.numbers for part in parts},
    )


def tensor(values: Any) -> Tensor:
    """Any numbers as a float64 tensor on the processor, as marks hold them."""
    return torch.as_tensor(values, dtype=torch.float64, device="cpu").detach().clone()
