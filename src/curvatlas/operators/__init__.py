"""Matrix-free operators: H, H_o, H_f and the Fisher, whole or role by role."""

from curvatlas.linear_operator import LinearOperator, MatrixOperator, Tags
from curvatlas.operators.curvature import FunctionalHessian, GaussNewton, Hessian
from curvatlas.operators.fisher import Fisher

__all__ = [
    "Fisher",
    "FunctionalHessian",
    "GaussNewton",
    "Hessian",
    "LinearOperator",
    "MatrixOperator",
    "Tags",
]
