"""The page of a run: which sections in which order, and the files that are written."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from curvatlas.analysis.diagnostics import Advice
from curvatlas.display import drawing_of
from curvatlas.files import write_bytes
from curvatlas.report import experiments
from curvatlas.report.comparing import Comparison
from curvatlas.report.findings import conditions
from curvatlas.report.layout import (
    Account,
    Card,
    Fold,
    Page,
    Verdict,
    attempted,
    rows_of,
    table,
)
from curvatlas.report.paper import write_figures
from curvatlas.report.reading import MEASURED, Stage, sentence, stages_of
from curvatlas.report.survey import survey
from curvatlas.report.words import listed, shown
from curvatlas.results import Result
from curvatlas.runs.loading import FINDINGS, LoadedRun, load
from curvatlas.runs.manifest import Manifest
from curvatlas.runs.subject import TrainedWeights
from curvatlas.spectra.estimate import Estimate
from curvatlas.training.snapshot import CurvatureHistory

_CARDS, _PICTURES = 5, 3  # on the first screen
_MISSED = 0.06  # above this the bound on an overlooked eigenvalue is worth a word
_MOST_RESULTS, _MOST_LINES = 200, 12  # that are shown as they print themselves


def write_report(
    run: LoadedRun | str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    figures: bool = False,
) -> Path:
    """Write the page of a run; returns where it is.

    ``output``: a file ending in .html, or a folder (default: the run's own), in which the page is
    called report.html. ``figures``: also PNG and SVG figures for papers, in ``figures/`` beside it.
    In the run's own folder its findings stand in findings.txt too, and its tables in ``tables/``.
    """
    loaded = run if isinstance(run, LoadedRun) else load(run)
    target = loaded.path if output is None else Path(output)
    if target.suffix.lower() not in (".html", ".htm"):
        target = target / "report.html"
    page = page_of(loaded)
    write_bytes(target, page.html().encode("utf-8"))
    if output is None:
        write_bytes(loaded.path / FINDINGS, "\n".join(page.lines()).encode("utf-8"))
        for name, content in _spreadsheets(page):
            write_bytes(loaded.path / "tables" / f"{name}.csv", content)
    if figures:
        write_figures(page, target.parent / "figures")
    return target


def training_page(history: CurvatureHistory, output: str | os.PathLike[str]) -> Path:
    """The page of a monitored training that has no run folder; returns where it is.

    One HTML file that works from disk: curves, events, and the maps over the steps. With maps at
    two steps or more it says whether early dominant blocks predict movement.
    """
    if len(history.snapshots) < 2:
        raise ValueError("a page of training needs at least two snapshots.")
    results: dict[str, Result] = {"dynamics": history}
    with contextlib.suppress(ValueError):  # no maps, or too few blocks for a rank correlation
        results["early_blocks"] = history.early_blocks()
    accounts, faults = attempted(experiments.accounts(results))
    page = _assembled(
        "Curvature over training", "", accounts, folds=(), warnings=faults, urgent=False
    )
    target = Path(output)
    write_bytes(target, page.html().encode("utf-8"))
    return target


def page_of(run: LoadedRun) -> Page:
    """What the page of a run says."""
    stages = stages_of(run.results)
    accounts, faults = attempted([*experiments.accounts(run.results), lambda: survey(stages)])
    subjects = [stage.subject for stage in stages if stage.subject is not None]
    command = run.manifest.options.get("command")
    title = f"Results of curvatlas {command}" if command else "Results of a run"
    state = list(_state(run.manifest))
    return _assembled(
        f"Curvature of {subjects[0].name}" if subjects else title,
        sentence(stages),
        accounts,
        folds=(*_others(run.results), _printed(run.results), _computed(run.manifest, stages)),
        warnings=[*state, *faults, *run.manifest.warnings, *_cautions(run.results)],
        urgent=bool(state or faults),
    )


def comparison_page(comparison: Comparison, states: Sequence[Stage], last: LoadedRun) -> Page:
    """States side by side: the page of a run whose stages they are."""
    accounts, faults = attempted(
        [lambda: survey(states, same_data=comparison.same_data, comparison=comparison)]
    )
    return _assembled(
        f"Comparison of {listed(comparison.states)}",
        sentence(states),
        accounts,
        folds=(_computed(last.manifest, states),),
        warnings=faults,
        urgent=bool(faults),
    )


def _assembled(
    title: str,
    subject: str,
    accounts: Sequence[Account],
    *,
    folds: Sequence[Fold],
    warnings: Sequence[str],
    urgent: bool,
) -> Page:
    """The first account with a verdict gives it, the first with pictures the first screen's.

    Cards come in the order of the accounts; the pictures of other accounts go to their sections.
    """
    verdicts = [account.verdict for account in accounts if account.verdict is not None]
    verdicts += [Verdict("unsure", one.answer) for account in accounts for one in account.sections]
    drawn = [account for account in accounts if account.pictures]
    by_title: dict[str, Card] = {}  # two accounts may find the same: the first one says it
    for card in (card for account in accounts for card in account.cards):
        by_title.setdefault(card.title, card)
    sections = []
    for account in accounts:
        for place, one in enumerate(account.sections):
            later = place == 0 and account in drawn[1:] and one.picture is None
            sections.append(replace(one, picture=account.pictures[0]) if later else one)
    return Page(
        title=title,
        subject=subject,
        verdict=verdicts[0] if verdicts else None,
        cards=tuple(by_title.values())[:_CARDS],
        pictures=drawn[0].pictures[:_PICTURES] if drawn else (),
        sections=tuple(sections),
        folds=tuple(folds),
        warnings=tuple(warnings),
        urgent=urgent,
    )


# --- what folds away ------------------------------------------------------------------------------


def _state(manifest: Manifest) -> Iterator[str]:
    if manifest.status != "complete":
        error = f" ({manifest.error})" if manifest.error else ""
        yield f"This run is {manifest.status}{error}: what is missing was not computed."
    for name, reason in manifest.failures.items():
        yield f"{name} failed: {reason}"


def _cautions(results: Mapping[str, Result]) -> Iterator[str]:
    """Estimates that did not reach what was asked."""
    for name, result in results.items():
        if getattr(result, "converged", None) is False:
            if isinstance(result, Estimate):
                yield (
                    f"{name} is known to ± {result.error:.2g} only: its products are spent (more "
                    "with --products). Its interval holds."
                )
            else:
                yield f"{name} did not converge within its budget."
        missed = getattr(result, "missed_probability", None)
        if isinstance(missed, float) and missed > _MISSED:
            yield (
                f"{name}: the chance that an eigenvalue further out was overlooked is bounded only "
                f"by {missed:.0%}."
            )


def _others(results: Mapping[str, Result]) -> Iterator[Fold]:
    """Picture and table of results that no section speaks of."""
    for name, result in list(results.items())[:_MOST_RESULTS]:
        trace = isinstance(result, Estimate) and result.quantity == "trace"
        silent = (Advice, TrainedWeights, *(k for k in MEASURED if k is not Estimate))
        if trace or result.kind in experiments.SECTIONS or isinstance(result, silent):
            continue
        picture = drawing_of(type(result)) is not None
        rows = rows_of(result)
        yield Fold(
            title=name.replace(".", ", ").replace("_", " "),
            pictures=(experiments.picture_of(result),) if picture else (),
            tables=(rows,) if rows is not None else (),
        )


def _printed(results: Mapping[str, Result]) -> Fold:
    """Every result as it prints itself in a terminal."""
    told = []
    for name, result in list(results.items())[:_MOST_RESULTS]:
        lines = str(result).split("\n")
        more = [f"… {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
        told.append("\n  ".join([name, *lines[:_MOST_LINES], *more]))
    return Fold(title=f"Every result as it prints itself ({len(results)})", code="\n".join(told))


def _computed(manifest: Manifest, stages: Sequence[Stage]) -> Fold:
    """How the numbers were made, and how to make them again."""
    subjects = [stage.subject for stage in stages if stage.subject is not None]
    text = []
    if subjects:
        first = subjects[0]
        batches = f"{first.batches} batch{'es' if first.batches != 1 else ''}"
        text.append(
            f"The mean loss over {first.targets:,.0f} targets in {batches}, in {first.dtype} on "
            f"{first.device}."
        )
        text += [f"Products with H: {first.engine}."] if first.engine else []
    text += [line for stage in stages for line in conditions(stage.advice)]
    text.append("The same command on the same machine gives the same numbers.")
    settings = {
        **{f"option {key}": value for key, value in manifest.options.items()},
        "curvatlas": manifest.version,
        **manifest.environment,
        **{f"{key} fingerprint": value for key, value in manifest.fingerprints.items() if value},
        "started": manifest.created,
        "last written": manifest.updated,
    }
    steps = [[name, step.kind, f"{step.seconds:.2f}"] for name, step in manifest.steps.items()]
    rows = [[key, shown(value)] for key, value in settings.items()]
    tables = [
        table("Steps and their time", ["step", "result", "seconds"], steps),
        table("Settings and versions", ["setting", "value"], rows),
    ]
    return Fold(
        title="How this was computed, and how to repeat it",
        text=tuple(text),
        code=shlex.join(manifest.command) if manifest.command else "(run from Python)",
        tables=tuple(one for one in tables if one is not None),
    )


# --- tables as files ------------------------------------------------------------------------------


def _spreadsheets(page: Page) -> Iterator[tuple[str, bytes]]:
    """Every table of every section, with what folds away, as CSV."""
    for section in page.sections:
        folded = [one for fold in section.folds for one in fold.tables]
        tables = [*([section.table] if section.table is not None else []), *folded]
        for index, one in enumerate(tables):
            buffer = io.StringIO()
            writer = csv.writer(buffer)
            writer.writerows([_inert(cell) for cell in row] for row in (one.head, *one.rows))
            name = section.key + (f"-{index + 1}" if index else "")
            yield name, buffer.getvalue().encode("utf-8-sig")


def _inert(cell: str) -> str:
    """No cell is a formula, whatever a name may hold."""
    return f"'{cell}" if cell[:1] in ("=", "@", "\t", "\r") or cell[:2] in ("+c", "-c") else cell
