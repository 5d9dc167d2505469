"""Carry out a command's work in a run folder: resume, interrupt, report, answer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import typer

from curvatlas import files, parallel, runs
from curvatlas.budget import give_back
from curvatlas.cli.options import Console, Interrupted, TimeUp
from curvatlas.results import Result, brief, parse
from curvatlas.runs import LoadedRun, loading
from curvatlas.runs import manifest as manifests
from curvatlas.runs.folder import EFFORT, Run
from curvatlas.runs.manifest import FolderLock, Manifest, StepEntry

# -------------------------------------------------------------------------------------------------
# A run that several processes carry out together: the first has the folder, the others follow.
# -------------------------------------------------------------------------------------------------


R = TypeVar("R", bound=Result)


class SharedRun(Run):
    """``Run`` in every process of a group; only the first one reads and writes the folder.

    All call the same steps in the same order. An error of the first one, a full disk for example,
    stops all of them.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: FolderLock | None) -> None:
        self.path, self.manifest = path, manifest
        self._first = lock is not None
        if lock is not None:
            super().__init__(path, manifest, lock)

    @classmethod
    def create(cls, path: str | os.PathLike[str], **options: Any) -> Run:
        """``Run.create``, by the first process of several."""
        if parallel.world_size() == 1:
            return Run.create(path, **options)
        opened = parallel.together(
            lambda: Run.create(path, **options) if parallel.rank() == 0 else None
        )
        if opened is not None:
            told = {"path": str(opened.path), "manifest": opened.manifest.to_json()}
            parallel.from_first(json.dumps(told).encode())
            return cls(opened.path, opened.manifest, opened._lock)
        heard = json.loads(parallel.from_first(b""))
        manifest = manifests.parse(heard["manifest"], "the first process's manifest")
        return cls(Path(heard["path"]), manifest, None)

    def step(self, name: str, function: Callable[[], R], *, spends: Sequence[str] = ()) -> R:
        """The result called ``name``, computed by all together, or told by the first process."""
        if name in self.manifest.steps:
            return cast("R", self._told(name))
        compute = super().step
        return parallel.together(lambda: compute(name, function, spends=spends))

    def _told(self, name: str) -> Result:
        def read() -> tuple[Result, bytes] | None:
            if not self._first:
                return None
            result = loading.read_result(self.path, name, self.manifest)
            file = self.path / loading.RESULTS / f"{name}.safetensors"
            return result, bytes(files.read(file))

        stored = parallel.together(read)
        content = parallel.from_first(b"" if stored is None else stored[1])
        return parse(bytearray(content), name) if stored is None else stored[0]

    def close(self, status: manifests.Status = "complete", error: str | None = None) -> None:
        if self._first:
            super().close(status, error)

    def _store(self, name: str, result: Result, seconds: float, effort: dict[str, Any]) -> None:
        if self._first:
            super()._store(name, result, seconds, effort)
            return
        entry = StepEntry(kind=result.kind, sha256="", json_sha256="", seconds=seconds)
        self._write_manifest(steps={**self.manifest.steps, name: entry})

    def _write_manifest(self, **changes: Any) -> None:
        if self._first:
            super()._write_manifest(**changes)
        else:
            self.manifest = self.manifest.changed(**changes)


# -------------------------------------------------------------------------------------------------
# A command started by torchrun: its processes compute together, the first writes and prints.
# -------------------------------------------------------------------------------------------------


TOGETHER = ("analyze",)  # commands that share their work; the others run in one process


def several() -> bool:
    """Whether torchrun (or a launcher made of it) started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def begin(arguments: Sequence[str]) -> None:
    """Refuse what several processes cannot share; silence all but the first one.

    The others print no results, bars and warnings; their errors are still said.
    """
    if not several():
        return
    command = next((word for word in arguments if not word.startswith("-")), None)
    if command is not None and command not in TOGETHER:
        raise ValueError(
            f"{command} runs in one process: start it without torchrun (only "
            f"{', '.join(TOGETHER)} shares its work)."
        )
    if os.environ.get("RANK") != "0":
        # for the rest of the process
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        warnings.simplefilter("ignore")


def join(device: str) -> str:
    """Join the group that torchrun has prepared, if any; gives the device of this process."""
    if not several():
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


def leave() -> None:
    """Leave the group that ``join`` has joined."""
    if several() and "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


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
