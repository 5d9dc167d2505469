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
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvatlas import parallel
from curvatlas.budget import available_bytes, default_budget, parse_bytes
from curvatlas.operators.base import LinearOperator
from curvatlas.progress import bar
from curvatlas.spectra.checkpoint import Checkpoint, fingerprint, generator
from curvatlas.spectra.checkpoint_shards import ShardedCheckpoint
from curvatlas.spectra.data_error import eigenvalue_half_widths
from curvatlas.spectra.dense import dense_eigenpairs
from curvatlas.spectra.eigen_result import Eigenpairs, cluster_radii
from curvatlas.spectra.krylov import Array, KrylovBasis, RitzPairs
from curvatlas.spectra.missed import (
    APART,
    MISSED,
    complete_outside,
    missed_probability,
    separate_probability,
    worthwhile,
)
from curvatlas.spectra.requirements import check_budget, require_symmetric
from curvatlas.spectra.selection import WHICH, Positions, Which, by_interest, select

_SHORT_SEARCH = 4  # products, and one more for each 50: a search expected to end by then is made
_LONGEST_SEARCH = 14  # products, while the search approaches the wanted ends
_SAVE_EVERY = 8  # products between two looks at the checkpoint's clock
_EXACT_UP_TO = 48  # below this size a dense decomposition needs no more products than Lanczos


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
    shard: bool = False,
    thorough: bool = False,
    bounded: float | None = None,
    data_error: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Eigenpairs:
    """The k largest, smallest (most negative), both (k at each end) or largest-|λ| eigenpairs.

    tol: residual relative to ‖A‖;  start: (n,) or (n, j) earlier eigenvectors to warm-start from;
    max_products: default min(n, 1000 + 40 k);  memory: bytes (or "2GB") for the basis, beyond it
    the run restarts thickly;  data_error: where the operator knows its batches, measure their
    scatter too (one more product for each pair);  checkpoint: a file to resume from.
    thorough: search for overlooked copies until they are improbable in crowded spectra too.
    bounded: go on until ``spectrum_within`` reaches at most ``bounded``·‖A‖ beyond the values.
    storage: precision of the stored basis, torch.bfloat16 for half of float32's memory: sums stay
    in the operator's precision, and what rounding does is part of the residuals.
    shard: every process of the group holds its own part of the basis and of ``result.vectors``,
    n/world entries of each vector (``parallel.Shards`` says which).
    """
    n = require_symmetric(op, "eigenpairs")
    wanted = _check(n, k, which, tol, bounded)
    if max_products is None:
        max_products = min(n, 1000 + 40 * k)
    check_budget(max_products)
    if (2 * wanted >= n or n <= _EXACT_UP_TO) and max_products >= n:
        found = dense_eigenpairs(op, k, which)
        return _with_data_error(op, found) if data_error else found
    mark = fingerprint(
        op, estimate="eigenpairs", k=k, which=which, tol=tol, seed=seed, max_products=max_products,
        memory=memory, storage=str(storage), warm=None if start is None else list(start.shape),
        thorough=thorough, bounded=bounded,
    )  # fmt: skip
    shards = parallel.Shards.of(n) if shard else None
    file: Checkpoint = Checkpoint(checkpoint, mark)
    if shards is not None:
        file = ShardedCheckpoint(checkpoint, mark, shards)
    capacity, device = _capacity(op, wanted, max_products, memory, storage, shards)
    basis = KrylovBasis(op, capacity, device, storage=storage, shards=shards)
    found = _Run(basis, k, which, wanted, tol, max_products, file, thorough, bounded).result(
        seed, start
    )
    return _with_data_error(op, found) if data_error and shards is None else found


def _with_data_error(op: LinearOperator, found: Eigenpairs) -> Eigenpairs:
    measured = eigenvalue_half_widths(op, found.vectors)
    if measured is None:
        return found
    half, products = measured
    interval = (found.values - half, found.values + half)
    return replace(found, data_interval=interval, products=found.products + products)


class _Run:
    """The state of one computation; all of it goes to the checkpoint."""

    def __init__(
        self, basis: KrylovBasis, k: int, which: Which, wanted: int, tol: float,
        max_products: int, checkpoint: Checkpoint, thorough: bool, bounded: float | None,
    ) -> None:  # fmt: skip
        self.thorough, self.bounded = thorough, bounded
        self.op, self.k, self.which, self.wanted, self.tol = basis.op, k, which, wanted, tol
        self.max_products, self.checkpoint = max_products, checkpoint
        self.basis = basis
        self.random = generator(0)
        self.searching = False  # following a random direction; its recurrence is kept here
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.searched = 0
        self.known: list[float] = []  # the wanted values when the search was last looked at
        self.missed = 1.0
        self.complete = (-np.inf, np.inf)
        self.plain = True  # one random start, never restarted: its recurrence is evidence too
        self.invariant = False  # a Krylov space ended early: there are few different eigenvalues
        self.own: list[list[float]] = []  # that recurrence, [alphas, betas]
        self.done = False
        self.next_look = min(wanted + 2, max_products)

    def result(self, seed: int, start: Tensor | None) -> Eigenpairs:
        stored = self.checkpoint.load()
        if stored is None:
            self.random = generator(seed)
            self._begin(start)
        else:
            self._restore(*stored)
        with (
            bar(f"eigenpairs ({self.which})", total=self.max_products) as progress,
            self.checkpoint.kept(self._state),
        ):
            progress.update(self.basis.products)
            while not self.done:
                self.done = self._advance()
                progress.update(self.basis.products - progress.n)
                if self.basis.products % _SAVE_EVERY == 0 and self.checkpoint.due():
                    self.checkpoint.save(*self._state())
        if self.checkpoint.path is not None:
            self.checkpoint.save(*self._state())
        return self._finish()

    def _begin(self, start: Tensor | None) -> None:
        if start is not None:
            columns = start.detach().unsqueeze(-1) if start.ndim == 1 else start.detach()
            if columns.shape[0] != self.op.shape[1]:
                raise ValueError(
                    f"start has {columns.shape[0]} rows, the operator {self.op.shape[1]}: give "
                    "eigenvectors of this operator as columns (n, k)."
                )
            for column in columns.T:
                self.basis.add(column)
            self.plain = False
        if self.basis.count == 0:
            self.basis.add_random(self.random)

    def _advance(self) -> bool:
        """One product, and a look at what it brought when one is due; True when finished."""
        basis = self.basis
        if basis.products >= self.max_products or basis.multiplied >= basis.size:
            return True
        if basis.pending == 0:
            self.plain, self.invariant = False, True
            if not basis.add_random(self.random):
                return True  # the basis is the whole space
        if self.searching:
            beta = basis.expand(basis.count - 1)
            self.searched += 1
            self.betas.append(beta)
            self.alphas.append(basis.coefficients[basis.multiplied - 1, basis.multiplied - 1])
        else:
            basis.expand()
        if basis.products >= self.next_look or basis.products == self.max_products:
            return self._look()
        if basis.count >= basis.capacity - 1:
            self._restart(basis.ritz())
        return False

    def _look(self) -> bool:
        basis = self.basis
        ritz = basis.ritz()
        allowed = 0.05 if basis.store.packed else min(1e-2, 1e3 * basis.eps**0.5)
        if basis.asymmetry() > allowed:
            raise ValueError(
                f"the operator is not symmetric (relative {basis.asymmetry():.1e}): eigenpairs "
                "needs a symmetric one; use spectral_norm for rectangular or skew operators."
            )
        self.next_look = basis.products + 1
        if basis.multiplied < self.wanted:
            return False
        chosen = select(ritz.values, self.k, self.which)
        accepted = self.tol * max(np.abs(ritz.values).max(), np.finfo(np.float64).tiny)
        accepted = max(accepted, 8 * basis.eps * basis.scale)
        worst = ritz.residuals[chosen].max()
        if worst <= accepted and self._bounds_hold(ritz.values):
            # With a bound from above a second copy of a single value would change nothing.
            alone = self.k == 1 and self.bounded is not None
            return alone or self._search(ritz, chosen, accepted)
        self._stop_search()
        self.searched = 0
        far = worst / accepted
        steps = basis.multiplied // 10 if far > 100 else basis.multiplied // 30 if far > 5 else 0
        self.next_look = min(basis.products + 1 + steps, self.max_products)
        if basis.pending > 1:
            open_ = chosen[ritz.residuals[chosen] > accepted]
            basis.turn_pending(ritz.pending[:, open_])
        if basis.count >= basis.capacity - 1:
            self._restart(ritz)
        return False

    def _bounds_hold(self, nodes: Array) -> bool:
        """Whether the random start excludes eigenvalues further out than was asked."""
        if self.bounded is None or not self.plain or self.own:
            return True
        self._keep_own()
        low, high = self._range(nodes, 0.0, self.basis.multiplied >= self.basis.size)
        self.own = []
        norm = float(np.abs(nodes).max())
        up, down = high - float(nodes[-1]), float(nodes[0]) - low
        reach = {"largest": up, "smallest": down, "both": max(up, down)}
        return reach.get(self.which, max(high, -low) - norm) <= self.bounded * norm

    def _search(self, ritz: RitzPairs, chosen: Positions, slack: float) -> bool:
        """Follow a fresh random direction until an overlooked eigenvalue is improbable."""
        basis = self.basis
        current = [float(value) for value in ritz.values[chosen]]
        if self.known and max(abs(a - b) for a, b in zip(current, self.known, strict=True)) > slack:
            self._stop_search()  # the search brought a new one: begin it again
            self.searched, self.missed = 0, 1.0
        self.known = current
        if self.alphas and self._settled(ritz.values[chosen], slack):
            return True
        if basis.count >= basis.capacity - 2:
            if self.searched and basis.pending > 1:
                return True  # the pairs are found, and a longer search does not fit
            self._restart(ritz)
        if not self.own and self.plain:
            self._keep_own()
        if not self.alphas or self.betas[-1] == 0.0:
            self._stop_search()
            self.searching = basis.add_random(self.random)
            if not self.searching:
                self.missed = 0.0
        return not self.searching

    def _settled(self, found: Array, slack: float) -> bool:
        """Whether the search has excluded an overlooked eigenvalue, or will not by going on."""
        alphas, betas = np.array(self.alphas), np.array(self.betas)
        around = self.basis.size - self.basis.multiplied + len(alphas)
        self.missed = missed_probability(alphas, betas, found, self.which, around, slack)
        self.complete = complete_outside(alphas, betas, around)
        if self.missed <= MISSED:
            return True
        if self.thorough:
            return False
        limit = _SHORT_SEARCH + self.basis.products // 50
        if self.invariant or np.diff(np.sort(found)).min(initial=np.inf) <= 1e-3 * slack:
            limit = _LONGEST_SEARCH  # copies have been seen: there may be more
            if self.searched < limit // 2:
                return False
        return self.searched >= _LONGEST_SEARCH or not worthwhile(
            alphas, betas, found, self.which, around, slack, limit
        )

    def _range(self, nodes: Array, floor: float, full: bool) -> tuple[float, float]:
        """Between which values the spectrum lies: further out the random start would show it."""
        if full:
            return float(nodes[0]) - floor, float(nodes[-1]) + floor
        if self.plain and not self.own:
            self._keep_own()
        if not self.own:
            return -np.inf, np.inf
        low, high = complete_outside(np.array(self.own[0]), np.array(self.own[1]), self.basis.size)
        return min(low, float(nodes[0]) - floor), max(high, float(nodes[-1]) + floor)

    def _keep_own(self) -> None:
        """The recurrence of the start vector, before a search puts other rows between."""
        m = self.basis.multiplied
        self.own = [np.diag(self.basis.coefficients, -below)[:m].tolist() for below in (0, 1)]

    def _separate(self, found: Array, norm: float) -> float:
        """Bound on a separate eigenvalue overlooked, from the run's own start and the search."""
        if self.plain and not self.own:
            self._keep_own()
        recurrences = (self.own or [[], []], (self.alphas, self.betas))
        runs = [(np.array(a), np.array(b)) for a, b in recurrences if a]
        if not runs:
            return 1.0
        return separate_probability(
            runs, found, self.which, self.basis.size, APART * self.tol * norm
        )

    def _stop_search(self) -> None:
        self.searching, self.alphas, self.betas = False, [], []

    def _restart(self, ritz: RitzPairs) -> None:
        """Keep the wanted Ritz vectors and half of the room around them."""
        room = max(self.wanted + 2, min(self.basis.capacity // 2, self.basis.multiplied - 1))
        room = max(self.wanted, min(room, self.basis.capacity - 3 - self.basis.pending))
        order = by_interest(ritz.values, self.which)
        self.basis.restart(np.sort(order[:room]), ritz)
        self.plain = False
        self._stop_search()

    def _finish(self) -> Eigenpairs:
        basis, ritz = self.basis, self.basis.ritz()
        chosen = select(ritz.values, self.k, self.which)
        norm = float(np.abs(ritz.values).max())
        floor = 32 * basis.eps * max(norm, basis.scale)
        residuals = ritz.residuals[chosen] + floor
        values = ritz.values[chosen]
        full = basis.multiplied >= basis.size
        enough = len(chosen) == self.wanted
        accepted = max(self.tol * norm, 8 * basis.eps * basis.scale)
        converged = bool(enough and (ritz.residuals[chosen] <= accepted).all())
        radii = cluster_radii(values, residuals)
        vectors = basis.final_vectors(ritz.coordinates[:, chosen])
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
            missed_probability=0.0 if full else self._separate(values, norm),
            complete_outside=(0.0, 0.0) if full else self.complete,
            spectrum_within=self._range(ritz.values, floor, full),
            products=basis.products,
            converged=converged,
            exact=full,
        )

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, numbers = self.basis.state()
        tensors["random"] = self.random.get_state()
        return tensors, {
            **numbers,
            "searching": self.searching,
            "searched": self.searched,
            "known": self.known,
            "alphas": self.alphas,
            "betas": self.betas,
            "missed": self.missed,
            "complete": list(self.complete),
            "plain": self.plain,
            "invariant": self.invariant,
            "own": self.own,
            "done": self.done,
            "next_look": self.next_look,
        }

    def _restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.basis.restore(tensors, numbers)
        self.random.set_state(tensors["random"])
        self.searching = bool(numbers["searching"])
        self.searched, self.known = int(numbers["searched"]), list(numbers["known"])
        self.alphas, self.betas = list(numbers["alphas"]), list(numbers["betas"])
        self.missed, self.done = float(numbers["missed"]), bool(numbers["done"])
        self.complete = (float(numbers["complete"][0]), float(numbers["complete"][1]))
        self.plain, self.own = bool(numbers["plain"]), list(numbers["own"])
        self.invariant = bool(numbers["invariant"])
        self.next_look = int(numbers["next_look"])


def _check(n: int, k: int, which: str, tol: float, bounded: float | None) -> int:
    if which not in WHICH:
        raise ValueError(f"which must be one of {', '.join(WHICH)}, got {which!r}.")
    if not isinstance(k, int | np.integer) or k < 1 or k > n:
        raise ValueError(f"k must be an integer between 1 and the operator's size {n}, got {k!r}.")
    if not tol > 0:
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
    """How many rows fit, and where: beside the operator, or in main memory when it is short."""
    most = min(max_products + 4 + wanted, op.shape[1] + 2)
    least = min(2 * wanted + 12 if memory is None else wanted + max(6, wanted // 4), most)
    length = op.shape[1] if shards is None else shards.length
    row = length * (storage or op.dtype).itemsize
    device = op.device
    if memory is not None:
        budget = parse_bytes(memory)
    elif device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] // 2
    else:
        budget = max(default_budget(), available_bytes() // 2)
    if memory is None and device.type == "cuda" and budget < most * row:
        device, budget = torch.device("cpu"), max(default_budget(), available_bytes() // 2)
    return max(least, min(most, budget // row)), device
