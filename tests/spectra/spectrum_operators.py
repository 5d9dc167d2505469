"""Operators with a chosen spectrum: what the estimators of spectra/ are tested on.

Random starts and Gaussian probes do not change under rotation, so a diagonal operator is as hard as
any with the same eigenvalues, and its truth is exact. ``rotated`` is for what depends on the basis.
"""

from __future__ import annotations

import torch
from scipy.stats import binom
from torch import Tensor

from curvatlas.linear_operator import LinearOperator, Tags
from curvatlas.spectra.deflated import DeflatedSampler


def most_misses(trials: int, *, counts: int = 1) -> int:
    """How often 95 % intervals may miss in so many trials: other seeds exceed it once in 10,000.

    The smallest m with counts · P(Bin(trials, 0.05) > m) ≤ 10⁻⁴, for a test that fails when one of
    ``counts`` numbers of misses is above m. Intervals half as wide miss a normal estimate in 33 %:
    in 40 trials more than the 9 allowed with a chance of 0.89, in 60 or more of 0.98.
    """
    return next(m for m in range(trials) if counts * binom.sf(m, trials, 0.05) <= 1e-4)


class SpectrumOperator(LinearOperator):
    """diag(values), known to the estimators through products only."""

    def __init__(self, values: Tensor, *, psd: bool = False, fail_at: int | None = None) -> None:
        n = len(values)
        super().__init__((n, n), dtype=values.dtype, tags=Tags(symmetric=True, psd=psd))
        self.values = values
        self.fail_at = fail_at

    def _columns(self, columns: Tensor) -> Tensor:
        if self.fail_at is not None and self.products >= self.fail_at:
            raise KeyboardInterrupt
        return self.values[:, None] * columns


class DenseOperator(LinearOperator):
    """A matrix that does not say it is one, so that nothing is read off it."""

    def __init__(self, matrix: Tensor, *, symmetric: bool = True, psd: bool = False) -> None:
        tags = Tags(symmetric=symmetric, psd=psd)
        super().__init__(tuple(matrix.shape), dtype=matrix.dtype, tags=tags)
        self.matrix = matrix

    def _columns(self, columns: Tensor) -> Tensor:
        return self.matrix @ columns

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self.matrix.T @ columns


def deflate(sampler: DeflatedSampler, vectors: int) -> None:
    """Let a sampler take so many vectors into its basis."""
    sampler.goal = vectors
    while sampler.deflating:
        sampler.grow()


def spectra() -> dict[str, Tensor]:
    """Indefinite, degenerate, rank-deficient, heavy-tailed and flat spectra."""
    random = torch.Generator().manual_seed(5)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=random, dtype=torch.float64)

    heavy = normal(500)
    heavy = heavy.sign() * heavy.abs() ** 4
    heavy[0] = 200.0
    hessian_like = 0.02 * normal(800)
    hessian_like[:12] += torch.logspace(1.5, -0.5, 12, dtype=torch.float64)
    hessian_like[12:16] -= torch.tensor([1.0, 0.6, 0.4, 0.3], dtype=torch.float64)
    deficient = torch.zeros(400, dtype=torch.float64)
    deficient[:60] = torch.linspace(0.1, 4, 60, dtype=torch.float64)
    degenerate = torch.cat(
        [torch.full((20,), 3.0), torch.full((10,), -2.0), torch.full((270,), 0.5)]
    )
    return {
        "hessian_like": hessian_like,
        "heavy_tailed": heavy,
        "rank_deficient": deficient,
        "degenerate": degenerate.double(),
        "power_law": torch.arange(1, 601, dtype=torch.float64) ** -1.0,
        "flat": torch.linspace(1, 2, 400, dtype=torch.float64),
    }


def rotated(values: Tensor, seed: int = 0) -> Tensor:
    """Q diag(values) Qᵀ with a random orthogonal Q."""
    random = torch.Generator().manual_seed(seed)
    n = len(values)
    q = torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64))[0]
    matrix = (q * values.double()) @ q.T
    return ((matrix + matrix.T) / 2).to(values.dtype)
