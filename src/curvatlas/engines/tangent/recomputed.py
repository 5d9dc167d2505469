"""A block that keeps its input and its output's adjoint, and is linearised anew when it is needed.

For models whose activations do not fit: a product then needs the memory of one block, its vectors
and a tangent between any two blocks. It costs two more forward passes, one backward pass and one
more push of the tangents: about twice the time. ``PassingBlock`` needs the memory of all blocks for
the samples of one product, and costs one forward and one backward pass: a third more time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from curvatlas.engines.tangent.block import BlockTangent, FormedTangent, LinearisedBlock
from curvatlas.engines.tangent.linear import restart_numbers
from curvatlas.layers.structure import Weights


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
        self._forgotten: list[Tensor] = []

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
        block = self.linearised()
        slopes = block.gradient(delta, wanted=wanted)
        self._forgotten = block.reads_forgotten()
        return slopes

    def reads_forgotten(self) -> list[Tensor]:
        """As ``LinearisedBlock.reads_forgotten``, of the kept adjoint."""
        return self._forgotten

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


class PassingBlock(RecomputedBlock):
    """Linearised on the way up of a product, and let go of on the way down.

    The blocks of a chain are pushed in order behind one ``restart_numbers``.
    """

    _here: LinearisedBlock | None = None

    def attach(self, weights: Weights) -> None:
        super().attach(weights)
        if self._here is not None:
            self._here.attach(weights)

    def detach(self) -> None:
        super().detach()
        if self._here is not None:
            self._here.detach()

    def push_checked(  # type: ignore[override]
        self,
        tangents: Weights,
        x_dot: Tensor | None,
        directions: int,
        x_dot_again: FormedTangent | None,
    ) -> BlockTangent:
        """As ``LinearisedBlock.push_checked``."""
        self._here = self._make(self._x, self._weights)
        self._here.give_output()  # the next block has its own
        return self._here.push_checked(tangents, x_dot, directions, x_dot_again)

    def pull(  # type: ignore[override]
        self,
        rate: Tensor | None,
        tangent: BlockTangent | None = None,
        *,
        wanted: Collection[str] | None = None,
        needs_input: bool = True,
        into: Mapping[str, Tensor] | None = None,
        accumulate: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """As ``LinearisedBlock.pull``."""
        block = self._make(self._x, self._weights) if self._here is None else self._here
        self._here = None
        if tangent is not None:
            assert self._delta is not None
            block.gradient(self._delta, wanted=())
        return block.pull(
            rate, tangent, wanted=wanted, needs_input=needs_input, into=into, accumulate=accumulate
        )
