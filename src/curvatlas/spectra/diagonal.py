r"""The diagonal, entry by entry with intervals.

    diag A = diag(A V Vᵀ) + diag(A P) ,   P = I − VVᵀ.

The first part is exact: a Lanczos basis V and its known image A V. The second is sampled with
Rademacher probes z (Bekas, Kokiopoulou, Saad 2007): z ⊙ (A P z) has mean diag(A P) and, entry i,
variance Σ_{k≠i} (A P)_ik². The error of every entry is read from the scatter of its samples.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from curvatlas.linear_operator import LinearOperator, MatrixOperator
from curvatlas.operators.curvature import CurvatureOperator, FunctionalHessian
from curvatlas.operators.per_sample import SampleFactors
from curvatlas.operators.views import BlockView
from curvatlas.precision import float64_device, in_float64
from curvatlas.results import Result
from curvatlas.spectra.checkpoint import Resumable, State, fingerprint, generator
from curvatlas.spectra.exact import (
    Completion,
    products_allowed,
    reads_at_once,
    reads_the_rest,
    unit_columns,
)
from curvatlas.spectra.krylov import KrylovBasis
from curvatlas.spectra.requirements import (
    alike_on_every_rank,
    check_rtol,
    refuse_asymmetric_images,
    require_finite,
    require_square,
)
from curvatlas.spectra.vectors import VectorSpace

_BATCH = 8  # probes multiplied at once
_FEWEST = 8
# Products that an exact diag H_o may cost: what its estimate takes for the outliers alone.
_DEAREST = 60
FACTORS = "factors of the samples"


@dataclass(frozen=True, kw_only=True)
class DiagonalEstimate(Result):
    """diag A with an interval for every entry."""

    values: Tensor  # (n,), with ``shard`` this process's entries
    interval: tuple[Tensor, Tensor]  # 95 % for each entry
    relative_error: float  # expected ‖error‖ / ‖diag A‖
    products: int
    converged: bool
    exact: bool
    method: str

    @property
    def value(self) -> Tensor:
        """The same as ``values``."""
        return self.values

    def __str__(self) -> str:
        kind = "exact" if self.exact else f"relative error {self.relative_error:.2g}"
        text = (
            f"diagonal of {len(self.values)} entries in [{float(self.values.min()):.4g}, "
            f"{float(self.values.max()):.4g}] ({kind}, {self.products} products)"
        )
        return text if self.converged else text + ", NOT converged"


def moved(estimate: DiagonalEstimate, space: VectorSpace, into: VectorSpace) -> DiagonalEstimate:
    """The estimate with the entries of another space: gathered, or this process's own taken."""
    if space.shards is into.shards:
        return estimate
    low, high = (into.take(space.whole(bound)).clone() for bound in estimate.interval)
    values = into.take(space.whole(estimate.values)).clone()
    return replace(estimate, values=values, interval=(low, high))


@alike_on_every_rank
def diagonal(
    op: LinearOperator,
    *,
    rtol: float = 0.1,
    seed: int = 0,
    max_products: int | None = None,
    shard: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> DiagonalEstimate:
    """diag A until ‖error‖ ≤ rtol ‖diag A‖; read exactly when that takes no more products.

    diag H_o comes exactly from the factors of the samples where that is cheap (few outputs to a
    sample). max_products: 300 by default, or the columns of an operator up to 512.
    shard: every process of the group gets its own entries, n/world of them (``op.shards``, else
    ``parallel.Shards``, says which). None: no, but where weights are spread (FSDP2) so are basis,
    probes and samples, and only the result is whole. What is read exactly, of operators that are
    small or by factors of samples that fit the budget, is computed whole in every process.
    """
    space = VectorSpace.of(op, shard=shard)
    estimate, computed_in = _diagonal(op, space, rtol, seed, max_products, checkpoint)
    wanted = space if shard else VectorSpace.of(op, shard=False)
    return moved(estimate, computed_in, wanted)


def _diagonal(
    op: LinearOperator,
    space: VectorSpace,
    rtol: float,
    seed: int,
    max_products: int | None,
    checkpoint: str | os.PathLike[str] | None,
) -> tuple[DiagonalEstimate, VectorSpace]:
    """The diagonal, and the space that it was computed in: whole where it is exact."""
    n = require_square(op, "diagonal")
    whole = VectorSpace.of(op, shard=False)
    check_rtol(rtol)
    eps = torch.finfo(op.dtype).eps
    entries = closed_form_diagonal(op)
    if entries is not None:
        return exact_diagonal(entries, 0, eps, "closed form"), whole
    budget = products_allowed(max_products, n)
    outer = outer_part(op, min(budget, n, _DEAREST)) if all_outer(op) else None
    if outer is not None:
        return exact_diagonal(outer.diagonal, outer.products, eps, FACTORS), whole
    if reads_at_once("diagonal", n, budget):
        return exact_diagonal(read_diagonal(op), n, eps, "column by column"), whole
    mark = fingerprint(op, estimate="diagonal", rtol=rtol, seed=seed, max_products=max_products)
    sampler = DiagonalSampler(op, space, rtol, budget, seed)
    sampler.run_from(checkpoint, mark, space.shards)
    return sampler.outcome, space


class DiagonalSampler(Resumable):
    """A Lanczos basis first, then probes in its complement, eight at a time.

    The outcome has the entries of ``space``.
    """

    title = "diagonal"
    outcome: DiagonalEstimate
    vector_axes: ClassVar = {"rows": 1, "total": 0, "squares": 0, "directions": 0, "images": 0}

    def __init__(
        self, op: LinearOperator, space: VectorSpace, rtol: float, budget: int, seed: int
    ) -> None:
        self.op, self.space, self.rtol, self.budget = op, space, rtol, budget
        self.random = generator(seed)
        n, length = op.shape[0], space.length
        # A third for the outliers: their columns make most of the scatter.
        self.steps = min(budget // 3, 60) if op.tags.symmetric else 0
        self.basis = KrylovBasis(op, self.steps + 2, shards=space.shards)
        zeros = torch.zeros(length, dtype=torch.float64, device=float64_device(op.device))
        self.total, self.squares = zeros, zeros.clone()
        self.probes = 0
        # Kept only where the estimate may end in reading all columns: what was multiplied, (n, k).
        self.reads = n <= budget
        self.directions = torch.empty(length, 0, dtype=op.dtype, device=op.device)
        self.images = self.directions.clone()

    @property
    def products(self) -> int:
        return self.basis.products + self.probes

    @property
    def rewrites(self) -> int:
        return self.basis.rewrites

    def step(self) -> None:
        if self._deflated():
            return
        left = self.budget - self.products
        if self.probes >= _FEWEST or left <= 0:
            reached = self._reached()
            ahead = self.probes * ((reached.relative_error / self.rtol) ** 2 - 1)
            ahead = max(int(min(ahead, 1e9)), _BATCH)
            if reached.converged:
                self._finish(reached)
            elif reads_the_rest(self.op.shape[0] - self.products, ahead, left):
                self._finish(self._complete())
            elif left <= 0:
                self._finish(reached)
        if not self.done:
            self._probe(min(_BATCH, left))

    def _finish(self, outcome: DiagonalEstimate) -> None:
        self.outcome, self.done = outcome, True

    def _deflated(self) -> bool:
        """One Lanczos step, where one is due."""
        basis = self.basis
        if basis.products >= self.steps:
            return False
        if basis.count == 0:
            basis.add_random(self.random)
        if basis.pending == 0:
            self.steps = basis.products
            return False
        basis.advance(self.steps - basis.products)
        return True

    def _probe(self, count: int) -> None:
        basis, space = self.basis, self.space
        v = basis.rows[: basis.multiplied]
        probes = space.signs(count, self.random)
        directions = probes - v.T @ space.summed(v @ probes)
        images = space.times(self.op, directions)
        require_finite(images, space=space)
        if self.probes == 0:
            refuse_asymmetric_images(
                self.op, directions, images, "diagonal", scale=basis.scale, space=space
            )
        if self.reads:
            self.directions = torch.cat([self.directions, directions], 1)
            self.images = torch.cat([self.images, images], 1)
        samples = in_float64(probes * images)
        self.total = self.total + samples.sum(1)
        self.squares = self.squares + samples.pow(2).sum(1)
        self.probes += count

    def _reached(self) -> DiagonalEstimate:
        basis, m = self.basis, max(self.probes, 1)
        j, r = basis.multiplied, basis.count
        exact = torch.zeros_like(self.total)
        if j:
            action = torch.as_tensor(
                basis.coefficients[:r, :j], dtype=basis.rows.dtype, device="cpu"
            )
            image = action.T.to(basis.rows.device) @ basis.rows[:r]  # rows (A v_i)ᵀ
            exact = in_float64((image * basis.rows[:j]).sum(0))
        mean = self.total / m
        variance = (self.squares / m - mean**2).clamp_min(0) * m / max(m - 1, 1)
        error = (variance / m).sqrt()
        if self.probes < 2:
            error = torch.full_like(error, torch.inf)  # one sample does not scatter
        values = exact + mean
        size = float(self.space.norm(values))
        relative = (
            float(self.space.norm(error)) / size if size else 0.0 if self.probes > 1 else np.inf
        )
        half = float(student.ppf(0.975, max(m - 1, 1))) * error
        half = half + 16 * basis.eps * (exact.abs() + mean.abs())
        return DiagonalEstimate(
            values=values,
            interval=(values - half, values + half),
            relative_error=relative,
            products=self.products,
            converged=self.probes >= _FEWEST and relative <= self.rtol,
            exact=False,
            method="Lanczos deflation and Rademacher probes",
        )

    def _complete(self) -> DiagonalEstimate:
        """Σ (A b) ⊙ b over an orthonormal basis that begins with what was multiplied."""
        before = self.op.products
        rows, images = (part.to(self.op.device) for part in self.basis.multiplied_columns())
        # As many columns as products: an operator so small that its vectors are gathered.
        completion = Completion(
            self.op,
            self.space.whole(torch.cat([rows, self.directions], 1)),
            self.space.whole(torch.cat([images, self.images], 1)),
        )
        values = self.total.new_zeros(self.op.shape[0])
        sizes = torch.zeros_like(values)
        for basis, image in completion.blocks():
            values += (basis * image).sum(1)
            sizes += (basis * image).abs().sum(1)
        products = self.products + self.op.products - before
        radius = 64 * self.basis.eps * completion.magnification * sizes
        exact = exact_diagonal(values, products, self.basis.eps, "every column", radius=radius)
        return moved(exact, VectorSpace.of(self.op, shard=False), self.space)

    def state(self) -> State:
        tensors, numbers = self.basis.state()
        tensors.update(total=self.total, squares=self.squares, random=self.random.get_state())
        if self.reads:
            tensors.update(directions=self.directions, images=self.images)
        return tensors, {**numbers, "probes": self.probes, "steps": self.steps}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.basis.restore(tensors, numbers)
        self.total = tensors["total"].to(self.total.device)
        self.squares = tensors["squares"].to(self.squares.device)
        self.random.set_state(tensors["random"])
        if self.reads:
            self.directions = tensors["directions"].to(self.op.device)
            self.images = tensors["images"].to(self.op.device)
        self.probes, self.steps = int(numbers["probes"]), int(numbers["steps"])


def read_diagonal(op: LinearOperator, what: str = "diagonal") -> Tensor:
    """(n,) float64, by products with the unit vectors."""
    entries = []
    largest = 0.0  # ‖A e_j‖: the last columns may be nothing but rounding beside it
    for places, block, images in unit_columns(op):
        diagonal = images[places].diagonal()
        require_finite(diagonal)
        largest = max(largest, float(torch.linalg.vector_norm(images, dim=0).max()))
        if places.stop == op.shape[0] and np.isfinite(largest):
            refuse_asymmetric_images(op, block, images, what, scale=largest)
        entries.append(in_float64(diagonal))
    return torch.cat(entries)


def closed_form_diagonal(op: LinearOperator) -> Tensor | None:
    """The diagonal of an operator that has it written out, else None."""
    if isinstance(op, MatrixOperator):
        return in_float64(op.matrix.diagonal())
    exact = getattr(op, "exact_diagonal", None)
    return exact() if callable(exact) else None


def exact_diagonal(
    values: Tensor,
    products: int,
    eps: float,
    method: str,
    *,
    condition: float = 1.0,
    radius: Tensor | None = None,
) -> DiagonalEstimate:
    """A diagonal known up to rounding, which ``condition`` magnifies, or up to ``radius``."""
    values = in_float64(values.detach())
    if radius is None:
        radius = 64 * eps * condition * values.abs()
    radius = radius + np.finfo(np.float64).tiny
    return DiagonalEstimate(
        values=values,
        interval=(values - radius, values + radius),
        relative_error=eps * condition,
        products=products,
        converged=True,
        exact=True,
        method=method,
    )


# --- diag H_o, exactly and cheaply ----------------------------------------------------------------
#
# With few outputs to a sample the diagonal of H_o costs a handful of products
# (``operators/per_sample.py``). H_o itself is then settled, and of H = H_o + H_f only the
# functional part is left to estimate, which has no large outliers to be found first.


@dataclass(frozen=True, kw_only=True)
class OuterPart:
    """diag H_o of an operator's rows, its cost, and the operator of what is left."""

    diagonal: Tensor  # (n,) float64
    products: int  # the cost, in products with the operator
    rest: LinearOperator | None  # None: H_o is all there is


def count_products(op: LinearOperator, products: int) -> None:
    """Add to an operator's count what was spent on its behalf elsewhere."""
    op.products += products
    if isinstance(op, BlockView):
        op.parent.products += products


def all_outer(op: LinearOperator) -> bool:
    """Whether nothing is left beside H_o."""
    parent = op.parent if isinstance(op, BlockView) else op
    return isinstance(parent, CurvatureOperator) and parent.outer == "whole"


def outer_part(op: LinearOperator, most: int) -> OuterPart | None:
    """H_o's diagonal where it costs at most ``most`` products; None where it is dearer or unknown.

    The cost is added to the operator's own count.
    """
    view = op if isinstance(op, BlockView) else None
    parent = view.parent if view is not None else op
    if not isinstance(parent, CurvatureOperator) or parent.outer == "none":
        return None
    if view is not None and view.row_slices != view.column_slices:
        return None
    names = parent.problem.layout.names if view is None else view.row_parameters
    factors = SampleFactors(parent, names)
    columns = factors.columns()
    if columns is None or (spent := factors.products(columns)) > most:
        return None
    values = factors.diagonal()
    if values is None:
        return None
    count_products(op, spent)
    if view is not None:
        values = view.rows_of(values)
    return OuterPart(diagonal=values, products=spent, rest=_rest(parent, view))


def _rest(parent: CurvatureOperator, view: BlockView | None) -> LinearOperator | None:
    if parent.outer == "whole":
        return None
    parent.release()  # the rest has the same budget: both would be twice as much
    rest = FunctionalHessian(parent.problem, budget=parent.budget, checks=parent.checks)
    return rest if view is None else BlockView(rest, view.row_slices, view.column_slices)
