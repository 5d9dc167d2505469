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
from curvatlas.blocks.products_linear import Linear, add
from curvatlas.blocks.products_mask import attention_mask
from curvatlas.blocks.rope import Rotation
from curvatlas.blocks.structure import BlockSpec, Weights

PROJECTIONS = ("query", "key", "value")


@dataclass
class AttentionTangent:
    """What the way back needs of the way forward."""

    x_dot: Tensor | None  # (K, N, d)
    output_dot: Tensor | None  # Ȯ as tokens (K, N, H·dv)
    core: CoreTangent
    weights: Mapping[str, Tensor]


class Attention:
    """Self-attention at tokens x (N, d), N = n · L."""

    def __init__(
        self, spec: BlockSpec, weights: Weights, x: Tensor, *, samples: int, mask: Tensor | None
    ) -> None:
        self.spec, self.samples, self.length = spec, samples, x.shape[0] // samples
        self.inputs = {
            name: Linear(x, weights[f"{name}_weight"], weights.get(f"{name}_bias"))
            for name in PROJECTIONS
        }
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
        heads = {name: self._split(self.inputs[name].value()[None], name) for name in PROJECTIONS}
        self.core = AttentionCore(
            heads["query"].squeeze(1),
            heads["key"].squeeze(1),
            heads["value"].squeeze(1),
            scale=spec.logit_scale,
            softmax=spec.softmax,
            bias=self._rows_of(bias),
            allowed=self._rows_of(allowed),
        )
        mixed = self._merge(self.core.output.unsqueeze(1), "output")[0]
        self.output: Linear | None = None
        if "output_weight" in weights:
            self.output = Linear(mixed, weights["output_weight"], weights.get("output_bias"))
        self._mixed = mixed

    def value(self) -> Tensor:
        """F (N, d)."""
        return self._mixed if self.output is None else self.output.value()

    def push(
        self, x_dot: Tensor | None, dots: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, AttentionTangent]:
        """Ḟ (K, N, d) and what ``pull`` needs."""
        heads = []
        for name in PROJECTIONS:
            moved = self.inputs[name].push(
                x_dot, dots.get(f"{name}_weight"), dots.get(f"{name}_bias")
            )
            heads.append(None if moved is None else self._split(moved, name))
        mixed, core = self.core.push(*heads)
        tokens = None if mixed is None else self._merge(mixed, "output")
        tangent = AttentionTangent(x_dot, tokens, core, dots)
        if self.output is None:
            return tokens, tangent
        result = self.output.push(tokens, dots.get("output_weight"), dots.get("output_bias"))
        return result, tangent

    def pull(
        self,
        rate: Tensor | None,
        tangent: AttentionTangent | None,
        *,
        wanted: frozenset[str],
        needs_input: bool,
        found: dict[str, Tensor | None],
        record: bool = False,
    ) -> Tensor | None:
        """Rδ_x from Rδ_F; puts the wanted weights' rates into ``found``."""
        dots: Mapping[str, Tensor] = {} if tangent is None else tangent.weights
        if self.output is not None:
            if record:
                assert rate is not None
                self.output.delta = rate[0]
            if "output_weight" in wanted:
                moved = None if tangent is None else tangent.output_dot
                found["output_weight"] = self.output.weight_rate(rate, moved)
            if "output_bias" in wanted:
                found["output_bias"] = self.output.bias_rate(rate)
        needs = tuple(
            needs_input or f"{name}_weight" in wanted or f"{name}_bias" in wanted
            for name in PROJECTIONS
        )
        if not any(needs):
            return None
        if self.output is not None:
            rate = self.output.pull(rate, dots.get("output_weight"))
        heads = None if rate is None else self._split(rate, "output")
        rates = self.core.pull(
            heads,
            None if tangent is None else tangent.core,
            needs=(needs[0], needs[1], needs[2]),
            record=record,
        )
        result: Tensor | None = None
        for name, head_rate in zip(PROJECTIONS, rates, strict=True):
            layer = self.inputs[name]
            tokens = None if head_rate is None else self._merge(head_rate, name)
            if record:
                assert tokens is not None
                layer.delta = tokens[0]
            if f"{name}_weight" in wanted:
                moved = None if tangent is None else tangent.x_dot
                found[f"{name}_weight"] = layer.weight_rate(tokens, moved)
            if f"{name}_bias" in wanted:
                found[f"{name}_bias"] = layer.bias_rate(tokens)
            if needs_input:
                result = add(result, layer.pull(tokens, dots.get(f"{name}_weight")))
        return result

    def _split(self, tokens: Tensor, name: str) -> Tensor:
        """Tokens (K, n·L, heads·s) → slots (n·G, K, (H/G)·L, s); queries and keys are rotated."""
        spec, shared = self.spec, self.spec.kv_heads
        repeats = spec.n_heads // shared if name in ("query", "output") else 1
        k, size = tokens.shape[0], tokens.shape[-1] // (shared * repeats)
        heads = tokens.view(k, self.samples, self.length, shared, repeats, size)
        heads = heads.permute(1, 3, 0, 4, 2, 5)  # (n, G, K, H/G, L, s)
        if self.rotation is not None and name in ("query", "key"):
            heads = self.rotation.apply(heads)
        return heads.reshape(self.samples * shared, k, repeats * self.length, size)

    def _merge(self, heads: Tensor, name: str) -> Tensor:
        """The adjoint of ``_split``."""
        spec, shared = self.spec, self.spec.kv_heads
        repeats = spec.n_heads // shared if name in ("query", "output") else 1
        k, size = heads.shape[1], heads.shape[-1]
        parts = heads.view(self.samples, shared, k, repeats, self.length, size)
        if self.rotation is not None and name in ("query", "key"):
            parts = self.rotation.adjoint(parts)
        tokens = parts.permute(2, 0, 4, 1, 3, 5)  # (K, n, L, G, H/G, s)
        return tokens.reshape(k, self.samples * self.length, shared * repeats * size)

    def _rows_of(self, pairs: Tensor | None) -> Tensor | None:
        """A mask (n or 1, H or 1, L or 1, L) as the slots see it: (n·G or 1, (H/G)·L or 1, L)."""
        if pairs is None:
            return None
        shared, repeats = self.spec.kv_heads, self.spec.n_heads // self.spec.kv_heads
        if pairs.shape[:2] == (1, 1) and repeats == 1:
            return pairs[0]
        full = pairs.expand(self.samples, self.spec.n_heads, self.length, self.length)
        return full.reshape(self.samples * shared, repeats * self.length, self.length)
