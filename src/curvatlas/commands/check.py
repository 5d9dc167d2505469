"""``curvatlas check RUN``: whether a run folder is whole, and its repair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvatlas.commands.options import AsJson, Debug, Quiet, Verbose


def check(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Remove left-overs, go back to the state before a damaged one, drop damaged "
            "results so that a resume computes them again.",
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Verify manifest, results, checkpoints, checksums and left-overs of a run.

    Exit codes: 0 the run is whole (after --repair: again), 1 something is wrong, 2 the folder is
    no run, of a newer version, or, with --repair, being written by another process.
    """
    from curvatlas import runs
    from curvatlas.commands.console import Console

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    seen = runs.repair(run) if repair else runs.check(run)
    console.answer({**seen.to_dict(), "whole": seen.whole}, seen)
    if not seen.whole:
        raise typer.Exit(1)
