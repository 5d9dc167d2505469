"""What is computed in; and where float64 is, on the device or, where it has none, in main memory.

Sums of many squares and small decompositions are computed in float64 whatever the model computes
in. Apple's GPU ("mps") has no float64 at all: there the few numbers concerned go to main memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Second derivatives are lost in the rounding of half precision, and some processors die of it.
COMPUTED = (torch.float32, torch.float64)
WITHOUT_FLOAT64 = frozenset({"mps"})  # types of device


def has_float64(device: torch.device) -> bool:
    """Whether a float64 tensor can lie on the device."""
    return device.type not in WITHOUT_FLOAT64


def float64_device(device: torch.device) -> torch.device:
    """The device itself, or main memory where it has no float64."""
    return device if has_float64(device) else torch.device("cpu")


def in_float64(tensor: Tensor) -> Tensor:
    """The same numbers in float64, on ``float64_device`` of where they are."""
    # Moved first: converted first, a tensor of a device without float64 would be refused.
    return tensor.to(device=float64_device(tensor.device)).to(dtype=torch.float64)


def sum_in_float64(tensor: Tensor) -> Tensor:
    """The sum of all entries, a scalar in float64, without a copy where the device has float64."""
    if has_float64(tensor.device):
        return tensor.sum(dtype=torch.float64)
    return in_float64(tensor).sum()
