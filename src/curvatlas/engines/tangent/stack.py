r"""Exact products with the Hessian of a whole stack of blocks, no autograd graph anywhere.

    stack = BlockStack([(spec, weights), ...], loss="cross_entropy", readout=Readout(weight=W))
    here = stack.linearise(x, targets)         # one forward and one backward pass, kept
    here.value, here.gradient                  # loss (), flat gradient (P,)
    here @ v, here.outer @ v, here.functional @ V     # H v, H_o v, H_f V with columns V (P, K)
    ca.eigenpairs(here), ca.trace(here.outer)         # operators like any other

Tangents run forward block by block, adjoints and their tangents run back (derivations §11):
passing ẋ in and (δ_x, Rδ_x) out of each block composes exactly. The flat order is block by block in
the order of ``WEIGHT_NAMES``, then the readout, then, if asked for, the stack's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.budget import ResultMemory
from curvatlas.engines.tangent.attention import with_joint_projections
from curvatlas.engines.tangent.block import BlockTangent, LinearisedBlock
from curvatlas.engines.tangent.head import LinearisedReadout, Readout, ReadoutTangent
from curvatlas.engines.tangent.linear import BackwardPass, Buffers, as_rows, restart_numbers
from curvatlas.engines.tangent.reading import FlatOrder, map_stack
from curvatlas.engines.tangent.tape import Tapes
from curvatlas.layers.checks import check_spec
from curvatlas.layers.decomposition import DecomposedHessian
from curvatlas.layers.losses import (
    LinearHeadCrossEntropy,
    OutputLoss,
    PooledCrossEntropy,
    Seeds,
    TokenCrossEntropy,
    TokenSquaredError,
    resolve_loss,
)
from curvatlas.layers.structure import WEIGHT_NAMES, BlockSpec, Weights
from curvatlas.linear_operator import Part, Tags, check_columns
from curvatlas.precision import in_float64

READOUT = -1  # the group of the readout's weights; block i is group i
Groups = dict[int, dict[str, Tensor]]


class Chain:
    """Blocks and readout at some samples x (n, L, d) of a batch, every stage linearised.

    Samples do not see each other, so a batch may go through in several chains: their activations
    are kept side by side, the tangents of a product are needed for one chain at a time.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[BlockSpec, Weights]],
        readout: Readout,
        x: Tensor,
        *,
        mask: Tensor | None,
        space: Buffers,
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
        backward = BackwardPass(Buffers(keep=False), frozenset(), record=True)
        rate = self.readout.pull(self.delta, None, backward)
        for block in reversed(self.blocks):
            assert rate is not None
            _, delta_x = block.gradient(rate[0], wanted=())
            rate = delta_x.view(1, -1, delta_x.shape[-1])

    @property
    def convex(self) -> bool:
        """Whether Λ is positive semi-definite."""
        return self._seeds is not None and self._seeds.convex

    @property
    def delta(self) -> Tensor:
        """∂ℓ/∂Z (1, n·L, C)."""
        assert self._seeds is not None
        return self._share(self._seeds.delta).reshape(1, -1, self.output.shape[-1])

    def curvature(self, moved: Tensor) -> Tensor:
        """Λ of the loss times the outputs' tangent (K, n·L, C), which may be overwritten."""
        assert self._seeds is not None
        # The head's output has a buffer of its own; without a head ``moved`` is needed again.
        product = self._seeds.overwrite if self.readout.linear is not None else None
        product = product or self._seeds.product
        rate = product(moved.view(-1, *self.output.shape))
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

    def pull(
        self,
        rate: Tensor | None,
        states: list[BlockTangent | None] | None,
        readout: ReadoutTangent | None,
        into: Callable[[int], dict[str, Tensor]],
        *,
        needs_input: bool,
        accumulate: bool,
    ) -> Tensor | None:
        """Rδ of the input (K, n·L, d) from that of the outputs; ``into(group)`` are the slots that
        take the rates of a group's weights, or have them added."""
        slots = into(READOUT)
        backward = BackwardPass(self.space, frozenset(slots), slots, accumulate=accumulate)
        rate = self.readout.pull(rate, readout, backward)
        for name, slot in slots.items():
            if name not in backward.rates and not accumulate:
                slot.zero_()
        for index, block in reversed(list(enumerate(self.blocks))):
            shaped = None if rate is None else rate.view(rate.shape[0], *block.shape)
            slots = into(index)
            _, back = block.pull(
                shaped,
                None if states is None else states[index],
                wanted=slots,
                needs_input=index > 0 or needs_input,
                into=slots,
                accumulate=accumulate,
            )
            rate = None if back is None else back.flatten(1, 2)
        return rate


def with_sample_axis(targets: Tensor, readout: Readout) -> Tensor:
    """After a pooling one target a sample may come as (n,) or (n, C): add the axis of length 1."""
    axes = 2 if targets.is_floating_point() else 1
    return targets.unsqueeze(1) if readout.pooling and targets.ndim == axes else targets


def mask_of(mask: Tensor | None, samples: slice, count: int) -> Tensor | None:
    """The mask of some of ``count`` samples; a mask common to all has no axis for them."""
    if mask is None or mask.shape[0] != count or (mask.ndim == 2 and mask.dtype != torch.bool):
        return mask
    return mask[samples]


def shares(loss: OutputLoss, targets: Tensor, samples: Sequence[slice]) -> list[Tensor] | None:
    """Each part's weight in the mean over the batch, or None when the loss is not such a mean.

    Cross-entropy weighs by valid targets; a part without any cannot be taken alone.
    """
    kind = type(loss)
    if kind is TokenSquaredError or (kind is PooledCrossEntropy and loss.token_weights is None):  # type: ignore[attr-defined]
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


INPUT = "input"


class LinearisedStack(DecomposedHessian):
    """The Hessian of a stack at one batch, with loss and gradient; see ``BlockStack.linearise``."""

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
        self.space, self._results = Buffers(keep=True), ResultMemory()
        self._tapes = Tapes(self.space, own=[x, *stack.named_weights.values()])
        shapes = stack.named_weights if include_weights else {}
        self._shapes = {name: tuple(weight.shape) for name, weight in shapes.items()}
        if include_input:
            self._shapes[INPUT] = tuple(x.shape)
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        *starts, size = accumulate(sizes, initial=0)
        places = zip(starts, sizes, strict=True)
        self.offsets = dict(zip(self._shapes, places, strict=True))
        super().__init__((size, size), dtype=x.dtype, device=x.device, tags=Tags(symmetric=True))
        self._groups = self._weight_groups()
        self._content = [stack.specs, stack.named_weights, stack.readout, stack.loss, x, targets]
        self._content += [mask, include_input, include_weights]
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

    def content(self) -> Any:
        return self._content

    def _weight_groups(self) -> dict[int, list[_Piece]]:
        """Where the weights of every block and of the readout stand in the flat vector."""
        groups: dict[int, list[_Piece]] = {}
        for name, (start, size) in self.offsets.items():
            if name != INPUT:
                group, _, weight = name.rpartition(".")
                index = READOUT if group == "readout" else int(group.removeprefix("blocks."))
                place = (weight, self._shapes[name], start, start + size)
                groups.setdefault(index, []).append(place)
        return groups

    @staticmethod
    def _parts(
        stack: BlockStack, x: Tensor, targets: Tensor, parts: int | None
    ) -> tuple[list[slice], list[Tensor | None]]:
        """Runs of samples that go through together, and each one's share of the loss."""
        together: tuple[list[slice], list[Tensor | None]] = [slice(0, len(x))], [None]
        count = default_parts(stack.specs, x) if parts is None else parts
        if count < 1 or (parts is not None and count > len(x)):
            raise ValueError(f"parts must be between 1 and the {len(x)} samples, got {count}.")
        if count == 1 or targets.shape[:1] != x.shape[:1]:
            return together
        step = -(-len(x) // count)
        samples = [slice(i, min(i + step, len(x))) for i in range(0, len(x), step)]
        weights = shares(stack.loss, targets, samples)
        return together if weights is None else (samples, [w.to(x) for w in weights])

    @property
    def names(self) -> tuple[str, ...]:
        """The pieces of the flat vector, in order."""
        return tuple(self._shapes)

    @property
    def output(self) -> Tensor:
        """The outputs (n, L, C), or (n, 1, C) after a pooling."""
        if len(self.chains) == 1:
            return self.chains[0].output
        return torch.cat([chain.output for chain in self.chains])

    @property
    def convex(self) -> bool:  # type: ignore[override]
        return all(chain.convex for chain in self.chains)

    def _part_columns(self, columns: Tensor, part: Part) -> Tensor:
        rows = as_rows(columns, self.space)
        flat = self._results.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        self._tapes.run(part, partial(self._fill, part), rows, flat)
        return flat.T

    def _fill(self, part: Part, rows: Tensor, flat: Tensor) -> None:
        """One of the three matrices times ``rows`` (K, P), into ``flat``."""
        tangents = {index: _views(rows, pieces) for index, pieces in self._groups.items()}
        for number, chain in enumerate(self.chains):
            states, readout = chain.push(tangents, self._input(rows, number))
            rate = None
            if part != "functional" and readout.output is not None:
                rate = chain.curvature(readout.output)
            curved = part != "outer"
            self._pull(number, rate, states if curved else None, readout if curved else None, flat)

    @cached_property
    def gradient(self) -> Tensor:
        """∂ℓ/∂θ (P,), by one backward pass when first asked for."""
        flat = self.chains[0].output.new_empty(1, self.shape[0])
        for number, chain in enumerate(self.chains):
            self._pull(number, chain.delta, None, None, flat)
        return flat[0]

    def jacobian_product(self, v: Tensor) -> Tensor:
        """J v: (P,) → the outputs' shape (n, L, C), or (P, K) → (K, n, L, C)."""
        check_columns(self, v)
        rows = v.detach().unsqueeze(0) if v.ndim == 1 else v.detach().T.contiguous()
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
        check_columns(self, v)
        return {
            name: v[start : start + size].view(*self._shapes[name], *v.shape[1:])
            for name, (start, size) in self.offsets.items()
        }

    def _pull(
        self,
        number: int,
        rate: Tensor | None,
        states: list[BlockTangent | None] | None,
        readout: ReadoutTangent | None,
        flat: Tensor,
    ) -> None:
        """One chain's backward pass: writes (the first chain) or adds to ``flat`` (K, P)."""
        rate = self.chains[number].pull(
            rate,
            states,
            readout,
            lambda group: _views(flat, self._groups.get(group, [])),
            needs_input=self.include_input,
            accumulate=number > 0,
        )
        if self.include_input:
            target = self._input(flat, number)
            assert target is not None
            target.zero_() if rate is None else target.copy_(rate.view(target.shape))

    def _input(self, rows: Tensor, number: int) -> Tensor | None:
        """One chain's part of the input in flat rows: a view (K, n', L, d)."""
        if not self.include_input:
            return None
        start, _ = self.offsets[INPUT]
        inputs = rows[:, start:].view(rows.shape[0], *self._shapes[INPUT])
        return inputs[:, self._samples[number]]


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


class BlockStack:
    """Blocks in a row, a readout and a loss.

    ``blocks``: (spec, weights) pairs. ``readout``: final norm, pooling, linear head (all optional).
    ``loss``: ``"mse"``, ``"cross_entropy"``, or an ``layers.losses.OutputLoss``.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[BlockSpec, Weights]],
        *,
        loss: str | OutputLoss = "mse",
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
        cls, module: nn.Module, *, loss: str | OutputLoss = "mse", head: bool = True
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
        parts: int | None = None,
    ) -> LinearisedStack:
        """Evaluate at inputs x (n, L, d), keeping activations and adjoints for products.

        ``include_input`` appends the input's n·L·d numbers to the flat vector;
        ``include_weights=False`` leaves only them. ``parts``: how many groups of samples go
        through one after the other in a product (None: by size); the tangents need memory for one.
        """
        return LinearisedStack(
            self,
            x,
            targets,
            mask=mask,
            include_input=include_input,
            include_weights=include_weights,
            parts=parts,
        )

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The outputs (n, L, C), or (n, 1, C) after a pooling."""
        x = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach()
        for spec, weights in zip(self.specs, self.weights, strict=True):
            x = LinearisedBlock(spec, weights, x, mask).output
        samples = x.shape[0]
        return LinearisedReadout(self.readout, x.flatten(0, 1), samples=samples).output
