r"""tr f(A), log-determinants and quadratic forms bᵀ f(A) b.

tr f(A) = Σ_i f(θ_i) + E[uᵀ f(A) u], the sum over converged eigenpairs, u on the sphere of radius √d
in the complement of their vectors. uᵀ f(A) u is integrated by the Gauss rule of u's own Lanczos run
(Golub and Meurant 2010; Ubaru, Chen and Saad 2017), the scatter of the probes gives the interval,
the change with the last quarter of the steps the resolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.linear_operator import LinearOperator
from curvatlas.precision import in_float64
from curvatlas.progress import bar
from curvatlas.results import Result
from curvatlas.spectra.checkpoint import generator
from curvatlas.spectra.estimate import Estimate, close_enough, exact_estimate, tolerance
from curvatlas.spectra.exact import (
    KeptProducts,
    products_allowed,
    reads_at_once,
    reads_the_rest,
    symmetric_matrix,
)
from curvatlas.spectra.krylov import Array, KrylovBasis
from curvatlas.spectra.quadrature import radau, recurrences, rule
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    as_columns,
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
_FEWEST_PROBES = 6


@alike_on_every_rank
def log_determinant(
    op: LinearOperator,
    *,
    damping: float = 0.0,
    rtol: float = 0.01,
    seed: int = 0,
    max_products: int | None = None,
) -> Estimate:
    """log det(A + damping·I) of a positive definite A + damping·I, as ``trace_function``."""
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
    max_products: int | None = None,
    quantity: str = "tr f(A)",
) -> Estimate:
    """tr f(A) for a function of NumPy arrays of eigenvalues, until the 95 % interval is ± rtol.

    A sum that cancels to less than a tenth of Σ|f(λ)| is asked to ``rtol`` of that tenth.
    max_products: default 600, or the columns of an operator up to 1024; they are read, and the
    trace is exact, when the estimate would take as many.
    """
    n = require_symmetric(op, quantity)
    check_rtol(rtol)
    # Twice what the others may take: a single probe is a run of thirty products.
    budget = 2 * products_allowed(None, (n + 1) // 2) if max_products is None else max_products
    check_budget(budget)
    if reads_at_once("function", n, budget):
        return _from_matrix(op, function, quantity)
    random, original = generator(seed), op
    op, before = KeptProducts.of(op, budget), op.products
    eps = torch.finfo(op.dtype).eps
    basis = lanczos(op, min(60, budget // 3, n // 2), random)
    vectors, known = outliers(basis)
    products = original.products - before
    inside = _applied(function, known)
    steps = max(min(30, (budget - 60) // 6, n - len(known)), 2)
    d = n - len(known)

    def read() -> Estimate:
        assert isinstance(op, KeptProducts)
        matrix, magnification = op.matrix(quantity)
        spent = original.products - before
        return _of_eigenvalues(matrix, function, quantity, spent, eps * magnification)

    kept = isinstance(op, KeptProducts)
    if kept:
        ahead = steps * _probes_ahead(basis, known, function, rtol)
        if reads_the_rest(n - products, ahead, budget - products):
            return read()
    scale = float(np.abs(known).max(initial=0.0))
    fine: list[float] = []
    coarse: list[float] = []
    sizes: list[float] = []
    with bar(quantity, total=budget) as progress:
        while True:
            count = _FEWEST_PROBES if not fine else min(len(fine), 16)
            count = min(count, max((budget - products) // steps, 0))
            if count == 0:
                break
            starts = torch.randn(n, count, generator=random, dtype=torch.float64, device="cpu")
            starts = starts.to(device=op.device, dtype=op.dtype)
            alphas, betas, spent = recurrences(
                op, starts, steps, vectors, scale=scale, what=quantity
            )
            products += spent
            progress.update(products - progress.n)
            scale = max(scale, float(np.abs(alphas).max()))
            fewer = max(steps - max(steps // 4, 1), 1)
            for a, b in zip(alphas, betas, strict=True):
                for integrals, s in ((fine, steps), (coarse, fewer)):
                    nodes, weights = rule(a[:s], b[:s], scale, eps, n)
                    parts = _applied(function, nodes)
                    integrals.append(d * float(weights @ parts))
                sizes.append(d * float(weights @ np.abs(parts)))
            norm = float(np.abs(inside).sum() + np.mean(sizes))
            reached = _estimate(inside, fine, coarse, rtol, norm, products, quantity)
            if reached.converged:
                return reached
            goal = tolerance(reached.value, rtol, norm)
            more = len(fine) * ((reached.error / goal) ** 2 - 1) if goal > 0 else np.inf
            ahead = max(int(np.ceil(min(more, 1e9))), 1) * steps
            if kept and reads_the_rest(n - products, ahead, budget - products):
                return read()
    if len(fine) < 2:
        raise ValueError(f"{budget} products are too few for {quantity}: give at least 100.")
    return reached


def _from_matrix(op: LinearOperator, function: Function, quantity: str) -> Estimate:
    matrix, products = symmetric_matrix(op, quantity)
    return _of_eigenvalues(matrix, function, quantity, products, torch.finfo(op.dtype).eps)


def _of_eigenvalues(
    matrix: Tensor, function: Function, quantity: str, products: int, eps: float
) -> Estimate:
    values = torch.linalg.eigvalsh(matrix).cpu().numpy()
    parts = _applied(function, values)
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
    square = float(in_float64(b).pow(2).sum())
    basis = KrylovBasis(op, min(max_products, n) + 2)
    certain = function is None and op.tags.psd and damping > 0
    f = function if function is not None else _reciprocal
    value = low = high = middle = steep = 0.0
    done = not basis.add(b)
    previous = np.inf
    betas: list[float] = []
    with bar("quadratic form", total=max_products) as progress:
        while not done and basis.products < max_products:
            betas.append(basis.expand())
            progress.update()
            alphas = np.diag(basis.coefficients)[: basis.multiplied] + damping
            nodes, weights = rule(alphas, np.array(betas), basis.scale, basis.eps, n)
            parts = _applied(f, nodes)
            value = low = high = middle = square * float(weights @ parts)
            norm = square * float(weights @ np.abs(parts))
            # A node is known to rounding of the largest eigenvalue, and f may be steep there.
            with np.errstate(all="ignore"):
                moved = np.asarray(f(nodes + 16 * basis.eps * basis.scale))
            steep = square * float(weights @ np.abs(moved - parts))
            if betas[-1] > 0 and certain:
                at, outer = radau(alphas, np.array(betas), damping)
                high = square * float(outer @ f(at))
                middle = (low + high) / 2
            elif betas[-1] > 0:
                # no bound is known: twice the last change, which Lanczos reduces geometrically
                change = 2 * abs(value - previous)
                low, high = value - change, value + change
            previous = value
            near = (high - low) / 2 <= tolerance(value, rtol, norm)
            done = betas[-1] == 0.0 or (len(betas) > 2 and near)
    refuse_asymmetric(basis, "quadratic_form")
    rounding = 64 * basis.eps * max(abs(low), abs(high))
    rounding += steep if np.isfinite(steep) else np.inf
    return Estimate(
        quantity="quadratic form", value=middle, products=basis.products,
        interval=(low - rounding, high + rounding), converged=done,
        exact=bool(betas) and betas[-1] == 0.0,
        method="Gauss and Gauss-Radau rules" if certain else "Gauss rule",
    )  # fmt: skip


def lanczos(op: LinearOperator, steps: int, random: torch.Generator) -> KrylovBasis:
    """The basis of ``steps`` Lanczos steps from a random start, or fewer where it is invariant."""
    basis = KrylovBasis(op, steps + 2)
    basis.add_random(random)
    while basis.products < steps and basis.pending:
        basis.expand()
    refuse_asymmetric(basis, "a function of a matrix")
    return basis


def outliers(basis: KrylovBasis) -> tuple[Tensor, Array]:
    """Rows (k, n) and values (k,) of the eigenpairs that the basis determines."""
    op = basis.op
    if basis.multiplied == 0:
        return torch.empty(0, op.shape[0], dtype=op.dtype, device=op.device), np.zeros(0)
    ritz = basis.ritz()
    limit = max(_CONVERGED, 100 * basis.eps) * float(np.abs(ritz.values).max())
    settled = ritz.residuals <= limit
    rows = basis.vectors(ritz.coordinates[:, settled]).T.contiguous()
    return rows, ritz.values[settled]


def _probes_ahead(basis: KrylovBasis, known: Array, function: Function, rtol: float) -> int:
    """How many probes rtol will take, by the rule of the basis' own random start.

    The mean of m probes scatters by (2 d Var f / m)^½ around d · mean f, the variance over the
    spectrum without the known eigenvalues.
    """
    nodes, weights = rule(*basis.recurrence(), basis.scale, basis.eps, basis.size)
    apart = np.abs(nodes[:, None] - known).min(1, initial=np.inf)
    weights = np.where(apart > 1e-6 * basis.scale, weights, 0.0)
    share = float(weights.sum())
    if share == 0.0:
        return _FEWEST_PROBES
    parts, inside = _applied(function, nodes), _applied(function, known)
    mean = float(weights @ parts) / share
    variance = float(weights @ (parts - mean) ** 2) / share
    d = basis.size - len(known)
    norm = float(np.abs(inside).sum()) + d * float(weights @ np.abs(parts)) / share
    goal = tolerance(float(inside.sum()) + d * mean, rtol, norm)
    needed = 2 * d * variance * (1.96 / goal) ** 2 if goal > 0 else np.inf
    return max(int(min(needed, 1e6)), _FEWEST_PROBES)


def _estimate(
    inside: Array, fine: list[float], coarse: list[float], rtol: float, norm: float, products: int,
    quantity: str,
) -> Estimate:  # fmt: skip
    values = np.array(fine)
    m = len(values)
    value = float(inside.sum() + values.mean())
    spread = float(values.std(ddof=1)) if m > 1 else float(np.abs(values).max())
    error = float(student.ppf(0.975, max(m - 1, 1))) * spread / np.sqrt(m)
    error += 1.5 * abs(float(values.mean() - np.mean(coarse))) + 1e-12 * float(np.abs(inside).sum())
    return Estimate(
        quantity=quantity, value=value, interval=(value - error, value + error),
        products=products, converged=_settled(m, value, error, rtol, norm), exact=False,
        method="Lanczos quadrature, known eigenpairs taken out",
    )  # fmt: skip


def _applied(function: Function, values: Array) -> Array:
    """function(values), refused where it is not a finite number for every value."""
    if len(values) == 0:
        return np.zeros(0)
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


def _settled(m: int, value: float, error: float, rtol: float, norm: float) -> bool:
    """Few probes may agree by chance: fewer than twelve have to agree four times as well."""
    return m >= _FEWEST_PROBES and close_enough(value, error, rtol if m >= 12 else rtol / 4, norm)


def _reciprocal(values: Array) -> Array:
    return 1.0 / values


# -------------------------------------------------------------------------------------------------
# f(A) v by Lanczos: ‖v‖ Q f(T) e_1 from the basis Q of span{v, A v, A² v, …}.
#
# f(T) is exact for polynomials up to the number of steps, and the products of A and nothing else
# enter. The error is estimated from the change over the last steps: coordinates in an orthonormal
# basis, so it costs no product (Saad 1992; Higham 2008).
# -------------------------------------------------------------------------------------------------


_LOOK_BACK = (
    3  # steps over which the change must stay below the tolerance: one may be small by luck
)


@dataclass(frozen=True, kw_only=True)
class FunctionProduct(Result):
    """f(A) v with an estimate of ‖error‖."""

    value: Tensor  # (n,) or (n, K)
    error: float  # largest over the columns, relative to ‖value‖
    products: int
    converged: bool

    def __str__(self) -> str:
        state = "" if self.converged else ", NOT converged"
        return f"f(A) v, relative error about {self.error:.1e}, {self.products} products{state}"


@alike_on_every_rank
def matrix_function(
    op: LinearOperator,
    v: Tensor,
    function: Function,
    *,
    rtol: float = 1e-8,
    max_products: int | None = None,
) -> FunctionProduct:
    """f(A) v for a symmetric A and v (n,) or (n, K), until the estimated error is below rtol.

    function: of NumPy arrays of eigenvalues, as in ``trace_function``: ``np.exp``, ``np.sqrt``,
    ``lambda x: 1 / (x + 0.1)``. It is evaluated at Ritz values, which lie within the spectrum.
    max_products: default min(n, 300) for each column.
    """
    n = require_symmetric(op, "matrix_function")
    check_rtol(rtol)
    budget = min(n, 300) if max_products is None else max_products
    check_budget(budget)
    columns = as_columns(v, op, "v")
    if max_products is not None:
        budget = max(budget // columns.shape[1], 1)
    parts = [_one(op, column, function, rtol, budget) for column in columns.T]
    value = torch.stack([part.value for part in parts], 1)
    return FunctionProduct(
        value=value.squeeze(1) if v.ndim == 1 else value,
        error=max(part.error for part in parts),
        products=sum(part.products for part in parts),
        converged=all(part.converged for part in parts),
    )


def _one(
    op: LinearOperator, v: Tensor, function: Function, rtol: float, budget: int
) -> FunctionProduct:
    n = op.shape[0]
    size = float(torch.linalg.vector_norm(in_float64(v)))
    basis = KrylovBasis(op, budget + 2)
    if size == 0.0 or not basis.add(v):
        return FunctionProduct(value=torch.zeros_like(v), error=0.0, products=0, converged=True)
    before: list[Array] = []
    with bar("f(A) v", total=budget) as progress:
        while True:
            last = basis.expand()
            progress.update()
            coordinates, rounding = _coordinates(basis, function, size)
            norm = float(np.linalg.norm(coordinates))
            complete = last == 0.0 or basis.multiplied == n
            error = rounding
            if not complete:
                error += _change(coordinates, before) if len(before) >= _LOOK_BACK else norm
            before = [*before, coordinates][-_LOOK_BACK:]
            reached = error <= max(rtol * norm, 2 * rounding)
            if complete or reached or basis.products >= budget:
                break
    refuse_asymmetric(basis, "matrix_function")
    relative = error / norm if norm > 0 else 0.0
    return FunctionProduct(
        value=basis.vectors(coordinates[:, None]).squeeze(1),
        error=relative,
        products=basis.products,
        converged=relative <= rtol,
    )


def _coordinates(basis: KrylovBasis, function: Function, size: float) -> tuple[Array, float]:
    """‖v‖ f(T) e_1 in the basis, and how far rounding of the eigenvalues moves it."""
    action = basis.coefficients[: basis.multiplied, : basis.multiplied]
    values, vectors = np.linalg.eigh((action + action.T) / 2)
    images = _applied(function, values)
    weights = size * vectors[0]
    coordinates: Array = vectors @ (images * weights)
    step = 32 * basis.eps * max(float(np.abs(values).max()), basis.scale)
    moved = images
    for shift in (step, -step):  # one side may lie outside of the function's domain
        with np.errstate(all="ignore"):
            trial = np.asarray(function(values + shift), dtype=np.float64)
        if np.isfinite(trial).all():
            moved = trial
            break
    rounding = float(np.linalg.norm((moved - images) * weights))
    return coordinates, rounding + 32 * basis.eps * float(np.linalg.norm(coordinates))


def _change(coordinates: Array, before: list[Array]) -> float:
    """The largest distance to one of the last approximations, whose basis was a part of this."""
    padded = [np.pad(earlier, (0, len(coordinates) - len(earlier))) for earlier in before]
    return max(float(np.linalg.norm(coordinates - earlier)) for earlier in padded)
