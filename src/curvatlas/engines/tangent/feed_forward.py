r"""The feed-forward part down(g(h)), h = up(v), or g = f(h_gate) ⊙ h_up, twice differentiated.

    ġ = D1 ḣ,   δ_h = D1 t,   Rδ_h = D1 Rt + (D2 t) ḣ,   t = δ_S W_down          (derivations §11)

with D1, D2 of derivations §6, per hidden unit (2 × 2 when gated). ``None`` is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.engines.tangent.linear import (
    BackwardPass,
    Buffers,
    Linear,
    count_directions,
    stage_number,
)
from curvatlas.layers.activations import hidden_units
from curvatlas.layers.structure import BlockSpec, Weights

# ---- activations: f and its derivatives, no autograd (derivations §6) --------------------------


@dataclass
class FeedForwardTangent:
    """What the backward pass needs of the forward pass, K directions."""

    up_dot: Tensor | None  # (K, N, d_ff); without a gate ġ
    gate_dot: Tensor | None  # (K, N, d_ff)
    weights: Mapping[str, Tensor]


class FeedForwardStage:
    """The feed-forward part at its input x (N, d)."""

    def __init__(self, spec: BlockSpec, weights: Weights, x: Tensor) -> None:
        self._key = stage_number()
        self.up = Linear(["up"], weights)
        self.gate = Linear(["gate"], weights) if spec.gated else None
        self.down = Linear(["down"], weights)
        gate = None if self.gate is None else self.gate.value(x)
        units = hidden_units(spec.activation, self.up.value(x), gate)
        self.hidden = units.value  # g (N, d_ff)
        self.slope_up, self.slope_gate = units.slope_up, units.slope_gate
        # D2 until an adjoint is recorded, D2 ⊙ t after: products only ever need the latter. Without
        # a gate D2 ⊙ t / D1: its factor is then ġ = D1 ḣ, which W_down's rate needs as well, and ḣ
        # need not be kept (one pass of three over the hidden units saved on the way back).
        straight = spec.activation in ("relu", "identity")
        self.bend_up = None if straight else units.bend_up
        self.bend_gate = None if straight else units.bend_gate
        self.bend_cross = units.bend_cross
        if self.bend_up is not None:
            self.slope_up = _away_from_zero(self.slope_up, self.bend_up)
        self._recorded = False

    def attach(self, weights: Weights) -> None:
        """Multiply with these weights from now on."""
        for layer in (self.up, self.gate, self.down):
            if layer is not None:
                layer.attach(weights)

    def detach(self) -> None:
        """Let go of the weights until ``attach`` brings them again."""
        for layer in (self.up, self.gate, self.down):
            if layer is not None:
                layer.detach()

    def value(self) -> Tensor:
        """(N, d)."""
        return self.down.value(self.hidden)

    def push(
        self,
        x: Tensor,
        x_dot: Tensor | None,
        dots: Mapping[str, Tensor],
        space: Buffers,
        *,
        key: str,
    ) -> tuple[Tensor | None, FeedForwardTangent]:
        """The output's tangent (K, N, d), in the buffer of ``key``, and what ``pull`` needs."""
        directions = count_directions(x_dot, dots)
        shape = (directions, *self.slope_up.shape)
        up = space.take(self._key + "up", *shape, like=self.slope_up)
        up_dot = self.up.push(x, x_dot, dots, up)
        gate_dot: Tensor | None = None
        if self.gate is not None:
            gate = space.take(self._key + "gate", *shape, like=self.slope_up)
            gate_dot = self.gate.push(x, x_dot, dots, gate)
        if self.gate is None and up_dot is not None:
            up_dot *= self.slope_up
        tangent = FeedForwardTangent(up_dot, gate_dot, dots)
        out = space.take(key, directions, *x.shape, like=x)
        hidden_dot = self._hidden_dot(up_dot, gate_dot, space)
        return self.down.push(self.hidden, hidden_dot, dots, out), tangent

    def pull(
        self,
        rate: Tensor | None,
        tangent: FeedForwardTangent | None,
        backward: BackwardPass,
        *,
        x: Tensor,
        x_dot: Tensor | None,
        needs_input: bool,
    ) -> Tensor | None:
        """Rδ_x from the output's Rδ; finds the wanted weights' rates on the way."""
        if tangent is None:
            up_dot, gate_dot = None, None
            dots: Mapping[str, Tensor] = {}
        else:
            up_dot, gate_dot, dots = tangent.up_dot, tangent.gate_dot, tangent.weights
        hidden_dot = None
        if backward.wants(self.down.weight_names):
            hidden_dot = self._hidden_dot(up_dot, gate_dot, backward.space)
        self.down.rates(rate, self.hidden, hidden_dot, backward)
        inner = {"up_weight", "up_bias", "gate_weight", "gate_bias"}
        if not (needs_input or backward.wanted & inner or backward.record):
            return None
        directions = count_directions(rate if rate is not None else x_dot, dots)
        shape = (directions, *self.slope_up.shape)
        buffer = backward.space.take("wide", *shape, like=self.slope_up)
        t = buffer if self.down.pull(rate, dots, buffer) else None
        up_rate, gate_rate = self._through_units(t, up_dot, gate_dot, backward, shape)
        self.up.rates(up_rate, x, x_dot, backward)
        out = backward.space.take(f"ffn.x{backward.turn}", directions, *x.shape, like=x)
        if self.gate is not None:
            self.gate.rates(gate_rate, x, x_dot, backward)
        if not needs_input:
            return None
        done = self.up.pull(up_rate, dots, out)
        if self.gate is not None:
            done = self.gate.pull(gate_rate, dots, out, accumulate=done)
        return out if done else None

    def _hidden_dot(
        self, up_dot: Tensor | None, gate_dot: Tensor | None, space: Buffers
    ) -> Tensor | None:
        """ġ (K, N, d_ff); with a gate formed on both ways: a pass is cheaper than the memory."""
        if self.gate is None:
            return up_dot
        moved = up_dot if up_dot is not None else gate_dot
        if moved is None:
            return None
        out = space.take("wide", *moved.shape, like=moved)
        return _sum_of_products(out, (self.slope_up, up_dot), (self.slope_gate, gate_dot))

    def _through_units(
        self,
        t: Tensor | None,
        up_dot: Tensor | None,
        gate_dot: Tensor | None,
        backward: BackwardPass,
        shape: tuple[int, ...],
    ) -> tuple[Tensor | None, Tensor | None]:
        """Rδ_h of both channels from Rt."""
        gate_rate: Tensor | None = None
        bends = (self.bend_up, self.bend_gate, self.bend_cross)
        bend_up, bend_gate, bend_cross = bends if self._recorded else (None, None, None)
        if self.gate is not None:
            gate_rate = backward.space.take("ffn.gate", *shape, like=self.slope_up)
            gate_terms = ((self.slope_gate, t), (bend_gate, gate_dot), (bend_cross, up_dot))
            gate_rate = _sum_of_products(gate_rate, *gate_terms)
        up_rate = t if t is not None else backward.space.take("wide", *shape, like=self.slope_up)
        if backward.record:
            assert t is not None
            self._record(t[0])
        # Over t itself: nothing needs Rt after this.
        up_terms = ((self.slope_up, t), (bend_up, up_dot), (bend_cross, gate_dot))
        return _sum_of_products(up_rate, *up_terms), gate_rate

    def _record(self, t: Tensor) -> None:
        """Turn D2 into ρ = D2 ⊙ t."""
        if self._recorded:
            raise ValueError("this block already keeps an adjoint: linearise again for another.")
        self.bend_up = None if self.bend_up is None else self.bend_up * t
        if self.bend_up is not None:  # no gate
            self.bend_up = (self.bend_up / self.slope_up).masked_fill_(self.slope_up == 0, 0.0)
        self.bend_gate = None if self.bend_gate is None else self.bend_gate * t
        self.bend_cross = None if self.bend_cross is None else self.bend_cross * t
        self._recorded = True


def _away_from_zero(slope: Tensor, bend: Tensor) -> Tensor:
    """The slope with a tiny value in place of zero where the bend is not zero: it is divided by.

    Products and quotients keep their relative accuracy, however small the slope is; what is added
    where it vanishes is far below rounding.
    """
    tiny = math.sqrt(torch.finfo(slope.dtype).tiny)
    return torch.where((slope.abs() < tiny) & (bend != 0), tiny, slope)


def _sum_of_products(out: Tensor, *terms: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    """out = Σ scale ⊙ moved over the terms that are there; ``out`` may be the first ``moved``."""
    done = False
    for scale, moved in terms:
        if scale is None or moved is None:
            continue
        out.addcmul_(moved, scale) if done else torch.mul(moved, scale, out=out)
        done = True
    return out if done else None
