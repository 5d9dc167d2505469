r"""A linear layer y = x Wᵀ + b with its tangent and the tangent of its adjoint (THEORY 9).

Forward tangent, adjoint, and the tangent R of the adjoint, W in PyTorch's (out, in) layout:

    ẏ = ẋ Wᵀ + x Ẇᵀ + ḃ
    δ_x = δ_y W                 R δ_x = Rδ_y W + δ_y Ẇ
    ∂ℓ/∂W = δ_yᵀ x              R ∂ℓ/∂W = Rδ_yᵀ x + δ_yᵀ ẋ
    ∂ℓ/∂b = Σ_i δ_y             R ∂ℓ/∂b = Σ_i Rδ_y

Shapes: x (N, in), y and δ_y (N, out); everything with a dot or an R has a leading axis K of
directions. ``None`` stands for zero everywhere, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from curvatlas.blocks.products_workspace import Way, adjoining


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """left + right where ``None`` is zero; written over ``left``."""
    if left is None:
        return right
    return left if right is None else left.add_(right)


class Linear:
    """A linear layer; its input x (N, in) comes with each call, ``delta`` is its output's adjoint.

    ``names`` are the prefixes of its weights, ``{name}_weight`` and ``{name}_bias``. Several names
    are layers of one input taken together, their outputs side by side: larger matrix products.
    """

    def __init__(self, names: Sequence[str], weights: Mapping[str, Tensor]) -> None:
        self.weight_names = tuple(f"{name}_weight" for name in names)
        self.bias_names = tuple(f"{name}_bias" for name in names if f"{name}_bias" in weights)
        self.sizes = tuple(weights[name].shape[0] for name in self.weight_names)
        self.weight = _join([weights[name] for name in self.weight_names], 0)
        self.bias: Tensor | None = None
        if self.bias_names:
            self.bias = _join([weights[name] for name in self.bias_names], 0)
        self.delta: Tensor | None = None  # (N, out)

    def value(self, x: Tensor) -> Tensor:
        """(N, out)."""
        if self.bias is None:
            return x @ self.weight.T
        return torch.addmm(self.bias, x, self.weight.T)

    def push(
        self, x: Tensor, x_dot: Tensor | None, dots: Mapping[str, Tensor], out: Tensor
    ) -> Tensor | None:
        """ẏ (K, N, out), written to ``out``; None when it is zero."""
        weight_dot, bias_dot = _tangent(self.weight_names, dots), _tangent(self.bias_names, dots)
        done = False
        if x_dot is not None:
            _times_shared(x_dot, self.weight.T, out, bias_dot)
            done = True
        if weight_dot is not None:
            _shared_times(x, weight_dot.mT, out, None if done else bias_dot, accumulate=done)
            done = True
        if not done and bias_dot is not None:
            out.copy_(bias_dot.unsqueeze(1).expand_as(out))
            done = True
        return out if done else None

    def pull(
        self,
        rate: Tensor | None,
        dots: Mapping[str, Tensor],
        out: Tensor,
        *,
        accumulate: bool = False,
    ) -> bool:
        """Rδ_x (K, N, in) from Rδ_y ``rate``, written or added to ``out``; whether it now holds it.

        ``dots`` empty: the adjoint alone.
        """
        if rate is not None:
            _times_shared(rate, self.weight, out, None, accumulate=accumulate)
            accumulate = True
        weight_dot = None if self.delta is None else _tangent(self.weight_names, dots)
        if weight_dot is not None:
            assert self.delta is not None
            _shared_times(self.delta, weight_dot, out, None, accumulate=accumulate)
            accumulate = True
        return accumulate

    def rates(self, rate: Tensor | None, x: Tensor, x_dot: Tensor | None, way: Way) -> None:
        """R ∂ℓ/∂W (K, out, in) and R ∂ℓ/∂b (K, out), those that are wanted and not zero."""
        if way.record:
            assert rate is not None
            self.delta = rate[0]
        moved = x_dot if self.delta is not None else None
        if (rate is not None or moved is not None) and way.wants(self.weight_names):
            self._weight_rate(rate, x, moved, way)
        if rate is not None and way.wants(self.bias_names):
            way.give(self.bias_names, self.sizes, rate.sum(1))

    def _weight_rate(self, rate: Tensor | None, x: Tensor, moved: Tensor | None, way: Way) -> None:
        given = rate if rate is not None else moved
        assert given is not None
        shape = (given.shape[0], *self.weight.shape)
        # A wide result is formed transposed and copied: in float64 the BLAS reaches 39 instead of
        # 24 GFlop/s there (512 × 128, inner 512).
        wide = x.dtype == torch.float64 and shape[0] == 1 and shape[1] > shape[2]
        room = None if wide else way.room(self.weight_names)
        if room is not None:
            target = room
        elif wide:
            target = way.space.take("linear.wide", shape[0], shape[2], shape[1], like=x).mT
        else:
            target = torch.empty(shape, dtype=x.dtype, device=x.device)
        accumulate = room is not None and way.accumulate
        if rate is not None:
            _transposed_times(rate, x, target, accumulate=accumulate)
            accumulate = True
        if moved is not None:
            assert self.delta is not None
            _shared_times(self.delta.T, moved, target, None, accumulate=accumulate)
        if room is None:
            own = wide and not way.into and way.space.keep
            way.give(self.weight_names, self.sizes, target.clone() if own else target)


def complete(names: Iterable[str], given: Container[str]) -> bool:
    """Whether all or none of ``names`` are given: what layers taken together need."""
    return len({name in given for name in names}) <= 1


def _tangent(names: Sequence[str], dots: Mapping[str, Tensor]) -> Tensor | None:
    parts = [dots[name] for name in names if name in dots]
    return _join(parts, 1) if parts else None


def _join(parts: Sequence[Tensor], axis: int) -> Tensor:
    """The parts along ``axis``; neighbours in memory, as in a flat vector, are not copied."""
    if len(parts) == 1:
        return parts[0]
    whole = adjoining(parts, axis)
    return torch.cat(list(parts), axis) if whole is None else whole


def _times_shared(
    left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None, *, accumulate: bool = False
) -> None:
    """out (+)= (K, N, a) @ (a, b) + bias (K, b), the directions as more rows of one GEMM."""
    k, n, a = left.shape
    rows, result = left.view(k * n, a), out.view(k * n, -1)
    if accumulate:
        result.addmm_(rows, right)
    elif bias is not None and k == 1:
        torch.addmm(bias[0], rows, right, out=result)
    else:
        torch.mm(rows, right, out=result)
        if bias is not None:
            out += bias.unsqueeze(1)


def _shared_times(
    left: Tensor, right: Tensor, out: Tensor, bias: Tensor | None, *, accumulate: bool
) -> None:
    """out (+)= (a, N) @ (K, N, b) + bias (K, b), the left factor common to all directions."""
    k = right.shape[0]
    if k == 1:
        if accumulate:
            out[0].addmm_(left, right[0])
        elif bias is not None:
            torch.addmm(bias[0], left, right[0], out=out[0])
        else:
            torch.mm(left, right[0], out=out[0])
        return
    shared = left.expand(k, -1, -1)
    if accumulate:
        out.baddbmm_(shared, right)
    else:
        torch.bmm(shared, right, out=out)
        if bias is not None:
            out += bias.unsqueeze(1)


def _transposed_times(left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """out (+)= leftᵀ right:  (K, N, a), (N, b) → (K, a, b)."""
    if left.shape[0] == 1:
        if accumulate:
            out[0].addmm_(left[0].T, right)
        else:
            torch.mm(left[0].T, right, out=out[0])
        return
    shared = right.expand(left.shape[0], -1, -1)
    if accumulate:
        out.baddbmm_(left.mT, shared)
    else:
        torch.bmm(left.mT, shared, out=out)
