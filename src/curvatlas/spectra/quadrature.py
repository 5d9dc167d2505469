r"""Gauss rules of a Lanczos recurrence, and what they know for certain.

s steps from a unit vector u give the Jacobi matrix T of u's spectral measure μ_u: its eigenvalues
are the nodes, the squared first components of its eigenvectors the weights, and polynomials up to
degree 2s − 1 are integrated exactly (Golub and Meurant 2010).
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import eigh_tridiagonal

from curvatlas.spectra.krylov import Array

ROUNDING = 16  # times eps·scale: the norm of what rounding leaves of an invariant space
DROP = 1e-2  # β this far below a later one: the later direction was hardly in the start, or not


def jacobi(alphas: Array, betas: Array) -> Array:
    """The symmetric tridiagonal matrix of alphas (s,) and betas (s − 1,)."""
    return np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1)


def length(betas: Array, scale: float, eps: float) -> int:
    """How many steps count: up to the first β that is rounding (the Krylov space is invariant)."""
    small = np.flatnonzero(betas <= ROUNDING * eps * scale)
    return int(small[0]) + 1 if len(small) else len(betas)


def rounding_weight(eps: float, size: int) -> float:
    """A node of less weight is not in the spectrum: rounding put it there.

    A direction that rounding drew, c·eps of the start, weighs (c·eps)²; c grows with the steps. One
    of ``size`` eigenvalues weighs 1/size: a node of a thousandth of that is nothing either.
    """
    return min((1e3 * eps) ** 2, 1e-3 / size)


def rule(alphas: Array, betas: Array, scale: float, eps: float, size: int) -> tuple[Array, Array]:
    """The Gauss rule of the steps that count, without nodes that are rounding.

    scale: of the operator, so that eps·scale is the rounding of a product.
    """
    s = length(betas, scale, eps)
    nodes, weights = gauss(alphas[:s], betas[:s])
    held = weights > rounding_weight(eps, size)
    return nodes[held], weights[held] / weights[held].sum()


def invariant_after(alphas: Array, betas: Array, scale: float, eps: float, size: int) -> int:
    """After how many steps rounding went on alone; all of them if it did not.

    The space was invariant, but roundings had grown by then: β is small, far above eps, and the
    next direction is one that rounding drew. It shows by β rising again, and by all that later
    steps add elsewhere weighing less than rounding.
    """
    after = np.append(np.maximum.accumulate(betas[::-1])[::-1][1:], 0.0)
    drops = np.flatnonzero((betas <= DROP * after) & (betas <= np.sqrt(eps) * scale))
    if len(drops) == 0:
        return len(alphas)
    nodes, weights = gauss(alphas, betas)
    for i in drops[np.argsort(betas[drops])]:
        before = np.linalg.eigvalsh(jacobi(alphas[: i + 1], betas[:i]))
        elsewhere = np.abs(nodes[:, None] - before).min(1) > 4 * betas[i] + ROUNDING * eps * scale
        if weights[elsewhere].sum() <= rounding_weight(eps, size):
            return int(i) + 1
    return len(alphas)


def gauss(alphas: Array, betas: Array) -> tuple[Array, Array]:
    """Nodes (s,) ascending and weights (s,) summing to one; betas may have s or s − 1 entries."""
    nodes, vectors = eigh_tridiagonal(alphas, betas[: len(alphas) - 1])
    return nodes, vectors[0] ** 2


def radau(alphas: Array, betas: Array, point: float) -> tuple[Array, Array]:
    """The rule with one node more, placed at ``point``; needs β_s as well.

    The weights left of the point and at it bracket the measure's true mass there: with w_0 the
    weight at the point, Σ_{θ<point} w ≤ μ(−∞, point) ≤ Σ_{θ<point} w + w_0 (Chebyshev, Markov,
    Stieltjes).
    """
    s = len(alphas)
    # e_sᵀ (T − point)⁻¹ e_s by elimination from the first row on.
    pivot = scale = 0.0
    for j, alpha in enumerate(alphas):
        scale = max(scale, abs(alpha - point), betas[j])
        pivot = alpha - point - (betas[j - 1] ** 2 / pivot if j else 0.0)
        if pivot == 0.0:
            pivot = np.finfo(np.float64).tiny ** 0.5 + np.finfo(np.float64).eps ** 2 * scale
    if abs(pivot) > 1e-8 * scale:
        correction = betas[s - 1] ** 2 / pivot
    else:  # the point is a node already: the least correction that keeps it
        shifted = jacobi(alphas, betas[: s - 1]) - point * np.eye(s)
        unit = np.zeros(s)
        unit[-1] = betas[s - 1] ** 2
        correction = np.linalg.lstsq(shifted, unit, rcond=None)[0][-1]
    return gauss(np.append(alphas, point + correction), betas[:s])


def mass_below(alphas: Array, betas: Array, point: float) -> tuple[float, float]:
    """Certain bounds of μ(−∞, point) from the recurrence."""
    if betas[len(alphas) - 1] == 0.0:
        nodes, weights = gauss(alphas, betas)
        mass = float(weights[nodes < point].sum())
        return mass, mass
    nodes, weights = radau(alphas, betas, point)
    at = int(np.argmin(np.abs(nodes - point)))
    below = float(weights[:at].sum())
    return below, min(below + float(weights[at]), 1.0)


def wasserstein(a: Array, wa: Array, b: Array, wb: Array) -> float:
    """W1 = ∫ |F_a − F_b| of two discrete measures (nodes, weights summing to one)."""
    points = np.concatenate([a, b])
    signed = np.concatenate([wa, -wb])
    order = np.argsort(points, kind="stable")
    difference = np.cumsum(signed[order])[:-1]
    return float(np.abs(difference) @ np.diff(points[order]))
