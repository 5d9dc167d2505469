"""Bounds over entries of parameters: how they combine, tie and meet the exact rows of the norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.blocks.structure import WEIGHT_NAMES, BlockSpec, Weights


@dataclass(frozen=True)
class EntryBounds:
    """Bounds over entries: matrix [b] (E, E) symmetric, its diagonal's two signed ends (E,)."""

    names: tuple[str, ...]
    matrix: Tensor
    high: Tensor
    low: Tensor

    def ends(self) -> tuple[Tensor, Tensor]:
        """(u, l) with −l ≤ H ≤ u: each the top of [b] with that end on the diagonal."""
        off = self.matrix - torch.diag(torch.diagonal(self.matrix))
        high, low = (
            torch.linalg.eigvalsh(off + torch.diag(end))[-1] for end in (self.high, self.low)
        )
        return high, low

    def norm(self) -> Tensor:
        """‖H‖ ≤ the larger of the two ends."""
        return torch.maximum(*self.ends())


def tie_groups(bounds: EntryBounds, spec: BlockSpec) -> EntryBounds:
    """Grouped-query heads share keys and values: H_tied = EᵀHE, bounds add up within a group."""
    ratio = spec.n_heads // spec.kv_heads
    names: list[str] = []
    for name in bounds.names:
        kind = name[0]
        tied = f"{kind}{int(name[1:]) // ratio}" if kind in "KV" and name[1:].isdigit() else name
        names.append(tied)
    kept = list(dict.fromkeys(names))
    fold = torch.zeros(len(kept), len(names), dtype=bounds.matrix.dtype)
    for column, name in enumerate(names):
        fold[kept.index(name), column] = 1.0
    fold = fold.to(bounds.matrix.device)
    off = bounds.matrix - torch.diag(torch.diagonal(bounds.matrix))
    ends = [
        torch.diagonal(fold @ (off + torch.diag(e)) @ fold.T) for e in (bounds.high, bounds.low)
    ]
    return EntryBounds(tuple(kept), fold @ bounds.matrix @ fold.T, ends[0], ends[1])


def append_norms(
    bounds: EntryBounds, rows: Tensor, spec: BlockSpec, weights: Weights
) -> EntryBounds:
    """Adds the entry of all γ and β with exact norms of its rows against every other entry."""
    columns = entry_columns(spec, weights)
    own = rows[:, columns["norms"]]
    values = torch.linalg.eigvalsh(0.5 * (own + own.T))
    cross = torch.stack(
        [torch.linalg.matrix_norm(rows[:, columns[name]], 2) for name in bounds.names]
    )
    ends = values[-1].clamp_min(0.0), (-values[0]).clamp_min(0.0)
    corner = torch.maximum(*ends).reshape(1, 1)
    matrix = torch.cat(
        [
            torch.cat([bounds.matrix, cross.unsqueeze(1)], 1),
            torch.cat([cross.unsqueeze(0), corner], 1),
        ]
    )
    return EntryBounds(
        (*bounds.names, "norms"),
        matrix,
        torch.cat([bounds.high, ends[0].reshape(1)]),
        torch.cat([bounds.low, ends[1].reshape(1)]),
    )


def entry_columns(spec: BlockSpec, weights: Weights) -> dict[str, Tensor]:
    """Flat positions of every entry's parameters, the weights in ``WEIGHT_NAMES`` order."""
    start, places = 0, {}
    for name in (n for n in WEIGHT_NAMES if n in weights):
        size = weights[name].numel()
        places[name] = torch.arange(start, start + size).reshape(weights[name].shape)
        start += size

    def take(*names: str) -> Tensor:
        return torch.cat([places[n].reshape(-1) for n in names if n in places])

    columns = {"Q": take("query_weight", "query_bias")}
    for kind, name, size in (("K", "key", spec.key_size), ("V", "value", spec.value_size)):
        for g in range(spec.kv_heads):
            rows = slice(g * size, (g + 1) * size)
            parts = [places[p][rows].reshape(-1) for p in (f"{name}_weight", f"{name}_bias")
                     if p in places]  # fmt: skip
            columns[f"{kind}{g}"] = torch.cat(parts)
    if "output_weight" in places:
        columns["O"] = take("output_weight", "output_bias")
    if "up_weight" in places:
        columns["up"] = take("gate_weight", "gate_bias", "up_weight", "up_bias")
        columns["down"] = take("down_weight", "down_bias")
    norms = [n for n in places if n.startswith("norm")]
    if norms:
        columns["norms"] = take(*norms)
    return columns
