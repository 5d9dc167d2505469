r"""Exact products with the Hessian of a whole stack of blocks, no autograd graph anywhere.

    stack = BlockStack([(spec, weights), ...], loss="cross_entropy", readout=Readout(weight=W))
    here = stack.linearise(x, targets)         # one forward and one backward pass, kept
    here.value, here.gradient                  # loss (), flat gradient (P,)
    here.product(v)                            # H v;  part="outer": H_o v,  "functional": H_f v
    here @ V                                   # columns (P, K)

Tangents run forward block by block, adjoints and their tangents run back (THEORY 9): passing ẋ in
and (δ_x, Rδ_x) out of each block composes exactly. The flat order is block by block in the order
of ``WEIGHT_NAMES``, then the readout, then, if asked for, the stack's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from curvatlas.blocks.adapters import FlatOrder
from curvatlas.blocks.adapters_stack import map_stack
from curvatlas.blocks.losses import Loss, resolve_loss
from curvatlas.blocks.products import PARTS, BlockTangent, LinearisedBlock, Part
from curvatlas.blocks.products_check import check_spec
from curvatlas.blocks.products_head import LinearisedReadout, Readout, ReadoutTangent
from curvatlas.blocks.products_workspace import Way, Workspace
from curvatlas.blocks.structure import WEIGHT_NAMES, BlockSpec, Weights

INPUT = "input"


class BlockStack:
    """Blocks in a row, a readout and a loss.

    ``blocks``: (spec, weights) pairs. ``readout``: final norm, pooling, linear head (all optional).
    ``loss``: ``"mse"``, ``"cross_entropy"``, or a ``curvatlas.blocks.losses.Loss`` of the outputs.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[BlockSpec, Weights]],
        *,
        loss: str | Loss = "mse",
        readout: Readout | None = None,
    ) -> None:
        if not blocks:
            raise ValueError("a stack needs at least one block.")
        widths = {spec.d_model for spec, _ in blocks}
        if len(widths) > 1:
            raise ValueError(f"all blocks of a stack share one width, got {sorted(widths)}.")
        self.specs = tuple(spec for spec, _ in blocks)
        for spec in self.specs:
            check_spec(spec)
        self.weights: list[dict[str, Tensor]] = [
            {name: weights[name].detach() for name in WEIGHT_NAMES if name in weights}
            for _, weights in blocks
        ]
        self.readout = readout if readout is not None else Readout()
        self.loss = resolve_loss(loss)
        self.order: FlatOrder | None = None  # set by from_module

    @classmethod
    def from_module(
        cls, module: nn.Module, *, loss: str | Loss = "mse", head: bool = True
    ) -> BlockStack:
        """The blocks, final norm and linear head of a model; the input is the embeddings' output.

        Reads ``nn.TransformerEncoder``, the zoo's ViT and GPT, and Hugging Face GPT-2, Llama, BERT
        and ViT models. ``head=False`` leaves the head away. A head tied to the embedding stays in
        the function but is no parameter of the stack: its other use lies outside. ``stack.order``
        translates between the stack's flat vectors and the model's.
        """
        mapped = map_stack(module, head=head)
        stack = cls(mapped.blocks, loss=loss, readout=mapped.readout)
        stack.order = mapped
        return stack

    @property
    def named_weights(self) -> dict[str, Tensor]:
        """``blocks.0.query_weight`` … ``readout.bias`` → tensor, in flat order."""
        named = {
            f"blocks.{i}.{name}": weight
            for i, weights in enumerate(self.weights)
            for name, weight in weights.items()
        }
        return named | {f"readout.{k}": v for k, v in self.readout.weights.items()}

    @property
    def size(self) -> int:
        """The number of parameters P."""
        return sum(weight.numel() for weight in self.named_weights.values())

    def linearise(
        self,
        x: Tensor,
        targets: Tensor,
        *,
        mask: Tensor | None = None,
        include_input: bool = False,
        include_weights: bool = True,
    ) -> LinearisedStack:
        """Evaluate at inputs x (n, L, d), keeping activations and adjoints for products.

        ``include_input`` appends the input's n·L·d numbers to the flat vector;
        ``include_weights=False`` leaves only them.
        """
        return LinearisedStack(
            self,
            x,
            targets,
            mask=mask,
            include_input=include_input,
            include_weights=include_weights,
        )

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The outputs (n, L, C), or (n, 1, C) after a pooling."""
        x = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach()
        for spec, weights in zip(self.specs, self.weights, strict=True):
            x = LinearisedBlock(spec, weights, x, mask).output
        samples = x.shape[0]
        return LinearisedReadout(self.readout, x.flatten(0, 1), samples=samples).output


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
    ) -> None:
        if not (include_input or include_weights):
            raise ValueError("nothing to differentiate: include the weights, the input or both.")
        x = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach()
        self.include_input, self.include_weights = include_input, include_weights
        self.space = Workspace(keep=True)
        self.blocks: list[LinearisedBlock] = []
        z, again = x, None
        for index, (spec, weights) in enumerate(zip(stack.specs, stack.weights, strict=True)):
            block = LinearisedBlock(
                spec, weights, z, mask, space=self.space, turn=index % 2, x_again=again
            )
            if self.blocks and block.sublayers[0].normalizes_input:
                self.blocks[-1].sublayers[-1].forget_output()
            self.blocks.append(block)
            z, again = block.give_output(), block.sublayers[-1].output_again
        self.blocks[-1].sublayers[-1].forget_output()  # the readout asks for it at once
        tokens = z.reshape(-1, z.shape[-1])
        self._readout = LinearisedReadout(stack.readout, tokens, samples=x.shape[0])
        self.output = self._readout.output  # (n, L or 1, C)
        self._seeds = stack.loss.seeds(self.output, with_sample_axis(targets, self._readout))
        self.value: Tensor = self._seeds.value
        if not bool(torch.isfinite(self.value)):
            raise ValueError(f"the loss is {float(self.value)}: no derivative is defined here.")
        self._shapes = {
            name: tuple(weight.shape)
            for name, weight in (stack.named_weights if include_weights else {}).items()
        }
        if include_input:
            self._shapes[INPUT] = tuple(x.shape)
        self._sizes = [torch.Size(shape).numel() for shape in self._shapes.values()]
        self._record()

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
        return self.output.dtype

    def __matmul__(self, columns: Tensor) -> Tensor:
        return self.product(columns)

    def product(self, v: Tensor, *, part: Part = "total") -> Tensor:
        """H v, H_o v or H_f v for v (P,) or columns (P, K)."""
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}.")
        tangents, x_dot, directions = self._unpack(v)
        states, readout = self._push(tangents, x_dot)
        rate = None
        if part != "functional" and readout.output is not None:
            rate = self._seeds.product(readout.output.view(directions, *self.output.shape))
            rate = rate.reshape(readout.output.shape)
        flat = self._pull(rate, states, readout, directions, curved=part != "outer")
        return flat[0] if v.ndim == 1 else flat.T

    @cached_property
    def gradient(self) -> Tensor:
        """∂ℓ/∂θ (P,), by one way back when first asked for."""
        delta = self._seeds.delta.reshape(1, -1, self.output.shape[-1])
        states: list[BlockTangent | None] = [None] * len(self.blocks)
        return self._pull(delta, states, None, 1, curved=False)[0]

    def jacobian_product(self, v: Tensor) -> Tensor:
        """J v: (P,) → the outputs' shape (n, L, C), or (P, K) → (K, n, L, C)."""
        tangents, x_dot, directions = self._unpack(v)
        output = self._push(tangents, x_dot)[1].output
        if output is None:
            output = self.output.new_zeros(directions, self.output.numel())
        shaped = output.view(directions, *self.output.shape).clone()
        return shaped[0] if v.ndim == 1 else shaped

    def split(self, v: Tensor) -> dict[str, Tensor]:
        """A flat vector (P,) as named pieces in their own shapes (views)."""
        self._check_vector(v)
        pieces = torch.split(v, self._sizes)
        return {
            name: piece.view(*shape, *v.shape[1:])
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }

    def _push(
        self, tangents: dict[int, dict[str, Tensor]], x_dot: Tensor | None
    ) -> tuple[list[BlockTangent | None], ReadoutTangent]:
        moved, again, states = x_dot, None, []
        for index, block in enumerate(self.blocks):
            dots = tangents.get(index, {})
            state: BlockTangent | None = None
            if moved is not None or dots:
                state = block.push(dots, moved, x_dot_again=again)
                moved, again = state.output, state.output_again
            states.append(state)
        flat = None if moved is None else moved.flatten(1, 2)
        return states, self._readout.push(flat, tangents.get(-1, {}), self.space)

    def _pull(
        self,
        rate: Tensor | None,
        states: list[BlockTangent | None],
        readout: ReadoutTangent | None,
        directions: int,
        *,
        curved: bool,
    ) -> Tensor:
        """The way back from the outputs' Rδ to flat rows (K, P); ``curved`` uses the tangents."""
        flat = self.output.new_empty(directions, sum(self._sizes))
        slots = self._slots(flat)
        way = Way(self.space, frozenset(slots.get(-1, {})), slots.get(-1, {}))
        rate = self._readout.pull(rate, readout if curved else None, way)
        _clear(slots.get(-1, {}), way)
        for index in reversed(range(len(self.blocks))):
            block = self.blocks[index]
            _, back = block.pull(
                None if rate is None else rate.view(directions, *block.shape),
                states[index] if curved else None,
                wanted=slots.get(index, {}),
                needs_input=index > 0 or self.include_input,
                into=slots.get(index, {}),
            )
            rate = None if back is None else back.flatten(1, 2)
        if self.include_input:
            last = flat[:, -self._sizes[-1] :]
            last.zero_() if rate is None else last.copy_(rate.flatten(1))
        return flat

    def _record(self) -> None:
        """Send δ back once and let every stage keep its adjoint."""
        way = Way(Workspace(keep=False), frozenset(), record=True)
        delta = self._seeds.delta.reshape(1, -1, self.output.shape[-1])
        rate = self._readout.pull(delta, None, way)
        for block in reversed(self.blocks):
            assert rate is not None
            _, delta_x = block.gradient(rate[0], wanted=())
            rate = delta_x.view(1, -1, delta_x.shape[-1])

    def _slots(self, flat: Tensor) -> dict[int, dict[str, Tensor]]:
        """Views of flat rows (K, P) in the weights' shapes, by block (−1: the readout)."""
        slots: dict[int, dict[str, Tensor]] = {}
        for (name, shape), piece in zip(
            self._shapes.items(), torch.split(flat, self._sizes, dim=1), strict=True
        ):
            if name == INPUT:
                continue
            group, _, weight = name.rpartition(".")
            index = -1 if group == "readout" else int(group.removeprefix("blocks."))
            slots.setdefault(index, {})[weight] = piece.view(flat.shape[0], *shape)
        return slots

    def _unpack(self, v: Tensor) -> tuple[dict[int, dict[str, Tensor]], Tensor | None, int]:
        """Tangents by block (−1: the readout), the input's tangent (K, N, d), and K."""
        self._check_vector(v)
        rows = v.detach().unsqueeze(0) if v.ndim == 1 else v.detach().T.contiguous()
        directions = rows.shape[0]
        x_dot: Tensor | None = None
        if self.include_input:
            shape = self._shapes[INPUT]
            x_dot = rows[:, -self._sizes[-1] :].reshape(directions, *shape)
        return self._slots(rows), x_dot, directions

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
        if v.device != self.output.device:
            raise ValueError(f"the vector is on {v.device}, the stack on {self.output.device}.")


def with_sample_axis(targets: Tensor, readout: LinearisedReadout) -> Tensor:
    """After a pooling one target a sample may come as (n,) or (n, C): add the axis of length 1."""
    axes = 2 if targets.is_floating_point() else 1
    return targets.unsqueeze(1) if readout.pooling and targets.ndim == axes else targets


def _clear(slots: dict[str, Tensor], way: Way) -> None:
    """Zero what the way back did not reach."""
    for name, slot in slots.items():
        if name not in way.found:
            slot.zero_()
