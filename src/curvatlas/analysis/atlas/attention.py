"""Attention alone: its curvature batch by batch, and how much of it goes to the first token."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from curvatlas.analysis.atlas.mapping import atlas
from curvatlas.analysis.atlas.result import Atlas
from curvatlas.errors import ProblemError
from curvatlas.operators.curvature import Hessian
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.problem.evaluation import evaluated
from curvatlas.problem.losses import LossLike
from curvatlas.progress import track
from curvatlas.results import Result, Rows, also_named


@dataclass(frozen=True, kw_only=True)
class AttentionCurvature(Rows, Result):
    """Maps of the attention parameters' curvature: of all data, and of every batch alone.

    ``whole.frobenius["outer"]["blocks.0.value", "blocks.0.value"]`` is ‖H_o‖_F of one block;
    ``series(row, column)`` follows one entry over the batches.
    """

    whole: Atlas
    batches: tuple[Atlas, ...]
    targets: tuple[float, ...]  # valid targets of every batch
    losses: tuple[float, ...] = ()  # of every batch
    problems: InitVar[tuple[Problem, ...]] = ()  # of every batch; not stored

    _problems: ClassVar[tuple[Problem, ...]]  # set on the instance

    def __post_init__(self, problems: tuple[Problem, ...]) -> None:
        object.__setattr__(self, "_problems", problems)

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """One mapping a batch: ``batch``, ``loss``, ``h_WQ``, ``h_WK``, ``h_WV``.

        h_W is the Frobenius norm of ∂²L/∂W² over that weight in all layers as one block, and
        ``h_WQ_interval`` its interval: from zero to a bound where rounding hides it. ``H_WQ`` is
        the block itself as an operator (``.dense()``), until the result is saved.
        """
        rows = []
        for number, one in enumerate(self.batches):
            norms = one.view("block", "frobenius", "total")
            loss = self.losses[number] if number < len(self.losses) else float("nan")
            row: dict[str, Any] = {"batch": number, "loss": loss}
            for key, role in _WEIGHTS.items():
                places = [i for i, name in enumerate(norms.names) if role in name.split(".")]
                value, low, high = (
                    float(torch.linalg.norm(end[places][:, places]))
                    for end in (norms.values, norms.low, norms.high)
                )
                row[key], row[f"{key}_interval"] = value, (low, high)
                if self._problems:
                    row[f"H{key[1:]}"] = Hessian(self._problems[number])[role, role]
            rows.append(row)
        return tuple(rows)

    @property
    def names(self) -> tuple[str, ...]:
        """The blocks: layer and role."""
        return self.whole.names

    @property
    def products(self) -> int:
        return self.whole.products + sum(a.products for a in self.batches)

    @property
    def converged(self) -> bool:
        return self.whole.converged and all(a.converged for a in self.batches)

    def series(
        self,
        row: str,
        column: str | None = None,
        *,
        part: str = "total",
        quantity: str = "frobenius",
    ) -> Tensor:
        """(batches, 3): value, low and high of one entry in every batch."""
        entries = []
        for one in self.batches:
            shown = one.view("block", quantity, part)
            i = shown.place(row)
            j = i if column is None else shown.place(column)
            place: Any = i if shown.values.ndim == 1 else (i, j)
            entries.append([float(t[place]) for t in (shown.values, shown.low, shown.high)])
        return torch.tensor(entries, dtype=torch.float64)

    def _rows(self) -> list[dict[str, Any]]:
        """A row a parameter and batch: the norm of its diagonal block."""
        return [
            {"name": name, "batch": batch, "value": value, "low": low, "high": high}
            for name in self.names
            for batch, (value, low, high) in enumerate(self.series(name).tolist(), 1)
        ]

    def __str__(self) -> str:
        shown = {part: self.whole.frobenius[part] for part in ("total", "outer", "functional")}
        lines = [f"{'block':24s} {'‖H‖':>10s} {'‖H_o‖':>10s} {'‖H_f‖':>10s}   range over batches"]
        for name in self.names:
            norms = " ".join(f"{shown[part].text(name, name):>10s}" for part in shown)
            along = self.series(name)
            if bool((along[:, 1] > 0).all()):
                norms += f"   {along[:, 0].min():.4g} to {along[:, 0].max():.4g}"
            lines.append(f"{name:24s} {norms}")
        return "\n".join([*lines, f"{len(self.batches)} batches, {self.products} products"])


_WEIGHTS = {"h_WQ": "query", "h_WK": "key", "h_WV": "value"}  # the article's key → role


@evaluated
@also_named(dataloader="data")
def analyze_attention_curvature(
    model: nn.Module,
    data: Any,
    *,
    device: str | torch.device | None = None,
    loss: LossLike | None = None,
    heads: bool = False,
    biases: bool = True,
    rtol: float = 0.05,
    products: int | None = None,
    seed: int = 0,
) -> AttentionCurvature:
    """Curvature of every attention parameter, for all data and tracked over its batches.

    H, H_o and H_f of the loss restricted to the attention sublayers' parameters, as atlas maps
    (Frobenius, spectral, trace, coupling): exact up to 4,096 attention parameters, estimates with
    95 % intervals beyond. Batches are weighted by valid targets in ``whole``. The result is a
    sequence of rows, one a batch, with the loss and the norms of the query, key and value blocks.

    device: where to compute, on a copy of the model if it is elsewhere (default: where it is).
    data: one batch, a list or a re-iterable loader, as for ``Problem``.
    loss: as for ``Problem``; None: cross-entropy for integer targets, else mean squared error.
    heads, biases, rtol, products, seed: as for ``atlas``.
    """
    if device is not None and next(model.parameters()).device != torch.device(device):
        model = copy.deepcopy(model).to(device)
    chosen = _guessed_loss(data) if loss is None else loss
    everything = Problem(model, chosen, data)
    everything.require_one_process("the attention curvature of every batch")
    slices = everything.anatomy.slices
    names = list(dict.fromkeys(s.parameter for s in slices if s.sublayer == "attention"))
    if not names:
        raise ProblemError(
            f"no attention in {type(model).__name__}: its parameters are "
            f"{', '.join(dict.fromkeys(s.parameter for s in slices[:4]))}…; use ca.atlas for any "
            "model."
        )
    problem = Problem(model, chosen, data, parameters=names)

    def mapped(part: Problem) -> Atlas:
        return atlas(part, heads=heads, biases=biases, rtol=rtol, products=products, seed=seed)

    batches = list(problem.batches())
    single = [problem.with_batches([batch]) for batch in batches]
    of_all_data = mapped(problem)
    if len(batches) == 1:
        parts = [of_all_data]
    else:
        parts = [mapped(part) for part in track(single, "batches", total=len(batches))]
    return AttentionCurvature(
        whole=of_all_data,
        batches=tuple(parts),
        targets=tuple(float(b.count) for b in batches),
        losses=tuple(part.value() for part in single),
        problems=tuple(single),
    )


def _guessed_loss(data: Any) -> str:
    """Cross-entropy where the first batch has integer targets, else mean squared error."""
    batch = data
    while not _is_batch(batch):
        batch = next(iter(batch), None)
        if batch is None:
            return "cross_entropy"  # empty: Problem says so
    targets = batch["labels"] if hasattr(batch, "keys") else batch[1]
    floating = isinstance(targets, Tensor) and targets.is_floating_point()
    return "mse" if floating else "cross_entropy"


def _is_batch(value: Any) -> bool:
    if hasattr(value, "keys") or not hasattr(value, "__iter__"):
        return True
    return isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[1], Tensor)


@dataclass(frozen=True, kw_only=True)
class AttentionSinks(Result):
    """Mean attention on the first token over all queries but its own, and what uniform would be."""

    mass: Tensor  # (layers, heads), between 0 and 1
    uniform: float  # the same number if every query looked at all it may see alike

    @property
    def by_layer(self) -> Tensor:
        """(layers,), mean over the heads."""
        return self.mass.mean(1)

    def __str__(self) -> str:
        layers, heads = self.mass.shape
        strong = int((self.mass > 0.5).sum())
        return (
            f"first token's share of attention: {float(self.mass.mean()):.2f} on average "
            f"({self.uniform:.3f} if uniform), above a half in {strong} of {layers * heads} heads"
        )


def attention_sinks(model: nn.Module, inputs: Mapping[str, Any]) -> AttentionSinks:
    """Of a Hugging Face model on one batch of sequences without padding on the left.

    The weights are read from one forward pass with ``output_attentions`` (the eager kernel).
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise ProblemError(
            f"{type(model).__name__} does not give its attention weights: attention_sinks needs a "
            "Hugging Face model (output_attentions=True)."
        )
    before = config._attn_implementation
    try:
        config._attn_implementation = "eager"
        with torch.no_grad():
            attentions = model(**inputs, output_attentions=True).attentions
    finally:
        config._attn_implementation = before
    if not attentions or attentions[0] is None:
        raise ProblemError(f"{type(model).__name__} returned no attention weights.")
    length = attentions[0].shape[-1]
    if length < 2:
        raise ProblemError("a sequence of one token has no other to look at: give longer ones.")
    mass = torch.stack(
        [in_float64(w[:, :, 1:, 0]).mean((0, 2)) for w in attentions]
    )  # (B, H, L, L) each
    causal = not bool(attentions[0][:, :, 0, 1:].any())
    steps = torch.arange(2, length + 1, dtype=torch.float64)
    uniform = float((1 / steps).mean()) if causal else 1 / length
    return AttentionSinks(mass=mass.cpu(), uniform=uniform)
