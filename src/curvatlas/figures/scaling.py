"""Scaling for papers: a norm against model size and against data size, with fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.drawing import (  # fmt: skip
    GREY,
    ORANGE,
    PathLike,
    mapping,
    new_figure,
    saved,
)
from curvatlas.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.figures.drawing import Array


def plot_scaling_law_predictions(
    results: Result | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    path: PathLike | None = None,
    quantity: str = "hessian_norm",
) -> Figure:
    """``quantity`` against model size with its power-law fit, and against data size with 1/√D.

    results: rows with ``parameters``, ``samples`` and ``quantity`` (a result or mapping holds them
    in ``rows``). The fit's 95 % interval is in the legend; the 1/√D guide is only a guide.
    """
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
    _draw_power_law(left, sizes, values, samples, "parameters N", "samples D")
    _draw_power_law(right, samples, values, sizes, "samples D", "parameters N")
    grid = np.geomspace(samples.min(), samples.max(), 50)
    anchor = np.exp(np.mean(np.log(values) + 0.5 * np.log(samples)))
    right.plot(grid, anchor / np.sqrt(grid), color=GREY, linestyle=":", label="guide 1/√D")
    for axes in (left, right):
        axes.set_ylabel(quantity.replace("_", " "))
        axes.legend(fontsize=8)
    return saved(figure, path)


def power_law(x: Array, y: Array) -> tuple[float, float, tuple[float, float]]:
    """y = C·x^a by least squares in logarithms: (C, a, 95 % interval of a)."""
    from scipy import stats

    fit = stats.linregress(np.log(x), np.log(y))
    count = len(x)
    half = float(stats.t.ppf(0.975, count - 2)) * fit.stderr if count > 2 else float("inf")
    return float(np.exp(fit.intercept)), float(fit.slope), (fit.slope - half, fit.slope + half)


def _draw_power_law(
    axes: Any, x: Array, y: Array, groups: Array, label: str, group_label: str
) -> None:
    distinct = np.unique(groups)
    for index, group in enumerate(distinct):
        chosen = groups == group
        shade = index / max(len(distinct) - 1, 1)
        axes.plot(x[chosen], y[chosen], "o-", color=(0.1 + 0.75 * shade, 0.45, 0.7 - 0.5 * shade),
                  markersize=4, linewidth=0.8, label=f"{group_label} = {group:g}")  # fmt: skip
    if len(np.unique(x)) > 1 and (y > 0).all():
        factor, slope, (low, high) = power_law(x, y)
        grid = np.geomspace(x.min(), x.max(), 50)
        label_of_fit = f"fit ∝ {label[-1]}^{slope:.2f} [{low:.2f}, {high:.2f}]"
        axes.plot(grid, factor * grid**slope, color=ORANGE, linestyle="--", label=label_of_fit)
    axes.set(xlabel=label, xscale="log", yscale="log")


def _rows(
    results: Result | Mapping[str, Any] | Sequence[Mapping[str, Any]],
) -> Sequence[Mapping[str, Any]]:
    rows = results
    if isinstance(results, (Result, Mapping)):
        rows = mapping(results).get("rows", ())
    if not isinstance(rows, Sequence) or not rows:
        raise ValueError("there are no rows of a scaling grid to draw.")
    return rows
