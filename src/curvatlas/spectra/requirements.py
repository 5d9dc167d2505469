"""What an estimator demands of its operator and options, said in one line when it is not met."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from curvatlas import parallel
from curvatlas.budget import default_budget, parse_bytes, readable
from curvatlas.errors import NotSymmetricError, ProblemError
from curvatlas.linear_operator import LinearOperator
from curvatlas.precision import in_float64
from curvatlas.problem.fingerprint import content
from curvatlas.spectra.vectors import VectorSpace

if TYPE_CHECKING:
    from curvatlas.spectra.krylov import KrylovBasis

P = ParamSpec("P")
R = TypeVar("R")

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


def vectors_within(
    op: LinearOperator, memory: int | float | str | None, what: str, *, fewest: int
) -> int:
    """How many vectors of the operator's longer side fit into ``memory``.

    None: the default budget. It is a share of what the machine has, not of what is free now: the
    same call gives the same numbers.
    """
    # Of a spread vector every process has its part; the longest one is planned for.
    length = max(*op.shape, 1) if op.shards is None else op.shards.largest
    row = length * op.dtype.itemsize
    room = (default_budget(op.device) if memory is None else parse_bytes(memory)) // row
    if parallel.sums_over_processes(op):
        room = parallel.smallest_over_processes(room)  # all take the same steps
    if room >= fewest:
        return room
    if memory is None:
        return fewest
    raise ValueError(
        f"memory={readable(parse_bytes(memory))} holds {room} vectors of {readable(row)}: {what} "
        f"needs at least {fewest}, give memory={readable(1.01 * fewest * row)!r}."
    )


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
        raise ValueError(f"{what} must be a tensor ({n},), got {_kind(vector)}.")
    _check_finite_input(vector, what)


def as_columns(tensor: Tensor, op: LinearOperator, what: str) -> Tensor:
    """A right-hand side (m,) or (m, K) of finite numbers, as columns (m, K) where ``op`` is."""
    _check_columns(tensor, op.shape[0], what, fewest=1)
    _check_finite_input(tensor, what)
    return _columns(tensor, op)


def as_parts(tensor: Tensor, op: LinearOperator, what: str, space: VectorSpace) -> Tensor:
    """``as_columns`` of a right-hand side of which every process gives its own entries."""
    whose = f"this process's entries of {what}"
    fewest = min(space.length, 1)  # of a short vector a process may have none
    parallel.together(lambda: _check_columns(tensor, space.length, whose, fewest=fewest))
    if not space.finite(tensor):
        raise ValueError(f"{what} contains NaN or infinity.")
    return _columns(tensor, op)


def _check_columns(tensor: Tensor, m: int, what: str, *, fewest: int) -> None:
    right_shape = isinstance(tensor, Tensor) and tensor.ndim in (1, 2) and tensor.shape[0] == m
    if not right_shape or tensor.numel() < fewest:
        raise ValueError(f"{what} must be a tensor ({m},) or ({m}, K), got {_kind(tensor)}.")


def _columns(tensor: Tensor, op: LinearOperator) -> Tensor:
    columns = tensor.detach().unsqueeze(-1) if tensor.ndim == 1 else tensor.detach()
    return columns.to(device=op.device, dtype=op.dtype)


def _kind(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _check_finite_input(tensor: Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{what} contains NaN or infinity.")


def require_finite(
    image: Tensor, what: str = "a product with the operator", *, space: VectorSpace | None = None
) -> None:
    """Raise on NaN or infinity in what the operator gave; space: of vectors that may be spread."""
    if not (bool(torch.isfinite(image).all()) if space is None else space.finite(image)):
        raise not_finite(image, what, space=space)


def not_finite(
    image: Tensor,
    what: str = "a product with the operator",
    *,
    op: LinearOperator | None = None,
    space: VectorSpace | None = None,
) -> FloatingPointError:
    """What to raise of an image that is not finite, or whose norm is not.

    op: raises itself where its own checks know why (``LinearOperator.confirm``);  space: where the
    image may be spread, and all processes have come here.
    """
    if op is not None:
        op.confirm()
    bad, entries = int((~torch.isfinite(image)).sum()), image.numel()
    if space is not None and space.shards is not None:
        counts = torch.tensor([bad, entries], dtype=torch.float64, device="cpu")
        bad, entries = (int(count) for count in space.summed(counts))
    if not bad:
        return FloatingPointError(
            f"the norm of {what} overflows {image.dtype}: compute in float64, or scale the loss "
            "down."
        )
    return FloatingPointError(
        f"{what} holds NaN or infinity in {bad} of {entries} entries: check the loss and the "
        "parameters for NaN, or compute in float64."
    )


def largest_asymmetry(dtype: torch.dtype, size: int = 1) -> float:
    """‖A − Aᵀ‖_F / ‖A‖_F that rounding explains.

    Measured on networks of 1 k to 1 M parameters: 2 to 9 eps. float32 is given 2e-3, below the one
    percent of a wrong derivative; sums over very many entries round more.
    """
    eps = torch.finfo(dtype).eps
    return float(max(min(2e-3, 1e3 * eps**0.5), 10 * eps * size**0.5))


def asymmetry(space: VectorSpace, directions: Tensor, images: Tensor) -> tuple[float, float]:
    """‖A − Aᵀ‖_F and ‖A‖_F by random directions (n, k) and their images under A: no products.

    (uᵀ A v − vᵀ A u)² has the mean ‖A − Aᵀ‖_F² for independent normal u and v, ‖A u‖² that of
    ‖A‖_F².
    """
    n, count = space.size, directions.shape[1]
    norms = space.norms(directions)
    if count < 2 or not bool((norms > 0).all()):
        return 0.0, 0.0
    forms, squares = space.together(
        (directions / norms).T @ (images / norms), in_float64(images / norms).pow(2).sum()
    )
    apart = float(in_float64(forms - forms.T).pow(2).sum()) / (count * (count - 1))
    size = float(squares) / count
    return float(np.sqrt(n * n * apart)), float(np.sqrt(n * size))


def refuse_asymmetric_images(
    op: LinearOperator,
    directions: Tensor,
    images: Tensor,
    what: str,
    *,
    scale: float = 0.0,
    space: VectorSpace | None = None,
) -> None:
    """Raise when images (n, k) of random directions show that a symmetric operator is not one.

    scale: a lower bound of ‖A‖ where the directions avoid what A multiplies most: their images may
    be nothing but rounding of it.  space: of vectors that may be spread, None: these are whole.
    """
    if not op.tags.symmetric:
        return
    n = op.shape[0]
    if space is None:
        space = VectorSpace(n, dtype=op.dtype, device=op.device)
    apart, size = asymmetry(space, directions, images)
    rounding = 100 * torch.finfo(op.dtype).eps * n * scale
    if apart > largest_asymmetry(op.dtype, n) * size and apart > rounding:
        raise not_symmetric(apart / size, what)


def refuse_asymmetric(basis: KrylovBasis, what: str) -> None:
    """Raise when the products that made ``basis`` are not those of a symmetric operator."""
    if not basis.op.tags.symmetric:
        return
    largest = largest_asymmetry(basis.op.dtype, basis.size)
    measured = basis.asymmetry()
    if measured > largest:
        raise not_symmetric(measured, what)
    # The start is one random direction among rows that are not: its share of rounding grows with n
    # (0.2 n eps, measured on networks of 1 k to 1 M parameters).
    measured = basis.asymmetry_of_start()
    if not basis.store.packed and measured > max(largest, 2 * basis.size * basis.eps):
        raise not_symmetric(measured, what)


def not_symmetric(measured: float, what: str) -> NotSymmetricError:
    """What to raise for an operator with this ‖A − Aᵀ‖_F / ‖A‖_F."""
    return NotSymmetricError(
        f"the operator is not symmetric (relative {measured:.1e}): {what} needs a symmetric one; "
        "compute in float64, check its product, or do not tag it symmetric."
    )


# --- several processes ----------------------------------------------------------------------------


def alike_on_every_rank(estimator: Callable[P, R]) -> Callable[P, R]:
    """Let the processes of a group compare the options of an estimator before it begins.

    With another seed or another number of vectors they would add products that do not belong
    together, or wait for each other. The operator is the estimator's first argument.
    """
    signature = inspect.signature(estimator)

    @functools.wraps(estimator)
    def compared(*args: P.args, **options: P.kwargs) -> R:
        if parallel.world_size() > 1:
            op = args[0] if args else options.get("op")
            if options.get("shard") or parallel.sums_over_processes(op):
                _compare_options(estimator.__name__, signature, args, options)
        return estimator(*args, **options)

    return compared


def _compare_options(name: str, signature: inspect.Signature, args: Any, options: Any) -> None:
    facts: dict[str, str] = {"estimator": name}

    def gather() -> tuple[int, int]:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = bound.arguments
        apart = {"b"} if given.get("shard") else set()  # every process gives its own entries
        facts.update({key: _told(key, given[key]) for key in given if key not in apart})
        return parallel.halves(content(facts))

    if not parallel.others_than_first(parallel.shared(gather, 2)):
        return
    for what, told in parallel.differing(facts).items():
        ranks = parallel.others_than_first(told)
        if what == "estimator":
            who = parallel.named(ranks, "calls", "call")
            raise ProblemError(
                f"{who} {told[ranks[0]]} where rank 0 calls {told[0]}: call the same estimators in "
                "the same order on every rank."
            )
        who = parallel.named(ranks, "has", "have")
        raise ProblemError(
            f"{who} {what} = {told[ranks[0]]} in {name} and rank 0 has {told[0]}: pass the same on "
            "every rank."
        )


def _told(key: str, value: Any) -> str:
    """An option in words that are the same wherever the option is."""
    if key == "checkpoint":  # the same file may have another path on another machine
        return "None" if value is None else "a file"
    if value is None or isinstance(value, bool | int | float | str | np.number | torch.dtype):
        return repr(value)
    kind = type(value).__name__
    if key == "op":
        return f"{kind} {tuple(value.shape)} {value.dtype}"
    if isinstance(value, Tensor | np.ndarray):
        kind = f"{kind} {tuple(value.shape)}"
    return f"{kind} {content(value).hex()[:8]}"
