"""Statements of the papers as objects: what is claimed, how it is tested, what was measured.

Each lives in a file of ``papers/`` as one function, whose docstring is the statement as printed and
whose body is the check. The recorded verdict never enters it:

    @statement("layer-norm-jacobian", HOLDS)
    def layer_norm_jacobian(effort: CheckEffort) -> Rows:
        \"""Jacobian of LayerNorm in the P(X)·M(X) form

        ∂LN/∂X = (P⊗I_d)G + (I_L⊗Mᵀ)∂P/∂X
        Source: Petrov et al., Theorem 2 [petrov-thm2]
        Assumptions: σ > 0
        Tested by: automatic differentiation
        \"""
        for trial in effort.trials(9, 60):
            ...
            yield formula, truth  # or: printed, truth, corrected

``curvatlas verify``, the tests and the docs page all read the same registry.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvatlas.budget import one_thread
from curvatlas.progress import bar
from curvatlas.results import Result
from curvatlas.theory.reference import relative_error

HOLDS = "holds"
CORRECTED = "holds corrected"
FALSE = "false as printed"
UNCONFIRMED = "not confirmed"  # never recorded: a check that ends here is a failure
VERDICTS = (HOLDS, CORRECTED, FALSE)

# Files of ``papers/`` in the order a reader meets them → the section of the derivations they use.
TOPICS = {
    "attention": "4-attention",
    "layer_norm": "5-normalisation",
    "block": "7-the-block",
    "bounds": "13-bounds",
    "convergence": "14-one-more-sample",
    "growth": "15-growth",
    "scalar_model": "16-spectra",
    "symmetries": "17-invariants",
    "article": "18-the-articles-claims",
    "own_results": "13-bounds",
}


@dataclass(frozen=True, kw_only=True)
class CheckEffort:
    """How much to compute: the seed of every random draw, and whether the large sweep runs."""

    full: bool = False
    seed: int = 0

    def choose(self, short: int, full: int) -> int:
        return full if self.full else short

    def trials(self, short: int, full: int) -> range:
        return range(self.choose(short, full))

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


Rows = Iterator[tuple[Tensor, ...]]  # (formula, truth), or (printed, truth, corrected)
Check = Callable[[CheckEffort], Outcome]
Plot = Callable[[Outcome], Any]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One theorem, lemma, bound, rate or claim of a source, in our words.

    papers: its ids in the papers, as ``petrov-thm3``, ``ormaniec-lemma-d.2``, ``cracking-thm-3.5``;
    empty for what has no number there.
    """

    name: str
    papers: tuple[str, ...] = ()
    topic: str
    verdict: str  # recorded: what the project stands for; verify compares with it
    source: str
    title: str
    formula: str
    assumptions: str = "none"
    tested_by: str
    counterexample: str = ""
    derivation: str
    check: Check
    plot: Plot | None = None

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(
                f"{self.name}: the verdict is {self.verdict!r}, expected one of {VERDICTS}."
            )

    def run(self, *, full: bool = False, seed: int = 0) -> Outcome:
        """Measure now. The result depends on ``seed`` and ``full`` only."""
        return self.check(CheckEffort(full=full, seed=seed))


_registered: dict[str, Statement] = {}
_LABELS = re.compile(r"^(Source|Assumptions|Tested by|Counterexample): ", re.MULTILINE)
_PAPERS = re.compile(r" \[([\w.\- ]+)\]$")


def statement(
    name: str,
    verdict: str,
    *,
    derivation: str = "",
    plot: Plot | None = None,
    limit: float = 1e-12,
) -> Callable[[Callable[[CheckEffort], Outcome | Rows]], Check]:
    """Register the decorated check; its docstring is title, formula and labelled lines.

    The source ends with the ids of the papers in brackets. derivation: a section other than the
    topic's. limit: of the relative errors of a check that yields rows.
    """

    def register(function: Callable[[CheckEffort], Outcome | Rows]) -> Check:
        title, text = (inspect.getdoc(function) or "").split("\n\n")
        pieces = [" ".join(piece.split()) for piece in _LABELS.split(text)]
        labelled = dict(zip(pieces[1::2], pieces[2::2], strict=True))
        source, *ids = _PAPERS.split(labelled["Source"])
        if name in _registered:
            raise ValueError(f"{name}: two functions check this statement.")

        @functools.wraps(function)
        def check(effort: CheckEffort) -> Outcome:
            measured = function(effort)
            return measured if isinstance(measured, Outcome) else compared(measured, limit)

        topic = function.__module__.rpartition(".")[2]
        _registered[name] = Statement(
            name=name,
            papers=tuple(ids[0].split()) if ids else (),
            topic=topic,
            verdict=verdict,
            source=source,
            title=title,
            formula=pieces[0],
            assumptions=labelled.get("Assumptions", "none"),
            tested_by=labelled["Tested by"],
            counterexample=labelled.get("Counterexample", ""),
            derivation=f"docs/theory/derivations.md#{derivation or TOPICS[topic]}",
            check=check,
            plot=plot,
        )
        return check

    return register


@functools.cache
def all_statements() -> tuple[Statement, ...]:
    """Every statement of ``papers/``, in reading order."""
    for topic in TOPICS:
        importlib.import_module(f"curvatlas.theory.papers.{topic}")
    order = list(TOPICS)
    return tuple(sorted(_registered.values(), key=lambda item: order.index(item.topic)))


def statements_by_paper_id() -> dict[str, tuple[Statement, ...]]:
    """Every numbered claim of the papers → the statements that test it, the leading one first."""
    table: dict[str, tuple[Statement, ...]] = {}
    for statement in all_statements():
        for paper_id in statement.papers:
            table[paper_id] = (*table.get(paper_id, ()), statement)
    return table


def find(name: str) -> Statement:
    """The statement called ``name``, or the leading one behind that number of a paper.

    ``find("layer-norm-hessian")`` and ``find("petrov-thm3")`` are the same statement. Raises
    ValueError with the three nearest names otherwise.
    """
    known = {paper_id: group[0] for paper_id, group in statements_by_paper_id().items()}
    known |= {statement.name: statement for statement in all_statements()}
    if name in known:
        return known[name]
    near = sorted(known, key=lambda n: SequenceMatcher(None, name, n).ratio(), reverse=True)[:3]
    raise ValueError(f"no statement is called {name!r}: try one of {', '.join(near)}.")


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


def outcome(
    figure: str,
    *,
    printed: bool,
    corrected: bool | None = None,
    numbers: Mapping[str, Any],
    series: Mapping[str, Any] | None = None,
) -> Outcome:
    """What a check measured, with the verdict that follows (``judge``)."""
    verdict = judge(printed=printed, corrected=corrected)
    return Outcome(verdict=verdict, figure=figure, numbers=dict(numbers), series=dict(series or {}))


def compared(rows: Rows, limit: float) -> Outcome:
    """Two ways to one quantity, row by row: every relative error lies below ``limit``."""
    errors = [[relative_error(formula, row[1]) for formula in (row[0], *row[2:])] for row in rows]
    printed = worst([row[0] for row in errors])
    corrected = [error for row in errors for error in row[1:]]
    numbers = {"error": printed, "comparisons": len(errors)}
    if not corrected:
        return outcome(
            f"largest relative error {printed:.0e} in {len(errors)} comparisons",
            printed=printed < limit,
            numbers=numbers,
        )
    return outcome(
        f"printed off by {min(row[0] for row in errors):.2g} to {printed:.2g}; corrected exact to "
        f"{worst(corrected):.0e}",
        printed=printed < limit,
        corrected=worst(corrected) < limit,
        numbers=numbers | {"corrected_error": worst(corrected)},
    )


def log_log(
    x: Sequence[float], curves: Mapping[str, Sequence[float]], xlabel: str, ylabel: str = ""
) -> dict[str, Any]:
    """What ``figures.theory.lines_figure`` draws on two logarithmic axes."""
    labels = {"xlabel": xlabel} | ({"ylabel": ylabel} if ylabel else {})
    return {"x": x, "curves": curves, "xscale": "log", "yscale": "log", **labels}


# ---- verification -----------------------------------------------------------------------------

_SHORT = {"holds": "holds", "holds corrected": "corrected", "false as printed": "FALSE"}


@dataclass(frozen=True, kw_only=True)
class Verification(Result):
    """What ``curvatlas verify`` measured: one entry a statement, in reading order."""

    entries: tuple[dict[str, Any], ...]
    full: bool
    seed: int
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether every measured verdict is the recorded one."""
        return all(entry["agrees"] for entry in self.entries)

    def listing(self) -> list[dict[str, Any]]:
        """The entries as JSON-ready values: ``name``, ``source``, ``verdict``, ``figure``, …"""
        plain = self.to_dict()["entries"]
        assert isinstance(plain, list)
        return plain

    def __str__(self) -> str:
        lines, topic = [], ""
        width = max(len(e["name"]) for e in self.entries)
        for entry in self.entries:
            if entry["topic"] != topic:
                topic = entry["topic"]
                lines.append(topic.replace("_", " "))
            mark = " " if entry["agrees"] else "!"
            verdict = _SHORT.get(entry["verdict"], entry["verdict"])
            lines.append(f"{mark} {entry['name']:<{width}}  {verdict:<9}  {entry['figure']}")
        counts = {v: sum(e["verdict"] == v for e in self.entries) for v in _SHORT}
        lines.append("")
        lines.append(
            f"{len(self.entries)} statements in {self.seconds:.0f} s: "
            + ", ".join(f"{count} {name}" for name, count in counts.items())
        )
        differ = [e["name"] for e in self.entries if not e["agrees"]]
        lines.append(
            "every verdict is the recorded one"
            if not differ
            else f"! {len(differ)} differ from the recorded verdict: {', '.join(differ)}"
        )
        return "\n".join(lines)


def run_verify(
    names: Sequence[str] = (),
    *,
    full: bool = False,
    seed: int = 0,
    output: str | Path | None = None,
    figures: bool = True,
) -> Verification:
    """Check the named statements (all by default) on this machine.

    ``full`` runs the large sweeps (2,000 random blocks and 50 ascents for the bounds). ``output``
    is a folder for ``verify.json`` and ``figures/*.png``.
    """
    chosen = [find(name) for name in names] if names else list(all_statements())
    folder = None if output is None else Path(output)
    entries = []
    started = time.perf_counter()
    with one_thread(), bar("verify", total=len(chosen)) as progress:
        for item in chosen:
            progress.set_postfix_str(item.name)
            entries.append(_entry(item, full=full, seed=seed, folder=folder if figures else None))
            progress.update(1)
    result = Verification(
        entries=tuple(entries), full=full, seed=seed, seconds=time.perf_counter() - started
    )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result.listing(), indent=1, ensure_ascii=False)
        (folder / "verify.json").write_text(text + "\n", encoding="utf-8")
    return result


def _entry(item: Statement, *, full: bool, seed: int, folder: Path | None) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        outcome = item.run(full=full, seed=seed)
    except (ArithmeticError, RuntimeError, ValueError) as error:  # a check that breaks has failed
        outcome = Outcome(
            verdict=UNCONFIRMED, figure=f"the check broke: {type(error).__name__}: {error}"
        )
    drawn = None
    if folder is not None and item.plot is not None and outcome.series:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        drawn = str(folder / "figures" / f"{item.name}.png")
        item.plot(outcome).savefig(drawn, dpi=130)
    texts = {f.name: getattr(item, f.name) for f in fields(item) if f.name not in ("check", "plot")}
    return texts | {
        "recorded": item.verdict,
        "verdict": outcome.verdict,
        "agrees": outcome.verdict == item.verdict,
        "figure": outcome.figure,
        "numbers": outcome.numbers,
        "picture": drawn,
        "seconds": time.perf_counter() - started,
    }


def describe(entry: dict[str, Any]) -> str:
    """One statement at length, for ``curvatlas verify NAME``."""
    rows = [
        ("source", entry["source"]),
        ("statement", entry["formula"]),
        ("assumptions", entry["assumptions"]),
        ("tested by", entry["tested_by"]),
        ("recorded", entry["recorded"]),
        ("measured", f"{entry['verdict']} ({entry['seconds']:.1f} s)"),
        ("figure", entry["figure"]),
        ("counterexample", entry["counterexample"]),
        ("derivation", entry["derivation"]),
        ("picture", entry["picture"] or ""),
    ]
    lines = [f"{entry['name']}: {entry['title']}"]
    lines += [f"  {label:<15}{value}" for label, value in rows if value]
    for key, value in entry["numbers"].items():
        lines.append(f"  {'number':<15}{key} = {_short(value)}")
    if not entry["agrees"]:
        lines.append("  ! the measured verdict differs from the recorded one")
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        shown = ", ".join(_short(v) for v in value[:8])
        return shown + (", …" if len(value) > 8 else "")
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_short(v)}" for k, v in value.items())
    return str(value)
