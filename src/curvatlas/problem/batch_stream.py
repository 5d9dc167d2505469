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
    """The batches that a complete pass over shared data has seen, in order."""

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
        for index, raw in enumerate(self._noted(raws)):
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
                if batch.layout is None and not _is_mine(index):
                    continue  # it cannot be cut: one process takes all of it
                first, last = _my_share(batch.samples) if batch.layout is not None else (0, 1)
                if first == last:
                    continue
                batch = batch.part(first, last, loss.count)
            yield batch

    def _noted(self, raws: Iterable[Any]) -> Iterator[Any]:
        """The same batches; a digest of all of them stays where ranks have to compare it."""
        if not self.sharded or parallel.world_size() == 1:
            yield from raws
            return
        digest = hashlib.blake2b(digest_size=16)
        for raw in raws:
            digest.update(content(raw))
            yield raw
        self.last_pass.digest = digest.digest()

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


def _my_share(samples: int) -> tuple[int, int]:
    world, rank = parallel.world_size(), parallel.rank()
    return samples * rank // world, samples * (rank + 1) // world
