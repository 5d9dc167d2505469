"""Buffers that a sequence of products reuses.

A CPU allocation of a megabyte is a system call and hundreds of page faults: in the first version
of these products fresh outputs took 40 % of the time. A workspace hands out the same memory under
the same key again, product after product. Keys starting with a stage's own number live from the
way forward to the way back; the others are scratch shared by all stages of a stack ("wide" by
attention and feed-forward, which never run at the same time).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

_local = threading.local()


def restart_numbers() -> None:
    """Begin a new chain of stages in this thread."""
    _local.numbers = count()


def stage_number() -> str:
    """A name no other stage of its chain has, the prefix of its private buffers."""
    if not hasattr(_local, "numbers"):
        restart_numbers()
    return f"{next(_local.numbers)}."


def adjoining(parts: Sequence[Tensor], axis: int) -> Tensor | None:
    """Tensors that follow each other in memory as one, along ``axis``; None when they do not."""
    first, inner = parts[0], parts[0].stride()[axis:]
    end, length = first.storage_offset(), 0
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        same = part.stride()[axis:] == inner and part.shape[axis + 1 :] == first.shape[axis + 1 :]
        packed = part[0].is_contiguous() if axis else part.is_contiguous()
        rows = axis == 0 or part.shape[0] == 1 or part.stride(0) == first.stride(0)
        if not (same and packed and rows and part.storage_offset() == end):
            return None
        if part.untyped_storage().data_ptr() != storage:
            return None
        end += part.numel() // (part.shape[0] if axis else 1)
        length += part.shape[axis]
    shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
    return first.as_strided(shape, first.stride())


class Workspace:
    """Buffers by key; with ``keep=False`` every buffer is fresh and belongs to the caller."""

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, key: str, *shape: int, like: Tensor) -> Tensor:
        """An uninitialised tensor; the same memory while ``key`` asks for no more than before."""
        if not self.keep:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        view = self._views.get((key, shape))
        if view is None:
            view = self._grow(key, math.prod(shape), like).view(shape)
            self._views[key, shape] = view
        return view

    def _grow(self, key: str, size: int, like: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            # let the old memory go, with every view of it, before the new one comes
            self._views = {k: v for k, v in self._views.items() if k[0] != key}
            self._buffers.pop(key, None)
            buffer = None
            buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:size]

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())


@dataclass
class Way:
    """One way back through the stages: what to find, where to put it, whether to keep adjoints."""

    space: Workspace
    wanted: frozenset[str]
    into: Mapping[str, Tensor] = field(default_factory=dict)  # name → (K, *shape) to write to
    found: dict[str, Tensor] = field(default_factory=dict)
    record: bool = False
    accumulate: bool = False  # add to what ``into`` holds instead of replacing it
    turn: int = 0  # alternates from block to block: a result must not overwrite what it came from

    def wants(self, names: Sequence[str]) -> bool:
        """Whether the weights of one layer are wanted."""
        return bool(names) and names[0] in self.wanted

    def sums(self, name: str, terms: Tensor) -> None:
        """The rate of a bias or gain: the sum of ``terms`` (K, N, d) over the tokens."""
        self.give([name], [terms.shape[-1]], terms.sum(1))

    def give(self, names: Sequence[str], sizes: Sequence[int], rate: Tensor) -> None:
        """Take the rates (K, Σ sizes, …) of weights that lie side by side."""
        pieces = [rate] if len(names) == 1 else torch.split(rate, list(sizes), 1)
        for name, piece in zip(names, pieces, strict=True):
            target = self.into.get(name)
            if target is None:
                self.found[name] = piece
                continue
            target.add_(piece) if self.accumulate else target.copy_(piece)
            self.found[name] = target

    def room(self, names: Sequence[str]) -> Tensor | None:
        """Where the rates of these weights may be written at once; None: ``give`` them after."""
        parts = [self.into[name] for name in names if name in self.into]
        whole = adjoining(parts, 1) if parts and len(parts) == len(names) else None
        if whole is not None:
            self.found.update(zip(names, parts, strict=True))
        return whole
