"""A checkpoint whose basis is sharded over processes, readable by any number of them.

Every process writes its own columns of the rows to ``<name>.step<n>.<start>-<stop>``; when all have
done so, the first process replaces ``<name>`` itself, which holds everything else and names the
step. A kill at any moment leaves the last complete step; parts of other steps are removed later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from curvatlas import parallel
from curvatlas.spectra.checkpoint import Checkpoint, State, write_tensors

_SHARDED = "rows"


class ShardedCheckpoint(Checkpoint):
    """``Checkpoint`` for states whose ``rows`` (R, n_local) are this process's columns."""

    def __init__(self, path: Any, mark: Mapping[str, Any], shards: parallel.Shards) -> None:
        super().__init__(path, mark)
        self._shards = shards
        self._step = 0

    def load(self) -> State | None:
        found = super().load()
        if found is None:
            return None
        tensors, numbers = found
        self._step = int(numbers.pop("step"))
        try:
            tensors[_SHARDED] = self._read_rows(int(numbers.pop("rows")))
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(
                f"a part of {self.path} is missing or damaged ({error}): bring all files "
                f"{self.path}.* back to one place, or delete them to start afresh."
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
                piece = part[:, low - start : high - start]
            if rows is None:
                rows = torch.empty(count, mine.length, dtype=piece.dtype)
            rows[:, low - mine.start : high - mine.start] = piece
            covered += high - low
        if rows is None or covered != mine.length:
            raise ValueError(f"step {self._step} covers {covered} of {mine.length} entries")
        return rows

    def _parts(self, step: int | None) -> list[tuple[Path, int, int]]:
        assert self.path is not None
        found = []
        for file in sorted(self.path.parent.glob(f"{self.path.name}.step*")):
            match = re.fullmatch(r".*\.step(\d+)\.(\d+)-(\d+)", file.name)
            if match and (step is None or int(match[1]) == step):
                found.append((file, int(match[2]), int(match[3])))
        return found

    def due(self) -> bool:
        """Decided by the first process, so that all write the same step."""
        mine = torch.tensor([float(super().due())]) if parallel.rank() == 0 else torch.zeros(1)
        return bool(parallel.add_over_processes(mine))

    def save(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, everywhere: bool = False
    ) -> None:
        # After a failure processes may be at different steps, or gone: the last step stands.
        if self.path is None or everywhere:
            return
        self._step += 1
        rows = tensors[_SHARDED]
        part = f"{self.path.name}.step{self._step}.{self._shards.start}-{self._shards.stop}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        failed = 0.0
        try:
            write_tensors(self.path.parent / part, {_SHARDED: rows}, {})
        except OSError as error:
            failed = 1.0
            self._report(error)
        if float(parallel.add_over_processes(torch.tensor([failed]))) > 0:
            (self.path.parent / part).unlink(missing_ok=True)
            return
        rest = {name: value for name, value in tensors.items() if name != _SHARDED}
        super().save(rest, {**numbers, "step": self._step, "rows": rows.shape[0]})
        parallel.add_over_processes(torch.zeros(1))  # the step is complete before any is removed
        for file, start, stop in self._parts(None):
            mine = (start, stop) == (self._shards.start, self._shards.stop)
            old = f".step{self._step}." not in file.name
            # Parts of another number of processes are nobody's: the first process removes them.
            if old and (mine or parallel.rank() == 0):
                file.unlink(missing_ok=True)
