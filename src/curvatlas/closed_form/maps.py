r"""The bent maps of a block: normalisations, softmax moments, activations.

The first two are gradient maps y = ∇ψ(x). A normalisation is n = d ∇σ(x): J = (C − n nᵀ/d)/σ and
Ψ(δ) = −[(Jδ)nᵀ + n(Jδ)ᵀ + (nᵀδ) J]/(dσ). Attention seen from one query row is an exponential
family over its keys: m = Σ_j A_j x_j = ∇ψ(θ) with ψ = log Σ_j exp(x_jᵀθ), and

    J = M2 = Σ_j A_j (x_j − m)(x_j − m)ᵀ,     Ψ(δ) = Σ_j w_j (x_j − m)(x_j − m)ᵀ,
    w_j = A_j (e_j − Σ_l A_l e_l),  e_j = δ·x_j,

the third moment along δ. The tokens are centred first: exact, since covariances and w (Σ_j w_j = 0)
ignore a shift, and what keeps float32 accurate when all tokens share a large mean. Without softmax
A_j = θ·x_j is linear: J = Σ_j x_j x_jᵀ over the allowed keys, Ψ = 0.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from curvatlas.closed_form.chain import Diagonal, Map, Matrix, Node, Symmetric, times
from curvatlas.layers.activations import activation_derivatives
from curvatlas.layers.norms import norm_jacobian, norm_jacobian_product, norm_second
from curvatlas.layers.structure import Activation, Norm


class Normalise(Map):
    """n = (x − μ)/σ at the tokens with these n (n, d) and 1/σ (n, 1)."""

    cheap = True

    def __init__(self, n: Tensor, inv_std: Tensor, kind: Norm) -> None:
        self.n, self.inv_std, self.kind = n, inv_std, kind

    def pull(self, rows: Matrix) -> Matrix:
        if isinstance(rows, Diagonal):
            J = norm_jacobian(self.n, self.inv_std, norm=self.kind)
            return J if rows.values is None else rows.values.unsqueeze(-1) * J
        n, inv_std = self.n.unsqueeze(1), self.inv_std.unsqueeze(1)
        return norm_jacobian_product(n, inv_std, rows, norm=self.kind)

    def bend(self, delta: Tensor) -> Tensor:
        """Ψ(δ) (n, d, d)."""
        return norm_second(self.n, self.inv_std, delta, norm=self.kind)


class Keys:
    """What the query rows of some samples see: tokens (b, L, d̂), and the same about a centre."""

    def __init__(self, tokens: Tensor, centred: Tensor) -> None:
        self.tokens, self.centred = tokens, centred

    @cached_property
    def pairs(self) -> Tensor:
        """x̃_j x̃_jᵀ of every key (b, L, d̂²)."""
        x = self.centred
        return (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)


class Moments(Map):
    """m = Σ_j A_j x̂_j of one head at n = b·r query rows, from A (b, r, L).

    ``allowed`` (b, r, L), 0 or 1, for attention without softmax.
    """

    def __init__(self, A: Tensor, keys: Keys, allowed: Tensor | None) -> None:
        self.A, self.keys, self.allowed = A, keys, allowed
        self.weight = A if allowed is None else allowed
        self.value = (A @ keys.tokens).flatten(0, 1)

    @cached_property
    def mean(self) -> Tensor:
        """m of the centred tokens (n, d̂)."""
        return (self.A @ self.keys.centred).flatten(0, 1)

    @cached_property
    def jacobian(self) -> Tensor:
        """M2 (n, d̂, d̂)."""
        second = self.second_moment(self.weight)
        if self.allowed is not None:
            return second
        return second.baddbmm_(self.mean.unsqueeze(-1), self.mean.unsqueeze(-2), alpha=-1)

    def second_moment(self, weights: Tensor) -> Tensor:
        """Σ_j weights_ij x̃_j x̃_jᵀ (n, d̂, d̂) of weights (b, r, L)."""
        width = self.keys.centred.shape[-1]
        return (weights @ self.keys.pairs).reshape(-1, width, width)

    def pull(self, rows: Matrix) -> Matrix:
        product = times(rows, self.jacobian)
        assert product is not None
        return product

    def along(self, t: Tensor) -> Tensor:
        """x̃_j · t for rows t (n, k, d̂) → (b, r, k, L)."""
        b, r, _ = self.A.shape
        x = self.keys.centred
        return (t.reshape(b, -1, t.shape[-1]) @ x.mT).view(b, r, -1, x.shape[1])

    def summed(self, weights: Tensor) -> Tensor:
        """Σ_j weights_j x̃_j of weights (b, r, k, L) → (n, k, d̂)."""
        b, r, k, _ = weights.shape
        return (weights.flatten(1, 2) @ self.keys.centred).reshape(b * r, k, -1)

    def adjoint(self, t: Tensor) -> Tensor:
        if self.allowed is not None:
            return self.summed(self.along(t) * self.allowed.unsqueeze(2))
        e, A = self.along(t), self.A.unsqueeze(2)
        return self.summed((e - (e * A).sum(-1, keepdim=True)) * A)

    def bend(self, delta: Tensor) -> ThirdMoment:
        """Ψ(δ) for δ (n, d̂), under softmax."""
        return ThirdMoment(self, delta)


class ThirdMoment(Symmetric):
    """Ψ(δ) = Σ_j w_j (x_j − m)(x_j − m)ᵀ, formed only where it is read whole."""

    def __init__(self, moments: Moments, delta: Tensor) -> None:
        self.moments = moments
        A = moments.A
        e = moments.along(delta.unsqueeze(1)).squeeze(2)
        self.w = A * (e - (A * e).sum(-1, keepdim=True))  # (b, r, L)
        self.nu = moments.summed(self.w.unsqueeze(2)).squeeze(1)  # (n, d̂)

    @cached_property
    def _dense(self) -> Tensor:
        cross = self.nu.unsqueeze(-1) * self.moments.mean.unsqueeze(-2)
        return self.moments.second_moment(self.w) - cross - cross.mT

    def dense(self) -> Tensor:
        return self._dense

    def times(self, t: Tensor) -> Tensor:
        mean = self.moments.mean.unsqueeze(1)
        nu = self.nu.unsqueeze(1)
        moved = self.moments.summed(self.moments.along(t) * self.w.unsqueeze(2))
        return moved - nu * (mean * t).sum(-1, keepdim=True) - mean * (nu * t).sum(-1, keepdim=True)

    def diagonal_along(self, T: Matrix) -> Tensor:
        """Σ_j w_j y_j² − 2 ȳ ν_y of tokens y = Tᵀx, T the same at every token: no d × d tensor."""
        if isinstance(T, Tensor) and len(T) > 1:
            return super().diagonal_along(T)
        x = self.moments.keys.centred
        y = x @ T[0] if isinstance(T, Tensor) else x if T.values is None else x * T.values
        diagonal = self.w @ y.square() - 2.0 * (self.moments.A @ y) * (self.w @ y)
        return diagonal.flatten(0, 1)


def activated(
    name: Activation, *inputs: Node
) -> tuple[Tensor, list[Tensor], list[list[Tensor | None]]]:
    """Value, slopes and bends of a hidden layer: g = f(h), or gated g = f(h_gate) ⊙ h_up.

    To add a gated variant write its value, ∂g/∂h_i and ∂²g/∂h_i∂h_j here; to add an activation
    write f, f' and f'' in ``layers.activations``.
    """
    straight = name in ("relu", "identity")
    h = inputs[0].value
    assert h is not None
    f, f1, f2 = activation_derivatives(name, h)
    if len(inputs) == 1:
        return f, [f1], [[None if straight else f2]]
    up = inputs[1].value
    assert up is not None
    return f * up, [f1 * up, f], [[None if straight else f2 * up, f1], [f1, None]]
