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
from curvatlas.engines.tangent.structure import Activation, BlockSpec, Weights

# ---- activations: f and its derivatives, no autograd (derivations §6) --------------------------


ACTIVATIONS: tuple[Activation, ...] = ("relu", "gelu", "gelu_tanh", "silu", "identity")
# of families that the matrix-free products read; the closed forms and bounds do not list them
FAMILY_ACTIVATIONS: tuple[Activation, ...] = ("gelu_quick", "relu_squared")

_KAPPA = math.sqrt(2.0 / math.pi)  # the tanh form of GELU: u = κ (z + c z³)
_CUBIC = 0.044715
# Beyond this the tanh has saturated to ±1 in float64 and every derivative of it is exactly zero;
# clamping keeps 0 · u'³ from becoming 0 · inf for absurdly large pre-activations.
_SATURATED = 30.0


def check_activation(name: str) -> None:
    """Raise on a name that is not one of ``ACTIVATIONS``."""
    if name not in _DERIVATIVES:
        raise ValueError(f"unknown activation {name!r}: choose one of {', '.join(ACTIVATIONS)}.")


def activation_derivatives(name: Activation, z: Tensor, *, order: int = 2) -> tuple[Tensor, ...]:
    """f and its derivatives at ``z``, elementwise: ``(f, f', …)`` of length ``order + 1``.

    ``order`` is 0 to 3. At the kink of ReLU f'(0) = 0 as in PyTorch, and f'' = f''' = 0
    everywhere: the Hessian is that of the piecewise linear function, exact almost everywhere.
    """
    check_activation(name)
    if not 0 <= order <= 3:
        raise ValueError(f"derivatives are known up to order 3, got order={order}.")
    return _DERIVATIVES[name](z, order)[: order + 1]


def _relu(z: Tensor, order: int) -> tuple[Tensor, ...]:
    zero = torch.zeros_like(z) if order >= 2 else z
    return z.clamp_min(0), (z > 0).to(z.dtype), zero, zero


def _identity(z: Tensor, order: int) -> tuple[Tensor, ...]:
    zero = torch.zeros_like(z) if order >= 2 else z
    return z, torch.ones_like(z), zero, zero


def _gelu(z: Tensor, order: int) -> tuple[Tensor, ...]:
    """f = zΦ, f' = Φ + zφ, f'' = (2 − z²)φ, f''' = (z³ − 4z)φ."""
    distribution = 0.5 * (1.0 + torch.erf(z * math.sqrt(0.5)))
    value = z * distribution
    if order == 0:
        return (value,)
    square = z * z
    density = torch.exp(-0.5 * square) / math.sqrt(2.0 * math.pi)
    return (
        value,
        distribution + z * density,
        (2.0 - square) * density,
        z * (square - 4.0) * density if order >= 3 else density,
    )


def _gelu_tanh(z: Tensor, order: int) -> tuple[Tensor, ...]:
    """f = z(1+t)/2, f' = (1+t+zt')/2, f'' = t' + zt''/2, f''' = (3t'' + zt''')/2, t = tanh u(z)."""
    inner = z.clamp(-_SATURATED, _SATURATED)
    u1 = _KAPPA * (1.0 + 3.0 * _CUBIC * inner * inner)
    u2 = 6.0 * _KAPPA * _CUBIC * inner
    t = torch.tanh(_KAPPA * (inner + _CUBIC * inner**3))
    value = 0.5 * z * (1.0 + t)
    if order == 0:
        return (value,)
    slope = 1.0 - t * t
    t1 = slope * u1
    t2 = slope * (u2 - 2.0 * t * u1 * u1)
    third = t
    if order >= 3:
        u3 = 6.0 * _KAPPA * _CUBIC
        t3 = slope * (u3 - 6.0 * t * u1 * u2 + (4.0 * t * t - 2.0 * slope) * u1**3)
        third = 1.5 * t2 + 0.5 * inner * t3
    return value, 0.5 * (1.0 + t + inner * t1), t1 + 0.5 * inner * t2, third


_BLOOM_KAPPA, _BLOOM_SLOPE = 0.79788456, 0.1070322243


def _gelu_bloom(z: Tensor, order: int) -> tuple[Tensor, ...]:
    """Bloom's GELU: κ and 3κc rounded, each by itself, so that f' is only nearly that of f.

    f = z(1+t)/2, f' = (1+t)/2 + z(1−t²)p/2 with p = κ + b z² written out in the model, and what
    follows from these: the derivatives the model's own backward pass has.
    """
    inner = z.clamp(-_SATURATED, _SATURATED)
    square = inner * inner
    t = torch.tanh(_BLOOM_KAPPA * inner * (1.0 + _CUBIC * square))
    value = 0.5 * z * (1.0 + t)
    if order == 0:
        return (value,)
    slope = 1.0 - t * t
    u1 = _BLOOM_KAPPA * (1.0 + 3.0 * _CUBIC * square)  # of the argument of tanh
    p, p1 = _BLOOM_KAPPA + _BLOOM_SLOPE * square, 2.0 * _BLOOM_SLOPE * inner
    t1 = slope * u1
    bend = 0.5 * (t1 + slope * (p + inner * p1) - 2.0 * inner * t * t1 * p)
    third = t
    if order >= 3:
        u2 = 6.0 * _BLOOM_KAPPA * _CUBIC * inner
        t2 = slope * (u2 - 2.0 * t * u1 * u1)
        g, g1, g2 = inner * p, p + inner * p1, 2.0 * p1 + 2.0 * _BLOOM_SLOPE * inner
        slope1, slope2 = -2.0 * t * t1, -2.0 * (t1 * t1 + t * t2)
        third = 0.5 * (t2 + slope2 * g + 2.0 * slope1 * g1 + slope * g2)
    return value, 0.5 * (1.0 + t + inner * slope * p), bend, third


def _silu(z: Tensor, order: int) -> tuple[Tensor, ...]:
    """f = zs, f' = s + zs', f'' = 2s' + zs'', f''' = 3s'' + zs''', s the logistic function."""
    s = torch.sigmoid(z)
    value = z * s
    if order == 0:
        return (value,)
    s1 = s * torch.sigmoid(-z)
    s2 = s1 * (1.0 - 2.0 * s)
    third = 3.0 * s2 + z * s1 * (1.0 - 6.0 * s1) if order >= 3 else s
    return value, s + z * s1, 2.0 * s1 + z * s2, third


_QUICK = 1.702


def _gelu_quick(z: Tensor, order: int) -> tuple[Tensor, ...]:
    """f = z s(a z) = silu(a z)/a, a = 1.702 (CLIP)."""
    return tuple(d * _QUICK ** (i - 1) for i, d in enumerate(_silu(_QUICK * z, order)))


def _relu_squared(z: Tensor, order: int) -> tuple[Tensor, ...]:
    """f = max(z, 0)²; f'' jumps at zero, where it is 0 as in PyTorch."""
    positive = z.clamp_min(0)
    bend = 2.0 * (z > 0).to(z.dtype) if order >= 2 else z
    return positive.square(), 2.0 * positive, bend, torch.zeros_like(z) if order >= 3 else z


_DERIVATIVES = {
    "relu": _relu,
    "relu_squared": _relu_squared,
    "gelu_quick": _gelu_quick,
    "identity": _identity,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_bloom": _gelu_bloom,
    "silu": _silu,
}


@dataclass(frozen=True, kw_only=True)
class HiddenUnits:
    """The hidden layer g(h) of a feed-forward part with its first two derivatives.

    Plain:  g = f(h);              D1 = f',        D2 = f''.
    Gated:  g = f(h_gate) h_up;    D1 = (f'h_up, f), D2 = [[f''h_up, f'], [f', 0]]  per unit.

    All tensors (…, d_ff); ``*_gate`` are None in the plain case, where ``up`` is the only channel.
    """

    value: Tensor  # g
    slope_up: Tensor  # ∂g/∂h_up
    slope_gate: Tensor | None  # ∂g/∂h_gate
    bend_up: Tensor | None  # ∂²g/∂h_up², None when gated (zero)
    bend_gate: Tensor | None  # ∂²g/∂h_gate²
    bend_cross: Tensor | None  # ∂²g/∂h_gate∂h_up


def hidden_units(name: Activation, up: Tensor, gate: Tensor | None = None) -> HiddenUnits:
    """Evaluate a hidden layer from its pre-activations, (…, d_ff) each."""
    if gate is None:
        f, f1, f2 = activation_derivatives(name, up)
        return HiddenUnits(
            value=f, slope_up=f1, slope_gate=None, bend_up=f2, bend_gate=None, bend_cross=None
        )
    f, f1, f2 = activation_derivatives(name, gate)
    return HiddenUnits(
        value=f * up,
        slope_up=f,
        slope_gate=f1 * up,
        bend_up=None,
        bend_gate=f2 * up,
        bend_cross=f1,
    )


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
