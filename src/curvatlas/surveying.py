"""The main job: survey a problem step by step into a run folder, and write its page.

The module is not called ``survey``: as a submodule it would hide the function ``curvatlas.survey``.
"""

from __future__ import annotations

import json
import math
import os
import time as clocks
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from safetensors.torch import save

from curvatlas import files, parallel
from curvatlas.analysis.atlas.mapping import atlas, with_known_traces
from curvatlas.analysis.atlas.result import Atlas, AtlasBlock, blocks_of
from curvatlas.analysis.conditioning import conditioning_of
from curvatlas.analysis.diagnostics import Advice, Situation, advice_lines, advise
from curvatlas.analysis.propagation.analyzer import CurvaturePropagationAnalyzer
from curvatlas.analysis.propagation.pooling import pooled_flow
from curvatlas.analysis.propagation.result import CurvatureFlow, FlowEntry
from curvatlas.anatomy import Anatomy, Slice
from curvatlas.budget import Clock, TimeUp, give_back, memory_plan, parse_bytes, readable
from curvatlas.errors import CURVATURE_ERRORS, StepMissing
from curvatlas.linear_operator import LinearOperator
from curvatlas.operators.curvature import FunctionalHessian, GaussNewton, Hessian
from curvatlas.planning import product_costs
from curvatlas.problem import Batch, Problem
from curvatlas.problem.sharding import class_name
from curvatlas.progress import track, within_step
from curvatlas.report.page import write_report
from curvatlas.results import Result, pack, unpack
from curvatlas.runs import LoadedRun, Run, load
from curvatlas.runs.folder import SharedRun, default_folder
from curvatlas.runs.manifest import valid_name
from curvatlas.runs.subject import RoleSize, Subject, of_data, of_model
from curvatlas.spectra.checkpoint import Checkpoint, State
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.diagonal import outer_part
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
_DENSE_FLOW_SAMPLES = 4  # beyond that probes tell the norms to 2 % at a thirtieth of the time
_FLOW_GROUPS = 8  # of the samples: each an account of its own, so that their scatter is seen
_NORMAL = 1.96
_DEAREST_DIAGONAL = 64  # products that an exact diagonal of H_o may cost
_SPENDS = ("products",)  # of the effort: steps whose result depends on how many there may be


def survey(
    problem: Problem,
    *,
    output: str | os.PathLike[str] | Run | None = None,
    stage: str = "model",
    roles: Sequence[str] | None = None,
    skip: Collection[Skippable] = (),
    eigenvalues: int = 5,
    density_products: int = 150,
    products: int | None = None,
    optimizer: str | None = None,
    learning_rate: float | None = None,
    held_out: Any = None,
    memory: int | str | None = None,
    time: float | str | Clock | None = None,
    seed: int = 0,
    name: str | None = None,
    data: str | None = None,
    basis: str = "",
    say: Callable[[object], object] | None = None,
    detail: Callable[[object], object] | None = None,
) -> LoadedRun:
    """Measure the curvature of a problem and write its page: what ``curvatlas analyze`` does.

    Loss and roles, the ends of the spectra and the traces of H, H_o and H_f, the map over pairs of
    roles, curvature by depth, spectral densities, advice; what takes longest comes last. Every
    result is stored as soon as it is there: the same call with the same ``output`` resumes a run
    that was stopped, and gives the numbers of one that was not.

        run = ca.survey(problem, output="runs/vit")
        run["model.total.eigenpairs"]      # or run.result(name, ca.Eigenpairs), for type checkers
        run.open()                         # the page, run.report, in the browser

    output: the folder (default: named after what is computed, below ``curvatlas-runs``), or an
    open ``ca.runs.Run`` to which the results are added under ``stage``, as ``<stage>.subject`` …;
    closing it and writing its page are then the caller's.
    roles: only these parameters, by role, name or glob; without map, propagation and advice.
    skip: of trace, map, propagation, density, advice. eigenvalues: at each end of each spectrum.
    density_products, products: most matrix-vector products of a density, of any one estimate.
    optimizer, learning_rate: what the model is trained with ("sgd", "adamw" …), for the advice.
    held_out: data the model was not trained on, in the form of the problem's: advice that predicts
    a change of the loss is given where steps were taken on both and the loss fell, never without.
    memory: bytes or a text such as "2GB". time: seconds or a text such as "5m"; when it is used
    up, the run is returned with status "interrupted" and a page of what is there.
    A step whose measurement fails (a second derivative that is not symmetric, say) is told with the
    reason, kept in ``run.failures`` and on the page, and the others go on: status "incomplete". The
    same call tries it again.
    name, data: what the page calls the model and the data; basis: a sentence on how many samples
    were taken and why, where there are more. say: called with each result as it is
    ready, for example ``print``; detail: with each step's number, name and the time that is left.
    """
    _check_options(problem, stage, skip, eigenvalues, density_products, products)
    situation = Situation(optimizer=optimizer, learning_rate=learning_rate).checked()
    others = None if held_out is None else problem.with_data(held_out)
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
            situation=situation,
            held_out=others,
            products_asked=products,
            memory_asked=bytes_asked,
            clock=clock,
            seed=seed,
            say=say or _silent,
            detail=detail or _silent,
        ).carry_out(name=name, data=data, basis=basis)

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
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        **({} if others is None else {"held_out": fingerprints_of(others)["data_fingerprint"]}),
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
    problem: Problem | dict[str, str],
    output: str | os.PathLike[str] | Run | None,
    options: dict[str, Any],
    work: Callable[[Step], R],
) -> R:
    """``work(step)``: ``step(name, function)`` gives a stored result, or computes and keeps it.

    problem: or the fingerprints of model and data where there is none. output: None keeps nothing;
    an open ``Run`` is left open; a folder gets the page too, and the same call resumes it.
    """
    if output is None:
        return work(lambda _, function: function())
    if isinstance(output, Run):
        return work(output.step)
    marks = fingerprints_of(problem) if isinstance(problem, Problem) else problem
    run = SharedRun.create(output, options=options, **marks)
    results: list[R] = []
    finish(run, lambda: results.append(work(run.step)))
    return results[0]


def finish(run: Run, work: Callable[[], None]) -> TimeUp | None:
    """Do the work and write the page, also of a part: after Ctrl-C, an error, the end of the time.

    Returns what ended it early, if the time was used up.
    """
    stopped: BaseException | None = None
    try:
        with run:
            work()
    except KeyboardInterrupt as error:
        stopped = error
    except Exception as error:
        if isinstance(error, OSError) or parallel.world_size() > 1 or not run.manifest.steps:
            raise
        stopped = error

    def report() -> None:
        if parallel.rank() > 0:
            return
        give_back()
        write_report(load(run.path))

    if stopped is not None and not isinstance(stopped, TimeUp):
        if isinstance(stopped, Exception):
            with suppress(Exception):  # the first error is the one to see
                report()
        elif parallel.world_size() == 1:
            report()
        raise stopped
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


@dataclass(frozen=True)
class _Step:
    """One step as planned: what it is called and how many gradients it is expected to take."""

    name: str  # as it is stored, without the stage
    words: str
    products: int  # expected
    gradients: float  # of all samples: their time
    work: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class PlannedStep(Result):
    """What one step of a survey is expected to take."""

    name: str
    products: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SurveyPlan(Result):
    """What a survey will take, before it starts: ``curvatlas analyze --dry-run``."""

    steps: tuple[PlannedStep, ...]
    seconds: float
    gradient_seconds: float  # measured, of all samples
    memory: int  # bytes expected at the peak, beside the model and the libraries
    memory_limit: int  # bytes it keeps below

    @property
    def value(self) -> float:
        return self.seconds

    def __str__(self) -> str:
        width = max(len(step.name) for step in self.steps)
        lines = [
            f"  {i:2}. {step.name:<{width}}  {step.products or '':>5}  {_span(step.seconds)}"
            for i, step in enumerate(self.steps, 1)
        ]
        return "\n".join(
            [
                f"{len(self.steps)} steps, about {_span(self.seconds)} and "
                f"{readable(self.memory)} of memory (never more than "
                f"{readable(self.memory_limit)}); a gradient takes {self.gradient_seconds:.3g} s.",
                f"      {'step':<{width}}  products  time",
                *lines,
            ]
        )


def _span(seconds: float) -> str:
    """``40 s``, ``3 min``, ``2.5 h``: as a person would say it."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# Gradients that one product costs: DESIGN's count of forward passes, 6 and 4 against 3.
_GRADIENTS = {"total": 2.0, "outer": 4 / 3, "functional": 2.0}
_MAP_GRADIENTS = 10 / 3  # H_o and H_f of the same column
_FLOW_GRADIENTS = 9.0  # of an entry: 8 probes through what lies behind it


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
    situation: Situation
    held_out: Problem | None
    products_asked: int | None
    memory_asked: int | None
    clock: Clock
    seed: int
    say: Callable[[object], object]
    detail: Callable[[object], object]

    def __post_init__(self) -> None:
        problem = self.problem
        self.failed: set[str] = set()  # steps of this session
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
        rows_needed = _basis_rows(self.eigenvalues)
        self.storage = torch.bfloat16 if self.memory.vectors < rows_needed * vector_bytes else None

    def carry_out(self, *, name: str | None, data: str | None, basis: str) -> None:
        """Every step, the most telling first, the dearest last."""
        self.say(
            self._step(
                "subject",
                lambda: subject_of(
                    self.problem,
                    name=name or class_name(self.problem.model),
                    data=data or f"{self.problem.total_count:g} targets",
                    state="" if self.stage == "model" else self.stage,
                    basis=basis,
                ),
            )
        )
        for note in self.problem.anatomy.notes:
            self.run.warn(f"roles: {note}")
        started = clocks.perf_counter()
        self.problem.gradient()
        self._gradient = clocks.perf_counter() - started
        steps = self.steps()
        for index, step in enumerate(steps):
            words = f"step {index + 2} of {len(steps) + 1}"
            left = sum(one.gradients for one in steps[index:] if not self._stored(one.name))
            if not self._stored(step.name):
                left_over = _span(left * self._seconds(steps))
                self.detail(f"{words}: {step.words}, about {left_over} left")
            watch = self.clock.check if parallel.world_size() == 1 else None
            with within_step(words, watch):
                self._attempt(step)

    def _attempt(self, step: _Step) -> None:
        """One step; what a measurement may meet ends it and not the run.

        Several processes stop together: one of them cannot tell what another one has met.
        """
        try:
            step.work()
        except CURVATURE_ERRORS as error:
            if parallel.world_size() > 1:
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            if self.problem.dtype != torch.float64 and not isinstance(error, StepMissing):
                reason += " In float64 (--dtype float64, model.double()) it may succeed."
            self.failed.add(step.name)
            self.run.fail(f"{self.stage}.{step.name}", reason)
            told = f"{step.words} failed, the others go on: {reason}"
            self.say(f"  {told}")
            if self.say is _silent:
                warnings.warn(told, stacklevel=4)

    def _stored(self, what: str) -> bool:
        return f"{self.stage}.{what}" in self.run.manifest.steps

    def _seconds(self, steps: Sequence[_Step]) -> float:
        """Seconds that a planned gradient takes: as the finished steps took, or as measured."""
        done = {s.name: s.gradients for s in steps if self._stored(s.name) and s.gradients > 0}
        taken = sum(self.run.manifest.steps[f"{self.stage}.{what}"].seconds for what in done)
        planned = sum(done.values())
        return taken / planned if planned > 20 else self._gradient

    def steps(self) -> list[_Step]:
        """All but the subject, in order."""
        return _ordered(
            self.problem,
            self.operators,
            eigenvalues=self.eigenvalues,
            products=self.products,
            products_asked=self.products_asked,
            density_products=self.density_products,
            skip=self.skip,
            work={
                "eigenpairs": lambda part: self._say_of(part, self._ends(part)),
                "trace": lambda part: self._say_of(part, self._trace(part)),
                "density": lambda part: self._say_of(part, self._density(part)),
                "atlas": lambda _: self._map(),
                "propagation": lambda _: self._propagation(),
                "advice": lambda _: self._advice(self._ends("total"), self._density("total")),
            },
        )

    def _step(self, what: str, function: Callable[[], R], *, spends: tuple[str, ...] = ()) -> R:
        """One step of this stage; stops before it when the time is used up."""
        self.clock.check()
        if what in self.failed:
            raise StepMissing(f"it needs {what}, which failed.")
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

    def _trace(self, part: str) -> Estimate:
        if part == "functional":
            traces = [self._trace(other) for other in ("total", "outer")]
            return self._estimate("functional.trace", lambda _: _difference(*traces))
        return self._estimate(
            f"{part}.trace",
            lambda checkpoint: trace(
                self.operators[part],
                rtol=_TRACE_ERROR,
                # Two seeds: the traces of H and H_o are subtracted, their errors independent.
                seed=2 * self.seed + (part == "outer"),
                max_products=self.products_asked or _trace_products(self.problem.size),
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
                learning_rate=self.situation.learning_rate,
                layers=True,
                seed=self.seed,
                max_products=self.products,
                memory=self.memory.vectors,
            )
            known = {"initial": False, "trained": True}.get(self.stage)
            situation = self.situation.at(self.problem, conditioning.loss, trained=known)
            recommendations, ruled_out = advise(
                [conditioning],
                self.problem,
                ends,
                held_out=self.held_out,
                situation=situation,
            )
            return Advice(
                conditioning=conditioning,
                recommendations=recommendations,
                situation=situation,
                ruled_out=ruled_out,
            )

        for line in advice_lines(self._estimate("advice", read)):
            self.say(f"  {line}")

    def _map(self) -> None:
        """The map over pairs of roles; biases count with their weights."""
        blocks = blocks_of(self.problem.anatomy, biases=False)
        if self.products_asked is not None and self.products_asked < 2 * len(blocks):
            self.run.warn(
                f"no map of roles: {len(blocks)} blocks need at least {2 * len(blocks)} products, "
                f"the budget allows {self.products_asked}."
            )
            return

        def draw(checkpoint: Path) -> Atlas:
            dense = self.problem.size <= _DENSE_MAP_PARAMETERS
            found = atlas(
                self.problem,
                biases=False,
                rtol=_MAP_ERROR,
                method="dense" if dense else "sketch",
                products=self.products_asked or max(_PRODUCTS, 5 * len(blocks)),
                seed=self.seed,
                budget=self.memory.graphs,
                checkpoint=checkpoint,
            )
            return found if dense else self._with_known_traces(found, blocks)

        self.say(f"  {self._estimate('atlas', draw)}")

    def _with_known_traces(self, found: Atlas, blocks: Sequence[AtlasBlock]) -> Atlas:
        """Traces by role that agree with the traces of the whole, where these were measured."""
        if "trace" in self.skip or "functional.trace" in self.failed:
            return with_known_traces(found, blocks)
        estimates = {part: self._trace(part) for part in ("outer", "functional")}
        diagonal = None
        if estimates["outer"].exact:
            outer = outer_part(self.full["outer"], _DEAREST_DIAGONAL)
            diagonal = None if outer is None else outer.diagonal.cpu()
        traces = {part: (e.value, e.error / _NORMAL) for part, e in estimates.items()}
        return with_known_traces(found, blocks, outer=diagonal, traces=traces)

    def _propagation(self) -> None:
        """Curvature by depth on all samples, group by group."""

        def flow(checkpoint: Path) -> CurvatureFlow:
            with self.problem.whole_model():  # it looks inside the model
                return flow_of_groups(checkpoint)

        def flow_of_groups(checkpoint: Path) -> CurvatureFlow:
            # Where every process has data of its own it accounts for its own groups.
            joins = self.problem.owns_data and self.problem.loss.additive
            samples, groups = _groups(self.problem, own=joins)
            analyzer = CurvaturePropagationAnalyzer(
                self.problem.model,
                self.problem.loss,
                budget=self.memory.graphs,
                method="matrix-free" if samples > _DENSE_FLOW_SAMPLES else "auto",
                seed=self.seed,
                compute_dtype=self.problem.compute_dtype,
            )
            counts = [group.count for group in groups]
            if joins:
                before = sum(parallel.from_every_process(len(groups))[: parallel.rank()])
                flows = parallel.together(lambda: accounts(analyzer, groups, [], first=before))
                flows, counts = _of_every_process(flows, counts)
            else:
                file = Checkpoint(checkpoint, {"estimate": "propagation", "groups": len(groups)})
                flows = _unpacked(file.load())
                try:
                    accounts(analyzer, groups, flows)
                except BaseException:
                    file.save(*_packed(flows))
                    raise
            summed = self.problem.loss.summed
            return pooled_flow(flows, [1.0 if summed else c / sum(counts) for c in counts])

        def accounts(
            analyzer: CurvaturePropagationAnalyzer,
            groups: Sequence[Batch],
            flows: list[CurvatureFlow],
            *,
            first: int = 0,
        ) -> list[CurvatureFlow]:
            """Add the accounts of the groups that are missing; first: number of the first one."""
            for index in track(range(len(flows), len(groups)), "propagation"):
                self.clock.check()
                analyzer.seed = self.seed + first + index  # probes of the groups are independent
                inputs, targets = groups[index].inputs, groups[index].targets
                account = analyzer.analyze_curvature_flow(inputs, targets)
                flows.append(_without_matrices(account))
                analyzer.history.clear()
            return flows

        self.say(f"  propagation: {str(self._estimate('propagation', flow)).splitlines()[0]}")


def _ordered(
    problem: Problem,
    operators: Collection[str],
    *,
    eigenvalues: int,
    products: int,
    products_asked: int | None,
    density_products: int,
    skip: Collection[str],
    work: dict[str, Callable[[str], object]],
) -> list[_Step]:
    """The steps after the subject: both ends of every spectrum, then the others by their cost.

    A step that needs another's result comes after it.
    """
    blocks = len(blocks_of(problem.anatomy, biases=False)) if "map" not in skip else 0
    # what estimates took on ViTs and GPTs, trained and not: benchmarks and the tests' surveys
    ends = {part: min(products, (6 if part == "outer" else 13) * eigenvalues) for part in operators}
    traces = {
        "total": min(products_asked or _trace_products(problem.size), 100),
        "outer": 30,
        "functional": 0,
    }
    density = min(density_products, products)
    layers = len({piece.layer for piece in problem.anatomy})
    known = any(p.sublayer in ("attention", "ffn", "norm") for p in problem.anatomy)
    steps: list[_Step] = []

    def add(kind: str, part: str, words: str, count: int, gradients: float) -> _Step:
        name = kind if kind in ("atlas", "propagation", "advice") else f"{part}.{kind}"
        return _Step(name, words, count, gradients, lambda: work[kind](part))

    first = [
        add("eigenpairs", p, f"ends of the spectrum of {_SYMBOLS[p]}", n, n * _GRADIENTS[p])
        for p, n in ends.items()
    ]
    if "trace" not in skip:
        steps += [
            add("trace", p, f"trace of {_SYMBOLS[p]}", n, n * _GRADIENTS[p])
            for p, n in traces.items()
        ]
    if "propagation" not in skip and known:
        count = (6 * layers + 3) * 12
        words = "curvature by depth, on all samples"
        steps.append(add("propagation", "", words, count, (6 * layers + 3) * _FLOW_GRADIENTS))
    if blocks:
        count = products_asked or min(5 * blocks, max(_PRODUCTS, 5 * blocks))
        steps.append(add("atlas", "", "map over pairs of roles", count, count * _MAP_GRADIENTS))
    if "density" not in skip:
        steps += [
            add("density", p, f"density of {_SYMBOLS[p]}", density, density * _GRADIENTS[p])
            for p in operators
        ]
        if "advice" not in skip:
            groups = layers + 2
            steps.append(add("advice", "", "sharpness by layer", 10 * groups, 20.0 * groups))
    # Stable: a trace of H_f, which is a difference, costs nothing and waits for both traces.
    needs = {"functional.trace": ("total.trace", "outer.trace"), "advice": ("total.density",)}
    if "trace" not in skip:
        needs["atlas"] = ("functional.trace",)
    ordered: list[_Step] = []
    waiting = sorted(steps, key=lambda step: step.gradients)
    while waiting:
        done = {step.name for step in ordered}
        ready = next(s for s in waiting if all(n in done for n in needs.get(s.name, ())))
        waiting.remove(ready)
        ordered.append(ready)
    return first + ordered


def _trace_products(size: int) -> int:
    """Most products of a trace: it is one number, and those of larger models cost more."""
    return min(_PRODUCTS, max(120, 3_000_000 // size))


def _basis_rows(eigenvalues: int) -> int:
    """Vectors that the search for both ends holds at once."""
    wanted = 2 * eigenvalues
    return 2 * wanted + max(6, wanted // 4) + 3


def plan_survey(
    problem: Problem,
    *,
    roles: Sequence[str] | None = None,
    skip: Collection[Skippable] = (),
    eigenvalues: int = 5,
    density_products: int = 150,
    products: int | None = None,
    memory: int | str | None = None,
) -> SurveyPlan:
    """What ``survey`` with the same options will take, from trials and the counts of work.

    Products with H and H_o are timed on the model's first layers and drawn out to all
    (``curvatlas.planning``); their numbers are those that the estimates have taken so far.
    """
    _check_options(problem, "model", skip, eigenvalues, density_products, products)
    problem.require_one_process("planning", maker="plan_survey")
    left_out = {*skip, "map", "propagation", "advice"} if roles else set(skip)
    vector = problem.size * problem.dtype.itemsize
    limit = memory_plan(None if memory is None else parse_bytes(memory), vector)
    costs = product_costs(problem, budget=limit.graphs)
    measured = []
    for _ in range(2):  # the first one also loads what libraries need
        started = clocks.perf_counter()
        problem.gradient()
        measured.append(clocks.perf_counter() - started)
    gradient = min(measured)
    steps = _ordered(
        problem,
        tuple(_SYMBOLS),
        eigenvalues=eigenvalues,
        products=products or _PRODUCTS,
        products_asked=products,
        density_products=density_products,
        skip=left_out,
        work={},
    )
    subject = PlannedStep(name="model, loss and roles", products=0, seconds=gradient)
    # The steps' counts in gradients are those of any model: here is what products really take.
    curved = costs.seconds["H"] / _GRADIENTS["total"]
    unit = {
        "total": curved,
        "functional": curved,
        "atlas": curved,
        "outer": costs.seconds["H_o"] / _GRADIENTS["outer"],
    }
    taken = [s.gradients * unit.get(s.name.split(".")[0], gradient) for s in steps]
    basis = max(_basis_rows(eigenvalues), min(30 + 3 * density_products // 10, 60) + 30)
    expected = min(costs.memory, limit.graphs) + min(basis * vector, limit.vectors)
    return SurveyPlan(
        steps=(
            subject,
            *(
                PlannedStep(name=step.words, products=step.products, seconds=seconds)
                for step, seconds in zip(steps, taken, strict=True)
            ),
        ),
        seconds=gradient + sum(taken),
        gradient_seconds=gradient,
        memory=int(expected),
        memory_limit=limit.total,
    )


def _groups(problem: Problem, *, own: bool) -> tuple[int, list[Batch]]:
    """(samples, all of them in about eight groups); a batch that cannot be cut is one of them.

    own: groups of this process's share only.
    """
    batches = list(problem.batches() if own else problem.all_batches())
    samples = sum(problem.units(batch) for batch in batches)
    if own:
        samples = sum(parallel.from_every_process(samples))
    size = max(1, math.ceil(samples / _FLOW_GROUPS))
    groups: list[Batch] = []
    for batch in batches if problem.loss.additive else batches[:1]:
        if not problem.separable:
            groups.append(batch)
            continue
        for start in range(0, batch.samples, size):
            part = batch.part(start, min(start + size, batch.samples), problem.loss.count)
            if part.count > 0:
                groups.append(part)
    return samples, groups


def subject_of(
    problem: Problem, *, name: str, data: str, state: str = "", basis: str = ""
) -> Subject:
    """Describe a ``Problem``; costs one gradient, and a product of one sample."""
    sizes: dict[tuple[int | None, str, str], int] = {}
    for piece in problem.anatomy:
        key = (piece.layer, piece.sublayer, piece.role)
        sizes[key] = sizes.get(key, 0) + piece.size
    return Subject(
        name=name,
        model=class_name(problem.model),
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
        engine=str(Hessian(problem).prepare()),
        basis=basis,
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


@dataclass(frozen=True, kw_only=True)
class _Accounts(Result):
    """The accounts of the groups so far: what a stopped propagation goes on from."""

    flows: tuple[CurvatureFlow, ...]


def _packed(flows: Sequence[CurvatureFlow]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, text = pack(_Accounts(flows=tuple(flows)))
    return tensors, {"accounts": text}


def _unpacked(state: State | None) -> list[CurvatureFlow]:
    if state is None:
        return []
    accounts = unpack(state[0], str(state[1]["accounts"]), "the checkpoint")
    return list(accounts.flows) if isinstance(accounts, _Accounts) else []


def _of_every_process(
    flows: Sequence[CurvatureFlow], counts: Sequence[float]
) -> tuple[list[CurvatureFlow], list[float]]:
    """The accounts and counts of valid targets of all processes, by rank."""
    tensors, said = _packed(flows)
    content = save(tensors, {"accounts": said["accounts"], "counts": json.dumps(list(counts))})
    everything: list[CurvatureFlow] = []
    totals: list[float] = []
    for received in parallel.contents(content):
        kept, arrived = files.parse(bytearray(received), "another process's account")
        everything += _unpacked((arrived, {"accounts": kept["accounts"]}))
        totals += json.loads(kept["counts"])
    return everything, totals


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
