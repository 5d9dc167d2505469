r"""Which blocks of H, H_o and H_f vanish for every value of the weights, and why.

Read off the formula H_fg = Σ_i α_i (M_i α'_i + K_i δ'_i) of ``families``: a block is zero when both
of its terms are. The outer part is zero exactly where a direction at the output is (key bias under
softmax, queries and keys of a sequence of one token). The functional part needs curvature between
the two places: a norm behind them, a bent activation between them, attention itself, or a later
weight that multiplies what the earlier one moves. No number is looked at.
"""

from __future__ import annotations

from curvatlas.blocks.structure import BlockSpec

_ATTENTION = ("front", "query", "key", "value", "output")
_ORDER = (*_ATTENTION, "middle", "gate", "up", "down", "final")
_BENT = ("gelu", "gelu_tanh", "silu")


class StructuralZeros:
    """The zero pattern of a block's Hessian at a sequence length."""

    def __init__(self, spec: BlockSpec, names: tuple[str, ...], *, length: int) -> None:
        self.spec, self.names, self.length = spec, names, length
        post = spec.residual and not spec.norm_first
        curved = spec.norm != "none"
        bent = spec.activation in _BENT
        whole = spec.d_ff is not None
        # Functional curvature at the places of the tail: S, hidden, v, U (THEORY §5 with Λ_Z = 0).
        self.at_S = post and curved
        self.at_hidden = {
            ("gate", "gate"): self.at_S or bent,
            ("gate", "up"): True,  # ∂²g/∂h_gate∂h_up = f', never identically zero
            ("up", "up"): self.at_S or (bent and not spec.gated),
        }
        self.hidden_v = self.at_S or bent or spec.gated
        self.at_v = self.hidden_v
        self.at_U = self.at_S or (whole and (self.at_v or curved))

    def is_zero(self, a: str, b: str, part: str = "total") -> bool:
        """Whether block (a, b) of ``part`` is zero whatever the weights are."""
        if self._dead(a) or self._dead(b):
            return True
        return part == "functional" and not self._functional(a, b)

    def pairs(self, part: str) -> tuple[tuple[str, str], ...]:
        """All structurally zero blocks (a, b), a not after b in the order of the names."""
        return tuple(
            (a, b)
            for i, a in enumerate(self.names)
            for b in self.names[i:]
            if self.is_zero(a, b, part)
        )

    def _dead(self, name: str) -> bool:
        """Parameters the output does not depend on at all."""
        if not self.spec.softmax:
            return False
        if self.length == 1 and name.startswith(("query_", "key_")):
            return True
        # A key bias adds the same number to a whole row of logits; turned by rotary positions it
        # differs from key to key and does count.
        return name == "key_bias" and self.spec.rope_base is None

    def _kind(self, name: str) -> str:
        role = name.removesuffix("_weight").removesuffix("_bias")
        if role == "norm1":
            if self.spec.norm_first:
                return "front"
            return "final" if self.spec.d_ff is None else "middle"
        if role == "norm2":
            return "middle" if self.spec.norm_first else "final"
        return role

    def _functional(self, a: str, b: str) -> bool:
        """Whether H_f(a, b) can be different from zero."""
        if _ORDER.index(self._kind(a)) > _ORDER.index(self._kind(b)):
            a, b = b, a
        f, g, weight = self._kind(a), self._kind(b), b.endswith("_weight")
        if g == "final":
            # β enters the output linearly and nothing follows it; γ multiplies what moves.
            return f != "final" and weight
        if f in _ATTENTION and g in _ATTENTION:
            return self._attention(f, g, a, b)
        if g == "middle":
            if f == "middle":
                return self.at_v
            return weight or self.at_v
        if g in ("gate", "up"):
            if f in ("gate", "up"):
                return self.at_hidden[(f, g)]
            return weight or self.hidden_v
        assert g == "down"
        if f == "down":
            return self.at_S
        return weight or self.at_S

    def _attention(self, f: str, g: str, a: str, b: str) -> bool:
        weight, softmax = b.endswith("_weight"), self.spec.softmax
        if g == "output":
            return self.at_U or (f != "output" and weight)
        if g == "value":
            # The row sum of A is constant under softmax: a value bias is not re-weighted.
            return self.at_U or (f != "value" and (weight or not softmax))
        if f == g and f != "front":
            return self.at_U or softmax  # without softmax the logits enter linearly
        return True
