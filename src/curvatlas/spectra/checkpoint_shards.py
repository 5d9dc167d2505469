"""A checkpoint whose basis is sharded over processes, readable by any number of them.

Every process writes its own columns of the rows to ``<name>.step<n>.<start>-<stop>``; when all have
done so, the first process replaces ``<name>`` itself, which holds everything else and names the
step. A kill at any moment leaves the last complete step; the one before it stays too, the way back
when a part is damaged; parts of other steps are removed.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from curvatlas import archive, parallel
from curvatlas.spectra.checkpoint import (
    Checkpoint,
    State,
    checksum,
)

_SHARDED = "rows"
_SUM = "crc32"  # of a part, which is read row by row


def parts_on_disk(path: Path) -> list[tuple[Path, int, int, int]]:
    """(file, step, start, stop) of every part of the checkpoint ``path``."""
    parts = []
    for file in sorted(path.parent.glob(f"{glob.escape(path.name)}.step*")):
        match = re.fullmatch(r"\.step(\d+)\.(\d+)-(\d+)", file.name[len(path.name) :])
        if match:
            parts.append((file, int(match[1]), int(match[2]), int(match[3])))
    return parts


def step_of(header: Mapping[str, Any]) -> int | None:
    """The step whose parts the state with this header needs; None where it has no parts."""
    numbers = header["numbers"]
    return int(numbers["step"]) if {"step", "rows"} <= set(numbers) else None


def missing_entries(header: Mapping[str, Any], parts: Iterable[tuple[int, int]]) -> str | None:
    """What the parts (start, stop) of a state's step leave out of its vectors, in words."""
    size = int(header["fingerprint"]["shape"][1])
    end = 0
    for start, stop in [*sorted(parts), (size, size)]:
        if start > end:
            return f"entries {end} to {start} of {size}"
        end = max(end, stop)
    return None


class ShardedCheckpoint(Checkpoint):
    """``Checkpoint`` for states whose ``rows`` (R, n_local) are this process's columns."""

    def __init__(self, path: Any, mark: Mapping[str, Any], shards: parallel.Shards) -> None:
        super().__init__(path, mark)
        self._shards = shards
        self._together = parallel.world_size() > 1
        self._step = 0  # of the last complete state

    def _read(self) -> State | None:
        found = super()._read()
        if found is None:
            return None
        tensors, numbers = found
        self._step = int(numbers.pop("step"))
        try:
            tensors[_SHARDED] = self._read_rows(int(numbers.pop("rows")))
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(
                f"a part of {self.path} is missing or damaged ({error}): bring all files "
                f"{self.path}.* back to one place; {self._way_back()}delete them to start afresh."
            ) from error
        return tensors, numbers

    def _read_rows(self, count: int) -> Tensor:
        """This process's columns, from the parts of however many processes wrote them."""
        mine = self._shards
        rows: Tensor | None = None
        covered = 0
        for file, start, stop in self._parts(self._step):
            low, high = max(start, mine.start), min(stop, mine.stop)
            if low >= high:
                continue
            with safe_open(str(file), framework="pt") as opened:
                part = opened.get_slice(_SHARDED)
                if part.get_shape() != [count, stop - start]:
                    raise ValueError(f"{file} has {part.get_shape()}")
                total = 0
                for place in range(count):  # row by row: a part may be larger than this process's
                    row = part[place : place + 1]
                    total = checksum(row, total)
                    if rows is None:
                        rows = torch.empty(count, mine.length, dtype=row.dtype, device="cpu")
                    rows[place, low - mine.start : high - mine.start] = row[
                        0, low - start : high - start
                    ]
                expected = (opened.metadata() or {}).get(_SUM)
            if f"{total:08x}" != expected:
                raise ValueError(f"the bytes of {file.name} do not match their checksum")
            covered += high - low
        if rows is None or covered != mine.length:
            raise ValueError(f"step {self._step} covers {covered} of {mine.length} entries")
        return rows

    def _parts(self, step: int) -> list[tuple[Path, int, int]]:
        return [(file, start, stop) for file, at, start, stop in self._all_parts() if at == step]

    def _all_parts(self) -> list[tuple[Path, int, int, int]]:
        assert self.path is not None
        return parts_on_disk(self.path)

    def due(self) -> bool:
        """Decided by the first process, so that all write the same step."""
        return bool(parallel.from_every_process(int(super().due()))[0])

    def save(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, everywhere: bool = False
    ) -> bool:
        # After a failure processes may be at different steps, or gone: the last step stands.
        if self.path is None or everywhere:
            return True
        step = max([self._step, *(found for _, found, _, _ in self._all_parts())]) + 1
        step = int(parallel.largest_over_processes(step))
        rows = tensors[_SHARDED]
        part = self.path.parent / (
            f"{self.path.name}.step{step}.{self._shards.start}-{self._shards.stop}"
        )
        written = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            archive.write(part, {_SHARDED: rows}, {_SUM: f"{checksum(rows):08x}"})
            written = True
        except OSError as error:
            self._report(error)
        if parallel.everywhere(written):
            rest = {name: value for name, value in tensors.items() if name != _SHARDED}
            numbers = {**numbers, "step": step, "rows": rows.shape[0]}
            written = super().save(rest, numbers)
        # Without the first process's file the parts name nothing, and the last step's still do.
        if not parallel.everywhere(written):
            part.unlink(missing_ok=True)
            return False
        self._remove_all_but({step, self._step})
        self._step = step
        return True

    def _remove_all_but(self, steps: set[int]) -> None:
        """The step just written and the one before it stay: the last state and the way back."""
        for file, step, start, stop in self._all_parts():
            mine = (start, stop) == (self._shards.start, self._shards.stop)
            # Parts of another number of processes are nobody's: the first process removes them.
            if step not in steps and (mine or parallel.rank() == 0):
                file.unlink(missing_ok=True)
