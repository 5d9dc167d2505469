"""Curvature flow: along the depth at every stage, layer by layer, and the article's four panels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.style import (
    BLUE,
    GRID,
    SERIES,
    PathLike,
    band,
    colour_bar,
    draws,
    error_bars,
    heat_map,
    legend,
    lying_bars,
    name_axis,
    panels,
    saved,
    shade,
    short_names,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.analysis.propagation.result import CurvatureFlow, FlowEntry
    from curvatlas.article import LayerWiseCurvature
    from curvatlas.figures.style import Array

_MOST_NAMES = 16  # sublayers that are written by name; more by their block
_MOST_LINES = 8  # with words in the legend
_ALONG = {
    "norm": "curvature at the input",
    "created_here": "curvature created here",
    "passed_on": "curvature passed on",
    "both": "curvature",
    "gradient_scale": "norm of the gradient",
}


@draws("CurvatureFlow", stages=True)
def draw_flow(stages: Mapping[str, CurvatureFlow], *, quantity: str = "norm") -> Figure:
    """Curvature at the input of every sublayer with its interval, a line a stage.

    quantity: "norm", "created_here", "passed_on", "both" (the last one hollow) or
    "gradient_scale".
    """
    if quantity not in _ALONG:
        raise ValueError(f"quantity is one of {', '.join(_ALONG)}, got {quantity!r}.")
    figure, (axes,) = panels()
    sublayers = {words: flow.sublayers for words, flow in stages.items()}
    if quantity == "both":
        here = {f"created here, {words}".strip(", "): one for words, one in sublayers.items()}
        onwards = {f"passed on, {words}".strip(", "): one for words, one in sublayers.items()}
        _draw_along(axes, here, "created_here")
        _draw_along(axes, onwards, "passed_on", style="o:", fillstyle="none")
    else:
        _draw_along(axes, sublayers, quantity)
    axes.set_ylabel(_ALONG[quantity])
    legend(axes)
    return figure


def _draw_along(
    axes: Any, stages: Mapping[str, Sequence[FlowEntry]], quantity: str, **look: Any
) -> None:
    """Entries from the embedding to the head, one place each, a line a stage."""
    for index, (words, entries) in enumerate(stages.items()):
        told = [_told(entry, quantity) for entry in entries]
        values, ends = [v for v, _ in told], np.array([e for _, e in told]).reshape(-1, 2)
        colour = SERIES[index] if len(stages) <= 4 else shade(index, len(stages))
        shown = words if words and len(stages) <= _MOST_LINES else "_"
        band(axes, range(len(values)), values, *ends.T, color=colour, label=shown, **look)
    _name_depth(axes, next(iter(stages.values())))
    if any(_told(entry, quantity)[0] > 0 for entries in stages.values() for entry in entries):
        axes.set_yscale("log")
    axes.grid(axis="y", color=GRID, linewidth=0.6)


def _told(entry: FlowEntry, quantity: str) -> tuple[float, tuple[float, float]]:
    """A number and its interval; what is zero has no place on a logarithmic axis."""
    if quantity in ("created_here", "passed_on"):
        measure = entry.measures[quantity]
        value, interval = measure.norm, measure.norm_interval
    elif quantity == "norm":
        value, interval = entry.norm, entry.interval
    else:
        value = float(getattr(entry, quantity))
        interval = (value, value)
    return (value, interval) if value > 0 else (math.nan, (math.nan, math.nan))


def _name_depth(axes: Any, entries: Sequence[FlowEntry]) -> None:
    """Every sublayer's name while they fit, else where a block begins."""
    names = [entry.name for entry in entries]
    short = [name.replace("attention residual", "att. sum").replace("ffn residual", "ffn sum")
             for name in short_names(names)]  # fmt: skip
    layers = [entry.layer for entry in entries]
    if len(names) <= _MOST_NAMES:
        several = len({layer for layer in layers if layer is not None}) > 1
        if several:
            short = [s if n is None else f"{n} {s}" for n, s in zip(layers, short, strict=True)]
        name_axis(axes.xaxis, short, turned=40)
        return
    first = [i for i, n in enumerate(layers) if n is not None and n not in layers[:i]]
    first = first[:: max(-(-len(first) // 12), 1)]
    name_axis(axes.xaxis, [name.replace("blocks.", "block ") for name in names])
    axes.set_xticks(first, [str(layers[i]) for i in first])
    axes.set_xlabel("block")


@draws("LayerWiseCurvature")
def draw_layers(curvature: LayerWiseCurvature) -> Figure:
    """Largest eigenvalue of every sublayer as bars."""
    layers = curvature.layers
    figure, (axes,) = panels(height=max(0.7, 0.25 + 0.06 * len(layers)))
    names = [f"{'' if c.layer is None else c.layer} {c.sublayer}".strip() for c in layers]
    lying_bars(axes, names, [c.top_eigenvalue for c in layers], most=60)
    axes.set_xlabel("largest eigenvalue (loss / parameter²)")
    return figure


# --- the article's figure ------------------------------------------------------------------------

# what the rows of a run are read by: curvature, the second map and its title, the layer's name
_ROWS = (
    ("attn_curvature", "gradient_scale", "gradient norm", "layer"),
    ("curvature", "output_norm", "norm of the output", "name"),
)
_STREAM = ("norm", "gradient_scale", "gradient norm", "name")  # of a flow's residual stream


def visualize_curvature_flow(flow: Any, *, path: PathLike | None = None) -> Figure:
    """Curvature and gradient scale over layers and steps: two heat maps, lines, final bars.

    flow: a run or a list of runs of one model, each a list of mappings: with ``attn_curvature`` and
    ``gradient_scale`` (``compute_layer_curvature``), or with ``name``, ``output_norm`` and
    ``curvature`` (``analyze_layer_wise_curvature``, whose second map is the output's norm). Or a
    ``CurvatureFlow`` or several (``analyzer.history``): then the layers are the residual stream,
    the embedding and every block's output.
    """
    flows = list(flow) if isinstance(flow, (list, tuple)) else [flow]
    runs = _runs_of(flows)
    keys = next((keys for keys in _ROWS if keys[0] in runs[0][0]), _ROWS[0])
    keys = _STREAM if hasattr(flows[0], "stream") else keys
    for place, row in ((i, row) for run in runs for i, row in enumerate(run)):
        missing = [key for key in keys[:2] if key not in row]
        if missing:
            raise ValueError(f"row {place} has no {missing[0]!r}: it has {sorted(row)}.")
    names = [str(row.get(keys[3], i)) or "model" for i, row in enumerate(runs[0])]
    if any([str(row.get(keys[3], i)) or "model" for i, row in enumerate(r)] != names for r in runs):
        raise ValueError("the runs have rows of different layers: draw runs of one model.")
    curvature, second = (
        np.array(
            [[math.nan if row[key] is None else float(row[key]) for row in run] for run in runs]
        )
        for key in keys[:2]
    )
    given = [getattr(one, "step", None) for one in flows[: len(runs)]]
    steps = [float(i if step is None else step) for i, step in enumerate(given)]
    figure, (a, b, c, d) = panels(2, 2)
    for axes, matrix, label in ((a, curvature, "curvature"), (b, second, keys[2])):
        _draw_map(figure, axes, matrix, names, steps, label)
    for index, name in enumerate(names):
        colour, marker = shade(index, len(names)), "o" if len(steps) < 20 else None
        c.plot(steps, curvature[:, index], color=colour, marker=marker, label=name, markersize=4)
    c.set(xlabel="step", ylabel="curvature")
    if (curvature > 0).all():
        c.set_yscale("log")
    legend(c, "curvature of each layer")
    ends = [row["interval"] for row in runs[-1] if "interval" in row]
    error = error_bars(curvature[-1].tolist(), ends) if len(ends) == len(names) else None
    d.bar(range(len(names)), curvature[-1], color=BLUE, yerr=error)
    d.set(ylabel="curvature", title=f"at step {steps[-1]:g}")
    name_axis(d.xaxis, names, turned=45 if len(names) > 6 else 0, most=20)
    return saved(figure, path)


def _runs_of(runs: list[Any]) -> list[list[dict[str, Any]]]:
    """Runs as lists of one mapping a layer; one run may stand alone."""
    if runs and (isinstance(runs[0], Mapping) or hasattr(runs[0], "attn_curvature")):
        runs = [runs]
    keys = ("name", "norm", "gradient_scale", "interval")
    try:
        rows = [
            [{key: getattr(entry, key) for key in keys} for entry in run.stream]
            if hasattr(run, "stream")
            else [dict(row) for row in run]
            for run in runs
        ]
    except (TypeError, ValueError):
        rows = []
    if not rows or not all(rows):
        raise ValueError(
            "give a CurvatureFlow, a list of them, or a list of runs, each a list of mappings with "
            "'attn_curvature' and 'gradient_scale'."
        )
    return rows


def _draw_map(
    figure: Any, axes: Any, matrix: Array, names: list[str], steps: list[float], label: str
) -> None:
    image = heat_map(
        axes, matrix.T, names, [f"step {step:g}" for step in steps],
        logarithmic=bool((matrix > 0).all()),
    )  # fmt: skip
    colour_bar(figure, image, axes, label)
    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 8)).round().astype(int))
    axes.set_xticks(shown, [f"{steps[index]:g}" for index in shown])
    name_axis(axes.yaxis, names, most=20)
    axes.set(xlabel="step", ylabel="layer")
    axes.set_title(f"{label} by layer and step")
