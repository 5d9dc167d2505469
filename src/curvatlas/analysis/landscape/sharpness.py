"""How fast the sharpness changes under training: dλmax/dt from the third derivative.

>>> drift = sharpness_drift(problem)         # doctest: +SKIP
>>> drift.value, drift.rate                  # doctest: +SKIP
>>> drift.after(learning_rate=0.01)          # doctest: +SKIP
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.operators.curvature import Hessian
from curvatlas.operators.third_derivative import ThirdDerivative
from curvatlas.problem import Problem
from curvatlas.results import Result
from curvatlas.spectra.eigenpairs import eigenpairs

_COPIES = 4  # eigenpairs asked for, to see whether the largest eigenvalue is a multiple one


@dataclass(frozen=True, kw_only=True)
class SharpnessDrift(Result):
    """λmax of the Hessian and its rate of change along a direction, to first order."""

    value: float  # λmax
    rate: float  # dλmax/dt along the direction; gradient flow by default
    gap: float  # λmax − λ₂: the prediction holds while the change stays well below it
    multiplicity: int  # of λmax, as far as the eigenpairs tell copies apart
    gradient_norm: float
    products: int  # with H and with its derivative
    converged: bool

    def after(self, learning_rate: float, steps: int = 1) -> float:
        """λmax after ``steps`` small steps of gradient descent, to first order in their length."""
        if not learning_rate > 0 or steps < 0:
            raise ValueError(
                f"learning_rate must be positive and steps at least 0, got {learning_rate!r} and "
                f"{steps!r}."
            )
        return self.value + steps * learning_rate * self.rate

    def __str__(self) -> str:
        direction = "sharpens" if self.rate > 0 else "flattens"
        return (
            f"λmax = {self.value:.6g} {direction} at dλ/dt = {self.rate:.4g} "
            f"(gap to the next {self.gap:.3g}, {self.products} products)"
        )


def sharpness_drift(
    problem: Problem, *, direction: Tensor | None = None, tol: float = 1e-6, seed: int = 0
) -> SharpnessDrift:
    r"""dλmax/dt = T[q, q, dθ/dt] with q the top eigenvector of the Hessian.

    Under gradient flow dθ/dt = −∇L, so that a step of gradient descent with learning rate η changes
    λmax by −η T[q, q, ∇L] + O(η²). Where λmax has copies, the fastest of their branches counts.

    direction: dθ/dt as a flat vector (P,), for instance an optimizer's step;  tol: residual of the
    eigenpairs relative to ‖H‖, with which the rate's error is of the same order over the gap.
    """
    gradient = problem.gradient()
    hessian, third = Hessian(problem), ThirdDerivative(problem)
    count = min(_COPIES, problem.size)
    pairs = eigenpairs(hessian, k=count, which="largest", tol=tol, seed=seed, data_error=False)
    values = pairs.values
    # Eigenvalues closer than their residuals cannot be told apart: one eigenspace.
    near = values[0] - values <= 2 * (pairs.residuals[0] + pairs.residuals)
    multiplicity = max(1, int(near.int().cumprod(0).sum()))
    rates = third.eigenvalue_rate(
        pairs.vectors[:, :multiplicity], -gradient if direction is None else direction
    )
    others = values[multiplicity:]
    return SharpnessDrift(
        value=float(values[0]),
        rate=float(rates[-1]),
        gap=float(values[0] - others[0]) if len(others) else math.nan,
        multiplicity=multiplicity,
        gradient_norm=float(torch.linalg.vector_norm(gradient)),
        products=hessian.products + third.products,
        converged=pairs.converged,
    )
