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
    mapping,
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
    """Density (or histogram), sorted magnitudes on a log axis, cumulative energy with statistics.

    spectrum: eigenvalues as numbers, an ``Eigenpairs``, a ``SpectralDensity``, or a pair
    (``SpectralDensity``, ``Eigenpairs``) of one matrix, drawn together.
    """
    density, values = _density_and_values(spectrum)
    figure, (left, middle, right) = panels(3)
    if density is not None:
        _draw_curve(left, density, values)
    elif values is not None:
        left.hist(values.tolist(), bins=min(60, max(10, len(values) // 4)), color=BLUE)
        left.set(xlabel="eigenvalue", ylabel="count", yscale="log")
    legend(left, title)
    sizes, weights = (values, np.ones(len(values))) if values is not None else _measure(density)
    _draw_sorted(middle, sizes)
    _draw_energy(right, sizes, weights, counted=values is not None)
    lines = _statistics(density, values)
    right.text(
        0.98, 0.03, "\n".join(lines), va="bottom", ha="right", family="monospace", fontsize=8,
        transform=right.transAxes, linespacing=1.1,
    )  # fmt: skip
    return saved(figure, path)


def _density_and_values(spectrum: Any) -> tuple[Mapping[str, Any] | None, Array | None]:
    together = isinstance(spectrum, tuple) and all(
        isinstance(piece, (Result, Mapping)) for piece in spectrum
    )
    density, values = None, None
    for piece in spectrum if together else (spectrum,):
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


def _draw_curve(axes: Any, density: Mapping[str, Any], values: Array | None) -> None:
    grid, height = np.asarray(density["grid"]), np.asarray(density["density"])
    (line,) = axes.plot(grid, height, color=BLUE, linewidth=1.1, label="density")
    line.shading = axes.fill_between(grid, height, color=BLUE, alpha=SHADING, linewidth=0)
    axes.set(xlabel="eigenvalue", ylabel="density", yscale="log")
    top = max(float(height.max()), 1e-290)
    axes.set_ylim(top * 1e-6, top * 3)
    if values is not None:
        heights = np.full(len(values), height.max() * 1e-5)
        axes.plot(values, heights, "|", color=ORANGE, markersize=12, label="eigenvalues")


def _measure(density: Any) -> tuple[Array, Array]:
    """Nodes and weights of a density, the weights summing to one."""
    nodes, weights = (np.asarray(density[name]).reshape(-1) for name in ("nodes", "weights"))
    return nodes, weights / weights.sum()


def _draw_sorted(axes: Any, values: Array) -> None:
    order = np.argsort(-np.abs(values))
    ordered, negative = np.abs(values)[order], values[order] < 0
    ranks = np.arange(1, len(ordered) + 1)
    floor = max(ordered.max() * 1e-12, 1e-300)
    size = 3 if len(ranks) > 40 else 5
    for chosen, colour, label in ((~negative, BLUE, "positive"), (negative, ORANGE, "negative")):
        if chosen.any():
            heights = np.maximum(ordered[chosen], floor)
            axes.plot(ranks[chosen], heights, "o", color=colour, markersize=size, label=label)
    axes.set(xlabel="rank", ylabel="|eigenvalue|", yscale="log")
    legend(axes, "sorted by magnitude")


def _draw_energy(axes: Any, values: Array, weights: Array, *, counted: bool) -> None:
    """The share of Σλ² in the largest eigenvalues, against how many they are."""
    order = np.argsort(-np.abs(values))
    energy = np.cumsum((weights * values**2)[order])
    share = energy / (energy[-1] or 1.0)
    among = np.cumsum(weights[order])
    axes.plot(among, 100 * share, color=BLUE, marker="o" if len(share) <= 40 else "", markersize=3)
    axes.axhline(100, color=MUTED, linewidth=0.7, linestyle=":")
    what = "eigenvalues" if counted else "share of the eigenvalues"
    axes.set(xlabel=f"largest {what}", ylabel="cumulative energy, % of Σλ²", ylim=(0, 106))
    axes.set_title("cumulative energy", color=INK)


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
        nodes, weights = _measure(density)
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
