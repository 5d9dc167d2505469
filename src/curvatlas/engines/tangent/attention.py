r"""Self-attention F = concat_h(A^h V^h) W_Oᵀ + b_O with projections, rotation and grouped heads.

Projections are linear layers of the tokens; between them and the core stand only linear
rearrangements (tokens to heads, rotary positions), so tangents pass through them unchanged and
adjoints through their transposes. ``None`` is zero.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.engines.tangent.attention_core import AttentionCore, CoreTangent, attention_mask
from curvatlas.engines.tangent.linear import (
    BackwardPass,
    Buffers,
    Linear,
    complete,
    count_directions,
    stage_number,
)
from curvatlas.engines.tangent.structure import BlockSpec, Weights
from curvatlas.precision import float64_device


class Rotation:
    """Rotary positions: the rotation R_i of each of L positions; ``angles`` (L, s/2).

    Coordinate p turns with coordinate p + s/2 (Llama's layout) by the angle i · base^(−2p/s). The
    map is linear and orthogonal: its tangent is the same rotation, its adjoint the opposite one.
    """

    def __init__(self, angles: Tensor) -> None:
        self.cos = angles.cos()
        self.sin = angles.sin()

    @classmethod
    def from_base(
        cls, base: float, *, length: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> Rotation:
        """Angles i · base^(−2p/s) for positions 0 … L−1 and p < s/2."""
        if size % 2:
            raise ValueError(f"rotary positions pair coordinates: head size {size} is odd.")
        if not base > 0:
            raise ValueError(f"rope_base must be positive, got {base!r}.")
        half = size // 2
        # Angles in float64 whatever the dtype: position × frequency loses digits for long inputs.
        place = float64_device(device)
        exponent = torch.arange(half, dtype=torch.float64, device=place) / half
        position = torch.arange(length, dtype=torch.float64, device=place)
        return cls((position[:, None] * base ** (-exponent)).to(dtype=dtype).to(device=device))

    def apply(self, x: Tensor) -> Tensor:
        """R_i x_i:  (…, L, s) → (…, L, s)."""
        return _turn(x, self.cos, self.sin)

    def adjoint(self, x: Tensor) -> Tensor:
        """R_iᵀ x_i:  (…, L, s) → (…, L, s)."""
        return _turn(x, self.cos, -self.sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


PROJECTIONS = ("query", "key", "value")


@dataclass
class AttentionTangent:
    """What the backward pass needs of the forward pass."""

    mixed_dot: Tensor | None  # Ȯ as tokens (K, N, H·dv)
    core: CoreTangent
    weights: Mapping[str, Tensor]


class AttentionStage:
    """Self-attention at tokens x (N, d), N = n · L."""

    def __init__(
        self, spec: BlockSpec, weights: Weights, x: Tensor, *, samples: int, mask: Tensor | None
    ) -> None:
        self.spec, self.samples, self.length = spec, samples, x.shape[0] // samples
        self._key = stage_number()
        self.together, self.inputs = _projections(weights)
        self.rotation: Rotation | None = None
        if spec.rope_base is not None:
            self.rotation = Rotation.from_base(
                spec.rope_base,
                length=self.length,
                size=spec.key_size,
                dtype=x.dtype,
                device=x.device,
            )
        bias, allowed = attention_mask(
            spec, mask, samples=samples, length=self.length, dtype=x.dtype, device=x.device
        )
        fresh = Buffers(keep=False)
        q, k, v = (
            self._split(self.inputs[name].value(x).unsqueeze(0), name, fresh).squeeze(1)
            for name in PROJECTIONS
        )
        self.core = AttentionCore(
            q,
            k,
            v,
            scale=spec.logit_scale,
            softmax=spec.softmax,
            bias=self._rows_of(bias),
            allowed=self._rows_of(allowed),
        )
        mixed = self.core.value().unsqueeze(1)
        width = spec.n_heads * spec.value_size
        self._mixed = self._merge(mixed, "output", x.new_empty(1, x.shape[0], width))[0]
        self.output: Linear | None = None
        if "output_weight" in weights:
            self.output = Linear(["output"], weights)

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
        heads = self._push_projections(x, x_dot, dots, directions, space)
        mixed, core = self.core.push(heads[0], heads[1], heads[2], space)
        tokens: Tensor | None = None
        if mixed is not None:
            buffer = space.take(self._key + "merged", directions, *self._mixed.shape, like=mixed)
            tokens = self._merge(mixed, "output", buffer)
        if tokens is not None and core.centre is not None:
            self._subtract(core.centre, self._mixed, tokens)
        tangent = AttentionTangent(tokens, core, dots)
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
        query, key, value = (
            needs_input
            or backward.record
            or f"{name}_weight" in backward.wanted
            or f"{name}_bias" in backward.wanted
            for name in PROJECTIONS
        )
        if not (query or key or value):
            return None
        direction = next((t for t in (rate, x_dot, *dots.values()) if t is not None), None)
        if direction is None:
            return None
        directions = direction.shape[0]
        if self.output is not None:
            shape = (directions, *self._mixed.shape)
            buffer = backward.space.take("wide", *shape, like=self._mixed)
            rate = buffer if self.output.pull(rate, dots, buffer) else None
        rates = self.core.pull(
            None if rate is None else self._split(rate, "output", backward.space),
            None if tangent is None else tangent.core,
            backward,
            needs=(query, key, value),
        )
        centre = None if tangent is None else tangent.core.centre
        out = backward.space.take(f"attention.x{backward.turn}", directions, *x.shape, like=x)
        done = False
        for layer, tokens in self._merged(rates, centre, dots, backward):
            layer.rates(tokens, x, x_dot, backward)
            if needs_input:
                done = layer.pull(tokens, dots, out, accumulate=done)
        if backward.record:
            self._share_adjoint()
        return out if done else None

    def _push_projections(
        self,
        x: Tensor,
        x_dot: Tensor | None,
        dots: Mapping[str, Tensor],
        directions: int,
        space: Buffers,
    ) -> list[Tensor | None]:
        """q̇, k̇, v̇ in the slots' layout; in one matrix product where all three move alike."""
        layer = self.together
        if layer is not None and _alike(layer, dots):
            shape = (directions, self._mixed.shape[0], layer.weight.shape[0])
            buffer = space.take("wide", *shape, like=self._mixed)
            tokens = layer.push(x, x_dot, dots, buffer)
            if tokens is None:
                return [None, None, None]
            parts = torch.split(tokens, list(layer.sizes), -1)
            named = zip(PROJECTIONS, parts, strict=True)
            return [self._split(part, name, space) for name, part in named]
        heads: list[Tensor | None] = []
        for name, layer in self.inputs.items():
            shape = (directions, self._mixed.shape[0], layer.weight.shape[0])
            buffer = space.take("wide", *shape, like=self._mixed)
            moved = layer.push(x, x_dot, dots, buffer)
            heads.append(None if moved is None else self._split(moved, name, space))
        return heads

    def _merged(
        self,
        rates: Sequence[Tensor | None],
        centre: Tensor | None,
        dots: Mapping[str, Tensor],
        backward: BackwardPass,
    ) -> Iterator[tuple[Linear, Tensor | None]]:
        """The projections with their outputs' Rδ as tokens, all three as one where they can be."""
        layer = self.together
        present = [rate for rate in rates if rate is not None]
        if layer is not None and len(present) == 3 and _alike(layer, dots, backward.wanted):
            shape = (present[0].shape[1], self._mixed.shape[0], layer.weight.shape[0])
            tokens: Tensor = backward.space.take("wide", *shape, like=self._mixed)
            parts = torch.split(tokens, list(layer.sizes), -1)
            for name, rate, part in zip(PROJECTIONS, present, parts, strict=True):
                self._merge(rate, name, part)
            self._correct_query(parts[0], centre)
            yield layer, tokens
            return
        for (name, single), head_rate in zip(self.inputs.items(), rates, strict=True):
            if head_rate is None:
                yield single, None
                continue
            shape = (head_rate.shape[1], self._mixed.shape[0], single.weight.shape[0])
            buffer = backward.space.take("wide", *shape, like=head_rate)
            tokens = self._merge(head_rate, name, buffer)
            if name == "query":
                self._correct_query(tokens, centre)
            yield single, tokens

    def _correct_query(self, tokens: Tensor, centre: Tensor | None) -> None:
        """The core's Rδ_q + c δ_q without its second term."""
        delta = self.inputs["query"].delta
        if centre is not None and delta is not None:
            self._subtract(centre, delta, tokens)

    def _share_adjoint(self) -> None:
        """Let the three projections see their columns of the common adjoint."""
        if self.together is not None and self.together.delta is not None:
            parts = torch.split(self.together.delta, list(self.together.sizes), -1)
            for layer, part in zip(self.inputs.values(), parts, strict=True):
                layer.delta = part

    def _split(self, tokens: Tensor, name: str, space: Buffers) -> Tensor:
        """Tokens (K, n·L, heads·s) → slots (n·G, K, s, (H/G)·L); queries and keys are rotated."""
        shared = self.spec.kv_heads
        repeats = self.spec.n_heads // shared if name in ("query", "output") else 1
        k, size = tokens.shape[0], tokens.shape[-1] // (shared * repeats)
        heads = tokens.view(k, self.samples, self.length, shared, repeats, size)
        heads = heads.permute(1, 3, 0, 4, 2, 5)  # (n, G, K, H/G, L, s)
        if self.rotation is not None and name in ("query", "key"):
            heads = self.rotation.apply(heads)
        heads = heads.permute(0, 1, 2, 5, 3, 4)  # (n, G, K, s, H/G, L)
        # Tangents of q, k, v wait for the backward pass: their buffers are this stage's own.
        key = "attention.split" if name == "output" else self._key + name
        out = space.take(key, self.samples * shared, k, size, repeats * self.length, like=tokens)
        out.view(heads.shape).copy_(heads)
        return out

    def _merge(self, heads: Tensor, name: str, out: Tensor) -> Tensor:
        """The adjoint of ``_split``, written to ``out`` (K, n·L, heads·s)."""
        shared = self.spec.kv_heads
        repeats = self.spec.n_heads // shared if name in ("query", "output") else 1
        k, size = heads.shape[1], heads.shape[2]
        parts = heads.view(self.samples, shared, k, size, repeats, self.length)
        parts = parts.permute(0, 1, 2, 4, 5, 3)  # (n, G, K, H/G, L, s)
        if self.rotation is not None and name in ("query", "key"):
            parts = self.rotation.adjoint(parts)
        tokens = parts.permute(2, 0, 4, 1, 3, 5)  # (K, n, L, G, H/G, s)
        out.view(tokens.shape).copy_(tokens)
        return out

    def _subtract(self, centre: Tensor, base: Tensor, tokens: Tensor) -> None:
        """tokens (K, N, H·s) −= c · base (N, H·s), c (n·G, K, 1, (H/G)·L) one a head and row."""
        n, length, shared = self.samples, self.length, self.spec.kv_heads
        k, repeats = centre.shape[1], self.spec.n_heads // shared
        factor = centre.view(n, shared, k, 1, repeats, length).permute(2, 0, 5, 1, 4, 3)
        parts = (n, length, shared, repeats, -1)
        tokens.view(k, *parts).addcmul_(factor, base.view(1, *parts), value=-1)

    def _rows_of(self, pairs: Tensor | None) -> Tensor | None:
        """A mask (n or 1, H or 1, L or 1, L) as the slots see it: (n·G or 1, (H/G)·L or 1, L)."""
        if pairs is None:
            return None
        shared, repeats = self.spec.kv_heads, self.spec.n_heads // self.spec.kv_heads
        if pairs.shape[:2] == (1, 1) and repeats == 1:
            return pairs[0]
        full = pairs.expand(self.samples, self.spec.n_heads, self.length, self.length)
        return full.reshape(self.samples * shared, repeats * self.length, self.length)


def with_joint_projections(weights: Weights) -> dict[str, Tensor]:
    """The same weights with query, key and value side by side in memory, copied if they are not.

    Chains that share these weights then share the copy that ``_projections`` would make for each.
    """
    if not all(f"{name}_weight" in weights for name in PROJECTIONS):
        return dict(weights)  # the block will say what it misses
    layer = _projections(weights)[0]
    return dict(weights) if layer is None else {**weights, **_columns_of(layer)}


def _projections(weights: Weights) -> tuple[Linear | None, dict[str, Linear]]:
    """The three projections as one layer (None where only some have a bias) and one by one."""
    biases = [f"{name}_bias" for name in PROJECTIONS]
    if not complete(biases, weights):
        return None, {name: Linear([name], weights) for name in PROJECTIONS}
    together = Linear(PROJECTIONS, weights)
    return together, {name: Linear([name], _columns_of(together)) for name in PROJECTIONS}


def _columns_of(layer: Linear) -> dict[str, Tensor]:
    """The weights of layers taken together, one by one (views)."""
    sizes = list(layer.sizes)
    views = dict(zip(layer.weight_names, torch.split(layer.weight, sizes), strict=True))
    if layer.bias is not None:
        views |= dict(zip(layer.bias_names, torch.split(layer.bias, sizes), strict=True))
    return views


def _alike(layer: Linear, *groups: Container[str]) -> bool:
    """Whether layers taken together have all or none of their weights, and biases, in each."""
    names = (layer.weight_names, layer.bias_names)
    return all(complete(group, some) for some in groups for group in names)
