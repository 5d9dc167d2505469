"""The rows of a Krylov basis: where they lie, in what precision, and the sums over them.

Plain rows are one tensor. ``storage`` keeps them in fewer bits (bfloat16: half of float32) while
every sum is computed in the operator's precision, a band of columns at a time. ``shards`` gives
every process its own columns of every row; sums over a row then end in one small reduction.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from curvatlas import parallel
from curvatlas.operators.base import LinearOperator

_BAND = 2**24  # entries of the rows that are converted together
_DRAWN = 2**16  # entries of a random vector that share a stream


class Rows:
    """(capacity, n) in ``storage`` precision; vectors in and out are in ``dtype``, (n_local,)."""

    def __init__(
        self,
        capacity: int,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        storage: torch.dtype | None = None,
        shards: parallel.Shards | None = None,
    ) -> None:
        self.dtype, self.shards = dtype, shards
        self.length = size if shards is None else shards.length
        self.packed = storage is not None and storage != dtype
        # Untouched pages are not committed: the whole capacity costs nothing until it is used.
        self.tensor = torch.empty(capacity, self.length, dtype=storage or dtype, device=device)

    def row(self, i: int) -> Tensor:
        """Row i in ``dtype``; a view where it is stored so."""
        return self.tensor[i].to(self.dtype)

    def put(self, i: int, row: Tensor) -> float:
        """Store a row; returns the norm of what its rounding took away."""
        self.tensor[i] = row
        if not self.packed:
            return 0.0
        return float(self.norm(row - self.row(i)))

    def take(self, vector: Tensor) -> Tensor:
        """This process's part of a full vector (n,), a copy here and in ``dtype``."""
        if self.shards is not None:
            vector = vector[self.shards.start : self.shards.stop]
        return vector.to(device=self.tensor.device, dtype=self.dtype).clone()

    def random(self, random: torch.Generator) -> Tensor:
        """This process's part of a normal vector (n,), the same vector over any number of them.

        One number of ``random`` chooses the vector, and every _DRAWN entries of it have a stream
        of their own: a process draws those that its part lies in, never all n.
        """
        key = int(torch.randint(2**62, (), generator=random, device="cpu"))
        first = 0 if self.shards is None else self.shards.start
        end = first + self.length
        row = torch.empty(self.length, dtype=torch.float64, device="cpu")
        for begin in range(first // _DRAWN * _DRAWN, end, _DRAWN):
            stream = np.random.Generator(np.random.Philox(key=[key, begin // _DRAWN]))
            drawn = stream.standard_normal(min(_DRAWN, end - begin))
            low = max(begin, first)
            row[low - first : begin + len(drawn) - first] = torch.from_numpy(drawn[low - begin :])
        return row.to(dtype=self.dtype).to(self.tensor.device)

    def image(self, op: LinearOperator, i: int) -> Tensor:
        """op · row i, as this process's part."""
        row = self.row(i).to(op.device)
        if self.shards is None:
            return (op @ row).to(self.tensor.device)  # type: ignore[no-any-return]
        return parallel.sharded_product(op, row, self.shards).to(self.tensor.device)

    # --- sums over a row -------------------------------------------------------------------------

    def _summed(self, values: Tensor) -> Tensor:
        return values if self.shards is None else parallel.add_over_processes(values)

    def norm(self, vector: Tensor) -> Tensor:
        """‖vector‖ over all processes, a scalar tensor."""
        if self.shards is None:
            whole: Tensor = torch.linalg.vector_norm(vector)
            return whole
        return self._summed(torch.linalg.vector_norm(vector).square()).sqrt()

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ left · right over all processes, a scalar tensor."""
        return self._summed(torch.dot(left, right))

    def _bands(self, count: int) -> list[slice]:
        step = max(1, _BAND // max(count, 1))
        return [slice(left, left + step) for left in range(0, self.length, step)]

    def coordinates(self, vector: Tensor, count: int) -> Tensor:
        """B · vector for the first ``count`` rows."""
        if not self.packed:
            return self._summed(self.tensor[:count] @ vector)
        found = torch.zeros(count, dtype=self.dtype, device=vector.device)
        for band in self._bands(count):
            found.addmv_(self.tensor[:count, band].to(self.dtype), vector[band])
        return self._summed(found)

    def subtract(self, vector: Tensor, weights: Tensor, which: Tensor | None = None) -> None:
        """vector −= Σ weights_i row_i in place, over the first rows or those named."""
        count = len(weights)
        if not self.packed:
            rows = self.tensor[:count] if which is None else self.tensor[which]
            vector.addmv_(rows.T, weights, alpha=-1)
            return
        for band in self._bands(count):
            rows = self.tensor[:count, band] if which is None else self.tensor[which, band]
            vector[band].addmv_(rows.to(self.dtype).T, weights, alpha=-1)

    def project_out(self, vector: Tensor, count: int) -> Tensor:
        """vector ← (I − BᵀB) vector in place; returns the coefficients B·vector."""
        found = self.coordinates(vector, count)
        self.subtract(vector, found)
        return found

    # --- combinations ----------------------------------------------------------------------------

    def combined(self, weights: Tensor) -> Tensor:
        """Combinations of the first rows as columns: weights (m, k) → (n_local, k)."""
        count = weights.shape[0]
        if not self.packed:
            return self.tensor[:count].T @ weights
        result = torch.empty(self.length, weights.shape[1], dtype=self.dtype, device="cpu")
        for band in self._bands(count):
            result[band] = self.tensor[:count, band].to(self.dtype).T @ weights
        return result

    def rotate(self, which: slice, rotation: NDArray[np.float64]) -> NDArray[np.float64]:
        """rows ← rotationᵀ rows, a band of columns at a time so that no second basis is needed.

        Returns the norms of what rounding took from the new rows.
        """
        turn = torch.as_tensor(rotation.T.copy(), dtype=self.dtype, device=self.tensor.device)
        start = which.start
        lost = torch.zeros(turn.shape[0], dtype=self.dtype, device=self.tensor.device)
        for band in self._bands(which.stop - which.start):
            part = self.tensor[:, band]
            turned = turn @ part[which].to(self.dtype)
            into = part[start : start + turn.shape[0]]
            into.copy_(turned)
            if self.packed:
                lost += (turned - into.to(self.dtype)).square().sum(1)
        if not self.packed:
            return np.zeros(turn.shape[0])
        return self._summed(lost).sqrt().cpu().double().numpy()
