r"""The small end of |λ|: which magnitude 5 % of the eigenvalues that are not null stay below.

N(x), the share with |λ| ≤ x, is bracketed by the rules with nodes at x and −x. Which part of what
lies at zero is null cannot be told: with none of it null the quantile is lowest, with all of it
null highest. Between the two, and the chance of the probes, the quantile lies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from curvatlas.spectra.estimate import Interval
from curvatlas.spectra.krylov import Array
from curvatlas.spectra.probe_brackets import Probes

QUANTILE = 0.05
_HALVINGS = 14  # of the logarithm of x: to a fifth of a percent


def small_magnitude(probes: Probes, nodes: Array, weights: Array) -> tuple[float, Interval]:
    """The quantile by nodes (q,) and weights (q,), and its interval of at least 95 %."""
    sizes = np.abs(nodes)
    held = sizes > probes.zero
    if not held.any():
        return 0.0, (0.0, 0.0)
    order = np.argsort(sizes[held])
    share = np.cumsum(weights[held][order]) / weights[held].sum()
    at = min(int(np.searchsorted(share, QUANTILE)), int(held.sum()) - 1)
    value = float(sizes[held][order][at])
    least, most = np.clip(_within(probes, probes.zero), 0.0, 1.0)
    least = least if probes.ended else 0.0  # only then is a node at zero a null space
    levels = [null + (1 - null) * QUANTILE for null in (least, most)]
    low = _first(probes, lambda x: _within(probes, x)[1] >= levels[0])[0]
    high = _first(probes, lambda x: _within(probes, x)[0] >= levels[1])[1]
    return float(np.clip(value, low, high)), (low, high)


def _within(probes: Probes, x: float) -> tuple[float, float]:
    """Bounds of the share with |λ| ≤ x, at 95 %."""
    right, left = (probes.around(point, probes.steps).mean(0) for point in (x, -x))
    outside = float((np.abs(probes.outliers) <= x).sum()) / probes.size
    bounds = []
    for mass, sign in ((right[0] - left.sum(), -1), (right.sum() - left[0], 1)):
        inside = float(np.clip(mass, 0.0, 1.0))
        bounds.append(outside + probes.share * inside + sign * probes.error(inside, 0.0))
    return bounds[0], bounds[1]


def _first(probes: Probes, reached: Callable[[float], bool]) -> tuple[float, float]:
    """Around the least x with ``reached(x)``, which stays true above it."""
    low, high = np.log(probes.zero), np.log(4 * probes.scale)
    if reached(float(np.exp(low))):
        return 0.0, probes.zero
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if reached(float(np.exp(middle))):
            high = middle
        else:
            low = middle
    return float(np.exp(low)), float(np.exp(high))
