"""Budgets of a command: time, memory, products."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

from curvatlas.budget import available_bytes, limit_bytes, parse_bytes, readable

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


MOST_PRODUCTS = 300  # of one estimate, unless --products says otherwise
_MEMORY = 2 * 10**9  # of a survey, unless --memory says otherwise
_FIRST_USE = 80 * 10**6  # measured: what libraries load and keep when they are first used
_VECTORS = 60  # that a survey needs room for, however large the model


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one run may use; ``memory`` in bytes; None for the default."""

    seconds: float | None = None
    memory: int | None = None
    products: int | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def most_products(self) -> int:
        """For one estimate."""
        return self.products or MOST_PRODUCTS

    @property
    def told_products(self) -> int | str:
        """For the manifest. The map takes more than other estimates unless a number is asked."""
        return self.products or f"{MOST_PRODUCTS} by default"

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


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a survey divides its memory: one operator and one estimate are at work at a time.

    Made of what was asked for or of fixed numbers, never of what is free: bases and pieces of
    batches, and with them the last digits of the results, are the same on a busy machine.
    """

    total: int

    @property
    def graphs(self) -> int:
        """For what an operator keeps and what its products allocate."""
        return self._divided * 40 // 100

    @property
    def vectors(self) -> int:
        """For the vectors of an estimate; the rest is left to the allocator's gaps."""
        return self._divided * 42 // 100

    @property
    def _divided(self) -> int:
        return self.total - min(_FIRST_USE, self.total // 4)


def memory_plan(asked: int | None, parameter_bytes: int) -> MemoryPlan:
    """The plan for what was asked; by default 2 GB, more for models that need more.

    The default stays below three quarters of what the process may use; less memory than that is
    free is said at once, not when it runs out.
    """
    from curvatlas import parallel

    total = asked
    if total is None:
        total = min(max(_MEMORY, _VECTORS * parameter_bytes), limit_bytes() * 3 // 4)
        total = parallel.smallest_over_processes(total)
    if total > available_bytes():
        warnings.warn(
            f"{readable(total)} are planned and {readable(available_bytes())} are free: if memory "
            "runs out, start again with a smaller --memory.",
            stacklevel=2,
        )
    return MemoryPlan(total=total)


def budget_of(
    *, time: str | None = None, memory: str | None = None, products: int | None = None
) -> Budget:
    """The budget that the options describe; ValueError when one cannot be read."""
    seconds = None if time is None else parse_time(time)
    return Budget(
        seconds=seconds,
        memory=None if memory is None else parse_bytes(memory),
        products=products,
    )
