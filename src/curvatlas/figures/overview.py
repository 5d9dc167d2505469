"""One picture of a run: the spectrum at every stage, where curvature lives, how it travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.style import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    PathLike,
    band,
    log_map,
    new_figure,
    saved,
    thinned,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.analysis.atlas.result import Atlas
    from curvatlas.analysis.propagation.result import CurvatureFlow
    from curvatlas.spectra.density_result import SpectralDensity

_COLOURS = (BLUE, ORANGE, GREEN, PINK)  # as on the page: the first stage blue, the next orange
_MOST_NAMES = 30  # rows of the map that can be labelled
_DECADES = 4  # shown below the largest entry


def visualize_overview(
    *,
    densities: Mapping[str, SpectralDensity],
    atlas: Atlas | None = None,
    flows: Mapping[str, CurvatureFlow] | None = None,
    atlas_words: str = "",
    title: str = "",
    path: PathLike | None = None,
) -> Figure:
    """Densities of H by stage, the map of the last stage, curvature by depth at every stage.

    Keys are the words of the legend, such as "at initialisation"; what is missing is left out.
    atlas_words: the stage of the map, for its title.
    """
    panels = [bool(densities), atlas is not None, bool(flows)]
    if not any(panels):
        raise ValueError("there is no density, no map and no flow to draw.")
    widths = [w for w, wanted in zip((1.25, 1.2, 1.15), panels, strict=True) if wanted]
    figure = new_figure(3.7 * sum(widths), 4.4)
    figure.set_layout_engine("constrained", h_pad=0.12)  # rotated labels reach further than told
    axes = iter(np.atleast_1d(figure.subplots(1, len(widths), width_ratios=widths)))
    if densities:
        _draw_densities(next(axes), densities)
    if atlas is not None:
        _draw_map(figure, next(axes), atlas, f"where it lives {atlas_words}".strip())
    if flows:
        _draw_flows(next(axes), flows)
    figure.suptitle(title, fontsize=11)
    return saved(figure, path)


def _draw_densities(axes: Any, densities: Mapping[str, SpectralDensity]) -> None:
    """Eigenvalues per decade of a symmetric logarithmic axis: bulk and outliers in one picture."""
    typical = min(max(float((d.weights * d.nodes.abs()).sum()), 1e-300) for d in densities.values())
    tops = []
    for (words, density), colour in zip(densities.items(), _COLOURS, strict=False):
        grid, height = density.grid.double().numpy(), density.density.double().numpy()
        drawn = height * np.sqrt(grid**2 + typical**2) * density.size
        axes.fill_between(grid, drawn, color=colour, alpha=0.3)
        largest = float(density.nodes[-1])
        axes.plot(
            grid, drawn, color=colour, linewidth=1, label=f"{words}, λ$_{{max}}$ {largest:.3g}"
        )
        tops.append(float(drawn.max()))
    axes.set_xscale("symlog", linthresh=typical)
    axes.set(yscale="log", ylim=(0.2, 60 * max(tops)))
    axes.set(xlabel="eigenvalue of H", ylabel="eigenvalues per e-fold", title="spectrum")
    ends = axes.get_xlim()
    decades = [k for k in range(-12, 12) if typical < 10.0**k < max(abs(e) for e in ends)]
    kept = decades[:: -(-len(decades) // 3)]
    ticks = [*(-(10.0**k) for k in reversed(kept)), 0.0, *(10.0**k for k in kept)]
    shown = [tick for tick in ticks if ends[0] <= tick <= ends[1]]
    axes.set_xticks(shown, [_power(tick) for tick in shown])
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="upper center")


def _power(value: float) -> str:
    if value == 0:
        return "0"
    return f"{'−' if value < 0 else ''}$10^{{{round(np.log10(abs(value)))}}}$"


def _draw_map(figure: Any, axes: Any, atlas: Atlas, title: str) -> None:
    view = "block" if len(atlas.names) <= _MOST_NAMES else "role"
    chosen = atlas.view(view)
    values = chosen.values.double().numpy()
    alive = (values > 0) & (chosen.low.double().numpy() > 0)  # the rest is zero up to its interval
    top = float(np.log10(values[alive].max())) if alive.any() else 0.0
    low = max(float(np.log10(values[alive].min())), top - _DECADES) if alive.any() else -1.0
    # "auto" shape: the layout engine cuts labels of axes whose shape is fixed
    image = log_map(axes, values, alive, limits=(low, top))
    places, labels = thinned(_short(chosen.names), _MOST_NAMES)
    axes.set_xticks(places, labels, rotation=90, fontsize=7.5)
    axes.set_yticks(places, labels, fontsize=7.5)
    axes.set_title(title)
    figure.colorbar(image, ax=axes, shrink=0.75, label="log$_{10}$ ‖H$_{ij}$‖$_F$")


def _draw_flows(axes: Any, flows: Mapping[str, CurvatureFlow]) -> None:
    names: list[str] = []
    for (words, flow), colour in zip(flows.items(), _COLOURS, strict=False):
        names = [entry.name for entry in flow.sublayers]
        ends = np.array([entry.interval for entry in flow.sublayers]).T
        norms = [entry.norm for entry in flow.sublayers]
        line: Any = {"color": colour, "style": "o-", "markersize": 4, "label": words}
        band(axes, range(len(names)), norms, *ends, **line)
    axes.set_xticks(*thinned(_short(names), 14), rotation=90, fontsize=7.5)
    axes.set(yscale="log", ylabel="‖∂²L/∂input²‖$_F$", title="how it travels back")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _short(names: Sequence[str]) -> list[str]:
    """Names without what they share: the only block's number, the long word for an embedding."""
    blocks = {name.split(".")[1] for name in names if name.startswith("blocks.")}
    prefix = f"blocks.{next(iter(blocks))}." if len(blocks) == 1 else "blocks."
    return [
        name.removeprefix(prefix).replace("embedding.", "emb. ").replace("_residual", " (+)")
        for name in names
    ]
