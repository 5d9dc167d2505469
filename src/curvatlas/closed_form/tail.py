r"""Everything after attention, token by token, from the seeds at Z back to U (derivations §7).

    v = γ ⊙ n(U) + β,   h = v W1ᵀ,   g = act(h),   S = g W2ᵀ + (v post-norm | U pre-norm),
    Z = γ ⊙ n(S) + β (post-norm) or S.

Each property is one line of the recursion; all are computed on first use, for the n tokens of one
chunk. Second derivatives keep the earlier variable last, Λ_hv (n, F, d), so that the norm's
Jacobian acts on the last axis in O(d) per row instead of as a d × d product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from curvatlas.closed_form.assembly import Workspace
from curvatlas.closed_form.evaluation import Evaluation, NormState
from curvatlas.engines.tangent.norm import norm_jacobian, norm_jacobian_product, norm_second

Take = Callable[[Tensor], Tensor]  # (B, L, ·) → the chunk's (n, ·)


class NormTokens:
    """One normalisation at the n tokens of a chunk."""

    def __init__(self, state: NormState, kind: str, take: Take) -> None:
        self.kind: str = kind
        self.prefix = state.prefix
        self.n, self.inv_std = take(state.n), take(state.inv_std)  # (n, d), (n, 1)
        self.gamma = state.gamma
        self.has_gamma, self.has_beta = state.gamma is not None, state.beta is not None

    def scaled(self, t: Tensor) -> Tensor:
        """γ ⊙ t on the last axis."""
        return t if self.gamma is None else t * self.gamma

    def pull(self, t: Tensor) -> Tensor:
        """J (γ ⊙ t) on the last axis of (n, d) or (n, c, d)."""
        n, inv_std = self.n, self.inv_std
        if t.ndim == 3:
            n, inv_std = n.unsqueeze(1), inv_std.unsqueeze(1)
        return norm_jacobian_product(n, inv_std, self.scaled(t), norm=self.kind)  # type: ignore[arg-type]

    @cached_property
    def jacobian(self) -> Tensor:
        """J without γ (n, d, d)."""
        return norm_jacobian(self.n, self.inv_std, norm=self.kind)  # type: ignore[arg-type]

    def second(self, delta: Tensor) -> Tensor:
        """Ψ(γ ⊙ δ) (n, d, d)."""
        return norm_second(self.n, self.inv_std, self.scaled(delta), norm=self.kind)  # type: ignore[arg-type]

    def affine(self, beta_rows: Tensor, delta: Tensor | None) -> Tensor:
        """Rows (γ, β) of a second derivative from its β rows (n, d, c), γ first.

        ∂/∂γ = n ⊙ ∂/∂β, plus diag(δ) J towards the norm's own input (``delta`` given, c = d).
        """
        parts = []
        if self.has_gamma:
            gamma_rows = self.n.unsqueeze(-1) * beta_rows
            if delta is not None:
                gamma_rows = torch.addcmul(gamma_rows, delta.unsqueeze(-1), self.jacobian)
            parts.append(gamma_rows)
        if self.has_beta:
            parts.append(beta_rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class Tail:
    """The recursion for one chunk; ``lam`` (n, d, d) or None (zero), ``delta`` (n, d) or None.

    Its one large tensor, Λ_hh, goes to the workspace: fresh pages cost twice the product.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        take: Take,
        lam: Tensor | None,
        delta: Tensor | None,
        workspace: Workspace,
    ) -> None:
        self._workspace = workspace
        spec, weights = evaluation.spec, evaluation.weights
        tokens = take(evaluation.output)
        self.delta_Z = torch.zeros_like(tokens) if delta is None else delta
        self.lam_Z = tokens.new_zeros(*tokens.shape, tokens.shape[-1]) if lam is None else lam
        self.final = self._norm(evaluation.final, spec.norm, take)
        self.middle = self._norm(evaluation.middle, spec.norm, take)
        self.feed_forward = spec.d_ff is not None
        self.pre = spec.norm_first
        if not self.feed_forward:
            return
        assert evaluation.ffn_input is not None
        assert evaluation.hidden is not None
        units = evaluation.hidden
        self.gated = spec.gated
        self.v = take(evaluation.ffn_input)
        self.g = take(units.value)
        self.W1_up, self.W2 = weights["up_weight"], weights["down_weight"]
        self.slope_up = take(units.slope_up)
        self.W1 = self.W1_up
        if self.gated:
            assert units.slope_gate is not None
            assert units.bend_gate is not None
            assert units.bend_cross is not None
            self.W1_gate = weights["gate_weight"]
            self.slope_gate = take(units.slope_gate)
            self.bend_gate, self.bend_cross = take(units.bend_gate), take(units.bend_cross)
            self.W1 = torch.cat([self.W1_gate, self.W1_up])
        else:
            assert units.bend_up is not None
            self.bend_up = take(units.bend_up)

    @staticmethod
    def _norm(state: NormState | None, kind: str, take: Take) -> NormTokens | None:
        return None if state is None else NormTokens(state, kind, take)

    # ---- at S -------------------------------------------------------------------------------

    @cached_property
    def delta_S(self) -> Tensor:
        """δ_S = J_ZSᵀ δ_Z (n, d)."""
        return self.delta_Z if self.final is None else self.final.pull(self.delta_Z)

    @cached_property
    def lam_ZS(self) -> Tensor:
        """Λ_Z J_ZS (n, d, d), rows at Z."""
        return self.lam_Z if self.final is None else self.final.pull(self.lam_Z)

    @cached_property
    def lam_S(self) -> Tensor:
        """Λ_S = J_ZSᵀ Λ_Z J_ZS + Ψ(γ ⊙ δ_Z) (n, d, d)."""
        if self.final is None:
            return self.lam_Z
        return self.final.pull(self.lam_ZS.mT) + self.final.second(self.delta_Z)

    @cached_property
    def lam_final_S(self) -> Tensor:
        """Rows (γ, β) of the final norm against S (n, ·, d)."""
        assert self.final is not None
        return self.final.affine(self.lam_ZS, self.delta_Z)

    @cached_property
    def lam_final_final(self) -> Tensor:
        """The final norm's own (γ, β) block: Λ_Z with n on either side (n, ·, ·)."""
        assert self.final is not None
        half = self.final.affine(self.lam_Z, None)
        return self.final.affine(half.mT, None)

    # ---- at the hidden layer ----------------------------------------------------------------

    @cached_property
    def jac_hS(self) -> Tensor:
        """(∂S/∂h)ᵀ = D1 W2ᵀ (n, F1, d), the gate's rows first."""
        columns = self.W2.mT
        up = self.slope_up.unsqueeze(-1) * columns
        if not self.gated:
            return up
        return torch.cat([self.slope_gate.unsqueeze(-1) * columns, up], 1)

    @cached_property
    def delta_h(self) -> Tensor:
        """δ_h = D1 ⊙ (W2ᵀ δ_S) (n, F1)."""
        t = self.delta_S @ self.W2
        if not self.gated:
            return self.slope_up * t
        return torch.cat([self.slope_gate * t, self.slope_up * t], -1)

    @cached_property
    def bends(self) -> tuple[Tensor, Tensor | None]:
        """ρ = D2 ⊙ (W2ᵀ δ_S): its diagonal (n, F), and the gate-up part when gated."""
        t = self.delta_S @ self.W2
        if not self.gated:
            return self.bend_up * t, None
        return self.bend_gate * t, self.bend_cross * t

    @cached_property
    def lam_hS(self) -> Tensor:
        """Λ_hS = (∂S/∂h)ᵀ Λ_S (n, F1, d)."""
        return self.jac_hS @ self.lam_S

    @cached_property
    def lam_hh(self) -> Tensor:
        """Λ_hh = (∂S/∂h)ᵀ Λ_S (∂S/∂h) + ρ (n, F1, F1)."""
        n, f1, _ = self.lam_hS.shape
        room: Tensor | None = None
        if not self.lam_hS.requires_grad:
            room = self._workspace.take("lam_hh", n * f1 * f1, self.lam_hS).view(n, f1, f1)
        result = torch.bmm(self.lam_hS, self.jac_hS.mT, out=room)
        bend, cross = self.bends
        if cross is None:
            result.diagonal(dim1=1, dim2=2).add_(bend)
            return result
        f = bend.shape[-1]
        result[:, :f, :f].diagonal(dim1=1, dim2=2).add_(bend)
        result[:, :f, f:].diagonal(dim1=1, dim2=2).add_(cross)
        result[:, f:, :f].diagonal(dim1=1, dim2=2).add_(cross)
        return result

    # ---- at v, the feed-forward input -------------------------------------------------------

    @cached_property
    def rho_W1(self) -> Tensor:
        """ρ W1 (n, F1, d)."""
        bend, cross = self.bends
        if cross is None:
            return bend.unsqueeze(-1) * self.W1
        gate = bend.unsqueeze(-1) * self.W1_gate + cross.unsqueeze(-1) * self.W1_up
        return torch.cat([gate, cross.unsqueeze(-1) * self.W1_gate], 1)

    @cached_property
    def jac_Sv(self) -> Tensor:
        """∂S/∂v through the hidden layer, plus I when the residual path carries v (n, d, d)."""
        # (n, d, F) contiguous times one (F, d) matrix is a single large product
        slope = (self.W2 * self.slope_up.unsqueeze(1)) @ self.W1_up
        through = slope
        if self.gated:
            through = slope + (self.W2 * self.slope_gate.unsqueeze(1)) @ self.W1_gate
        if not self.pre:
            through.diagonal(dim1=1, dim2=2).add_(1.0)
        return through

    @cached_property
    def delta_v(self) -> Tensor:
        """δ_v = W1ᵀ δ_h (+ δ_S post-norm) (n, d)."""
        through = self.delta_h @ self.W1
        return through if self.pre else through + self.delta_S

    @cached_property
    def lam_Sv(self) -> Tensor:
        """Λ_Sv = Λ_S ∂S/∂v (n, d, d)."""
        return self.lam_S @ self.jac_Sv

    @cached_property
    def lam_hv(self) -> Tensor:
        """Λ_hv = (∂S/∂h)ᵀ Λ_S ∂S/∂v + ρ W1 (n, F1, d)."""
        return torch.baddbmm(self.rho_W1, self.jac_hS, self.lam_Sv)

    @cached_property
    def lam_vv(self) -> Tensor:
        """Λ_vv = (∂S/∂v)ᵀ Λ_S ∂S/∂v + W1ᵀ ρ W1 (n, d, d)."""
        return torch.baddbmm(self._bent_W1(), self.jac_Sv.mT, self.lam_Sv)

    def _bent_W1(self) -> Tensor:
        """W1ᵀ ρ W1 (n, d, d), as large products like ``jac_Sv``."""
        bend, cross = self.bends
        if cross is None:
            return (self.W1.mT * bend.unsqueeze(1)) @ self.W1
        gate = self.W1_gate.mT.contiguous()
        mixed = (gate * cross.unsqueeze(1)) @ self.W1_up
        return (gate * bend.unsqueeze(1)) @ self.W1_gate + mixed + mixed.mT

    def hidden_diagonal(self, gate: bool) -> Tensor:
        """The diagonal of Λ_hh alone, w_kᵀ Λ_S w_k D1² + ρ_kk, for the gate's or the up units."""
        quadratic = ((self.lam_S @ self.W2) * self.W2).sum(1)  # (n, F)
        slope = self.slope_gate if gate else self.slope_up
        bend, cross = self.bends
        diagonal = quadratic * slope.square()
        return diagonal if cross is not None and not gate else diagonal + bend

    @cached_property
    def lam_final_v(self) -> Tensor:
        """The final norm's (γ, β) against v (n, ·, d)."""
        return self.lam_final_S @ self.jac_Sv

    @cached_property
    def slope_gv(self) -> Tensor:
        """∂g/∂v = D1 W1 (n, F, d)."""
        up = self.slope_up.unsqueeze(-1) * self.W1_up
        return up if not self.gated else up + self.slope_gate.unsqueeze(-1) * self.W1_gate

    # ---- at U -------------------------------------------------------------------------------

    def to_U(self, at_v: Tensor, at_S: Tensor | None) -> Tensor:
        """Rows towards U from rows towards v and, pre-norm, towards S: J_vUᵀ · + r_U ·."""
        pulled = at_v if self.middle is None else self.middle.pull(at_v)
        return pulled + at_S if self.pre and at_S is not None else pulled

    @cached_property
    def delta_U(self) -> Tensor:
        """R = ∂ℓ/∂U (n, d)."""
        return self.to_U(self.delta_v, self.delta_S) if self.feed_forward else self.delta_S

    @cached_property
    def lam_vU(self) -> Tensor:
        """Λ_vU (n, d, d)."""
        return self.to_U(self.lam_vv, self.lam_Sv.mT)

    @cached_property
    def lam_SU(self) -> Tensor:
        """Λ_SU (n, d, d)."""
        return self.to_U(self.lam_Sv, self.lam_S) if self.feed_forward else self.lam_S

    @cached_property
    def lam_UU(self) -> Tensor:
        """Λ_UU = ∂²ℓ/∂U² (n, d, d)."""
        if not self.feed_forward:
            return self.lam_S
        result = self.to_U(self.lam_vU.mT, self.lam_SU.mT)
        return result if self.middle is None else result + self.middle.second(self.delta_v)

    @cached_property
    def lam_hU(self) -> Tensor:
        """Λ_hU (n, F1, d)."""
        return self.to_U(self.lam_hv, self.lam_hS)

    @cached_property
    def lam_middle_U(self) -> Tensor:
        """The middle norm's (γ, β) against U (n, ·, d)."""
        assert self.middle is not None
        return self.middle.affine(self.lam_vU, self.delta_v)

    @cached_property
    def lam_final_U(self) -> Tensor:
        """The final norm's (γ, β) against U (n, ·, d)."""
        if not self.feed_forward:
            return self.lam_final_S
        return self.to_U(self.lam_final_v, self.lam_final_S)

    @cached_property
    def slope_vU(self) -> Tensor:
        """∂v/∂U (n, d, d)."""
        if self.middle is None:
            d = self.v.shape[-1]
            return torch.eye(d, dtype=self.v.dtype, device=self.v.device).expand(len(self.v), d, d)
        gamma = self.middle.gamma
        jacobian = self.middle.jacobian
        return jacobian if gamma is None else gamma.unsqueeze(-1) * jacobian

    @cached_property
    def slope_gU(self) -> Tensor:
        """∂g/∂U = ∂g/∂v ∂v/∂U (n, F, d)."""
        return self.slope_gv if self.middle is None else self.middle.pull(self.slope_gv)
