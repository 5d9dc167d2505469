"""Activation checkpointing that can be differentiated twice and keeps nothing inside a block.

A block keeps only its inputs; its gradient keeps only its inputs and cotangents; both are computed
anew from these when a derivative asks for them. ``torch.utils.checkpoint`` (non-reentrant) frees
the activations of the first backward pass, but a gradient taken with ``create_graph=True`` saves
them again for the second: a kept gradient graph is then as large as without it. Here a product of
H costs one forward and one backward pass of every block more (by the count of operations, 3 instead
of 2 gradients) and holds the graph of one block at a time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvatlas.errors import ProblemError
from curvatlas.problem.evaluation import called_with
from curvatlas.problem.kernels import same_operations
from curvatlas.problem.state import written_buffers

TRUSTED_NODES = frozenset({"_BlockBackward", "_BlockGradientBackward"})


def block_stacks(model: nn.Module) -> list[nn.Module]:
    """The model's outermost stacks: lists of two or more modules of one class."""
    stacks: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        children = list(module.children())
        stack = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1
        alike = len({type_before_parametrizations(child) for child in children}) == 1
        if stack and alike and all(any(True for _ in c.parameters()) for c in children):
            stacks.append(module)
            return
        for child in children:
            walk(child)

    walk(model)
    return stacks


def shortened(model: nn.Module, keep: int) -> nn.Module:
    """The model with the first ``keep`` layers of each stack; weights and buffers are shared."""
    stacks = set(block_stacks(model))
    copies: dict[nn.Module, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if module not in copies:
            other = copies[module] = copy.copy(module)
            children = list(module._modules.items())
            kept = children[:keep] if module in stacks else children
            other._modules = {name: child and copied(child) for name, child in kept}
            other._parameters = dict(module._parameters)
            other._buffers = dict(module._buffers)
        return copies[module]

    return copied(model)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of the model's outermost stacks."""
    return [block for stack in block_stacks(model) for block in stack.children()]


@contextlib.contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Inside, calls of the model's repeated blocks keep their inputs only."""
    blocks: list[Any] = repeated_blocks(model)
    if not blocks:
        raise ProblemError(
            f"{type(model).__name__} has no list of repeated blocks to checkpoint: leave "
            "checkpoint_activations off, or put its layers into an nn.ModuleList."
        )
    before = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.forward = functools.partial(_call, block, block.forward)
    try:
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            if own is None:
                del block.forward
            else:
                block.forward = own
    written = sorted(written_buffers(model))
    if written:
        raise ProblemError(
            f"the forward pass writes into buffer {written[0]!r}, so that a block computed again "
            "would start from another state: leave checkpoint_activations off."
        )


def _call(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    flat, spec = tree_flatten((args, kwargs))
    places = [
        i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    names, parameters = [], []
    for name, parameter in block.named_parameters():
        names.append(name)
        parameters.append(parameter)
    plan = _Plan(block, forward, flat, spec, places, names)
    results = _Block.apply(  # type: ignore[no-untyped-call]
        plan, *(flat[i] for i in places), *parameters
    )
    return plan.rebuild(results)


class _Plan:
    """How to run one block again: what was passed to it, and what it returns."""

    def __init__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        flat: Sequence[Any],
        spec: Any,
        places: Sequence[int],
        names: Sequence[str],
    ) -> None:
        self._block, self._forward, self._spec = block, forward, spec
        moving = set(places)
        # Tensors in the graph are passed explicitly; holding them here would keep them twice.
        self._fixed = [None if i in moving else leaf for i, leaf in enumerate(flat)]
        self._places, self._names = tuple(places), tuple(names)
        self._results: list[Any] = []
        self._result_spec: Any = None
        self._result_places: tuple[int, ...] = ()

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The floating results for these inputs and parameters."""
        flat = list(self._fixed)
        for place, tensor in zip(self._places, tensors, strict=False):
            flat[place] = tensor
        args, kwargs = tree_unflatten(flat, self._spec)
        values = dict(zip(self._names, tensors[len(self._places) :], strict=True))
        block: Any = self._block
        patched = block.__dict__.get("forward")
        block.forward = self._forward
        try:
            with same_operations():
                raw = called_with(block, values, args, kwargs)
        finally:
            if patched is None:
                del block.forward
            else:
                block.forward = patched
        results, self._result_spec = tree_flatten(raw)
        self._result_places = tuple(
            i for i, r in enumerate(results) if isinstance(r, Tensor) and r.is_floating_point()
        )
        outputs = [results[i] for i in self._result_places]
        for i in self._result_places:
            results[i] = None
        self._results = results
        return outputs

    def rebuild(self, results: Sequence[Tensor]) -> Any:
        flat = list(self._results)
        for place, result in zip(self._result_places, results, strict=True):
            flat[place] = result
        return tree_unflatten(flat, self._result_spec)


class _Block(torch.autograd.Function):
    """(inputs, parameters) ↦ results, keeping no activation."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> Any:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(plan.run(tensors))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[1:]
        given = [c for c in cotangents if c is not None]
        at = [i for i, c in enumerate(cotangents) if c is not None]
        grads = iter(
            _BlockGradient.apply(  # type: ignore[no-untyped-call]
                ctx.plan, needed, at, *ctx.saved_tensors, *given
            )
        )
        return (None, *(next(grads) if wanted else None for wanted in needed))


class _BlockGradient(torch.autograd.Function):
    """(inputs, parameters, cotangents) ↦ their vector-Jacobian product, keeping no activation."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, needed: Sequence[bool], at: Sequence[int], *tensors: Tensor
    ) -> Any:
        ctx.plan, ctx.needed, ctx.at = plan, tuple(needed), tuple(at)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        fresh, cotangents = _split(tensors, ctx.needed)
        with torch.enable_grad():
            return _pulled(plan, fresh, ctx.needed, ctx.at, cotangents, create_graph=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *directions: Tensor | None) -> Any:
        fresh, cotangents = _split(ctx.saved_tensors, ctx.needed)
        wanted = ctx.needs_input_grad[3:]
        inputs = [*fresh, *(c.detach().requires_grad_(True) for c in cotangents)]
        asked = [i for i, w in enumerate(wanted) if w and inputs[i].requires_grad]
        with torch.enable_grad():
            grads = _pulled(
                ctx.plan, fresh, ctx.needed, ctx.at, inputs[len(fresh) :], create_graph=True
            )
            pairs = [
                (g, d)
                for g, d in zip(grads, directions, strict=True)
                if d is not None and g is not None and g.requires_grad
            ]
            gradients: Sequence[Tensor | None] = [None] * len(asked)
            if pairs and asked:
                gradients = torch.autograd.grad(
                    [g for g, _ in pairs],
                    [inputs[i] for i in asked],
                    [d for _, d in pairs],
                    allow_unused=True,
                )
        results: list[Tensor | None] = [None] * len(inputs)
        for i, value in zip(asked, gradients, strict=True):
            results[i] = value
        return (None, None, None, *results)


def _split(
    tensors: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[list[Tensor], Sequence[Tensor]]:
    """Fresh leaves for inputs and parameters, and the cotangents behind them."""
    count = len(needed)
    fresh = [t.detach().requires_grad_(wanted) for t, wanted in zip(tensors, needed, strict=False)]
    return fresh, tensors[count:]


def _pulled(
    plan: _Plan,
    fresh: Sequence[Tensor],
    needed: Sequence[bool],
    at: Sequence[int],
    cotangents: Sequence[Tensor],
    *,
    create_graph: bool,
) -> tuple[Tensor | None, ...]:
    results = plan.run(fresh)
    pairs = [
        (results[i], c) for i, c in zip(at, cotangents, strict=True) if results[i].requires_grad
    ]
    leaves = [t for t, wanted in zip(fresh, needed, strict=True) if wanted]
    if not pairs:
        return (None,) * len(leaves)
    return torch.autograd.grad(
        [r for r, _ in pairs],
        leaves,
        [c for _, c in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )
