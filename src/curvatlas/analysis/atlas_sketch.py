"""Fill the map column by column: one product gives all rows of H, H_o and H_f at once.

A probe that lives in column block j gives H_ij z for every row block i. Only small Gram matrices of
these products are kept: (rows, q, q) a column and part, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvatlas.analysis.atlas_blocks import Block
from curvatlas.analysis.atlas_statistics import Array, Energy, energy_of, pooled
from curvatlas.operators.parts import PARTS, CurvatureParts
from curvatlas.progress import bar


@dataclass(frozen=True)
class ProbeGroup:
    """q orthonormal probes of one column block of size n."""

    size: int
    grams: Array  # (parts, rows, q, q): Gram matrices of H_ij Q
    inner: Array  # (parts, q, q): Qᵀ H_jj Q

    @property
    def probes(self) -> int:
        return int(self.inner.shape[-1])


class Sketch:
    """All products so far, and the energies they estimate."""

    def __init__(self, operator: CurvatureParts, blocks: Sequence[Block], *, seed: int) -> None:
        self.operator = operator
        self.blocks = tuple(blocks)
        self.groups: list[list[ProbeGroup]] = [[] for _ in blocks]
        self._generator = torch.Generator(device="cpu").manual_seed(seed)
        sizes = [block.size for block in blocks]
        order = torch.cat([block.indices for block in blocks])
        in_order = bool((order == torch.arange(len(order))).all())
        # Rows of fused parameters are regrouped into blocks; None where they already are.
        self._order = None if in_order else order.to(operator.device)
        self._sizes = sizes

    @property
    def products(self) -> int:
        return sum(group.probes for groups in self.groups for group in groups)

    def probe(self, columns: Sequence[int], probes: int) -> None:
        """Draw ``probes`` more orthonormal probes in each of the ``columns``."""
        wanted = [min(probes, self._sizes[j]) for j in columns]
        with bar("atlas", total=sum(wanted)) as progress:
            for j, count in zip(columns, wanted, strict=True):
                if any(group.probes >= group.size for group in self.groups[j]):
                    continue  # this column is exact already
                self.groups[j].append(self._measure(j, count))
                progress.update(count)

    def _measure(self, j: int, count: int) -> ProbeGroup:
        block, operator = self.blocks[j], self.operator
        size = block.size
        draw = torch.randn(size, count, generator=self._generator, dtype=torch.float64)
        basis = torch.linalg.qr(draw).Q.to(operator.device, operator.dtype)  # (n, q)
        layout = operator.problem.layout
        results = operator.parts(scatter(block, basis.T, operator), layout.names)
        grams = np.empty((len(PARTS), len(self.blocks), count, count))
        inner = np.empty((len(PARTS), count, count))
        for p, part in enumerate(PARTS):
            rows = results[part]  # (q, P)
            if self._order is not None:
                rows = rows.index_select(1, self._order)
            for i, piece in enumerate(torch.split(rows, self._sizes, dim=1)):
                # In the model's own precision: a float64 copy of ten million rows costs more than
                # the product, and 1e-6 is far below the probes' own error.
                grams[p, i] = (piece @ piece.T).double().cpu().numpy()
                if i == j:
                    inner[p] = (piece @ basis).double().cpu().numpy()
        return ProbeGroup(size, grams, (inner + inner.swapaxes(-1, -2)) / 2)

    # --- energies -------------------------------------------------------------------------------

    def energies(self, groups: Sequence[Sequence[int]]) -> Energy:
        """‖H[a, b]‖_F² for groups a, b of blocks: arrays (parts, groups, groups).

        Uses both triangles: an entry and its transpose are probed independently.
        """
        indicator = np.zeros((len(groups), len(self.blocks)))
        for a, group in enumerate(groups):
            indicator[a, list(group)] = 1
        per_column = [self._column(j, indicator) for j in range(len(self.blocks))]
        one_way = [pooled([per_column[j] for j in group], [1.0] * len(group)) for group in groups]
        full = Energy(*(np.stack([getattr(e, f) for e in one_way], -1) for f in _FIELDS))
        return _both_triangles(full, self._weights(groups))

    def _column(self, j: int, indicator: Array) -> Energy:
        """(parts, row groups) of one column, pooled over its probe groups."""
        groups = self.groups[j]
        count = sum(group.probes for group in groups)
        exact = [group for group in groups if group.probes >= group.size]
        if exact:
            groups, count = exact[:1], exact[0].probes
        parts = [
            energy_of(np.einsum("ab,pbkl->pakl", indicator, group.grams), group.size)
            for group in groups
        ]
        return pooled(parts, [group.probes / count for group in groups])

    def _weights(self, columns: Sequence[Sequence[int]]) -> Array:
        """How well a column group is probed: the fewest probes of its blocks."""
        counts = []
        for group in columns:
            per_block = [
                np.inf
                if any(g.probes >= g.size for g in self.groups[j])
                else float(sum(g.probes for g in self.groups[j]))
                for j in group
            ]
            counts.append(min(per_block))
        return np.array(counts)

    def traces(self) -> tuple[Array, Array]:
        """tr H_jj and its standard error: arrays (parts, blocks).

        Var[(n/q) tr QᵀAQ] ≤ (2/q) ‖A‖_F², and ‖A‖_F² is known from the map itself.
        """
        values = np.zeros((len(PARTS), len(self.blocks)))
        errors = np.zeros_like(values)
        for j, groups in enumerate(self.groups):
            exact = [g for g in groups if g.probes >= g.size]
            groups = exact[:1] or groups
            count = sum(g.probes for g in groups)
            for g in groups:
                n, q = g.size, g.probes
                share = q / count
                values[:, j] += share * n / q * np.trace(g.inner, axis1=-2, axis2=-1)
                frobenius = n / q * np.trace(g.grams[:, j], axis1=-2, axis2=-1)
                shrink = n * (n - q) / max((n - 1) * (n + 2), 1)
                errors[:, j] += share**2 * 2 / q * shrink * frobenius
        return values, np.sqrt(errors)


_FIELDS = ("value", "variance", "fourth", "pairs", "seen")


def _both_triangles(energy: Energy, probes: Array) -> Energy:
    """Average an entry with its transpose, weighted by probes; the diagonal stays as it is."""
    transposed = Energy(*(np.swapaxes(getattr(energy, f), -1, -2) for f in _FIELDS))
    own, other = np.broadcast_arrays(probes[None, :], probes[:, None])
    with np.errstate(invalid="ignore"):
        weight = np.where(np.isinf(own), np.where(np.isinf(other), 0.5, 1.0), own / (own + other))
    np.fill_diagonal(weight, 0.5)
    weight, rest = weight[None], 1 - weight[None]
    diagonal = np.eye(len(probes), dtype=bool)[None]
    variance = weight**2 * energy.variance + rest**2 * transposed.variance
    variance = np.where(diagonal, energy.variance, variance)
    pairs = np.where(diagonal, energy.pairs, energy.pairs + transposed.pairs)
    return Energy(
        weight * energy.value + rest * transposed.value,
        variance,
        weight * energy.fourth + rest * transposed.fourth,
        np.where(variance == 0, np.inf, pairs),
        np.maximum(energy.seen, transposed.seen),
    )


def scatter(block: Block, rows: Tensor, operator: CurvatureParts) -> dict[str, Tensor]:
    """(K, size of the block) → parameter name → (K, *shape), zero outside the block."""
    layout = operator.problem.layout
    place = {name: k for k, name in enumerate(layout.names)}
    result: dict[str, Tensor] = {}
    start = 0
    for piece in block.slices:
        k = place[piece.parameter]
        name, size = layout.names[k], layout.sizes[k]
        if name not in result:
            result[name] = rows.new_zeros(len(rows), size)
        local = (piece.indices - layout.starts[k]).to(rows.device)
        result[name].index_copy_(1, local, rows[:, start : start + piece.size])
        start += piece.size
    return {
        name: column.reshape(-1, *layout.shapes[place[name]]) for name, column in result.items()
    }
