"""The outer part as a factor: H_o = V Vᵀ for losses whose Λ has low rank (THEORY §8).

Pooled and class-token classifiers see a sample through a few numbers, so Λ = Σ_r φ_r φ_rᵀ with R ≤
classes columns a sample, and V = Jᵀφ has R columns a sample: memory P·R·samples instead of P².
"""

from __future__ import annotations

from torch import Tensor

from curvatlas.blocks.families import Family
from curvatlas.blocks.terms import Terms


def pulled_factor(phi: Tensor, families: tuple[Family, ...], size: int, terms: Terms) -> Tensor:
    """V = Jᵀφ (P, samples · R) from φ (samples, R, L, d): Σ_i α_i ⊗ (adjoint of φ_i)."""
    samples, rank, length, _ = phi.shape
    out = phi.new_zeros(size, samples, rank)
    seeds = phi.transpose(1, 2).reshape(samples * length, rank, -1)  # (n, R, d)
    for f in families:
        adjoint = terms.pulled(f, seeds)  # (n, R, core)
        active = terms.activation(f)
        for segment in f.segments:
            alpha = active[:, slice(*segment.activation)].reshape(samples, length, -1)
            core = adjoint[..., slice(*segment.core)].reshape(samples, length, -1)
            product = (alpha.mT @ core).view(samples, alpha.shape[-1], rank, -1)
            order = (1, 3, 0, 2) if segment.activation_major else (3, 1, 0, 2)
            out[segment.rows] += product.permute(order).reshape(-1, samples, rank)
    return out.view(size, -1)
