"""Which eigenvalues are wanted, and in what order they are reported."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from curvatlas.spectra.krylov import Array

Which = Literal["largest", "smallest", "both", "magnitude"]
WHICH: tuple[Which, ...] = ("largest", "smallest", "both", "magnitude")
Positions = NDArray[np.int64]


def select(values: Array, k: int, which: Which) -> Positions:
    """Positions of the wanted ones among ascending ``values``, in the order they are reported."""
    m = len(values)
    if which == "largest":
        return np.arange(m - 1, max(m - 1 - k, -1), -1)
    if which == "smallest":
        return np.arange(min(k, m))
    if which == "both":
        if 2 * k >= m:
            return np.arange(m - 1, -1, -1)
        return np.concatenate([np.arange(m - 1, m - 1 - k, -1), np.arange(k - 1, -1, -1)])
    return np.argsort(-np.abs(values), kind="stable")[:k]


def by_interest(values: Array, which: Which) -> Positions:
    """All positions, those nearest to the wanted end first."""
    m = len(values)
    if which == "largest":
        return np.arange(m - 1, -1, -1)
    if which == "smallest":
        return np.arange(m)
    if which == "magnitude":
        return np.argsort(-np.abs(values), kind="stable")
    both = np.empty(m, dtype=np.int64)
    both[0::2] = np.arange(m - 1, m - 1 - len(both[0::2]), -1)
    both[1::2] = np.arange(len(both[1::2]))
    return both
