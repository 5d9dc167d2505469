"""Sums over the processes of a torch.distributed group; plain sums without one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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


def summed(
    fill: Callable[[Tensor], None],
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    distributed: bool,
    zeroed: bool = True,
) -> Tensor:
    """The tensor of ``shape`` that ``fill`` adds to on every rank, summed over ranks.

    zeroed: with False, ``fill`` gets uninitialised memory and has to write every entry.

    One reduction carries the numbers and a failure flag, so that an error on one rank is raised on
    all of them instead of leaving the others waiting.
    """
    make = torch.zeros if zeroed else torch.empty
    buffer = make(math.prod(shape) + 1, dtype=dtype, device=device)
    buffer[-1] = 0
    total = buffer[:-1].view(*shape)
    failure: Exception | None = None
    try:
        fill(total)
    except Exception as error:
        if not distributed:
            raise
        failure = error
        buffer.zero_()
        buffer[-1] = 1
    if distributed and world_size() > 1:
        dist.all_reduce(buffer)
        if float(buffer[-1]) > 0 and failure is None:
            raise RuntimeError(
                f"{int(buffer[-1])} of {world_size()} processes failed: their own error says why; "
                f"process {rank()} stops with them."
            )
    if failure is not None:
        raise failure
    return total
