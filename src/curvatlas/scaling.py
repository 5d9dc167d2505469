"""Scaling laws of loss and curvature, from real training runs.

>>> analyzer = ScalingLawAnalyzer(lambda width: zoo.reference_vit(d_model=width))   # doctest: +SKIP
>>> grid = analyzer.analyze_scaling_with_size([8, 12, 16, 24], [100, 200, 400, 800],
...                                           output="runs/scaling")               # doctest: +SKIP
>>> print(analyzer.predict_optimal_dataset_size(4000, target=0.5))                  # doctest: +SKIP
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvatlas.analysis.diagnostics import gradient_noise
from curvatlas.figures.scaling import QUANTITIES, grid_figure
from curvatlas.fits import (
    Array,
    PlanePowerLaw,
    ScalingLaw,
    mean_reach,
    plane_power_law,
    scaling_law,
)
from curvatlas.operators.curvature import Hessian
from curvatlas.operators.per_sample import sample_losses, subset
from curvatlas.problem import Problem
from curvatlas.problem.batches import batches_of, paired
from curvatlas.problem.evaluation import in_evaluation_mode, without_randomness
from curvatlas.problem.losses import LossLike
from curvatlas.progress import track
from curvatlas.results import Interval, Result, also_named
from curvatlas.runs import Run, subject
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.summary import condition_number
from curvatlas.spectra.trace import trace
from curvatlas.zoo.datasets import Dataset, Samples, digits
from curvatlas.zoo.training import evaluate, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Data = Dataset | Any  # or what ``Problem`` takes; None: digits

_LOOKS = 20  # times the validation loss is looked at in training


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HessianNorm(Result):
    """‖H‖₂ of one model's loss, both ends of the spectrum and what lies between."""

    value: float  # ‖H‖₂, the largest |λ|
    interval: Interval  # certified
    top_eigenvalue: float  # λmax
    bottom_eigenvalue: float  # λmin, negative at saddles
    condition_number: float  # λmax over the mean |λ|
    condition_interval: Interval  # 95 %
    effective_rank: float
    effective_rank_interval: Interval
    negative_mass: float
    products: int
    converged: bool

    def __str__(self) -> str:
        low, high = self.condition_interval
        return (
            f"‖H‖ = {self.value:.4g} ± {(self.interval[1] - self.interval[0]) / 2:.1g}, λ in "
            f"[{self.bottom_eigenvalue:.4g}, {self.top_eigenvalue:.4g}], λmax/mean|λ| "
            f"{self.condition_number:.3g} [{low:.3g}, {high:.3g}], effective rank "
            f"{self.effective_rank:.3g}"
        )


def hessian_norm(operator: Hessian, *, products: int, rtol: float, seed: int) -> HessianNorm:
    """Both ends by Lanczos, condition number and effective rank by quadrature."""
    ends = eigenpairs(operator, k=1, which="both", tol=rtol, seed=seed)
    density = spectral_density(operator, max_products=products, seed=seed)
    largest = int(ends.values.abs().argmax())  # ‖H‖ may be that of the most negative eigenvalue
    radius = float(ends.interval[1][largest] - ends.interval[0][largest]) / 2
    norm = abs(float(ends.values[largest]))
    low, top, high = (float(end[0]) for end in (ends.interval[0], ends.values, ends.interval[1]))
    condition, condition_interval = condition_number((low, top, high), density)
    return HessianNorm(
        value=norm,
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
    critical_batch_interval: Interval
    curvature_samples: int
    products: int
    seconds: float
    top_eigenvalue: float = float("nan")  # λmax

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

    def __str__(self) -> str:
        return (
            f"N = {self.parameters}, D = {self.samples}: validation loss "
            f"{self.validation_loss:.4f} (training {self.training_loss:.4f}), ‖H‖ = "
            f"{self.hessian_norm:.4g}, trace {self.trace:.4g}, effective rank "
            f"{self.effective_rank:.3g}, critical batch {self.critical_batch_size:.3g} "
            f"({self.seconds:.0f} s)"
        )


@dataclass(frozen=True, kw_only=True)
class ScalingGrid(Result):
    """Runs over model and data sizes, with the laws fitted to them."""

    cells: tuple[ScalingCell, ...]
    law: ScalingLaw | None  # L = E + A/N^α + B/D^β; None on a grid smaller than 3 × 3
    planes: dict[str, PlanePowerLaw]  # each quantity as C N^a D^b

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """One mapping a run, for tables and ``plot_scaling_law_predictions``."""
        return tuple(
            {key: value for key, value in cell.to_dict().items() if key != "kind"}
            for cell in self.cells
        )

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "rows": list(self.rows)}

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
        lines.append(f"loss law: {self.law if self.law else 'the grid is too small to fit one'}")
        lines += [f"{name} {plane}" for name, plane in self.planes.items()]
        return "\n".join(lines)

    def _picture(self) -> Figure:
        """Every quantity against D, one line a model size, with the fitted planes."""
        return grid_figure(self)


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


class ScalingLawAnalyzer:
    """Trains models that ``model_factory(size)`` makes, on growing data, and fits what it sees.

    Models and batches are those of ``Problem``: Hugging Face models and mappings too.
    """

    def __init__(
        self, model_factory: Callable[[Any], nn.Module], *, loss: LossLike = "cross_entropy"
    ) -> None:
        self.model_factory = model_factory
        self.loss = loss
        self.grid: ScalingGrid | None = None

    @also_named(dataloader="data")
    def compute_hessian_norm(
        self,
        model: nn.Module,
        data: Any,
        targets: Any = None,
        *,
        n_samples: int | None = None,
        loss: LossLike | None = None,
        rtol: float = 1e-3,
        products: int = 60,
        seed: int = 0,
    ) -> HessianNorm:
        """‖H‖₂ of the model's loss on ``data`` (or on the batch (data, targets)), certified.

        n_samples: only the first so many samples. products: for condition number and rank.
        """
        if n_samples is not None and n_samples < 1:
            raise ValueError(f"n_samples is at least 1, got {n_samples}.")
        with without_randomness(model):
            problem = Problem(model, self.loss if loss is None else loss, paired(data, targets))
            if n_samples is not None:
                problem = subset(problem, torch.arange(n_samples, device="cpu"))
            return hessian_norm(Hessian(problem), products=products, rtol=rtol, seed=seed)

    def analyze_scaling_with_size(
        self,
        model_sizes: Sequence[Any],
        dataset_sizes: Sequence[int],
        *,
        data: Data = None,
        output: str | os.PathLike[str] | Run | None = None,
        steps: int = 600,
        lr: float = 5e-3,
        batch_size: int = 32,
        curvature_samples: int = 192,
        products: int = 60,
        seed: int = 0,
        loss: LossLike | None = None,
    ) -> ScalingGrid:
        """Train every pair of sizes, measure loss and curvature, fit the laws.

        data: a ``Dataset``, or what ``Problem`` takes, (inputs, targets), mappings with labels or
            loaders of either, of which a fifth is held out (default: digits).
        output: a run folder (or an open ``Run``, left open); each finished run is stored, and the
            same call resumes it.
        """
        chosen = self.loss if loss is None else loss
        dataset = _as_dataset(data)
        sizes = _check_sizes(model_sizes, dataset_sizes, dataset.train.size)
        effort: dict[str, Any] = {
            "steps": steps,
            "lr": lr,
            "batch_size": batch_size,
            "seed": seed,
            "curvature_samples": curvature_samples,
            "products": products,
        }
        pairs = [(i, j) for j in range(len(sizes)) for i in range(len(model_sizes))]

        def cell(i: int, j: int) -> ScalingCell:
            make = functools.partial(self._made, model_sizes[i])
            samples = dataset.train.take(sizes[j])
            label = _label(model_sizes[i])
            return run_cell(make, samples, dataset.validation, size=label, loss=chosen, **effort)

        if output is None:
            cells = [cell(i, j) for i, j in track(pairs, "scaling grid", total=len(pairs))]
            self.grid = fit_grid(cells)
        elif isinstance(output, Run):
            self.grid = _stored(output, pairs, cell)
        else:
            options = {
                "model_sizes": [_label(s) for s in model_sizes],
                "dataset_sizes": sizes,
                "loss": chosen
                if isinstance(chosen, str)
                else getattr(chosen, "__name__", "callable"),
                **effort,
            }
            with self._run(output, options, model_sizes, dataset, seed) as run:
                self.grid = _stored(run, pairs, cell)
        return self.grid

    def _made(self, size: Any) -> nn.Module:
        made = self.model_factory(size)
        if not isinstance(made, nn.Module):
            raise TypeError(
                f"model_factory({size!r}) gave a {type(made).__name__}, expected an nn.Module."
            )
        return made

    def _run(
        self,
        output: str | os.PathLike[str],
        options: dict[str, Any],
        sizes: Sequence[Any],
        data: Dataset,
        seed: int,
    ) -> Run:
        prints = []
        for size in sizes:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                prints.append(subject.of_model(self._made(size)))
        return Run.create(
            output,
            options=options,
            model_fingerprint=subject.of_data([json.dumps(prints)]),
            data_fingerprint=subject.of_data([tuple(data.train), tuple(data.validation)]),
        )

    def predict_optimal_dataset_size(
        self,
        model_size: Any,
        target: float | None = None,
        *,
        target_condition: float | None = None,
        quantity: str = "validation_loss",
        grid: ScalingGrid | None = None,
        factor: float = 4.0,
        seed: int = 0,
    ) -> DatasetPrediction:
        """Samples D at which ``quantity`` reaches ``target``, or the compute-optimal D.

        model_size: a size of the grid, or a number of parameters N. Without a target: the D that
        balances model and data at equal compute N·D, α A/N^α = β B/D^β. Predictions beyond
        ``factor`` times the measured sizes are refused.
        target_condition: a target for the condition number λmax / mean|λ|.
        """
        if target_condition is not None:
            if target is not None or quantity not in ("validation_loss", "condition_number"):
                raise ValueError("give target_condition alone, or target with quantity.")
            target, quantity = target_condition, "condition_number"
        grid = self._grid(grid)
        parameters = _parameters_of(grid, model_size)
        trained = [float(cell.parameters) for cell in grid.cells]
        refuse("the model size N", parameters, (min(trained), max(trained)), factor)
        centre, draws = solutions(grid, parameters, target, quantity, seed)
        sizes = [float(cell.samples) for cell in grid.cells]
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

    def compare_predictions(self, grid: ScalingGrid | None = None) -> PredictionComparison:
        """Hold out the largest data size; predict its losses by loss, by curvature, by neither."""
        return compare_predictions(self._grid(grid))

    def _grid(self, grid: ScalingGrid | None) -> ScalingGrid:
        grid = self.grid if grid is None else grid
        if grid is None:
            raise ValueError("no runs yet: call analyze_scaling_with_size first or pass grid=.")
        return grid


def _stored(
    run: Run, pairs: Sequence[tuple[int, int]], cell: Callable[[int, int], ScalingCell]
) -> ScalingGrid:
    cells = [
        run.step(f"cell.n{i}.d{j}", functools.partial(cell, i, j))
        for i, j in track(pairs, "scaling grid", total=len(pairs))
    ]
    return run.step("grid", lambda: fit_grid(cells))


def fit_grid(cells: Sequence[ScalingCell]) -> ScalingGrid:
    """The laws of a set of runs."""
    n, d = [c.parameters for c in cells], [c.samples for c in cells]
    planes: dict[str, PlanePowerLaw] = {}
    if len(set(n)) > 1 and len(set(d)) > 1 and len(cells) >= 4:
        for name in QUANTITIES:
            values = [float(getattr(c, name)) for c in cells]
            if all(math.isfinite(v) and v > 0 for v in values):
                planes[name] = plane_power_law(n, d, values)
    law = None
    if len(cells) >= 7 and min(len(set(n)), len(set(d))) >= 3:
        law = scaling_law(n, d, [c.validation_loss for c in cells])
    return ScalingGrid(cells=tuple(cells), law=law, planes=planes)


def _parameters_of(grid: ScalingGrid, size: Any) -> float:
    for cell in grid.cells:
        if cell.size == _label(size):
            return float(cell.parameters)
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not size > 0:
        raise ValueError(f"{size!r} is neither a size of the grid nor a number of parameters.")
    return float(size)


def _label(size: Any) -> str:
    return str(size)


def _as_dataset(data: Data) -> Dataset:
    if data is None:
        return digits()
    if isinstance(data, Dataset):
        return data
    samples = _joined(data)
    held = max(2, samples.size // 5)
    classes = 0 if samples.targets.is_floating_point() else int(samples.targets.max()) + 1
    return Dataset(
        name="data",
        train=samples.at(slice(held, None)),
        validation=samples.take(held),
        classes=classes,
    )


def _joined(data: Any) -> Samples:
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
    curvature_samples: int,
    products: int,
    seed: int,
) -> ScalingCell:
    """Train, keep the best weights, measure curvature in float64 on the training loss."""
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
    half = validation.size // 2
    chooser = validation.take(half)
    judge = validation.at(slice(half, None))
    with in_evaluation_mode(model):
        reader = Problem(model, loss, training.take(2).batch)  # how batches are read
    best_step = train_best(
        model, training, chooser, loss=reader, steps=steps, lr=lr, batch_size=batch_size, seed=seed
    )
    train_loss, _ = evaluate(model, training, loss=reader)
    value, accuracy = evaluate(model, judge, loss=reader)
    model.double().eval()
    reach = _reach(model, judge.to(torch.float64), loss)
    some = training.take(curvature_samples).to(torch.float64)
    problem = Problem(model, loss, [batch.batch for batch in some.batches(64)])
    operator = Hessian(problem)
    norm = hessian_norm(operator, products=products, rtol=1e-3, seed=seed)
    total = trace(operator, rtol=0.05, seed=seed, max_products=2 * products)
    noise = gradient_noise(problem, samples=96)
    return ScalingCell(
        size=size,
        parameters=problem.size,
        samples=training.size,
        seed=seed,
        steps=steps,
        best_step=best_step,
        training_loss=train_loss,
        validation_loss=value,
        validation_interval=(value - reach, value + reach),
        validation_accuracy=accuracy,
        hessian_norm=norm.value,
        hessian_norm_interval=norm.interval,
        top_eigenvalue=norm.top_eigenvalue,
        smallest=norm.bottom_eigenvalue,
        trace=total.value,
        trace_interval=total.interval,
        effective_rank=norm.effective_rank,
        effective_rank_interval=norm.effective_rank_interval,
        condition_number=norm.condition_number,
        condition_interval=norm.condition_interval,
        negative_mass=norm.negative_mass,
        noise_scale=noise.simple,
        critical_batch_size=noise.value,
        critical_batch_interval=noise.interval,
        curvature_samples=some.size,
        products=operator.products + noise.products,
        seconds=time.perf_counter() - started,
    )


def _reach(model: nn.Module, judge: Samples, loss: Any) -> float:
    """Half the 95 % interval of a mean loss over samples (normal)."""
    problem = Problem(model, loss, [batch.batch for batch in judge.batches(256)])
    losses = sample_losses(problem, limit=judge.size)
    return 1.96 * float(losses.std()) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0


def train_best(
    model: nn.Module,
    training: Samples,
    chooser: Samples,
    *,
    loss: Any,
    steps: int,
    lr: float,
    batch_size: int,
    seed: int,
) -> int:
    """Train in place and go back to the best weights seen; returns their step.

    Without this, small data sets are judged by how long they were overfitted.
    """
    best: tuple[float, int, dict[str, Tensor]] = (float("inf"), 0, {})
    every = max(1, steps // _LOOKS)

    def look(step: int, _: float = 0.0) -> None:
        nonlocal best
        if step % every and step != steps:
            return
        value, _accuracy = evaluate(model, chooser, loss=loss)
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
    look(steps)
    model.load_state_dict(best[2])
    return best[1]


# --- predictions ----------------------------------------------------------------------------------


def compare_predictions(grid: ScalingGrid) -> PredictionComparison:
    """Predict the runs with the most data from the others."""
    sizes = sorted({cell.samples for cell in grid.cells})
    kept = [c for c in grid.cells if c.samples < sizes[-1]]
    held = [c for c in grid.cells if c.samples == sizes[-1]]
    if len(sizes) < 3 or len({c.parameters for c in kept}) < 2:
        raise ValueError("comparing predictions needs 3 data sizes and 2 model sizes.")
    n, d = [c.parameters for c in kept], [c.samples for c in kept]
    losses = [c.validation_loss for c in kept]
    law: Callable[[Any, Any], Any]
    if len(kept) >= 7 and min(len(set(n)), len(set(d))) >= 3:
        law = scaling_law(n, d, losses, replicas=10)
    else:
        law = plane_power_law(n, d, losses)
    by_loss = [float(law(c.parameters, c.samples)) for c in held]
    # curvature's way: how it grows with the sizes, and what loss goes with a curvature at that N
    name = "trace" if all(c.trace > 0 for c in kept) else "hessian_norm"
    curvature = [float(getattr(c, name)) for c in kept]
    growth, link = plane_power_law(n, d, curvature), plane_power_law(n, curvature, losses)
    by_curvature = [float(link(c.parameters, growth(c.parameters, c.samples))) for c in held]
    nearest = {c.parameters: c.validation_loss for c in sorted(kept, key=lambda c: c.samples)}
    control = [nearest[c.parameters] for c in held]
    actual = [c.validation_loss for c in held]
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


def solutions(
    grid: ScalingGrid, parameters: float, target: float | None, quantity: str, seed: int
) -> tuple[float, Array]:
    """D by the fit, and by each of its plausible variants (infinite where none reaches)."""
    if target is None or quantity == "validation_loss":
        if grid.law is None:
            raise ValueError("the loss law needs a grid of at least 3 × 3 sizes and 7 runs.")
        law = grid.law
        rows = np.array([(law.E, law.A, law.B, law.alpha, law.beta), *law.replicas])
        sizes = np.array([_by_law(row, parameters, target) for row in rows])
        if not np.isfinite(sizes[0]):
            floor = law.E + law.A * parameters**-law.alpha
            raise ValueError(
                f"no amount of data brings a model of {parameters:.4g} parameters to {target:.4g}: "
                f"its fitted floor is {floor:.4g}. Take a larger model."
            )
        return float(sizes[0]), sizes[1:]
    if quantity not in grid.planes:
        raise ValueError(f"no fit for {quantity!r}: there are {', '.join(grid.planes)}.")
    plane = grid.planes[quantity]
    if plane.samples_interval[0] <= 0 <= plane.samples_interval[1]:
        low, high = plane.samples_interval
        raise ValueError(
            f"{quantity} does not measurably depend on D here (exponent [{low:.3f}, {high:.3f}]): "
            "no data size follows from a target."
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
