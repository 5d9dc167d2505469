"""What a Lanczos run knows of eigenvalues it has not found: its own start, and a search at the end.

Two recurrences are evidence (``spectra/missed.py``): that of the run's random start, as long as no
restart has cut it, and that of a fresh random direction followed after the wanted pairs have
converged, the only one that can show a second copy of a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from curvatlas.spectra.krylov import Array, KrylovBasis, RitzPairs
from curvatlas.spectra.missed import (
    APART,
    MISSED,
    complete_outside,
    missed_probability,
    separate_probability,
    worthwhile,
)
from curvatlas.spectra.selection import Which

_SHORT_SEARCH = 4  # products, and one more for each 50: a search expected to end by then is made
_LONGEST_SEARCH = 14  # products, while the search approaches the wanted ends


class Search:
    """The evidence of one run; all of it goes to the checkpoint."""

    def __init__(self, basis: KrylovBasis, which: Which, *, tol: float, thorough: bool) -> None:
        self.basis, self.which, self.tol, self.thorough = basis, which, tol, thorough
        self.going_on = False  # following a random direction; its recurrence is kept here
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.searched = 0
        self.known: list[float] = []  # the wanted values when the search was last looked at
        self.missed = 1.0
        self.complete = (-np.inf, np.inf)
        self.plain = True  # one random start, never restarted: its recurrence is evidence too
        self.invariant = False  # a Krylov space ended early: there are few different eigenvalues
        self.own: list[list[float]] = []  # that recurrence, [alphas, betas]

    def expand(self) -> None:
        """One product with the direction that is followed."""
        basis = self.basis
        beta = basis.expand(basis.count - 1)
        self.searched += 1
        self.betas.append(beta)
        self.alphas.append(basis.coefficients[basis.multiplied - 1, basis.multiplied - 1])

    def compare(self, current: list[float], slack: float) -> None:
        """Begin again when the search itself has brought a new wanted value."""
        if self.known and max(abs(a - b) for a, b in zip(current, self.known, strict=True)) > slack:
            self.stop()
            self.searched, self.missed = 0, 1.0
        self.known = current

    def stop(self) -> None:
        """Forget the direction that is followed."""
        self.going_on, self.alphas, self.betas = False, [], []

    def settled(self, found: Array, slack: float) -> bool:
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

    def bounds_hold(self, ritz: RitzPairs, bounded: float | None) -> bool:
        """Whether the random start excludes eigenvalues further out than was asked."""
        if bounded is None or not self.plain or self.own:
            return True
        self.keep_own()
        nodes = ritz.values
        low, high = self.range(ritz, 0.0, self.basis.multiplied >= self.basis.size)
        self.own = []
        norm = float(np.abs(nodes).max())
        up, down = high - float(nodes[-1]), float(nodes[0]) - low
        reach = {"largest": up, "smallest": down, "both": max(up, down)}
        return reach.get(self.which, max(high, -low) - norm) <= bounded * norm

    def range(self, ritz: RitzPairs, floor: float, full: bool) -> tuple[float, float]:
        """Between which values the spectrum lies: further out the random start would show it."""
        nodes = float(ritz.values[0]), float(ritz.values[-1])
        if full:
            return nodes[0] - floor, nodes[1] + floor
        if self.plain and not self.own:
            self.keep_own()
        if not self.own:
            return -np.inf, np.inf
        low, high = complete_outside(np.array(self.own[0]), np.array(self.own[1]), self.basis.size)
        # The eigenvalue that a Ritz value stands for lies within its residual, further out mostly.
        radii = floor + float(ritz.residuals[0]), floor + float(ritz.residuals[-1])
        return min(low, nodes[0] - radii[0]), max(high, nodes[1] + radii[1])

    def keep_own(self) -> None:
        """The recurrence of the start vector, before a search puts other rows between."""
        m = self.basis.multiplied
        self.own = [np.diag(self.basis.coefficients, -below)[:m].tolist() for below in (0, 1)]

    def separate(self, found: Array, norm: float) -> float:
        """Bound on a separate eigenvalue overlooked, from the run's own start and the search."""
        if self.plain and not self.own:
            self.keep_own()
        recurrences = (self.own or [[], []], (self.alphas, self.betas))
        runs = [(np.array(a), np.array(b)) for a, b in recurrences if a]
        if not runs:
            return 1.0
        return separate_probability(
            runs, found, self.which, self.basis.size, APART * self.tol * norm
        )

    def state(self) -> dict[str, Any]:
        """Numbers for the checkpoint."""
        return {
            "searching": self.going_on,
            "searched": self.searched,
            "known": list(self.known),
            "alphas": list(self.alphas),
            "betas": list(self.betas),
            "missed": self.missed,
            "complete": list(self.complete),
            "plain": self.plain,
            "invariant": self.invariant,
            "own": list(self.own),
        }

    def restore(self, numbers: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.going_on = bool(numbers["searching"])
        self.searched, self.known = int(numbers["searched"]), list(numbers["known"])
        self.alphas, self.betas = list(numbers["alphas"]), list(numbers["betas"])
        self.missed = float(numbers["missed"])
        self.complete = (float(numbers["complete"][0]), float(numbers["complete"][1]))
        self.plain, self.own = bool(numbers["plain"]), list(numbers["own"])
        self.invariant = bool(numbers["invariant"])
