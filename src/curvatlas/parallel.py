"""Sums over the processes of a torch.distributed group; plain sums without one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    if distributed and _scattering is not None:
        return _scattered(fill, shape, make, dtype, device, _scattering)
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
            raise _stopped(int(buffer[-1]))
    if failure is not None:
        raise failure
    return total


def _stopped(failed: int) -> RuntimeError:
    return RuntimeError(
        f"{failed} of {world_size()} processes failed: their own error says why; "
        f"process {rank()} stops with them."
    )


# --- sharded vectors ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Shards:
    """Which entries of a vector of length ``size`` this process holds: start to stop."""

    size: int
    start: int
    stop: int
    largest: int  # entries of the longest shard; every shard is padded to it on the way

    @staticmethod
    def of(size: int) -> Shards:
        """Equal shards over the process group (the whole vector without one)."""
        largest = -(-size // world_size())
        start = min(rank() * largest, size)
        return Shards(size, start, min(start + largest, size), largest)

    @property
    def length(self) -> int:
        return self.stop - self.start

    def gathered(self, part: Tensor) -> Tensor:
        """The whole vector (size,) from every process's part (length,)."""
        if world_size() == 1:
            return part
        padded = part.new_zeros(self.largest)
        padded[: self.length] = part
        whole = part.new_empty(self.largest * world_size())
        _all_gather(whole, padded)
        return whole[: self.size]


_scattering: Shards | None = None  # products inside end in a reduce-scatter


def sharded_product(op: Any, part: Tensor, shards: Shards) -> Tensor:
    """op · v for a sharded v: gather v, multiply, and keep this process's part of the sum."""
    global _scattering
    whole = shards.gathered(part)
    before, _scattering = _scattering, shards
    try:
        product: Tensor = op @ whole
    finally:
        _scattering = before
    # An operator that is no sum over processes gives the whole product everywhere.
    if product.shape[0] == shards.size:
        return product[shards.start : shards.stop].clone()
    return product[: shards.length]


def _scattered(
    fill: Callable[[Tensor], None],
    shape: Sequence[int],
    make: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device,
    shards: Shards,
) -> Tensor:
    """``summed`` for one vector of which every process keeps its own part."""
    if math.prod(shape) != shards.size:
        raise ValueError("only single vectors are sharded: multiply the columns one by one.")
    buffer = make(shards.largest * world_size(), dtype=dtype, device=device)
    buffer[shards.size :] = 0
    failure: Exception | None = None
    try:
        fill(buffer[: shards.size].view(*shape))
    except Exception as error:
        failure = error
    failed = add_over_processes(torch.tensor([float(failure is not None)], device=device))
    if failure is not None:
        raise failure
    if float(failed) > 0:
        raise _stopped(int(failed))
    part = buffer
    if world_size() > 1:
        part = buffer.new_empty(shards.largest)
        _reduce_scatter(part, buffer)
    return part[: shards.length].view(*shape[:-1], shards.length)


def add_over_processes(values: Tensor) -> Tensor:
    """The sum over processes, in place."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def from_every_process(value: int) -> list[int]:
    """One number of every process, in the order of their ranks."""
    seen = torch.zeros(world_size(), dtype=torch.int64)
    seen[rank()] = value
    return [int(number) for number in add_over_processes(seen)]


def everywhere(condition: bool) -> bool:
    """Whether the condition holds in every process."""
    return all(from_every_process(int(condition)))


def largest_over_processes(value: int) -> int:
    return max(from_every_process(value))


def sums_over_processes(op: Any) -> bool:
    """Whether the operator's products are sums over the group, so that all have to join in them."""
    source = getattr(op, "parent", op)  # a role × role view multiplies through its operator
    problem = getattr(source, "problem", None)
    return world_size() > 1 and bool(getattr(problem, "distributed", False))


# Newer names where torch has them: the older ones warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
