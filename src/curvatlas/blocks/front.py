r"""Curvature of the norm in front of attention: γ1 and β1 of a pre-norm block, in closed form.

γ_c and β_c move every attention input at once, ẏ_j = ζ_jc e_c with ζ = n_jc or 1. Seen from query
row i they turn q_i by W_Q[:, c] ζ_ic and the row's family by a_ic = (W_Kᵀ q_i)_c along the base
coordinate c, and carry the values along: with M, T, ν the moments of the base tokens n̂ = [n, 1],
b(c) = c for γ_c and the constant coordinate for β_c, ω = W_Vᵀ τ,

    X[c]        = Σ_h  ζ_c W_Q[:,c]ᵀ X_Q + a_c X_base[b(c)] + m_b(c) (W_O W_V)[:, c]
    ∂δ_q/∂c     = s² ζ_c T_KK W_Q[:,c] + s² a_c T_K[:,b(c)] + s ω_c M_K[:,b(c)] + s W_K[:,c] ν_b(c)
    ∂(sν_b)/∂c  = s² ζ_c (T_K)ᵀ W_Q[:,c] + s² a_c T[b,b(c)] + s ω_c M[b,b(c)]

and so on: 2d directions with the moments that are there already, no further pass over the tokens.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from curvatlas.blocks.moments import AdjointMoments, HeadMoments


class Front:
    """Terms of (γ1, β1) for one chunk; ``n`` (n, d) are the chunk's normalised query tokens."""

    def __init__(
        self, n: Tensor, heads: list[HeadMoments], adjoints: list[AdjointMoments] | None
    ) -> None:
        self.n, self.heads, self.adjoints = n, heads, adjoints
        parent = heads[0].parent
        d = n.shape[-1]
        coordinates = torch.arange(d, device=n.device)
        columns, base, zeta = [], [], []
        if parent.gamma is not None:
            columns.append(coordinates)
            base.append(coordinates)
            zeta.append(n)
        if parent.beta is not None:
            columns.append(coordinates)
            base.append(torch.full_like(coordinates, d))  # the constant coordinate
            zeta.append(torch.ones_like(n))
        self.columns, self.base = torch.cat(columns), torch.cat(base)  # (C,)
        self.zeta = torch.cat(zeta, -1)  # (n, C)
        self.width = d

    def _a(self, head: HeadMoments) -> Tensor:
        """a (n, C)."""
        return (head.q @ head.W_K)[:, self.columns]

    def _omega(self, h: int) -> Tensor:
        """ω (n, C)."""
        assert self.adjoints is not None
        return (self.adjoints[h].tau @ self.heads[h].W_V)[:, self.columns]

    @cached_property
    def X(self) -> Tensor:
        """How U moves along (γ, β) (n, C, d)."""
        total = None
        for head in self.heads:
            turned = (head.W_Q.mT @ head.X_Q)[:, self.columns] * self.zeta.unsqueeze(-1)
            turned += head.X_base[:, self.base] * self._a(head).unsqueeze(-1)
            OV = head.W_V if head.W_O is None else head.W_O @ head.W_V  # (d, d)
            turned += OV.mT[self.columns] * head.mean_base[:, self.base].unsqueeze(-1)
            total = turned if total is None else total + turned
        assert total is not None
        return total

    def query_rate(self, h: int) -> Tensor:
        """∂δ_q/∂(γ, β) with τ fixed (n, C, dk)."""
        assert self.adjoints is not None
        head, adjoint = self.heads[h], self.adjoints[h]
        s = head.s
        rate = s * head.M_K[..., self.base] * self._omega(h).unsqueeze(1)
        rate = rate + s * head.W_K[:, self.columns] * adjoint.nu_base[:, None, self.base]
        if adjoint.T_K is not None and adjoint.T_KK is not None:
            turned = (adjoint.T_KK @ head.W_Q)[..., self.columns] * self.zeta.unsqueeze(1)
            along = adjoint.T_K[..., self.base] * self._a(head).unsqueeze(1)
            rate = rate + s * s * (turned + along)
        return rate.mT

    def _nu_rate(self, h: int) -> Tensor:
        """∂(s ν_base)/∂(γ, β) with τ and the tokens fixed (n, C, d̂)."""
        assert self.adjoints is not None
        head, adjoint = self.heads[h], self.adjoints[h]
        s = head.s
        rate = s * head.M[:, self.base] * self._omega(h).unsqueeze(-1)
        if adjoint.T_K is not None and adjoint.T is not None:
            turned = (head.W_Q.mT @ adjoint.T_K)[:, self.columns] * self.zeta.unsqueeze(-1)
            along = adjoint.T[:, self.base] * self._a(head).unsqueeze(-1)
            rate = rate + s * s * (turned + along)
        return rate

    def key_rate(self, h: int) -> Tensor:
        """∂(s ν)/∂(γ, β) in input coordinates (n, C, d̂): the inputs themselves move too."""
        assert self.adjoints is not None
        head, adjoint = self.heads[h], self.adjoints[h]
        rate = head.to_input(self._nu_rate(h)).clone()
        rows = torch.arange(len(self.columns), device=self.n.device)
        rate[:, rows, self.columns] += head.s * adjoint.nu_base[:, self.base]
        return rate

    def query_slope(self, h: int) -> Tensor:
        """q̇ = W_Q[:, c] ζ_c (n, C, dk)."""
        return self.heads[h].W_Q.mT[self.columns] * self.zeta.unsqueeze(-1)

    def _mean_base_slope(self, h: int) -> Tensor:
        """ṁ of the base tokens (n, C, d̂)."""
        head = self.heads[h]
        turned = (head.W_Q.mT @ head.M_K)[:, self.columns] * self.zeta.unsqueeze(-1)
        along = head.M[:, self.base] * self._a(head).unsqueeze(-1)
        return head.s * (turned + along)

    def mean_slope(self, h: int) -> Tensor:
        """ṁ of the inputs (n, C, d̂): the row's family moves, and so do the inputs."""
        head = self.heads[h]
        slope = head.to_input(self._mean_base_slope(h)).clone()
        rows = torch.arange(len(self.columns), device=self.n.device)
        slope[:, rows, self.columns] += head.mean_base[:, self.base]
        return slope

    def mixed_slope(self) -> Tensor:
        """Change of concat_h(A^h V^h) (n, C, H·dv)."""
        parts = []
        for h, head in enumerate(self.heads):
            moved = self._mean_base_slope(h) @ head.V_hat.mT
            carried = head.W_V.mT[self.columns] * head.mean_base[:, self.base].unsqueeze(-1)
            parts.append(moved + carried)
        return torch.cat(parts, -1)

    def own(self) -> Tensor:
        """Second derivative along (γ, β) twice with τ fixed (n, C, C)."""
        assert self.adjoints is not None
        total = None
        for h, head in enumerate(self.heads):
            adjoint = self.adjoints[h]
            # gradient_c = ζ_c W_Q[:,c]·δ_q + a_c s ν_b(c) + ω_c m_b(c), differentiated along c'
            by_query = self.query_rate(h) @ head.W_Q[:, self.columns] * self.zeta.unsqueeze(1)
            turning = self.query_slope(h) @ head.W_K[:, self.columns]
            turning = turning * (head.s * adjoint.nu_base[:, None, self.base])
            by_key = self._nu_rate(h)[..., self.base] * self._a(head).unsqueeze(1)
            by_value = self._mean_base_slope(h)[..., self.base] * self._omega(h).unsqueeze(1)
            part = by_query + turning + by_key + by_value
            total = part if total is None else total + part
        assert total is not None
        return total
