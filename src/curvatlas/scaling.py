"""Scaling laws of loss and curvature, from real training runs.

>>> trainer = GridTrainer(
...     lambda width, seed: zoo.reference_vit(d_model=width, seed=seed))            # doctest: +SKIP
>>> grid = trainer.train_grid([8, 12, 16, 24], [100, 200, 400, 800], seeds=3,
...                            output="runs/scaling")                               # doctest: +SKIP
>>> print(optimal_dataset_size(grid, 4000, target=0.5))                            # doctest: +SKIP

A run is one model size N, one data size D and one seed, which draws the initial weights, the D
samples and their order, anew for every pair of sizes: runs are independent, and how far they
scatter between seeds is the error of every fit. Runs that did not train are kept, named and left
out of the laws.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvatlas.analysis.diagnostics import gradient_noise, scale_text
from curvatlas.errors import NonFiniteError
from curvatlas.figures.scaling import QUANTITIES
from curvatlas.fits import (
    Array,
    PlanePowerLaw,
    ScalingLaw,
    gathered,
    mean_reach,
    plane_power_law,
    scaling_law,
    second_descent,
    two_phases,
)
from curvatlas.operators.curvature import Hessian
from curvatlas.operators.per_sample import sample_losses, sample_operations
from curvatlas.problem import Problem
from curvatlas.problem.batches import batches_of
from curvatlas.problem.evaluation import in_evaluation_mode
from curvatlas.problem.losses import LossLike
from curvatlas.progress import track
from curvatlas.results import Interval, Number, Result
from curvatlas.runs import Run, subject
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.estimate import eigenvalue_half_widths, with_data_error
from curvatlas.spectra.summary import condition_density, condition_number
from curvatlas.spectra.trace import trace
from curvatlas.zoo.datasets import Dataset, Samples, digits, text
from curvatlas.zoo.training import evaluate, train

Data = Dataset | Any  # or what ``Problem`` takes; None: digits

Match = Literal["compute", "steps"]  # what every run of a grid has alike

_LOOKS = 12  # times loss and sharpness are looked at in training
_LOOK_SAMPLES = 24  # that the sharpness in training is measured on
_LOOK_PRODUCTS = 16
_CHOOSERS, _JUDGES = 256, 1024  # most validation samples that choose the weights, that judge them
_BATCHES = 8  # that the curvature's samples are cut into: their scatter is its data interval
_NOISE_SAMPLES = 48  # whose gradients make the critical batch size
_FEWEST_LOOKS = 7  # for the phases of a run
_SIGNIFICANT = 0.05


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HessianNorm(Result):
    """‖H‖₂ of one model's loss, both ends of the spectrum and what lies between."""

    value: float  # ‖H‖₂, the largest |λ|
    interval: Interval  # certified
    top_eigenvalue: float  # λmax
    bottom_eigenvalue: float  # λmin
    condition_number: float  # λmax over the mean |λ|
    condition_interval: Interval  # 95 %
    effective_rank: float
    effective_rank_interval: Interval
    negative_mass: float
    products: int
    converged: bool
    data_interval: Interval | None = None  # 95 %, of ‖H‖ over the batches, where there are several

    def __str__(self) -> str:
        low, high = self.condition_interval
        return (
            f"‖H‖ = {Number(self.value, *self.interval)}, λ in "
            f"[{self.bottom_eigenvalue:.4g}, {self.top_eigenvalue:.4g}], λmax/mean|λ| "
            f"{Number(self.condition_number, low, high)}, effective rank "
            f"{Number(self.effective_rank, *self.effective_rank_interval)}"
        )


def hessian_norm(
    operator: Hessian,
    *,
    products: int = 60,
    rtol: float = 1e-3,
    seed: int = 0,
    groups: Hessian | None = None,
) -> HessianNorm:
    """Both ends by Lanczos, condition number and effective rank by quadrature.

    products: for the quadrature.
    groups: the same Hessian over smaller batches, whose scatter is the data interval.
    """
    ends = eigenpairs(operator, k=1, which="both", tol=rtol, seed=seed, data_error=False)
    density = condition_density(operator, max_products=products, seed=seed)
    largest = int(ends.values.abs().argmax())  # ‖H‖ may be that of the most negative eigenvalue
    radius = float(ends.interval[1][largest] - ends.interval[0][largest]) / 2
    norm = abs(float(ends.values[largest]))
    low, top, high = (float(end[0]) for end in (ends.interval[0], ends.values, ends.interval[1]))
    condition, condition_interval = condition_number((low, top, high), density)
    data_interval = None
    scatter = eigenvalue_half_widths(groups or operator, ends.vectors[:, largest : largest + 1])
    if scatter is not None:
        half = float(scatter[0][0])
        data_interval = (norm - half, norm + half)
    return HessianNorm(
        value=norm,
        data_interval=data_interval,
        interval=(norm - radius, norm + radius),
        top_eigenvalue=top,
        bottom_eigenvalue=float(ends.values[-1]),
        condition_number=condition,
        condition_interval=condition_interval,
        effective_rank=density.effective_rank,
        effective_rank_interval=density.effective_rank_interval,
        negative_mass=density.negative_mass,
        products=ends.products + density.products,
        converged=ends.converged,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingLooks(Result):
    """What a training run looked like on its way, at evenly spaced steps."""

    steps: tuple[int, ...]
    training_loss: tuple[float, ...]  # on the first few training samples
    validation_loss: tuple[float, ...]  # on the samples that choose the weights
    sharpness: tuple[float, ...]  # λmax on the first few training samples

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, kw_only=True)
class ScalingCell(Result):
    """Loss and curvature of one trained model, at the weights with the best validation loss."""

    size: str  # as given to the factory
    parameters: int
    samples: int
    seed: int
    steps: int
    best_step: int
    training_loss: float
    validation_loss: float  # on the half of the validation data that did not choose the weights
    validation_interval: Interval  # 95 %, over those samples
    validation_accuracy: float | None
    hessian_norm: float  # largest |λ| of the training loss
    hessian_norm_interval: Interval
    smallest: float  # λmin
    trace: float
    trace_interval: Interval
    effective_rank: float
    effective_rank_interval: Interval
    condition_number: float  # λmax over the mean |λ|
    condition_interval: Interval  # 95 %
    negative_mass: float
    noise_scale: float
    critical_batch_size: float
    critical_batch_interval: Interval  # (bound, ∞) of a lower bound
    curvature_samples: int
    products: int
    seconds: float
    top_eigenvalue: float = float("nan")  # λmax
    processor_seconds: float = float("nan")
    final_validation_loss: float = float("nan")  # after the last step, not at the best weights
    critical_batch_is_bound: bool = False  # a lower one: the samples set no upper limit
    # 95 %, over the D samples of the run; None where all of them were used, and there is no error
    hessian_norm_data_interval: Interval | None = None
    trace_data_interval: Interval | None = None
    operations: float = float("nan")  # of the training, multiplications and additions
    looks: TrainingLooks | None = None
    failure: str = ""  # what stopped the run

    also = ("n_params", "n_samples", "bottom_eigenvalue")

    @property
    def value(self) -> float:
        return self.validation_loss

    @property
    def n_params(self) -> int:
        """N, by the article's name."""
        return self.parameters

    @property
    def n_samples(self) -> int:
        """D, by the article's name."""
        return self.samples

    @property
    def bottom_eigenvalue(self) -> float:
        """λmin, by the article's name."""
        return self.smallest

    @property
    def left_out(self) -> str:
        """Why the laws are fitted without this run; empty where they are not."""
        if self.failure:
            return self.failure
        if self.best_step == 0:
            return "training never brought the validation loss below that of the first weights"
        if not math.isfinite(self.validation_loss):
            return f"the validation loss is {self.validation_loss}"
        return ""

    @property
    def trained(self) -> bool:
        """Whether the laws may use this run."""
        return not self.left_out

    def __str__(self) -> str:
        name = f"N = {self.parameters}, D = {self.samples}, seed {self.seed}"
        if self.failure:
            return f"{name}: left out, {self.failure}"
        batch = scale_text(
            self.critical_batch_size,
            self.critical_batch_interval,
            bound=self.critical_batch_is_bound,
        )
        return (
            f"{name}: validation loss {Number(self.validation_loss, *self.validation_interval)} "
            f"(training {self.training_loss:.4f}), ‖H‖ = "
            f"{Number(self.hessian_norm, *self.hessian_norm_interval)}, trace "
            f"{Number(self.trace, *self.trace_interval)}, effective rank "
            f"{Number(self.effective_rank, *self.effective_rank_interval)}, critical batch {batch} "
            f"({self.seconds:.0f} s)" + (f"; left out, {self.left_out}" if self.left_out else "")
        )


@dataclass(frozen=True, kw_only=True)
class RunPhases(Result):
    """Do training runs change fast and then settle? One curve of every run as two lines."""

    quantity: str  # of ``TrainingLooks``, in logarithms
    runs: int
    bent: int  # runs that one straight line does not describe (p < 1 %) and that slow down
    change: float  # median over runs: where the bend is, as a share of the training
    change_range: Interval  # the middle 95 % of the runs
    share_before: float  # median: how much of the way is done there
    slowing: float  # mean over runs of (|rate before| − |rate after|) / (mean rate)
    interval: Interval  # 95 %, Student over runs; above zero: fast, then slow
    late_rate: float  # mean change of the logarithm over the second phase, were it the whole run
    late_interval: Interval

    @property
    def value(self) -> float:
        return self.slowing

    @property
    def verdict(self) -> str:
        """ "fast, then slow", "no slowing", or "undecided"; and whether it settles."""
        low, high = self.interval
        if low > 0:
            (a, b) = self.late_interval
            settled = "settled" if a <= 0 <= b else "still moving"
            return f"fast, then slow ({settled} at the end)"
        return "no slowing" if high < 0 else "undecided"

    def __str__(self) -> str:
        (low, high), (a, b) = self.interval, self.late_interval
        return (
            f"{self.quantity.replace('_', ' ')} over training: {self.verdict}; {self.bent} of "
            f"{self.runs} runs bend, at {self.change:.0%} of the steps with {self.share_before:.0%}"
            f" of the way done (medians); slowing {self.slowing:.2f} [{low:.2f}, {high:.2f}] of "
            f"the mean rate, late rate {self.late_rate:+.2f} [{a:+.2f}, {b:+.2f}] a run (95 %, "
            "over runs)"
        )


@dataclass(frozen=True, kw_only=True)
class DescentLine(Result):
    """One curve of the grid, tested for a second descent of the validation loss."""

    along: str  # "parameters", "samples" or "steps"
    at: str  # what was held
    start: float  # the place before the rise, at its top and after the second fall
    top: float
    end: float
    rise: float  # of the loss, as a factor
    rise_interval: Interval
    fall: float  # from the top to the end, as a factor below one
    fall_interval: Interval
    p_value: float  # Holm's, over all curves of the grid

    @property
    def value(self) -> float:
        return self.rise

    @property
    def found(self) -> bool:
        """At 5 % over all curves together."""
        return self.p_value < _SIGNIFICANT

    def __str__(self) -> str:
        (a, b), (c, d) = self.rise_interval, self.fall_interval
        return (
            f"along {self.along} at {self.at}: × {self.rise:.3g} [{a:.3g}, {b:.3g}] from "
            f"{self.start:g} to {self.top:g}, then × {self.fall:.3g} [{c:.3g}, {d:.3g}] to "
            f"{self.end:g} (p = {self.p_value:.2g} over all curves)"
        )


@dataclass(frozen=True, kw_only=True)
class DoubleDescent(Result):
    """Whether the loss rises and falls again along N, D or the steps, beyond what seeds scatter."""

    lines: tuple[DescentLine, ...]  # most significant first
    why_not: str = ""  # why there is nothing to test

    @property
    def found(self) -> tuple[DescentLine, ...]:
        """The curves with a second descent."""
        return tuple(line for line in self.lines if line.found)

    def __str__(self) -> str:
        if not self.lines:
            return f"double descent: not tested, {self.why_not}"
        if not self.found:
            best = self.lines[0]
            return f"double descent: none in {len(self.lines)} curves; the nearest {best}"
        told = "; ".join(str(line) for line in self.found)
        return f"double descent: in {len(self.found)} of {len(self.lines)} curves; {told}"


@dataclass(frozen=True, kw_only=True)
class GridPoint(Result):
    """One quantity at one pair of sizes: the geometric mean over seeds."""

    parameters: int
    samples: int
    value: float
    interval: Interval  # 95 %: over seeds, pooled over the grid; of the estimate with one seed
    runs: int


@dataclass(frozen=True, kw_only=True)
class ScalingGrid(Result):
    """Runs over model and data sizes and seeds, with the laws fitted to them."""

    cells: tuple[ScalingCell, ...]
    law: ScalingLaw | None  # L = E + A/N^α + B/D^β; None where there are too few sizes
    planes: dict[str, PlanePowerLaw]  # each quantity as C N^a D^b
    phases: dict[str, RunPhases] = field(default_factory=dict)
    descent: DoubleDescent | None = None
    notes: tuple[str, ...] = ()  # runs left out, laws not fitted, errors not known: and why

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """One mapping a run, for tables and ``plot_scaling_law_predictions``."""
        hidden = ("kind", "looks")
        return tuple(
            {
                **{key: value for key, value in cell.to_dict().items() if key not in hidden},
                "left_out": cell.left_out,
            }
            for cell in self.cells
        )

    @property
    def trained(self) -> tuple[ScalingCell, ...]:
        """The runs that the laws are fitted to."""
        return tuple(cell for cell in self.cells if cell.trained)

    def points(self, quantity: str) -> tuple[GridPoint, ...]:
        """Means over seeds with their errors, by N and then D; runs that count only."""
        usable = [c for c in self.trained if _usable(c, quantity)]
        if not usable:
            return ()
        values = np.array([float(getattr(c, quantity)) for c in usable])
        sizes = [
            np.array([float(getattr(c, a)) for c in usable]) for a in ("parameters", "samples")
        ]
        cells = gathered(values, *sizes)
        found = []
        for n, d, mean, count in zip(*cells.sizes, cells.log_means, cells.counts, strict=True):
            value = math.exp(mean)
            if cells.within_freedom:
                half = _student(cells.within_freedom) * float(cells.seed_scatter or 0.0)
                factor = math.exp(half / math.sqrt(count))
                interval = (value / factor, value * factor)
            else:
                (cell,) = (c for c in usable if (c.parameters, c.samples) == (n, d))
                interval = getattr(cell, QUANTITIES[quantity][1])
            found.append(
                GridPoint(
                    parameters=int(n),
                    samples=int(d),
                    value=value,
                    interval=interval,
                    runs=int(count),
                )
            )
        return tuple(found)

    def law_of(self, quantity: str) -> ScalingLaw | PlanePowerLaw | None:
        """The law that is drawn through a quantity."""
        if quantity == "validation_loss" and self.law is not None:
            return self.law
        return self.planes.get(quantity)

    @property
    def fits(self) -> dict[str, dict[str, Any]]:
        """Exponents with intervals, one mapping a law."""
        found: dict[str, dict[str, Any]] = {}
        if self.law is not None:
            found["loss, E + A/N^α + B/D^β"] = {
                name: getattr(self.law, name)
                for letter in ("alpha", "beta", "E")
                for name in (letter, f"{letter}_interval")
            }
        for name, plane in self.planes.items():
            found[f"{name}, C N^a D^b"] = {
                "a": plane.by_parameters,
                "a_interval": plane.parameters_interval,
                "b": plane.by_samples,
                "b_interval": plane.samples_interval,
            }
        return found

    def _derived(self) -> dict[str, Any]:
        """Rows, means over seeds, curves of the laws, fits, findings."""
        findings = [f"loss law: {self.law}"] if self.law is not None else []
        findings += [str(phases) for phases in self.phases.values()]
        findings += [str(self.descent)] if self.descent is not None else []
        return {
            "rows": self.rows,
            "points": {name: self.points(name) for name in QUANTITIES},
            "curves": {name: self._curves(name) for name in QUANTITIES},
            "fits": self.fits,
            "findings": findings,
        }

    def _curves(self, quantity: str) -> list[dict[str, Any]]:
        """The law of a quantity for every model size, over the data sizes."""
        law, points = self.law_of(quantity), self.points(quantity)
        if law is None:
            return []
        data = np.geomspace(min(p.samples for p in points), max(p.samples for p in points), 24)
        return [
            {"parameters": n, "samples": data.tolist(), "values": law(n, data).tolist()}
            for n in sorted({p.parameters for p in points})
        ]

    def __iter__(self) -> Iterator[ScalingCell]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, key: Any) -> Any:
        """A field by name, or one run by number."""
        return super().__getitem__(key) if isinstance(key, str) else self.cells[key]

    def series(self, quantity: str) -> list[float]:
        return [float(getattr(cell, quantity)) for cell in self.cells]

    def __str__(self) -> str:
        lines = [str(cell) for cell in self.cells]
        if self.law is not None:
            lines.append(f"loss law: {self.law}")
        lines += [f"{name} {plane}" for name, plane in self.planes.items()]
        lines += [str(phases) for phases in self.phases.values()]
        lines += [str(self.descent)] if self.descent is not None else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _usable(cell: ScalingCell, quantity: str) -> bool:
    """A positive number that is no mere bound."""
    if quantity == "critical_batch_size" and cell.critical_batch_is_bound:
        return False
    value = float(getattr(cell, quantity))
    return math.isfinite(value) and value > 0


def _student(freedom: int) -> float:
    return float(stats.t.ppf(0.975, freedom))


@dataclass(frozen=True, kw_only=True)
class DatasetPrediction(Result):
    """How much data a model of a given size needs."""

    value: float  # samples
    interval: Interval  # 95 %; the upper end is infinite when the fit allows it
    parameters: float
    quantity: str
    target: float | None  # None: compute-optimal, dL/dN = dL/dD at equal compute N·D
    measured_range: Interval  # of D in the grid
    factor: float  # beyond measured_range × factor no prediction is made
    extrapolated: bool

    def __str__(self) -> str:
        low, high = self.interval
        aim = "compute-optimal" if self.target is None else f"{self.quantity} = {self.target:.4g}"
        inside = "extrapolated beyond" if self.extrapolated else "within"
        first, last = self.measured_range
        return (
            f"{aim} at N = {self.parameters:.4g}: D = {self.value:.4g} [{low:.4g}, {high:.4g}] "
            f"(95 %), {inside} the measured {first:.4g} … {last:.4g}"
        )


@dataclass(frozen=True, kw_only=True)
class PredictionComparison(Result):
    """Validation loss of held-out runs, predicted from smaller ones in three ways."""

    held_out: str  # what was held out
    actual: tuple[float, ...]
    by_loss: tuple[float, ...]  # extrapolating the loss itself
    by_curvature: tuple[float, ...]  # extrapolating curvature, and loss as a function of it
    curvature: str  # the measure of it: the trace, or the norm where a trace is negative
    control: tuple[float, ...]  # no model: the loss of the nearest run that was kept
    errors: dict[str, float]  # mean |log(predicted / actual)|
    intervals: dict[str, Interval]  # 95 %, Student over the held-out runs

    @property
    def value(self) -> float:
        """Error by curvature over error by loss: above one, curvature predicts worse."""
        return self.errors["curvature"] / max(self.errors["loss"], 1e-300)

    def __str__(self) -> str:
        told = ", ".join(
            f"{name} {error:.1%} [{max(self.intervals[name][0], 0):.1%}, "
            f"{self.intervals[name][1]:.1%}]"
            for name, error in self.errors.items()
        )
        best = min(self.errors, key=lambda name: self.errors[name])
        return f"error of the predicted loss ({self.held_out}): {told}; smallest by {best}"


# --- the analysis ---------------------------------------------------------------------------------


class GridTrainer:
    """Trains models that ``model_factory`` makes, on growing data, and fits what it sees.

    Models and batches are those of ``Problem``: Hugging Face models and mappings too.
    model_factory: size → model, weights drawn with torch's generator; or (size, seed) → model, for
    a factory that has an argument called ``seed``.
    dataloader: the data of ``train_grid`` where a call brings none; None: digits, or windows of a
    text for models that look tokens up.
    """

    def __init__(
        self, model_factory: Callable[..., nn.Module], *, loss: LossLike = "cross_entropy"
    ) -> None:
        self.model_factory = model_factory
        self.loss = loss
        self.dataloader: Data = None
        self.grid: ScalingGrid | None = None

    def train_grid(
        self,
        model_sizes: Sequence[Any],
        dataset_sizes: Sequence[int],
        *,
        data: Data = None,
        output: str | os.PathLike[str] | Run | None = None,
        seeds: int | None = None,
        steps: int = 600,
        match: Match = "compute",
        lr: float = 5e-3,
        batch_size: int = 32,
        curvature_samples: int | None = 192,
        products: int = 60,
        seed: int = 0,
        loss: LossLike | None = None,
    ) -> ScalingGrid:
        """Train every pair of sizes, measure loss and curvature, fit the laws.

        data: a ``Dataset``, or what ``Problem`` takes, (inputs, targets), mappings with labels or
            loaders of either, of which a fifth is held out (default: ``dataloader``).
        output: a run folder (or an open ``Run``, left open); each finished run is stored, and the
            same call resumes it.
        seeds: runs at every pair of sizes, 2 or more: errors are then those between seeds. None is
            one run each, whose errors are the scatter around the fitted law.
        steps: of the model that takes the most operations a sample; with match="compute" the others
            take as many more as they are cheaper, with "steps" all take as many.
        curvature_samples: of the training samples that curvature is measured on. A run with more
            gets an interval for its data, None measures on all D.
        """
        chosen = self.loss if loss is None else loss
        dataset = self._dataset(data, model_sizes, chosen, seed)
        sizes = _check_sizes(model_sizes, dataset_sizes, dataset.train.size)
        if seeds is not None and seeds < 2:
            raise ValueError(f"an error between seeds needs at least 2 seeds, got {seeds}.")
        if match not in ("compute", "steps"):
            raise ValueError(f"match is 'compute' or 'steps', got {match!r}.")
        effort: dict[str, Any] = {
            "steps": steps,
            "lr": lr,
            "batch_size": batch_size,
            "seed": seed,
            "curvature_samples": curvature_samples,
            "products": products,
        }
        runs = [
            (i, j, k)
            for j in range(len(sizes))
            for i in range(len(model_sizes))
            for k in range(seed, seed + (seeds or 1))
        ]
        costs = self._operations(model_sizes, dataset, chosen, seed)
        if seeds is not None:
            self._check_seeds(model_sizes[0], seed)
        taken = [steps if match == "steps" else round(steps * max(costs) / c) for c in costs]

        def cell(i: int, j: int, k: int) -> ScalingCell:
            drawn = _cell_seed(k, i, j)
            order = torch.randperm(
                dataset.train.size, generator=torch.Generator().manual_seed(drawn)
            )
            return run_cell(
                functools.partial(self.made, model_sizes[i], drawn),
                dataset.train.at(order[: sizes[j]]),
                dataset.validation,
                size=_label(model_sizes[i]),
                loss=chosen,
                draws=drawn,
                operations=costs[i],
                **{**effort, "seed": k, "steps": taken[i]},
            )

        if output is None:
            cells = [cell(*run) for run in track(runs, "scaling grid", total=len(runs))]
            self.grid = fit_grid(cells)
        elif isinstance(output, Run):
            self.grid = _stored(output, runs, cell)
        else:
            options = {
                "model_sizes": [_label(s) for s in model_sizes],
                "dataset_sizes": sizes,
                "loss": chosen
                if isinstance(chosen, str)
                else getattr(chosen, "__name__", "callable"),
                **effort,
                "seeds": seeds,
                "match": match,
            }
            marks: Any = self.fingerprints(model_sizes, dataset, seed)
            with Run.create(output, options=options, **marks) as run:
                self.grid = _stored(run, runs, cell)
        return self.grid

    def _dataset(
        self, data: Data, model_sizes: Sequence[Any], loss: LossLike, seed: int
    ) -> Dataset:
        given = self.dataloader if data is None else data
        if given is not None or not model_sizes:
            return as_dataset(given)
        return default_dataset(self.made(model_sizes[0], seed), loss)

    def made(self, size: Any, seed: int) -> nn.Module:
        """The model of one size and seed; what a factory gets wrong is said in one line."""
        try:
            takes_seed = "seed" in inspect.signature(self.model_factory).parameters
        except (TypeError, ValueError):  # a builtin: nothing to read
            takes_seed = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                made = self.model_factory(size, **({"seed": seed} if takes_seed else {}))
            except TypeError as error:
                reason = " ".join(str(error).split())
                raise TypeError(
                    f"model_factory({size!r}) failed: {reason}. A factory takes the size, and the "
                    "seed if it has an argument of that name."
                ) from error
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"model_factory({size!r}) gave a {type(made).__name__}, expected an nn.Module."
            )
        return made

    def _operations(
        self, sizes: Sequence[Any], data: Dataset, loss: LossLike, seed: int
    ) -> list[int]:
        """Operations of a forward pass of one sample, by model size."""
        costs, counts = [], []
        for size in sizes:
            model = self.made(size, seed)
            with in_evaluation_mode(model):
                problem = Problem(model, loss, data.train.take(2).batch)
                costs.append(sample_operations(problem) or problem.size)
            counts.append(problem.size)
        if len(sizes) > 1 and len(set(counts)) == 1:
            raise ValueError(
                f"the factory makes {counts[0]} parameters for each of the sizes "
                f"{', '.join(map(_label, sizes))}: it does not use the size."
            )
        return costs

    def _check_seeds(self, size: Any, seed: int) -> None:
        """Say so where the seed does not reach the weights."""
        first, second = (
            [p.detach() for p in self.made(size, seed + k).parameters()] for k in (0, 1)
        )
        if all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
            warnings.warn(
                "the factory makes the same weights from every seed: errors between seeds hold the "
                "choice and the order of the samples only. Give it an argument seed=, or let it "
                "draw with torch's generator.",
                stacklevel=3,
            )

    def fingerprints(self, sizes: Sequence[Any], data: Data, seed: int) -> dict[str, str]:
        """What a run folder remembers of the models and the data, to resume only the same ones."""
        dataset = as_dataset(data)
        prints = [subject.of_model(self.made(size, seed)) for size in sizes]
        return {
            "model_fingerprint": subject.of_data([json.dumps(prints)]),
            "data_fingerprint": subject.of_data([tuple(dataset.train), tuple(dataset.validation)]),
        }


def _cell_seed(seed: int, model: int, data: int) -> int:
    """A seed of its own for every run: with shared ones, errors would go together along N or D."""
    return int(np.random.SeedSequence([seed, model, data]).generate_state(1)[0])


def _stored(
    run: Run, runs: Sequence[tuple[int, int, int]], cell: Callable[[int, int, int], ScalingCell]
) -> ScalingGrid:
    cells = [
        run.step(f"cell.n{i}.d{j}.s{k}", functools.partial(cell, i, j, k))
        for i, j, k in track(runs, "scaling grid", total=len(runs))
    ]
    return run.step("grid", lambda: fit_grid(cells))


def fit_grid(cells: Sequence[ScalingCell]) -> ScalingGrid:
    """The laws of a set of runs, and what the runs say of phases and second descents."""
    trained = [c for c in cells if c.trained]
    notes = [f"{_name(c)} is left out: {c.left_out}" for c in cells if not c.trained]
    models, data = (len({getattr(c, a) for c in trained}) for a in ("parameters", "samples"))
    planes: dict[str, PlanePowerLaw] = {}
    for name in QUANTITIES:
        usable = [c for c in trained if _usable(c, name)]
        if _spans(usable, 2, 4):
            try:
                planes[name] = plane_power_law(*_columns(usable, name))
            except ValueError as reason:  # runs that are left lie on a line
                notes.append(f"no law of the {name.replace('_', ' ')}: {reason}")
        if name == "critical_batch_size" and len(usable) < len(trained):
            notes.append(
                f"the critical batch size of {len(trained) - len(usable)} runs is only a lower "
                "bound: its law is fitted without them"
            )
    law = None
    if _spans(trained, 3, 7):
        law = scaling_law(*_columns(trained, "validation_loss"))
    else:
        notes.append(
            "no law of the loss: it takes 3 model sizes, 3 data sizes and 7 pairs of them, the "
            f"runs that trained have {models}, {data} and {len(_pairs(trained))}"
        )
    if trained and len(trained) == len(_pairs(trained)):
        notes.append(
            "one seed at each pair of sizes: intervals come from the scatter around the fitted "
            "law, not from repeated runs"
        )
    return ScalingGrid(
        cells=tuple(cells),
        law=law,
        planes=planes,
        phases=_phases(trained),
        descent=_descents([c for c in cells if not c.failure]),
        notes=tuple(notes),
    )


def _name(cell: ScalingCell) -> str:
    return f"N = {cell.parameters}, D = {cell.samples}, seed {cell.seed}"


def _pairs(cells: Sequence[ScalingCell]) -> set[tuple[int, int]]:
    return {(c.parameters, c.samples) for c in cells}


def _spans(cells: Sequence[ScalingCell], sizes: int, pairs: int) -> bool:
    """Whether there are enough different sizes for a fit."""
    found = _pairs(cells)
    return len(found) >= pairs and all(len(set(axis)) >= sizes for axis in zip(*found, strict=True))


def _columns(cells: Sequence[ScalingCell], quantity: str) -> tuple[list[float], ...]:
    names = ("parameters", "samples", quantity)
    return tuple([float(getattr(c, name)) for c in cells] for name in names)


def _phases(cells: Sequence[ScalingCell]) -> dict[str, RunPhases]:
    """Sharpness and loss over training, each run as two lines, judged over runs."""
    found = {}
    for quantity in ("sharpness", "training_loss", "validation_loss"):
        fits, lengths = [], []
        for cell in cells:
            if cell.looks is None:
                continue
            values = np.array(getattr(cell.looks, quantity))
            keep = np.isfinite(values) & (values > 0)
            if keep.sum() < _FEWEST_LOOKS:
                continue
            steps = np.array(cell.looks.steps)[keep] / cell.steps  # a run is one unit long
            fits.append(two_phases(steps, np.log(values[keep]), seed=cell.seed))
            lengths.append(float(steps[-1] - steps[0]))
        if len(fits) < 2:
            continue
        mean_rates = np.array(
            [
                abs(f.rate_before) * f.change + abs(f.rate_after) * (length - f.change)
                for f, length in zip(fits, lengths, strict=True)
            ]
        )
        fast = np.array([abs(f.rate_before) - abs(f.rate_after) for f in fits])
        slowing = fast / np.maximum(mean_rates, 1e-300)
        late = np.array([f.rate_after for f in fits])
        places = np.array([f.change for f in fits])
        ends = np.quantile(places, [0.025, 0.975])
        found[quantity] = RunPhases(
            quantity=quantity,
            runs=len(fits),
            bent=sum(f.slows_down for f in fits),
            change=float(np.median(places)),
            change_range=(float(ends[0]), float(ends[1])),
            share_before=float(np.median([f.share_before for f in fits])),
            slowing=float(slowing.mean()),
            interval=_around(slowing),
            late_rate=float(late.mean()),
            late_interval=_around(late),
        )
    return found


def _around(values: Array) -> Interval:
    half = mean_reach(values)
    return float(values.mean() - half), float(values.mean() + half)


def _descents(cells: Sequence[ScalingCell]) -> DoubleDescent:
    """Every curve of the grid that has 2 seeds and 3 points, tested together (Holm).

    Along N and D it is the loss after the last step: choosing the best weights, early stopping,
    takes a second descent away.
    """
    finals: dict[tuple[int, int], dict[int, float]] = {}
    for cell in cells:
        finals.setdefault((cell.parameters, cell.samples), {})[cell.seed] = (
            cell.final_validation_loss
        )
    curves: list[tuple[str, str, list[float], Any]] = []
    for along, held, sign in (("parameters", 1, "D"), ("samples", 0, "N")):
        for size in sorted({key[held] for key in finals}):
            line = sorted(key for key in finals if key[held] == size)
            curves.append(
                (
                    along,
                    f"{sign} = {size}",
                    [float(key[1 - held]) for key in line],
                    _by_seed([finals[key] for key in line]),
                )
            )
    for n, d in sorted(finals):
        looks = {c.seed: c.looks for c in cells if (c.parameters, c.samples) == (n, d)}
        steps = next((look.steps for look in looks.values() if look is not None), ())
        curve = [
            {
                seed: look.validation_loss[k]
                for seed, look in looks.items()
                if look is not None and len(look) > k
            }
            for k in range(len(steps))
        ]
        curves.append(("steps", f"N = {n}, D = {d}", [float(s) for s in steps], _by_seed(curve)))
    tested = [
        (along, at, places, second_descent(rows))
        for along, at, places, rows in curves
        if rows is not None and rows.shape[0] >= 2 and rows.shape[1] >= 3
    ]
    if not tested:
        return DoubleDescent(
            lines=(), why_not="it takes 2 seeds and 3 sizes (or looks) that are all finite"
        )
    tested.sort(key=lambda entry: entry[3].p_value)
    lines, highest = [], 0.0
    for k, (along, at, places, found) in enumerate(tested):
        highest = max(highest, min(1.0, found.p_value * (len(tested) - k)))
        low, high = found.rise_interval
        least, most = found.fall_interval
        lines.append(
            DescentLine(
                along=along,
                at=at,
                start=places[found.start],
                top=places[found.top],
                end=places[found.end],
                rise=math.exp(found.rise),
                rise_interval=(math.exp(low), math.exp(high)),
                fall=math.exp(-found.fall),
                fall_interval=(math.exp(-most), math.exp(-least)),
                p_value=highest,
            )
        )
    return DoubleDescent(lines=tuple(lines))


def _by_seed(points: Sequence[Mapping[int, float]]) -> Array | None:
    """Logarithms (seeds, points) of the seeds that every point has; None where any is missing."""
    seeds = sorted(set.intersection(*(set(point) for point in points))) if points else []
    rows = np.array([[point[seed] for point in points] for seed in seeds])
    if not seeds or not np.isfinite(rows).all() or not (rows > 0).all():
        return None
    return np.asarray(np.log(rows))


def _parameters_of(grid: ScalingGrid, size: Any) -> float:
    for cell in grid.cells:
        if cell.size == _label(size):
            return float(cell.parameters)
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not size > 0:
        raise ValueError(f"{size!r} is neither a size of the grid nor a number of parameters.")
    return float(size)


def _label(size: Any) -> str:
    return str(size)


def as_dataset(data: Data) -> Dataset:
    """The data as a ``Dataset``: a fifth held out of what is not split."""
    if isinstance(data, Dataset):
        return data
    samples = joined_samples(data)
    held = max(2, samples.size // 5)
    classes = 0 if samples.targets.is_floating_point() else int(samples.targets.max()) + 1
    return Dataset(
        name="data",
        train=samples.at(slice(held, None)),
        validation=samples.take(held),
        classes=classes,
    )


def default_dataset(model: nn.Module, loss: LossLike) -> Dataset:
    """Digits where the model takes them; else windows of a text in the tokens it knows, with the
    next token (or, for one output a sample, the last one) as target."""
    if _reads(model, loss, digits()):
        return digits()
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    for vocabulary in dict.fromkeys(tables):
        for context in (64, 32, 16, 8, 4, 2):
            spoken = text(context=context)
            ranks = spoken.train.inputs.flatten().bincount(minlength=256).argsort(descending=True)
            token = ranks.argsort().clamp(max=vocabulary - 1)  # by frequency; rare ones are one
            parts = [
                Samples(*(token[t] for t in part)) for part in (spoken.train, spoken.validation)
            ]
            for windows in (parts, [Samples(p.inputs, p.targets[:, -1]) for p in parts]):
                dataset = Dataset(
                    name=spoken.name, train=windows[0], validation=windows[1], classes=vocabulary
                )
                if _reads(model, loss, dataset):
                    return dataset
    raise ValueError(
        f"{type(model).__name__} takes neither digits nor tokens of a text: pass data=, or set "
        "dataloader."
    )


def _reads(model: nn.Module, loss: LossLike, dataset: Dataset) -> bool:
    try:
        with in_evaluation_mode(model), torch.no_grad():
            Problem(model, loss, dataset.train.take(2).batch).value()
    except (RuntimeError, TypeError, ValueError, LookupError):
        return False
    return True


def joined_samples(data: Any) -> Samples:
    """The batches of whatever ``Problem`` takes as one set of samples."""
    parts = []
    for index, raw in enumerate(batches_of(data, dtype=torch.get_default_dtype())):
        if isinstance(raw, Mapping) and isinstance(raw.get("labels"), Tensor):
            tensors = {k: v for k, v in raw.items() if isinstance(v, Tensor) and k != "labels"}
            parts.append(Samples(tensors, raw["labels"]))
        elif isinstance(raw, (tuple, list)) and len(raw) == 2 and isinstance(raw[1], Tensor):
            parts.append(Samples(*raw))
        else:
            raise ValueError(
                f"batch {index} is a {type(raw).__name__}: scaling takes (inputs, targets) or a "
                "mapping with 'labels'."
            )
    try:
        return Samples(*tree_map(lambda *tensors: torch.cat(tensors), *map(tuple, parts)))
    except (RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ValueError(
            f"the batches do not join into one set of samples ({reason}): pad them to one length."
        ) from error


def _check_sizes(models: Sequence[Any], sizes: Sequence[int], available: int) -> list[int]:
    if not models or not sizes:
        raise ValueError("give at least one model size and one data size.")
    for size in sizes:
        if not 2 <= size <= available:
            raise ValueError(f"data sizes must lie in 2 … {available} (the data), got {size}.")
    return [int(size) for size in sizes]


# --- one run --------------------------------------------------------------------------------------


def run_cell(
    make: Callable[[], nn.Module],
    training: Samples,
    validation: Samples,
    *,
    size: str,
    loss: Any,
    steps: int,
    lr: float,
    batch_size: int,
    curvature_samples: int | None,
    products: int,
    seed: int,
    draws: int,
    operations: float = float("nan"),
) -> ScalingCell:
    """Train, keep the best weights, measure curvature in float64 on the training loss.

    draws: seeds every random draw of the run. operations: of a forward pass of one sample. A run
    whose loss or curvature leaves the numbers is a cell with a ``failure``, no error.
    """
    started, spent = time.perf_counter(), time.process_time()

    def times() -> dict[str, Any]:
        return {
            "seconds": time.perf_counter() - started,
            "processor_seconds": time.process_time() - spent,
        }

    model = make()
    named: dict[str, Any] = {
        "size": size,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "samples": training.size,
        "seed": seed,
        "steps": steps,
        "operations": 3 * operations * min(batch_size, training.size) * steps,
    }
    half = validation.size // 2
    chooser = validation.take(min(half, _CHOOSERS))
    judge = validation.at(slice(half, half + _JUDGES))
    try:
        with in_evaluation_mode(model):
            reader = Problem(model, loss, training.take(2).batch)  # how batches are read
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(draws)  # dropout draws too
            trained = train_best(
                model,
                training,
                chooser,
                loss=reader,
                steps=steps,
                lr=lr,
                batch_size=batch_size,
                seed=draws,
            )
        final_loss, _ = evaluate(model, judge, loss=reader)
        model.load_state_dict(trained.best)
        train_loss, _ = evaluate(model, training, loss=reader)
        value, accuracy = evaluate(model, judge, loss=reader)
        named |= _curvature(model, training, judge, loss, value, curvature_samples, products, seed)
    except (FloatingPointError, NonFiniteError) as error:
        reason = " ".join(str(error).split())
        return ScalingCell(**{**_nothing(), **named, **times(), "failure": reason})
    return ScalingCell(
        **named,
        best_step=trained.best_step,
        training_loss=train_loss,
        validation_loss=value,
        validation_accuracy=accuracy,
        final_validation_loss=final_loss,
        looks=trained.history,
        **times(),
    )


def _curvature(
    model: nn.Module,
    training: Samples,
    judge: Samples,
    loss: Any,
    value: float,
    samples: int | None,
    products: int,
    seed: int,
) -> dict[str, Any]:
    """Fields of a cell: the Hessian of the training loss at the model's weights, in float64."""
    model.double().eval()
    reach = _reach(model, judge.to(torch.float64), loss)
    some = training.take(training.size if samples is None else samples).to(torch.float64)
    problem = Problem(model, loss, [batch.batch for batch in some.batches(64)])
    operator = Hessian(problem)
    # Of D samples, so many were looked at: the fewer are left, the less they can differ. Small
    # batches show how they differ; products with them are few, for they take longer.
    share = math.sqrt(1 - some.size / training.size)
    groups = None
    if share > 0 and some.size > 1:
        few = some.batches(math.ceil(some.size / _BATCHES))
        groups = Hessian(problem.with_data([batch.batch for batch in few]))
    norm = hessian_norm(operator, products=products, rtol=1e-3, seed=seed, groups=groups)
    total = trace(operator, rtol=0.05, seed=seed, max_products=2 * products, data_error=False)
    if groups is not None:
        total = with_data_error(groups, total, seed, lambda probes: probes, 1)
    noise = gradient_noise(problem, samples=_NOISE_SAMPLES)
    return {
        "validation_interval": (value - reach, value + reach),
        "hessian_norm": norm.value,
        "hessian_norm_interval": norm.interval,
        "hessian_norm_data_interval": _shrunk(norm.value, norm.data_interval, share),
        "top_eigenvalue": norm.top_eigenvalue,
        "smallest": norm.bottom_eigenvalue,
        "trace": total.value,
        "trace_interval": total.interval,
        "trace_data_interval": _shrunk(total.value, total.data_interval, share),
        "effective_rank": norm.effective_rank,
        "effective_rank_interval": norm.effective_rank_interval,
        "condition_number": norm.condition_number,
        "condition_interval": norm.condition_interval,
        "negative_mass": norm.negative_mass,
        "noise_scale": noise.simple,
        "critical_batch_size": noise.value,
        "critical_batch_interval": noise.interval,
        "critical_batch_is_bound": noise.lower_bound,
        "curvature_samples": some.size,
        "products": operator.products + noise.products + (groups.products if groups else 0),
    }


def _shrunk(value: float, interval: Interval | None, share: float) -> Interval | None:
    """An interval over batches, for samples drawn from D without putting them back."""
    if interval is None or share == 0:
        return None
    half = share * (interval[1] - interval[0]) / 2
    return value - half, value + half


def _nothing() -> dict[str, Any]:
    """The numbers of a run that has none."""
    nan = float("nan")
    numbers = dict.fromkeys(
        (
            *("training_loss", "validation_loss", "hessian_norm", "smallest", "trace"),
            *("effective_rank", "condition_number", "negative_mass", "noise_scale"),
            "critical_batch_size",
        ),
        nan,
    )
    intervals = dict.fromkeys((interval for _, interval in QUANTITIES.values()), (nan, nan))
    counts = dict.fromkeys(("best_step", "curvature_samples", "products"), 0)
    return {**numbers, **intervals, **counts, "validation_accuracy": None}


def _reach(model: nn.Module, judge: Samples, loss: Any) -> float:
    """Half the 95 % interval of a mean loss over samples (normal)."""
    problem = Problem(model, loss, [batch.batch for batch in judge.batches(256)])
    losses = sample_losses(problem, limit=judge.size)
    return 1.96 * float(losses.std()) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0


@dataclass(frozen=True)
class FinishedTraining:
    """How a run went, and its weights at the best look; the model has those at the end."""

    history: TrainingLooks
    best_step: int
    best: dict[str, Tensor]


def train_best(
    model: nn.Module,
    training: Samples,
    chooser: Samples,
    *,
    loss: Problem,
    steps: int,
    lr: float,
    batch_size: int,
    seed: int,
) -> FinishedTraining:
    """Train in place; the step with the best validation loss, and the weights there.

    Without going back to it, small data sets are judged by how long they were overfitted.
    """
    every = steps // _LOOKS if steps >= 2 * _LOOKS else math.ceil(steps / _LOOKS)
    few = training.take(_LOOK_SAMPLES)
    with in_evaluation_mode(model):
        operator = Hessian(loss.with_data([few.batch]))
    at: list[int] = []
    seen: dict[str, list[float]] = {"training_loss": [], "validation_loss": [], "sharpness": []}
    best: tuple[float, int, dict[str, Tensor]] = (
        float("inf"),
        0,
        copy.deepcopy(model.state_dict()),
    )

    def look(step: int, _: float = 0.0) -> None:
        nonlocal best
        if step % every and step != steps:
            return
        value, _accuracy = evaluate(model, chooser, loss=loss)
        at.append(step)
        seen["validation_loss"].append(value)
        seen["training_loss"].append(evaluate(model, few, loss=loss)[0])
        with in_evaluation_mode(model):
            top = eigenpairs(
                operator,
                k=1,
                which="largest",
                tol=0.05,
                seed=seed,
                max_products=min(_LOOK_PRODUCTS, operator.shape[0]),
                data_error=False,
            )
        seen["sharpness"].append(float(top.values[0]))
        if value < best[0]:
            best = (value, step, copy.deepcopy(model.state_dict()))

    train(
        model,
        training,
        steps=steps,
        lr=lr,
        batch_size=batch_size,
        seed=seed,
        loss=loss,
        on_step=look,
    )
    if steps % every or at[-1] != steps:
        look(steps)
    history = TrainingLooks(
        steps=tuple(at), **{name: tuple(values) for name, values in seen.items()}
    )
    return FinishedTraining(history, best[1], best[2])


# --- predictions ----------------------------------------------------------------------------------


def compare_predictions(grid: ScalingGrid) -> PredictionComparison:
    """Predict the runs with the most data from the others."""
    points = grid.points("validation_loss")
    sizes = sorted({point.samples for point in points})
    held = [p for p in points if p.samples == sizes[-1]]
    kept = [c for c in grid.trained if c.samples < sizes[-1]] if sizes else []
    if len(sizes) < 3 or not _spans(kept, 2, 4):
        raise ValueError(
            "comparing predictions needs 3 data sizes and 2 model sizes that trained, got "
            f"{len(sizes)} and {len({p.parameters for p in points})}."
        )
    n, d, losses = _columns(kept, "validation_loss")
    law: Callable[[Any, Any], Any]
    fitted = scaling_law if _spans(kept, 3, 7) else plane_power_law
    law = fitted(n, d, losses)
    # curvature's way: how it grows with the sizes, and what loss goes with a curvature at that N
    name = "trace" if all(c.trace > 0 for c in kept) else "hessian_norm"
    curvature = [float(getattr(c, name)) for c in kept]
    growth, link = plane_power_law(n, d, curvature), plane_power_law(n, curvature, losses)
    earlier = sorted((p for p in points if p.samples < sizes[-1]), key=lambda p: p.samples)
    nearest = {p.parameters: p.value for p in earlier}
    held = [p for p in held if p.parameters in nearest]
    control = [nearest[p.parameters] for p in held]
    actual = [p.value for p in held]
    by_loss = [float(law(p.parameters, p.samples)) for p in held]
    by_curvature = [float(link(p.parameters, growth(p.parameters, p.samples))) for p in held]
    errors, intervals = {}, {}
    for way, guesses in (("loss", by_loss), ("curvature", by_curvature), ("control", control)):
        wrong = np.abs(np.log(np.array(guesses) / np.array(actual)))
        errors[way] = float(wrong.mean())
        half = mean_reach(wrong)
        intervals[way] = (errors[way] - half, errors[way] + half)
    return PredictionComparison(
        held_out=f"D = {sizes[-1]}, from D ≤ {sizes[-2]}",
        actual=tuple(actual),
        by_loss=tuple(by_loss),
        by_curvature=tuple(by_curvature),
        curvature=name,
        control=tuple(control),
        errors=errors,
        intervals=intervals,
    )


def optimal_dataset_size(
    grid: ScalingGrid,
    model_size: Any,
    *,
    target: float | None = None,
    quantity: str = "validation_loss",
    factor: float = 4.0,
    seed: int = 0,
) -> DatasetPrediction:
    """Samples D at which ``quantity`` reaches its ``target``; without one the compute-optimal D.

    model_size: a size of the grid, or a number of parameters N. Without a target: the D that
    balances model and data at equal compute N·D, α A/N^α = β B/D^β. Predictions beyond ``factor``
    times the measured sizes are refused.
    """
    parameters = _parameters_of(grid, model_size)
    if not grid.trained:
        raise ValueError(f"no run of the grid trained: {grid.notes[0]}.")
    models = [float(cell.parameters) for cell in grid.trained]
    refuse("the model size N", parameters, (min(models), max(models)), factor)
    centre, draws = solutions(grid, parameters, target, quantity, seed)
    sizes = [float(cell.samples) for cell in grid.trained]
    measured = (min(sizes), max(sizes))
    refuse("the predicted data size D", centre, measured, factor)
    low, high = np.quantile(draws, [0.025, 0.975], method="nearest")
    return DatasetPrediction(
        value=centre,
        interval=(min(float(low), centre), max(float(high), centre)),
        parameters=parameters,
        quantity=quantity,
        target=target,
        measured_range=measured,
        factor=factor,
        extrapolated=not measured[0] <= centre <= measured[1],
    )


def solutions(
    grid: ScalingGrid, parameters: float, target: float | None, quantity: str, seed: int
) -> tuple[float, Array]:
    """D by the fit, and by each of its plausible variants (infinite where none reaches)."""
    if target is None or quantity == "validation_loss":
        if grid.law is None:
            raise ValueError(
                "the loss law needs 3 model sizes, 3 data sizes and 7 pairs of them that trained."
            )
        law = grid.law
        rows = np.array([(law.E, law.A, law.B, law.alpha, law.beta), *law.replicas])
        sizes = np.array([_by_law(row, parameters, target) for row in rows])
        if not np.isfinite(sizes[0]) and target is None:
            raise ValueError(
                f"no compute-optimal data size: the loss does not fall with both sizes here (α = "
                f"{law.alpha:.3g}, β = {law.beta:.3g})."
            )
        if not np.isfinite(sizes[0]):
            floor = law.E + law.A * parameters**-law.alpha
            raise ValueError(
                f"no amount of data brings a model of {parameters:.4g} parameters to {target:.4g}: "
                f"its fitted floor is {floor:.4g}. Take a larger model."
            )
        return float(sizes[0]), sizes[1:]
    if quantity not in grid.planes:
        fitted = f"; laws of {', '.join(grid.planes)} are" if grid.planes else ""
        raise ValueError(
            f"no law of {quantity!r} is fitted{fitted}: it takes 2 model sizes, 2 data sizes and 4 "
            f"pairs of them that trained, these runs have {len(_pairs(grid.trained))} pairs: "
            "train more sizes."
        )
    plane = grid.planes[quantity]
    if plane.samples_interval[0] <= 0 <= plane.samples_interval[1]:
        low, high = plane.samples_interval
        raise ValueError(
            f"{quantity} does not measurably depend on D here (exponent [{low:.3f}, {high:.3f}]): "
            "no data size follows from a target; it takes data sizes further apart, or more seeds."
        )
    centre = np.array([np.log(plane.factor), plane.by_parameters, plane.by_samples])
    rows = np.concatenate([centre[None], plane.draws(1000, seed)])
    with np.errstate(over="ignore"):
        logs = (math.log(target) - rows[:, 0] - rows[:, 1] * math.log(parameters)) / rows[:, 2]
        sizes = np.exp(np.minimum(logs, 700.0))
    return float(sizes[0]), sizes[1:]


def _by_law(row: Array, n: float, target: float | None) -> float:
    e, a, b, alpha, beta = (float(v) for v in row)
    if beta <= 0 or b <= 0:
        return math.inf
    gap = alpha * a * n**-alpha / beta if target is None else target - e - a * n**-alpha
    if gap <= 0:
        return math.inf
    exponent = math.log(b / gap) / beta
    return math.exp(exponent) if exponent < 700 else math.inf


def refuse(what: str, value: float, measured: tuple[float, float], factor: float) -> None:
    """Raise when a size lies too far outside what was measured."""
    if not measured[0] / factor <= value <= measured[1] * factor:
        raise ValueError(
            f"{what} = {value:.4g} is more than {factor:g} times outside the measured "
            f"{measured[0]:.4g} … {measured[1]:.4g}: extend the grid, or allow a larger factor=."
        )
