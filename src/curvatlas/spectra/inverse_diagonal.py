"""The diagonal of (A + damping·I)⁻¹: known eigenpairs exactly, the rest by solves with probes."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import t as student

from curvatlas.operators.base import LinearOperator
from curvatlas.spectra.checkpoint import generator
from curvatlas.spectra.dense import symmetric_matrix
from curvatlas.spectra.diagonal import DiagonalEstimate, exact_diagonal
from curvatlas.spectra.functions import outliers
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_budget,
    check_damping,
    check_rtol,
    require_symmetric,
)
from curvatlas.spectra.solve import solve

_FEW = 64  # columns of a matrix that is inverted: fewer products than the first group of solves


@alike_on_every_rank
def inverse_diagonal(
    op: LinearOperator,
    *,
    damping: float,
    rtol: float = 0.1,
    seed: int = 0,
    max_products: int = 2000,
) -> DiagonalEstimate:
    """diag (A + damping·I)⁻¹ by solves with Rademacher probes, known eigenpairs taken out first."""
    n = require_symmetric(op, "inverse_diagonal")
    check_damping(damping)
    check_rtol(rtol)
    check_budget(max_products)
    if n <= min(max_products, _FEW):
        matrix, spent = symmetric_matrix(op, "inverse_diagonal")
        shifted = matrix + damping * torch.eye(n, dtype=matrix.dtype).to(matrix)
        return exact_diagonal(
            torch.linalg.inv(shifted).diagonal(), spent, torch.finfo(op.dtype).eps,
            "the whole matrix", condition=float(torch.linalg.cond(shifted)),
        )  # fmt: skip
    if max_products < 4:
        raise ValueError(f"{max_products} products are too few for inverse_diagonal: give 100.")
    random = generator(seed)
    first = min(60, max_products // 3, n // 2)
    vectors, known = outliers(op, first, random)
    exact = torch.zeros(n, dtype=torch.float64, device=op.device)
    if len(known):
        if np.abs(known + damping).min() == 0.0:
            raise ValueError("A + damping·I is singular: take damping above zero.")
        weights = torch.as_tensor(1 / (known + damping), dtype=torch.float64, device=op.device)
        exact = (vectors.double().pow(2) * weights[:, None]).sum(0)
    samples = torch.empty(n, 0, dtype=torch.float64, device=op.device)
    products, converged = first, False
    values, half, relative = exact, torch.full_like(exact, torch.inf), float("inf")
    while not converged:
        # Half of what is left, so that a slow solve leaves something for a second group.
        left = max_products - products
        count = min(8, left // 2)
        if count == 0 or (samples.shape[1] == 0 and count < 2):
            break
        signs = torch.randint(0, 2, (n, count), generator=random, dtype=torch.int8)
        probes = (2 * signs - 1).to(device=op.device, dtype=op.dtype)
        outside = probes - vectors.T @ (vectors @ probes)
        solved = solve(op, outside, damping=damping, rtol=min(rtol / 100, 1e-4), max_products=left)
        products += solved.products
        samples = torch.cat([samples, (probes * solved.value).double()], 1)
        m = samples.shape[1]
        error = samples.std(1) / m**0.5
        values = exact + samples.mean(1)
        relative = float(error.norm() / values.norm())
        half = float(student.ppf(0.975, m - 1)) * error + rtol / 100 * values.abs()
        converged = solved.converged and relative <= rtol
        if not solved.converged:
            break
    return DiagonalEstimate(
        values=values, interval=(values - half, values + half), relative_error=relative,
        products=products, converged=converged, exact=False,
        method="solves with Rademacher probes",
    )  # fmt: skip
