r"""Probes that know where a column's curvature lies, learnt from the columns already probed.

H is symmetric, so the products H_ba z_a of other columns are samples of the row space of H_ab.
Their leading directions u_1, …, u_r are an approximate eigenbasis of B = H_abᵀH_ab for every row a.
Dealt out in turn to q classes, with random signs ε and a random share w of the complement,

    x_c = Σ_{i ∈ c} ε_i u_i + √((n − r)/q) w_c,  E Σ_c x_c x_cᵀ = I,  E Σ_c ‖H_ab x_c‖² = ‖H_ab‖_F²,

only pairs inside a class make noise, Var = 2 Σ_c Σ_{i ≠ j ∈ c} B_ij²: none of the q leading
directions disturbs another, and no product more is needed than for isotropic probes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.precision import in_float64

_FULL_UP_TO = 512  # entries of a block whose whole covariance is kept
MOST = 40  # directions kept of a larger block
WAITING = 0.6  # samples, as a share of these, gathered before they are merged
_FEWEST = 4  # directions worth keeping
_ENOUGH = 3 * MOST  # samples, after which more would cost time and teach little


class Directions:
    """The leading directions of one block's entries, from samples of its rows.

    kept: how many of a block of more than 512 entries; fewer than 4 are not worth the memory.
    """

    def __init__(
        self, size: int, *, dtype: torch.dtype, device: torch.device, kept: int = MOST
    ) -> None:
        self.size = size
        self._most = kept
        self.samples = 0
        small = size <= _FULL_UP_TO
        empty = torch.zeros(0, size, dtype=dtype, device=device)
        self._covariance = empty.new_zeros(size, size) if small else None
        self._kept = empty
        self._waiting: list[Tensor] = []

    @property
    def learns(self) -> bool:
        return self.samples < _ENOUGH and (self._covariance is not None or self._most >= _FEWEST)

    def add(self, samples: Tensor) -> None:
        """samples: (k, n), each scaled by how much it matters."""
        if not self.learns:
            return
        self.samples += len(samples)
        if self._covariance is not None:
            self._covariance.addmm_(samples.T, samples)
            return
        self._waiting.append(samples)
        if sum(len(block) for block in self._waiting) >= WAITING * self._most:
            self._merge()

    def _merge(self) -> None:
        """Keep the leading right singular vectors, scaled, of all samples so far, as rows."""
        if not self._waiting:
            return
        stacked = torch.cat([self._kept, *self._waiting])  # (k, n)
        self._waiting = []
        values, vectors = torch.linalg.eigh(in_float64(stacked @ stacked.T))
        vectors = vectors.flip(1)[:, : min(self._most, int((values > 1e-6 * values[-1]).sum()))]
        self._kept = vectors.T.to(stacked.dtype).to(stacked.device) @ stacked

    def basis(self) -> Tensor:
        """(n, r) orthonormal, leading direction first; r = 0 before the first sample."""
        if not self.samples:
            return torch.zeros(self.size, 0, dtype=self._kept.dtype)
        if self._covariance is not None:
            vectors: Tensor = torch.linalg.eigh(self._covariance.cpu().double()).eigenvectors
            return vectors.flip(1).to(self._kept.dtype)
        self._merge()
        return orthonormal(self._kept.T.cpu())


def orthonormal(columns: Tensor) -> Tensor:
    """The orthonormal factor of a tall (n, k) matrix."""
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def coded_probes(basis: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(n, q) probes x_c of the module's equation, orthogonal, scaled so that E XXᵀ = I."""
    size, known = basis.shape
    probes = torch.zeros(size, count, dtype=basis.dtype)
    rest = size - known
    if rest > 0:
        # Isotropic where nothing is known; fewer columns where the complement has fewer dimensions.
        some = min(count, rest)
        draw = torch.randn(size, some, generator=generator, dtype=basis.dtype, device="cpu")
        draw -= basis @ (basis.T @ draw)
        probes[:, :some] = orthonormal(draw) * (rest / some) ** 0.5
    if known > 0:
        signs = (
            torch.randint(0, 2, (known,), generator=generator, device="cpu").to(basis.dtype) * 2 - 1
        )
        classes = torch.zeros(known, count, dtype=basis.dtype)
        places = torch.arange(known)
        classes[places, places % count] = signs
        probes += basis @ classes
    return probes
