r"""Products with one block and its Frobenius norm, straight from the per-token tensors.

    y_i = M_i (α'_i · V) + K_i (Vᵀ δ'_i),      (H_fg V)[r, a] = Σ_i y_i[r] α_i[a]

costs n(|a||r| + |r||c| + …), far below a full product; the norm needs only token × token Gram
matrices:  ‖Σ_i α_i ⊗ (M_i ⊗ α'_i + K_i ⊗ δ'_i)‖² = Σ_ij (α_i·α_j)[(α'_i·α'_j)⟨M_i, M_j⟩ + …].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from curvatlas.blocks.families import Pair, Segment


def diagonal_columns(pair: Pair, rows: range, device: torch.device) -> Tensor:
    """The activation column that each row's single entry of K stands in."""
    first, period = pair.diagonal_columns
    return first + torch.arange(rows.start, rows.stop, device=device) % period


class PairPart:
    """One pair cut down to two segments, with its activations."""

    def __init__(
        self, pair: Pair, alpha: Tensor, beta: Tensor, left: Segment, right: Segment
    ) -> None:
        n = alpha.shape[0]
        rows, columns = slice(*left.core), slice(*right.core)
        self.left, self.right = left, right
        self.M = pair.core[:, rows, columns].expand(n, -1, -1)
        self.alpha = alpha[:, slice(*left.activation)]
        self.beta = beta[:, slice(*right.activation)]
        self.delta = None if pair.delta is None else pair.delta[:, columns]
        self.K: Tensor | None = None
        self.diagonal: Tensor | None = None
        low, high = right.activation
        if pair.slope is not None:
            first = max(low, pair.slope_start)
            last = min(high, pair.slope_start + pair.slope.shape[-1])
            if first < last:
                cut = pair.slope[:, rows, first - pair.slope_start : last - pair.slope_start]
                self.K = cut.expand(n, -1, -1)
                self.K_columns = slice(first - low, last - low)
        if pair.slope_diagonal is not None:
            place = diagonal_columns(pair, range(*left.core), alpha.device)
            inside = (place >= low) & (place < high)
            # A row outside the segment keeps column 0 and weight 0: no shape depends on data.
            self.place = torch.where(inside, place - low, 0)
            self.diagonal = pair.slope_diagonal[:, rows] * inside

    @cached_property
    def _M_transposed(self) -> Tensor:
        return self.M.mT.contiguous()

    def _moved(self, u: Tensor) -> Tensor:
        """M u for rows u (n, k, c) → (n, r, k)."""
        if u.shape[1] == 1 and u.device.type == "cpu" and u.dtype in (torch.float32, torch.float64):
            # One vector a token: batched BLAS packs every matrix before use, this streams it
            # (2.7 against 4.0 ms for 256 matrices of 128 × 128).
            moved = np.einsum("nrc,nc->nr", self.M.numpy(), u[:, 0].numpy())
            return torch.from_numpy(moved).unsqueeze(-1)
        return (u @ self._M_transposed).mT

    def times(self, v: Tensor) -> Tensor:
        """H V for V (c, b, k) → (r, a, k)."""
        if v.shape[-1] == 1:  # plain products: einsum would permute and copy
            u = (self.beta @ v[..., 0].mT).unsqueeze(1)
        else:
            u = torch.einsum("nb,cbk->nkc", self.beta, v)
        y = self._moved(u)
        if self.delta is not None and (self.K is not None or self.diagonal is not None):
            t = torch.einsum("nc,cbk->nbk", self.delta, v)
            if self.K is not None:
                y = y + self.K @ t[:, self.K_columns]
            if self.diagonal is not None:
                y = y + self.diagonal.unsqueeze(-1) * t[:, self.place]
        if v.shape[-1] == 1:
            return (y[..., 0].mT @ self.alpha).unsqueeze(-1)
        return torch.einsum("nrk,na->rak", y, self.alpha)

    def transposed_times(self, v: Tensor) -> Tensor:
        """Hᵀ V for V (r, a, k) → (c, b, k)."""
        y = torch.einsum("na,rak->nrk", self.alpha, v)
        result = torch.einsum("nkc,nb->cbk", y.mT @ self.M, self.beta)
        if self.delta is not None and self.K is not None:
            back = torch.einsum("nc,nbk->cbk", self.delta, self.K.mT @ y)
            result[:, self.K_columns] += back
        if self.delta is not None and self.diagonal is not None:
            back = torch.einsum("nc,nrk->crk", self.delta, self.diagonal.unsqueeze(-1) * y)
            result.index_add_(1, self.place, back)
        return result

    def squared_norm(self, other: PairPart) -> Tensor:
        """The share of ‖H_fg‖² from tokens of this chunk with tokens of ``other``."""
        gram = (self.alpha @ other.alpha.mT) * 1.0
        inner = (self.M.flatten(1) @ other.M.flatten(1).mT) * (self.beta @ other.beta.mT)
        if self.delta is not None and other.delta is not None:
            deltas = self.delta @ other.delta.mT
            if self.K is not None and other.K is not None:
                inner = inner + (self.K.flatten(1) @ other.K.flatten(1).mT) * deltas
            if self.diagonal is not None and other.diagonal is not None:
                inner = inner + (self.diagonal @ other.diagonal.mT) * deltas
            if self.K is not None or self.diagonal is not None:
                inner = inner + self._cross(other) + other._cross(self).mT
        return (gram * inner).sum()

    def _cross(self, other: PairPart) -> Tensor:
        """⟨M_i ⊗ α'_i, K_j ⊗ δ'_j⟩ (n, n'), a few core rows at a time."""
        assert other.delta is not None
        n, rows, _ = self.M.shape
        total = self.M.new_zeros(n, other.M.shape[0])
        step = max(1, (1 << 22) // max(1, total.numel()))
        for low in range(0, rows, step):
            part = slice(low, low + step)
            moved = self.M[:, part] @ other.delta.mT  # (n, r, n')
            if other.K is not None:
                along = other.K[:, part] @ self.beta[:, other.K_columns].mT  # (n', r, n)
                total += (moved * along.permute(2, 1, 0)).sum(1)
            if other.diagonal is not None:
                weighted = moved * self.beta[:, other.place[part]].unsqueeze(-1)
                total += (weighted * other.diagonal[:, part].mT).sum(1)
        return total


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A pair part of a block, and whether the block is its transpose."""

    part: PairPart
    flipped: bool


class BlockProduct:
    """One block as an operator: ``@ v`` for v (columns,) or several columns (columns, k)."""

    def __init__(
        self,
        chosen: list[Chosen],
        *,
        rows: tuple[int, int],
        columns: tuple[int, int],
        factor: Tensor | None,
    ) -> None:
        self.chosen, self.factor = chosen, factor
        self.row, self.column = rows[0], columns[0]
        self.shape = (rows[1], columns[1])

    def __matmul__(self, v: Tensor) -> Tensor:
        columns = v.unsqueeze(-1) if v.ndim == 1 else v
        if columns.ndim != 2 or columns.shape[0] != self.shape[1]:
            raise ValueError(f"expected ({self.shape[1]},) or columns, got {tuple(v.shape)}.")
        out = columns.new_zeros(self.shape[0], columns.shape[1])
        for item in self.chosen:
            part = item.part
            source, target = (part.right, part.left)
            if item.flipped:
                source, target = target, source
            piece = columns.narrow(0, source.start - self.column, source.size)
            piece = _to_core_major(piece, source)
            moved = part.transposed_times(piece) if item.flipped else part.times(piece)
            out.narrow(0, target.start - self.row, target.size).add_(_to_flat(moved, target))
        if self.factor is not None:
            rows = self.factor.narrow(0, self.row, self.shape[0])
            out += rows @ (self.factor.narrow(0, self.column, self.shape[1]).mT @ columns)
        return out.squeeze(-1) if v.ndim == 1 else out


def _to_core_major(v: Tensor, segment: Segment) -> Tensor:
    """(size, k) in flat order → (core, activation, k)."""
    r, a = segment.shape
    if segment.activation_major:
        return v.reshape(a, r, -1).transpose(0, 1)
    return v.reshape(r, a, -1)


def _to_flat(v: Tensor, segment: Segment) -> Tensor:
    """(core, activation, k) → (size, k) in flat order."""
    return (v.transpose(0, 1) if segment.activation_major else v).reshape(segment.size, -1)
