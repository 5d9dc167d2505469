"""``op[rows, columns]``: rectangular blocks of an operator of a Problem, computed without the rest.

Columns enter only the parameters that hold them, and only the rows' parameters are differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvatlas.anatomy import Slice
from curvatlas.linear_operator import LinearOperator, Tags, is_index, places_of

if TYPE_CHECKING:
    from curvatlas.operators.curvature import CurvatureOperator
    from curvatlas.problem import Problem
    from curvatlas.problem.parameters import Layout


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

    def _beneath(self) -> Sequence[LinearOperator]:
        return (self.parent,)

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
        self.size: int = sum(piece.size for piece in slices)
        in_order = all(isinstance(piece, Slice) for piece in slices)  # others: in any order
        in_order = in_order and [p.parameter for p in slices] == self.names
        # Positions of the wanted entries among the concatenated parameters; None: all, in order.
        self._places: Tensor | None = None
        if not (in_order and self.size == offset):
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
