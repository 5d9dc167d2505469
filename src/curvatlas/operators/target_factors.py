r"""Factors of Λ: Λ_t = Σ_c f_tc f_tcᵀ for every target t, as seeds of backward passes.

Targets do not meet in Λ, so that its factors are those of small matrices, C × C for C outputs of a
target, and a column f_tc is zero outside its own target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.errors import ProblemError
from curvatlas.precision import in_float64
from curvatlas.problem import Batch, CrossEntropy, Loss, MeanSquaredError

_MOST_NUMBERS = 2**27  # in the matrices Λ_t of one call, 1 GB


@dataclass(frozen=True)
class TargetFactors:
    """Columns f_tc of n samples with T targets each."""

    columns: Tensor  # (n, T, C, r)
    places: Tensor  # (q, 2) pairs (t, c) that are not zero for some sample, the largest first
    shape: torch.Size  # of the outputs, samples first

    def seeds(self, some: Tensor) -> Tensor:
        """Columns of the pairs ``some`` (k, 2) as directions of the outputs, samples first."""
        n, targets, classes, _ = self.columns.shape
        t, c = some.unbind(1)
        found = self.columns.new_zeros(len(some), n, targets, classes)
        found[torch.arange(len(some), device=t.device), :, t] = self.columns[:, t, :, c]
        return found.reshape(len(some), *self.shape)


def target_factors(
    loss: Loss, outputs: Tensor, targets: object, *, axis: int = 0
) -> TargetFactors | None:
    """The factors at ``outputs`` with n samples on ``axis``.

    None: no closed form of Λ, or too many outputs.
    """
    shape = outputs.movedim(axis, 0).shape  # samples first
    n, classes = shape[0], _outputs_of_a_target(loss, shape)
    if outputs.numel() * classes > _MOST_NUMBERS:
        return None
    product = loss.curvature(outputs.detach(), targets)
    if product is None:
        return None
    units = torch.eye(classes, dtype=outputs.dtype, device=outputs.device)
    units = units.view(classes, 1, 1, classes)
    count = outputs.numel() // (n * classes)
    units = units.expand(classes, n, count, classes).reshape(classes, *shape)
    weighted = product(units.movedim(1, 1 + axis)).movedim(1 + axis, 1)
    blocks = in_float64(weighted.reshape(classes, n, count, classes).movedim(0, 3))
    values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)  # (n, T, C)
    rounding = classes * torch.finfo(outputs.dtype).eps * values.amax()
    columns: Tensor = vectors * values.where(values > rounding, 0.0).sqrt().unsqueeze(2)
    sizes = columns.square().sum((0, 2))  # (T, r)
    places = sizes.nonzero()
    order = sizes[places[:, 0], places[:, 1]].argsort(descending=True)
    return TargetFactors(
        columns.to(outputs.dtype).to(outputs.device), places[order].to(outputs.device), shape
    )


def _outputs_of_a_target(loss: Loss, shape: torch.Size) -> int:
    """C: along the last axis for losses that are known so, else all outputs of a sample."""
    if isinstance(loss, CrossEntropy | MeanSquaredError) and len(shape) > 1:
        return shape[-1]
    return shape[1:].numel()


def sample_axis_of_outputs(batch: Batch) -> int:
    """The axis on which the outputs, one tensor, hold the samples of a batch."""
    layout = batch.layout
    if layout is None or layout.outputs[0] is None:
        raise ProblemError("the samples of this batch cannot be told apart.")
    return layout.outputs[0]
