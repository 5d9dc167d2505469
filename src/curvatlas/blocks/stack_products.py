"""A stack at one batch: its loss, gradient and products with its Hessian."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvatlas.blocks.products import PARTS, BlockTangent, Part
from curvatlas.blocks.products_attention import with_joint_projections
from curvatlas.blocks.products_head import ReadoutTangent
from curvatlas.blocks.products_workspace import Workspace
from curvatlas.blocks.stack_chain import (
    READOUT,
    Chain,
    mask_of,
    shares,
    with_sample_axis,
)
from curvatlas.blocks.structure import BlockSpec

if TYPE_CHECKING:
    from curvatlas.blocks.stack import BlockStack

INPUT = "input"


class LinearisedStack:
    """A stack at one batch; see ``BlockStack.linearise``."""

    def __init__(
        self,
        stack: BlockStack,
        x: Tensor,
        targets: Tensor,
        *,
        mask: Tensor | None,
        include_input: bool,
        include_weights: bool,
        parts: int | None,
    ) -> None:
        if not (include_input or include_weights):
            raise ValueError("nothing to differentiate: include the weights, the input or both.")
        x = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach()
        mask = mask.unsqueeze(0) if mask is not None and mask.ndim == 1 else mask
        targets = with_sample_axis(targets, stack.readout)
        self.include_input = include_input
        self.space = Workspace(keep=True)
        self._layout(stack, x, include_weights)
        self._samples, weights = self._parts(stack, x, targets, parts)
        joint = [with_joint_projections(weights) for weights in stack.weights]
        blocks = list(zip(stack.specs, joint, strict=True))
        self.chains: list[Chain] = []
        values: list[Tensor] = []
        for samples, weight in zip(self._samples, weights, strict=True):
            part = mask_of(mask, samples, len(x))
            chain = Chain(blocks, stack.readout, x[samples], mask=part, space=self.space)
            seeds = stack.loss.seeds(chain.output, targets[samples])
            values.append(seeds.value if weight is None else weight * seeds.value)
            if not bool(torch.isfinite(seeds.value)):
                raise ValueError(f"the loss is {float(seeds.value)}: no derivative is defined.")
            chain.record(seeds, weight)
            self.chains.append(chain)
        self.value: Tensor = torch.stack(values).sum()

    def _layout(self, stack: BlockStack, x: Tensor, include_weights: bool) -> None:
        """Names, shapes and places of the flat vector's pieces."""
        named = stack.named_weights if include_weights else {}
        self._shapes = {name: tuple(weight.shape) for name, weight in named.items()}
        if self.include_input:
            self._shapes[INPUT] = tuple(x.shape)
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self._groups: dict[int, list[_Piece]] = {}
        start = 0
        for (name, shape), size in zip(self._shapes.items(), self._sizes, strict=True):
            if name != INPUT:
                group, _, weight = name.rpartition(".")
                index = READOUT if group == "readout" else int(group.removeprefix("blocks."))
                self._groups.setdefault(index, []).append((weight, shape, start, start + size))
            start += size

    @staticmethod
    def _parts(
        stack: BlockStack, x: Tensor, targets: Tensor, parts: int | None
    ) -> tuple[list[slice], list[Tensor | None]]:
        """Runs of samples that go through together, and each one's share of the loss."""
        whole: tuple[list[slice], list[Tensor | None]] = [slice(0, len(x))], [None]
        count = default_parts(stack.specs, x) if parts is None else parts
        if count < 1 or (parts is not None and count > len(x)):
            raise ValueError(f"parts must be between 1 and the {len(x)} samples, got {count}.")
        if count == 1 or targets.shape[:1] != x.shape[:1]:
            return whole
        step = -(-len(x) // count)
        samples = [slice(i, min(i + step, len(x))) for i in range(0, len(x), step)]
        weights = shares(stack.loss, targets, samples)
        return whole if weights is None else (samples, [w.to(x) for w in weights])

    @property
    def names(self) -> tuple[str, ...]:
        """The pieces of the flat vector, in order."""
        return tuple(self._shapes)

    @property
    def shape(self) -> tuple[int, int]:
        size = sum(self._sizes)
        return size, size

    @property
    def dtype(self) -> torch.dtype:
        return self.chains[0].output.dtype

    @property
    def output(self) -> Tensor:
        """The outputs (n, L, C), or (n, 1, C) after a pooling."""
        if len(self.chains) == 1:
            return self.chains[0].output
        return torch.cat([chain.output for chain in self.chains])

    def __matmul__(self, columns: Tensor) -> Tensor:
        return self.product(columns)

    def product(self, v: Tensor, *, part: Part = "total") -> Tensor:
        """H v, H_o v or H_f v for v (P,) or columns (P, K)."""
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}.")
        rows = self._rows(v)
        flat = torch.empty_like(rows)
        tangents = {index: _views(rows, pieces) for index, pieces in self._groups.items()}
        for number, chain in enumerate(self.chains):
            states, readout = chain.push(tangents, self._input(rows, number))
            rate = None
            if part != "functional" and readout.output is not None:
                rate = chain.curvature(readout.output)
            curved = part != "outer"
            self._pull(number, rate, states if curved else None, readout if curved else None, flat)
        return flat[0] if v.ndim == 1 else flat.T

    @cached_property
    def gradient(self) -> Tensor:
        """∂ℓ/∂θ (P,), by one way back when first asked for."""
        flat = self.chains[0].output.new_empty(1, sum(self._sizes))
        for number, chain in enumerate(self.chains):
            self._pull(number, chain.delta, None, None, flat)
        return flat[0]

    def jacobian_product(self, v: Tensor) -> Tensor:
        """J v: (P,) → the outputs' shape (n, L, C), or (P, K) → (K, n, L, C)."""
        rows = self._rows(v)
        tangents = {index: _views(rows, pieces) for index, pieces in self._groups.items()}
        outputs = []
        for number, chain in enumerate(self.chains):
            shape = (rows.shape[0], *chain.output.shape)
            moved = chain.push(tangents, self._input(rows, number))[1].output
            outputs.append(rows.new_zeros(shape) if moved is None else moved.view(shape).clone())
        shaped = torch.cat(outputs, 1)
        return shaped[0] if v.ndim == 1 else shaped

    def split(self, v: Tensor) -> dict[str, Tensor]:
        """A flat vector (P,) as named pieces in their own shapes (views)."""
        self._check_vector(v)
        pieces = torch.split(v, self._sizes)
        return {
            name: piece.view(*shape, *v.shape[1:])
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    def _pull(
        self,
        number: int,
        rate: Tensor | None,
        states: list[BlockTangent | None] | None,
        readout: ReadoutTangent | None,
        flat: Tensor,
    ) -> None:
        """One chain's way back: writes (the first chain) or adds its share to ``flat`` (K, P)."""
        chain = self.chains[number]
        into, more = _views(flat, self._groups.get(READOUT, [])), number > 0
        rate = chain.pull_readout(rate, readout, into, accumulate=more)
        for index in reversed(range(len(chain.blocks))):
            rate = chain.pull_block(
                index,
                rate,
                None if states is None else states[index],
                _views(flat, self._groups.get(index, [])),
                needs_input=index > 0 or self.include_input,
                accumulate=more,
            )
        if self.include_input:
            target = self._input(flat, number)
            assert target is not None
            target.zero_() if rate is None else target.copy_(rate.view(target.shape))

    def _rows(self, v: Tensor) -> Tensor:
        """(P,) or (P, K) → (K, P)."""
        self._check_vector(v)
        return v.detach().unsqueeze(0) if v.ndim == 1 else v.detach().T.contiguous()

    def _input(self, rows: Tensor, number: int) -> Tensor | None:
        """One chain's part of the input in flat rows: a view (K, n', L, d)."""
        if not self.include_input:
            return None
        shape = self._shapes[INPUT]
        whole = rows[:, -self._sizes[-1] :].view(rows.shape[0], *shape)
        return whole[:, self._samples[number]]

    def _check_vector(self, v: Tensor) -> None:
        size = sum(self._sizes)
        if v.ndim not in (1, 2) or v.shape[0] != size:
            raise ValueError(
                f"expected a vector ({size},) or columns ({size}, K), got {tuple(v.shape)}."
            )
        if v.dtype != self.dtype:
            raise TypeError(
                f"the vector is {v.dtype}, the stack {self.dtype}: convert one of them."
            )
        device = self.chains[0].output.device
        if v.device != device:
            raise ValueError(f"the vector is on {v.device}, the stack on {device}.")


_Piece = tuple[str, tuple[int, ...], int, int]  # name, shape, first and last place


def _views(rows: Tensor, pieces: Sequence[_Piece]) -> dict[str, Tensor]:
    """Views of flat rows (K, size) in the shapes of some weights."""
    count = rows.shape[0]
    return {name: rows[:, a:b].view(count, *shape) for name, shape, a, b in pieces}


def default_parts(specs: Sequence[BlockSpec], x: Tensor) -> int:
    """How many parts a batch is taken in: enough to bound the tangents' memory.

    One below 16 MB of tangents, where smaller products would cost more than the memory is worth;
    two from there on (half the tangents for about 5 % of time); more where two would pass 64 MB.
    """
    n, length, d = x.shape
    numbers = 0
    for spec in specs:
        heads = spec.n_heads * spec.value_size + 3 * spec.n_heads * spec.key_size
        numbers += heads + 2 * d + (spec.d_ff or 0) * (2 if spec.gated else 1)
        numbers += spec.n_heads * length
    size = numbers * n * length * x.element_size()
    return 1 if size < 2**24 else int(min(n, max(2, -(-size // 2**26))))
