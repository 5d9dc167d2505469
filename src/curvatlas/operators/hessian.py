"""The Hessian H, its Gauss-Newton part H_o and the functional rest H_f = H − H_o."""

from __future__ import annotations

import warnings

from curvatlas.operators.base import Tags
from curvatlas.operators.compiled import Compile
from curvatlas.operators.curvature import CurvatureOperator
from curvatlas.operators.linearisation import (
    FunctionalLinearisation,
    HessianLinearisation,
    OuterLinearisation,
)
from curvatlas.problem import Problem


class Hessian(CurvatureOperator):
    """H = ∂²L/∂θ², by double backward on kept gradient graphs (2.1 gradients a product)."""

    linearisation = HessianLinearisation
    outer = "part"


class FunctionalHessian(CurvatureOperator):
    """H_f = Σ_z (∂ℓ/∂Z_z) ∂²Z_z/∂θ²: the network's own curvature, weighted by the loss slope."""

    linearisation = FunctionalLinearisation


class GaussNewton(CurvatureOperator):
    """H_o = Jᵀ (∂²ℓ/∂Z²) J, exact for any loss; positive semidefinite where the loss is convex."""

    linearisation = OuterLinearisation
    outer = "whole"

    def __init__(
        self,
        problem: Problem,
        *,
        budget: int | str | None = None,
        checks: bool = True,
        compile: Compile = False,
        expected_products: int | None = None,
    ) -> None:
        if problem.loss.linear:
            warnings.warn(
                f"{problem.loss.name} is linear in the outputs, so that H_o is zero: give the "
                "model's logits to a cross-entropy for the usual Gauss-Newton matrix.",
                stacklevel=2,
            )
        tags = Tags(symmetric=True, psd=problem.loss.convex)
        super().__init__(
            problem, budget=budget, checks=checks, compile=compile,
            expected_products=expected_products, tags=tags,
        )  # fmt: skip
