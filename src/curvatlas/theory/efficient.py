"""Our closed forms, as the checks use them: dense Hessians without automatic differentiation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.blocks.losses import Loss, resolve_loss
from curvatlas.blocks.products import LinearisedBlock, Part, linearise
from curvatlas.blocks.structure import BlockSpec, Weights
from curvatlas.theory.kronecker import SingleHead


@dataclass(frozen=True)
class BlockHessian:
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


def dense_from_products(
    block: LinearisedBlock, curvature: object, part: Part, *, columns: int = 512
) -> Tensor:
    """All P columns of the Hessian by closed-form products, ``columns`` at a time."""
    sizes = {name: w.numel() for name, w in block.weights.items()}
    total = sum(sizes.values())
    rows = []
    for start in range(0, total, columns):
        stop = min(total, start + columns)
        tangents, offset = {}, 0
        for name, weight in block.weights.items():
            low, high = max(start, offset), min(stop, offset + sizes[name])
            if low < high:
                tangent = weight.new_zeros(stop - start, sizes[name])
                index = torch.arange(low, high, device=weight.device)
                tangent[index - start, index - offset] = 1.0
                tangents[name] = tangent.view(stop - start, *weight.shape)
            offset += sizes[name]
        found, _ = block.hvp(tangents, curvature=curvature, part=part, needs_input=False)  # type: ignore[arg-type]
        rows.append(torch.cat([found[n].reshape(stop - start, -1) for n in sizes], 1))
    return torch.cat(rows)


def block_hessian(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    target: Tensor,
    *,
    loss: str | Loss = "mse",
    mask: Tensor | None = None,
) -> BlockHessian:
    """Total, outer and functional Hessian of a block at inputs x (n, L, d), in closed form."""
    block = linearise(spec, weights, x, mask)
    seeds = resolve_loss(loss).seeds(block.output, target)
    block.gradient(seeds.delta)
    outer = dense_from_products(block, seeds.product, "outer")
    functional = dense_from_products(block, seeds.product, "functional")
    sizes = tuple(block.weights[n].numel() for n in block.names)
    return BlockHessian(block.names, sizes, outer + functional, outer, functional)


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
