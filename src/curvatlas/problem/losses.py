"""What a loss is: the mean over valid targets, how many those are, the Hessian at the outputs.

Adding one: derive from ``Loss``, give ``value`` and ``count``; give ``curvature`` too where
Λ = ∂²ℓ/∂Z² has a closed form (otherwise it is found by double backward through ``value`` alone).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvatlas.errors import ProblemError

IGNORE_INDEX = -100

Uniform = Callable[[torch.Size], Tensor]  # shape → numbers in (0, 1), the same at every call
Rebuild = Callable[[list[Tensor]], Any]  # the differentiable tensors of an output → the output


class Loss:
    """A mean over valid targets of outputs Z; ``convex`` says that Λ is positive semidefinite.

    The objective of a Problem is Σ_b c_b ℓ_b / Σ_b c_b with c_b the ``count`` and ℓ_b the ``value``
    of batch b, or Σ_b c_b ℓ_b where the loss is ``summed``.
    """

    name = "loss"
    convex = False
    # Whether a batch may be split into samples: true for sums over independent targets.
    additive = False
    # Whether the objective is the sum over targets instead of their mean.
    summed = False
    # Whether targets can be drawn from the model's predictions (``sample_residual``).
    likelihood = False
    # Whether the value is linear in the outputs: then Λ and H_o are zero.
    linear = False

    @property
    def factored(self) -> bool:
        """Whether ``value`` and the curvature also take logits in factors (``HiddenLogits``)."""
        return False

    def outputs_of(self, raw: Any) -> Any:
        """What the loss reads from the model's return value."""
        return raw

    def class_axis(self, shape: torch.Size, targets: Any) -> int:
        """Where the classes lie in outputs of this shape: last, unless the loss says otherwise."""
        return -1

    def arranged(self, outputs: Any, targets: Any) -> Any:
        """The outputs with their axes in the order the other methods expect."""
        return outputs

    def tensors(self) -> list[Tensor]:
        """Tensors the value depends on beside outputs and targets, such as class weights."""
        return []

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
            "use loss='cross_entropy', 'mse' or 'bce_with_logits', or kind='empirical'."
        )


LossLike = str | Callable[[Any, Any], Tensor] | Loss  # what ``Problem`` takes


def main_tensor(raw: Any, purpose: str) -> Tensor:
    """The tensor a built-in loss reads: the return value, its logits, or its first tensor."""
    if isinstance(raw, Tensor):
        return raw
    for name in ("logits", "last_hidden_state"):
        value = raw.get(name) if isinstance(raw, dict) else getattr(raw, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(raw, (tuple, list)) and raw and isinstance(raw[0], Tensor):
        beside_loss = len(raw) > 1 and not raw[0].ndim and isinstance(raw[1], Tensor)
        return raw[1] if beside_loss and raw[1].ndim else raw[0]
    raise ProblemError(
        f"{purpose} needs a tensor from the model (or .logits), got {type(raw).__name__}: "
        "pass a callable loss that picks what it needs, or loss='model' for the model's own."
    )
