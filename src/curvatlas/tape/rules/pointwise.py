"""Functions of one entry by f' and f'', and sums of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.record import aten
from curvatlas.tape.rules.base import (
    Bilinear,
    Call,
    Pointwise,
    Rule,
    Unruled,
    Values,
    aligned,
    pointwise,
    rule,
    summed_to,
)


class Sum(Rule):
    """y = x₁ + α x₂, either of them broadcast."""

    bends = False

    def __init__(self, call: Call, first: float, second: float) -> None:
        super().__init__(call)
        factors = [0.0] * len(call.x)
        for position, factor in ((0, first), (1, second)):
            place = call.which(position)
            if place is not None:
                factors[place] += factor
        self._factors = factors

    def push(self, tangents: Values) -> Tensor:
        total: Tensor | None = None
        for tangent, factor in zip(tangents, self._factors, strict=True):
            if tangent is None:
                continue
            part = aligned(tangent, len(self.shape))
            if total is None:
                total = part if factor == 1 else part * factor
            else:
                total = torch.add(total, part, alpha=factor)
        assert total is not None
        return total.expand(total.shape[0], *self.shape)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        result: list[Tensor | None] = []
        for shape, factor, needed in zip(self.shapes, self._factors, needs, strict=True):
            part = summed_to(adjoint, shape) if needed else None
            result.append(part if part is None or factor == 1 else part * factor)
        return result


def _alpha(call: Call) -> float:
    return float(call.kwargs.get("alpha", call.get(2, 1)))


rule(aten.add.Tensor, aten.add.Scalar)(lambda call: Sum(call, 1.0, _alpha(call)))
rule(aten.sub.Tensor, aten.sub.Scalar)(lambda call: Sum(call, 1.0, -_alpha(call)))
rule(aten.rsub.Tensor, aten.rsub.Scalar)(lambda call: Sum(call, -_alpha(call), 1.0))


class Product(Bilinear):
    """y = a ⊙ b."""

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        n = len(self.shape)
        return aligned(a, n) * aligned(b, n)

    def pull_a(self, adjoint: Tensor, b: Tensor) -> Tensor:
        return adjoint * aligned(b, len(self.shape))

    def pull_b(self, adjoint: Tensor, a: Tensor) -> Tensor:
        return adjoint * aligned(a, len(self.shape))


@rule(aten.mul.Tensor, aten.mul.Scalar)
def _product(call: Call) -> Rule:
    first, second = call.args[0], call.args[1]
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return Product(call)
    return Pointwise(call, second if isinstance(first, Tensor) else first, None)


@rule(aten.div.Tensor, aten.div.Scalar)
def _quotient(call: Call) -> Rule:
    if len(call.args) != 2 or call.kwargs:
        raise Unruled
    over = call.args[1]
    if call.which(1) is None:
        if not isinstance(over, Tensor):
            return Pointwise(call, 1.0 / over, None)
        if over.ndim <= call.args[0].ndim and call.y.shape == call.args[0].shape:
            return Pointwise(call, over.reciprocal(), None)
        raise Unruled
    return Quotient(call)


class Quotient(Rule):
    """y = a / b: ẏ = (ȧ − y ḃ)/b; with u = ȳ/b: ā = u, b̄ = −u y.

    bends: ā' = −u ḃ/b, b̄' = −u (ȧ − 2 y ḃ)/b.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._a, self._b = call.which(0), call.which(1)
        self._inverse = call.args[1].reciprocal()
        self._y = call.y
        self._u: Any = None

    def _of(self, tangents: Values, place: int | None) -> Tensor | None:
        tangent = None if place is None else tangents[place]
        return None if tangent is None else aligned(tangent, len(self.shape))

    def push(self, tangents: Values) -> Tensor:
        a, b = self._of(tangents, self._a), self._of(tangents, self._b)
        total = a if b is None else -self._y * b if a is None else a - self._y * b
        assert total is not None
        result: Tensor = total * self._inverse
        return result

    def _give(self, a: Tensor | None, b: Tensor | None, needs: Sequence[bool]) -> Values:
        result: list[Tensor | None] = [None] * len(self.shapes)
        for place, part in ((self._a, a), (self._b, b)):
            if place is not None and needs[place] and part is not None:
                part = summed_to(part, self.shapes[place])
                before = result[place]
                result[place] = part if before is None else before + part
        return result

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        u = adjoint * self._inverse
        return self._give(u, -u * self._y, needs)

    def keep(self, adjoint: Any) -> None:
        self._u = adjoint * self._inverse * self._inverse

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        assert self._u is not None
        a, b = self._of(tangents, self._a), self._of(tangents, self._b)
        to_a = None if b is None else -self._u * b
        inner = 0.0 if b is None else 2 * self._y * b
        to_b = self._u * (inner if a is None else inner - a)
        return self._give(to_a, to_b, needs)


# --- f' and f'' -----------------------------------------------------------------------------------

_A = aten


def _square(call: Call) -> tuple[Any, Any]:
    x = call.x[0]
    return 2 * x, lambda: 2.0


def _power(call: Call) -> tuple[Any, Any]:
    x, n = call.x[0], call.args[1]
    if isinstance(n, Tensor) or not isinstance(call.args[0], Tensor):
        raise Unruled
    if n == 2:
        return _square(call)
    if n in (0, 1):
        return float(n), None
    return n * x.pow(n - 1), lambda: n * (n - 1) * x.pow(n - 2)


def _silu(call: Call) -> tuple[Any, Any]:
    x = call.x[0]
    s = torch.sigmoid(x)
    d = s * (1 - s)
    return s + x * d, lambda: d * (2 + x * (1 - 2 * s))


def _gelu(call: Call) -> tuple[Any, Any]:
    x = call.x[0]
    if call.kwargs.get("approximate", call.get(1, "none")) == "none":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        normal = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return torch.addcmul(normal, x, density), lambda: density * (2 - x * x)
    c, k = math.sqrt(2 / math.pi), 0.044715
    inner = c * (x + k * x**3)
    t = torch.tanh(inner)
    first, second = c * (1 + 3 * k * x * x), 6 * c * k * x
    sech = 1 - t * t
    slope = 0.5 * (1 + t) + 0.5 * x * sech * first
    return slope, lambda: sech * first + 0.5 * x * sech * (second - 2 * t * first * first)


def _tanh(call: Call) -> tuple[Any, Any]:
    y = call.y
    slope = 1 - y * y
    return slope, lambda: -2 * y * slope


def _sigmoid(call: Call) -> tuple[Any, Any]:
    y = call.y
    slope = y * (1 - y)
    return slope, lambda: slope * (1 - 2 * y)


def _softplus(call: Call) -> tuple[Any, Any]:
    x, beta, threshold = call.x[0], call.get(1, 1), call.get(2, 20)
    s = torch.sigmoid(beta * x)
    straight = beta * x > threshold
    return torch.where(straight, 1.0, s), lambda: torch.where(straight, 0.0, beta * s * (1 - s))


def _leaky(call: Call) -> tuple[Any, Any]:
    x, slope = call.x[0], call.get(1, 0.01)
    return torch.where(x > 0, 1.0, float(slope)).to(x.dtype), None


def _elu(call: Call) -> tuple[Any, Any]:
    x = call.x[0]
    alpha, scale, inner = call.get(1, 1), call.get(2, 1), call.get(3, 1)
    low = alpha * inner * scale * torch.exp(inner * x)
    return (
        torch.where(x > 0, float(scale), low),
        lambda: torch.where(x > 0, 0.0, inner * low),
    )


def _clamped(call: Call) -> tuple[Any, Any]:
    x = call.x[0]
    low, high = call.get(1), call.get(2)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        raise Unruled
    inside = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    return inside.to(x.dtype), None


def _hard(call: Call) -> tuple[Any, Any]:
    x, low, high = call.x[0], call.get(1, -1), call.get(2, 1)
    return ((x > low) & (x < high)).to(x.dtype), None


def _clamp_min(call: Call) -> tuple[Any, Any]:
    if isinstance(call.args[1], Tensor):
        raise Unruled
    return (call.x[0] >= call.args[1]).to(call.y.dtype), None


pointwise(_A.neg.default, slopes=lambda c: (-1.0, None))
pointwise(_A.relu.default, slopes=lambda c: ((c.x[0] > 0).to(c.y.dtype), None))
pointwise(_A.abs.default, slopes=lambda c: (c.x[0].sgn(), None))
pointwise(_A.exp.default, slopes=lambda c: (c.y, lambda: c.y))
pointwise(_A.expm1.default, slopes=lambda c: (c.y + 1, lambda: c.y + 1))
pointwise(_A.log.default, slopes=lambda c: (1 / c.x[0], lambda: -1 / c.x[0].square()))
pointwise(_A.log1p.default, slopes=lambda c: (1 / (1 + c.x[0]), lambda: -1 / (1 + c.x[0]) ** 2))
pointwise(_A.sqrt.default, slopes=lambda c: (0.5 / c.y, lambda: -0.25 / (c.y * c.x[0])))
pointwise(
    _A.rsqrt.default,
    slopes=lambda c: (-0.5 * c.y / c.x[0], lambda: 0.75 * c.y / c.x[0].square()),
)
pointwise(_A.reciprocal.default, slopes=lambda c: (-c.y.square(), lambda: 2 * c.y**3))
pointwise(_A.square.default, slopes=_square)
pointwise(_A.pow.Tensor_Scalar, slopes=_power)
pointwise(_A.sin.default, slopes=lambda c: (c.x[0].cos(), lambda: -c.y))
pointwise(_A.cos.default, slopes=lambda c: (-c.x[0].sin(), lambda: -c.y))
pointwise(_A.tanh.default, slopes=_tanh)
pointwise(_A.sigmoid.default, slopes=_sigmoid)
pointwise(_A.silu.default, slopes=_silu)
pointwise(_A.gelu.default, slopes=_gelu)
pointwise(_A.softplus.default, slopes=_softplus)
pointwise(_A.leaky_relu.default, slopes=_leaky)
pointwise(_A.elu.default, slopes=_elu)
pointwise(_A.clamp.default, slopes=_clamped)
pointwise(_A.clamp_min.default, slopes=_clamp_min)
pointwise(_A.hardtanh.default, slopes=_hard)
pointwise(
    _A.erf.default,
    slopes=lambda c: (
        d := 2 / math.sqrt(math.pi) * torch.exp(-c.x[0].square()),
        lambda: -2 * c.x[0] * d,
    ),
)
