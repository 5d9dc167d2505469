"""``curvatlas report RUN``: the page of a run folder, or two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvatlas.cli.options import AsJson, Debug, Quiet, Verbose

# -------------------------------------------------------------------------------------------------
# ``curvatlas check RUN``: whether a run folder is whole, and its repair.
# -------------------------------------------------------------------------------------------------


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
    from curvatlas.cli.options import Console

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    seen = runs.repair(run) if repair else runs.check(run)
    console.answer({**seen.to_dict(), "whole": seen.whole}, seen)
    if not seen.whole:
        raise typer.Exit(1)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE|DIR", help="Where to write (default: into the run)."
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Compare with this run instead.")
    ] = None,
    figures: Annotated[
        bool, typer.Option("--figures", help="Also write PNG and SVG figures for papers.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Write the self-contained HTML page of a run, from its numbers alone."""
    from curvatlas import runs
    from curvatlas.cli.options import Console
    from curvatlas.report.html import write_report

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    loaded = runs.load(run)
    if against is not None:
        comparison = runs.compare(loaded, runs.load(against))
        console.answer(comparison.to_dict(), comparison)
        return
    page = write_report(loaded, output, figures=figures)
    answer = {"run": str(loaded.path), "report": str(page), "bytes": page.stat().st_size}
    console.answer(answer, f"report: {page}")
