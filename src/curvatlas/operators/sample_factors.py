r"""The exact diagonal of H_o from the factors of single samples.

Samples do not meet in H_o = Σ_i J_iᵀ Λ_i J_i, and Λ_i = Σ_c f_ic f_icᵀ has few columns where a
sample has few outputs (C classes: C − 1). So

    diag H_o = Σ_i Σ_c (J_iᵀ f_ic)²,     tr H_o = Σ_i Σ_c ‖J_iᵀ f_ic‖²,

one backward pass for each c with the gradients of the samples kept apart: the forward pass is
mapped over samples that each have the parameters to themselves, and only first derivatives are
taken. Where an operation of the model cannot be mapped over samples, or samples do meet in the
model, there is no answer and the caller estimates. (``outer_diagonal.py`` takes one sample after
the other, for any model and for more outputs.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvatlas.errors import ProblemError
from curvatlas.operators.target_factors import (
    TargetFactors,
    sample_axis_of_outputs,
    target_factors,
)
from curvatlas.precision import float64_device, in_float64
from curvatlas.problem import Batch, Problem

if TYPE_CHECKING:
    from curvatlas.operators.curvature import CurvatureOperator

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
        total = torch.zeros(self.size, dtype=torch.float64, device=float64_device(problem.device))
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
        total = torch.zeros(
            self.size, dtype=torch.float64, device=float64_device(factors.columns.device)
        )
        for some in torch.split(factors.places, self._at_once):
            gradients = self._gradients(batch, factors.seeds(some))  # (r, n, *shape) each
            # Not in place: gradients of different parameters may share their memory.
            pieces = [gradient.flatten(2).square().sum((0, 1)) for gradient in gradients]
            total += in_float64(torch.cat(pieces))
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
