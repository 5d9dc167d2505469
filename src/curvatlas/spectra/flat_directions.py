r"""Directions along which the curvature is exactly zero, by name.

A key bias shifts all logits of a row alike and softmax does not see it; a shift of all class logits
is invisible to cross-entropy; a shift of everything a LayerNorm reads is removed by it. Each slice
of the anatomy is tested with two directions v: a random one in it (is the whole slice flat?) and
one that adds the same random row to all its output features (is its output shift flat?). v is flat
if ‖A v‖ ≤ tolerance · ‖A‖: since v is random in its space, the whole space is then flat with
probability one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.spectra.checkpoint import generator

_AT_ONCE = 16


@dataclass(frozen=True)
class FlatDirection:
    """A named flat subspace."""

    slice: str
    kind: str  # "whole" or "output shift"
    dimension: int

    def __str__(self) -> str:
        return self.slice if self.kind == "whole" else f"{self.slice} ({self.kind})"


@dataclass(frozen=True)
class Found:
    directions: tuple[FlatDirection, ...]
    products: int


def flat_directions(
    op: LinearOperator, *, norm: float, tolerance: float | None = None, seed: int = 0
) -> Found:
    """Flat slices of an operator with a ``problem``; nothing for other operators."""
    problem = getattr(op, "problem", None)
    if problem is None or op.shape[0] != problem.size:
        return Found((), 0)
    limit = (100 * torch.finfo(op.dtype).eps if tolerance is None else tolerance) * norm
    random = generator(seed)
    candidates: list[tuple[Any, str, int, Tensor]] = []
    for piece in problem.anatomy:
        draw = torch.randn(piece.size, generator=random, dtype=torch.float64, device="cpu")
        candidates.append((piece, "whole", piece.size, draw))
        outputs = piece.shape[-1] if piece.transposed else piece.shape[0]
        inputs = piece.size // outputs
        if outputs > 1:
            row = torch.randn(inputs, generator=random, dtype=torch.float64, device="cpu")
            same = row.expand(outputs, inputs)
            same = same.T if piece.transposed else same
            candidates.append((piece, "output shift", inputs, same.reshape(-1)))
    found: dict[str, FlatDirection] = {}
    for start in range(0, len(candidates), _AT_ONCE):
        group = candidates[start : start + _AT_ONCE]
        columns = torch.zeros(op.shape[1], len(group), dtype=op.dtype, device=op.device)
        for i, (piece, _, _, direction) in enumerate(group):
            unit = direction / direction.norm()
            columns[torch.as_tensor(piece.indices, device="cpu"), i] = unit.to(op.device, op.dtype)
        sizes = torch.linalg.vector_norm(op @ columns, dim=0)
        for (piece, kind, dimension, _), size in zip(group, sizes.tolist(), strict=True):
            if size <= limit and piece.name not in found:
                found[piece.name] = FlatDirection(piece.name, kind, dimension)
    return Found(tuple(found.values()), len(candidates))
