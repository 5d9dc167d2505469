"""Scaling for papers: a norm against model size and against data size, with fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.style import (
    GREY,
    ORANGE,
    PathLike,
    error_bars,
    mapping,
    new_figure,
    plain_numbers,
    saved,
    shade,
    tidy_log_axes,
)
from curvatlas.fits import (
    Array,
    PlanePowerLaw,
    ScalingLaw,
    plane_power_law,
    power_law,
    scaling_law,
)
from curvatlas.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.scaling import ScalingGrid


# quantity of a run → its axis and the field of its interval
QUANTITIES = {
    "validation_loss": ("validation loss", "validation_interval"),
    "hessian_norm": ("‖H‖ (loss / parameter²)", "hessian_norm_interval"),
    "trace": ("trace (loss / parameter²)", "trace_interval"),
    "effective_rank": ("effective rank (eigenvalues)", "effective_rank_interval"),
    "condition_number": ("λmax / mean |λ|", "condition_interval"),
    "critical_batch_size": ("critical batch size (samples)", "critical_batch_interval"),
}


def plot_scaling_law_predictions(
    results: Result | Mapping[str, Any] | Sequence[Any] | None = None,
    hessian_norms: Any = None,
    dataset_sizes: Sequence[float] | None = None,
    *,
    model_sizes: Sequence[float] | None = None,
    path: PathLike | None = None,
    quantity: str = "hessian_norm",
) -> Figure:
    """``quantity`` against model size and against data size, with the law fitted to both at once.

    results: rows with ``parameters``, ``samples`` and ``quantity`` (a result or mapping holds them
    in ``rows``); rows that say why they are ``left_out`` are. One law, C Nᵃ Dᵇ, or E + A/N^α +
    B/D^β of a validation loss where the sizes suffice, is drawn for every size in its colour; its
    exponents' 95 % intervals are in the legends. The 1/√D guide is only a guide.

    As in the article, also ``plot_scaling_law_predictions(model_sizes, hessian_norms,
    dataset_sizes)``: norms of every pair, (models, data sizes), or one a model, each measured with
    the data size at the same place; where the lists differ in length, norms of models alone, with
    the guide over the data sizes.
    """
    if results is None:
        results = model_sizes
    if hessian_norms is not None or dataset_sizes is not None:
        results = _listed(results, hessian_norms, dataset_sizes, quantity)
    rows = [row for row in _rows(results) if not row.get("left_out")]
    if not rows:
        raise ValueError("every row of the scaling grid is left out: there is nothing to draw.")
    try:
        sizes, samples, values = (
            np.array([float(row[key]) for row in rows])
            for key in ("parameters", "samples", quantity)
        )
    except KeyError as error:
        raise ValueError(f"the rows have no {error}: they have {sorted(rows[0])}.") from None
    usable = np.isfinite(values)
    sizes, samples, values = sizes[usable], samples[usable], values[usable]
    figure = new_figure(10.5, 5.2)
    left, right = figure.subplots(1, 2)
    known = np.isfinite(samples).all()  # which data every norm was measured with
    if known:
        law = _joint(sizes, samples, values, quantity)
        _draw_against(left, sizes, values, samples, law, "N")
        _draw_against(right, samples, values, sizes, law, "D")
    else:
        samples = np.asarray(dataset_sizes, dtype=np.float64)
        _draw_against(left, sizes, values, np.zeros_like(sizes), None, "N")
        right.set(xlabel=_AXES["D"], xscale="log", yscale="log")
        values = np.full_like(samples, values[-1]) * np.sqrt(samples.min() / samples)
    grid = np.geomspace(samples.min(), samples.max(), 50)
    anchor = np.exp(np.mean(np.log(np.abs(values)) + 0.5 * np.log(samples)))
    right.plot(grid, anchor / np.sqrt(grid), color=GREY, linestyle=":", label="guide 1/√D")
    for axes in (left, right):
        axes.set_ylabel(quantity.replace("_", " "))
        # below the axes: inside, it would hide points
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)
    return saved(figure, path)


_AXES = {"N": "parameters N", "D": "samples D"}


def _joint(sizes: Array, samples: Array, values: Array, quantity: str) -> Any:
    """One law for both sizes, or None where they do not suffice for one."""
    if not (values > 0).all():
        return None
    fits = (scaling_law, plane_power_law) if quantity == "validation_loss" else (plane_power_law,)
    for fit in fits:
        try:
            return fit(sizes, samples, values)
        except ValueError:  # too few sizes, or N and D grow together
            continue
    return None


def _draw_against(axes: Any, x: Array, y: Array, groups: Array, law: Any, axis: str) -> None:
    """Points by group, and the joint law of each group; without one, the law of x alone."""
    distinct = np.unique(groups)
    grid = np.geomspace(x.min(), x.max(), 50)
    other = "D" if axis == "N" else "N"
    for index, group in enumerate(distinct):
        chosen, colour = groups == group, shade(index, len(distinct))
        told = "measured" if group == 0 else f"{_AXES[other]} = {group:g}"
        axes.plot(
            x[chosen],
            y[chosen],
            "o",
            color=colour,
            markersize=4.5,
            alpha=0.85,
            label=told,
            zorder=3,
        )
        if law is not None:
            curve = law(grid, group) if axis == "N" else law(group, grid)
            axes.plot(grid, curve, color=colour, linewidth=1.0)
    if law is not None:
        axes.plot([], [], color=GREY, linewidth=1.0, label=f"joint fit {_exponent(law, axis)}")
    elif len(x) > 2 and len(np.unique(x)) > 1 and (y > 0).all():
        fit = power_law(x, y)
        low, high = fit.interval
        told = f"fit of {axis} alone ∝ {axis}^{fit.exponent:.2f} [{low:.2f}, {high:.2f}]"
        axes.plot(grid, fit(grid), color=ORANGE, linestyle="--", label=told)
    axes.set(xlabel=_AXES[axis], xscale="log", yscale="log")


def _exponent(law: PlanePowerLaw | ScalingLaw, axis: str) -> str:
    """One exponent of a law with its 95 % interval."""
    if isinstance(law, ScalingLaw):
        sign, letter = ("−α", "A") if axis == "N" else ("−β", "B")
        value = law.alpha if axis == "N" else law.beta
        low, high = law.alpha_interval if axis == "N" else law.beta_interval
        return f"{letter} {axis}^{sign}, {sign[1]} = {value:.2f} [{low:.2f}, {high:.2f}]"
    value = law.by_parameters if axis == "N" else law.by_samples
    low, high = law.parameters_interval if axis == "N" else law.samples_interval
    return f"∝ {axis}^{value:.2f} [{low:.2f}, {high:.2f}]"


def _listed(sizes: Any, norms: Any, samples: Any, quantity: str) -> list[dict[str, float]]:
    """The rows of three lists; ``samples`` is nan where a norm belongs to no one data size."""
    if sizes is None or norms is None or samples is None:
        raise ValueError("give all three: model_sizes, hessian_norms and dataset_sizes.")
    sizes, norms, samples = (
        np.asarray(plain_numbers(part), dtype=np.float64) for part in (sizes, norms, samples)
    )
    if sizes.ndim != 1 or samples.ndim != 1 or not sizes.size or not samples.size:
        raise ValueError("model_sizes and dataset_sizes are lists of numbers.")
    if not all((part > 0).all() for part in (sizes, norms, samples)):
        raise ValueError("sizes and norms must be positive: they are drawn on logarithmic axes.")
    if norms.shape == (len(sizes), len(samples)):
        places = [(n, d, norms[i, j]) for i, n in enumerate(sizes) for j, d in enumerate(samples)]
    elif norms.shape != sizes.shape:
        raise ValueError(
            f"hessian_norms has shape {norms.shape}: expected ({len(sizes)},), one a model, or "
            f"({len(sizes)}, {len(samples)}), one for every pair of sizes."
        )
    else:
        paired = samples if len(samples) == len(sizes) else np.full_like(sizes, np.nan)
        places = list(zip(sizes, paired, norms, strict=True))
    keys = ("parameters", "samples", quantity)
    return [dict(zip(keys, map(float, place), strict=True)) for place in places]


def _rows(results: Any) -> Sequence[Mapping[str, Any]]:
    rows = results
    if isinstance(results, (Result, Mapping)):
        rows = mapping(results).get("rows", ())
    if not isinstance(rows, Sequence) or not rows:
        raise ValueError("there are no rows of a scaling grid to draw.")
    return rows


def grid_figure(grid: ScalingGrid) -> Figure:
    """Every quantity against D, one line a model size, with the fitted laws; then the training."""
    figure = new_figure(12.5, 10.4 if grid.phases else 7.4)
    panels = figure.subplots(3 if grid.phases else 2, 3)
    for axes, quantity in zip(panels.flat, QUANTITIES, strict=False):
        _draw_quantity(axes, grid, quantity)
    if grid.phases:
        for axes, quantity in zip(panels[2], _LOOKED_AT, strict=True):
            _draw_training(axes, grid, quantity)
    if panels[0][0].get_legend_handles_labels()[0]:
        # below the panel: inside, it would hide points
        panels[0][0].legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=2)
    return tidy_log_axes(figure)


_LOOKED_AT = {
    "sharpness": "λmax (loss / parameter²)",
    "training_loss": "training loss",
    "validation_loss": "validation loss",
}


def _draw_quantity(axes: Any, grid: ScalingGrid, quantity: str) -> None:
    sizes = sorted({cell.parameters for cell in grid.cells})
    points = grid.points(quantity)
    law = grid.law_of(quantity)
    for index, size in enumerate(sizes):
        colour = shade(index, len(sizes))
        line = [p for p in points if p.parameters == size]
        x, y = [p.samples for p in line], [p.value for p in line]
        if line:
            error = error_bars(y, [p.interval for p in line], reach=9)
            style: Any = {"fmt": "o", "markersize": 4.5, "capsize": 2, "zorder": 3}
            axes.errorbar(x, y, yerr=error, color=colour, label=f"N = {size:,}", **style)
        if law is not None and len(line) > 1:
            data_sizes = np.geomspace(min(x), max(x), 40)
            axes.plot(data_sizes, law(size, data_sizes), color=colour, linewidth=0.9)
        _draw_outsiders(axes, grid, quantity, size, colour)
    axes.set(xlabel="training samples D", ylabel=QUANTITIES[quantity][0])
    axes.set(xscale="log", yscale="log")
    axes.set_title(_title(law), fontsize=8)
    if not points:
        axes.text(0.5, 0.5, "not measurable here", ha="center", transform=axes.transAxes)


def _draw_outsiders(axes: Any, grid: ScalingGrid, quantity: str, size: int, colour: Any) -> None:
    """Runs that the laws leave out as crosses, critical batch sizes that are bounds as arrows."""
    for cell in grid.cells:
        value = float(getattr(cell, quantity))
        if cell.parameters != size or not (np.isfinite(value) and value > 0):
            continue
        bound = quantity == "critical_batch_size" and cell.critical_batch_is_bound
        if bound or not cell.trained:
            style: Any = {"color": colour, "markersize": 5, "alpha": 0.6, "linestyle": "none"}
            axes.plot([cell.samples], [value], marker="^" if bound else "x", **style)


def _draw_training(axes: Any, grid: ScalingGrid, quantity: str) -> None:
    """A curve of every run over its training, and where the runs bend."""
    sizes = sorted({cell.parameters for cell in grid.cells})
    for cell in grid.trained:
        if cell.looks is not None:
            steps = np.array(cell.looks.steps) / max(cell.steps, 1)
            colour = shade(sizes.index(cell.parameters), len(sizes))
            axes.plot(steps, getattr(cell.looks, quantity), color=colour, linewidth=0.6, alpha=0.6)
    phases = grid.phases.get(quantity)
    if phases is not None:
        axes.axvspan(*phases.change_range, color=GREY, alpha=0.12, linewidth=0)
        axes.axvline(phases.change, color=GREY, linestyle="--", linewidth=1)
        axes.set_title(f"{phases.verdict}; {phases.bent} of {phases.runs} runs bend", fontsize=8)
    axes.set(xlabel="share of the steps", ylabel=_LOOKED_AT[quantity], yscale="log")


def _title(law: PlanePowerLaw | ScalingLaw | None) -> str:
    if isinstance(law, ScalingLaw):
        (a, b), (c, d) = law.alpha_interval, law.beta_interval
        return f"E + A/N^α + B/D^β: α [{a:.2f}, {b:.2f}], β [{c:.2f}, {d:.2f}]"
    if law is None:
        return "no fit"
    (a, b), (c, d) = law.parameters_interval, law.samples_interval
    return f"∝ N^[{a:.2f}, {b:.2f}] D^[{c:.2f}, {d:.2f}] (95 %)"
