r"""Functions of a matrix: tr f(A) and log-determinants, bᵀ f(A) b, and f(A) v.

tr f(A) = Σ_i f(θ_i) + E[uᵀ f(A) u], the sum over converged eigenpairs, u on the sphere of radius √d
in the complement of their vectors. uᵀ f(A) u is integrated by the Gauss rule of u's own Lanczos run
(Golub and Meurant 2010; Ubaru, Chen and Saad 2017), the scatter of the probes gives the interval,
the change with the last quarter of the steps the resolution.

f(A) v = ‖v‖ Q f(T) e_1 in the basis Q of span{v, A v, A² v, …}: f(T) is exact for polynomials up to
the number of steps. The error is estimated from the change over the last steps: coordinates in an
orthonormal basis, so it costs no product (Saad 1992; Higham 2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import t as student
from torch import Tensor

from curvatlas.linear_operator import LinearOperator
from curvatlas.precision import in_float64
from curvatlas.progress import bar
from curvatlas.results import Result
from curvatlas.spectra.checkpoint import generator
from curvatlas.spectra.estimate import Estimate, close_enough, exact_estimate, tolerance
from curvatlas.spectra.exact import (
    MATRIX_UP_TO,
    KeptProducts,
    products_allowed,
    reads_at_once,
    reads_the_rest,
    symmetric_matrix,
)
from curvatlas.spectra.krylov import Array, KrylovBasis, krylov_steps
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
from curvatlas.spectra.vectors import VectorSpace

Function = Callable[[Array], Array]
# Residual relative to ‖A‖ below which a Ritz pair is taken out as known: what it misses of f is
# quadratic in the residual.
_CONVERGED = 1e-4
_FEWEST_PROBES = 6
_LOOK_BACK = 3  # steps over which f(A) v must stay: one change may be small by luck


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
        matrix, products = symmetric_matrix(op, quantity)
        return _of_eigenvalues(matrix, products, torch.finfo(op.dtype).eps, function, quantity)
    eps = torch.finfo(op.dtype).eps
    outliers = Outliers(op, budget, seed)
    inside = _applied(function, outliers.values)
    d = n - len(outliers.values)
    steps = max(min(30, (budget - 60) // 6, d), 2)
    fewer = max(steps - max(steps // 4, 1), 1)
    if outliers.kept and outliers.reads_the_rest(steps * _probes_ahead(outliers, function, rtol)):
        return _of_eigenvalues(*outliers.matrix(quantity), function, quantity)
    scale = float(np.abs(outliers.values).max(initial=0.0))
    fine: list[float] = []
    coarse: list[float] = []
    sizes: list[float] = []
    with bar(quantity, total=budget) as progress:
        while True:
            count = _FEWEST_PROBES if not fine else min(len(fine), 16)
            count = min(count, max((budget - outliers.products) // steps, 0))
            if count == 0:
                break
            alphas, betas, _ = recurrences(
                outliers.op,
                outliers.space.normal(count, outliers.random),
                steps,
                outliers.vectors,
                scale=scale,
                what=quantity,
            )
            progress.update(outliers.products - progress.n)
            scale = max(scale, float(np.abs(alphas).max()))
            for a, b in zip(alphas, betas, strict=True):
                for integrals, s in ((fine, steps), (coarse, fewer)):
                    nodes, weights = rule(a[:s], b[:s], scale, eps, n)
                    parts = _applied(function, nodes)
                    integrals.append(d * float(weights @ parts))
                sizes.append(d * float(weights @ np.abs(parts)))
            norm = float(np.abs(inside).sum() + np.mean(sizes))
            reached = _estimate(inside, fine, coarse, rtol, norm, outliers.products, quantity)
            if reached.converged:
                return reached
            goal = tolerance(reached.value, rtol, norm)
            more = len(fine) * ((reached.error / goal) ** 2 - 1) if goal > 0 else np.inf
            ahead = max(int(np.ceil(min(more, 1e9))), 1) * steps
            if outliers.reads_the_rest(ahead):
                return _of_eigenvalues(*outliers.matrix(quantity), function, quantity)
    if len(fine) < 2:
        raise ValueError(f"{budget} products are too few for {quantity}: give at least 100.")
    return reached


def _of_eigenvalues(
    matrix: Tensor, products: int, eps: float, function: Function, quantity: str
) -> Estimate:
    values = torch.linalg.eigvalsh(matrix).cpu().numpy()
    parts = _applied(function, values)
    # An eigenvalue is known to rounding of the largest, and a small one's f may be steep.
    moved = _applied(function, values + 32 * eps * np.abs(values).max())
    steep = float(np.abs(moved - parts).sum()) / (64 * eps)
    return exact_estimate(
        quantity,
        float(parts.sum()),
        scale=float(np.abs(parts).sum()) + steep,
        eps=eps,
        products=products,
        method="the whole matrix",
    )


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
    certain = function is None and op.tags.psd and damping > 0
    f = function if function is not None else np.reciprocal
    value = low = high = middle = steep = rounding = 0.0
    done, products, exact = True, 0, False
    previous = np.inf
    for basis, beta in krylov_steps(op, b, max_products, "quadratic form"):
        products, exact = basis.products, beta == 0.0
        alphas, betas = basis.recurrence()
        alphas = alphas + damping
        nodes, weights = rule(alphas, betas, basis.scale, basis.eps, n)
        parts = _applied(f, nodes)
        value = low = high = middle = square * float(weights @ parts)
        norm = square * float(weights @ np.abs(parts))
        # A node is known to rounding of the largest eigenvalue, and f may be steep there.
        with np.errstate(all="ignore"):
            moved = np.asarray(f(nodes + 16 * basis.eps * basis.scale))
        steep = square * float(weights @ np.abs(moved - parts))
        if beta > 0 and certain:
            at, outer = radau(alphas, betas, damping)
            high = square * float(outer @ f(at))
            middle = (low + high) / 2
        elif beta > 0:
            # no bound is known: twice the last change, which Lanczos reduces geometrically
            change = 2 * abs(value - previous)
            low, high = value - change, value + change
        previous = value
        rounding = 64 * basis.eps * max(abs(low), abs(high))
        near = (high - low) / 2 <= tolerance(value, rtol, norm)
        done = exact or (len(betas) > 2 and near)
        if done:
            break
    if products:
        refuse_asymmetric(basis, "quadratic_form")
    rounding += steep if np.isfinite(steep) else np.inf
    return Estimate(
        quantity="quadratic form",
        value=middle,
        products=products,
        interval=(low - rounding, high + rounding),
        converged=done,
        exact=exact,
        method="Gauss and Gauss-Radau rules" if certain else "Gauss rule",
    )


class Outliers:
    """Eigenpairs that a short Lanczos run determines, and the way to the whole matrix from there.

    products: all that were taken of the operator since; op: it, with its products kept where it may
    come to reading all columns.
    """

    def __init__(self, op: LinearOperator, budget: int, seed: int) -> None:
        n = op.shape[0]
        self.random, self.budget = generator(seed), budget
        self._original, self._before = op, op.products
        self.op = KeptProducts(op) if n <= min(budget, MATRIX_UP_TO) else op
        self.kept = self.op is not op
        # With products kept an operator is small, and its vectors are whole.
        self.space = VectorSpace.of(self.op)
        capacity = min(60, budget // 3, n // 2) + 2
        self.basis = KrylovBasis(self.op, capacity, shards=self.space.shards)
        self.basis.add_random(self.random)
        while (left := self.basis.capacity - 2 - self.basis.products) > 0 and self.basis.pending:
            self.basis.advance(left)
        refuse_asymmetric(self.basis, "a function of a matrix")
        shape = 0, self.space.length
        self.vectors = torch.empty(shape, dtype=op.dtype, device=op.device)  # (k, n) rows
        self.values: Array = np.zeros(0)  # (k,)
        if self.basis.multiplied:
            ritz = self.basis.ritz()
            limit = max(_CONVERGED, 100 * self.basis.eps) * float(np.abs(ritz.values).max())
            settled = ritz.residuals <= limit
            self.vectors = self.basis.vectors(ritz.coordinates[:, settled]).T.contiguous()
            self.values = ritz.values[settled]

    @property
    def products(self) -> int:
        return self._original.products - self._before

    def rest(self, nodes: Array) -> NDArray[np.bool_]:
        """Which nodes (q,) are none of the eigenvalues taken out."""
        apart = np.abs(nodes[:, None] - self.values).min(1, initial=np.inf)
        rest: NDArray[np.bool_] = apart > 1e-6 * self.basis.scale
        return rest

    def reads_the_rest(self, ahead: int) -> bool:
        """Whether all other columns cost no more than ``ahead`` and than is left."""
        missing, left = self.op.shape[0] - self.products, self.budget - self.products
        return self.kept and reads_the_rest(missing, ahead, left)

    def matrix(self, what: str) -> tuple[Tensor, int, float]:
        """The symmetric matrix in float64, the products in all, and its relative rounding."""
        assert isinstance(self.op, KeptProducts)
        matrix, magnification = self.op.matrix(what)
        return matrix, self.products, torch.finfo(self.op.dtype).eps * magnification


def _probes_ahead(outliers: Outliers, function: Function, rtol: float) -> int:
    """How many probes rtol will take, by the rule of the basis' own random start.

    The mean of m probes scatters by (2 d Var f / m)^½ around d · mean f, the variance over the
    spectrum without the known eigenvalues.
    """
    basis = outliers.basis
    nodes, weights = rule(*basis.recurrence(), basis.scale, basis.eps, basis.size)
    weights = np.where(outliers.rest(nodes), weights, 0.0)
    share = float(weights.sum())
    if share == 0.0:
        return _FEWEST_PROBES
    parts, inside = _applied(function, nodes), _applied(function, outliers.values)
    mean = float(weights @ parts) / share
    variance = float(weights @ (parts - mean) ** 2) / share
    d = basis.size - len(outliers.values)
    norm = float(np.abs(inside).sum()) + d * float(weights @ np.abs(parts)) / share
    goal = tolerance(float(inside.sum()) + d * mean, rtol, norm)
    needed = 2 * d * variance * (1.96 / goal) ** 2 if goal > 0 else np.inf
    return max(int(min(needed, 1e6)), _FEWEST_PROBES)


def _estimate(
    inside: Array,
    fine: list[float],
    coarse: list[float],
    rtol: float,
    norm: float,
    products: int,
    quantity: str,
) -> Estimate:
    values = np.array(fine)
    m = len(values)
    value = float(inside.sum() + values.mean())
    spread = float(values.std(ddof=1)) if m > 1 else float(np.abs(values).max())
    error = float(student.ppf(0.975, max(m - 1, 1))) * spread / math.sqrt(m)
    error += 1.5 * abs(float(values.mean() - np.mean(coarse))) + 1e-12 * float(np.abs(inside).sum())
    # Few probes may agree by chance: fewer than twelve have to agree four times as well.
    near = close_enough(value, error, rtol if m >= 12 else rtol / 4, norm)
    return Estimate(
        quantity=quantity,
        value=value,
        interval=(value - error, value + error),
        products=products,
        converged=m >= _FEWEST_PROBES and near,
        exact=False,
        method="Lanczos quadrature, known eigenpairs taken out",
    )


def _applied(function: Function, values: Array) -> Array:
    """function(values), refused where it is not a finite number for every value."""
    if len(values) == 0:
        return np.zeros(0)
    with np.errstate(all="ignore"):
        images = np.asarray(function(values), dtype=np.float64)
    if images.shape != values.shape:
        raise ValueError(
            f"the function must give one number for each of an array of eigenvalues, got the shape "
            f"{images.shape} for {values.shape}."
        )
    if not np.isfinite(images).all():
        bad = float(values[~np.isfinite(images)][0])
        raise ValueError(
            f"the function is not finite at the eigenvalue {bad:.3g}: take damping, or another one."
        )
    return images


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
    max_products: default min(n, 300) for each column. Where weights are spread (FSDP2) so is the
    basis; v and the value are whole in every process.
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
    size = float(torch.linalg.vector_norm(in_float64(v)))
    product = FunctionProduct(value=torch.zeros_like(v), error=0.0, products=0, converged=True)
    before: list[Array] = []
    for basis, last in krylov_steps(op, v, budget, "f(A) v"):
        coordinates, rounding = _coordinates(basis, function, size)
        norm = float(np.linalg.norm(coordinates))
        complete = last == 0.0 or basis.multiplied == op.shape[0]
        error = rounding
        if not complete:
            error += _change(coordinates, before) if len(before) >= _LOOK_BACK else norm
        before = [*before, coordinates][-_LOOK_BACK:]
        if complete or error <= max(rtol * norm, 2 * rounding) or basis.products >= budget:
            refuse_asymmetric(basis, "matrix_function")
            relative = error / norm if norm > 0 else 0.0
            product = FunctionProduct(
                value=basis.store.space.whole(basis.vectors(coordinates[:, None])).squeeze(1),
                error=relative,
                products=basis.products,
                converged=relative <= rtol,
            )
            break
    return product


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
