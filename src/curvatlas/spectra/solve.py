r"""(A + damping·I) x = b by conjugate gradients (positive definite) or MINRES (indefinite).

Hestenes and Stiefel 1952; Paige and Saunders 1975. Several right-hand sides go through the operator
together, each with its own coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.progress import bar
from curvatlas.results import Result
from curvatlas.spectra.requirements import (
    check_budget,
    check_damping,
    check_rtol,
    require_symmetric,
)

Method = Literal["auto", "cg", "minres"]


@dataclass(frozen=True, kw_only=True)
class Solution(Result):
    """x with (A + damping·I) x ≈ b."""

    value: Tensor  # (n,) or (n, K)
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


def solve(
    op: LinearOperator,
    b: Tensor,
    *,
    damping: float = 0.0,
    rtol: float = 1e-6,
    max_products: int | None = None,
    method: Method = "auto",
) -> Solution:
    """Solve for b (n,) or (n, K) until every residual is below rtol ‖b‖.

    auto: conjugate gradients when the operator is tagged psd and damped, MINRES otherwise.
    max_products: default 4 n, at most 2000, for each column. A singular operator gives the
    least-squares solution under MINRES, marked not converged if b is outside its range.
    """
    n = require_symmetric(op, "solve")
    check_rtol(rtol)
    check_damping(damping)
    if not isinstance(b, Tensor) or b.ndim not in (1, 2) or b.shape[0] != n or not b.numel():
        got = tuple(b.shape) if isinstance(b, Tensor) else type(b).__name__
        raise ValueError(f"b must be a tensor ({n},) or ({n}, K), got {got}.")
    if not bool(torch.isfinite(b).all()):
        raise ValueError("the right-hand side contains NaN or infinity.")
    if method not in ("auto", "cg", "minres"):
        raise ValueError(f'method must be "auto", "cg" or "minres", got {method!r}.')
    if method == "auto":
        method = "cg" if op.tags.psd and damping >= 0 else "minres"
    columns = (b.unsqueeze(-1) if b.ndim == 1 else b).to(device=op.device, dtype=op.dtype)
    count = columns.shape[1]
    budget = min(4 * n, 2000) * count if max_products is None else max_products
    check_budget(budget)
    if budget < count:
        raise ValueError(f"{budget} products do not reach for {count} right-hand sides: give more.")
    iterations = budget // count - 1  # the last product is for the residual
    run = _conjugate_gradients if method == "cg" else _minres
    x, used, message = run(op, columns, damping, rtol, iterations)
    residual = columns - (op @ x + damping * x)
    if not bool(torch.isfinite(residual).all()):
        raise FloatingPointError("a product with the operator gave NaN or infinity.")
    norms = torch.linalg.vector_norm(columns, dim=0).clamp_min(torch.finfo(op.dtype).tiny)
    relative = float((torch.linalg.vector_norm(residual, dim=0) / norms).max())
    # The recurrence's residual drifts from the true one by rounding: where it has reached the
    # tolerance, a factor of ten is forgiven.
    goal = max(rtol, 10 * torch.finfo(op.dtype).eps)
    converged = relative <= (10 * goal if message == "reached rtol" else goal)
    if not converged and message == "reached rtol":
        message = "stopped at the least-squares solution: b is partly outside the range"
    return Solution(
        value=x.squeeze(-1) if b.ndim == 1 else x,
        residual=relative,
        damping=damping,
        iterations=used,
        products=(used + 1) * count,
        converged=converged,
        method="conjugate gradients" if method == "cg" else "MINRES",
        message="converged" if converged else message,
    )


def _dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(0)


def _conjugate_gradients(
    op: LinearOperator, b: Tensor, damping: float, rtol: float, iterations: int
) -> tuple[Tensor, int, str]:
    x = torch.zeros_like(b)
    residual, direction = b.clone(), b.clone()
    square = _dots(residual, residual)
    goal = rtol**2 * square
    active = square > goal
    with bar("conjugate gradients", total=iterations) as progress:
        for step in range(iterations):
            if not bool(active.any()):
                return x, step, "reached rtol"
            image = op @ direction + damping * direction
            curvature = _dots(direction, image)
            if bool((active & (curvature <= 0)).any()):
                return x, step + 1, "negative curvature met: use method='minres' or more damping"
            if not bool(torch.isfinite(curvature).all()):
                raise FloatingPointError("a product with the operator gave NaN or infinity.")
            length = torch.where(active, square / curvature.clamp_min(1e-300), 0.0).to(x.dtype)
            x += length * direction
            residual -= length * image
            new = _dots(residual, residual)
            direction = residual + torch.where(active, new / square, 0.0).to(x.dtype) * direction
            square = torch.where(active, new, square)
            active = active & (square > goal)
            progress.update()
    done = not bool(active.any())
    return x, iterations, "reached rtol" if done else "product budget exhausted"


def _minres(
    op: LinearOperator, b: Tensor, damping: float, rtol: float, iterations: int
) -> tuple[Tensor, int, str]:
    """Lanczos with a QR factorisation of the tridiagonal matrix, updated by Givens rotations."""
    tiny = torch.finfo(b.dtype).tiny
    norm = torch.linalg.vector_norm(b, dim=0)
    x = torch.zeros_like(b)
    v, before = b / norm.clamp_min(tiny), torch.zeros_like(b)
    w, w_before = torch.zeros_like(b), torch.zeros_like(b)
    beta = torch.zeros_like(norm)
    c, s = torch.ones_like(norm), torch.zeros_like(norm)
    c_before, s_before = c.clone(), s.clone()
    left = norm.clone()  # what remains of ‖b‖ e_1 under the rotations: the residual's norm
    scale = torch.zeros_like(norm)
    active = norm > 0
    with bar("MINRES", total=iterations) as progress:
        for step in range(iterations):
            if not bool(active.any()):
                return x, step, "reached rtol"
            image = op @ v + damping * v - beta * before
            alpha = _dots(v, image)
            if not bool(torch.isfinite(alpha).all()):
                raise FloatingPointError("a product with the operator gave NaN or infinity.")
            image = image - alpha * v
            after = torch.linalg.vector_norm(image, dim=0)
            if not bool(torch.isfinite(after).all()):
                raise FloatingPointError(
                    f"the norm of a product overflows {b.dtype}: compute in float64, or scale the "
                    "loss down."
                )
            scale = torch.maximum(scale, alpha.abs() + after + beta)
            third = s_before * beta
            second = c * (c_before * beta) + s * alpha
            bar_ = c * alpha - s * (c_before * beta)
            first = torch.sqrt(bar_**2 + after**2).clamp_min(tiny)
            c_before, s_before = c, s
            c, s = bar_ / first, after / first
            direction = (v - second * w - third * w_before) / first
            singular = first <= 8 * torch.finfo(b.dtype).eps * scale
            advance = torch.where(active & ~singular, c * left, torch.zeros_like(left))
            x += advance * direction
            left = torch.where(active, -s * left, left)
            w_before, w = w, direction
            before, v, beta = v, image / after.clamp_min(tiny), after
            invariant = after <= 8 * torch.finfo(b.dtype).eps * scale
            active = active & (left.abs() > rtol * norm) & ~invariant & ~singular
            progress.update()
    done = not bool(active.any())
    return x, iterations, "reached rtol" if done else "product budget exhausted"
