r"""The bent maps of a block: normalisations and softmax moments.

Both are gradient maps y = ∇ψ(x). A normalisation is n = d ∇σ(x): J = (C − n nᵀ/d)/σ and
Ψ(δ) = −[(Jδ)nᵀ + n(Jδ)ᵀ + (nᵀδ) J]/(dσ). Attention seen from one query row is an exponential
family over its keys, m = Σ_j A_j x_j = ∇ψ(θ) with ψ = log Σ_j exp(x_jᵀθ), and both its derivatives
are moments of the keys about m, under other weights:

    J = Σ_j A_j (x_j − m)(x_j − m)ᵀ,     Ψ(δ) = Σ_j A_j δ·(x_j − m) (x_j − m)(x_j − m)ᵀ.

Without softmax A_j = θ·x_j is linear: J = Σ_j x_j x_jᵀ over the allowed keys, Ψ = 0.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from curvatlas.closed_form.chain import Bend, Diagonal, Map, Matrix, times
from curvatlas.layers.norms import norm_jacobian, norm_jacobian_product, norm_second
from curvatlas.layers.structure import Norm


class Normalise(Map):
    """n = (x − μ)/σ at the tokens with these n (n, d) and 1/σ (n, 1)."""

    pointwise = True

    def __init__(self, n: Tensor, inv_std: Tensor, kind: Norm) -> None:
        self.n, self.inv_std, self.kind = n, inv_std, kind

    def pull(self, rows: Matrix) -> Matrix:
        if isinstance(rows, Diagonal):
            return times(rows, norm_jacobian(self.n, self.inv_std, norm=self.kind))
        n, inv_std = self.n.unsqueeze(1), self.inv_std.unsqueeze(1)
        return norm_jacobian_product(n, inv_std, rows, norm=self.kind)

    def push(self, t: Tensor) -> Tensor:
        return self.adjoint(t)  # J is symmetric

    def bend(self, delta: Tensor) -> Bend:
        """Ψ(δ)."""
        return Bend(norm_second(self.n, self.inv_std, delta, norm=self.kind))


class Keys:
    """What the query rows of some samples see: tokens (b, L, d̂), and the same about a centre.

    Tokens are centred for second moments: exact, since moments about m ignore a shift, and what
    keeps float32 accurate when all tokens share a large mean.
    """

    def __init__(self, tokens: Tensor, centred: Tensor) -> None:
        self.tokens, self.centred = tokens, centred

    @cached_property
    def pairs(self) -> Tensor:
        """x̃_j x̃_jᵀ of every key (b, L, d̂²)."""
        x = self.centred
        return (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)


class Moment(Bend):
    """Σ_j w_ij (x_j − m_i)(x_j − m_i)ᵀ at n = b·r query rows, for weights w (b, r, L).

    ``mean`` (n, d̂) is m of the centred tokens, None about zero. The matrix is formed only where it
    is read whole.
    """

    def __init__(self, keys: Keys, w: Tensor, mean: Tensor | None) -> None:
        self.keys, self.w, self.mean = keys, w, mean

    @cached_property
    def matrix(self) -> Tensor:  # type: ignore[override]
        """S(w) − ν mᵀ − m νᵀ + (Σ_j w_j) m mᵀ with S = Σ_j w_j x̃_j x̃_jᵀ and ν = Σ_j w_j x̃_j."""
        x, m = self.keys.centred, self.mean
        second = (self.w @ self.keys.pairs).view(-1, x.shape[-1], x.shape[-1])
        if m is None:
            return second
        shift = (self.w @ x).flatten(0, 1) - 0.5 * self.w.sum(-1).view(-1, 1) * m
        cross = shift.unsqueeze(-1) * m.unsqueeze(-2)
        return second.sub_(cross).sub_(cross.mT)

    def times(self, t: Tensor) -> Tensor:
        """Its product with rows t (n, k, d̂), key by key."""
        x, (b, r, length) = self.keys.centred, self.w.shape
        along = t.reshape(b, -1, t.shape[-1]) @ x.mT
        if self.mean is not None:
            along = along - (t @ self.mean.unsqueeze(-1)).view(b, -1, 1)
        weighted = (along.view(b, r, -1, length) * self.w.unsqueeze(2)).flatten(1, 2)
        moved = (weighted @ x).view(t.shape)
        if self.mean is None:
            return moved
        return moved - weighted.sum(-1).view(*t.shape[:2], 1) * self.mean.unsqueeze(1)

    def diagonal_along(self, left: Matrix, right: Matrix) -> Tensor:
        """Σ_j w_j (y_j − ȳ)² of tokens y = Tᵀx with T the same at every token: no d × d tensor."""
        if len(right.values if isinstance(right, Diagonal) else right) > 1:
            return super().diagonal_along(left, right)
        y = times(self.keys.centred, right)
        assert isinstance(y, Tensor)
        diagonal = (self.w @ y.square()).flatten(0, 1)
        if self.mean is None:
            return diagonal
        mean = times(self.mean.unsqueeze(1), right)
        assert isinstance(mean, Tensor)
        twice = 2.0 * (self.w @ y).flatten(0, 1) - self.w.sum(-1).view(-1, 1) * mean[:, 0]
        return diagonal - twice * mean[:, 0]


class Attend(Map):
    """m = Σ_j A_j x̂_j of one head, from A (b, r, L); ``allowed``, 0 or 1, without softmax."""

    def __init__(self, A: Tensor, keys: Keys, allowed: Tensor | None = None) -> None:
        self.A, self.keys = A, keys
        self.value = (A @ keys.tokens).flatten(0, 1)  # (n, d̂)
        mean = (A @ keys.centred).flatten(0, 1) if allowed is None else None
        self.jacobian = Moment(keys, A if allowed is None else allowed, mean)

    @property
    def matrix(self) -> Tensor:  # type: ignore[override]
        """J (n, d̂, d̂)."""
        return self.jacobian.matrix

    def adjoint(self, t: Tensor) -> Tensor:
        return self.jacobian.times(t)

    def push(self, t: Tensor) -> Tensor:
        return self.jacobian.times(t)  # J is symmetric

    def bend(self, delta: Tensor) -> Moment:
        """Ψ(δ) for δ (n, d̂), under softmax."""
        e = delta.view(*self.A.shape[:2], -1) @ self.keys.centred.mT
        w = self.A * (e - (self.A * e).sum(-1, keepdim=True))
        return Moment(self.keys, w, self.jacobian.mean)
