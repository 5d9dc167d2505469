"""Matrices with a chosen spectrum, and operators that give nothing away but products."""

from __future__ import annotations

import torch
from torch import Tensor

import curvatlas as ca


class Opaque(ca.LinearOperator):
    """A matrix known through its products and its transpose's."""

    def __init__(self, matrix: Tensor, *, psd: bool = False) -> None:
        square = matrix.shape[0] == matrix.shape[1]
        symmetric = square and torch.equal(matrix, matrix.T)
        super().__init__(
            tuple(matrix.shape), dtype=matrix.dtype, tags=ca.Tags(symmetric=symmetric, psd=psd)
        )
        self._matrix = matrix

    def _columns(self, columns: Tensor) -> Tensor:
        return self._matrix @ columns

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self._matrix.T @ columns


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues in a random basis."""
    basis = torch.linalg.qr(drawn(len(values), len(values), seed=seed))[0]
    matrix = basis @ torch.diag(values.double()) @ basis.T
    return (matrix + matrix.T) / 2


def rectangular(values: Tensor, rows: int, columns: int, seed: int = 0) -> Tensor:
    """A matrix (rows, columns) with these singular values."""
    k = len(values)
    left = torch.linalg.qr(drawn(rows, k, seed=seed))[0]
    right = torch.linalg.qr(drawn(columns, k, seed=seed + 1))[0]
    return left @ torch.diag(values.double()) @ right.T


def wishart(n: int, seed: int = 0) -> Tensor:
    """AᵀA / n of a square normal matrix."""
    root = drawn(n, n, seed=seed)
    product = root.T @ root / n
    return (product + product.T) / 2


def error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ relative to ‖want‖, absolute where that is zero."""
    scale = float(want.norm())
    distance = float((got - want).norm())
    return distance / scale if scale else distance
