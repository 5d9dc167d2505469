"""Maps: which weights curve with which, entries of a Hessian, changes by measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from curvatlas.figures.style import (
    MUTED,
    PAPER,
    SERIES,
    band,
    colour_bar,
    colour_limits,
    draws,
    error_bars,
    finish,
    heat_map,
    layers_of,
    legend,
    name_axis,
    panels,
    power_label,
    short_names,
)
from curvatlas.linear_operator import PARTS, SYMBOLS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.analysis.atlas.attention import AttentionCurvature
    from curvatlas.analysis.atlas.entries import Entries
    from curvatlas.analysis.atlas.result import Atlas, AtlasMap
    from curvatlas.analysis.landscape.flatness import Invariance
    from curvatlas.closed_form.result import BlockHessian
    from curvatlas.studies.comparisons import ModelComparison
    from curvatlas.training.snapshot import CurvatureHistory

_MOST_NAMES = 40  # rows whose every name is written; more are labelled by layer
_NAME = 0.14  # inches of a row with a name
_EDGE = {"color": PAPER, "linewidth": 0.6, "alpha": 0.8}
_SEPARATOR = {**_EDGE, "linestyle": "--"}
_MOST_CELLS_A_SIDE = 900
_WORDS = {
    "coupling": "‖Hᵢⱼ‖ / √(‖Hᵢᵢ‖ ‖Hⱼⱼ‖)",
    "frobenius": "Frobenius norm of the pair",
    "spectral": "spectral norm of the pair",
}


@draws("Atlas", stages=True)
def draw_atlas(
    stages: Mapping[str, Atlas],
    *,
    view: str | None = None,
    quantity: str = "frobenius",
    part: str | None = None,
) -> Figure:
    """H, H_o and H_f side by side on one colour scale, or one part of several atlases.

    view: "block", "role", "layer" …; by default the finest whose names can all be written.
    """
    first = next(iter(stages.values()))
    if view is None:
        few = all(len(one.names) <= _MOST_NAMES for one in stages.values())
        view = "block" if few or f"role/{quantity}/total" not in first.maps else "role"
    if len(stages) == 1 and part is None:
        return draw_maps({SYMBOLS[p]: first.view(view, quantity, p) for p in PARTS})
    part = part or "total"
    maps = {words: one.view(view, quantity, part) for words, one in stages.items()}
    return draw_maps(maps)


@draws("ModelComparison")
def draw_comparison(found: ModelComparison, *, view: str = "role", part: str = "total") -> Figure:
    """The models' maps on one colour scale."""
    return draw_atlas(found.atlases, view=view, part=part)


@draws("AtlasMap", stages=True)
def draw_maps(stages: Mapping[str, AtlasMap]) -> Figure:
    """Heat maps on one colour scale (plain for couplings), or bars for traces."""
    maps = list(stages.values())
    if maps[0].values.ndim == 1:
        return _bars(stages)
    size = _growth(max(len(one.names) for one in maps))
    figure, axes = panels(len(maps), width=size, height=size)
    coupling = maps[0].quantity == "coupling"
    alive = [_alive(one) for one in maps]
    values = [one.values.double().numpy() for one in maps]
    told = [matrix[known] for matrix, known in zip(values, alive, strict=True)]
    limits = (0.0, 1.0) if coupling else colour_limits(*told)
    image: Any = None
    for axis, (words, one), shown in zip(axes, stages.items(), alive, strict=True):
        notes = _interval_of(one)
        image = heat_map(
            axis, one.values.double().numpy(), one.names, one.names, alive=shown, limits=limits,
            logarithmic=not coupling, notes=notes,
        )  # fmt: skip
        same = axis is not axes[0] and one.names == maps[0].names
        name_map(axis, one.names, rows=not same)
        if words:
            axis.set_title(words, pad=12)
    label = _WORDS[maps[0].quantity]
    colour_bar(figure, image, axes, label + ("" if all(a.all() for a in alive) else "; grey: zero"))
    return figure


def _alive(one: AtlasMap) -> Any:
    """Which entries can be told from zero."""
    if one.quantity == "coupling":
        return np.isfinite(one.values.double().numpy())
    return ((one.values > 0) & ((one.low > 0) | (one.high == one.low))).numpy()


def _interval_of(one: AtlasMap) -> Any:
    low, high = one.low.tolist(), one.high.tolist()
    return lambda i, j: "" if low[i][j] == high[i][j] else f" [{low[i][j]:.3g}, {high[i][j]:.3g}]"


def _growth(count: int) -> float:
    """How many panels a map of so many names needs, so that its names can be read."""
    return min(max(1.0, 0.3 + _NAME * min(count, _MOST_NAMES) / 3.1), 2.2)


def name_map(axes: Any, names: Sequence[str], *, rows: bool = True) -> None:
    """Every name while they fit, the blocks above; otherwise one label a block or part."""
    groups = layers_of(names)
    for (before, _, _), (label, start, _) in pairwise(groups):
        if before.isdigit() or label.isdigit():
            axes.axhline(start - 0.5, **_EDGE)
            axes.axvline(start - 0.5, **_EDGE)
    short = short_names(names)
    several = len({label for label, _, _ in groups if label.isdigit()}) > 1
    if len(names) <= _MOST_NAMES:
        name_axis(axes.xaxis, short, turned=90, size=8)
        name_axis(axes.yaxis, short, size=8)
        for label, start, stop in groups if several else ():
            if label.isdigit() and stop - start > 1:
                words = f"block {label}" if stop - start > 3 else label
                middle = (start + stop - 1) / 2
                axes.text(middle, -0.7, words, ha="center", fontsize=8, color=MUTED)
    else:
        # A group's label sits in its middle; a group too thin for its own label goes without one.
        thin, last = len(names) / _MOST_NAMES, -np.inf
        shown = []
        for label, start, stop in groups:
            middle = (start + stop - 1) / 2
            if middle - last >= thin:
                shown.append((middle, label))
                last = middle
        places, labels = zip(*shown, strict=True)
        axes.set_xticks(places, labels, rotation=90)
        axes.set_yticks(places, labels)
        if several:
            axes.set_xlabel("block")
            axes.set_ylabel("block" if rows else "")
    if not rows:
        axes.set_yticklabels([])


def _bars(stages: Mapping[str, AtlasMap]) -> Figure:
    """Horizontal bars with intervals, one colour a part or model."""
    maps = list(stages.values())
    names = maps[0].names
    figure, (axes,) = panels(height=min(max(0.7, 0.3 + 0.055 * len(names) * len(maps) ** 0.5), 6))
    step = 0.8 / len(maps)
    for k, (words, one) in enumerate(stages.items()):
        value, low, high = (t.double().tolist() for t in (one.values, one.low, one.high))
        error = error_bars(value, list(zip(low, high, strict=True)))
        places = np.arange(len(names)) + (k - (len(maps) - 1) / 2) * step
        axes.barh(
            places, value, height=step, xerr=error, color=SERIES[k % len(SERIES)],
            label=words or "_", error_kw={"elinewidth": 0.7, "ecolor": MUTED},
        )  # fmt: skip
    name_axis(axes.yaxis, short_names(names) if len(set(short_names(names))) > 1 else names, size=8)
    axes.set_ylim(len(names) - 0.4, -0.6)  # downwards, without the wide margins of a tall figure
    axes.axvline(0, color=MUTED, linewidth=0.6)
    reach = max((float(one.values.abs().max()) for one in maps), default=0.0)
    if maps[0].quantity == "trace" and reach > 0:
        axes.set_xscale("symlog", linthresh=reach / 1e3)
    units = " (loss / parameter²)" if maps[0].quantity == "trace" else ""
    axes.set_xlabel(maps[0].quantity + units)
    legend(axes)
    return figure


def draw_film(history: CurvatureHistory, *, view: str, part: str) -> Figure:
    """‖H_ab‖_F of every map of a run, one panel a step, on one logarithmic colour scale."""
    frames = [(s.step, s.maps.view(view, part=part)) for s in history.snapshots if s.maps]
    if not frames:
        raise ValueError("this history has no maps: use Monitor(maps=True).")
    columns = min(len(frames), 4)
    figure, axes = panels(columns, -(-len(frames) // columns), width=0.7, height=0.85)
    top = max(float(frame.values.max()) for _, frame in frames)
    image: Any = None
    for place, (axis, (step, frame)) in enumerate(zip(axes, frames, strict=False)):
        image = heat_map(
            axis, frame.values.double().numpy(), frame.names, frame.names,
            limits=(top * 1e-4, top) if top > 0 else (1e-4, 1.0),
        )  # fmt: skip
        name_axis(axis.xaxis, short_names(frame.names), turned=90, size=7, most=16)
        name_axis(axis.yaxis, short_names(frame.names), size=7, most=16)
        if place % columns:
            axis.set_yticklabels([])
        axis.set_title(f"step {step}")
    for axis in axes[len(frames) :]:
        axis.axis("off")
    colour_bar(figure, image, axes, _WORDS["frobenius"])
    return finish(figure)


@draws("AttentionCurvature")
def draw_attention(curvature: AttentionCurvature) -> Figure:
    """The map of all data, and the diagonal blocks over the batches with their intervals."""
    figure, (left, right) = panels(2)
    values = curvature.whole.frobenius["total"].values.double().numpy()
    image = heat_map(left, values, curvature.names, curvature.names, decades=8)
    name_map(left, curvature.names)
    colour_bar(figure, image, left, _WORDS["frobenius"])
    steps = range(1, len(curvature.batches) + 1)
    short = short_names(curvature.names)
    for place, (name, words) in enumerate(zip(curvature.names, short, strict=True)):
        line = band(right, steps, *curvature.series(name).T, label=words if place < 8 else "_")
        line.set_color(SERIES[place % len(SERIES)])
        line.shading.set_color(SERIES[place % len(SERIES)])
    right.set(yscale="log", xlabel="batch", ylabel="Frobenius norm of the diagonal block")
    legend(right)
    return figure


@draws("Entries", stages=True)
def draw_entries(
    stages: Mapping[str, Entries],
    *,
    limits: tuple[float, float] | None = None,
    eps: float = 0.0,
    blur: bool = False,
    decades: float = 8.0,
) -> Figure:
    """|entry| with block separators, a panel a stage, all on one logarithmic colour scale.

    limits: of the colours, in decades. eps: added to every |entry|, as the papers do (1e-6); with 0
    a zero is grey. blur: the papers' mean of log10|h| over 5 × 5 neighbours.
    """
    first = next(iter(stages.values()))
    title = {"": f"entries of {SYMBOLS[first.part]}"} if list(stages) == [""] else {}
    maps = {title.get(w, w): (one.matrix, one.names, one.sizes) for w, one in stages.items()}
    return _entry_maps(maps, limits=limits, decades=decades, eps=eps, blur=blur)


@draws("BlockHessian")
def draw_block_hessian(found: BlockHessian, part: Any = "total") -> Figure:
    """|entry| with the blocks marked."""
    one = found.part(part), found.names, tuple(found.block_sizes.values())
    return _entry_maps({f"entries of {SYMBOLS[part]}": one}, decades=12)


def _entry_maps(
    maps: Mapping[str, tuple[torch.Tensor, Sequence[str], Sequence[int]]],
    *,
    limits: tuple[float, float] | None = None,
    decades: float,
    eps: float = 0.0,
    blur: bool = False,
) -> Figure:
    """Title → (matrix, names, sizes of its blocks): one scale, white dashed separators."""
    figure, axes = panels(len(maps), width=1.6, height=2)
    drawn = [cells(matrix, eps=eps, blur=blur) for matrix, _, _ in maps.values()]
    ends = colour_limits(*(c for c, _ in drawn), decades=decades)
    if limits is not None:
        ends = (10.0 ** limits[0], 10.0 ** limits[1])
    image: Any = None
    for axis, title, (shown_cells, step) in zip(axes, maps, drawn, strict=True):
        _, names, sizes = maps[title]
        rows = [
            f"{name}[{k}]" for name, size in zip(names, sizes, strict=True) for k in range(size)
        ]
        image = heat_map(axis, shown_cells.numpy(), rows[::step], rows[::step], limits=ends)
        edges = np.concatenate([[0], np.cumsum(sizes)]) / step
        for edge in edges[1:-1]:
            axis.axhline(edge - 0.5, **_SEPARATOR)
            axis.axvline(edge - 0.5, **_SEPARATOR)
        # A block thinner than a line of text keeps its separators but not its name.
        shown = [k for k, size in enumerate(sizes) if size >= sum(sizes) / _MOST_NAMES]
        middles = [(edges[k] + edges[k + 1] - 1) / 2 for k in shown]
        short = short_names(names)
        axis.set_xticks(middles, [short[k] for k in shown], rotation=90)
        axis.set_yticks(middles, [short[k] for k in shown])
        axis.set_title(title)
    added = f" + {power_label(eps)}" if eps else ""
    words = f"|entry|{added} (loss / parameter²)" + (", 5 × 5 mean" if blur else "")
    colour_bar(figure, image, axes, words)
    return finish(figure)


def cells(
    matrix: torch.Tensor, *, eps: float = 0.0, blur: bool = False
) -> tuple[torch.Tensor, int]:
    """|entry| + ε as a panel shows it, and how many rows a cell spans.

    matrix: (n, n) → (⌈n / step⌉, ⌈n / step⌉). blur: the papers' mean of log10 over 5 × 5
    neighbours; a cell that spans several rows is the mean of log10 as well.
    """
    size = matrix.detach().cpu().abs().double() + eps
    step = -(-len(size) // _MOST_CELLS_A_SIDE)
    if blur:
        size = _log_mean(size, 5, 1)
    return (_log_mean(size, step, step) if step > 1 else size), step


def _log_mean(values: torch.Tensor, width: int, step: int) -> torch.Tensor:
    """exp(mean of log) over squares of ``width``, at every ``step``-th place; not of zeros."""
    alive = (values > 0).double()
    logs = torch.where(values > 0, values, 1.0).log()
    around: dict[str, Any] = {"kernel_size": width, "stride": step, "ceil_mode": step > 1}
    around |= {"padding": width // 2 if step == 1 else 0, "count_include_pad": False}
    total, count = (F.avg_pool2d(x[None, None], **around)[0, 0] for x in (logs, alive))
    return torch.where(count > 0, (total / count.clamp_min(1e-300)).exp(), 0.0)


def draw_entry_histograms(
    stages: Mapping[str, Entries],
    blocks: Sequence[str],
    *,
    bins: int = 49,
    faint: Mapping[str, Entries] | None = None,
) -> Figure:
    """Counts against |entry|, one panel a block beneath the other on one logarithmic axis.

    faint: the same of other entries, behind (the papers' softmax behind no softmax).
    """
    names = short_names(blocks)
    figure, axes = panels(1, len(blocks), width=1.3, height=0.6, sharex=True)
    for axis, block, name in zip(axes, blocks, names, strict=True):
        for opacity, several in ((0.25, faint or {}), (0.75, stages)):
            for place, (words, one) in enumerate(several.items()):
                edges, counts = one.histogram(block, bins=bins)
                look: Any = {"color": SERIES[place % len(SERIES)], "alpha": opacity}
                label = words if axis is axes[0] and words else "_"
                axis.bar(edges[:-1], counts, np.diff(edges), align="edge", label=label, **look)
        axis.set_xscale("log")
        axis.set_ylabel(name)
    legend(axes[0])
    axes[-1].set_xlabel("|entry| (loss / parameter²)")
    return finish(figure)


@draws("Invariance")
def draw_invariance(found: Invariance) -> Figure:
    """The relative change of every measure under every rescaling."""
    measures = list(found.before)
    changes = np.array([found.change(name) for name in measures])
    figure, (axes,) = panels(
        width=0.55 + 0.2 * len(found.rescalings), height=0.5 + 0.1 * len(measures)
    )
    alive = np.isfinite(changes)
    image = heat_map(
        axes, np.maximum(changes, 1e-16), measures, found.rescalings, alive=alive,
        limits=(1e-16, 10.0),
    )  # fmt: skip
    name_axis(axes.yaxis, short_names(measures))
    name_axis(axes.xaxis, found.rescalings, turned=40)
    for row, column in np.argwhere(changes <= found.tolerance):
        axes.text(column, row, "same", ha="center", va="center", color="#fefefe", fontsize=7)
    axes.set_title("change under rescalings that keep the function")
    colour_bar(figure, image, axes, "relative change")
    return figure
