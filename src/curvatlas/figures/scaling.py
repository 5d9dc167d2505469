"""Scaling for papers: a norm against model size and against data size, with fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.drawing import (
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
from curvatlas.fits import Array, PlanePowerLaw, ScalingLaw, power_law
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
    """``quantity`` against model size with its power-law fit, and against data size with 1/√D.

    results: rows with ``parameters``, ``samples`` and ``quantity`` (a result or mapping holds them
    in ``rows``). The fit's 95 % interval is in the legend; the 1/√D guide is only a guide.

    As in the article, also ``plot_scaling_law_predictions(model_sizes, hessian_norms,
    dataset_sizes)``: norms of every pair, (models, data sizes), or one a model, each measured with
    the data size at the same place; where the lists differ in length, norms of models alone, with
    the guide over the data sizes.
    """
    if results is None:
        results = model_sizes
    if hessian_norms is not None or dataset_sizes is not None:
        results = _listed(results, hessian_norms, dataset_sizes, quantity)
    rows = _rows(results)
    try:
        sizes, samples, values = (
            np.array([float(row[key]) for row in rows])
            for key in ("parameters", "samples", quantity)
        )
    except KeyError as error:
        raise ValueError(f"the rows have no {error}: they have {sorted(rows[0])}.") from None
    figure = new_figure(10.5, 4.2)
    left, right = figure.subplots(1, 2)
    known = np.isfinite(samples).all()  # which data every norm was measured with
    if known:
        _draw_power_law(left, sizes, values, samples, "parameters N", "samples D")
        _draw_power_law(right, samples, values, sizes, "samples D", "parameters N")
    else:
        samples = np.asarray(dataset_sizes, dtype=np.float64)
        _draw_power_law(left, sizes, values, np.zeros_like(sizes), "parameters N", "samples D")
        right.set(xlabel="samples D", xscale="log", yscale="log")
        values = np.full_like(samples, values[-1]) * np.sqrt(samples.min() / samples)
    grid = np.geomspace(samples.min(), samples.max(), 50)
    anchor = np.exp(np.mean(np.log(values) + 0.5 * np.log(samples)))
    right.plot(grid, anchor / np.sqrt(grid), color=GREY, linestyle=":", label="guide 1/√D")
    for axes in (left, right):
        axes.set_ylabel(quantity.replace("_", " "))
        axes.legend(fontsize=8)
    return saved(figure, path)


def _draw_power_law(
    axes: Any, x: Array, y: Array, groups: Array, label: str, group_label: str
) -> None:
    distinct = np.unique(groups)
    for index, group in enumerate(distinct):
        chosen = groups == group
        told = "measured" if group == 0 else f"{group_label} = {group:g}"
        style = {"markersize": 4, "linewidth": 0.8, "label": told}
        axes.plot(x[chosen], y[chosen], "o-", color=shade(index, len(distinct)), **style)
    if len(x) > 2 and len(np.unique(x)) > 1 and (y > 0).all():
        fit = power_law(x, y)
        low, high = fit.interval
        grid = np.geomspace(x.min(), x.max(), 50)
        told = f"fit ∝ {label[-1]}^{fit.exponent:.2f} [{low:.2f}, {high:.2f}]"
        axes.plot(grid, fit(grid), color=ORANGE, linestyle="--", label=told)
    axes.set(xlabel=label, xscale="log", yscale="log")


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
    """Every quantity against D, one line a model size, with the fitted planes."""
    figure = new_figure(12.5, 7.2)
    for axes, quantity in zip(figure.subplots(2, 3).flat, QUANTITIES, strict=True):
        _draw_quantity(axes, grid, quantity)
    return tidy_log_axes(figure)


def _draw_quantity(axes: Any, grid: ScalingGrid, quantity: str) -> None:
    sizes = sorted({cell.parameters for cell in grid.cells})
    label, interval = QUANTITIES[quantity]
    plane = grid.planes.get(quantity)
    law = grid.law if quantity == "validation_loss" and grid.law is not None else plane
    for index, size in enumerate(sizes):
        cells = [c for c in grid.cells if c.parameters == size]
        cells = [c for c in cells if np.isfinite(getattr(c, quantity))]
        if not cells:
            continue
        cells.sort(key=lambda c: c.samples)
        x, y = [c.samples for c in cells], [float(getattr(c, quantity)) for c in cells]
        error = error_bars(y, [getattr(c, interval) for c in cells], reach=9)
        style: Any = {"fmt": "o", "markersize": 4, "capsize": 2, "label": f"N = {size:,}"}
        colour = shade(index, len(sizes))
        axes.errorbar(x, y, yerr=error, color=colour, **style)
        if law is not None:
            data_sizes = np.geomspace(min(x), max(x), 40)
            axes.plot(data_sizes, law(size, data_sizes), color=colour, linewidth=0.9)
    axes.set(xlabel="training samples D", ylabel=label, xscale="log", yscale="log")
    axes.set_title(_title(law), fontsize=8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
    else:
        axes.text(0.5, 0.5, "not measurable here", ha="center", transform=axes.transAxes)


def _title(law: PlanePowerLaw | ScalingLaw | None) -> str:
    if isinstance(law, ScalingLaw):
        (a, b), (c, d) = law.alpha_interval, law.beta_interval
        return f"E + A/N^α + B/D^β: α [{a:.2f}, {b:.2f}], β [{c:.2f}, {d:.2f}]"
    if law is None:
        return "no fit"
    (a, b), (c, d) = law.parameters_interval, law.samples_interval
    return f"∝ N^[{a:.2f}, {b:.2f}] D^[{c:.2f}, {d:.2f}] (95 %)"
