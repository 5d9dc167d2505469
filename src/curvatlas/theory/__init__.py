"""Every statement of the sources executable, and bounds a user can call on their own block.

``theory.bounds(block, x, target)`` → printed, data-free, token-structured and exact norm.
``theory.directional_derivatives(block, x, target, v)`` → ℓ, ℓ', ℓ'', ℓ''' along v.
``scalar_attention_spectrum(x, y, query=…, key=…, value=…)`` → the scalar model, in closed form.
``theory.all_statements()`` → the registry behind ``curvatlas verify``.
``theory.find("layer-norm-jacobian").run()`` → measure one statement now.
``theory.statements_by_paper_id()["petrov-thm3"]`` → the statements behind a number of the papers.
"""

from curvatlas.theory.norm_bounds import CurvatureBounds, bounds
from curvatlas.theory.scalar_attention import (
    ScalarAttentionSpectrum,
    scalar_attention_spectrum,
)
from curvatlas.theory.statements import (
    CheckEffort,
    Outcome,
    Statement,
    all_statements,
    find,
    statements_by_paper_id,
)
from curvatlas.theory.third_order import DirectionalDerivatives, directional_derivatives

__all__ = [
    "CheckEffort",
    "CurvatureBounds",
    "DirectionalDerivatives",
    "Outcome",
    "ScalarAttentionSpectrum",
    "Statement",
    "all_statements",
    "bounds",
    "directional_derivatives",
    "find",
    "scalar_attention_spectrum",
    "statements_by_paper_id",
]
