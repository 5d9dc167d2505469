"""A smooth curve of a discrete measure on an axis that shows bulk and outliers together."""

from __future__ import annotations

import numpy as np

from curvatlas.spectra.krylov import Array

_POINTS = 1024
_WIDTH = 0.04  # standard deviation of the kernel on the asinh axis


def smooth(outliers: Array, rules: list[tuple[Array, Array]], size: int) -> tuple[Array, Array]:
    """(grid, density) with unit integral over the grid.

    outliers: single eigenvalues of weight 1/size; rules: Gauss rules that share the rest. Kernels
    are Gaussian in y = asinh(x/c), c the mean |node|: near zero they resolve the bulk, far out they
    widen in proportion, so that an outlier is neither a spike nor lost. A node of a rule stands for
    the eigenvalues up to halfway to its neighbours, so its kernel is at least that wide.
    """
    share = (size - len(outliers)) / size / max(len(rules), 1)
    nodes = np.concatenate([outliers, *(x for x, _ in rules)])
    weights = np.concatenate([np.full(len(outliers), 1 / size), *(w * share for _, w in rules)])
    scale = float(np.abs(nodes) @ weights) or 1.0
    y = np.arcsinh(nodes / scale)
    cells = [_cells(np.arcsinh(x / scale)) for x, _ in rules]
    widths = np.maximum(np.concatenate([np.zeros(len(outliers)), *cells]), _WIDTH)
    axis = np.linspace(y.min() - 5 * _WIDTH, y.max() + 5 * _WIDTH, _POINTS)
    kernel = np.exp(-0.5 * ((axis[:, None] - y) / widths) ** 2) / widths
    grid = scale * np.sinh(axis)
    density = kernel @ weights / (scale * np.cosh(axis))
    area = float((density[1:] + density[:-1]) @ np.diff(grid) / 2)
    return grid, density / area


def _cells(nodes: Array) -> Array:
    """Half the distance to the nearer neighbour (s,), zero for a single node."""
    if len(nodes) < 2:
        return np.zeros(len(nodes))
    gaps = np.diff(nodes)
    cells: Array = np.minimum(np.r_[gaps, gaps[-1]], np.r_[gaps[0], gaps]) / 2
    return cells
