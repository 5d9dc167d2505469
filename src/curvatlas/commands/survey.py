"""The standard survey of a problem: what is measured, step by step, into a run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch

import curvatlas as ca
from curvatlas.analysis.advice import Advice, recommend
from curvatlas.analysis.atlas import atlas
from curvatlas.analysis.atlas_blocks import blocks_of
from curvatlas.analysis.diagnostics_conditioning import conditioning_of
from curvatlas.analysis.propagation import CurvaturePropagationAnalyzer
from curvatlas.analysis.propagation_result import CurvatureFlow, FlowEntry
from curvatlas.budget import give_back
from curvatlas.commands.budgets import Budget, memory_plan
from curvatlas.commands.console import Console
from curvatlas.results import Result
from curvatlas.runs import Run
from curvatlas.runs.subject import subject_of
from curvatlas.spectra.estimate import Estimate

R = TypeVar("R", bound=Result)

_FLOW_SAMPLES = 4
_DENSE_UP_TO = 512  # parameters; beyond that the map is estimated, with intervals
_PRODUCTS = ("products",)  # what a step spends whose result depends on how many there may be
SYMBOLS = {"total": "H", "outer": "H_o", "functional": "H_f"}


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of the spectrum is computed, and how well; part of the run's options."""

    eigenvalues: int = 5
    tol: float = 1e-4
    trace_rtol: float = 0.05
    map_rtol: float = 0.1
    density_products: int = 300
    seed: int = 0
    skip: tuple[str, ...] = ()  # "trace", "map", "propagation", "density", "advice"


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
        itemsize = problem.dtype.itemsize
        asked = budget.memory if budget.memory is not None else run.effort.get("memory")
        self.memory = memory_plan(asked, problem.size * itemsize)
        run.plan(memory=self.memory.total)
        self.whole = {
            "total": ca.Hessian(problem, budget=self.memory.graphs),
            "outer": ca.GaussNewton(problem, budget=self.memory.graphs),
            "functional": ca.FunctionalHessian(problem, budget=self.memory.graphs),
        }
        whole: dict[str, Any] = dict(self.whole)
        # Half of the bytes where the vectors would not fit: their rounding is in the residuals.
        rows = self.memory.vectors // (problem.size * itemsize)
        ends = 2 * self.effort.eigenvalues
        self.storage = torch.bfloat16 if rows < 2 * ends + max(6, ends // 4) + 3 else None
        if roles:
            chosen = chosen_slices(problem.anatomy, roles)
            whole = {part: operator[chosen, chosen] for part, operator in whole.items()}
        self.operators = {part: budget.watch(operator) for part, operator in whole.items()}
        self.restricted = bool(roles)

    def carry_out(self, *, name: str, data: str) -> None:
        """Every step, the most telling first."""
        state = "" if self.stage == "model" else self.stage
        self.console.say(
            self.step(
                "subject", lambda: subject_of(self.problem, name=name, data=data, state=state)
            )
        )
        for note in self.problem.anatomy.notes:
            self.run.warn(f"roles: {note}")
        for part in self.operators:
            self.say(part, self.ends(part))
        if "trace" not in self.effort.skip:
            self.traces()
        if "map" not in self.effort.skip and not self.restricted:
            self.map()
        if "propagation" not in self.effort.skip and not self.restricted:
            self.propagation()
        if "density" not in self.effort.skip:
            densities = {}
            for part in self.operators:
                densities[part] = self.density(part)
                self.say(part, densities[part])
            if "advice" not in self.effort.skip and not self.restricted:
                self.advice(self.ends("total"), densities["total"])

    def step(self, what: str, function: Callable[[], R], *, spends: tuple[str, ...] = ()) -> R:
        """One step of this stage; stops before it when the time is used up."""
        self.budget.check()
        name = f"{self.stage}.{what}"
        known = name in self.run.manifest.steps
        self.console.detail(f"{name}{': read from the folder' if known else ' …'}")
        if not known:
            for operator in self.whole.values():
                operator.release()  # one operator at a time has the memory to itself
            give_back()
        return self.run.step(name, function, spends=spends)

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
                max_products=self.budget.most_products,
                memory=self.memory.vectors,
                storage=self.storage,
                checkpoint=self.run.checkpoint_path(f"{self.stage}.{part}.eigenpairs"),
            ),
            spends=_PRODUCTS,
        )
        return found

    def traces(self) -> None:
        total, outer = self.trace("total"), self.trace("outer")
        functional = self.step(
            "functional.trace", lambda: _difference(total, outer), spends=_PRODUCTS
        )
        for part, found in (("total", total), ("outer", outer), ("functional", functional)):
            self.say(part, found)

    def trace(self, part: str) -> Estimate:
        # Two seeds: the traces of H and H_o are subtracted, so their errors must be independent.
        seed = 2 * self.effort.seed + (part == "outer")
        found: Estimate = self.step(
            f"{part}.trace",
            lambda: ca.trace(
                self.operators[part],
                rtol=self.effort.trace_rtol,
                seed=seed,
                max_products=self.budget.most_products,
                memory=self.memory.vectors,
                checkpoint=self.run.checkpoint_path(f"{self.stage}.{part}.trace"),
            ),
            spends=_PRODUCTS,
        )
        return found

    def density(self, part: str) -> Result:
        found: Result = self.step(
            f"{part}.density",
            lambda: ca.spectral_density(
                self.operators[part],
                max_products=min(self.effort.density_products, self.budget.most_products),
                memory=self.memory.vectors,
                seed=self.effort.seed,
                checkpoint=self.run.checkpoint_path(f"{self.stage}.{part}.density"),
            ),
            spends=_PRODUCTS,
        )
        return found

    def advice(self, ends: Any, density: Any) -> None:
        """Recommendations from the spectrum already measured and the sharpness of each layer."""

        def read() -> Advice:
            found = conditioning_of(
                self.problem, self.operators["total"], ends, density, learning_rate=None,
                layers=True, seed=self.effort.seed, max_products=self.budget.most_products,
                memory=self.memory.vectors,
            )  # fmt: skip
            model = self.problem.model
            return Advice(conditioning=found, recommendations=recommend([found], model=model))

        for recommendation in self.step("advice", read, spends=_PRODUCTS).recommendations:
            self.console.say(f"  → {recommendation}")

    def map(self) -> None:
        """The map over pairs of roles; biases count with their weights."""
        products, blocks = self.budget.products, len(blocks_of(self.problem.anatomy, biases=False))
        if products is not None and products < 2 * blocks:
            self.run.warn(
                f"no map of roles: {blocks} blocks need at least {2 * blocks} products, "
                f"the budget allows {products}."
            )
            return
        found = self.step(
            "atlas",
            lambda: atlas(
                self.problem,
                biases=False,
                rtol=self.effort.map_rtol,
                method="sketch" if self.problem.size > _DENSE_UP_TO else "dense",
                products=products or max(self.budget.most_products, 5 * blocks),
                seed=self.effort.seed,
                budget=self.memory.graphs,
            ),
            spends=_PRODUCTS,
        )
        self.console.say(f"  {found}")

    def propagation(self) -> None:
        """Curvature by depth on a few samples; a model without known sublayers has none."""
        if not any(p.sublayer in ("attention", "ffn", "norm") for p in self.problem.anatomy):
            return

        def flow() -> Result:
            batch = next(self.problem.all_batches())
            small = batch.part(0, _FLOW_SAMPLES, self.problem.loss.count)
            analyzer = CurvaturePropagationAnalyzer(
                self.problem.model, self.problem.loss, budget=self.memory.graphs,
                seed=self.effort.seed,
            )  # fmt: skip
            return _without_matrices(analyzer.analyze_curvature_flow(small.inputs, small.targets))

        found = self.step("propagation", flow)
        self.console.say(f"  propagation: {str(found).splitlines()[0]}")


def _without_matrices(flow: CurvatureFlow) -> CurvatureFlow:
    """Norms, traces and eigenvalues are kept; the matrices themselves would fill the disk."""

    def bare(entry: FlowEntry) -> FlowEntry:
        return replace(entry, total=None, passed_on=None, created_here=None)

    return replace(
        flow,
        sublayers=tuple(bare(entry) for entry in flow.sublayers),
        activations=tuple(bare(entry) for entry in flow.activations),
    )


def chosen_slices(anatomy: Any, wanted: list[str]) -> list[Any]:
    """Slices by role ("query"), by name or by glob ("blocks.0.*"), in the anatomy's order."""
    found: set[str] = set()
    for word in wanted:
        by_role = any(fnmatchcase(role, word) for role in anatomy.roles)
        pieces = anatomy.select(role=word) if by_role else anatomy.select(word)
        found |= {piece.name for piece in pieces}
    return [piece for piece in anatomy if piece.name in found]


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
