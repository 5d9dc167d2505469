"""One picture a kind of result, and the article's three figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from curvatlas.figures import landscape, maps, papers, theory, training
from curvatlas.figures.flow import visualize_curvature_flow
from curvatlas.figures.scaling import plot_scaling_law_predictions
from curvatlas.figures.spectrum import visualize_hessian_spectrum
from curvatlas.figures.style import DRAWINGS, STAGED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvatlas.results import Result

__all__ = [
    "DRAWINGS",
    "draw",
    "landscape",
    "maps",
    "papers",
    "plot_scaling_law_predictions",
    "theory",
    "training",
    "visualize_curvature_flow",
    "visualize_hessian_spectrum",
]


def draw(stages: Mapping[str, Result], **options: Any) -> Figure:
    """Several results of one kind in one picture, each under its words: {"at the start": …}."""
    kinds = {result.kind for result in stages.values()}
    if len(kinds) != 1 or not kinds <= STAGED:
        raise ValueError(
            f"one picture shows results of one kind out of {', '.join(sorted(STAGED))}, got "
            f"{', '.join(sorted(kinds)) or 'none'}."
        )
    return DRAWINGS[kinds.pop()](stages, **options)
