"""What an autograd graph holds: its memory, and nodes that would break a second derivative."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

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
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = node.name()
        if kind == "torch::autograd::Error":
            # It has no edges, so autograd would skip it and return zeros without a word.
            raise DifferentiationError(
                "an operation of the model has no second derivative (its backward is marked "
                "once_differentiable): replace it by plain PyTorch operations or use eager or sdpa "
                "attention instead of a fused kernel."
            )
        if isinstance(node, BackwardCFunction) and kind not in _TRUSTED:
            custom.add(kind)
        for tensor in _saved_tensors(node):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                tensors += 1
                storages[storage.data_ptr()] = storage.nbytes()
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return GraphSize(bytes=sum(storages.values()), tensors=tensors, custom=frozenset(custom))


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
