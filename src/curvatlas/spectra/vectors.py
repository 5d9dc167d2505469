r"""The vectors that an estimator works with: whole, or this process's entries of each of them.

Where the weights of a model are spread (FSDP2) so are the vectors its operators multiply: a process
that cannot hold the weights cannot hold a vector of their length either. An estimator's formulas
are the same in both cases if they are made of products A V, combinations V C, which every process
computes of its own entries, and inner products

    Uᵀ V = Σ_p U_pᵀ V_p,      U_p (n_p, j): the rows of process p,

of which each process adds its term and one small reduction brings the sum to all. What they decide
by it they decide alike. Random vectors are the same numbers however many processes share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from curvatlas.linear_operator import LinearOperator
from curvatlas.parallel import Range, Shards

_STREAM = 2**16  # entries of a random vector that share a stream
_DRAWN = 2**20  # numbers of a common sequence that are drawn at a time


class VectorSpace:
    """Vectors of length ``size`` as columns (length, K): all of their entries, or this process's.

    Without ``shards`` every method is the plain formula, and nothing is sent.
    """

    def __init__(
        self,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shards: Shards | None = None,
    ) -> None:
        self.size, self.dtype, self.device, self.shards = size, dtype, device, shards
        self.length = size if shards is None else shards.length

    @classmethod
    def of(cls, op: LinearOperator, *, shard: bool | None = None) -> VectorSpace:
        """The vectors that a square ``op`` multiplies.

        shard: as the option of estimators. None: spread where the operator's weights are; True:
        over all processes in any case; False: whole in each.
        """
        shards = None if shard is False else op.shards
        if shard and shards is None:
            shards = Shards.of(op.shape[1])
        return cls(op.shape[1], dtype=op.dtype, device=op.device, shards=shards)

    @property
    def longest(self) -> int:
        """Entries of the process that has most of them: what memory is planned by."""
        return self.size if self.shards is None else self.shards.largest

    # --- between whole vectors and parts ----------------------------------------------------------

    def take(self, whole: Tensor) -> Tensor:
        """This process's rows of whole vectors (size,) or (size, K)."""
        return whole if self.shards is None else self.shards.take(whole)

    def whole(self, part: Tensor) -> Tensor:
        """The whole vectors of parts (length,) or (length, K), gathered; all processes join in."""
        if self.shards is None:
            return part
        if part.ndim == 1:
            return self.shards.gathered(part)
        if not part.shape[1]:
            return part.new_empty(self.size, 0)
        return torch.stack([self.shards.gathered(column) for column in part.T.contiguous()], 1)

    def places(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """(which of the entries ``indices`` (k,) of a whole vector are here, their places here)."""
        if self.shards is None:
            return torch.ones_like(indices, dtype=torch.bool), indices
        starts, stops = torch.tensor(self.shards.own, dtype=torch.int64, device="cpu").T
        before = (stops - starts).cumsum(0) - (stops - starts)
        piece = torch.bucketize(indices, starts.contiguous(), right=True) - 1
        here = (piece >= 0) & (indices < stops[piece])
        piece = piece[here]
        return here, indices[here] - starts[piece] + before[piece]

    def times(self, op: LinearOperator, columns: Tensor) -> Tensor:
        """A V of vectors (length,) or columns (length, K), in the same form."""
        if self.shards is None:
            image: Tensor = op @ columns
            return image
        if columns.ndim == 1:
            return op.sharded_matvec(columns, self.shards)
        if self.shards is op.shards:
            return op.sharded_columns(columns)
        return torch.stack([op.sharded_matvec(c, self.shards) for c in columns.T.contiguous()], 1)

    # --- sums over the entries --------------------------------------------------------------------

    def summed(self, values: Tensor) -> Tensor:
        """Σ over processes of what each made of its entries; ``values`` may be written over."""
        return values if self.shards is None else self.shards.summed(values.contiguous())

    def together(self, *values: Tensor) -> Sequence[Tensor]:
        """``summed`` of several tensors in one reduction, each in its own precision."""
        if self.shards is None:
            return values
        wide = torch.float64 if any(v.dtype == torch.float64 for v in values) else self.dtype
        total = self.shards.summed(torch.cat([value.reshape(-1).to(wide) for value in values]))
        pieces = torch.split(total, [value.numel() for value in values])
        return [p.view(v.shape).to(v.dtype) for p, v in zip(pieces, values, strict=True)]

    def norms(self, columns: Tensor, *, dim: int = 0) -> Tensor:
        """‖·‖ over the entries, which lie along ``dim``."""
        norms: Tensor = torch.linalg.vector_norm(columns, dim=dim)
        return norms if self.shards is None else self.summed(norms.square()).sqrt()

    def norm(self, vector: Tensor) -> Tensor:
        """‖vector‖, a scalar tensor."""
        norm: Tensor = torch.linalg.vector_norm(vector)
        return norm if self.shards is None else self.summed(norm.square()).sqrt()

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ left · right, a scalar tensor."""
        return self.summed(torch.dot(left, right))

    def dots(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ_i left_ij right_ij, (K,)."""
        return self.summed((left * right).sum(0))

    def finite(self, columns: Tensor) -> bool:
        """Whether all entries are finite, in every process."""
        finite = torch.isfinite(columns).all()
        if self.shards is None:
            return bool(finite)
        return not bool(self.summed((~finite).to(self.dtype)))

    # --- random vectors ---------------------------------------------------------------------------

    def direction(self, random: torch.Generator) -> Tensor:
        """A normal vector (length,), the same over any number of processes.

        One number of ``random`` chooses the vector, and every _STREAM entries of it have a stream
        of their own: a process draws those that its part lies in, never all n.
        """
        key = int(torch.randint(2**62, (), generator=random, device="cpu"))
        row = torch.empty(self.length, dtype=torch.float64, device="cpu")
        at, begin, drawn = 0, -1, np.empty(0)
        for first, end in self._own:
            while first < end:
                if begin != first // _STREAM * _STREAM:
                    begin = first // _STREAM * _STREAM
                    stream = np.random.Generator(np.random.Philox(key=[key, begin // _STREAM]))
                    drawn = stream.standard_normal(min(_STREAM, self.size - begin))
                last = min(end, begin + _STREAM)
                row[at : at + last - first] = torch.from_numpy(drawn[first - begin : last - begin])
                at, first = at + last - first, last
        return row.to(dtype=self.dtype).to(self.device)

    def normal(
        self, count: int, random: torch.Generator, *, precision: torch.dtype = torch.float64
    ) -> Tensor:
        """Normal columns (length, count), drawn as ``torch.randn(size, count)`` draws them all.

        precision: that they are drawn in.
        """

        def draw(rows: int) -> Tensor:
            return torch.randn(rows, count, generator=random, dtype=precision, device="cpu")

        def skip(rows: int) -> None:
            # A uniform number takes as much of the generator as a normal one, at a quarter of its
            # time (4.3 against 18 ns of a core).
            torch.empty(rows, count, dtype=precision, device="cpu").uniform_(generator=random)

        return self._own_rows(draw, skip, self.dtype).to(self.device)

    def signs(self, count: int, random: torch.Generator) -> Tensor:
        """±1 with equal chance, (length, count), drawn as whole columns (size, count) would be."""

        def draw(rows: int) -> Tensor:
            shape = rows, count
            return torch.randint(0, 2, shape, generator=random, dtype=torch.int8, device="cpu")

        signs = self._own_rows(draw, draw, torch.int8)
        return (2 * signs - 1).to(device=self.device, dtype=self.dtype)

    @property
    def _own(self) -> tuple[Range, ...]:
        return ((0, self.size),) if self.shards is None else self.shards.own

    def _own_rows(
        self, draw: Callable[[int], Tensor], skip: Callable[[int], object], dtype: torch.dtype
    ) -> Tensor:
        """This process's rows of the ``size`` that ``draw`` would give at once, a block at a time.

        The generator ends where it would after drawing all of them, in every process. Rounded to
        ``dtype`` block by block: all columns in the precision of the draw would be twice as large.
        """
        columns = draw(0).shape[1]
        part = torch.empty(self.length, columns, dtype=dtype, device="cpu")
        at = 0
        for begin, end, last in _blocks(self.size, columns):
            here = [(max(a, begin), min(b, end)) for a, b in self._own if a < end and b > begin]
            # torch draws normal numbers in groups of 16, and the last ones of an odd number anew:
            # the last block takes what they take of the generator only if it is drawn.
            if not (here or last):
                skip(end - begin)
                continue
            block = draw(end - begin)
            for a, b in here:
                part[at : at + b - a] = block[a - begin : b - begin]
                at += b - a
        return part


def _blocks(rows: int, columns: int) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, whether it is the last) of whole groups of 16, the last one the longest."""
    step = max(_DRAWN // max(columns, 1) // 16, 1) * 16
    count = max(rows // step, 1)
    for i in range(count):
        last = i == count - 1
        yield i * step, rows if last else (i + 1) * step, last
