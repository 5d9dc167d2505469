"""The report: one self-contained HTML page from any run folder, and figures for papers."""

from curvatlas.figures import (
    plot_scaling_law_predictions,
    visualize_curvature_flow,
    visualize_hessian_spectrum,
)
from curvatlas.report.page import write_report

__all__ = [
    "plot_scaling_law_predictions",
    "visualize_curvature_flow",
    "visualize_hessian_spectrum",
    "write_report",
]
