"""Linear operators: a shape, tags and products with columns, and what is made of operators.

``A + B``, ``c * A``, ``A @ B`` and ``A[rows, columns]`` are operators again, and what is known of
their members (symmetric, psd) is carried over; nothing is multiplied before a product is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor

from curvatlas.budget import available_bytes, readable
from curvatlas.precision import in_float64

if TYPE_CHECKING:
    from curvatlas.parallel import Shards
    from curvatlas.problem import Problem

Part = Literal["total", "outer", "functional"]  # H = H_o + H_f
PARTS: tuple[Part, ...] = get_args(Part)
SYMBOLS: dict[str, str] = {"total": "H", "outer": "H_o", "functional": "H_f"}


def require_part(part: str) -> None:
    """Raise on a name that is none of total, outer and functional."""
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}.")


@dataclass(frozen=True, kw_only=True)
class Tags:
    """What is known of an operator, so that algorithms can choose."""

    symmetric: bool = False
    psd: bool = False


class LinearOperator:
    """A real matrix known through its products; subclasses give ``_columns`` and the properties.

    ``A + B``, ``A - B``, ``c * A``, ``A / c``, ``-A``, ``A @ B``, ``A.T`` and ``A[rows, columns]``
    are operators again; nothing is multiplied before a product is taken.
    """

    __array_ufunc__ = None  # NumPy leaves ``array @ op`` and ``np.float64(2) * op`` to the operator
    __iter__ = None  # without it, ``op[i]`` would make an operator a sequence

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
        self.before_product: Callable[[], None] | None = None  # may raise to stop an estimate

    def content(self) -> Any:
        """Everything the products depend on, for checkpoints to be told apart by; None: unknown.

        Tensors, numbers, texts and collections of these.
        """
        return None

    def confirm(self) -> None:
        """Wait for the device and raise what checks of earlier products have found there.

        In main memory every product is checked before it is returned, and this does nothing. On a
        device the host does not wait: a product that must not be used is NaN.
        """
        for op in self._beneath():
            op.confirm()

    def _beneath(self) -> Sequence[LinearOperator]:
        """The operators whose products this one's are made of."""
        return ()

    def _columns(self, columns: Tensor) -> Tensor:
        """(n, K) → (m, K)."""
        raise TypeError(f"{type(self).__name__} defines no product.")

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        """(m, K) → (n, K), the transpose's product."""
        if self.tags.symmetric:
            return self._columns(columns)
        raise TypeError(f"{type(self).__name__} has no transposed product.")

    def _problem_on(self, axis: int) -> Problem | None:
        """The problem whose flat vector the rows (axis 0) or columns (axis 1) stand for, if any."""
        return None

    @overload
    def __matmul__(self, right: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, right: LinearOperator) -> LinearOperator: ...
    @overload
    def __matmul__(self, right: NDArray[Any]) -> NDArray[Any]: ...
    @overload
    def __matmul__(self, right: Sequence[Tensor] | Mapping[str, Tensor]) -> Any: ...
    def __matmul__(self, right: Any) -> Any:
        """``op @ v`` for (n,) or (n, K) tensors, NumPy arrays alike; ``A @ B`` for an operator.

        Operators of a Problem also take one tensor a parameter, as a list, a tuple or a mapping by
        name, each in the parameter's shape or with a last axis of K columns, and give the same.
        """
        if isinstance(right, LinearOperator):
            return _product(self, right)
        if isinstance(right, (list, tuple, Mapping)):
            return self._by_parameter(right)
        if isinstance(right, np.ndarray):
            if np.iscomplexobj(right):
                raise TypeError(f"{self!r} is real: multiply the two parts of a complex array.")
            tensor = torch.from_numpy(np.ascontiguousarray(right))
            tensor = tensor.to(device=self.device, dtype=self.dtype)
            return (self @ tensor).cpu().numpy()
        if not isinstance(right, Tensor):
            return NotImplemented
        if (
            right.ndim not in (1, 2)
            or right.shape[0] != self.shape[1]
            or right.dtype != self.dtype
            or right.device != self.device
        ):
            check_columns(self, right)  # says which
        if self.before_product is not None:
            self.before_product()
        columns = right.detach().unsqueeze(-1) if right.ndim == 1 else right.detach()
        self.products += columns.shape[1]
        result = self._columns(columns)
        return result.squeeze(-1) if right.ndim == 1 else result

    def _by_parameter(self, tensors: Sequence[Tensor] | Mapping[str, Tensor]) -> Any:
        entering, leaving = self._problem_on(1), self._problem_on(0)
        if entering is None:
            raise TypeError(
                f"{self!r} takes tensors and arrays: a {type(tensors).__name__} of tensors needs "
                "an operator over the parameters of a Problem."
            )
        image = self @ entering.layout.flat(tensors)
        if leaving is None:
            return image
        pieces = leaving.layout.shaped(image)
        if isinstance(tensors, Mapping):
            return dict(zip(leaving.layout.names, pieces, strict=True))
        return tuple(pieces) if isinstance(tensors, tuple) else pieces

    def sharded_matvec(self, part: Tensor, shards: Shards) -> Tensor:
        """This process's entries of A v, of a vector v whose entries lie on all processes.

        part: (shards.length,), this process's entries of v.
        """
        product: Tensor = self @ shards.gathered(part)
        return shards.take(product).clone()

    @property
    def shards(self) -> Shards | None:
        """Which entries of its vectors every process holds; None: each of them holds all."""
        return None

    def sharded_columns(self, columns: Tensor) -> Tensor:
        """``sharded_matvec`` of columns (P_local, K) in the operator's own ``shards``."""
        assert self.shards is not None
        images = [self.sharded_matvec(column, self.shards) for column in columns.T]
        return torch.stack(images, 1)

    def matvec(self, vector: Tensor) -> Tensor:
        """The same as ``op @ vector``."""
        result: Tensor = self @ vector
        return result

    def quadratic(self, columns: Tensor) -> Tensor:
        """vᵀ A v of every column of (n, K), or of one vector (n,): (K,) or a number."""
        check_columns(self, columns)
        return (columns * (self @ columns)).sum(0)

    @property
    def T(self) -> LinearOperator:
        """The transpose as an operator (the operator itself when it is symmetric)."""
        return self if self.tags.symmetric else Transpose(self)

    def transpose(self) -> LinearOperator:
        """The same as ``op.T``."""
        return self.T

    def __rmatmul__(self, left: Any) -> Any:
        """``v @ op`` = vᵀA for v (m,) or rows (K, m), or one tensor a parameter."""
        if isinstance(left, (list, tuple, Mapping)):
            return self.T @ left
        if not isinstance(left, (Tensor, np.ndarray)):
            return NotImplemented
        return (self.T @ left.T).T if left.ndim == 2 else self.T @ left

    def __add__(self, other: Any) -> LinearOperator:
        return _add(self, other)

    def __radd__(self, other: Any) -> LinearOperator:
        if isinstance(other, int) and other == 0:
            return self  # the start of sum([...])
        return _add(self, other)

    def __sub__(self, other: Any) -> LinearOperator:
        return _add(self, other, sign=-1)

    def __rsub__(self, other: Any) -> LinearOperator:
        return _add(self, other)  # says what is wrong

    def __neg__(self) -> LinearOperator:
        return _scale(self, -1.0)

    def __mul__(self, factor: Any) -> LinearOperator:
        return _scale(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> LinearOperator:
        return _scale(self, divisor, divide=True)

    def __getitem__(self, key: Any) -> LinearOperator:
        """``op[rows, columns]``: those rows × those columns as an operator; ``op[rows]``: a block
        on the diagonal.

        Rows and columns are whole numbers, ranges, slices, lists, integer tensors or arrays, or
        masks; over the parameters of a Problem also names, roles and globs. Every chosen row meets
        every chosen column, as in ``matrix[rows][:, columns]``.
        """
        rows, columns = key if isinstance(key, tuple) and len(key) == 2 else (key, key)
        return self._submatrix(self._places(rows, axis=0), self._places(columns, axis=1))

    def _places(self, selector: Any, *, axis: int) -> Tensor:
        """Positions (k,) int64 that a selector picks of the rows (axis 0) or columns (axis 1)."""
        problem = self._problem_on(axis)
        if problem is None or is_index(selector) or isinstance(selector, slice):
            return places_of(selector, self.shape[axis])
        return torch.cat([piece.indices for piece in problem.anatomy.select(selector)])

    def _submatrix(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        return Submatrix(self, rows, columns)

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
            self.shape,
            matvec=forward,
            matmat=forward,
            rmatvec=backward,
            rmatmat=backward,
            dtype=dtype,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle runs code when it is loaded, and graphs cannot be stored at all.
        raise TypeError(
            f"{self!r} is not pickled or copied: make it anew from its Problem, keep its numbers "
            "as a tensor (op.dense()), and store results by their save()."
        )

    def __repr__(self) -> str:
        tags = [name for name in ("symmetric", "psd") if getattr(self.tags, name)]
        described = f", {' '.join(tags)}" if tags else ""
        return f"{type(self).__name__}({self.shape[0]} × {self.shape[1]}{described})"


def check_columns(operator: LinearOperator, right: Tensor) -> None:
    """Raise unless ``operator @ right`` is defined: shape, dtype and device."""
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


class Transpose(LinearOperator):
    """Aᵀ of an operator that is not symmetric."""

    def __init__(self, original: LinearOperator) -> None:
        m, n = original.shape
        super().__init__((n, m), dtype=original.dtype, device=original.device)
        self.original = original

    def content(self) -> Any:
        return ["transpose", self.original.content()]

    def _beneath(self) -> Sequence[LinearOperator]:
        return (self.original,)

    def _columns(self, columns: Tensor) -> Tensor:
        self.original.products += columns.shape[1]
        return self.original._adjoint_columns(columns)

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self.original._columns(columns)

    def _problem_on(self, axis: int) -> Problem | None:
        return self.original._problem_on(1 - axis)

    def _submatrix(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        return self.original._submatrix(columns, rows).T

    @property
    def T(self) -> LinearOperator:
        return self.original


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

    def content(self) -> Any:
        return self.matrix

    def _columns(self, columns: Tensor) -> Tensor:
        return self.matrix @ columns

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self.matrix.T @ columns

    def _dense(self) -> Tensor:
        return self.matrix.clone()

    def _submatrix(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        chosen = self.matrix[rows.to(self.device)][:, columns.to(self.device)]
        block = torch.equal(rows, columns)
        return MatrixOperator(chosen, tags=self.tags if block else None)


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


# --- operators made of operators ------------------------------------------------------------------


class _Combination(LinearOperator):
    """Made of ``members`` of one dtype and device; what holds of all of them holds of the whole.

    Subclasses say how a product is made of the members' own (``_combine``).
    """

    def __init__(
        self, members: Sequence[LinearOperator], shape: tuple[int, int], tags: Tags | None = None
    ) -> None:
        first = members[0]
        tags = tags or Tags(
            symmetric=all(member.tags.symmetric for member in members),
            psd=all(member.tags.psd for member in members),
        )
        super().__init__(shape, dtype=first.dtype, device=first.device, tags=tags)
        self.members = tuple(members)

    def content(self) -> Any:
        return [type(self).__name__, *(member.content() for member in self.members)]

    def _beneath(self) -> Sequence[LinearOperator]:
        return self.members

    def _combine(self, members: Sequence[LinearOperator], columns: Tensor) -> Tensor:
        raise NotImplementedError

    def _columns(self, columns: Tensor) -> Tensor:
        return self._combine(self.members, columns)

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self._combine([member.T for member in self.members], columns)


class BlockDiagonalOperator(_Combination):
    """diag(A, B, …) of blocks of any shapes."""

    def __init__(self, blocks: Sequence[LinearOperator]) -> None:
        _check_some(blocks, "a block-diagonal operator")
        rows, columns = (sum(block.shape[axis] for block in blocks) for axis in (0, 1))
        super().__init__(blocks, (rows, columns))
        self.blocks = self.members

    def _combine(self, members: Sequence[LinearOperator], columns: Tensor) -> Tensor:
        pieces = torch.split(columns, [block.shape[1] for block in members])
        return torch.cat([b @ piece for b, piece in zip(members, pieces, strict=True)])

    def _dense(self) -> Tensor:
        blocks = [block.dense() for block in self.blocks]
        matrix: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        return matrix


class KroneckerOperator(_Combination):
    """A ⊗ B ⊗ …: (A ⊗ B) vec(X) = vec(A X Bᵀ) for row-major X, factor after factor."""

    def __init__(self, factors: Sequence[LinearOperator]) -> None:
        _check_some(factors, "a Kronecker product")
        rows, columns = (math.prod(factor.shape[axis] for factor in factors) for axis in (0, 1))
        super().__init__(factors, (rows, columns))
        self.factors = self.members

    def _combine(self, members: Sequence[LinearOperator], columns: Tensor) -> Tensor:
        count = columns.shape[1]
        array = columns.reshape(*[factor.shape[1] for factor in members], count)
        for axis, factor in enumerate(members):
            moved = array.movedim(axis, 0)
            image: Tensor = factor @ moved.reshape(moved.shape[0], -1)
            array = image.reshape(factor.shape[0], *moved.shape[1:]).movedim(0, axis)
        return array.reshape(-1, count)


class Sum(_Combination):
    """A + B + …"""

    def __init__(self, members: Sequence[LinearOperator]) -> None:
        super().__init__(members, members[0].shape)

    def _combine(self, members: Sequence[LinearOperator], columns: Tensor) -> Tensor:
        images: list[Tensor] = [member @ columns for member in members]
        return functools.reduce(torch.add, images)

    def _dense(self) -> Tensor:
        return functools.reduce(torch.add, [member.dense() for member in self.members])

    def _problem_on(self, axis: int) -> Problem | None:
        return next(filter(None, (member._problem_on(axis) for member in self.members)), None)

    def _submatrix(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        return Sum([member._submatrix(rows, columns) for member in self.members])


class Scaled(_Combination):
    """c · A for a number c: psd if A is and c ≥ 0."""

    def __init__(self, original: LinearOperator, factor: float) -> None:
        tags = Tags(symmetric=original.tags.symmetric, psd=original.tags.psd and factor >= 0)
        super().__init__([original], original.shape, tags)
        self.original, self.factor = original, factor

    def content(self) -> Any:
        return [self.factor, *super().content()]

    def _combine(self, members: Sequence[LinearOperator], columns: Tensor) -> Tensor:
        image: Tensor = members[0] @ columns
        return self.factor * image

    def _dense(self) -> Tensor:
        return self.factor * self.original.dense()

    def _problem_on(self, axis: int) -> Problem | None:
        return self.original._problem_on(axis)

    def _submatrix(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        return Scaled(self.original._submatrix(rows, columns), self.factor)


class Product(_Combination):
    """A B …, applied from the right.

    F₁ᵀ … F_kᵀ M F_k … F₁ is symmetric where M is, and psd where M is psd or the identity.
    """

    def __init__(self, members: Sequence[LinearOperator]) -> None:
        half, odd = divmod(len(members), 2)
        mirrored = all(_transposes(members[i], members[-1 - i]) for i in range(half))
        middle = members[half].tags if odd else Tags(symmetric=True, psd=True)
        symmetric = mirrored and middle.symmetric
        tags = Tags(symmetric=symmetric, psd=symmetric and middle.psd)
        super().__init__(members, (members[0].shape[0], members[-1].shape[1]), tags)

    def _combine(self, members: Sequence[LinearOperator], columns: Tensor) -> Tensor:
        for member in reversed(members):
            columns = member @ columns
        return columns

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self._combine([member.T for member in reversed(self.members)], columns)

    def _dense(self) -> Tensor:
        return self._combine(self.members[:-1], self.members[-1].dense())

    def _problem_on(self, axis: int) -> Problem | None:
        return self.members[-axis]._problem_on(axis)  # the first one's rows, the last one's columns


class Submatrix(LinearOperator):
    """S_rᵀ A S_c: the rows r and columns c of an operator that is only known as a whole."""

    def __init__(self, original: LinearOperator, rows: Tensor, columns: Tensor) -> None:
        tags = original.tags if torch.equal(rows, columns) else None
        shape = len(rows), len(columns)
        super().__init__(shape, dtype=original.dtype, device=original.device, tags=tags)
        self.original = original
        self._row_places = rows.to(original.device)
        self._column_places = columns.to(original.device)

    def content(self) -> Any:
        return ["rows, columns", self._row_places, self._column_places, self.original.content()]

    def _beneath(self) -> Sequence[LinearOperator]:
        return (self.original,)

    def _columns(self, columns: Tensor) -> Tensor:
        return self._chosen(self.original, self._column_places, columns)[self._row_places]

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self._chosen(self.original.T, self._row_places, columns)[self._column_places]

    @staticmethod
    def _chosen(op: LinearOperator, places: Tensor, columns: Tensor) -> Tensor:
        full = columns.new_zeros(op.shape[1], columns.shape[1])
        image: Tensor = op @ full.index_add_(0, places, columns)  # a place may be chosen twice
        return image


def _add(left: LinearOperator, right: Any, *, sign: int = 1) -> LinearOperator:
    """left ± right."""
    if not isinstance(right, LinearOperator):
        raise TypeError(_what_to_add(left, right))
    _check_alike(left, right, "+" if sign > 0 else "−")
    if left.shape != right.shape:
        raise ValueError(f"{left!r} and {right!r} have different shapes: their sum is undefined.")
    if isinstance(left, DiagonalOperator) and isinstance(right, DiagonalOperator):
        return DiagonalOperator(left.diagonal + sign * right.diagonal)
    return Sum([*_members(left, Sum), *_members(right if sign > 0 else _scale(right, -1.0), Sum)])


def _scale(original: LinearOperator, factor: Any, *, divide: bool = False) -> LinearOperator:
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


def _product(left: LinearOperator, right: LinearOperator) -> LinearOperator:
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
    return Product([*_members(left, Product), *_members(right, Product)])


def _members(op: LinearOperator, kind: type[_Combination]) -> Sequence[LinearOperator]:
    return op.members if isinstance(op, kind) else (op,)


def _transposes(left: LinearOperator, right: LinearOperator) -> bool:
    """Whether left = rightᵀ, as far as can be told without products."""
    if left is right:
        return left.tags.symmetric
    return (isinstance(left, Transpose) and left.original is right) or (
        isinstance(right, Transpose) and right.original is left
    )


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


# --- rows and columns ----------------------------------------------------------------------


def is_index(selector: Any) -> bool:
    """Whether a selector speaks of positions: numbers, ranges, slices, arrays, masks."""
    if isinstance(selector, (int, np.integer, np.ndarray, Tensor, range)):
        return True
    if isinstance(selector, slice):
        return selector != slice(None)
    return isinstance(selector, Sequence) and any(
        isinstance(item, (int, float, np.number, np.bool_)) for item in selector
    )


def places_of(selector: Any, size: int) -> Tensor:
    """Positions (k,) int64 among ``size`` that an index picks; negative ones count from the end."""
    if isinstance(selector, slice):
        return _some(torch.arange(size, device="cpu")[_forward(selector)], selector)
    if isinstance(selector, range):
        selector = list(selector)
    try:
        places = torch.as_tensor(selector, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"rows and columns are chosen by whole numbers, ranges, slices or masks, got "
            f"{selector!r}."
        ) from error
    if places.ndim > 1:
        raise IndexError(f"an index has one axis, got the shape {tuple(places.shape)}.")
    if places.dtype == torch.bool:
        if places.shape != (size,):
            raise IndexError(f"a mask has one entry for each of {size}, got {tuple(places.shape)}.")
        return _some(torch.nonzero(places).squeeze(1), "a mask of zeros")
    if places.numel() and (places.is_floating_point() or places.is_complex()):
        raise TypeError(f"indices are whole numbers, got {places.dtype}.")
    places = _some(places.reshape(-1).to(torch.int64), selector)
    low, high = int(places.min()), int(places.max())
    if low < -size or high >= size:
        raise IndexError(f"index {low if low < -size else high} is outside of {size} entries.")
    return torch.where(places < 0, places + size, places)


def _forward(selector: slice) -> slice:
    if selector.step is not None and selector.step < 0:
        raise IndexError(f"a slice goes forward, got the step {selector.step}: give a range.")
    return selector


def _some(places: Tensor, selector: Any) -> Tensor:
    if not len(places):
        raise IndexError(f"{selector!r} selects nothing.")
    return places
