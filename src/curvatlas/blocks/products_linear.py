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

from torch import Tensor


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """left + right where ``None`` is zero."""
    if left is None:
        return right
    return left if right is None else left + right


class Linear:
    """A linear layer at its input ``x`` (N, in); ``delta`` is its output's adjoint, when known."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.x, self.weight, self.bias = x, weight, bias
        self.delta: Tensor | None = None  # (N, out)

    def value(self) -> Tensor:
        """(N, out)."""
        if self.bias is None:
            return self.x @ self.weight.T
        return self.bias.addmm(self.x, self.weight.T)

    def push(
        self, x_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None
    ) -> Tensor | None:
        """ẏ (K, N, out)."""
        result = None if x_dot is None else _times_shared(x_dot, self.weight.T)
        if weight_dot is not None:
            result = _add_product(result, self.x, weight_dot.mT)
        if bias_dot is not None:
            shift = bias_dot.unsqueeze(1)
            if result is None:
                return shift.expand(-1, self.x.shape[0], -1).contiguous()
            result += shift
        return result

    def pull(self, rate: Tensor | None, weight_dot: Tensor | None = None) -> Tensor | None:
        """Rδ_x (K, N, in) from Rδ_y ``rate`` (K, N, out)."""
        result = None if rate is None else _times_shared(rate, self.weight)
        if weight_dot is not None and self.delta is not None:
            result = _add_product(result, self.delta, weight_dot)
        return result

    def weight_rate(self, rate: Tensor | None, x_dot: Tensor | None = None) -> Tensor | None:
        """R ∂ℓ/∂W (K, out, in)."""
        result = None
        if rate is not None:
            result = _shared_right(rate.mT, self.x)
        if x_dot is not None and self.delta is not None:
            result = _add_product(result, self.delta.T, x_dot)
        return result

    @staticmethod
    def bias_rate(rate: Tensor | None) -> Tensor | None:
        """R ∂ℓ/∂b (K, out)."""
        return None if rate is None else rate.sum(1)


def _times_shared(left: Tensor, right: Tensor) -> Tensor:
    """(K, N, a) @ (a, b) as one GEMM."""
    k, n, a = left.shape
    return (left.reshape(k * n, a) @ right).view(k, n, -1)


def _shared_right(left: Tensor, right: Tensor) -> Tensor:
    """(K, a, N) @ (N, b), the right factor common to all K."""
    if left.shape[0] == 1:
        return (left[0] @ right).unsqueeze(0)
    return left @ right.expand(left.shape[0], -1, -1)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + (a, N) @ (K, N, b) in place, the left factor common to all K."""
    k = right.shape[0]
    if k == 1:
        if total is None:
            return (left @ right[0]).unsqueeze(0)
        total[0].addmm_(left, right[0])
        return total
    shared = left.expand(k, -1, -1)
    return shared @ right if total is None else total.baddbmm_(shared, right)
