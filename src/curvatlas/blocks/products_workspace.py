"""Buffers that a sequence of products reuses.

A CPU allocation of a megabyte is a system call and hundreds of page faults: in the first version
of these products fresh outputs took 40 % of the time. A workspace hands out the same memory under
the same key again, product after product. Keys starting with a stage's own number live from the
way forward to the way back; the others are scratch shared by all stages of a stack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

_numbers = count()


def stage_number() -> str:
    """A name no other stage has, the prefix of its private buffers."""
    return f"{next(_numbers)}."


class Workspace:
    """Buffers by key; with ``keep=False`` every buffer is fresh and belongs to the caller."""

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self._buffers: dict[str, Tensor] = {}

    def take(self, key: str, *shape: int, like: Tensor) -> Tensor:
        """An uninitialised tensor; the same memory each time ``key`` asks for no more than before."""
        if not self.keep:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        size = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            self._buffers.pop(key, None)  # let the old one go before the new one comes
            buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:size].view(shape)

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
    turn: int = 0  # alternates from block to block: a result must not overwrite what it came from

    def slot(self, name: str, *shape: int, like: Tensor) -> Tensor:
        """The tensor that takes the rate of weight ``name``."""
        target = self.into.get(name)
        if target is None:
            target = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.found[name] = target
        return target
