"""A block that keeps its input and its output's adjoint, and is linearised anew when it is needed.

For models whose activations do not fit: a product then needs the memory of one block, its vectors
and a tangent between any two blocks. It costs two more forward passes, one backward pass and one
more push of the tangents: about twice the time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from curvatlas.engines.tangent.block import BlockTangent, FormedTangent, LinearisedBlock
from curvatlas.engines.tangent.linear import restart_numbers
from curvatlas.engines.tangent.structure import Weights


@dataclass
class RecomputedTangent:
    """One push through the block: what it was, to be made again."""

    output: Tensor | None  # (K, n, L, d)
    output_again: FormedTangent
    weights: Weights
    x_dot: Tensor | None
    directions: int


class RecomputedBlock:
    """The products of ``LinearisedBlock``, with ``make(x, weights)`` called for every one of them.

    All blocks of a chain share one workspace, so that its memory is that of the largest.
    """

    def __init__(self, make: Callable[[Tensor, Weights], LinearisedBlock], x: Tensor) -> None:
        self._make, self._x, self.shape = make, x, x.shape
        self._weights: Weights = {}
        self._delta: Tensor | None = None

    def attach(self, weights: Weights) -> None:
        """As ``LinearisedBlock.attach``."""
        self._weights = weights

    def detach(self) -> None:
        """As ``LinearisedBlock.detach``."""
        self._weights = {}

    def linearised(self) -> LinearisedBlock:
        """The block at its input."""
        restart_numbers()
        return self._make(self._x, self._weights)

    def gradient(
        self, delta: Tensor, *, wanted: Collection[str] | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """As ``LinearisedBlock.gradient``; the adjoint is kept."""
        self._delta = delta.clone()
        return self.linearised().gradient(delta, wanted=wanted)

    def push_checked(
        self,
        tangents: Weights,
        x_dot: Tensor | None,
        directions: int,
        x_dot_again: FormedTangent | None,
    ) -> RecomputedTangent:
        """As ``LinearisedBlock.push_checked``; nothing of the inside is kept."""
        kept = None if x_dot is None else x_dot.clone()
        state = self.linearised().push_checked(tangents, kept, directions, None)
        output = None if state.output is None else state.output.clone()
        tokens = None if output is None else output.flatten(1, 2)
        return RecomputedTangent(output, lambda _: tokens, tangents, kept, directions)

    def pull(
        self,
        rate: Tensor | None,
        tangent: RecomputedTangent | None = None,
        *,
        wanted: Collection[str] | None = None,
        needs_input: bool = True,
        into: Mapping[str, Tensor] | None = None,
        accumulate: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """As ``LinearisedBlock.pull``."""
        rate = None if rate is None else rate.clone()  # it may lie in the workspace
        block = self.linearised()
        state: BlockTangent | None = None
        if tangent is not None:
            assert self._delta is not None
            block.gradient(self._delta, wanted=())
            state = block.push_checked(tangent.weights, tangent.x_dot, tangent.directions, None)
        rates, back = block.pull(
            rate, state, wanted=wanted, needs_input=needs_input, into=into, accumulate=accumulate
        )
        return rates, None if back is None else back.clone()
