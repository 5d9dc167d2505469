r"""diag H_o read from the outputs instead of the weights, one sample after the other.

    [H_o]_ii = Σ_t Σ_c (J_tᵀ f_tc)_i²,

one backward pass of one sample for every output of it. Column by column it would be one product of
all samples for every weight. Where samples can be mapped over and have few outputs,
``sample_factors.py`` takes the same sum for many samples at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvatlas.errors import NonFiniteError, ProblemError
from curvatlas.operators.fisher import TargetFactors, sample_axis_of_outputs, target_factors
from curvatlas.problem import Batch, Problem
from curvatlas.progress import bar

if TYPE_CHECKING:
    from curvatlas.operators.curvature import CurvatureOperator

# -------------------------------------------------------------------------------------------------
# The exact diagonal of H_o from the factors of single samples.
#
# Samples do not meet in H_o = Σ_i J_iᵀ Λ_i J_i, and Λ_i = Σ_c f_ic f_icᵀ has few columns where a
# sample has few outputs (C classes: C − 1). So
#
#     diag H_o = Σ_i Σ_c (J_iᵀ f_ic)²,     tr H_o = Σ_i Σ_c ‖J_iᵀ f_ic‖²,
#
# one backward pass for each c with the gradients of the samples kept apart: the forward pass is
# mapped over samples that each have the parameters to themselves, and only first derivatives are
# taken. Where an operation of the model cannot be mapped over samples, or samples do meet in the
# model, there is no answer and the caller estimates. (``outer_diagonal.py`` takes one sample after
# the other, for any model and for more outputs.)
# -------------------------------------------------------------------------------------------------


_IN_FLIGHT_BYTES = 2**27  # gradients of single samples that exist at the same time
_COPIES = 3  # a gradient, its square and their sum
_MOST_OUTPUTS = 256  # numbers that the model gives for one sample; Λ_i is decomposed densely
_OUTER_UNITS, _TOTAL_UNITS = 4, 6  # of a product with H_o and with H; a forward pass is one


class SampleFactors:
    """The factors f_ic of an operator's data, for the parameters ``names``."""

    def __init__(self, operator: CurvatureOperator, names: Sequence[str]) -> None:
        self.problem: Problem = operator.problem
        self.names = tuple(names)
        self._checks = operator.checks
        self._product_units = _OUTER_UNITS if operator.outer == "whole" else _TOTAL_UNITS
        sizes = dict(zip(self.problem.layout.names, self.problem.layout.sizes, strict=True))
        self.size = sum(sizes[name] for name in names)
        self._gradient_bytes = _COPIES * self.size * operator.dtype.itemsize
        self._fits = self._gradient_bytes <= operator.budget
        at_once = max(1, min(_IN_FLIGHT_BYTES, operator.budget) // max(self._gradient_bytes, 1))
        self._at_once = int(at_once)  # gradients of single samples

    def columns(self) -> int | None:
        """How many backward passes the diagonal takes; None where there is no such way."""
        problem = self.problem
        supported = problem.loss.additive and problem.loss.convex and self._fits
        if not supported or problem.distributed or problem.checkpoint_activations:
            return None
        if not problem.separable:
            return None
        first = next(problem.batches(), None)
        if first is None:
            return None
        try:
            with problem.evaluating(), torch.no_grad():
                outputs = problem.outputs(first.part(0, 1, problem.loss.count), {})
        except (RuntimeError, ProblemError):
            return None
        if not isinstance(outputs, Tensor) or outputs.numel() > _MOST_OUTPUTS:
            return None
        rank = outputs.numel()
        if problem.loss.name == "cross_entropy":
            rank -= rank // outputs.shape[-1]  # logits may be shifted together
        return rank

    def products(self, columns: int) -> int:
        """The cost in products with the operator.

        A forward pass for the outputs, one more for each group of columns, and a backward pass,
        which counts as two, for each column.
        """
        groups = math.ceil(columns / min(self._at_once, max(columns, 1)))
        return math.ceil((1 + groups + 2 * columns) / self._product_units)

    def diagonal(self) -> Tensor | None:
        """Σ_i Σ_c (J_iᵀ f_ic)² (Σ sizes of ``names``,), float64.

        None when the samples cannot be told apart in this model.
        """
        problem, columns = self.problem, self.columns()
        if columns is None:
            return None
        if self._checks:
            problem.check()
        total = torch.zeros(self.size, dtype=torch.float64, device=problem.device)
        together = max(1, self._at_once // max(columns, 1))
        mapped = False
        try:
            with problem.evaluating():
                for batch in problem.batches():
                    for start in range(0, batch.samples, together):
                        stop = min(start + together, batch.samples)
                        part = batch.part(start, stop, problem.loss.count)
                        if part.count == 0:
                            continue
                        factors = self._factors(part)
                        if not len(factors.places):
                            continue  # saturated: Λ is zero
                        if not mapped and not self._mapping_agrees(part, factors):
                            return None
                        mapped = True
                        total += part.count / problem.normaliser * self._squares(part, factors)
        except (RuntimeError, ProblemError):
            return None  # an operation without a rule for vmap, or with a look at its values
        return total if bool(torch.isfinite(total).all()) else None

    def _factors(self, batch: Batch) -> TargetFactors:
        problem = self.problem
        with torch.no_grad():
            outputs = problem.outputs(batch, {})
            axis = sample_axis_of_outputs(batch)
            factors = target_factors(problem.loss, outputs, batch.targets, axis=axis)
        if factors is None:
            raise ProblemError("the loss has no closed form of its curvature by sample.")
        return factors

    def _squares(self, batch: Batch, factors: TargetFactors) -> Tensor:
        """Σ_i Σ_c (J_iᵀ f_ic)² of one batch, flat and in float64."""
        total = torch.zeros(self.size, dtype=torch.float64, device=factors.columns.device)
        for some in torch.split(factors.places, self._at_once):
            gradients = self._gradients(batch, factors.seeds(some))  # (r, n, *shape) each
            # Not in place: gradients of different parameters may share their memory.
            pieces = [gradient.flatten(2).square().sum((0, 1)) for gradient in gradients]
            total += torch.cat(pieces).double()
        return total

    def _gradients(self, batch: Batch, seeds: Tensor) -> list[Tensor]:
        """J_iᵀ f_ic for every sample and column: (r, n, *shape) for each of ``names``.

        seeds: (r, n, *outputs of a sample), the columns.

        Every sample gets parameters of its own, all views of the same memory: the gradient by them
        is the samples' gradients side by side.
        """
        problem, size, layout = self.problem, batch.samples, batch.layout
        assert layout is not None
        leaves = {
            name: leaf.detach().expand(size, *leaf.shape).requires_grad_(True)
            for name, leaf in problem.leaves(self.names).items()
        }
        flat, spec = tree_flatten(batch.inputs)
        axes = layout.leaves[: len(flat)]
        output_axis = sample_axis_of_outputs(batch)
        # The check of the loss looks at the targets' values, which vmap forbids: one stands for all
        single = batch.part(0, 1, problem.loss.count)

        def one(parameters: dict[str, Tensor], given: list[Tensor]) -> Tensor:
            fresh = iter(given)
            own = [
                t if axis is None else next(fresh).unsqueeze(axis)
                for t, axis in zip(flat, axes, strict=True)
            ]
            sample = Batch(
                inputs=tree_unflatten(own, spec), targets=single.targets, count=single.count,
                index=batch.index, offset=batch.offset,
            )  # fmt: skip
            outputs: Tensor = problem.outputs(sample, parameters)
            return outputs.squeeze(output_axis)

        given = [t for t, axis in zip(flat, axes, strict=True) if axis is not None]
        along = [axis for axis in axes if axis is not None]
        outputs = torch.func.vmap(one, in_dims=(0, along))(leaves, given)
        found = torch.autograd.grad(
            outputs, list(leaves.values()), seeds,
            is_grads_batched=True, allow_unused=True,
        )  # fmt: skip
        return [
            leaf.new_zeros(len(seeds), *leaf.shape) if gradient is None else gradient
            for gradient, leaf in zip(found, leaves.values(), strict=True)
        ]

    def _mapping_agrees(self, batch: Batch, factors: TargetFactors) -> bool:
        """Whether gradients of mapped samples are those of a plain backward pass.

        That the samples are apart is known (``Problem.separable``); whether every operation of the
        model is mapped over them rightly is seen on a random mixture of two samples' outputs.
        """
        pair = batch.part(0, min(2, batch.samples), self.problem.loss.count)
        random = torch.Generator().manual_seed(0)
        shape = (1, pair.samples, *factors.shape[1:])
        seeds = torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(
            factors.columns
        )
        apart = self._gradients(pair, seeds)
        leaves = self.problem.leaves(self.names)
        outputs = self.problem.outputs(pair, leaves).movedim(sample_axis_of_outputs(pair), 0)
        joint = torch.autograd.grad(
            outputs, list(leaves.values()), seeds[0], allow_unused=True, materialize_grads=True
        )
        left = torch.cat([gradient.sum((0, 1)).reshape(-1) for gradient in apart])
        right = torch.cat([gradient.reshape(-1) for gradient in joint])
        allowed = torch.finfo(left.dtype).eps ** 0.5 * float(right.abs().max())
        return bool((left - right).abs().max() <= allowed)


_NUMBERS = 2**23  # of gradient rows held at once: 32 MB in float32


def exact_outer_diagonal(problem: Problem) -> tuple[Tensor, int] | None:
    """(P,) float64 diag H_o and the number of single samples' gradients it took.

    None where a sample has more outputs than there are weights, the loss no closed form of Λ, or
    the data are spread over processes.
    """
    if problem.spread or not problem.separable or not _fewer_outputs_than_weights(problem):
        return None
    problem.check()
    total = torch.zeros(problem.size, dtype=torch.float64, device=problem.device)
    passes = 0
    with problem.evaluating(), bar("exact diagonal") as progress:
        for batch in problem.batches():
            for piece in batch.singles(problem.loss.count):
                found = None if piece.layout is None else _of_sample(problem, piece)
                if found is None:
                    return None
                total += piece.count * found[0]
                passes += found[1]
                progress.update(1)
    if not bool(torch.isfinite(total).all()):
        raise NonFiniteError("the Gauss-Newton diagonal is not finite at these weights.")
    return total / problem.normaliser, passes


def _fewer_outputs_than_weights(problem: Problem) -> bool:
    piece = next(iter(problem.batches())).part(0, 1, problem.loss.count)
    with problem.evaluating(), torch.no_grad():
        outputs = problem.outputs(piece, problem.leaves())
    return isinstance(outputs, Tensor) and outputs.numel() <= problem.size


def _of_sample(problem: Problem, piece: Batch) -> tuple[Tensor, int] | None:
    """Σ (J_tᵀ f_tc)² of one sample, (P,) float64, and how many pairs (t, c) there were."""
    leaves = problem.leaves()
    outputs = problem.outputs(piece, leaves)
    axis = sample_axis_of_outputs(piece)
    factors = target_factors(problem.loss, outputs, piece.targets, axis=axis)
    if factors is None:
        return None
    total = torch.zeros(problem.size, dtype=torch.float64, device=problem.device)
    for some in torch.split(factors.places, max(1, _NUMBERS // problem.size)):
        rows = torch.autograd.grad(
            outputs.movedim(axis, 0), list(leaves.values()), factors.seeds(some),
            is_grads_batched=True, retain_graph=True, allow_unused=True,
        )  # fmt: skip
        squares = [None if r is None else r.double().square().sum(0) for r in rows]
        total += problem.layout.join(squares, like=total)
    return total, len(factors.places)
