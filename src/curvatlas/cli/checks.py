"""Commands that check and show: ``verify``, ``report``, ``compare``, ``check``, ``doctor`` …"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from curvatlas.cli.options import Console, Output, PageConsole, Seed

if TYPE_CHECKING:
    from curvatlas.runs import LoadedRun
    from curvatlas.theory.statements import Verification

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


def verify(
    *,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Statements; all by default.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Run the large sweeps (about an hour).")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Only list the statements.")] = False,
    output: Output = None,
    seed: Seed = 0,
    console: Console,
) -> None:
    """Check every theorem, bound and claim; exit 1 if a verdict differs from the recorded one.

    All statements together write verify.json and figures to curvatlas-runs/verify; with --output
    the run is resumable as well, and its folder gets a report.
    """
    from curvatlas import theory
    from curvatlas.theory.statements import describe, run_verify

    chosen = [theory.find(name) for name in names] if names else list(theory.all_statements())
    if listing:
        rows = [{"name": s.name, "source": s.source, "title": s.title} for s in chosen]
        console.answer(rows, "\n".join(f"{s.name}: {s.title} ({s.source})" for s in chosen))
        return
    chosen_names = [statement.name for statement in chosen]
    folder = output
    if output is not None:
        result = _verify_in_a_run(chosen_names, output, full=full, seed=seed)
    else:
        # Measured anew every time: a verdict of yesterday's machine is not this machine's.
        folder = None if names else Path("curvatlas-runs") / "verify"
        result = run_verify(chosen_names, full=full, seed=seed, output=folder)
    text = "\n\n".join(describe(entry) for entry in result.entries) if names else str(result)
    text += "" if folder is None else f"\nnumbers and figures: {folder}"
    console.answer(result.listing(), text)
    if not result.agrees:
        raise typer.Exit(1)


def _verify_in_a_run(names: list[str], output: Path, *, full: bool, seed: int) -> Verification:
    """One step a statement: what a killed run has measured is not measured again."""
    from curvatlas.cli.execution import finish, open_run
    from curvatlas.files import write_json
    from curvatlas.progress import track
    from curvatlas.theory.statements import Verification, run_verify

    options = {"command": "verify", "names": names, "full": full, "seed": seed}
    run = open_run(output, options)
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


def report(
    *,
    run: RunFolder,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE|DIR", help="Where to write (default: into the run)."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Write the page that compares it with this run."),
    ] = None,
    figures: Annotated[
        bool, typer.Option("--figures", help="Also write PNG and SVG figures for papers.")
    ] = False,
    console: PageConsole,
) -> None:
    """Write the self-contained HTML page of a run, from its numbers alone."""
    from curvatlas import runs
    from curvatlas.report.page import write_report

    loaded = runs.load(run)
    if against is not None:
        _answer_comparison([runs.load(against), loaded], output or loaded.path, console)
        return
    page = write_report(loaded, output, figures=figures)
    answer = {"run": str(loaded.path), "report": str(page), "bytes": page.stat().st_size}
    console.end(answer, loaded.findings if output is None else "", page)


def compare(
    *,
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders; one with two stages is enough."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE|DIR", help="Where to write (default: into the last)."
        ),
    ] = None,
    console: PageConsole,
) -> None:
    """Compare runs side by side, in order of time: what changed, and whether it is real."""
    from curvatlas import runs

    loaded = [runs.load(folder) for folder in folders]
    _answer_comparison(loaded, output or loaded[-1].path, console)


def _answer_comparison(loaded: list[LoadedRun], output: Path, console: PageConsole) -> None:
    from curvatlas.report.comparing import compare as compare_runs

    comparison = compare_runs(loaded, output=output)
    console.answer(comparison.to_dict(), comparison)
    if comparison.page is not None:
        console.show(Path(comparison.page))


def check(
    *,
    run: RunFolder,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Remove left-overs, go back to the state before a damaged one, drop damaged "
            "results so that a resume computes them again.",
        ),
    ] = False,
    console: Console,
) -> None:
    """Verify manifest, results, checkpoints, checksums and left-overs of a run.

    Exit codes: 0 the run is whole (after --repair: again), 1 something is wrong, 2 the folder is
    no run, of a newer version, or, with --repair, being written by another process.
    """
    from curvatlas import runs

    seen = runs.repair(run) if repair else runs.check(run)
    console.answer({**seen.to_dict(), "whole": seen.whole}, seen)
    if not seen.whole:
        raise typer.Exit(1)


def bench(
    *,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the GPT.")] = 4,
    width: Annotated[int, typer.Option(min=4, help="Width of the GPT, in fours.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are printed.")] = 5,
    seed: Seed = 0,
    console: Console,
) -> None:
    """Time products with H, H_o and H_f of a GPT, alone and by eight, in gradients.

    Every product stands between two gradients, so that other work on the machine cancels. The
    comparison with other libraries is in the repository's benchmarks folder (make bench).
    """
    if width % 4:
        raise ValueError(f"--width must be a multiple of its 4 heads, got {width}.")
    from curvatlas.cli.machine import describe_timing, measure

    findings = measure(layers=layers, width=width, rounds=rounds, seed=seed)
    console.answer(findings, describe_timing(findings))


def doctor(*, console: Console) -> None:
    """Print versions, kernels and guards, and test second derivatives through LayerNorm."""
    from curvatlas.cli.machine import checkup, describe_checkup

    findings = checkup()
    console.answer(findings, describe_checkup(findings))
    if not findings["healthy"]:
        raise typer.Exit(1)
