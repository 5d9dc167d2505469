r"""A model of two stacks: an encoder whose output M is the memory that a decoder attends to.

    encoder stem → encoder blocks → M = norm(z), or z itself
    decoder stem → decoder blocks, each with M → tail

Tangents go up the encoder, then up the decoder with Ṁ beside the tokens' own. On the way back every
decoder block adds its share to the memory's adjoint, and to the tangent Rδ_M of it; the encoder's
way back starts from that sum:

    δ_M = Σ_b ∂ℓ/∂M |_b,        Rδ_M = Σ_b R{∂ℓ/∂M |_b}

A memory that is an input of the model, or comes of layers that are not known, is an encoder without
blocks. What does not move with the parameters followed is a constant: a view of decoder weights
holds no encoder, and rows of decoder weights alone need none of its way back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from curvatlas.engines.tangent.ends import ModuleCall, same_values, stem_norm
from curvatlas.engines.tangent.linear import BackwardPass, Buffers
from curvatlas.engines.tangent.model import (
    Chain,
    Columns,
    KnownLayer,
    LayerCall,
    Passed,
    Watch,
    arguments_at,
    tangent_numbers,
)
from curvatlas.engines.tangent.norm import Normalization, NormTangent
from curvatlas.engines.tangent.reading import BlockCall, UnmappedModuleError, memory_argument
from curvatlas.engines.tangent.stem import AutogradStem, Slots, Stem, StemNorm

_BRIDGE = "bridge"  # prefix of the scratch and of the weights of what lies between the stacks


class Bridge:
    """The memory M = norm(z) at the encoder's last tokens z (n, L', m), or z itself."""

    def __init__(self, z: Tensor, plan: StemNorm | None) -> None:
        self._plan, self.shape = plan, z.shape
        self.names = frozenset(() if plan is None else plan.parameters.values())
        self.memory = z
        self._norm: Normalization | None = None
        if plan is not None:
            tokens = z.reshape(-1, z.shape[-1])
            self._norm = Normalization(_BRIDGE, plan.weights, tokens, norm=plan.norm, eps=plan.eps)
            self.memory = self._norm.value(Buffers(keep=False)).view(z.shape)

    def record(self, delta: Tensor) -> Tensor:
        """δ_z (1, N, m) from δ_M, which is kept."""
        if self._norm is None:
            return delta
        backward = BackwardPass(Buffers(keep=False), frozenset(), record=True)
        pulled = self._norm.pull(delta, None, backward)
        assert pulled is not None
        return pulled

    def push(
        self, moved: Tensor | None, columns: Columns, space: Buffers
    ) -> tuple[Tensor | None, NormTangent | None]:
        """Ṁ (K, n, L', m) from ż, in memory of its own, and what ``pull`` needs."""
        if self._norm is None or self._plan is None:
            if moved is None:
                return None, None
            # a copy: ż may be scratch of the block behind it
            return space.take(f"{_BRIDGE}.y", *moved.shape, like=moved).copy_(moved), None
        own = {ours: columns[n] for ours, n in self._plan.parameters.items() if n in columns}
        flat = None if moved is None else moved.flatten(1, 2)
        result, state = self._norm.push(flat, own, space)
        return (None if result is None else result.view(-1, *self.shape)), state

    def pull(
        self, rate: Tensor, state: NormTangent | None, slots: Slots, space: Buffers
    ) -> Tensor | None:
        """Rδ_z (K, N, m) from Rδ_M; the norm's rates go to their slots."""
        if self._norm is None or self._plan is None:
            return rate
        names = {ours: n for ours, n in self._plan.parameters.items() if n in slots.into}
        backward = BackwardPass(space, frozenset(names))
        pulled = self._norm.pull(rate, state, backward)
        slots.add({names[ours]: value for ours, value in backward.rates.items()})
        return pulled


class EncoderDecoderChain(Chain):
    """``Chain`` of an encoder and a decoder: ``stem`` and the first ``crossing`` blocks are the
    encoder's, ``entry`` and the others the decoder's."""

    entry: Stem | AutogradStem
    bridge: Bridge
    crossing: int

    @property
    def stems(self) -> Sequence[Stem | AutogradStem]:
        return (self.stem, self.entry)

    # --- building -------------------------------------------------------------------------------

    def _assemble(self, watch: Watch, names: frozenset[str]) -> Tensor:
        encoder = watch.calls[: watch.crossing]
        decoder: Sequence[LayerCall] = watch.calls[watch.crossing :]
        self._encoder = tuple(call.layer for call in encoder)
        entry = self._entry(watch, decoder)
        stem, calls, plan = self._up_to_memory(watch, encoder, decoder[0], names)
        if not calls and plan is None and stem.names.isdisjoint(names):
            entry, decoder = self._moving(entry, decoder, names)
        self.stem, self.entry = stem, entry
        self._adapt([*calls, *decoder])
        z = self._linearise(calls, stem.output) if calls else stem.output
        self.crossing, self.bridge = len(self.blocks), Bridge(z, plan)
        memory = self.bridge.memory
        if not same_values(memory, decoder[0].call.memory):
            raise UnmappedModuleError(
                f"written out by hand, {decoder[0].layer.path} attends to another memory than in "
                "the model."
            )
        ours = [replace(call, call=replace(call.call, memory=memory)) for call in decoder]
        return self._linearise(ours, entry.output)

    def _entry(self, watch: Watch, decoder: Sequence[LayerCall]) -> Stem | AutogradStem:
        """What leads to the decoder's first block."""
        # Behind the encoder, or before it where both kinds of tokens are embedded first.
        groups = [watch.others_at(place) for place in dict.fromkeys((watch.crossing, 0))]
        layers = [call.layer for call in decoder]
        with self._giving(self._encoder_outputs()):
            return self._stem(decoder[0], groups, layers, name="entry")

    def _encoder_outputs(self) -> dict[KnownLayer, Tensor]:
        """What the encoder's layers gave in the model's run."""
        results = {layer: self._results[layer.path] for layer in self._encoder}
        return {layer: y[0] if isinstance(y, tuple) else y for layer, y in results.items()}

    def _up_to_memory(
        self,
        watch: Watch,
        encoder: Sequence[LayerCall],
        first: LayerCall,
        names: frozenset[str],
    ) -> tuple[Stem | AutogradStem, Sequence[LayerCall], StemNorm | None]:
        """The encoder's stem, its blocks and the norm behind them, from what moves on."""
        memory = first.call.memory
        assert memory is not None
        if not encoder:
            return self._memory_stem(first, memory), [], None
        plan = self._bridge_plan(watch, encoder[-1], first)
        stem = self._stem(encoder[0], [watch.others_at(0)], self._encoder)
        own = frozenset().union(*(call.layer.parameters for call in encoder))
        if stem.names.isdisjoint(names) and own.isdisjoint(names):
            if plan is None or names.isdisjoint(plan.parameters.values()):
                return Stem(memory, []), [], None
            last = encoder[-1]
            return Stem(last.call.tokens(last.hidden).detach(), []), [], plan
        return (*self._moving(stem, encoder, names), plan)

    def _memory_stem(self, first: LayerCall, memory: Tensor) -> Stem | AutogradStem:
        """A memory that no known layer gives: an input, or what the model makes of one."""
        leaves = self._problem.leaves(self._names)
        layer, args, kwargs = arguments_at(self._problem, [first.layer], self._batch, leaves)
        given = first.call.tokens(memory_argument(layer.module, args, kwargs))
        return AutogradStem(given, leaves) if given.requires_grad else Stem(memory, [])

    def _bridge_plan(self, watch: Watch, last: LayerCall, first: LayerCall) -> StemNorm | None:
        """The norm between the encoder's last block and the memory, None: there is nothing."""
        memory, axes = first.call.memory, first.call
        assert memory is not None
        if same_values(axes.tokens(last.hidden), memory):
            return None
        for call in watch.others_at(watch.crossing):
            if not _gives(call, last.hidden, memory, axes):
                continue
            with self._end_weights() as weights:
                values = {name: weight.detach() for name, weight in weights.items()}
                plan = stem_norm(self._reading, values, call.module, _BRIDGE)
            if plan is not None:
                return plan
        raise UnmappedModuleError(
            f"{first.layer.path} attends to something else than what {last.layer.path} gives or a "
            "norm of it."
        )

    @contextlib.contextmanager
    def _passing(self, z: Tensor) -> Iterator[None]:
        """Inside, the decoder's layers give z, and the encoder's zeros.

        Zeros, because outputs that depend on the encoder past the decoder are then others.
        """
        outputs = {layer: torch.zeros_like(x) for layer, x in self._encoder_outputs().items()}
        others = [layer for layer in self._reading.layers if layer not in outputs]
        with self._giving({**outputs, **dict.fromkeys(others, z)}):
            yield

    def _record(self) -> None:
        rate, memory = self.tail.delta, None
        if self.crossing or self.stem.names or self.bridge.names:
            memory = torch.zeros_like(self.bridge.memory)
        for index in reversed(range(self.crossing, len(self.blocks))):
            rate = self._record_block(index, rate, memory)
        self.entry.record(rate)
        if memory is None:
            return
        rate = self.bridge.record(memory.view(1, -1, memory.shape[-1]))
        for index in reversed(range(self.crossing)):
            rate = self._record_block(index, rate)
        self.stem.record(rate)

    # --- products -------------------------------------------------------------------------------

    @functools.cached_property
    def _upstream(self) -> frozenset[str]:
        """The parameters that the memory depends on; asked for when all adjoints are recorded."""
        blocks = [layer.parameters for layer in self.layers[: self.crossing]]
        return frozenset().union(self.stem.names, self.bridge.names, *blocks)

    def names(self) -> frozenset[str]:
        return super().names() | self.bridge.names

    @property
    def tangent_bytes(self) -> int:
        samples, length, d = self.shape
        longest = max(length, self.bridge.shape[1])
        numbers = tangent_numbers(self.layers, samples, longest, d, blocked=self.blocked)
        return numbers * self.tail.delta.element_size()

    def _forward(self, columns: Columns) -> tuple[Tensor | None, Passed]:
        passed = Passed([])
        moved, state = self.stem.push(columns, self.space)
        passed.stems.append(state)
        moved = self._push_blocks(range(self.crossing), columns, moved, passed)
        memory, state = self.bridge.push(moved, columns, self.space)
        passed.stems.append(state)
        moved, state = self.entry.push(columns, self.space)
        passed.stems.append(state)
        places = range(self.crossing, len(self.blocks))
        return self._push_blocks(places, columns, moved, passed, memory), passed

    def _back(self, rate: Tensor | None, slots: Slots, passed: Passed, *, curved: bool) -> None:
        stem, bridge, entry = passed.stems if curved else (None, None, None)
        enters = not self.entry.names.isdisjoint(slots.into)
        memory = self._memory_rate(slots)
        places = range(self.crossing, len(self.blocks))
        rate = self._pull_blocks(
            places, rate, slots, passed, curved=curved, below=enters, memory=memory
        )
        if enters:
            self.entry.pull(rate, entry, slots, self.space)
        if memory is None:
            return
        rate = self.bridge.pull(memory.flatten(1, 2), bridge, slots, self.space)
        places, below = range(self.crossing), not self.stem.names.isdisjoint(slots.into)
        rate = self._pull_blocks(places, rate, slots, passed, curved=curved, below=below)
        if below:
            self.stem.pull(rate, stem, slots, self.space)

    def _memory_rate(self, slots: Slots) -> Tensor | None:
        """Where Rδ_M (K, n, L', m) is added up; None: no row is asked for that needs it."""
        if self._upstream.isdisjoint(slots.into):
            return None
        count, like = len(next(iter(slots.into.values()))), self.bridge.memory
        return self.space.take(f"{_BRIDGE}.rate", count, *like.shape, like=like).zero_()


def _gives(call: ModuleCall, hidden: Tensor, memory: Tensor, axes: BlockCall) -> bool:
    """Whether a module turns the encoder's last tokens into the memory (n, L', m)."""
    if call.given.shape != hidden.shape or call.result.shape != hidden.shape:
        return False
    return torch.equal(call.given, hidden) and torch.equal(axes.tokens(call.result), memory)
