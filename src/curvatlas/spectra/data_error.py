r"""The other source of error: the batches at hand are a sample of the data.

An operator that offers ``per_batch()`` is a mean A = Σ_b w_b A_b over batches. A quantity that is
linear in A (or made linear around it) has a value q_b on every batch, and

    Var[Σ_b w_b q_b] ≈ B/(B−1) Σ_b w_b² (q_b − q)².

q_b is measured on the same few probes for all batches, so that what they have in common cancels;
the probes' remaining noise is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.spectra.estimate import Interval
from curvatlas.spectra.krylov import Array

Batches = list[tuple[float, LinearOperator]]


def batches_of(op: LinearOperator) -> Batches:
    """(share, operator) of every batch; empty when the operator has fewer than two."""
    offered = getattr(op, "per_batch", None)
    parts: Batches = list(offered()) if callable(offered) else []
    if len(parts) < 2:
        return []
    let_go_of_graphs(op)  # or those of all batches would lie beside those of each
    return parts


def linear_samples(
    parts: Batches, probes: Tensor, read: Callable[[Tensor], Tensor]
) -> tuple[Array, Array]:
    """Shares (B,) and samples (B, q): ``read`` turns A_b @ probes into one number a probe."""
    shares = np.array([share for share, _ in parts])
    rows = []
    for _, part in parts:
        rows.append(read(part @ probes).cpu().double().numpy())
        let_go_of_graphs(part)  # every part has the budget of the operator to itself
    return shares / shares.sum(), np.stack(rows)


def let_go_of_graphs(op: LinearOperator) -> None:
    """Free the graphs that an operator, or the one it is a view of, keeps between products."""
    release = getattr(getattr(op, "parent", op), "release", None)
    if callable(release):
        release()


def half_width(
    shares: Array, samples: Array, *, exact: bool = False, whole: float | None = None
) -> float:
    """95 % half-width of the weighted mean; exact: the samples carry no probe noise.

    whole: the value of the mean itself where it is known better than these probes tell. A batch
    deviates in part by a multiple of the whole, and that part is known from it: every batch's
    deviations are regressed on the probes' values of the whole and moved to its known value.
    """
    count, probes = samples.shape
    together = shares @ samples  # (q,)
    deviations = samples - together  # (B, q)
    middle = deviations.mean(1)
    noise = np.zeros(count)
    if not exact and probes > 1:
        noise = deviations.var(1, ddof=1) / probes
    apart = together - together.mean()
    spread = float(apart @ apart)
    if whole is not None and probes > 3 and spread > 0.0 and not exact:
        slope = deviations @ apart / spread
        missing = whole - float(together.mean())
        rest = deviations - middle[:, None] - np.outer(slope, apart)
        middle = middle + slope * missing
        noise = (rest**2).sum(1) / (probes - 2) * (1 / probes + missing**2 / spread)
    scatter, doubt = (count / (count - 1) * float(shares**2 @ part) for part in (middle**2, noise))
    # Where the scatter drowns in the probes' noise it is not zero but unknown below its chance.
    variance = max(scatter - doubt, doubt * (2 / count) ** 0.5)
    return float(student.ppf(0.975, count - 1)) * float(np.sqrt(max(variance, 0.0)))


def around(value: float, half: float) -> Interval:
    """value ± half."""
    return value - half, value + half


def eigenvalue_half_widths(op: LinearOperator, vectors: Tensor) -> tuple[Tensor, int] | None:
    """Half-widths (k,) of eigenvalues over batches, to first order vᵀ A_b v; and the products."""
    parts = batches_of(op)
    if not parts:
        return None
    vectors = vectors.to(device=op.device, dtype=op.dtype)  # they may be stored in fewer bits
    shares, samples = linear_samples(parts, vectors, lambda images: (vectors * images).sum(0))
    widths = [
        half_width(shares, samples[:, i : i + 1], exact=True) for i in range(samples.shape[1])
    ]
    return torch.tensor(widths, dtype=torch.float64, device="cpu"), vectors.shape[1]
