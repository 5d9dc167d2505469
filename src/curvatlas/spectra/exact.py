r"""The exact route: every column, where the operator is small or an estimate would cost as much.

One rule for all estimators: n products tell everything of an operator with n columns, so none takes
more. Products that were made for an estimate are not lost: with b_1 … b_n orthonormal, the first of
them spanning what was multiplied,

    A = Σ_i (A b_i) b_iᵀ,   tr A = Σ b_iᵀ A b_i,   diag A = Σ (A b_i) ⊙ b_i,   ‖A‖_F² = Σ ‖A b_i‖²,

and only the images of the others are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from scipy.linalg import qr, solve_triangular
from torch import Tensor

from curvatlas.linear_operator import LinearOperator
from curvatlas.precision import float64_device, in_float64
from curvatlas.spectra.requirements import (
    check_budget,
    largest_asymmetry,
    not_symmetric,
    require_finite,
)

MOST_PRODUCTS = 300  # that one estimate spends unless it is told how many
READ_UP_TO = 512  # columns that may be read unless max_products is given: not many more than that
MATRIX_UP_TO = 8192  # columns of a matrix that is put together: half a gigabyte
# Columns up to which an estimate reads all of them at once: as many products as it takes at least.
# (Of a density: columns of a matrix at hand.)
Estimator = Literal[
    "eigenpairs", "trace", "frobenius_norm", "diagonal", "inverse_diagonal", "function", "density"
]
DENSE_UP_TO: dict[Estimator, int] = {
    "eigenpairs": 48,
    "trace": 64,
    "frobenius_norm": 64,
    "diagonal": 64,
    "inverse_diagonal": 200,
    "function": 240,
    "density": 512,
}
_INDEPENDENT = 0.03  # a direction's part outside the others, below which its image is not used
_BLOCK = 64  # columns multiplied at once


def products_allowed(max_products: int | None, columns: int) -> int:
    """What was asked for, or 300; of an operator of few columns, enough to read them all."""
    if max_products is None:
        return MOST_PRODUCTS if columns > READ_UP_TO else columns
    check_budget(max_products)
    return max_products


def reads_at_once(estimator: Estimator, columns: int, budget: int) -> bool:
    """Whether the columns are so few that they are read without trying an estimate."""
    return columns <= min(budget, DENSE_UP_TO[estimator])


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
        completion = Completion(self.op, torch.cat(self._directions, 1), torch.cat(self._images, 1))
        n = self.op.shape[0]
        place = float64_device(self.op.device)
        matrix = torch.zeros(n, n, dtype=torch.float64, device=place)
        for basis, images in completion.blocks():
            matrix.addmm_(images, basis.T)
        return _symmetric(matrix, self.op.dtype, what), completion.magnification


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
        images_of_basis = solve_triangular(right, scaled.T, trans="T").T if rank else scaled
        self._place = float64_device(op.device)
        self._basis = torch.from_numpy(np.ascontiguousarray(basis[:, :rank])).to(self._place)
        self._images = torch.from_numpy(np.ascontiguousarray(images_of_basis)).to(self._place)
        inverse = solve_triangular(right, np.eye(rank)) if rank else np.eye(1)
        self.magnification = float(np.linalg.norm(inverse, 2))
        self.missing = op.shape[1] - rank

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(b, A b) in float64, (n, w) and (m, w): the known columns, then products."""
        n, rank = self._basis.shape
        if rank:
            yield self._basis, self._images
        reflections = torch.geqrf(self._basis) if rank else None
        for start in range(rank, n, _BLOCK):
            stop = min(start + _BLOCK, n)
            block = torch.zeros(n, stop - start, dtype=torch.float64, device=self._place)
            block[start:stop].fill_diagonal_(1)
            if reflections is not None:
                block = torch.ormqr(*reflections, block)
            columns = block.to(self.op.dtype).to(self.op.device)
            images = in_float64(self.op @ columns)
            require_finite(images)
            yield in_float64(columns), images


def symmetric_matrix(op: LinearOperator, what: str) -> tuple[Tensor, int]:
    """(n, n) in float64 of an operator symmetric up to rounding, made so exactly; and its cost."""
    before = op.products
    matrix = in_float64(op.dense())
    require_finite(matrix, "the operator's matrix")
    return _symmetric(matrix, op.dtype, what), op.products - before


def unit_columns(op: LinearOperator) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(places, unit vectors (n, w), their images (m, w)) of all columns, a block at a time."""
    n = op.shape[1]
    for start in range(0, n, _BLOCK):
        places = slice(start, min(start + _BLOCK, n))
        block = torch.zeros(n, places.stop - start, dtype=op.dtype, device=op.device)
        block[places].fill_diagonal_(1)
        yield places, block, op @ block


def _symmetric(matrix: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    scale = float(torch.linalg.norm(matrix))
    asymmetry = float(torch.linalg.norm(matrix - matrix.T)) / scale if scale else 0.0
    if asymmetry > largest_asymmetry(dtype, len(matrix)):
        raise not_symmetric(asymmetry, what)
    return (matrix + matrix.T) / 2
