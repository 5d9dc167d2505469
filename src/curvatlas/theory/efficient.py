"""Our closed forms, as the checks use them: dense Hessians without automatic differentiation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.blocks.block import ClosedFormBlock
from curvatlas.blocks.losses import Loss
from curvatlas.blocks.structure import BlockSpec, Weights
from curvatlas.theory.kronecker import SingleHead


@dataclass(frozen=True)
class DenseParts:
    """H, H_o, H_f (P, P) of one block, with the positions of every weight."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    total: Tensor
    outer: Tensor
    functional: Tensor

    def positions(self, name: str) -> slice:
        start = sum(self.sizes[: self.names.index(name)])
        return slice(start, start + self.sizes[self.names.index(name)])

    def block(self, name: str, part: str = "total", other: str | None = None) -> Tensor:
        """The block (name, other) of a part; the diagonal block when ``other`` is left out."""
        full: Tensor = getattr(self, part)
        return full[self.positions(name), self.positions(other or name)]


def block_hessian(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    target: Tensor,
    *,
    loss: str | Loss = "mse",
    mask: Tensor | None = None,
) -> DenseParts:
    """Total, outer and functional Hessian of a block at inputs x (n, L, d), in closed form."""
    closed = ClosedFormBlock.from_weights(spec, weights)
    found = closed.derivatives(x, target, loss=loss, mask=mask)
    outer, functional = found.dense("outer"), found.dense("functional")
    sizes = tuple(weights[name].numel() for name in found.names)
    return DenseParts(found.names, sizes, outer + functional, outer, functional)


def total_hessian(spec: BlockSpec, weights: Weights, x: Tensor, target: Tensor) -> Tensor:
    """H (P, P) alone, under mean squared error."""
    return ClosedFormBlock.from_weights(spec, weights).derivatives(x, target).dense("total")


def head_as_block(head: SingleHead) -> tuple[BlockSpec, dict[str, Tensor]]:
    """The papers' single head as a block: weights in (out, in) layout, no W_O, no residual."""
    d, d_k = head.query.shape
    spec = BlockSpec(d_model=d, d_k=d_k, d_v=d, residual=False)
    weights = {
        "query_weight": head.query.detach().T.contiguous(),
        "key_weight": head.key.detach().T.contiguous(),
        "value_weight": head.value.detach().T.contiguous(),
    }
    return spec, weights


def attention_hessian_blocks(head: SingleHead, part: str) -> dict[str, Tensor]:
    """Blocks VV, QQ, QK, KK, VQ, VK of ``part``, in the papers' (in, out) row-major layout."""
    spec, weights = head_as_block(head)
    result = block_hessian(spec, weights, head.x.unsqueeze(0), head.target.unsqueeze(0))
    letters = {"Q": "query_weight", "K": "key_weight", "V": "value_weight"}

    def turned(name: str) -> Tensor:
        out, inputs = weights[name].shape
        return torch.arange(out * inputs).reshape(out, inputs).T.reshape(-1)

    blocks = {}
    for a, b in ("VV", "QQ", "QK", "KK", "VQ", "VK"):
        first, second = letters[a], letters[b]
        blocks[a + b] = result.block(first, part, second)[turned(first)][:, turned(second)]
    return blocks
