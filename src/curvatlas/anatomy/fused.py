"""Where the parts of a fused projection lie, once it is known what each output feature is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn


@dataclass(frozen=True)
class Part:
    """One role's output features: ``count`` runs of ``length``, ``stride`` apart."""

    role: str
    start: int
    length: int
    count: int = 1
    stride: int = 0


@dataclass(frozen=True)
class Heads:
    """What an attention module says of its heads; None where it says nothing."""

    count: int | None
    size: int | None


_COUNT = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead")
_SIZE = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head", "d_kv")


def heads_of(chain: list[nn.Module]) -> Heads:
    """Head count and size from the innermost module (or its config) that states them."""
    count = size = None
    for module in chain:
        for source in (module, getattr(module, "config", None)):
            count = count if count is not None else _integer(source, _COUNT)
            size = size if size is not None else _integer(source, _SIZE)
    return Heads(count, size)


def _integer(source: object, names: tuple[str, ...]) -> int | None:
    for name in names:
        try:
            value = getattr(source, name, None)
        except Exception:  # a configuration whose layers differ refuses to name one size
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def stacked(roles: Sequence[str], out: int) -> list[Part]:
    """All of the first role, then all of the second, …: equal parts."""
    size = out // len(roles)
    return [Part(role, i * size, size) for i, role in enumerate(roles)]


def parts_of(roles: Sequence[str]) -> list[Part] | None:
    """The regular runs of every role, in order of first appearance; None where they are irregular.

    roles: one for every output feature, "query", "query", …, "key", …
    """
    starts: dict[str, list[int]] = {}
    ends: dict[str, list[int]] = {}
    for place, role in enumerate(roles):
        if place == 0 or roles[place - 1] != role:
            starts.setdefault(role, []).append(place)
        if place == len(roles) - 1 or roles[place + 1] != role:
            ends.setdefault(role, []).append(place + 1)
    parts = []
    for role, first in starts.items():
        lengths = {b - a for a, b in zip(first, ends[role], strict=True)}
        strides = {b - a for a, b in pairwise(first)}
        if len(lengths) > 1 or len(strides) > 1:
            return None
        stride = strides.pop() if strides else 0
        parts.append(Part(role, first[0], lengths.pop(), len(first), stride))
    return parts
