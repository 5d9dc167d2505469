"""Vector-Jacobian products of several cotangents at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Inputs = Sequence[Tensor] | Sequence[GradientEdge]


def pull(
    roots: Sequence[Tensor],
    inputs: Inputs,
    cotangents: Sequence[Tensor],
    *,
    together: bool | None = None,
) -> list[Tensor | None]:
    """Jᵀ c for K cotangents: (K, *root) for each root → (K, *input) for each input, None: zero.

    together: all in one pass, RuntimeError where an operation has no batching rule; False: one by
    one; None: together where that is possible. The graph is kept.
    """
    chosen = [i for i, root in enumerate(roots) if root.requires_grad]
    if not chosen:
        return [None] * len(inputs)
    outputs, seeds = [roots[i] for i in chosen], [cotangents[i] for i in chosen]
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    count = len(seeds[0])
    if count > 1 and together is not False:
        try:
            return list(
                torch.autograd.grad(outputs, inputs, seeds, is_grads_batched=True, **options)
            )
        except RuntimeError:
            if together:
                raise
    rows = [
        torch.autograd.grad(outputs, inputs, [s[k] for s in seeds], **options) for k in range(count)
    ]
    pulled: list[Tensor | None] = []
    for parts in zip(*rows, strict=True):
        dense = [t.to_dense() if t.is_sparse else t for t in parts if t is not None]
        # One row is no copy: it may be as large as the model.
        pulled.append(torch.stack(dense) if len(dense) > 1 else dense[0][None] if dense else None)
    return pulled
