r"""Third-order jets: a quantity with its first three derivatives along a straight line θ + t v.

Every rule is the closed form of one operation, no automatic differentiation:

    product        (fg)''' = f'''g + 3f''g' + 3f'g'' + fg'''
    normalisation  σ² = m, σ n = c:  σ''' = (m'''/2 − 3σ'σ'')/σ,
                   n''' = (c''' − 3σ'n'' − 3σ''n' − σ'''n)/σ
    softmax        cumulants: (log Σ e^T)''' = ⟨T'''⟩ + 3Cov(T', T'') + κ₃(T')
    activation     f(h)''' = f'h''' + 3f''h'h'' + f'''h'³
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.blocks.activations import activation_derivatives
from curvatlas.blocks.structure import Activation, Norm


@dataclass(frozen=True)
class Jet:
    """f, f', f'', f''' at t = 0, all of one shape."""

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
