"""Linear operators: a shape, tags, and a product with columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor

from curvatlas.budget import available_bytes, readable


@dataclass(frozen=True, kw_only=True)
class Tags:
    """What is known of an operator, so that algorithms can choose."""

    symmetric: bool = False
    psd: bool = False


class LinearOperator:
    """A real matrix known through its products; subclasses give ``_columns`` and the properties."""

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tags: Tags | None = None,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device(device)
        self.tags = tags or Tags()
        self.products = 0  # matrix-vector products so far; K columns count K

    def _columns(self, columns: Tensor) -> Tensor:
        """(n, K) → (m, K)."""
        raise TypeError(f"{type(self).__name__} defines no product.")

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        """(m, K) → (n, K), the transpose's product."""
        if self.tags.symmetric:
            return self._columns(columns)
        raise TypeError(f"{type(self).__name__} has no transposed product.")

    def __matmul__(self, right: Any) -> Any:
        """``op @ v`` for (n,) or (n, K) tensors; NumPy arrays give NumPy arrays."""
        if isinstance(right, np.ndarray):
            tensor = torch.from_numpy(np.ascontiguousarray(right))
            tensor = tensor.to(device=self.device, dtype=self.dtype)
            return (self @ tensor).cpu().numpy()
        if not isinstance(right, Tensor):
            return NotImplemented
        _check_columns(self, right)
        columns = right.detach().unsqueeze(-1) if right.ndim == 1 else right.detach()
        self.products += columns.shape[1]
        result = self._columns(columns)
        return result.squeeze(-1) if right.ndim == 1 else result

    def matvec(self, vector: Tensor) -> Tensor:
        """The same as ``op @ vector``."""
        result: Tensor = self @ vector
        return result

    @property
    def T(self) -> LinearOperator:
        """The transpose as an operator (the operator itself when it is symmetric)."""
        return self if self.tags.symmetric else _Transpose(self)

    def dense(self) -> Tensor:
        """The whole (m, n) matrix, column block by column block."""
        rows, columns = self.shape
        size = rows * columns * self.dtype.itemsize
        if self.device.type == "cpu" and size > available_bytes():
            raise MemoryError(
                f"the dense {rows} × {columns} matrix takes {readable(size)} and only "
                f"{readable(available_bytes())} are free: use products, diagonal() or eigenpairs()."
            )
        return self._dense()

    def _dense(self) -> Tensor:
        rows, columns = self.shape
        result = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        step = 256  # columns handed over at once; operators cut them further as memory allows
        for start in range(0, columns, step):
            stop = min(start + step, columns)
            block = torch.zeros(columns, stop - start, dtype=self.dtype, device=self.device)
            block[start:stop].fill_diagonal_(1)
            result[:, start:stop] = self @ block
        return result

    def to_scipy(self) -> ScipyOperator:
        """A ``scipy.sparse.linalg.LinearOperator`` with the same products."""
        dtype = np.dtype(str(self.dtype).removeprefix("torch."))
        transpose = self.T

        def forward(array: np.ndarray) -> np.ndarray:
            return np.asarray(self @ array)

        def backward(array: np.ndarray) -> np.ndarray:
            return np.asarray(transpose @ array)

        return ScipyOperator(
            self.shape, matvec=forward, matmat=forward, rmatvec=backward, rmatmat=backward,
            dtype=dtype,
        )  # fmt: skip

    def __repr__(self) -> str:
        tags = [name for name in ("symmetric", "psd") if getattr(self.tags, name)]
        described = f", {' '.join(tags)}" if tags else ""
        return f"{type(self).__name__}({self.shape[0]} × {self.shape[1]}{described})"


def _check_columns(operator: LinearOperator, right: Tensor) -> None:
    expected = operator.shape[1]
    if right.ndim not in (1, 2) or right.shape[0] != expected:
        raise ValueError(
            f"{operator!r} takes a vector ({expected},) or columns ({expected}, K), "
            f"got {tuple(right.shape)}."
        )
    if right.dtype != operator.dtype:
        raise TypeError(
            f"{operator!r} computes in {operator.dtype}, got a vector of {right.dtype}: "
            f"convert it with .to({operator.dtype})."
        )
    if right.device != operator.device:
        raise ValueError(
            f"{operator!r} lives on {operator.device}, the vector on {right.device}: move one."
        )


class _Transpose(LinearOperator):
    def __init__(self, original: LinearOperator) -> None:
        m, n = original.shape
        super().__init__((n, m), dtype=original.dtype, device=original.device)
        self._original = original

    def _columns(self, columns: Tensor) -> Tensor:
        self._original.products += columns.shape[1]
        return self._original._adjoint_columns(columns)

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self._original._columns(columns)

    @property
    def T(self) -> LinearOperator:
        return self._original


class MatrixOperator(LinearOperator):
    """A dense matrix as an operator: for closed forms, tests and small problems."""

    def __init__(self, matrix: Tensor, *, tags: Tags | None = None) -> None:
        if matrix.ndim != 2:
            raise ValueError(f"a matrix has two axes, got shape {tuple(matrix.shape)}.")
        rows, columns = matrix.shape
        if tags is None:
            tags = Tags(symmetric=rows == columns and bool(torch.equal(matrix, matrix.T)))
        super().__init__((rows, columns), dtype=matrix.dtype, device=matrix.device, tags=tags)
        self.matrix = matrix.detach()

    def _columns(self, columns: Tensor) -> Tensor:
        return self.matrix @ columns

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self.matrix.T @ columns

    def _dense(self) -> Tensor:
        return self.matrix.clone()
