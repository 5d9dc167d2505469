r"""Self-attention F = concat_h(A^h V^h) W_Oᵀ + b_O with projections, rotation and grouped heads.

Projections are linear layers of the tokens; between them and the core stand only linear
rearrangements (tokens to heads, rotary positions), so tangents pass through them unchanged and
adjoints through their transposes. ``None`` is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from curvatlas.blocks.products_core import AttentionCore, CoreTangent
from curvatlas.blocks.products_linear import Linear
from curvatlas.blocks.products_mask import attention_mask
from curvatlas.blocks.products_workspace import Way, Workspace, stage_number
from curvatlas.blocks.rope import Rotation
from curvatlas.blocks.structure import BlockSpec, Weights

PROJECTIONS = ("query", "key", "value")


@dataclass
class AttentionTangent:
    """What the way back needs of the way forward."""

    x_dot: Tensor | None  # (K, N, d)
    mixed_dot: Tensor | None  # Ȯ as tokens (K, N, H·dv)
    core: CoreTangent
    weights: Mapping[str, Tensor]


class Attention:
    """Self-attention at tokens x (N, d), N = n · L."""

    def __init__(
        self, spec: BlockSpec, weights: Weights, x: Tensor, *, samples: int, mask: Tensor | None
    ) -> None:
        self.spec, self.samples, self.length = spec, samples, x.shape[0] // samples
        self._key = stage_number()
        self.inputs = {name: Linear(name, weights, x) for name in PROJECTIONS}
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
        fresh = Workspace(keep=False)
        q, k, v = (
            self._split(self.inputs[name].value().unsqueeze(0), name, fresh).squeeze(1)
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
        self._mixed = self._merge(self.core.value().unsqueeze(1), "output", fresh)[0]
        self.output: Linear | None = None
        if "output_weight" in weights:
            self.output = Linear("output", weights, self._mixed)

    def value(self) -> Tensor:
        """F (N, d)."""
        return self._mixed if self.output is None else self.output.value()

    def push(
        self, x_dot: Tensor | None, dots: Mapping[str, Tensor], space: Workspace, *, key: str
    ) -> tuple[Tensor | None, AttentionTangent]:
        """Ḟ (K, N, d), in the buffer of ``key``, and what ``pull`` needs."""
        heads: list[Tensor | None] = []
        directions = x_dot.shape[0] if x_dot is not None else next(iter(dots.values())).shape[0]
        for name in PROJECTIONS:
            layer = self.inputs[name]
            shape = (directions, layer.x.shape[0], layer.weight.shape[0])
            moved = layer.push(x_dot, dots, space.take("attention." + name, *shape, like=layer.x))
            heads.append(None if moved is None else self._split(moved, name, space))
        mixed, core = self.core.push(heads[0], heads[1], heads[2], space)
        tokens = None if mixed is None else self._merge(mixed, "output", space)
        if tokens is not None and core.centre is not None:
            self._subtract(core.centre, self._mixed, tokens)
        tangent = AttentionTangent(x_dot, tokens, core, dots)
        shape = (directions, *self.inputs["query"].x.shape)
        out = space.take(key, *shape, like=self._mixed)
        if self.output is None:
            return (None if tokens is None else out.copy_(tokens)), tangent
        return self.output.push(tokens, dots, out), tangent

    def pull(
        self,
        rate: Tensor | None,
        tangent: AttentionTangent | None,
        way: Way,
        *,
        needs_input: bool,
    ) -> Tensor | None:
        """Rδ_x from Rδ_F; finds the wanted weights' rates on the way."""
        dots: Mapping[str, Tensor] = {} if tangent is None else tangent.weights
        x_dot = None if tangent is None else tangent.x_dot
        if self.output is not None:
            self.output.rates(rate, None if tangent is None else tangent.mixed_dot, way)
        needs = [
            needs_input or f"{name}_weight" in way.wanted or f"{name}_bias" in way.wanted
            for name in PROJECTIONS
        ]
        if not (any(needs) or way.record):
            return None
        given = next((t for t in (rate, x_dot, *dots.values()) if t is not None), None)
        if given is None:
            return None
        directions = given.shape[0]
        if self.output is not None:
            shape = (directions, *self._mixed.shape)
            buffer = way.space.take("attention.mixed", *shape, like=self._mixed)
            rate = buffer if self.output.pull(rate, dots, buffer) else None
        rates = self.core.pull(
            None if rate is None else self._split(rate, "output", way.space),
            None if tangent is None else tangent.core,
            way,
            needs=(True, True, True) if way.record else (needs[0], needs[1], needs[2]),
        )
        shape = (directions, *self.inputs["query"].x.shape)
        out = way.space.take(f"attention.x{way.turn}", *shape, like=self._mixed)
        done = False
        for name, head_rate in zip(PROJECTIONS, rates, strict=True):
            layer = self.inputs[name]
            tokens = None if head_rate is None else self._merge(head_rate, name, way.space)
            if name == "query" and tokens is not None and tangent is not None:
                centre, delta = tangent.core.centre, layer.delta
                if centre is not None and delta is not None:
                    self._subtract(centre, delta, tokens)
            layer.rates(tokens, x_dot, way)
            if needs_input:
                done = layer.pull(tokens, dots, out, accumulate=done)
        return out if done else None

    def _split(self, tokens: Tensor, name: str, space: Workspace) -> Tensor:
        """Tokens (K, n·L, heads·s) → slots (n·G, K, (H/G)·L, s); queries and keys are rotated."""
        shared = self.spec.kv_heads
        repeats = self.spec.n_heads // shared if name in ("query", "output") else 1
        k, size = tokens.shape[0], tokens.shape[-1] // (shared * repeats)
        heads = tokens.view(k, self.samples, self.length, shared, repeats, size)
        heads = heads.permute(1, 3, 0, 4, 2, 5)  # (n, G, K, H/G, L, s)
        if self.rotation is not None and name in ("query", "key"):
            heads = self.rotation.apply(heads)
        # Tangents of q, k, v wait for the way back: their buffers are this stage's own.
        key = "attention.split" if name == "output" else self._key + name
        out = space.take(key, self.samples * shared, k, repeats * self.length, size, like=tokens)
        out.view(heads.shape).copy_(heads)
        return out

    def _merge(self, heads: Tensor, name: str, space: Workspace) -> Tensor:
        """The adjoint of ``_split``."""
        shared = self.spec.kv_heads
        repeats = self.spec.n_heads // shared if name in ("query", "output") else 1
        k, size = heads.shape[1], heads.shape[-1]
        parts = heads.view(self.samples, shared, k, repeats, self.length, size)
        if self.rotation is not None and name in ("query", "key"):
            parts = self.rotation.adjoint(parts)
        tokens = parts.permute(2, 0, 4, 1, 3, 5)  # (K, n, L, G, H/G, s)
        key = self._key + "merged" if name == "output" else "attention." + name
        width = shared * repeats * size
        out = space.take(key, k, self.samples * self.length, width, like=heads)
        out.view(tokens.shape).copy_(tokens)
        return out

    def _subtract(self, centre: Tensor, base: Tensor, tokens: Tensor) -> None:
        """tokens (K, N, H·s) −= c · base (N, H·s), c (n·G, K, (H/G)·L, 1) one a head and row."""
        n, length, shared = self.samples, self.length, self.spec.kv_heads
        k, repeats = centre.shape[1], self.spec.n_heads // shared
        factor = centre.view(n, shared, k, repeats, length, 1).permute(2, 0, 4, 1, 3, 5)
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
