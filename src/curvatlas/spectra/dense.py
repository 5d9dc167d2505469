"""The exact route: the whole matrix, where it is small or an estimate would cost as much.

One rule for all estimators: n products tell everything of an operator with n columns, so none takes
more. Products that were made for an estimate are not lost: with b_1 … b_n orthonormal, the first of
them spanning what was multiplied,

    A = Σ_i (A b_i) b_iᵀ,   tr A = Σ b_iᵀ A b_i,   diag A = Σ (A b_i) ⊙ b_i,   ‖A‖_F² = Σ ‖A b_i‖²,

and only the images of the others are missing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy.linalg import qr, solve_triangular
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.precision import float64_device, in_float64
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.requirements import largest_asymmetry, not_symmetric
from curvatlas.spectra.selection import Which, select

_MOST_COLUMNS = 8192  # of a matrix that is put together: half a gigabyte
_INDEPENDENT = 0.03  # a direction's part outside the others, below which its image is not used
_BLOCK = 64  # columns multiplied at once


def reads_the_rest(missing: int, ahead: int, left: int) -> bool:
    """Whether the ``missing`` columns cost no more than the way ``ahead`` and than is ``left``."""
    return missing <= min(ahead, left)


class KeptProducts(LinearOperator):
    """The same operator; every product is kept, so that the matrix can be completed from them."""

    def __init__(self, op: LinearOperator) -> None:
        super().__init__(op.shape, dtype=op.dtype, device=op.device, tags=op.tags)
        self.op = op
        self._directions: list[Tensor] = []
        self._images: list[Tensor] = []

    def _columns(self, columns: Tensor) -> Tensor:
        images: Tensor = self.op @ columns
        self._directions.append(columns)
        self._images.append(images)
        return images

    def matrix(self, what: str) -> tuple[Tensor, float]:
        """The symmetric (n, n) in float64, and the magnification of its rounding."""
        known = Completion(self.op, torch.cat(self._directions, 1), torch.cat(self._images, 1))
        n = self.op.shape[0]
        place = float64_device(self.op.device)
        matrix = torch.zeros(n, n, dtype=torch.float64, device=place)
        for basis, images in known.blocks():
            matrix.addmm_(images, basis.T)
        return _symmetric(matrix, self.op.dtype, what), known.magnification

    @staticmethod
    def of(op: LinearOperator, budget: int) -> LinearOperator:
        """The operator with kept products where it may come to reading all of it."""
        n = op.shape[0]
        return KeptProducts(op) if n <= min(budget, _MOST_COLUMNS) else op


class Completion:
    """An orthonormal basis of the whole space that begins with what was multiplied already."""

    def __init__(self, op: LinearOperator, directions: Tensor, images: Tensor) -> None:
        """directions (n, k) of any length and angle, images (m, k) under the operator."""
        self.op = op
        sizes = in_float64(directions).norm(dim=0)
        held = sizes > 0
        columns = (in_float64(directions)[:, held] / sizes[held]).cpu().numpy()
        basis, right, order = qr(columns, mode="economic", pivoting=True)
        rank = int((np.abs(np.diag(right)) > _INDEPENDENT).sum())
        right, order = right[:rank, :rank], order[:rank]
        scaled = (in_float64(images)[:, held] / sizes[held]).cpu().numpy()[:, order]
        # A (D R⁻¹) = (A D) R⁻¹
        known = solve_triangular(right, scaled.T, trans="T").T if rank else scaled
        self._place = float64_device(op.device)
        self._basis = torch.from_numpy(np.ascontiguousarray(basis[:, :rank])).to(self._place)
        self._known = torch.from_numpy(np.ascontiguousarray(known)).to(self._place)
        inverse = solve_triangular(right, np.eye(rank)) if rank else np.eye(1)
        self.magnification = float(np.linalg.norm(inverse, 2))
        self.missing = op.shape[1] - rank

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(b, A b) in float64, (n, w) and (m, w): the known columns, then products."""
        n, rank = self._basis.shape
        if rank:
            yield self._basis, self._known
        reflections = torch.geqrf(self._basis) if rank else None
        for start in range(rank, n, _BLOCK):
            stop = min(start + _BLOCK, n)
            block = torch.zeros(n, stop - start, dtype=torch.float64, device=self._place)
            block[start:stop].fill_diagonal_(1)
            if reflections is not None:
                block = torch.ormqr(*reflections, block)
            columns = block.to(self.op.dtype).to(self.op.device)
            images = in_float64(self.op @ columns)
            if not bool(torch.isfinite(images).all()):
                raise FloatingPointError("a product with the operator gave NaN or infinity.")
            yield in_float64(columns), images


def dense_matrix(op: LinearOperator) -> tuple[Tensor, int]:
    """(n, n) in float64 and the products it took."""
    before = op.products
    matrix = in_float64(op.dense())
    if not bool(torch.isfinite(matrix).all()):
        raise FloatingPointError(
            "the operator's matrix contains NaN or infinity: check the loss and the parameters."
        )
    return matrix, op.products - before


def symmetric_matrix(op: LinearOperator, what: str) -> tuple[Tensor, int]:
    """The same of an operator that is symmetric up to rounding, made so exactly."""
    matrix, products = dense_matrix(op)
    return _symmetric(matrix, op.dtype, what), products


def _symmetric(matrix: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    scale = float(torch.linalg.norm(matrix))
    asymmetry = float(torch.linalg.norm(matrix - matrix.T)) / scale if scale else 0.0
    if asymmetry > largest_asymmetry(dtype, len(matrix)):
        raise ValueError(not_symmetric(asymmetry, what))
    return (matrix + matrix.T) / 2


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
