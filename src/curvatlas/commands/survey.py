"""The standard survey of a problem: what is measured, step by step, into a run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import curvatlas as ca
from curvatlas.commands.budgets import Budget
from curvatlas.commands.console import Console
from curvatlas.results import Result
from curvatlas.runs import Run
from curvatlas.runs.subject import Subject, subject_of

# the three matrices by the names results and report use
PARTS = {"total": "Hessian", "outer": "GaussNewton", "functional": "FunctionalHessian"}
SYMBOLS = {"total": "H", "outer": "H_o", "functional": "H_f"}


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of the spectrum is computed, and how well; part of the run's options."""

    eigenvalues: int = 5
    tol: float = 1e-4
    trace_rtol: float = 0.05
    seed: int = 0


def survey(
    run: Run,
    problem: Any,
    *,
    name: str,
    data: str,
    stage: str,
    effort: Effort,
    budget: Budget,
    console: Console,
) -> None:
    """Loss and roles, then eigenvalues and trace of H, H_o, H_f, then their densities."""

    def step(what: str, function: Callable[[], Result]) -> Result:
        budget.check()
        known = f"{stage}.{what}" in run.manifest.steps
        console.detail(f"{stage}.{what} …{' (already there)' if known else ''}")
        return run.step(f"{stage}.{what}", function)

    def subject() -> Subject:
        return subject_of(problem, name=name, data=data, state="" if stage == "model" else stage)

    console.say(step("subject", subject))
    operators = {part: budget.watch(getattr(ca, kind)(problem)) for part, kind in PARTS.items()}
    limit: dict[str, Any] = {} if budget.products is None else {"max_products": budget.products}
    for part, operator in operators.items():
        pairs = step(
            f"{part}.eigenpairs",
            lambda operator=operator, part=part: ca.eigenpairs(  # type: ignore[misc]
                operator,
                k=min(effort.eigenvalues, max(1, operator.shape[0] // 2)),
                which="largest" if part == "outer" else "both",
                tol=effort.tol,
                seed=effort.seed,
                memory=budget.memory,
                checkpoint=run.checkpoint_path(f"{stage}.{part}.eigenpairs"),
                **limit,
            ),
        )
        console.say(f"  {SYMBOLS[part]}: {pairs}")
        trace = step(
            f"{part}.trace",
            lambda operator=operator, part=part: ca.trace(  # type: ignore[misc]
                operator,
                rtol=effort.trace_rtol,
                seed=effort.seed,
                checkpoint=run.checkpoint_path(f"{stage}.{part}.trace"),
                **limit,
            ),
        )
        console.say(f"  {SYMBOLS[part]}: {trace}")
    for part, operator in operators.items():
        density = step(
            f"{part}.density",
            lambda operator=operator, part=part: ca.spectral_density(  # type: ignore[misc]
                operator,
                seed=effort.seed,
                checkpoint=run.checkpoint_path(f"{stage}.{part}.density"),
                **limit,
            ),
        )
        console.say(f"  {SYMBOLS[part]}: {density}")
