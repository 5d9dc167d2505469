"""How curvature travels: one entry a sublayer, one an activation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.results import Interval, Number, Result


@dataclass(frozen=True, kw_only=True)
class Measure(Result):
    """Frobenius norm and trace of one matrix over all samples, with 95 % intervals."""

    norm: float
    norm_interval: Interval
    trace: float
    trace_interval: Interval


@dataclass(frozen=True, kw_only=True)
class FlowEntry(Result):
    """The loss's second derivative at one place, split by where it comes from.

    An entry of a sublayer f stands at f's own input (only f's argument is varied):
        total = Jᵀ S J + Σ δ ∂²f:  passed on through f, and created here by f.
    An entry of an activation is the Hessian of the loss with respect to that activation:
        created here by the sublayers that read it, passed on from everything behind them.
    Matrices are (samples, n, n), n = tokens · width; None beyond the memory budget.
    """

    name: str
    sublayer: str  # embedding, norm, attention, ffn, residual, head
    layer: int | None
    place: str  # "sublayer" or "activation"
    aliases: tuple[str, ...]
    module: str | None  # path of the module that puts the activation out
    shape: tuple[int, ...]  # of the activation (of the sublayer's input)
    total: Tensor | None
    passed_on: Tensor | None
    created_here: Tensor | None
    measures: dict[str, Measure]  # of "total", "passed_on", "created_here"
    spectral_norm: float
    spectral_interval: Interval
    eigenvalues: Tensor | None  # (samples, n) ascending, where n is small enough
    token_trace: Tensor  # (samples, tokens)
    token_norm: Tensor | None  # (samples, tokens) Frobenius norms of the tokens' own blocks
    gradient_scale: float  # ‖∂ℓ/∂activation‖ over all samples
    amplification: float | None  # sublayer: ‖total‖ over the norm at its output
    amplification_interval: Interval | None
    exact: bool
    token_trace_error: Tensor | None = None  # (samples, tokens) standard errors; None: exact
    # What the article reads of one layer; the scores only of ``compute_layer_curvature``.
    attn_curvature: float | None = None  # ‖∂²ℓ/∂input²‖_F of the layer's attention, at its input
    attention_scores: Tensor | None = None  # A (samples, heads, queries, keys), after softmax

    @property
    def norm(self) -> float:
        return self.measures["total"].norm

    @property
    def trace(self) -> float:
        return self.measures["total"].trace

    @property
    def value(self) -> float:
        """The Frobenius norm of the total."""
        return self.norm

    @property
    def interval(self) -> Interval:
        return self.measures["total"].norm_interval

    @property
    def created_share(self) -> float:
        """‖created here‖ / (‖created here‖ + ‖passed on‖)."""
        created, passed = self.measures["created_here"].norm, self.measures["passed_on"].norm
        return created / (created + passed) if created + passed > 0 else 0.0

    @property
    def token_coupling(self) -> float | None:
        """Share of ‖total‖² between different tokens; None where it was not formed."""
        if self.token_norm is None:
            return None
        within_tokens = float(self.token_norm.double().pow(2).sum())
        return max(0.0, 1 - within_tokens / self.norm**2) if self.norm > 0 else 0.0

    def __str__(self) -> str:
        total = self.measures["total"]
        text = f"{self.name}: ‖S‖ = {Number(self.norm, *total.norm_interval)}"
        text += f", tr {Number(self.trace, *total.trace_interval)}"
        text += f", created here {Number(self.created_share, *self._share_interval()):%}"
        if self.amplification is not None:
            within = self.amplification_interval or (self.amplification, self.amplification)
            text += f", × {Number(self.amplification, *within)}"
        return text

    def _share_interval(self) -> Interval:
        """Of the share created here: the ends that the intervals of both norms allow."""
        created, passed = (self.measures[k].norm_interval for k in ("created_here", "passed_on"))
        ends = (
            here / (here + behind) if here + behind > 0 else 0.0
            for here, behind in zip(created, reversed(passed), strict=True)
        )
        low, high = ends
        return low, high


@dataclass(frozen=True, kw_only=True)
class CurvatureFlow(Result):
    """The account of curvature from the loss back to the embedding."""

    sublayers: tuple[FlowEntry, ...]  # in order of computation
    activations: tuple[FlowEntry, ...]
    method: str  # "dense" or "matrix-free"
    loss: float
    target: str  # where the targets came from
    samples: int
    step: int | None
    products: int = 0  # vectors multiplied by second derivatives; 0 for a dense account
    # 95 %, over samples and probes; None for an account of one batch
    amplification_interval: Interval | None = None

    def __iter__(self) -> Iterator[FlowEntry]:
        return iter(self.sublayers)

    def __len__(self) -> int:
        return len(self.sublayers)

    def __getitem__(self, name: str | int) -> FlowEntry:
        """A sublayer by name or place; ``flow.activation(name)`` for activations."""
        if isinstance(name, int):
            return self.sublayers[name]
        return _find(self.sublayers, name, "sublayer")

    def activation(self, name: str | int) -> FlowEntry:
        """An activation by name ("embedding", "blocks.0.attention") or a block's output."""
        wanted = f"blocks.{name}" if isinstance(name, int) else name
        return _find(self.activations, wanted, "activation")

    @property
    def stream(self) -> tuple[FlowEntry, ...]:
        """The residual stream: the embedding and every block's output."""
        layers = sorted({e.layer for e in self.activations if e.layer is not None})
        entries = [e for e in self.activations if "embedding" in (e.name, *e.aliases)][:1]
        for layer in layers:
            name = f"blocks.{layer}"
            entries += [e for e in self.activations if name in (e.name, *e.aliases)]
        return tuple(entries)

    @property
    def amplification(self) -> float:
        """End to end: the norm at the first activation over that at the last."""
        last = self.activations[-1].norm
        return self.activations[0].norm / last if last > 0 else float("nan")

    def matrix(self, quantity: str) -> tuple[list[str], Tensor]:
        """Kinds of sublayers and a (kinds, layers) matrix of a property such as "norm"."""
        layers = sorted({e.layer for e in self.sublayers if e.layer is not None})
        names = list(
            dict.fromkeys(
                e.name.removeprefix(f"blocks.{e.layer}.")
                for e in self.sublayers
                if e.layer is not None
            )
        )
        values = torch.full((len(names), len(layers)), torch.nan, dtype=torch.float64)
        for entry in self.sublayers:
            if entry.layer is not None:
                row = names.index(entry.name.removeprefix(f"blocks.{entry.layer}."))
                values[row, layers.index(entry.layer)] = float(_quantity(entry, quantity))
        return names, values

    def __str__(self) -> str:
        ends = (self.activations[0].interval, self.activations[-1].interval)
        grown = Number(self.amplification, *(self.amplification_interval or _ratio(*ends)))
        lines = [
            f"{len(self.sublayers)} sublayers, {self.method}, loss {self.loss:.4g}, targets: "
            f"{self.target}; curvature × {grown} from head to embedding"
        ]
        lines += [f"  {entry}" for entry in self.sublayers]
        return "\n".join(lines)


def _ratio(first: Interval, last: Interval) -> Interval:
    """Of the ratio of two lengths with these intervals."""
    if not last[0] > 0:
        return 0.0, float("inf")
    return first[0] / last[1], first[1] / last[0]


def _quantity(entry: FlowEntry, quantity: str) -> float:
    if quantity in ("created_here", "passed_on"):
        return entry.measures[quantity].norm
    value = getattr(entry, quantity)
    return float("nan") if value is None else float(value)


def _find(entries: tuple[FlowEntry, ...], name: str, what: str) -> FlowEntry:
    for entry in entries:
        if name == entry.name:
            return entry
    for entry in entries:
        if name in entry.aliases or name == entry.module:
            return entry
    names = ", ".join(entry.name for entry in entries)
    raise KeyError(f"there is no {what} {name!r}; there are {names}.")
