"""Carry out a command's work in a run folder: resume, interrupt, report, answer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from curvatlas import parallel, runs
from curvatlas.budget import give_back
from curvatlas.commands.budgets import Interrupted, TimeUp
from curvatlas.commands.console import Console
from curvatlas.results import brief
from curvatlas.runs import LoadedRun, Run
from curvatlas.runs.folder import EFFORT
from curvatlas.runs.shared import SharedRun

OUT_OF_TIME = 3  # exit code: stopped by the time budget, resumable
_LARGEST_PRINTED = 512  # numbers of one tensor in the JSON answer


def open_run(
    command: str,
    output: Path | None,
    *,
    options: Mapping[str, Any],
    model_fingerprint: str = "",
    data_fingerprint: str = "",
) -> Run:
    """The folder the user named, or one named after what is computed: the same command resumes."""
    if output is None:
        decisive = {key: value for key, value in options.items() if key != EFFORT}
        told = json.dumps([decisive, model_fingerprint, data_fingerprint], sort_keys=True)
        digest = hashlib.sha256(told.encode()).hexdigest()
        output = Path("curvatlas-runs") / f"{command}-{digest[:8]}"
    return SharedRun.create(
        output,
        options=options,
        model_fingerprint=model_fingerprint,
        data_fingerprint=data_fingerprint,
        command=_command_line(output),
    )


def carry_out(run: Run, work: Callable[[], None], console: Console) -> None:
    """Do the work, write the report, print the answer; leave a resumable run when stopped."""
    stopped = finish(run, work)
    if parallel.rank() == 0:
        page = run.path / "report.html"
        console.answer(_as_json(runs.load(run.path), page), f"report: {page}")
    if stopped is not None:
        print(f"curvatlas: {_how_to_resume(run, str(stopped))}", file=sys.stderr)
        raise typer.Exit(OUT_OF_TIME)


def finish(run: Run, work: Callable[[], None]) -> TimeUp | None:
    """Do the work and write the report; returns what ended it early, if the time was used up."""
    from curvatlas.report.html import write_report

    stopped: TimeUp | None = None
    try:
        with run:
            work()
    except TimeUp as error:
        stopped = error
    except KeyboardInterrupt:
        raise Interrupted(_how_to_resume(run, "interrupted")) from None

    def report() -> None:
        if parallel.rank() > 0:
            return
        give_back()
        loaded = runs.load(run.path)
        write_report(loaded)
        if importlib.util.find_spec("matplotlib") is not None:
            from curvatlas.report.paper import MAIN, write_figures

            write_figures(loaded, run.path / "figures", kinds=MAIN)

    parallel.together(report)
    return stopped


def _how_to_resume(run: Run, reason: str) -> str:
    count = len(run.manifest.steps)
    command = shlex.join(_command_line(run.path))
    return f"{reason}: {count} results are kept in {run.path}. Resume with: {command}"


def _command_line(output: Path) -> list[str]:
    given = sys.argv[1:]
    named = any(a in ("--output", "-o") or a.startswith(("--output=", "-o")) for a in given)
    return ["curvatlas", *given, *([] if named else ["--output", str(output)])]


def _as_json(loaded: LoadedRun, page: Path) -> dict[str, Any]:
    return {
        "run": str(loaded.path),
        "report": str(page),
        "status": loaded.status,
        "warnings": list(loaded.warnings),
        "results": {n: brief(r, largest=_LARGEST_PRINTED) for n, r in loaded.results.items()},
    }
