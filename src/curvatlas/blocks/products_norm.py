r"""A normalisation y = γ ⊙ n(x) + β with its tangent and the tangent of its adjoint (THEORY 9).

    ṅ = J ẋ,   ẏ = γ ⊙ ṅ + γ̇ ⊙ n + β̇
    δ_x = J(γ ⊙ δ_y)
    R δ_x = J(γ ⊙ Rδ_y + γ̇ ⊙ δ_y) + Ψ(γ ⊙ δ_y) ẋ
    R ∂ℓ/∂γ = Σ_i (n ⊙ Rδ_y + ṅ ⊙ δ_y),   R ∂ℓ/∂β = Σ_i Rδ_y

Ψ(δ) ẋ = −[Jδ (n·ẋ) + n (Jδ·ẋ) + (n·δ) Jẋ]/(dσ) needs only the row sums kept below.
``None`` is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from curvatlas.blocks.normalization import norm_jacobian_product, normalize
from curvatlas.blocks.structure import Norm


@dataclass
class NormTangent:
    """What the way back needs of the way forward: ẋ, ṅ and n·ẋ, for K directions."""

    x_dot: Tensor | None  # (K, N, d)
    n_dot: Tensor | None  # (K, N, d)
    along: Tensor | None  # n·ẋ (K, N, 1)
    weight_dot: Tensor | None  # (K, d)


class Normalization:
    """One norm at its input x (N, d)."""

    def __init__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, norm: Norm, eps: float
    ) -> None:
        self.norm, self.weight, self.bias = norm, weight, bias
        self.n, self.inv_std = normalize(x, eps=eps, norm=norm)
        self.delta: Tensor | None = None  # δ_y (N, d)
        self._pulled: Tensor | None = None  # J(γ δ_y) (N, d)
        self._along: Tensor | None = None  # n·(γ δ_y) (N, 1)

    def value(self) -> Tensor:
        """(N, d)."""
        y = self.n if self.weight is None else self.n * self.weight
        return y if self.bias is None else y + self.bias

    def push(
        self, x_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None
    ) -> tuple[Tensor | None, NormTangent]:
        """ẏ (K, N, d) and what ``pull`` needs."""
        n_dot, along = None, None
        if x_dot is not None:
            n_dot = norm_jacobian_product(self.n, self.inv_std, x_dot, norm=self.norm)
            if self.norm != "none":
                along = (self.n * x_dot).sum(-1, keepdim=True)
        result = n_dot
        if n_dot is not None and self.weight is not None:
            result = n_dot * self.weight
        if weight_dot is not None:
            scaled = self.n * weight_dot.unsqueeze(1)
            result = scaled if result is None else scaled.add_(result)
        if bias_dot is not None:
            shift = bias_dot.unsqueeze(1)
            result = (
                shift.expand(-1, self.n.shape[0], -1).contiguous()
                if result is None
                else result + shift
            )
        return result, NormTangent(x_dot, n_dot, along, weight_dot)

    def pull(self, rate: Tensor | None, tangent: NormTangent | None = None) -> Tensor | None:
        """Rδ_x (K, N, d) from Rδ_y ``rate``; the tangent adds the second-order terms."""
        inner = rate if rate is None or self.weight is None else rate * self.weight
        if tangent is None or self.delta is None:
            return None if inner is None else self._jacobian(inner)
        if tangent.weight_dot is not None:
            moved = tangent.weight_dot.unsqueeze(1) * self.delta
            inner = moved if inner is None else moved.add_(inner)
        result = None if inner is None else self._jacobian(inner)
        if tangent.x_dot is None or self.norm == "none":
            return result
        assert tangent.n_dot is not None
        assert tangent.along is not None
        assert self._pulled is not None
        assert self._along is not None
        bend = self._pulled * tangent.along
        bend.addcmul_(self.n, (self._pulled * tangent.x_dot).sum(-1, keepdim=True))
        bend.addcmul_(tangent.n_dot, self._along)
        bend.mul_(self.inv_std * (-1.0 / self.n.shape[-1]))
        return bend if result is None else bend.add_(result)

    def record(self, delta: Tensor, pulled: Tensor) -> None:
        """Keep the adjoint δ_y (N, d) and δ_x = J(γδ_y) for second-order terms."""
        self.delta, self._pulled = delta, pulled
        inner = delta if self.weight is None else delta * self.weight
        self._along = (self.n * inner).sum(-1, keepdim=True)

    def weight_rate(self, rate: Tensor | None, tangent: NormTangent | None = None) -> Tensor | None:
        """R ∂ℓ/∂γ (K, d)."""
        result = None if rate is None else (rate * self.n).sum(1)
        if tangent is not None and tangent.n_dot is not None and self.delta is not None:
            moved = (tangent.n_dot * self.delta).sum(1)
            result = moved if result is None else result.add_(moved)
        return result

    def _jacobian(self, v: Tensor) -> Tensor:
        return norm_jacobian_product(self.n, self.inv_std, v, norm=self.norm)
