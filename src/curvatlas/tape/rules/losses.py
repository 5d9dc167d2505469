"""Losses: entry by entry and summed, or a softmax against targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.record import aten
from curvatlas.tape.rules.base import (
    Call,
    Linear,
    Rule,
    Unruled,
    Values,
    broadcast,
    dots,
    entrywise,
    from_end,
    rule,
)

# --- entry by entry -------------------------------------------------------------------------------


def _share(reduction_at: int) -> Callable[[Call], float | None]:
    """The share of one entry in the loss; None: it is not summed."""

    def made(call: Call) -> float | None:
        entries = math.prod(broadcast(call.args))
        shares = (None, 1 / entries if entries else math.nan, 1.0)
        return shares[call.args[reduction_at]]

    return made


def _of_difference(
    derivatives: Callable[[Call, Tensor], tuple[Tensor, Any]],
) -> Callable[[Call], Any]:
    """f(x − t): f' and f'' with their signs."""

    def slopes(call: Call) -> Any:
        slope, second = derivatives(call, call.args[0] - call.args[1])
        return {0: slope, 1: -slope}, {
            (0, 0): lambda: second,
            (0, 1): lambda: -second,
            (1, 1): lambda: second,
        }

    return slopes


def _huber(call: Call, d: Tensor) -> tuple[Tensor, Any]:
    delta = call.args[3]
    return d.clamp(-delta, delta), (d.abs() < delta).to(d.dtype)


def _smooth_l1(call: Call, d: Tensor) -> tuple[Tensor, Any]:
    beta = call.args[3]
    if not beta:
        return d.sgn(), 0.0
    return (d / beta).clamp(-1, 1), (d.abs() < beta).to(d.dtype) / beta


entrywise(aten.mse_loss.default, slopes=_of_difference(lambda _, d: (2 * d, 2.0)), share=_share(2))
entrywise(aten.huber_loss.default, slopes=_of_difference(_huber), share=_share(2))
entrywise(aten.smooth_l1_loss.default, slopes=_of_difference(_smooth_l1), share=_share(2))


def _binary(call: Call) -> Any:
    """−w (t log x + (1 − t) log(1 − x)), logarithms not below −100 as in PyTorch."""
    x, t, weight = call.args[:3]
    w = 1.0 if weight is None else weight
    odds = (x * (1 - x)).clamp(min=1e-12)
    logs = x.log().clamp(min=-100) - (1 - x).log().clamp(min=-100)
    return {0: w * (x - t) / odds, 1: -w * logs}, {
        (0, 0): lambda: w * (t / x.square() + (1 - t) / (1 - x).square()),
        (0, 1): lambda: -w / odds,
    }


def _binary_with_logits(call: Call) -> Any:
    """w ((1 − t) x + (1 + (p − 1) t) softplus(−x)), p the weight of positives."""
    x, t, weight, positive = call.args[:4]
    w = 1.0 if weight is None else weight
    more = 0.0 if positive is None else positive - 1
    s = torch.sigmoid(-x)
    falls = 1 + more * t
    by_target = w * (more * torch.nn.functional.softplus(-x) - x)
    return {0: w * (1 - t - falls * s), 1: by_target}, {
        (0, 0): lambda: w * falls * s * (1 - s),
        (0, 1): lambda: -w * (1 + more * s),
    }


def _soft_margin(call: Call) -> Any:
    """log(1 + e^(−t x))."""
    x, t = call.args[:2]
    if call.which(1) is not None:
        raise Unruled
    s = torch.sigmoid(-t * x)
    return {0: -t * s}, {(0, 0): lambda: t * t * s * (1 - s)}


entrywise(aten.binary_cross_entropy.default, slopes=_binary, share=_share(3))
entrywise(
    aten.binary_cross_entropy_with_logits.default, slopes=_binary_with_logits, share=_share(4)
)
entrywise(aten.soft_margin_loss.default, slopes=_soft_margin, share=_share(2))

# --- a class a target -----------------------------------------------------------------------------


class _Targets:
    """Of every target its class, with a weight of zero where it is ignored.

    classes: with an axis of one where x has its classes;  weights: of the same shape;
    share: (N, 1, …) or a number by which a loss counts in the result.
    """

    def __init__(self, x: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int):
        self.axis = from_end(min(1, x.ndim - 1), x.ndim)
        counted = target != ignored
        classes = torch.where(counted, target, 0)
        weights = counted.to(x.dtype)
        if weight is not None:
            weights = weights * weight[classes]
        self.total = weights.sum()
        self.classes, self.weights = classes.unsqueeze(self.axis), weights.unsqueeze(self.axis)
        self.share = 1 / self.total if reduction == 1 else 1.0

    def read(self, t: Tensor) -> Tensor:
        """The entries of (K, *x) at the targets."""
        return t.gather(self.axis, self.classes.expand(len(t), *self.classes.shape))

    def put(self, zeros: Tensor, t: Tensor) -> Tensor:
        """Add values to these entries."""
        return zeros.scatter_add_(self.axis, self.classes.expand(t.shape), t)


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _negative_log_likelihood(call: Call) -> Rule:
    """−Σ w x[target]: linear."""
    x, target, weight, reduction, ignored = call.args
    if call.which(0) is None or len(call.x) > 1:
        raise Unruled
    targets = _Targets(x, target, weight, reduction, ignored)
    weights, shape = -targets.weights * targets.share, call.y.shape

    def push(t: Tensor) -> Tensor:
        picked = targets.read(t) * weights
        return (picked if reduction == 0 else picked.flatten(1).sum(1)).reshape(len(t), *shape)

    def pull(t: Tensor) -> Tensor:
        bars = t.reshape(len(t), *(weights.shape if reduction == 0 else (1,) * weights.ndim))
        return targets.put(t.new_zeros(len(t), *x.shape), bars * weights)

    return Linear(call, [(0, push, pull)])


class CrossEntropy(Rule):
    """Σ s (a log Σ eˣ − ⟨b, x⟩) over targets, with p = softmax(x).

    ẏ = s (a ⟨p, ẋ⟩ − ⟨b, ẋ⟩);  x̄ = ȳ s (a p − b);  bend = ȳ s a p (ẋ − ⟨p, ẋ⟩).
    One class a target: a = w, b = w at the class; label smoothing ε spreads ε of b evenly.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        x, target, weight, reduction, ignored, smoothing = call.args
        if call.which(0) is None or len(call.x) > 1:
            raise Unruled
        self._axis = from_end(min(1, x.ndim - 1), x.ndim)
        self._p = torch.softmax(x, self._axis)
        self._summed = reduction != 0
        count = x.shape[self._axis]
        self._targets: _Targets | None = None
        self._b: Any = None  # dense, beside what stands at the targets
        each = (
            None
            if weight is None
            else weight.reshape(-1, *(1,) * (x.ndim - 1 - (self._axis + x.ndim)))
        )
        if target.is_floating_point():
            b = target if not smoothing else target * (1 - smoothing) + smoothing / count
            self._b = b if each is None else b * each
            samples = self._b.numel() // max(count, 1)
            self._share: Any = 1 / samples if reduction == 1 else 1.0
            self._b = self._b * self._share
            self._a = self._b.sum(self._axis, keepdim=True)
        else:
            self._targets = _Targets(x, target, weight, reduction, ignored)
            self._share = self._targets.share
            self._at = self._targets.weights * ((1 - smoothing) * self._share)
            self._a = self._at
            if smoothing:
                counted = (target != ignored).unsqueeze(self._axis).to(x.dtype)
                even = counted if each is None else counted * each
                self._b = (even * (self._share * smoothing / count)).expand(x.shape)
                self._a = self._at + self._b.sum(self._axis, keepdim=True)
        self._weight: Any = None  # ȳ a p

    def _mean(self, v: Tensor) -> Tensor:
        mean: Tensor = (self._p * v).sum(self._axis, keepdim=True)
        return mean

    def push(self, tangents: Values) -> Tensor:
        x = tangents[0]
        assert x is not None
        total: Tensor = self._a * self._mean(x)
        if self._targets is not None:
            total = total - self._at * self._targets.read(x)
        if self._b is not None:
            total = total - (self._b * x).sum(self._axis, keepdim=True)
        return (total.flatten(1).sum(1) if self._summed else total).reshape(len(x), *self.shape)

    def _bars(self, adjoint: Tensor) -> Tensor:
        """(K, …) with an axis of one for the classes."""
        shape = (1,) * self._a.ndim if self._summed else self._a.shape
        return adjoint.reshape(len(adjoint), *shape)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        bars = self._bars(adjoint)
        part = (bars * self._a) * self._p
        if self._targets is not None:
            self._targets.put(part, -bars * self._at)
        return [part if self._b is None else part - bars * self._b]

    def keep(self, adjoint: Any) -> None:
        self._weight = (self._bars(adjoint.unsqueeze(0)) * self._a).squeeze(0) * self._p

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        assert tangents[0] is not None
        return [self._weight * (tangents[0] - self._mean(tangents[0]))]

    def quadratic(self, tangents: Values) -> Tensor:
        """Σ ȳ a ⟨p, (ẋ − ⟨p, ẋ⟩)²⟩."""
        assert tangents[0] is not None
        return dots((tangents[0] - self._mean(tangents[0])).square(), self._weight)


def _signature(
    input: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> None:
    """torch._C._nn.cross_entropy_loss's."""


rule(torch._C._nn.cross_entropy_loss, signature=_signature)(CrossEntropy)
