"""The article's three figures, for papers: they return the figure, save where told, never show.

``visualize_hessian_spectrum`` (histogram or density, sorted values, statistics),
``visualize_curvature_flow`` (two heat maps, lines by layer, final bars),
``plot_scaling_law_predictions`` (norm against model size and against data size, with fits).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from curvatlas.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Array = np.ndarray[Any, np.dtype[np.float64]]

_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#d55e00", "#009e73", "#777777"
_PathLike = str | os.PathLike[str]


def visualize_hessian_spectrum(
    spectrum: Any, *, path: _PathLike | None = None, title: str = "Hessian spectrum"
) -> Figure:
    """Density (or histogram), sorted magnitudes on a log axis, and statistics.

    spectrum: eigenvalues as numbers, an ``Eigenpairs``, a ``SpectralDensity``, or a pair
    (``SpectralDensity``, ``Eigenpairs``) of one matrix, drawn together.
    """
    density, values = _density_and_values(spectrum)
    figure = _figure(11.5, 3.6)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.3, 1.3, 0.9))
    if density is not None:
        _draw_density(left, density, values)
    elif values is not None:
        left.hist(values.tolist(), bins=min(60, max(10, len(values) // 4)), color=_BLUE)
        left.set(xlabel="eigenvalue", ylabel="count", yscale="log")
    left.set_title(title)
    ordered = values if values is not None else np.asarray(density["nodes"])  # type: ignore[index]
    _draw_sorted(middle, np.asarray(ordered, dtype=np.float64))
    right.axis("off")
    lines = _statistics(density, values)
    right.text(0.0, 0.95, "\n".join(lines), va="top", family="monospace", fontsize=9)
    return _saved(figure, path)


def visualize_curvature_flow(
    flow: Result | Mapping[str, Any], *, path: _PathLike | None = None
) -> Figure:
    """Curvature and gradient scale over layers and steps: two heat maps, lines, final bars.

    flow: a result or mapping with ``curvature`` and ``gradient`` (steps, layers), and optionally
    ``layers`` (names), ``steps`` (numbers) and ``interval`` ((steps, layers), (steps, layers)).
    """
    content = _mapping(flow)
    curvature = _matrix(content, "curvature")
    gradient = _matrix(content, "gradient")
    if gradient.shape != curvature.shape:
        raise ValueError(
            f"curvature is {curvature.shape}, gradient {gradient.shape}: make them one."
        )
    count, layers = curvature.shape
    names = [str(name) for name in content.get("layers") or range(layers)]
    steps = [float(step) for step in content.get("steps") or range(count)]
    figure = _figure(11.5, 7.2)
    (a, b), (c, d) = figure.subplots(2, 2)
    for axes, matrix, label in ((a, curvature, "curvature"), (b, gradient, "gradient norm")):
        _draw_map(figure, axes, matrix, names, steps, label)
    for index in range(layers):
        shade = index / max(layers - 1, 1)
        c.plot(steps, curvature[:, index], color=(0.1 + 0.75 * shade, 0.45, 0.7 - 0.5 * shade),
               marker="o" if count < 20 else None, label=names[index])  # fmt: skip
    c.set(xlabel="step", ylabel="curvature", title="curvature of each layer")
    if (curvature > 0).all():
        c.set_yscale("log")
    c.legend(fontsize=8, ncols=1 + layers // 9)
    d.bar(range(layers), curvature[-1], color=_BLUE, yerr=_last_interval(content, curvature))
    d.set(ylabel="curvature", title=f"at step {steps[-1]:g}")
    d.set_xticks(range(layers), names, rotation=45 if layers > 6 else 0, ha="right")
    return _saved(figure, path)


def plot_scaling_law_predictions(
    results: Result | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    path: _PathLike | None = None,
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
    figure = _figure(10.5, 4.2)
    left, right = figure.subplots(1, 2)
    _draw_power_law(left, sizes, values, samples, "parameters N", "samples D")
    _draw_power_law(right, samples, values, sizes, "samples D", "parameters N")
    grid = np.geomspace(samples.min(), samples.max(), 50)
    anchor = np.exp(np.mean(np.log(values) + 0.5 * np.log(samples)))
    right.plot(grid, anchor / np.sqrt(grid), color=_GREY, linestyle=":", label="guide 1/√D")
    for axes in (left, right):
        axes.set_ylabel(quantity.replace("_", " "))
        axes.legend(fontsize=8)
    return _saved(figure, path)


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
        axes.plot(grid, factor * grid**slope, color=_ORANGE, linestyle="--", label=label_of_fit)
    axes.set(xlabel=label, xscale="log", yscale="log")


def _draw_density(axes: Any, density: Mapping[str, Any], values: Array | None) -> None:
    grid, height = np.asarray(density["grid"]), np.asarray(density["density"])
    axes.fill_between(grid, height, color=_BLUE, alpha=0.3)
    axes.plot(grid, height, color=_BLUE, label="density")
    axes.set(xlabel="eigenvalue", ylabel="density", yscale="log")
    top = max(float(height.max()), 1e-290)
    axes.set_ylim(top * 1e-6, top * 3)
    if values is not None:
        axes.plot(values, np.full(len(values), height.max() * 1e-5), "|", color=_ORANGE,
                  markersize=12, label="eigenvalues")  # fmt: skip
        axes.legend(fontsize=8)


def _draw_sorted(axes: Any, values: Array) -> None:
    ordered = np.sort(np.abs(values))[::-1]
    signs = values[np.argsort(-np.abs(values))] < 0
    ranks = np.arange(1, len(ordered) + 1)
    floor = max(ordered.max() * 1e-12, 1e-300)
    for chosen, colour, label in ((~signs, _BLUE, "positive"), (signs, _ORANGE, "negative")):
        if chosen.any():
            axes.plot(ranks[chosen], np.maximum(ordered[chosen], floor), "o", color=colour,
                      markersize=3 if len(ranks) > 40 else 5, label=label)  # fmt: skip
    axes.set(xlabel="rank", ylabel="|eigenvalue|", yscale="log", title="sorted by magnitude")
    axes.legend(fontsize=8)


def _draw_map(
    figure: Any, axes: Any, matrix: Array, names: list[str], steps: list[float], label: str
) -> None:
    from matplotlib.colors import LogNorm

    positive = matrix[matrix > 0]
    norm = LogNorm(positive.min(), positive.max()) if positive.size == matrix.size else None
    image = axes.imshow(matrix.T, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
    figure.colorbar(image, ax=axes, label=label)
    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 8)).round().astype(int))
    axes.set_xticks(shown, [f"{steps[index]:g}" for index in shown])
    every = -(-len(names) // 24)
    axes.set_yticks(range(0, len(names), every), names[::every])
    axes.set(xlabel="step", ylabel="layer", title=f"{label} by layer and step")


def _last_interval(content: Mapping[str, Any], curvature: Array) -> Array | None:
    bounds = content.get("interval")
    if bounds is None:
        return None
    low, high = (np.asarray(_numbers(side), dtype=np.float64) for side in bounds)
    return np.stack([curvature[-1] - low[-1], high[-1] - curvature[-1]])


def _density_and_values(spectrum: Any) -> tuple[Mapping[str, Any] | None, Array | None]:
    pieces = spectrum if isinstance(spectrum, tuple) and _are_results(spectrum) else (spectrum,)
    density, values = None, None
    for piece in pieces:
        content = _mapping(piece) if isinstance(piece, (Result, Mapping)) else {"values": piece}
        if "grid" in content and "density" in content:
            density = content
        elif "values" in content:
            values = np.asarray(_numbers(content["values"]), dtype=np.float64).reshape(-1)
        else:
            raise ValueError(f"a {type(piece).__name__} holds no eigenvalues and no density.")
    if density is None and (values is None or not len(values)):
        raise ValueError("there are no eigenvalues to draw.")
    return density, values


def _are_results(pieces: tuple[Any, ...]) -> bool:
    return all(isinstance(piece, (Result, Mapping)) for piece in pieces)


def _statistics(density: Mapping[str, Any] | None, values: Array | None) -> list[str]:
    lines = []
    if values is not None:
        ordered = np.sort(values)[::-1]
        lines += [f"largest  {ordered[0]:.4g}", f"smallest {ordered[-1]:.4g}"]
        if len(ordered) > 1:
            lines.append(f"gap      {ordered[0] - ordered[1]:.4g}")
        if density is None:  # with a density, mean and share are told of the whole spectrum
            lines += ["", f"of these {len(values)} values", f"mean     {values.mean():.4g}"]
            lines += [f"spread   {values.std():.4g}", f"negative {np.mean(values < 0):.1%}"]
    if density is not None:
        nodes = np.asarray(density["nodes"]).reshape(-1)
        weights = np.asarray(density["weights"]).reshape(-1)
        weights = weights / weights.sum()
        mean = float(nodes @ weights)
        spread = float(np.sqrt(((nodes - mean) ** 2) @ weights))
        lines += ["", "of the whole spectrum", f"mean     {mean:.4g}", f"spread   {spread:.4g}",
                  f"negative {float(weights[nodes < 0].sum()):.1%}"]  # fmt: skip
    return lines


def _mapping(value: Result | Mapping[str, Any]) -> Mapping[str, Any]:
    return value.to_dict() if isinstance(value, Result) else value


def _matrix(content: Mapping[str, Any], key: str) -> Array:
    if key not in content:
        raise ValueError(f"the curvature flow has no {key!r}: it has {sorted(content)}.")
    matrix = np.asarray(_numbers(content[key]), dtype=np.float64)
    if matrix.ndim == 1:
        matrix = matrix[None]
    if matrix.ndim != 2 or not matrix.size:
        raise ValueError(f"{key} must be a (steps, layers) matrix, got shape {matrix.shape}.")
    return matrix


def _numbers(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def _rows(
    results: Result | Mapping[str, Any] | Sequence[Mapping[str, Any]],
) -> Sequence[Mapping[str, Any]]:
    rows = results
    if isinstance(results, (Result, Mapping)):
        rows = _mapping(results).get("rows", ())
    if not isinstance(rows, Sequence) or not rows:
        raise ValueError("there are no rows of a scaling grid to draw.")
    return rows


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _without_minor_labels(figure: Figure) -> None:
    """Minor ticks of log axes stay unlabelled: their labels crowd the axis."""
    from matplotlib.ticker import NullFormatter

    for axes in figure.axes:
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())


def _saved(figure: Figure, path: _PathLike | None) -> Figure:
    _without_minor_labels(figure)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
    return figure
