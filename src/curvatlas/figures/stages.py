"""What only the page of a run asks: pictures across its stages that are no single result's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.flow import draw_flow
from curvatlas.figures.maps import draw_atlas, draw_shares, name_map
from curvatlas.figures.spectrum import draw_density, draw_eigenvalues
from curvatlas.figures.style import (
    GREEN,
    INK,
    PINK,
    colour_bar,
    finish,
    heat_map,
    legend,
    lying_bars,
    panels,
    tooltip,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.analysis.atlas.result import Atlas

    Interval = tuple[float, float]

stage_eigenvalues, stage_flow, stage_roles = draw_eigenvalues, draw_flow, draw_shares


def stage_spectra(
    densities: Mapping[str, Any], *, first_colour: int = 0, width: float = 4.4, height: float = 3.1
) -> Figure:
    """Densities of eigenvalues, a colour a stage or part; width and height in inches."""
    figure = draw_density(densities, first_colour=first_colour)
    figure.set_size_inches(width, height)
    return finish(figure)


def stage_map(atlas: Atlas, *, part: str = "total") -> Figure:
    """Which weights curve with which others: Frobenius norms of the blocks, or of the roles."""
    return draw_atlas({"": atlas}, part=part)


def stage_terms(flows: Mapping[str, Any]) -> Figure:
    """What every sublayer creates (filled) and passes on (hollow), a colour a stage."""
    return draw_flow(flows, quantity="both")


def map_change(before: Atlas, after: Atlas) -> Figure:
    """The factor by which every pair of roles changed; white where the intervals overlap."""
    one, two = before.view("role"), after.view("role")
    names = [name for name in one.names if name in two.names]
    factors, words = np.ones((len(names), len(names))), {}
    for i, row in enumerate(names):
        for j, column in enumerate(names):
            a, b = one[row, column], two[row, column]
            (low, high), (least, most) = one.interval_of(row, column), two.interval_of(row, column)
            apart = a > 0 and b > 0 and (high < least or most < low)
            factors[i, j] = b / a if apart else 1.0
            said = f"× {b / a:.3g}" if a > 0 else f"{a:.3g} → {b:.3g}"
            words[i, j] = f", {said}" + ("" if apart else ", within error")
    figure, (axes,) = panels()
    reach = max(float(np.exp(np.abs(np.log(factors)).max())), 2.0)
    image = heat_map(
        axes, factors, names, names, limits=(1 / reach, reach), colours="RdBu_r",
        notes=lambda i, j: words[i, j],
    )  # fmt: skip
    name_map(axes, names)
    colour_bar(figure, image, axes, "factor of change")
    return finish(figure)


def both_errors(
    rows: Sequence[tuple[str, float, Interval | None, Interval | None]],
) -> Figure:
    """The error of the measurement and of the data, in percent of each number."""
    figure, (axes,) = panels(height=max(0.8, 0.35 + 0.09 * len(rows)))
    names = [row[0] for row in rows]
    for kind, (index, words) in enumerate(((2, "of the measurement"), (3, "of the data"))):
        halves = []
        for row in rows:
            interval: Any = row[index]
            half = 0.0 if interval is None else (interval[1] - interval[0]) / 2 / abs(row[1] or 1)
            halves.append(100 * half if half > 1e-7 else np.nan)
        if np.isfinite(halves).any():
            look: Any = {"color": (GREEN, PINK)[kind], "label": f"error {words}"}
            lying_bars(axes, names, halves, shift=0.36 * (kind - 0.5), width=0.34, **look)
            for bar, name, half in zip(axes.containers[-1], names, halves, strict=True):
                tooltip(bar, f"{name}: ± {half:.2g} % {words}")
    axes.set(xscale="log", xlabel="half the 95 % interval, in % of the number")
    axes.axvline(100, color=INK, linewidth=0.8, linestyle=":")
    legend(axes)
    return finish(figure)
