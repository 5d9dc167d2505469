r"""Newton step with a trust region: min_s gᵀs + ½ sᵀA s subject to ‖s‖ ≤ radius.

Generalised Lanczos (Gould, Lucidi, Roma and Toint 1999): in the Krylov basis of g the problem is
small and solved exactly, (T + λI) h = −‖g‖ e_1 with λ ≥ max(0, −λ_min(T)); indefinite A is no
obstacle. The residual of the full problem is the pending row's coefficient times h.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from curvatlas.linear_operator import LinearOperator
from curvatlas.precision import in_float64
from curvatlas.results import Result
from curvatlas.spectra.krylov import Array, krylov_steps
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_budget,
    check_rtol,
    check_vector,
    refuse_asymmetric,
    require_symmetric,
)


@dataclass(frozen=True, kw_only=True)
class NewtonStep(Result):
    """The minimiser of the quadratic model within the trust region."""

    value: Tensor  # (n,) the step s
    decrease: float  # −(gᵀs + ½ sᵀA s) ≥ 0
    multiplier: float  # λ: zero inside the region
    on_boundary: bool
    residual: float  # ‖(A + λI) s + g‖ / ‖g‖
    products: int
    converged: bool

    def __str__(self) -> str:
        where = "on the boundary" if self.on_boundary else "inside"
        state = "" if self.converged else ", NOT converged"
        return (
            f"Newton step of length {float(self.value.norm()):.3g} ({where}), predicted decrease "
            f"{self.decrease:.3g}, residual {self.residual:.1e}, {self.products} products{state}"
        )


@alike_on_every_rank
def newton_step(
    op: LinearOperator,
    gradient: Tensor,
    *,
    radius: float,
    rtol: float = 1e-3,
    max_products: int | None = None,
) -> NewtonStep:
    """The trust-region step for the model gᵀs + ½ sᵀA s; max_products: default min(n, 200).

    Where weights are spread (FSDP2) so is the basis; gradient and step are whole in every process.
    """
    n = require_symmetric(op, "newton_step")
    check_rtol(rtol)
    check_vector(gradient, n, "the gradient")
    if not radius > 0:
        raise ValueError(f"radius must be positive, got {radius!r}.")
    budget = min(n, 200) if max_products is None else max_products
    check_budget(budget)
    size = float(torch.linalg.vector_norm(in_float64(gradient)))
    step = NewtonStep(
        value=torch.zeros_like(gradient),
        decrease=0.0,
        multiplier=0.0,
        on_boundary=False,
        residual=0.0,
        products=0,
        converged=True,
    )
    for basis, last in krylov_steps(op, gradient, budget, "Newton step"):
        action = basis.coefficients[: basis.multiplied, : basis.multiplied]
        h, multiplier = _small(action, size, radius)
        residual = last * abs(float(h[-1])) / size
        done = residual <= rtol or last == 0.0
        if done or basis.products >= budget:
            refuse_asymmetric(basis, "newton_step")
            step = NewtonStep(
                value=basis.store.space.whole(basis.vectors(h[:, None])).squeeze(1),
                decrease=-float(size * h[0] + 0.5 * float(h @ action @ h)),
                multiplier=multiplier,
                on_boundary=multiplier > 0,
                residual=residual,
                products=basis.products,
                converged=done,
            )
            break
    return step


def _small(action: Array, size: float, radius: float) -> tuple[Array, float]:
    """The problem in the basis, by the secular equation ‖h(λ)‖ = radius."""
    values, vectors = np.linalg.eigh((action + action.T) / 2)
    right = -size * vectors[0]  # −‖g‖ e_1 in the eigenbasis

    def step(shift: float) -> Array:
        result: Array = right / (values + shift)
        return result

    if values[0] > 0 and np.linalg.norm(step(0.0)) <= radius:
        return vectors @ step(0.0), 0.0
    if not np.isfinite(radius):
        raise ValueError(
            f"the model falls without end along negative curvature ({values[0]:.3g}): give a "
            "finite radius."
        )
    floor = max(0.0, -float(values[0]))
    low = floor + 1e-14 * max(size / radius, abs(float(values[0])), 1e-300)
    high = floor + (1 + 1e-8) * size / radius + 1e-300  # rounding: the step there is not longer
    if np.linalg.norm(step(low)) <= radius:
        # Hard case: g has no part along the lowest eigenvector; go along it to the boundary.
        inside = step(low)
        inside[0] = 0.0
        inside[0] = np.sqrt(max(radius**2 - float(inside @ inside), 0.0))
        return vectors @ inside, floor
    shift = brentq(lambda x: 1 / np.linalg.norm(step(x)) - 1 / radius, low, high, xtol=1e-15 * high)
    return vectors @ step(float(shift)), float(shift)
