"""The spectrum for papers: density or histogram, sorted values, statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.style import (
    BLUE,
    ORANGE,
    PathLike,
    mapping,
    new_figure,
    plain_numbers,
    saved,
)
from curvatlas.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.figures.style import Array


def visualize_hessian_spectrum(
    spectrum: Any, *, path: PathLike | None = None, title: str = "Hessian spectrum"
) -> Figure:
    """Density (or histogram), sorted magnitudes on a log axis, and statistics.

    spectrum: eigenvalues as numbers, an ``Eigenpairs``, a ``SpectralDensity``, or a pair
    (``SpectralDensity``, ``Eigenpairs``) of one matrix, drawn together.
    """
    density, values = _density_and_values(spectrum)
    figure = new_figure(11.5, 3.6)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.3, 1.3, 0.9))
    if density is not None:
        _draw_density(left, density, values)
    elif values is not None:
        left.hist(values.tolist(), bins=min(60, max(10, len(values) // 4)), color=BLUE)
        left.set(xlabel="eigenvalue", ylabel="count", yscale="log")
    left.set_title(title)
    ordered = values if values is not None else np.asarray(density["nodes"])  # type: ignore[index]
    _draw_sorted(middle, np.asarray(ordered, dtype=np.float64))
    right.axis("off")
    lines = _statistics(density, values)
    right.text(0.0, 0.95, "\n".join(lines), va="top", family="monospace", fontsize=9)
    return saved(figure, path)


def _density_and_values(spectrum: Any) -> tuple[Mapping[str, Any] | None, Array | None]:
    pieces = spectrum if isinstance(spectrum, tuple) and _are_results(spectrum) else (spectrum,)
    density, values = None, None
    for piece in pieces:
        content = mapping(piece) if isinstance(piece, (Result, Mapping)) else {"values": piece}
        if "grid" in content and "density" in content:
            density = content
        elif "values" in content:
            values = np.asarray(plain_numbers(content["values"]), dtype=np.float64).reshape(-1)
        else:
            raise ValueError(f"a {type(piece).__name__} holds no eigenvalues and no density.")
    if density is None and (values is None or not len(values)):
        raise ValueError("there are no eigenvalues to draw.")
    return density, values


def _are_results(pieces: tuple[Any, ...]) -> bool:
    return all(isinstance(piece, (Result, Mapping)) for piece in pieces)


def _draw_density(axes: Any, density: Mapping[str, Any], values: Array | None) -> None:
    grid, height = np.asarray(density["grid"]), np.asarray(density["density"])
    axes.fill_between(grid, height, color=BLUE, alpha=0.3)
    axes.plot(grid, height, color=BLUE, label="density")
    axes.set(xlabel="eigenvalue", ylabel="density", yscale="log")
    top = max(float(height.max()), 1e-290)
    axes.set_ylim(top * 1e-6, top * 3)
    if values is not None:
        heights = np.full(len(values), height.max() * 1e-5)
        axes.plot(values, heights, "|", color=ORANGE, markersize=12, label="eigenvalues")
        axes.legend(fontsize=8)


def _draw_sorted(axes: Any, values: Array) -> None:
    ordered = np.sort(np.abs(values))[::-1]
    signs = values[np.argsort(-np.abs(values))] < 0
    ranks = np.arange(1, len(ordered) + 1)
    floor = max(ordered.max() * 1e-12, 1e-300)
    size = 3 if len(ranks) > 40 else 5
    for chosen, colour, label in ((~signs, BLUE, "positive"), (signs, ORANGE, "negative")):
        if chosen.any():
            heights = np.maximum(ordered[chosen], floor)
            axes.plot(ranks[chosen], heights, "o", color=colour, markersize=size, label=label)
    axes.set(xlabel="rank", ylabel="|eigenvalue|", yscale="log", title="sorted by magnitude")
    axes.legend(fontsize=8)


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
        lines += ["", "of the whole spectrum", f"mean     {mean:.4g}", f"spread   {spread:.4g}"]
        lines.append(_negative_share(density, nodes, weights))
    return lines


def _negative_share(density: Mapping[str, Any], nodes: Array, weights: Array) -> str:
    """As the density itself says it, with its interval; its nodes alone know only one of both."""
    share, interval = density.get("negative_mass"), density.get("negative_mass_interval")
    if share is None or interval is None:
        return f"negative {float(weights[nodes < 0].sum()):.1%}"
    low, high = interval
    return f"negative {share:.1%}\n  [{low:.1%}, {high:.1%}]"
