"""Curvature flow for papers: two heat maps, lines by layer, final bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvatlas.report.figures.drawing import (
    BLUE,
    PathLike,
    new_figure,
    plain_numbers,
    saved,
)  # fmt: skip
from curvatlas.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.report.figures.drawing import Array


def visualize_curvature_flow(
    flow: Result | Sequence[Result] | Mapping[str, Any], *, path: PathLike | None = None
) -> Figure:
    """Curvature and gradient scale over layers and steps: two heat maps, lines, final bars.

    flow: a ``CurvatureFlow`` or several of one model (``analyzer.history``): then the layers are
    the residual stream, the embedding and every block's output. Or a mapping with ``curvature`` and
    ``gradient`` (steps, layers), and optionally ``layers`` (names), ``steps`` (numbers) and
    ``interval`` ((steps, layers), (steps, layers)).
    """
    content = flow if isinstance(flow, Mapping) else _stream_of(flow)
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
    for axes, matrix, label in ((a, curvature, "curvature"), (b, gradient, "gradient norm")):
        _draw_map(figure, axes, matrix, names, steps, label)
    for index in range(layers):
        shade = index / max(layers - 1, 1)
        c.plot(steps, curvature[:, index], color=(0.1 + 0.75 * shade, 0.45, 0.7 - 0.5 * shade),
               marker="o" if count < 20 else None, label=names[index])  # fmt: skip
    c.set(xlabel="step", ylabel="curvature", title="curvature of each layer")
    if (curvature > 0).all():
        c.set_yscale("log")
    c.legend(fontsize=8, ncols=1 + layers // 9)
    d.bar(range(layers), curvature[-1], color=BLUE, yerr=_last_interval(content, curvature))
    d.set(ylabel="curvature", title=f"at step {steps[-1]:g}")
    d.set_xticks(range(layers), names, rotation=45 if layers > 6 else 0, ha="right")
    return saved(figure, path)


def _stream_of(flow: Any) -> Mapping[str, Any]:
    """The residual stream of one or several ``CurvatureFlow`` as matrices."""
    flows = list(flow) if isinstance(flow, (list, tuple)) else [flow]
    if not flows or not all(hasattr(one, "stream") for one in flows):
        raise ValueError("give a CurvatureFlow, a list of them, or a mapping of matrices.")
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
    every = -(-len(names) // 24)
    axes.set_yticks(range(0, len(names), every), names[::every])
    axes.set(xlabel="step", ylabel="layer", title=f"{label} by layer and step")


def _last_interval(content: Mapping[str, Any], curvature: Array) -> Array | None:
    bounds = content.get("interval")
    if bounds is None:
        return None
    low, high = (np.asarray(plain_numbers(side), dtype=np.float64) for side in bounds)
    return np.stack([curvature[-1] - low[-1], high[-1] - curvature[-1]])
