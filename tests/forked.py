"""Processes of a test, forked from one that has imported torch and curvatlas and done no more.

A new interpreter spends about three seconds of processor time on those imports, a fork of the
server almost none. The server runs no test: a child begins as a new interpreter would after its
imports, with no graph, thread or random number of the tests around it. Where the start of the
interpreter is itself the subject (what an import loads, what it takes of memory), a test starts
one.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

_IMPORTED = (
    "torch", "torch.func", "torch._dynamo", "torch.distributed.fsdp", "scipy.stats",
    "matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg",
    "curvatlas.surveying", "curvatlas.cli.execution", "curvatlas.cli.inputs",
    "curvatlas.report.page", "forked",
)  # fmt: skip


def server() -> ForkServerContext:
    """Where processes are forked; started at the first use in this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context


def ranks(worker: Callable[..., Any], arguments: Sequence[Any], *, join: bool = True) -> Any:
    """``worker(rank, *arguments)`` in two processes, as ``torch.multiprocessing.spawn``."""
    server()
    return mp.start_processes(
        worker, args=tuple(arguments), nprocs=2, join=join, start_method="forkserver"
    )


class Forked:
    """A running ``python script arguments`` or ``python -m module arguments``."""

    def __init__(
        self,
        program: str | Path,
        *arguments: object,
        cwd: Path,
        path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,  # beside that of the server
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name, name) for name in ("out", "err")]
        words = [str(program), *map(str, arguments)]
        self.words = words
        places = [*map(str, path), *sys.path]
        self.process: ForkServerProcess = server().Process(
            target=_run,
            args=(words, str(cwd), places, list(map(str, self._streams)), dict(environment or {})),
        )
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def running(self) -> bool:
        return self.process.exitcode is None

    def finished(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait for its end: exit code, out and err."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(self.words, timeout)
        out, err = (stream.read_text(encoding="utf-8") for stream in self._streams)
        self._folder.cleanup()
        return subprocess.CompletedProcess(self.words, self.process.exitcode, out, err)


def _run(
    words: list[str], cwd: str, path: list[str], streams: list[str], environment: dict[str, str]
) -> None:
    """What the child does; an exception or ``sys.exit`` ends it as it ends an interpreter."""
    for number, stream in enumerate(streams, start=1):
        file = os.open(stream, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.update(environment)
    gc.freeze()  # what the server has imported is shared with it as long as nobody walks over it
    # A shell starts background jobs, and so their children, deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv, sys.path[:] = words, path
    if words[0].endswith(".py"):
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.path.insert(0, cwd)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
