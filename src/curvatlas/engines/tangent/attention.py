r"""Attention F = concat_h(A^h V^h) W_Oᵀ + b_O with projections, rotation and grouped heads.

Projections are linear layers of the tokens; between them and the core stand only linear
rearrangements (tokens to heads, rotary positions), so tangents pass through them unchanged and
adjoints through their transposes. ``None`` is zero. ``CrossAttentionStage`` takes keys and values
of a memory, an encoder's output; its tangent and its rate go by the name ``MEMORY`` among those of
the weights.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvatlas.engines.tangent.attention_core import (
    AttentionCore,
    BlockedCore,
    CoreTangent,
    LogitMask,
)
from curvatlas.engines.tangent.linear import (
    BackwardPass,
    Buffers,
    Linear,
    complete,
    count_directions,
    stage_number,
)
from curvatlas.engines.tangent.norm import Normalization, NormTangent
from curvatlas.layers.masks import Keyless
from curvatlas.layers.structure import DISTANCE, MEMORY, BlockSpec, Weights
from curvatlas.precision import float64_device


class Rotation:
    """Rotary positions: the turn R_i of each of L positions.

    Coordinate p of a head's first r turns with coordinate p + r/2 (Llama's layout), or 2p with
    2p + 1 (``interleaved``, GPT-J's), and the coordinates behind them stay:

        y_first = c₁ x_first − s₁ x_second        y_second = c₂ x_second + s₂ x_first

    ``first`` = (c₁, s₁) and ``second`` = (c₂, s₂) are (L, r/2), or (n, L, r/2) where samples
    differ. The map is linear: its tangent is itself, its adjoint the transposed turn, also where
    the tables carry a factor (YaRN) or differ within a pair.
    """

    def __init__(
        self,
        first: tuple[Tensor, Tensor],
        second: tuple[Tensor, Tensor] | None = None,
        *,
        interleaved: bool = False,
    ) -> None:
        self.first, self.second = first, first if second is None else second
        self.interleaved = interleaved

    @classmethod
    def from_base(
        cls,
        base: float,
        *,
        length: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        interleaved: bool = False,
    ) -> Rotation:
        """Angles i · base^(−2p/r) for positions 0 … L−1 and p < r/2, r = ``size``."""
        if size % 2:
            raise ValueError(f"rotary positions pair coordinates: head size {size} is odd.")
        if not base > 0:
            raise ValueError(f"rope_base must be positive, got {base!r}.")
        half = size // 2
        # Angles in float64 whatever the dtype: position × frequency loses digits for long inputs.
        place = float64_device(device)
        exponent = torch.arange(half, dtype=torch.float64, device=place) / half
        position = torch.arange(length, dtype=torch.float64, device=place)
        angles = (position[:, None] * base ** (-exponent)).to(dtype=dtype).to(device=device)
        return cls((angles.cos(), angles.sin()), interleaved=interleaved)

    @classmethod
    def from_tables(cls, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Rotation:
        """The tables a library multiplies with, one number a coordinate: (n or 1, L, r) each."""
        if cos.shape != sin.shape or cos.ndim != 3 or cos.shape[-1] % 2:
            raise ValueError(
                f"cosines and sines must be (n, L, even), got {tuple(cos.shape)} and "
                f"{tuple(sin.shape)}."
            )
        tables = [table.detach()[0] if len(table) == 1 else table.detach() for table in (cos, sin)]
        (c1, c2), (s1, s2) = (_halves(table, interleaved) for table in tables)
        alike = torch.equal(c1, c2) and torch.equal(s1, s2)
        return cls((c1, s1), None if alike else (c2, s2), interleaved=interleaved)

    @property
    def size(self) -> int:
        """r, how many coordinates of a head turn."""
        return 2 * self.first[0].shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, r/2), or (n, L, r/2)."""
        return tuple(self.first[0].shape)

    def to(self, *, dtype: torch.dtype, device: torch.device) -> Rotation:
        """The same turns in another dtype or place."""
        pairs = [
            (cos.to(device=device, dtype=dtype), sin.to(device=device, dtype=dtype))
            for cos, sin in (self.first, self.second)
        ]
        second = None if self.second is self.first else pairs[1]
        return Rotation(pairs[0], second, interleaved=self.interleaved)

    def of_samples(self, samples: slice) -> Rotation:
        """The turns of some samples."""
        if len(self.shape) == 2:
            return self
        (c1, s1), (c2, s2) = self.first, self.second
        first = (c1[samples], s1[samples])
        second = None if self.second is self.first else (c2[samples], s2[samples])
        return Rotation(first, second, interleaved=self.interleaved)

    def apply(self, x: Tensor) -> Tensor:
        """R_i x_i:  (…, L, s) → (…, L, s); (n, …, L, s) where samples differ."""
        (c1, s1), (c2, s2) = self._shaped(x.ndim)
        return self._turned(x, c1, -s1, c2, s2)

    def adjoint(self, x: Tensor) -> Tensor:
        """R_iᵀ x_i:  (…, L, s) → (…, L, s)."""
        (c1, s1), (c2, s2) = self._shaped(x.ndim)
        return self._turned(x, c1, s2, c2, -s1)

    def _shaped(self, axes: int) -> list[list[Tensor]]:
        """The tables as they meet a tensor of so many axes, samples first."""
        if len(self.shape) == 2:
            return [list(self.first), list(self.second)]
        n, length, half = self.shape
        shape = (n, *[1] * (axes - 3), length, half)
        return [[table.view(shape) for table in pair] for pair in (self.first, self.second)]

    def _turned(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """(a first + b second, c second + d first), the coordinates behind them as they are."""
        first, second = _halves(x[..., : self.size], self.interleaved)
        pair = torch.addcmul(first * a, second, b), torch.addcmul(second * c, first, d)
        rest = [x[..., self.size :]] if self.size < x.shape[-1] else []
        if self.interleaved:
            return torch.cat([torch.stack(pair, -1).flatten(-2), *rest], -1)
        return torch.cat([*pair, *rest], -1)


def _halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The two coordinates of every pair, (…, r/2) each (views)."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


PROJECTIONS = ("query", "key", "value")
_MEMORY_PROJECTIONS = ("cross_key", "cross_value")


class HeadNorm:
    """The norm of queries or keys as tokens (N, heads·s), over every head or the whole width.

    Heads that share their gains are rows of one norm; gains of each head's own come behind a norm
    without gains, as a diagonal map.
    """

    def __init__(
        self, name: str, spec: BlockSpec, weights: Weights, tokens: Tensor, *, heads: int
    ) -> None:
        assert spec.qk_norm is not None
        self.width = tokens.shape[-1]
        self._name, span = f"{name}_norm", spec.qk_span
        size = self.width if span == "width" else self.width // heads
        eps = spec.eps if spec.qk_eps is None else spec.qk_eps
        make = partial(Normalization, norm=spec.qk_norm, eps=eps)
        rows = tokens.reshape(-1, size)
        fresh = Buffers(keep=False)
        if span == "each head":
            plain = make(self._name + ".plain", {}, rows)
            after = plain.value(fresh).view(-1, self.width)
            gains = Normalization(self._name, weights, after, norm="none", eps=0.0)
            self.stages = [plain, gains]
        else:
            self.stages = [make(self._name, weights, rows)]
        self.value = self.stages[-1].value(fresh).view(-1, self.width)  # only for the core's q, k

    def push(
        self, moved: Tensor | None, dots: Mapping[str, Tensor], space: Buffers
    ) -> tuple[Tensor | None, list[NormTangent]]:
        """The output's tangent (K, N, heads·s) and what ``pull`` needs."""
        states = []
        for stage in self.stages:
            rows = None if moved is None else self._rows(moved, stage)
            moved, state = stage.push(rows, dots, space)
            states.append(state)
        return (None if moved is None else self._tokens(moved)), states

    def pull(
        self, rate: Tensor | None, states: list[NormTangent] | None, backward: BackwardPass
    ) -> Tensor | None:
        """Rδ of its input (K, N, heads·s)."""
        for index, stage in reversed(list(enumerate(self.stages))):
            rows = None if rate is None else self._rows(rate, stage)
            rate = stage.pull(rows, None if states is None else states[index], backward)
        return None if rate is None else self._tokens(rate)

    def _rows(self, tokens: Tensor, stage: Normalization) -> Tensor:
        return tokens.reshape(tokens.shape[0], *stage.n.shape)

    def _tokens(self, rows: Tensor) -> Tensor:
        return rows.view(rows.shape[0], -1, self.width)


@dataclass
class AttentionTangent:
    """What the backward pass needs of the forward pass."""

    mixed_dot: Tensor | None  # Ȯ as tokens (K, N, H·dv)
    core: CoreTangent
    weights: Mapping[str, Tensor]
    norms: Mapping[str, list[NormTangent]]


class AttentionStage:
    """Self-attention at tokens x (N, d), N = n · L; ``rotation`` instead of ``spec.rope_base``.

    ``blocked``: by blocks of queries, in memory that is linear in L (``BlockedCore``).
    """

    _joined: Sequence[str] = PROJECTIONS  # those that ``together`` computes

    def __init__(
        self,
        spec: BlockSpec,
        weights: Weights,
        x: Tensor,
        *,
        samples: int,
        mask: Tensor | None,
        rotation: Rotation | None = None,
        keyless: Keyless = "refuse",
        blocked: bool = False,
        buckets: Tensor | None = None,
    ) -> None:
        self.spec, self.samples, self.length = spec, samples, x.shape[0] // samples
        self._buckets = buckets  # (L, L) rows of the table of learned terms
        self.key_length = self.length
        self._key = stage_number()
        self.together, self.inputs = _projections(weights)
        self.rotation = self._rotation(rotation, x)
        tokens = {name: self.inputs[name].value(x) for name in PROJECTIONS}
        self.norms: dict[str, HeadNorm] = {}
        if spec.qk_norm is not None:
            for name, heads in (("query", spec.n_heads), ("key", spec.kv_heads)):
                self.norms[name] = HeadNorm(name, spec, weights, tokens[name], heads=heads)
                tokens[name] = self.norms[name].value
                del self.norms[name].value
        pairs = LogitMask(
            spec=spec,
            mask=mask,
            samples=samples,
            length=self.length,
            dtype=x.dtype,
            device=x.device,
            keyless=keyless,
        )
        self._attend(tokens, pairs, blocked, weights.get(DISTANCE))
        # queries, keys and values go to the heads and back in one copy
        self.alike = (
            self.together is not None
            and not self.norms
            and self.rotation is None
            and self.core.q.shape == self.core.k.shape == self.core.v.shape
        )
        self.output: Linear | None = None
        if "output_weight" in weights:
            self.output = Linear(["output"], weights)

    def _attend(
        self,
        tokens: Mapping[str, Tensor],
        pairs: LogitMask,
        blocked: bool,
        table: Tensor | None = None,
    ) -> None:
        """The core at queries, keys and values as tokens, and what it mixes."""
        fresh = Buffers(keep=False)
        q, k, v = (self._split(tokens[name].unsqueeze(0), name, fresh)[0] for name in PROJECTIONS)
        terms = None if table is None else self._terms(table.unsqueeze(0), fresh)[0]
        self.core = self._core(q, k, v, pairs, blocked, terms)
        width = self.spec.n_heads * self.spec.value_size
        room = q.new_empty(1, self.samples * self.length, width)
        self._mixed = self._merge(self.core.value().unsqueeze(0), "output", room)[0]

    def _terms(self, table: Tensor, space: Buffers) -> Tensor:
        """Learned terms (K, S, L, L) of the logits, from their table (K, B, H) or its tangent."""
        assert self._buckets is not None
        by_pair = table[:, self._buckets].permute(0, 3, 1, 2)  # (K, H, L, L)
        k, heads, length = by_pair.shape[:3]
        shape = (k, self.samples * heads, length, length)
        out = space.take("attention.terms", *shape, like=table)
        out.view(k, self.samples, heads, length, length).copy_(by_pair.unsqueeze(1))
        return out

    def _table_rate(self, rates: Tensor) -> Tensor:
        """The adjoint of ``_terms``: (K, S, L, L) → (K, B, H)."""
        assert self._buckets is not None
        k, _, length, _ = rates.shape
        by_pair = rates.view(k, self.samples, -1, length * length).sum(1).mT  # (K, L·L, H)
        table = rates.new_zeros(k, self.spec.distances or 0, by_pair.shape[-1])
        return table.index_add_(1, self._buckets.flatten(), by_pair)

    def _core(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pairs: LogitMask,
        blocked: bool,
        terms: Tensor | None,
    ) -> AttentionCore | BlockedCore:
        spec = self.spec
        options: Any = {
            "scale": spec.logit_scale,
            "softmax": spec.softmax,
            "softcap": spec.softcap,
        }
        if blocked and terms is not None:
            raise ValueError("attention by blocks of queries has no learned terms of the logits.")
        if blocked:
            return BlockedCore(q, k, v, mask=pairs, **options)
        bias, allowed = pairs.rows(slice(0, self.length), check=True)
        added = self._rows_of(bias)
        if terms is not None:
            added = terms if added is None else terms + added
        return AttentionCore(q, k, v, bias=added, allowed=self._rows_of(allowed), **options)

    def _rotation(self, tables: Rotation | None, x: Tensor) -> Rotation | None:
        """The turns of the positions: those the call brought, or those of ``rope_base``."""
        spec = self.spec
        if tables is None and spec.rope_tables:
            raise ValueError(
                "the rotary positions of this block come with each call: pass rotation=."
            )
        if tables is None and spec.rope_base is not None:
            return Rotation.from_base(
                spec.rope_base,
                length=self.length,
                size=spec.key_size if spec.rotary_size is None else spec.rotary_size,
                interleaved=spec.rope_interleaved,
                dtype=x.dtype,
                device=x.device,
            )
        if tables is None:
            return None
        expected = {(self.length,), (self.samples, self.length)}
        if tables.shape[:-1] not in expected or tables.size > spec.key_size:
            raise ValueError(
                f"the rotation's tables are {tables.shape}: needed are (L, r/2) or (n, L, r/2) "
                f"with n={self.samples}, L={self.length} and r at most {spec.key_size}."
            )
        return tables.to(dtype=x.dtype, device=x.device)

    def attach(self, weights: Weights) -> None:
        """Multiply with these weights from now on."""
        if self.together is not None:
            self.together.attach(weights)
            weights = {**weights, **_columns_of(self.together)}
        for layer in self._single():
            layer.attach(weights)

    def detach(self) -> None:
        """Let go of the weights until ``attach`` brings them again."""
        for layer in (*self._single(), self.together):
            if layer is not None:
                layer.detach()

    def _single(self) -> list[Linear]:
        output = [] if self.output is None else [self.output]
        return [*self.inputs.values(), *output]

    def value(self) -> Tensor:
        """F (N, d)."""
        return self._mixed if self.output is None else self.output.value(self._mixed)

    def push(
        self,
        x: Tensor,
        x_dot: Tensor | None,
        dots: Mapping[str, Tensor],
        space: Buffers,
        *,
        key: str,
    ) -> tuple[Tensor | None, AttentionTangent]:
        """Ḟ (K, N, d), in the buffer of ``key``, and what ``pull`` needs."""
        directions = count_directions(x_dot, dots)
        heads, norms = self._push_projections(x, x_dot, dots, directions, space)
        if self._buckets is not None and DISTANCE in dots:
            assert isinstance(self.core, AttentionCore)
            terms = self._terms(dots[DISTANCE], space)
            mixed, core = self.core.push(heads[0], heads[1], heads[2], space, bias_dot=terms)
        else:
            mixed, core = self.core.push(heads[0], heads[1], heads[2], space)
        tokens: Tensor | None = None
        if mixed is not None:
            buffer = space.take(self._key + "merged", directions, *self._mixed.shape, like=mixed)
            tokens = self._merge(mixed, "output", buffer)
        tangent = AttentionTangent(tokens, core, dots, norms)
        out = space.take(key, directions, *x.shape, like=x)
        if self.output is None:
            return (None if tokens is None else out.copy_(tokens)), tangent
        return self.output.push(self._mixed, tokens, dots, out), tangent

    def pull(
        self,
        rate: Tensor | None,
        tangent: AttentionTangent | None,
        backward: BackwardPass,
        *,
        x: Tensor,
        x_dot: Tensor | None,
        needs_input: bool,
    ) -> Tensor | None:
        """Rδ_x from Rδ_F; finds the wanted weights' rates on the way."""
        dots: Mapping[str, Tensor] = {} if tangent is None else tangent.weights
        if self.output is not None:
            mixed_dot = None if tangent is None else tangent.mixed_dot
            self.output.rates(rate, self._mixed, mixed_dot, backward)
        needs = self._needs(needs_input, backward)
        table = self._buckets is not None and DISTANCE in backward.wanted
        if not (any(needs) or table):
            return None
        direction = next((t for t in (rate, x_dot, *dots.values()) if t is not None), None)
        if direction is None:
            return None
        directions = direction.shape[0]
        if self.output is not None:
            shape = (directions, *self._mixed.shape)
            buffer = backward.space.take("wide", *shape, like=self._mixed)
            rate = buffer if self.output.pull(rate, dots, buffer) else None
        joint, rates = self._head_rates(needs, directions, backward.space)
        output_rate = None if rate is None else self._split(rate, "output", backward.space)
        core = None if tangent is None else tangent.core
        if table:
            written = self._pull_with_table(output_rate, core, backward, rates, directions)
        else:
            written = self.core.pull(output_rate, core, backward, rates)
        if not written:
            joint, rates = None, [None, None, None]
        norms = {} if tangent is None else tangent.norms
        merged = self._merged(joint, rates, dots, norms, backward)
        pulled = self._pull_inputs(
            merged, x, x_dot, dots, directions, backward, needs_input=needs_input
        )
        if backward.record:
            self._share_adjoint()
        return pulled

    def _pull_with_table(
        self,
        rate: Tensor | None,
        tangent: CoreTangent | None,
        backward: BackwardPass,
        rates: Sequence[Tensor | None],
        directions: int,
    ) -> bool:
        """The core's pull, and from it the rate of the table of learned terms."""
        assert isinstance(self.core, AttentionCore)
        room = backward.space.take(
            "attention.terms", directions, *self.core.A.shape, like=self._mixed
        )
        written = self.core.pull(rate, tangent, backward, rates, bias_out=room)
        if written:
            backward.give((DISTANCE,), (self.spec.distances or 0,), self._table_rate(room))
        return written

    def _needs(self, needs_input: bool, backward: BackwardPass) -> Sequence[bool]:
        """Which of Rδ_q, Rδ_k, Rδ_v somebody asks for."""
        return [
            needs_input or backward.record or not backward.wanted.isdisjoint(_weights_of(name))
            for name in PROJECTIONS
        ]

    def _pull_inputs(
        self,
        merged: Iterator[tuple[Linear, Tensor | None]],
        x: Tensor,
        x_dot: Tensor | None,
        dots: Mapping[str, Tensor],
        directions: int,
        backward: BackwardPass,
        *,
        needs_input: bool,
    ) -> Tensor | None:
        """Rδ_x from the projections' Rδ as tokens, with their weights' rates."""
        out = backward.space.take(f"attention.x{backward.turn}", directions, *x.shape, like=x)
        done = False
        for layer, tokens in merged:
            layer.rates(tokens, x, x_dot, backward)
            if needs_input:
                done = layer.pull(tokens, dots, out, accumulate=done)
        return out if done else None

    def _head_rates(
        self, needs: Sequence[bool], directions: int, space: Buffers
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Room for Rδ_q, Rδ_k, Rδ_v, those that are needed; one tensor where they are alike."""
        heads = (self.core.q, self.core.k, self.core.v)
        if self.alike and all(needs):
            joint = space.take("core.heads", 3, directions, *heads[0].shape, like=heads[0])
            return joint, list(joint)
        return None, [
            space.take("core." + name, directions, *head.shape, like=head) if needed else None
            for name, head, needed in zip(PROJECTIONS, heads, needs, strict=True)
        ]

    def _push_projections(
        self,
        x: Tensor,
        x_dot: Tensor | None,
        dots: Mapping[str, Tensor],
        directions: int,
        space: Buffers,
    ) -> tuple[list[Tensor | None], dict[str, list[NormTangent]]]:
        """q̇, k̇, v̇ in the slots' layout; in one matrix product where all three move alike."""
        norms: dict[str, list[NormTangent]] = {}

        def finish(name: str, moved: Tensor | None) -> Tensor | None:
            if name in self.norms:
                moved, norms[name] = self.norms[name].push(moved, dots, space)
            return None if moved is None else self._split(moved, name, space)

        layer = self.together
        if layer is not None and _alike(layer, dots):
            shape = (directions, self._mixed.shape[0], layer.weight.shape[0])
            buffer = space.take("wide", *shape, like=self._mixed)
            tokens = layer.push(x, x_dot, dots, buffer)
            if tokens is None:
                return [finish(name, None) for name in PROJECTIONS], norms
            if self.alike:
                joint = space.take(
                    self._key + "heads", 3, directions, *self.core.q.shape, like=tokens
                )
                self._by_head(joint).copy_(self._by_token(tokens))
                return list(joint), norms
            parts = torch.split(tokens, list(layer.sizes), -1)
            named = zip(PROJECTIONS, parts, strict=True)
            return [finish(name, part) for name, part in named], norms
        heads: list[Tensor | None] = []
        for name, layer in self.inputs.items():
            shape = (directions, self._mixed.shape[0], layer.weight.shape[0])
            buffer = space.take("wide", *shape, like=self._mixed)
            heads.append(finish(name, layer.push(x, x_dot, dots, buffer)))
        return heads, norms

    def _merged(
        self,
        joint: Tensor | None,
        rates: Sequence[Tensor | None],
        dots: Mapping[str, Tensor],
        norms: Mapping[str, list[NormTangent]],
        backward: BackwardPass,
    ) -> Iterator[tuple[Linear, Tensor | None]]:
        """The projections with their outputs' Rδ as tokens, all three as one where they can be."""
        layer = self.together
        present = [rate for rate in rates if rate is not None]
        if layer is not None and len(present) == 3 and _alike(layer, dots, backward.wanted):
            shape = (present[0].shape[0], self._mixed.shape[0], layer.weight.shape[0])
            tokens: Tensor = backward.space.take("wide", *shape, like=self._mixed)
            if joint is not None:
                self._by_token(tokens).copy_(self._by_head(joint))
                yield layer, tokens
                return
            parts = torch.split(tokens, list(layer.sizes), -1)
            for name, rate, part in zip(PROJECTIONS, present, parts, strict=True):
                if name not in self.norms:
                    self._merge(rate, name, part)
                    continue
                pulled = self._through_norm(name, rate, norms, backward)
                part.zero_() if pulled is None else part.copy_(pulled)
            yield layer, tokens
            return
        for (name, single), head_rate in zip(self.inputs.items(), rates, strict=True):
            if name in self.norms:
                yield single, self._through_norm(name, head_rate, norms, backward)
                continue
            if head_rate is None:
                yield single, None
                continue
            shape = (head_rate.shape[0], self._mixed.shape[0], single.weight.shape[0])
            buffer = backward.space.take("wide", *shape, like=head_rate)
            tokens = self._merge(head_rate, name, buffer)
            yield single, tokens

    def _through_norm(
        self,
        name: str,
        rate: Tensor | None,
        norms: Mapping[str, list[NormTangent]],
        backward: BackwardPass,
    ) -> Tensor | None:
        """Rδ of a projection's output as tokens, from that of its norm's output as slots."""
        tokens: Tensor | None = None
        if rate is not None:
            shape = (rate.shape[0], self._mixed.shape[0], self.norms[name].width)
            buffer = backward.space.take("attention.normed", *shape, like=rate)
            tokens = self._merge(rate, name, buffer)
        return self.norms[name].pull(tokens, norms.get(name), backward)

    def _share_adjoint(self) -> None:
        """Let the three projections see their columns of the common adjoint."""
        if self.together is not None and self.together.delta is not None:
            parts = torch.split(self.together.delta, list(self.together.sizes), -1)
            for name, part in zip(self._joined, parts, strict=True):
                self.inputs[name].delta = part

    def _by_head(self, joint: Tensor) -> Tensor:
        """Three slots' worth (3, K, n·H, L, s) → a view (3, K, n, H, L, s)."""
        return joint.view(*joint.shape[:2], self.samples, -1, *joint.shape[3:])

    def _by_token(self, tokens: Tensor) -> Tensor:
        """Queries, keys and values side by side (K, n·L, 3·H·s) → a view (3, K, n, H, L, s)."""
        shape = (tokens.shape[0], self.samples, self.length, 3, self.spec.n_heads, -1)
        return tokens.view(shape).permute(3, 0, 1, 4, 2, 5)

    def _split(self, tokens: Tensor, name: str, space: Buffers) -> Tensor:
        """Tokens (K, n·L, heads·s) → slots (K, n·G, (H/G)·L, s); queries and keys are rotated."""
        shared, repeats, length = self._slots(name)
        k, size = tokens.shape[0], tokens.shape[-1] // (shared * repeats)
        heads = tokens.view(k, self.samples, length, shared, repeats, size)
        heads = heads.permute(1, 0, 3, 4, 2, 5)  # (n, K, G, H/G, L, s)
        if self.rotation is not None and name in ("query", "key"):
            heads = self.rotation.apply(heads)
        # Tangents of q, k, v wait for the backward pass: their buffers are this stage's own.
        key = "attention.split" if name == "output" else self._key + name
        out = space.take(key, k, self.samples * shared, repeats * length, size, like=tokens)
        out.view(k, self.samples, *heads.shape[2:]).copy_(heads.transpose(0, 1))
        return out

    def _merge(self, heads: Tensor, name: str, out: Tensor) -> Tensor:
        """The adjoint of ``_split``, written to ``out`` (K, n·L, heads·s)."""
        shared, repeats, length = self._slots(name)
        k, size = heads.shape[0], heads.shape[3]
        parts = heads.view(k, self.samples, shared, repeats, length, size)
        if self.rotation is not None and name in ("query", "key"):
            parts = self.rotation.adjoint(parts.transpose(0, 1)).transpose(0, 1)
        tokens = parts.permute(0, 1, 4, 2, 3, 5)  # (K, n, L, G, H/G, s)
        out.view(tokens.shape).copy_(tokens)
        return out

    def _slots(self, name: str) -> tuple[int, int, int]:
        """(G, heads that share a slot, tokens) of the queries and what is mixed, or of the keys."""
        shared = self.spec.kv_heads
        if name in ("query", "output"):
            return shared, self.spec.n_heads // shared, self.length
        return shared, 1, self.key_length

    def _rows_of(self, pairs: Tensor | None) -> Tensor | None:
        """A mask (n or 1, H or 1, L or 1, L) as the slots see it: (n·G or 1, (H/G)·L or 1, L)."""
        if pairs is None:
            return None
        shared, repeats = self.spec.kv_heads, self.spec.n_heads // self.spec.kv_heads
        if pairs.shape[:2] == (1, 1) and repeats == 1:
            return pairs[0]
        full = pairs.expand(self.samples, self.spec.n_heads, self.length, self.key_length)
        return full.reshape(self.samples * shared, repeats * self.length, self.key_length)


class CrossAttentionStage(AttentionStage):
    """Attention of tokens x (N, d) to a memory M (n·L', m): its own keys and values.

        q = x W_Qᵀ,   k = M W_Kᵀ,   v = M W_Vᵀ

    The memory moves like a weight: its tangent is ``dots[MEMORY]`` (K, n, L', m), its rate is found
    where ``MEMORY`` is wanted and added to what ``into`` holds, since every block of a decoder has
    its share.
    """

    _joined = PROJECTIONS[1:]

    def __init__(
        self,
        spec: BlockSpec,
        weights: Weights,
        x: Tensor,
        *,
        memory: Tensor,
        mask: Tensor | None,
        keyless: Keyless = "refuse",
        blocked: bool = False,
    ) -> None:
        self.samples, self.key_length, _ = memory.shape
        # The options of the logits are those of the attention before it; the rest has no meaning.
        self.spec = spec = replace(spec, causal=False, window=None, rope_base=None)
        self.length = x.shape[0] // self.samples
        self._key = stage_number()
        self.memory = memory.reshape(-1, memory.shape[-1])  # (n·L', m)
        self.together, sources = _projections(weights, _MEMORY_PROJECTIONS)
        self.inputs = {"query": Linear(["cross_query"], weights)}
        self.inputs |= zip(self._joined, sources.values(), strict=True)
        self.rotation, self.norms, self.alike, self._buckets = None, {}, False, None
        tokens = {name: layer.value(self._input(name, x)) for name, layer in self.inputs.items()}
        pairs = LogitMask(
            spec=spec,
            mask=mask,
            samples=self.samples,
            length=self.length,
            dtype=x.dtype,
            device=x.device,
            keyless=keyless,
            key_length=self.key_length,
        )
        self._attend(tokens, pairs, blocked)
        self.output = Linear(["cross_output"], weights)

    def _input(self, name: str, x: Tensor) -> Tensor:
        return x if name == "query" else self.memory

    def _push_projections(
        self,
        x: Tensor,
        x_dot: Tensor | None,
        dots: Mapping[str, Tensor],
        directions: int,
        space: Buffers,
    ) -> tuple[list[Tensor | None], dict[str, list[NormTangent]]]:
        """q̇, k̇, v̇ in the slots' layout; keys and values in one matrix product where they can."""

        def push(layer: Linear, given: Tensor, moved: Tensor | None) -> Tensor | None:
            shape = (directions, len(given), layer.weight.shape[0])
            return layer.push(given, moved, dots, space.take("wide", *shape, like=given))

        def split(name: str, tokens: Tensor | None) -> Tensor | None:
            return None if tokens is None else self._split(tokens, name, space)

        heads = [split("query", push(self.inputs["query"], x, x_dot))]
        moved = _memory_dot(dots)
        if self.together is not None and _alike(self.together, dots):
            tokens = push(self.together, self.memory, moved)
            parts: Sequence[Tensor | None] = (None, None)
            if tokens is not None:
                parts = torch.split(tokens, list(self.together.sizes), -1)
            heads += [split(name, part) for name, part in zip(self._joined, parts, strict=True)]
        else:
            heads += [
                split(name, push(self.inputs[name], self.memory, moved)) for name in self._joined
            ]
        return heads, {}

    def _needs(self, needs_input: bool, backward: BackwardPass) -> Sequence[bool]:
        asked = {"query": needs_input, **dict.fromkeys(self._joined, MEMORY in backward.wanted)}
        return [
            asked[name]
            or backward.record
            or not backward.wanted.isdisjoint((*layer.weight_names, *layer.bias_names))
            for name, layer in self.inputs.items()
        ]

    def _merged(
        self,
        joint: Tensor | None,
        rates: Sequence[Tensor | None],
        dots: Mapping[str, Tensor],
        norms: Mapping[str, list[NormTangent]],
        backward: BackwardPass,
    ) -> Iterator[tuple[Linear, Tensor | None]]:
        """The projections with their outputs' Rδ as tokens, keys and values as one if possible."""

        def room(layer: Linear, like: Tensor) -> Tensor:
            given = self.samples * (
                self.length if layer is self.inputs["query"] else self.key_length
            )
            shape = (like.shape[0], given, layer.weight.shape[0])
            return backward.space.take("wide", *shape, like=like)

        names: Sequence[str] = PROJECTIONS
        key, value = rates[1:]
        if (
            self.together is not None
            and key is not None
            and value is not None
            and _alike(self.together, dots, backward.wanted)
        ):
            tokens = room(self.together, key)
            parts = torch.split(tokens, list(self.together.sizes), -1)
            self._merge(key, "key", parts[0])
            self._merge(value, "value", parts[1])
            yield self.together, tokens
            names = PROJECTIONS[:1]
        for name, rate in zip(names, rates, strict=False):
            layer = self.inputs[name]
            yield layer, None if rate is None else self._merge(rate, name, room(layer, rate))

    def _pull_inputs(
        self,
        merged: Iterator[tuple[Linear, Tensor | None]],
        x: Tensor,
        x_dot: Tensor | None,
        dots: Mapping[str, Tensor],
        directions: int,
        backward: BackwardPass,
        *,
        needs_input: bool,
    ) -> Tensor | None:
        """Rδ_x of the queries; Rδ_M of keys and values is added to what the pass has of it."""
        out = backward.space.take(f"cross.x{backward.turn}", directions, *x.shape, like=x)
        done, moved = False, _memory_dot(dots)
        total = self._memory_rate(directions, backward)
        for layer, tokens in merged:
            if layer is self.inputs["query"]:
                layer.rates(tokens, x, x_dot, backward)
                if needs_input:
                    done = layer.pull(tokens, dots, out)
                continue
            layer.rates(tokens, self.memory, moved, backward)
            if total is not None:
                layer.pull(tokens, dots, total, accumulate=True)
        return out if done else None

    def _memory_rate(self, directions: int, backward: BackwardPass) -> Tensor | None:
        """Where Rδ_M (K, n·L', m) is added up, None: nobody asks for it."""
        if MEMORY not in backward.wanted:
            return None
        if MEMORY not in backward.rates:
            shape = (directions, self.samples, self.key_length, self.memory.shape[-1])
            given = backward.into.get(MEMORY)
            backward.rates[MEMORY] = self.memory.new_zeros(shape) if given is None else given
        return backward.rates[MEMORY].flatten(1, 2)


def _memory_dot(dots: Mapping[str, Tensor]) -> Tensor | None:
    """Ṁ (K, n·L', m)."""
    moved = dots.get(MEMORY)
    return None if moved is None else moved.flatten(1, 2)


def with_joint_projections(weights: Weights) -> dict[str, Tensor]:
    """The same weights with query, key and value side by side in memory, copied if they are not.

    Chains that share these weights then share the copy that ``_projections`` would make for each.
    """
    joint = dict(weights)
    for names in (PROJECTIONS, _MEMORY_PROJECTIONS):
        if not all(f"{name}_weight" in weights for name in names):
            continue  # the block will say what it misses
        layer = _projections(weights, names)[0]
        if layer is not None:
            joint |= _columns_of(layer)
    return joint


def _projections(
    weights: Weights, names: Sequence[str] = PROJECTIONS
) -> tuple[Linear | None, dict[str, Linear]]:
    """Projections of one input as one layer (None where only some have a bias) and one by one."""
    biases = [f"{name}_bias" for name in names]
    if not complete(biases, weights):
        return None, {name: Linear([name], weights) for name in names}
    together = Linear(names, weights)
    return together, {name: Linear([name], _columns_of(together)) for name in names}


def _columns_of(layer: Linear) -> dict[str, Tensor]:
    """The weights of layers taken together, one by one (views)."""
    sizes = list(layer.sizes)
    views = dict(zip(layer.weight_names, torch.split(layer.weight, sizes), strict=True))
    if layer.bias is not None:
        views |= dict(zip(layer.bias_names, torch.split(layer.bias, sizes), strict=True))
    return views


def _weights_of(name: str) -> tuple[str, ...]:
    """The weights between the input and one of q, k, v."""
    return tuple(f"{part}_{kind}" for part in (name, f"{name}_norm") for kind in ("weight", "bias"))


def _alike(layer: Linear, *groups: Container[str]) -> bool:
    """Whether layers taken together have all or none of their weights, and biases, in each."""
    names = (layer.weight_names, layer.bias_names)
    return all(complete(group, some) for some in groups for group in names)
