"""An orthonormal basis that grows by products and knows the operator's action on itself.

The rows b_1 … b_R of the basis are orthonormal; the first M of them have been multiplied:

    A b_j = Σ_i C[i, j] b_i      for j ≤ M                    (1)

holds to rounding, because every coefficient that orthogonalisation removes is kept in C, not only
the two of the Lanczos recurrence. So the residual of a Ritz pair is known without another product,
whatever the rounding did to the recurrence, and C's asymmetry shows an operator that is not
symmetric. One row pending (R = M + 1) is Lanczos; several are band Lanczos; keeping Ritz vectors is
the thick restart. On a device the host would have to wait for C after every product: there
``advance`` takes several, and C is read once for all of them.

Lanczos 1950; Daniel, Gragg, Kaufman and Stewart 1976 (when to orthogonalise twice); Ruhe 1979
(band); Wu and Simon 2000 (thick restart).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from curvatlas import parallel
from curvatlas.linear_operator import LinearOperator
from curvatlas.parallel import Shards
from curvatlas.progress import bar
from curvatlas.spectra.requirements import not_finite
from curvatlas.spectra.vectors import VectorSpace

Array = NDArray[np.float64]

_BAND = 2**24  # entries of the rows that are converted together
_STRIDE = 8  # products on a device between two looks of the host


def stride(device: torch.device) -> int:
    """After how many products an iteration looks at its numbers: in main memory after each."""
    return 1 if device.type == "cpu" else _STRIDE


class Rows:
    """(capacity, n) in ``storage`` precision; vectors in and out are in ``dtype``, (n_local,).

    ``storage`` keeps the rows in fewer bits (bfloat16: half of float32) while every sum is computed
    in the operator's precision, a band of columns at a time. ``shards`` gives every process its own
    columns of every row; sums over a row then end in one small reduction.
    """

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
        self.space = VectorSpace(size, dtype=dtype, device=device, shards=shards)
        self.dtype, self.shards, self.length = dtype, shards, self.space.length
        self.packed = storage is not None and storage != dtype
        # Untouched pages are not committed: the whole capacity costs nothing until it is used.
        self.tensor = torch.empty(capacity, self.length, dtype=storage or dtype, device=device)

    def row(self, i: int) -> Tensor:
        """Row i in ``dtype``; a view where it is stored so."""
        return self.tensor[i].to(self.dtype)

    def put(self, i: int, row: Tensor) -> Tensor | None:
        """Store a row; returns the norm of what its rounding took away, None: nothing."""
        self.tensor[i] = row
        return self.norm(row - self.row(i)) if self.packed else None

    def take(self, vector: Tensor) -> Tensor:
        """This process's part of a full vector (n,), a copy here and in ``dtype``."""
        vector = self.space.take(vector)
        return vector.to(device=self.tensor.device, dtype=self.dtype).clone()

    def random(self, random: torch.Generator) -> Tensor:
        """This process's part of a normal vector (n,), the same vector over any number of them."""
        return self.space.direction(random)

    def image(self, op: LinearOperator, i: int) -> Tensor:
        """op · row i, as this process's part."""
        return self.space.times(op, self.row(i).to(op.device)).to(self.tensor.device)

    def images(self, op: LinearOperator, which: slice) -> list[Tensor]:
        """op · rows, as this process's parts; one call of the operator where rows are whole."""
        if self.shards is not None:
            return [self.image(op, i) for i in range(which.start, which.stop)]
        rows = self.tensor[which].to(device=op.device, dtype=self.dtype)
        return list((op @ rows.T).T.contiguous().to(self.tensor.device))

    # --- sums over a row -------------------------------------------------------------------------

    def norm(self, vector: Tensor) -> Tensor:
        """‖vector‖ over all processes, a scalar tensor."""
        return self.space.norm(vector)

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        """Σ left · right over all processes, a scalar tensor."""
        return self.space.dot(left, right)

    def _bands(self, count: int) -> list[slice]:
        step = max(1, _BAND // max(count, 1))
        return [slice(left, left + step) for left in range(0, self.length, step)]

    def coordinates(self, vector: Tensor, count: int) -> Tensor:
        """B · vector for the first ``count`` rows."""
        if not self.packed:
            return self.space.summed(self.tensor[:count] @ vector)
        inner = torch.zeros(count, dtype=self.dtype, device=vector.device)
        for band in self._bands(count):
            inner.addmv_(self.tensor[:count, band].to(self.dtype), vector[band])
        return self.space.summed(inner)

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
        inner = self.coordinates(vector, count)
        self.subtract(vector, inner)
        return inner

    # --- combinations ----------------------------------------------------------------------------

    def combined(self, weights: Tensor) -> Tensor:
        """Combinations of the first rows as columns: weights (m, k) → (n_local, k)."""
        count = weights.shape[0]
        if not self.packed:
            return self.tensor[:count].T @ weights
        shape = self.length, weights.shape[1]
        result = torch.empty(shape, dtype=self.dtype, device=self.tensor.device)
        for band in self._bands(count):
            result[band] = self.tensor[:count, band].to(self.dtype).T @ weights
        return result

    def rotate(self, which: slice, rotation: Array) -> Array:
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
        return self.space.summed(lost).sqrt().cpu().double().numpy()


@dataclass(frozen=True)
class RitzPairs:
    """Eigenpairs of the operator restricted to the multiplied rows."""

    values: Array  # (M,) ascending
    coordinates: Array  # (M, M) columns in the basis
    residuals: Array  # (M,) ‖A y − θ y‖
    pending: Array  # (R − M, M) the residuals' coordinates on the pending rows


class KrylovBasis:
    """Rows (R, n) and coefficients C of (1)."""

    def __init__(
        self,
        op: LinearOperator,
        capacity: int,
        device: torch.device | None = None,
        *,
        storage: torch.dtype | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.op = op
        self.size = op.shape[1]
        self.store = Rows(
            capacity,
            self.size,
            dtype=op.dtype,
            device=device or op.device,
            storage=storage,
            shards=shards,
        )
        self.coefficients: Array = np.zeros((0, 0))
        self.count = 0
        self.multiplied = 0
        self.products = 0
        self.rewrites = 0  # moves before rows that are part of a state are written over
        self.scale = 0.0  # largest ‖A b‖ seen, a lower bound of ‖A‖
        self.start_asymmetry: float | None = None  # as the start showed it until a restart
        self.eps = torch.finfo(op.dtype).eps
        # How far (1) is off in column j: rows are rounded when they are stored in fewer bits.
        self.drift: Array = np.zeros(0)
        self._make_room(1)

    def _make_room(self, rows: int) -> None:
        """Room for the coefficients of that many rows; most runs need few of all there might be."""
        before = len(self.drift)
        if rows > before:
            more = min(max(rows, 2 * before, 64), max(self.capacity, rows)) - before
            self.coefficients = np.pad(self.coefficients, ((0, more), (0, more)))
            self.drift = np.pad(self.drift, (0, more))

    @property
    def rows(self) -> Tensor:
        """The rows as they are stored, (capacity, n)."""
        return self.store.tensor

    @property
    def capacity(self) -> int:
        return self.store.tensor.shape[0]

    @property
    def pending(self) -> int:
        return self.count - self.multiplied

    def add(self, vector: Tensor) -> bool:
        """Append a new direction; False if it lies in the span already."""
        return self._append(self.store.take(vector))

    def add_random(self, random: torch.Generator) -> bool:
        """Append a direction drawn uniformly from the complement of the span."""
        return self._append(self.store.random(random))

    def _append(self, row: Tensor) -> bool:
        norm = before = float(self.store.norm(row))
        if not np.isfinite(before):
            raise ValueError("a start vector contains NaN or infinity.")
        if before == 0.0 or self.count >= min(self.size, self.capacity):
            return False
        row /= before
        for _ in range(3):
            self.store.project_out(row, self.count)
            after = float(self.store.norm(row))
            if after < 100 * self.eps * self.size**0.5:
                return False
            row /= after
            norm = after
            if norm > 0.7:
                break
        self._make_room(self.count + 2)  # β of the last one lies below the diagonal
        self.store.put(self.count, row)
        self.count += 1
        return True

    def expand(self, index: int | None = None) -> float:
        """Multiply one pending row (the first, or ``index``); returns the norm of what is new."""
        j = self.multiplied
        image = self.store.image(self.op, j if index is None else index)
        # Nothing is changed before the product has succeeded: an interrupted state stays valid.
        if index is not None and index != j:
            self._swap(index, j)
        return self._absorb(image)

    def expand_together(self, count: int) -> None:
        """Multiply the first ``count`` pending rows in one call: columns share what they can."""
        for image in self.store.images(self.op, slice(self.multiplied, self.multiplied + count)):
            self._absorb(image)

    @property
    def stride(self) -> int:
        """How many products ``advance`` should be asked for at least."""
        return 1 if self.store.shards is not None else stride(self.rows.device)

    def advance(self, steps: int, *, newest: bool = False) -> list[float]:
        """Up to ``steps`` products of plain Lanczos; returns the norm of what each of them added.

        In main memory, and where several rows are pending, it is one product (``expand``). On a
        device all numbers of C stay there until the last product is made. A space that turns out
        to be invariant goes on with rows of zeros, which are dropped when C is read: at most
        ``steps`` − 1 products too many. newest: follow the last of several pending rows.
        """
        if self.stride == 1 or not (newest or self.pending == 1):
            return [self.expand(self.count - 1 if newest else None)]
        start = self.count
        steps = max(1, min(steps, self.capacity - start, self.size - self.multiplied))
        scale = torch.full((), self.scale, dtype=self.op.dtype, device=self.rows.device)
        unread: list[Tensor] = []
        try:
            for step in range(steps):
                j, last = self.multiplied + step, start + step - 1
                image = self.store.image(self.op, last)
                self._swap_rows(j, last)  # the same row where it is the only one pending
                scale = torch.maximum(scale, self.store.norm(image))
                unread.append(self._absorb_unread(image, last + 1, scale))
        finally:
            added = self._read(unread)
        return added

    def _absorb_unread(self, image: Tensor, count: int, scale: Tensor) -> Tensor:
        """The image's coefficients (count,), what is new as row ``count``, and what it lost.

        Without C at hand the image is orthogonalised twice, in full. Returns the coefficients, the
        norm of what is new, what its rounding took away, and the largest norm so far.
        """
        inner = self.store.project_out(image, count)
        inner = inner + self.store.project_out(image, count)
        after = self.store.norm(image)
        lasting = after > 16 * self.eps * scale
        lost = None
        if count < min(self.size, self.capacity):
            row = torch.where(lasting, image / torch.where(lasting, after, 1.0), 0.0)
            lost = self.store.put(count, row)
        missing = torch.zeros_like(after) if lost is None else lost
        return torch.cat([inner, torch.stack([after, missing, scale])])

    def _read(self, unread: list[Tensor]) -> list[float]:
        """Take in the steps that the host has not seen, up to the first that added nothing."""
        if not unread:
            return []
        numbers: list[float] = torch.cat(unread).tolist()  # the one synchronisation of all steps
        at, added = 0, list[float]()
        idle: list[tuple[int, int]] = []  # where rows of zeros were put
        for step in unread:
            j, count = self.multiplied, self.count
            inner = numbers[at : at + len(step) - 3]
            after, lost, scale = numbers[at + len(step) - 3 : at + len(step)]
            at += len(step)
            self.products += 1
            if not np.isfinite(after):
                self.op.confirm()
                raise FloatingPointError(
                    f"product {self.products} with the operator holds NaN or infinity, or its norm "
                    f"overflows {self.op.dtype}: check the loss and the parameters for NaN, or "
                    "compute in float64."
                )
            if added and added[-1] == 0.0:
                idle.append((j + len(idle), count + len(idle)))
                continue  # of a row of zeros
            if self.pending > 1:
                self.rewrites += 1
                self.coefficients[[j, count - 1]] = self.coefficients[[count - 1, j]]
            self._make_room(count + 2)
            self.coefficients[: len(inner), j] += inner
            self.scale = max(self.scale, scale)
            self.multiplied += 1
            if after <= 16 * self.eps * self.scale or count >= self.size:
                added.append(0.0)
                continue
            self.drift[j] += after * lost
            self.coefficients[count, j] = after
            self.count += 1
            added.append(after)
        for i, j in reversed(idle):
            self._swap_rows(i, j)
        return added

    def _absorb(self, image: Tensor) -> float:
        """Take in A b_j of the first pending row: its column of C, and what is new as a row."""
        j = self.multiplied
        self.products += 1
        row = self.store.row(j)
        before = self.store.norm(image)
        # By symmetry A b_j has the coefficient C[j, i] on every earlier b_i: remove those first,
        # then one pass over the whole basis finds only rounding and is as good as two.
        earlier = np.flatnonzero(self.coefficients[j, :j])
        by_symmetry = self.coefficients[j, earlier]
        alpha = self.store.dot(row, image)
        image = image - alpha * row
        if len(earlier) == 1:
            image.sub_(self.store.row(earlier[0]), alpha=float(by_symmetry[0]))
        elif len(earlier):
            weights = torch.as_tensor(by_symmetry, dtype=image.dtype, device=image.device)
            self.store.subtract(image, weights, torch.as_tensor(earlier, device="cpu"))
        local = self.store.norm(image)
        inner = self.store.project_out(image, self.count)
        after = self.store.norm(image)
        measured = torch.cat([inner, torch.stack([alpha, before, local, after])])
        numbers: list[float] = measured.tolist()  # the one synchronisation of a step
        removed, (alpha_, before_, local_, after_) = numbers[:-4], map(float, numbers[-4:])
        if not np.isfinite(after_):
            what = f"product {self.products} with the operator"
            raise not_finite(image, what, op=self.op, space=self.store.space)
        column = self.coefficients[:, j]
        column[: self.count] += removed
        column[earlier] += by_symmetry
        column[j] += alpha_
        if after_ < 0.7 * local_:
            column[: self.count] += self.store.project_out(image, self.count).cpu().numpy()
            after_ = float(self.store.norm(image))
        self.scale = max(self.scale, before_)
        self.multiplied += 1
        # Below this the remainder is rounding of the product itself: the space is invariant.
        if after_ <= 16 * self.eps * self.scale or self.count >= self.size:
            return 0.0
        self._make_room(self.count + 2)
        lost = self.store.put(self.count, image / after_)
        self.drift[j] += after_ * (0.0 if lost is None else float(lost))
        self.coefficients[self.count, j] = after_
        self.count += 1
        return after_

    def ritz(self) -> RitzPairs:
        """Rayleigh-Ritz on the multiplied rows, with residuals from (1): no products."""
        m, r = self.multiplied, self.count
        action = self.coefficients[:m, :m]
        values, coordinates = np.linalg.eigh((action + action.T) / 2)
        outside = self.coefficients[m:r, :m] @ coordinates
        return RitzPairs(values, coordinates, self.residuals(values, coordinates), outside)

    def residuals(self, values: Array, coordinates: Array) -> Array:
        """‖A y − θ y‖ (k,) of unit combinations y of the multiplied rows, from (1)."""
        m, r = self.multiplied, self.count
        image = self.coefficients[:r, :m] @ coordinates
        image[:m] -= coordinates * values
        # Roundings of different rows are unrelated: their squares add.
        rounded = np.sqrt((self.drift[:m, None] ** 2 * coordinates**2).sum(0))
        norms: Array = np.sqrt((image**2).sum(0)) + rounded
        return norms

    def asymmetry(self) -> float:
        """‖C − Cᵀ‖ / ‖C‖ on the multiplied rows: rounding for a symmetric operator.

        Rows that the operator sends to zero hold nothing but rounding of ‖A‖, which is no less than
        ``scale``.
        """
        action = self.coefficients[: self.multiplied, : self.multiplied]
        norm = max(float(np.linalg.norm(action)), self.scale)
        return float(np.linalg.norm(action - action.T)) / norm if norm else 0.0

    def asymmetry_of_start(self) -> float:
        """‖A − Aᵀ‖_F / ‖A‖_F as a random start b_1 shows it: its row of C against its column.

        A restart turns that row into one that is not random: what it has shown by then is kept.
        √n ‖A b_1‖ stands for ‖A‖_F, which is no less than ``scale``.
        """
        if self.start_asymmetry is not None:
            return self.start_asymmetry
        m = self.multiplied
        if m < 2:
            return 0.0
        apart = self.coefficients[0, 1:m] - self.coefficients[1:m, 0]
        whole = max(self.size**0.5 * float(np.linalg.norm(self.coefficients[:, 0])), self.scale)
        return self.size * float(np.sqrt((apart**2).mean())) / whole if whole else 0.0

    def multiplied_columns(self) -> tuple[Tensor, Tensor]:
        """The multiplied rows and their images by (1), as columns (n, M) each."""
        m, r = self.multiplied, self.count
        rows = self.rows[:r]
        action = torch.as_tensor(self.coefficients[:r, :m], dtype=rows.dtype, device=rows.device)
        return rows[:m].T, rows.T @ action

    def vectors(self, coordinates: Array) -> Tensor:
        """Combinations of the multiplied rows as columns (n, k) on the operator's device."""
        weights = torch.as_tensor(
            np.ascontiguousarray(coordinates), dtype=self.store.dtype, device=self.rows.device
        )
        return self.store.combined(weights).to(self.op.device)

    def final_vectors(self, coordinates: Array) -> Tensor:
        """``vectors``; a basis stored in fewer bits is turned into them and is one no more."""
        if not self.store.packed:
            return self.vectors(coordinates)
        # Two bases would not fit: the vectors stay in the stored precision, in the same memory.
        self.store.rotate(slice(0, self.multiplied), np.ascontiguousarray(coordinates))
        return self.rows[: coordinates.shape[1]].T

    def turn_pending(self, residuals: Array) -> Array:
        """Rotate the pending rows so that the first carries most of ``residuals`` (R − M, k).

        Returns how much each of them carries (singular values, descending).
        """
        rotation, carried, _ = np.linalg.svd(residuals, full_matrices=True)
        self.rewrites += 1
        m, r = self.multiplied, self.count
        lost = self.store.rotate(slice(m, r), rotation)
        self.coefficients[m:r, :m] = rotation.T @ self.coefficients[m:r, :m]
        if lost.any():
            self.drift[:m] += lost.max() * np.linalg.norm(self.coefficients[m:r, :m], axis=0)
        return carried

    def recurrence(self) -> tuple[Array, Array]:
        """α (M,) and β (M,) of a plain Lanczos run: the diagonal of C and the one below it."""
        m = self.multiplied
        below = np.diag(self.coefficients, -1)[:m]
        return np.diag(self.coefficients)[:m].copy(), below.copy()

    def cut(self, steps: int) -> None:
        """Forget everything after the first ``steps`` rows, the pending ones too."""
        self.rewrites += 1
        self.multiplied = self.count = steps
        self.coefficients[steps:] = 0.0
        self.coefficients[:, steps:] = 0.0
        self.drift[steps:] = 0.0

    def restart(self, keep: NDArray[np.int64], ritz: RitzPairs) -> None:
        """Thick restart: keep the Ritz vectors ``keep`` (positions) and the pending rows."""
        m, p, k = self.multiplied, self.pending, len(keep)
        self.start_asymmetry = self.asymmetry_of_start()
        chosen = np.ascontiguousarray(ritz.coordinates[:, keep])
        self.rewrites += 1
        lost = self.store.rotate(slice(0, m), chosen)
        # A row off by δ makes (1) off by A δ − θ δ.
        drift = np.sqrt((self.drift[:m, None] ** 2 * chosen**2).sum(0))
        drift += lost * (self.scale + np.abs(ritz.values[keep]))
        self.drift[:] = 0.0
        self.drift[:k] = drift
        self.rows[k : k + p] = self.rows[m : m + p].clone()
        self.coefficients[:] = 0.0
        self.coefficients[np.arange(k), np.arange(k)] = ritz.values[keep]
        self.coefficients[k : k + p, :k] = ritz.pending[:, keep]
        self.multiplied, self.count = k, k + p

    def state(self) -> tuple[dict[str, Tensor], dict[str, float | int]]:
        """Everything that the next step depends on; good until ``rewrites`` moves."""
        tensors = {
            "rows": self.rows[: self.count],
            "coefficients": torch.from_numpy(self.coefficients[: self.count, : self.count].copy()),
            "drift": torch.from_numpy(self.drift[: self.count].copy()),
        }
        numbers = {"multiplied": self.multiplied, "products": self.products, "scale": self.scale}
        if self.start_asymmetry is not None:
            numbers["start_asymmetry"] = self.start_asymmetry
        return tensors, numbers

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, float | int]) -> None:
        """The inverse of ``state``."""
        rows = tensors["rows"]
        self.count = rows.shape[0]
        self._make_room(self.count + 1)
        self.rows[: self.count] = rows.to(self.rows.device)
        self.coefficients[:] = 0.0
        self.coefficients[: self.count, : self.count] = tensors["coefficients"].numpy()
        self.drift[: self.count] = tensors["drift"].numpy()
        self.multiplied = int(numbers["multiplied"])
        self.products = int(numbers["products"])
        self.scale = float(numbers["scale"])
        self.start_asymmetry = numbers.get("start_asymmetry")

    def _swap(self, i: int, j: int) -> None:
        if not (self.multiplied <= i < self.count):
            raise IndexError(f"row {i} is not pending.")
        self.rewrites += 1
        self._swap_rows(i, j)
        self.coefficients[[i, j]] = self.coefficients[[j, i]]

    def _swap_rows(self, i: int, j: int) -> None:
        if i != j:
            kept = self.rows[i].clone()
            self.rows[i] = self.rows[j]
            self.rows[j] = kept


def krylov_steps(
    op: LinearOperator, start: Tensor, budget: int, title: str
) -> Iterator[tuple[KrylovBasis, float]]:
    """The growing basis of span{b, A b, A² b, …} and the norm of what each product added to it.

    On a device it grows by several products at a time (``stride``), and the last one's is given.
    Nothing where b is zero; ends with the budget or an invariant space.
    start: b (n,), whole; where the operator's weights are spread, so is the basis.
    """
    basis = KrylovBasis(op, min(budget, op.shape[1]) + 2, shards=op.shards)
    basis.add(start)
    with bar(title, total=budget) as progress:
        while basis.products < budget and basis.pending:
            before = basis.products
            added = basis.advance(min(max(basis.stride // 2, 1), budget - before))
            progress.update(basis.products - before)
            yield basis, added[-1]
