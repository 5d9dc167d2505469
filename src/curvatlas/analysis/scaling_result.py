"""What the scaling analysis returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from curvatlas.analysis.fits import ScalingLaw
from curvatlas.analysis.fits_plane import PlanePowerLaw
from curvatlas.analysis.scaling_cell import ScalingCell
from curvatlas.results import Result
from curvatlas.ticks import tidy_log_axes

Interval = tuple[float, float]
QUANTITIES = (
    "validation_loss", "hessian_norm", "trace", "effective_rank", "condition_number",
    "critical_batch_size",
)  # fmt: skip
_UNITS = {
    "validation_loss": "validation loss",
    "hessian_norm": "‖H‖ (loss / parameter²)",
    "trace": "trace (loss / parameter²)",
    "effective_rank": "effective rank (eigenvalues)",
    "condition_number": "λmax / mean |λ|",
    "critical_batch_size": "critical batch size (samples)",
}
_INTERVALS = {
    "validation_loss": "validation_interval",
    "condition_number": "condition_interval",
    "hessian_norm": "hessian_norm_interval",
    "trace": "trace_interval",
    "effective_rank": "effective_rank_interval",
    "critical_batch_size": "critical_batch_interval",
}


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
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12.5, 7.2), layout="constrained")
        for axes, quantity in zip(figure.subplots(2, 3).flat, QUANTITIES, strict=True):
            self._plot_quantity(axes, quantity)
        return tidy_log_axes(figure)

    def _plot_quantity(self, axes: Any, quantity: str) -> None:
        sizes = sorted({cell.parameters for cell in self.cells})
        plane = self.planes.get(quantity)
        for index, size in enumerate(sizes):
            cells = sorted((c for c in self.cells if c.parameters == size), key=lambda c: c.samples)
            shade = index / max(len(sizes) - 1, 1)
            colour = (0.1 + 0.75 * shade, 0.45, 0.7 - 0.5 * shade)
            cells = [c for c in cells if np.isfinite(getattr(c, quantity))]
            if not cells:
                continue
            x = [c.samples for c in cells]
            y = [float(getattr(c, quantity)) for c in cells]
            field = _INTERVALS.get(quantity)
            error = None
            if field is not None:
                ends = [getattr(c, field) for c in cells]
                error = [
                    [max(v - e[0], 0) for v, e in zip(y, ends, strict=True)],
                    [min(max(e[1] - v, 0), 9 * abs(v)) for v, e in zip(y, ends, strict=True)],
                ]
            axes.errorbar(x, y, yerr=error, fmt="o", color=colour, markersize=4, capsize=2,
                          label=f"N = {size:,}")  # fmt: skip
            grid = np.geomspace(min(x), max(x), 40)
            if quantity == "validation_loss" and self.law is not None:
                axes.plot(grid, self.law(size, grid), color=colour, linewidth=0.9)
            elif plane is not None:
                axes.plot(grid, plane(size, grid), color=colour, linewidth=0.9)
        axes.set(xlabel="training samples D", ylabel=_UNITS[quantity], xscale="log", yscale="log")
        axes.set_title(_title(quantity, plane, self.law), fontsize=8)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
        else:
            axes.text(0.5, 0.5, "not measurable here", ha="center", transform=axes.transAxes)


def _title(quantity: str, plane: PlanePowerLaw | None, law: ScalingLaw | None) -> str:
    if quantity == "validation_loss" and law is not None:
        (a, b), (c, d) = law.alpha_interval, law.beta_interval
        return f"E + A/N^α + B/D^β: α [{a:.2f}, {b:.2f}], β [{c:.2f}, {d:.2f}]"
    if plane is None:
        return "no fit"
    (a, b), (c, d) = plane.parameters_interval, plane.samples_interval
    return f"∝ N^[{a:.2f}, {b:.2f}] D^[{c:.2f}, {d:.2f}] (95 %)"


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
