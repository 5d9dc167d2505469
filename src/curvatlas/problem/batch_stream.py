"""From a user's data to checked batches: labels shifted, targets counted, this process's share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from curvatlas import parallel
from curvatlas.problem.batches import HOLD_BYTES, Batch, checked, shapes, size_in_bytes
from curvatlas.problem.fingerprint import content
from curvatlas.problem.objective import Objective
from curvatlas.problem.sample_axis import SampleAxes


@dataclass(frozen=True)
class FirstPass:
    """What one look at all data tells."""

    held: list[Batch] | None  # None: too large to hold
    total: float  # valid targets
    seen: int  # batches
    kinds: frozenset[tuple[torch.Size, ...]]  # shapes of their tensors


@dataclass
class LastPass:
    """The batches that a complete pass over shared data has seen, in order, and their samples."""

    digest: bytes = b""


@dataclass(frozen=True)
class BatchStream:
    """The batches of ``data``, made anew at every pass."""

    data: Iterable[Any]
    objective: Objective
    device: torch.device
    sharded: bool  # every process sees the same data and takes its own share
    finder: SampleAxes  # of the samples in a batch
    last_pass: LastPass = field(default_factory=LastPass)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches(self.data)

    def batches(self, raws: Iterable[Any]) -> Iterator[Batch]:
        """Raw batches, from the first one on, as checked ones."""
        loss = self.objective.loss
        dealt = 0  # samples so far
        compared = self.sharded and parallel.world_size() > 1
        seen = hashlib.blake2b(digest_size=16)
        for index, raw in enumerate(raws):
            if compared:
                seen.update(content(raw))
            if self.sharded and not loss.additive and not _is_mine(index):
                continue
            inputs, labels = self.objective.parted(raw, index)
            inputs = checked(inputs, what="inputs", device=self.device, index=index)
            labels = checked(labels, what="targets", device=self.device, index=index)
            inputs, targets = self.objective.assembled(
                inputs, labels, mapping=isinstance(raw, Mapping)
            )
            batch = Batch(
                inputs=inputs,
                targets=targets,
                count=loss.count(targets),
                index=index,
                finder=self.finder,
            )
            if self.sharded and loss.additive:
                # one where they cannot be told apart: the batch goes to one process as it is
                first, last = _my_share(dealt, batch.samples)
                dealt += batch.samples
                seen.update(f"{batch.samples};".encode())
                if first == last:
                    continue
                batch = batch.part(first, last, loss.count)
            yield batch
        if compared:
            self.last_pass.digest = seen.digest()

    def first_pass(self, raws: Iterable[Any]) -> FirstPass:
        """Check and count; hold the batches when they are small enough."""
        held: list[Batch] | None = []
        total, bytes_so_far, seen = 0.0, 0, 0
        kinds: set[tuple[torch.Size, ...]] = set()
        for batch in self.batches(raws):
            seen += 1
            total += batch.count
            kinds.add(shapes(batch))
            bytes_so_far += size_in_bytes(batch)
            if held is not None:
                held.append(batch)
                if bytes_so_far > HOLD_BYTES:
                    held = None
        return FirstPass(held, total, seen, frozenset(kinds))


def _is_mine(index: int) -> bool:
    return index % parallel.world_size() == parallel.rank()


def _my_share(dealt: int, samples: int) -> tuple[int, int]:
    """First and last of this process's samples in a batch that comes after ``dealt`` others.

    Samples are dealt one after the other to the processes in turn, over the bounds of batches, so
    that batches smaller than the group are shared as evenly as large ones. As many as fall to a
    process in one batch lie side by side there: a batch is cut, not shuffled.
    """
    world, rank = parallel.world_size(), parallel.rank()

    def taken(up_to: int) -> int:
        """How many of the first samples have gone to the ranks before and up to this one."""
        return up_to // world * (rank + 1) + min(up_to % world, rank + 1)

    last = taken(dealt + samples) - taken(dealt)
    mine = (dealt + samples - rank - 1) // world - (dealt - rank - 1) // world
    return last - mine, last
