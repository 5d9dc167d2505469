"""Pictures of the theory: looseness of bounds, growth rates, spectra. matplotlib loads on use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from curvatlas.figures.style import (
    GREEN,
    MUTED,
    SERIES,
    colour_bar,
    draws,
    finish,
    heat_map,
    legend,
    lying_bars,
    name_axis,
    panels,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.theory.norm_bounds import CurvatureBounds
    from curvatlas.theory.scalar_attention import ScalarAttentionSpectrum
    from curvatlas.theory.statements import Outcome

_COLOURS = (*SERIES, MUTED)


@draws("CurvatureBounds")
def draw_bounds(bounds: CurvatureBounds) -> Figure:
    """The bounds beside the exact norm, and the matrix of group bounds."""
    figure, (left, right) = panels(2)
    names = ["exact", "token-structured", "data-free", "printed"]
    values = [bounds.exact, bounds.token_structured, bounds.data_free, bounds.printed]
    lying_bars(left, names, values, color=[GREEN, *_COLOURS[:2], MUTED], logarithmic=True)
    left.set_xlabel("bound on ‖H‖₂")
    for place, value in enumerate(values):
        left.text(value, place, f" {value:.3g}", va="center", fontsize=8)
    left.set_xlim(right=8 * max(values))
    matrix, tokens = bounds.token_matrix.detach().cpu().numpy(), bounds.token_names
    image = heat_map(right, matrix, tokens, tokens, decades=8)
    name_axis(right.xaxis, tokens, turned=90, size=8)
    name_axis(right.yaxis, tokens, size=8)
    right.set_title("token-structured bound of each pair")
    colour_bar(figure, image, right, "bound (loss / parameter²)")
    return figure


def looseness_figure(outcome: Outcome) -> Figure:
    """Distribution of bound/true by kind of block, with what is allowed."""
    figure, (axis,) = panels(width=1.5)
    ratios: dict[str, list[float]] = outcome.series["ratios"]
    axis.boxplot(list(ratios.values()), whis=(0, 100), widths=0.5)
    axis.set_xticks(range(1, len(ratios) + 1), list(ratios))
    axis.set_xlim(0.5, len(ratios) + 1.0)  # room for the words beside the boxes
    for level, text in ((1.0, "violated below"), (3.0, "median allowed"), (6.0, "worst allowed")):
        axis.axhline(level, color=MUTED, linewidth=0.8, linestyle="--")
        axis.text(len(ratios) + 0.98, level, text, fontsize=7, va="bottom", ha="right")
    axis.set_yscale("log")
    axis.set_yticks([1, 1.5, 2, 3, 4, 6], ["1", "1.5", "2", "3", "4", "6"])
    axis.set_ylabel("token-structured bound / true ‖H‖")
    count = sum(len(v) for v in ratios.values())
    axis.set_title(f"{count} random blocks; box: quartiles, whiskers: all")
    return finish(figure)


def growth_figure(outcome: Outcome) -> Figure:
    """Block norms against a scale on log-log axes, one panel a part; slopes in the legend."""
    usual = {"xlabel": "scale t", "ylabel": "Frobenius norm of the block"}
    slopes: dict[str, dict[str, float]] = outcome.series.get("slopes", {})
    panels_of = {
        title: {
            name if slopes.get(title, {}).get(name) is None
            else f"{name}  slope {slopes[title][name]:.2f}": values
            for name, values in curves.items()
        }
        for title, curves in outcome.series["panels"].items()
    }  # fmt: skip
    log = {"xscale": "log", "yscale": "log"}
    return _curves(panels_of, outcome.series["scales"], {**usual, **outcome.series, **log})


def lines_figure(outcome: Outcome) -> Figure:
    """Plain curves: series["x"], series["curves"], labels and scales as given."""
    return _curves({"": outcome.series["curves"]}, outcome.series["x"], outcome.series)


def _curves(
    panels_of: dict[str, dict[str, list[float]]], x: list[float], series: dict[str, Any]
) -> Figure:
    figure, axes = panels(len(panels_of))
    looks = {k: series[k] for k in ("xscale", "yscale", "xlabel", "ylabel") if k in series}
    for axis, (title, curves) in zip(axes, panels_of.items(), strict=True):
        for colour, (name, values) in zip(_COLOURS * 3, curves.items(), strict=False):
            axis.plot(x, values, marker="o", markersize=3, color=colour, label=name)
        axis.set(**looks)
        legend(axis, title)
    return finish(figure)


def spectrum_figure(outcome: Outcome) -> Figure:
    """Computed eigenvalues against the closed form, sorted."""
    figure, (axis,) = panels()
    computed: list[float] = outcome.series["computed"]
    predicted: list[float] = outcome.series["predicted"]
    places = range(1, len(computed) + 1)
    axis.plot(places, computed, "o", color=_COLOURS[0], markersize=5, label="eigenvalues of H")
    axis.plot(places, predicted, "x", color=_COLOURS[1], markersize=6, label="closed form")
    axis.axhline(0.0, color=MUTED, linewidth=0.8)
    axis.set_xlabel("rank")
    axis.set_ylabel("eigenvalue")
    axis.set_yscale("symlog", linthresh=max(abs(v) for v in computed) * 1e-3)
    legend(axis, outcome.series.get("title", ""))
    return finish(figure)


@draws("ScalarAttentionSpectrum")
def draw_scalar_attention(spectrum: ScalarAttentionSpectrum) -> Figure:
    """Every eigenvalue by its rank: the bulk as a band of two lines, the outliers apart."""
    figure, (axis,) = panels()
    values = spectrum.eigenvalues
    bulk = (values.abs() - spectrum.bulk).abs() <= 1e-12 * values.abs().max()
    places = range(1, len(values) + 1)
    for chosen, name, colour in ((bulk, "bulk ±g", _COLOURS[0]), (~bulk, "outliers", _COLOURS[1])):
        ranks = [place for place, kept in zip(places, chosen.tolist(), strict=True) if kept]
        axis.plot(ranks, values[chosen].tolist(), "o", color=colour, markersize=5, label=name)
    axis.axhline(0.0, color=MUTED, linewidth=0.8)
    axis.set_xlabel("rank")
    axis.set_ylabel("eigenvalue")
    largest = max(float(values.abs().max()), 1e-300)
    axis.set_yscale("symlog", linthresh=1e-3 * largest)
    axis.set_ylim(-3.0 * largest, 3.0 * largest)
    legend(axis, f"bulk {spectrum.bulk_ratio:.2g} of the largest outlier")
    return figure
