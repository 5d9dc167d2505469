"""Trace with an interval, adaptive until it is good enough."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import torch

from curvatlas.operators.base import LinearOperator, MatrixOperator
from curvatlas.precision import in_float64
from curvatlas.progress import bar
from curvatlas.spectra.checkpoint import Checkpoint, fingerprint, generator
from curvatlas.spectra.data_error import around, batches_of, half_width, linear_samples
from curvatlas.spectra.deflated import FEWEST_PROBES, FEWEST_VECTORS, DeflatedSampler, plan
from curvatlas.spectra.dense import Completion, reads_the_rest
from curvatlas.spectra.diagonal import read_diagonal
from curvatlas.spectra.estimate import Estimate, close_enough, exact_estimate, tolerance
from curvatlas.spectra.outer_part import FACTORS, count_products, outer_part
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_budget,
    check_rtol,
    products_allowed,
    require_square,
    vectors_within,
)

_DATA_PROBES = 6
_FIRST_STEPS = 8
_DEAREST = 32  # products that an exact tr H_o may cost where the trace is asked to 1 %
_EXACT_UP_TO = 64  # so few products that reading the whole diagonal is cheaper than estimating


@alike_on_every_rank
def trace(
    op: LinearOperator,
    *,
    rtol: float = 0.01,
    seed: int = 0,
    max_products: int | None = None,
    memory: int | float | str | None = None,
    data_error: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Estimate:
    """tr A until the 95 % interval is within ``rtol`` of the value, or the products are spent.

    A trace that cancels to less than a tenth of Σ|λ| is asked to ``rtol`` of that tenth: no effort
    reaches a share of zero.
    A dense matrix or an operator with ``exact_trace()`` answers exactly. So does H_o where a sample
    has few outputs, through the factors of the samples; of H only H_f is then estimated (the cost
    is reported in products, ``method`` says it). Otherwise outliers are captured by Lanczos and the
    rest is sampled; when that would take as many products as the operator has columns, they are
    read and the trace is exact. ``data_error``: where the operator knows its batches, measure their
    scatter too (six more products).
    max_products: 300 by default, or the columns of an operator up to 512;  memory: bytes (or "2GB")
    for the vectors beside the operator's own, a quarter of the machine's by default; with less,
    fewer outliers are captured.
    """
    require_square(op, "trace")
    check_rtol(rtol)
    if max_products is not None:
        check_budget(max_products)
    found = _closed_form(op)
    if found is None:
        room = vectors_within(op, memory, "trace", fewest=FEWEST_VECTORS)
        found = _through_factors(op, rtol, seed, max_products, room, checkpoint)
        found = found or _estimate(op, rtol, seed, max_products, room, checkpoint)
    return _with_data_error(op, found, seed) if data_error else found


def _with_data_error(op: LinearOperator, found: Estimate, seed: int) -> Estimate:
    parts = batches_of(op)
    if not parts:
        return found
    random = generator(seed + 1)
    probes = torch.randn(
        op.shape[0], _DATA_PROBES, generator=random, dtype=torch.float64, device="cpu"
    )
    probes = probes.to(device=op.device, dtype=op.dtype)
    shares, samples = linear_samples(parts, probes, lambda images: (probes * images).sum(0))
    half = half_width(shares, samples, whole=found.value)
    return replace(
        found,
        data_interval=around(found.value, half),
        products=found.products + _DATA_PROBES,
    )


def _through_factors(
    op: LinearOperator,
    rtol: float,
    seed: int,
    max_products: int | None,
    room: int,
    checkpoint: str | os.PathLike[str] | None,
) -> Estimate | None:
    """tr H_o exactly, and tr H_f estimated if it belongs to the operator."""
    # What sampling would take at least, and at rtol = 1 % (benchmarks/spectra.py: 36 to 79).
    most = int(np.clip(_DEAREST * 0.01 / rtol, FEWEST_PROBES + _FIRST_STEPS, _DEAREST))
    if max_products is not None:
        most = min(most, max_products - 1)
    known = outer_part(op, min(most, op.shape[0]))
    if known is None:
        return None
    value = float(known.diagonal.sum())
    if known.rest is None:
        return exact_estimate(
            "trace", value, scale=value, eps=torch.finfo(op.dtype).eps, products=known.products,
            method=FACTORS,
        )  # fmt: skip
    left = None if max_products is None else max_products - known.products
    rest = _estimate(known.rest, rtol, seed, left, room, checkpoint, offset=value)
    count_products(op, rest.products)
    rounding = 64 * torch.finfo(op.dtype).eps * value
    return replace(
        rest,
        interval=(rest.interval[0] - rounding, rest.interval[1] + rounding),
        products=rest.products + known.products,
        method=f"H_o by {FACTORS}, H_f by {rest.method}",
    )


def _estimate(
    op: LinearOperator,
    rtol: float,
    seed: int,
    max_products: int | None,
    room: int,
    checkpoint: str | os.PathLike[str] | None,
    *,
    offset: float = 0.0,
) -> Estimate:
    """offset + tr A: the tolerance is relative to the sum.

    room: vectors that fit into memory.
    """
    n = op.shape[0]
    budget = products_allowed(max_products, n)
    room = min(room, 5 * budget + 64)  # all there could ever be
    if n <= _EXACT_UP_TO and budget >= n:
        return _read_diagonal(op, offset)
    mark = fingerprint(
        op, estimate="deflated trace", rtol=rtol, seed=seed, max_products=max_products,
        room=room, beside=offset != 0.0,
    )  # fmt: skip
    file = Checkpoint(checkpoint, mark)
    sampler = DeflatedSampler(op, min(budget, n), generator(seed), room=room)
    stored = file.load()
    if stored is not None:
        sampler.restore(*stored)
    sampler.between_steps = file.mark
    with (
        bar("trace", total=budget) as progress,
        file.kept(sampler.state, lambda: sampler.basis.rewrites),
    ):
        while True:
            sampler.finish()
            file.mark()
            progress.update(sampler.products - progress.n)
            if file.due():
                file.save(*sampler.state())
            if sampler.probe_count < FEWEST_PROBES or (
                sampler.basis.multiplied == 0 and sampler.growing
            ):
                if not _begin(sampler, budget):
                    break
                continue
            reached, norm = _reached(sampler, rtol, offset)
            if reached.converged:
                file.save(*sampler.state())
                return reached
            step = plan(sampler, tolerance(reached.value, rtol, norm), reached.error)
            if reads_the_rest(sampler.missing, step.products, budget - sampler.products):
                return _complete(sampler, offset)
            if sampler.products >= budget:
                file.save(*sampler.state())
                return reached
            count = min(step.count, budget - sampler.products)
            if step.deflate:
                sampler.deflate(count)
            else:
                sampler.probe(count)
    return _reached(sampler, rtol, offset)[0]


def _begin(sampler: DeflatedSampler, budget: int) -> bool:
    """The first probes and Lanczos steps; False when the budget does not allow them."""
    left = budget - sampler.products
    missing = FEWEST_PROBES - sampler.probe_count
    # Where memory is short, the basis comes before the probes: it cannot grow once these were let
    # go, and they need to see what it leaves.
    tight = sampler.room < 4 * FEWEST_PROBES + 2 * _FIRST_STEPS
    if tight and sampler.basis.multiplied == 0 and sampler.growing and left > 0:
        sampler.deflate(min(max(sampler.room // 4, 1), left))
    elif missing > 0 and left > 0:
        sampler.probe(min(missing, left))
    elif left > 0:
        sampler.deflate(min(_FIRST_STEPS, left))
    return left > 0


def _reached(sampler: DeflatedSampler, rtol: float, offset: float) -> tuple[Estimate, float]:
    """The estimate, and Σ|λ| as far as it is known."""
    captured = np.diag(sampler.captured)
    rest = sampler.rest()
    m = sampler.probe_count
    value = offset + float(captured.sum() + rest.values.mean())
    eps = torch.finfo(sampler.op.dtype).eps
    rounding = 16 * eps * (np.abs(captured).sum() + np.abs(rest.values).mean())
    below, above = rest.bounds()
    low, high = value - below - float(rounding), value + above + float(rounding)
    ritz = np.linalg.eigvalsh(sampler.captured) if len(captured) else captured
    norm = abs(offset) + float(np.abs(ritz).sum())
    norm += max(rest.magnitude(), abs(float(rest.values.mean())))
    estimate = Estimate(
        quantity="trace",
        value=value,
        interval=(low, high),
        products=sampler.products,
        converged=m >= FEWEST_PROBES and close_enough(value, (high - low) / 2, rtol, norm),
        exact=False,
        method="Lanczos deflation and sphere probes",
    )
    return estimate, norm


def _complete(sampler: DeflatedSampler, offset: float) -> Estimate:
    """Σ bᵀ A b over an orthonormal basis that begins with what the sampler has multiplied."""
    before = sampler.op.products
    known = Completion(sampler.op, *sampler.known())
    total = size = 0.0
    for basis, images in known.blocks():
        forms = (basis * images).sum(0)
        total += float(forms.sum())
        size += float(forms.abs().sum())
    return exact_estimate(
        "trace", offset + total, scale=size * known.magnification,
        eps=torch.finfo(sampler.op.dtype).eps,
        products=sampler.products + sampler.op.products - before,
        method="every column",
    )  # fmt: skip


def _read_diagonal(op: LinearOperator, offset: float) -> Estimate:
    """Σ e_iᵀ A e_i, a block of columns at a time."""
    diagonal = read_diagonal(op, "trace")
    if not bool(torch.isfinite(diagonal).all()):
        raise FloatingPointError(
            "a product with the operator gave NaN or infinity: check the loss and the parameters."
        )
    return exact_estimate(
        "trace", offset + float(diagonal.sum()), scale=float(diagonal.abs().sum()),
        eps=torch.finfo(op.dtype).eps, products=op.shape[0],
        method="diagonal, column by column",
    )  # fmt: skip


def _closed_form(op: LinearOperator) -> Estimate | None:
    eps = torch.finfo(op.dtype).eps
    if isinstance(op, MatrixOperator):
        diagonal = in_float64(op.matrix.diagonal())
        return exact_estimate(
            "trace", float(diagonal.sum()), scale=float(diagonal.abs().sum()), eps=eps,
            products=0, method="diagonal of the matrix",
        )  # fmt: skip
    known = getattr(op, "exact_trace", None)
    value = known() if callable(known) else None
    if value is None:
        return None
    return exact_estimate(
        "trace", float(value), scale=abs(float(value)), eps=eps, products=0, method="closed form"
    )
