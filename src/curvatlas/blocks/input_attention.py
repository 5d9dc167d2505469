r"""Attention as a function of its input: dense Jacobian and second derivative (THEORY 11).

For one head with rotated projections W_Q^i = R_i W_Q and W_K^j = R_j W_K (R = I without rotary
positions), p_ij = W_K^jᵀ q_i, t_i = W_Vᵀ τ_i, the adjoint weights w and c_ij = w_ij(k_j − κ_i) −
A_ij ν_i, the blocks (j, l) of a sample's L d × L d matrices are sums over heads of

    J[i,j]  = W_O { δ_ij s Ĝ_i W_Q^i + s A_ij (v_j − o_i) p_ijᵀ + A_ij W_V }

    C       = Σ δ·∂²F:
      qq      δ_ij s² W_Q^iᵀ T_KK,i W_Q^i
      kq, vq  (j, i) and its transpose (i, j):
              s w_ij W_K^jᵀ W_Q^i + s² p_ij (W_Q^iᵀ c_ij)ᵀ + s A_ij t_i (W_Q^iᵀ (k_j − κ_i))ᵀ
      kk      (j, l): s² Σ_i p_ij p_ilᵀ (δ_jl w_ij − w_ij A_il − A_ij w_il)
      vk      (j, l) and its transpose (l, j): s Σ_i t_i p_ilᵀ A_ij (δ_jl − A_il)

Without softmax w_ij and A_ij are their values on the allowed positions, κ = o = 0 inside the
brackets, and only the terms linear in each of q, k, v remain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.blocks.products_attention import Attention


@dataclass
class _Head:
    """One head of all samples: n samples, L tokens."""

    A: Tensor  # (n, L, L)
    w: Tensor  # (n, L, L), zeros when no adjoint is recorded
    pattern: Tensor  # A with softmax, the allowed 0/1 pattern without
    q: Tensor  # (n, L, dk), rotated
    k: Tensor  # (n, L, dk), rotated
    v: Tensor  # (n, L, dv)
    tau: Tensor  # (n, L, dv)
    W_Q: Tensor  # (L, dk, d), rotated
    W_K: Tensor  # (L, dk, d), rotated
    W_V: Tensor  # (dv, d)
    W_O: Tensor | None  # (d, dv)
    s: float
    softmax: bool

    @property
    def kappa(self) -> Tensor:
        """Mean key of each row (n, L, 1, dk); zero without softmax."""
        mean = self.A @ self.k if self.softmax else torch.zeros_like(self.k)
        return mean.unsqueeze(2)

    @property
    def centred_keys(self) -> Tensor:
        """k_j − κ_i (n, i, j, dk)."""
        return self.k.unsqueeze(1) - self.kappa

    @property
    def p(self) -> Tensor:
        """W_K^jᵀ q_i (n, i, j, d)."""
        return torch.einsum("nip,jpd->nijd", self.q, self.W_K)

    def jacobian(self) -> Tensor:
        """∂o_i/∂x_j without W_O (n, i, dv, j, d)."""
        length = self.q.shape[1]
        mean = self.A @ self.v if self.softmax else torch.zeros_like(self.v)
        centred = self.v.unsqueeze(1) - mean.unsqueeze(2)  # v_j − o_i (n, i, j, dv)
        weighted = self.pattern.unsqueeze(-1) * centred
        result = torch.einsum("nijo,nijd->niojd", self.s * weighted, self.p)
        result += torch.einsum("nij,od->niojd", self.A, self.W_V)
        by_query = torch.einsum("nijo,nijp->niop", weighted, self.centred_keys)  # Ĝ
        own = self.s * torch.einsum("niop,ipd->niod", by_query, self.W_Q)
        rows = torch.arange(length, device=result.device)
        result[:, rows, :, rows] += own.transpose(0, 1)
        return result

    def second(self) -> Tensor:
        """Σ_i τ_i·∂²o_i as a matrix of the inputs (n, L, d, L, d)."""
        p, s = self.p, self.s
        t = self.tau @ self.W_V  # (n, i, d)
        n, length, d = t.shape
        rows = torch.arange(length, device=t.device)
        keys = self.centred_keys
        turned_keys = torch.einsum("nijp,ipd->nijd", keys, self.W_Q)
        half = torch.einsum("nij,jpa,ipb->njaib", s * self.w, self.W_K, self.W_Q)
        y = s * self.pattern.unsqueeze(-1) * turned_keys
        half += torch.einsum("nia,nijb->njaib", t, y)
        spread = (s * self.pattern).unsqueeze(-1) * t.unsqueeze(2)  # s A_ij t_i (n, i, j, d)
        diagonal = torch.einsum("nija,nijb->njab", spread, p)
        if self.softmax:
            means = torch.einsum("nij,njp->nip", self.w, self.k)  # ν
            c = self.w.unsqueeze(-1) * keys - self.A.unsqueeze(-1) * means.unsqueeze(2)
            turned = torch.einsum("nijp,ipd->nijd", c, self.W_Q)
            half += torch.einsum("nija,nijb->njaib", s * s * p, turned)
            shared = (self.A.unsqueeze(-1) * p).view(n, length, length * d)
            pairs = spread + (s * s) * self.w.unsqueeze(-1) * p
            pairs = pairs.view(n, length, length * d).mT @ shared
            half -= pairs.view(n, length, d, length, d)
            own = torch.einsum("nij,nijp,nijq->nipq", self.w, keys, keys)  # T_KK
            block = torch.einsum("ipa,nipq,iqb->niab", s * s * self.W_Q, own, self.W_Q)
            weighted = (s * s) * self.w.unsqueeze(-1) * p
            block += torch.einsum("nija,nijb->njab", weighted, p)
            diagonal = diagonal + 0.5 * block  # symmetric: half of it before the transpose
        half[:, rows, :, rows] += diagonal.transpose(0, 1)
        return half + half.permute(0, 3, 4, 1, 2)


def _heads(attention: Attention) -> list[_Head]:
    spec, core = attention.spec, attention.core
    n, length, groups = attention.samples, attention.length, spec.kv_heads
    d = spec.d_model
    repeats = spec.n_heads // groups

    def by_head(rows: Tensor) -> Tensor:
        return rows.reshape(n, groups, repeats, length, -1)

    A, q = by_head(core.A), by_head(core.q.mT)
    w, tau = torch.zeros_like(A), torch.zeros_like(by_head(core.value().mT))
    if core.delta is not None:
        w, tau = by_head(core.adjoint()), by_head(core.delta.mT)
    k = core.k.mT.reshape(n, groups, length, -1)
    v = core.v.mT.reshape(n, groups, length, -1)
    pattern = A
    if not spec.softmax:
        allowed = core.A.new_ones(()) if core.allowed is None else core.allowed
        pattern = by_head(allowed.expand(core.A.shape).contiguous())
    output = None if attention.output is None else attention.output.weight
    heads = []
    for h in range(spec.n_heads):
        g, r = divmod(h, repeats)
        heads.append(
            _Head(
                A=A[:, g, r],
                w=w[:, g, r],
                pattern=pattern[:, g, r],
                q=q[:, g, r],
                k=k[:, g],
                v=v[:, g],
                tau=tau[:, g, r],
                W_Q=_rotated(attention, "query", h),
                W_K=_rotated(attention, "key", g),
                W_V=attention.inputs["value"].weight.reshape(groups, -1, d)[g],
                W_O=None if output is None else output.reshape(d, spec.n_heads, -1)[:, h],
                s=spec.logit_scale,
                softmax=spec.softmax,
            )
        )
    return heads


def _rotated(attention: Attention, name: str, head: int) -> Tensor:
    """R_i W of one head (L, dk, d)."""
    heads = attention.spec.n_heads if name == "query" else attention.spec.kv_heads
    weight = attention.inputs[name].weight
    weight = weight.reshape(heads, -1, weight.shape[1])[head]  # (dk, d)
    everywhere = weight.expand(attention.length, *weight.shape)
    if attention.rotation is None:
        return everywhere
    # the rotation acts on the last axis at each position: (d, L, dk)
    return attention.rotation.apply(everywhere.permute(2, 0, 1)).permute(1, 2, 0)


def attention_jacobian(attention: Attention) -> Tensor:
    """∂F/∂x of every sample (n, L·d, L·d), rows the output."""
    total: Tensor | None = None
    for head in _heads(attention):
        part = head.jacobian()
        if head.W_O is not None:
            part = torch.einsum("co,niojd->nicjd", head.W_O, part)
        total = part if total is None else total.add_(part)
    assert total is not None
    n, length, d = total.shape[0], total.shape[1], total.shape[2]
    return total.reshape(n, length * d, length * d)


def attention_second(attention: Attention) -> Tensor:
    """Σ δ_F·∂²F/∂x² of every sample (n, L·d, L·d), at the recorded adjoint."""
    total: Tensor | None = None
    for head in _heads(attention):
        part = head.second()
        total = part if total is None else total.add_(part)
    assert total is not None
    n, length, d = total.shape[0], total.shape[1], total.shape[2]
    return total.reshape(n, length * d, length * d)
