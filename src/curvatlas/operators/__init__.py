"""Matrix-free operators: H, H_o, H_f and the Fisher, whole or role by role."""

from curvatlas.operators.base import LinearOperator, MatrixOperator, Tags
from curvatlas.operators.fisher import Fisher
from curvatlas.operators.hessian import FunctionalHessian, GaussNewton, Hessian

__all__ = [
    "Fisher",
    "FunctionalHessian",
    "GaussNewton",
    "Hessian",
    "LinearOperator",
    "MatrixOperator",
    "Tags",
]
