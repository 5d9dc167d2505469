"""Bounds on ‖H‖ of one attention head: Theorem 1 as drafted, as published, mended, and ours.

‖·‖ is the spectral norm; x, q, k, v of the input and the weights, c = 2/(L d_v), s = 1/√d_k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.theory.reference import SingleHead


def _norm(matrix: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(matrix, 2)
    return norm


def draft_theorem_1(head: SingleHead) -> dict[str, Tensor]:
    """The four terms of the draft's Theorem 1; its bound is their maximum. Not valid: see verify.

    Xmax = ‖X‖₂, Wmax = max‖W‖₂, Rmax = ‖F − Y‖_F, Smax = √d_v.
    """
    length, d = head.target.shape
    d_k = head.query.shape[1]
    x = _norm(head.x)
    w = torch.stack([_norm(p) for p in head.parameters]).amax()
    r, s = (head.output() - head.target).norm(), float(d) ** 0.5
    qq = 2.0 * (w**4 * x**6 + r * w**3 * x**5) / (length * d * d_k)
    return {
        "VV": 2.0 * x**2 / (length * d),
        "QQ": qq,
        "VQ": 2.0 * (x**4 * w**2 + r * s * x**3 * w) / (length * d * d_k**0.5),
        "QK": qq + 2.0 * r * w * x**3 * s / (length * d * d_k**0.5),
    }


def _sizes(head: SingleHead) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, q, k, v and the bound R = √min(L, d_v) (L x v + ‖Y‖) on ‖F − Y‖_F."""
    x, (q, k, v) = _norm(head.x), (_norm(p) for p in head.parameters)
    return x, q, k, v, min(head.target.shape) ** 0.5 * (len(head.x) * x * v + _norm(head.target))


def published_theorem_1(head: SingleHead) -> dict[str, Tensor]:
    """The four lines of the published Theorem 1; its bound is M = 3 max. Not valid: see verify."""
    length, d = head.target.shape
    d_k = head.query.shape[1]
    x, q, k, v, r = _sizes(head)
    outer = 8.0 * k * v**2 * x**6 / (length**3 * d * d_k)
    mixed = 4.0 * r * v * (3 * length * k * q * x**5 + d * x**3 / length) / (length * d * d_k**0.5)
    return {
        "VV": 2.0 * length * x**2 / d,
        "QQ": k * outer + 12.0 * r * v * k**2 * x**5 / (d * d_k),
        "VQ": 4.0 * v * k * x**4 / (length * d * d_k**0.5)
        + 4.0 * r * k * x**3 / (length**2 * d_k**0.5),
        "QK": q * outer + mixed,
    }


def mended_theorem_1(head: SingleHead) -> dict[str, Tensor]:
    """The published lines, VQ with ‖M2‖ ≤ x²/2 instead of x²/L, and KK and VK beside them.

    H(V,Q) = c s (M1ᵀ⊗W_Vᵀ)Z1(I⊗W_K) + …:  VQ ≤ (c s/2) k x³ (√L x v + R); KK, VK: q for k.
    """
    x, q, k, v, r = _sizes(head)
    side = 0.5 * head.reduction * head.scale * x**3 * (len(head.x) ** 0.5 * x * v + r)
    swapped = SingleHead(head.x, head.key, head.query, head.value, head.target)
    other = published_theorem_1(swapped)["QQ"]
    return published_theorem_1(head) | {"VQ": k * side, "KK": other, "VK": q * side}


def corrected_blocks(head: SingleHead) -> Tensor:
    """Corrected block bounds (derivations §13) as the symmetric 3×3 matrix over (Q, K, V).

    Uses ‖M2_i‖ ≤ r² with r the largest distance of a token from the mean token, |e_ij| ≤ 2r‖u_i‖.
    """
    c, s = head.reduction, head.scale
    x = head.x
    q, k, v = (_norm(p) for p in head.parameters)
    residual = c * (head.output() - head.target)
    u = (residual @ head.value.T).norm(dim=1)
    size = _norm(x)
    r = (x - x.mean(0)).norm(dim=1).amax()
    # ‖A X‖ ≤ √L max‖x_j‖: rows of A are averages, but ‖A‖₂ may exceed 1
    mu = x.norm(dim=1).amax() * float(len(x)) ** 0.5
    omega = torch.linalg.eigvalsh((x * u.unsqueeze(1)).T @ x)[-1]
    inner = c * size**2 * v**2 * r**2 + 2.0 * omega * r
    side = r**2 * size * (c * mu * v + residual.norm())
    qq = s**2 * k**2 * r**2 * inner
    kk = s**2 * q**2 * r**2 * inner
    qk = s**2 * q * k * r**2 * inner + s * size * u.norm() * r**2
    vv = c * mu**2
    rows = [[qq, qk, s * k * side], [qk, kk, s * q * side], [s * k * side, s * q * side, vv]]
    return torch.stack([torch.stack(row) for row in rows])


def corrected_bound(head: SingleHead) -> Tensor:
    """‖H‖ ≤ the norm of the matrix of block bounds (≤ 3 times the largest block)."""
    bound: Tensor = torch.linalg.eigvalsh(corrected_blocks(head))[-1]
    return bound
