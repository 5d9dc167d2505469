"""The loss along a line: value and first three derivatives of blocks and stacks, in closed form.

found = directional_derivatives(block, x, target, direction)
found.second        # vᵀHv
found.third         # d³ℓ/dt³, what the Taylor remainder is made of
found.predict(t)    # ℓ + tℓ' + t²ℓ''/2 (+ t³ℓ'''/6)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from curvatlas.layers.masks import attention_mask
from curvatlas.layers.structure import (
    WEIGHT_NAMES,
    Activation,
    BlockSpec,
    Norm,
    Weights,
    require_plain,
)
from curvatlas.results import Result
from curvatlas.theory.norm_bounds import as_layers


@dataclass(frozen=True)
class Jet:
    """f, f', f'', f''' along a straight line θ + t v at t = 0, all of one shape.

    Every rule is the closed form of one operation, no automatic differentiation (derivations §19):

        product        (fg)''' = f'''g + 3f''g' + 3f'g'' + fg'''
        normalisation  σ² = m, σ n = c:  σ''' = (m'''/2 − 3σ'σ'')/σ,
                       n''' = (c''' − 3σ'n'' − 3σ''n' − σ'''n)/σ
        softmax        cumulants: (log Σ e^T)''' = ⟨T'''⟩ + 3Cov(T', T'') + κ₃(T')
        activation     f(h)''' = f'h''' + 3f''h'h'' + f'''h'³
    """

    value: Tensor
    first: Tensor
    second: Tensor
    third: Tensor

    @classmethod
    def constant(cls, value: Tensor) -> Jet:
        zero = torch.zeros_like(value)
        return cls(value, zero, zero, zero)

    @classmethod
    def line(cls, value: Tensor, direction: Tensor) -> Jet:
        """value + t · direction."""
        zero = torch.zeros_like(value)
        return cls(value, direction, zero, zero)

    @property
    def orders(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.value, self.first, self.second, self.third

    def map(self, linear: Callable[[Tensor], Tensor]) -> Jet:
        """A linear map applied to every order."""
        return Jet(*(linear(order) for order in self.orders))

    def __add__(self, other: Jet) -> Jet:
        return Jet(*(a + b for a, b in zip(self.orders, other.orders, strict=True)))

    def __sub__(self, other: Jet) -> Jet:
        return Jet(*(a - b for a, b in zip(self.orders, other.orders, strict=True)))

    def _product(self, other: Jet, times: Callable[[Tensor, Tensor], Tensor]) -> Jet:
        f0, f1, f2, f3 = self.orders
        g0, g1, g2, g3 = other.orders
        return Jet(
            times(f0, g0),
            times(f1, g0) + times(f0, g1),
            times(f2, g0) + 2.0 * times(f1, g1) + times(f0, g2),
            times(f3, g0) + 3.0 * times(f2, g1) + 3.0 * times(f1, g2) + times(f0, g3),
        )

    def __mul__(self, other: Jet) -> Jet:
        return self._product(other, torch.mul)

    def __matmul__(self, other: Jet) -> Jet:
        return self._product(other, torch.matmul)


def normalize_jet(x: Jet, *, eps: float, norm: Norm) -> Jet:
    """n(x(t)) of every token, (…, d); from σ² = m and σ n = c, differentiated three times."""
    if norm == "none":
        return x
    c = x.map(lambda t: t - t.mean(-1, keepdim=True)) if norm == "layer" else x
    m = (c * c).map(lambda t: t.mean(-1, keepdim=True))
    s0 = (m.value + eps).sqrt()
    s1 = 0.5 * m.first / s0
    s2 = (0.5 * m.second - s1**2) / s0
    s3 = (0.5 * m.third - 3.0 * s1 * s2) / s0
    n0 = c.value / s0
    n1 = (c.first - s1 * n0) / s0
    n2 = (c.second - 2.0 * s1 * n1 - s2 * n0) / s0
    n3 = (c.third - 3.0 * s1 * n2 - 3.0 * s2 * n1 - s3 * n0) / s0
    return Jet(n0, n1, n2, n3)


def log_sum_exp_jet(logits: Jet) -> Jet:
    """log Σ_j exp T_j over the last axis (kept): derivatives are cumulants under softmax."""
    a = torch.softmax(logits.value, -1)

    def mean(values: Tensor) -> Tensor:
        return (a * values).sum(-1, keepdim=True)

    t1, t2, t3 = logits.first, logits.second, logits.third
    centred = t1 - mean(t1)
    return Jet(
        torch.logsumexp(logits.value, -1, keepdim=True),
        mean(t1),
        mean(t2) + mean(centred**2),
        mean(t3) + 3.0 * mean(centred * t2) + mean(centred**3),
    )


def softmax_jet(logits: Jet) -> Jet:
    """A = exp(T − log Σ e^T) over the last axis; −∞ logits (masks) stay exactly zero."""
    log = log_sum_exp_jet(logits)
    a = torch.softmax(logits.value, -1)
    p1, p2, p3 = (t - l for t, l in zip(logits.orders[1:], log.orders[1:], strict=True))
    return Jet(a, a * p1, a * (p2 + p1**2), a * (p3 + 3.0 * p1 * p2 + p1**3))


def activation_jet(h: Jet, name: Activation) -> Jet:
    """f(h(t)) elementwise."""
    f0, f1, f2, f3 = activation_derivatives(name, h.value, order=3)
    return Jet(
        f0,
        f1 * h.first,
        f1 * h.second + f2 * h.first**2,
        f1 * h.third + 3.0 * f2 * h.first * h.second + f3 * h.first**3,
    )


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
    if input_direction is not None:
        z = Jet.line(x, input_direction.reshape(x.shape))
    else:
        z = Jet.constant(x)
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


class _Lines:
    """The block's weights as lines W + t V."""

    def __init__(self, weights: Weights, move: Mapping[str, Tensor]) -> None:
        self.weights, self.move = weights, move

    def __contains__(self, name: str) -> bool:
        return name in self.weights

    def __getitem__(self, name: str) -> Jet:
        weight = self.weights[name]
        return Jet.line(weight, self.move.get(name, torch.zeros_like(weight)))

    def linear(self, x: Jet, which: str) -> Jet:
        y = x @ self[f"{which}_weight"].map(lambda w: w.transpose(-1, -2))
        return self.shift(y, f"{which}_bias")

    def shift(self, y: Jet, name: str) -> Jet:
        if name not in self:
            return y
        bias = self[name]
        return Jet(y.value + bias.value, y.first + bias.first, y.second, y.third)

    def norm(self, x: Jet, which: str, spec: BlockSpec) -> Jet:
        y = normalize_jet(x, eps=spec.eps, norm=spec.norm)
        if f"{which}_weight" in self:
            y = y * self[f"{which}_weight"]
        return self.shift(y, f"{which}_bias")


def attention_jet(
    spec: BlockSpec,
    weights: Weights,
    move: Mapping[str, Tensor],
    x: Jet,
    mask: Tensor | None = None,
) -> Jet:
    """Attention of x (n, L, d) along the line: T = sQKᵀ is quartic at most in t, A by cumulants."""
    if spec.rope_base is not None:
        raise ValueError("third derivatives cover attention without rotary embedding.")
    lines = _Lines(weights, move)
    n, length, _ = x.value.shape
    heads, groups = spec.n_heads, spec.kv_heads

    def split(which: str, count: int, size: int) -> Jet:
        y = lines.linear(x, which)
        y = y.map(lambda t: t.reshape(n, length, count, size).transpose(1, 2))
        return y.map(lambda t: t.repeat_interleave(heads // count, 1))

    q = split("query", heads, spec.key_size)
    k = split("key", groups, spec.key_size)
    v = split("value", groups, spec.value_size)
    bias, allowed = attention_mask(
        spec, mask, samples=n, length=length, dtype=x.value.dtype, device=x.value.device
    )
    logits = (q @ k.map(lambda t: t.transpose(-1, -2))).map(lambda t: spec.logit_scale * t)
    if spec.softmax:
        if bias is not None:
            logits = Jet(logits.value + bias, logits.first, logits.second, logits.third)
        logits = softmax_jet(logits)
    elif allowed is not None:
        logits = logits.map(lambda t: t * allowed)
    mixed = (logits @ v).map(lambda t: t.transpose(1, 2).reshape(n, length, -1))
    return lines.linear(mixed, "output") if "output_weight" in lines else mixed


def block_jet(
    spec: BlockSpec,
    weights: Weights,
    move: Mapping[str, Tensor],
    x: Jet,
    mask: Tensor | None = None,
) -> Jet:
    """A whole block along the line."""
    require_plain(spec, "the third derivative")
    lines = _Lines(weights, move)

    def feed(v: Jet) -> Jet:
        up = lines.linear(v, "up")
        if spec.gated:
            return lines.linear(
                activation_jet(lines.linear(v, "gate"), spec.activation) * up, "down"
            )
        return lines.linear(activation_jet(up, spec.activation), "down")

    if not spec.residual:
        return attention_jet(spec, weights, move, x, mask)
    if spec.norm_first:
        u = x + attention_jet(spec, weights, move, lines.norm(x, "norm1", spec), mask)
        return u if spec.d_ff is None else u + feed(lines.norm(u, "norm2", spec))
    y = lines.norm(x + attention_jet(spec, weights, move, x, mask), "norm1", spec)
    return y if spec.d_ff is None else lines.norm(y + feed(y), "norm2", spec)


def loss_jet(loss: OutputLoss, z: Jet, target: Tensor) -> Jet:
    """The loss of outputs z(t) (n, L, d): mean squared error or token cross-entropy."""
    if isinstance(loss, TokenSquaredError):
        error = z - Jet.constant(target)
        return (error * error).map(lambda t: t.mean())
    if isinstance(loss, TokenCrossEntropy):
        valid = target != loss.ignore_index
        weight = valid.to(z.value.dtype) / valid.sum()
        label = torch.where(valid, target, 0).unsqueeze(-1)
        surprise = log_sum_exp_jet(z) - z.map(lambda t: t.gather(-1, label))
        return surprise.map(lambda t: (t.squeeze(-1) * weight).sum())
    raise TypeError(
        f"third derivatives know mse and token cross-entropy, got {type(loss).__name__}."
    )
