"""What scaling runs give: one trained model, the grid with its laws, predictions from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from curvatlas.figures.scaling import grid_figure
from curvatlas.fits import Array, PlanePowerLaw, ScalingLaw, plane_power_law, scaling_law
from curvatlas.results import Interval, Result


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

    @property
    def value(self) -> float:
        return self.validation_loss

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

    def series(self, quantity: str) -> list[float]:
        return [float(getattr(cell, quantity)) for cell in self.cells]

    def __str__(self) -> str:
        lines = [str(cell) for cell in self.cells]
        lines.append(f"loss law: {self.law if self.law else 'the grid is too small to fit one'}")
        lines += [f"{name} {plane}" for name, plane in self.planes.items()]
        return "\n".join(lines)

    def plot(self) -> Any:
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
        half = math.inf
        if len(wrong) > 1:
            half = float(stats.t.ppf(0.975, len(wrong) - 1) * wrong.std(ddof=1) / len(wrong) ** 0.5)
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
