"""Norms, lengths and softmaxes: gradient maps, with symmetric Jacobians and closed bends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.record import aten
from curvatlas.tape.rules.base import (
    Call,
    Rule,
    Unruled,
    Values,
    added,
    dots,
    from_end,
    rule,
)
from curvatlas.tape.rules.default import Default
from curvatlas.tape.rules.views import axes_of

# --- y = γ n(x) + β -------------------------------------------------------------------------------


class Norm(Rule):
    """y = γ n(x) + β, where n divides rows of x by their size, centred first or not.

    With ⟨·⟩ the mean of a row (or its sum), C v = v − ⟨v⟩ (or v) and n = C x/σ:
    J v = (C v − n ⟨n v⟩)/σ.  Its derivative along ẋ, with ṅ = J ẋ and σ̇ = ⟨n ẋ⟩:
    J̇ v = −(ṅ ⟨n v⟩ + n ⟨ṅ v⟩ + σ̇ J v)/σ.

    x is seen as ``view`` with rows over its ``axes``, γ and β as ``parameter``, which broadcasts to
    it; inverse: 1/σ.
    """

    def __init__(
        self,
        call: Call,
        *,
        places: Sequence[int | None],  # positions of x, γ and β among the arguments
        view: Sequence[int],
        axes: Sequence[int],
        parameter: Sequence[int],
        n: Tensor,
        inverse: Tensor,
        centred: bool = False,
        summed: bool = False,
    ) -> None:
        super().__init__(call)
        self._places = [None if p is None else call.which(p) for p in places]
        if sum(p is not None for p in self._places) < len(call.x):
            raise Unruled
        gamma = None if places[1] is None else call.args[places[1]]
        self._gamma = None if gamma is None else gamma.reshape(parameter)
        self._view, self._parameter = tuple(view), tuple(parameter)
        self._axes = [from_end(a, len(view)) for a in axes]
        self._centred, self._summed = centred, summed
        self._n, self._inverse = n.reshape(view), inverse
        self._bar: Any = None  # ȳ
        self._scaled_bar: Any = None  # n̄ = γ ȳ
        self._moment: Any = None  # ⟨n n̄⟩
        self._pulled: Any = None  # J n̄

    def _mean(self, v: Tensor) -> Tensor:
        return v.sum(self._axes, True) if self._summed else v.mean(self._axes, True)

    def _jacobian(self, v: Tensor) -> Tensor:
        inner = v - self._mean(v) if self._centred else v
        return torch.addcmul(inner, self._n, self._mean(self._n * v), value=-1).mul_(self._inverse)

    def _jacobian_moved(self, x: Tensor, moved: Tensor) -> Tensor:
        """J̇ n̄ along ẋ, with ṅ = J ẋ."""
        total = moved * self._moment
        total.addcmul_(self._n, self._mean(moved * self._scaled_bar))
        total.addcmul_(self._mean(self._n * x), self._pulled)
        result: Tensor = total.mul_(-self._inverse)
        return result

    def _of(self, values: Values) -> list[Any]:
        """Tangents of x, γ and β in the shapes that they are seen in."""
        shapes = (self._view, self._parameter, self._parameter)
        return [
            None if place is None or (v := values[place]) is None else v.reshape(len(v), *shape)
            for place, shape in zip(self._places, shapes, strict=True)
        ]

    def _scaled(self, v: Tensor) -> Tensor:
        return v if self._gamma is None else v * self._gamma

    def push(self, tangents: Values) -> Tensor:
        x, gamma, beta = self._of(tangents)
        total = None
        if x is not None:
            total = self._scaled(self.shared(tangents, lambda: self._jacobian(x)))
        if gamma is not None:
            total = gamma * self._n if total is None else torch.addcmul(total, gamma, self._n)
        total = added(total, beta)
        assert total is not None
        return total.expand(len(total), *self._view).reshape(len(total), *self.shape)

    def _to_parameter(self, v: Tensor) -> Tensor:
        axes = [
            axis + 1
            for axis, (n, wide) in enumerate(zip(self._parameter, self._view, strict=True))
            if n != wide
        ]
        return v.sum(axes, keepdim=True) if axes else v

    def _give(self, parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * len(self.shapes)
        for place, part in zip(self._places, parts, strict=True):
            if place is not None and part is not None:
                result[place] = part.reshape(len(part), *self.shapes[place])
        return result

    def _needed(self, needs: Sequence[bool]) -> list[bool]:
        return [place is not None and needs[place] for place in self._places]

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        adjoint = adjoint.reshape(len(adjoint), *self._view)
        to_x, to_gamma, to_beta = self._needed(needs)
        return self._give(
            (
                self._jacobian(self._scaled(adjoint)) if to_x else None,
                self._to_parameter(adjoint * self._n) if to_gamma else None,
                self._to_parameter(adjoint) if to_beta else None,
            )
        )

    def keep(self, adjoint: Any) -> None:
        self._bar = adjoint.reshape(self._view)
        self._scaled_bar = self._scaled(self._bar)
        self._moment = self._mean(self._n * self._scaled_bar)
        self._pulled = self._jacobian(self._scaled_bar)

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        return self.pull2(None, tangents, needs)

    def pull2(self, adjoint: Any, tangents: Values, needs: Sequence[bool]) -> Values:
        """x̄' = J (γ ȳ' + γ̇ ȳ) + J̇ n̄ and γ̄' = Σ (n ȳ' + ṅ ȳ): J is applied once to both."""
        x, gamma, _ = self._of(tangents)
        bar = None if adjoint is None else adjoint.reshape(len(adjoint), *self._view)
        moved = None if x is None else self.shared(tangents, lambda: self._jacobian(x))
        needs_x, needs_gamma, needs_beta = self._needed(needs)
        to_x = to_gamma = None
        if needs_x:
            to_x = None if bar is None else self._scaled(bar)
            if gamma is not None:
                to_x = gamma * self._bar if to_x is None else torch.addcmul(to_x, gamma, self._bar)
            to_x = None if to_x is None else self._jacobian(to_x)
            if moved is not None:
                bent = self._jacobian_moved(x, moved)
                to_x = bent if to_x is None else bent.add_(to_x)
        if needs_gamma:
            to_gamma = None if bar is None else bar * self._n
            if moved is not None:
                to_gamma = (
                    moved * self._bar
                    if to_gamma is None
                    else torch.addcmul(to_gamma, moved, self._bar)
                )
            to_gamma = None if to_gamma is None else self._to_parameter(to_gamma)
        to_beta = self._to_parameter(bar) if needs_beta and bar is not None else None
        return self._give((to_x, to_gamma, to_beta))

    def quadratic(self, tangents: Values) -> Tensor | None:
        """⟨ẋ, J̇ n̄⟩ + 2 ⟨γ̇ ȳ, J ẋ⟩, the first −(2 ⟨n n̄⟩… as the bend, with J ẋ made once."""
        x, gamma, _ = self._of(tangents)
        if x is None:
            return None
        moved = self.shared(tangents, lambda: self._jacobian(x))
        total = dots(self._jacobian_moved(x, moved), x)
        return total if gamma is None else total + 2 * dots(gamma * self._bar, moved)


class Scaled(Norm):
    """A norm by constants, as batch norm's in evaluation: J v = v/σ."""

    def _jacobian(self, v: Tensor) -> Tensor:
        return v * self._inverse

    def _jacobian_moved(self, x: Tensor, moved: Tensor) -> Tensor:
        return torch.zeros_like(x)


def _wide(statistic: Tensor, ndim: int) -> Tensor:
    """A statistic of rows with axes of one behind it."""
    return statistic.reshape(*statistic.shape, *(1,) * (ndim - statistic.ndim))


@rule(aten.native_layer_norm.default)
def _layer_norm(call: Call) -> Rule:
    x, shape = call.args[0], call.args[1]
    axes = range(-len(shape), 0)
    mean, inverse = (_wide(call.result(i), x.ndim) for i in (1, 2))
    return Norm(
        call,
        places=(0, 2, 3),
        view=x.shape,
        axes=axes,
        n=(x - mean) * inverse,
        parameter=(1,) * (x.ndim - len(shape)) + tuple(shape),
        inverse=inverse,
        centred=True,
    )


@rule(torch.rms_norm, signature=lambda input, normalized_shape, weight=None, eps=None: None)
def _rms_norm(call: Call) -> Rule:
    x, shape, _, eps = call.args
    axes = list(range(-len(shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    inverse = (x.square().mean(axes, keepdim=True) + eps).rsqrt()
    return Norm(
        call,
        places=(0, 2, None),
        view=x.shape,
        axes=axes,
        n=x * inverse,
        parameter=(1,) * (x.ndim - len(shape)) + tuple(shape),
        inverse=inverse,
    )


@rule(aten.native_group_norm.default)
def _group_norm(call: Call) -> Rule:
    samples, channels, size, groups = call.args[3:7]
    view = (samples, groups, channels // groups, size)
    mean, inverse = (call.result(i).reshape(samples, groups, 1, 1) for i in (1, 2))
    return Norm(
        call,
        places=(0, 1, 2),
        view=view,
        axes=(2, 3),
        parameter=(1, *view[1:3], 1),
        n=(call.args[0].reshape(view) - mean) * inverse,
        inverse=inverse,
        centred=True,
    )


def _batch_norm(call: Call) -> Rule:
    x, *_, running_mean, running_variance = call.args[:5]
    trains = call.args[5] if isinstance(call.args[5], bool) else "update" in call.node.name
    eps = call.args[-1]
    view = (x.shape[0], x.shape[1], x[0, 0].numel() if x.numel() else 0)
    rows = x.reshape(view)
    if trains:
        variance, mean = torch.var_mean(rows, (0, 2), correction=0, keepdim=True)
    else:
        mean, variance = (s.reshape(1, -1, 1) for s in (running_mean, running_variance))
    inverse = (variance + eps).rsqrt()
    kind = Norm if trains else Scaled
    return kind(
        call,
        places=(0, 1, 2),
        view=view,
        axes=(0, 2),
        parameter=(1, view[1], 1),
        n=(rows - mean) * inverse,
        inverse=inverse,
        centred=True,
    )


rule(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update_functional.default,
)(_batch_norm)


@rule(aten._weight_norm_interface.default)
def _weight_norm(call: Call) -> Rule:
    """g v/‖v‖, the length over all axes but one."""
    v, _, dim = call.args
    dim = dim % v.ndim
    axes = [axis for axis in range(v.ndim) if axis != dim]
    inverse = 1 / torch.linalg.vector_norm(v, dim=axes, keepdim=True)
    return Norm(
        call,
        places=(0, 1, None),
        view=v.shape,
        axes=axes,
        n=v * inverse,
        inverse=inverse,
        parameter=[n if axis == dim else 1 for axis, n in enumerate(v.shape)],
        summed=True,
    )


# --- lengths and variances ------------------------------------------------------------------------


class Length(Rule):
    """y = g(s Σ (C x)²) over some axes, g the identity (variance) or the root (length, deviation).

    With c = s C x. Identity: J ẋ = 2 ⟨c, ẋ⟩, bend = 2 ȳ s C ẋ.
    Root: J ẋ = ⟨c, ẋ⟩/y, bend = (ȳ/y)(s C ẋ − c ẏ/y); zero where y is, as in PyTorch.
    """

    def __init__(
        self,
        call: Call,
        axes: Sequence[int],
        *,
        share: float = 1.0,
        centred: bool = False,
        root: bool = True,
    ) -> None:
        super().__init__(call)
        x = call.x[0]
        self._axes, self._share, self._centred, self._root = list(axes), share, centred, root
        self._kept = [1 if a - x.ndim in self._axes else n for a, n in enumerate(x.shape)]
        self._c = share * self._centre(x)
        y = call.y.reshape(self._kept)
        self._factor: Any = torch.where(y == 0, 0.0, 1 / y) if root else 2.0
        self._bar: Any = None

    def _centre(self, v: Tensor) -> Tensor:
        return v - v.mean(self._axes, True) if self._centred and self._axes else v

    def _moved(self, x: Tensor) -> Tensor:
        """ẏ with the axes kept."""
        inner = self._c * x
        moved: Tensor = (inner.sum(self._axes, True) if self._axes else inner) * self._factor
        return moved

    def push(self, tangents: Values) -> Tensor:
        assert tangents[0] is not None
        return self._moved(tangents[0]).reshape(len(tangents[0]), *self.shape)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return [adjoint.reshape(len(adjoint), *self._kept) * self._factor * self._c]

    def keep(self, adjoint: Any) -> None:
        self._bar = adjoint.reshape(self._kept) * self._factor

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        x = tangents[0]
        assert x is not None
        bent = self._share * self._centre(x)
        if self._root:
            bent = bent - self._c * (self._moved(x) * self._factor)
        return [bent * self._bar]


@rule(aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def _length(call: Call) -> Rule:
    if call.args[1] not in (2, None) or not call.x[0].numel() or call.x[0].dtype != call.y.dtype:
        raise Unruled
    dims = None if call.node.operation is aten.norm.Scalar else call.args[2]
    return Length(call, axes_of(dims, call.x[0].ndim))


@rule(aten.var.correction, aten.std.correction)
def _variance(call: Call) -> Rule:
    x, dims, correction = call.args[:3]
    axes = axes_of(dims, x.ndim)
    rows = x.numel() / max(call.y.numel(), 1)
    free = rows - (1 if correction is None else correction)
    if free <= 0 or not x.numel():
        raise Unruled
    root = call.node.operation is aten.std.correction
    return Length(call, axes, share=1 / free, centred=True, root=root)


def _distances(call: Call) -> Rule:
    """cdist, by autograd of its definition: its own second derivative is missing."""
    p = call.args[2] if len(call.args) > 2 else 2.0

    def distances(a: Tensor, b: Tensor, *_: Any) -> Any:
        return torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)

    return Default(call, distances)


rule(aten._cdist_forward.default, aten._euclidean_dist.default)(_distances)

# --- softmaxes ------------------------------------------------------------------------------------


class _Weights(Rule):
    """What softmax, log softmax and logsumexp share: p = eˣ/Σ eˣ along their axes."""

    def __init__(self, call: Call, axes: Sequence[int], p: Tensor) -> None:
        super().__init__(call)
        self._axes, self._p = list(axes), p

    def _mean(self, v: Tensor) -> Tensor:
        """⟨p, v⟩."""
        weighted: Tensor = self._p * v
        return weighted.sum(self._axes, keepdim=True) if self._axes else weighted

    def _centred(self, v: Tensor) -> Tensor:
        return v - self._mean(v)


def _axis(call: Call) -> list[int]:
    n = call.x[0].ndim
    return [from_end(call.args[1], n)] if n else []


class Softmax(_Weights):
    """J v = p (v − ⟨p, v⟩), symmetric.

    bend = p (a c − ⟨p, a c⟩) with a = ẋ − ⟨p, ẋ⟩ and c = ȳ − ⟨p, ȳ⟩; quadratic = Σ p a² c.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call, _axis(call), call.y)
        self._c: Tensor | None = None

    def push(self, tangents: Values) -> Tensor:
        assert tangents[0] is not None
        return self._p * self._centred(tangents[0])

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return [self._p * self._centred(adjoint)]

    def keep(self, adjoint: Any) -> None:
        self._c = self._centred(adjoint)

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        assert tangents[0] is not None
        assert self._c is not None
        return [self._p * self._centred(self._centred(tangents[0]) * self._c)]

    def quadratic(self, tangents: Values) -> Tensor:
        assert tangents[0] is not None
        assert self._c is not None
        return dots(self._centred(tangents[0]).square(), self._p * self._c)


rule(aten._softmax.default, aten._safe_softmax.default)(Softmax)


class LogSumExp(_Weights):
    """y = log Σ eˣ: ẏ = ⟨p, ẋ⟩;  x̄ = ȳ p;  bend = ȳ p (ẋ − ⟨p, ẋ⟩)."""

    def __init__(self, call: Call) -> None:
        x = call.x[0]
        axes = axes_of(call.args[1], x.ndim)
        self._kept = [1 if a - x.ndim in axes else n for a, n in enumerate(x.shape)]
        y = call.y.reshape(self._kept)
        super().__init__(call, axes, (x - torch.where(y.isfinite(), y, 0.0)).exp())
        self._weight: Any = None

    def push(self, tangents: Values) -> Tensor:
        assert tangents[0] is not None
        return self._mean(tangents[0]).reshape(len(tangents[0]), *self.shape)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return [adjoint.reshape(len(adjoint), *self._kept) * self._p]

    def keep(self, adjoint: Any) -> None:
        self._weight = adjoint.reshape(self._kept) * self._p

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        assert tangents[0] is not None
        return [self._weight * self._centred(tangents[0])]


rule(aten.logsumexp.default)(LogSumExp)


class LogSoftmax(_Weights):
    """y = x − log Σ eˣ: ẏ = ẋ − ⟨p, ẋ⟩;  x̄ = ȳ − p Σ ȳ;  bend = −(Σ ȳ) p (ẋ − ⟨p, ẋ⟩)."""

    def __init__(self, call: Call) -> None:
        super().__init__(call, _axis(call), call.y.exp())
        self._weight: Any = None

    def push(self, tangents: Values) -> Tensor:
        assert tangents[0] is not None
        return self._centred(tangents[0])

    def _spread(self, adjoint: Tensor) -> Tensor:
        """p Σ ȳ."""
        return self._p * (adjoint.sum(self._axes, keepdim=True) if self._axes else adjoint)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return [adjoint - self._spread(adjoint)]

    def keep(self, adjoint: Any) -> None:
        self._weight = -self._spread(adjoint)

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        assert tangents[0] is not None
        return [self._weight * self._centred(tangents[0])]


rule(aten._log_softmax.default)(LogSoftmax)
