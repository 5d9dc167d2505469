"""Carry out a command's work in a run folder: resume, interrupt, report, answer; torchrun."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from curvatlas.cli.options import PageConsole

if TYPE_CHECKING:
    from curvatlas.budget import TimeUp
    from curvatlas.runs import LoadedRun, Run

OUT_OF_TIME = 3  # exit code: stopped by the time budget, resumable
INCOMPLETE = 4  # exit code: the page is written, some steps failed
_LARGEST_PRINTED = 512  # numbers of one tensor in the JSON answer
SHARING_COMMANDS = ("analyze",)  # commands that share their work; the others run in one process


def is_one_of_several() -> bool:
    """Whether torchrun (or a launcher made of it) started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def check_processes(arguments: Sequence[str]) -> None:
    """Refuse what several processes cannot share; silence all but the first one.

    The others print no results, bars and warnings; their errors are still said.
    """
    if not is_one_of_several():
        return
    command = next((word for word in arguments if not word.startswith("-")), None)
    if command is not None and command not in SHARING_COMMANDS:
        raise ValueError(
            f"{command} runs in one process: start it without torchrun (only "
            f"{', '.join(SHARING_COMMANDS)} shares its work)."
        )
    if os.environ.get("RANK") != "0":
        # for the rest of the process
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        warnings.simplefilter("ignore")


def join_group(device: str) -> str:
    """Join the group that torchrun has prepared, if any; gives the device of this process."""
    if not is_one_of_several():
        return device
    import torch
    import torch.distributed as dist

    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    return device


def leave_group() -> None:
    """Leave the group that ``join_group`` has joined."""
    if is_one_of_several() and "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


class Interrupted(Exception):
    """Ctrl-C, with the words that say how to resume. (typer swallows KeyboardInterrupt.)"""


def open_run(output: Path | None, options: Mapping[str, Any], **fingerprints: str) -> Run:
    """The folder the user named, or one named after what is computed: the same command resumes."""
    from curvatlas.runs.folder import SharedRun, default_folder

    folder = output or default_folder(options, **fingerprints)
    return SharedRun.create(folder, options=options, command=_command_line(folder), **fingerprints)


def carry_out(run: Run, work: Callable[[], None], console: PageConsole) -> None:
    """Do the work, write the report, print the answer; leave a resumable run when stopped."""
    from curvatlas import parallel, runs

    stopped = finish(run, work)
    if parallel.rank() == 0:
        loaded = runs.load(run.path)
        console.end(_as_json(loaded), loaded.findings, loaded.report)
    if stopped is not None:
        print(f"curvatlas: {_how_to_resume(run, str(stopped))}", file=sys.stderr)
        raise typer.Exit(OUT_OF_TIME)
    failures = run.manifest.failures
    if failures:
        steps = "1 step" if len(failures) == 1 else f"{len(failures)} steps"
        told = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        print(f"curvatlas: {steps} failed, the page has the others. {told}", file=sys.stderr)
        raise typer.Exit(INCOMPLETE)


def finish(run: Run, work: Callable[[], None]) -> TimeUp | None:
    """Do the work and write the report; returns what ended it early, if the time was used up."""
    from curvatlas import surveying

    try:
        return surveying.finish(run, work)
    except KeyboardInterrupt:
        raise Interrupted(_how_to_resume(run, "interrupted")) from None


def _how_to_resume(run: Run, reason: str) -> str:
    count = len(run.manifest.steps)
    command = shlex.join(_command_line(run.path))
    return f"{reason}: {count} results are kept in {run.path}. Resume with: {command}"


def _command_line(output: Path) -> list[str]:
    words = sys.argv[1:]
    named = any(w in ("--output", "-o") or w.startswith(("--output=", "-o")) for w in words)
    return ["curvatlas", *words, *([] if named else ["--output", str(output)])]


def _as_json(loaded: LoadedRun) -> dict[str, Any]:
    from curvatlas.results import brief

    return {
        "run": str(loaded.path),
        "report": str(loaded.report),
        "status": loaded.status,
        "findings": loaded.findings.split("\n") if loaded.findings else [],
        "warnings": list(loaded.warnings),
        "failures": dict(loaded.failures),
        "results": {n: brief(r, largest=_LARGEST_PRINTED) for n, r in loaded.results.items()},
    }
