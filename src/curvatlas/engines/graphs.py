"""What an autograd graph holds and how it is walked back: its memory, nodes without a second
derivative, vector-Jacobian products of several cotangents at once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvatlas.errors import DifferentiationError
from curvatlas.files import in_memory
from curvatlas.problem import checkpointing, large_heads
from curvatlas.problem.kernels import unwatched


@dataclass(frozen=True, kw_only=True)
class GraphSize:
    """Bytes of the distinct storages a graph keeps alive, and how many tensors it saves."""

    bytes: int
    tensors: int
    custom: frozenset[str] = frozenset()  # hand-written torch.autograd.Function nodes
    runs_python: bool = False  # whether a pass through the graph calls a Function, ours too

    @property
    def mean_bytes(self) -> float:
        """Average size of a saved tensor: small ones are dominated by the cost of a call."""
        return self.bytes / max(self.tensors, 1)


# Our own nodes: tested against double backward, so that they need no probe by differences.
_TRUSTED = checkpointing.TRUSTED_NODES | large_heads.TRUSTED_NODES
_saved_names: dict[str, tuple[str, ...]] = {}


@unwatched
def graph_size(
    roots: Iterable[Tensor | GradientEdge | None], *, excluding: Iterable[Tensor] = ()
) -> GraphSize:
    """Size of everything reachable from ``roots`` backwards, without ``excluding``'s storages."""
    known = {t.untyped_storage().data_ptr() for t in excluding}
    storages: dict[int, int] = {}
    seen: set[Any] = set()
    nodes = [r.node if isinstance(r, GradientEdge) else r.grad_fn for r in roots if r is not None]
    stack: list[Any] = [node for node in nodes if node is not None]
    tensors = 0
    custom: set[str] = set()
    once: set[str] = set()  # of these, the ones marked once_differentiable
    refused = runs_python = overwritten = False
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = node.name()
        refused = refused or kind == "torch::autograd::Error"
        if kind == "torch::autograd::WarnNotImplemented":
            raise DifferentiationError(_without_formula(node))
        if isinstance(node, BackwardCFunction):
            runs_python = True
            if kind not in _TRUSTED:
                custom.add(kind)
                if _differentiable_once(node):
                    once.add(kind.removesuffix("Backward"))
        try:
            kept = _saved_tensors(node)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            kept, overwritten = [], True
        for tensor in (part for saved in kept for part in in_memory(saved)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                tensors += 1
                storages[storage.data_ptr()] = storage.nbytes()
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    if refused:
        # Such a node has no edges: autograd would skip it and return zeros without a word.
        named = f"{', '.join(sorted(once))}: " if once else ""
        raise DifferentiationError(
            f"{named}an autograd.Function marked once_differentiable has no second derivative: "
            "replace it by plain PyTorch operations, or write its backward in them and remove the "
            "mark."
        )
    if overwritten:
        named = ", ".join(sorted(kind.removesuffix("Backward") for kind in custom))
        who = f"the autograd.Function {named}" if custom else "the forward pass"
        raise DifferentiationError(
            f"{who} writes in place into a value that the second derivative needs: compute it out "
            "of place, x = x + y instead of x += y, or write into a clone."
        )
    return GraphSize(
        bytes=sum(storages.values()),
        tensors=tensors,
        custom=frozenset(custom),
        runs_python=runs_python,
    )


def _differentiable_once(node: Any) -> bool:
    """Whether the node's Function has a backward behind ``once_differentiable``."""
    backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
    place = getattr(backward, "__globals__", {}).get("__name__")
    return hasattr(backward, "__wrapped__") and place == once_differentiable.__module__


def _without_formula(node: Any) -> str:
    """What to say of an operator that drops gradients; torch names it in a warning only."""
    with warnings.catch_warnings(record=True) as said, contextlib.suppress(RuntimeError, TypeError):
        warnings.simplefilter("always")
        node(torch.zeros((), device="cpu"))
    names = [str(warning.message).split(": an autograd kernel")[0] for warning in said]
    return (
        f"the custom operator {names[0] if names else 'of torch.library'} has no derivative, and "
        "gradients through it are dropped: register one with torch.library.register_autograd, or "
        "call it on detached tensors where its result is a constant."
    )


def _saved_tensors(node: Any) -> list[Tensor]:
    kind = node.name()
    names = _saved_names.get(kind)
    if names is None:
        # dir() on a node costs 50 µs; once per kind of node is enough.
        names = tuple(n for n in dir(node) if n.startswith("_saved_") or n == "saved_tensors")
        _saved_names[kind] = names
    tensors: list[Tensor] = []
    for name in names:
        value = getattr(node, name, None)
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            tensors.extend(v for v in value if isinstance(v, Tensor))
    return tensors


Inputs = Sequence[Tensor] | Sequence[GradientEdge]


def edge_of(tensor: Tensor | None) -> GradientEdge | None:
    """Where a tensor stands in its graph: what products need of it, without its memory."""
    if tensor is None or tensor.grad_fn is None:
        return None
    return get_gradient_edge(tensor)


def pull(
    roots: Sequence[Tensor] | Sequence[GradientEdge],
    inputs: Inputs,
    cotangents: Sequence[Tensor],
    *,
    together: bool | None = None,
) -> list[Tensor | None]:
    """Jᵀ c for K cotangents: (K, *root) for each root → (K, *input) for each input, None: zero.

    together: all in one pass, RuntimeError where an operation has no batching rule; False: one by
    one; None: together where that is possible. The graph is kept.
    """
    chosen = [i for i, r in enumerate(roots) if getattr(r, "requires_grad", True)]  # edges: all do
    if not chosen:
        return [None] * len(inputs)
    outputs: Any = [roots[i] for i in chosen]
    seeds = [cotangents[i] for i in chosen]
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
