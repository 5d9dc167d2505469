r"""f(A) v by Lanczos: ‖v‖ Q f(T) e_1 from the basis Q of span{v, A v, A² v, …}.

f(T) is exact for polynomials up to the number of steps, and the products of A and nothing else
enter. The error is estimated from the change over the last steps: coordinates in an orthonormal
basis, so it costs no product (Saad 1992; Higham 2008).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.precision import in_float64
from curvatlas.progress import bar
from curvatlas.results import Result
from curvatlas.spectra.functions import Function, _applied
from curvatlas.spectra.krylov import Array, KrylovBasis
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_budget,
    check_rtol,
    check_vector,
    refuse_asymmetric,
    require_symmetric,
)

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
    if not isinstance(v, Tensor) or v.ndim not in (1, 2) or not v.numel():
        got = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
        raise ValueError(f"v must be a tensor ({n},) or ({n}, K), got {got}.")
    columns = v.unsqueeze(1) if v.ndim == 1 else v
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
    check_vector(v, n, "v")
    v = v.detach().to(device=op.device, dtype=op.dtype)
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
