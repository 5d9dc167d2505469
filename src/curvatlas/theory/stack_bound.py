r"""The token-structured bound for a stack of blocks.

With h_b the output of block b, Λ_b = ∂²ℓ/∂h_b², δ_b = ∂ℓ/∂h_b, the stack's Hessian has

    H_bb = K_bᵀΛ_bK_b + Σ δ_b ∂²h_b/∂θ_b²         (K_b = ∂h_b/∂θ_b)
    H_ab = K_aᵀ … = (∂h_{b−1}/∂θ_a)ᵀ ∂²ℓ/∂h_{b−1}∂θ_b          for a < b.

Everything that passes through the N·d numbers of an h_b is exact, from N·d products and matrices of
N·d × N·d: the off-diagonal blocks, and the outer part of the diagonal ones (inside a stack Λ_b
couples tokens). The functional part of a diagonal block has its token-structured bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvatlas.blocks.losses import Loss, Seeds
from curvatlas.blocks.products import LinearisedBlock, linearise
from curvatlas.blocks.stack import BlockStack
from curvatlas.blocks.structure import BlockSpec, Weights
from curvatlas.theory.exact_norm import exact_norm
from curvatlas.theory.norm_rows import has_norms, rows_by_products
from curvatlas.theory.token_bound import entry_bounds
from curvatlas.theory.token_entries import EntryBounds


def _no_curvature(like: Tensor, delta: Tensor) -> Seeds:
    """Seeds with Λ = 0 and the given δ (n, L, d): the functional part alone."""
    blocks = like.new_zeros(*like.shape, like.shape[-1])
    return Seeds.from_blocks(value=like.new_zeros(()), delta=delta, blocks=blocks)


def _entry(
    spec: BlockSpec, weights: Weights, x: Tensor, seeds: Seeds, mask: Tensor | None
) -> EntryBounds:
    rows = (lambda: rows_by_products(spec, weights, x, seeds, mask)) if has_norms(weights) else None
    return entry_bounds(spec, weights, x, seeds, mask=mask, norm_rows=rows)


def stack_token_bound(
    layers: Sequence[tuple[BlockSpec, Weights]],
    x: Tensor,
    target: Tensor,
    loss: Loss,
    mask: Tensor | None,
) -> tuple[tuple[str, ...], Tensor, float, float, Seeds]:
    """Names of the blocks, matrix of block bounds, the bound, the exact norm, and the seeds."""
    blocks, inputs, z = [], [], x
    for spec, weights in layers:
        inputs.append(z)
        blocks.append(linearise(spec, weights, z, mask))
        z = blocks[-1].output
    seeds = loss.seeds(z, target)
    deltas = [seeds.delta]
    for block in reversed(blocks):
        deltas.insert(0, block.gradient(deltas[0])[1])
    count, size = len(layers), x.numel()
    matrix = torch.zeros(count, count, dtype=torch.float64)
    curvatures, mixed = _input_curvature(layers, inputs, target, loss, mask)
    ends = torch.zeros(2, count, dtype=torch.float64)  # signed: highest, minus lowest
    for a, (spec, weights) in enumerate(layers):
        through = _jacobian_rows(blocks[a], size)  # ∂h_a/∂θ_a as (Nd, P_a)
        gram = through @ through.T
        functional = _entry(spec, weights, inputs[a], _no_curvature(z, deltas[a + 1]), mask)
        if a == count - 1:
            whole = _entry(spec, weights, inputs[a], seeds, mask)
            ends[:, a] = torch.stack(whole.ends())
        else:
            ends[:, a] = _sandwich(curvatures[a], gram) + torch.stack(functional.ends())
        for b in range(a + 1, count):
            if b > a + 1:  # ∂h_{b−1}/∂θ_a = (∂h_{b−1}/∂h_{b−2}) ∂h_{b−2}/∂θ_a
                step = _input_jacobian(blocks[b - 1], size)
                gram = step @ gram @ step.T
            matrix[a, b] = matrix[b, a] = _sandwich(mixed[b], gram)[0].sqrt()
    bound = max(float(torch.linalg.eigvalsh(matrix + torch.diag(e))[-1]) for e in ends)
    matrix = matrix + torch.diag(ends.amax(0))
    names = tuple(f"block {i}" for i in range(count))
    return names, matrix, bound, exact_norm(layers, x, target, loss, mask), seeds


def _sandwich(middle: Tensor, gram: Tensor) -> Tensor:
    """(highest, −lowest), not below 0, of the spectrum of KᵀMK from M and KKᵀ, both Nd × Nd."""
    values, vectors = torch.linalg.eigh(gram)
    root = vectors * values.clamp_min(0.0).sqrt()
    inner = root.T @ middle @ root
    found = torch.linalg.eigvalsh(0.5 * (inner + inner.T))
    return torch.stack([found[-1], -found[0]]).clamp_min(0.0)


def _input_curvature(
    layers: Sequence[tuple[BlockSpec, Weights]],
    inputs: Sequence[Tensor],
    target: Tensor,
    loss: Loss,
    mask: Tensor | None,
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Λ_b (Nd, Nd) at every inner block's output, and MMᵀ for M = ∂²ℓ/∂h_{b−1}∂θ_b.

    Both from N·d products of the blocks above with the unit vectors of their input.
    """
    curvatures: dict[int, Tensor] = {}
    mixed: dict[int, Tensor] = {}
    for b in range(1, len(layers)):
        above = BlockStack(list(layers[b:]), loss=loss).linearise(
            inputs[b], target, mask=mask, include_input=True
        )
        size, total = inputs[b].numel(), above.shape[0]
        units = torch.zeros(total, size, dtype=inputs[b].dtype, device=inputs[b].device)
        units[total - size :] = torch.eye(size, dtype=units.dtype, device=units.device)
        rows = above @ units  # (P above + Nd, Nd)
        lam = rows[total - size :]
        curvatures[b - 1] = 0.5 * (lam + lam.T)
        own = sum(w.numel() for w in layers[b][1].values())
        part = rows[:own].T  # (Nd, P_b)
        mixed[b] = part @ part.T
    return curvatures, mixed


def _jacobian_rows(block: LinearisedBlock, size: int) -> Tensor:
    """∂h/∂θ (Nd, P) by Nd vector-Jacobian products."""
    output = block.output
    units = torch.eye(size, dtype=output.dtype, device=output.device).view(size, *output.shape)
    found, _ = block.vjp(units)
    return torch.cat([t.reshape(size, -1) for t in found.values()], 1)


def _input_jacobian(block: LinearisedBlock, size: int) -> Tensor:
    """∂h/∂x (Nd, Nd)."""
    output = block.output
    units = torch.eye(size, dtype=output.dtype, device=output.device).view(size, *output.shape)
    found: Tensor = block.vjp(units, wanted=())[1].reshape(size, -1)
    return found
