"""A smooth curve of a discrete measure on an axis that shows bulk and outliers together."""

from __future__ import annotations

import numpy as np

from curvatlas.spectra.krylov import Array

_POINTS = 1024
_WIDTH = 0.04  # standard deviation of the kernel on the asinh axis


def smooth(nodes: Array, weights: Array, *, width: float = _WIDTH) -> tuple[Array, Array]:
    """(grid, density) with unit integral over the grid.

    The kernel is Gaussian in y = asinh(x/c), c the mean |node|: near zero it resolves the bulk,
    far out it widens in proportion, so that an outlier is neither a spike nor lost.
    """
    scale = float(np.abs(nodes) @ weights)
    if scale == 0.0:
        scale = 1.0
    y = np.arcsinh(nodes / scale)
    axis = np.linspace(y.min() - 5 * width, y.max() + 5 * width, _POINTS)
    kernel = np.exp(-0.5 * ((axis[:, None] - y[None, :]) / width) ** 2)
    on_axis = kernel @ weights
    grid = scale * np.sinh(axis)
    density = on_axis / (scale * np.cosh(axis))
    area = float((density[1:] + density[:-1]) @ np.diff(grid) / 2)
    return grid, density / area
