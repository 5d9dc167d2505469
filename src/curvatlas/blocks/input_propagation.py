"""The input Hessian of every block of a stack, from the loss back to the embeddings.

S enters at the outputs as Λ, passes the readout, then block after block (``input_hessian``); each
block reports what it passed on and what it created.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.blocks.input_hessian import InputHessian, pull_curvature
from curvatlas.blocks.losses import Seeds
from curvatlas.blocks.products import LinearisedBlock
from curvatlas.blocks.products_head import LinearisedReadout
from curvatlas.blocks.products_workspace import Way, Workspace
from curvatlas.blocks.stack import BlockStack
from curvatlas.blocks.stack_chain import with_sample_axis


def propagate_input_hessian(
    stack: BlockStack, x: Tensor, targets: Tensor, *, mask: Tensor | None = None
) -> tuple[InputHessian, ...]:
    """∂²ℓ/∂(block input)² of every block, in the order of the forward pass.

    ``result[0].total`` is the Hessian at the stack's input (n, L·d, L·d).
    """
    x = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach()
    blocks: list[LinearisedBlock] = []
    z = x
    for spec, weights in zip(stack.specs, stack.weights, strict=True):
        blocks.append(LinearisedBlock(spec, weights, z, mask))
        z = blocks[-1].output
    readout = LinearisedReadout(stack.readout, z.flatten(0, 1), samples=len(x))
    seeds = stack.loss.seeds(readout.output, with_sample_axis(targets, stack.readout))
    delta, curvature = _before_readout(readout, seeds, z.shape)
    results = []
    for block in reversed(blocks):
        results.append(pull_curvature(block, delta, curvature))
        delta, curvature = results[-1].delta, results[-1].total
    return tuple(reversed(results))


def _before_readout(
    readout: LinearisedReadout, seeds: Seeds, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """δ and S at the last block's output, S by products with unit vectors.

    Samples never couple, and tokens only through a pooling: one product serves the same coordinate
    of every sample, and of every token where they stay apart.
    """
    n, length, d = shape
    fresh = Workspace(keep=False)
    delta = seeds.delta.reshape(1, -1, readout.output.shape[-1])
    pulled = readout.pull(delta, None, Way(fresh, frozenset(), record=True))
    assert pulled is not None
    apart = readout.pooling is None and not seeds.couples_tokens
    size = d if apart else length * d
    basis = torch.eye(size, dtype=delta.dtype, device=delta.device)
    if apart:
        directions = basis.view(d, 1, 1, d).expand(d, n, length, d)
    else:
        directions = basis.view(size, 1, length, d).expand(size, n, length, d)
    moved = readout.push(directions.reshape(size, n * length, d).contiguous(), {}, fresh)
    assert moved.output is not None
    rate = seeds.product(moved.output.view(size, *readout.output.shape))
    columns = readout.pull(rate.reshape(moved.output.shape), moved, Way(fresh, frozenset()))
    assert columns is not None
    if apart:
        curvature = columns.view(d, n, length, d).permute(1, 2, 3, 0)
    else:
        curvature = columns.view(size, n, size).permute(1, 2, 0)
    return pulled[0].view(shape), curvature.contiguous()
