"""Softmax cross-entropy, of whole logits or of logits in factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvatlas.errors import ProblemError
from curvatlas.problem.chunked import ChunkedSoftmax, HiddenLogits
from curvatlas.problem.losses import IGNORE_INDEX, Loss, Rebuild, Uniform, main_tensor


class CrossEntropy(Loss):
    r"""Softmax cross-entropy; targets are class indices, ``ignore_index`` marks what to skip.

    δ_i = (π_i − q_i)/N,   Λ_i = (diag π_i − π_i π_iᵀ)/N,   N valid targets.
    """

    name = "cross_entropy"
    convex = True
    additive = True
    factored = True

    def __init__(
        self,
        *,
        ignore_index: int = IGNORE_INDEX,
        label_smoothing: float = 0.0,
        class_weights: Tensor | None = None,
    ) -> None:
        if class_weights is not None and label_smoothing > 0:
            raise ProblemError(
                "cross_entropy with class weights and label smoothing together is not supported: "
                "pass a callable (outputs, targets) -> mean loss instead."
            )
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.class_weights = class_weights

    def outputs_of(self, raw: Any) -> Tensor:
        return main_tensor(raw, self.name)

    def check(self, outputs: Tensor, targets: Any) -> None:
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            kind = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
            raise ProblemError(
                f"cross_entropy takes integer class targets (torch.long), got {kind}."
            )
        if tuple(outputs.shape[:-1]) != tuple(targets.shape):
            raise ProblemError(
                f"cross_entropy takes logits (..., classes) and targets (...): logits of shape "
                f"{tuple(outputs.shape)} expect targets {tuple(outputs.shape[:-1])}, "
                f"got {tuple(targets.shape)}."
            )
        valid = targets[targets != self.ignore_index]
        if valid.numel() and (int(valid.min()) < 0 or int(valid.max()) >= outputs.shape[-1]):
            raise ProblemError(
                f"class targets must lie in 0..{outputs.shape[-1] - 1}, got values from "
                f"{int(valid.min())} to {int(valid.max())} (ignore_index is {self.ignore_index})."
            )

    def count(self, targets: Tensor) -> float:
        return float(self._row_weights(targets, torch.float64).sum())

    def _row_weights(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        valid = targets != self.ignore_index
        if self.class_weights is None:
            return valid.to(dtype)
        weights = self.class_weights.to(device=targets.device, dtype=dtype)
        return weights[targets.clamp_min(0)] * valid

    def value(self, outputs: Tensor | HiddenLogits, targets: Tensor) -> Tensor:
        if isinstance(outputs, HiddenLogits):
            return self.chunked(outputs, targets).value(outputs)
        weights = None if self.class_weights is None else self.class_weights.to(outputs)
        return F.cross_entropy(
            outputs.reshape(-1, outputs.shape[-1]),
            targets.reshape(-1).long(),
            weight=weights,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def curvature(self, outputs: Tensor, targets: Tensor) -> Callable[[Tensor], Tensor]:
        rows = self._row_weights(targets, outputs.dtype)
        scale = (rows / rows.sum()).unsqueeze(-1)  # (..., 1)
        probabilities = outputs.detach().softmax(-1)

        def product(w: Tensor) -> Tensor:
            weighted = probabilities * w
            weighted.addcmul_(probabilities, weighted.sum(-1, keepdim=True), value=-1)
            return weighted.mul_(scale)

        return product

    def root_product(self, outputs: Tensor, targets: Tensor, noise: Tensor) -> Tensor:
        # B = diag √π − π √πᵀ: B Bᵀ = diag π − π πᵀ because √π has length one.
        rows = self._row_weights(targets, outputs.dtype)
        probabilities = outputs.detach().softmax(-1)
        found = probabilities.sqrt().mul_(noise)
        found.addcmul_(probabilities, found.sum(-1, keepdim=True), value=-1)
        return found.mul_((rows / rows.sum()).sqrt_().unsqueeze(-1))

    def chunked(self, outputs: HiddenLogits, targets: Tensor) -> ChunkedSoftmax:
        """The same loss of logits in factors."""
        rows = self._row_weights(targets, outputs.dtype)
        return ChunkedSoftmax(
            targets,
            rows / rows.sum(),
            smoothing=self.label_smoothing,
            rows_at_once=ChunkedSoftmax.rows_that_fit(outputs),
        )

    def fixed_slopes(
        self, outputs: list[Tensor], rebuild: Rebuild, targets: Tensor
    ) -> tuple[float, list[Tensor]]:
        whole = rebuild(outputs)
        if not isinstance(whole, HiddenLogits):
            return super().fixed_slopes(outputs, rebuild, targets)
        chunked = self.chunked(whole, targets)
        with torch.no_grad():
            value = float(chunked.value(whole))
        # The slopes at h and W depend on W and h: that is the head's own part of H_f.
        slopes = chunked.fixed_slopes(whole)
        found = [slopes[i] for i in present_factors(whole, outputs)]
        return value, [slope for slope in found if slope is not None]

    def residual_classes(
        self, outputs: HiddenLogits, targets: Tensor, levels: list[Tensor] | None = None
    ) -> tuple[ChunkedSoftmax, list[Tensor]]:
        """The weights and classes of ``residual`` (or, with uniform ``levels``, of samples)."""
        rows = self._row_weights(targets, outputs.dtype)
        chunked = self.chunked(outputs, targets)
        if levels is None:
            chunked.scale = (rows.square() / rows.sum()).reshape(-1)
            return chunked, [chunked.targets]
        chunked.scale = (rows / (rows.sum() * len(levels))).reshape(-1)
        chunked.smoothing = 0.0
        return chunked, [chunked.drawn_classes(outputs, level) for level in levels]

    def residual(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        rows = self._row_weights(targets, outputs.dtype).unsqueeze(-1)
        classes = outputs.shape[-1]
        truth = F.one_hot(targets.long().clamp_min(0), classes).to(outputs.dtype)
        truth = truth * (1 - self.label_smoothing) + self.label_smoothing / classes
        return (outputs.detach().softmax(-1) - truth) * rows, 1

    def target_count(self, outputs: Tensor, targets: Tensor) -> float:
        return self.count(targets)

    def sample_residual(self, outputs: Tensor, targets: Any, uniform: Uniform) -> Tensor:
        probabilities = outputs.detach().softmax(-1)
        cumulative = probabilities.cumsum(-1)
        level = uniform(targets.shape).to(outputs).unsqueeze(-1) * cumulative[..., -1:]
        drawn = torch.searchsorted(cumulative, level).clamp_max(outputs.shape[-1] - 1)
        truth = torch.zeros_like(probabilities).scatter_(-1, drawn, 1.0)
        rows = self._row_weights(targets, outputs.dtype).unsqueeze(-1)
        return (probabilities - truth) * rows.sqrt()


def present_factors(logits: HiddenLogits, leaves: list[Tensor]) -> list[int]:
    """Which of hidden, weight and bias are among ``leaves``, in that order."""
    return [i for i in range(3) if any(logits[i] is leaf for leaf in leaves)]
