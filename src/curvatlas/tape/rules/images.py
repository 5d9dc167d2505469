"""Pooling, padding, resizing: linear operations that a column joins as one more sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.record import aten
from curvatlas.tape.rules.base import Call, Change, linear


def _options(call: Call) -> tuple[Any, ...]:
    return call.args[1:]


def joins_samples(
    *operations: Any, axes: int | None, options: Callable[[Call], tuple[Any, ...]] = _options
) -> None:
    """Declare linear operations on the last axes of x, all of them where ``axes`` is None.

    The transpose is autograd's at zero: it does not depend on x.
    """

    def sizes(x: Tensor) -> tuple[int, Sequence[int]]:
        """How many samples, and the size of one."""
        samples = 0 if axes is None else x.ndim - axes
        return math.prod(x.shape[:samples]), x.shape[samples:]

    def push(call: Call) -> Change:
        operation, rest, (samples, size) = call.node.operation, options(call), sizes(call.x[0])

        def pushed(t: Tensor) -> Tensor:
            y: Tensor = operation(t.reshape(len(t) * samples, *size), *rest)
            return y.reshape(len(t), *call.y.shape)

        return pushed

    def pull(call: Call) -> Change:
        operation, rest, (samples, size) = call.node.operation, options(call), sizes(call.x[0])
        shape = call.x[0].shape

        def pulled(t: Tensor) -> Tensor:
            with torch.enable_grad():
                x = t.new_zeros(len(t) * samples, *size).requires_grad_(True)
                y = operation(x, *rest)
                (part,) = torch.autograd.grad(y, x, t.reshape(y.shape))
            return part.reshape(len(t), *shape)

        return pulled

    linear(*operations, push=push, pull=pull)


joins_samples(
    aten.avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.upsample_nearest2d.default,
    aten._upsample_nearest_exact2d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bicubic2d.default,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bicubic2d_aa.default,
    aten.reflection_pad2d.default,
    aten.replication_pad2d.default,
    aten.im2col.default,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.channel_shuffle.default,
    axes=3,
)
joins_samples(aten.col2im.default, axes=2)
joins_samples(
    aten.upsample_nearest1d.default,
    aten._upsample_nearest_exact1d.default,
    aten.upsample_linear1d.default,
    aten.reflection_pad1d.default,
    aten.replication_pad1d.default,
    axes=2,
)
joins_samples(
    aten.avg_pool3d.default,
    aten._adaptive_avg_pool3d.default,
    aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact3d.default,
    aten.upsample_trilinear3d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad3d.default,
    axes=4,
)
# What is filled in is constant: its linear map fills in zeros.
joins_samples(aten.constant_pad_nd.default, axes=None, options=lambda call: call.args[1:2])
