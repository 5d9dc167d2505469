"""Four panels of a curvature flow: what attention creates, slopes, the stream, the whole map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from curvatlas.analysis.propagation_result import CurvatureFlow, FlowEntry
from curvatlas.ticks import tidy_log_axes

_COLOURS = {
    "attention": "#0072b2",
    "ffn": "#e69f00",
    "norm": "#009e73",
    "residual": "#999999",
    "head": "#cc79a7",
    "embedding": "#56b4e9",
}


def plot_flow(flows: Sequence[CurvatureFlow]) -> Any:
    """One flow, or the same model at several steps (lines from light to dark)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 8.2), layout="constrained")
    panels = figure.subplots(2, 2)
    _created(panels[0, 0], flows)
    _slopes(panels[0, 1], flows)
    _stream(panels[1, 0], flows)
    _map(figure, panels[1, 1], flows)
    return tidy_log_axes(figure)


def _shade(k: int, count: int) -> float:
    return 1.0 if count == 1 else 0.35 + 0.65 * k / (count - 1)


def _created(axes: Any, flows: Sequence[CurvatureFlow]) -> None:
    for k, flow in enumerate(flows):
        for kind in ("attention", "ffn", "norm"):
            by_layer: dict[int, float] = {}
            for entry in flow.sublayers:
                if entry.sublayer == kind and entry.layer is not None:
                    square = by_layer.get(entry.layer, 0.0)
                    by_layer[entry.layer] = square + entry.measures["created_here"].norm ** 2
            if by_layer:
                layers = sorted(by_layer)
                axes.plot(
                    layers, [np.sqrt(by_layer[i]) for i in layers], marker="o", markersize=3,
                    color=_COLOURS[kind], alpha=_shade(k, len(flows)),
                    label=kind if k == len(flows) - 1 else None,
                )  # fmt: skip
    known = sorted({e.layer for e in flows[-1].sublayers if e.layer is not None})
    places, labels = _thinned([str(layer) for layer in known], 16)
    axes.set_xticks([known[i] for i in places], labels, fontsize=7)
    axes.set_xlabel("layer")
    _finish(axes, flows, "created in a layer, ‖Σ δ ∂²f‖$_F$", "curvature created by kind")


def _slopes(axes: Any, flows: Sequence[CurvatureFlow]) -> None:
    for k, flow in enumerate(flows):
        entries = flow.stream
        axes.plot(
            range(len(entries)), [e.gradient_scale for e in entries], marker="o", markersize=3,
            color="#0072b2", alpha=_shade(k, len(flows)),
            label=_step(flow) if len(flows) > 1 else "‖∂ℓ/∂stream‖",
        )  # fmt: skip
    _stream_ticks(axes, flows[-1].stream)
    _finish(axes, flows, "norm of the gradient", "gradient scale along the stream")


def _stream(axes: Any, flows: Sequence[CurvatureFlow]) -> None:
    for k, flow in enumerate(flows):
        entries = flow.stream
        places = list(range(len(entries)))
        values = np.array([e.norm for e in entries])
        ends = np.array([e.interval for e in entries])
        shade = _shade(k, len(flows))
        axes.plot(
            places, values, marker="o", markersize=3, color="#d55e00", alpha=shade,
            label=_step(flow) if len(flows) > 1 else "‖∂²ℓ/∂stream²‖$_F$",
        )  # fmt: skip
        axes.fill_between(places, ends[:, 0], ends[:, 1], color="#d55e00", alpha=0.15 * shade)
    _stream_ticks(axes, flows[-1].stream)
    _finish(axes, flows, "Frobenius norm", "curvature of the residual stream")


def _map(figure: Any, axes: Any, flows: Sequence[CurvatureFlow]) -> None:
    if len(flows) > 1:
        entries = [list(flow.stream) for flow in flows]
        values = np.array([[e.norm for e in row] for row in entries])
        names = [_short(e) for e in entries[-1]]
        rows = [_step(flow) for flow in flows]
        title = "curvature of the stream over steps"
    else:
        rows, found = flows[0].matrix("norm")
        values = found.numpy()
        layers = sorted({e.layer for e in flows[0].sublayers if e.layer is not None})
        names = [str(layer) for layer in layers]
        title = "curvature at each sublayer's input"
        axes.set_xlabel("layer")
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.log10(values)
    exponents[~np.isfinite(exponents)] = np.nan
    axes.set_facecolor("0.8")
    image = axes.imshow(exponents, cmap="viridis", aspect="auto")
    axes.set_yticks(*_thinned(rows, 24), fontsize=7)
    axes.set_xticks(*_thinned(names, 16), fontsize=7, rotation=45 if len(flows) > 1 else 0)
    axes.set_title(title, fontsize=10)
    label = "log$_{10}$ ‖S‖$_F$"
    if np.isnan(exponents).any():
        label += "\ngrey: not told from zero"
    figure.colorbar(image, ax=axes, label=label, shrink=0.9)


def _thinned(names: Sequence[str], most: int) -> tuple[list[int], list[str]]:
    """Every k-th name, so that at most ``most`` are written."""
    step = -(-len(names) // most)
    places = list(range(0, len(names), max(step, 1)))
    return places, [names[i] for i in places]


def _finish(axes: Any, flows: Sequence[CurvatureFlow], label: str, title: str) -> None:
    axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    if len(flows) <= 8:
        axes.legend(fontsize=7)


def _stream_ticks(axes: Any, entries: Sequence[FlowEntry]) -> None:
    axes.set_xticks(*_thinned([_short(e) for e in entries], 16), fontsize=7)
    axes.set_xlabel("after block")


def _short(entry: FlowEntry) -> str:
    return "emb." if entry.layer is None else str(entry.layer)


def _step(flow: CurvatureFlow) -> str:
    return "batch" if flow.step is None else f"step {flow.step}"
