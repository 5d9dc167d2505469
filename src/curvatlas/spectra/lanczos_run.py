r"""One Lanczos run: products, looks at what they brought, thick restarts, the search at the end.

Everything that the next step depends on goes to the checkpoint: a run that was killed continues
with the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvatlas.progress import bar
from curvatlas.spectra.checkpoint import Checkpoint, generator
from curvatlas.spectra.eigen_result import Eigenpairs, cluster_radii, within_list
from curvatlas.spectra.eigen_search import Search
from curvatlas.spectra.krylov import Array, KrylovBasis, RitzPairs
from curvatlas.spectra.refined import wanted_pairs
from curvatlas.spectra.requirements import not_symmetric, refuse_asymmetric
from curvatlas.spectra.selection import Positions, Which, by_interest, select

_ASYMMETRY_OF_FEW_BITS = 0.05  # of a basis stored in bfloat16
_SAVE_EVERY = 8  # products between two looks at the checkpoint's clock


class LanczosRun:
    """The state of one computation; all of it goes to the checkpoint."""

    def __init__(
        self, basis: KrylovBasis, k: int, which: Which, wanted: int, tol: float,
        max_products: int, checkpoint: Checkpoint, thorough: bool, bounded: float | None,
    ) -> None:  # fmt: skip
        self.bounded = bounded
        self.op, self.k, self.which, self.wanted, self.tol = basis.op, k, which, wanted, tol
        self.max_products, self.checkpoint = max_products, checkpoint
        self.basis = basis
        self.search = Search(basis, which, tol=tol, thorough=thorough)
        self.random = generator(0)
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
            self.checkpoint.kept(self._state, lambda: self.basis.rewrites),
        ):
            progress.update(self.basis.products)
            while not self.done:
                self.checkpoint.mark()
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
            self.search.plain = False
        if self.basis.count == 0:
            self.basis.add_random(self.random)

    def _advance(self) -> bool:
        """One product, and a look at what it brought when one is due; True when finished."""
        basis = self.basis
        if basis.products >= self.max_products or basis.multiplied >= basis.size:
            return True
        if basis.pending == 0:
            self.search.plain, self.search.invariant = False, True
            if not basis.add_random(self.random):
                return True  # the basis is the whole space
        if self.search.going_on:
            self.search.expand()
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
        self._refuse_asymmetric()
        self.next_look = basis.products + 1
        if basis.multiplied < self.wanted:
            return False
        chosen = select(ritz.values, self.k, self.which)
        accepted = self.tol * max(np.abs(ritz.values).max(), np.finfo(np.float64).tiny)
        accepted = max(accepted, 8 * basis.eps * basis.scale)
        found = wanted_pairs(basis, ritz, chosen, accepted)
        if found.residuals.max() <= accepted and self.search.bounds_hold(ritz, self.bounded):
            # With a bound from above a second copy of a single value would change nothing.
            alone = self.k == 1 and self.bounded is not None
            return alone or self._searched(ritz, chosen, accepted)
        self.search.stop()
        self.search.searched = 0
        far = ritz.residuals[chosen].max() / accepted
        steps = basis.multiplied // 10 if far > 100 else basis.multiplied // 30 if far > 5 else 0
        self.next_look = min(basis.products + 1 + steps, self.max_products)
        if basis.pending > 1:
            open_ = chosen[ritz.residuals[chosen] > accepted]
            basis.turn_pending(ritz.pending[:, open_])
            ritz = basis.ritz()  # the residuals' coordinates have turned with the rows
        if basis.count >= basis.capacity - 1:
            self._restart(ritz)
        return False

    def _refuse_asymmetric(self) -> None:
        basis = self.basis
        if not basis.store.packed:
            refuse_asymmetric(basis, "eigenpairs")
        elif basis.asymmetry() > _ASYMMETRY_OF_FEW_BITS:
            raise ValueError(not_symmetric(basis.asymmetry(), "eigenpairs"))

    def _searched(self, ritz: RitzPairs, chosen: Positions, slack: float) -> bool:
        """Follow a fresh random direction until an overlooked eigenvalue is improbable."""
        basis, search = self.basis, self.search
        search.compare([float(value) for value in ritz.values[chosen]], slack)
        if search.alphas and search.settled(ritz.values[chosen], slack):
            return True
        if basis.count >= basis.capacity - 2:
            if search.searched and basis.pending > 1:
                return True  # the pairs are found, and a longer search does not fit
            self._restart(ritz)
        if not search.own and search.plain:
            search.keep_own()
        if not search.alphas or search.betas[-1] == 0.0:
            search.stop()
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

    def _finish(self) -> Eigenpairs:
        basis, ritz = self.basis, self.basis.ritz()
        chosen = select(ritz.values, self.k, self.which)
        norm = float(np.abs(ritz.values).max())
        floor = 32 * basis.eps * max(norm, basis.scale)
        accepted = max(self.tol * norm, 8 * basis.eps * basis.scale)
        found = wanted_pairs(basis, ritz, chosen, accepted)
        values, residuals = found.values, found.residuals + floor
        full = basis.multiplied >= basis.size
        enough = len(chosen) == self.wanted
        converged = bool(enough and (found.residuals <= accepted).all())
        radii = cluster_radii(values, residuals)
        vectors = basis.final_vectors(found.coordinates)
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
            missed_probability=self._missed(values, norm, full, enough),
            complete_outside=(0.0, 0.0)
            if full
            else within_list(self.search.complete, values, self.which),
            spectrum_within=self.search.range(ritz, floor, full),
            products=basis.products,
            converged=converged,
            exact=full,
        )

    def _missed(self, values: Array, norm: float, full: bool, enough: bool) -> float:
        if full or not enough:
            return 0.0 if full else 1.0
        return self.search.separate(values, norm)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, numbers = self.basis.state()
        tensors["random"] = self.random.get_state()
        return tensors, {
            **numbers,
            **self.search.state(),
            "done": self.done,
            "next_look": self.next_look,
        }

    def _restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.basis.restore(tensors, numbers)
        self.random.set_state(tensors["random"])
        self.search.restore(numbers)
        self.done, self.next_look = bool(numbers["done"]), int(numbers["next_look"])
