r"""tr f(A), log-determinants and quadratic forms bᵀ f(A) b.

tr f(A) = Σ_i f(θ_i) + E[uᵀ f(A) u], the sum over converged eigenpairs, u on the sphere of radius √d
in the complement of their vectors. uᵀ f(A) u is integrated by the Gauss rule of u's own Lanczos run
(Golub and Meurant 2010; Ubaru, Chen and Saad 2017), the scatter of the probes gives the interval,
the change with the last quarter of the steps the resolution.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.progress import bar
from curvatlas.spectra.checkpoint import generator
from curvatlas.spectra.dense import symmetric_matrix
from curvatlas.spectra.estimate import Estimate, close_enough, exact_estimate
from curvatlas.spectra.krylov import Array, KrylovBasis
from curvatlas.spectra.probe_lanczos import recurrences
from curvatlas.spectra.quadrature import radau, rule
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_budget,
    check_damping,
    check_rtol,
    check_vector,
    refuse_asymmetric,
    require_symmetric,
)

Function = Callable[[Array], Array]
# Residual relative to ‖A‖ below which a Ritz pair is taken out as known: what it misses of f is
# quadratic in the residual.
_CONVERGED = 1e-4
_EXACT_UP_TO = 240  # products that the shortest estimate takes: as many columns are the matrix


@alike_on_every_rank
def log_determinant(
    op: LinearOperator,
    *,
    damping: float = 0.0,
    rtol: float = 0.01,
    seed: int = 0,
    max_products: int = 2000,
) -> Estimate:
    """log det(A + damping·I) of a positive definite A + damping·I."""
    check_damping(damping)

    def logarithm(values: Array) -> Array:
        shifted = values + damping
        if shifted.min() <= 0:
            raise ValueError(
                f"A + damping·I is not positive definite (eigenvalue near {shifted.min():.3g}): "
                f"take damping above {damping - shifted.min():.3g}."
            )
        return np.log(shifted)

    return trace_function(
        op, logarithm, rtol=rtol, seed=seed, max_products=max_products, quantity="log-determinant"
    )


@alike_on_every_rank
def trace_function(
    op: LinearOperator,
    function: Function,
    *,
    rtol: float = 0.01,
    seed: int = 0,
    max_products: int = 2000,
    quantity: str = "tr f(A)",
) -> Estimate:
    """tr f(A) for a function of NumPy arrays of eigenvalues, until the 95 % interval is ± rtol."""
    n = require_symmetric(op, quantity)
    check_rtol(rtol)
    check_budget(max_products)
    if n <= min(max_products, _EXACT_UP_TO):
        return _from_matrix(op, function, quantity)
    random = generator(seed)
    before = op.products
    vectors, known = outliers(op, min(60, max_products // 3, n // 2), random)
    products = op.products - before
    inside = _applied(function, known) if len(known) else known
    steps = max(min(30, (max_products - 60) // 6, n - len(known)), 2)
    d = n - len(known)
    eps, scale = torch.finfo(op.dtype).eps, float(np.abs(known).max(initial=0.0))
    fine: list[float] = []
    coarse: list[float] = []
    with bar(quantity, total=max_products) as progress:
        while True:
            count = 6 if not fine else min(len(fine), 16)
            count = min(count, max((max_products - products) // steps, 0))
            if count == 0:
                break
            starts = torch.randn(n, count, generator=random, dtype=torch.float64)
            starts = starts.to(device=op.device, dtype=op.dtype)
            alphas, betas, spent = recurrences(op, starts, steps, vectors, scale=scale)
            products += spent
            progress.update(products - progress.n)
            scale = max(scale, float(np.abs(alphas).max()))
            fewer = max(steps - max(steps // 4, 1), 1)
            for a, b in zip(alphas, betas, strict=True):
                for integrals, s in ((fine, steps), (coarse, fewer)):
                    nodes, weights = rule(a[:s], b[:s], scale, eps, n)
                    integrals.append(d * float(weights @ _applied(function, nodes)))
            reached = _estimate(inside, fine, coarse, rtol, products, quantity)
            if reached.converged:
                return reached
    if len(fine) < 2:
        raise ValueError(f"{max_products} products are too few for {quantity}: give at least 100.")
    return _estimate(inside, fine, coarse, rtol, products, quantity)


def _from_matrix(op: LinearOperator, function: Function, quantity: str) -> Estimate:
    matrix, products = symmetric_matrix(op, quantity)
    values = torch.linalg.eigvalsh(matrix).cpu().numpy()
    parts = _applied(function, values)
    eps = torch.finfo(op.dtype).eps
    # An eigenvalue is known to rounding of the largest, and a small one's f may be steep.
    moved = _applied(function, values + 32 * eps * np.abs(values).max())
    steep = float(np.abs(moved - parts).sum()) / (64 * eps)
    return exact_estimate(
        quantity, float(parts.sum()), scale=float(np.abs(parts).sum()) + steep,
        eps=eps, products=products, method="the whole matrix",
    )  # fmt: skip


@alike_on_every_rank
def quadratic_form(
    op: LinearOperator,
    b: Tensor,
    *,
    function: Function | None = None,
    damping: float = 0.0,
    rtol: float = 1e-6,
    max_products: int = 300,
) -> Estimate:
    """bᵀ (A + damping·I)⁻¹ b, or bᵀ f(A + damping·I) b.

    For the inverse of a psd operator with damping the interval is certain: the Gauss rule lies
    below the value and the Gauss-Radau rule with a node at the damping above it.
    """
    n = require_symmetric(op, "quadratic_form")
    check_rtol(rtol)
    check_budget(max_products)
    check_damping(damping)
    check_vector(b, n, "b")
    square = float(b.double().pow(2).sum())
    basis = KrylovBasis(op, max_products + 2)
    certain = function is None and op.tags.psd and damping > 0
    f = function if function is not None else _reciprocal
    value = low = high = middle = 0.0
    done = not basis.add(b)
    previous = np.inf
    betas: list[float] = []
    with bar("quadratic form", total=max_products) as progress:
        while not done and basis.products < max_products:
            betas.append(basis.expand())
            progress.update()
            alphas = np.diag(basis.coefficients)[: basis.multiplied] + damping
            nodes, weights = rule(alphas, np.array(betas), basis.scale, basis.eps, n)
            value = low = high = middle = square * float(weights @ _applied(f, nodes))
            if betas[-1] > 0 and certain:
                at, outer = radau(alphas, np.array(betas), damping)
                high = square * float(outer @ f(at))
                middle = (low + high) / 2
            elif betas[-1] > 0:
                # no bound is known: twice the last change, which Lanczos reduces geometrically
                change = 2 * abs(value - previous)
                low, high = value - change, value + change
            previous = value
            done = betas[-1] == 0.0 or (len(betas) > 2 and high - low <= 2 * rtol * abs(value))
    refuse_asymmetric(basis, "quadratic_form")
    rounding = 64 * basis.eps * max(abs(low), abs(high))
    return Estimate(
        quantity="quadratic form", value=middle, products=basis.products,
        interval=(low - rounding, high + rounding), converged=done, exact=False,
        method="Gauss and Gauss-Radau rules" if certain else "Gauss rule",
    )  # fmt: skip


def outliers(op: LinearOperator, steps: int, random: torch.Generator) -> tuple[Tensor, Array]:
    """Rows (k, n) and values (k,) of the eigenpairs that ``steps`` Lanczos steps determine."""
    basis = KrylovBasis(op, steps + 2)
    basis.add_random(random)
    while basis.products < steps and basis.pending:
        basis.expand()
    if basis.multiplied == 0:
        return torch.empty(0, op.shape[0], dtype=op.dtype, device=op.device), np.zeros(0)
    refuse_asymmetric(basis, "a function of a matrix")
    ritz = basis.ritz()
    limit = max(_CONVERGED, 100 * basis.eps) * float(np.abs(ritz.values).max())
    settled = ritz.residuals <= limit
    rows = basis.vectors(ritz.coordinates[:, settled]).T.contiguous()
    return rows, ritz.values[settled]


def _estimate(
    inside: Array, fine: list[float], coarse: list[float], rtol: float, products: int, quantity: str
) -> Estimate:
    values = np.array(fine)
    m = len(values)
    value = float(inside.sum() + values.mean())
    spread = float(values.std(ddof=1)) if m > 1 else float(np.abs(values).max())
    error = float(student.ppf(0.975, max(m - 1, 1))) * spread / np.sqrt(m)
    error += 1.5 * abs(float(values.mean() - np.mean(coarse))) + 1e-12 * float(np.abs(inside).sum())
    return Estimate(
        quantity=quantity, value=value, interval=(value - error, value + error),
        products=products, converged=_settled(m, value, error, rtol), exact=False,
        method="Lanczos quadrature, known eigenpairs taken out",
    )  # fmt: skip


def _applied(function: Function, values: Array) -> Array:
    """function(values), refused where it is not a finite number for every value."""
    with np.errstate(all="ignore"):
        found = np.asarray(function(values), dtype=np.float64)
    if found.shape != values.shape:
        raise ValueError(
            f"the function must give one number for each of an array of eigenvalues, got the shape "
            f"{found.shape} for {values.shape}."
        )
    if not np.isfinite(found).all():
        bad = float(values[~np.isfinite(found)][0])
        raise ValueError(
            f"the function is not finite at the eigenvalue {bad:.3g}: take damping, or another one."
        )
    return found


def _settled(m: int, value: float, error: float, rtol: float) -> bool:
    """Few probes may agree by chance: fewer than twelve have to agree four times as well."""
    return m >= 6 and close_enough(value, error, rtol if m >= 12 else rtol / 4)


def _reciprocal(values: Array) -> Array:
    return 1.0 / values
