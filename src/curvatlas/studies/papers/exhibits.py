"""The list of what can be reproduced, and ``ca.paper``, which does it.

A figure or table is a function of this package, declared where it is computed:

    @exhibit("ormaniec-fig3a", shows="…", claim="…", source="…", seconds=40, takes=("model",))
    def figure_3a(ask: Ask) -> Reproduction: ...

A numbered claim comes from the statements of ``curvatlas.theory``, by its id in the papers. Every
module of this package is searched, so that a new file is all that a new family of figures needs.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from curvatlas.budget import one_thread
from curvatlas.display import Table
from curvatlas.errors import ProblemError
from curvatlas.problem import Problem
from curvatlas.runs import Run
from curvatlas.studies.papers.reproduction import Reproduction, together
from curvatlas.studies.papers.statements import claims, of_statements
from curvatlas.surveying import Step, recorded

Takes = Literal["model", "data"]
PAPERS = {  # the beginning of an id → what is reproduced
    "ormaniec": "Ormaniec, Dangel, Singh, ICLR 2025",
    "petrov": "Petrov, Kiselev, Meshkov, Grabovoy, ICLR 2026",
    "cracking": "Singh, Ormaniec, Hofmann, Cracking the Hessian",
}
_NEAREST = 3  # ids that an unknown one is answered with


def _alone(_: str, function: Callable[[], Any]) -> Any:
    return function()


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a reproduction is asked for.

    problem: a model and data of the user's instead of the paper's. data: a folder with the data set
    of the paper. step: ``step(name, function)`` keeps a part of a long computation, so that an
    interrupted one goes on.
    """

    full: bool = False
    seed: int = 0
    problem: Problem | None = None
    data: Path | None = None
    step: Step = _alone

    def attention(self, what: str, roles: Sequence[str] = ("query", "value")) -> Problem | None:
        """The user's problem, which must have attention with these roles; None: the paper's own."""
        if self.problem is not None:
            missing = [role for role in roles if role not in self.problem.anatomy.roles]
            if missing:
                known = ", ".join(self.problem.anatomy.roles[:8])
                raise ProblemError(
                    f"{what} is about attention, and {type(self.problem.model).__name__} has no "
                    f"{' or '.join(missing)} that is known (its roles: {known}): give a model with "
                    "attention, or name the roles with --role."
                )
        return self.problem


Make = Callable[[Ask], Reproduction]


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A figure, table or numbered claim of a paper, and how it is made again."""

    id: str
    shows: str
    claim: str
    source: str
    seconds: float  # of the default, on two cores
    takes: tuple[Takes, ...] = ()
    make: Make
    numbered: bool = False  # a theorem or lemma that no figure or table shows

    @property
    def order(self) -> tuple[int, int, list[int | str]]:
        """Paper by paper, figures before claims, numbers as numbers."""
        paper = list(PAPERS).index(self.id.partition("-")[0])
        words = [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", self.id)]
        return paper, self.numbered, words

    def check(self, ask: Ask) -> None:
        """Refuse a model or data that it has no use for."""
        if ask.problem is not None and "model" not in self.takes:
            raise ValueError(f"{self.id} is about the paper's own model: it takes no --model.")
        if ask.data is not None and "data" not in self.takes:
            raise ValueError(f"{self.id} takes no --data folder: it makes its own data.")

    def served(self, ask: Ask, step: Step) -> Ask:
        """What of an ask it takes, with the steps of a run."""
        problem = ask.problem if "model" in self.takes else None
        data = ask.data if "data" in self.takes else None
        return replace(ask, problem=problem, data=data, step=step)

    def run(self, ask: Ask) -> Reproduction:
        """Make it again."""
        self.check(ask)
        result = self.make(ask)
        return replace(
            result,
            id=self.id,
            shows=self.shows,
            claim=self.claim,
            source=self.source,
            full=ask.full,
            seed=ask.seed,
        )


_exhibits: dict[str, Exhibit] = {}


def exhibit(
    name: str,
    *,
    shows: str,
    claim: str,
    source: str,
    seconds: float,
    takes: Sequence[Takes] = (),
) -> Callable[[Make], Make]:
    """Let the decorated function reproduce ``name``; it gives findings, panels and settings."""

    def register(function: Make) -> Make:
        if name in _exhibits and _exhibits[name].make.__module__ != function.__module__:
            raise ValueError(f"{name}: two functions reproduce it.")
        if name.partition("-")[0] not in PAPERS:
            raise ValueError(f"{name} begins with none of {', '.join(PAPERS)}.")
        _exhibits[name] = Exhibit(
            id=name,
            shows=shows,
            claim=claim,
            source=source,
            seconds=seconds,
            takes=tuple(takes),
            make=function,
        )
        return function

    return register


@functools.cache
def all_exhibits() -> Mapping[str, Exhibit]:
    """Everything that can be reproduced, in reading order, by id."""
    package = importlib.import_module("curvatlas.studies.papers")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    found = dict(_exhibits)
    for claim in claims():
        drawn = found.get(claim.id)
        found[claim.id] = Exhibit(
            id=claim.id,
            shows=claim.shows if drawn is None else drawn.shows,
            claim=claim.claim if drawn is None else drawn.claim,
            source=claim.source if drawn is None else drawn.source,
            seconds=claim.seconds + (0.0 if drawn is None else drawn.seconds),
            takes=() if drawn is None else drawn.takes,
            make=_both(claim.id, drawn),
            numbered=drawn is None,
        )
    ordered = sorted(found.values(), key=lambda one: one.order)
    return {one.id: one for one in ordered}


def _both(name: str, drawn: Exhibit | None) -> Make:
    """The statements behind an id, after the figure of the same id where there is one."""
    if drawn is None:
        return functools.partial(of_statements, name)

    def make(ask: Ask) -> Reproduction:
        figure, claim = drawn.make(ask), of_statements(name, ask)
        return replace(figure, findings=(*figure.findings, *claim.findings))

    return make


def named(name: str) -> tuple[Exhibit, ...]:
    """The exhibit of this id, or the parts of a figure: ``…-fig3`` is ``…-fig3a`` and ``…-fig3b``.

    An unknown id is answered with the three nearest.
    """
    known = all_exhibits()
    if name in known:
        return (known[name],)
    parts = [one for key, one in known.items() if re.fullmatch(re.escape(name) + "[a-z]", key)]
    if parts and name[-1:].isdigit():
        return tuple(parts)
    near = difflib.get_close_matches(name, known, n=_NEAREST, cutoff=0.0)
    raise ValueError(
        f"no figure or claim is called {name!r}: the nearest are {', '.join(near)} "
        "('curvatlas paper list' shows all)."
    )


class Papers:
    """``ca.paper(id)`` reproduces a figure or claim of the papers; ``ca.paper.list()`` lists them.

    ``curvatlas paper`` is the same on the command line.
    """

    def __call__(
        self,
        name: str,
        *,
        full: bool = False,
        seed: int = 0,
        problem: Problem | None = None,
        data: str | os.PathLike[str] | None = None,
        output: str | os.PathLike[str] | Run | None = None,
    ) -> Reproduction:
        """Our numbers beside the paper's, the figure as the paper draws it, and a verdict.

        full: the paper's own size (default: what ends here in a minute or two, which is said).
        problem: a model and data of yours instead of the paper's. data: a folder with MNIST's IDX
        files, CIFAR's binary files or its PNG sheets.
        output: a run folder, or an open ``Run``: what is computed is kept, and the same call
        resumes it.
        """
        exhibits = named(name)
        folder = None if data is None else Path(data)
        options = {"command": "paper", "names": [name], "full": full, "seed": seed}
        options |= {} if folder is None else {"data": str(folder)}

        def work(step: Step) -> Reproduction:
            ask = Ask(full=full, seed=seed, problem=problem, data=folder, step=step)
            return together(name, [reproduced(one, ask) for one in exhibits])

        return recorded({} if problem is None else problem, output, options, work)

    def list(self) -> Table:
        """A row a figure, table or numbered claim: id, what it shows, the claim, the time here."""
        return Table.of(
            [
                {
                    "id": one.id,
                    "shows": one.shows,
                    "claim": one.claim,
                    "time here": span(one.seconds),
                }
                for one in all_exhibits().values()
            ]
        )


def reproduced(one: Exhibit, ask: Ask) -> Reproduction:
    """One exhibit as a step of the run, its own steps below it."""
    inner = replace(ask, step=lambda name, function: ask.step(f"{one.id}.{name}", function))
    with one_thread():
        result: Reproduction = ask.step(f"paper.{one.id}", lambda: one.run(inner))
    return result


def span(seconds: float) -> str:
    """A time as a list shows it."""
    return f"{max(seconds, 1):.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"


paper = Papers()
