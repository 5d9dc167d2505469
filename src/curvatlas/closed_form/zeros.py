"""Structural zeros: the chain of a block walked over {zero, not zero}."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from curvatlas.closed_form.blocks import Inputs, block_chain
from curvatlas.closed_form.chain import Bend, Diagonal, Linear, Map, Matrix, Scale, Symmetric, times
from curvatlas.closed_form.hessian import PairPart
from curvatlas.closed_form.maps import Keys, Moments, Normalise
from curvatlas.layers.checks import weight_shapes
from curvatlas.layers.structure import BlockSpec
from curvatlas.linear_operator import PARTS


class Pattern(Map):
    """Where a Jacobian can be different from zero: ones there. Sums of ones never cancel."""

    def __init__(self, ones: Tensor, *, cheap: bool) -> None:
        self.ones, self.cheap = ones, cheap

    def pull(self, rows: Matrix) -> Matrix:
        product = times(rows, self.ones.unsqueeze(0))
        assert product is not None
        return product


@functools.cache
def structural_zeros(
    spec: BlockSpec, names: tuple[str, ...], *, length: int
) -> dict[str, tuple[tuple[str, str], ...]]:
    """Blocks (a, b) of each part that vanish for every value of the weights; a not after b.

    The chain of the same block with every width 1 and every number that can differ from zero
    replaced by 1 is walked as it is: what comes out zero is zero by structure. ``length`` 1: one
    token attends to itself whatever the queries and keys are.
    """
    small = replace(
        spec,
        d_model=1,
        n_heads=1,
        n_kv_heads=None,
        d_k=1,
        d_v=1,
        d_ff=None if spec.d_ff is None else 1,
        eps=1.0,
    )
    weights = {
        name: torch.ones(shape, dtype=torch.float64)
        for name, shape in weight_shapes(small).items()
        if name in names
    }
    one = torch.ones(1, 1, dtype=torch.float64)
    hat = torch.ones(1, 1, 2, dtype=torch.float64)
    front = spec.norm_first and spec.residual
    inputs = Inputs(x=one, rows=one, front=front, keys=Keys(hat, hat))
    chain = block_chain(small, weights, inputs)
    attention, bent = _attention_pattern(spec, length)
    for node in chain.nodes:
        node.sources = tuple((x, _pattern(way, attention)) for x, way in node.sources)
        if node.bends is not None:
            node.bends = _ones_of(node.bends(one.expand(1, node.width)), attention, bent)
    for node in chain.nodes:
        node.consumers = [(y, way) for y in chain.nodes for x, way in y.sources if x is node]
    chain.leaves = [replace(leaf, alpha=torch.ones_like(leaf.alpha)) for leaf in chain.leaves]
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for part in PARTS:
        chain = chain.seeded(
            None if part == "functional" else one.unsqueeze(0), None if part == "outer" else one
        )
        present = {
            frozenset((left.name, right.name))
            for i, f in enumerate(chain.leaves)
            for g in chain.leaves[i:]
            for left in f.segments
            for right in g.segments
            if PairPart(chain.pair(f, g), f.activation, g.activation, left, right).present()
        }
        found[part] = tuple(
            (a, b)
            for i, a in enumerate(names)
            for b in names[i:]
            if frozenset((a, b)) not in present
        )
    return found


def _attention_pattern(spec: BlockSpec, length: int) -> tuple[Tensor, bool]:
    """∂m̂/∂θ̂, the constant coordinate last, and whether it bends.

    The row sum of A is 1 under softmax, and a number added to a whole row of logits changes
    nothing; turned by rotary positions a key's bias differs from key to key and does count.
    """
    ones = torch.ones(2, 2, dtype=torch.float64)
    if spec.softmax:
        if length == 1:
            return torch.zeros_like(ones), False
        ones[1] = 0.0
        if spec.rope_base is None:
            ones[:, 1] = 0.0
    return ones, spec.softmax


def _pattern(way: Map, attention: Tensor) -> Map:
    if isinstance(way, Moments):
        return Pattern(attention, cheap=False)
    if isinstance(way, Normalise):
        return Pattern(torch.ones(1, 1, dtype=torch.float64), cheap=True)
    if isinstance(way, Linear):
        return Pattern((way.weight != 0).double(), cheap=False)
    assert isinstance(way, Scale)
    return Scale(cheap=way.cheap)


def _ones_of(bends: list[Bend], attention: Tensor, bent: bool) -> Callable[[Tensor], list[Bend]]:
    """The same bends with ones for every Ψ."""
    ones: list[Bend] = []
    for x, y, bend in bends:
        if isinstance(bend, Symmetric):
            seen = attention[0] if bent else torch.zeros_like(attention[0])
            ones.append((x, y, (seen.unsqueeze(0) * seen.unsqueeze(1)).unsqueeze(0)))
        elif isinstance(bend, Diagonal):
            ones.append((x, y, Diagonal(torch.ones(1, x.width, dtype=torch.float64))))
        else:
            ones.append((x, y, torch.ones_like(bend)))
    return lambda delta: ones
