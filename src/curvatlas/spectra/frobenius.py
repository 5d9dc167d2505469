r"""‖A‖_F² = ‖A V‖_F² + E‖A P u‖²: the outliers exactly, the rest by probes.

V (j, n) are orthonormal right vectors grown by Lanczos (by Golub-Kahan when A is not symmetric),
their images A V are kept. u is uniform on the sphere of radius √d in the complement, P = I − VᵀV,
M = P AᵀA P:  ‖A P u‖² = uᵀMu has mean tr M and variance 2 (‖M‖² − (tr M)²/d). The images a_i of the
probes give what it needs: with g_ij = a_i·a_j − (tr M/d) u_i·u_j and different i, j, k,
E g_ij² = ‖M_c‖_F² and E g_ij g_jk g_ki = tr M_c³, M_c = M − (tr M/d) P.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.precision import has_float64, in_float64
from curvatlas.spectra.checkpoint import undone
from curvatlas.spectra.krylov import Array
from curvatlas.spectra.requirements import refuse_asymmetric_images

FEWEST_PROBES = 8
FEWEST_VECTORS = 16  # in memory: less leaves no room for one vector of V and two probes
_FIRST_STEPS = 6
_AT_WORK = 3  # vectors that one step makes and lets go
_BAND = 2**23  # entries of the probes that are worked on together
_CHI_SQUARED = (9.82e-4, 5.024)  # 2.5 % and 97.5 %, one degree of freedom


@dataclass(frozen=True)
class Grams:
    """Inner products of a group of probes on the sphere of the complement, (m, m) each."""

    images: Array  # A P u_i · A P u_j
    probes: Array  # P u_i · P u_j

    def centred(self, mean: float) -> Array:
        """g_ij of the module's docstring off the diagonal, zeros on it; mean: tr M / d."""
        g = self.images - mean * self.probes
        np.fill_diagonal(g, 0.0)
        return g


class FrobeniusSampler:
    """Right vectors V and their images, probes and their images.

    room: vectors of the operator's longer side that may be held at once. When they are used up V
    stays as it is, the probes go and leave their inner products, and further probes come in groups.
    """

    def __init__(
        self, op: LinearOperator, max_products: int, random: torch.Generator, *, room: int
    ) -> None:
        self.op, self.random, self.room = op, random, room
        m, n = op.shape
        # A vector of V and its image are two, and a quarter of the room leaves half to the probes.
        capacity = max(min(max_products, n, (room - 12) // 4), 1)
        # Untouched pages are not committed: the whole capacity costs nothing until it is used.
        self._vectors = torch.empty(capacity, n, dtype=op.dtype, device=op.device)
        self._vector_images = torch.empty(capacity, m, dtype=op.dtype, device=op.device)
        self.count = 0  # vectors of V
        self.next: Tensor | None = None
        # Probes (n, ·) and images (m, ·) in the pieces they came in: joining would hold them twice.
        self._probes: list[Tensor] = []
        self._images: list[Tensor] = []
        self.let_go: list[Grams] = []
        self._latest: dict[int, Grams] = {}  # of the probes at hand, by how much of V is removed
        self.goal = 0  # vectors that V is meant to have
        self.exhausted = False
        self.products = 0
        self.between_steps: Callable[[], None] = lambda: None  # called where the state may be kept

    @property
    def vectors(self) -> Tensor:
        """V (j, n)."""
        return self._vectors[: self.count]

    @property
    def images(self) -> Tensor:
        """A V (j, m)."""
        return self._vector_images[: self.count]

    @property
    def probe_count(self) -> int:
        return self._held + sum(len(group.images) for group in self.let_go)

    @property
    def _held(self) -> int:
        return sum(piece.shape[1] for piece in self._probes)

    @property
    def growing(self) -> bool:
        """Whether V can still grow: nothing was let go, and there is room."""
        used = 2 * (self.count + self._held) + _AT_WORK
        full = used + 2 > self.room or self.count >= len(self._vectors)
        return not (self.exhausted or self.let_go or full)

    def begun(self, budget: int) -> bool:
        """Make one of the first steps; True when they are done or the budget is."""
        left = budget - self.products
        missing = FEWEST_PROBES - self.probe_count
        # Where memory is short V comes before the probes: it cannot grow once these were let go.
        tight = self.room < 4 * FEWEST_PROBES + 2 * _FIRST_STEPS + _AT_WORK
        steps = left >= self._cost and self.count < _FIRST_STEPS and self.growing
        if steps and (tight or missing <= 0):
            self.deflate(1)
            return False
        if left > 0 and missing > 0:
            self.probe(min(missing, left))
            return False
        return True

    def probe(self, count: int) -> int:
        """Draw and multiply up to ``count`` more probes in one call of the operator; how many."""
        # A probe in the making: as it is drawn in float64, in the operator's precision, its image.
        each = 3 + (self.op.dtype != torch.float64)
        left = self.room - 2 * self.count - _AT_WORK
        if each * count > left - 2 * self._held and self._held > 1:
            self.let_go.append(self._grams(self.count))
            self._probes, self._images, self._latest = [], [], {}
            self.between_steps()  # or the state kept last would still hold them
        count = max(min(count, (left - 2 * self._held) // each), 1)
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
        if self.probe_count == 0:
            refuse_asymmetric_images(self.op, fresh, images, "frobenius_norm")
        self.products += count
        self._probes.append(fresh)
        self._images.append(images)
        self._latest = {}
        return count

    def deflate(self, steps: int) -> None:
        """One more right vector a step: one product if A is symmetric, two otherwise."""
        self.goal = self.count + steps
        self.finish()

    def finish(self) -> None:
        """Take the steps that are due: after an interruption some of them are missing."""
        while self.count < self.goal and self.growing:
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
            self._vectors[self.count] = vector
            self._vector_images[self.count] = image
            self.count += 1
            self.between_steps()

    def _grams(self, j: int) -> Grams:
        """Inner products of the probes at hand, with the first j vectors of V removed."""
        if j not in self._latest:
            vectors = self.vectors[:j]
            inside = torch.cat([vectors @ piece for piece in self._probes], 1)
            probes = self._inner_products(self._probes, vectors, inside)
            images = self._inner_products(self._images, self.images[:j], inside)
            scale = np.sqrt((self.op.shape[1] - j) / np.diag(probes))
            sphere = scale[:, None] * scale
            self._latest[j] = Grams(images * sphere, probes * sphere)
        return self._latest[j]

    def _inner_products(self, pieces: list[Tensor], rows: Tensor, inside: Tensor) -> Array:
        """(X − rowsᵀ·inside)ᵀ(X − rowsᵀ·inside) (m, m), X the pieces side by side.

        A band of entries at a time: the projected vectors never exist beside the drawn ones.
        """
        m, length = inside.shape[1], rows.shape[1]
        step = max(min(_BAND, self.room * length // 32) // m, 1)
        total = torch.zeros(m, m, dtype=torch.float64, device="cpu")
        for band in (slice(start, start + step) for start in range(0, length, step)):
            part = torch.cat([piece[band] for piece in pieces], 1)
            part.addmm_(rows[:, band].T, inside, alpha=-1)
            total += (part.T @ part).cpu().double()
        inner: Array = total.numpy()
        return inner

    def _rest(self, j: int) -> tuple[float, list[Array]]:
        """Mean of ‖A P u‖² and, of every group, the centred g with an empty diagonal."""
        groups = [*self.let_go, self._grams(j)] if self._held else self.let_go
        mean = float(np.concatenate([np.diag(group.images) for group in groups]).mean())
        return mean, [group.centred(mean / (self.op.shape[1] - j)) for group in groups]

    def estimate(self) -> tuple[float, float, float]:
        """‖A‖_F and its 95 % interval."""
        m = self.probe_count
        precise = torch.float64 if has_float64(self.op.device) else None
        lengths = torch.linalg.vector_norm(self.images, dim=1, dtype=precise)
        exact = float(in_float64(lengths).square().sum())
        rest, centred = self._rest(self.count)
        square = exact + rest
        if square == 0.0:
            return 0.0, 0.0, 0.0
        rounding = 32 * torch.finfo(self.op.dtype).eps * square
        pairs = _count(centred, 2)
        if pairs == 0:
            # One number does not scatter. If M has rank one, the worst, it is tr M times χ² of one
            # degree of freedom, which lies between these two in 95 %.
            ends = exact + rest / _CHI_SQUARED[1], exact + rest / _CHI_SQUARED[0]
            low, high = (float(np.sqrt(end)) for end in (max(ends[0] - rounding, 0.0), ends[1]))
            return float(np.sqrt(square)), low, high
        variance = _variance(centred)
        skew = most = float(np.sqrt(8 / m))
        triples = _count(centred, 3)
        if triples > 0 and variance > 0:
            third = sum(float(np.trace(g @ g @ g)) for g in centred) / triples
            skew = float(np.clip(most * third / (variance / 2) ** 1.5, 0.0, most))
        # γ² = 8 / (m r) gives the effective rank r of M. Independent pairs of probes would give
        # m (m − 1) / 2 degrees of freedom; pairs share probes, and sampling ends where the variance
        # came out small: with 1.5 for each probe a ramp is missed in 4 % instead of 6 %.
        rank = max(most**2 / max(skew, 1e-6) ** 2, 1.0)
        freedom = max(min((m - 1) * min(rank, 1.5), pairs / 2), 1.0)
        half = float(student.ppf(0.975, freedom)) * float(np.sqrt(variance / m))
        low = max(square - half * float(np.exp(-0.4 * skew)), exact) - rounding
        high = square + half * float(np.exp(1.2 * skew)) + rounding
        return float(np.sqrt(square)), float(np.sqrt(max(low, 0.0))), float(np.sqrt(high))

    @property
    def missing(self) -> int:
        """Directions whose image is not at hand."""
        return self.op.shape[1] - self.count - self._held

    def known(self) -> tuple[Tensor, Tensor]:
        """All that was multiplied and is at hand, and its images, (n, k) and (m, k)."""
        return (
            torch.cat([self.vectors.T, *self._probes], 1),
            torch.cat([self.images.T, *self._images], 1),
        )

    def paths(self, rtol: float, reached: float) -> tuple[int, int]:
        """Products that the way to rtol is expected to take by probes, and by vectors first.

        The error falls as 1/√m with the probes; a quarter more vectors reduce the variance as the
        last ones did.
        """
        j, m, back = self.count, self.probe_count, self._back
        needed = min(max(m * (reached / rtol) ** 2 * 1.02, FEWEST_PROBES), 1e9)
        by_probes = max(int(np.ceil(needed)) - m, 1)
        if not self.growing or j < back or j + m >= self.op.shape[1] - 2:
            return by_probes, by_probes
        now, before = _variance(self._rest(j)[1]), _variance(self._rest(j - back)[1])
        if not 0 < now < before:
            return by_probes, by_probes
        return by_probes, self._cost * back + max(int(np.ceil(needed * now / before)) - m, 0)

    @property
    def _back(self) -> int:
        return max(2, self.count // 4)

    @property
    def _cost(self) -> int:
        return 1 if self.op.tags.symmetric else 2

    def advance(self, by_probes: int, by_vectors: int, left: int) -> None:
        """Deflate or probe, whichever promises the shorter way."""
        if by_vectors < by_probes and left >= self._cost * self._back:
            self.deflate(self._back)
        else:
            self.probe(min(by_probes, max(self.probe_count, 4), left))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {
            "vectors": self.vectors, "images": self.images, "random": self.random.get_state(),
        }  # fmt: skip
        for i, (probes, images) in enumerate(zip(self._probes, self._images, strict=True)):
            tensors.update({f"probes{i}": probes, f"probe_images{i}": images})
        for i, group in enumerate(self.let_go):
            tensors[f"gram_images{i}"] = torch.from_numpy(group.images)
            tensors[f"gram_probes{i}"] = torch.from_numpy(group.probes)
        if self.next is not None:
            tensors["next"] = self.next
        return tensors, {
            "products": self.products,
            "exhausted": int(self.exhausted),
            "goal": self.goal,
            "pieces": len(self._probes),
            "groups": len(self.let_go),
        }

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        device, pieces = self.op.device, range(int(numbers["pieces"]))
        self.count = len(tensors["vectors"])
        self._vectors[: self.count] = tensors["vectors"].to(device)
        self._vector_images[: self.count] = tensors["images"].to(device)
        self._probes = [tensors[f"probes{i}"].to(device) for i in pieces]
        self._images = [tensors[f"probe_images{i}"].to(device) for i in pieces]
        self.let_go = [
            Grams(tensors[f"gram_images{i}"].numpy(), tensors[f"gram_probes{i}"].numpy())
            for i in range(int(numbers["groups"]))
        ]
        self._latest = {}
        self.next = tensors["next"].to(device) if "next" in tensors else None
        self.random.set_state(tensors["random"])
        self.products, self.goal = int(numbers["products"]), int(numbers["goal"])
        self.exhausted = bool(numbers["exhausted"])


def _variance(centred: list[Array]) -> float:
    """2 ‖M_c‖_F², of one probe's ‖A P u‖²."""
    return 2 * sum(float((g**2).sum()) for g in centred) / max(_count(centred, 2), 1)


def _count(groups: list[Array], together: int) -> int:
    """Ordered pairs or triples of different probes within the groups."""
    return sum(math.perm(len(group), together) for group in groups)
