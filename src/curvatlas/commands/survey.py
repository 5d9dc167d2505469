"""The standard survey of a problem: what is measured, step by step, into a run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import curvatlas as ca
from curvatlas.commands.budgets import Budget
from curvatlas.commands.console import Console
from curvatlas.results import Result
from curvatlas.runs import Run
from curvatlas.runs.subject import subject_of
from curvatlas.spectra.estimate import Estimate

R = TypeVar("R", bound=Result)

SYMBOLS = {"total": "H", "outer": "H_o", "functional": "H_f"}


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of the spectrum is computed, and how well; part of the run's options."""

    eigenvalues: int = 5
    tol: float = 1e-4
    trace_rtol: float = 0.05
    seed: int = 0


class Survey:
    """Loss and roles, then the ends of the spectra and traces of H, H_o, H_f, then densities."""

    def __init__(
        self,
        run: Run,
        problem: Any,
        *,
        stage: str,
        effort: Effort,
        budget: Budget,
        console: Console,
        roles: list[str] | None = None,
    ) -> None:
        self.run, self.problem, self.stage = run, problem, stage
        self.effort, self.budget, self.console = effort, budget, console
        self.limit = {} if budget.products is None else {"max_products": budget.products}
        whole = {
            "total": ca.Hessian(problem),
            "outer": ca.GaussNewton(problem),
            "functional": ca.FunctionalHessian(problem),
        }
        if roles:
            chosen = problem.anatomy.select(*roles)
            whole = {part: operator[chosen, chosen] for part, operator in whole.items()}
        self.operators = {part: budget.watch(operator) for part, operator in whole.items()}

    def carry_out(self, *, name: str, data: str) -> None:
        """Every step, the most telling first."""
        state = "" if self.stage == "model" else self.stage
        self.console.say(
            self.step(
                "subject", lambda: subject_of(self.problem, name=name, data=data, state=state)
            )
        )
        for assumption in self.problem.anatomy.assumptions:
            self.run.warn(f"roles: {assumption}")
        for part in self.operators:
            self.say(part, self.ends(part))
        total, outer = self.trace("total"), self.trace("outer")
        functional = self.step("functional.trace", lambda: _difference(total, outer))
        for part, found in (("total", total), ("outer", outer), ("functional", functional)):
            self.say(part, found)
        for part in self.operators if hasattr(ca, "spectral_density") else ():
            self.say(part, self.density(part))

    def step(self, what: str, function: Callable[[], R]) -> R:
        """One step of this stage; stops before it when the time is used up."""
        self.budget.check()
        name = f"{self.stage}.{what}"
        known = name in self.run.manifest.steps
        self.console.detail(f"{name}{': read from the folder' if known else ' …'}")
        return self.run.step(name, function)

    def say(self, part: str, found: Result) -> None:
        self.console.say(f"  {SYMBOLS[part]}: {found}")

    def ends(self, part: str) -> Result:
        """The extreme eigenvalues; H_o has no negative ones."""
        operator = self.operators[part]
        count = min(self.effort.eigenvalues, max(1, operator.shape[0] // 2))
        found: Result = self.step(
            f"{part}.eigenpairs",
            lambda: ca.eigenpairs(
                operator,
                k=count,
                which="largest" if part == "outer" else "both",
                tol=self.effort.tol,
                seed=self.effort.seed,
                memory=self.budget.memory,
                checkpoint=self.run.checkpoint_path(f"{self.stage}.{part}.eigenpairs"),
                **self.limit,
            ),
        )
        return found

    def trace(self, part: str) -> Estimate:
        # Two seeds: the traces of H and H_o are subtracted, so their errors must be independent.
        seed = 2 * self.effort.seed + (part == "outer")
        found: Estimate = self.step(
            f"{part}.trace",
            lambda: ca.trace(
                self.operators[part],
                rtol=self.effort.trace_rtol,
                seed=seed,
                checkpoint=self.run.checkpoint_path(f"{self.stage}.{part}.trace"),
                **self.limit,
            ),
        )
        return found

    def density(self, part: str) -> Result:
        found: Result = self.step(
            f"{part}.density",
            lambda: ca.spectral_density(
                self.operators[part],
                seed=self.effort.seed,
                checkpoint=self.run.checkpoint_path(f"{self.stage}.{part}.density"),
                **self.limit,
            ),
        )
        return found


def _difference(total: Estimate, outer: Estimate) -> Estimate:
    """tr H_f = tr H − tr H_o, independent errors added in quadrature.

    H_f is indefinite and its trace often small: sampled alone it would take many more products.
    """
    value = total.value - outer.value
    error = (total.error**2 + outer.error**2) ** 0.5
    return Estimate(
        quantity="trace",
        value=value,
        interval=(value - error, value + error),
        products=0,
        converged=total.converged and outer.converged,
        exact=total.exact and outer.exact,
        method="tr H − tr H_o",
    )
