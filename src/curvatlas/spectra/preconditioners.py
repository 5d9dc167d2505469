r"""Preconditioners for (A + μI) x = b from a few products: A ≈ U Λ Uᵀ, inverted exactly.

    P⁻¹ = U (Λ + μ)⁻¹ Uᵀ + (I − U Uᵀ) / ν

Nyström (Frangella, Tropp and Udell 2023): A Ω (Ωᵀ A Ω)⁻¹ (A Ω)ᵀ for k random columns Ω, with
ν = λ_k + μ. Partial Cholesky with pivots (Harbrecht, Peters and Schneider 2012): L Lᵀ from the k
columns of A whose diagonal is largest when their turn comes, with ν = μ, which is the inverse of
L Lᵀ + μI itself. The number of conjugate-gradient steps then depends on what is left beside the k
directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from curvatlas.linear_operator import LinearOperator, Tags
from curvatlas.precision import float64_device, in_float64
from curvatlas.spectra.checkpoint import generator
from curvatlas.spectra.diagonal import diagonal as estimated_diagonal
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_damping,
    largest_asymmetry,
    require_finite,
    require_symmetric,
)

Precondition = Callable[[Tensor], Tensor]  # (n, K) → (n, K), close to (A + μI)⁻¹
Preconditioner = LinearOperator | Precondition | Literal["nystrom", "cholesky"]
_WHAT_IT_IS = "preconditioner is 'nystrom', 'cholesky', an operator or a function"


class LowRankInverse(LinearOperator):
    """(U Λ Uᵀ + μI)⁻¹ with ν for μ on the complement of U: a preconditioner."""

    def __init__(self, vectors: Tensor, values: Tensor, damping: float, complement: float) -> None:
        n = vectors.shape[0]
        tags = Tags(symmetric=True, psd=True)
        super().__init__((n, n), dtype=vectors.dtype, device=vectors.device, tags=tags)
        self.vectors = vectors  # U (n, k)
        self.values = values  # Λ (k,), largest first
        self.damping, self.complement = damping, complement
        self._weights = 1 / (values + damping) - 1 / complement

    @property
    def rank(self) -> int:
        return len(self.values)

    def _columns(self, columns: Tensor) -> Tensor:
        inside = self._weights.unsqueeze(1) * (self.vectors.T @ columns)
        return columns / self.complement + self.vectors @ inside


@alike_on_every_rank
def nystrom_preconditioner(
    op: LinearOperator, *, rank: int | None = None, damping: float = 0.0, seed: int = 0
) -> LowRankInverse:
    """From ``rank`` products with random columns (default min(n, 20)) of a psd operator."""
    n, k = _sizes(op, rank, damping)
    random = torch.randn(n, k, generator=generator(seed), dtype=torch.float64, device="cpu")
    columns = torch.linalg.qr(random)[0].to(device=op.device, dtype=op.dtype)
    image: Tensor = op @ columns
    require_finite(image)
    # A shift of rounding size keeps the small matrix definite; it is taken off again below.
    shift = torch.finfo(op.dtype).eps * float(torch.linalg.norm(image)) * n**0.5
    image = image + shift * columns
    small = columns.T @ image
    root, info = torch.linalg.cholesky_ex((small + small.T) / 2)
    if int(info) != 0:
        if shift == 0:
            raise ValueError("the operator is zero on random columns: it needs no preconditioner.")
        raise ValueError(_not_psd(op))
    factor = torch.linalg.solve_triangular(root, image.T, upper=False).T  # (n, k)
    vectors, singular, _ = torch.linalg.svd(factor, full_matrices=False)
    values = (singular**2 - shift).clamp_min(0)
    return _inverse(vectors, values, damping, float(values[-1]) + damping)


@alike_on_every_rank
def cholesky_preconditioner(
    op: LinearOperator,
    *,
    rank: int | None = None,
    damping: float = 0.0,
    diagonal: Tensor | None = None,
) -> LowRankInverse:
    """From ``rank`` columns (default min(n, 20)) of a psd operator, one product each.

    diagonal: of the operator, (n,); by default it is read where it is known and estimated where it
    is not, with as many products as there are columns. It decides only which columns are taken.
    """
    _, k = _sizes(op, rank, damping)
    factor = partial_cholesky(op, k, diagonal=diagonal)
    if not factor.shape[1]:
        raise ValueError("the operator's diagonal is zero: it needs no preconditioner.")
    vectors, singular, _ = torch.linalg.svd(factor, full_matrices=False)
    values = singular**2
    return _inverse(vectors, values, damping, damping if damping > 0 else float(values[-1]))


def partial_cholesky(op: LinearOperator, rank: int, *, diagonal: Tensor | None = None) -> Tensor:
    """L (n, k) with L Lᵀ ≈ A: k ≤ rank columns, fewer where A has less rank."""
    n = op.shape[0]
    if diagonal is None:
        diagonal = estimated_diagonal(op, max_products=max(rank, 16)).values
    if diagonal.shape != (n,):
        raise ValueError(f"the diagonal is a tensor ({n},), got {tuple(diagonal.shape)}.")
    left = in_float64(diagonal.detach()).to(float64_device(op.device)).clone()
    eps = torch.finfo(op.dtype).eps
    factor = torch.zeros(n, rank, dtype=op.dtype, device=op.device)
    taken, largest = 0, 0.0
    for _ in range(min(n, 2 * rank)):
        if taken == rank:
            break
        place = int(torch.argmax(left))
        unit = torch.zeros(n, dtype=op.dtype, device=op.device)
        unit[place] = 1
        column = op @ unit - factor[:, :taken] @ factor[place, :taken]
        require_finite(column)
        pivot = float(column[place])
        largest = max(largest, abs(pivot))
        left[place] = -torch.inf  # not again
        if pivot < -100 * n * eps * largest:
            raise ValueError(_not_psd(op))
        if pivot <= 100 * n * eps * largest:
            continue
        factor[:, taken] = column / pivot**0.5
        left -= in_float64(factor[:, taken]) ** 2
        taken += 1
    return factor[:, :taken]


_BY_NAME: dict[str, Callable[..., LowRankInverse]] = {
    "nystrom": nystrom_preconditioner,
    "cholesky": cholesky_preconditioner,
}


def as_preconditioner(
    wanted: Preconditioner | None, op: LinearOperator, damping: float
) -> Precondition | None:
    """What ``solve`` takes, as a function of columns."""
    if wanted is None:
        return None
    if isinstance(wanted, str):
        if wanted not in _BY_NAME:
            raise ValueError(f"{_WHAT_IT_IS}, got {wanted!r}.")
        return _BY_NAME[wanted](op, damping=damping).matvec
    if isinstance(wanted, LinearOperator):
        if wanted.shape != op.shape:
            raise ValueError(f"the preconditioner {wanted!r} has another shape than {op!r}.")
        if wanted.dtype != op.dtype:
            raise TypeError(f"the preconditioner is of {wanted.dtype}, the operator of {op.dtype}.")
        if not wanted.tags.symmetric:
            _refuse_asymmetric(wanted.matvec, op)
        return wanted.matvec
    if not callable(wanted):
        raise ValueError(f"{_WHAT_IT_IS}, got a {type(wanted).__name__}.")

    def checked(columns: Tensor) -> Tensor:
        image = wanted(columns)
        if not isinstance(image, Tensor) or image.shape != columns.shape:
            got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(
                f"the preconditioner takes columns {tuple(columns.shape)} and gives {got}."
            )
        return image

    _refuse_asymmetric(checked, op)
    return checked


def _refuse_asymmetric(precondition: Precondition, op: LinearOperator) -> None:
    """uᵀ(Pv) against vᵀ(Pu) for two random vectors: conjugate gradients need them alike."""
    random = torch.randn(op.shape[0], 2, generator=generator(0), dtype=torch.float64, device="cpu")
    vectors = random.to(device=op.device, dtype=op.dtype)
    images = precondition(vectors)
    gap = abs(float(vectors[:, 0] @ images[:, 1]) - float(vectors[:, 1] @ images[:, 0]))
    scale = float(torch.linalg.norm(vectors)) * float(torch.linalg.norm(images))
    if not gap <= largest_asymmetry(op.dtype) * scale:
        raise ValueError(
            f"the preconditioner is not symmetric (relative {gap / scale:.1e}), and conjugate "
            "gradients need one that is: take its symmetric part, or method='lsmr' without one."
        )


def _sizes(op: LinearOperator, rank: int | None, damping: float) -> tuple[int, int]:
    n = require_symmetric(op, "a preconditioner")
    check_damping(damping)
    if damping < 0:
        raise ValueError(f"a preconditioner needs damping of at least zero, got {damping!r}.")
    k = min(n, 20) if rank is None else rank
    if not 1 <= k <= n:
        raise ValueError(f"rank must lie between 1 and {n}, got {rank!r}.")
    return n, k


def _inverse(vectors: Tensor, values: Tensor, damping: float, complement: float) -> LowRankInverse:
    if complement <= 0:
        # The rank is exhausted and nothing is added: the rest is the operator's null space.
        complement = float(values[values > 0].min()) if bool((values > 0).any()) else 1.0
        keep = values > 0
        vectors, values = vectors[:, keep], values[keep]
    return LowRankInverse(vectors, values, damping, complement)


def _not_psd(op: LinearOperator) -> str:
    return f"{op!r} is not positive semidefinite: a preconditioner needs one that is."
