"""Mean squared error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvatlas.errors import ProblemError
from curvatlas.problem.losses import Loss, Uniform, main_tensor


class MeanSquaredError(Loss):
    r"""Mean over all entries of (Z − Y)²:  δ = 2(Z − Y)/n,  Λ = (2/n) I,  n entries.

    As a likelihood, one target is the vector along the last axis (D entries) with Gaussian noise of
    variance D/2, so that its mean squared error is the negative log-likelihood up to a constant.
    """

    name = "mse"
    convex = True
    additive = True

    def outputs_of(self, raw: Any) -> Tensor:
        return main_tensor(raw, self.name)

    def check(self, outputs: Tensor, targets: Any) -> None:
        if not isinstance(targets, Tensor) or outputs.shape != targets.shape:
            got = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise ProblemError(
                f"mse takes targets of the outputs' shape {tuple(outputs.shape)}, got {got}."
            )

    def count(self, targets: Tensor) -> float:
        return float(targets.numel())

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets.to(outputs.dtype)).pow(2).mean()

    def curvature(self, outputs: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        factor = 2.0 / outputs.numel()
        return lambda w: w * factor

    def root_product(self, outputs: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
        return noise * math.sqrt(2.0 / outputs.numel())

    def residual(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        size = outputs.shape[-1] if outputs.ndim > 1 else 1
        slope = 2.0 * (outputs.detach() - targets.to(outputs.dtype)) / size
        return slope, min(outputs.ndim - 1, 1)

    def target_count(self, outputs: Tensor, targets: Tensor) -> float:
        return float(outputs.numel() // (outputs.shape[-1] if outputs.ndim > 1 else 1))

    def sample_residual(self, outputs: Tensor, targets: Any, uniform: Uniform) -> Tensor:
        size = outputs.shape[-1] if outputs.ndim > 1 else 1
        noise: Tensor = torch.special.ndtri(uniform(outputs.shape)).to(outputs)
        return noise * math.sqrt(2.0 / size)
