"""LayerNorm's derivatives in the papers' matrices and in compact form."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.theory.kronecker import eye, kron
from curvatlas.theory.reference import jacobian, normalize


class Printed:
    """LN(X) = P(X) M(X) with the papers' matrices; X (L, d), row-major vec."""

    def __init__(self, x: Tensor, eps: float) -> None:
        self.x, self.eps = x, eps
        self.length, self.d = x.shape
        ones = torch.ones(self.d, self.d, dtype=torch.float64)
        self.centring = eye(self.length * self.d) - kron(eye(self.length), ones) / self.d  # G
        self.m = x - x.mean(1, keepdim=True)
        self.sigma = (self.m.pow(2).mean(1) + eps).sqrt()
        self.p = torch.diag(1.0 / self.sigma)

    def scale_jacobian(self) -> Tensor:
        """∂P/∂X (L², L d) by the three lemmas: inverse, Hadamard square, Hadamard root."""
        pick = torch.zeros(self.length**2, self.length, dtype=torch.float64)
        for i in range(self.length):
            pick[i * self.length + i, i] = 1.0  # vec_r of diag(v) = pick v
        mean = kron(eye(self.length), torch.ones(1, self.d, dtype=torch.float64)) / self.d
        square = 2.0 * torch.diag(self.m.reshape(-1)) @ self.centring
        root = 0.5 * torch.diag(1.0 / self.sigma) @ mean @ square
        return -kron(self.p, self.p.T) @ pick @ root

    def jacobian(self) -> Tensor:
        """(P⊗I_d)G + (I_L⊗Mᵀ)∂P/∂X."""
        return self.first_term() + kron(eye(self.length), self.m.T) @ self.scale_jacobian()

    def first_term(self) -> Tensor:
        return kron(self.p, eye(self.d)) @ self.centring

    def hessian_terms(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three terms of ∂²LN/∂X², each (L²d², L d); derivatives of P and M taken entrywise."""
        x = self.x.detach().clone().requires_grad_(True)
        tracked = Printed(x, self.eps)
        size = self.length * self.d
        scale_first = jacobian(tracked.p, [x], graph=True)  # ∂P/∂X
        scale_second = jacobian(scale_first, [x]).detach()  # ∂²P/∂X²
        spread_scale = jacobian(kron(tracked.p, eye(self.d)), [x]).detach()
        spread_centred = jacobian(kron(eye(self.length), tracked.m.T), [x]).detach()
        first = kron(eye(size), self.centring.T) @ spread_scale
        second = kron(kron(eye(self.length), self.m.T), eye(size)) @ scale_second
        third = kron(eye(size), scale_first.detach().T) @ spread_centred
        return first, second, third


def automatic(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Jacobian (Ld, Ld) and stacked Hessian (L²d², L d) of LayerNorm by differentiation."""
    leaf = x.detach().clone().requires_grad_(True)
    first = jacobian(normalize(leaf, "layer", eps), [leaf], graph=True)
    return first.detach(), jacobian(first, [leaf]).detach()


def compact_jacobian(x: Tensor, eps: float, *, kind: str = "layer") -> Tensor:
    """J = (C − n nᵀ/d)/σ of each token: x (…, d) → (…, d, d)."""
    d = x.shape[-1]
    n = normalize(x, kind, eps)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    sigma = (centred.pow(2).mean(-1) + eps).sqrt()
    centring = torch.eye(d, dtype=x.dtype) - (1.0 / d if kind == "layer" else 0.0)
    return (centring - n.unsqueeze(-1) * n.unsqueeze(-2) / d) / sigma[..., None, None]


def compact_hessian(x: Tensor, eps: float, *, kind: str = "layer") -> Tensor:
    """∂²n_a/∂x_b∂x_c = −(J_ab n_c + J_ac n_b + J_bc n_a)/(dσ) of one token: (d,) → (d, d, d)."""
    d = x.shape[-1]
    n, j = normalize(x, kind, eps), compact_jacobian(x, eps, kind=kind)
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    sigma = (centred.pow(2).mean(-1) + eps).sqrt()
    outer = torch.einsum("ab,c->abc", j, n)
    return -(outer + outer.permute(0, 2, 1) + outer.permute(2, 0, 1)) / (d * sigma)
