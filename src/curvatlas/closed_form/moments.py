r"""Moments of attention rows (derivations §8): the only tensors through which Q, K, V act.

Row i of a head depends on the weights through θ_i alone, as an exponential family over its keys:

    m_i = Σ_j A_ij x_j,    M_i = Cov_A(x, x) = Σ_j A_ij (x_j−m_i)(x_j−m_i)ᵀ,
    ν_i = Σ_j w_ij x_j,    T_i = Σ_j w_ij (x_j−m_i)(x_j−m_i)ᵀ

with adjoint weights w_ij = A_ij(e_ij − Σ_l A_il e_il), e_ij = τ_i·v_j. The tokens are centred by
their sequence mean first: exact, since covariances and w (Σ_j w_ij = 0) ignore a shift, and what
keeps float32 accurate when all tokens share a large mean (derivations §20). Without softmax A = T
is linear in θ: M_i = Σ_j x_j x_jᵀ over the allowed keys, T_i = 0, w_ij = τ_i·v_j there.

With ``augmented`` a constant coordinate 1 stands behind the d coordinates of every token: it makes
biases ordinary weights. Centred, it is exactly 0: the key bias has no curvature under softmax.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from curvatlas.closed_form.evaluation import Evaluation


class Moments:
    """Moments of every head at the query rows ``rows`` of the samples ``samples``.

    The base tokens are n1(x) where a front norm has γ or β (their own curvature needs them), else
    the attention's input; ``scale`` (d̂,) turns base coordinates into input coordinates.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        samples: slice,
        rows: slice,
        shared: dict[str, Tensor],
    ) -> None:
        self.spec, self.weights = evaluation.spec, evaluation.weights
        spec, weights = self.spec, self.weights
        self.augmented = any(name in weights for name in ("key_bias", "value_bias")) or (
            spec.norm_first and "norm1_bias" in weights
        )
        self.attention = evaluation.attention[samples, :, rows]  # (b, H, r, L)
        self.query = evaluation.query[samples, :, rows]  # (b, H, r, dk)
        allowed = evaluation.allowed
        self.allowed = None
        if allowed is not None:
            full = allowed.expand(evaluation.samples, -1, -1, -1)
            full = full.expand(-1, -1, evaluation.length, -1)
            self.allowed = full[samples, :, rows]
        front = evaluation.front
        self.has_front = front is not None
        self.gamma = None if front is None else front.gamma
        self.beta = None if front is None else front.beta
        base = evaluation.attention_input if front is None else front.n
        self.inputs = evaluation.attention_input[samples]  # (b, L, d)
        self.base = self._augment(base[samples], 1.0)  # (b, L, d̂)
        if spec.softmax:
            # Any fixed shift is exact; this one, the mean of what is attended to, removes what
            # cancels and never looks at padding.
            received = evaluation.attention[samples].mean((1, 2)).unsqueeze(1)  # (b, 1, L)
            self.centred = self._augment(base[samples] - received @ base[samples], 0.0)
        else:
            self.centred = self.base

        self._shared, self._place = shared, f"{samples.start}:{samples.stop}"

    @property
    def token_pairs(self) -> Tensor:
        """x̃_j x̃_jᵀ of every key (b, L, d̂²), kept for the next chunk of the same samples."""
        if self._place not in self._shared:
            self._shared.clear()
            x = self.centred
            self._shared[self._place] = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
        return self._shared[self._place]

    def _augment(self, tokens: Tensor, constant: float) -> Tensor:
        if not self.augmented:
            return tokens
        return torch.nn.functional.pad(tokens, (0, 1), value=constant)

    @cached_property
    def scale(self) -> Tensor | None:
        """γ of the front norm, with 1 for the constant coordinate; None when there is none."""
        if self.gamma is None:
            return None
        return torch.cat([self.gamma, self.gamma.new_ones(1)]) if self.augmented else self.gamma

    def head(self, h: int) -> HeadMoments:
        return HeadMoments(self, h)


class HeadMoments:
    """One head at the chunk's n = b·r query rows; every tensor is (n, …)."""

    def __init__(self, parent: Moments, h: int) -> None:
        self.parent, self.h = parent, h
        spec, weights = parent.spec, parent.weights
        g = h // (spec.n_heads // spec.kv_heads)
        self.group = g
        dk, dv = spec.key_size, spec.value_size
        self.s = spec.logit_scale
        self.W_Q = weights["query_weight"][h * dk : (h + 1) * dk]
        self.W_K = weights["key_weight"][g * dk : (g + 1) * dk]
        self.W_V = weights["value_weight"][g * dv : (g + 1) * dv]
        # Effective weights on the base tokens: k = W_K (γ⊙n + β) + b_K = K_hat [n; 1].
        self.K_hat = self._effective(self.W_K, weights.get("key_bias"), g * dk, dk)
        self.V_hat = self._effective(self.W_V, weights.get("value_bias"), g * dv, dv)
        output = weights.get("output_weight")
        self.W_O = None if output is None else output[:, h * dv : (h + 1) * dv]  # (d, dv)
        self.A = parent.attention[:, h]  # (b, r, L)
        self.n_tokens = self.A.shape[0] * self.A.shape[1]
        self.q = parent.query[:, h].reshape(self.n_tokens, dk)

    def _effective(self, weight: Tensor, bias: Tensor | None, start: int, size: int) -> Tensor:
        parent = self.parent
        effective = weight if parent.gamma is None else weight * parent.gamma
        if not parent.augmented:
            return effective
        constant = weight.new_zeros(size) if bias is None else bias[start : start + size]
        if parent.beta is not None:
            constant = constant + weight @ parent.beta
        return torch.cat([effective, constant.unsqueeze(-1)], 1)

    def _flat(self, t: Tensor) -> Tensor:
        return t.reshape(self.n_tokens, *t.shape[2:])

    def to_input(self, t: Tensor) -> Tensor:
        """Moments in base coordinates → input coordinates on the last axis: γ ⊙ ·.

        Without softmax moments are not shift invariant and β adds its share of the constant.
        """
        scale, beta = self.parent.scale, self.parent.beta
        t = t if scale is None else t * scale
        if self.parent.spec.softmax or beta is None:
            return t
        return torch.cat([t[..., :-1] + t[..., -1:] * beta, t[..., -1:]], -1)

    # ---- first and second moments -----------------------------------------------------------

    @cached_property
    def mean_base(self) -> Tensor:
        """m = A x̂ of the base tokens (n, d̂); its last coordinate is the row sum of A."""
        return self._flat(self.A @ self.parent.base)

    @cached_property
    def mean_input(self) -> Tensor:
        """A y of the attention's inputs, with the row sum of A behind it if augmented (n, d̂)."""
        if not self.parent.has_front:
            return self.mean_base
        mean = self._flat(self.A @ self.parent.inputs)
        return torch.cat([mean, self.mean_base[:, -1:]], 1) if self.parent.augmented else mean

    @cached_property
    def _mean_centred(self) -> Tensor:
        return self._flat(self.A @ self.parent.centred)

    @cached_property
    def M(self) -> Tensor:
        """Cov_A(x̂, x̂) (n, d̂, d̂); without softmax Σ_j x̂ x̂ᵀ over the allowed keys."""
        if self.parent.spec.softmax:
            mean = self._mean_centred
            second = self._second_moment(self.A)
            return second.baddbmm_(mean.unsqueeze(-1), mean.unsqueeze(-2), alpha=-1)
        return self._second_moment(self._permitted())

    def _second_moment(self, weights: Tensor) -> Tensor:
        """Σ_j weights_ij x̃_j x̃_jᵀ (n, d̂, d̂) of weights (b, r, L)."""
        d = self.parent.centred.shape[-1]
        return (weights @ self.parent.token_pairs).reshape(self.n_tokens, d, d)

    def _permitted(self) -> Tensor:
        allowed = self.parent.allowed
        if allowed is None:
            return torch.ones_like(self.A)
        return allowed[:, self.h if allowed.shape[1] > 1 else 0].expand_as(self.A)

    @cached_property
    def M_input(self) -> Tensor:
        """M in input coordinates on both sides (n, d̂, d̂)."""
        return self.to_input(self.to_input(self.M).mT)

    @cached_property
    def M_K(self) -> Tensor:
        """Cov_A(k, x̂_base) = K̂ M (n, dk, d̂)."""
        return self.K_hat @ self.M

    # ---- directions at the attention's output -----------------------------------------------

    @cached_property
    def OV(self) -> Tensor:
        """W_O V̂ (d, d̂)."""
        return self.V_hat if self.W_O is None else self.W_O @ self.V_hat

    @cached_property
    def X_base(self) -> Tensor:
        """s M (W_O V̂)ᵀ (n, d̂, d): the output's change along a base coordinate of θ."""
        return self.M @ (self.s * self.OV.mT)

    @cached_property
    def X_K(self) -> Tensor:
        """Direction of W_K[p, b] is q_p X_K[b] (n, d̂, d)."""
        return self.to_input(self.X_base.mT).mT

    @cached_property
    def X_Q(self) -> Tensor:
        """Direction of W_Q[p, b] is x̂_b X_Q[p] (n, dk, d)."""
        return self.K_hat @ self.X_base

    @cached_property
    def X_V(self) -> Tensor:
        """Direction of W_V[o, b] is m_b X_V[o], X_V = W_Oᵀ (1, dv, d), the same at every token."""
        if self.W_O is None:
            size = self.W_V.shape[0]
            return torch.eye(size, dtype=self.W_V.dtype, device=self.W_V.device).unsqueeze(0)
        return self.W_O.mT.unsqueeze(0)

    # ---- moments under the adjoint weights --------------------------------------------------

    def adjoint(self, R: Tensor) -> AdjointMoments:
        """Adjoint moments for R = ∂ℓ/∂U (n, d)."""
        return AdjointMoments(self, R)


class AdjointMoments:
    """The functional side of one head: everything linear in τ."""

    def __init__(self, head: HeadMoments, R: Tensor) -> None:
        self.head = head
        self.tau = R if head.W_O is None else R @ head.W_O  # (n, dv)

    @cached_property
    def w(self) -> Tensor:
        """Adjoint weights w (b, r, L)."""
        head = self.head
        u = (self.tau @ head.V_hat).view(*head.A.shape[:2], -1)
        e = u @ head.parent.centred.mT
        if not head.parent.spec.softmax:
            return e * head._permitted()
        return head.A * (e - (head.A * e).sum(-1, keepdim=True))

    @cached_property
    def nu_base(self) -> Tensor:
        """ν = w x̂ of the base tokens (n, d̂)."""
        return self.head._flat(self.w @ self.head.parent.centred)

    @cached_property
    def nu(self) -> Tensor:
        """ν in input coordinates: the adjoint of W_K[p, b] is s q_p ν_b (n, d̂)."""
        return self.head.to_input(self.nu_base)

    @cached_property
    def T(self) -> Tensor | None:
        """Σ_j w_ij (x̂_j−m_i)(x̂_j−m_i)ᵀ (n, d̂, d̂) of the base tokens; None without softmax."""
        head = self.head
        if not head.parent.spec.softmax:
            return None
        cross = self.nu_base.unsqueeze(-1) * head._mean_centred.unsqueeze(-2)
        return head._second_moment(self.w) - cross - cross.mT

    @cached_property
    def T_input(self) -> Tensor | None:
        """T in input coordinates on both sides."""
        if self.T is None:
            return None
        return self.head.to_input(self.head.to_input(self.T).mT)

    @cached_property
    def T_K(self) -> Tensor | None:
        """K̂ T (n, dk, d̂), base coordinates."""
        return None if self.T is None else self.head.K_hat @ self.T

    @cached_property
    def T_KK(self) -> Tensor | None:
        """K̂ T K̂ᵀ (n, dk, dk)."""
        return None if self.T_K is None else self.T_K @ self.head.K_hat.mT

    def T_diagonal(self) -> Tensor | None:
        """The diagonal of T_input alone (n, d̂): Σ_j w_ij x_j² − 2 m_i ν_i, no d × d tensor."""
        return self._diagonal(self.head.parent.centred, self.head.parent.scale)

    def T_KK_diagonal(self) -> Tensor | None:
        """The diagonal of T_KK alone (n, dk)."""
        return self._diagonal(self.head.parent.centred @ self.head.K_hat.mT, None)

    def _diagonal(self, tokens: Tensor, scale: Tensor | None) -> Tensor | None:
        """Diagonal of Σ_j w_ij (y_j−ȳ)(y_j−ȳ)ᵀ for tokens y (b, L, ·)."""
        head = self.head
        if not head.parent.spec.softmax:
            return None
        diagonal = self.w @ tokens.square() - 2.0 * (head.A @ tokens) * (self.w @ tokens)
        return head._flat(diagonal if scale is None else diagonal * scale.square())

    @cached_property
    def delta_q(self) -> Tensor:
        """∂ℓ/∂q = s K̂ ν (n, dk)."""
        return self.nu_base @ (self.head.s * self.head.K_hat.mT)
