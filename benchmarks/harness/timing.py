"""Interleaved timing: every call stands between two gradients, and only ratios are kept.

On a shared machine seconds drift by factors while the ratio of neighbours stays put. The median
over many short rounds is reported with its quartiles. Processor time beside wall time shows how
much of a difference is the machine's other work.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Contestant:
    """One way of computing a product: ``run`` handles ``columns`` vectors a call."""

    name: str
    library: str
    quantity: str  # "H", "H_o" or "H_f"
    columns: int
    run: Callable[[], Any]
    wall: list[float] = field(default_factory=list)  # gradients a vector, one entry a round
    processor: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        low, middle, high = quartiles(self.wall)
        return {
            "name": self.name,
            "library": self.library,
            "quantity": self.quantity,
            "columns": self.columns,
            "gradients": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "processor_gradients": round(statistics.median(self.processor), 3),
            "rounds": len(self.wall),
        }


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def clocked(run: Callable[[], Any]) -> tuple[float, float]:
    """(wall, processor) seconds of one call."""
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - processor


def least_processor_seconds(run: Callable[[], Any], rounds: int) -> float:
    """Of ``rounds`` calls."""
    return min(clocked(run)[1] for _ in range(rounds))


def interleave(
    gradient: Callable[[], Any], contestants: Sequence[Contestant], *, rounds: int, wide: int
) -> float:
    """Fill in every contestant's ratios; returns the gradient's median seconds.

    ``wide``: contestants with many columns take part in every ``wide``-th round only.
    """
    for run in (gradient, *(contestant.run for contestant in contestants)):
        run()  # warm-up: allocator, linearisation, compiled batching rules
    seconds: list[float] = []
    for turn in range(rounds):
        before = clocked(gradient)
        for contestant in contestants:
            if contestant.columns > 1 and turn % wide:
                continue
            taken = clocked(contestant.run)
            after = clocked(gradient)
            for index, kept in ((0, contestant.wall), (1, contestant.processor)):
                unit = (before[index] + after[index]) / 2
                kept.append(taken[index] / contestant.columns / unit)
            seconds.append(after[0])
            before = after
        print(f"  round {turn + 1}/{rounds}", end="\r", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return statistics.median(seconds)
