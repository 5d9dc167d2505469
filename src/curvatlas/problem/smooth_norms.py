"""Normalisation layers that can be differentiated any number of times.

The backward of PyTorch's fused layer norm is right to second order and silently wrong beyond: the
third derivative of a small ViT along a random line came out 4 % (post-norm) and 16 % (pre-norm)
off, with no error. Within ``SmoothNorms`` the same formulas are written out, whose derivatives of
every order are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(axes, keepdim=True)
    result = centred / (centred.pow(2).mean(axes, keepdim=True) + eps).sqrt()
    return _affine(result, weight, bias)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    small = torch.finfo(input.dtype).eps if eps is None else eps
    result = input / (input.pow(2).mean(axes, keepdim=True) + small).sqrt()
    return _affine(result, weight, None)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    count, channels = input.shape[:2]
    grouped = input.reshape(count, num_groups, math.prod(input.shape[1:]) // num_groups)
    result = _layer_norm(grouped, grouped.shape[-1:], eps=eps).reshape(input.shape)
    shape = (1, channels, *[1] * (input.ndim - 2))
    weight = None if weight is None else weight.reshape(shape)
    return _affine(result, weight, None if bias is None else bias.reshape(shape))


def _affine(result: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


_WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
}
for _module in (F, torch):
    if hasattr(_module, "rms_norm"):  # torch ≥ 2.4
        _WRITTEN_OUT[_module.rms_norm] = _rms_norm


class SmoothNorms(TorchFunctionMode):
    """Inside, layer, RMS and group norms are computed operation by operation."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _WRITTEN_OUT.get(func, func)(*args, **(kwargs or {}))
