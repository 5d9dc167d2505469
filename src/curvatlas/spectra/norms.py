r"""Frobenius and spectral norm, of rectangular operators too."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from curvatlas.operators.base import LinearOperator, MatrixOperator, Tags
from curvatlas.precision import in_float64
from curvatlas.progress import bar
from curvatlas.spectra.checkpoint import Checkpoint, fingerprint, generator
from curvatlas.spectra.data_error import around, batches_of, half_width, linear_samples
from curvatlas.spectra.dense import Completion, reads_the_rest
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.estimate import Estimate, close_enough, exact_estimate
from curvatlas.spectra.frobenius import FEWEST_PROBES, FEWEST_VECTORS, FrobeniusSampler
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_rtol,
    products_allowed,
    refuse_asymmetric_images,
    require_precision,
    vectors_within,
)

_DATA_PROBES = 6


class Gram(LinearOperator):
    """AᵀA or A Aᵀ, whichever is smaller, as a symmetric operator: two products of A each."""

    def __init__(self, op: LinearOperator) -> None:
        rows, columns = op.shape
        self._first, self._second = (op, op.T) if columns <= rows else (op.T, op)
        size = min(rows, columns)
        tags = Tags(symmetric=True, psd=True)
        super().__init__((size, size), dtype=op.dtype, device=op.device, tags=tags)

    def content(self) -> Any:
        return ["gram", self._first.content()]

    def _columns(self, columns: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._second @ (self._first @ columns)
        return result


@alike_on_every_rank
def spectral_norm(
    op: LinearOperator,
    *,
    rtol: float = 1e-3,
    seed: int = 0,
    max_products: int | None = None,
    data_error: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Estimate:
    """‖A‖₂, the largest |eigenvalue|, or the largest singular value through ``op.T``.

    An eigenvalue lies in the interval for certain, by its residual; at 97.5 % no further one lies
    above, because the random start would have shown it.
    """
    check_rtol(rtol)
    require_precision(op, "spectral_norm")
    if min(op.shape) == 0:
        raise ValueError("spectral_norm: the operator is empty.")
    if op.tags.symmetric:
        budget = max_products
        found = eigenpairs(
            op, k=1, which="magnitude", tol=rtol, bounded=rtol, seed=seed, max_products=budget,
            data_error=data_error, checkpoint=checkpoint,
        )  # fmt: skip
        value = abs(found.value)
        radius = float(found.interval[1][0] - found.interval[0][0]) / 2
        low, high, products = max(value - radius, 0.0), value + radius, found.products
        high = max(high, _finite(-found.spectrum_within[0]), _finite(found.spectrum_within[1]))
    else:
        budget = None if max_products is None else max(max_products // 2, 1)
        found = eigenpairs(
            Gram(op), k=1, which="largest", tol=rtol, bounded=rtol, seed=seed, max_products=budget,
            data_error=False, checkpoint=checkpoint,
        )  # fmt: skip
        ends = float(found.interval[0][0]), float(found.interval[1][0])
        ends = ends[0], max(ends[1], _finite(found.spectrum_within[1]))
        low, high = (float(np.sqrt(max(bound, 0.0))) for bound in ends)
        value, products = float(np.sqrt(max(found.value, 0.0))), 2 * found.products
    spread = found.data_interval
    return Estimate(
        quantity="spectral norm",
        value=value,
        interval=(low, high),
        data_interval=None
        if spread is None
        else around(value, float(spread[1][0] - spread[0][0]) / 2),
        products=products,
        converged=found.converged and close_enough(value, (high - low) / 2, rtol),
        exact=found.exact,
        method="Lanczos" if op.tags.symmetric else "Lanczos on the Gram operator",
    )


def _finite(bound: float) -> float:
    """The bound, or nothing where none is known."""
    return bound if np.isfinite(bound) else 0.0


@alike_on_every_rank
def frobenius_norm(
    op: LinearOperator,
    *,
    rtol: float = 0.02,
    seed: int = 0,
    max_products: int | None = None,
    memory: int | float | str | None = None,
    data_error: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Estimate:
    """‖A‖_F until the 95 % interval is within ``rtol`` of the value; exact for a matrix at hand.

    max_products: 300 by default, or the columns of an operator up to 512; they are read, and the
    norm is exact, when the estimate would take as many.
    memory: bytes (or "2GB") for the vectors beside the operator's own, a quarter of the machine's
    by default; with less, fewer outliers are captured.
    ``data_error``: where the operator knows its batches, measure their scatter too.
    """
    check_rtol(rtol)
    require_precision(op, "frobenius_norm")
    if min(op.shape) == 0:
        raise ValueError("frobenius_norm: the operator is empty.")
    found = _closed_form(op)
    if found is None:
        room = vectors_within(op, memory, "frobenius_norm", fewest=FEWEST_VECTORS)
        found = _estimate(op, rtol, seed, max_products, room, checkpoint)
    parts = batches_of(op) if data_error and found.value > 0 else []
    if not parts:
        return found
    random = generator(seed + 1)
    probes = torch.randn(
        op.shape[1], _DATA_PROBES, generator=random, dtype=torch.float64, device="cpu"
    )
    probes = probes.to(device=op.device, dtype=op.dtype)
    whole = op @ probes
    # d‖A‖_F = ⟨A, dA⟩ / ‖A‖_F: linear around A, so every batch has its own number.
    shares, samples = linear_samples(
        parts, probes, lambda images: (whole * images).sum(0) / found.value
    )
    return replace(
        found,
        data_interval=around(found.value, half_width(shares, samples, whole=found.value)),
        products=found.products + 2 * _DATA_PROBES,
    )


def _estimate(
    op: LinearOperator,
    rtol: float,
    seed: int,
    max_products: int | None,
    room: int,
    checkpoint: str | os.PathLike[str] | None,
) -> Estimate:
    """room: vectors that fit into memory."""
    # ‖A‖_F = ‖Aᵀ‖_F: sample on the side with fewer columns.
    side = op.T if op.shape[1] > op.shape[0] else op
    n = side.shape[1]
    budget = products_allowed(max_products, n)
    if max_products is None and not side.tags.symmetric:
        budget += n // 8  # a vector of the other side is multiplied for each one deflated
    room = min(room, 6 * budget + 64)  # all there could ever be
    if n <= 64 and budget >= n:
        return _read_columns(side)
    mark = fingerprint(
        op, estimate="frobenius", rtol=rtol, seed=seed, max_products=max_products, room=room
    )
    file = Checkpoint(checkpoint, mark)
    sampler = FrobeniusSampler(side, min(budget, n), generator(seed), room=room)
    stored = file.load()
    if stored is not None:
        sampler.restore(*stored)
    sampler.between_steps = file.mark
    with bar("Frobenius norm", total=budget) as progress, file.kept(sampler.state):
        while True:
            sampler.finish()
            file.mark()
            progress.update(sampler.products - progress.n)
            if file.due():
                file.save(*sampler.state())
            if not sampler.begun(budget):
                continue
            value, low, high = sampler.estimate()
            converged = sampler.probe_count >= FEWEST_PROBES and close_enough(
                value, (high - low) / 2, rtol
            )
            left = budget - sampler.products
            paths = sampler.paths(rtol, (high - low) / 2 / value if value else 1.0)
            if not converged and reads_the_rest(sampler.missing, min(paths), left):
                return _complete(sampler)
            if converged or left <= 0:
                file.save(*sampler.state())
                return Estimate(
                    quantity="Frobenius norm", value=value, interval=(low, high),
                    products=sampler.products, converged=converged, exact=False,
                    method="Lanczos deflation and sphere probes",
                )  # fmt: skip
            sampler.advance(*paths, left)


def _complete(sampler: FrobeniusSampler) -> Estimate:
    """Σ ‖A b‖² over an orthonormal basis that begins with what the sampler has multiplied."""
    before = sampler.op.products
    known = Completion(sampler.op, *sampler.known())
    value = 0.0
    for _, images in known.blocks():
        value = _grown(value, images)
    return exact_estimate(
        "Frobenius norm", value, scale=value * known.magnification,
        eps=torch.finfo(sampler.op.dtype).eps,
        products=sampler.products + sampler.op.products - before, method="every column",
    )  # fmt: skip


def _closed_form(op: LinearOperator) -> Estimate | None:
    eps = torch.finfo(op.dtype).eps
    if isinstance(op, MatrixOperator):
        value = float(torch.linalg.norm(in_float64(op.matrix)))
        method = "the matrix itself"
    else:
        known = getattr(op, "exact_frobenius_norm", None)
        found = known() if callable(known) else None
        if found is None:
            return None
        value, method = float(found), "closed form"
    return exact_estimate("Frobenius norm", value, scale=value, eps=eps, products=0, method=method)


def _grown(norm: float, images: torch.Tensor) -> float:
    """‖·‖_F of what is known and further columns."""
    # Scaled first: squares of entries below 1e-162 or above 1e154 are not numbers any more.
    largest = float(images.abs().max()) if images.numel() else 0.0
    if largest == 0.0:
        return norm
    return float(np.hypot(norm, largest * float(torch.linalg.norm(images / largest))))


def _read_columns(op: LinearOperator) -> Estimate:
    n, value = op.shape[1], 0.0
    for start in range(0, n, 64):
        stop = min(start + 64, n)
        block = torch.zeros(n, stop - start, dtype=op.dtype, device=op.device)
        block[start:stop].fill_diagonal_(1)
        images = op @ block
        if start == 0 and bool(torch.isfinite(images).all()):
            refuse_asymmetric_images(op, block, images, "frobenius_norm")
        value = _grown(value, in_float64(images))
    if not np.isfinite(value):
        raise FloatingPointError("a product with the operator gave NaN or infinity.")
    return exact_estimate(
        "Frobenius norm", value, scale=value, eps=torch.finfo(op.dtype).eps,
        products=n, method="column by column",
    )  # fmt: skip
