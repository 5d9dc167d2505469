"""curvatlas: the atlas of Transformer curvature.

Public names are loaded on first use, so that ``curvatlas --help`` and ``import curvatlas``
do not pay for PyTorch before it is needed.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__version__ = "0.1.0"

# public name → module that defines it
_PUBLIC: dict[str, str] = {
    "BlockStack": "curvatlas.engines.tangent.stack",
    "Readout": "curvatlas.engines.tangent.head",
    "BlockHessian": "curvatlas.closed_form.result",
    "FFNHessian": "curvatlas.closed_form.feed_forward",
    "LayerNormHessian": "curvatlas.closed_form.layer_norm",
    "RMSNormHessian": "curvatlas.closed_form.layer_norm",
    "SelfAttentionHessian": "curvatlas.closed_form.attention",
    "TransformerBlockHessian": "curvatlas.closed_form.block",
    "verify_layernorm_hessian": "curvatlas.closed_form.layer_norm",
    "Anatomy": "curvatlas.anatomy",
    "anatomy_of": "curvatlas.anatomy",
    "Atlas": "curvatlas.analysis.atlas.result",
    "analyze_attention_curvature": "curvatlas.analysis.atlas.attention",
    "CurvaturePropagationAnalyzer": "curvatlas.analysis.propagation.analyzer",
    "atlas": "curvatlas.analysis.atlas.mapping",
    "module_wise_curvature": "curvatlas.analysis.atlas.layerwise",
    "examine_claims": "curvatlas.studies.claims",
    "Problem": "curvatlas.problem",
    "BlockDiagonalOperator": "curvatlas.linear_operator",
    "DiagonalOperator": "curvatlas.linear_operator",
    "KroneckerOperator": "curvatlas.linear_operator",
    "Fisher": "curvatlas.operators.fisher",
    "FunctionalHessian": "curvatlas.operators.curvature",
    "GaussNewton": "curvatlas.operators.curvature",
    "Hessian": "curvatlas.operators.curvature",
    "IdentityOperator": "curvatlas.linear_operator",
    "Jacobian": "curvatlas.operators.jacobian",
    "LinearOperator": "curvatlas.linear_operator",
    "MatrixOperator": "curvatlas.linear_operator",
    "Tags": "curvatlas.linear_operator",
    "eigenpairs": "curvatlas.spectra.eigenpairs",
    "trace": "curvatlas.spectra.trace",
    "TransformerHessianAnalyzer": "curvatlas.analysis.analyzer",
    "EKFAC": "curvatlas.operators.kfac",
    "KFAC": "curvatlas.operators.kfac",
    "compare_densities": "curvatlas.spectra.summary",
    "curvature_summary": "curvatlas.spectra.summary",
    "participation": "curvatlas.spectra.summary",
    "diagonal": "curvatlas.spectra.diagonal",
    "frobenius_norm": "curvatlas.spectra.norms",
    "spectral_norm": "curvatlas.spectra.norms",
    "inverse_diagonal": "curvatlas.spectra.solve",
    "log_determinant": "curvatlas.spectra.functions",
    "newton_step": "curvatlas.spectra.trust_region",
    "quadratic_form": "curvatlas.spectra.functions",
    "trace_function": "curvatlas.spectra.functions",
    "solve": "curvatlas.spectra.solve",
    "inverse": "curvatlas.spectra.solve",
    "least_squares": "curvatlas.spectra.solve",
    "matrix_function": "curvatlas.spectra.functions",
    "cholesky_preconditioner": "curvatlas.spectra.preconditioners",
    "nystrom_preconditioner": "curvatlas.spectra.preconditioners",
    "spectral_density": "curvatlas.spectra.density",
    "CurvatureAwareOptimizer": "curvatlas.training.optimizer",
    "Monitor": "curvatlas.training.monitor",
    "prune": "curvatlas.training.pruning",
    "quantization_sensitivity": "curvatlas.training.pruning",
    "Thresholds": "curvatlas.training.snapshot",
    "Result": "curvatlas.results",
    "ConvergenceDiagnostics": "curvatlas.analysis.diagnostics",
    "ScalingLawAnalyzer": "curvatlas.scaling.analyzer",
    "landscape_convergence": "curvatlas.analysis.landscape.convergence",
    "TaylorExpansionAnalyzer": "curvatlas.analysis.landscape.taylor",
    "visualize_hessian_spectrum": "curvatlas.figures",
    "visualize_curvature_flow": "curvatlas.figures",
    "plot_scaling_law_predictions": "curvatlas.figures",
    "load": "curvatlas.results",
    "survey": "curvatlas.surveying",
}
_MODULES = frozenset(
    {
        "analysis",
        "anatomy",
        "closed_form",
        "engines",
        "figures",
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
    if name == "blocks":
        warnings.warn(
            "curvatlas.blocks is now curvatlas.closed_form", DeprecationWarning, stacklevel=2
        )
        name = "closed_form"
    if name in _MODULES:
        return importlib.import_module(f"curvatlas.{name}")
    raise AttributeError(f"module 'curvatlas' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_MODULES})
