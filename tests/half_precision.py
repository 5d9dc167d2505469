"""Arithmetic in half precision: what notices it, and what the tests themselves may compute with.

Some virtual machines list instructions for it that they do not allow: oneDNN believes the list, and
the process dies of the first matrix product.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HALF = (torch.bfloat16, torch.float16)
# What draws, stores, moves or looks at numbers: no machine has a kernel of its own for it.
_STORES = (
    "_to_copy", "copy_", "clone", "empty", "zeros", "ones", "full", "fill_", "zero_", "lift_fresh",
    "isfinite", "eq", "ne", "equal", "abs", "all", "any", "_local_scalar_dense", "cat", "stack",
    "view_dtype", "index", "nan_to_num", "randn", "normal_", "uniform_",
)  # fmt: skip


class NoHalfPrecision(TorchDispatchMode):
    """Inside, the first operation that computes with numbers in half precision fails."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        half = any(
            isinstance(leaf, Tensor) and leaf.dtype in HALF
            for leaf in tree_leaves((args, kwargs, result))
        )
        if half and not func.is_view and not name.startswith(_STORES):
            raise AssertionError(f"{name} was computed in half precision.")
        return result


def plain_half_precision() -> contextlib.AbstractContextManager[Any]:
    """Inside, half precision is computed by PyTorch's own loops, which run on every machine."""
    return torch.backends.mkldnn.flags(enabled=False)
