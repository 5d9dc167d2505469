"""Norms and softmaxes: gradient maps, with symmetric Jacobians and bends in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from curvatlas.tape.record import aten
from curvatlas.tape.rules.base import Call, Rule, Values, rule


class Norm(Rule):
    """y = γ n(x) + β over the last axes together; centred or not (RMS norm).

    With rows of d numbers, ⟨·⟩ their mean, C v = v − ⟨v⟩ (or v) and n = C x/σ:
    J v = (C v − n ⟨n v⟩)/σ.  Its derivative along ẋ, with ṅ = J ẋ and σ̇ = ⟨n ẋ⟩:
    J̇ v = −(ṅ ⟨n v⟩ + n ⟨ṅ v⟩ + σ̇ J v)/σ.
    """

    def __init__(
        self,
        call: Call,
        *,
        x: int,
        weight: int,
        bias: int,
        normalised: Tensor,
        inverse: Tensor,
        centred: bool,
        axes: int,
    ) -> None:
        super().__init__(call)
        self._x, self._weight, self._bias = call.which(x), call.which(weight), call.which(bias)
        self._gamma = call.get(weight)
        self._axes, self._centred = list(range(-axes, 0)), centred
        self._n, self._inverse = normalised, inverse
        self._kept: Any = None  # n̄ = γ ȳ
        self._bar: Any = None  # ȳ
        self._pulled: Any = None  # J n̄
        self._moment: Any = None  # ⟨n n̄⟩

    def _mean(self, v: Tensor) -> Tensor:
        return v.mean(self._axes, keepdim=True)

    def _jacobian(self, v: Tensor) -> Tensor:
        inner = v - self._mean(v) if self._centred else v
        return (inner - self._n * self._mean(self._n * v)) * self._inverse

    def _of(self, values: Values, place: int | None) -> Any:
        return None if place is None else values[place]

    def _scaled(self, v: Tensor) -> Tensor:
        return v if self._gamma is None else v * self._gamma

    def _wide(self, parameter: Tensor) -> Tensor:
        """(K, *γ) against (K, *x)."""
        n = len(self.shape) - (parameter.ndim - 1)
        return parameter.reshape(parameter.shape[0], *(1,) * n, *parameter.shape[1:])

    def push(self, tangents: Values) -> Tensor:
        x, weight, bias = (self._of(tangents, p) for p in (self._x, self._weight, self._bias))
        total: Tensor | None = None
        if x is not None:
            total = self._scaled(self._jacobian(x))
        if weight is not None:
            part = self._wide(weight) * self._n
            total = part if total is None else total.add_(part)
        if bias is not None:
            wide = self._wide(bias)
            total = wide.expand(wide.shape[0], *self.shape) if total is None else total + wide
        assert total is not None
        return total

    def _to_parameter(self, v: Tensor) -> Tensor:
        return v.reshape(v.shape[0], -1, *v.shape[v.ndim - len(self._axes) :]).sum(1)

    def _give(self, x: Any, weight: Any, bias: Any) -> Values:
        result: list[Tensor | None] = [None] * len(self.shapes)
        for place, part in ((self._x, x), (self._weight, weight), (self._bias, bias)):
            if place is not None and part is not None:
                part = part.reshape(part.shape[0], *self.shapes[place])
                result[place] = part
        return result

    def _needed(self, place: int | None, needs: Sequence[bool]) -> bool:
        return place is not None and needs[place]

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return self._give(
            self._jacobian(self._scaled(adjoint)) if self._needed(self._x, needs) else None,
            self._to_parameter(adjoint * self._n) if self._needed(self._weight, needs) else None,
            self._to_parameter(adjoint) if self._needed(self._bias, needs) else None,
        )

    def keep(self, adjoint: Any) -> None:
        self._bar = adjoint
        self._kept = self._scaled(adjoint)
        self._moment = self._mean(self._n * self._kept)
        self._pulled = self._jacobian(self._kept)

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        x, weight = self._of(tangents, self._x), self._of(tangents, self._weight)
        moved = None if x is None else self._jacobian(x)
        to_x = to_weight = None
        if self._needed(self._x, needs):
            if x is not None:
                assert moved is not None
                assert self._kept is not None
                to_x = -self._inverse * (
                    moved * self._moment
                    + self._n * self._mean(moved * self._kept)
                    + self._mean(self._n * x) * self._pulled
                )
            if weight is not None:
                part = self._jacobian(self._wide(weight) * self._bar)
                to_x = part if to_x is None else to_x + part
        if self._needed(self._weight, needs) and moved is not None:
            to_weight = self._to_parameter(moved * self._bar)
        return self._give(to_x, to_weight, None)


@rule(aten.native_layer_norm.default)
def _layer_norm(call: Call) -> Rule:
    x, shape, eps = call.args[0], call.args[1], call.args[4]
    axes = list(range(-len(shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    inverse = (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    return Norm(
        call, x=0, weight=2, bias=3, normalised=centred * inverse, inverse=inverse,
        centred=True, axes=len(shape),
    )  # fmt: skip


class Softmax(Rule):
    """p = softmax(x): J v = p (v − ⟨p, v⟩), symmetric.

    bend = p (a c − ⟨p, a c⟩) with a = ẋ − ⟨p, ẋ⟩ and c = ȳ − ⟨p, ȳ⟩.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._dim = call.args[1] if call.args[1] < 0 else call.args[1] - call.y.ndim
        self._p = call.y
        self._c: Tensor | None = None

    def _centred(self, v: Tensor) -> Tensor:
        return v - (self._p * v).sum(self._dim, keepdim=True)

    def push(self, tangents: Values) -> Tensor:
        assert tangents[0] is not None
        result: Tensor = self._p * self._centred(tangents[0])
        return result

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return [self._p * self._centred(adjoint)]

    def keep(self, adjoint: Any) -> None:
        self._c = self._centred(adjoint)

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        assert tangents[0] is not None
        assert self._c is not None
        return [self._p * self._centred(self._centred(tangents[0]) * self._c)]


rule(aten._softmax.default, aten._safe_softmax.default)(Softmax)


class LogSoftmax(Rule):
    """y = x − log Σ eˣ, p = e^y: ẏ = ẋ − ⟨p, ẋ⟩;  x̄ = ȳ − p Σ ȳ;  bend = −(Σ ȳ) p (ẋ − ⟨p, ẋ⟩)."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._dim = call.args[1] if call.args[1] < 0 else call.args[1] - call.y.ndim
        self._p = call.y.exp()
        self._total: Any = None

    def _centred(self, v: Tensor) -> Tensor:
        return v - (self._p * v).sum(self._dim, keepdim=True)

    def push(self, tangents: Values) -> Tensor:
        assert tangents[0] is not None
        return self._centred(tangents[0])

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return [adjoint - self._p * adjoint.sum(self._dim, keepdim=True)]

    def keep(self, adjoint: Any) -> None:
        self._total = self._p * adjoint.sum(self._dim, keepdim=True)

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        assert tangents[0] is not None
        return [-self._total * self._centred(tangents[0])]


rule(aten._log_softmax.default)(LogSoftmax)
