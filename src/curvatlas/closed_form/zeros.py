"""Structural zeros: the chain of a block walked over {zero, not zero}."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvatlas.closed_form.blocks import Inputs, block_chain
from curvatlas.closed_form.chain import Bend, Bends, Diagonal, Map
from curvatlas.closed_form.maps import Attend, Keys, Moment, Normalise
from curvatlas.layers.checks import weight_shapes
from curvatlas.layers.structure import BlockSpec
from curvatlas.linear_operator import PARTS


@functools.cache
def structural_zeros(
    spec: BlockSpec, names: tuple[str, ...], *, length: int
) -> dict[str, tuple[tuple[str, str], ...]]:
    """Blocks (a, b) of each part that vanish for every value of the weights; a not after b.

    The chain of the same block with every width 1 and every number that can differ from zero
    replaced by 1 is walked as it is: what comes out zero is zero by structure, since sums of ones
    never cancel. ``length`` 1: one token attends to itself whatever the queries and keys are.
    """
    hidden = None if spec.d_ff is None else 1
    widths: dict[str, Any] = {
        "d_model": 1,
        "n_heads": 1,
        "n_kv_heads": None,
        "d_k": 1,
        "d_v": 1,
        "d_ff": hidden,
    }
    small = replace(spec, eps=1.0, **widths)
    shapes = weight_shapes(small)
    weights = {name: torch.ones(shapes[name], dtype=torch.float64) for name in names}
    one = torch.ones(1, 1, dtype=torch.float64)
    tokens = torch.ones(
        1, 1, 1 if spec.softmax and spec.rope_base is None else 2, dtype=torch.float64
    )
    keys = Keys(tokens, tokens) if "query_weight" in names else None
    chain = block_chain(small, weights, Inputs(x=one, rows=one, keys=keys))
    attention, bent = _attention(spec, length)
    for node in chain.nodes:
        node.sources = tuple((x, _pattern(way, attention)) for x, way in node.sources)
        if node.bends is not None:
            node.bends = _ones_of(node.bends(one.expand(1, node.width)), bent)
    for node in chain.nodes:
        node.consumers = [(y, way) for y in chain.nodes for x, way in y.sources if x is node]
    chain.leaves = [replace(leaf, alpha=torch.ones_like(leaf.alpha)) for leaf in chain.leaves]
    zeros: dict[str, tuple[tuple[str, str], ...]] = {}
    for part in PARTS:
        lam, delta = None if part == "functional" else one[None], None if part == "outer" else one
        pairs = chain.seeded(lam, delta).pairs()
        present = {frozenset((pair.f.name, pair.g.name)) for pair in pairs if pair.present}
        both = ((a, b) for i, a in enumerate(names) for b in names[i:])
        zeros[part] = tuple(pair for pair in both if frozenset(pair) not in present)
    return zeros


def _attention(spec: BlockSpec, length: int) -> tuple[Tensor, bool]:
    """∂m̂/∂θ̂, the constant coordinate last where there is one, and whether it bends.

    The row sum of A is 1 under softmax, and a number added to a whole row of logits changes
    nothing; turned by rotary positions a key's bias differs from key to key and does count.
    """
    if not spec.softmax:
        return torch.ones(1, 2, 2, dtype=torch.float64), False
    ones = torch.ones(1, 1, 1, dtype=torch.float64)
    if spec.rope_base is not None:
        ones = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]], dtype=torch.float64)
    return ones * (length > 1), length > 1


def _pattern(way: Map, attention: Tensor) -> Map:
    if isinstance(way, Attend):
        return Map(attention)
    if isinstance(way, Normalise):
        return Map(Diagonal(attention.new_ones(1, 1)))
    if isinstance(way.matrix, Diagonal):
        return Map(Diagonal(torch.ones_like(way.matrix.values)))
    return Map((way.matrix != 0).double())


def _ones_of(bends: Bends, bent: bool) -> Callable[[Tensor], Bends]:
    """The same bends with ones for every Ψ."""
    ones: Bends = []
    for x, y, bend in bends:
        if isinstance(bend.matrix, Diagonal):
            ones.append((x, y, Bend(Diagonal(torch.ones_like(bend.matrix.values)))))
        elif bent or not isinstance(bend, Moment):
            ones.append((x, y, Bend(torch.ones_like(bend.matrix))))
    return lambda delta: ones
