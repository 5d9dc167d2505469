"""Probes of a second derivative on one sample, before any number of it is trusted."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvatlas.engines.autograd.linearisation import (
    Columns,
    HessianLinearisation,
    Linearisation,
)
from curvatlas.engines.graphs import graph_size
from curvatlas.errors import DifferentiationError
from curvatlas.precision import has_float64
from curvatlas.problem import Batch, Problem
from curvatlas.problem.cross_entropy import differentiable_leaves
from curvatlas.problem.evaluation import listed
from curvatlas.problem.kernels import unwatched
from curvatlas.problem.large_heads import HiddenLogits

_SYMMETRY = {torch.float64: 1e-5, torch.float32: 5e-3}
# Differences of gradients in float32 carry some 1e-2 of noise; what they must catch is a term that
# is missing altogether.
_DIFFERENCES = {torch.float64: 1e-3, torch.float32: 0.3}
# Of T[v, v, ·], in float64; a wrong third derivative of a norm was 2 to 16 % off.
_THIRD = {torch.float64: 5e-3, torch.float32: 0.3}
_ROUNDINGS = 5  # of the gradient's norm, in a difference of two gradients


def _draw(leaves: dict[str, Tensor], names: Sequence[str], seed: int) -> Iterator[Tensor]:
    """One normal tensor (1, *shape) a parameter; the same again at every call."""
    for place, name in enumerate(names):
        leaf = leaves[name]
        generator = torch.Generator().manual_seed(1009 * seed + place)
        drawn = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype, device="cpu")
        yield drawn.to(leaf.device).unsqueeze(0)


@unwatched
def random_columns(leaves: dict[str, Tensor], names: Sequence[str], seed: int) -> dict[str, Tensor]:
    """Normal columns (1, *shape) by parameter."""
    return dict(zip(names, _draw(leaves, names, seed), strict=True))


def _movable(problem: Problem, direction: dict[str, Tensor]) -> dict[str, Tensor]:
    """The direction without the rows of padding tokens, which autograd holds fixed.

    ``nn.Embedding(padding_idx=)`` reads such a row and gives it no gradient: differences that move
    it would see a derivative that no operator has.
    """
    names = {id(parameter): name for name, parameter in problem.model.named_parameters()}
    for module in problem.model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            piece = direction.get(names.get(id(module.weight), ""))
            if piece is not None:
                piece[:, module.padding_idx] = 0.0
    return direction


@unwatched
def _dot(left: Iterable[Tensor | None], right: Iterable[Tensor | None]) -> float:
    """Σ ⟨left, right⟩ over tensors, summed in float64; None is zero."""
    pairs = zip(left, right, strict=True)
    return sum(
        float(torch.dot(a.detach().reshape(-1), b.detach().reshape(-1)))
        for a, b in pairs
        if a is not None and b is not None
    )


def probe_symmetry(
    linear: Linearisation, names: Sequence[str], columns: Callable[[], Columns] | None = None
) -> tuple[Columns, list[Tensor | None]]:
    """uᵀ(Hv) against vᵀ(Hu): two products on one sample catch most wrong double backwards.

    Normal vectors are drawn anew where they are needed: on a large model every flat vector that is
    held costs as much as the model. Gives u and H u; columns: how u is drawn.
    """
    leaves = linear.leaves
    product = linear.product(random_columns(leaves, names, 1), names)
    u = columns() if columns is not None else random_columns(leaves, names, 0)
    left = _dot((u[name] for name in names), product)
    typical = _dot(product, product) ** 0.5  # of uᵀ(Hv) for a normal u
    del product
    product = linear.product(u, names)
    right = _dot(_draw(leaves, names, 1), product)
    scale = max(abs(left), abs(right), typical)
    dtype = next(iter(leaves.values())).dtype
    if scale > 0 and not abs(left - right) <= _SYMMETRY[dtype] * scale:
        custom = linear.size.custom
        suspect = listed(sorted(custom)) if custom else "an operation of the model"
        raise DifferentiationError(
            f"the second derivative is not symmetric (uᵀHv = {left:.6g}, vᵀHu = {right:.6g}): "
            f"{suspect} has a wrong double backward; replace it by plain PyTorch operations, or "
            "pass checks=False to look at the operator all the same."
        )
    return u, product


def probe_by_differences(
    problem: Problem, batch: Batch, names: Sequence[str], custom: frozenset[str], *, room: int
) -> None:
    """H v against differences of the gradient, for models with hand-written autograd functions.

    A custom backward that calls foreign kernels leaves no graph behind: autograd then returns a
    symmetric matrix with terms missing. Only differences notice. They are taken in float64 where
    the functions can be: in float32 a step is so long that it passes many kinks of a ReLU, and what
    is missing in a small part of the model is below the noise.

    room: bytes that a copy of the model in float64 may take.
    """
    if problem.dtype == torch.float32:
        try:
            twin, doubled = _in_float64(problem, batch, room)
            with twin.evaluating():
                linear = HessianLinearisation(twin, doubled, names)
                probe_symmetry(linear, names)
                _compare_with_differences(twin, linear, custom)
            return
        except DifferentiationError:
            raise
        except Exception:  # what has no float64 is compared as it is
            pass
    _compare_with_differences(problem, HessianLinearisation(problem, batch, names), custom)


def _in_float64(problem: Problem, batch: Batch, room: int) -> tuple[Problem, Batch]:
    """A copy of the problem and of a batch of it."""
    tensors = [*problem.model.parameters(), *problem.model.buffers()]
    if not has_float64(problem.device):
        raise TypeError(f"{problem.device} has no float64.")
    if sum(t.numel() * 8 for t in tensors) > room:
        raise MemoryError("the model is too large to be copied.")

    def doubled(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    twin = problem.with_model(copy.deepcopy(problem.model).double())
    twin.dtype = torch.float64
    inputs, targets = tree_map(doubled, (batch.inputs, batch.targets))
    return twin, replace(batch, inputs=inputs, targets=targets)


def _compare_with_differences(
    problem: Problem, linear: HessianLinearisation, custom: frozenset[str]
) -> None:
    leaves, batch = linear.leaves, linear.batch
    names = tuple(leaves)
    direction = _movable(problem, random_columns(leaves, names, 2))
    product = linear.product(direction, names)
    size = (
        _dot(leaves.values(), leaves.values()) / _dot(direction.values(), direction.values())
    ) ** 0.5
    dtype = next(iter(leaves.values())).dtype
    step = max(size, 1e-3) * torch.finfo(dtype).eps ** (1 / 3)

    def gradient(steps: float) -> tuple[Tensor, ...]:
        moved = {
            n: (leaf.detach() + steps * step * direction[n][0]).requires_grad_(True)
            for n, leaf in leaves.items()
        }
        loss = problem.loss.value(problem.outputs(batch, moved), batch.targets)
        return torch.autograd.grad(loss, list(moved.values()), materialize_grads=True)

    def differences(steps: float) -> list[Tensor]:
        pairs = zip(gradient(steps), gradient(-steps), strict=True)
        return [(a - b) / (2 * steps * step) for a, b in pairs]

    near, far = differences(1.0), differences(2.0)
    slope = gradient(0.0)
    # What a difference can be off by itself: rounding, and the third derivative.
    rounding = _ROUNDINGS * torch.finfo(dtype).eps * _dot(slope, slope) ** 0.5 / step
    total = error = 0.0
    wrong: dict[str, float] = {}
    for name, hv, close, wide in zip(names, product, near, far, strict=True):
        gap = float((close if hv is None else close - hv[0]).norm())
        scale = max(0.0 if hv is None else float(hv.norm()), float(close.norm()))
        total, error = total + scale**2, error + gap**2
        allowed = _DIFFERENCES[dtype] * scale + 3 * float((wide - close).norm()) + rounding
        if dtype == torch.float64 and gap > allowed:
            wrong[name] = gap / scale
    off = (error / total) ** 0.5 if total > 0 else 0.0
    if wrong or off > _DIFFERENCES[dtype]:
        where = f" (at {listed(list(wrong))})" if wrong else ""
        raise DifferentiationError(
            "the second derivative differs from differences of the gradient by "
            f"{max([off, *wrong.values()]):.0%}{where}: {listed(sorted(custom))} has no usable "
            "double backward; replace it by plain PyTorch operations, or pass checks=False."
        )


def probe_third_derivative(
    problem: Problem,
    batch: Batch,
    names: Sequence[str],
    linearise: Callable[[Problem, Batch, Mapping[str, Tensor]], Linearisation],
    *,
    room: int,
) -> None:
    """T[v, v, ·] against differences of H v: fused operations may be right to second order only.

    In float64 where a copy of the model fits into ``room`` bytes, as ``probe_by_differences``.
    linearise: (problem, batch, v by parameter) → the products T[v, ·, ·] of that batch.
    """
    if problem.dtype == torch.float32:
        with contextlib.suppress(Exception):  # no float64 or no room: compared as it is
            problem, batch = _in_float64(problem, batch, room)
    with problem.evaluating():
        leaves = problem.leaves(names)
        direction = _movable(problem, random_columns(leaves, names, 2))
        linear = linearise(problem, batch, {n: piece[0] for n, piece in direction.items()})
        product = linear.product(direction, names)
        del linear
        eps = torch.finfo(problem.dtype).eps
        length = _dot(leaves.values(), leaves.values()) ** 0.5
        step = max(length, 1e-3) / _dot(direction.values(), direction.values()) ** 0.5
        step *= eps ** (1 / 3)

        def curved(steps: float) -> list[Tensor | None]:
            moved = {
                n: (leaf.detach() + steps * step * direction[n][0]).requires_grad_(True)
                for n, leaf in leaves.items()
            }
            loss = problem.loss.value(problem.outputs(batch, moved), batch.targets)
            inputs = list(moved.values())
            slopes = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
            chosen = [(s, direction[n][0]) for n, s in zip(names, slopes, strict=True)]
            chosen = [(s, d) for s, d in chosen if s.requires_grad]
            if not chosen:
                return [None] * len(inputs)
            roots, seeds = zip(*chosen, strict=True)
            return list(torch.autograd.grad(roots, inputs, seeds, materialize_grads=True))

        def differences(steps: float) -> list[Tensor | None]:
            pairs = zip(curved(steps), curved(-steps), strict=True)
            return [
                None if a is None or b is None else (a - b) / (2 * steps * step) for a, b in pairs
            ]

        near, far, here = differences(1.0), differences(2.0), curved(0.0)
    scale = max(_dot(product, product), _dot(near, near)) ** 0.5
    error = _distance(product, near)
    # What a difference can be off by itself: its step, and the rounding of H v.
    rounding = _ROUNDINGS * eps * _dot(here, here) ** 0.5 / step
    tolerance = _THIRD[problem.dtype] * scale
    if error > tolerance + 3 * _distance(near, far) + rounding:
        raise DifferentiationError(
            "the third derivative differs from differences of H v by "
            f"{error / max(scale, 1e-300):.0%}: an operation of the model has a wrong or no third "
            "derivative; replace it by plain PyTorch operations, or pass checks=False."
        )


def _distance(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> float:
    """‖left − right‖ over tensors, None being zero."""
    gaps = [
        a if b is None else -b if a is None else a.reshape(-1) - b.reshape(-1)
        for a, b in zip(left, right, strict=True)
        if a is not None or b is not None
    ]
    return float(_dot(gaps, gaps) ** 0.5)


def probe_loss_by_differences(problem: Problem, linear: Linearisation) -> None:
    """Λ u against differences of the slope ∂ℓ/∂Z, for losses with hand-written autograd functions.

    A fused loss whose gradient is made in its forward pass has a second derivative of zero by
    autograd: H_o would vanish, and H be H_f, symmetric and without a word.
    """
    outputs, rebuild = differentiable_leaves(linear.outputs)
    if not outputs or isinstance(linear.outputs, HiddenLogits):
        return

    def value(leaves: list[Tensor]) -> Tensor:
        return problem.loss.value(rebuild(leaves), linear.batch.targets)

    def slopes(sign: float) -> tuple[Tensor, ...]:
        moved = [
            (z.detach() + sign * step * u).requires_grad_(True)
            for z, u in zip(outputs, directions, strict=True)
        ]
        return torch.autograd.grad(value(moved), moved, materialize_grads=True)

    fresh = [z.detach().requires_grad_(True) for z in outputs]
    loss = value(fresh)
    custom = graph_size([loss]).custom
    if not custom:
        return
    generator = torch.Generator().manual_seed(0)
    directions = [
        torch.randn(z.shape, generator=generator, dtype=z.dtype, device="cpu").to(z.device)
        for z in outputs
    ]
    dtype = outputs[0].dtype
    step = max(_dot(outputs, outputs) / _dot(directions, directions), 1e-6) ** 0.5
    step *= torch.finfo(dtype).eps ** (1 / 3)
    first = torch.autograd.grad(loss, fresh, create_graph=True, materialize_grads=True)
    curved = [(s, u) for s, u in zip(first, directions, strict=True) if s.requires_grad]
    product: Sequence[Tensor] = [torch.zeros_like(z) for z in outputs]
    if curved:
        product = torch.autograd.grad(
            [s for s, _ in curved], fresh, [u for _, u in curved], materialize_grads=True
        )
    difference = [(a - b) / (2 * step) for a, b in zip(slopes(1.0), slopes(-1.0), strict=True)]
    gap = [a - b for a, b in zip(difference, product, strict=True)]
    scale = max(_dot(product, product), _dot(difference, difference)) ** 0.5
    error = _dot(gap, gap) ** 0.5
    if scale > 0 and error > _DIFFERENCES.get(dtype, 0.3) * scale:
        raise DifferentiationError(
            f"the loss's second derivative differs from differences of its slope by "
            f"{error / scale:.0%}: {listed(sorted(custom))} has no usable double backward; "
            "compute the loss by plain PyTorch operations, or pass checks=False."
        )
