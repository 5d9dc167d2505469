"""Linear operators: a shape, tags, and a product with columns; blocks of them by role or index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor

from curvatlas.anatomy import Slice
from curvatlas.budget import available_bytes, readable
from curvatlas.parallel import Shards

if TYPE_CHECKING:
    from curvatlas.operators.curvature import CurvatureOperator
    from curvatlas.problem import Problem
    from curvatlas.problem.parameters import Layout

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
    are operators again (``operators/algebra.py``); nothing is multiplied before a product is taken.
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

    def __matmul__(self, right: Any) -> Any:
        """``op @ v`` for (n,) or (n, K) tensors, NumPy arrays alike; ``A @ B`` for an operator.

        Operators of a Problem also take one tensor a parameter, as a list, a tuple or a mapping by
        name, each in the parameter's shape or with a last axis of K columns, and give the same.
        """
        if isinstance(right, LinearOperator):
            from curvatlas.operators import algebra

            return algebra.product(self, right)
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
        return product[shards.start : shards.stop].clone()

    def matvec(self, vector: Tensor) -> Tensor:
        """The same as ``op @ vector``."""
        result: Tensor = self @ vector
        return result

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
        from curvatlas.operators import algebra

        return algebra.add(self, other)

    def __radd__(self, other: Any) -> LinearOperator:
        if isinstance(other, int) and other == 0:
            return self  # the start of sum([...])
        from curvatlas.operators import algebra

        return algebra.add(self, other)

    def __sub__(self, other: Any) -> LinearOperator:
        from curvatlas.operators import algebra

        return algebra.add(self, other, sign=-1)

    def __rsub__(self, other: Any) -> LinearOperator:
        from curvatlas.operators import algebra

        return algebra.add(self, other)  # says what is wrong

    def __neg__(self) -> LinearOperator:
        from curvatlas.operators import algebra

        return algebra.scale(self, -1.0)

    def __mul__(self, factor: Any) -> LinearOperator:
        from curvatlas.operators import algebra

        return algebra.scale(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> LinearOperator:
        from curvatlas.operators import algebra

        return algebra.scale(self, divisor, divide=True)

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

        return torch.cat([piece.indices for piece in pieces_of(problem, selector)])

    def _submatrix(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        from curvatlas.operators import algebra

        return algebra.Submatrix(self, rows, columns)

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


@dataclass(frozen=True, eq=False)
class Entries:
    """Some entries of one parameter by their positions in the flat vector, in any order."""

    parameter: str
    indices: Tensor  # (size,) int64

    @property
    def size(self) -> int:
        return len(self.indices)

    @property
    def name(self) -> str:
        return f"{self.size} of {self.parameter}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entries) and torch.equal(self.indices, other.indices)

    def __hash__(self) -> int:
        return hash((self.parameter, self.size))


def entries(places: Tensor, layout: Layout) -> tuple[Entries, ...]:
    """Positions in the flat vector (k,), cut wherever the parameter changes."""
    ends = torch.tensor(layout.starts[1:], dtype=torch.int64, device="cpu")
    owner = torch.bucketize(places.contiguous(), ends, right=True)
    cuts = (torch.nonzero(owner[1:] != owner[:-1]).squeeze(1) + 1).tolist()
    pieces = torch.tensor_split(places, cuts)
    return tuple(
        Entries(layout.names[int(owner[start])], piece)
        for start, piece in zip([0, *cuts], pieces, strict=True)
    )


Piece = Slice | Entries


def pieces_of(problem: Problem, selector: Any) -> tuple[Piece, ...]:
    """What a selector picks of the flat vector: a name, role or glob, a Slice, a list of these,
    ``:``, or an index."""
    if is_index(selector):
        return entries(places_of(selector, problem.size), problem.layout)
    if isinstance(selector, slice):
        return tuple(problem.anatomy.slices)
    if isinstance(selector, Slice):
        return (selector,)
    if isinstance(selector, str):
        return tuple(problem.anatomy.select(selector))
    pieces = dict.fromkeys(piece for item in selector for piece in pieces_of(problem, item))
    if not pieces:
        raise KeyError("an empty list selects no rows or columns.")
    return tuple(pieces)


class BlockView(LinearOperator):
    """op[rows, columns]: columns enter only their own parameters, rows are read off directly."""

    def __init__(
        self, parent: CurvatureOperator, rows: Sequence[Piece], columns: Sequence[Piece]
    ) -> None:
        self.row_slices, self.column_slices = tuple(rows), tuple(columns)
        self._rows, self._cols = _Part(parent, rows), _Part(parent, columns)
        same = self.row_slices == self.column_slices
        super().__init__(
            (self._rows.size, self._cols.size),
            dtype=parent.dtype,
            device=parent.device,
            tags=parent.tags if same else Tags(),
        )
        self.parent = parent

    def content(self) -> Any:
        places = [piece.indices for piece in (*self.row_slices, *self.column_slices)]
        return ["view", len(self.row_slices), places, self.parent.content()]

    def _columns(self, columns: Tensor) -> Tensor:
        return self._product(self._rows, self._cols, columns)

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self._product(self._cols, self._rows, columns)

    def _product(self, rows: _Part, cols: _Part, columns: Tensor) -> Tensor:
        self.parent.products += columns.shape[1]
        full = self.parent.restricted(cols.scatter(columns), rows.names)  # (K, Σ sizes)
        return rows.gather(full).T

    @property
    def row_parameters(self) -> list[str]:
        """Names of the parameters that hold the rows, in the problem's order."""
        return self._rows.names

    def rows_of(self, flat: Tensor) -> Tensor:
        """A vector over ``row_parameters`` (Σ sizes,) → its entries at the rows (m,)."""
        return self._rows.gather(flat.unsqueeze(0)).squeeze(0)

    def _submatrix(self, rows: Tensor, columns: Tensor) -> LinearOperator:
        inner = [torch.cat([p.indices for p in s]) for s in (self.row_slices, self.column_slices)]
        return self.parent[inner[0][rows], inner[1][columns]]

    def per_batch(self) -> list[tuple[float, LinearOperator]]:
        """(share of the valid targets, this block of that batch alone) for every batch."""
        return [
            (share, BlockView(operator, self.row_slices, self.column_slices))
            for share, operator in self.parent.per_batch()
        ]

    def __repr__(self) -> str:
        rows = ", ".join(piece.name for piece in self.row_slices[:3])
        cols = ", ".join(piece.name for piece in self.column_slices[:3])
        return f"{type(self.parent).__name__}[{rows} × {cols}]({self.shape[0]} × {self.shape[1]})"


class _Part:
    """Slices in the order asked for, as places in the parameters that contain them."""

    def __init__(self, parent: CurvatureOperator, slices: Sequence[Piece]) -> None:
        layout = parent.problem.layout
        wanted = {piece.parameter for piece in slices}
        self.names = [name for name in layout.names if name in wanted]
        self._shapes = dict(zip(layout.names, layout.shapes, strict=True))
        sizes = dict(zip(layout.names, layout.sizes, strict=True))
        flat_start = dict(zip(layout.names, layout.starts, strict=True))
        local_start, offset = {}, 0
        for name in self.names:
            local_start[name] = offset
            offset += sizes[name]
        self._sizes = [sizes[name] for name in self.names]
        self._total = offset
        self.size = sum(piece.size for piece in slices)
        whole = [p.parameter for p in slices] == self.names and self.size == offset
        whole = whole and all(isinstance(piece, Slice) for piece in slices)  # others: any order
        # Positions of the wanted entries among the concatenated parameters; None: all, in order.
        self._places: Tensor | None = None
        if not whole:
            parts = [p.indices - flat_start[p.parameter] + local_start[p.parameter] for p in slices]
            self._places = torch.cat(parts).to(parent.device)

    def scatter(self, columns: Tensor) -> dict[str, Tensor]:
        """(size, K) → parameter name → (K, *shape), zero outside the slices."""
        rows = columns.T  # (K, size)
        if self._places is not None:
            full = rows.new_zeros(rows.shape[0], self._total)
            rows = full.index_add_(1, self._places, rows)  # an entry may be asked for twice
        pieces = torch.split(rows, self._sizes, dim=1)
        return {
            name: piece.reshape(-1, *self._shapes[name])
            for name, piece in zip(self.names, pieces, strict=True)
        }

    def gather(self, rows: Tensor) -> Tensor:
        """(K, Σ parameter sizes) → (K, size)."""
        return rows if self._places is None else rows.index_select(1, self._places)
