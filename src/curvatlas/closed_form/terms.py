"""The per-token tensors of every block, for the tokens of one chunk.

``Terms`` joins the moments of attention with the tail behind it and answers two questions:
the activation α and adjoint δ of a family, and the ``Pair`` of two families. Nothing is computed
before it is asked for, so a single block costs only what it needs.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from curvatlas.closed_form.assembly import Workspace
from curvatlas.closed_form.evaluation import Evaluation
from curvatlas.closed_form.families import Family, Pair, with_one
from curvatlas.closed_form.moments import AdjointMoments, HeadMoments, Moments
from curvatlas.closed_form.tail import Tail


class Front:
    r"""Terms of γ1, β1 of a pre-norm block; ``n`` (n, d) are the chunk's normalised query tokens.

    γ_c and β_c move every attention input at once, ẏ_j = ζ_jc e_c with ζ = n_jc or 1. Seen from
    query row i they turn q_i by W_Q[:, c] ζ_ic and the row's family by a_ic = (W_Kᵀ q_i)_c along
    the base coordinate c, and carry the values along: with M, T, ν the moments of the base tokens
    n̂ = [n, 1], b(c) = c for γ_c and the constant coordinate for β_c, ω = W_Vᵀ τ,

        X[c]        = Σ_h  ζ_c W_Q[:,c]ᵀ X_Q + a_c X_base[b(c)] + m_b(c) (W_O W_V)[:, c]
        ∂δ_q/∂c     = s²(ζ_c T_KK W_Q[:,c] + a_c T_K[:,b(c)]) + s(ω_c M_K[:,b(c)] + W_K[:,c] ν_b(c))
        ∂(sν_b)/∂c  = s² ζ_c (T_K)ᵀ W_Q[:,c] + s² a_c T[b,b(c)] + s ω_c M[b,b(c)]

    and so on: 2d directions with the moments that are there already, no further pass over tokens.
    """

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

    def curvature(self) -> Tensor:
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


ATTENTION = ("front", "query", "key", "value", "output")
HIDDEN = ("gate", "up")


class Terms:
    """Tensors of the tokens (samples, rows) for seeds Λ (n, d, d) and δ (n, d); None is zero."""

    def __init__(
        self,
        evaluation: Evaluation,
        samples: slice,
        rows: slice,
        lam: Tensor | None,
        delta: Tensor | None,
        shared: dict[str, Tensor] | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.evaluation = evaluation
        self.shared = {} if shared is None else shared
        self.samples, self.rows = samples, rows
        self.place = (samples.start, rows.start)  # chunks of one batch differ in it
        self.weights = evaluation.weights
        self.functional = delta is not None
        self.tail = Tail(evaluation, self.take, lam, delta, workspace or Workspace())
        self._heads: dict[int, HeadMoments] = {}
        self._adjoints: dict[int, AdjointMoments] = {}
        self._curved: dict[tuple[str, int], Tensor] = {}

    def take(self, t: Tensor) -> Tensor:
        """The chunk's tokens of a (B, L, ·) activation as (n, ·)."""
        return t[self.samples, self.rows].flatten(0, 1)

    # ---- attention --------------------------------------------------------------------------

    @cached_property
    def moments(self) -> Moments:
        return Moments(self.evaluation, self.samples, self.rows, self.shared)

    def head(self, h: int) -> HeadMoments:
        if h not in self._heads:
            self._heads[h] = self.moments.head(h)
        return self._heads[h]

    def adjoint(self, h: int) -> AdjointMoments:
        if h not in self._adjoints:
            self._adjoints[h] = self.head(h).adjoint(self.tail.delta_U)
        return self._adjoints[h]

    @cached_property
    def front(self) -> Front:
        assert self.evaluation.front is not None
        heads = range(self.evaluation.spec.n_heads)
        adjoints = [self.adjoint(h) for h in heads] if self.functional else None
        return Front(self.take(self.evaluation.front.n), [self.head(h) for h in heads], adjoints)

    # ---- activations and directions ---------------------------------------------------------

    def activation(self, f: Family) -> Tensor:
        """α (n, a), the constant of a bias last."""
        kind = f.kind
        bias = f"{kind}_bias" in self.weights
        if kind == "query":
            return with_one(self.take(self.evaluation.attention_input), bias)
        if kind == "key":
            return self.head(f.head).q
        if kind == "value":
            mean = self.head(f.head).mean_input
            return mean if bias or not self.moments.augmented else mean[:, :-1]
        if kind == "output":
            return with_one(self.take(self.evaluation.mixed), bias)
        if kind in HIDDEN:
            return with_one(self.tail.v, bias)
        if kind == "down":
            return with_one(self.tail.g, bias)
        return self.tail.delta_Z.new_ones(len(self.tail.delta_Z), 1)

    def delta(self, f: Family) -> Tensor:
        """δ (n, core): the adjoint where the family acts."""
        kind = f.kind
        if kind == "query":
            return self.adjoint(f.head).delta_q
        if kind == "key":
            return self._key_core(f, self.adjoint(f.head).nu * self.head(f.head).s)
        if kind == "value":
            return self.adjoint(f.head).tau
        if kind == "output":
            return self.tail.delta_U
        if kind in HIDDEN:
            return self.tail.delta_h[:, self._hidden(f)]
        assert kind == "down"
        return self.tail.delta_S

    def direction(self, f: Family) -> Tensor:
        """X (n or 1, core, d): how U moves along the family's core, for the attention families."""
        if f.kind == "front":
            return self.front.X
        if f.kind == "query":
            return self.head(f.head).X_Q
        if f.kind == "key":
            return self._key_core(f, self.head(f.head).X_K)
        if f.kind == "value":
            return self.head(f.head).X_V
        d = self.evaluation.spec.d_model
        return torch.eye(d, dtype=self.tail.delta_Z.dtype, device=self.tail.delta_Z.device)[None]

    def pulled(self, f: Family, seeds: Tensor) -> Tensor:
        """Adjoints of R seeds φ (n, R, d) at the output where the family acts: (n, R, core)."""
        tail = self.tail
        at_S = seeds if tail.final is None else tail.final.pull(seeds)
        if f.kind == "final":
            assert tail.final is not None
            return tail.final.affine(seeds.mT, None).mT
        if f.kind == "down":
            return at_S
        if f.kind in HIDDEN:
            return at_S @ tail.jac_hS[:, self._hidden(f)].mT
        at_v = at_S @ tail.jac_Sv if tail.feed_forward else at_S
        if f.kind == "middle":
            assert tail.middle is not None
            return tail.middle.affine(at_v.mT, None).mT
        at_U = tail.to_U(at_v, at_S) if tail.feed_forward else at_S
        return at_U @ self.direction(f).mT

    def _curved_direction(self, f: Family) -> Tensor:
        """X Λ_UU (n, core, d), kept for all partners of the family."""
        if f.key not in self._curved:
            self._curved[f.key] = self._along(f, self.tail.lam_UU)
        return self._curved[f.key]

    def _key_core(self, f: Family, t: Tensor) -> Tensor:
        """Drop the constant coordinate (axis 1) where the key has no bias."""
        return t[:, : f.segments[-1].core[1]]

    def _hidden(self, f: Family) -> slice:
        size = self.evaluation.spec.d_ff
        assert size is not None
        first = size if f.kind == "up" and self.evaluation.spec.gated else 0
        return slice(first, first + size)

    # ---- pairs ------------------------------------------------------------------------------

    def pair(self, f: Family, g: Family) -> Pair:
        """The tensors of block (f, g), f not after g in the order of the computation."""
        if f.kind in ATTENTION:
            if g.kind in ATTENTION:
                return self._attention_pair(f, g)
            return self._mixed_pair(f, g)
        return self._tail_pair(f, g)

    def _towards_U(self, g: Family) -> Tensor:
        """Λ_gU (n, core of g, d)."""
        tail = self.tail
        if g.kind == "middle":
            return tail.lam_middle_U
        if g.kind in HIDDEN:
            return tail.lam_hU[:, self._hidden(g)]
        return tail.lam_SU if g.kind == "down" else tail.lam_final_U

    def _mixed_pair(self, f: Family, g: Family) -> Pair:
        core = self._along(f, self._towards_U(g))
        if not self.functional or g.kind in ("middle", "final"):
            return Pair(core=core)
        slope = self.tail.slope_vU if g.kind in HIDDEN else self.tail.slope_gU
        return Pair(core=core, slope=self._along(f, slope), delta=self.delta(g))

    def _along(self, f: Family, t: Tensor) -> Tensor:
        """X tᵀ (n, core, c) for t (n, c, d): t seen along the directions of an attention family."""
        if f.kind == "output" or (f.kind == "value" and self.head(f.head).W_O is None):
            return t.mT  # X = I
        X = self.direction(f)
        # One matrix for all tokens: a single large product instead of n small ones.
        return (t @ X[0].mT).mT if X.shape[0] == 1 else X @ t.mT

    def _attention_pair(self, f: Family, g: Family) -> Pair:
        core = self._along(g, self._curved_direction(f)).mT
        if not self.functional:
            return Pair(core=core)
        if f.kind == "front":
            return self._front_pair(core, g)
        if f.kind == "output":
            return Pair(core=core)
        head, same = self.head(f.head), f.head == g.head
        if g.kind == "output":
            return self._output_pair(f, g, core)
        if not same or f.kind == g.kind == "value":
            return Pair(core=core)
        adjoint, s = self.adjoint(f.head), head.s
        if g.kind == "value":
            columns = self.activation(g).shape[-1]
            inner = head.to_input(head.M_K) if f.kind == "query" else head.M_input
            slope = self._key_core(f, s * inner) if f.kind == "key" else s * inner
            return Pair(core=core, slope=slope[..., :columns], delta=adjoint.tau)
        if f.kind == "query" and g.kind == "query":
            return Pair(core=_plus(core, s * s, adjoint.T_KK))
        if f.kind == "key":
            T = adjoint.T_input
            return Pair(core=_plus(core, s * s, None if T is None else self._square(f, T)))
        T = None if adjoint.T_K is None else head.to_input(adjoint.T_K)
        T = None if T is None else T[..., : g.segments[-1].core[1]]
        ones = torch.ones_like(head.q)
        return Pair(
            core=_plus(core, s * s, T),
            slope_diagonal=ones,
            diagonal_columns=(0, ones.shape[-1]),
            delta=self.delta(g),
        )

    def _square(self, f: Family, t: Tensor) -> Tensor:
        size = f.segments[-1].core[1]
        return t[:, :size, :size]

    def _output_pair(self, f: Family, g: Family, core: Tensor) -> Pair:
        head, size = self.head(f.head), self.evaluation.spec.value_size
        delta = self.delta(g)
        if f.kind == "value":
            ones = head.q.new_ones(head.n_tokens, size)
            return Pair(
                core=core.expand(head.n_tokens, -1, -1),
                slope_diagonal=ones,
                diagonal_columns=(f.head * size, size),
                delta=delta,
            )
        if f.kind == "query":
            slope = head.M_K @ (head.s * head.V_hat.mT)
        else:
            slope = self._key_core(f, head.to_input(head.V_hat @ head.M).mT * head.s)
        return Pair(core=core, slope=slope, slope_start=f.head * size, delta=delta)

    def _front_pair(self, core: Tensor, g: Family) -> Pair:
        front, d = self.front, self.evaluation.spec.d_model
        if g.kind == "front":
            return Pair(core=core + front.curvature())
        if g.kind == "query":
            return Pair(
                core=core + front.query_rate(g.head),
                slope_diagonal=front.zeta,
                diagonal_columns=(0, d),
                delta=self.delta(g),
            )
        delta = self.delta(g)
        if g.kind == "key":
            rate = front.key_rate(g.head)[..., : g.segments[-1].core[1]]
            return Pair(core=core + rate, slope=front.query_slope(g.head), delta=delta)
        if g.kind == "value":
            columns = self.activation(g).shape[-1]
            slope = front.mean_slope(g.head)[..., :columns]
            return Pair(core=core, slope=slope, delta=delta)
        return Pair(core=core, slope=front.mixed_slope(), delta=delta)

    def _tail_pair(self, f: Family, g: Family) -> Pair:
        tail = self.tail
        if f.kind == "middle":
            return self._middle_pair(g)
        if f.kind == "final":
            return Pair(core=tail.lam_final_final)
        if f.kind == "down":
            return Pair(core=tail.lam_S if g.kind == "down" else tail.lam_final_S.mT)
        rows = self._hidden(f)
        if g.kind in HIDDEN:
            return Pair(core=tail.lam_hh[:, rows, self._hidden(g)])
        if g.kind == "final":
            return Pair(core=tail.jac_hS[:, rows] @ tail.lam_final_S.mT)
        core = tail.lam_hS[:, rows]
        if not self.functional:
            return Pair(core=core)
        slope = tail.slope_up if f.kind == "up" else tail.slope_gate
        return Pair(
            core=core,
            slope_diagonal=slope,
            diagonal_columns=(0, slope.shape[-1]),
            delta=tail.delta_S,
        )

    def _middle_pair(self, g: Family) -> Pair:
        tail, middle = self.tail, self.tail.middle
        assert middle is not None
        if g.kind == "middle":
            return Pair(core=middle.affine(middle.affine(tail.lam_vv, None).mT, None))
        if g.kind == "final":
            return Pair(core=middle.affine(tail.lam_final_v.mT, None))
        if g.kind == "down":
            core = middle.affine(tail.lam_Sv.mT, None)
            if not self.functional:
                return Pair(core=core)
            return Pair(core=core, slope=middle.affine(tail.slope_gv.mT, None), delta=tail.delta_S)
        core = middle.affine(tail.lam_hv[:, self._hidden(g)].mT, None)
        if not self.functional:
            return Pair(core=core)
        ones = torch.ones_like(middle.n)
        parts = [middle.n] * middle.has_gamma + [ones] * middle.has_beta
        return Pair(
            core=core,
            slope_diagonal=torch.cat(parts, -1),
            diagonal_columns=(0, ones.shape[-1]),
            delta=self.delta(g),
        )


def _plus(core: Tensor, scale: float, T: Tensor | None) -> Tensor:
    return core if T is None else torch.add(core, T, alpha=scale)
