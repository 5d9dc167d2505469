"""``curvatlas verify``: every theorem of the sources, measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvatlas.commands.options import AsJson, Debug, Quiet, Seed, Verbose

_DEFAULT = Path("curvatlas-runs/verify")


def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Statements; all by default.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Run the large sweeps (about an hour).")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", show_default=str(_DEFAULT),
            help="Folder for verify.json and the figures.",
        ),
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Check every theorem, bound and claim; exit 1 if a verdict differs from the recorded one."""
    from curvatlas.commands.console import Console
    from curvatlas.theory.verification import describe, run_verify

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    folder = output if output is not None else _DEFAULT
    result = run_verify(tuple(names or ()), full=full, seed=seed, output=folder)
    text = "\n\n".join(describe(e) for e in result.entries) if names else str(result)
    console.answer(result.listing(), text)
    console.say(f"written to {folder}")
    if not result.agrees:
        raise typer.Exit(1)
