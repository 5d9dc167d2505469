"""Rows of the Hessian that belong to γ and β: few enough to be had exactly.

Two ways to the same numbers: hand-written products (no graph, what a user's call takes) and double
backward with a graph kept (what the bound's adversary differentiates through).
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.blocks.losses import Loss, Seeds
from curvatlas.blocks.products import linearise
from curvatlas.blocks.structure import WEIGHT_NAMES, BlockSpec, Weights
from curvatlas.theory import reference


def has_norms(weights: Weights) -> bool:
    return any(name.startswith("norm") for name in weights)


def rows_by_products(
    spec: BlockSpec, weights: Weights, x: Tensor, seeds: Seeds, mask: Tensor | None = None
) -> Tensor:
    """(#norm, P) by one batched closed-form product over all γ and β; x (n, L, d)."""
    block = linearise(spec, weights, x, mask)
    block.gradient(seeds.delta)
    names = [n for n in block.names if n.startswith("norm")]
    total = sum(weights[n].numel() for n in names)
    tangents, start = {}, 0
    for name in names:
        size = weights[name].numel()
        tangent = weights[name].new_zeros(total, size)
        tangent[start : start + size] = torch.eye(size, dtype=tangent.dtype, device=tangent.device)
        tangents[name], start = tangent, start + size
    found, _ = block.hvp(tangents, curvature=seeds.product, needs_input=False)
    return torch.cat([found[n].reshape(total, -1) for n in block.names], 1)


def rows_by_backward(spec: BlockSpec, weights: Weights, x: Tensor, loss: Loss, y: Tensor) -> Tensor:
    """The same by double backward, itself differentiable; weights must record gradients."""
    names = [n for n in WEIGHT_NAMES if n in weights]
    params = [weights[n] for n in names]
    z = reference.block_output(spec, weights, x)
    value = loss.seeds(z, y).value
    norms = [p for n, p in zip(names, params, strict=True) if n.startswith("norm")]
    return reference.jacobian(reference.flat_gradient(value, norms, graph=True), params, graph=True)
