"""Statements of the sources as objects: what is claimed, how it is tested, what was measured.

A statement is written next to the function that checks it:

    @statement(name="softmax-jacobian-norm", source="Petrov et al., draft, proof of Theorem 1", ...)
    def softmax_jacobian_norm(effort: Effort) -> Outcome: ...

The check measures and judges; the recorded verdict never enters it. ``curvatlas verify``, the tests
and the docs page all read the same registry.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from curvatlas.results import Result

HOLDS = "holds"
CORRECTED = "holds corrected"
FALSE = "false as printed"
UNCONFIRMED = "not confirmed"  # never recorded: a check that ends here is a failure
VERDICTS = (HOLDS, CORRECTED, FALSE)

# Topics in the order a reader meets them; each module registers its statements when imported.
TOPICS: tuple[str, ...] = (
    "softmax",
    "printed_attention",
    "printed_layer_norm",
    "printed_block",
    "curvature_bounds",
    "our_bounds",
    "convergence",
    "growth",
    "depth",
    "scalar_model",
    "sinks",
    "invariants",
    "article",
    "article_code",
    "extensions",
    "third_order_checks",
)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to compute: the seed of every random draw, and whether the large sweep runs."""

    full: bool = False
    seed: int = 0

    def trials(self, short: int, full: int) -> int:
        return full if self.full else short

    def generator(self, stream: int = 0) -> torch.Generator:
        """An independent stream of random numbers for one use within a check."""
        return torch.Generator().manual_seed(1_000_003 * self.seed + 7919 * stream + 17)


@dataclass(frozen=True, kw_only=True)
class Outcome(Result):
    """What one check measured: the verdict its numbers give, and the numbers."""

    verdict: str
    figure: str  # the measured number(s) with their spread, as a person reads them
    numbers: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Any] = field(default_factory=dict)  # what the picture is drawn from

    def __str__(self) -> str:
        return f"{self.verdict}: {self.figure}"


Check = Callable[[Effort], Outcome]
Plot = Callable[[Outcome], Any]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One theorem, lemma, bound, rate or claim of a source, in our words."""

    name: str
    source: str
    title: str
    formula: str
    assumptions: str
    tested_by: str
    verdict: str  # recorded: what the project stands for; verify compares with it
    counterexample: str
    derivation: str
    topic: str
    check: Check
    plot: Plot | None = None

    def run(self, *, full: bool = False, seed: int = 0) -> Outcome:
        """Measure now. The result depends on ``seed`` and ``full`` only."""
        return self.check(Effort(full=full, seed=seed))


_registry: dict[str, Statement] = {}


def statement(
    *,
    name: str,
    source: str,
    title: str,
    formula: str,
    tested_by: str,
    verdict: str,
    assumptions: str = "none",
    counterexample: str = "",
    derivation: str,
    plot: Plot | None = None,
) -> Callable[[Check], Check]:
    """Register the decorated check as the test of a statement."""
    if verdict not in VERDICTS:
        raise ValueError(f"{name}: the verdict is {verdict!r}, expected one of {VERDICTS}.")

    def register(check: Check) -> Check:
        if name in _registry and _registry[name].check.__module__ != check.__module__:
            raise ValueError(f"{name}: this statement is registered twice.")
        _registry[name] = Statement(
            name=name,
            source=source,
            title=title,
            formula=formula,
            assumptions=assumptions,
            tested_by=tested_by,
            verdict=verdict,
            counterexample=counterexample,
            derivation=derivation,
            topic=check.__module__.rsplit(".", 1)[-1],
            check=check,
            plot=plot,
        )
        return check

    return register


def all_statements() -> tuple[Statement, ...]:
    """Every registered statement, in reading order."""
    for topic in TOPICS:
        importlib.import_module(f"curvatlas.theory.{topic}")
    order = {topic: place for place, topic in enumerate(TOPICS)}
    return tuple(sorted(_registry.values(), key=lambda s: order[s.topic]))


def find(name: str) -> Statement:
    """The statement called ``name``; raises ValueError with the close names otherwise."""
    known = {s.name: s for s in all_statements()}
    if name in known:
        return known[name]
    close = [n for n in known if name in n or n in name] or list(known)
    raise ValueError(f"no statement is called {name!r}: try one of {', '.join(sorted(close))}.")


def judge(*, printed: bool, corrected: bool | None = None) -> str:
    """The verdict that measured truth values give.

    ``printed``: the claim as printed survived the test. ``corrected``: the corrected claim did
    (None: no correction is offered, the claim is simply wrong when it fails).
    """
    if corrected is False:
        return UNCONFIRMED
    if printed:
        return HOLDS
    return FALSE if corrected is None else CORRECTED


def spread(values: Sequence[float]) -> str:
    """ "median [minimum, maximum]" of measured numbers."""
    ordered = sorted(float(v) for v in values)
    middle = ordered[len(ordered) // 2]
    return f"{middle:.3g} [{ordered[0]:.3g}, {ordered[-1]:.3g}]"


def worst(errors: Mapping[str, float] | Sequence[float]) -> float:
    """The largest of measured errors; NaN counts as infinitely wrong."""
    values = list(errors.values()) if isinstance(errors, Mapping) else list(errors)
    return max(float("inf") if v != v else float(v) for v in values)
