r"""Optimal Brain Surgeon on blocks of weights, all blocks at once.

Removing weight q of a block with curvature B raises the loss by s_q = w_q² / (2 [B⁻¹]_qq) when the
other weights of the block move to the best place, δw = −w_q / [B⁻¹]_qq · B⁻¹ e_q (Hassibi and
Stork 1993). The inverse without row and column q is one rank-one update away, so weights are taken
out one after another, the cheapest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Removals:
    """For each block the order in which weights go, and what each removal adds to the loss."""

    order: Tensor  # (blocks, size) places within the block, first removed first
    cost: Tensor  # (blocks, size) rise of the loss by that removal


def inverse_blocks(factor: Tensor, *, damping: float) -> Tensor:
    """(B + damping·mean(diag B)·I)⁻¹ for B = FᵀF, factor F: (blocks, samples, size)."""
    blocks = factor.transpose(1, 2) @ factor  # (blocks, size, size)
    scale = blocks.diagonal(dim1=1, dim2=2).mean()
    blocks.diagonal(dim1=1, dim2=2).add_(damping * scale.clamp_min(torch.finfo(factor.dtype).tiny))
    return torch.cholesky_inverse(torch.linalg.cholesky(blocks))


def remove_all(weights: Tensor, inverse: Tensor) -> Removals:
    """Take every weight out of every block, cheapest first; weights: (blocks, size)."""
    blocks, size = weights.shape
    order = torch.empty(blocks, size, dtype=torch.long, device=weights.device)
    cost = torch.empty_like(weights)
    state, inverse = weights.clone(), inverse.clone()
    alive = torch.ones_like(weights, dtype=torch.bool)
    rows = torch.arange(blocks, device=weights.device)
    for turn in range(size):
        price = state.square() / (2 * inverse.diagonal(dim1=1, dim2=2))
        chosen = price.masked_fill(~alive, torch.inf).argmin(1)  # (blocks,)
        order[:, turn], cost[:, turn] = chosen, price[rows, chosen]
        _remove(state, inverse, alive, rows, chosen)
    return Removals(order, cost)


def remove_first(weights: Tensor, inverse: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """The weights after the first ``counts[b]`` removals of ``order[b]`` in each block b."""
    state, inverse = weights.clone(), inverse.clone()
    alive = torch.ones_like(weights, dtype=torch.bool)
    for turn in range(int(counts.max())):
        rows = (counts > turn).nonzero().squeeze(1)
        _remove(state, inverse, alive, rows, order[rows, turn])
    return state.masked_fill(~alive, 0.0)


def _remove(state: Tensor, inverse: Tensor, alive: Tensor, rows: Tensor, chosen: Tensor) -> None:
    column = inverse[rows, :, chosen]  # (rows, size): B⁻¹ e_q
    pivot = column.gather(1, chosen[:, None])  # [B⁻¹]_qq
    state[rows] -= state[rows].gather(1, chosen[:, None]) / pivot * column
    inverse[rows] -= column.unsqueeze(2) * column.unsqueeze(1) / pivot.unsqueeze(2)
    alive[rows, chosen] = False
    state[rows, chosen] = 0.0
    # Rounding leaves crumbs where the row and column should be exactly zero; the pivot stays
    # positive so that removed weights never divide by zero.
    inverse[rows, chosen, :] = 0.0
    inverse[rows, :, chosen] = 0.0
    inverse[rows, chosen, chosen] = 1.0
