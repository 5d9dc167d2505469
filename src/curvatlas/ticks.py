"""Tick labels of logarithmic axes that neither overlap nor vanish."""

from __future__ import annotations

import math
from typing import Any

_FEW_DECADES = 2.0  # below this, 1, 2 and 5 of every decade are labelled


def tidy_log_axes(figure: Any) -> Any:
    """Label decades, or 1, 2, 5 where there are few; returns the figure.

    Matplotlib labels every minor tick of an axis shorter than a decade, over each other.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
            low, high = sorted(axis.get_view_interval())
            if axis.get_scale() == "log" and low > 0 and math.log10(high / low) < _FEW_DECADES:
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return figure
