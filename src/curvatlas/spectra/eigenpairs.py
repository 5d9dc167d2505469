r"""Extreme eigenpairs by Lanczos with full reorthogonalisation: one run serves both ends.

Stops when every wanted Ritz pair has ‖A y − θ y‖ ≤ tol · ‖A‖ (‖A‖ by the largest |θ|). A symmetric
matrix has an eigenvalue within ‖A y − θ y‖ of θ: the reported intervals are certified by that, not
by statistics. What no residual can tell is whether an eigenvalue was overlooked, a second copy
above all, which a single start vector cannot see: so at the end a fresh random direction outside
the basis is followed for two steps, more where more will settle it, and the result says beyond
which values its list is complete at 97.5 % (``spectra/missed.py``). At the edge of a bulk neither
can be promised; ``thorough=True`` searches until it can, or the budget ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvatlas import parallel
from curvatlas.budget import default_budget, parse_bytes, readable
from curvatlas.linear_operator import LinearOperator
from curvatlas.spectra.checkpoint import (
    Checkpoint,
    Resumable,
    ShardedCheckpoint,
    State,
    fingerprint,
    generator,
)
from curvatlas.spectra.eigen_result import (
    WHICH,
    Eigenpairs,
    Positions,
    Which,
    by_interest,
    cluster_radii,
    select,
    within_list,
)
from curvatlas.spectra.estimate import eigenvalue_half_widths
from curvatlas.spectra.exact import reads_at_once, symmetric_matrix
from curvatlas.spectra.krylov import Array, KrylovBasis, RitzPairs
from curvatlas.spectra.missed import Search
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_budget,
    not_symmetric,
    refuse_asymmetric,
    require_symmetric,
)

# Times the tolerance: further off, unwanted neighbours carry more of the residual than the vector
# itself, and an eigenvalue may still be emerging among them.
REFINED_WITHIN = 1.5
_SEARCH_STEPS = 2  # with a random direction on a device, before they are looked at
_ASYMMETRY_OF_FEW_BITS = 0.05  # of a basis stored in bfloat16


@alike_on_every_rank
def eigenpairs(
    op: LinearOperator,
    *,
    k: int = 6,
    which: Which = "largest",
    tol: float = 1e-4,
    seed: int = 0,
    start: Tensor | None = None,
    max_products: int | None = None,
    memory: int | float | str | None = None,
    storage: torch.dtype | None = None,
    shard: bool | None = None,
    thorough: bool = False,
    bounded: float | None = None,
    data_error: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Eigenpairs:
    """The k largest, smallest (most negative), both (k at each end) or largest-|λ| eigenpairs.

    tol: residual relative to ‖A‖;  start: (n,) or (n, j) earlier eigenvectors to warm-start from;
    max_products: default min(n, 1000 + 40 k);  memory: bytes (or "2GB") for the basis and what is
    made of it, half of the machine's by default; beyond it the run restarts thickly;
    data_error: where the operator knows its batches, measure their scatter too (one more product
    for each pair);  checkpoint: a file to resume from.
    thorough: search for overlooked copies until they are improbable in crowded spectra too.
    bounded: go on until ``spectrum_within`` reaches at most ``bounded``·‖A‖ beyond the values.
    storage: precision of the stored basis, torch.bfloat16 for half of float32's memory: sums stay
    in the operator's precision, and what rounding does is part of the residuals.
    shard: every process of the group holds its own part of the basis and of ``result.vectors``,
    n/world entries of each vector (``parallel.Shards`` says which). None: no, but where weights are
    spread (FSDP2) so is the basis, as they are, and ``result.vectors`` are whole.
    """
    n = require_symmetric(op, "eigenpairs")
    if storage is not None and not storage.is_floating_point:
        raise ValueError(f"storage must be a floating-point type, got {storage}.")
    wanted = _check(n, k, which, tol, bounded)
    max_products = _limit(n, k, max_products)
    if _is_small(n, wanted, max_products):
        pairs = _dense_eigenpairs(op, k, which)
        return _with_data_error(op, pairs) if data_error else pairs
    mark = fingerprint(
        op,
        estimate="eigenpairs",
        k=k,
        which=which,
        tol=tol,
        seed=seed,
        max_products=max_products,
        memory=memory,
        storage=str(storage),
        warm=None if start is None else list(start.shape),
        thorough=thorough,
        bounded=bounded,
    )
    shards = op.shards if shard is None else None
    if shard:
        shards = op.shards or parallel.Shards.of(n)
    capacity, device = _capacity(op, wanted, max_products, memory, storage, shards)

    def run() -> Eigenpairs:
        # The basis goes before the scatter is measured, which takes memory of its own.
        file: Checkpoint = Checkpoint(checkpoint, mark)
        if shards is not None:
            file = ShardedCheckpoint(checkpoint, mark, shards)
        basis = KrylovBasis(op, capacity, device, storage=storage, shards=shards)
        lanczos = LanczosRun(
            basis, k, which, wanted, tol, max_products, seed, start, thorough, bounded
        )
        lanczos.run(file)
        return lanczos.result()

    pairs = run()
    if shard is None and shards is not None:
        whole = [shards.gathered(vector) for vector in pairs.vectors.T.contiguous()]
        pairs = replace(pairs, vectors=torch.stack(whole, 1))
    return _with_data_error(op, pairs) if data_error and shards is None else pairs


def _limit(n: int, k: int, max_products: int | None) -> int:
    if max_products is None:
        max_products = min(n, 1000 + 40 * k)
    check_budget(max_products)
    return max_products


def _is_small(n: int, wanted: int, max_products: int) -> bool:
    """Whether the dense matrix is the shorter way."""
    return n <= max_products and (2 * wanted >= n or reads_at_once("eigenpairs", n, max_products))


@alike_on_every_rank
def followed(
    op: LinearOperator,
    *,
    k: int,
    which: Which,
    tol: float,
    seed: int,
    start: Tensor | None,
    max_products: int | None,
    searching: bool,
) -> tuple[Eigenpairs, Tensor]:
    """``eigenpairs`` and the vectors for the next start, of the wanted pairs and one beyond.

    searching: whether a random direction is followed at the end; without, no completeness is
    claimed.
    """
    n = require_symmetric(op, "eigenpairs")
    wanted = _check(n, k, which, tol, None)
    limit = _limit(n, k, max_products)
    if _is_small(n, wanted, limit):
        pairs = _dense_eigenpairs(op, k, which)
        return pairs, pairs.vectors
    capacity, device = _capacity(op, wanted, limit, None, None, None)
    basis = KrylovBasis(op, capacity, device)
    lanczos = LanczosRun(
        basis, k, which, wanted, tol, limit, seed, start, False, None, searching=searching
    )
    if start is not None:
        lanczos.search.least = STEPS_OF_A_CHECK  # no random start has looked around before
    lanczos.run(Checkpoint(None, {}))
    return lanczos.result(), lanczos.ahead(wanted + 1)


CHECKED_EVERY = 10  # measurements, of which one looks for eigenvalues that came from elsewhere
STEPS_OF_A_CHECK = 4  # products with a random direction


class Following:
    r"""The extreme eigenpairs of an operator that moves with the weights θ, again and again.

    The last eigenvectors, one power step ahead (``LanczosRun.ahead``), are carried on along the
    weights' path: with the last displacement d of the weights and the one x that came since,

        V ← V + c (V − V before),    c = x·d / d·d,

    and multiplied together. Where their residuals meet the tolerance that is all; each pair that
    does not gets a direction of its own, and so on as in ``eigenpairs``. The certificate of every
    value is its residual, as after a cold start. What residuals cannot tell, an eigenvalue that
    came from elsewhere, is looked for in one measurement of ``CHECKED_EVERY``: the best Ritz vector
    beyond the wanted ones is multiplied with them, as a crossing brings it in, and a fresh random
    direction is followed. The results in between claim no completeness.
    """

    def __init__(
        self, *, k: int, which: Which, tol: float, max_products: int | None = None, seed: int = 0
    ) -> None:
        self.k, self.which, self.tol, self.seed = k, which, tol, seed
        self.max_products = max_products
        self.count = 0
        self.vectors: list[Tensor] = []  # (n, wanted + 1) of the last two measurements
        self.positions: list[Tensor] = []  # the weights there

    def measure(self, op: LinearOperator, position: Tensor | None = None) -> Eigenpairs:
        """At the present weights ``position``; without them V is taken as it is."""
        checking = self.count % CHECKED_EVERY == 0
        self.vectors = [vectors.to(op.device) for vectors in self.vectors]  # stored elsewhere
        if position is not None:
            self.positions = [earlier.to(position.device) for earlier in self.positions]
        start = self._predicted(position)
        wanted = 2 * self.k if self.which == "both" else self.k
        if start is not None and not checking:
            start = start[:, :wanted]
        pairs, ahead = followed(
            op,
            k=self.k,
            which=self.which,
            tol=self.tol,
            seed=self.seed + self.count,  # the random directions of a run are independent
            start=start,
            max_products=self.max_products,
            searching=checking,
        )
        if start is not None and not checking:  # nothing was learnt of what lies beyond
            ahead = torch.cat([ahead[:, :wanted], self.vectors[-1][:, wanted:]], dim=1)
        self.vectors = [*self.vectors[-1:], ahead]
        if position is not None:
            self.positions = [*self.positions[-1:], position.detach().clone()]
        self.count += 1
        return pairs

    def _predicted(self, position: Tensor | None) -> Tensor | None:
        if not self.vectors:
            return None
        last = self.vectors[-1]
        if position is None or len(self.positions) < 2 or self.vectors[-2].shape != last.shape:
            return last
        moved = self.positions[-1] - self.positions[-2]
        share = float((position - self.positions[-1]) @ moved / (moved @ moved))
        # The rotation of the earlier vectors that brings them nearest to the last ones.
        left, _, right = torch.linalg.svd(self.vectors[-2].T @ last)
        change = last - self.vectors[-2] @ (left @ right)
        return last + share * change if np.isfinite(share) else last

    def state(self) -> dict[str, Tensor]:
        """What the next measurement starts from."""
        kept = {f"vectors{i}": tensor for i, tensor in enumerate(self.vectors)}
        kept.update({f"positions{i}": tensor for i, tensor in enumerate(self.positions)})
        return {**kept, "count": torch.tensor([self.count], device="cpu")}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``state``; nothing where there is none."""
        self.vectors = [tensors[key] for key in sorted(tensors) if key.startswith("vectors")]
        self.positions = [tensors[key] for key in sorted(tensors) if key.startswith("positions")]
        self.count = int(tensors["count"]) if "count" in tensors else 0


def _dense_eigenpairs(op: LinearOperator, k: int, which: Which) -> Eigenpairs:
    """Eigenpairs from the dense matrix; the residual is rounding."""
    matrix, products = symmetric_matrix(op, "eigenpairs")
    values, vectors = torch.linalg.eigh(matrix)
    ends = (float(values[0]), float(values[-1]))
    norm = max(abs(ends[0]), abs(ends[1]))
    chosen = torch.from_numpy(select(values.cpu().numpy(), k, which)).to(values.device)
    values, vectors = values[chosen], vectors[:, chosen]
    floor = 32 * torch.finfo(op.dtype).eps * norm
    residuals = torch.linalg.vector_norm(matrix @ vectors - vectors * values, dim=0) + floor
    values, residuals = values.cpu(), residuals.cpu()
    return Eigenpairs(
        values=values,
        vectors=vectors.to(op.dtype),
        residuals=residuals,
        interval=(values - residuals, values + residuals),
        which=which,
        k=k,
        tol=0.0,
        norm=norm,
        missed_probability=0.0,
        complete_outside=(0.0, 0.0),
        spectrum_within=ends,
        products=products,
        converged=True,
        exact=True,
    )


def _with_data_error(op: LinearOperator, pairs: Eigenpairs) -> Eigenpairs:
    measured = eigenvalue_half_widths(op, pairs.vectors)
    if measured is None:
        return pairs
    half, products = measured
    interval = (pairs.values - half, pairs.values + half)
    return replace(pairs, data_interval=interval, products=pairs.products + products)


def _check(n: int, k: int, which: str, tol: float, bounded: float | None) -> int:
    if which not in WHICH:
        raise ValueError(f"which must be one of {', '.join(WHICH)}, got {which!r}.")
    if not isinstance(k, int | np.integer) or k < 1 or k > n:
        raise ValueError(f"k must be an integer between 1 and the operator's size {n}, got {k!r}.")
    if not isinstance(tol, int | float | np.number) or not tol > 0:
        raise ValueError(f"tol must be positive, got {tol!r}.")
    if bounded is not None and not bounded > 0:
        raise ValueError(f"bounded must be positive or None, got {bounded!r}.")
    return min(2 * k, n) if which == "both" else k


def _capacity(
    op: LinearOperator,
    wanted: int,
    max_products: int,
    memory: int | float | str | None,
    storage: torch.dtype | None,
    shards: parallel.Shards | None,
) -> tuple[int, torch.device]:
    """How many rows fit, and where: beside the operator, or in main memory when it is short.

    Without ``memory`` they are planned by what the machine has, not by what is free: a basis that
    restarts elsewhere ends in other digits. Ranks that work together take the fewest that any of
    them has room for: where one restarts, the others have to.
    """
    most = min(max_products + 4 + wanted, op.shape[1] + 2)
    least = min(2 * wanted + 12 if memory is None else wanted + max(6, wanted // 4), most)
    # The longest shard, whichever this process has: all of them restart at the same step.
    length = op.shape[1] if shards is None else shards.largest
    row = length * (storage or op.dtype).itemsize
    device = op.device
    if memory is None:
        in_main_memory = 2 * default_budget() // row
        beside_operator = in_main_memory
        if device.type != "cpu":
            beside_operator = 2 * default_budget(device) // row
        if shards is not None or parallel.sums_over_processes(op):
            ranks = parallel.shared(lambda: [beside_operator, in_main_memory], 2)
            beside_operator, in_main_memory = map(min, zip(*ranks, strict=True))
        if device.type == "cuda" and beside_operator < most:
            return max(least, min(most, in_main_memory)), torch.device("cpu")
        return max(least, min(most, beside_operator)), device
    # Beside the basis: the vectors made of it (a packed one is turned into them), and the image
    # that a step works on.
    beside = 0 if storage not in (None, op.dtype) else wanted + 3
    rows = parse_bytes(memory) // row - beside
    if rows < least:
        needed = 1.01 * (least + beside) * row  # more than three digits may round away
        raise ValueError(
            f"memory={readable(parse_bytes(memory))} holds {rows + beside} vectors of "
            f"{readable(row)}: {wanted} eigenpairs need at least {least + beside}, give "
            f"memory={readable(needed)!r}, ask for fewer"
            + (" or store them as torch.bfloat16." if beside else ".")
        )
    return min(most, rows), device


class LanczosRun(Resumable):
    """Products, tests of convergence, thick restarts, and the search for overlooked eigenvalues."""

    products_between_looks = 8

    def __init__(
        self,
        basis: KrylovBasis,
        k: int,
        which: Which,
        wanted: int,
        tol: float,
        max_products: int,
        seed: int,
        start: Tensor | None,
        thorough: bool,
        bounded: float | None,
        searching: bool = True,
    ) -> None:
        self.title, self.budget = f"eigenpairs ({which})", max_products
        self.op, self.k, self.which, self.wanted, self.tol = basis.op, k, which, wanted, tol
        self.basis, self.start, self.bounded = basis, start, bounded
        self.search = Search(basis, which, tol=tol, thorough=thorough)
        self.searching = searching
        self.random = generator(seed)
        self.next_look = min(wanted + 2, max_products)
        self.together = 1  # pending rows that the next call of the operator multiplies
        # More would leave a restart no room for the wanted pairs and two products.
        self.most_pending = max(basis.capacity - 4 - wanted, 1)

    @property
    def products(self) -> int:
        return self.basis.products

    @property
    def rewrites(self) -> int:
        return self.basis.rewrites

    def begin(self) -> None:
        if self.start is not None:
            columns = self.start.detach()
            columns = columns.unsqueeze(-1) if columns.ndim == 1 else columns
            if columns.shape[0] != self.op.shape[1]:
                raise ValueError(
                    f"start has {columns.shape[0]} rows, the operator {self.op.shape[1]}: give "
                    "eigenvectors of this operator as columns (n, k)."
                )
            # As many again become pending: half of the room.
            most = min(max(self.basis.capacity // 2 - 1, 1), self.most_pending)
            for column in columns.T[:most]:
                self.basis.add(column)
            self.search.plain = False
            self.together = max(self.basis.count, 1)
            self.next_look = min(max(self.together, self.wanted), self.budget)
        if self.basis.count == 0:
            self.basis.add_random(self.random)

    def step(self) -> None:
        self.done = self._advance()

    def _advance(self) -> bool:
        """One product, and a test of convergence when one is due; True when finished."""
        basis = self.basis
        if basis.products >= self.budget or basis.multiplied >= basis.size:
            return True
        if basis.pending == 0:
            self.search.plain, self.search.invariant = False, True
            if not basis.add_random(self.random):
                return True  # the basis is the whole space
        if self.search.going_on:
            left = self.budget - basis.products, basis.capacity - 1 - basis.count
            self.search.expand(min(_SEARCH_STEPS, *left))
            self.next_look = basis.products
        elif self.together > 1:
            left = self.budget - basis.products, basis.capacity - basis.count
            basis.expand_together(min(self.together, basis.pending, *left))
            self.together = 1
        else:
            until = min(self.next_look, self.budget) - basis.products
            basis.advance(min(until, basis.capacity - 1 - basis.count))
        if basis.products >= self.next_look or basis.products == self.budget:
            return self._look()
        if basis.count >= basis.capacity - 1:
            self._restart(basis.ritz())
        return False

    def _look(self) -> bool:
        basis = self.basis
        ritz = basis.ritz()
        self._refuse_asymmetric()
        self.next_look = basis.products + basis.stride
        if basis.multiplied < self.wanted:
            return False
        chosen = select(ritz.values, self.k, self.which)
        accepted = self.tol * max(np.abs(ritz.values).max(), np.finfo(np.float64).tiny)
        accepted = max(accepted, 8 * basis.eps * basis.scale)
        pairs = wanted_pairs(basis, ritz, chosen, accepted)
        if pairs.residuals.max() <= accepted and self.search.bounds_hold(ritz, self.bounded):
            # With a bound from above a second copy of a single value would change nothing.
            alone = self.k == 1 and self.bounded is not None
            return alone or not self.searching or self._searched(ritz, chosen, accepted)
        self.search.stop()
        self.search.searched = 0
        far = ritz.residuals[chosen].max() / accepted
        steps = basis.multiplied // 10 if far > 100 else basis.multiplied // 30 if far > 5 else 0
        self.next_look = min(basis.products + max(1 + steps, basis.stride), self.budget)
        if basis.pending > 1:
            open_ = chosen[ritz.residuals[chosen] > accepted]
            carried = basis.turn_pending(ritz.pending[:, open_])
            ritz = basis.ritz()  # the residuals' coordinates have turned with the rows
            if self.start is not None:
                # One direction for every pair that is open: each needs its own, and columns that
                # are multiplied together cost less.
                self.together = max(int((carried > accepted).sum()), 1)
                self.next_look = min(basis.products + self.together, self.budget)
        if basis.count >= basis.capacity - 1:
            self._restart(ritz)
        return False

    def _refuse_asymmetric(self) -> None:
        basis = self.basis
        if not basis.store.packed:
            refuse_asymmetric(basis, "eigenpairs")
        elif basis.asymmetry() > _ASYMMETRY_OF_FEW_BITS:
            raise not_symmetric(basis.asymmetry(), "eigenpairs")

    def _searched(self, ritz: RitzPairs, chosen: Positions, slack: float) -> bool:
        """Follow a fresh random direction until an overlooked eigenvalue is improbable."""
        basis, search = self.basis, self.search
        search.compare([float(value) for value in ritz.values[chosen]], slack)
        if search.alphas and search.settled(ritz.values[chosen], slack):
            return True
        if basis.count >= basis.capacity - 2:
            if search.searched and basis.pending > 1:
                return True  # the pairs have converged, and a longer search does not fit
            self._restart(ritz)
        if search.plain:
            search.keep_start()
        if not search.alphas or search.betas[-1] == 0.0:
            search.stop()
            if basis.pending >= self.most_pending:
                return True  # another direction does not fit
            search.going_on = basis.add_random(self.random)
            if not search.going_on:
                search.missed = 0.0
        return not search.going_on

    def _restart(self, ritz: RitzPairs) -> None:
        """Keep the wanted Ritz vectors and half of the room around them."""
        room = max(self.wanted + 2, min(self.basis.capacity // 2, self.basis.multiplied - 1))
        room = max(self.wanted, min(room, self.basis.capacity - 3 - self.basis.pending))
        order = by_interest(ritz.values, self.which)
        self.basis.restart(np.sort(order[:room]), ritz)
        self.search.plain = False
        self.search.stop()

    def result(self) -> Eigenpairs:
        basis, ritz = self.basis, self.basis.ritz()
        chosen = select(ritz.values, self.k, self.which)
        norm = float(np.abs(ritz.values).max())
        floor = 32 * basis.eps * max(norm, basis.scale)
        accepted = max(self.tol * norm, 8 * basis.eps * basis.scale)
        pairs = wanted_pairs(basis, ritz, chosen, accepted)
        values, residuals = pairs.values, pairs.residuals + floor
        full = basis.multiplied >= basis.size
        enough = len(chosen) == self.wanted
        converged = bool(enough and (pairs.residuals <= accepted).all())
        radii = cluster_radii(values, residuals)
        missed = 0.0 if full else self.search.separate(values, norm) if enough else 1.0
        complete = within_list(self.search.complete, values, self.which)
        vectors = basis.final_vectors(pairs.coordinates)
        for column in vectors.T:
            column /= basis.store.norm(column.to(basis.store.dtype)).to(column.dtype)
        return Eigenpairs(
            values=torch.from_numpy(values.copy()),
            vectors=vectors,
            residuals=torch.from_numpy(residuals),
            interval=(torch.from_numpy(values - radii), torch.from_numpy(values + radii)),
            which=self.which,
            k=self.k,
            tol=self.tol,
            norm=norm,
            missed_probability=missed,
            complete_outside=(0.0, 0.0) if full else complete,
            spectrum_within=self.search.range(ritz, floor, full),
            products=basis.products,
            converged=converged,
            exact=full,
        )

    def ahead(self, count: int) -> Tensor:
        r"""The first ``count`` Ritz vectors by interest, one power step further, (n, count).

        A y = θ y + r, so y + r/θ = A y/θ costs no product: of what is wrong with y, the part along
        an eigenvector of eigenvalue λ shrinks by λ/θ. Where r is not small against θ, y itself.
        """
        basis, ritz = self.basis, self.basis.ritz()
        chosen = by_interest(ritz.values, self.which)[:count]
        values = ritz.values[chosen]
        ahead = ritz.residuals[chosen] <= 0.5 * np.abs(values)
        step = np.where(ahead, 1.0 / np.where(ahead, values, 1.0), 0.0)
        weights = np.concatenate([ritz.coordinates[:, chosen], ritz.pending[:, chosen] * step])
        return basis.vectors(weights)

    def state(self) -> State:
        tensors, numbers = self.basis.state()
        tensors["random"] = self.random.get_state()
        return tensors, {
            **numbers,
            **self.search.state(),
            "done": self.done,
            "next_look": self.next_look,
            "together": self.together,
        }

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.basis.restore(tensors, numbers)
        self.random.set_state(tensors["random"])
        self.search.restore(numbers)
        self.done, self.next_look = bool(numbers["done"]), int(numbers["next_look"])
        self.together = int(numbers["together"])


@dataclass(frozen=True)
class Wanted:
    """The pairs to be reported."""

    values: Array  # (k,)
    coordinates: Array  # (m, k) orthonormal columns in the basis
    residuals: Array  # (k,)


def wanted_pairs(basis: KrylovBasis, ritz: RitzPairs, chosen: Positions, accepted: float) -> Wanted:
    """The Ritz pairs, or refined ones where those reach ``accepted`` and the Ritz pairs do not."""
    plain = Wanted(ritz.values[chosen], ritz.coordinates[:, chosen], ritz.residuals[chosen])
    near = accepted < plain.residuals.max(initial=0.0) <= REFINED_WITHIN * accepted
    # What rounding did to a basis stored in fewer bits is no residual that could be turned.
    if not near or basis.store.packed:
        return plain
    better = refined(basis, ritz, chosen)
    return better if better.residuals.max() <= accepted else plain


def refined(basis: KrylovBasis, ritz: RitzPairs, chosen: Positions) -> Wanted:
    r"""Orthonormal vectors near the Ritz vectors ``chosen`` with smaller residuals.

    In the Ritz basis the residual of e_i is z_i, its coordinates on the p pending rows. Adding
    unwanted Ritz vectors j, at the distance δ_j = θ_j − θ_i, costs δ_j inside the basis and turns
    the residual:

        min_ε ‖z_i + Σ_j ε_j z_j‖² + Σ_j δ_j² ε_j²,    ε = −D⁻² Zᵀ (I + Z D⁻² Zᵀ)⁻¹ z_i.

    At the edge of a bulk, where neighbours have not converged and lie near, the residual falls by a
    quarter to a half: what one or two further products would do (refined Ritz vectors, Jia 1997).
    The vectors are made orthonormal afterwards and their residuals computed, not predicted.
    """
    others = np.setdiff1d(np.arange(len(ritz.values)), chosen)
    rows = ritz.pending[:, others]  # (p, m − k)
    tiny = np.finfo(np.float64).eps * max(basis.scale, np.finfo(np.float64).tiny)
    mixed = np.zeros((len(ritz.values), len(chosen)))
    for column, i in enumerate(chosen):
        weights = 1.0 / np.maximum(np.abs(ritz.values[others] - ritz.values[i]), tiny) ** 2
        inner = np.eye(len(rows)) + (rows * weights) @ rows.T
        mixed[others, column] = -weights * (rows.T @ np.linalg.solve(inner, ritz.pending[:, i]))
        mixed[i, column] = 1.0
    left, _, right = np.linalg.svd(mixed, full_matrices=False)
    coordinates = ritz.coordinates @ (left @ right)  # the nearest orthonormal columns
    action = basis.coefficients[: basis.multiplied, : basis.multiplied]
    values = np.einsum("ij,ij->j", coordinates, action @ coordinates)
    return Wanted(values, coordinates, basis.residuals(values, coordinates))
