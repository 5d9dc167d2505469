r"""A number with its uncertainty: what the scalar estimators return.

Besides the probes there is another source of error: the batches at hand are a sample of the data.
An operator that offers ``per_batch()`` is a mean A = Σ_b w_b A_b over batches. A quantity that is
linear in A (or made linear around it) has a value q_b on every batch, and

    Var[Σ_b w_b q_b] ≈ B/(B−1) Σ_b w_b² (q_b − q)².

q_b is measured on the same few probes for all batches, so that what they have in common cancels;
the probes' remaining noise is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.linear_operator import LinearOperator
from curvatlas.results import Number, Result
from curvatlas.spectra.checkpoint import generator
from curvatlas.spectra.krylov import Array

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Estimate(Result):
    """An estimated quantity of an operator.

    Two sources of error are kept apart: ``interval`` is for the probes (the number the data at hand
    define), ``data_interval`` for the sampling of the data (what other batches of the same kind
    would give), None when the operator does not know its batches.
    """

    quantity: str  # "trace", "Frobenius norm", …
    value: float
    interval: Interval  # 95 %, probes only
    data_interval: Interval | None = None  # 95 %, batches only
    products: int
    converged: bool
    exact: bool  # a closed form or the matrix itself: the interval is rounding
    method: str

    @property
    def number(self) -> Number:
        """The value with its errors, as it is printed."""
        return Number(self.value, *self.interval, data=self.data_interval, exact=self.exact)

    @property
    def error(self) -> float:
        """Half the width of the 95 % interval."""
        return (self.interval[1] - self.interval[0]) / 2

    @property
    def advice(self) -> str:
        """Which source of error to reduce first."""
        if self.data_interval is None:
            return "more probes" if not self.converged else "nothing: only probes were in play"
        data = (self.data_interval[1] - self.data_interval[0]) / 2
        if data > 2 * self.error:
            return f"more data: batches contribute ±{data:.2g}, probes ±{self.error:.2g}"
        if self.error > 2 * data:
            return f"more probes: they contribute ±{self.error:.2g}, batches ±{data:.2g}"
        return f"both alike: probes ±{self.error:.2g}, batches ±{data:.2g}"

    def __str__(self) -> str:
        level = "" if self.number.exact and self.data_interval is None else " (95 %)"
        # a difference of two estimates has cost nothing of its own
        cost = f"{self.products} products" if self.products else f"by {self.method}"
        state = "" if self.converged else ", NOT converged"
        return f"{self.quantity} = {self.number}{level}, {cost}{state}"


def exact_estimate(
    quantity: str, value: float, *, scale: float, eps: float, products: int, method: str
) -> Estimate:
    """A number known up to rounding: ``scale`` is the sum of the magnitudes that were added."""
    radius = 64 * eps * scale + math.ulp(value)
    return Estimate(
        quantity=quantity,
        value=value,
        interval=(value - radius, value + radius),
        products=products,
        converged=True,
        exact=True,
        method=method,
    )


def close_enough(value: float, error: float, rtol: float, norm: float = 0.0) -> bool:
    """Whether ± error is within rtol of the value."""
    return error <= tolerance(value, rtol, norm)


def tolerance(value: float, rtol: float, norm: float = 0.0) -> float:
    """rtol of the value, and where a sum cancels to less than a tenth of its ``norm``, of that.

    norm: the sum of the magnitudes. No effort reaches a share of a sum that happens to be zero.
    """
    return rtol * max(abs(value), 0.1 * norm)


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
    shares: Array, samples: Array, *, exact: bool = False, total: float | None = None
) -> float:
    """95 % half-width of the weighted mean; exact: the samples carry no probe noise.

    total: the value of the mean itself where it is known better than these probes tell. A batch
    deviates in part by a multiple of the mean, and that part is known from it: every batch's
    deviations are regressed on the probes' values of the mean and moved to its known value.
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
    if total is not None and probes > 3 and spread > 0.0 and not exact:
        slope = deviations @ apart / spread
        missing = total - float(together.mean())
        rest = deviations - middle[:, None] - np.outer(slope, apart)
        middle = middle + slope * missing
        noise = (rest**2).sum(1) / (probes - 2) * (1 / probes + missing**2 / spread)
    scatter, doubt = (count / (count - 1) * float(shares**2 @ part) for part in (middle**2, noise))
    # Where the scatter drowns in the probes' noise it is not zero but unknown below its chance.
    variance = max(scatter - doubt, doubt * (2 / count) ** 0.5)
    return float(student.ppf(0.975, count - 1)) * float(np.sqrt(max(variance, 0.0)))


def with_data_error(
    op: LinearOperator, estimate: Estimate, seed: int, weigh: Callable[[Tensor], Tensor], cost: int
) -> Estimate:
    """The estimate with the scatter of its batches, on six normal probes u (n, 6).

    A quantity that changes by E[wᵀ dA u] with the operator, w = weigh(u): one number a batch.
    cost: products for each probe.
    """
    parts = batches_of(op)
    if not parts:
        return estimate
    probes = torch.randn(
        op.shape[1], 6, generator=generator(seed + 1), dtype=torch.float64, device="cpu"
    )
    probes = probes.to(device=op.device, dtype=op.dtype)
    weights = weigh(probes)
    let_go_of_graphs(op)  # those that ``weigh`` may have made
    shares, samples = linear_samples(parts, probes, lambda images: (weights * images).sum(0))
    half = half_width(shares, samples, total=estimate.value)
    interval = estimate.value - half, estimate.value + half
    return replace(
        estimate, data_interval=interval, products=estimate.products + cost * probes.shape[1]
    )


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
