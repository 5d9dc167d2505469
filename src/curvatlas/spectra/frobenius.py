r"""‖A‖_F² = ‖A V‖_F² + E‖A P u‖²: the outliers exactly, the rest by probes.

V (j, n) are orthonormal right vectors grown by Lanczos (by Golub-Kahan when A is not symmetric),
their images A V are kept. u is uniform on the sphere of radius √d in the complement, P = I − VᵀV,
M = P AᵀA P:  ‖A P u‖² = uᵀMu has mean tr M and variance 2 (‖M‖² − (tr M)²/d). The images a_i of the
probes give what it needs: with g_ij = a_i·a_j − (tr M/d) u_i·u_j and different i, j, k,
E g_ij² = ‖M_c‖_F² and E g_ij g_jk g_ki = tr M_c³, M_c = M − (tr M/d) P.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.spectra.checkpoint import undone
from curvatlas.spectra.requirements import refuse_asymmetric_images

FEWEST_PROBES = 8
_FIRST_STEPS = 6
_CHI_SQUARED = (9.82e-4, 5.024)  # 2.5 % and 97.5 %, one degree of freedom


class FrobeniusSampler:
    """Right vectors V and their images, probes and their images."""

    def __init__(self, op: LinearOperator, max_products: int, random: torch.Generator) -> None:
        self.op, self.random = op, random
        m, n = op.shape
        self.vectors = torch.empty(0, n, dtype=op.dtype, device=op.device)
        self.images = torch.empty(0, m, dtype=op.dtype, device=op.device)
        self.next: Tensor | None = None
        self.probes = torch.empty(n, 0, dtype=op.dtype, device=op.device)
        self.probe_images = torch.empty(m, 0, dtype=op.dtype, device=op.device)
        self.goal = 0  # vectors that V is meant to have
        self.exhausted = False
        self.products = 0
        self.between_steps: Callable[[], None] = lambda: None  # called where the state may be kept

    def begun(self, budget: int) -> bool:
        """Make one of the first steps; True when they are done or the budget is."""
        left = budget - self.products
        missing = FEWEST_PROBES - self.probes.shape[1]
        if left > 0 and missing > 0:
            self.probe(min(missing, left))
            return False
        if left > 0 and len(self.vectors) < _FIRST_STEPS and not self.exhausted:
            self.deflate(1)
            return False
        return True

    def probe(self, count: int) -> None:
        with undone(self.random):
            fresh = torch.randn(
                self.op.shape[1], count, generator=self.random, dtype=torch.float64, device="cpu"
            )
            fresh = fresh.to(device=self.op.device, dtype=self.op.dtype)
            images = self.op @ fresh
        if not bool(torch.isfinite(images).all()):
            raise FloatingPointError(
                "a product with the operator gave NaN or infinity: check the loss and the "
                "parameters for NaN, or compute in float64."
            )
        if self.products == 0:
            refuse_asymmetric_images(self.op, fresh, images, "frobenius_norm")
        self.products += count
        self.probes = torch.cat([self.probes, fresh], 1)
        self.probe_images = torch.cat([self.probe_images, images], 1)

    def deflate(self, steps: int) -> None:
        """One more right vector a step: one product if A is symmetric, two otherwise."""
        self.goal = len(self.vectors) + steps
        self.finish()

    def finish(self) -> None:
        """Take the steps that are due: after an interruption some of them are missing."""
        while len(self.vectors) < self.goal and not self.exhausted:
            if self.next is None:
                start = torch.randn(
                    self.op.shape[1], generator=self.random, dtype=torch.float64, device="cpu"
                )
                self.next = start.to(device=self.op.device, dtype=self.op.dtype)
            vector = self.next - self.vectors.T @ (self.vectors @ self.next)
            vector = vector - self.vectors.T @ (self.vectors @ vector)
            norm, before = float(vector.norm()), float(self.next.norm())
            if norm <= 1e3 * torch.finfo(vector.dtype).eps * before:
                self.exhausted = True
                return
            vector = vector / norm
            image = self.op @ vector
            symmetric = self.op.tags.symmetric
            self.next = image if symmetric else self.op.T @ image
            self.products += 1 if symmetric else 2
            self.vectors = torch.cat([self.vectors, vector[None]])
            self.images = torch.cat([self.images, image[None]])
            self.between_steps()

    def _rest(self, j: int) -> tuple[float, np.ndarray]:
        """Mean of ‖A P u‖² and the centred g (m, m) with an empty diagonal."""
        inside = self.vectors[:j] @ self.probes
        probes = self.probes - self.vectors[:j].T @ inside
        images = self.probe_images - self.images[:j].T @ inside
        d = self.op.shape[1] - j
        scale = torch.sqrt(d / probes.double().pow(2).sum(0))
        gram = (images.T @ images).double() * scale[:, None] * scale
        mean = float(gram.diagonal().mean())
        centred = gram - mean / d * (probes.T @ probes).double() * scale[:, None] * scale
        result: np.ndarray = centred.fill_diagonal_(0.0).cpu().numpy()
        return mean, result

    def estimate(self) -> tuple[float, float, float]:
        """‖A‖_F and its 95 % interval."""
        m = self.probes.shape[1]
        exact = float(self.images.double().pow(2).sum())
        rest, centred = self._rest(len(self.vectors))
        square = exact + rest
        if square == 0.0:
            return 0.0, 0.0, 0.0
        rounding = 32 * torch.finfo(self.op.dtype).eps * square
        if m == 1:
            # One number does not scatter. If M has rank one, the worst, it is tr M times χ² of one
            # degree of freedom, which lies between these two in 95 %.
            ends = exact + rest / _CHI_SQUARED[1], exact + rest / _CHI_SQUARED[0]
            low, high = (float(np.sqrt(end)) for end in (max(ends[0] - rounding, 0.0), ends[1]))
            return float(np.sqrt(square)), low, high
        variance = _variance(centred)
        skew = most = float(np.sqrt(8 / m))
        if m > 2 and variance > 0:
            third = float(np.trace(centred @ centred @ centred)) / (m * (m - 1) * (m - 2))
            skew = float(np.clip(most * third / (variance / 2) ** 1.5, 0.0, most))
        # γ² = 8 / (m r) gives the effective rank r of M. Independent pairs of probes would give
        # m (m − 1) / 2 degrees of freedom; pairs share probes, and sampling ends where the variance
        # came out small: with 1.5 for each probe a ramp is missed in 4 % instead of 6 %.
        rank = max(most**2 / max(skew, 1e-6) ** 2, 1.0)
        freedom = max((m - 1) * min(rank, 1.5), 1.0)
        half = float(student.ppf(0.975, freedom)) * float(np.sqrt(variance / m))
        low = max(square - half * float(np.exp(-0.4 * skew)), exact) - rounding
        high = square + half * float(np.exp(1.2 * skew)) + rounding
        return float(np.sqrt(square)), float(np.sqrt(max(low, 0.0))), float(np.sqrt(high))

    @property
    def missing(self) -> int:
        """Directions whose image is not known."""
        return self.op.shape[1] - len(self.vectors) - self.probes.shape[1]

    def known(self) -> tuple[Tensor, Tensor]:
        """All that was multiplied and its images, (n, k) and (m, k)."""
        return (
            torch.cat([self.vectors.T, self.probes], 1),
            torch.cat([self.images.T, self.probe_images], 1),
        )

    def paths(self, rtol: float, reached: float) -> tuple[int, int]:
        """Products that the way to rtol is expected to take by probes, and by vectors first.

        The error falls as 1/√m with the probes; a quarter more vectors reduce the variance as the
        last ones did.
        """
        j, m, back = len(self.vectors), self.probes.shape[1], self._back
        needed = min(max(m * (reached / rtol) ** 2 * 1.02, FEWEST_PROBES), 1e9)
        by_probes = max(int(np.ceil(needed)) - m, 1)
        if self.exhausted or j < back or j + m >= self.op.shape[1] - 2:
            return by_probes, by_probes
        now, before = _variance(self._rest(j)[1]), _variance(self._rest(j - back)[1])
        if not 0 < now < before:
            return by_probes, by_probes
        return by_probes, self._cost * back + max(int(np.ceil(needed * now / before)) - m, 0)

    @property
    def _back(self) -> int:
        return max(2, len(self.vectors) // 4)

    @property
    def _cost(self) -> int:
        return 1 if self.op.tags.symmetric else 2

    def advance(self, by_probes: int, by_vectors: int, left: int) -> None:
        """Deflate or probe, whichever promises the shorter way."""
        if by_vectors < by_probes and left >= self._cost * self._back:
            self.deflate(self._back)
        else:
            self.probe(min(by_probes, max(self.probes.shape[1], 4), left))

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        tensors = {
            "vectors": self.vectors, "images": self.images, "probes": self.probes,
            "probe_images": self.probe_images, "random": self.random.get_state(),
        }  # fmt: skip
        if self.next is not None:
            tensors["next"] = self.next
        numbers = {"products": self.products, "exhausted": int(self.exhausted), "goal": self.goal}
        return tensors, numbers

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        device = self.op.device
        self.vectors, self.images = tensors["vectors"].to(device), tensors["images"].to(device)
        self.probes = tensors["probes"].to(device)
        self.probe_images = tensors["probe_images"].to(device)
        self.next = tensors["next"].to(device) if "next" in tensors else None
        self.random.set_state(tensors["random"])
        self.products, self.goal = int(numbers["products"]), int(numbers["goal"])
        self.exhausted = bool(numbers["exhausted"])


def _variance(centred: np.ndarray) -> float:
    """2 ‖M_c‖_F², of one probe's ‖A P u‖²."""
    m = len(centred)
    return 2 * float((centred**2).sum()) / max(m * (m - 1), 1)
