"""The matrices the papers write with: row-major vec, Kronecker factors, attention moments.

These are the printed forms, to be compared with at small size. They grow like (L d³)(L d² d_k):
344 MB for one factor at L = d = d_k = 9. The efficient forms live in ``curvatlas.blocks``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def kron(*factors: Tensor) -> Tensor:
    """A ⊗ B ⊗ … from left to right."""
    product = factors[0]
    for factor in factors[1:]:
        product = torch.kron(product.contiguous(), factor.contiguous())
    return product


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def commutation(m: int, n: int) -> Tensor:
    """K_{m,n} (mn, mn) with K vec(A) = vec(Aᵀ) for A (m, n), column-major vec."""
    matrix = torch.zeros(m * n, m * n, dtype=torch.float64)
    for i in range(m):
        for j in range(n):
            matrix[j + n * i, i + m * j] = 1.0
    return matrix


@dataclass(frozen=True)
class Moments:
    """Central moments of the tokens under each row of A: M1 (L, d), M2 (L, d, d), M3 (L, d², d)."""

    first: Tensor
    second: Tensor
    third: Tensor


def moments(attention: Tensor, x: Tensor) -> Moments:
    """M1_i = Σ_j A_ij x_j, M2_i = Σ_j A_ij x̃x̃ᵀ, M3_i = Σ_j A_ij x̃⊗x̃x̃ᵀ with x̃ = x_j − M1_i.

    attention: (L, L), x: (L, d)
    """
    first = attention @ x
    centred = x.unsqueeze(0) - first.unsqueeze(1)  # (i, j, d)
    second = torch.einsum("ij,ija,ijb->iab", attention, centred, centred)
    third = torch.einsum("ij,ija,ijb,ijc->iabc", attention, centred, centred, centred)
    d = x.shape[1]
    return Moments(first, second, third.reshape(len(x), d * d, d))


def first_factor(x: Tensor, m: Moments) -> Tensor:
    """Z1 (L d, d²): block row i is x_iᵀ ⊗ M2_i."""
    return torch.cat([kron(x[i : i + 1], m.second[i]) for i in range(len(x))])


def second_factor(x: Tensor, m: Moments) -> Tensor:
    """Z2 (L d³, d²) = (I_L ⊗ K_{d,d} ⊗ I_d)(block rows x_iᵀ ⊗ x_i ⊗ M3_i)."""
    length, d = x.shape
    rows = [kron(x[i : i + 1], x[i : i + 1].T, m.third[i]) for i in range(length)]
    return kron(eye(length), commutation(d, d), eye(d)) @ torch.cat(rows)


def shuffle(d: int) -> Tensor:
    """S (d³, d) = (I_d ⊗ K_{d,d})(vec_r I_d ⊗ I_d)."""
    return kron(eye(d), commutation(d, d)) @ kron(eye(d).reshape(-1, 1), eye(d))


@dataclass(frozen=True)
class SingleHead:
    """Single-head attention in the papers' layout: weights act on the right, d_v = d, no W_O."""

    x: Tensor  # (L, d)
    query: Tensor  # (d, d_k)
    key: Tensor  # (d, d_k)
    value: Tensor  # (d, d)
    target: Tensor  # (L, d)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.query.shape[1])

    @property
    def reduction(self) -> float:
        """c = 2/(L d_v), the second derivative of the mean squared error."""
        return 2.0 / self.target.numel()

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def logits(self) -> Tensor:
        return self.scale * (self.x @ self.query) @ (self.x @ self.key).T

    def attention(self) -> Tensor:
        return torch.softmax(self.logits(), -1)

    def output(self) -> Tensor:
        return self.attention() @ self.x @ self.value

    def loss(self, output: Tensor) -> Tensor:
        return (output - self.target).pow(2).mean()

    def tracked(self) -> SingleHead:
        q, k, v = (p.detach().clone().requires_grad_(True) for p in self.parameters)
        return SingleHead(self.x, q, k, v, self.target)


def draw_head(
    generator: torch.Generator,
    *,
    length: int,
    d: int,
    d_k: int,
    input_scale: float = 1.0,
    weight_scale: float = 1.0,
) -> SingleHead:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return SingleHead(
        x=input_scale * draw(length, d),
        query=weight_scale * draw(d, d_k) / d**0.5,
        key=weight_scale * draw(d, d_k) / d**0.5,
        value=weight_scale * draw(d, d) / d**0.5,
        target=draw(length, d),
    )
