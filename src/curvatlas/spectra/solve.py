r"""(A + damping·I) x = b by conjugate gradients (positive definite), MINRES (indefinite) or LSMR
(not symmetric), least squares by LSMR, and the inverse as an operator.

Hestenes and Stiefel 1952; Paige and Saunders 1975; Fong and Saunders 2011. Several right-hand sides
go through the operator together, each with its own coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.errors import ConvergenceError
from curvatlas.linear_operator import (
    DiagonalOperator,
    IdentityOperator,
    LinearOperator,
    MatrixOperator,
    Tags,
)
from curvatlas.precision import float64_device, in_float64
from curvatlas.progress import bar
from curvatlas.results import Result
from curvatlas.spectra.diagonal import DiagonalEstimate, exact_diagonal, moved
from curvatlas.spectra.exact import reads_at_once, symmetric_matrix
from curvatlas.spectra.functions import Outliers
from curvatlas.spectra.krylov import stride
from curvatlas.spectra.preconditioners import Precondition, Preconditioner, as_preconditioner
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    as_columns,
    as_parts,
    check_budget,
    check_damping,
    check_rtol,
    not_finite,
    require_finite,
    require_precision,
    require_square,
    require_symmetric,
)
from curvatlas.spectra.vectors import VectorSpace

if TYPE_CHECKING:
    from curvatlas.problem import Problem

Method = Literal["auto", "cg", "minres", "lsmr"]
_REACHED, _EXHAUSTED = "reached rtol", "product budget exhausted"
_NAMES = {"cg": "conjugate gradients", "minres": "MINRES", "lsmr": "LSMR"}


@dataclass(frozen=True, kw_only=True)
class Solution(Result):
    """x with (A + damping·I) x ≈ b."""

    value: Tensor  # (n,) or (n, K), with ``shard`` this process's entries
    residual: float  # largest ‖b − (A + damping·I) x‖ / ‖b‖, computed from x itself
    damping: float
    iterations: int
    products: int
    converged: bool
    method: str
    message: str

    def __str__(self) -> str:
        return (
            f"solution by {self.method}: relative residual {self.residual:.1e} "
            f"({self.message}; {self.products} products)"
        )


@alike_on_every_rank
def solve(
    op: LinearOperator,
    b: Tensor,
    *,
    damping: float = 0.0,
    rtol: float = 1e-6,
    max_products: int | None = None,
    method: Method = "auto",
    preconditioner: Preconditioner | None = None,
    shard: bool | None = None,
) -> Solution:
    """Solve for b (n,) or (n, K) until every residual is below rtol ‖b‖.

    auto: conjugate gradients when the operator is tagged psd and damped, or there is a
        preconditioner; MINRES otherwise. "lsmr" takes operators that are not symmetric, at two
        products a step.
    max_products: default 4 n, at most 2000, for each column. A singular operator gives the
        least-squares solution under MINRES, marked not converged if b is outside its range.
    preconditioner: for conjugate gradients, something close to (A + damping·I)⁻¹ that is symmetric
        and positive definite: an operator (``KFAC(problem).inverse(damping)``, a
        ``DiagonalOperator``), a function of columns (n, K), or "nystrom" or "cholesky" for
        ``nystrom_preconditioner`` and ``cholesky_preconditioner`` of this operator and damping.
    shard: every process of the group gives its own entries of b and gets its own of the solution,
        n/world of each (``op.shards``, else ``parallel.Shards``, says which). None: no, but where
        weights are spread (FSDP2) so are the vectors of the iteration; only b and the solution are
        whole. A preconditioner, and "lsmr", take whole vectors, which are gathered for them.
    """
    n = require_square(op, "solve") if method == "lsmr" else require_symmetric(op, "solve")
    check_rtol(rtol)
    check_damping(damping)
    space = VectorSpace.of(op, shard=shard)
    columns = as_parts(b, op, "b", space) if shard else space.take(as_columns(b, op, "b"))
    if method not in ("auto", *_NAMES):
        raise ValueError(f'method must be "auto", "cg", "minres" or "lsmr", got {method!r}.')
    if preconditioner is not None and method not in ("auto", "cg"):
        raise ValueError(f'a preconditioner is for method="cg", not for {method!r}.')
    if method == "auto":
        definite = op.tags.psd and damping > 0
        method = "cg" if definite or preconditioner is not None else "minres"
    count = columns.shape[1]
    budget = min(4 * n, 2000) * count if max_products is None else max_products
    check_budget(budget)
    if budget < count:
        raise ValueError(f"{budget} products do not reach for {count} right-hand sides: give more.")
    before = op.products
    precondition = _on_parts(space, as_preconditioner(preconditioner, op, damping))
    cost = count * (2 if method == "lsmr" else 1)
    # the last product is for the residual, LSMR's first for its start
    iterations = max(budget - (op.products - before) - cost, 0) // cost
    if method == "cg":
        run = _conjugate_gradients(space, op, columns, damping, rtol, iterations, precondition)
    elif method == "minres":
        run = _minres(space, op, columns, damping, rtol, iterations)
    else:
        shifted = op if damping == 0 else op + damping * IdentityOperator.like(op)
        spaces = space, space
        run = _lsmr(spaces, shifted, columns, 0.0, rtol, iterations, squares=False)
    x, used, message = run
    residual, eps = columns - (space.times(op, x) + damping * x), torch.finfo(op.dtype).eps
    relative, converged = _converged(space, residual, columns, max(rtol, 10 * eps), message)
    if not converged and message == _REACHED:
        message = "stopped at the least-squares solution: b is partly outside the range"
    if not shard:
        x = space.whole(x)
    return Solution(
        value=x.squeeze(-1) if b.ndim == 1 else x,
        residual=relative,
        damping=damping,
        iterations=used,
        products=op.products - before,
        converged=converged,
        method=_NAMES[method] + (", preconditioned" if preconditioner is not None else ""),
        message="converged" if converged else message,
    )


def _on_parts(space: VectorSpace, precondition: Precondition | None) -> Precondition | None:
    """What takes and gives whole columns, on this process's entries of them."""
    if precondition is None or space.shards is None:
        return precondition
    return lambda part: space.take(precondition(space.whole(part)))


def _converged(
    space: VectorSpace, rest: Tensor, first: Tensor, goal: float, message: str
) -> tuple[float, bool]:
    """‖rest‖ / ‖first‖, the largest of the columns, and whether that is small enough.

    The recurrence's residual drifts from the true one by rounding: where it has reached the
    tolerance, a factor of ten is forgiven.
    """
    require_finite(rest, space=space)
    norms = space.norms(first).clamp_min(torch.finfo(first.dtype).tiny)
    relative = float((space.norms(rest) / norms).max())
    return relative, relative <= (10 * goal if message == _REACHED else goal)


@alike_on_every_rank
def least_squares(
    op: LinearOperator,
    b: Tensor,
    *,
    damping: float = 0.0,
    start: Tensor | None = None,
    rtol: float = 1e-6,
    max_products: int | None = None,
) -> Solution:
    r"""x with ‖A x − b‖² + damping ‖x − start‖² least, for an A (m, n) of any shape, by LSMR.

    x = start + (AᵀA + damping·I)⁻¹ Aᵀ(b − A start); without damping, of all minimisers the nearest
    to ``start`` (default zero). b is (m,) or (m, K), start (n,) or (n, K).

    The ``residual`` of the solution is that of the normal equations, ‖Aᵀ(b − A x) + damping
    (start − x)‖ relative to ‖Aᵀ(b − A start)‖; it has converged below rtol.
    max_products: default 8 (m + n), at most 4000, for each column; Aᵀ counts as A.
    """
    require_precision(op, "least_squares")
    check_rtol(rtol)
    check_damping(damping)
    if damping < 0:
        raise ValueError(f"damping of least squares must not be negative, got {damping!r}.")
    columns = as_columns(b, op, "b")
    m, n = op.shape
    count = columns.shape[1]
    budget = min(8 * (m + n), 4000) * count if max_products is None else max_products
    check_budget(budget)
    iterations = budget // (2 * count) - 2  # two products each for the start and the residual
    if iterations < 0:
        raise ValueError(f"{budget} products do not reach for {count} right-hand sides: give more.")
    before = op.products
    x = torch.zeros(n, count, dtype=op.dtype, device=op.device)
    if start is not None:
        if start.shape[0] != n or start.shape[1:] != b.shape[1:]:
            raise ValueError(f"start must be ({n},) or ({n}, K) as b is, got {tuple(start.shape)}.")
        x = start.detach().reshape(n, count).to(device=op.device, dtype=op.dtype)
    rest = columns if start is None else columns - op @ x
    # Whole in every process: an operator of two sides has no one way to spread both.
    spaces = VectorSpace.of(op.T, shard=False), VectorSpace.of(op, shard=False)
    step, used, message = _lsmr(spaces, op, rest, damping**0.5, rtol, iterations, squares=True)
    first = op.T @ rest
    gradient = op.T @ (rest - op @ step) - damping * step
    goal = max(rtol, 100 * torch.finfo(op.dtype).eps)
    relative, converged = _converged(spaces[1], gradient, first, goal, message)
    return Solution(
        value=(x + step).reshape(n, *b.shape[1:]),
        residual=relative,
        damping=damping,
        iterations=used,
        products=op.products - before,
        converged=converged,
        method="LSMR, least squares",
        message="converged" if converged else message,
    )


def inverse(
    op: LinearOperator,
    *,
    damping: float = 0.0,
    rtol: float = 1e-8,
    max_products: int | None = None,
    method: Method = "auto",
    preconditioner: Preconditioner | None = None,
) -> LinearOperator:
    """(A + damping·I)⁻¹ as an operator: every product is a ``solve`` to ``rtol``.

    A solve that does not reach it raises ``ConvergenceError``: a product is right or there is none.
    Diagonal operators, matrices and KFAC are inverted in closed form. An operator that is not
    symmetric is solved by LSMR.
    """
    n = require_square(op, "inverse")
    check_damping(damping)
    if isinstance(op, DiagonalOperator):
        shifted = op.diagonal + damping
        if bool((shifted == 0).any()):
            raise ValueError("A + damping·I has a zero on its diagonal: it has no inverse.")
        return DiagonalOperator(1 / shifted)
    if isinstance(op, MatrixOperator):
        shift = damping * torch.eye(n, dtype=op.dtype, device=op.device)
        matrix, info = torch.linalg.inv_ex(op.matrix + shift)
        if int(info) != 0:
            raise ValueError("A + damping·I is singular: it has no inverse; take other damping.")
        if op.tags.symmetric:
            matrix = (matrix + matrix.T) / 2
        return MatrixOperator(matrix, tags=_inverse_tags(op, damping))
    closed = getattr(op, "inverse", None)
    if callable(closed):
        inverted: LinearOperator = closed(damping)
        return inverted
    if method == "auto" and not op.tags.symmetric:
        method = "lsmr"
    options: dict[str, Any] = {"rtol": rtol, "max_products": max_products, "method": method}
    if preconditioner is not None:
        options["preconditioner"] = as_preconditioner(preconditioner, op, damping)
    return InverseOperator(op, damping, options)


class InverseOperator(LinearOperator):
    """(A + damping·I)⁻¹ through solves."""

    def __init__(self, original: LinearOperator, damping: float, options: dict[str, Any]) -> None:
        super().__init__(
            original.shape,
            dtype=original.dtype,
            device=original.device,
            tags=_inverse_tags(original, damping),
        )
        self.original, self.damping, self._options = original, damping, options

    def _columns(self, columns: Tensor) -> Tensor:
        return self._solved(self.original, columns)

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self._solved(self.original.T, columns)

    def _solved(self, op: LinearOperator, columns: Tensor) -> Tensor:
        solution = solve(op, columns, damping=self.damping, **self._options)
        if not solution.converged:
            raise ConvergenceError(
                f"a product with the inverse of {op!r} stopped at the relative residual "
                f"{solution.residual:.1e} ({solution.message}): give more max_products, damping, a "
                "preconditioner, or a larger rtol."
            )
        return solution.value

    def _problem_on(self, axis: int) -> Problem | None:
        return self.original._problem_on(1 - axis)


def _inverse_tags(op: LinearOperator, damping: float) -> Tags:
    return Tags(symmetric=op.tags.symmetric, psd=op.tags.psd and damping >= 0)


def _conjugate_gradients(
    space: VectorSpace,
    op: LinearOperator,
    b: Tensor,
    damping: float,
    rtol: float,
    iterations: int,
    precondition: Precondition | None,
) -> tuple[Tensor, int, str]:
    def improved(residual: Tensor) -> Tensor:
        return residual if precondition is None else precondition(residual)

    x = torch.zeros_like(b)
    residual = b.clone()
    square = space.dots(b, b)
    goal = rtol**2 * square
    z = improved(residual)
    direction = z.clone()
    size = space.dots(residual, z)  # ‖residual‖² in the norm of the preconditioner
    active = square > goal
    # Why to stop, and whether to: x stays as it was when the first reason came up, however late
    # the host looks (``krylov.stride``).
    indefinite = bent = broken = torch.zeros((), dtype=torch.bool, device=b.device)
    looks = stride(op.device)
    with bar("conjugate gradients", total=iterations) as progress:
        for step in range(iterations):
            indefinite = indefinite | (active & ~(size > 0)).any()
            if step % looks == 0:
                going, *reasons = torch.stack([active.any(), indefinite, bent, broken]).tolist()
                if any(reasons) or not going:
                    return x, step, _ended(space, op, direction, *reasons) or _REACHED
            image = space.times(op, direction) + damping * direction
            curvature = space.dots(direction, image)
            bent = bent | (active & (curvature <= 0)).any()
            broken = broken | ~torch.isfinite(curvature).all()
            if looks == 1 and bool(bent | broken):
                return x, step + 1, _ended(space, op, image, False, bool(bent), True)
            active = active & ~(indefinite | bent | broken)
            length = torch.where(active, size / curvature.clamp_min(1e-300), 0.0).to(x.dtype)
            x += length * direction
            residual -= length * image
            z = improved(residual)
            new, square = space.together((residual * z).sum(0), (residual * residual).sum(0))
            direction = z + torch.where(active, new / size, 0.0).to(x.dtype) * direction
            size = torch.where(active, new, size)
            active = active & (square > goal)
            progress.update()
    going, *reasons = torch.stack([active.any(), indefinite, bent, broken]).tolist()
    last = _EXHAUSTED if going else _REACHED
    return x, iterations, _ended(space, op, direction, *reasons) or last


def _ended(
    space: VectorSpace,
    op: LinearOperator,
    image: Tensor,
    indefinite: bool,
    bent: bool,
    broken: bool,
) -> str:
    """Why conjugate gradients cannot go on, empty: they can; raises on NaN and infinity."""
    if indefinite:
        return "the preconditioner is not positive definite"
    if bent:
        return "negative curvature met: use method='minres' or more damping"
    if broken:
        raise not_finite(image, op=op, space=space)
    return ""


_FEWEST_STEPS = 8  # of MINRES, before it may have to choose between two solutions


def _minres(
    space: VectorSpace,
    op: LinearOperator,
    b: Tensor,
    damping: float,
    rtol: float,
    iterations: int,
) -> tuple[Tensor, int, str]:
    """Lanczos with a QR factorisation of the tridiagonal matrix, updated by Givens rotations.

    Where b lies outside the range of a singular operator, x is the least-squares solution as soon
    as ‖A r‖ is as small beside ‖A‖ ‖r‖ as rounding allows, about √ε; further steps only add to x
    what A does not see, until rounding carries it off. That x is set aside: it is the answer if
    nothing better comes.
    """
    tiny, eps = torch.finfo(b.dtype).tiny, torch.finfo(b.dtype).eps
    norm = space.norms(b)
    x = torch.zeros_like(b)
    v, before = b / norm.clamp_min(tiny), torch.zeros_like(b)
    w, w_before = torch.zeros_like(b), torch.zeros_like(b)
    beta = torch.zeros_like(norm)
    c, s = torch.ones_like(norm), torch.zeros_like(norm)
    c_before, s_before = c.clone(), s.clone()
    left = norm.clone()  # what remains of ‖b‖ e_1 under the rotations: the residual's norm
    scale = torch.zeros_like(norm)
    active = norm > 0
    looks = stride(op.device)
    aside, aside_left = x.clone(), left.clone()
    aside_step = torch.full_like(norm, float("inf"))
    setting_aside = iterations > _FEWEST_STEPS
    if setting_aside:
        iterations -= 2  # products that tell which of two solutions is the better one
    taken = iterations
    with bar("MINRES", total=iterations) as progress:
        for step in range(iterations):
            if step % looks == 0 and not bool(active.any()):
                taken = step
                break
            image = space.times(op, v) + damping * v - beta * before
            alpha = space.dots(v, image)
            after = space.norms(image - alpha * v)
            # NaN stays in the recurrence until the host looks.
            looking = (step + 1) % looks == 0 or step == iterations - 1
            if looking and not bool(torch.isfinite(after).all()):
                raise not_finite(image, op=op, space=space)
            image = image - alpha * v
            scale = torch.maximum(scale, alpha.abs() + after + beta)
            third = s_before * beta
            second = c * (c_before * beta) + s * alpha
            bar_ = c * alpha - s * (c_before * beta)
            slope = torch.sqrt(bar_**2 + (c * after) ** 2)  # ‖A r‖ / ‖r‖ before this step
            flat = active & (slope <= eps**0.5 * scale) & aside_step.isinf()
            if looks > 1 or bool(flat.any()):  # on a device the host does not wait to know
                aside = torch.where(flat, x, aside)
                aside_left = torch.where(flat, left, aside_left)
                aside_step = torch.where(flat, float(step), aside_step)
            first = torch.sqrt(bar_**2 + after**2).clamp_min(tiny)
            c_before, s_before = c, s
            c, s = bar_ / first, after / first
            direction = (v - second * w - third * w_before) / first
            singular = first <= 8 * eps * scale
            advance = torch.where(active & ~singular, c * left, torch.zeros_like(left))
            x += advance * direction
            left = torch.where(active, -s * left, left)
            w_before, w = w, direction
            before, v, beta = v, image / after.clamp_min(tiny), after
            invariant = after <= 8 * eps * scale
            stuck = (step > 3 * aside_step + 50) & (left.abs() > 0.99 * aside_left.abs())
            active = active & (left.abs() > rtol * norm) & ~invariant & ~singular & ~stuck
            progress.update()
    reason = _EXHAUSTED if bool(active.any()) else _REACHED
    unfinished = aside_step.isfinite() & (left.abs() > rtol * norm)
    if not setting_aside or not bool(unfinished.any()):
        return x, taken, reason
    # Rounding is in what the recurrence says of x.
    found, other = (space.norms(b - space.times(op, some) - damping * some) for some in (x, aside))
    return torch.where(unfinished & ~(found < 0.99 * other), aside, x), taken, reason


def _lsmr(
    spaces: tuple[VectorSpace, VectorSpace],
    op: LinearOperator,
    b: Tensor,
    damp: float,
    rtol: float,
    iterations: int,
    *,
    squares: bool,
) -> tuple[Tensor, int, str]:
    r"""min ‖A x − b‖² + damp² ‖x‖²: Golub-Kahan bidiagonalisation, MINRES on the normal equations.

    A v_k = α_k u_k + β_{k+1} u_{k+1},  Aᵀ u_{k+1} = β_{k+1} v_k + α_{k+1} v_{k+1}. Two rotations a
    step bring the bidiagonal matrix and its square to triangular form; the gradient's norm is then
    |ζ̄|, and the residual's follows from the rotations of β_1 e_1 (letters as in the paper).
    squares: stop where the gradient is small; otherwise only where the residual is.
    spaces: of A v and of v.
    """
    images, space = spaces
    tiny, eps = torch.finfo(b.dtype).tiny, torch.finfo(b.dtype).eps
    u, beta = _normalised(images, b)
    v, alpha = _normalised(space, images.times(op.T, u))
    one, zero = torch.ones_like(beta), torch.zeros_like(beta)
    alpha_bar, zeta_bar, first_gradient = alpha, alpha * beta, alpha * beta
    rho, rho_bar, c_bar, s_bar = one, one, one, zero
    h, h_bar, x = v.clone(), torch.zeros_like(v), torch.zeros_like(v)
    # the residual's recurrence
    beta_ddot, beta_dot, rho_dot = beta, zero, one
    tau = theta_tilde = zeta = lost = zero
    norm_b, square_norm = beta, alpha**2
    active = zeta_bar > 0
    looks = stride(op.device)
    broken = torch.zeros((), dtype=torch.bool, device=b.device)
    with bar("LSMR", total=iterations) as progress:
        for step in range(iterations):
            if step % looks == 0 and not bool(active.any()):
                return x, step, _REACHED
            u, beta = _normalised(images, space.times(op, v) - alpha * u)
            square_norm = square_norm + beta**2
            v, alpha = _normalised(space, images.times(op.T, u) - beta * v)
            broken = broken | ~torch.isfinite(alpha + beta).all()
            looking = (step + 1) % looks == 0 or step == iterations - 1
            if looking and bool(broken):
                raise not_finite(torch.cat([u, v]), op=op, space=space)
            # rotation of the damping into the diagonal
            alpha_hat = torch.sqrt(alpha_bar**2 + damp**2).clamp_min(tiny)
            c_hat, s_hat = alpha_bar / alpha_hat, damp / alpha_hat
            rho_before, rho = rho, torch.sqrt(alpha_hat**2 + beta**2).clamp_min(tiny)
            c, s = alpha_hat / rho, beta / rho
            theta, alpha_bar = s * alpha, c * alpha
            # rotation of R̄
            rho_bar_before, zeta_before = rho_bar, zeta
            theta_bar, diagonal = s_bar * rho, c_bar * rho
            rho_bar = torch.sqrt(diagonal**2 + theta**2).clamp_min(tiny)
            c_bar, s_bar = diagonal / rho_bar, theta / rho_bar
            zeta, zeta_bar = c_bar * zeta_bar, -s_bar * zeta_bar
            h_bar = h - (theta_bar * rho / (rho_before * rho_bar_before)) * h_bar
            x += torch.where(active, zeta / (rho * rho_bar) * h_bar, zero)
            h = v - (theta / rho) * h
            # ‖b − A x‖, damping included
            lost = lost + (s_hat * beta_ddot) ** 2
            beta_hat, beta_ddot = c * c_hat * beta_ddot, -s * c_hat * beta_ddot
            rho_tilde = torch.sqrt(rho_dot**2 + theta_bar**2).clamp_min(tiny)
            c_tilde, s_tilde = rho_dot / rho_tilde, theta_bar / rho_tilde
            tau = (zeta_before - theta_tilde * tau) / rho_tilde
            theta_tilde, rho_dot = s_tilde * rho_bar, c_tilde * rho_bar
            beta_dot = c_tilde * beta_hat - s_tilde * beta_dot
            tau_dot = (zeta - theta_tilde * tau) / rho_dot.clamp_min(tiny)
            residual = torch.sqrt(lost + (beta_dot - tau_dot) ** 2 + beta_ddot**2)
            square_norm = square_norm + alpha**2
            gradient = zeta_bar.abs()
            done = gradient <= rtol * first_gradient if squares else residual <= rtol * norm_b
            done |= gradient <= eps * square_norm.sqrt() * residual  # as small as rounding allows
            active = active & ~done & (alpha > 0)
            # What has ended is rounding from here on: keep it out of the operator.
            u, v = torch.where(active, u, zero), torch.where(active, v, zero)
            progress.update()
    return x, iterations, _EXHAUSTED if bool(active.any()) else _REACHED


def _normalised(space: VectorSpace, columns: Tensor) -> tuple[Tensor, Tensor]:
    norms = space.norms(columns)
    return columns / norms.clamp_min(torch.finfo(columns.dtype).tiny), norms


# --- the diagonal of (A + damping·I)⁻¹ ------------------------------------------------------------

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
    shard: bool | None = None,
) -> DiagonalEstimate:
    """diag (A + damping·I)⁻¹ by solves with Rademacher probes, known eigenpairs taken out first.

    max_products: default 2000 (a group of eight probes is eight solves); where that reaches for all
    columns and the estimate would take as many, they are read and the matrix is inverted.
    shard: every process gets its own entries of the result, as of ``diagonal``; solves are spread
    where the weights are.
    """
    estimate, space = _inverse_diagonal(op, damping, rtol, seed, max_products)
    return moved(estimate, space, VectorSpace.of(op, shard=bool(shard)))


def _inverse_diagonal(
    op: LinearOperator, damping: float, rtol: float, seed: int, max_products: int | None
) -> tuple[DiagonalEstimate, VectorSpace]:
    """The diagonal, and whether its entries are all or this process's."""
    whole = VectorSpace.of(op, shard=False)
    n = require_symmetric(op, "inverse_diagonal")
    check_damping(damping)
    check_rtol(rtol)
    budget = _PRODUCTS if max_products is None else max_products
    check_budget(budget)
    if reads_at_once("inverse_diagonal", n, budget):
        matrix, spent = symmetric_matrix(op, "inverse_diagonal")
        return _of_matrix(matrix, damping, spent, torch.finfo(op.dtype).eps), whole
    if budget < 4:
        raise ValueError(f"{budget} products are too few for inverse_diagonal: give 100.")
    outliers = Outliers(op, budget, seed)
    op, vectors, eigenvalues = outliers.op, outliers.vectors, outliers.values
    space = outliers.space

    def read() -> tuple[DiagonalEstimate, VectorSpace]:
        matrix, spent, eps = outliers.matrix("inverse_diagonal")
        return _of_matrix(matrix, damping, spent, eps), whole

    if outliers.kept and outliers.reads_the_rest(_GROUP * _iterations(outliers, damping, rtol)):
        return read()
    place = float64_device(op.device)
    exact = torch.zeros(space.length, dtype=torch.float64, device=place)
    if len(eigenvalues):
        if np.abs(eigenvalues + damping).min() == 0.0:
            raise ValueError("A + damping·I is singular: take damping above zero.")
        weights = torch.as_tensor(1 / (eigenvalues + damping), dtype=torch.float64, device=place)
        exact = (in_float64(vectors).pow(2) * weights[:, None]).sum(0)
    samples = torch.empty(space.length, 0, dtype=torch.float64, device=place)
    converged = False
    values, half, relative = exact, torch.full_like(exact, torch.inf), float("inf")
    while not converged:
        # Half of what is left, so that a slow solve leaves something for a second group.
        left = budget - outliers.products
        count = min(_GROUP, left // 2)
        if count == 0 or (samples.shape[1] == 0 and count < 2):
            break
        probes = space.signs(count, outliers.random)
        outside = probes - vectors.T @ space.summed(vectors @ probes)
        # A solve that takes as many products as are missing from the matrix is not gone on with.
        most = max(n - outliers.products, count) if outliers.kept else left
        solved = solve(
            op,
            outside,
            damping=damping,
            rtol=_solve_tolerance(rtol),
            max_products=min(left, most),
            shard=None if space.shards is None else True,
        )
        groups = 1.0
        if solved.converged or not outliers.kept:
            samples = torch.cat([samples, in_float64(probes * solved.value)], 1)
            m = samples.shape[1]
            error = samples.std(1) / m**0.5
            values = exact + samples.mean(1)
            relative = float(space.norm(error) / space.norm(values))
            half = float(student.ppf(0.975, m - 1)) * error + rtol / 100 * values.abs()
            converged = solved.converged and relative <= rtol
            groups = m * ((relative / rtol) ** 2 - 1) / count
        ahead = int(min(max(groups, 1.0) * solved.products, 1e9))
        if not converged and outliers.reads_the_rest(ahead):
            return read()
        if not solved.converged:
            break
    estimate = DiagonalEstimate(
        values=values,
        interval=(values - half, values + half),
        relative_error=relative,
        products=outliers.products,
        converged=converged,
        exact=False,
        method="solves with Rademacher probes",
    )
    return estimate, space


def _iterations(outliers: Outliers, damping: float, rtol: float) -> int:
    """Steps of a solve outside the known eigenpairs: ½ κ^½ ln(2/ε) of conjugate gradients.

    κ by the Ritz values that are left; where they have both signs a solve takes κ itself.
    """
    ritz = outliers.basis.ritz().values
    rest = ritz[outliers.rest(ritz)] + damping
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
    entries, condition = torch.linalg.inv(shifted).diagonal(), float(torch.linalg.cond(shifted))
    return exact_diagonal(entries, products, eps, "the whole matrix", condition=condition)
