"""What only the page of a run asks: pictures across its stages that are no single result's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.maps import name_map
from curvatlas.figures.style import (
    GREEN,
    INK,
    PINK,
    SERIES,
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


def draw_shares(stages: Mapping[str, Atlas], *, most: int = 12) -> Figure:
    """The share of ‖H‖² in the rows of every role, the largest of the last stage first."""
    shares: dict[str, dict[str, float]] = {}
    for words, atlas in stages.items():
        one = atlas.view("role")
        squares = one.values.double() ** 2
        rows = 100 * squares.sum(1) / (float(squares.sum()) or 1.0)
        shares[words] = dict(zip(one.names, rows.tolist(), strict=True))
    last = list(shares.values())[-1]
    names = sorted(last, key=lambda name: -last[name])[:most]
    figure, (axes,) = panels(height=max(0.7, 0.3 + 0.07 * len(names)))
    width = 0.8 / len(shares)
    for place, (words, share) in enumerate(shares.items()):
        look: Any = {"color": SERIES[place % len(SERIES)], "label": words, "width": width}
        shift = width * (place - (len(shares) - 1) / 2)
        lying_bars(axes, names, [share.get(name, 0.0) for name in names], shift=shift, **look)
    axes.set_xlabel("share of ‖H‖² in the role's rows, %")
    legend(axes)
    return finish(figure)


def draw_change(before: Atlas, after: Atlas) -> Figure:
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


def draw_errors(rows: Sequence[tuple[str, float, Interval | None, Interval | None]]) -> Figure:
    """The error of the measurement and of the data, in percent of each number."""
    figure, (axes,) = panels(height=max(0.8, 0.35 + 0.09 * len(rows)))
    names, numbers, *intervals = (list(column) for column in zip(*rows, strict=True))
    looks = ("of the measurement", GREEN, -0.18), ("of the data", PINK, 0.18)
    for (words, colour, shift), ends in zip(looks, intervals, strict=True):
        halves = [0.0 if one is None else (one[1] - one[0]) / 2 for one in ends]
        shares = [100 * half / abs(v or 1) for half, v in zip(halves, numbers, strict=True)]
        shown = [share if share > 1e-5 else np.nan for share in shares]
        if np.isfinite(shown).any():
            look: Any = {"color": colour, "label": f"error {words}", "shift": shift, "width": 0.34}
            lying_bars(axes, names, shown, **look)
            for bar, name, share in zip(axes.containers[-1], names, shown, strict=True):
                tooltip(bar, f"{name}: ± {share:.2g} % {words}")
    axes.set(xscale="log", xlabel="half the 95 % interval, in % of the number")
    axes.axvline(100, color=INK, linewidth=0.8, linestyle=":")
    legend(axes)
    return finish(figure)
