"""The rows and columns of the atlas: roles of every layer, cut finer or coarser on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.anatomy import Anatomy, Slice

VIEWS = ("block", "role", "layer", "sublayer", "model")


@dataclass(frozen=True, kw_only=True)
class Block:
    """Entries of the flat vector that make one row and one column of the map."""

    name: str  # "blocks.0.query", "embedding.token", "blocks.1.value.head2", …
    role: str  # the name without its layer: "query", "norm1.gamma", "embedding.token"
    layer: str  # "layer 0", or "embedding", "final_norm", "head" for what has no layer
    sublayer: str
    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.slices)

    @property
    def indices(self) -> Tensor:
        """Positions in the flat vector, (size,) int64."""
        return torch.cat([piece.indices for piece in self.slices])

    def label(self, view: str) -> str:
        """The group this block belongs to in one of ``VIEWS``."""
        return {
            "block": self.name,
            "role": self.role,
            "layer": self.layer,
            "sublayer": self.sublayer,
            "model": "model",
        }[view]


def blocks_of(
    anatomy: Anatomy, *, by: str = "role", heads: bool = False, biases: bool = True
) -> tuple[Block, ...]:
    """One block a slice of the anatomy, in its order.

    by: "role", or "sublayer" and "layer" for coarser blocks of deep models.
    heads: cut query, key, value and output into one block a head.
    biases: False counts a bias with the weight of the same linear map.
    """
    if by not in ("role", "sublayer", "layer"):
        raise ValueError(f"by is 'role', 'sublayer' or 'layer', got {by!r}.")
    if by != "role":
        return _coarse(anatomy, by)
    groups: dict[str, list[Slice]] = {}
    known = set(anatomy.names)
    for piece in anatomy.slices:
        for part in _heads_of(anatomy, piece) if heads else [piece]:
            name = part.name
            if not biases:
                name = _weight_of(part.name, known, heads=heads)
            groups.setdefault(name, []).append(part)
    return tuple(_block(name, slices) for name, slices in groups.items())


def _coarse(anatomy: Anatomy, by: str) -> tuple[Block, ...]:
    """One block a layer, or a sublayer of a layer; what has no layer goes by its place.

    A place outside the layers may hold several sublayers (the token table and the norm of BERT's
    embeddings): the one it is named after keeps its name, the others are added to it
    ("embedding", "embedding.norm").
    """
    groups: dict[tuple[str, str], list[Slice]] = {}
    for piece in anatomy.slices:
        own = _block(piece.name, [piece])
        groups.setdefault((own.layer, own.sublayer if by == "sublayer" else ""), []).append(piece)
    sublayers = Counter(layer for layer, _ in groups)
    blocks = []
    for (layer, sublayer), slices in groups.items():
        outside = slices[0].layer is None
        place = layer if outside else f"blocks.{slices[0].layer}"
        alone = outside and (sublayers[layer] == 1 or sublayer == layer)
        name = place if alone or not sublayer else f"{place}.{sublayer}"
        blocks.append(
            Block(
                name=name,
                role=layer if not sublayer else name if outside else sublayer,
                layer=layer,
                sublayer=sublayer or "all",
                slices=tuple(slices),
            )
        )
    return tuple(blocks)


def _heads_of(anatomy: Anatomy, piece: Slice) -> Sequence[Slice]:
    try:
        return anatomy.heads(piece)
    except ValueError:
        return [piece]  # embeddings, norms, feed-forward parts have no heads


def _weight_of(name: str, known: set[str], *, heads: bool) -> str:
    """The weight that a bias belongs to: "query_bias" → "query", "head.bias" → "head.weight"."""
    stem, dot, last = name.rpartition(".")
    head = ""
    if heads and last.startswith("head") and last[4:].isdigit():
        head, (stem, dot, last) = f".{last}", stem.rpartition(".")
    for weight in (
        last.removesuffix("_bias"),
        "weight" if last == "bias" else last,
        last.removesuffix("_bias") + "_weight",
    ):
        candidate = f"{stem}{dot}{weight}"
        if weight != last and candidate in known:
            return candidate + head
    return name


def _block(name: str, slices: Sequence[Slice]) -> Block:
    first = slices[0]
    prefix = f"blocks.{first.layer}."
    if first.layer is None:
        role, layer = name, name.partition(".")[0]
    else:
        role = name.removeprefix(prefix) if name.startswith(prefix) else first.role
        layer = f"layer {first.layer}"
    return Block(
        name=name, role=role, layer=layer, sublayer=first.sublayer, slices=tuple(slices)
    )  # fmt: skip


def groups_of(blocks: Sequence[Block], view: str) -> dict[str, list[int]]:
    """Label → places of its blocks, in order of first appearance."""
    if view not in VIEWS:
        raise ValueError(f"a view is one of {', '.join(map(repr, VIEWS))}, got {view!r}.")
    groups: dict[str, list[int]] = {}
    for place, block in enumerate(blocks):
        groups.setdefault(block.label(view), []).append(place)
    return groups
