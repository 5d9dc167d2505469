"""Losses: the mean over valid targets, how many those are, and the Hessian at the outputs.

Adding one: derive from ``Loss``, give ``value`` and ``count``; give ``curvature`` too where
Λ = ∂²ℓ/∂Z² has a closed form (otherwise it is found by double backward through ``value`` alone).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvatlas.errors import ProblemError
from curvatlas.problem.chunked import ChunkedSoftmax, HiddenLogits, chunked_product

IGNORE_INDEX = -100

Uniform = Callable[[torch.Size], Tensor]  # shape → numbers in (0, 1), the same at every call
Rebuild = Callable[[list[Tensor]], Any]  # the differentiable tensors of an output → the output


class Loss:
    """A mean over valid targets of outputs Z; ``convex`` says that Λ is positive semidefinite."""

    name = "loss"
    convex = False
    # Whether a batch may be split into samples: true for sums over independent targets.
    additive = False
    # Whether ``value`` and the curvature also take logits in factors (``HiddenLogits``).
    factored = False

    def outputs_of(self, raw: Any) -> Any:
        """What the loss reads from the model's return value."""
        return raw

    def check(self, outputs: Any, targets: Any) -> None:
        """Raise ProblemError when shapes or types do not fit."""

    def count(self, targets: Any) -> float:
        """Number of valid targets: the weight of a batch."""
        raise TypeError(f"{type(self).__name__} does not say how to count its targets.")

    def value(self, outputs: Any, targets: Any) -> Tensor:
        """Mean loss of a batch, a scalar in the autograd graph."""
        raise TypeError(f"{type(self).__name__} has no value.")

    def curvature(self, outputs: Tensor, targets: Any) -> Callable[[Tensor], Tensor] | None:
        """w ↦ Λ w with Λ = ∂²ℓ/∂Z² at ``outputs``, or None when there is no closed form.

        w has the outputs' shape, possibly behind a leading axis of columns.
        """
        return None

    def root_product(self, outputs: Tensor, targets: Any, noise: Tensor) -> Tensor | None:
        """B ξ with B Bᵀ = Λ, or None when there is no closed form; ξ has the outputs' shape."""
        return None

    def fixed_slopes(
        self, outputs: list[Tensor], rebuild: Rebuild, targets: Any
    ) -> tuple[float, list[Tensor]]:
        """ℓ, and δ = ∂ℓ/∂Z of the output tensors held fixed: differentiating Jᵀδ gives H_f."""
        fixed = [z.detach().requires_grad_(True) for z in outputs]
        loss = self.value(rebuild(fixed), targets)
        slopes = torch.autograd.grad(loss, fixed, materialize_grads=True)
        return float(loss.detach()), list(slopes)

    def residual(self, outputs: Tensor, targets: Any) -> tuple[Tensor, int]:
        """Gradient of every target's own loss by the outputs, and how many trailing axes one has.

        Returns R, shaped like ``outputs``, and k: the last k axes belong to one target.
        """
        leaf = outputs.detach().requires_grad_(True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.value(leaf, targets), leaf)
        return slope * leaf.shape[0], leaf.ndim - 1

    def target_count(self, outputs: Tensor, targets: Any) -> float:
        """Number of targets in the sense of ``residual``: samples, unless a loss knows better."""
        return float(outputs.shape[0])

    def sample_residual(self, outputs: Tensor, targets: Any, uniform: Uniform) -> Tensor:
        """The residual with targets drawn from the model's own predictive distribution."""
        raise ProblemError(
            f"a Monte-Carlo Fisher needs a likelihood and {self.name!r} is not known as one: "
            "use loss='cross_entropy' or 'mse', or kind='empirical'."
        )


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
        found = [slopes[i] for i in _present(whole, outputs)]
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


class CallableLoss(Loss):
    """Any ``(outputs, targets) -> mean loss``; a batch is one unit and is never split."""

    def __init__(
        self,
        function: Callable[[Any, Any], Tensor],
        *,
        count: Callable[[Any], float] | None = None,
    ) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self._count = count

    def value(self, outputs: Any, targets: Any) -> Tensor:
        result = self.function(outputs, targets)
        if not isinstance(result, Tensor) or result.numel() != 1:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ProblemError(
                f"the loss {self.name!r} must return a scalar tensor (a mean), got {got}."
            )
        return result.reshape(())

    def count(self, targets: Any) -> float:
        if self._count is not None:
            return float(self._count(targets))
        leaves = [t for t in tree_flatten(targets)[0] if isinstance(t, Tensor)]
        if not leaves:
            raise ProblemError(
                f"cannot count the targets of {self.name!r}: pass count=function_of_targets."
            )
        first = leaves[0]
        if first.is_floating_point():
            return float(first.numel())
        return float((first != IGNORE_INDEX).sum())


def main_tensor(raw: Any, purpose: str) -> Tensor:
    """The tensor a built-in loss reads: the return value, its logits, or its first tensor."""
    if isinstance(raw, Tensor):
        return raw
    for name in ("logits", "last_hidden_state"):
        found = raw.get(name) if isinstance(raw, dict) else getattr(raw, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(raw, (tuple, list)) and raw and isinstance(raw[0], Tensor):
        return raw[0]
    raise ProblemError(
        f"{purpose} needs a tensor from the model (or .logits), got {type(raw).__name__}: "
        "pass a callable loss that picks what it needs."
    )


def _present(logits: HiddenLogits, leaves: list[Tensor]) -> list[int]:
    """Which of hidden, weight and bias are among ``leaves``, in that order."""
    return [i for i in range(3) if any(logits[i] is leaf for leaf in leaves)]


def differentiable_leaves(outputs: Any) -> tuple[list[Tensor], Rebuild]:
    """The tensors of an output tree that carry gradients, and the way back to the tree."""
    if isinstance(outputs, Tensor):
        return [outputs], lambda leaves: leaves[0]
    flat, spec = tree_flatten(outputs)
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def rebuild(leaves: list[Tensor]) -> Any:
        filled = list(flat)
        for place, leaf in zip(places, leaves, strict=True):
            filled[place] = leaf
        return tree_unflatten(filled, spec)

    return [flat[i] for i in places], rebuild


def output_curvature(
    loss: Loss, leaves: list[Tensor], rebuild: Rebuild, targets: Any
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Λ as a product on lists of output tensors: closed form if known, else double backward.

    Every tensor carries one leading axis of columns: (K, *outputs).
    """
    whole = rebuild(leaves)
    if isinstance(whole, HiddenLogits) and isinstance(loss, CrossEntropy):
        return factored_product(
            whole,
            leaves,
            lambda factors, directions: loss.chunked(whole, targets).product(
                factors, directions, outer=True, functional=False
            ),
        )
    if len(leaves) == 1:
        closed = loss.curvature(leaves[0].detach(), targets)
        if closed is not None:
            return lambda columns: [closed(columns[0])]
    fresh = [leaf.detach().requires_grad_(True) for leaf in leaves]
    with torch.enable_grad():
        value = loss.value(rebuild(fresh), targets)
        slopes = torch.autograd.grad(value, fresh, create_graph=True, materialize_grads=True)
    curved = [i for i, slope in enumerate(slopes) if slope.requires_grad]

    def product(columns: list[Tensor]) -> list[Tensor]:
        if not curved:
            return [torch.zeros_like(c) for c in columns]
        results = [
            torch.autograd.grad(
                [slopes[i] for i in curved],
                fresh,
                [columns[i][k] for i in curved],
                retain_graph=True,
                materialize_grads=True,
            )
            for k in range(columns[0].shape[0])
        ]
        return [torch.stack(parts) for parts in zip(*results, strict=True)]

    return product


def factored_product(
    logits: HiddenLogits, leaves: list[Tensor], one: Callable[[Any, Any], Any]
) -> Callable[[list[Tensor]], list[Tensor]]:
    """A product at the logits, as one on those of hidden, weight and bias that vary.

    one: ((hidden, weight, bias), directions) → the three results, all tokens in one axis.
    """
    present = _present(logits, leaves)
    hidden = logits.hidden.detach().reshape(-1, logits.hidden.shape[-1])
    bias = None if logits.bias is None else logits.bias.detach()
    factors = (hidden, logits.weight.detach(), bias)
    return chunked_product(
        logits, [i in present for i in range(3)], lambda directions: one(factors, directions)
    )


def as_loss(
    loss: str | Callable[[Any, Any], Tensor] | Loss,
    *,
    count: Callable[[Any], float] | None = None,
) -> Loss:
    """``"cross_entropy"``, ``"mse"``, a torch loss module or any callable, as a ``Loss``."""
    if count is not None:
        if isinstance(loss, (str, Loss)):
            raise ProblemError("count= belongs to a callable loss; built-in ones count themselves.")
        return CallableLoss(loss, count=count)
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        known: dict[str, Callable[[], Loss]] = {
            "cross_entropy": CrossEntropy,
            "mse": MeanSquaredError,
        }
        if loss not in known:
            raise ProblemError(
                f"unknown loss {loss!r}: use 'cross_entropy', 'mse' or a callable "
                "(outputs, targets) -> mean loss."
            )
        return known[loss]()
    if isinstance(loss, (nn.CrossEntropyLoss, nn.MSELoss)):
        if loss.reduction != "mean":
            raise ProblemError(
                f"{type(loss).__name__} must have reduction='mean', got {loss.reduction!r}."
            )
        if isinstance(loss, nn.MSELoss):
            return MeanSquaredError()
        return CrossEntropy(
            ignore_index=loss.ignore_index,
            label_smoothing=loss.label_smoothing,
            class_weights=loss.weight,
        )
    if callable(loss):
        return CallableLoss(loss)
    raise ProblemError(f"a loss is a name or a callable, got {type(loss).__name__}.")
