r"""Per-sample losses, slopes and curvatures in a few directions, streamed.

For directions W (P, w) and every sample i: ℓ_i, ‖∇ℓ_i‖, Wᵀ∇ℓ_i (w,) and S_i = Wᵀ h_i W (w, w), by
Hessian products h_i W of single samples. Samples run side by side under ``vmap``, outermost, with
one linearisation for all directions; P-sized memory is that of one chunk, whatever the number of
samples. Norms are written out, so that every composition of derivatives is right, and the first
chunk is compared with the Hessian operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvatlas.analysis.taylor_norms import smooth_norms
from curvatlas.budget import default_budget
from curvatlas.errors import DifferentiationError
from curvatlas.operators.hessian import Hessian
from curvatlas.problem import Batch, Problem
from curvatlas.problem.evaluation import call
from curvatlas.progress import bar

_CHUNK = 64  # samples side by side: more gains nothing on a CPU and costs memory


@dataclass(frozen=True)
class SampleQuantities:
    """One row a sample, in the order of the data."""

    counts: Tensor  # (n,) valid targets: the sample's weight in the mean
    losses: Tensor  # (n,)
    gradient_norms: Tensor  # (n,)
    slopes: Tensor  # (n, w)
    curvatures: Tensor  # (n, w, w), symmetric


def sample_quantities(
    problem: Problem, directions: Tensor, *, limit: int | None = None, chunk: int | None = None
) -> SampleQuantities:
    """Stream over the samples (at most ``limit``) and keep a few numbers of each, in float64."""
    parts: list[tuple[Tensor, ...]] = []
    sampler = _Sampler(problem, directions, chunk)
    total = count_samples(problem) if limit is None else min(limit, count_samples(problem))
    seen = 0
    with bar("per-sample curvature", total=total) as progress:
        for batch in pieces(problem, sampler.chunk):
            if seen >= total:
                break
            if batch.samples > total - seen:
                batch = batch.part(0, total - seen, problem.loss.count)
            parts.append(sampler.of(batch))
            seen += len(parts[-1][0])
            progress.update(len(parts[-1][0]))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return SampleQuantities(*columns)


def sample_losses(problem: Problem, *, limit: int) -> Tensor:
    """ℓ_i of the first ``limit`` samples with a valid target, (n,) float64; forward only."""
    sampler = _Sampler(problem, problem.parameters.new_zeros(problem.size, 0), 256)
    found: list[Tensor] = []
    with torch.no_grad():
        for batch in pieces(problem, sampler.chunk):
            found.append(sampler.of(batch)[1])
            if sum(map(len, found)) >= limit:
                break
    return torch.cat(found)[:limit]


def pieces(problem: Problem, size: int) -> Iterator[Batch]:
    """The data in batches of at most ``size`` samples; whole batches where they cannot be cut."""
    problem.require_one_process("a quantity by sample")
    for batch in problem.batches():
        for start in range(0, batch.samples, size):
            piece = batch.part(start, min(start + size, batch.samples), problem.loss.count)
            if piece.count > 0:
                yield piece


def count_samples(problem: Problem) -> int:
    """Samples of the data (batches, where a loss is not a sum over samples)."""
    problem.require_one_process("a quantity by sample")
    return sum(batch.samples for batch in problem.batches())


class _Sampler:
    """Computes a chunk's rows: vectorised, or sample by sample where the model does not allow."""

    def __init__(self, problem: Problem, directions: Tensor, chunk: int | None) -> None:
        problem.require_mean("curvature by sample")
        problem.check()
        self.problem = problem
        self.directions = directions.to(dtype=problem.dtype, device=problem.device)
        row = 8 * problem.size * problem.dtype.itemsize  # gradient, products and their graph
        self.chunk = chunk or max(1, min(_CHUNK, default_budget(problem.device) // row))
        self._vectorised = problem.separable
        self._checked = False
        everything = dict(problem.model.named_parameters())
        self._fixed = {n: p.detach() for n, p in everything.items()}
        self._columns = [
            dict(zip(problem.layout.names, [t[j] for t in split], strict=True))
            for split in [problem.layout.split(self.directions)]
            for j in range(self.directions.shape[1])
        ]

    def of(self, batch: Batch) -> tuple[Tensor, ...]:
        rows = None
        with self.problem.evaluating(), smooth_norms():
            if self._vectorised and batch.layout is not None:
                try:
                    rows = self._side_by_side(batch)
                except RuntimeError:
                    self._vectorised = False  # an operation without a batching rule
            if rows is None:
                rows = self._one_by_one(batch)
        if not self._checked and self._columns:
            self._check(batch, rows)
            self._checked = True
        counts = self._counts(batch)
        valid = counts > 0
        return tuple(t.cpu().double()[valid] for t in (counts, *rows))

    def _counts(self, batch: Batch) -> Tensor:
        count = self.problem.loss.count
        return torch.tensor(
            [batch.part(i, i + 1, count).count for i in range(batch.samples)], dtype=torch.float64
        )

    def _side_by_side(self, batch: Batch) -> tuple[Tensor, ...]:
        assert batch.layout is not None
        leaves, spec = tree_flatten((batch.inputs, batch.targets))
        along = batch.layout.leaves
        tensors = [leaf for leaf, axis in zip(leaves, along, strict=True) if axis is not None]
        names = self.problem.parameter_names
        here = {n: self._fixed[n] for n in names}

        def one(*rows: Tensor) -> tuple[Tensor, ...]:
            given = iter(rows)
            filled = [
                leaf if axis is None else next(given).unsqueeze(axis)
                for leaf, axis in zip(leaves, along, strict=True)
            ]
            inputs, targets = tree_unflatten(filled, spec)

            def loss(values: dict[str, Tensor]) -> Tensor:
                raw = call(self.problem.model, {**self._fixed, **values}, inputs)
                loss = self.problem.loss
                return loss.value(loss.arranged(loss.outputs_of(raw), targets), targets)

            def slope(values: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
                gradient, value = torch.func.grad_and_value(loss)(values)
                return gradient, value

            if not self._columns:
                return (loss(here),)
            linear: Any = torch.func.vjp(slope, here, has_aux=True)
            gradient, pull, value = linear
            flat = torch.cat([gradient[n].reshape(-1) for n in names])
            products = []
            for column in self._columns:
                (bent,) = pull(column)
                products.append(torch.cat([bent[n].reshape(-1) for n in names]) @ self.directions)
            return value, flat.norm(), flat @ self.directions, torch.stack(products)

        axes = tuple(axis for axis in along if axis is not None)
        found: tuple[Tensor, ...] = torch.func.vmap(one, in_dims=axes)(*tensors)
        return found

    def _one_by_one(self, batch: Batch) -> tuple[Tensor, ...]:
        problem = self.problem
        parts = [batch.part(i, i + 1, problem.loss.count) for i in range(batch.samples)]
        rows: list[tuple[Tensor, ...]] = []
        for part in parts:
            if part.count == 0:
                width = len(self._columns)
                zero = self.directions.new_zeros
                empty = (zero(()), zero(()), zero(width), zero(width, width))
                rows.append(empty if width else empty[:1])
                continue
            leaves = problem.leaves()
            if not self._columns:
                value = problem.loss.value(problem.outputs(part, leaves), part.targets)
                rows.append((value.detach(),))
                continue
            tensors = list(leaves.values())
            value = problem.loss.value(problem.outputs(part, leaves), part.targets)
            grads = torch.autograd.grad(value, tensors, create_graph=True, materialize_grads=True)
            like = self.directions[:, 0]
            flat = problem.layout.join([g.detach() for g in grads], like=like)
            products = []
            for column in self._columns:
                chosen = [i for i, g in enumerate(grads) if g.requires_grad]
                bent = torch.autograd.grad(
                    [grads[i] for i in chosen],
                    tensors,
                    [column[problem.parameter_names[i]] for i in chosen],
                    retain_graph=True,
                    allow_unused=True,
                )
                products.append(problem.layout.join(bent, like=like) @ self.directions)
            rows.append(
                (value.detach(), flat.norm(), flat @ self.directions, torch.stack(products))
            )
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    def _check(self, batch: Batch, rows: tuple[Tensor, ...]) -> None:
        """The weighted mean of the samples' curvatures is the Hessian operator's."""
        operator = Hessian(self.problem.with_batches([batch]))
        want = self.directions.T @ (operator @ self.directions)
        counts = self._counts(batch).to(want)
        got = torch.einsum("i,iab->ab", counts / counts.sum(), rows[3].to(want))
        error = float((got - want).norm())
        allowed = 1e4 * torch.finfo(want.dtype).eps * float(rows[3].abs().max() + want.norm())
        if error > allowed:
            raise DifferentiationError(
                f"per-sample curvatures do not add up to the Hessian ({error:.1e} off, "
                f"{allowed:.1e} allowed): samples of a batch influence each other, or an operation "
                "has a wrong second derivative."
            )


def subset(problem: Problem, indices: Tensor) -> Problem:
    """The same problem on some samples, numbered in the order of the data."""
    problem.require_one_process("a choice of samples")
    chosen, first = [], 0
    for batch in problem.batches():
        size = batch.samples
        here = indices[(indices >= first) & (indices < first + size)] - first
        first += size
        if not len(here):
            continue
        chosen.append(batch.chosen(here.sort().values, problem.loss.count))
    return problem.with_batches(chosen)
