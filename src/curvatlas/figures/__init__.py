"""The article's three figures, and an overview: returned, saved where told, never shown."""

from curvatlas.figures.flow import visualize_curvature_flow
from curvatlas.figures.overview import visualize_overview
from curvatlas.figures.scaling import plot_scaling_law_predictions
from curvatlas.figures.spectrum import visualize_hessian_spectrum

__all__ = [
    "plot_scaling_law_predictions",
    "visualize_curvature_flow",
    "visualize_hessian_spectrum",
    "visualize_overview",
]
