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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.operators.base import LinearOperator
from curvatlas.precision import float64_device, in_float64, sum_in_float64
from curvatlas.spectra.checkpoint import undone
from curvatlas.spectra.krylov import Array, KrylovBasis
from curvatlas.spectra.requirements import refuse_asymmetric_images

FEWEST_PROBES = 6
FEWEST_VECTORS = 12  # in memory: less leaves no room for a basis and two probes
_AT_WORK = 3  # vectors that one step makes and lets go
_BAND = 2**23  # entries of the probes that are worked on together
_GRAMS = ("values", "squares", "lengths", "cross", "gram")


@dataclass(frozen=True)
class Rest:
    """What the probes say of B = P A P."""

    values: Array  # (m,) uᵀ B u
    squares: Array  # (m,) ‖B u‖²
    centred: float  # mean ‖B_c u‖², estimates ‖B_c‖_F²
    third: float  # mean (u_i·B_c u_j) (B_c u_i·B_c u_j), i ≠ j: estimates tr B_c³
    fourth: float  # mean (B_c u_i·B_c u_j)², i ≠ j: estimates tr B_c⁴

    def magnitude(self) -> float:
        """A lower bound of Σ|λ| of B, by its second and fourth moments: (Σλ²)³ ≤ (Σ|λ|)² Σλ⁴."""
        if self.fourth <= 0.0 or self.centred <= 0.0:
            return 0.0
        return float(self.centred**1.5 / self.fourth**0.5)

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


@dataclass(frozen=True)
class Grams:
    """What a group of probes says of B_c = B − c P in inner products, the vectors let go."""

    values: Array  # (m,) uᵀ B u
    squares: Array  # (m,) ‖B u‖²
    centre: float  # c
    lengths: Array  # (m, m) u_i·u_j
    cross: Array  # (m, m) u_i·B_c u_j
    gram: Array  # (m, m) B_c u_i·B_c u_j

    def centred_at(self, centre: float) -> tuple[Array, Array]:
        """``cross`` and ``gram`` of another centre c + δ: B_c − δ P."""
        by = centre - self.centre
        if by == 0.0:
            return self.cross, self.gram
        gram = self.gram - by * (self.cross + self.cross.T) + by * by * self.lengths
        return self.cross - by * self.lengths, gram


class DeflatedSampler:
    """The basis V, the probes u and their images, and the next step.

    room: vectors of the operator's size that may be held at once. When they are used up V stays as
    it is, the probes go and leave their inner products, and further probes come in groups.
    """

    def __init__(
        self, op: LinearOperator, max_products: int, random: torch.Generator, *, room: int
    ) -> None:
        self.op, self.random, self.room = op, random, room
        self.size = op.shape[0]
        self.basis = KrylovBasis(op, min(max_products, self.size, room // 2) + 2)
        self.let_go: list[Grams] = []
        # Probes and images (n, ·) in the pieces they came in: joining them would hold them twice.
        self._probes: list[Tensor] = []
        self._images: list[Tensor] = []
        self._known: list[tuple[Tensor, Tensor]] = []  # V u and V A u (r, ·) of each piece
        self._lengths: Tensor
        self._forms: Tensor
        self._latest: Grams | None
        self._forget_probes()
        self.goal = 0  # products that V is meant to have had
        self.exhausted = False  # the Krylov space is invariant: deflation has given all it can
        self.between_steps: Callable[[], None] = lambda: None  # called where the state may be kept

    @property
    def products(self) -> int:
        return self.basis.products + self.probe_count

    @property
    def probe_count(self) -> int:
        return self._held + sum(len(group.values) for group in self.let_go)

    @property
    def _held(self) -> int:
        return sum(chunk.shape[1] for chunk in self._probes)

    @property
    def growing(self) -> bool:
        """Whether V can still grow: nothing was let go, and there is room."""
        used = self.basis.count + 2 * self._held + _AT_WORK
        full = used >= self.room or self.basis.count >= self.basis.capacity - 1
        return not (self.exhausted or self.let_go or full)

    def deflate(self, steps: int) -> None:
        """Grow V by Lanczos steps."""
        self.goal = self.basis.products + steps
        self.finish()

    def finish(self) -> None:
        """Take the steps that are due: after an interruption some of them are missing."""
        basis = self.basis
        while basis.products < self.goal and self.growing:
            if basis.count == 0:
                basis.add_random(self.random)
            if basis.pending:
                basis.expand()
                self._latest = None
            else:
                self.exhausted = True
            self.between_steps()

    def probe(self, count: int) -> int:
        """Draw and multiply up to ``count`` more probes in one call of the operator; how many."""
        # A probe in the making: as it is drawn in float64, in the operator's precision, its image.
        each = 3 + (self.op.dtype != torch.float64)
        left = self.room - self.basis.count - _AT_WORK
        if each * count > left - 2 * self._held and self._held > 1:
            self.let_go.append(self._grams_now())
            self._forget_probes()
            self.between_steps()  # or the state kept last would still hold them
        count = max(min(count, (left - 2 * self._held) // each), 1)
        with undone(self.random):
            fresh = torch.randn(
                self.size, count, generator=self.random, dtype=torch.float64, device="cpu"
            )
            fresh = fresh.to(device=self.op.device, dtype=self.op.dtype)
            images = self.op @ fresh
        if not bool(torch.isfinite(images).all()):
            raise FloatingPointError(
                "a product with the operator gave NaN or infinity: check the loss and the "
                "parameters for NaN, or compute in float64."
            )
        if self.probe_count == 0:
            refuse_asymmetric_images(self.op, fresh, images, "trace")
        self._probes.append(fresh)
        self._images.append(images)
        self._latest = None
        return count

    @property
    def missing(self) -> int:
        """Directions whose image is not at hand."""
        return self.size - self.basis.multiplied - self._held

    def known(self) -> tuple[Tensor, Tensor]:
        """All that was multiplied and is at hand, and its images, (n, k) each."""
        rows, images = (part.to(self.op.device) for part in self.basis.known())
        return torch.cat([rows, *self._probes], 1), torch.cat([images, *self._images], 1)

    @property
    def captured(self) -> Array:
        """VᵀAV, symmetrised (j, j)."""
        j = self.basis.multiplied
        action = self.basis.coefficients[:j, :j]
        return (action + action.T) / 2

    def rest(self) -> Rest:
        """Quadratic forms of B on the probes, scaled to the sphere of the complement."""
        groups = [*self.let_go, self._grams_now()] if self._held else self.let_go
        values = np.concatenate([group.values for group in groups])
        squares = np.concatenate([group.squares for group in groups])
        centre = float(values.mean()) / (self.size - self.basis.multiplied)
        pairs = [group.centred_at(centre) for group in groups]
        mean = sum(float(np.trace(gram)) for _, gram in pairs) / len(values)
        third = _off_mean([cross * gram for cross, gram in pairs])
        return Rest(values, squares, mean, third, _off_mean([gram * gram for _, gram in pairs]))

    def centred_with(self, deflated: int) -> float:
        """Mean ‖B_c u‖² of the probes at hand, with only the first so many vectors of V."""
        total = 0.0
        for _, centred in self._centred(deflated)[1]:
            total += float(sum_in_float64(centred * centred))
        return total / self._held

    def _grams_now(self) -> Grams:
        """Inner products of the probes at hand, with V as it is."""
        if self._latest is not None:
            return self._latest
        j, m = self.basis.multiplied, self._held
        centre, bands = self._centred(j)
        sums = torch.zeros(3, m, m, dtype=torch.float64, device="cpu")
        for u, centred in bands:
            products = [u.T @ u, u.T @ centred, centred.T @ centred]
            sums += torch.stack(products).cpu().double()
        lengths, cross, gram = sums.numpy()
        d = self.size - j
        values = np.diag(cross) + centre * d
        squares = np.diag(gram) + 2 * centre * np.diag(cross) + centre**2 * d
        self._latest = Grams(values, squares, centre, lengths, cross, gram)
        return self._latest

    def _centred(self, j: int) -> tuple[float, Iterator[tuple[Tensor, Tensor]]]:
        """A centre c, and bands of entries of the probes √d P u/‖P u‖ and of their B_c.

        A band at a time, the projected vectors never exist beside the drawn ones. Their
        coordinates in V are kept: a step of V adds a row to them.
        """
        basis, r = self.basis, self.basis.count
        inside, raw = self._coordinates()
        action = inside.new_tensor(basis.coefficients[:r, :j])
        # A P u = A u − A V (Vᵀu), and of that the part in V goes too.
        removed = action @ inside[:j]
        removed[:j] = raw[:j]
        d = self.size - j
        lengths = (self._lengths - in_float64(inside[:j]).square().sum(0)).cpu().numpy()
        root = inside.new_tensor(np.sqrt(d / lengths))
        forms = self._forms - (in_float64(inside) * in_float64(removed)).sum(0)
        # Good to the rounding of A u, not of B u: enough for a centre.
        centre = float((forms.cpu().numpy() / lengths).mean())

        def bands() -> Iterator[tuple[Tensor, Tensor]]:
            # A thirty-second of what may be held: two bands beside it are no matter.
            step = min(_BAND, self.room * self.size // 32) // self._held + 1
            for band in (slice(start, start + step) for start in range(0, self.size, step)):
                rows = basis.rows[:r, band].T
                u = torch.cat([chunk[band] for chunk in self._probes], 1)
                image = torch.cat([chunk[band] for chunk in self._images], 1)
                u.addmm_(rows[:, :j], inside[:j], alpha=-1).mul_(root)
                image.addmm_(rows, removed, alpha=-1).mul_(root)
                yield u, image.sub_(u, alpha=centre)

        return centre, bands()

    def _coordinates(self) -> tuple[Tensor, Tensor]:
        """V u and V A u (r, m) of the probes at hand, and ‖u‖² and uᵀAu (m,) beside them."""
        rows, known = self.basis.rows[: self.basis.count], self._known
        for chunk, (probes, images) in enumerate(zip(self._probes, self._images, strict=True)):
            if chunk == len(known):
                self._note_lengths(probes, images)
                known.append((rows @ probes, rows @ images))
            elif len(known[chunk][0]) < len(rows):
                new = rows[len(known[chunk][0]) :]
                inside, raw = known[chunk]
                known[chunk] = torch.cat([inside, new @ probes]), torch.cat([raw, new @ images])
        return torch.cat([i for i, _ in known], 1), torch.cat([w for _, w in known], 1)

    def _note_lengths(self, probes: Tensor, images: Tensor) -> None:
        self._lengths = torch.cat([self._lengths, _dots(probes, probes)])
        self._forms = torch.cat([self._forms, _dots(probes, images)])

    def _forget_probes(self) -> None:
        empty = torch.zeros(0, dtype=torch.float64, device=float64_device(self.op.device))
        self._probes, self._images, self._known = [], [], []
        self._lengths, self._forms, self._latest = empty, empty, None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, numbers = self.basis.state()
        tensors["random"] = self.random.get_state()
        for i, (probes, images) in enumerate(zip(self._probes, self._images, strict=True)):
            tensors.update({f"probes{i}": probes, f"images{i}": images})
        # Made row by row as V grew: made anew at once they would differ in the last bits.
        for i, (inside, raw) in enumerate(self._known):
            tensors.update({f"inside{i}": inside, f"raw{i}": raw})
        for i, group in enumerate(self.let_go):
            for name in _GRAMS:
                tensors[f"{name}{i}"] = torch.from_numpy(np.ascontiguousarray(getattr(group, name)))
        return tensors, {
            **numbers,
            "exhausted": int(self.exhausted),
            "goal": self.goal,
            "chunks": len(self._probes),
            "chunks_known": len(self._known),
            "centres": [group.centre for group in self.let_go],
        }

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.basis.restore(tensors, numbers)
        chunks = range(int(numbers["chunks"]))
        self._forget_probes()
        self._probes = [tensors[f"probes{i}"].to(self.op.device) for i in chunks]
        self._images = [tensors[f"images{i}"].to(self.op.device) for i in chunks]
        for i in range(int(numbers["chunks_known"])):
            pair = tensors[f"inside{i}"].to(self.op.device), tensors[f"raw{i}"].to(self.op.device)
            self._known.append(pair)
            self._note_lengths(self._probes[i], self._images[i])
        self.let_go = [
            Grams(centre=float(centre), **{name: tensors[f"{name}{i}"].numpy() for name in _GRAMS})
            for i, centre in enumerate(numbers["centres"])
        ]
        self.random.set_state(tensors["random"])
        self.exhausted, self.goal = bool(numbers["exhausted"]), int(numbers["goal"])


def _dots(left: Tensor, right: Tensor) -> Tensor:
    """Σ_i left_ij right_ij (m,) in float64."""
    dots: Tensor = torch.linalg.vecdot(left, right, dim=0)
    return in_float64(dots)


def _off_mean(matrices: list[Array]) -> float:
    """Mean of the entries off the diagonals (of all entries where there are no pairs)."""
    pairs = sum(len(matrix) * (len(matrix) - 1) for matrix in matrices)
    if not pairs:
        return float(np.mean([matrix.mean() for matrix in matrices]))
    return float(sum(matrix.sum() - np.trace(matrix) for matrix in matrices)) / pairs


@dataclass(frozen=True)
class Step:
    """What to do next, and how many products the whole way is expected to take."""

    deflate: bool
    count: int
    products: int


def plan(sampler: DeflatedSampler, target: float, error: float) -> Step:
    """The next products: deflation while it shortens the road to ± target, probes otherwise."""
    m, j = sampler.probe_count, sampler.basis.multiplied
    # error ∝ ‖B_c‖ / √m: how many probes the target needs if nothing more is deflated
    ratio = (error / target) ** 2 if target > 0 else np.inf
    needed = min(max(m * ratio * 1.02, FEWEST_PROBES), 1e9)
    by_probes = max(int(np.ceil(needed)) - m, 1)
    probes = Step(False, min(by_probes, max(m, 4)), by_probes)
    look_back = max(2, j // 4)
    if not sampler.growing or j < look_back or j + m >= sampler.size - 2:
        return probes
    now, before = sampler.rest().centred, sampler.centred_with(j - look_back)
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
