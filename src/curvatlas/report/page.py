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
    Picture,
    Section,
    Table,
    attempted,
    rows_of,
    table,
)
from curvatlas.report.reading import MEASURED, Stage, sentence, stages_of
from curvatlas.report.survey import survey
from curvatlas.report.words import capitalised, listed, number, with_interval
from curvatlas.results import Result
from curvatlas.runs.loading import FINDINGS, LoadedRun, load
from curvatlas.runs.manifest import Manifest
from curvatlas.runs.subject import TrainedWeights
from curvatlas.spectra.estimate import Estimate
from curvatlas.training.snapshot import CurvatureHistory

_CARDS, _PICTURES = 5, 3  # on the first screen
_MISSED = 0.06  # above this the bound on an overlooked eigenvalue is worth a word
_MOST_OTHERS = 40  # results of unknown kinds that are written out


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
        from curvatlas.report.paper import write_figures

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
    title = f"Curvature of {subjects[0].name}" if subjects else _title(run)
    state = list(_state(run.manifest))
    return _assembled(
        title,
        sentence(stages),
        accounts,
        folds=(*_trials(stages), *_others(run.results), *_computed(run.manifest, stages)),
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
        folds=tuple(_computed(last.manifest, states)),
        warnings=faults,
        urgent=bool(faults),
    )


def _title(run: LoadedRun) -> str:
    command = run.manifest.options.get("command")
    return f"Results of curvatlas {command}" if isinstance(command, str) else "Results of a run"


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
    drawn = [account for account in accounts if account.pictures]
    by_title: dict[str, Card] = {}  # two accounts may find the same: the first one says it
    for card in (card for account in accounts for card in account.cards):
        by_title.setdefault(card.title, card)
    sections = [s for one in accounts for s in _with_picture(one, later=one in drawn[1:])]
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


def _with_picture(account: Account, *, later: bool) -> tuple[Section, ...]:
    """The sections; the first one with the account's picture, where it is on no first screen."""
    if not later or not account.sections or account.sections[0].picture is not None:
        return account.sections
    first, *others = account.sections
    return replace(first, picture=account.pictures[0]), *others


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
    """Results that no section speaks of: what they print, their picture and their table."""
    spoken = (*MEASURED, Advice)
    left = {
        name: result
        for name, result in results.items()
        if (result.kind not in experiments.ACCOUNTS and not isinstance(result, spoken))
        or (isinstance(result, Estimate) and result.quantity != "trace")
    }
    for name, result in list(left.items())[:_MOST_OTHERS]:
        shown = result.history if isinstance(result, TrainedWeights) else result
        text = str(shown).split("\n")
        rows = rows_of(shown) if not isinstance(result, TrainedWeights) else None
        kept = rows if rows is not None and len(rows.rows) <= _MOST_OTHERS else None
        yield Fold(
            title=f"{name.replace('.', ', ').replace('_', ' ')}",
            text=tuple(text[:8]),
            pictures=(_drawn(name, shown),) if drawing_of(type(shown)) is not None else (),
            tables=(kept,) if kept is not None else (),
        )
    if len(left) > _MOST_OTHERS:
        names = list(left)[_MOST_OTHERS:]
        yield Fold(title=f"{len(names)} more results", text=(", ".join(names[:200]),))


def _drawn(name: str, result: Result) -> Picture:
    return Picture(name, f"Picture of the result {name}.", result.plot)


def _computed(manifest: Manifest, stages: Sequence[Stage]) -> Iterator[Fold]:
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
    rows = [[key, "–" if value is None else str(value)] for key, value in settings.items()]
    tables = [
        table("Steps and their time", ["step", "result", "seconds"], steps),
        table("Settings and versions", ["setting", "value"], rows),
        _roles(stages),
    ]
    yield Fold(
        title="How this was computed, and how to repeat it",
        text=tuple(text),
        code=shlex.join(manifest.command) if manifest.command else "(run from Python)",
        tables=tuple(one for one in tables if one is not None),
    )


def _trials(stages: Sequence[Stage]) -> Iterator[Fold]:
    """The steps that were taken before something was advised, or not."""
    for stage in stages:
        if stage.advice is None:
            continue
        given = [item.trial for item in stage.advice.recommendations if item.trial is not None]
        for trial in (*given, *stage.advice.ruled_out):
            columns = [trial.lengths, trial.predicted, trial.measured]
            head = ["length of the step", "predicted", "measured"]
            if trial.held_out:
                pairs = zip(trial.held_out, trial.held_out_intervals, strict=True)
                columns.append([with_interval(*pair) for pair in pairs])  # type: ignore[arg-type]
                head.append("on held-out data")
            columns.append(trial.instead_measured)
            rows = [[number(cells[0]), *cells[1:]] for cells in zip(*columns, strict=False)]
            steps = table("Change of the loss", [*head, trial.instead], rows)
            where = f", {stage.label}" if stage.label else ""
            yield Fold(
                title=f"What was tried{where}: {trial.direction}",
                text=(f"{capitalised(trial.verdict)}. Rounding: ± {number(trial.rounding)}.",),
                tables=(steps,) if steps is not None else (),
            )


def _roles(stages: Sequence[Stage]) -> Table | None:
    subject = next((stage.subject for stage in stages if stage.subject is not None), None)
    if subject is None:
        return None
    sizes: dict[str, int] = {}
    for entry in subject.roles:
        role = entry.role.removesuffix("_bias")
        sizes[role] = sizes.get(role, 0) + entry.parameters
    total = max(sum(sizes.values()), 1)
    ranked = sorted(sizes.items(), key=lambda item: -item[1])[:60]
    rows = [[role, size, f"{size / total:.1%}"] for role, size in ranked]
    caption = "Parameters by role, biases with their weights"
    return table(caption, ["role", "parameters", "share"], rows)


# --- tables as files ------------------------------------------------------------------------------


def _spreadsheets(page: Page) -> Iterator[tuple[str, bytes]]:
    """Every table of every section, with what folds away, as CSV."""
    for section in page.sections:
        folded = [one for fold in section.folds for one in fold.tables]
        tables = [*([section.table] if section.table is not None else []), *folded]
        for index, one in enumerate(tables):
            buffer = io.StringIO()
            writer = csv.writer(buffer)
            writer.writerow([_inert(cell) for cell in one.head])
            writer.writerows([_inert(cell) for cell in row] for row in one.rows)
            name = section.key + (f"-{index + 1}" if index else "")
            yield name, buffer.getvalue().encode("utf-8-sig")


def _inert(cell: str) -> str:
    """No cell is a formula, whatever a name may hold."""
    return f"'{cell}" if cell[:1] in ("=", "@", "\t", "\r") or cell[:2] in ("+c", "-c") else cell
