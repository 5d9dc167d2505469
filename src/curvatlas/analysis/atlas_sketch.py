"""Fill the map column by column: one product gives all rows of H, H_o and H_f at once.

A probe that lives in column block j gives H_ij z for every row block i. Only small Gram matrices of
these products are kept, (rows, q, q) a column and part, and the leading directions of every row
block, which make the probes of the columns to come better than random ones (atlas_directions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvatlas.analysis.atlas_blocks import Block
from curvatlas.analysis.atlas_directions import MOST, WAITING, Directions, coded_probes
from curvatlas.analysis.atlas_statistics import Array, Energy, energy_of, pooled
from curvatlas.operators.parts import PARTS, CurvatureParts
from curvatlas.progress import bar

_UNSEEN = 1e-5  # of the largest norm: below it the products of one column are rounding
_SAMPLES = 3  # directions that one column's products teach about each row block


@dataclass(frozen=True)
class ProbeGroup:
    """q orthogonal probes X of one column block of size n; Q = √(q/n) X, orthonormal on average."""

    size: int
    grams: Array  # (parts, rows, q, q): Gram matrices of H_ij Q
    inner: Array  # (parts, q, q): Qᵀ H_jj Q
    longest: float  # largest squared length of a column of Q
    noise: float  # mean relative variance of the energies

    @property
    def probes(self) -> int:
        return int(self.inner.shape[-1])

    def energy(self, grams: Array) -> Energy:
        return energy_of(grams, self.size, longest=self.longest)

    @property
    def precision(self) -> float:
        """What the group counts for beside others; infinite where it is exact."""
        return np.inf if self.probes >= self.size else 1 / max(self.noise, 1e-12)


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
        # A quarter of the budget, at most, for what the columns teach each other.
        vectors = operator.budget / 4 / (sum(sizes) * operator.dtype.itemsize)
        kept = min(MOST, int(vectors / (1 + WAITING)))
        self._directions = [
            Directions(size, dtype=operator.dtype, device=operator.device, kept=kept)
            for size in sizes
        ]

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
        if count >= size:
            draw = torch.eye(size, dtype=torch.float64)
        else:
            draw = coded_probes(self._directions[j].basis(), count, self._generator)
            draw *= (count / size) ** 0.5
        basis = draw.to(operator.device, operator.dtype)  # (n, q)
        layout = operator.problem.layout
        results = operator.parts(scatter(block, basis.T, operator), layout.names)
        grams = np.empty((len(PARTS), len(self.blocks), count, count))
        inner = np.empty((len(PARTS), count, count))
        for p, part in enumerate(PARTS):
            for i, piece in enumerate(self._pieces(results[part])):
                # In the model's own precision: a float64 copy of ten million rows costs more than
                # the product, and 1e-6 is far below the probes' own error.
                grams[p, i] = (piece @ piece.T).cpu().double().numpy()
                if i == j:
                    inner[p] = (piece @ basis).cpu().double().numpy()
        self._learn(j, results, grams)
        longest = float(draw.square().sum(0).max())
        noise = _noise(energy_of(grams, size, longest=longest))
        return ProbeGroup(size, grams, (inner + inner.swapaxes(-1, -2)) / 2, longest, noise)

    def _pieces(self, rows: Tensor) -> Sequence[Tensor]:
        """(q, P) → (q, size) for every block."""
        if self._order is not None:
            rows = rows.index_select(1, self._order)
        return torch.split(rows, self._sizes, dim=1)

    def _learn(self, j: int, results: dict[str, Tensor], grams: Array) -> None:
        """Keep what the products of column j say about the row spaces of all other columns."""
        norms = np.sqrt(np.trace(grams[1:], axis1=-2, axis2=-1))  # (2, rows): each weighs the same
        floor = _UNSEEN * np.sqrt(np.trace(grams[0], axis1=-2, axis2=-1).max())
        scale = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > floor)
        outer, functional = (self._pieces(results[part]) for part in PARTS[1:])
        cross = np.stack(
            [(a @ b.T).cpu().double().numpy() for a, b in zip(outer, functional, strict=True)]
        )
        both = np.block([[grams[1], cross], [cross.swapaxes(-1, -2), grams[2]]])  # (rows, 2q, 2q)
        scale = np.repeat(scale.T, grams.shape[-1], axis=1)  # (rows, 2q)
        vectors = np.linalg.eigh(scale[:, :, None] * both * scale[:, None, :])[1]
        leading = vectors[..., ::-1][..., :_SAMPLES].swapaxes(-1, -2) * scale[:, None, :]
        mixed = torch.from_numpy(leading).to(outer[0])  # (rows, samples, 2q)
        q = grams.shape[-1]
        for i, directions in enumerate(self._directions):
            # Its own probes would no longer be independent of what was learnt from them.
            if i == j or not directions.learns or not scale[i].any():
                continue
            directions.add(mixed[i, :, :q] @ outer[i] + mixed[i, :, q:] @ functional[i])

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
        groups = self._counted(j)
        parts = [
            group.energy(np.einsum("ab,pbkl->pakl", indicator, group.grams)) for group in groups
        ]
        return pooled(parts, _shares(groups))

    def _counted(self, j: int) -> list[ProbeGroup]:
        """The groups of column j that say something: the exact one alone, if there is one."""
        exact = [group for group in self.groups[j] if group.probes >= group.size]
        return exact[:1] or self.groups[j]

    def _weights(self, columns: Sequence[Sequence[int]]) -> Array:
        """How well a column group is known: the least precision of its blocks."""
        precision = [
            sum(group.precision for group in self._counted(j)) for j in range(len(self.blocks))
        ]
        return np.array([min(precision[j] for j in group) for group in columns])

    def traces(self) -> tuple[Array, Array]:
        """tr H_jj and its standard error: arrays (parts, blocks).

        Var[(n/q) tr QᵀAQ] ≤ (2/q) ‖A‖_F², and ‖A‖_F² is known from the map itself.
        """
        values = np.zeros((len(PARTS), len(self.blocks)))
        errors = np.zeros_like(values)
        for j in range(len(self.groups)):
            groups = self._counted(j)
            for g, share in zip(groups, _shares(groups), strict=True):
                n, q = g.size, g.probes
                values[:, j] += share * n / q * np.trace(g.inner, axis1=-2, axis2=-1)
                frobenius = n / q * np.trace(g.grams[:, j], axis1=-2, axis2=-1)
                shrink = n * (n - q) / max((n - 1) * (n + 2), 1)
                errors[:, j] += share**2 * 2 / q * shrink * frobenius
        return values, np.sqrt(errors)


def _noise(energy: Energy) -> float:
    """Mean relative variance over entries and parts, those of rounding apart."""
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = energy.variance / energy.value**2
    floor = _UNSEEN**2 * energy.value.max(axis=(-2, -1), keepdims=True)
    return float(relative[energy.value > floor].mean()) if (energy.value > floor).any() else 0.0


def _shares(groups: Sequence[ProbeGroup]) -> list[float]:
    """Weights of independent groups, by their precision averaged over the map.

    An entry's own variance must not weigh it: few probes estimate both, and low with low.
    """
    if len(groups) == 1:
        return [1.0]
    precision = np.array([group.precision for group in groups])
    return [float(share) for share in precision / precision.sum()]


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
