"""Operators with a known spectrum for the trials of coverage.py.

Gaussian starts and probes do not change under rotation: a diagonal matrix is as hard as any with
the same eigenvalues. Where the basis matters (the diagonal) a rotation is given.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas.zoo.datasets import digits
from curvatlas.zoo.models import ViT, ViTConfig
from curvatlas.zoo.training import train


class ChosenSpectrum(ca.LinearOperator):
    """Q diag(values) Qᵀ known through products; Q = I unless given."""

    def __init__(self, values: Tensor, *, psd: bool = False, basis: Tensor | None = None) -> None:
        n = len(values)
        super().__init__((n, n), dtype=values.dtype, tags=ca.Tags(symmetric=True, psd=psd))
        self.values, self.basis = values, basis

    def matrix(self) -> Tensor:
        if self.basis is None:
            return torch.diag(self.values)
        return (self.basis * self.values) @ self.basis.T

    def _columns(self, columns: Tensor) -> Tensor:
        if self.basis is None:
            return self.values[:, None] * columns
        return self.basis @ (self.values[:, None] * (self.basis.T @ columns))


class Sampled(ChosenSpectrum):
    """The mean over batches that a seed draws; their scatter around ``values`` is 20 % each."""

    def __init__(self, values: Tensor, seed: int, *, batches: int = 10) -> None:
        random = torch.Generator().manual_seed(seed)
        common = torch.randn(batches, 1, generator=random, dtype=values.dtype)
        own = torch.randn(batches, len(values), generator=random, dtype=values.dtype)
        self._batches = values * (1 + 0.2 * common + 0.1 * own)
        super().__init__(self._batches.mean(0))

    def per_batch(self) -> list[tuple[float, ca.LinearOperator]]:
        return [(1 / len(self._batches), ChosenSpectrum(values)) for values in self._batches]


def rotation(n: int) -> Tensor:
    random = torch.Generator().manual_seed(n)
    return torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64))[0]


def chosen_spectra() -> dict[str, Tensor]:
    """Name → eigenvalues, ascending order not implied."""
    random = torch.Generator().manual_seed(2024)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=random, dtype=torch.float64)

    indefinite = 0.3 * normal(400)
    indefinite[:8] += torch.linspace(4, 12, 8, dtype=torch.float64)
    indefinite[8:14] -= torch.linspace(2, 5, 6, dtype=torch.float64)
    degenerate = torch.cat(
        [torch.full((n,), x, dtype=torch.float64) for n, x in ((12, 6.0), (25, -1.5), (323, 0.4))]
    )
    deficient = torch.zeros(420, dtype=torch.float64)
    deficient[:90] = normal(90) + 0.8
    heavy = normal(480)
    heavy = heavy.sign() * heavy.abs() ** 3
    heavy[:3] = torch.tensor([60.0, 45.0, -30.0], dtype=torch.float64)
    return {
        "indefinite": indefinite,
        "degenerate": degenerate,
        "rank-deficient": deficient,
        "heavy-tailed": heavy,
        "power law": torch.arange(1, 501, dtype=torch.float64) ** -0.8,
        "ramp": torch.linspace(-1, 1, 360, dtype=torch.float64),
        "trained ViT": _trained(),
    }


def held_out_spectra() -> dict[str, Tensor]:
    """Spectra that no rule was chosen on: near a minimum, and half flat in two ways."""
    random = np.random.default_rng(77)
    bulk = random.gamma(0.6, 1.0, 380)
    minimum = np.concatenate([bulk, -random.gamma(0.8, 0.2, 30), [40.0, 31.0, 22.0, 15.0, -3.0]])
    sides = 0.4 * random.standard_t(4, 260)
    flat = np.concatenate([sides, np.zeros(180), [9.0, 12.0, 14.0, -6.0]])
    negative = np.where(flat == 0.0, -1e-7, flat)
    return {
        "near a minimum": torch.from_numpy(minimum),
        "with a null space": torch.from_numpy(flat),
        "small and negative": torch.from_numpy(negative),
    }


def _trained() -> Tensor:
    """The whole spectrum of a ViT of 750 parameters after 200 steps on the digits."""
    torch.manual_seed(7)
    model, data = ViT(ViTConfig(d_model=8, n_heads=2, d_ff=16, n_layers=1)), digits()
    train(model, data, steps=200, seed=7)
    batch = data.train.inputs[:64].double(), data.train.targets[:64]
    matrix = ca.Hessian(ca.Problem(model.double().eval(), "cross_entropy", batch)).dense()
    return torch.from_numpy(np.linalg.eigvalsh(((matrix + matrix.T) / 2).numpy()).copy())
