"""Pictures of the theory: looseness of bounds, growth rates, spectra. matplotlib loads on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from curvatlas.figures import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.theory.norm_bounds import CurvatureBounds
    from curvatlas.theory.statements import Outcome

_COLOURS = (
    style.BLUE,
    style.ORANGE,
    style.GREEN,
    style.YELLOW,
    style.SKY,
    style.PINK,
    style.GREY,
)


def _panels(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Any]]:
    """An empty figure with axes in a row."""
    figure = style.new_figure(width, height)
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def bounds_figure(bounds: CurvatureBounds) -> Figure:
    """The bounds beside the exact norm, and the matrix of group bounds."""
    import numpy as np

    figure, (left, right) = _panels(9.5, 3.6, 2)
    names = ["exact", "token-structured", "data-free", "printed"]
    values = [bounds.exact, bounds.token_structured, bounds.data_free, bounds.printed]
    left.barh(names, values, color=_COLOURS[:4])
    left.set_xscale("log")
    left.invert_yaxis()
    left.set_xlabel("bound on ‖H‖₂")
    for place, value in enumerate(values):
        left.text(value, place, f" {value:.3g}", va="center", fontsize=8)
    left.margins(x=0.25)
    matrix = bounds.token_matrix.detach().cpu().numpy()
    shown = right.imshow(np.log10(np.maximum(matrix, matrix.max() * 1e-8)), cmap="viridis")
    right.set_xticks(range(len(bounds.token_names)), bounds.token_names, fontsize=7, rotation=90)
    right.set_yticks(range(len(bounds.token_names)), bounds.token_names, fontsize=7)
    right.set_title("token-structured bound of each pair", fontsize=9)
    figure.colorbar(shown, ax=right, label="log10")
    return figure


def looseness_figure(outcome: Outcome) -> Figure:
    """Distribution of bound/true by kind of block, with what is allowed."""
    figure, (axis,) = _panels(7.0, 3.6)
    ratios: dict[str, list[float]] = outcome.series["ratios"]
    axis.boxplot(list(ratios.values()), whis=(0, 100), widths=0.5)
    axis.set_xticks(range(1, len(ratios) + 1), list(ratios))
    axis.set_xlim(0.5, len(ratios) + 1.0)  # room for the words beside the boxes
    for level, text in ((1.0, "violated below"), (3.0, "median allowed"), (6.0, "worst allowed")):
        axis.axhline(level, color="#bbbbbb", linewidth=0.8, linestyle="--")
        axis.text(len(ratios) + 0.98, level, text, fontsize=7, va="bottom", ha="right")
    axis.set_yscale("log")
    axis.set_yticks([1, 1.5, 2, 3, 4, 6], ["1", "1.5", "2", "3", "4", "6"])
    axis.set_ylabel("token-structured bound / true ‖H‖")
    count = sum(len(v) for v in ratios.values())
    axis.set_title(f"{count} random blocks; box: quartiles, whiskers: all", fontsize=9)
    return figure


def growth_figure(outcome: Outcome) -> Figure:
    """Block norms against a scale on log-log axes, one panel a part; slopes in the legend."""
    panels: dict[str, dict[str, list[float]]] = outcome.series["panels"]
    scales: list[float] = outcome.series["scales"]
    slopes: dict[str, dict[str, float]] = outcome.series.get("slopes", {})
    figure, axes = _panels(4.6 * len(panels), 3.8, len(panels))
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for colour, (name, values) in zip(_COLOURS * 3, curves.items(), strict=False):
            slope = slopes.get(title, {}).get(name)
            label = name if slope is None else f"{name}  slope {slope:.2f}"
            axis.plot(scales, values, marker="o", markersize=3, color=colour, label=label)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(outcome.series.get("xlabel", "scale t"))
        axis.set_ylabel(outcome.series.get("ylabel", "Frobenius norm of the block"))
        axis.set_title(title, fontsize=9)
        axis.legend(fontsize=7, frameon=False)
    return style.tidy_log_axes(figure)


def spectrum_figure(outcome: Outcome) -> Figure:
    """Computed eigenvalues against the closed form, sorted."""
    figure, (axis,) = _panels(6.5, 3.6)
    computed: list[float] = outcome.series["computed"]
    predicted: list[float] = outcome.series["predicted"]
    places = range(1, len(computed) + 1)
    axis.plot(places, computed, "o", color=_COLOURS[0], markersize=5, label="eigenvalues of H")
    axis.plot(places, predicted, "x", color=_COLOURS[1], markersize=6, label="closed form")
    axis.axhline(0.0, color="#bbbbbb", linewidth=0.8)
    axis.set_xlabel("rank")
    axis.set_ylabel("eigenvalue")
    # A linear part as high as two decades keeps the ticks around zero apart.
    smallest = max(abs(v) for v in computed) * 1e-3
    axis.set_yscale("symlog", linthresh=smallest, linscale=2.0)
    axis.yaxis.labelpad = 10
    axis.set_title(outcome.series.get("title", ""), fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    return figure


def lines_figure(outcome: Outcome) -> Figure:
    """Plain curves: series["x"], series["curves"], labels and scales as given."""
    figure, (axis,) = _panels(6.0, 3.8)
    for colour, (name, values) in zip(_COLOURS, outcome.series["curves"].items(), strict=False):
        axis.plot(outcome.series["x"], values, marker="o", markersize=3, color=colour, label=name)
    axis.set_xscale(outcome.series.get("xscale", "linear"))
    axis.set_yscale(outcome.series.get("yscale", "linear"))
    axis.set_xlabel(outcome.series.get("xlabel", ""))
    axis.set_ylabel(outcome.series.get("ylabel", ""))
    axis.legend(fontsize=8, frameon=False)
    return style.tidy_log_axes(figure)
