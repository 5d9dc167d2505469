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

import numpy as np
from scipy.special import erfinv
from scipy.stats import beta

from curvatlas.spectra.krylov import Array
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
