"""Λ = ∂²ℓ/∂Z² as a product on whatever tensors the model puts out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvatlas.problem.chunked import HiddenLogits, chunked_product
from curvatlas.problem.cross_entropy import CrossEntropy, present_factors
from curvatlas.problem.losses import Loss, Rebuild


def differentiable_leaves(outputs: Any) -> tuple[list[Tensor], Rebuild]:
    """The tensors of an output tree that carry gradients, and the way back to the tree."""
    if isinstance(outputs, Tensor):
        return [outputs], lambda leaves: leaves[0]
    flat, spec = tree_flatten(outputs)
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def rebuild(leaves: list[Tensor]) -> Any:
        filled = list(flat)
        for place, leaf in zip(places, leaves, strict=True):
            filled[place] = leaf
        return tree_unflatten(filled, spec)

    return [flat[i] for i in places], rebuild


def output_curvature(
    loss: Loss, leaves: list[Tensor], rebuild: Rebuild, targets: Any
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Λ as a product on lists of output tensors: closed form if known, else double backward.

    Every tensor carries one leading axis of columns: (K, *outputs).
    """
    whole = rebuild(leaves)
    if isinstance(whole, HiddenLogits) and isinstance(loss, CrossEntropy):
        return factored_product(
            whole,
            leaves,
            lambda factors, directions: loss.chunked(whole, targets).product(
                factors, directions, outer=True, functional=False
            ),
        )
    if len(leaves) == 1:
        closed = loss.curvature(leaves[0].detach(), targets)
        if closed is not None:
            return lambda columns: [closed(columns[0])]
    fresh = [leaf.detach().requires_grad_(True) for leaf in leaves]
    with torch.enable_grad():
        value = loss.value(rebuild(fresh), targets)
        slopes = torch.autograd.grad(value, fresh, create_graph=True, materialize_grads=True)
    curved = [i for i, slope in enumerate(slopes) if slope.requires_grad]

    def product(columns: list[Tensor]) -> list[Tensor]:
        if not curved:
            return [torch.zeros_like(c) for c in columns]
        results = [
            torch.autograd.grad(
                [slopes[i] for i in curved],
                fresh,
                [columns[i][k] for i in curved],
                retain_graph=True,
                materialize_grads=True,
            )
            for k in range(columns[0].shape[0])
        ]
        return [torch.stack(parts) for parts in zip(*results, strict=True)]

    return product


def factored_product(
    logits: HiddenLogits, leaves: list[Tensor], one: Callable[[Any, Any], Any]
) -> Callable[[list[Tensor]], list[Tensor]]:
    """A product at the logits, as one on those of hidden, weight and bias that vary.

    one: ((hidden, weight, bias), directions) → the three results, all tokens in one axis.
    """
    present = present_factors(logits, leaves)
    hidden = logits.hidden.detach().reshape(-1, logits.hidden.shape[-1])
    bias = None if logits.bias is None else logits.bias.detach()
    factors = (hidden, logits.weight.detach(), bias)
    return chunked_product(
        logits, [i in present for i in range(3)], lambda directions: one(factors, directions)
    )
