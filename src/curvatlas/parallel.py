"""Sums over the processes of a torch.distributed group; the identity without one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes, 1 when no process group is initialised."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def rank() -> int:
    """This process's number, 0 when no process group is initialised."""
    return dist.get_rank() if world_size() > 1 else 0


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of every process's tensor, the same on each; one reduction."""
    if world_size() > 1:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
    return tensor


def sum_number_over_ranks(number: float, device: torch.device) -> float:
    """The sum of a number over processes."""
    if world_size() == 1:
        return number
    return float(sum_over_ranks(torch.tensor(number, dtype=torch.float64, device=device)))
