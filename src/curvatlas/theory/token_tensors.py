r"""Per-token ingredients of the token-structured bound (derivations §7 and §8).

After attention everything acts token by token, so a block's Hessian is known from small tensors at
each of the N = n·L tokens. Everything here is a plain differentiable function of inputs and
weights: the adversary of the bound climbs through it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.engines.tangent.attention_core import attention_mask
from curvatlas.engines.tangent.feed_forward import hidden_units
from curvatlas.engines.tangent.norm import norm_jacobian, norm_second, normalize
from curvatlas.engines.tangent.structure import BlockSpec, Weights
from curvatlas.theory.reference import linear

# -------------------------------------------------------------------------------------------------
# Upper bounds on the norm of sums of Kronecker products over tokens.
#
# Every block of a Transformer block's Hessian is a sum over tokens (derivations §9)
#
#     Σ_i α_i β_iᵀ ⊗ M_i          or, with an adjoint term,   Σ_i α_i ⊗ (a_i ⊗ N_i + K_i ⊗ b_i).
#
# Nothing of the size of the block is formed. Each function returns the smallest of several proven
# bounds; all are differentiable, so that an adversary can climb the ratio true/bound.
# -------------------------------------------------------------------------------------------------


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
    """‖Σ_i α_iβ_iᵀ ⊗ M_i‖_F from Gram matrices of the tokens (derivations §12), exact."""
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


def with_one(x: Tensor, bias: bool) -> Tensor:
    """x̂ = [x; 1] when the layer that reads x has a bias."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1) if bias else x


@dataclass(frozen=True)
class TokenHead:
    """One head at every token; s = 1/√d_k, covariances under the rows of A."""

    query: Tensor  # q (N, d_k)
    mean: Tensor  # m̂ = A x̂ (N, d̂)
    output_weight: Tensor  # W_O^h (d, d_v)
    value_key: Tensor  # Ĝ = Cov(v, k) (N, d_v, d_k)
    value_input: Tensor  # P̂ = Cov(v, x) (N, d_v, d)
    key_input: Tensor  # Cov(k, x) (N, d_k, d)
    input_input: Tensor  # Cov(x, x) (N, d, d)
    adjoint: Tensor  # τ = W_Oᵀ R (N, d_v)
    third_kk: Tensor  # T_KK (N, d_k, d_k)
    third_kx: Tensor  # T_KX (N, d_k, d)
    third_xx: Tensor  # T_XX (N, d, d)
    pull: Tensor  # ν = w x (N, d)


def attention_inside(
    spec: BlockSpec, weights: Weights, x: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A (n, H, L, L), q, k (n, H, L, d_k) and v (n, H, L, d_v) of attention inputs x (n, L, d)."""
    n, length, _ = x.shape
    heads, groups = spec.n_heads, spec.kv_heads

    def split(which: str, count: int, size: int) -> Tensor:
        return linear(x, weights, which).reshape(n, length, count, size).transpose(1, 2)

    q = split("query", heads, spec.key_size)
    k = split("key", groups, spec.key_size).repeat_interleave(heads // groups, 1)
    v = split("value", groups, spec.value_size).repeat_interleave(heads // groups, 1)
    bias, _ = attention_mask(spec, mask, samples=n, length=length, dtype=x.dtype, device=x.device)
    logits = spec.logit_scale * q @ k.mT
    if bias is not None:
        logits = logits + bias
    return torch.softmax(logits, -1), q, k, v


def heads_at_tokens(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    adjoint: Tensor,
    mask: Tensor | None = None,
) -> tuple[list[TokenHead], Tensor]:
    """Every head's tensors, and the concatenated head outputs O (N, H d_v).

    x (n, L, d) the attention's input, adjoint R (n, L, d) = ∂ℓ/∂F.
    """
    n, length, d = x.shape
    a_all, q_all, k_all, v_all = attention_inside(spec, weights, x, mask)
    d_v, ratio = spec.value_size, spec.n_heads // spec.kv_heads
    w_v = weights["value_weight"].reshape(spec.kv_heads, d_v, d)
    augmented = with_one(x, "value_bias" in weights)
    centred = x - x.mean(1, keepdim=True)  # covariances ignore shifts; centring saves digits
    heads = []
    for h in range(spec.n_heads):
        a, q, k, v = a_all[:, h], q_all[:, h], k_all[:, h], v_all[:, h]
        w_o = (
            weights["output_weight"][:, h * d_v : (h + 1) * d_v]
            if "output_weight" in weights
            else torch.eye(d, dtype=x.dtype, device=x.device)
        )
        k = k - k.mean(1, keepdim=True)
        tau = adjoint @ w_o
        score = tau @ v.mT - (tau * (a @ v)).sum(-1, keepdim=True)
        w = a * score
        kx, xx = _covariance(a, k, centred), _covariance(a, centred, centred)
        value = w_v[h // ratio]
        heads.append(
            TokenHead(
                query=q.reshape(-1, spec.key_size),
                mean=(a @ augmented).reshape(n * length, -1),
                output_weight=w_o,
                value_key=value @ kx.mT,
                value_input=value @ xx,
                key_input=kx,
                input_input=xx,
                adjoint=tau.reshape(-1, d_v),
                third_kk=_weighted(a, w, k, k),
                third_kx=_weighted(a, w, k, centred),
                third_xx=_weighted(a, w, centred, centred),
                pull=(w @ centred).reshape(-1, d),
            )
        )
    outputs = (a_all @ v_all).transpose(1, 2).reshape(n * length, -1)
    return heads, outputs


def _second(a: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Σ_j a_ij y_j z_jᵀ: (n, L, L), (n, L, p), (n, L, r) → (N, p, r)."""
    pairs = (y.unsqueeze(-1) * z.unsqueeze(-2)).flatten(-2)
    return (a @ pairs).reshape(-1, y.shape[-1], z.shape[-1])


def _covariance(a: Tensor, y: Tensor, z: Tensor) -> Tensor:
    first, last = (a @ y).flatten(0, 1), (a @ z).flatten(0, 1)
    return _second(a, y, z) - first.unsqueeze(-1) * last.unsqueeze(-2)


def _weighted(a: Tensor, w: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Σ_j w_ij (y_j − ȳ_i)(z_j − z̄_i)ᵀ for weights with Σ_j w_ij = 0."""
    mean_y, mean_z = (a @ y).flatten(0, 1), (a @ z).flatten(0, 1)
    pull_y, pull_z = (w @ y).flatten(0, 1), (w @ z).flatten(0, 1)
    crossed = pull_y.unsqueeze(-1) * mean_z.unsqueeze(-2)
    return _second(w, y, z) - crossed - mean_y.unsqueeze(-1) * pull_z.unsqueeze(-2)


@dataclass(frozen=True)
class TokenTail:
    """What follows attention, per token: adjoints δ and curvatures Λ at U, h (hidden) and S."""

    adjoint_u: Tensor  # R (N, d)
    curvature_u: Tensor  # Λ_UU (N, d, d)
    hidden_input: Tensor | None = None  # v̂ (N, d̂)
    hidden: Tensor | None = None  # ĝ (N, d_ff or d_ff + 1)
    slope: Tensor | None = None  # ∂g/∂h (N, d_ff, C d_ff)
    adjoint_h: Tensor | None = None  # δ_h (N, C d_ff)
    adjoint_s: Tensor | None = None  # δ_S (N, d)
    curvature_s: Tensor | None = None  # Λ_S (N, d, d)
    curvature_h: Tensor | None = None  # Λ_hh (N, C d_ff, C d_ff)
    h_s: Tensor | None = None  # Λ_hS
    u_h: Tensor | None = None  # Λ_Uh
    u_s: Tensor | None = None  # Λ_US
    v_by_u: Tensor | None = None  # J_vU (N, d, d)
    hidden_by_u: Tensor | None = None  # ∂g/∂U (N, d_ff, d)


def _affine(n: Tensor, weights: Weights, which: str) -> tuple[Tensor, Tensor]:
    """γ ⊙ n + β and γ (ones when absent)."""
    gamma = weights.get(f"{which}_weight", torch.ones_like(n[0]))
    y = gamma * n
    return (y + weights[f"{which}_bias"] if f"{which}_bias" in weights else y), gamma


def _through_norm(
    u: Tensor, weights: Weights, which: str, spec: BlockSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y = γ n(u) + β with its Jacobian diag(γ)J, γ, n and 1/σ; u (N, d)."""
    n, inv_std = normalize(u, eps=spec.eps, norm=spec.norm)
    y, gamma = _affine(n, weights, which)
    jac = gamma.unsqueeze(-1) * norm_jacobian(n, inv_std, norm=spec.norm)
    return y, jac, gamma, n, inv_std


def tail_at_tokens(
    spec: BlockSpec, weights: Weights, u: Tensor, delta: Tensor, lam: Tensor
) -> TokenTail:
    """The recursion of derivations §7 from seeds δ_Z (N, d), Λ_Z (N, d, d) down to U (N, d)."""
    if not spec.residual or (spec.d_ff is None and spec.norm_first):
        return TokenTail(delta, lam)
    if spec.d_ff is None:
        _, jac, gamma, n, inv_std = _through_norm(u, weights, "norm1", spec)
        back = norm_second(n, inv_std, gamma * delta, norm=spec.norm)
        return TokenTail((delta.unsqueeze(1) @ jac).squeeze(1), jac.mT @ lam @ jac + back)
    before = "norm2" if spec.norm_first else "norm1"
    v, v_by_u, gamma_v, n_v, inv_v = _through_norm(u, weights, before, spec)
    v_hat = with_one(v, "up_bias" in weights or "gate_bias" in weights)
    h_up = linear(v, weights, "up")
    h_gate = linear(v, weights, "gate") if spec.gated else None
    units = hidden_units(spec.activation, h_up, h_gate)
    down, w1 = weights["down_weight"], weights["up_weight"]
    slope = torch.diag_embed(units.slope_up)
    if spec.gated:
        assert units.slope_gate is not None
        w1 = torch.cat([weights["gate_weight"], w1])
        slope = torch.cat([torch.diag_embed(units.slope_gate), slope], -1)
    g_hat = with_one(units.value, "down_bias" in weights)
    adjoint_s, curvature_s = delta, lam
    if not spec.norm_first:
        s = v + linear(units.value, weights, "down")
        _, jac, gamma, n, inv_std = _through_norm(s, weights, "norm2", spec)
        adjoint_s = (delta.unsqueeze(1) @ jac).squeeze(1)
        curvature_s = jac.mT @ lam @ jac + norm_second(n, inv_std, gamma * delta, norm=spec.norm)
    pulled = adjoint_s @ down  # t (N, d_ff)
    adjoint_h = (pulled.unsqueeze(1) @ slope).squeeze(1)
    if spec.gated:
        assert units.bend_gate is not None
        assert units.bend_cross is not None
        own, cross = (
            torch.diag_embed(units.bend_gate * pulled),
            torch.diag_embed(units.bend_cross * pulled),
        )
        rho = torch.cat(
            [torch.cat([own, cross], -1), torch.cat([cross, torch.zeros_like(own)], -1)], -2
        )
    else:
        assert units.bend_up is not None
        rho = torch.diag_embed(units.bend_up * pulled)
    s_by_h = down @ slope  # (N, d, C d_ff)
    to_v = 0.0 if spec.norm_first else 1.0
    identity = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    s_by_v = s_by_h @ w1 + to_v * identity
    s_by_u = s_by_v @ v_by_u + (1.0 - to_v) * identity
    adjoint_v = to_v * adjoint_s + adjoint_h @ w1
    h_by_u = w1 @ v_by_u
    curvature_u = (
        s_by_u.mT @ curvature_s @ s_by_u
        + h_by_u.mT @ rho @ h_by_u
        + norm_second(n_v, inv_v, gamma_v * adjoint_v, norm=spec.norm)
    )
    return TokenTail(
        adjoint_u=(adjoint_v.unsqueeze(1) @ v_by_u).squeeze(1) + (1.0 - to_v) * adjoint_s,
        curvature_u=curvature_u,
        hidden_input=v_hat,
        hidden=g_hat,
        slope=slope,
        adjoint_h=adjoint_h,
        adjoint_s=adjoint_s,
        curvature_s=curvature_s,
        curvature_h=s_by_h.mT @ curvature_s @ s_by_h + rho,
        h_s=s_by_h.mT @ curvature_s,
        u_h=s_by_u.mT @ curvature_s @ s_by_h + h_by_u.mT @ rho,
        u_s=s_by_u.mT @ curvature_s,
        v_by_u=v_by_u,
        hidden_by_u=slope @ h_by_u,
    )
