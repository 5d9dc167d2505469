"""Heat maps of the atlas: one colour scale for compared panels, labels that never overlap."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from curvatlas.figures.style import (
    BLUE,
    GREEN,
    PINK,
    SKY,
    YELLOW,
    band,
    log_map,
    new_figure,
    tidy_log_axes,
)
from curvatlas.linear_operator import PARTS, SYMBOLS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.analysis.atlas.attention import AttentionCurvature
    from curvatlas.analysis.atlas.result import Atlas, AtlasMap

PART_LABELS = {"total": "H", "outer": "H$_o$", "functional": "H$_f$"}  # as matplotlib sets them

_LABELLED_UP_TO = 40  # rows whose every name is written; more are labelled by layer
_DECADES = 5  # shown below the largest entry
_MAP = "viridis"  # survives colour blindness and grey printing


def plot_map(
    chosen: AtlasMap, *, limits: tuple[float, float] | None = None, title: str | None = None
) -> Figure:
    """One heat map of log10 values (plain for couplings), or bars for traces."""
    if chosen.values.ndim == 1:
        return _bars([chosen], title)
    side = _side(len(chosen.names))
    figure = new_figure(side + 1.6, side + 0.6)
    axes = figure.add_subplot()
    image = _draw(axes, chosen, limits or _limits([chosen]), first=True)
    axes.set_title(title or f"{chosen.quantity} of {SYMBOLS[chosen.part]}, by {chosen.view}")
    figure.colorbar(image, ax=axes, shrink=0.8, label=_scale_name(chosen))
    return figure


def plot_atlas(atlas: Atlas, *, view: str = "block", quantity: str = "frobenius") -> Figure:
    """H, H_o and H_f side by side on one colour scale (bars for traces)."""
    chosen = [atlas.view(view, quantity, part) for part in PARTS]
    if chosen[0].values.ndim == 1:
        return _bars(chosen, None)
    side = _side(len(chosen[0].names), panels=3)
    labels = max(_label_width(chosen[0].names), 1.0)
    figure = new_figure(3 * side + labels + 1.2, side + labels + 0.4)
    panels = figure.subplots(1, 3)
    limits = _limits(chosen)
    for k, (axes, one) in enumerate(zip(panels, chosen, strict=True)):
        image = _draw(axes, one, limits, first=k == 0)
        axes.set_title(PART_LABELS[one.part])
    figure.colorbar(image, ax=list(panels), shrink=0.8, label=_scale_name(chosen[0]))
    return figure


def compare_atlases(
    atlases: dict[str, Atlas],
    *,
    view: str = "role",
    quantity: str = "frobenius",
    part: str = "total",
) -> Figure:
    """The same map of several models on one colour scale."""
    chosen = {name: atlas.view(view, quantity, part) for name, atlas in atlases.items()}
    maps = list(chosen.values())
    if maps[0].values.ndim == 1:
        return _bars(maps, None, list(chosen))
    side = max(_side(len(m.names), panels=len(maps)) for m in maps)
    labels = max(max(_label_width(m.names), 1.0) for m in maps)
    size = (len(maps) * (side + labels) + 1.2, side + labels + 0.5)
    figure = new_figure(*size)
    panels = np.atleast_1d(np.asarray(figure.subplots(1, len(maps))))
    limits = _limits(maps)
    for axes, (name, one) in zip(panels, chosen.items(), strict=True):
        image = _draw(axes, one, limits, first=True)
        axes.set_title(name)
    figure.colorbar(image, ax=list(panels), shrink=0.8, label=_scale_name(maps[0]))
    return figure


def save_figures(atlas: Atlas, folder: str | os.PathLike[str]) -> list[str]:
    """One PNG a view and quantity."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for view in ("block", "role", "layer"):
        for quantity in ("frobenius", "coupling", "trace"):
            path = target / f"atlas-{view}-{quantity}.png"
            plot_atlas(atlas, view=view, quantity=quantity).savefig(path, dpi=140)
            paths.append(str(path))
    return paths


# --- pieces ---------------------------------------------------------------------------------------


def _side(count: int, *, panels: int = 1) -> float:
    """Inches of one square panel: a readable label needs 0.16."""
    return float(min(max(2.6, 0.17 * min(count, _LABELLED_UP_TO)), 7.5 if panels == 1 else 6.0))


def _label_width(names: Sequence[str]) -> float:
    return 0.075 * max(len(name) for name in names) if len(names) <= _LABELLED_UP_TO else 0.8


def _limits(maps: Sequence[AtlasMap]) -> tuple[float, float]:
    if maps[0].quantity == "coupling":
        return 0.0, 1.0
    top = max((float(m.values.max()) for m in maps), default=0.0)
    high = float(np.log10(top)) if top > 0 else 0.0
    alive = [m.values[(m.values > 0) & ((m.low > 0) | (m.low == m.high))] for m in maps]
    floors = [float(values.min()) for values in alive if values.numel()]
    low = float(np.log10(min(floors))) if floors else high - 1
    return max(low, high - _DECADES), high if high > low else low + 1


def _scale_name(chosen: AtlasMap) -> str:
    if chosen.quantity == "coupling":
        return "‖H$_{ij}$‖ / √(‖H$_{ii}$‖ ‖H$_{jj}$‖)"
    symbol = {"frobenius": "‖·‖$_F$", "spectral": "‖·‖$_2$"}[chosen.quantity]
    return f"log$_{{10}}$ {symbol} (loss / parameter²)\ngrey: zero up to rounding"


def _draw(axes: Any, chosen: AtlasMap, limits: tuple[float, float], *, first: bool) -> Any:
    values = chosen.values.double().numpy()
    if chosen.quantity == "coupling":
        image = axes.imshow(
            values, vmin=limits[0], vmax=limits[1], cmap=_MAP, interpolation="nearest"
        )
    else:
        alive = (values > 0) & ((chosen.low > 0) | (chosen.high == chosen.low)).numpy()
        image = log_map(axes, values, alive, limits=limits, aspect="equal")
    _label(axes, chosen.names, first=first)
    return image


def _label(axes: Any, names: Sequence[str], *, first: bool) -> None:
    """Every name while they fit; otherwise one label a layer, centred, with separators."""
    groups = _layers(names)
    edges = [start for _, start, _ in groups[1:]]
    for edge in edges:
        axes.axhline(edge - 0.5, color="white", linewidth=0.6, alpha=0.7)
        axes.axvline(edge - 0.5, color="white", linewidth=0.6, alpha=0.7)
    if len(names) <= _LABELLED_UP_TO:
        places: list[float] = [float(place) for place in range(len(names))]
        labels = list(names)
        size = 7.0
    else:
        # A group's label sits in its middle; a group too thin for its own label goes without one.
        thin = len(names) / _LABELLED_UP_TO
        wide = [(label, start, stop) for label, start, stop in groups if stop - start >= thin]
        places = [(start + stop - 1) / 2 for _, start, stop in wide]
        labels = [label for label, _, _ in wide]
        size = 7.5
    axes.set_xticks(places, labels, rotation=90, fontsize=size)
    axes.set_yticks(places, labels if first else [""] * len(labels), fontsize=size)
    axes.tick_params(length=2)


def _layers(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """(label, first, last + 1) of runs of names that belong together."""
    runs: list[tuple[str, int, int]] = []
    for place, name in enumerate(names):
        parts = name.split(".")
        label = f"layer {parts[1]}" if parts[0] == "blocks" and len(parts) > 2 else parts[0]
        if runs and runs[-1][0] == label:
            runs[-1] = (label, runs[-1][1], place + 1)
        else:
            runs.append((label, place, place + 1))
    return runs


def _bars(maps: Sequence[AtlasMap], title: str | None, labels: list[str] | None = None) -> Figure:
    """Horizontal bars with intervals, one colour a part."""
    names = maps[0].names
    height = max(2.4, 0.2 * len(names) + 0.9)
    figure = new_figure(6.4, min(height, 40))
    axes = figure.add_subplot()
    colours = (BLUE, YELLOW, GREEN, PINK, SKY)
    step = 0.8 / len(maps)
    places = np.arange(len(names))
    for k, one in enumerate(maps):
        value, low, high = (t.double().numpy() for t in (one.values, one.low, one.high))
        axes.barh(
            places + k * step,
            value,
            height=step,
            color=colours[k % len(colours)],
            label=labels[k] if labels else SYMBOLS[one.part],
            xerr=np.maximum([value - low, high - value], 0),
            error_kw={"linewidth": 0.7},
        )
    axes.set_yticks(places + 0.4 - step / 2, names, fontsize=7)
    axes.set_ylim(len(names), -0.6)  # downwards, without the wide margins of a tall figure
    axes.axvline(0, color="0.5", linewidth=0.6)
    reach = max(float(one.values.abs().max()) for one in maps)
    if maps[0].quantity == "trace" and reach > 0:
        _signed_log(axes, reach)
    units = " (loss / parameter²)" if maps[0].quantity == "trace" else ""
    axes.set_xlabel(maps[0].quantity + units)
    axes.set_title(title or f"{maps[0].quantity} of the diagonal blocks, by {maps[0].view}")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _signed_log(axes: Any, reach: float) -> None:
    """Both signs on a log axis of three decades; the default ticks crowd around zero."""
    top = int(np.ceil(np.log10(reach)))
    decades = [10.0**k for k in range(top - 3, top + 1)]
    axes.set_xscale("symlog", linthresh=decades[0])
    ticks = [*(-d for d in reversed(decades[1:])), 0.0, *decades[1:]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
    axes.set_xticks([], minor=True)


def entry_heat_map(
    matrix: torch.Tensor,
    names: Sequence[str],
    sizes: Sequence[int],
    *,
    title: str = "",
    limits: tuple[float, float] | None = None,
) -> Figure:
    """log10 |entry| of a dense matrix with block separators, as in the paper.

    Rows are ordered block after block (``sizes`` entries each); ``limits`` in decades.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] != sum(sizes):
        raise ValueError(
            f"a square matrix of {sum(sizes)} rows is drawn here, got {tuple(matrix.shape)}."
        )
    magnitude = matrix.double().abs().numpy()
    with np.errstate(divide="ignore"):
        values = np.log10(magnitude)
    top = float(values.max()) if np.isfinite(values.max()) else 0.0
    low, high = limits or (top - 8, top)
    figure = new_figure(7.6, 6.8)
    axes = figure.add_subplot()
    image = axes.imshow(
        np.maximum(values, low), vmin=low, vmax=high, cmap=_MAP, interpolation="nearest"
    )
    edges = np.concatenate([[0], np.cumsum(sizes)])
    for edge in edges[1:-1]:
        axes.axhline(edge - 0.5, color="white", linewidth=0.5)
        axes.axvline(edge - 0.5, color="white", linewidth=0.5)
    # A block thinner than a line of text keeps its separators but not its name.
    least = sum(sizes) / _LABELLED_UP_TO
    shown = [k for k, size in enumerate(sizes) if size >= least]
    middles = [(edges[k] + edges[k + 1] - 1) / 2 for k in shown]
    axes.set_xticks(middles, [names[k] for k in shown], rotation=90, fontsize=7)
    axes.set_yticks(middles, [names[k] for k in shown], fontsize=7)
    axes.set_title(title)
    figure.colorbar(image, ax=axes, shrink=0.85, label="log$_{10}$ |entry|")
    return figure


def attention_figure(curvature: AttentionCurvature) -> Figure:
    """The map of all data, and the diagonal blocks over the batches with their intervals."""
    figure = new_figure(11.0, 4.2)
    left, right = figure.subplots(1, 2)
    values = curvature.whole.frobenius["total"].values.double().clamp_min(1e-300).log10()
    image = left.imshow(values.numpy(), cmap=_MAP)
    left.set_xticks(range(len(curvature.names)), curvature.names, rotation=90, fontsize=7)
    left.set_yticks(range(len(curvature.names)), curvature.names, fontsize=7)
    left.set_title("log10 ‖H‖_F of every pair, all data", fontsize=9)
    figure.colorbar(image, ax=left)
    steps = range(1, len(curvature.batches) + 1)
    for name in curvature.names:
        band(right, steps, *curvature.series(name).T, style="o-", markersize=3, label=name)
    right.set(yscale="log", xlabel="batch", ylabel="‖H‖_F of the diagonal block, 95 % interval")
    right.legend(fontsize=7, frameon=False, ncols=2)
    return tidy_log_axes(figure)
