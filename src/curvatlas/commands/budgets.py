"""Budgets of a command: time, memory, products."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class TimeUp(KeyboardInterrupt):
    """The time budget is used up: ends a run as Ctrl-C does, resumable."""


class Interrupted(Exception):
    """Ctrl-C, with the words that say how to resume. (typer swallows KeyboardInterrupt.)"""


def parse_time(text: str) -> float:
    """``"90"``, ``"90s"``, ``"1.5m"`` or ``"2h"`` in seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(s|m|min|h|)\s*", text.lower())
    if match is None or not float(match[1]) > 0:
        raise ValueError(f"cannot read {text!r} as a time: write for example 90s, 5m or 1h.")
    return float(match[1]) * _SECONDS[match[2]]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one run may use; None means no limit beyond each estimate's own."""

    seconds: float | None = None
    memory: str | None = None
    products: int | None = None
    started: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raise ``TimeUp`` when the time is used up; of several processes by the first's clock."""
        if self.seconds is None:
            return
        from curvatlas import parallel

        if parallel.from_every_process(time.monotonic() - self.started > self.seconds)[0]:
            raise TimeUp(f"the time budget of {self.seconds:g} s is used up")

    def watch(self, operator: Any) -> Any:
        """Let every product of ``operator`` look at the clock first; returns the operator.

        An estimate that keeps a checkpoint is then stopped between two products and goes on there
        when the run is resumed, with the same numbers as if it had never stopped.
        """
        if self.seconds is not None:
            original = operator._columns

            def watched(columns: Any) -> Any:
                self.check()
                return original(columns)

            operator._columns = watched
        return operator


def budget_of(
    *, time: str | None = None, memory: str | None = None, products: int | None = None
) -> Budget:
    """The budget that the options describe; ValueError when one cannot be read."""
    if memory is not None:
        from curvatlas.budget import parse_bytes

        parse_bytes(memory)
    seconds = None if time is None else parse_time(time)
    return Budget(seconds=seconds, memory=memory, products=products)
