"""The dense quantities by products with unit vectors, for blocks without a token-wise form.

Rotary positions tie the key's direction to the pair (query, key) and not to the query alone, so the
sums over tokens of ``families`` do not exist for them. Every number here is as exact; it costs P
products instead of a few matrix products. Same interface as ``BlockDerivatives``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curvatlas.blocks.derivatives import BlockDerivatives
from curvatlas.blocks.operands import Workspace
from curvatlas.blocks.products import LinearisedBlock, Part
from curvatlas.blocks.structure import Weights
from curvatlas.progress import track

_COLUMNS = 64


class ColumnDerivatives(BlockDerivatives):
    """``BlockDerivatives`` of a linearised block, column by column."""

    linearised: LinearisedBlock

    @classmethod
    def of(cls, base: BlockDerivatives, weights: Weights, mask: Tensor | None) -> ColumnDerivatives:
        evaluation = base.evaluation
        made = cls(evaluation, base.seeds, budget=base.budget)
        made.linearised = LinearisedBlock(evaluation.spec, weights, evaluation.x, mask)
        made.linearised.gradient(base.seeds.delta)
        return made

    def _product(self, columns: Tensor, part: Part) -> Tensor:
        """H V for V (P, k)."""
        k = columns.shape[1]
        tangents = {
            name: columns[start : start + size].mT.reshape(k, *self.linearised.weights[name].shape)
            for name, (start, size) in self.offsets.items()
        }
        rates, _ = self.linearised.hvp(
            tangents, curvature=self.seeds.product, part=part, needs_input=False
        )
        return torch.cat([rates[name].reshape(k, -1) for name in self.names], 1).mT

    def _strips(self, first: int, last: int, part: Part) -> Iterator[tuple[int, int, Tensor]]:
        """Columns [first, last) of the matrix, a few at a time: (start, stop, (P, k))."""
        for start in track(range(first, last, _COLUMNS), "Hessian columns"):
            stop = min(start + _COLUMNS, last)
            units = torch.zeros(self.size, stop - start, dtype=self.dtype, device=self.device)
            units[start:stop].fill_diagonal_(1.0)
            yield start, stop, self._product(units, part)

    def dense(
        self,
        part: Part = "total",
        *,
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> Tensor:
        out = self._output(out)
        for start, stop, strip in self._strips(0, self.size, part):
            out[:, start:stop] = strip
        return out

    def block(self, a: str, b: str, part: Part = "total") -> Tensor:
        self._check_names(a, b)
        (row, rows), (column, columns) = self.offsets[a], self.offsets[b]
        strips = self._strips(column, column + columns, part)
        return torch.cat([strip[row : row + rows] for _, _, strip in strips], 1)

    def diagonal(self, part: Part = "total") -> Tensor:
        strips = self._strips(0, self.size, part)
        return torch.cat([strip[start:stop].diagonal() for start, stop, strip in strips])

    def frobenius(self, part: Part = "total") -> Tensor:
        count = len(self.names)
        squares = torch.zeros(count, count, dtype=self.dtype, device=self.device)
        for j, (start, size) in enumerate(self.offsets.values()):
            for _, _, strip in self._strips(start, start + size, part):
                for i, (row, rows) in enumerate(self.offsets.values()):
                    squares[i, j] += strip[row : row + rows].square().sum()
        return squares.sqrt()

    def outer_factor(self) -> Tensor:
        if self.seeds.factor is None:
            return super().outer_factor()  # raises with the reason
        phi = self.seeds.factor()  # (B, R, L, d)
        samples, rank = phi.shape[:2]
        seeds = torch.zeros(samples, rank, *phi.shape[:1], *phi.shape[2:], dtype=self.dtype)
        seeds = seeds.to(self.device)
        index = torch.arange(samples, device=self.device)
        seeds[index, :, index] = phi
        rates, _ = self.linearised.vjp(seeds.flatten(0, 1))
        return torch.cat([rates[name].flatten(1) for name in self.names], 1).mT

    def block_product(self, a: str, b: str, part: Part = "total") -> ColumnBlock:  # type: ignore[override]
        self._check_names(a, b)
        return ColumnBlock(self, a, b, part)


class ColumnBlock:
    """One block as an operator, through full products of zero-padded vectors."""

    def __init__(self, source: ColumnDerivatives, a: str, b: str, part: Part) -> None:
        self.source, self.part = source, part
        self.rows, self.columns = source.offsets[a], source.offsets[b]
        self.shape = (self.rows[1], self.columns[1])

    def __matmul__(self, v: Tensor) -> Tensor:
        given = v.unsqueeze(-1) if v.ndim == 1 else v
        padded = given.new_zeros(self.source.size, given.shape[1])
        padded[self.columns[0] : self.columns[0] + self.columns[1]] = given
        moved = self.source._product(padded, self.part)
        result = moved[self.rows[0] : self.rows[0] + self.rows[1]]
        return result.squeeze(-1) if v.ndim == 1 else result
