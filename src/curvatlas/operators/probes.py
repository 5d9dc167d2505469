"""Probes of a second derivative on one sample, before any number of it is trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from curvatlas.errors import DifferentiationError
from curvatlas.operators.linearisation import HessianLinearisation, Linearisation
from curvatlas.problem import Batch, Problem
from curvatlas.problem.guards import listed

_SYMMETRY = {torch.float64: 1e-5, torch.float32: 5e-3}
# Differences of gradients in float32 carry some 1e-2 of noise; what they must catch is a term that
# is missing altogether.
_DIFFERENCES = {torch.float64: 0.05, torch.float32: 0.3}


def _draw(leaves: dict[str, Tensor], names: Sequence[str], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(leaves[name].shape, generator=generator, dtype=torch.float64)
        .to(leaves[name])
        .unsqueeze(0)
        for name in names
    }


def _flat(tensors: Iterable[Tensor | None], leaves: dict[str, Tensor]) -> Tensor:
    pieces = [
        torch.zeros_like(leaf) if t is None else t
        for leaf, t in zip(leaves.values(), tensors, strict=True)
    ]
    return torch.cat([t.detach().reshape(-1) for t in pieces]).double()


def probe_symmetry(linear: Linearisation, names: Sequence[str]) -> None:
    """uᵀ(Hv) against vᵀ(Hu): two products on one sample catch most wrong double backwards."""
    leaves = linear.leaves
    u, v = _draw(leaves, names, 0), _draw(leaves, names, 1)
    hu, hv = _flat(linear.product(u, names), leaves), _flat(linear.product(v, names), leaves)
    flat_u, flat_v = _flat(u.values(), leaves), _flat(v.values(), leaves)
    left, right = float(flat_u @ hv), float(flat_v @ hu)
    typical = float(hv.norm() * flat_u.norm()) / max(hv.numel(), 1) ** 0.5
    scale = max(abs(left), abs(right), typical)
    dtype = next(iter(leaves.values())).dtype
    if scale > 0 and not abs(left - right) <= _SYMMETRY[dtype] * scale:
        raise DifferentiationError(
            f"the second derivative is not symmetric (uᵀHv = {left:.6g}, vᵀHu = {right:.6g}): "
            "an operation of the model has a wrong double backward; replace it, or pass "
            "checks=False to look at the operator all the same."
        )


def probe_by_differences(
    problem: Problem, batch: Batch, names: Sequence[str], custom: frozenset[str]
) -> None:
    """H v against differences of the gradient, for models with hand-written autograd functions.

    A custom backward that calls foreign kernels leaves no graph behind: autograd then returns a
    symmetric matrix with terms missing. Only differences notice.
    """
    linear = HessianLinearisation(problem, batch, names)
    leaves = linear.leaves
    direction = _draw(leaves, names, 2)
    product = _flat(linear.product(direction, names), leaves)
    size = float(_flat(leaves.values(), leaves).norm() / _flat(direction.values(), leaves).norm())
    dtype = next(iter(leaves.values())).dtype
    step = max(size, 1e-3) * torch.finfo(dtype).eps ** (1 / 3)

    def gradient(sign: float) -> Tensor:
        moved = {
            n: (leaf.detach() + sign * step * direction[n][0]).requires_grad_(True)
            for n, leaf in leaves.items()
        }
        loss = problem.loss.value(problem.outputs(batch, moved), batch.targets)
        grads = torch.autograd.grad(loss, list(moved.values()), allow_unused=True)
        return _flat(grads, leaves)

    difference = (gradient(1.0) - gradient(-1.0)) / (2 * step)
    scale = max(float(product.norm()), float(difference.norm()))
    error = float((product - difference).norm())
    if scale > 0 and error > _DIFFERENCES[dtype] * scale:
        raise DifferentiationError(
            f"the second derivative differs from differences of the gradient by {error / scale:.0%}"
            f": {listed(sorted(custom))} has no usable double backward; replace it by plain "
            "PyTorch operations, or pass checks=False."
        )
