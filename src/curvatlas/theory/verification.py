"""Run the statements, compare verdicts with the recorded ones, write what was measured."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curvatlas.progress import bar
from curvatlas.results import Result
from curvatlas.theory.statements import UNCONFIRMED, Outcome, Statement, all_statements, find
from curvatlas.threads import one_thread

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
    is a folder for ``verify.json`` and ``figures/*.png``; without matplotlib no figure is drawn.
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
        drawn = _draw(item, outcome, folder / "figures")
    return {
        "name": item.name,
        "topic": item.topic,
        "source": item.source,
        "title": item.title,
        "formula": item.formula,
        "assumptions": item.assumptions,
        "tested_by": item.tested_by,
        "recorded": item.verdict,
        "verdict": outcome.verdict,
        "agrees": outcome.verdict == item.verdict,
        "figure": outcome.figure,
        "numbers": outcome.numbers,
        "counterexample": item.counterexample,
        "derivation": item.derivation,
        "picture": drawn,
        "seconds": time.perf_counter() - started,
    }


def _draw(item: Statement, outcome: Outcome, folder: Path) -> str | None:
    """Save the statement's picture; None when matplotlib is not installed."""
    assert item.plot is not None
    try:
        figure = item.plot(outcome)
    except ImportError:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{item.name}.png"
    figure.savefig(path, dpi=130)
    return str(path)


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
