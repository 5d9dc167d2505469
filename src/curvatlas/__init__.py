"""curvatlas: the atlas of Transformer curvature.

Public names are loaded on first use, so that ``curvatlas --help`` and ``import curvatlas``
do not pay for PyTorch before it is needed.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name → module that defines it
_PUBLIC: dict[str, str] = {
    "BlockStack": "curvatlas.blocks.stack",
    "Readout": "curvatlas.blocks.products_head",
    "BlockHessian": "curvatlas.blocks.result",
    "FFNHessian": "curvatlas.blocks.feed_forward",
    "LayerNormHessian": "curvatlas.blocks.layer_norm",
    "RMSNormHessian": "curvatlas.blocks.layer_norm",
    "SelfAttentionHessian": "curvatlas.blocks.attention",
    "TransformerBlockHessian": "curvatlas.blocks.block",
    "verify_layernorm_hessian": "curvatlas.blocks.layer_norm",
    "Anatomy": "curvatlas.anatomy",
    "anatomy_of": "curvatlas.anatomy",
    "Atlas": "curvatlas.analysis.atlas_result",
    "analyze_attention_curvature": "curvatlas.analysis.attention_curvature",
    "CurvaturePropagationAnalyzer": "curvatlas.analysis.propagation",
    "atlas": "curvatlas.analysis.atlas",
    "module_wise_curvature": "curvatlas.analysis.layerwise",
    "examine_claims": "curvatlas.analysis.claims",
    "Problem": "curvatlas.problem",
    "BlockDiagonalOperator": "curvatlas.operators.algebra",
    "DiagonalOperator": "curvatlas.operators.algebra",
    "KroneckerOperator": "curvatlas.operators.algebra",
    "Fisher": "curvatlas.operators.fisher",
    "FunctionalHessian": "curvatlas.operators.hessian",
    "GaussNewton": "curvatlas.operators.hessian",
    "Hessian": "curvatlas.operators.hessian",
    "IdentityOperator": "curvatlas.operators.algebra",
    "Jacobian": "curvatlas.operators.jacobian",
    "LinearOperator": "curvatlas.operators.base",
    "MatrixOperator": "curvatlas.operators.base",
    "Tags": "curvatlas.operators.base",
    "eigenpairs": "curvatlas.spectra.eigenpairs",
    "trace": "curvatlas.spectra.trace",
    "TransformerHessianAnalyzer": "curvatlas.analysis.analyzer",
    "EKFAC": "curvatlas.spectra.kronecker",
    "KFAC": "curvatlas.spectra.kronecker",
    "compare_densities": "curvatlas.spectra.comparison",
    "curvature_summary": "curvatlas.spectra.summary",
    "participation": "curvatlas.spectra.participation",
    "diagonal": "curvatlas.spectra.diagonal",
    "frobenius_norm": "curvatlas.spectra.norms",
    "spectral_norm": "curvatlas.spectra.norms",
    "inverse_diagonal": "curvatlas.spectra.inverse_diagonal",
    "log_determinant": "curvatlas.spectra.functions",
    "newton_step": "curvatlas.spectra.trust_region",
    "quadratic_form": "curvatlas.spectra.functions",
    "trace_function": "curvatlas.spectra.functions",
    "solve": "curvatlas.spectra.solve",
    "inverse": "curvatlas.spectra.solve",
    "least_squares": "curvatlas.spectra.solve",
    "matrix_function": "curvatlas.spectra.matrix_function",
    "cholesky_preconditioner": "curvatlas.spectra.preconditioners",
    "nystrom_preconditioner": "curvatlas.spectra.preconditioners",
    "spectral_density": "curvatlas.spectra.density",
    "CurvatureAwareOptimizer": "curvatlas.training.optimizer",
    "Monitor": "curvatlas.training.monitor",
    "prune": "curvatlas.training.pruning",
    "quantization_sensitivity": "curvatlas.training.quantization",
    "Thresholds": "curvatlas.training.events",
    "Result": "curvatlas.results",
    "ConvergenceDiagnostics": "curvatlas.analysis.diagnostics",
    "ScalingLawAnalyzer": "curvatlas.analysis.scaling",
    "landscape_convergence": "curvatlas.analysis.convergence",
    "TaylorExpansionAnalyzer": "curvatlas.analysis.taylor",
    "visualize_hessian_spectrum": "curvatlas.report.figures",
    "visualize_curvature_flow": "curvatlas.report.figures",
    "plot_scaling_law_predictions": "curvatlas.report.figures",
    "load": "curvatlas.results",
}
_MODULES = frozenset(
    {
        "analysis",
        "anatomy",
        "blocks",
        "operators",
        "parallel",
        "problem",
        "report",
        "runs",
        "spectra",
        "theory",
        "training",
        "zoo",
    }
)

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"curvatlas.{name}")
    raise AttributeError(f"module 'curvatlas' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_MODULES})
