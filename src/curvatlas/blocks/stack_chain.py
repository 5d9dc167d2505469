"""The blocks of a stack at some samples of a batch, one after the other.

Samples do not see each other, so a batch may go through in several chains: their activations are
kept side by side, but the tangents of a product are needed for one chain at a time and share their
buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvatlas.blocks.losses import (
    LinearHeadCrossEntropy,
    Loss,
    MeanSquaredError,
    PooledCrossEntropy,
    Seeds,
    TokenCrossEntropy,
)
from curvatlas.blocks.products import BlockTangent, LinearisedBlock
from curvatlas.blocks.products_head import LinearisedReadout, Readout, ReadoutTangent
from curvatlas.blocks.products_workspace import Way, Workspace, restart_numbers
from curvatlas.blocks.structure import BlockSpec, Weights
from curvatlas.precision import in_float64

READOUT = -1  # the group of the readout's weights; block i is group i
Groups = dict[int, dict[str, Tensor]]


class Chain:
    """Blocks and readout at x (n, L, d), every stage linearised."""

    def __init__(
        self,
        blocks: Sequence[tuple[BlockSpec, Weights]],
        readout: Readout,
        x: Tensor,
        *,
        mask: Tensor | None,
        space: Workspace,
    ) -> None:
        restart_numbers()  # chains that share a workspace share their stages' buffers in it
        self.space = space
        self.blocks: list[LinearisedBlock] = []
        z, again = x, None
        for index, (spec, weights) in enumerate(blocks):
            block = LinearisedBlock(
                spec, weights, z, mask, space=space, turn=index % 2, x_again=again
            )
            if self.blocks and block.sublayers[0].normalizes_input:
                self.blocks[-1].sublayers[-1].forget_output()
            self.blocks.append(block)
            z, again = block.give_output(), block.sublayers[-1].output_again
        self.blocks[-1].sublayers[-1].forget_output()  # the readout asks for it at once
        self.readout = LinearisedReadout(readout, z.flatten(0, 1), samples=x.shape[0])
        self.output = self.readout.output  # (n, L or 1, C)
        self._seeds: Seeds | None = None
        self._weight: Tensor | None = None  # None: these samples are the whole batch

    def record(self, seeds: Seeds, weight: Tensor | None) -> None:
        """Take the loss of these samples, ``weight`` of the whole; let every stage keep δ."""
        self._seeds, self._weight = seeds, weight
        way = Way(Workspace(keep=False), frozenset(), record=True)
        rate = self.readout.pull(self.delta, None, way)
        for block in reversed(self.blocks):
            assert rate is not None
            _, delta_x = block.gradient(rate[0], wanted=())
            rate = delta_x.view(1, -1, delta_x.shape[-1])

    @property
    def delta(self) -> Tensor:
        """∂ℓ/∂Z (1, n·L, C)."""
        assert self._seeds is not None
        return self._share(self._seeds.delta).reshape(1, -1, self.output.shape[-1])

    def curvature(self, moved: Tensor) -> Tensor:
        """Λ of the loss times the outputs' tangent (K, n·L, C)."""
        assert self._seeds is not None
        rate = self._seeds.product(moved.view(-1, *self.output.shape))
        return self._share(rate).reshape(moved.shape)

    def _share(self, value: Tensor) -> Tensor:
        return value if self._weight is None else value * self._weight

    def push(
        self, tangents: Groups, x_dot: Tensor | None
    ) -> tuple[list[BlockTangent | None], ReadoutTangent]:
        """J v through every block; ``x_dot`` (K, n, L, d)."""
        moved, again, states = x_dot, None, []
        directions = 0 if x_dot is None else x_dot.shape[0]
        for dots in tangents.values():
            directions = next(iter(dots.values())).shape[0]
        for index, block in enumerate(self.blocks):
            dots = tangents.get(index, {})
            state: BlockTangent | None = None
            if moved is not None or dots:
                state = block.push_checked(dots, moved, directions, again)
                moved, again = state.output, state.output_again
            states.append(state)
        flat = None if moved is None else moved.flatten(1, 2)
        return states, self.readout.push(flat, tangents.get(READOUT, {}), self.space)

    def pull_readout(
        self,
        rate: Tensor | None,
        tangent: ReadoutTangent | None,
        into: dict[str, Tensor],
        *,
        accumulate: bool,
    ) -> Tensor | None:
        """Rδ of the last block's output; fills ``into`` or adds to it."""
        way = Way(self.space, frozenset(into), into, accumulate=accumulate)
        rate = self.readout.pull(rate, tangent, way)
        for name, slot in into.items():
            if name not in way.found and not accumulate:
                slot.zero_()
        return rate

    def pull_block(
        self,
        index: int,
        rate: Tensor | None,
        tangent: BlockTangent | None,
        into: dict[str, Tensor],
        *,
        needs_input: bool,
        accumulate: bool,
    ) -> Tensor | None:
        """Rδ of the input (K, n·L, d) from that of the output; fills ``into`` or adds to it."""
        block = self.blocks[index]
        shaped = None if rate is None else rate.view(rate.shape[0], *block.shape)
        _, back = block.pull(
            shaped,
            tangent,
            wanted=into,
            needs_input=needs_input,
            into=into,
            accumulate=accumulate,
        )
        return None if back is None else back.flatten(1, 2)


def with_sample_axis(targets: Tensor, readout: Readout) -> Tensor:
    """After a pooling one target a sample may come as (n,) or (n, C): add the axis of length 1."""
    axes = 2 if targets.is_floating_point() else 1
    return targets.unsqueeze(1) if readout.pooling and targets.ndim == axes else targets


def mask_of(mask: Tensor | None, samples: slice, count: int) -> Tensor | None:
    """The mask of some of ``count`` samples; a mask common to all has no axis for them."""
    if mask is None or mask.shape[0] != count or (mask.ndim == 2 and mask.dtype != torch.bool):
        return mask
    return mask[samples]


def shares(loss: Loss, targets: Tensor, samples: Sequence[slice]) -> list[Tensor] | None:
    """Each part's weight in the mean over the batch, or None when the loss is not such a mean.

    Cross-entropy weighs by valid targets; a part without any cannot be taken alone.
    """
    kind = type(loss)
    if kind is MeanSquaredError or (kind is PooledCrossEntropy and loss.token_weights is None):  # type: ignore[attr-defined]
        counts = [torch.tensor(float(targets[part].shape[0])) for part in samples]
    elif kind in (TokenCrossEntropy, LinearHeadCrossEntropy):
        ignored = loss.ignore_index  # type: ignore[attr-defined]
        counts = [(targets[part] != ignored).sum() for part in samples]
    else:
        return None
    total = torch.stack([in_float64(count) for count in counts])
    if bool((total == 0).any()):
        return None
    return list(total / total.sum())
