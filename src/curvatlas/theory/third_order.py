"""The loss along a line: value and first three derivatives of blocks and stacks, in closed form.

found = directional_derivatives(block, x, target, direction)
found.second        # vᵀHv
found.third         # d³ℓ/dt³, what the Taylor remainder is made of
found.predict(t)    # ℓ + tℓ' + t²ℓ''/2 (+ t³ℓ'''/6)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvatlas.layers.activations import activation_derivatives
from curvatlas.layers.losses import (
    OutputLoss,
    TokenCrossEntropy,
    TokenSquaredError,
    resolve_loss,
)
from curvatlas.layers.structure import WEIGHT_NAMES, Activation, BlockSpec, Weights
from curvatlas.results import Result
from curvatlas.theory.norm_bounds import as_layers
from curvatlas.zoo.block import forward_pass

# Linear maps, which every order passes alike, and what a jet says of its tensors.
_LINEAR = {"view", "reshape", "transpose", "repeat_interleave", "mean"}
_SHAPE = {"shape", "ndim", "numel", "dtype", "device"}


@dataclass(frozen=True)
class Jet:
    """f, f', f'', f''' along a straight line θ + t v at t = 0, all of one shape.

    A plain forward pass takes jets for tensors: each operation it uses has its closed form in
    ``_RULES``, no automatic differentiation (derivations §19).
    """

    value: Tensor
    first: Tensor
    second: Tensor
    third: Tensor

    @classmethod
    def line(cls, value: Tensor, direction: Tensor | None = None) -> Jet:
        """value + t · direction; a constant without one."""
        zero = torch.zeros_like(value)
        return cls(value, zero if direction is None else direction, zero, zero)

    @property
    def orders(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.value, self.first, self.second, self.third

    def map(self, linear: Callable[[Tensor], Tensor]) -> Jet:
        """A linear map applied to every order."""
        return Jet(*(linear(order) for order in self.orders))

    @property
    def mT(self) -> Jet:
        return self.map(lambda t: t.mT)

    def __getattr__(self, name: str) -> Any:
        if name in _SHAPE:
            return getattr(self.value, name)
        if name in _LINEAR:
            return lambda *args, **options: self.map(lambda t: getattr(t, name)(*args, **options))
        if name in _RULES:
            return partial(_RULES[name], self)
        raise AttributeError(f"third derivatives have no rule for {name}.")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        rule = _RULES.get(function.__name__)
        if rule is None:
            raise TypeError(f"third derivatives have no rule for {function.__name__}.")
        return rule(*args, **(kwargs or {}))

    def __add__(self, other: Jet | Tensor | float) -> Jet:
        return Jet(*(a + b for a, b in zip(self.orders, _jet(other).orders, strict=True)))

    def __sub__(self, other: Jet | Tensor) -> Jet:
        return self + _jet(other) * -1.0

    def __mul__(self, other: Jet | Tensor | float) -> Jet:
        return _product(self, other, torch.mul)

    __rmul__ = __mul__

    def __matmul__(self, other: Jet) -> Jet:
        return _product(self, other, torch.matmul)

    def __getitem__(self, place: Any) -> Jet:
        return self.map(lambda t: t[place])


def _jet(value: Jet | Tensor | float) -> Jet:
    if isinstance(value, float):  # without dimensions: does not decide the dtype of a result
        value = torch.tensor(value, dtype=torch.float64)
    return value if isinstance(value, Jet) else Jet.line(value)


def _product(
    left: Jet, right: Jet | Tensor | float, times: Callable[[Tensor, Tensor], Tensor]
) -> Jet:
    """(fg)''' = f'''g + 3f''g' + 3f'g'' + fg'''."""
    (f0, f1, f2, f3), (g0, g1, g2, g3) = left.orders, _jet(right).orders
    return Jet(
        times(f0, g0),
        times(f1, g0) + times(f0, g1),
        times(f2, g0) + 2.0 * times(f1, g1) + times(f0, g2),
        times(f3, g0) + 3.0 * times(f2, g1) + 3.0 * times(f1, g2) + times(f0, g3),
    )


def _composed(h: Jet, f0: Tensor, f1: Tensor, f2: Tensor, f3: Tensor) -> Jet:
    """f(h(t)) elementwise: f(h)''' = f'h''' + 3f''h'h'' + f'''h'³."""
    return Jet(
        f0,
        f1 * h.first,
        f1 * h.second + f2 * h.first**2,
        f1 * h.third + 3.0 * f2 * h.first * h.second + f3 * h.first**3,
    )


def _activation(name: Activation, h: Jet, **_: Any) -> Jet:
    f0, f1, f2, f3 = activation_derivatives(name, h.value, order=3)
    return _composed(h, f0, f1, f2, f3)


def _gelu(h: Jet, approximate: str = "none") -> Jet:
    return _activation("gelu_tanh" if approximate == "tanh" else "gelu", h)


def _rsqrt(m: Jet) -> Jet:
    root = m.value.rsqrt()
    return _composed(m, root, -0.5 * root**3, 0.75 * root**5, -1.875 * root**7)


def _log_softmax(logits: Jet, dim: int = -1) -> Jet:
    """T − log Σ e^T: (log Σ e^T)''' = ⟨T'''⟩ + 3Cov(T', T'') + κ₃(T') under softmax."""
    a = torch.softmax(logits.value, dim)

    def mean(values: Tensor) -> Tensor:
        return (a * values).sum(dim, keepdim=True)

    t1, t2, t3 = logits.first, logits.second, logits.third
    centred = t1 - mean(t1)
    return Jet(
        torch.log_softmax(logits.value, dim),
        centred,
        t2 - mean(t2) - mean(centred**2),
        t3 - mean(t3) - 3.0 * mean(centred * t2) - mean(centred**3),
    )


def _softmax(logits: Jet, dim: int = -1) -> Jet:
    """exp of the above; −∞ logits (masks) stay exactly zero."""
    a = torch.softmax(logits.value, dim)
    return _composed(_log_softmax(logits, dim), a, a, a, a)


def _linear(x: Jet, weight: Jet, bias: Jet | None = None) -> Jet:
    y = x @ weight.mT
    return y if bias is None else y + bias


def _cat(parts: Sequence[Jet], dim: int = 0) -> Jet:
    return Jet(*(torch.cat(order, dim) for order in zip(*(p.orders for p in parts), strict=True)))


_RULES: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "rsqrt": _rsqrt,
    "relu": partial(_activation, "relu"),
    "gelu": _gelu,
    "silu": partial(_activation, "silu"),
    "square": lambda x: x * x,
    "cat": _cat,
    "ones_like": lambda x: torch.ones_like(x.value),
}


@dataclass(frozen=True, kw_only=True)
class DirectionalDerivatives(Result):
    """ℓ(θ + t v) and its derivatives at t = 0."""

    value: float
    first: float  # ∇ℓ·v
    second: float  # vᵀHv
    third: float  # the third derivative contracted with v three times

    def predict(self, t: float, *, order: int = 3) -> float:
        """The Taylor polynomial of the given order at t."""
        terms = (self.value, t * self.first, t**2 * self.second / 2, t**3 * self.third / 6)
        return sum(terms[: order + 1])

    def __str__(self) -> str:
        return (
            f"ℓ = {self.value:.6g}, ℓ' = {self.first:.6g}, ℓ'' = {self.second:.6g}, "
            f"ℓ''' = {self.third:.6g}"
        )


def directional_derivatives(
    block: Any,
    x: Tensor,
    target: Tensor,
    direction: Tensor | Sequence[Mapping[str, Tensor]] | Mapping[str, Tensor] | None = None,
    *,
    input_direction: Tensor | None = None,
    loss: str | OutputLoss = "mse",
    mask: Tensor | None = None,
) -> DirectionalDerivatives:
    """First three derivatives of the loss of a block or stack along one line, in closed form.

    ``direction``: flat (P,) over the weights in ``WEIGHT_NAMES`` order, block after block, or
    tensors by name (a list of such mappings for a stack). ``input_direction`` also moves x.
    """
    layers = as_layers(block)
    x = x.detach()
    if x.ndim == 2:
        x, target = x.unsqueeze(0), target.unsqueeze(0)
    moves = _directions(layers, direction)
    z = Jet.line(x, None if input_direction is None else input_direction.reshape(x.shape))
    for (spec, weights), move in zip(layers, moves, strict=True):
        z = block_jet(spec, weights, move, z, mask)
    jet = loss_jet(resolve_loss(loss), z, target)
    value, first, second, third = (float(order) for order in jet.orders)
    return DirectionalDerivatives(value=value, first=first, second=second, third=third)


def _directions(
    layers: Sequence[tuple[BlockSpec, Weights]],
    direction: Tensor | Sequence[Mapping[str, Tensor]] | Mapping[str, Tensor] | None,
) -> list[dict[str, Tensor]]:
    if direction is None:
        return [{} for _ in layers]
    if isinstance(direction, Mapping):
        direction = [direction]
    if not isinstance(direction, Tensor):
        if len(direction) != len(layers):
            raise ValueError(
                f"a stack of {len(layers)} blocks needs as many directions, got {len(direction)}."
            )
        return [dict(d) for d in direction]
    total = sum(w.numel() for _, weights in layers for w in weights.values())
    if direction.shape != (total,):
        raise ValueError(
            f"the direction must have shape ({total},), one number a parameter, "
            f"got {tuple(direction.shape)}."
        )
    moves, start = [], 0
    for _, weights in layers:
        move = {}
        for name in (n for n in WEIGHT_NAMES if n in weights):
            size = weights[name].numel()
            move[name] = direction[start : start + size].view_as(weights[name])
            start += size
        moves.append(move)
    return moves


def block_jet(
    spec: BlockSpec,
    weights: Weights,
    move: Mapping[str, Tensor],
    x: Jet,
    mask: Tensor | None = None,
) -> Jet:
    """A whole block along the line W + t V: its plain forward pass on jets."""
    if spec.eps == 0:
        forward_pass(spec, weights, x.value, mask)  # refuses tokens without variance
        spec = replace(spec, eps=1e-300)  # the same numbers, and no test of tokens left
    lines: Any = {name: Jet.line(weight, move.get(name)) for name, weight in weights.items()}
    tokens: Any = x
    jet: Any = forward_pass(spec, lines, tokens, mask)[0]
    assert isinstance(jet, Jet)
    return jet


def loss_jet(loss: OutputLoss, z: Jet, target: Tensor) -> Jet:
    """The loss of outputs z(t) (n, L, d): mean squared error or token cross-entropy."""
    if isinstance(loss, TokenSquaredError):
        error = z - target
        return (error * error).map(torch.mean)
    if isinstance(loss, TokenCrossEntropy):
        valid = target != loss.ignore_index
        label = torch.where(valid, target, 0).unsqueeze(-1)
        surprise = _log_softmax(z).map(lambda t: t.gather(-1, label).squeeze(-1))
        return surprise.map(lambda t: -(t * valid).sum() / valid.sum())
    raise TypeError(
        f"third derivatives know mse and token cross-entropy, got {type(loss).__name__}."
    )
