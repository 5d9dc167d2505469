r"""Lanczos quadrature with three vectors in memory, for models that fill it.

Without a stored basis there is no reorthogonalisation: copies of converged eigenvalues appear and
share their weight, so the nodes are no list of eigenvalues, but the quadrature stays that of a
nearby spectrum (Greenbaum 1989; Chen, Trogdon and Ubaru 2021). Every step can be the last one
before a kill: two vectors and the coefficients are the whole state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.progress import bar
from curvatlas.spectra.checkpoint import Checkpoint, generator
from curvatlas.spectra.density_result import SpectralDensity, summarise
from curvatlas.spectra.krylov import Array
from curvatlas.spectra.requirements import largest_asymmetry, not_symmetric


class LeanDensity:
    """``probes`` runs of ``steps`` steps, one after the other."""

    def __init__(
        self, op: LinearOperator, probes: int, steps: int, seed: int, file: Checkpoint
    ) -> None:
        self.op, self.probes, self.steps, self.seed, self.file = op, probes, steps, seed, file
        self.done: list[list[list[float]]] = []  # α and β of the finished probes
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.here = self.before = torch.zeros(0, device="cpu")

    def result(self) -> SpectralDensity:
        stored = self.file.load()
        if stored is None:
            self._begin()
        else:
            self._restore(*stored)
        total = self.probes * self.steps
        with bar("spectral density", total=total) as progress, self.file.kept(self._state):
            while len(self.done) < self.probes:
                progress.update(self._products - progress.n)
                self.file.mark()
                self._advance()
                if self.file.due():
                    self.file.save(*self._state())
        self.file.save(*self._state())
        coefficients: Array = np.array(self.done)  # (probes, 2, steps)
        return summarise(
            size=self.op.shape[0], outliers=np.zeros(0), coupling=0.0,
            alphas=coefficients[:, 0], betas=coefficients[:, 1],
            eps=torch.finfo(self.op.dtype).eps, products=self._products, psd=self.op.tags.psd,
        )  # fmt: skip

    @property
    def _products(self) -> int:
        return len(self.done) * self.steps + len(self.alphas)

    def _begin(self) -> None:
        """A random direction that depends on the seed and the probe's number alone."""
        random = generator(1009 * self.seed + len(self.done))
        start = torch.randn(self.op.shape[0], generator=random, dtype=torch.float32, device="cpu")
        start = start.to(device=self.op.device, dtype=self.op.dtype)
        self.here = start.div_(torch.linalg.vector_norm(start))
        self.before = torch.zeros(0, dtype=self.op.dtype, device=self.op.device)
        self.alphas, self.betas = [], []

    def _advance(self) -> None:
        image: Tensor = self.op @ self.here
        alpha = float(torch.dot(self.here, image))
        if len(self.alphas) == 1:
            self._refuse_asymmetric(float(torch.dot(self.before, image)), self.betas[-1])
        image.sub_(self.here, alpha=alpha)
        if self.alphas and self.betas[-1] > 0:
            image.sub_(self.before, alpha=self.betas[-1])
        beta = float(torch.linalg.vector_norm(image))
        if not np.isfinite(alpha + beta):
            raise FloatingPointError(
                "a product with the operator gave NaN or infinity: check the loss and the "
                "parameters for NaN, or compute in float64."
            )
        self.alphas.append(alpha)
        self.betas.append(beta)
        self.before, self.here = self.here, image.div_(max(beta, 1e-300))
        if len(self.alphas) == self.steps or beta == 0.0:
            missing = self.steps - len(self.alphas)
            self.done.append([self.alphas + [0.0] * missing, self.betas + [0.0] * missing])
            self._begin()

    def _refuse_asymmetric(self, back: float, forth: float) -> None:
        """b_1ᵀ A b_2 against b_2ᵀ A b_1 = β_1: no product, and no third vector."""
        n, eps = self.op.shape[0], torch.finfo(self.op.dtype).eps
        size = float(np.hypot(self.alphas[0], forth))  # ‖A b_1‖, the norm ‖A‖_F over n^½
        apart = n**0.5 * abs(back - forth) / size if size else 0.0
        if np.isfinite(apart) and apart > max(largest_asymmetry(self.op.dtype, n), 2 * n * eps):
            raise ValueError(not_symmetric(apart, "spectral_density"))

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        finished = len(self.done) >= self.probes
        vectors = {} if finished else {"here": self.here, "before": self.before}
        return vectors, {
            "done": list(self.done),
            "alphas": list(self.alphas),
            "betas": list(self.betas),
        }

    def _restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.done, self.alphas, self.betas = (numbers[k] for k in ("done", "alphas", "betas"))
        if "here" in tensors:
            self.here = tensors["here"].to(self.op.device)
            self.before = tensors["before"].to(self.op.device)
