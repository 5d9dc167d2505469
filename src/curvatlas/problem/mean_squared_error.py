"""Losses that are sums over single numbers: mean squared error, binary cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvatlas.errors import ProblemError
from curvatlas.problem.cross_entropy import Reduction
from curvatlas.problem.losses import Loss, Uniform, main_tensor


class EntrywiseLoss(Loss):
    r"""A mean or sum of e(Z_j, Y_j) over entries j, with outputs and targets of one shape.

    One target is the vector along the last axis (D entries). Its own loss is the mean of e over its
    entries where the objective is a mean, and their sum where it is a sum.
    """

    convex = True
    additive = True
    likelihood = True

    def __init__(self, *, reduction: Reduction = "mean") -> None:
        self.summed = reduction == "sum"

    def outputs_of(self, raw: Any) -> Tensor:
        return main_tensor(raw, self.name)

    def check(self, outputs: Tensor, targets: Any) -> None:
        if not isinstance(targets, Tensor) or outputs.shape != targets.shape:
            got = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise ProblemError(
                f"{self.name} takes targets of the outputs' shape {tuple(outputs.shape)}, "
                f"got {got}."
            )

    def count(self, targets: Any) -> float:
        """Entries of a mean, vectors of a sum."""
        if not isinstance(targets, Tensor):
            return 1.0  # ``check`` will say what is wrong with it
        return float(targets.numel() // (_width(targets) if self.summed else 1))

    def target_count(self, outputs: Tensor, targets: Tensor) -> float:
        return float(outputs.numel() // _width(outputs))

    def _own_entries(self, outputs: Tensor) -> int:
        """What divides the entries' losses in one target's own loss."""
        return 1 if self.summed else _width(outputs)


def _width(outputs: Tensor) -> int:
    """D, the entries of one target."""
    return outputs.shape[-1] if outputs.ndim > 1 else 1


class MeanSquaredError(EntrywiseLoss):
    r"""Mean over all entries of (Z − Y)²:  δ = 2(Z − Y)/n,  Λ = (2/n) I,  n entries.

    As a likelihood, one target is the vector along the last axis (D entries) with Gaussian noise of
    variance D/2 (1/2 for a sum), so that its loss is the negative log-likelihood up to a constant.

    single_label: outputs (..., 1) are read as (...), as Hugging Face does for ``num_labels=1``.
    """

    name = "mse"

    def __init__(self, *, reduction: Reduction = "mean", single_label: bool = False) -> None:
        super().__init__(reduction=reduction)
        self._single_label = single_label

    def arranged(self, outputs: Tensor, targets: Any) -> Tensor:
        if self._single_label and outputs.shape[-1:] == (1,):
            return outputs.reshape(targets.shape)
        return outputs

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets.to(outputs.dtype)).pow(2).sum() / self.count(targets)

    def curvature(self, outputs: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        factor = 2.0 / self.count(targets)
        return lambda w: w * factor

    def root_product(self, outputs: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
        return noise * math.sqrt(2.0 / self.count(targets))

    def residual(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        slope = 2.0 * (outputs.detach() - targets.to(outputs.dtype)) / self._own_entries(outputs)
        return slope, min(outputs.ndim - 1, 1)

    def sample_residual(self, outputs: Tensor, targets: Any, uniform: Uniform) -> Tensor:
        noise: Tensor = torch.special.ndtri(uniform(outputs.shape)).to(outputs)
        return noise * math.sqrt(2.0 / self._own_entries(outputs))


class BinaryCrossEntropy(EntrywiseLoss):
    r"""``nn.BCEWithLogitsLoss`` of logits Z: with σ = 1/(1 + e^−Z), weights w, positive weights p


        e = w ((1 − Y) Z + q softplus(−Z)),   q = 1 + (p − 1) Y
        δ = w (1 − Y − q (1 − σ))/n,   Λ = w q σ (1 − σ)/n   (diagonal),   n entries.

    As a likelihood, every entry is an independent Bernoulli variable, weighted by w q.
    """

    name = "bce_with_logits"

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        pos_weight: Tensor | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(reduction=reduction)
        for tensor in (weight, pos_weight):
            if tensor is not None and bool((tensor < 0).any()):
                raise ProblemError("bce_with_logits takes weights of at least zero.")
        self.weight, self.pos_weight = weight, pos_weight

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.weight, self.pos_weight) if tensor is not None]

    def check(self, outputs: Tensor, targets: Any) -> None:
        super().check(outputs, targets)
        if not targets.is_floating_point() and targets.dtype != torch.bool:
            raise ProblemError(
                f"bce_with_logits takes floating-point targets between 0 and 1, got "
                f"{targets.dtype}: convert them with .float()."
            )
        if bool(((targets < 0) | (targets > 1)).any()):
            raise ProblemError("bce_with_logits takes targets between 0 and 1.")
        for tensor in self.tensors():
            refuse_weight_per_sample(tensor, outputs, self.name)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(outputs)
        pos_weight = None if self.pos_weight is None else self.pos_weight.to(outputs)
        total = F.binary_cross_entropy_with_logits(
            outputs, targets.to(outputs.dtype), weight, pos_weight=pos_weight, reduction="sum"
        )
        return total / self.count(targets)

    def _bernoulli_weight(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """w q of every entry."""
        weight = torch.ones_like(outputs)
        if self.pos_weight is not None:
            weight = 1 + (self.pos_weight.to(outputs) - 1) * targets.to(outputs.dtype)
        return weight if self.weight is None else weight * self.weight.to(outputs)

    def _diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = outputs.detach()
        slope = outputs.sigmoid() * (-outputs).sigmoid()
        return slope * self._bernoulli_weight(outputs, targets) / self.count(targets)

    def curvature(self, outputs: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        diagonal = self._diagonal(outputs, targets)
        return lambda w: w * diagonal

    def root_product(self, outputs: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
        return noise * self._diagonal(outputs, targets).sqrt()

    def residual(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        leaf = outputs.detach().requires_grad_(True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.value(leaf, targets), leaf)
        return slope * self.target_count(outputs, targets), min(outputs.ndim - 1, 1)

    def sample_residual(self, outputs: Tensor, targets: Any, uniform: Uniform) -> Tensor:
        probability = outputs.detach().sigmoid()
        drawn = (uniform(outputs.shape).to(outputs) < probability).to(outputs.dtype)
        weight = self._bernoulli_weight(probability, targets) / self._own_entries(outputs)
        return (probability - drawn) * weight.sqrt()


def refuse_weight_per_sample(weight: Tensor, outputs: Tensor, name: str) -> None:
    """A weight along the batch's axis would belong to other samples in every batch."""
    if weight.ndim >= outputs.ndim and weight.shape[0] > 1:
        raise ProblemError(
            f"{name} has weights of shape {tuple(weight.shape)}, one for each sample of a batch: "
            "pass a callable loss, with the weights among the targets."
        )
