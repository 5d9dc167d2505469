"""Predictions from a scaling grid: data for a target, and which way of predicting is better."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

from curvatlas.analysis.fits import scaling_law
from curvatlas.analysis.fits_least_squares import Array
from curvatlas.analysis.fits_plane import plane_power_law
from curvatlas.analysis.scaling_result import PredictionComparison, ScalingGrid


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
        found = np.array([_by_law(row, parameters, target) for row in rows])
        if not np.isfinite(found[0]):
            floor = law.E + law.A * parameters**-law.alpha
            raise ValueError(
                f"no amount of data brings a model of {parameters:.4g} parameters to {target:.4g}: "
                f"its fitted floor is {floor:.4g}. Take a larger model."
            )
        return float(found[0]), found[1:]
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
        found = np.exp(np.minimum(logs, 700.0))
    return float(found[0]), found[1:]


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
