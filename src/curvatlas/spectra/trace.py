r"""Trace with an interval, adaptive until it is good enough.

With V a Krylov basis of the outliers, P = I − VVᵀ and B = P A P on the complement of dimension d,

    tr A = tr(VᵀAV) + E[uᵀ B u],     Var[uᵀ B u] ≤ 2 ‖B_c‖_F²,   B_c = B − (tr B / d) P,

for probes u on the sphere of radius √d in the complement (``spectra/deflated.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.linear_operator import LinearOperator, MatrixOperator
from curvatlas.precision import float64_device, in_float64, sum_in_float64
from curvatlas.spectra.checkpoint import State, fingerprint, generator
from curvatlas.spectra.deflated import AT_WORK, DeflatedSampler
from curvatlas.spectra.diagonal import (
    FACTORS,
    closed_form_diagonal,
    count_products,
    outer_part,
    read_diagonal,
)
from curvatlas.spectra.estimate import (
    Estimate,
    close_enough,
    exact_estimate,
    tolerance,
    with_data_error,
)
from curvatlas.spectra.exact import Completion, products_allowed, reads_at_once, reads_the_rest
from curvatlas.spectra.krylov import Array, KrylovBasis
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_budget,
    check_rtol,
    require_square,
    vectors_within,
)

FEWEST_PROBES = 6
FEWEST_VECTORS = 12  # in memory: less leaves no room for a basis and two probes
_FIRST_STEPS = 8
_DEAREST = 32  # products that an exact tr H_o may cost where the trace is asked to 1 %


@alike_on_every_rank
def trace(
    op: LinearOperator,
    *,
    rtol: float = 0.01,
    seed: int = 0,
    max_products: int | None = None,
    memory: int | float | str | None = None,
    data_error: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Estimate:
    """tr A until the 95 % interval is within ``rtol`` of the value, or the products are spent.

    A trace that cancels to less than a tenth of Σ|λ| is asked to ``rtol`` of that tenth: no effort
    reaches a share of zero.
    A dense matrix or an operator with ``exact_trace()`` answers exactly. So does H_o where a sample
    has few outputs, through the factors of the samples; of H only H_f is then estimated (the cost
    is reported in products, ``method`` says it). Otherwise outliers are captured by Lanczos and the
    rest is sampled; when that would take as many products as the operator has columns, they are
    read and the trace is exact. ``data_error``: where the operator knows its batches, measure their
    scatter too (six more products).
    max_products: 300 by default, or the columns of an operator up to 512;  memory: bytes (or "2GB")
    for the vectors beside the operator's own, a quarter of the machine's by default; with less,
    fewer outliers are captured. Where weights are spread (FSDP2) so are the vectors, and memory is
    that of each process; the factors of samples are whole, where they fit the operator's budget.
    """
    require_square(op, "trace")
    check_rtol(rtol)
    if max_products is not None:
        check_budget(max_products)
    estimate = _closed_form(op)
    if estimate is None:
        room = vectors_within(op, memory, "trace", fewest=FEWEST_VECTORS)
        estimate = _through_factors(op, rtol, seed, max_products, room, checkpoint)
        estimate = estimate or _estimate(op, rtol, seed, max_products, room, checkpoint)
    return with_data_error(op, estimate, seed, lambda u: u, 1) if data_error else estimate


def _through_factors(
    op: LinearOperator,
    rtol: float,
    seed: int,
    max_products: int | None,
    room: int,
    checkpoint: str | os.PathLike[str] | None,
) -> Estimate | None:
    """tr H_o exactly, and tr H_f estimated if it belongs to the operator."""
    # What sampling would take at least, and at rtol = 1 % (benchmarks/spectra.py: 36 to 79).
    most = int(np.clip(_DEAREST * 0.01 / rtol, FEWEST_PROBES + _FIRST_STEPS, _DEAREST))
    if max_products is not None:
        most = min(most, max_products - 1)
    outer = outer_part(op, min(most, op.shape[0]))
    if outer is None:
        return None
    value, eps = float(outer.diagonal.sum()), torch.finfo(op.dtype).eps
    if outer.rest is None:
        return exact_estimate(
            "trace", value, scale=value, eps=eps, products=outer.products, method=FACTORS
        )
    left = None if max_products is None else max_products - outer.products
    rest = _estimate(outer.rest, rtol, seed, left, room, checkpoint, offset=value)
    count_products(op, rest.products)
    rounding = 64 * eps * value
    return replace(
        rest,
        interval=(rest.interval[0] - rounding, rest.interval[1] + rounding),
        products=rest.products + outer.products,
        method=f"H_o by {FACTORS}, H_f by {rest.method}",
    )


def _estimate(
    op: LinearOperator,
    rtol: float,
    seed: int,
    max_products: int | None,
    room: int,
    checkpoint: str | os.PathLike[str] | None,
    *,
    offset: float = 0.0,
) -> Estimate:
    """offset + tr A: the tolerance is relative to the sum. room: vectors that fit into memory."""
    n = op.shape[0]
    budget = products_allowed(max_products, n)
    room = min(room, 5 * budget + 64)  # all there could ever be
    if reads_at_once("trace", n, budget):
        diagonal = read_diagonal(op, "trace")
        return exact_estimate(
            "trace",
            offset + float(diagonal.sum()),
            scale=float(diagonal.abs().sum()),
            eps=torch.finfo(op.dtype).eps,
            products=n,
            method="diagonal, column by column",
        )
    mark = fingerprint(
        op,
        estimate="deflated trace",
        rtol=rtol,
        seed=seed,
        max_products=max_products,
        room=room,
        beside=offset != 0.0,
    )
    sampler = TraceSampler(op, budget, generator(seed), room=room, rtol=rtol, offset=offset)
    sampler.run_from(checkpoint, mark, op.shards)
    return sampler.outcome


def _closed_form(op: LinearOperator) -> Estimate | None:
    method = "diagonal of the matrix" if isinstance(op, MatrixOperator) else "closed form"
    exact = getattr(op, "exact_trace", None)
    if (entries := closed_form_diagonal(op)) is not None:
        entries = in_float64(entries)
        value, scale = float(entries.sum()), float(entries.abs().sum())  # entries may cancel
    elif callable(exact) and (trace := exact()) is not None:
        value, scale = float(trace), abs(float(trace))
    else:
        return None
    eps = torch.finfo(op.dtype).eps
    return exact_estimate("trace", value, scale=scale, eps=eps, products=0, method=method)


@dataclass(frozen=True)
class Rest:
    """What the probes say of B = P A P."""

    values: Array  # (m,) uᵀ B u
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
class TraceGrams:
    """What a group of probes says of B_c = B − c P in inner products, the vectors let go."""

    values: Array  # (m,) uᵀ B u
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


@dataclass(frozen=True)
class Plan:
    """What to do next, and how many products the whole way is expected to take."""

    deflate: bool
    count: int
    products: int


class TraceSampler(DeflatedSampler):
    """tr A = tr(VᵀAV) + E[uᵀ B u] with a Krylov basis V; ``offset`` is added to it.

    The variance of uᵀBu is not taken from its few values but from ‖B_c u‖², which the same products
    give and which scatters far less: Var[uᵀ B u] ≤ 2 ‖B_c‖_F².
    """

    name = title = "trace"
    group = TraceGrams
    fewest_probes = FEWEST_PROBES

    def __init__(
        self,
        op: LinearOperator,
        budget: int,
        random: torch.Generator,
        *,
        room: int,
        rtol: float = 0.01,
        offset: float = 0.0,
    ) -> None:
        self.size, self.offset = op.shape[0], offset
        capacity = min(budget, self.size, room // 2) + 2
        self.basis = KrylovBasis(op, capacity, shards=op.shards)
        self._coordinates_of: list[tuple[Tensor, Tensor]] = []  # V u and V A u (r, ·) of each piece
        self._lengths: Tensor
        self._forms: Tensor
        self._latest: tuple[tuple[int, int], TraceGrams] | None = (
            None  # of so much of V and so many
        )
        super().__init__(op, budget, random, room=room, rtol=rtol)
        self.forget_probes()

    @property
    def products(self) -> int:
        return self.basis.products + self.probe_count

    @property
    def rewrites(self) -> int:
        return self.basis.rewrites

    @property
    def grown(self) -> int:
        return self.basis.multiplied

    @property
    def vectors_of_basis(self) -> int:
        return self.basis.count

    @property
    def growing(self) -> bool:
        used = self.basis.count + 2 * self.held + AT_WORK
        full = used >= self.room or self.basis.count >= self.basis.capacity - 1
        return not (self.exhausted or self.let_go or full)

    def grow(self) -> None:
        if self.basis.count == 0:
            self.basis.add_random(self.random)
        if self.basis.pending:
            used = self.basis.count + 2 * self.held + AT_WORK
            room = min(self.room - used, self.basis.capacity - 1 - self.basis.count)
            self.basis.advance(min(self.goal - self.grown, room, self.budget - self.products))
        else:
            self.exhausted = True

    def advance(self, left: int) -> None:
        if self.probe_count < FEWEST_PROBES or (self.grown == 0 and self.growing):
            if left > 0:
                self._begin(left)
            else:
                self.finish(self.reached()[0])
            return
        reached, norm = self.reached()
        if reached.converged:
            self.finish(reached)
            return
        plan = self._plan(tolerance(reached.value, self.rtol, norm), reached.error)
        if reads_the_rest(self.missing, plan.products, left):
            self.finish(self._complete())
        elif left <= 0:
            self.finish(reached)
        elif plan.deflate:
            self.goal = self.grown + min(plan.count, left)
        else:
            self.probe(min(plan.count, left))

    def _begin(self, left: int) -> None:
        """The first probes and Lanczos steps."""
        missing = FEWEST_PROBES - self.probe_count
        # Where memory is short, the basis comes before the probes: it cannot grow once these were
        # let go, and they need to see what it leaves.
        tight = self.room < 4 * FEWEST_PROBES + 2 * _FIRST_STEPS
        if tight and self.grown == 0 and self.growing:
            self.goal = min(max(self.room // 4, 1), left)
        elif missing > 0:
            self.probe(min(missing, left))
        else:
            self.goal = min(_FIRST_STEPS, left)

    def _plan(self, target: float, error: float) -> Plan:
        """Deflation while it shortens the road to ± target, probes otherwise."""
        m, j = self.probe_count, self.grown
        # error ∝ ‖B_c‖ / √m
        needed, by_probes = self.by_probes(error / target if target > 0 else np.inf)
        probes = Plan(False, min(by_probes, max(m, 4)), by_probes)
        look_back = max(2, j // 4)
        if not self.growing or j < look_back or j + m >= self.size - 2:
            return probes
        now, before = self.rest().centred, self.centred_with(j - look_back)
        if not 0 < now < before:
            return probes
        shrink = (now / before) ** (1.0 / look_back)  # of ‖B_c‖² by one step
        best = probes
        for count in (2, 4, 8, 16, 32):
            # Deflation gets harder as it goes: extrapolate the last steps' success only over as
            # many.
            faded = needed * shrink ** min(count, look_back)
            total = count + max(int(np.ceil(max(faded, FEWEST_PROBES))) - m, 0)
            if total < best.products:
                best = Plan(True, count, total)
        return best

    def reached(self) -> tuple[Estimate, float]:
        """The estimate, and Σ|λ| as far as it is known."""
        captured = np.diag(self.captured)
        rest = self.rest()
        value = self.offset + float(captured.sum() + rest.values.mean())
        eps = torch.finfo(self.op.dtype).eps
        rounding = float(16 * eps * (np.abs(captured).sum() + np.abs(rest.values).mean()))
        below, above = rest.bounds()
        low, high = value - below - rounding, value + above + rounding
        ritz = np.linalg.eigvalsh(self.captured) if len(captured) else captured
        norm = abs(self.offset) + float(np.abs(ritz).sum())
        norm += max(rest.magnitude(), abs(float(rest.values.mean())))
        near = close_enough(value, (high - low) / 2, self.rtol, norm)
        estimate = Estimate(
            quantity="trace",
            value=value,
            interval=(low, high),
            products=self.products,
            converged=self.probe_count >= FEWEST_PROBES and near,
            exact=False,
            method="Lanczos deflation and sphere probes",
        )
        return estimate, norm

    def _complete(self) -> Estimate:
        """Σ bᵀ A b over an orthonormal basis that begins with what was multiplied."""
        before = self.op.products
        rows, images = (part.to(self.op.device) for part in self.basis.multiplied_columns())
        # As many columns as products: an operator so small that its vectors are gathered.
        completion = Completion(
            self.op,
            self.space.whole(torch.cat([rows, *self.probes], 1)),
            self.space.whole(torch.cat([images, *self.images], 1)),
        )
        total = size = 0.0
        for basis, image in completion.blocks():
            forms = (basis * image).sum(0)
            total += float(forms.sum())
            size += float(forms.abs().sum())
        return exact_estimate(
            "trace",
            self.offset + total,
            scale=size * completion.magnification,
            eps=torch.finfo(self.op.dtype).eps,
            products=self.products + self.op.products - before,
            method="every column",
        )

    @property
    def captured(self) -> Array:
        """VᵀAV, symmetrised (j, j)."""
        j = self.basis.multiplied
        action = self.basis.coefficients[:j, :j]
        return (action + action.T) / 2

    def rest(self) -> Rest:
        """Quadratic forms of B on the probes, scaled to the sphere of the complement."""
        groups = [*self.let_go, self.grams()] if self.held else self.let_go
        values = np.concatenate([group.values for group in groups])
        centre = float(values.mean()) / (self.size - self.basis.multiplied)
        pairs = [group.centred_at(centre) for group in groups]
        mean = sum(float(np.trace(gram)) for _, gram in pairs) / len(values)
        third = _off_mean([cross * gram for cross, gram in pairs])
        return Rest(values, mean, third, _off_mean([gram * gram for _, gram in pairs]))

    def centred_with(self, deflated: int) -> float:
        """Mean ‖B_c u‖² of the probes at hand, with only the first so many vectors of V."""
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for _, centred in self._centred(deflated)[1]:
            total += sum_in_float64(centred * centred).cpu()
        return float(self.space.summed(total)) / self.held

    def grams(self) -> TraceGrams:
        """Inner products of the probes at hand, with V as it is."""
        key = self.grown, self.held
        if self._latest is not None and self._latest[0] == key:
            return self._latest[1]
        j, m = self.basis.multiplied, self.held
        centre, bands = self._centred(j)
        sums = torch.zeros(3, m, m, dtype=torch.float64, device="cpu")
        for u, centred in bands:
            products = [u.T @ u, u.T @ centred, centred.T @ centred]
            sums += torch.stack(products).cpu().double()
        lengths, cross, gram = self.space.summed(sums).numpy()
        d = self.size - j
        values = np.diag(cross) + centre * d
        self._latest = key, TraceGrams(values, centre, lengths, cross, gram)
        return self._latest[1]

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
            for band in self.bands(self.space.length):
                rows = basis.rows[:r, band].T
                u = torch.cat([chunk[band] for chunk in self.probes], 1)
                image = torch.cat([chunk[band] for chunk in self.images], 1)
                u.addmm_(rows[:, :j], inside[:j], alpha=-1).mul_(root)
                image.addmm_(rows, removed, alpha=-1).mul_(root)
                yield u, image.sub_(u, alpha=centre)

        return centre, bands()

    def _coordinates(self) -> tuple[Tensor, Tensor]:
        """V u and V A u (r, m) of the probes at hand, and ‖u‖² and uᵀAu (m,) beside them."""
        rows, made = self.basis.rows[: self.basis.count], self._coordinates_of
        for chunk, (probes, images) in enumerate(zip(self.probes, self.images, strict=True)):
            if chunk == len(made):
                self._note_lengths(probes, images)
                made.append(self._inside(rows, probes, images))
            elif len(made[chunk][0]) < len(rows):
                new = self._inside(rows[len(made[chunk][0]) :], probes, images)
                inside, raw = (torch.cat(pair) for pair in zip(made[chunk], new, strict=True))
                made[chunk] = inside, raw
        return torch.cat([i for i, _ in made], 1), torch.cat([w for _, w in made], 1)

    def _inside(self, rows: Tensor, probes: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        inside, raw = self.space.together(rows @ probes, rows @ images)
        return inside, raw

    def _note_lengths(self, probes: Tensor, images: Tensor) -> None:
        dots = self.space.together(_dots(probes, probes), _dots(probes, images))
        self._lengths = torch.cat([self._lengths, dots[0]])
        self._forms = torch.cat([self._forms, dots[1]])

    def forget_probes(self) -> None:
        super().forget_probes()
        empty = torch.zeros(0, dtype=torch.float64, device=float64_device(self.op.device))
        self._coordinates_of, self._lengths, self._forms, self._latest = [], empty, empty, None

    def state(self) -> State:
        tensors, numbers = super().state()
        rows, counts = self.basis.state()
        # Made row by row as V grew: made anew at once they would differ in the last bits.
        for i, (inside, raw) in enumerate(self._coordinates_of):
            tensors.update({f"inside{i}": inside, f"raw{i}": raw})
        return {**rows, **tensors}, {**counts, **numbers, "placed": len(self._coordinates_of)}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        super().restore(tensors, numbers)
        self.basis.restore(tensors, numbers)
        for i in range(int(numbers["placed"])):
            pair = tensors[f"inside{i}"].to(self.op.device), tensors[f"raw{i}"].to(self.op.device)
            self._coordinates_of.append(pair)
            self._note_lengths(self.probes[i], self.images[i])


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
