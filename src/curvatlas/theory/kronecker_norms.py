r"""Upper bounds on the norm of sums of Kronecker products over tokens.

Every block of a Transformer block's Hessian is a sum over tokens (THEORY §7)

    Σ_i α_i β_iᵀ ⊗ M_i          or, with an adjoint term,   Σ_i α_i ⊗ (a_i ⊗ N_i + K_i ⊗ b_i).

Nothing of the size of the block is formed. Each function returns the smallest of several proven
bounds; all are differentiable, so that an adversary can climb the ratio true/bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def top(matrix: Tensor) -> Tensor:
    """Largest eigenvalue of a symmetric matrix, not below zero."""
    largest: Tensor = torch.linalg.eigvalsh(matrix)[..., -1].clamp_min(0.0)
    return largest


def weighted_top(alpha: Tensor, weight: Tensor) -> Tensor:
    """λ_max(Σ_i w_i α_iα_iᵀ), alpha (N, a), w (…, N) ≥ 0 → (…)."""
    if alpha.shape[0] < alpha.shape[1]:  # the Gram matrix has the same spectrum and is smaller
        root = _root(weight)
        return top((alpha @ alpha.T) * root.unsqueeze(-2) * root.unsqueeze(-1))
    return top(alpha.T @ (alpha * weight.unsqueeze(-1)))


def _root(values: Tensor) -> Tensor:
    """√x with a finite derivative at 0 (the adversary differentiates through it)."""
    positive = values > 0
    return torch.where(positive, torch.where(positive, values, 1.0).sqrt(), 0.0 * values)


@dataclass(frozen=True)
class SignedNorm:
    """−low ≤ B ≤ high in the sense of quadratic forms, and a bound on ‖B‖_F."""

    high: Tensor
    low: Tensor
    frobenius: Tensor


def symmetric_sum(alpha: Tensor, middle: Tensor) -> SignedNorm:
    r"""Both ends of the spectrum of Σ_i α_iα_iᵀ ⊗ M_i, M_i symmetric.

    With M = M⁺ − M⁻:  Σ αα ᵀ⊗M⁺ ≤ ‖M_i⁺‖-weighted tokens ⊗ I, and ≤ I ⊗ Σ‖α_i‖²M_i⁺, and ≤ ‖B‖_F.

    alpha: (N, a), middle: (N, r, r)
    """
    values, vectors = torch.linalg.eigh(0.5 * (middle + middle.mT))
    size = alpha.pow(2).sum(1)
    frobenius = plain_frobenius(alpha, alpha, middle)
    ends = []
    for signed in (values, -values):
        part = signed.clamp_min(0.0)
        by_token = weighted_top(alpha, part.amax(1))
        summed = torch.einsum("nrk,nk,nsk->rs", vectors, part * size.unsqueeze(1), vectors)
        ends.append(torch.stack([by_token, top(summed), frobenius]).amin())
    return SignedNorm(ends[0], ends[1], frobenius)


def plain_sum(alpha: Tensor, beta: Tensor, middle: Tensor) -> Tensor:
    r"""‖Σ_i α_iβ_iᵀ ⊗ M_i‖ by Cauchy-Schwarz on M_i = (U√S)(V√S)ᵀ, weights w_i free:

    ≤ [ λ_max(Σ w αα ᵀ⊗USUᵀ) · λ_max(Σ w⁻¹ ββᵀ⊗VSVᵀ) ]^½, each side as in ``symmetric_sum``.

    alpha: (N, a), beta: (N, b), middle: (N, r, s)
    """
    u, s, vh = torch.linalg.svd(middle, full_matrices=False)
    a2, b2 = alpha.pow(2).sum(1), beta.pow(2).sum(1)
    left = (u * s.unsqueeze(1)) @ u.mT
    right = vh.mT @ (vh * s.unsqueeze(2))
    balance = ((b2 + 1e-300) / (a2 + 1e-300)).sqrt()
    w = torch.stack([torch.ones_like(balance), balance])  # two choices at once
    rows = torch.minimum(weighted_top(alpha, w * s[:, 0]), _summed_top(w * a2, left))
    columns = torch.minimum(weighted_top(beta, s[:, 0] / w), _summed_top(b2 / w, right))
    crossed = (_root(rows) * _root(columns)).amin()
    return torch.minimum(crossed, plain_frobenius(alpha, beta, middle))


def _summed_top(weight: Tensor, middle: Tensor) -> Tensor:
    """λ_max(Σ_i w_i M_i) for w (…, N), M (N, r, r)."""
    summed = weight @ middle.reshape(len(middle), -1)
    return top(summed.reshape(*weight.shape[:-1], *middle.shape[1:]))


def plain_frobenius(alpha: Tensor, beta: Tensor, middle: Tensor) -> Tensor:
    """‖Σ_i α_iβ_iᵀ ⊗ M_i‖_F from Gram matrices of the tokens (THEORY §10), exact."""
    flat = middle.reshape(len(middle), -1)
    return _root(((alpha @ alpha.T) * (beta @ beta.T) * (flat @ flat.T)).sum())


@dataclass(frozen=True)
class TwoTerms:
    r"""Σ_i α_i ⊗ (a_i ⊗ N_i + K_i ⊗ b_i): entry (α, r; c, k) = α(a_c N_rk + K_cr b_k).

    alpha (N, ·) the factor both terms share, first (N, c), inner (N, r, k), cross (N, c, r),
    last (N, k). ``exact`` bounds the second term when it is known better than by its factors.
    """

    alpha: Tensor
    first: Tensor
    inner: Tensor
    cross: Tensor
    last: Tensor
    exact: Tensor | None = None

    def frobenius(self) -> Tensor:
        gram = self.alpha @ self.alpha.T
        one = plain_frobenius(self.alpha, self.first, self.inner) ** 2
        two = plain_frobenius(self.alpha, self.last, self.cross) ** 2
        met = torch.einsum("jcr,ic->ijr", self.cross, self.first)
        seen = torch.einsum("irk,jk->ijr", self.inner, self.last)
        both = (gram * (met * seen).sum(-1)).sum()
        return _root((one + two + 2.0 * both).clamp_min(0.0))

    def norm(self) -> Tensor:
        second = plain_sum(self.alpha, self.last, self.cross.mT)
        if self.exact is not None:
            second = torch.minimum(second, self.exact)
        return torch.minimum(
            self.frobenius(), plain_sum(self.alpha, self.first, self.inner) + second
        )
