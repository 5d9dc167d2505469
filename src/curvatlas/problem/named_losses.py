"""Losses by name, torch module or function; those that are sums over single numbers."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from curvatlas.errors import ProblemError
from curvatlas.problem.batches import described
from curvatlas.problem.cross_entropy import CrossEntropy, NegativeLogLikelihood, Reduction
from curvatlas.problem.evaluation import WITHOUT_GRAPH
from curvatlas.problem.losses import IGNORE_INDEX, Loss, Uniform, main_tensor


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


class CallableLoss(Loss):
    """Any ``(outputs, targets) -> mean loss`` (or sum); a batch is one unit and is never split."""

    def __init__(
        self,
        function: Callable[[Any, Any], Tensor],
        *,
        count: Callable[[Any], float] | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self._count = count
        self.summed = reduction == "sum"

    @property
    def counts_itself(self) -> bool:
        """Whether the user has said how targets are counted."""
        return self._count is not None

    def value(self, outputs: Any, targets: Any) -> Tensor:
        try:
            result: Any = self.function(outputs, targets)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ProblemError(
                f"the loss {self.name!r} fails on outputs {described(outputs)} and targets "
                f"{described(targets)}: {type(error).__name__}: {error}."
            ) from error
        except RuntimeError as error:
            if WITHOUT_GRAPH not in str(error):
                raise
            raise ProblemError(
                f"the loss {self.name!r} takes a gradient itself: let the model's forward pass do "
                "that and return the loss (loss='model')."
            ) from error
        if not isinstance(result, Tensor) or result.numel() != 1:
            got = f"a {type(result).__name__}"
            if isinstance(result, Tensor):
                got = f"{tuple(result.shape)}: take its mean"
            elif isinstance(result, Mapping):
                got = f"a mapping of {', '.join(map(str, result))}: return the loss in it"
            raise ProblemError(
                f"the loss {self.name!r} must return a scalar tensor (a mean), got {got}."
            )
        scalar = result.reshape(())
        return scalar / self.count(targets) if self.summed else scalar

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

    def check_weights(self, outputs: Any, targets: Any) -> None:
        """Hold the loss of one batch to the losses of its parts, weighted by their counts.

        Several batches are weighted by ``count``: a sum, or a mean over other units, would give
        another objective than that of all data in one batch.
        """
        if self._count is not None or self.summed or not _samples_match(outputs, targets):
            return
        with torch.no_grad():
            parts = [
                (outputs[some], tree_map(lambda t, some=some: t[some], targets))
                for some in (slice(0, 1), slice(1, None))
            ]
            total = float(self.value(outputs, targets))
            values = [float(self.value(z, y)) for z, y in parts]
        counts = [self.count(y) for _, y in parts]
        if not min(counts) > 0 or not all(map(math.isfinite, [total, *values])):
            return
        mean = (counts[0] * values[0] + counts[1] * values[1]) / sum(counts)
        room = torch.finfo(outputs.dtype).eps ** 0.5 * max(map(abs, [total, *values]))
        if abs(total - mean) <= room:
            return
        if abs(total - sum(values)) <= room:
            raise ProblemError(
                f"the loss {self.name!r} is a sum over the samples, and several batches are "
                "weighted as means: return the mean, or pass reduction='sum'."
            )
        warnings.warn(
            f"the loss {self.name!r} of a batch is {total:.6g} and the mean of its samples, "
            f"weighted by their targets, {mean:.6g}: several batches are weighted by their "
            "targets all the same; pass count=function_of_targets if other weights are meant.",
            stacklevel=4,
        )

    def tensors(self) -> list[Tensor]:
        """Those of a loss that is a module."""
        if not isinstance(self.function, nn.Module):
            return []
        return [*self.function.parameters(), *self.function.buffers()]


def _samples_match(outputs: Any, targets: Any) -> bool:
    """Whether all are tensors with the same two or more samples along the first axis."""
    tensors = [outputs, *tree_leaves(targets)]
    if not all(isinstance(t, Tensor) and t.ndim for t in tensors):
        return False
    return len({len(t) for t in tensors}) == 1 and len(outputs) > 1


@dataclass(frozen=True)
class _Kind:
    """What the mean of a torch loss is over, and what is known of its shape."""

    unit: Literal["entries", "vectors", "samples"]
    same_shape: bool = True  # targets have the outputs' shape
    linear: bool = False


_TORCH_LOSSES: dict[type[nn.Module], _Kind] = {
    nn.L1Loss: _Kind("entries"),
    nn.SmoothL1Loss: _Kind("entries"),
    nn.HuberLoss: _Kind("entries"),
    nn.PoissonNLLLoss: _Kind("entries"),
    nn.KLDivLoss: _Kind("entries", linear=True),
    nn.BCELoss: _Kind("entries"),
    nn.SoftMarginLoss: _Kind("entries"),
    nn.HingeEmbeddingLoss: _Kind("entries"),
    nn.MultiLabelSoftMarginLoss: _Kind("vectors"),
    nn.MultiLabelMarginLoss: _Kind("samples"),
    nn.MultiMarginLoss: _Kind("samples", same_shape=False),
}
# Losses of more than two arguments, or with weights of their own.
_OTHER_ARGUMENTS: tuple[type[nn.Module], ...] = (
    nn.CTCLoss,
    nn.GaussianNLLLoss,
    nn.MarginRankingLoss,
    nn.CosineEmbeddingLoss,
    nn.TripletMarginLoss,
    nn.TripletMarginWithDistanceLoss,
    nn.AdaptiveLogSoftmaxWithLoss,
)
# Functions that take the same options as a module.
_MODULE_OF: dict[Callable[..., Any], Callable[..., nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.kl_div: nn.KLDivLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
    F.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
    F.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
}


class TorchLoss(Loss):
    """A loss module of torch whose mean or sum runs over known units; Λ by double backward.

    All of them are sums over samples and convex in the outputs.
    """

    additive = True
    convex = True

    def __init__(self, module: nn.Module, kind: _Kind) -> None:
        self._module, self._kind = module, kind
        self._unit = "samples" if module.reduction == "batchmean" else kind.unit
        self.name = type(module).__name__
        self.summed = module.reduction == "sum"
        self.linear = kind.linear

    def tensors(self) -> list[Tensor]:
        return list(self._module.buffers())

    def outputs_of(self, raw: Any) -> Tensor:
        return main_tensor(raw, self.name)

    def check(self, outputs: Tensor, targets: Any) -> None:
        if not isinstance(targets, Tensor):
            raise ProblemError(
                f"{self.name} takes a tensor of targets, got {type(targets).__name__}."
            )
        expected = outputs.shape if self._kind.same_shape else outputs.shape[:-1]
        if targets.shape != expected:
            raise ProblemError(
                f"{self.name} takes targets of shape {tuple(expected)} with outputs "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}."
            )
        for weight in self.tensors():
            refuse_weight_per_sample(weight, outputs, self.name)

    def count(self, targets: Any) -> float:
        """The units of a mean; samples, of which a sum has as many as it likes."""
        if not isinstance(targets, Tensor) or not targets.ndim:
            return 1.0
        if self.summed or self._unit == "samples":
            return float(targets.shape[0])
        return float(targets.numel() // (targets.shape[-1] if self._unit == "vectors" else 1))

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        fitting = targets.to(outputs.dtype) if targets.is_floating_point() else targets
        result: Tensor = self._module.to(outputs.device)(outputs, fitting)
        return result / self.count(targets) if self.summed else result


def as_loss(
    loss: str | Callable[[Any, Any], Tensor] | Loss,
    *,
    count: Callable[[Any], float] | None = None,
    reduction: Reduction | None = None,
) -> Loss:
    """A name, a torch loss (module, function or ``functools.partial``) or any callable."""
    if isinstance(loss, (str, Loss)):
        refuse_options(count=count, reduction=reduction)
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        return _by_name(loss)
    if not callable(loss):
        raise ProblemError(f"a loss is a name or a callable, got {type(loss).__name__}.")
    if count is None and reduction is None:
        module = loss if isinstance(loss, nn.Module) else _as_module(loss)
        torch_loss = None if module is None else _from_module(module)
        if torch_loss is not None:
            return torch_loss
    return CallableLoss(loss, count=count, reduction=reduction or "mean")


def refuse_options(**options: object) -> None:
    """Options of a callable loss, given with another one."""
    for name, value in options.items():
        if value is not None:
            raise ProblemError(
                f"{name}= belongs to a callable loss; built-in ones count themselves."
            )


def _by_name(name: str) -> Loss:
    by_name: dict[str, Callable[[], Loss]] = {
        "cross_entropy": CrossEntropy,
        "mse": MeanSquaredError,
        "bce_with_logits": BinaryCrossEntropy,
    }
    if name not in by_name:
        raise ProblemError(
            f"unknown loss {name!r}: use 'cross_entropy', 'mse', 'bce_with_logits', 'model' (the "
            "model's own) or a callable (outputs, targets) -> mean loss."
        )
    return by_name[name]()


def _as_module(function: Callable[..., Any]) -> nn.Module | None:
    """The module that computes what a function of ``torch.nn.functional`` does."""
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        options = {**function.keywords, **options}
        function = function.func
    make = _MODULE_OF.get(function)
    if make is None:
        return None
    try:
        return make(**options)
    except TypeError as error:
        raise ProblemError(f"{getattr(function, '__name__', function)}: {error}.") from error


def _from_module(module: nn.Module) -> Loss | None:
    """A loss of torch by what it computes; None for other modules."""
    kind = type(module)
    if kind in _OTHER_ARGUMENTS:
        raise ProblemError(
            f"{kind.__name__} takes more than (outputs, targets): pass a callable "
            "(outputs, targets) -> mean loss that hands it its arguments."
        )
    reduction: Any = getattr(module, "reduction", "mean")
    torch_own = kind in _TORCH_LOSSES or kind in _CLOSED
    allowed = ("mean", "sum", "batchmean") if kind is nn.KLDivLoss else ("mean", "sum")
    if torch_own and reduction not in allowed:
        raise ProblemError(
            f"{kind.__name__} must have a reduction of {' or '.join(map(repr, allowed))}, "
            f"got {reduction!r}."
        )
    if kind in _CLOSED:
        return _CLOSED[kind](module)
    if torch_own:
        return TorchLoss(module, _TORCH_LOSSES[kind])
    if reduction != "mean" and isinstance(reduction, str):
        raise ProblemError(
            f"{kind.__name__} has reduction={reduction!r} and a callable loss must return a mean: "
            "pass reduction='sum' to the Problem if it is a sum over the targets."
        )
    return None


_CLOSED: dict[type[nn.Module], Callable[[Any], Loss]] = {
    nn.MSELoss: lambda m: MeanSquaredError(reduction=m.reduction),
    nn.BCEWithLogitsLoss: lambda m: BinaryCrossEntropy(
        weight=m.weight, pos_weight=m.pos_weight, reduction=m.reduction
    ),
    nn.CrossEntropyLoss: lambda m: CrossEntropy(
        ignore_index=m.ignore_index,
        label_smoothing=m.label_smoothing,
        class_weights=m.weight,
        classes_first=True,
        reduction=m.reduction,
    ),
    nn.NLLLoss: lambda m: NegativeLogLikelihood(
        ignore_index=m.ignore_index,
        class_weights=m.weight,
        classes_first=True,
        reduction=m.reduction,
    ),
}
