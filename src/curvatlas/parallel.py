"""Sums over the processes of a torch.distributed group, which have to bring the same to them.

Every process adds its part of a product, and the sum is a product only if all of them multiply the
same vector at the same weights. So each reduction carries one small row of every process beside the
numbers: whether it failed, a digest of what its part rests on, a sketch of the vector, how many
numbers it brings. A process that fails or differs stops all of them with a message, instead of a
wrong number or a wait.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from curvatlas.errors import PeerError, ProblemError, is_wrong_input

T = TypeVar("T")

# Of a process's row: failure, two halves of the digest, sketch and norm of the vector, and how many
# numbers are summed, in units of 2**24 and the rest.
_FIELDS = 7
_ALIGNED = 16  # numbers: what follows the rows starts where a vector unit likes to read
_HALF = 2**24  # float32 counts whole numbers up to here
# Sketches of one vector differ by rounding, those of two vectors by about their norm.
_SAME_VECTOR = 1e-4
_SKETCHED = 4096  # numbers that are weighted and summed at a time


def world_size() -> int:
    """Number of processes, 1 when no process group is initialised."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def rank() -> int:
    """This process's number, 0 when no process group is initialised."""
    return dist.get_rank() if world_size() > 1 else 0


# --- collectives, on a device that the group can reach ------------------------------------------


def carrier(device: torch.device | None = None) -> torch.device:
    """Where a tensor of ``device`` has to lie for the group to send it.

    NCCL sends what is on CUDA only, gloo what is in main memory (its way through CUDA knows few
    operations); None: any device that the group can reach.
    """
    backends = dict(pair.split(":") for pair in str(dist.get_backend_config()).split(","))
    if device is not None and backends.get(device.type, "gloo") != "gloo":
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    reached = next(iter(backends))
    return torch.device(reached, torch.get_device_module(reached).current_device())


def add_over_processes(values: Tensor, group: Any = None) -> Tensor:
    """The sum over processes, or those of a group, in place."""
    if world_size() > 1:
        sent = values.to(carrier(values.device))
        dist.all_reduce(sent, group=group)
        if sent is not values:
            values.copy_(sent)
    return values


def from_every_process(value: int) -> list[int]:
    """One number of every process, in the order of their ranks."""
    return [numbers[0] for numbers in shared(lambda: [value], 1)]


def everywhere(condition: bool) -> bool:
    """Whether the condition holds in every process."""
    return all(from_every_process(int(condition)))


def largest_over_processes(value: int) -> int:
    return max(from_every_process(value))


def smallest_over_processes(value: int) -> int:
    return min(from_every_process(value))


def shared(work: Callable[[], Sequence[int]], length: int) -> list[list[int]]:
    """The ``length`` whole numbers that ``work`` gives in every process, by rank.

    Where it fails in one process, all of them stop: that one with its error, the others saying so.
    """
    if world_size() == 1:
        return [list(work())]
    numbers, failure = [0] * length, None
    try:
        numbers = list(work())
    except Exception as error:
        failure = error
    table = torch.zeros(world_size(), length + 1, dtype=torch.int64)
    table[rank()] = torch.tensor([_kind(failure), *numbers])
    rows = add_over_processes(table).tolist()
    if failure is not None:
        raise failure
    _stop_with_others([row[0] for row in rows])
    return [row[1:] for row in rows]


def together(work: Callable[[], T]) -> T:
    """What ``work`` gives here, once it has succeeded in every process."""
    results: list[T] = []

    def keep() -> list[int]:
        results.append(work())
        return []

    shared(keep, 0)
    return results[0]


def texts(text: str) -> list[str]:
    """One text of every process, in the order of their ranks."""
    return [content.decode() for content in contents(text.encode())]


def contents(content: bytes) -> list[bytes]:
    """The bytes of every process, in the order of their ranks."""
    lengths = from_every_process(len(content))
    letters = torch.zeros(world_size(), max(lengths), dtype=torch.uint8)
    letters[rank(), : len(content)] = torch.tensor(list(content), dtype=torch.uint8)
    add_over_processes(letters)
    return [bytes(row[:length].tolist()) for row, length in zip(letters, lengths, strict=True)]


def from_first(content: bytes) -> bytes:
    """The first process's bytes, in every process."""
    if world_size() == 1:
        return content
    length = from_every_process(len(content))[0]
    sent = torch.zeros(length, dtype=torch.uint8)
    if rank() == 0:
        sent.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return bytes(add_over_processes(sent).numpy())


def _kind(failure: Exception | None) -> int:
    return 0 if failure is None else 2 if is_wrong_input(failure) else 1


def _stop_with_others(kinds: Sequence[float]) -> None:
    failed = sum(kind > 0 for kind in kinds)
    if failed:
        raise PeerError(
            f"{failed} of {world_size()} processes failed: their own error says why; "
            f"process {rank()} stops with them.",
            wrong_input=max(kinds) > 1,
        )


# --- what has to agree --------------------------------------------------------------------------


def halves(digest: bytes) -> tuple[int, int]:
    """A digest as two signed numbers of 64 bits."""
    return tuple(int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8))  # type: ignore[return-value]


def differing(own: Mapping[str, str]) -> dict[str, list[str | None]]:
    """What every rank says under each name, where they do not all say the same."""
    said = [json.loads(text) for text in texts(json.dumps(dict(own)))]
    names = dict.fromkeys(name for facts in said for name in facts)
    values = {name: [facts.get(name) for facts in said] for name in names}
    return {name: told for name, told in values.items() if any(v != told[0] for v in told)}


def others_than_first(values: Sequence[object]) -> list[int]:
    """The ranks whose value is not rank 0's."""
    return [rank for rank, value in enumerate(values) if value != values[0]]


def named(ranks: Sequence[int], one: str, several: str) -> str:
    """``rank 1 has`` or ``ranks 1, 3 have``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    return f"ranks {', '.join(map(str, ranks))} {several}"


@dataclass(frozen=True)
class Mark:
    """What a process's part of a sum rests on."""

    content: bytes = b""  # digest of weights, loss and data: the same everywhere
    sketch: Tensor | None = None  # (2,) of the vector that is multiplied: the same up to rounding


def sketch(pieces: Iterable[Tensor]) -> Tensor:
    """(Σ_j a_j x_j, ‖x‖) with fixed random a, of the sum x of K columns in pieces (K, *shape)."""
    weighted, squares = [], []
    for place, piece in enumerate(pieces):
        x = (piece[0] if piece.shape[0] == 1 else piece.sum(0)).reshape(-1)
        squares.append(torch.linalg.vector_norm(x).square())
        weights = _sketch_weights(x.dtype, x.device)
        while len(x) > _SKETCHED:
            full = len(x) // _SKETCHED * _SKETCHED
            rest = x[full:] @ weights[: len(x) - full]
            x = torch.cat([x[:full].view(-1, _SKETCHED) @ weights, rest.reshape(1)])
        # a piece weighs differently at another place
        weighted.append(x @ weights[: len(x)] * weights[place % _SKETCHED])
    return torch.stack([torch.stack(weighted).sum(), torch.stack(squares).sum().sqrt()])


@functools.lru_cache(maxsize=4)
def _sketch_weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    drawn = torch.randn(_SKETCHED, generator=torch.Generator().manual_seed(20250730), device="cpu")
    return drawn.to(dtype=dtype, device=device)


def _row(mark: Mark | None, size: int, like: Tensor) -> Tensor:
    """The fields of a process that has not failed."""
    row = like.new_zeros(_FIELDS)
    row[5], row[6] = size // _HALF, size % _HALF
    if mark is not None:
        number = int.from_bytes(mark.content[:6], "little")
        row[1], row[2] = number % _HALF, number // _HALF
        if mark.sketch is not None:
            row[3:5] = mark.sketch
    return row


def _check_rows(
    rows: Tensor, column: int, failure: Exception | None, differ: Callable[[], None] | None
) -> None:
    """Stop where a process failed, rests on something else, or multiplies other vectors.

    column: how many numbers of the sum belong to one column.
    """
    table = rows.tolist()
    if failure is not None:
        raise failure
    _stop_with_others([row[0] for row in table])
    if any(row[1:3] != table[0][1:3] for row in table):
        if differ is not None:
            differ()
        raise ProblemError("the processes have other weights or data: make them the same.")
    columns = [int(row[5] * _HALF + row[6]) // max(column, 1) for row in table]
    others = others_than_first(columns)
    if others:
        raise ProblemError(
            f"{named(others, 'multiplies', 'multiply')} {columns[others[0]]} columns and rank 0 "
            f"{columns[0]}: every rank has to multiply the same vectors."
        )
    room = _SAME_VECTOR * max(row[4] for row in table)
    others = [r for r, row in enumerate(table) if abs(row[3] - table[0][3]) > room]
    if others:
        raise ProblemError(
            f"{named(others, 'multiplies', 'multiply')} another vector than rank 0: every rank has "
            "to multiply the same one; seed all of them alike, or broadcast rank 0's."
        )


def agree(
    mark: Mark | None, columns: int, like: Tensor, differ: Callable[[], None] | None = None
) -> None:
    """Stop on every rank unless all bring as many columns and rest on the same (``Mark``)."""
    if world_size() > 1:
        rows = like.new_zeros(world_size(), _FIELDS)
        rows[rank()] = _row(mark, columns, rows)
        _check_rows(add_over_processes(rows), 1, None, differ)


# --- sums ---------------------------------------------------------------------------------------


@torch.inference_mode(False)  # what is made in it could not be added to
def summed(
    fill: Callable[[Tensor], Mark | None],
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    distributed: bool,
    make: Callable[..., Tensor] = torch.zeros,
    differ: Callable[[], None] | None = None,
    shards: Shards | None = None,
) -> Tensor:
    """The tensor of ``shape`` that ``fill`` adds to on every rank, summed over ranks.

    fill: may return what its part rests on, to be compared over ranks.
    make: gives memory by shape, dtype and device; where it is uninitialised ``fill`` has to write
        every entry.
    differ: called on every rank where the marks differ, to say what it is.
    shards: of a single vector, give every rank its own entries of the sum only.

    One reduction carries the numbers and every rank's row, so that an error on one rank is raised
    on all of them instead of leaving the others waiting. Of several columns it carries the first,
    and another one the rest: a reduction of another length on each rank aborts inside the group,
    the first is as long on all of them, and its rows say how much each rank has left.
    """
    if not distributed or world_size() == 1:
        total = make(tuple(shape), dtype=dtype, device=device)
        fill(total)
        return total
    if shards is not None:
        return _scattered(fill, shape, make, dtype, device, shards, differ)
    size, column = math.prod(shape), math.prod(shape[:-2]) * shape[-1]
    head = -(-world_size() * _FIELDS // _ALIGNED) * _ALIGNED
    # at least one column, which a rank without any brings as zeros
    buffer = make((head + max(size, column),), dtype=dtype, device=device)
    buffer[:head] = 0
    rows = buffer[: world_size() * _FIELDS].view(world_size(), _FIELDS)
    total = buffer[head : head + size].view(*shape)
    failure: Exception | None = None
    try:
        if not size:
            buffer.zero_()
        rows[rank()] = _row(fill(total), size, rows)
    except Exception as error:
        failure = error
        buffer.zero_()
        rows[rank(), 0] = _kind(failure)
    add_over_processes(buffer[: head + column])
    _check_rows(rows, column, failure, differ)
    if size > column:
        add_over_processes(buffer[head + column :])
    return total


# --- sharded vectors ----------------------------------------------------------------------------


Range = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Shards:
    """Which entries of a vector of length ``size`` every process of a group holds.

    ``ranges``: by process, in the order of the vector. Contiguous pieces of equal length
    (``Shards.of``), or the rows of every parameter that FSDP2 gives to a process.
    """

    size: int
    index: int  # of this process among ``ranges``
    ranges: tuple[tuple[Range, ...], ...]
    group: Any = None  # None: all processes
    writes: bool = True  # False: another process holds the same entries and writes them

    @staticmethod
    def of(size: int) -> Shards:
        """Equal shards over the process group (the whole vector without one)."""
        largest = -(-size // world_size())
        starts = [min(r * largest, size) for r in range(world_size())]
        ranges = tuple(((start, min(start + largest, size)),) for start in starts)
        return Shards(size, rank(), ranges)

    @property
    def own(self) -> tuple[Range, ...]:
        """This process's entries."""
        return self.ranges[self.index]

    @functools.cached_property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.own)

    @functools.cached_property
    def largest(self) -> int:
        """Entries of the longest shard; every shard is padded to it on the way."""
        return max(sum(stop - start for start, stop in own) for own in self.ranges)

    @property
    def start(self) -> int:
        return self.own[0][0]

    @property
    def stop(self) -> int:
        return self.own[-1][1]

    def take(self, vector: Tensor) -> Tensor:
        """This process's entries of a whole vector (size,) or of columns (size, K)."""
        if len(self.own) == 1:
            return vector[self.start : self.stop]
        return torch.cat([vector[start:stop] for start, stop in self.own])

    def summed(self, values: Tensor) -> Tensor:
        """The sum over the processes that share a vector, in place."""
        return add_over_processes(values, self.group)

    def gathered(self, part: Tensor) -> Tensor:
        """The whole vector (size,) from every process's part (length,)."""
        if len(self.ranges) == 1:
            return part
        padded = part.new_zeros(self.largest, device=carrier(part.device))
        padded[: self.length] = part
        received = padded.new_empty(len(self.ranges), self.largest)
        _all_gather(received.view(-1), padded, group=self.group)
        whole = received.new_empty(self.size)
        for row, own in zip(received, self.ranges, strict=True):
            at = 0
            for start, stop in own:
                whole[start:stop] = row[at : at + stop - start]
                at += stop - start
        return whole.to(part.device)


def _scattered(
    fill: Callable[[Tensor], Mark | None],
    shape: Sequence[int],
    make: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device,
    shards: Shards,
    differ: Callable[[], None] | None,
) -> Tensor:
    """``summed`` for one vector of which every process keeps its own part."""
    if math.prod(shape) != shards.size:
        raise ValueError("only single vectors are sharded: multiply the columns one by one.")
    buffer = make((shards.largest * world_size(),), dtype=dtype, device=device)
    buffer[shards.size :] = 0
    rows = buffer.new_zeros(world_size(), _FIELDS)
    failure: Exception | None = None
    try:
        rows[rank()] = _row(fill(buffer[: shards.size].view(*shape)), shards.size, rows)
    except Exception as error:
        failure = error
        rows[rank(), 0] = _kind(failure)
    _check_rows(add_over_processes(rows), shards.size, failure, differ)
    sent = buffer.to(carrier(device))
    part = sent.new_empty(shards.largest)
    _reduce_scatter(part, sent)
    return part.to(device)[: shards.length].view(*shape[:-1], shards.length)


def sums_over_processes(op: Any) -> bool:
    """Whether the operator's products are sums over the group, so that all have to join in them."""
    return world_size() > 1 and _joins(op)


def _joins(op: Any) -> bool:
    """Whether an operator of a distributed Problem is part of it: views, sums, products, …"""
    held = getattr(op, "__dict__", {})
    if bool(getattr(held.get("problem"), "distributed", False)):
        return True
    parts = [p for value in held.values() for p in (value if type(value) is tuple else (value,))]
    return any(_joins(part) for part in parts if hasattr(part, "_columns"))


# Newer names where torch has them: the older ones warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- collectives that run while the processes compute ---------------------------------------------


def exchanges(group: Any) -> bool:
    """Whether two processes of the group send straight from and into memory of ours.

    gloo's own gathering fills memory of its own and copies, its sums go through every process; it
    sends from one process to another without either.
    """
    return dist.get_backend(group) == "gloo"


def begin_all_gather(received: Tensor, sent: Tensor, group: Any) -> Any:
    """Begin to bring every process's ``sent`` to ``received`` (processes, …); wait for it."""
    return _all_gather(received.view(-1), sent.view(-1), group=group, async_op=True)


def begin_exchange(
    sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], group: Any
) -> list[Any]:
    """Begin to send tensors to processes of a group, and to receive some; wait for all of it.

    (process's number in the group, tensor), contiguous. Two processes name what goes from one to
    the other in the same order.
    """
    arriving = [
        dist.irecv(tensor, dist.get_global_rank(group, index), group=group)
        for index, tensor in received
        if tensor.numel()
    ]
    leaving = [
        dist.isend(tensor, dist.get_global_rank(group, index), group=group)
        for index, tensor in sent
        if tensor.numel()
    ]
    return [*arriving, *leaving]


def begin_reduce_scatter(sent: Tensor, group: Any) -> tuple[Tensor, Any]:
    """Begin to bring Σ over processes of sent[r] to process r: (terms to be added, a wait).

    gloo sums the whole of ``sent`` in every process; it exchanges the parts alone as fast as it
    gathers, and they are added here.
    """
    if dist.get_backend(group) == "gloo":
        terms = torch.empty_like(sent)
        return terms, dist.all_to_all_single(terms, sent, group=group, async_op=True)
    total = sent.new_empty(1, *sent.shape[1:])
    return total, _reduce_scatter(total.view(-1), sent.view(-1), group=group, async_op=True)
