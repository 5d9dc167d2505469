"""Every statement of the sources executable, and bounds a user can call on their own block.

from curvatlas import theory
theory.bounds(block, x, target)          # printed, data-free, token-structured, exact
theory.statements()                      # the registry behind ``curvatlas verify``
theory.find("layer-norm-jacobian").run() # measure one statement now
"""

from curvatlas.theory.spectral_bounds import CurvatureBounds, bounds
from curvatlas.theory.statements import Effort, Outcome, Statement, find, statements

__all__ = [
    "CurvatureBounds",
    "Effort",
    "Outcome",
    "Statement",
    "bounds",
    "find",
    "statements",
]
