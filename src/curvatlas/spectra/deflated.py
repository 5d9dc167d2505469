r"""Sums over the spectrum with the outliers removed: the sampler behind trace and Frobenius norm.

A Lanczos basis V captures the outliers; tr(VᵀAV) is known exactly. The rest B = P A P, P = I − VVᵀ,
is sampled with probes u uniform on the sphere of radius √d in the complement (d its dimension):

    tr A = tr(VᵀAV) + E[uᵀ B u],     Var[uᵀ B u] ≤ 2 ‖B_c‖_F²,   B_c = B − (tr B / d) P.

The variance is not taken from the few values uᵀBu but from ‖B_c u‖², which the same products give
and which scatters far less. Probes drawn early stay valid when V grows later: A V is known, so
A P u = A u − A V (Vᵀu) costs no product. Whether the next products go to V or to probes is decided
by which shortens the road to the tolerance.

Hutch++ (Meyer, Musco, Musco, Woodruff 2021) and its adaptive form (Persson, Cortinovis, Kressner
2022) split the work in this way with a random range; a Krylov space captures outliers in fewer
products (Chen and Hallman 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.spectra.checkpoint import undone
from curvatlas.spectra.krylov import Array, KrylovBasis

FEWEST_PROBES = 6


@dataclass(frozen=True)
class Rest:
    """What the probes say of B = P A P."""

    values: Array  # (m,) uᵀ B u
    squares: Array  # (m,) ‖B u‖²
    centred: float  # mean ‖B_c u‖², estimates ‖B_c‖_F²
    third: float  # mean (u_i·B_c u_j) (B_c u_i·B_c u_j), i ≠ j: estimates tr B_c³
    fourth: float  # mean (B_c u_i·B_c u_j)², i ≠ j: estimates tr B_c⁴

    def bounds(self) -> tuple[float, float]:
        """How far the truth may lie below and above the mean of ``values``, at 95 %.

        The mean has variance 2 ‖B_c‖²/m, and ‖B_c‖² is estimated with m ‖B_c‖⁴ / tr B_c⁴ degrees
        of freedom: few when one outlier is left in B, many when B is a bulk. An outlier also skews
        the mean, γ = (8/m)^½ tr B_c³ / ‖B_c‖³, and pulls its error estimate along: the truth is
        then further above than below. For a single outlier the exact chi-squared interval is
        reached by the factors exp(±0.8 γ) within 10 % from 6 probes on; γ being uncertain itself,
        the near side is drawn in only half as much.
        """
        m = len(self.values)
        if self.centred <= 0.0:
            return 0.0, 0.0
        rank = min(max(self.centred**2 / self.fourth, 1.0), 1e6) if self.fourth > 0 else 1.0
        quantile = float(student.ppf(0.975, max((m - 1) * rank, 1.0)))
        half = quantile * float(np.sqrt(2.0 * self.centred / m))
        most = np.sqrt(8.0 / m)
        skew = float(np.clip(most * self.third / self.centred**1.5, -most, most))
        below = half * float(np.exp(-0.4 * skew if skew > 0 else -0.8 * skew))
        above = half * float(np.exp(0.8 * skew if skew > 0 else 0.4 * skew))
        return below, above


class DeflatedSampler:
    """The basis V, the probes u and their images, and the next step."""

    def __init__(self, op: LinearOperator, max_products: int, random: torch.Generator) -> None:
        self.op, self.random = op, random
        self.size = op.shape[0]
        self.basis = KrylovBasis(op, min(max_products, self.size) + 2)
        self.probes = torch.empty(self.size, 0, dtype=op.dtype, device=op.device)
        self.images = self.probes.clone()
        self.goal = 0  # products that V is meant to have had
        self.exhausted = False  # the Krylov space is invariant: deflation has given all it can
        self.between_steps: Callable[[], None] = lambda: None  # called where the state may be kept

    @property
    def products(self) -> int:
        return self.basis.products + self.probes.shape[1]

    def deflate(self, steps: int) -> None:
        """Grow V by Lanczos steps."""
        self.goal = self.basis.products + steps
        self.finish()

    def finish(self) -> None:
        """Take the steps that are due: after an interruption some of them are missing."""
        basis = self.basis
        while basis.products < self.goal and not self.exhausted:
            if basis.count == 0:
                basis.add_random(self.random)
            if basis.pending:
                basis.expand()
            else:
                self.exhausted = True
            self.between_steps()

    def probe(self, count: int) -> None:
        """Draw and multiply ``count`` more probes, all in one call of the operator."""
        with undone(self.random):
            fresh = torch.randn(self.size, count, generator=self.random, dtype=torch.float64)
            fresh = fresh.to(device=self.op.device, dtype=self.op.dtype)
            images = self.op @ fresh
        if not bool(torch.isfinite(images).all()):
            raise FloatingPointError(
                "a product with the operator gave NaN or infinity: check the loss and the "
                "parameters for NaN, or compute in float64."
            )
        self.probes = torch.cat([self.probes, fresh], 1)
        self.images = torch.cat([self.images, images], 1)

    @property
    def captured(self) -> Array:
        """VᵀAV, symmetrised (j, j)."""
        j = self.basis.multiplied
        action = self.basis.coefficients[:j, :j]
        return (action + action.T) / 2

    def rest(self, deflated: int | None = None) -> Rest:
        """Quadratic forms of B on the probes, scaled to the sphere of the complement.

        deflated: use only the first so many vectors of V (to see what the later ones brought).
        """
        basis, r = self.basis, self.basis.count
        j = basis.multiplied if deflated is None else deflated
        probes, images = self.probes, self.images
        if j:
            v = basis.rows[:j]
            inside = v @ probes  # (j, m)
            action = torch.as_tensor(
                basis.coefficients[:r, :j], dtype=probes.dtype, device=probes.device
            )
            images = images - basis.rows[:r].T @ (action @ inside)
            images = images - v.T @ (v @ images)
            probes = probes - v.T @ inside
        d = self.size - j
        scale = (d / (probes * probes).sum(0).double()).cpu().numpy()  # (m,)
        values = (probes * images).sum(0).double().cpu().numpy() * scale
        squares = (images * images).sum(0).double().cpu().numpy() * scale
        centre = float(values.mean()) / d
        centred = images - centre * probes
        root = torch.as_tensor(np.sqrt(scale), dtype=centred.dtype, device=centred.device)
        centred = centred * root
        gram = (centred.T @ centred).double().cpu().numpy()
        cross = ((probes * root).T @ centred).double().cpu().numpy()
        mean = float(np.trace(gram)) / len(values)
        return Rest(values, squares, mean, _off_mean(cross * gram), _off_mean(gram * gram))

    def state(self) -> tuple[dict[str, Tensor], dict[str, float | int]]:
        tensors, numbers = self.basis.state()
        tensors.update(probes=self.probes, images=self.images, random=self.random.get_state())
        return tensors, {**numbers, "exhausted": int(self.exhausted), "goal": self.goal}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, float | int]) -> None:
        self.basis.restore(tensors, numbers)
        self.probes = tensors["probes"].to(self.op.device)
        self.images = tensors["images"].to(self.op.device)
        self.random.set_state(tensors["random"])
        self.exhausted, self.goal = bool(numbers["exhausted"]), int(numbers["goal"])


def _off_mean(matrix: Array) -> float:
    """Mean of the entries off the diagonal (of all entries for a single probe)."""
    m = len(matrix)
    if m == 1:
        return float(matrix[0, 0])
    return float(matrix.sum() - np.trace(matrix)) / (m * (m - 1))


@dataclass(frozen=True)
class Step:
    """What to do next, and how many products the whole way is expected to take."""

    deflate: bool
    count: int
    products: int


def plan(sampler: DeflatedSampler, target: float, error: float) -> Step:
    """The next products: deflation while it shortens the road to ± target, probes otherwise."""
    m, j = sampler.probes.shape[1], sampler.basis.multiplied
    # error ∝ ‖B_c‖ / √m: how many probes the target needs if nothing more is deflated
    ratio = (error / target) ** 2 if target > 0 else np.inf
    needed = min(max(m * ratio * 1.02, FEWEST_PROBES), 1e9)
    by_probes = max(int(np.ceil(needed)) - m, 1)
    probes = Step(False, min(by_probes, max(m, 4)), by_probes)
    look_back = max(2, j // 4)
    if sampler.exhausted or j < look_back or j + m >= sampler.size - 2:
        return probes
    now, before = sampler.rest().centred, sampler.rest(j - look_back).centred
    if not 0 < now < before:
        return probes
    shrink = (now / before) ** (1.0 / look_back)  # of ‖B_c‖² by one step
    best = probes
    for count in (2, 4, 8, 16, 32):
        # Deflation gets harder as it goes: extrapolate the last steps' success only over as many.
        faded = needed * shrink ** min(count, look_back)
        total = count + max(int(np.ceil(max(faded, FEWEST_PROBES))) - m, 0)
        if total < best.products:
            best = Step(True, count, total)
    return best
