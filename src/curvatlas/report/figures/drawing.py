"""What the figures share: colours, the figure object, saving."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from curvatlas.results import Result
from curvatlas.ticks import tidy_log_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Array = np.ndarray[Any, np.dtype[np.float64]]

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
