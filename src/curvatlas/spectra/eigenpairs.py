r"""Extreme eigenpairs by Lanczos with full reorthogonalisation: one run serves both ends.

Stops when every wanted Ritz pair has ‖A y − θ y‖ ≤ tol · ‖A‖ (‖A‖ by the largest |θ|). A symmetric
matrix has an eigenvalue within ‖A y − θ y‖ of θ: the reported intervals are certified by that, not
by statistics. What no residual can tell is whether an eigenvalue was overlooked, a second copy
above all, which a single start vector cannot see: so at the end a fresh random direction outside
the basis is followed for two steps, more where more will settle it, and the result says beyond
which values its list is complete at 97.5 % (``spectra/missed.py``). At the edge of a bulk neither
can be promised; ``thorough=True`` searches until it can, or the budget ends.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from curvatlas import parallel
from curvatlas.budget import default_budget, parse_bytes, readable
from curvatlas.operators.base import LinearOperator
from curvatlas.spectra.checkpoint import Checkpoint, fingerprint
from curvatlas.spectra.checkpoint_shards import ShardedCheckpoint
from curvatlas.spectra.data_error import eigenvalue_half_widths
from curvatlas.spectra.dense import dense_eigenpairs
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.krylov import KrylovBasis
from curvatlas.spectra.lanczos_run import LanczosRun
from curvatlas.spectra.requirements import alike_on_every_rank, check_budget, require_symmetric
from curvatlas.spectra.selection import WHICH, Which

_EXACT_UP_TO = 48  # below this size a dense decomposition needs no more products than Lanczos


@alike_on_every_rank
def eigenpairs(
    op: LinearOperator,
    *,
    k: int = 6,
    which: Which = "largest",
    tol: float = 1e-4,
    seed: int = 0,
    start: Tensor | None = None,
    max_products: int | None = None,
    memory: int | float | str | None = None,
    storage: torch.dtype | None = None,
    shard: bool = False,
    thorough: bool = False,
    bounded: float | None = None,
    data_error: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Eigenpairs:
    """The k largest, smallest (most negative), both (k at each end) or largest-|λ| eigenpairs.

    tol: residual relative to ‖A‖;  start: (n,) or (n, j) earlier eigenvectors to warm-start from;
    max_products: default min(n, 1000 + 40 k);  memory: bytes (or "2GB") for the basis and what is
    made of it, half of the machine's by default; beyond it the run restarts thickly;
    data_error: where the operator knows its batches, measure their scatter too (one more product
    for each pair);  checkpoint: a file to resume from.
    thorough: search for overlooked copies until they are improbable in crowded spectra too.
    bounded: go on until ``spectrum_within`` reaches at most ``bounded``·‖A‖ beyond the values.
    storage: precision of the stored basis, torch.bfloat16 for half of float32's memory: sums stay
    in the operator's precision, and what rounding does is part of the residuals.
    shard: every process of the group holds its own part of the basis and of ``result.vectors``,
    n/world entries of each vector (``parallel.Shards`` says which).
    """
    n = require_symmetric(op, "eigenpairs")
    if storage is not None and not storage.is_floating_point:
        raise ValueError(f"storage must be a floating-point type, got {storage}.")
    wanted = _check(n, k, which, tol, bounded)
    if max_products is None:
        max_products = min(n, 1000 + 40 * k)
    check_budget(max_products)
    if (2 * wanted >= n or n <= _EXACT_UP_TO) and max_products >= n:
        found = dense_eigenpairs(op, k, which)
        return _with_data_error(op, found) if data_error else found
    mark = fingerprint(
        op, estimate="eigenpairs", k=k, which=which, tol=tol, seed=seed, max_products=max_products,
        memory=memory, storage=str(storage), warm=None if start is None else list(start.shape),
        thorough=thorough, bounded=bounded,
    )  # fmt: skip
    shards = parallel.Shards.of(n) if shard else None
    capacity, device = _capacity(op, wanted, max_products, memory, storage, shards)

    def run() -> Eigenpairs:
        # The basis goes before the scatter is measured, which takes memory of its own.
        file: Checkpoint = Checkpoint(checkpoint, mark)
        if shards is not None:
            file = ShardedCheckpoint(checkpoint, mark, shards)
        basis = KrylovBasis(op, capacity, device, storage=storage, shards=shards)
        return LanczosRun(
            basis, k, which, wanted, tol, max_products, file, thorough, bounded
        ).result(seed, start)

    found = run()
    return _with_data_error(op, found) if data_error and shards is None else found


def _with_data_error(op: LinearOperator, found: Eigenpairs) -> Eigenpairs:
    measured = eigenvalue_half_widths(op, found.vectors)
    if measured is None:
        return found
    half, products = measured
    interval = (found.values - half, found.values + half)
    return replace(found, data_interval=interval, products=found.products + products)


def _check(n: int, k: int, which: str, tol: float, bounded: float | None) -> int:
    if which not in WHICH:
        raise ValueError(f"which must be one of {', '.join(WHICH)}, got {which!r}.")
    if not isinstance(k, int | np.integer) or k < 1 or k > n:
        raise ValueError(f"k must be an integer between 1 and the operator's size {n}, got {k!r}.")
    if not isinstance(tol, int | float | np.number) or not tol > 0:
        raise ValueError(f"tol must be positive, got {tol!r}.")
    if bounded is not None and not bounded > 0:
        raise ValueError(f"bounded must be positive or None, got {bounded!r}.")
    return min(2 * k, n) if which == "both" else k


def _capacity(
    op: LinearOperator,
    wanted: int,
    max_products: int,
    memory: int | float | str | None,
    storage: torch.dtype | None,
    shards: parallel.Shards | None,
) -> tuple[int, torch.device]:
    """How many rows fit, and where: beside the operator, or in main memory when it is short.

    Without ``memory`` they are planned by what the machine has, not by what is free: a basis that
    restarts elsewhere ends in other digits. Ranks that work together take the fewest that any of
    them has room for: where one restarts, the others have to.
    """
    most = min(max_products + 4 + wanted, op.shape[1] + 2)
    least = min(2 * wanted + 12 if memory is None else wanted + max(6, wanted // 4), most)
    # The longest shard, whichever this process has: all of them restart at the same step.
    length = op.shape[1] if shards is None else shards.largest
    row = length * (storage or op.dtype).itemsize
    device = op.device
    if memory is None:
        in_main_memory = 2 * default_budget() // row
        beside_operator = in_main_memory
        if device.type != "cpu":
            beside_operator = 2 * default_budget(device) // row
        if shards is not None or parallel.sums_over_processes(op):
            ranks = parallel.shared(lambda: [beside_operator, in_main_memory], 2)
            beside_operator, in_main_memory = map(min, zip(*ranks, strict=True))
        if device.type == "cuda" and beside_operator < most:
            return max(least, min(most, in_main_memory)), torch.device("cpu")
        return max(least, min(most, beside_operator)), device
    # Beside the basis: the vectors made of it (a packed one is turned into them), and the image
    # that a step works on.
    beside = 0 if storage not in (None, op.dtype) else wanted + 3
    rows = parse_bytes(memory) // row - beside
    if rows < least:
        needed = 1.01 * (least + beside) * row  # more than three digits may round away
        raise ValueError(
            f"memory={readable(parse_bytes(memory))} holds {rows + beside} vectors of "
            f"{readable(row)}: {wanted} eigenpairs need at least {least + beside}, give "
            f"memory={readable(needed)!r}, ask for fewer"
            + (" or store them as torch.bfloat16." if beside else ".")
        )
    return min(most, rows), device
