r"""How probable it is that Lanczos overlooked an eigenvalue.

Follow a random unit direction u, uniform in the complement of the basis, for s Lanczos steps. If
the operator has an eigenvector z there with eigenvalue x, then for every polynomial p of degree
≤ s: p(x)² (zᵀu)² ≤ ‖p(A) u‖², and the best choice of p gives, with the orthonormal polynomials p_j
of the Lanczos recurrence (the Christoffel function),

    (zᵀu)² ≤ 1 / Σ_{j≤s} p_j(x)².

(zᵀu)² follows Beta(1/2, (n−1)/2) in n dimensions, so a small right-hand side is improbable: that
probability bounds the chance that such a z exists and was not noticed. It falls by a factor for
every step, large where x stands clear of the rest of the spectrum (two or three steps settle an
outlier) and near one at the edge of a bulk, where no affordable search could tell.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from scipy.special import erfinv
from scipy.stats import beta

from curvatlas.spectra.eigen_result import Which
from curvatlas.spectra.krylov import Array, KrylovBasis, RitzPairs
from curvatlas.spectra.quadrature import jacobi

MISSED = 0.025  # accepted probability, at each end, that an eigenvalue was overlooked
APART = 10.0  # an eigenvalue this many tolerances from every reported one is a separate one


def christoffel(alphas: Array, betas: Array, x: float) -> float:
    """1 / Σ_{j≤s} p_j(x)² for the recurrence β_j p_{j+1} = (x − α_j) p_j − β_{j−1} p_{j−1}."""
    before, here, total = 0.0, 1.0, 1.0
    for j, alpha in enumerate(alphas):
        if betas[j] <= 0.0:
            return 0.0 if (x - alpha) * here != 0.0 else 1.0 / total
        ahead = ((x - alpha) * here - (betas[j - 1] * before if j else 0.0)) / betas[j]
        before, here = here, ahead
        total += here * here
        if not np.isfinite(total) or total > 1e100:
            return 0.0
    return 1.0 / total


def missed_probability(
    alphas: Array, betas: Array, found: Array, which: str, n: int, slack: float
) -> float:
    """Bound for an eigenvalue further out than all of ``found`` by ``slack`` or more.

    alphas, betas: (s,) recurrence of a random direction in n dimensions; found: values reported.
    """
    nodes = np.linalg.eigvalsh(jacobi(alphas, betas[:-1]))
    worst = 0.0
    for edge, sign in _edges(found, which):
        point = edge + sign * slack
        outermost = np.abs(nodes).max() if which == "magnitude" else (sign * nodes).max()
        worst = max(worst, _beyond(alphas, betas, point, outermost < sign * point, n))
    return worst


def separate_probability(
    runs: list[tuple[Array, Array]], found: Array, which: str, n: int, apart: float
) -> float:
    """Bound for an eigenvalue beyond the innermost of ``found`` and ``apart`` from all of them.

    runs: recurrences (alphas, betas) of independent random directions, the run's own start among
    them: an overlooked eigenvector must have been hidden from every one.
    """
    worst = 0.0
    for edge, sign in _edges(found, which):
        reported = np.union1d(sign * found[sign * found >= sign * edge], sign * edge)
        outer = reported[-1] + apart * np.logspace(0, 1, 12)
        gaps = [np.linspace(a, b, 17) for a, b in pairwise(reported)]
        points = np.concatenate([*gaps, outer])
        points = points[np.abs(points[:, None] - reported).min(1) >= apart * (1 - 1e-12)]
        for point in points:
            hidden = [
                _beyond(alphas, betas, float(sign * point), True, n) for alphas, betas in runs
            ]
            worst = max(worst, float(np.prod(hidden)))
    return worst


def complete_outside(alphas: Array, betas: Array, n: int) -> tuple[float, float]:
    """(low, high): below and above, an eigenvalue not found is less probable than ``MISSED``."""
    nodes = np.linalg.eigvalsh(jacobi(alphas, betas[:-1]))
    ends = []
    for sign, node in ((-1.0, nodes[0]), (1.0, nodes[-1])):
        inner, width = 0.0, float(np.abs(nodes).max() + betas.max()) or np.finfo(np.float64).tiny
        while _beyond(alphas, betas, node + sign * width, True, n) > MISSED and width < 1e150:
            inner, width = width, 2 * width
        for _ in range(40):
            middle = (inner + width) / 2
            if _beyond(alphas, betas, node + sign * middle, True, n) > MISSED:
                inner = middle
            else:
                width = middle
        ends.append(float(node + sign * width) if width > 1e-300 else float(node))
    return ends[0], ends[1]


def worthwhile(
    alphas: Array, betas: Array, found: Array, which: str, n: int, slack: float, limit: int
) -> bool:
    """Whether a search of at most ``limit`` steps will settle an end that it has not yet.

    It will if its outermost value approaches the wanted ones (a copy is emerging), or if the
    polynomials at the edge keep growing at their present rate.
    """
    s = len(alphas)
    if s < 2:
        return True
    now, before = (np.linalg.eigvalsh(jacobi(alphas[:j], betas[: j - 1])) for j in (s, s - 1))
    goal = _accepted(n)
    for edge, sign in _edges(found, which):
        if which == "magnitude":
            reach, last = float(np.abs(now).max()), float(np.abs(before).max())
        else:
            reach, last = float((sign * now).max()), float((sign * before).max())
        if sign * edge - reach <= reach - last:
            return True
        here = christoffel(alphas, betas, edge + sign * slack)
        earlier = christoffel(alphas[:-1], betas[:-1], edge + sign * slack)
        if here <= goal:
            continue
        rate = np.log(earlier / here) if here < earlier else 0.0
        if rate > 0 and s + np.log(here / goal) / rate <= limit:
            return True
    return False


def _accepted(n: int) -> float:
    """The bound on (zᵀu)² whose probability is ``MISSED`` in n dimensions."""
    return float(2 * erfinv(MISSED) ** 2 / max(n, 1))


def _edges(found: Array, which: str) -> list[tuple[float, float]]:
    """(innermost wanted value, direction outwards) of every wanted end."""
    half = len(found) // 2
    if which == "both":
        return [(float(found[:half].min()), 1.0), (float(found[half:].max()), -1.0)]
    if which == "magnitude":
        edge = float(np.abs(found).min())
        return [(edge, 1.0), (-edge, -1.0)]
    return [(float(found.min()), 1.0)] if which == "largest" else [(float(found.max()), -1.0)]


def _beyond(alphas: Array, betas: Array, edge: float, outside_nodes: bool, n: int) -> float:
    if not outside_nodes:
        return 1.0
    return float(beta.cdf(christoffel(alphas, betas, edge), 0.5, max(n - 1, 1) / 2))


# -------------------------------------------------------------------------------------------------
# What a Lanczos run knows of eigenvalues it has not found: its own start, and a search at the end.
#
# Two recurrences are evidence (``spectra/missed.py``): that of the run's random start, as long as
# no
# restart has cut it, and that of a fresh random direction followed after the wanted pairs have
# converged, the only one that can show a second copy of a value.
# -------------------------------------------------------------------------------------------------


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
