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
from scipy.special import betainc, erfinv

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
    alphas: Array, betas: Array, reported: Array, which: str, n: int, slack: float
) -> float:
    """Bound for an eigenvalue further out than all of ``reported`` by ``slack`` or more.

    alphas, betas: (s,) recurrence of a random direction in n dimensions; reported: the values.
    """
    nodes = np.linalg.eigvalsh(jacobi(alphas, betas[:-1]))
    worst = 0.0
    for edge, sign in _edges(reported, which):
        point = edge + sign * slack
        outermost = np.abs(nodes).max() if which == "magnitude" else (sign * nodes).max()
        worst = max(worst, _beyond(alphas, betas, point, outermost < sign * point, n))
    return worst


def separate_probability(
    runs: list[tuple[Array, Array]], reported: Array, which: str, n: int, apart: float
) -> float:
    """Bound for an eigenvalue beyond the innermost of ``reported`` and ``apart`` from all of them.

    runs: recurrences (alphas, betas) of independent random directions, the run's own start among
    them: an overlooked eigenvector must have been hidden from every one.
    """
    worst = 0.0
    for edge, sign in _edges(reported, which):
        wanted = np.union1d(sign * reported[sign * reported >= sign * edge], sign * edge)
        outer = wanted[-1] + apart * np.logspace(0, 1, 12)
        gaps = [np.linspace(a, b, 17) for a, b in pairwise(wanted)]
        points = np.concatenate([*gaps, outer])
        points = points[np.abs(points[:, None] - wanted).min(1) >= apart * (1 - 1e-12)]
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
    alphas: Array, betas: Array, reported: Array, which: str, n: int, slack: float, limit: int
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
    for edge, sign in _edges(reported, which):
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


def _edges(reported: Array, which: str) -> list[tuple[float, float]]:
    """(innermost wanted value, direction outwards) of every wanted end."""
    half = len(reported) // 2
    if which == "both":
        return [(float(reported[:half].min()), 1.0), (float(reported[half:].max()), -1.0)]
    if which == "magnitude":
        edge = float(np.abs(reported).min())
        return [(edge, 1.0), (-edge, -1.0)]
    return [(float(reported.min()), 1.0)] if which == "largest" else [(float(reported.max()), -1.0)]


def _beyond(alphas: Array, betas: Array, edge: float, outside_nodes: bool, n: int) -> float:
    if not outside_nodes:
        return 1.0
    return float(betainc(0.5, max(n - 1, 1) / 2, christoffel(alphas, betas, edge)))


_SHORT_SEARCH = 4  # products, and one more for each 50: a search expected to end by then is made
_LONGEST_SEARCH = 14  # products, while the search approaches the wanted ends


class Search:
    """What one run knows of eigenvalues it has not found; all of it goes to the checkpoint.

    Two recurrences are evidence: that of the run's random start, as long as no restart has cut it,
    and that of a fresh random direction followed after the wanted pairs have converged, the only
    one that can show a second copy of a value.
    """

    def __init__(self, basis: KrylovBasis, which: Which, *, tol: float, thorough: bool) -> None:
        self.basis, self.which, self.tol, self.thorough = basis, which, tol, thorough
        self.going_on = False  # following a random direction; its recurrence is kept here
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.searched = 0
        self.least = 0  # products of a search, however little they promise
        self.wanted: list[float] = []  # the wanted values when the search was last looked at
        self.missed = 1.0
        self.complete = (-np.inf, np.inf)
        self.plain = True  # one random start, never restarted: its recurrence is evidence too
        self.invariant = False  # a Krylov space ended early: there are few different eigenvalues
        self.start: list[list[float]] = []  # the recurrence of the random start, [alphas, betas]

    def expand(self, most: int) -> None:
        """One product with the direction that is followed; on a device up to ``most``."""
        basis = self.basis
        before, start = basis.products, basis.multiplied
        self.betas += basis.advance(most, newest=True)
        self.searched += basis.products - before
        diagonal = np.diag(basis.coefficients)[start : basis.multiplied]
        self.alphas += [float(alpha) for alpha in diagonal]

    def compare(self, current: list[float], slack: float) -> None:
        """Begin again when the search itself has brought a new wanted value."""
        before = self.wanted
        if before and max(abs(a - b) for a, b in zip(current, before, strict=True)) > slack:
            self.stop()
            self.searched, self.missed = 0, 1.0
        self.wanted = current

    def stop(self) -> None:
        """Forget the direction that is followed."""
        self.going_on, self.alphas, self.betas = False, [], []

    def settled(self, reported: Array, slack: float) -> bool:
        """Whether the search has excluded an overlooked eigenvalue, or will not by going on."""
        alphas, betas = np.array(self.alphas), np.array(self.betas)
        around = self.basis.size - self.basis.multiplied + len(alphas)
        self.missed = missed_probability(alphas, betas, reported, self.which, around, slack)
        self.complete = complete_outside(alphas, betas, around)
        if self.missed <= MISSED:
            return True
        if self.thorough or self.searched < self.least:
            return False
        limit = _SHORT_SEARCH + self.basis.products // 50
        if self.invariant or np.diff(np.sort(reported)).min(initial=np.inf) <= 1e-3 * slack:
            limit = _LONGEST_SEARCH  # copies have been seen: there may be more
            if self.searched < limit // 2:
                return False
        return self.searched >= _LONGEST_SEARCH or not worthwhile(
            alphas, betas, reported, self.which, around, slack, limit
        )

    def bounds_hold(self, ritz: RitzPairs, bounded: float | None) -> bool:
        """Whether the random start excludes eigenvalues further out than was asked."""
        if bounded is None or not self.plain or self.start:
            return True
        self.keep_start()
        nodes = ritz.values
        low, high = self.range(ritz, 0.0, self.basis.multiplied >= self.basis.size)
        self.start = []
        norm = float(np.abs(nodes).max())
        up, down = high - float(nodes[-1]), float(nodes[0]) - low
        reach = {"largest": up, "smallest": down, "both": max(up, down)}
        return reach.get(self.which, max(high, -low) - norm) <= bounded * norm

    def range(self, ritz: RitzPairs, floor: float, full: bool) -> tuple[float, float]:
        """Between which values the spectrum lies: further out the random start would show it."""
        nodes = float(ritz.values[0]), float(ritz.values[-1])
        if full:
            return nodes[0] - floor, nodes[1] + floor
        if self.plain:
            self.keep_start()
        if not self.start:
            return -np.inf, np.inf
        low, high = complete_outside(
            np.array(self.start[0]), np.array(self.start[1]), self.basis.size
        )
        # The eigenvalue that a Ritz value stands for lies within its residual, further out mostly.
        radii = floor + float(ritz.residuals[0]), floor + float(ritz.residuals[-1])
        return min(low, nodes[0] - radii[0]), max(high, nodes[1] + radii[1])

    def keep_start(self) -> None:
        """The recurrence of the start vector, once, before a search puts other rows between."""
        if not self.start:
            self.start = [part.tolist() for part in self.basis.recurrence()]

    def separate(self, reported: Array, norm: float) -> float:
        """Bound on a separate eigenvalue overlooked, from the run's own start and the search."""
        if self.plain:
            self.keep_start()
        recurrences = (self.start or [[], []], (self.alphas, self.betas))
        runs = [(np.array(a), np.array(b)) for a, b in recurrences if a]
        if not runs:
            return 1.0
        return separate_probability(
            runs, reported, self.which, self.basis.size, APART * self.tol * norm
        )

    def state(self) -> dict[str, Any]:
        """Numbers for the checkpoint."""
        return {name: _copied(getattr(self, name)) for name in _STATE}

    def restore(self, numbers: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        for name in _STATE:
            setattr(self, name, _copied(numbers[name]))


_STATE = (
    "going_on",
    "searched",
    "least",
    "wanted",
    "alphas",
    "betas",
    "missed",
    "complete",
    "plain",
    "invariant",
    "start",
)


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
