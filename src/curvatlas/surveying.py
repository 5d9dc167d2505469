"""The main job: survey a problem step by step into a run folder, and write its page.

The module is not called ``survey``: as a submodule it would hide the function ``curvatlas.survey``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

from curvatlas import parallel
from curvatlas.analysis.atlas.mapping import atlas
from curvatlas.analysis.atlas.result import blocks_of
from curvatlas.analysis.conditioning import conditioning_of
from curvatlas.analysis.diagnostics import Advice, recommend
from curvatlas.analysis.propagation.analyzer import CurvaturePropagationAnalyzer
from curvatlas.analysis.propagation.result import CurvatureFlow, FlowEntry
from curvatlas.anatomy import Anatomy, Slice
from curvatlas.budget import Clock, TimeUp, give_back, memory_plan, parse_bytes
from curvatlas.linear_operator import LinearOperator
from curvatlas.operators.curvature import FunctionalHessian, GaussNewton, Hessian
from curvatlas.problem import Problem
from curvatlas.report.html import write_report
from curvatlas.results import Result
from curvatlas.runs import LoadedRun, Run, load
from curvatlas.runs.folder import SharedRun, default_folder
from curvatlas.runs.manifest import valid_name
from curvatlas.runs.subject import RoleSize, Subject, of_data, of_model
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.estimate import Estimate
from curvatlas.spectra.trace import trace

R = TypeVar("R", bound=Result)
# a result of a run by its name: read back where it is stored, else computed and kept
Step = Callable[[str, Callable[[], Any]], Any]
Skippable = Literal["trace", "map", "propagation", "density", "advice"]
SKIPPABLE: tuple[Skippable, ...] = get_args(Skippable)

_SYMBOLS = {"total": "H", "outer": "H_o", "functional": "H_f"}
_PRODUCTS = 300  # of one estimate, unless the user says otherwise
_EIGENPAIR_TOLERANCE = 1e-4
_TRACE_ERROR = 0.05  # relative, to be reached
_MAP_ERROR = 0.1
_DENSE_MAP_PARAMETERS = 512  # beyond that the map is estimated, with intervals
_FLOW_SAMPLES = 4
_SPENDS = ("products",)  # of the effort: steps whose result depends on how many there may be


def survey(
    problem: Problem,
    *,
    output: str | os.PathLike[str] | Run | None = None,
    stage: str = "model",
    roles: Sequence[str] | None = None,
    skip: Collection[Skippable] = (),
    eigenvalues: int = 5,
    density_products: int = 300,
    products: int | None = None,
    memory: int | str | None = None,
    time: float | str | Clock | None = None,
    seed: int = 0,
    name: str | None = None,
    data: str | None = None,
    say: Callable[[object], object] | None = None,
    detail: Callable[[object], object] | None = None,
) -> LoadedRun:
    """Measure the curvature of a problem and write its page: what ``curvatlas analyze`` does.

    Loss and roles, the ends of the spectra and the traces of H, H_o and H_f, the map over pairs of
    roles, curvature by depth, spectral densities, advice. Every result is stored as soon as it is
    there: the same call with the same ``output`` resumes a run that was stopped, and gives the
    numbers of one that was not.

        run = ca.survey(problem, output="runs/vit")
        run["model.total.eigenpairs"]      # or run.result(name, ca.Eigenpairs), for type checkers
        run.open()                         # the page, run.report, in the browser

    output: the folder (default: named after what is computed, below ``curvatlas-runs``), or an
    open ``ca.runs.Run`` to which the results are added under ``stage``, as ``<stage>.subject`` …;
    closing it and writing its page are then the caller's.
    roles: only these parameters, by role, name or glob; without map, propagation and advice.
    skip: of trace, map, propagation, density, advice. eigenvalues: at each end of each spectrum.
    density_products, products: most matrix-vector products of a density, of any one estimate.
    memory: bytes or a text such as "2GB". time: seconds or a text such as "5m"; when it is used
    up, the run is returned with status "interrupted" and a page of what is there.
    name, data: what the page calls the model and the data. say: called with each result as it is
    ready, for example ``print``; detail: with the name of each step.
    """
    _check_options(problem, stage, skip, eigenvalues, density_products, products)
    if roles is not None:
        chosen_slices(problem.anatomy, roles)  # a wrong name is told at once
    clock = time if isinstance(time, Clock) else Clock(time)
    bytes_asked = None if memory is None else parse_bytes(memory)

    def measure(run: Run) -> None:
        _Survey(
            run=run,
            problem=problem,
            stage=stage,
            roles=roles,
            skip=skip,
            eigenvalues=eigenvalues,
            density_products=density_products,
            products_asked=products,
            memory_asked=bytes_asked,
            clock=clock,
            seed=seed,
            say=say or _silent,
            detail=detail or _silent,
        ).carry_out(name=name, data=data)

    if isinstance(output, Run):
        measure(output)
        return output.loaded()
    options = {
        "command": "survey",
        "loss": problem.loss.name,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "device": str(problem.device),
        "stage": stage,
        "roles": None if roles is None else list(roles),
        "skip": sorted(skip),
        "eigenvalues": eigenvalues,
        "density_products": density_products,
        "seed": seed,
        "effort": effort(memory=bytes_asked, products=products, time=clock.seconds),
    }
    fingerprints = fingerprints_of(problem)
    folder = default_folder(options, **fingerprints) if output is None else output
    run = SharedRun.create(folder, options=options, **fingerprints)
    finish(run, lambda: measure(run))
    return run.loaded()


def effort(*, memory: int | None, products: int | None, time: float | str | None) -> dict[str, Any]:
    """What a survey may spend, as its manifest keeps it."""
    return {"memory": memory, "products": products or f"{_PRODUCTS} by default", "time": time}


def fingerprints_of(problem: Problem) -> dict[str, str]:
    """What tells two runs apart: the weights, and the data of all processes."""
    batches = ((batch.inputs, batch.targets) for batch in problem.all_batches())
    return {"model_fingerprint": of_model(problem.model), "data_fingerprint": of_data(batches)}


def recorded(
    problem: Problem,
    output: str | os.PathLike[str] | Run | None,
    options: dict[str, Any],
    work: Callable[[Step], R],
) -> R:
    """``work(step)``: ``step(name, function)`` gives a stored result, or computes and keeps it.

    output: None keeps nothing; an open ``Run`` is left open; a folder gets the page too, and the
    same call resumes it.
    """
    if output is None:
        return work(lambda _, function: function())
    if isinstance(output, Run):
        return work(output.step)
    run = SharedRun.create(output, options=options, **fingerprints_of(problem))
    results: list[R] = []
    finish(run, lambda: results.append(work(run.step)))
    return results[0]


def finish(run: Run, work: Callable[[], None]) -> TimeUp | None:
    """Do the work and write the page; returns what ended it early, if the time was used up."""
    stopped: TimeUp | None = None
    try:
        with run:
            work()
    except TimeUp as error:
        stopped = error

    def report() -> None:
        if parallel.rank() > 0:
            return
        give_back()
        loaded = load(run.path)
        write_report(loaded)
        if importlib.util.find_spec("matplotlib") is not None:
            from curvatlas.report.paper import MAIN, write_figures

            write_figures(loaded, run.path / "figures", kinds=MAIN)

    parallel.together(report)
    return stopped


def _silent(text: object) -> None:
    pass


def _check_options(
    problem: Problem,
    stage: str,
    skip: Collection[Skippable],
    eigenvalues: int,
    density_products: int,
    products: int | None,
) -> None:
    if not isinstance(problem, Problem):
        raise TypeError(
            f"survey takes a Problem, got a {type(problem).__name__}: write "
            "curvatlas.Problem(model, loss, data)."
        )
    if not valid_name(stage) or "." in stage:
        raise ValueError(f"stage is one word in lower case, such as 'trained', got {stage!r}.")
    unknown = [skip] if isinstance(skip, str) else [part for part in skip if part not in SKIPPABLE]
    if unknown:
        raise ValueError(f"skip is a list of {', '.join(SKIPPABLE)}, got {unknown[0]!r}.")
    counts = {
        "eigenvalues": eigenvalues,
        "density_products": density_products,
        "products": 1 if products is None else products,
    }
    for option, count in counts.items():
        if count < 1:
            raise ValueError(f"{option} must be at least 1, got {count}.")


@dataclass(kw_only=True)
class _Survey:
    """The steps on one problem. Each is read from the folder where it is stored already."""

    run: Run
    problem: Problem
    stage: str
    roles: Sequence[str] | None
    skip: Collection[str]
    eigenvalues: int
    density_products: int
    products_asked: int | None
    memory_asked: int | None
    clock: Clock
    seed: int
    say: Callable[[object], object]
    detail: Callable[[object], object]

    def __post_init__(self) -> None:
        problem = self.problem
        self.products = self.products_asked or _PRODUCTS
        if self.roles:
            self.skip = {*self.skip, "map", "propagation", "advice"}
        vector_bytes = problem.size * problem.dtype.itemsize
        memory = self.run.effort.get("memory") if self.memory_asked is None else self.memory_asked
        self.memory = memory_plan(memory, vector_bytes)
        self.run.plan(memory=self.memory.total)
        budget = self.memory.graphs
        self.hessian = Hessian(problem, budget=budget)
        self.full = {
            "total": self.hessian,
            "outer": GaussNewton(problem, budget=budget),
            "functional": FunctionalHessian(problem, budget=budget),
        }
        self.operators: dict[str, LinearOperator] = dict(self.full)
        if self.roles:
            chosen = chosen_slices(problem.anatomy, self.roles)
            self.operators = {part: op[chosen, chosen] for part, op in self.full.items()}
        if self.clock.seconds is not None:
            # An estimate is stopped between two products and goes on there from its checkpoint.
            for operator in self.operators.values():
                operator.before_product = self.clock.check
        # Half of the bytes where the vectors would not fit: their rounding is in the residuals.
        wanted = 2 * self.eigenvalues
        rows_needed = 2 * wanted + max(6, wanted // 4) + 3
        self.storage = torch.bfloat16 if self.memory.vectors < rows_needed * vector_bytes else None

    def carry_out(self, *, name: str | None, data: str | None) -> None:
        """Every step, the most telling first."""
        state = "" if self.stage == "model" else self.stage
        self.say(
            self._step(
                "subject",
                lambda: subject_of(
                    self.problem,
                    name=name or type(self.problem.model).__name__,
                    data=data or f"{self.problem.total_count:g} targets",
                    state=state,
                ),
            )
        )
        for note in self.problem.anatomy.notes:
            self.run.warn(f"roles: {note}")
        for part in self.operators:
            self._say_of(part, self._ends(part))
        if "trace" not in self.skip:
            self._traces()
        if "map" not in self.skip:
            self._map()
        if "propagation" not in self.skip:
            self._propagation()
        if "density" not in self.skip:
            densities = {}
            for part in self.operators:
                densities[part] = self._density(part)
                self._say_of(part, densities[part])
            if "advice" not in self.skip:
                self._advice(self._ends("total"), densities["total"])

    def _step(self, what: str, function: Callable[[], R], *, spends: tuple[str, ...] = ()) -> R:
        """One step of this stage; stops before it when the time is used up."""
        self.clock.check()
        name = f"{self.stage}.{what}"
        stored = name in self.run.manifest.steps
        self.detail(f"{name}{': read from the folder' if stored else ' …'}")
        if not stored:
            for operator in self.full.values():
                operator.release()  # one operator at a time has the memory to itself
            give_back()
        return self.run.step(name, function, spends=spends)

    def _say_of(self, part: str, result: Result) -> None:
        self.say(f"  {_SYMBOLS[part]}: {result}")

    def _estimate(self, name: str, compute: Callable[[Path], R]) -> R:
        """A step whose result depends on how many products there may be, with its checkpoint."""
        checkpoint = self.run.checkpoint_path(f"{self.stage}.{name}")
        return self._step(name, lambda: compute(checkpoint), spends=_SPENDS)

    def _ends(self, part: str) -> Eigenpairs:
        """The extreme eigenvalues; H_o has no negative ones."""
        operator = self.operators[part]
        return self._estimate(
            f"{part}.eigenpairs",
            lambda checkpoint: eigenpairs(
                operator,
                k=min(self.eigenvalues, max(1, operator.shape[0] // 2)),
                which="largest" if part == "outer" else "both",
                tol=_EIGENPAIR_TOLERANCE,
                seed=self.seed,
                max_products=self.products,
                memory=self.memory.vectors,
                storage=self.storage,
                checkpoint=checkpoint,
            ),
        )

    def _traces(self) -> None:
        traces = {part: self._trace(part) for part in ("total", "outer")}
        traces["functional"] = self._estimate(
            "functional.trace", lambda _: _difference(traces["total"], traces["outer"])
        )
        for part, estimate in traces.items():
            self._say_of(part, estimate)

    def _trace(self, part: str) -> Estimate:
        return self._estimate(
            f"{part}.trace",
            lambda checkpoint: trace(
                self.operators[part],
                rtol=_TRACE_ERROR,
                # Two seeds: the traces of H and H_o are subtracted, their errors independent.
                seed=2 * self.seed + (part == "outer"),
                max_products=self.products,
                memory=self.memory.vectors,
                checkpoint=checkpoint,
            ),
        )

    def _density(self, part: str) -> SpectralDensity:
        return self._estimate(
            f"{part}.density",
            lambda checkpoint: spectral_density(
                self.operators[part],
                max_products=min(self.density_products, self.products),
                memory=self.memory.vectors,
                seed=self.seed,
                checkpoint=checkpoint,
            ),
        )

    def _advice(self, ends: Eigenpairs, density: SpectralDensity) -> None:
        """Recommendations from the spectrum already measured and the sharpness of each layer."""

        def read(_: Path) -> Advice:
            conditioning = conditioning_of(
                self.problem,
                self.hessian,
                ends,
                density,
                learning_rate=None,
                layers=True,
                seed=self.seed,
                max_products=self.products,
                memory=self.memory.vectors,
            )
            advice = recommend([conditioning], model=self.problem.model)
            return Advice(conditioning=conditioning, recommendations=advice)

        for recommendation in self._estimate("advice", read).recommendations:
            self.say(f"  → {recommendation}")

    def _map(self) -> None:
        """The map over pairs of roles; biases count with their weights."""
        blocks = len(blocks_of(self.problem.anatomy, biases=False))
        if self.products_asked is not None and self.products_asked < 2 * blocks:
            self.run.warn(
                f"no map of roles: {blocks} blocks need at least {2 * blocks} products, "
                f"the budget allows {self.products_asked}."
            )
            return
        map_of_roles = self._estimate(
            "atlas",
            lambda _: atlas(
                self.problem,
                biases=False,
                rtol=_MAP_ERROR,
                method="sketch" if self.problem.size > _DENSE_MAP_PARAMETERS else "dense",
                products=self.products_asked or max(_PRODUCTS, 5 * blocks),
                seed=self.seed,
                budget=self.memory.graphs,
            ),
        )
        self.say(f"  {map_of_roles}")

    def _propagation(self) -> None:
        """Curvature by depth on a few samples; a model without known sublayers has none."""
        if not any(p.sublayer in ("attention", "ffn", "norm") for p in self.problem.anatomy):
            return

        def flow() -> CurvatureFlow:
            batch = next(self.problem.all_batches())
            small = batch.part(0, _FLOW_SAMPLES, self.problem.loss.count)
            analyzer = CurvaturePropagationAnalyzer(
                self.problem.model,
                self.problem.loss,
                budget=self.memory.graphs,
                seed=self.seed,
            )
            return _without_matrices(analyzer.analyze_curvature_flow(small.inputs, small.targets))

        self.say(f"  propagation: {str(self._step('propagation', flow)).splitlines()[0]}")


def subject_of(problem: Problem, *, name: str, data: str, state: str = "") -> Subject:
    """Describe a ``Problem``; costs one gradient."""
    sizes: dict[tuple[int | None, str, str], int] = {}
    for piece in problem.anatomy:
        key = (piece.layer, piece.sublayer, piece.role)
        sizes[key] = sizes.get(key, 0) + piece.size
    return Subject(
        name=name,
        model=type(problem.model).__name__,
        state=state,
        parameters=problem.size,
        dtype=str(problem.dtype).removeprefix("torch."),
        device=str(problem.device),
        data=data,
        loss_name=problem.loss.name,
        batches=sum(1 for _ in problem.all_batches()),
        targets=problem.total_count,
        loss=problem.value(),
        gradient_norm=float(problem.gradient().norm()),
        roles=tuple(
            RoleSize(layer=layer, sublayer=sublayer, role=role, parameters=size)
            for (layer, sublayer, role), size in sizes.items()
        ),
    )


def chosen_slices(anatomy: Anatomy, selectors: Sequence[str]) -> list[Slice]:
    """Slices by role ("query"), by name or by glob ("blocks.0.*"), in the anatomy's order."""
    names: set[str] = set()
    for selector in selectors:
        by_role = any(fnmatchcase(role, selector) for role in anatomy.roles)
        pieces = anatomy.select(role=selector) if by_role else anatomy.select(selector)
        names |= {piece.name for piece in pieces}
    return [piece for piece in anatomy if piece.name in names]


def _without_matrices(flow: CurvatureFlow) -> CurvatureFlow:
    """Norms, traces and eigenvalues are kept; the matrices themselves would fill the disk."""

    def bare(entry: FlowEntry) -> FlowEntry:
        return replace(entry, total=None, passed_on=None, created_here=None)

    return replace(
        flow,
        sublayers=tuple(bare(entry) for entry in flow.sublayers),
        activations=tuple(bare(entry) for entry in flow.activations),
    )


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
