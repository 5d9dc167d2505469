r"""Sums, multiples, products and submatrices of operators, and the simplest operators themselves.

A product with (A + B) v, c·A v, A (B v) or S_rᵀ A S_c v is taken when it is asked for: nothing is
formed before. What is known of the parts is carried over to the whole:

    symmetric + symmetric, c · symmetric, F₁ᵀ … F_kᵀ M F_k … F₁ with M symmetric   are symmetric,
    psd + psd, c · psd with c ≥ 0, F₁ᵀ … F_kᵀ M F_k … F₁ with M psd or M = 1       are psd.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from curvatlas.operators.base import LinearOperator, Tags, Transpose
from curvatlas.precision import in_float64

if TYPE_CHECKING:
    from curvatlas.problem import Problem


class DiagonalOperator(LinearOperator):
    """diag(d) for a vector d (n,): psd where no entry is negative."""

    def __init__(self, diagonal: Tensor) -> None:
        if not isinstance(diagonal, Tensor) or diagonal.ndim != 1:
            got = tuple(diagonal.shape) if isinstance(diagonal, Tensor) else type(diagonal).__name__
            raise ValueError(f"a diagonal is a tensor (n,), got {got}.")
        n = len(diagonal)
        tags = Tags(symmetric=True, psd=bool((diagonal >= 0).all()))
        super().__init__((n, n), dtype=diagonal.dtype, device=diagonal.device, tags=tags)
        self.diagonal = diagonal.detach()

    def content(self) -> Any:
        return ["diagonal", self.diagonal]

    def _columns(self, columns: Tensor) -> Tensor:
        return self.diagonal.unsqueeze(1) * columns

    def _dense(self) -> Tensor:
        return torch.diag(self.diagonal)

    def _submatrix(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        if torch.equal(rows, columns) and len(torch.unique(rows)) == len(rows):
            return DiagonalOperator(self.diagonal[rows.to(self.device)])
        return Submatrix(self, rows, columns)

    def exact_trace(self) -> float:
        return float(in_float64(self.diagonal).sum())

    def exact_frobenius_norm(self) -> float:
        return float(torch.linalg.vector_norm(in_float64(self.diagonal)))

    def exact_diagonal(self) -> Tensor:
        return self.diagonal.clone()


class IdentityOperator(DiagonalOperator):
    """The n × n identity, without n numbers in memory; ``H + c * IdentityOperator(n)`` damps H."""

    def __init__(
        self,
        size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(torch.ones(1, dtype=dtype, device=device).expand(size))

    @classmethod
    def like(cls, op: LinearOperator) -> IdentityOperator:
        """The identity on the columns of ``op``, in its dtype and on its device."""
        return cls(op.shape[1], dtype=op.dtype, device=op.device)

    def _columns(self, columns: Tensor) -> Tensor:
        return columns.clone()


class BlockDiagonalOperator(LinearOperator):
    """diag(A, B, …) of blocks of any shapes."""

    def __init__(self, blocks: Sequence[LinearOperator]) -> None:
        _check_some(blocks, "a block-diagonal operator")
        rows, columns = (sum(block.shape[axis] for block in blocks) for axis in (0, 1))
        tags = Tags(
            symmetric=all(block.tags.symmetric for block in blocks),
            psd=all(block.tags.psd for block in blocks),
        )
        first = blocks[0]
        super().__init__((rows, columns), dtype=first.dtype, device=first.device, tags=tags)
        self.blocks = tuple(blocks)

    def content(self) -> Any:
        return ["blocks", *(block.content() for block in self.blocks)]

    def _columns(self, columns: Tensor) -> Tensor:
        pieces = torch.split(columns, [block.shape[1] for block in self.blocks])
        return torch.cat([b @ piece for b, piece in zip(self.blocks, pieces, strict=True)])

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        pieces = torch.split(columns, [block.shape[0] for block in self.blocks])
        return torch.cat([b.T @ piece for b, piece in zip(self.blocks, pieces, strict=True)])

    def _dense(self) -> Tensor:
        result = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        row = column = 0
        for block in self.blocks:
            rows, columns = block.shape
            result[row : row + rows, column : column + columns] = block.dense()
            row, column = row + rows, column + columns
        return result


class KroneckerOperator(LinearOperator):
    """A ⊗ B ⊗ …: (A ⊗ B) vec(X) = vec(A X Bᵀ) for row-major X, factor after factor."""

    def __init__(self, factors: Sequence[LinearOperator]) -> None:
        _check_some(factors, "a Kronecker product")
        rows, columns = (math.prod(factor.shape[axis] for factor in factors) for axis in (0, 1))
        tags = Tags(
            symmetric=all(factor.tags.symmetric for factor in factors),
            psd=all(factor.tags.psd for factor in factors),
        )
        first = factors[0]
        super().__init__((rows, columns), dtype=first.dtype, device=first.device, tags=tags)
        self.factors = tuple(factors)

    def content(self) -> Any:
        return ["kronecker", *(factor.content() for factor in self.factors)]

    def _columns(self, columns: Tensor) -> Tensor:
        return _along_axes(self.factors, columns)

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return _along_axes([factor.T for factor in self.factors], columns)


def _along_axes(factors: Sequence[LinearOperator], columns: Tensor) -> Tensor:
    """Each factor on its own axis of columns (n₁ n₂ …, K)."""
    count = columns.shape[1]
    array = columns.reshape(*[factor.shape[1] for factor in factors], count)
    for axis, factor in enumerate(factors):
        moved = array.movedim(axis, 0)
        image: Tensor = factor @ moved.reshape(moved.shape[0], -1)
        array = image.reshape(factor.shape[0], *moved.shape[1:]).movedim(0, axis)
    return array.reshape(-1, count)


class Sum(LinearOperator):
    """A + B + …"""

    def __init__(self, parts: Sequence[LinearOperator]) -> None:
        first = parts[0]
        tags = Tags(
            symmetric=all(part.tags.symmetric for part in parts),
            psd=all(part.tags.psd for part in parts),
        )
        super().__init__(first.shape, dtype=first.dtype, device=first.device, tags=tags)
        self.parts = tuple(parts)

    def content(self) -> Any:
        return ["sum", *(part.content() for part in self.parts)]

    def _columns(self, columns: Tensor) -> Tensor:
        return _total([part @ columns for part in self.parts])

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return _total([part.T @ columns for part in self.parts])

    def _dense(self) -> Tensor:
        return _total([part.dense() for part in self.parts])

    def _problem_on(self, axis: int) -> Problem | None:
        return next(filter(None, (part._problem_on(axis) for part in self.parts)), None)

    def _submatrix(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        return Sum([part._submatrix(rows, columns) for part in self.parts])


class Scaled(LinearOperator):
    """c · A for a number c."""

    def __init__(self, original: LinearOperator, factor: float) -> None:
        tags = Tags(symmetric=original.tags.symmetric, psd=original.tags.psd and factor >= 0)
        super().__init__(original.shape, dtype=original.dtype, device=original.device, tags=tags)
        self.original, self.factor = original, factor

    def content(self) -> Any:
        return ["scaled", self.factor, self.original.content()]

    def _columns(self, columns: Tensor) -> Tensor:
        image: Tensor = self.original @ columns
        return self.factor * image

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        image: Tensor = self.original.T @ columns
        return self.factor * image

    def _dense(self) -> Tensor:
        return self.factor * self.original.dense()

    def _problem_on(self, axis: int) -> Problem | None:
        return self.original._problem_on(axis)

    def _submatrix(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        return Scaled(self.original._submatrix(rows, columns), self.factor)


class Product(LinearOperator):
    """A B …, applied from the right."""

    def __init__(self, factors: Sequence[LinearOperator]) -> None:
        first, last = factors[0], factors[-1]
        super().__init__(
            (first.shape[0], last.shape[1]),
            dtype=first.dtype,
            device=first.device,
            tags=_product_tags(factors),
        )
        self.factors = tuple(factors)

    def content(self) -> Any:
        return ["product", *(factor.content() for factor in self.factors)]

    def _columns(self, columns: Tensor) -> Tensor:
        for factor in reversed(self.factors):
            columns = factor @ columns
        return columns

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        for factor in self.factors:
            columns = factor.T @ columns
        return columns

    def _dense(self) -> Tensor:
        columns = self.factors[-1].dense()
        for factor in reversed(self.factors[:-1]):
            columns = factor @ columns
        return columns

    def _problem_on(self, axis: int) -> Problem | None:
        return self.factors[-axis]._problem_on(axis)  # the first factor's rows, the last's columns


class Submatrix(LinearOperator):
    """S_rᵀ A S_c: the rows r and columns c of an operator that is only known as a whole."""

    def __init__(self, original: LinearOperator, rows: Tensor, columns: Tensor) -> None:
        block = torch.equal(rows, columns)
        super().__init__(
            (len(rows), len(columns)),
            dtype=original.dtype,
            device=original.device,
            tags=original.tags if block else Tags(),
        )
        self.original = original
        self._row_places = rows.to(original.device)
        self._column_places = columns.to(original.device)

    def content(self) -> Any:
        return ["rows, columns", self._row_places, self._column_places, self.original.content()]

    def _columns(self, columns: Tensor) -> Tensor:
        placed = columns.new_zeros(self.original.shape[1], columns.shape[1])
        placed.index_add_(0, self._column_places, columns)
        image: Tensor = self.original @ placed
        return image[self._row_places]

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        placed = columns.new_zeros(self.original.shape[0], columns.shape[1])
        placed.index_add_(0, self._row_places, columns)
        image: Tensor = self.original.T @ placed
        return image[self._column_places]


def add(left: LinearOperator, right: Any, *, sign: int = 1) -> LinearOperator:
    """left ± right."""
    if not isinstance(right, LinearOperator):
        raise TypeError(_what_to_add(left, right))
    _check_alike(left, right, "+" if sign > 0 else "−")
    if left.shape != right.shape:
        raise ValueError(f"{left!r} and {right!r} have different shapes: their sum is undefined.")
    if isinstance(left, DiagonalOperator) and isinstance(right, DiagonalOperator):
        return DiagonalOperator(left.diagonal + sign * right.diagonal)
    other = right if sign > 0 else scale(right, -1.0)
    return Sum([*_members(left, Sum, "parts"), *_members(other, Sum, "parts")])


def scale(original: LinearOperator, factor: Any, *, divide: bool = False) -> LinearOperator:
    """factor · original, or original / factor."""
    number = _number(original, factor)
    if divide:
        if number == 0 or math.isinf(1 / number):
            raise ZeroDivisionError(f"{original!r} divided by {number}.")
        number = 1 / number
    if isinstance(original, DiagonalOperator):
        return DiagonalOperator(number * original.diagonal)
    if isinstance(original, Scaled):
        return Scaled(original.original, number * original.factor)
    return Scaled(original, number)


def product(left: LinearOperator, right: LinearOperator) -> LinearOperator:
    """left · right."""
    _check_alike(left, right, "@")
    if left.shape[1] != right.shape[0]:
        raise ValueError(
            f"{left!r} @ {right!r} is undefined: {left.shape[1]} columns meet "
            f"{right.shape[0]} rows."
        )
    if isinstance(left, IdentityOperator):
        return right
    if isinstance(right, IdentityOperator):
        return left
    if isinstance(left, DiagonalOperator) and isinstance(right, DiagonalOperator):
        return DiagonalOperator(left.diagonal * right.diagonal)
    return Product([*_members(left, Product, "factors"), *_members(right, Product, "factors")])


def _members(op: LinearOperator, kind: type, name: str) -> Sequence[LinearOperator]:
    members: Sequence[LinearOperator] = getattr(op, name) if isinstance(op, kind) else (op,)
    return members


def _product_tags(factors: Sequence[LinearOperator]) -> Tags:
    """Symmetric where the factors read the same from both ends, transposed."""
    half, odd = divmod(len(factors), 2)
    mirrored = all(_transposes(factors[i], factors[-1 - i]) for i in range(half))
    middle = factors[half].tags if odd else Tags(symmetric=True, psd=True)
    return Tags(
        symmetric=mirrored and middle.symmetric, psd=mirrored and middle.symmetric and middle.psd
    )


def _transposes(left: LinearOperator, right: LinearOperator) -> bool:
    """Whether left = rightᵀ, as far as can be told without products."""
    if left is right:
        return left.tags.symmetric
    return (isinstance(left, Transpose) and left.original is right) or (
        isinstance(right, Transpose) and right.original is left
    )


def _total(tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


def _check_some(members: Sequence[LinearOperator], what: str) -> None:
    if not members or not all(isinstance(member, LinearOperator) for member in members):
        raise TypeError(
            f"{what} is made of at least one operator; wrap a matrix in MatrixOperator."
        )
    for member in members[1:]:
        _check_alike(members[0], member, "beside")


def _check_alike(left: LinearOperator, right: LinearOperator, sign: str) -> None:
    for what in ("dtype", "device"):
        a, b = getattr(left, what), getattr(right, what)
        if a != b:
            raise TypeError(f"{left!r} {sign} {right!r}: one is of {what} {a}, the other of {b}.")


def _what_to_add(op: LinearOperator, other: Any) -> str:
    if isinstance(other, (int, float, np.number)) or (isinstance(other, Tensor) and not other.ndim):
        return (
            f"a number and {op!r} cannot be added: for damping add "
            f"{other} * ca.IdentityOperator.like(op)."
        )
    if isinstance(other, (Tensor, np.ndarray)) and other.ndim == 2:
        return f"{op!r} and a matrix cannot be added: wrap it as ca.MatrixOperator(matrix)."
    return f"{op!r} can be added to an operator, not to a {type(other).__name__}."


def _number(op: LinearOperator, factor: Any) -> float:
    if isinstance(factor, LinearOperator):
        raise TypeError(f"operators are multiplied by @: {op!r} @ {factor!r}.")
    if isinstance(factor, (Tensor, np.ndarray)):
        if factor.ndim:
            raise TypeError(
                f"{op!r} times an array of shape {tuple(factor.shape)}: use op @ v for a product, "
                "ca.DiagonalOperator(v) @ op to scale its rows."
            )
        factor = factor.item()
    if not isinstance(factor, (int, float, np.integer, np.floating)):
        raise TypeError(f"{op!r} is scaled by a real number, not by a {type(factor).__name__}.")
    number = float(factor)
    if not math.isfinite(number):
        raise ValueError(f"{op!r} cannot be scaled by {number}.")
    return number
