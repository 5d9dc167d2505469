"""The diagonal of (A + damping·I)⁻¹: known eigenpairs exactly, the rest by solves with probes."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.precision import float64_device, in_float64
from curvatlas.spectra.checkpoint import generator
from curvatlas.spectra.dense import KeptProducts, reads_the_rest, symmetric_matrix
from curvatlas.spectra.diagonal import DiagonalEstimate, exact_diagonal
from curvatlas.spectra.functions import lanczos, outliers
from curvatlas.spectra.krylov import Array, KrylovBasis
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_budget,
    check_damping,
    check_rtol,
    require_symmetric,
)
from curvatlas.spectra.solve import solve

_FEW = 200  # columns of a matrix that is inverted: as many products as a short estimate takes
_PRODUCTS = 2000
_GROUP = 8  # probes that are solved for at once


@alike_on_every_rank
def inverse_diagonal(
    op: LinearOperator,
    *,
    damping: float,
    rtol: float = 0.1,
    seed: int = 0,
    max_products: int | None = None,
) -> DiagonalEstimate:
    """diag (A + damping·I)⁻¹ by solves with Rademacher probes, known eigenpairs taken out first.

    max_products: default 2000 (a group of eight probes is eight solves); where that reaches for all
    columns and the estimate would take as many, they are read and the matrix is inverted.
    """
    n = require_symmetric(op, "inverse_diagonal")
    check_damping(damping)
    check_rtol(rtol)
    budget = _PRODUCTS if max_products is None else max_products
    check_budget(budget)
    if n <= min(budget, _FEW):
        matrix, spent = symmetric_matrix(op, "inverse_diagonal")
        return _of_matrix(matrix, damping, spent, torch.finfo(op.dtype).eps)
    if budget < 4:
        raise ValueError(f"{budget} products are too few for inverse_diagonal: give 100.")
    random, original = generator(seed), op
    op, before = KeptProducts.of(op, budget), op.products
    basis = lanczos(op, min(60, budget // 3, n // 2), random)
    vectors, known = outliers(basis)
    products = original.products - before

    def read() -> DiagonalEstimate:
        assert isinstance(op, KeptProducts)
        matrix, magnification = op.matrix("inverse_diagonal")
        eps = torch.finfo(op.dtype).eps * magnification
        return _of_matrix(matrix, damping, original.products - before, eps)

    kept = isinstance(op, KeptProducts)
    if kept and reads_the_rest(
        n - products, _GROUP * _iterations(basis, known, damping, rtol), budget - products
    ):
        return read()
    place = float64_device(op.device)
    exact = torch.zeros(n, dtype=torch.float64, device=place)
    if len(known):
        if np.abs(known + damping).min() == 0.0:
            raise ValueError("A + damping·I is singular: take damping above zero.")
        weights = torch.as_tensor(1 / (known + damping), dtype=torch.float64, device=place)
        exact = (in_float64(vectors).pow(2) * weights[:, None]).sum(0)
    samples = torch.empty(n, 0, dtype=torch.float64, device=place)
    converged = False
    values, half, relative = exact, torch.full_like(exact, torch.inf), float("inf")
    while not converged:
        # Half of what is left, so that a slow solve leaves something for a second group.
        left = budget - products
        count = min(_GROUP, left // 2)
        if count == 0 or (samples.shape[1] == 0 and count < 2):
            break
        signs = torch.randint(0, 2, (n, count), generator=random, dtype=torch.int8, device="cpu")
        probes = (2 * signs - 1).to(device=op.device, dtype=op.dtype)
        outside = probes - vectors.T @ (vectors @ probes)
        # A solve that takes as many products as are missing from the matrix is not gone on with.
        most = max(n - products, count) if kept else left
        solved = solve(
            op, outside, damping=damping, rtol=_solve_tolerance(rtol), max_products=min(left, most)
        )
        products += solved.products
        groups = 1.0
        if solved.converged or not kept:
            samples = torch.cat([samples, in_float64(probes * solved.value)], 1)
            m = samples.shape[1]
            error = samples.std(1) / m**0.5
            values = exact + samples.mean(1)
            relative = float(error.norm() / values.norm())
            half = float(student.ppf(0.975, m - 1)) * error + rtol / 100 * values.abs()
            converged = solved.converged and relative <= rtol
            groups = m * ((relative / rtol) ** 2 - 1) / count
        ahead = int(min(max(groups, 1.0) * solved.products, 1e9))
        left = budget - products
        if not converged and kept and reads_the_rest(n - products, ahead, left):
            return read()
        if not solved.converged:
            break
    return DiagonalEstimate(
        values=values, interval=(values - half, values + half), relative_error=relative,
        products=products, converged=converged, exact=False,
        method="solves with Rademacher probes",
    )  # fmt: skip


def _iterations(basis: KrylovBasis, known: Array, damping: float, rtol: float) -> int:
    """Steps of a solve outside the known eigenpairs: ½ κ^½ ln(2/ε) of conjugate gradients.

    κ by the Ritz values that are left; where they have both signs a solve takes κ itself.
    """
    ritz = basis.ritz().values
    rest = ritz[np.abs(ritz[:, None] - known).min(1, initial=np.inf) > 1e-6 * basis.scale] + damping
    if len(rest) == 0:
        return 1
    least = float(np.abs(rest).min())
    if least == 0.0:
        return 10**6
    ratio = float(np.abs(rest).max()) / least
    root = ratio if rest.min() < 0 < rest.max() else ratio**0.5
    return int(min(np.ceil(root * np.log(2 / _solve_tolerance(rtol)) / 2), 1e6))


def _solve_tolerance(rtol: float) -> float:
    return min(rtol / 100, 1e-4)


def _of_matrix(matrix: Tensor, damping: float, products: int, eps: float) -> DiagonalEstimate:
    shifted = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return exact_diagonal(
        torch.linalg.inv(shifted).diagonal(), products, eps, "the whole matrix",
        condition=float(torch.linalg.cond(shifted)),
    )  # fmt: skip
