"""What an estimator demands of its operator and options, said in one line when it is not met."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.spectra.krylov import KrylovBasis

_COARSEST = 1e-4  # relative rounding: orthogonal vectors need float32 at least


def require_square(op: LinearOperator, what: str) -> int:
    """The size n of an n × n operator."""
    require_precision(op, what)
    rows, columns = op.shape
    if rows != columns:
        raise ValueError(
            f"{what} needs a square operator, got {rows} × {columns}: take a diagonal block, or "
            "spectral_norm and frobenius_norm, which accept rectangular ones."
        )
    if rows == 0:
        raise ValueError(f"{what}: the operator is empty (0 × 0).")
    return rows


def require_precision(op: LinearOperator, what: str) -> None:
    """float32 or float64."""
    if not op.dtype.is_floating_point or torch.finfo(op.dtype).eps > _COARSEST:
        raise ValueError(
            f"{what} needs an operator in float32 or float64, got {op.dtype}: call model.float() "
            "or model.double() first."
        )


def require_symmetric(op: LinearOperator, what: str) -> int:
    """The size n of a symmetric n × n operator."""
    size = require_square(op, what)
    if not op.tags.symmetric:
        raise ValueError(
            f"{what} needs a symmetric operator and {op!r} is not tagged so: pass "
            "tags=Tags(symmetric=True) if it is."
        )
    return size


def check_budget(max_products: int) -> None:
    """A budget of products is a positive whole number."""
    if not isinstance(max_products, int | np.integer):
        raise ValueError(f"max_products must be a whole number, got {max_products!r}.")
    if max_products < 1:
        raise ValueError(f"max_products must be at least 1, got {max_products}.")


def check_rtol(rtol: float) -> None:
    """A relative tolerance lies between 0 and 1."""
    if not isinstance(rtol, int | float | np.number) or not 0 < rtol < 1:
        raise ValueError(f"rtol must lie between 0 and 1, got {rtol!r}.")


def check_damping(damping: float) -> None:
    """A finite number, of either sign."""
    if not isinstance(damping, int | float | np.number) or not np.isfinite(damping):
        raise ValueError(f"damping must be a finite number, got {damping!r}.")


def check_vector(vector: Tensor, n: int, what: str) -> None:
    """A vector (n,) of finite numbers."""
    if not isinstance(vector, Tensor) or vector.shape != (n,):
        got = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
        raise ValueError(f"{what} must be a tensor ({n},), got {got}.")
    if not bool(torch.isfinite(vector).all()):
        raise ValueError(f"{what} contains NaN or infinity.")


def largest_asymmetry(dtype: torch.dtype) -> float:
    """Relative asymmetry that rounding explains."""
    return float(min(1e-2, 1e3 * torch.finfo(dtype).eps ** 0.5))


def refuse_asymmetric(basis: KrylovBasis, what: str) -> None:
    """Raise when the products that made ``basis`` are not those of a symmetric operator."""
    asymmetry = basis.asymmetry()
    if asymmetry > largest_asymmetry(basis.op.dtype):
        raise ValueError(
            f"the operator is not symmetric (relative {asymmetry:.1e}): {what} needs a symmetric "
            "one."
        )
