"""The exact route: the whole matrix, decomposed, where it is small or most of it is wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.requirements import largest_asymmetry
from curvatlas.spectra.selection import Which, select


def dense_matrix(op: LinearOperator) -> tuple[Tensor, int]:
    """(n, n) in float64 and the products it took."""
    before = op.products
    matrix = op.dense().double()
    if not bool(torch.isfinite(matrix).all()):
        raise FloatingPointError(
            "the operator's matrix contains NaN or infinity: check the loss and the parameters."
        )
    return matrix, op.products - before


def symmetric_matrix(op: LinearOperator, what: str) -> tuple[Tensor, int]:
    """The same of an operator that is symmetric up to rounding, made so exactly."""
    matrix, products = dense_matrix(op)
    scale = float(torch.linalg.norm(matrix))
    asymmetry = float(torch.linalg.norm(matrix - matrix.T)) / scale if scale else 0.0
    if asymmetry > largest_asymmetry(op.dtype):
        raise ValueError(
            f"the operator is not symmetric (relative {asymmetry:.1e}): {what} needs a symmetric "
            "one."
        )
    return (matrix + matrix.T) / 2, products


def dense_eigenpairs(op: LinearOperator, k: int, which: Which) -> Eigenpairs:
    """Eigenpairs from the dense matrix; the residual is rounding."""
    matrix, products = symmetric_matrix(op, "eigenpairs")
    values, vectors = torch.linalg.eigh(matrix)
    ends = (float(values[0]), float(values[-1]))
    norm = max(abs(ends[0]), abs(ends[1]))
    chosen = torch.from_numpy(select(values.cpu().numpy(), k, which)).to(values.device)
    values, vectors = values[chosen], vectors[:, chosen]
    floor = 32 * torch.finfo(op.dtype).eps * norm
    residuals = torch.linalg.vector_norm(matrix @ vectors - vectors * values, dim=0) + floor
    values, residuals = values.cpu(), residuals.cpu()
    return Eigenpairs(
        values=values,
        vectors=vectors.to(op.dtype),
        residuals=residuals,
        interval=(values - residuals, values + residuals),
        which=which,
        k=k,
        tol=0.0,
        norm=norm,
        missed_probability=0.0,
        complete_outside=(0.0, 0.0),
        spectrum_within=ends,
        products=products,
        converged=True,
        exact=True,
    )
