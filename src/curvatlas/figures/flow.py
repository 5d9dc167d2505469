"""Curvature flow for papers: two heat maps, lines by layer, final bars."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.figures.style import (
    BLUE,
    GREEN,
    ORANGE,
    YELLOW,
    PathLike,
    band,
    error_bars,
    log_map,
    new_figure,
    plain_numbers,
    saved,
    shade,
    thinned,
    tidy_log_axes,
)
from curvatlas.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.analysis.propagation.result import CurvatureFlow, FlowEntry
    from curvatlas.figures.style import Array

_KINDS = {"attention": BLUE, "ffn": YELLOW, "norm": GREEN}


def plot_flow(flows: Sequence[CurvatureFlow]) -> Figure:
    """Four panels: what each kind creates, slopes, the stream, the whole map.

    One flow, or the same model at several steps (lines from light to dark).
    """
    figure = new_figure(11.5, 8.2)
    panels = figure.subplots(2, 2)
    _created(panels[0, 0], flows)
    _along_stream(panels[0, 1], flows, "gradient_scale")
    _finish(panels[0, 1], flows, "norm of the gradient", "gradient scale along the stream")
    _along_stream(panels[1, 0], flows, "norm")
    _finish(panels[1, 0], flows, "Frobenius norm", "curvature of the residual stream")
    _map(figure, panels[1, 1], flows)
    return tidy_log_axes(figure)


def _darkness(k: int, count: int) -> float:
    return 1.0 if count == 1 else 0.35 + 0.65 * k / (count - 1)


def _created(axes: Any, flows: Sequence[CurvatureFlow]) -> None:
    for k, flow in enumerate(flows):
        for kind, colour in _KINDS.items():
            squares: dict[int, float] = defaultdict(float)
            for entry in flow.sublayers:
                if entry.sublayer == kind and entry.layer is not None:
                    squares[entry.layer] += entry.measures["created_here"].norm ** 2
            if squares:
                layers = sorted(squares)
                label = kind if k == len(flows) - 1 else None
                line: Any = {"color": colour, "alpha": _darkness(k, len(flows)), "label": label}
                axes.plot(layers, [squares[i] ** 0.5 for i in layers], "o-", markersize=3, **line)
    layers_present = sorted({e.layer for e in flows[-1].sublayers if e.layer is not None})
    places, labels = thinned([str(layer) for layer in layers_present], 16)
    axes.set_xticks([layers_present[i] for i in places], labels, fontsize=7)
    axes.set_xlabel("layer")
    _finish(axes, flows, "created in a layer, ‖Σ δ ∂²f‖$_F$", "curvature created by kind")


def _along_stream(axes: Any, flows: Sequence[CurvatureFlow], quantity: str) -> None:
    """The gradient's norm ("gradient_scale"), or the curvature's with its interval ("norm")."""
    curved = quantity == "norm"
    symbol = "‖∂²ℓ/∂stream²‖$_F$" if curved else "‖∂ℓ/∂stream‖"
    for k, flow in enumerate(flows):
        values = [getattr(entry, quantity) for entry in flow.stream]
        ends = [entry.interval for entry in flow.stream] if curved else [(v, v) for v in values]
        label = _step(flow) if len(flows) > 1 else symbol
        line: Any = {"color": ORANGE if curved else BLUE, "style": "o-", "markersize": 3}
        line |= {"alpha": 0.15, "line_alpha": _darkness(k, len(flows)), "label": label}
        band(axes, range(len(values)), values, *np.array(ends).T, **line)
    axes.set_xticks(*thinned([_short(e) for e in flows[-1].stream], 16), fontsize=7)
    axes.set_xlabel("after block")


def _map(figure: Any, axes: Any, flows: Sequence[CurvatureFlow]) -> None:
    if len(flows) > 1:
        entries = [list(flow.stream) for flow in flows]
        values = np.array([[e.norm for e in row] for row in entries])
        names = [_short(e) for e in entries[-1]]
        rows = [_step(flow) for flow in flows]
        title = "curvature of the stream over steps"
    else:
        rows, matrix = flows[0].matrix("norm")
        values = matrix.numpy()
        layers = sorted({e.layer for e in flows[0].sublayers if e.layer is not None})
        names = [str(layer) for layer in layers]
        title = "curvature at each sublayer's input"
        axes.set_xlabel("layer")
    alive = np.isfinite(values) & (values > 0)
    image = log_map(axes, values, alive)
    axes.set_yticks(*thinned(rows, 24), fontsize=7)
    axes.set_xticks(*thinned(names, 16), fontsize=7, rotation=45 if len(flows) > 1 else 0)
    axes.set_title(title, fontsize=10)
    label = "log$_{10}$ ‖S‖$_F$"
    if not alive.all():
        label += "\ngrey: not told from zero"
    figure.colorbar(image, ax=axes, label=label, shrink=0.9)


def _finish(axes: Any, flows: Sequence[CurvatureFlow], label: str, title: str) -> None:
    axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    if len(flows) <= 8:
        axes.legend(fontsize=7)


def _short(entry: FlowEntry) -> str:
    return "emb." if entry.layer is None else str(entry.layer)


def _step(flow: CurvatureFlow) -> str:
    return "batch" if flow.step is None else f"step {flow.step}"


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
    figure = new_figure(11.5, 7.2)
    (a, b), (c, d) = figure.subplots(2, 2)
    second = content.get("second", "gradient norm")
    for axes, matrix, label in ((a, curvature, "curvature"), (b, gradient, second)):
        _draw_map(figure, axes, matrix, names, steps, label)
    for index in range(layers):
        marker = "o" if count < 20 else None
        line: Any = {"color": shade(index, layers), "marker": marker, "label": names[index]}
        c.plot(steps, curvature[:, index], **line)
    c.set(xlabel="step", ylabel="curvature", title="curvature of each layer")
    if (curvature > 0).all():
        c.set_yscale("log")
    c.legend(fontsize=8, ncols=1 + layers // 9)
    error = None
    if content.get("interval") is not None:
        low, high = (plain_numbers(end)[-1] for end in content["interval"])
        error = error_bars(curvature[-1], list(zip(low, high, strict=True)))
    d.bar(range(layers), curvature[-1], color=BLUE, yerr=error)
    d.set(ylabel="curvature", title=f"at step {steps[-1]:g}")
    d.set_xticks(range(layers), names, rotation=45 if layers > 6 else 0, ha="right")
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
    from matplotlib.colors import LogNorm

    positive = matrix[matrix > 0]
    norm = LogNorm(positive.min(), positive.max()) if positive.size == matrix.size else None
    image = axes.imshow(matrix.T, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
    figure.colorbar(image, ax=axes, label=label)
    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 8)).round().astype(int))
    axes.set_xticks(shown, [f"{steps[index]:g}" for index in shown])
    axes.set_yticks(*thinned(names, 24))
    axes.set(xlabel="step", ylabel="layer", title=f"{label} by layer and step")
