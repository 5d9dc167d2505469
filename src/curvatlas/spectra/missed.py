r"""How probable it is that Lanczos overlooked an eigenvalue.

Follow a random unit direction u, uniform in the complement of the basis, for s Lanczos steps. If
the operator has an eigenvector z there with eigenvalue x, then for every polynomial p of degree
≤ s: p(x)² (zᵀu)² ≤ ‖p(A) u‖², and the best choice of p gives, with the orthonormal polynomials p_j
of the Lanczos recurrence (the Christoffel function),

    (zᵀu)² ≤ 1 / Σ_{j≤s} p_j(x)².

(zᵀu)² follows Beta(1/2, (n−1)/2) in n dimensions, so a small right-hand side is improbable: that
probability bounds the chance that such a z exists and was not noticed.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import beta

from curvatlas.spectra.krylov import Array
from curvatlas.spectra.quadrature import jacobi


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
    if which in ("largest", "both"):
        edge = found[: len(found) // 2].min() if which == "both" else found.min()
        worst = _beyond(alphas, betas, edge + slack, nodes.max() < edge + slack, n)
    if which in ("smallest", "both"):
        edge = found[len(found) // 2 :].max() if which == "both" else found.max()
        low = _beyond(alphas, betas, edge - slack, nodes.min() > edge - slack, n)
        worst = max(worst, low)
    if which == "magnitude":
        edge = np.abs(found).min() + slack
        inside = np.abs(nodes).max() < edge
        worst = max(_beyond(alphas, betas, sign * edge, inside, n) for sign in (1.0, -1.0))
    return worst


def closing_in(alphas: Array, betas: Array, found: Array, which: str) -> bool:
    """Whether the search's outermost values may reach the wanted ones within a few more steps."""
    if len(alphas) < 2:
        return True
    s = len(alphas)
    now, before = (np.linalg.eigvalsh(jacobi(alphas[:j], betas[: j - 1])) for j in (s, s - 1))
    half = len(found) // 2
    distances = []
    if which in ("largest", "both"):
        edge = found[:half].min() if which == "both" else found.min()
        distances.append((edge - now[-1], now[-1] - before[-1]))
    if which in ("smallest", "both"):
        edge = found[half:].max() if which == "both" else found.max()
        distances.append((now[0] - edge, before[0] - now[0]))
    if which == "magnitude":
        reach, last = np.abs(now).max(), np.abs(before).max()
        distances.append((np.abs(found).min() - reach, reach - last))
    return any(distance <= progress for distance, progress in distances)


def _beyond(alphas: Array, betas: Array, edge: float, outside_nodes: bool, n: int) -> float:
    if not outside_nodes:
        return 1.0
    return float(beta.cdf(christoffel(alphas, betas, edge), 0.5, max(n - 1, 1) / 2))
