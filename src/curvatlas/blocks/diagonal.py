r"""The exact diagonal of a block's Hessian, without any P × P or d_ff × d_ff object (THEORY §10).

On the diagonal only M survives:  diag[(r, a)] = Σ_i α_i[a]² M_i[r, r],  and of every M only its
diagonal is formed, e.g. for the queries Σ_d (X Λ) ⊙ X + s² diag T_KK.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.blocks.families import Family
from curvatlas.blocks.terms import Terms


def core_diagonal(terms: Terms, f: Family) -> Tensor:
    """M_i[r, r] of block (f, f) (n, core)."""
    tail = terms.tail
    if f.kind == "down":
        return tail.lam_S.diagonal(dim1=1, dim2=2)
    if f.kind == "final":
        assert tail.final is not None
        return _affine_twice(tail.final.n, tail.lam_Z, tail.final.has_gamma, tail.final.has_beta)
    if f.kind == "middle":
        assert tail.middle is not None
        return _affine_twice(
            tail.middle.n, tail.lam_vv, tail.middle.has_gamma, tail.middle.has_beta
        )
    if f.kind in ("gate", "up"):
        return tail.hidden_diagonal(f.kind == "gate")
    X = terms.direction(f)
    outer = ((X @ tail.lam_UU) * X).sum(-1)
    if not terms.functional or f.kind in ("value", "output"):
        return outer
    if f.kind == "front":
        return outer + terms.front.own().diagonal(dim1=1, dim2=2)
    adjoint, s = terms.adjoint(f.head), terms.head(f.head).s
    extra = adjoint.T_KK_diagonal() if f.kind == "query" else adjoint.T_diagonal()
    if extra is None:
        return outer
    return outer + s * s * extra[:, : outer.shape[-1]]


def _affine_twice(n: Tensor, lam: Tensor, gamma: bool, beta: bool) -> Tensor:
    diagonal = lam.diagonal(dim1=1, dim2=2)
    parts = [n.square() * diagonal] * gamma + [diagonal] * beta
    return torch.cat(parts, -1)


def add_diagonal(out: Tensor, terms: Terms, f: Family) -> None:
    """Add the chunk's share of the family's diagonal to ``out`` (P,)."""
    core = core_diagonal(terms, f)
    squares = terms.activation(f).square()
    for segment in f.segments:
        part = core[:, slice(*segment.core)].mT @ squares[:, slice(*segment.activation)]
        part = part.mT if segment.activation_major else part
        out[segment.rows] += part.reshape(-1)
