"""``curvatlas verify``: every theorem of the sources, measured on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from curvatlas.cli.options import AsJson, Debug, Output, Quiet, Seed, Verbose

if TYPE_CHECKING:
    from curvatlas.theory.statements import Verification


def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Statements; all by default.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Run the large sweeps (about an hour).")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Only list the statements.")] = False,
    output: Output = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Check every theorem, bound and claim; exit 1 if a verdict differs from the recorded one.

    All statements together write verify.json and figures to curvatlas-runs/verify; with --output
    the run is resumable as well, and its folder gets a report.
    """
    from curvatlas import theory
    from curvatlas.cli.options import Console
    from curvatlas.theory.statements import describe, run_verify

    console = Console(as_json=as_json, quiet=quiet, verbose=verbose)
    chosen = [theory.find(name) for name in names] if names else list(theory.all_statements())
    if listing:
        rows = [{"name": s.name, "source": s.source, "title": s.title} for s in chosen]
        console.answer(rows, "\n".join(f"{s.name}: {s.title} ({s.source})" for s in chosen))
        return
    wanted = [statement.name for statement in chosen]
    folder = output
    if output is not None:
        result = _in_a_run(wanted, output, full=full, seed=seed)
    else:
        # Measured anew every time: a verdict of yesterday's machine is not this machine's.
        folder = None if names else Path("curvatlas-runs") / "verify"
        result = run_verify(wanted, full=full, seed=seed, output=folder)
    text = "\n\n".join(describe(entry) for entry in result.entries) if names else str(result)
    text += "" if folder is None else f"\nnumbers and figures: {folder}"
    console.answer(result.listing(), text)
    if not result.agrees:
        raise typer.Exit(1)


def _in_a_run(names: list[str], output: Path, *, full: bool, seed: int) -> Verification:
    """One step a statement: what a killed run has measured is not measured again."""
    from curvatlas.cli.execution import finish, open_run
    from curvatlas.files import write_json
    from curvatlas.progress import track
    from curvatlas.theory.statements import Verification, run_verify

    options = {"command": "verify", "names": names, "full": full, "seed": seed}
    run = open_run("verify", output, options=options)
    parts: list[Verification] = []

    def work() -> None:
        for name in track(names, "statements", total=len(names)):
            measure = partial(run_verify, [name], full=full, seed=seed, output=run.path)
            parts.append(run.step(f"statement.{name}", measure))

    finish(run, work)
    result = Verification(
        entries=tuple(entry for part in parts for entry in part.entries),
        full=full,
        seed=seed,
        seconds=sum(part.seconds for part in parts),
    )
    write_json(run.path / "verify.json", result.listing())
    return result
