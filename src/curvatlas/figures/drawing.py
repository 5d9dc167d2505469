"""What the figures share: colours, the figure object, saving."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from curvatlas.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Array = np.ndarray[Any, np.dtype[np.float64]]

# -------------------------------------------------------------------------------------------------
# Tick labels of logarithmic axes that neither overlap nor vanish.
# -------------------------------------------------------------------------------------------------


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


BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"
PathLike = str | os.PathLike[str]


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def saved(figure: Figure, path: PathLike | None) -> Figure:
    tidy_log_axes(figure)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
    return figure


def mapping(value: Result | Mapping[str, Any]) -> Mapping[str, Any]:
    return value.to_dict() if isinstance(value, Result) else value


def plain_numbers(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
