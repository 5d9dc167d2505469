"""Weight normalisation that can be differentiated twice.

PyTorch's fused ``torch._weight_norm`` has a wrong second derivative and says nothing (its error is
watched by a test). Inside ``exact_weight_norm`` the same w = g v / ‖v‖ is written out.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _WrittenOut(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._weight_norm:
            return _weight_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / ‖v‖, the norm over all axes but ``dim`` (-1: over all)."""
    axes = [axis for axis in range(v.ndim) if dim == -1 or axis != dim % v.ndim]
    return v * (g / v.square().sum(axes, keepdim=True).sqrt())


def exact_weight_norm(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """The scope in which the model's weight norms are written out; nothing where it has none."""
    return _WrittenOut() if any(map(_normalises, model.modules())) else contextlib.nullcontext()


def _normalises(module: nn.Module) -> bool:
    """As a parametrisation, or as the older hook."""
    hooks = module._forward_pre_hooks.values()
    return type(module).__name__ == "_WeightNorm" or any(
        type(hook).__name__ == "WeightNorm" for hook in hooks
    )
