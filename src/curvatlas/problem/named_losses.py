"""From what a user gives, a name, a torch module or a function, to a ``Loss``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from curvatlas.errors import ProblemError
from curvatlas.problem.cross_entropy import CrossEntropy
from curvatlas.problem.losses import IGNORE_INDEX, Loss
from curvatlas.problem.mean_squared_error import MeanSquaredError


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
