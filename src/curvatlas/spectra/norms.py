r"""Frobenius and spectral norm, of rectangular operators too.

    ‖A‖_F² = ‖A V‖_F² + E‖A P u‖²,   P = I − VᵀV:

the outliers exactly, the rest by probes (``spectra/deflated.py``). V (j, n) are orthonormal right
vectors grown by Lanczos (by Golub-Kahan when A is not symmetric), their images A V are kept. With
M = P AᵀA P, ‖A P u‖² = uᵀMu has mean tr M and variance 2 (‖M‖² − (tr M)²/d). The images a_i of the
probes give what it needs: with g_ij = a_i·a_j − (tr M/d) u_i·u_j and different i, j, k,

    E g_ij² = ‖M_c‖_F²,   E g_ij g_jk g_ki = tr M_c³,   M_c = M − (tr M/d) P.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.linear_operator import LinearOperator, MatrixOperator, Tags
from curvatlas.precision import has_float64, in_float64
from curvatlas.spectra.checkpoint import State, fingerprint, generator
from curvatlas.spectra.deflated import AT_WORK, DeflatedSampler
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.estimate import (
    Estimate,
    Interval,
    close_enough,
    exact_estimate,
    with_data_error,
)
from curvatlas.spectra.exact import (
    Completion,
    products_allowed,
    reads_at_once,
    reads_the_rest,
    unit_columns,
)
from curvatlas.spectra.krylov import Array
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_rtol,
    not_finite,
    refuse_asymmetric_images,
    require_precision,
    vectors_within,
)

FEWEST_PROBES = 8
FEWEST_VECTORS = 16  # in memory: less leaves no room for one vector of V and two probes
_FIRST_STEPS = 6
_CHI_SQUARED = (9.82e-4, 5.024)  # 2.5 % and 97.5 %, one degree of freedom


class Gram(LinearOperator):
    """AᵀA or A Aᵀ, whichever is smaller, as a symmetric operator: two products of A each."""

    def __init__(self, op: LinearOperator) -> None:
        rows, columns = op.shape
        self._first, self._second = (op, op.T) if columns <= rows else (op.T, op)
        size = min(rows, columns)
        tags = Tags(symmetric=True, psd=True)
        super().__init__((size, size), dtype=op.dtype, device=op.device, tags=tags)

    def content(self) -> Any:
        return ["gram", self._first.content()]

    def _columns(self, columns: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._second @ (self._first @ columns)
        return result


@alike_on_every_rank
def spectral_norm(
    op: LinearOperator,
    *,
    rtol: float = 1e-3,
    seed: int = 0,
    max_products: int | None = None,
    data_error: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Estimate:
    """‖A‖₂, the largest |eigenvalue|, or the largest singular value through ``op.T``.

    An eigenvalue lies in the interval for certain, by its residual; at 97.5 % no further one lies
    above, because the random start would have shown it.
    """
    check_rtol(rtol)
    require_precision(op, "spectral_norm")
    if min(op.shape) == 0:
        raise ValueError("spectral_norm: the operator is empty.")
    symmetric = op.tags.symmetric
    cost = 1 if symmetric else 2
    square = op if symmetric else Gram(op)
    pairs = eigenpairs(
        square,
        k=1,
        which="magnitude" if symmetric else "largest",
        tol=rtol,
        bounded=rtol,
        seed=seed,
        max_products=None if max_products is None else max(max_products // cost, 1),
        data_error=data_error and symmetric,
        checkpoint=checkpoint,
        shard=None if square.shards is None else True,  # no vector is asked for: none is gathered
    )
    # The random start excludes what lies beyond these, where they are known.
    below, above = (end if np.isfinite(end) else 0.0 for end in pairs.spectrum_within)
    low, high = (float(end[0]) for end in pairs.interval)
    if symmetric:
        value, radius = abs(pairs.value), (high - low) / 2
        low, high = max(value - radius, 0.0), max(value + radius, -below, above)
    else:
        squares = pairs.value, low, max(high, above)
        value, low, high = (float(np.sqrt(max(square, 0.0))) for square in squares)
    data_interval: Interval | None = None
    if pairs.data_interval is not None:
        half = float(pairs.data_interval[1][0] - pairs.data_interval[0][0]) / 2
        data_interval = value - half, value + half
    return Estimate(
        quantity="spectral norm",
        value=value,
        interval=(low, high),
        data_interval=data_interval,
        products=cost * pairs.products,
        converged=pairs.converged and close_enough(value, (high - low) / 2, rtol),
        exact=pairs.exact,
        method="Lanczos" if symmetric else "Lanczos on the Gram operator",
    )


@alike_on_every_rank
def frobenius_norm(
    op: LinearOperator,
    *,
    rtol: float = 0.02,
    seed: int = 0,
    max_products: int | None = None,
    memory: int | float | str | None = None,
    data_error: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Estimate:
    """‖A‖_F until the 95 % interval is within ``rtol`` of the value; exact for a matrix at hand.

    max_products: 300 by default, or the columns of an operator up to 512; they are read, and the
    norm is exact, when the estimate would take as many.
    memory: bytes (or "2GB") for the vectors beside the operator's own, a quarter of the machine's
    by default; with less, fewer outliers are captured. Where weights are spread (FSDP2) so are the
    vectors, and memory is that of each process.
    ``data_error``: where the operator knows its batches, measure their scatter too.
    """
    check_rtol(rtol)
    require_precision(op, "frobenius_norm")
    if min(op.shape) == 0:
        raise ValueError("frobenius_norm: the operator is empty.")
    estimate = _closed_form(op)
    if estimate is None:
        room = vectors_within(op, memory, "frobenius_norm", fewest=FEWEST_VECTORS)
        estimate = _estimate(op, rtol, seed, max_products, room, checkpoint)
    value = estimate.value
    if not data_error or value == 0:
        return estimate
    # d‖A‖_F = ⟨A, dA⟩ / ‖A‖_F: linear around A, so every batch has its own number.
    return with_data_error(op, estimate, seed, lambda u: (op @ u) / value, 2)


def _estimate(
    op: LinearOperator,
    rtol: float,
    seed: int,
    max_products: int | None,
    room: int,
    checkpoint: str | os.PathLike[str] | None,
) -> Estimate:
    """room: vectors that fit into memory."""
    # ‖A‖_F = ‖Aᵀ‖_F: sample on the side with fewer columns.
    side = op.T if op.shape[1] > op.shape[0] else op
    n = side.shape[1]
    budget = products_allowed(max_products, n)
    if max_products is None and not side.tags.symmetric:
        budget += n // 8  # a vector of the other side is multiplied for each one deflated
    room = min(room, 6 * budget + 64)  # all there could ever be
    if reads_at_once("frobenius_norm", n, budget):
        return _read_columns(side)
    mark = fingerprint(
        op, estimate="frobenius", rtol=rtol, seed=seed, max_products=max_products, room=room
    )
    sampler = FrobeniusSampler(side, budget, generator(seed), room=room, rtol=rtol)
    sampler.run_from(checkpoint, mark, side.shards)
    return sampler.outcome


def _closed_form(op: LinearOperator) -> Estimate | None:
    eps = torch.finfo(op.dtype).eps
    if isinstance(op, MatrixOperator):
        value = float(torch.linalg.norm(in_float64(op.matrix)))
        method = "the matrix itself"
    else:
        exact = getattr(op, "exact_frobenius_norm", None)
        norm = exact() if callable(exact) else None
        if norm is None:
            return None
        value, method = float(norm), "closed form"
    return exact_estimate("Frobenius norm", value, scale=value, eps=eps, products=0, method=method)


def _grown(norm: float, images: torch.Tensor) -> float:
    """‖·‖_F of what is known and further columns."""
    # Scaled first: squares of entries below 1e-162 or above 1e154 are not numbers any more.
    largest = float(images.abs().max()) if images.numel() else 0.0
    if largest == 0.0:
        return norm
    return float(np.hypot(norm, largest * float(torch.linalg.norm(images / largest))))


def _read_columns(op: LinearOperator) -> Estimate:
    value = 0.0
    for places, block, images in unit_columns(op):
        if places.start == 0 and bool(torch.isfinite(images).all()):
            refuse_asymmetric_images(op, block, images, "frobenius_norm")
        value = _grown(value, in_float64(images))
        if not np.isfinite(value):
            raise not_finite(images)
    return exact_estimate(
        "Frobenius norm",
        value,
        scale=value,
        eps=torch.finfo(op.dtype).eps,
        products=op.shape[1],
        method="column by column",
    )


@dataclass(frozen=True)
class FrobeniusGrams:
    """Inner products of a group of probes on the sphere of the complement, (m, m) each."""

    images: Array  # A P u_i · A P u_j
    lengths: Array  # P u_i · P u_j

    def centred(self, mean: float) -> Array:
        """g_ij off the diagonal, zeros on it; mean: tr M / d."""
        g = self.images - mean * self.lengths
        np.fill_diagonal(g, 0.0)
        return g


class FrobeniusSampler(DeflatedSampler):
    """Right vectors V with their images beside the probes and theirs."""

    name, title = "frobenius_norm", "Frobenius norm"
    vector_axes: ClassVar = {
        "vectors": 1,
        "vector_images": 1,
        "next": 0,
        "probes": 0,
        "images": 0,
    }
    group = FrobeniusGrams
    fewest_probes = FEWEST_PROBES

    def __init__(
        self,
        op: LinearOperator,
        budget: int,
        random: torch.Generator,
        *,
        room: int,
        rtol: float = 0.02,
    ) -> None:
        super().__init__(op, budget, random, room=room, rtol=rtol)
        m, n = op.shape
        # A vector of V and its image are two, and a quarter of the room leaves half to the probes.
        capacity = max(min(budget, n, (room - 12) // 4), 1)
        # Untouched pages are not committed: the whole capacity costs nothing until it is used.
        shape = capacity, self.space.length
        self._vectors = torch.empty(shape, dtype=op.dtype, device=op.device)
        shape = capacity, m if op.shards is None else self.space.length
        self._vector_images = torch.empty(shape, dtype=op.dtype, device=op.device)
        self.count = 0  # vectors of V
        self.next: Tensor | None = None
        self._latest: dict[
            tuple[int, int], FrobeniusGrams
        ] = {}  # with so much of V removed, of so many
        self._cost = 1 if op.tags.symmetric else 2  # products of a vector of V

    @property
    def vectors(self) -> Tensor:
        """V (j, n)."""
        return self._vectors[: self.count]

    @property
    def vector_images(self) -> Tensor:
        """A V (j, m)."""
        return self._vector_images[: self.count]

    @property
    def products(self) -> int:
        return self._cost * self.count + self.probe_count

    @property
    def grown(self) -> int:
        return self.count

    @property
    def vectors_of_basis(self) -> int:
        return 2 * self.count

    @property
    def growing(self) -> bool:
        used = 2 * (self.count + self.held) + AT_WORK
        full = used + 2 > self.room or self.count >= len(self._vectors)
        return not (self.exhausted or self.let_go or full)

    def grow(self) -> None:
        """One product if A is symmetric, two otherwise."""
        space = self.space
        if self.next is None:
            self.next = space.normal(1, self.random).squeeze(1)
        vector = self.next - self.vectors.T @ space.summed(self.vectors @ self.next)
        vector = vector - self.vectors.T @ space.summed(self.vectors @ vector)
        norm, before = float(space.norm(vector)), float(space.norm(self.next))
        if norm <= 1e3 * torch.finfo(vector.dtype).eps * before:
            self.exhausted = True
            return
        vector = vector / norm
        image = space.times(self.op, vector)
        self.next = image if self.op.tags.symmetric else space.times(self.op.T, image)
        self._vectors[self.count] = vector
        self._vector_images[self.count] = image
        self.count += 1

    def advance(self, left: int) -> None:
        missing = FEWEST_PROBES - self.probe_count
        # Where memory is short V comes before the probes: it cannot grow once these were let go.
        tight = self.room < 4 * FEWEST_PROBES + 2 * _FIRST_STEPS + AT_WORK
        first = left >= self._cost and self.count < _FIRST_STEPS and self.growing
        if first and (tight or missing <= 0):
            self.goal = self.count + 1
            return
        if left > 0 and missing > 0:
            self.probe(min(missing, left))
            return
        value, low, high = self.estimate()
        half = (high - low) / 2
        converged = missing <= 0 and close_enough(value, half, self.rtol)
        by_probes, by_vectors = self._paths(half / value if value else 1.0)
        back = self._look_back
        if not converged and reads_the_rest(self.missing, min(by_probes, by_vectors), left):
            self.finish(self._complete())
        elif converged or left <= 0:
            outcome = Estimate(
                quantity="Frobenius norm",
                value=value,
                interval=(low, high),
                products=self.products,
                converged=converged,
                exact=False,
                method="Lanczos deflation and sphere probes",
            )
            self.finish(outcome)
        elif by_vectors < by_probes and left >= self._cost * back:
            self.goal = self.count + back
        else:
            self.probe(min(by_probes, max(self.probe_count, 4), left))

    @property
    def _look_back(self) -> int:
        return max(2, self.count // 4)

    def _paths(self, error: float) -> tuple[int, int]:
        """Products that the way to rtol is expected to take by probes, and by vectors first.

        A quarter more vectors reduce the variance as the last ones did.
        """
        j, m, back = self.count, self.probe_count, self._look_back
        needed, by_probes = self.by_probes(error / self.rtol)
        if not self.growing or j < back or j + m >= self.op.shape[1] - 2:
            return by_probes, by_probes
        now, before = _variance(self._rest(j)[1]), _variance(self._rest(j - back)[1])
        if not 0 < now < before:
            return by_probes, by_probes
        return by_probes, self._cost * back + max(int(np.ceil(needed * now / before)) - m, 0)

    def grams(self) -> FrobeniusGrams:
        return self._grams(self.count)

    def _grams(self, j: int) -> FrobeniusGrams:
        """Inner products of the probes at hand, with the first j vectors of V removed."""
        key = j, self.held
        self._latest = {k: grams for k, grams in self._latest.items() if k[1] == self.held}
        if key not in self._latest:
            vectors = self.vectors[:j]
            inside = self.space.summed(torch.cat([vectors @ piece for piece in self.probes], 1))
            lengths = self._inner_products(self.probes, vectors, inside)
            images = self._inner_products(self.images, self.vector_images[:j], inside)
            scale = np.sqrt((self.op.shape[1] - j) / np.diag(lengths))
            sphere = scale[:, None] * scale
            self._latest[key] = FrobeniusGrams(images * sphere, lengths * sphere)
        return self._latest[key]

    def _inner_products(self, pieces: list[Tensor], rows: Tensor, inside: Tensor) -> Array:
        """(X − rowsᵀ·inside)ᵀ(X − rowsᵀ·inside) (m, m), X the pieces side by side."""
        m = inside.shape[1]
        total = torch.zeros(m, m, dtype=torch.float64, device="cpu")
        for band in self.bands(rows.shape[1]):
            part = torch.cat([piece[band] for piece in pieces], 1)
            part.addmm_(rows[:, band].T, inside, alpha=-1)
            total += (part.T @ part).cpu().double()
        inner: Array = self.space.summed(total).numpy()
        return inner

    def _rest(self, j: int) -> tuple[float, list[Array]]:
        """Mean of ‖A P u‖² and, of every group, the centred g with an empty diagonal."""
        groups = [*self.let_go, self._grams(j)] if self.held else self.let_go
        mean = float(np.concatenate([np.diag(group.images) for group in groups]).mean())
        return mean, [group.centred(mean / (self.op.shape[1] - j)) for group in groups]

    def estimate(self) -> tuple[float, float, float]:
        """‖A‖_F and its 95 % interval."""
        m = self.probe_count
        precise = torch.float64 if has_float64(self.op.device) else None
        lengths = torch.linalg.vector_norm(self.vector_images, dim=1, dtype=precise)
        exact = float(self.space.summed(in_float64(lengths).square().sum()))
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

    def _complete(self) -> Estimate:
        """Σ ‖A b‖² over an orthonormal basis that begins with what was multiplied."""
        before = self.op.products
        # As many columns as products: an operator so small that its vectors are gathered.
        completion = Completion(
            self.op,
            self.space.whole(torch.cat([self.vectors.T, *self.probes], 1)),
            self.space.whole(torch.cat([self.vector_images.T, *self.images], 1)),
        )
        value = 0.0
        for _, images in completion.blocks():
            value = _grown(value, images)
        return exact_estimate(
            "Frobenius norm",
            value,
            scale=value * completion.magnification,
            eps=torch.finfo(self.op.dtype).eps,
            products=self.products + self.op.products - before,
            method="every column",
        )

    def forget_probes(self) -> None:
        super().forget_probes()
        self._latest = {}

    def state(self) -> State:
        tensors, numbers = super().state()
        tensors.update(vectors=self.vectors, vector_images=self.vector_images)
        if self.next is not None:
            tensors["next"] = self.next
        return tensors, numbers

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        super().restore(tensors, numbers)
        self.count = len(tensors["vectors"])
        self._vectors[: self.count] = tensors["vectors"].to(self.op.device)
        self._vector_images[: self.count] = tensors["vector_images"].to(self.op.device)
        self.next = tensors["next"].to(self.op.device) if "next" in tensors else None


def _variance(centred: list[Array]) -> float:
    """2 ‖M_c‖_F², of one probe's ‖A P u‖²."""
    return 2 * sum(float((g**2).sum()) for g in centred) / max(_count(centred, 2), 1)


def _count(groups: list[Array], together: int) -> int:
    """Ordered pairs or triples of different probes within the groups."""
    return sum(math.perm(len(group), together) for group in groups)
