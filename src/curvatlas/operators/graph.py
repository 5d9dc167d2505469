"""What an autograd graph holds: its memory, and nodes that would break a second derivative."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable

from curvatlas.errors import DifferentiationError
from curvatlas.problem import checkpointing, chunked


@dataclass(frozen=True, kw_only=True)
class GraphSize:
    """Bytes of the distinct storages a graph keeps alive, and how many tensors it saves."""

    bytes: int
    tensors: int
    custom: frozenset[str] = frozenset()  # hand-written torch.autograd.Function nodes

    @property
    def mean_bytes(self) -> float:
        """Average size of a saved tensor: small ones are dominated by the cost of a call."""
        return self.bytes / max(self.tensors, 1)


# Our own nodes: tested against double backward, so that they need no probe by differences.
_TRUSTED = checkpointing.TRUSTED_NODES | chunked.TRUSTED_NODES
_saved_names: dict[str, tuple[str, ...]] = {}


def graph_size(roots: Iterable[Tensor | None], *, excluding: Iterable[Tensor] = ()) -> GraphSize:
    """Size of everything reachable from ``roots`` backwards, without ``excluding``'s storages."""
    known = {t.untyped_storage().data_ptr() for t in excluding}
    storages: dict[int, int] = {}
    seen: set[Any] = set()
    stack: list[Any] = [t.grad_fn for t in roots if t is not None and t.grad_fn is not None]
    tensors = 0
    custom: set[str] = set()
    once: set[str] = set()  # of these, the ones marked once_differentiable
    refused = False
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = node.name()
        refused = refused or kind == "torch::autograd::Error"
        if kind == "torch::autograd::WarnNotImplemented":
            raise DifferentiationError(_without_formula(node))
        if isinstance(node, BackwardCFunction) and kind not in _TRUSTED:
            custom.add(kind)
            if _differentiable_once(node):
                once.add(kind.removesuffix("Backward"))
        for tensor in _saved_tensors(node):
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
    return GraphSize(bytes=sum(storages.values()), tensors=tensors, custom=frozenset(custom))


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
    found: list[Tensor] = []
    for name in names:
        value = getattr(node, name, None)
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(v for v in value if isinstance(v, Tensor))
    return found
