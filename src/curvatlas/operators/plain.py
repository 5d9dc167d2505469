"""The Hessian behind any plain forward pass, by double backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.layers.decomposition import DecomposedHessian
from curvatlas.layers.losses import Seeds
from curvatlas.layers.structure import Weights
from curvatlas.linear_operator import Part, Tags


class PlainHessian(DecomposedHessian):
    """The Hessian over ``weights`` of a loss behind any plain forward pass, by double backward."""

    def __init__(
        self,
        forward: Callable[[Weights], Tensor],
        weights: Weights,
        seeds_at: Callable[[Tensor], Seeds],
    ) -> None:
        self.leaves = {n: w.detach().clone().requires_grad_(True) for n, w in weights.items()}
        with torch.enable_grad():
            self.output = forward(self.leaves)
        self.seeds = seeds_at(self.output.detach())
        self.convex = self.seeds.convex
        sizes = [w.numel() for w in weights.values()]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.offsets = dict(zip(weights, zip(starts, sizes, strict=True), strict=True))
        super().__init__(
            (sum(sizes), sum(sizes)),
            dtype=self.output.dtype,
            device=self.output.device,
            tags=Tags(symmetric=True),
        )

    def content(self) -> Any:
        seeds = [self.seeds.delta, self.seeds.product(torch.ones_like(self.seeds.delta))]
        return [self.leaves, self.output, seeds]

    def _part_columns(self, columns: Tensor, part: Part) -> Tensor:
        total = torch.zeros_like(columns)
        with torch.enable_grad():
            if part != "functional":  # J v by differentiating Jᵀu for u, then Λ, then Jᵀ
                u = torch.zeros_like(self.output, requires_grad=True)
                moved = _batched(self._slopes(self.output, u), [u], self._split(columns))
                total += self.adjoint(self.seeds.product(moved.mT.reshape(-1, *u.shape)))
            if part != "outer":
                slopes = self._slopes((self.seeds.delta * self.output).sum(), None)
                total += _batched(slopes, list(self.leaves.values()), self._split(columns))
        return total.detach()

    def adjoint(self, seeds: Tensor) -> Tensor:
        """Jᵀ seeds for seeds (k, *output): (P, k)."""
        return _batched([self.output], list(self.leaves.values()), [seeds])

    def _slopes(self, of: Tensor, seed: Tensor | None) -> list[Tensor]:
        """∂of/∂leaves as a graph, zero where a leaf is not used."""
        found = torch.autograd.grad(
            of, list(self.leaves.values()), seed, create_graph=True, materialize_grads=True
        )
        return list(found)

    def _split(self, columns: Tensor) -> list[Tensor]:
        """(P, k) → one (k, *shape) a parameter."""
        pieces = torch.split(columns.mT, [size for _, size in self.offsets.values()], 1)
        leaves = self.leaves.values()
        return [p.reshape(-1, *leaf.shape) for p, leaf in zip(pieces, leaves, strict=True)]


def _batched(of: Sequence[Tensor], leaves: Sequence[Tensor], seeds: Sequence[Tensor]) -> Tensor:
    """Σ seedᵀ ∂of/∂leaves for k seeds at once: (numbers of the leaves, k)."""
    live = [(y, s) for y, s in zip(of, seeds, strict=True) if y.requires_grad]
    k = len(seeds[0])
    found: Sequence[Tensor | None] = (None,) * len(leaves)
    if live:
        found = torch.autograd.grad(
            [y for y, _ in live],
            leaves,
            [s for _, s in live],
            retain_graph=True,
            is_grads_batched=True,
            allow_unused=True,
        )
    flat = [
        leaf.new_zeros(k, leaf.numel()) if g is None else g.reshape(k, -1)
        for g, leaf in zip(found, leaves, strict=True)
    ]
    return torch.cat(flat, 1).mT
