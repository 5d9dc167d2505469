"""Spectra: the density of eigenvalues before and after, certified eigenvalues, single estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.style import (
    BLUE,
    GRID,
    INK,
    MUTED,
    ORANGE,
    SERIES,
    SHADING,
    PathLike,
    band,
    draws,
    legend,
    name_axis,
    panels,
    plain_numbers,
    points,
    saved,
)
from curvatlas.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.figures.style import Array
    from curvatlas.spectra.density_result import SpectralDensity
    from curvatlas.spectra.diagonal import DiagonalEstimate
    from curvatlas.spectra.eigen_result import Eigenpairs
    from curvatlas.spectra.estimate import Estimate
    from curvatlas.spectra.summary import CurvatureSummary

_FEWEST = 0.2  # eigenvalues an e-fold: where the picture of a density ends below
_STRETCHES = 220  # of a curve's axis
_CURVE_STEP = 2  # of the points of a curve, for the area under it


@draws("SpectralDensity", stages=True)
def draw_density(
    stages: Mapping[str, SpectralDensity],
    *,
    ends: Mapping[str, tuple[float, float]] | None = None,
    symbol: str = "H",
    first_colour: int = 0,
) -> Figure:
    """Eigenvalues per e-fold of a symmetric logarithmic axis: bulk and outliers in one picture.

    ends: smallest and largest eigenvalue where they are known better than by the density.
    """
    figure, (axes,) = panels()
    typical = min(max(float((d.weights * d.nodes.abs()).sum()), 1e-300) for d in stages.values())
    tops, known, colours = [], {}, SERIES[first_colour:]
    for (words, one), colour in zip(stages.items(), colours, strict=False):
        grid, height = one.grid.double().numpy(), one.density.double().numpy()
        # per unit of the drawn axis, so that areas in the picture count eigenvalues
        drawn = height * np.sqrt(grid**2 + typical**2) * one.size
        kept = _peaks(np.arcsinh(grid / typical), drawn)
        grid, drawn = grid[kept], drawn[kept]
        (line,) = axes.plot(grid, drawn, color=colour, linewidth=1.1, label=words or "_")
        across, up = grid[::_CURVE_STEP], np.maximum(drawn[::_CURVE_STEP], _FEWEST / 2)
        across, up = across[[0, *range(len(across)), -1]], np.r_[_FEWEST / 2, up, _FEWEST / 2]
        (line.shading,) = axes.fill(across, up, color=colour, alpha=SHADING, linewidth=0)
        tops.append(float(drawn.max()))
        known[words] = (ends or {}).get(words, (float(one.nodes[0]), float(one.nodes[-1])))
    axes.set_xscale("symlog", linthresh=typical)
    axes.axvline(0.0, color=GRID, linewidth=0.8, zorder=0)
    axes.set(yscale="log", ylim=(_FEWEST, max(tops) * 10 ** (0.55 + 0.45 * len(stages))))
    low, high = axes.get_xlim()
    for row, ((smallest, largest), colour) in enumerate(zip(known.values(), colours, strict=False)):
        _mark_end(axes, largest, "λmax", colour, row)
        if smallest < 0:
            _mark_end(axes, smallest, "λmin", colour, row)
    axes.set(xlim=(low, high), xlabel=f"eigenvalue of {symbol}", ylabel="eigenvalues per e-fold")
    legend(axes)
    return figure


def _peaks(places: Array, heights: Array) -> list[int]:
    """The highest point of every stretch of the drawn axis: more would lie within a pixel."""
    reach = max(float(places[-1] - places[0]), 1e-300)
    stretch = np.floor((places - places[0]) / reach * _STRETCHES)
    parts = np.split(np.arange(len(places)), np.flatnonzero(np.diff(stretch)) + 1)
    return [int(part[heights[part].argmax()]) for part in parts]


def _mark_end(axes: Any, value: float, name: str, colour: str, row: int) -> None:
    """A dotted line with the number at an end of the spectrum, a row a stage."""
    top = 0.98 - 0.085 * row
    across = axes.get_xaxis_transform()
    axes.plot([value, value], [0, top], ":", color=colour, linewidth=1, transform=across)
    right = name == "λmax"
    axes.annotate(
        f"{name} {value:.3g}".replace("-", "−"), (value, top), xycoords=across, color=INK,
        xytext=(-4 if right else 4, 0), textcoords="offset points", va="top", fontsize=9,
        ha="right" if right else "left",
    )  # fmt: skip


@draws("CurvatureSummary", stages=True)
def draw_summary(stages: Mapping[str, CurvatureSummary]) -> Figure:
    """The density of each, its ends as the certified eigenvalues have them."""
    ends = {words: (one.smallest, one.sharpness) for words, one in stages.items()}
    densities = {words: one.density for words, one in stages.items()}
    return draw_density(densities, ends=ends)


@draws("Eigenpairs", stages=True)
def draw_eigenvalues(stages: Mapping[str, Eigenpairs]) -> Figure:
    """Eigenvalues in order with their intervals: over the data where known, else certified."""
    figure, (axes,) = panels()
    axes.axhline(0.0, color=GRID, linewidth=0.8, zorder=0)
    for (words, pairs), colour in zip(stages.items(), SERIES, strict=False):
        ranks = range(1, len(pairs.values) + 1)
        ends = pairs.data_interval or pairs.interval  # certified: narrower than other samples say
        intervals = list(zip(*(end.tolist() for end in ends), strict=True))
        points(axes, ranks, pairs.values, intervals, color=colour, label=words, joined=False)
    sizes = np.concatenate([pairs.values.double().abs().numpy() for pairs in stages.values()])
    if sizes.size and sizes.max() > 30 * sizes.min() > 0:
        axes.set_yscale("symlog", linthresh=max(sizes.min(), sizes.max() / 1e3))
    axes.set(xlabel="eigenvalues that were computed, in order", ylabel="eigenvalue")
    legend(axes)
    return figure


@draws("Estimate", stages=True)
def draw_estimate(stages: Mapping[str, Estimate]) -> Figure:
    """Values with their intervals: of the probes, and of the data where it was sampled."""
    rows = [
        (words, kind, one.value, interval)
        for words, one in stages.items()
        for kind, interval in (("probes", one.interval), ("data", one.data_interval))
        if interval is not None
    ]
    figure, (axes,) = panels(height=0.28 + 0.12 * len(rows))
    for place, (_, kind, value, (low, high)) in enumerate(rows):
        colour = BLUE if kind == "probes" else ORANGE
        axes.plot([low, high], [place, place], color=colour, linewidth=4, alpha=0.5)
        axes.plot([value], [place], "o", color=colour, markersize=5)
    name_axis(axes.yaxis, [f"{words} {kind}".strip() for words, kind, *_ in rows])
    quantity = next(iter(stages.values())).quantity
    axes.set(xlabel=quantity.replace("_", " "), ylim=(len(rows) - 0.4, -0.6))
    return figure


@draws("DiagonalEstimate")
def draw_diagonal(found: DiagonalEstimate) -> Figure:
    """Sorted entries with their intervals."""
    figure, (axes,) = panels()
    order = found.values.argsort().cpu()
    low, high = (bound.cpu()[order] for bound in found.interval)
    band(axes, range(len(order)), found.values.cpu()[order], low, high, color=BLUE, style="-")
    axes.set(xlabel="entry of the diagonal, sorted", ylabel="value")
    return figure


# --- the article's figure ------------------------------------------------------------------------


def visualize_hessian_spectrum(
    spectrum: Any, *, path: PathLike | None = None, title: str = "Hessian spectrum"
) -> Figure:
    """Histogram, sorted magnitudes on a logarithmic axis, cumulative energy with statistics.

    spectrum: eigenvalues as numbers, or an ``Eigenpairs``; a ``SpectralDensity`` has its own
    picture.
    """
    given = spectrum["values"] if isinstance(spectrum, Result) else spectrum
    values = np.asarray(plain_numbers(given), dtype=np.float64).reshape(-1)
    if not len(values):
        raise ValueError("there are no eigenvalues to draw.")
    figure, (left, middle, right) = panels(3)
    left.hist(values.tolist(), bins=min(60, max(10, len(values) // 4)), color=BLUE)
    left.set(xlabel="eigenvalue", ylabel="count", yscale="log", title=title)
    sizes = np.sort(np.abs(values))[::-1]
    order = values[np.argsort(-np.abs(values))]
    ranks = np.arange(1, len(values) + 1)
    heights = np.maximum(sizes, max(sizes[0] * 1e-12, 1e-300))
    for chosen, colour, label in ((order >= 0, BLUE, "positive"), (order < 0, ORANGE, "negative")):
        if chosen.any():
            look: Any = {"color": colour, "label": label, "markersize": 3 if len(ranks) > 40 else 5}
            middle.plot(ranks[chosen], heights[chosen], "o", **look)
    middle.set(xlabel="rank", ylabel="|eigenvalue|", yscale="log")
    legend(middle, "sorted by magnitude")
    energy = np.cumsum(sizes**2)
    marker = "o" if len(ranks) <= 40 else ""
    right.plot(ranks, 100 * energy / (energy[-1] or 1.0), color=BLUE, marker=marker, markersize=3)
    right.axhline(100, color=MUTED, linewidth=0.7, linestyle=":")
    right.set(xlabel="largest eigenvalues", ylabel="cumulative energy, % of Σλ²", ylim=(0, 106))
    right.set_title("cumulative energy")
    ends = np.sort(values)[::-1]
    numbers = {"largest": ends[0], "smallest": ends[-1], "mean": values.mean()}
    numbers |= {"gap": ends[0] - ends[1]} if len(ends) > 1 else {}
    lines = [f"{name:8s} {number:.4g}" for name, number in numbers.items()]
    lines += [f"{'spread':8s} {values.std():.4g}", f"{'negative':8s} {np.mean(values < 0):.1%}"]
    right.text(
        0.98, 0.03, "\n".join(lines), va="bottom", ha="right", family="monospace", fontsize=8,
        transform=right.transAxes, linespacing=1.1,
    )  # fmt: skip
    return saved(figure, path)
