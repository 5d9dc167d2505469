"""A statement of the sources with what was measured of it, as a result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from curvatlas.results import Result


@dataclass(frozen=True, kw_only=True)
class VerifiedStatement(Result):
    """One theorem, bound or claim: where it stands, what it says, what was measured here."""

    name: str
    source: str
    title: str
    formula: str
    recorded: str  # the verdict the project stands for
    verdict: str  # the verdict the measured numbers give
    figure: str  # those numbers, as a person reads them

    @property
    def agrees(self) -> bool:
        """Whether this machine confirms the recorded verdict."""
        return self.recorded == self.verdict

    def __str__(self) -> str:
        differs = "" if self.agrees else f" (recorded: {self.recorded})"
        return f"{self.name}: {self.verdict}{differs}; {self.figure}"


def verified(statement: Any, *, full: bool, seed: int) -> VerifiedStatement:
    """Measure a ``theory.Statement`` now."""
    outcome = statement.run(full=full, seed=seed)
    return VerifiedStatement(
        name=statement.name,
        source=statement.source,
        title=statement.title,
        formula=statement.formula,
        recorded=statement.verdict,
        verdict=outcome.verdict,
        figure=outcome.figure,
    )
