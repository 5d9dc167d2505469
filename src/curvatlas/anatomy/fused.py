"""How fused projections are laid out: known families by a table, others by experiment.

Three layouts exist of out = (query, key, value) along the output features:
  stacked    all queries, then all keys, then all values (torch, GPT-2, timm, Phi-3, …)
  per_head   head by head, each [query; key; value] (GPT-NeoX, BLOOM)
  per_group  group by group, each [its queries; key; value] (Falcon)
A fused parameter we cannot be sure of stays in one piece.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """One role's output features: ``count`` runs of ``length``, ``stride`` apart."""

    role: str
    start: int
    length: int
    count: int = 1
    stride: int = 0

    def features(self) -> Tensor:
        runs = self.start + self.stride * torch.arange(self.count)
        return (runs[:, None] + torch.arange(self.length)).reshape(-1)


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
        value = getattr(source, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def stacked(out: int, heads: Heads) -> list[Part] | None:
    """[q; k; v]; with grouped queries q is longer, k and v share the rest."""
    query = out // 3
    if heads.count and heads.size:
        query = heads.count * heads.size
    if (out - query) % 2 or out <= query:
        return None
    shared = (out - query) // 2
    if shared != query and (heads.size is None or shared % heads.size):
        return None
    return [
        Part("query", 0, query),
        Part("key", query, shared),
        Part("value", query + shared, shared),
    ]


def per_head(out: int, heads: Heads) -> list[Part] | None:
    """[q₁; k₁; v₁; q₂; k₂; v₂; …]."""
    if not heads.count or out % (3 * heads.count):
        return None
    size = out // (3 * heads.count)
    return [
        Part(role, i * size, size, heads.count, 3 * size)
        for i, role in enumerate(("query", "key", "value"))
    ]


def per_group(out: int, heads: Heads) -> list[Part] | None:
    """[q₁…q_m; k₁; v₁; …] with m queries to a key/value head."""
    if not heads.count or not heads.size:
        return None
    groups = (out // heads.size - heads.count) // 2
    if groups < 1 or heads.count % groups:
        return None
    many, size = heads.count // groups, heads.size
    stride = (many + 2) * size
    return [
        Part("query", 0, many * size, groups, stride),
        Part("key", many * size, size, groups, stride),
        Part("value", (many + 1) * size, size, groups, stride),
    ]


Layout = Callable[[int, Heads], list[Part] | None]

# class name of the attention → layout, as read in (and tested against) each implementation
_KNOWN: tuple[tuple[str, Layout], ...] = (
    (r"^MultiheadAttention$|^GPT2|^Phi3|^Phi4|^Mpt|^Dbrx|^ModernBert|^ImageGPT|^DecisionTransformer",
     stacked),
    (r"^GPTNeoX(?!Japanese)|^Bloom|^Persimmon", per_head),
)  # fmt: skip


def query_key_value(
    attention: nn.Module, leaf: nn.Module, leaf_name: str, out: int, heads: Heads
) -> tuple[list[Part] | None, str | None]:
    """Parts of a fused projection, and a note when they rest on convention only."""
    kind = type(attention).__name__
    if kind.startswith("Falcon"):
        if getattr(attention, "new_decoder_architecture", False):
            return per_group(out, heads), None
        many = getattr(attention, "multi_query", False)
        return (stacked if many else per_head)(out, heads), None
    for pattern, layout in _KNOWN:
        if re.search(pattern, kind):
            return layout(out, heads), None
    if not isinstance(leaf, nn.Linear):
        return None, None
    candidates = [layout(out, heads) for layout in (stacked, per_head, per_group)]
    verdict = _probe(attention, leaf_name, leaf.in_features, [c for c in candidates if c])
    if verdict is not None:
        return verdict or None, None
    if leaf_name.lower() == "query_key_value":  # both layouts are common under this name
        return None, None
    note = f"{kind}.{leaf_name} is read as [query; key; value]; it could not be tried out"
    return candidates[0], note if candidates[0] else None


def halves(first: str, second: str, out: int) -> list[Part] | None:
    """Two equal parts, [key; value] or [gate; up]."""
    if out % 2:
        return None
    return [Part(first, 0, out // 2), Part(second, out // 2, out // 2)]


@torch.no_grad()
def _probe(
    attention: nn.Module, leaf_name: str, width: int, candidates: list[list[Part]]
) -> list[Part] | None:
    """Find the layout by experiment on a copy: the candidate that behaves like attention.

    With its values zeroed an attention gives the same output whatever it is fed; adding one vector
    to all keys changes nothing (softmax ignores it), adding it to the queries does. Returns the
    candidate, [] when none behaves, None when the module cannot be called with one tensor.
    """
    try:
        twin = copy.deepcopy(attention).eval()
        leaf = twin.get_submodule(leaf_name)
        weight = next(leaf.parameters())
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(2, 5, width, generator=draw).to(weight)
        plain = _run(twin, x)
    except Exception:  # any signature, any failure: it cannot be tried out, and that is the answer
        return None
    scale = float((plain - plain.mean((0, 1))).abs().max())
    if not scale > 0:
        return None

    def effect(edit: Callable[[Tensor], Tensor], *, spread: bool) -> float:
        handle = leaf.register_forward_hook(lambda module, inputs, output: edit(output.clone()))
        try:
            changed = _run(twin, x)
        finally:
            handle.remove()
        difference = changed - (changed.mean((0, 1)) if spread else plain)
        return float(difference.abs().max()) / scale

    def zero(part: Part) -> Callable[[Tensor], Tensor]:
        return lambda output: output.index_fill(-1, part.features().to(output.device), 0.0)

    def shift(part: Part) -> Callable[[Tensor], Tensor]:
        vector = torch.randn(part.length * part.count, generator=draw).to(weight)
        features = part.features().to(weight.device)
        return lambda output: output.index_add(-1, features, vector.expand(*output.shape[:-1], -1))

    tolerance = 1e3 * torch.finfo(weight.dtype).eps
    for parts in candidates:
        query, key, value = parts
        if effect(zero(value), spread=True) > tolerance:
            continue
        if effect(shift(key), spread=False) > tolerance >= effect(shift(query), spread=False):
            continue  # query and key the other way round
        return parts
    return []


def _run(module: nn.Module, x: Tensor) -> Tensor:
    result = module(x)
    tensor = result[0] if isinstance(result, (tuple, list)) else result
    if not isinstance(tensor, Tensor) or tensor.shape[:2] != x.shape[:2]:
        raise TypeError("not a map of tokens")
    return tensor
