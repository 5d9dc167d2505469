"""Activations f with their derivatives, no autograd (derivations §6).

To add one write f, f', f'' (and f's third derivative, for third-order quantities) and name it in
``_DERIVATIVES``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.layers.structure import Activation

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
