"""Normalisations n = (x − μ)/σ with their Jacobians and second derivatives (derivations §5).

The functions leave γ and β to the caller: for y = γ ⊙ n + β the Jacobian is diag(γ) J and the
second derivative contracted with δ is Ψ(γ ⊙ δ). RMSNorm has C = I and no mean; ``norm="none"`` is
the identity. To add a norm write its n, J and Ψ here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.layers.structure import Norm

NORMS: tuple[Norm, ...] = ("layer", "rms", "none")


def normalize(x: Tensor, *, eps: float, norm: Norm = "layer") -> tuple[Tensor, Tensor]:
    """Normalised tokens and 1/σ:  (…, d) → n (…, d), inv_std (…, 1).

    Biased variance, ε inside the root. With ε = 0 a token without variance has no derivative
    and is refused.
    """
    if norm == "none":
        return x, torch.ones_like(x[..., :1])
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}: choose one of {', '.join(NORMS)}.")
    centred = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    spread = centred.square().mean(-1, keepdim=True)
    if eps == 0:
        _refuse_constant_tokens(x, spread, norm)
    inv_std = torch.rsqrt(spread + eps)
    return centred * inv_std, inv_std


def _refuse_constant_tokens(x: Tensor, spread: Tensor, norm: Norm) -> None:
    # A constant token has a variance of rounding size, not exactly zero.
    floor = (4.0 * torch.finfo(x.dtype).eps * x.abs().amax(-1, keepdim=True)).square()
    constant = (spread <= floor) if norm == "layer" else (spread == 0)
    if bool(constant.any()):
        where = tuple(int(i) for i in constant[..., 0].nonzero()[0]) if x.ndim > 1 else (0,)
        what = "no variance" if norm == "layer" else "zero length"
        raise ValueError(
            f"token {where} has {what} and eps=0: the normalisation is not differentiable there; "
            "use eps > 0 or drop the token."
        )


def norm_jacobian(n: Tensor, inv_std: Tensor, *, norm: Norm = "layer") -> Tensor:
    """J = (C − n nᵀ/d)/σ of every token, without γ:  (…, d), (…, 1) → (…, d, d)."""
    d = n.shape[-1]
    if norm == "none":
        return _identity_like(n).expand(*n.shape, d)
    identity = _identity_like(n)
    base = identity - 1.0 / d if norm == "layer" else identity
    return (base - n.unsqueeze(-1) * (n.unsqueeze(-2) / d)) * inv_std.unsqueeze(-1)


def norm_jacobian_product(n: Tensor, inv_std: Tensor, v: Tensor, *, norm: Norm = "layer") -> Tensor:
    """J v (= Jᵀ v) in O(d):  (C v − n · mean(n ⊙ v))/σ.  ``v`` may have extra leading axes."""
    if norm == "none":
        return v
    along = (n * v).mean(-1, keepdim=True)
    centred = v - v.mean(-1, keepdim=True) if norm == "layer" else v
    return (centred - n * along) * inv_std


def norm_second(n: Tensor, inv_std: Tensor, delta: Tensor, *, norm: Norm = "layer") -> Tensor:
    """Ψ(δ) = Σ_a δ_a ∂²n_a = −[(Jδ)nᵀ + n(Jδ)ᵀ + (nᵀδ) J]/(dσ):  (…, d) each → (…, d, d)."""
    d = n.shape[-1]
    if norm == "none":
        return n.new_zeros(*n.shape, d)
    pulled = norm_jacobian_product(n, inv_std, delta, norm=norm)
    outer = pulled.unsqueeze(-1) * n.unsqueeze(-2)
    along = (n * delta).sum(-1)[..., None, None]
    jacobian = norm_jacobian(n, inv_std, norm=norm)
    return (outer + outer.mT + along * jacobian) * (-inv_std / d).unsqueeze(-1)


def norm_hessian(n: Tensor, inv_std: Tensor, *, norm: Norm = "layer") -> Tensor:
    """The third-order tensor ∂²n_a/∂x_b∂x_c of every token:  (…, d) → (…, d, d, d)."""
    d = n.shape[-1]
    if norm == "none":
        return n.new_zeros(*n.shape, d, d)
    jacobian = norm_jacobian(n, inv_std, norm=norm)
    ab_c = jacobian.unsqueeze(-1) * n[..., None, None, :]
    total = ab_c + ab_c.transpose(-1, -2) + ab_c.transpose(-1, -3)
    return total * (-inv_std / d)[..., None, None]


def _identity_like(n: Tensor) -> Tensor:
    return torch.eye(n.shape[-1], dtype=n.dtype, device=n.device)
