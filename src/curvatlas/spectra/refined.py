r"""Better vectors from the same products: Ritz vectors with part of their residual turned away.

In the Ritz basis the residual of e_i is z_i, its coordinates on the p pending rows. Adding unwanted
Ritz vectors j, at the distance δ_j = θ_j − θ_i, costs δ_j inside the basis and turns the residual:

    min_ε ‖z_i + Σ_j ε_j z_j‖² + Σ_j δ_j² ε_j²,    ε = −D⁻² Zᵀ (I + Z D⁻² Zᵀ)⁻¹ z_i.

At the edge of a bulk, where neighbours have not converged and lie near, the residual falls by a
quarter to a half: what one or two further products would do (refined Ritz vectors, Jia 1997). The
vectors are made orthonormal afterwards and their residuals computed, not predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvatlas.spectra.krylov import Array, KrylovBasis, RitzPairs
from curvatlas.spectra.selection import Positions

# Times the tolerance: further off, unwanted neighbours carry more of the residual than the vector
# itself, and an eigenvalue may still be emerging among them.
_WITHIN = 1.5


@dataclass(frozen=True)
class Wanted:
    """The pairs to be reported."""

    values: Array  # (k,)
    coordinates: Array  # (m, k) orthonormal columns in the basis
    residuals: Array  # (k,)


def wanted_pairs(basis: KrylovBasis, ritz: RitzPairs, chosen: Positions, accepted: float) -> Wanted:
    """The Ritz pairs, or refined ones where those reach ``accepted`` and the Ritz pairs do not."""
    plain = Wanted(ritz.values[chosen], ritz.coordinates[:, chosen], ritz.residuals[chosen])
    near = accepted < plain.residuals.max(initial=0.0) <= _WITHIN * accepted
    # What rounding did to a basis stored in fewer bits is no residual that could be turned.
    if not near or basis.store.packed:
        return plain
    better = refined(basis, ritz, chosen)
    return better if better.residuals.max() <= accepted else plain


def refined(basis: KrylovBasis, ritz: RitzPairs, chosen: Positions) -> Wanted:
    """Orthonormal vectors near the Ritz vectors ``chosen`` with smaller residuals."""
    others = np.setdiff1d(np.arange(len(ritz.values)), chosen)
    rows = ritz.pending[:, others]  # (p, m − k)
    tiny = np.finfo(np.float64).eps * max(basis.scale, np.finfo(np.float64).tiny)
    mixed = np.zeros((len(ritz.values), len(chosen)))
    for column, i in enumerate(chosen):
        weights = 1.0 / np.maximum(np.abs(ritz.values[others] - ritz.values[i]), tiny) ** 2
        inner = np.eye(len(rows)) + (rows * weights) @ rows.T
        mixed[others, column] = -weights * (rows.T @ np.linalg.solve(inner, ritz.pending[:, i]))
        mixed[i, column] = 1.0
    left, _, right = np.linalg.svd(mixed, full_matrices=False)
    coordinates = ritz.coordinates @ (left @ right)  # the nearest orthonormal columns
    action = basis.coefficients[: basis.multiplied, : basis.multiplied]
    values = np.einsum("ij,ij->j", coordinates, action @ coordinates)
    return Wanted(values, coordinates, basis.residuals(values, coordinates))
