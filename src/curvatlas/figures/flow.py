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
    plain_numbers,
    saved,
    shade,
    short_names,
)
from curvatlas.results import Result

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


def visualize_curvature_flow(
    flow: Result | Sequence[Any] | Mapping[str, Any], *, path: PathLike | None = None
) -> Figure:
    """Curvature and gradient scale over layers and steps: two heat maps, lines, final bars.

    flow: a ``CurvatureFlow`` or several of one model (``analyzer.history``): then the layers are
    the residual stream, the embedding and every block's output. Or a mapping with ``curvature`` and
    ``gradient`` (steps, layers), and optionally ``layers`` (names), ``steps`` (numbers) and
    ``interval`` ((steps, layers), (steps, layers)). Or, as in the article, a list of runs, each a
    list of mappings: with ``attn_curvature`` and ``gradient_scale`` (``compute_layer_curvature``),
    or with ``name``, ``output_norm`` and ``curvature`` (``analyze_layer_wise_curvature``, and so
    ``analyzer.history["layer_curvatures"]``), whose second map is the output's norm.
    """
    content = flow if isinstance(flow, Mapping) else _of_rows(flow) or _stream_of(flow)
    curvature = _matrix(content, "curvature")
    gradient = _matrix(content, "gradient")
    if gradient.shape != curvature.shape:
        raise ValueError(
            f"curvature is {curvature.shape}, gradient {gradient.shape}: make them one."
        )
    count, layers = curvature.shape
    names = [str(name) for name in content.get("layers") or range(layers)]
    steps = [float(step) for step in content.get("steps") or range(count)]
    figure, (a, b, c, d) = panels(2, 2)
    second = content.get("second", "gradient norm")
    for axes, matrix, label in ((a, curvature, "curvature"), (b, gradient, second)):
        _draw_map(figure, axes, matrix, names, steps, label)
    for index in range(layers):
        marker = "o" if count < 20 else None
        line: Any = {"color": shade(index, layers), "marker": marker, "label": names[index]}
        c.plot(steps, curvature[:, index], markersize=4, **line)
    c.set(xlabel="step", ylabel="curvature")
    if (curvature > 0).all():
        c.set_yscale("log")
    legend(c, "curvature of each layer")
    error = None
    if content.get("interval") is not None:
        low, high = (plain_numbers(end)[-1] for end in content["interval"])
        error = error_bars(curvature[-1], list(zip(low, high, strict=True)))
    d.bar(range(layers), curvature[-1], color=BLUE, yerr=error)
    d.set(ylabel="curvature", title=f"at step {steps[-1]:g}")
    name_axis(d.xaxis, names, turned=45 if layers > 6 else 0, most=20)
    return saved(figure, path)


# what a run's rows are read by: curvature, the second map, the layer's name; the second's title
_ROWS = (
    ("attn_curvature", "gradient_scale", "layer", "gradient norm"),
    ("curvature", "output_norm", "name", "norm of the output"),
)


def _of_rows(runs: Any) -> Mapping[str, Any] | None:
    """Runs of one row a layer as matrices; one run may stand alone. None: no such rows."""

    def is_row(item: Any) -> bool:
        return isinstance(item, Mapping) or hasattr(item, "attn_curvature")

    def is_run(item: Any) -> bool:
        rows = isinstance(item, (list, tuple)) or hasattr(item, "activations")
        return rows and len(item) > 0 and all(map(is_row, item))

    if is_run(runs):
        runs = [runs]
    if not isinstance(runs, (list, tuple)) or not runs or not all(map(is_run, runs)):
        return None
    if all(hasattr(run, "stream") for run in runs):
        return None  # a flow has more rows than layers
    kind = next((kind for kind in _ROWS if kind[0] in runs[0][0]), _ROWS[0])
    names = [
        [str(dict(row).get(kind[2], i)) or "model" for i, row in enumerate(run)] for run in runs
    ]
    if any(row != names[0] for row in names):
        raise ValueError("the runs have rows of different layers: draw runs of one model.")
    for key in kind[:2]:
        missing = [i for run in runs for i, row in enumerate(run) if key not in row]
        if missing:
            raise ValueError(
                f"row {missing[0]} has no {key!r}: it has {sorted(runs[0][0].keys())}."
            )
    curvature, second = (
        [[float("nan") if row[key] is None else row[key] for row in run] for run in runs]
        for key in kind[:2]
    )
    return {"curvature": curvature, "gradient": second, "layers": names[0], "second": kind[3]}


def _stream_of(flow: Any) -> Mapping[str, Any]:
    """The residual stream of one or several ``CurvatureFlow`` as matrices."""
    flows = list(flow) if isinstance(flow, (list, tuple)) else [flow]
    if not flows or not all(hasattr(one, "stream") for one in flows):
        raise ValueError(
            "give a CurvatureFlow, a list of them, a mapping of matrices, or a list of runs, each "
            "a list of mappings with 'attn_curvature' and 'gradient_scale'."
        )
    streams = [one.stream for one in flows]
    if len({tuple(entry.name for entry in stream) for stream in streams}) != 1:
        raise ValueError("the flows are of different models: their layers have other names.")
    return {
        "curvature": [[entry.norm for entry in stream] for stream in streams],
        "gradient": [[entry.gradient_scale for entry in stream] for stream in streams],
        "layers": [entry.name for entry in streams[0]],
        "steps": [index if one.step is None else one.step for index, one in enumerate(flows)],
        "interval": [
            [[entry.interval[end] for entry in stream] for stream in streams] for end in (0, 1)
        ],
    }


def _matrix(content: Mapping[str, Any], key: str) -> Array:
    if key not in content:
        raise ValueError(f"the curvature flow has no {key!r}: it has {sorted(content)}.")
    matrix = np.asarray(plain_numbers(content[key]), dtype=np.float64)
    if matrix.ndim == 1:
        matrix = matrix[None]
    if matrix.ndim != 2 or not matrix.size:
        raise ValueError(f"{key} must be a (steps, layers) matrix, got shape {matrix.shape}.")
    return matrix


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
