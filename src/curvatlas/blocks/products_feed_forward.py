r"""The feed-forward part down(g(h)), h = up(v), or g = f(h_gate) ⊙ h_up, twice differentiated.

    ġ = D1 ḣ,   δ_h = D1 t,   Rδ_h = D1 Rt + (D2 t) ḣ,   t = δ_S W_down          (THEORY 9)

with D1, D2 of THEORY 3.3, per hidden unit (2 × 2 when gated). ``None`` is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from curvatlas.blocks.activations import hidden_units
from curvatlas.blocks.products_linear import Linear, add
from curvatlas.blocks.structure import BlockSpec, Weights


@dataclass
class FeedForwardTangent:
    """What the way back needs of the way forward, K directions."""

    x_dot: Tensor | None  # (K, N, d)
    up_dot: Tensor | None  # (K, N, d_ff)
    gate_dot: Tensor | None  # (K, N, d_ff)
    hidden_dot: Tensor | None  # (K, N, d_ff)
    weights: Mapping[str, Tensor]


class FeedForward:
    """The feed-forward part at its input x (N, d)."""

    def __init__(self, spec: BlockSpec, weights: Weights, x: Tensor) -> None:
        self.up = Linear(x, weights["up_weight"], weights.get("up_bias"))
        self.gate: Linear | None = None
        if spec.gated:
            self.gate = Linear(x, weights["gate_weight"], weights.get("gate_bias"))
        gate = None if self.gate is None else self.gate.value()
        units = hidden_units(spec.activation, self.up.value(), gate)
        self.down = Linear(units.value, weights["down_weight"], weights.get("down_bias"))
        self.slope_up, self.slope_gate = units.slope_up, units.slope_gate
        # D2 until an adjoint is recorded, D2 ⊙ t after: the products only ever need the latter.
        straight = spec.activation in ("relu", "identity")
        self._bend_up = None if straight else units.bend_up
        self._bend_gate = None if straight else units.bend_gate
        self._bend_cross = units.bend_cross
        self._up_bend: Tensor | None = None
        self._gate_bend: Tensor | None = None
        self._cross_bend: Tensor | None = None

    def value(self) -> Tensor:
        """(N, d)."""
        return self.down.value()

    def push(
        self, x_dot: Tensor | None, dots: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, FeedForwardTangent]:
        """The output's tangent (K, N, d) and what ``pull`` needs."""
        up_dot = self.up.push(x_dot, dots.get("up_weight"), dots.get("up_bias"))
        gate_dot = None
        if self.gate is not None:
            gate_dot = self.gate.push(x_dot, dots.get("gate_weight"), dots.get("gate_bias"))
        hidden_dot = None if up_dot is None else up_dot * self.slope_up
        if gate_dot is not None:
            assert self.slope_gate is not None
            hidden_dot = (
                gate_dot * self.slope_gate
                if hidden_dot is None
                else hidden_dot.addcmul_(gate_dot, self.slope_gate)
            )
        tangent = FeedForwardTangent(x_dot, up_dot, gate_dot, hidden_dot, dots)
        result = self.down.push(hidden_dot, dots.get("down_weight"), dots.get("down_bias"))
        return result, tangent

    def pull(
        self,
        rate: Tensor | None,
        tangent: FeedForwardTangent | None,
        *,
        wanted: frozenset[str],
        needs_input: bool,
        found: dict[str, Tensor | None],
        record: bool = False,
    ) -> Tensor | None:
        """Rδ_x from the output's Rδ; puts the wanted weights' rates into ``found``."""
        if record:
            assert rate is not None
            self.down.delta = rate[0]
        if "down_weight" in wanted:
            moved = None if tangent is None else tangent.hidden_dot
            found["down_weight"] = self.down.weight_rate(rate, moved)
        if "down_bias" in wanted:
            found["down_bias"] = self.down.bias_rate(rate)
        inner = {"up_weight", "up_bias", "gate_weight", "gate_bias"}
        if not (needs_input or wanted & inner):
            return None
        dots: Mapping[str, Tensor] = {} if tangent is None else tangent.weights
        hidden_rate = self.down.pull(rate, dots.get("down_weight"))
        up_rate, gate_rate = self._through_units(hidden_rate, tangent)
        if record:
            assert hidden_rate is not None
            self._keep(hidden_rate[0], up_rate, gate_rate)
        result: Tensor | None = None
        layers = {"up": (self.up, up_rate), "gate": (self.gate, gate_rate)}
        for name, (layer, layer_rate) in layers.items():
            if layer is None:
                continue
            if f"{name}_weight" in wanted:
                moved = None if tangent is None else tangent.x_dot
                found[f"{name}_weight"] = layer.weight_rate(layer_rate, moved)
            if f"{name}_bias" in wanted:
                found[f"{name}_bias"] = layer.bias_rate(layer_rate)
            if needs_input:
                result = add(result, layer.pull(layer_rate, dots.get(f"{name}_weight")))
        return result

    def _through_units(
        self, rate: Tensor | None, tangent: FeedForwardTangent | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Rδ_h of both channels from Rt."""
        up_dot = None if tangent is None else tangent.up_dot
        gate_dot = None if tangent is None else tangent.gate_dot
        up_rate = None if rate is None else rate * self.slope_up
        up_rate = _add_scaled(up_rate, self._up_bend, up_dot)
        up_rate = _add_scaled(up_rate, self._cross_bend, gate_dot)
        if self.gate is None:
            return up_rate, None
        gate_rate = None
        if rate is not None:
            assert self.slope_gate is not None
            gate_rate = rate * self.slope_gate
        gate_rate = _add_scaled(gate_rate, self._gate_bend, gate_dot)
        gate_rate = _add_scaled(gate_rate, self._cross_bend, up_dot)
        return up_rate, gate_rate

    def _keep(self, t: Tensor, up_rate: Tensor | None, gate_rate: Tensor | None) -> None:
        """Keep the adjoints δ_h and ρ = D2 ⊙ t."""
        self.up.delta = None if up_rate is None else up_rate[0]
        if self.gate is not None:
            self.gate.delta = None if gate_rate is None else gate_rate[0]
        self._up_bend = None if self._bend_up is None else self._bend_up * t
        self._gate_bend = None if self._bend_gate is None else self._bend_gate * t
        self._cross_bend = None if self._bend_cross is None else self._bend_cross * t


def _add_scaled(total: Tensor | None, scale: Tensor | None, moved: Tensor | None) -> Tensor | None:
    """total + scale ⊙ moved in place, ``None`` being zero."""
    if scale is None or moved is None:
        return total
    return moved * scale if total is None else total.addcmul_(moved, scale)
