"""The loop of every estimate that can be stopped, and the file it goes on from with the same bits.

A checkpoint is a safetensors file: the algorithm's tensors, and in the header its numbers and a
fingerprint (operator shape and dtype, options, seed). It is replaced atomically, so that a kill
leaves either the old or the new state, never half of one. It carries a checksum: a flipped bit in a
basis would resume to wrong numbers without a word. The state before the last one stays as
``<name>.previous``, the way back when the last one is damaged. Reading executes nothing.

Only states between two steps are ever written: an interruption in a product or in the middle of an
update saves the state before that step.

Vectors that are spread over processes lie in parts beside that file, readable by any number of
processes: each writes its entries to ``<name>.step<n>.<start>-<stop>``, and when all have done so
the first process replaces ``<name>`` itself, which holds everything else and names the step. A kill
at any moment leaves the last complete step; the one before it stays too.
"""

from __future__ import annotations

import functools
import glob
import json
import math
import os
import re
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from curvatlas import files, parallel
from curvatlas.files import parse_json, previous, remove_partial
from curvatlas.linear_operator import LinearOperator
from curvatlas.problem.fingerprint import content
from curvatlas.progress import bar

_SCHEMA = 3
_TOGETHER = "together"  # every process multiplies the same vectors: they resume from one state
_CONTENT = "weights, data or loss"
MAX_WRITE_SHARE = 0.1  # of the time since the last write that writing may take

State = tuple[dict[str, Tensor], dict[str, Any]]


class Resumable:
    """An estimate that is made step by step and may be stopped between any two of them.

    What the next step depends on is in ``state``, in values that later steps do not change; tensors
    that they do change move the number ``rewrites`` before that.
    """

    title: str  # of the progress bar
    budget: int  # products, the end of the progress bar
    done = False
    products_between_looks = 1  # at the checkpoint's clock
    # Which tensors of ``state`` are vectors, by their names without a number behind, and the axis
    # of the entries: where vectors are spread, every process has its own.
    vector_axes: ClassVar[Mapping[str, int]] = {"rows": 1}

    @property
    def products(self) -> int:
        """Products with the operator so far."""
        raise NotImplementedError

    @property
    def rewrites(self) -> int:
        return 0

    def begin(self) -> None:
        """Called once where there is no state to go on from."""

    def step(self) -> None:
        """Go on by a product or a few; ``done`` when there is nothing left to do."""
        raise NotImplementedError

    def state(self) -> State:
        raise NotImplementedError

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        raise NotImplementedError

    def run_from(
        self,
        path: str | os.PathLike[str] | None,
        mark: Mapping[str, Any],
        shards: parallel.Shards | None,
    ) -> None:
        """Go on from the file at ``path``, to the end; shards: of spread vectors."""
        if shards is None:
            self.run(Checkpoint(path, mark))
        else:
            self.run(ShardedCheckpoint(path, mark, shards, axes=self.vector_axes))

    def run(self, file: Checkpoint) -> None:
        """Go on from the file, to the end."""
        stored = file.load()
        if stored is None:
            self.begin()
        else:
            self.restore(*stored)
        between: tuple[int, State] | None = None  # the rewrites and the state before this step
        with bar(self.title, total=self.budget) as progress:
            try:
                while not self.done:
                    progress.update(self.products - progress.n)
                    if file.path is not None:
                        between = self.rewrites, self.state()
                    self.step()
                    if self.products % self.products_between_looks == 0 and file.due():
                        file.save(*self.state())
            except BaseException:  # Ctrl-C, a kill, an error
                # A NaN in a product is an error of the operator: what was reached before is valid.
                if between is not None and between[0] == self.rewrites:
                    file.save(*between[1], everywhere=True)  # any process may be the only one left
                raise
        if file.path is not None:
            file.save(*self.state())


def fingerprint(op: LinearOperator, **options: Any) -> dict[str, Any]:
    """What must agree between the run that wrote a checkpoint and the run that reads it."""
    described = {
        "operator": type(op).__name__,
        "shape": list(op.shape),
        "dtype": str(op.dtype),
        _TOGETHER: parallel.sums_over_processes(op),
        **options,
    }
    plain: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return {**plain, _CONTENT: op.content}


class Checkpoint:
    """Reads and writes the state of one estimate; with ``path=None`` it does neither."""

    def __init__(self, path: str | os.PathLike[str] | None, mark: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self._mark = dict(mark)
        # Not part of what must agree: any number of processes may go on.
        self._together = bool(self._mark.pop(_TOGETHER, False))
        read_content = self._mark.pop(_CONTENT, None)
        if self.path is not None and read_content is not None:
            # Trained on, or with other data, the same file would answer for what was before.
            self._mark[_CONTENT] = content(read_content()).hex()
        self._written = time.monotonic()
        self._cost = 0.0

    def load(self) -> State | None:
        """The stored (tensors, numbers), None without a file; ValueError on any other file."""
        stored: State | None = None
        failure: Exception | None = None
        if self.path is not None and parallel.rank() == 0:
            remove_partial(self.path)
        try:
            stored = self._read()
        except Exception as error:
            failure = error
        if self._together:
            self._agree(stored, failure)
        if failure is not None:
            raise failure
        return stored

    def _agree(self, stored: State | None, failure: Exception | None) -> None:
        """Stop where processes would go on from different states: their sums would be of nothing.

        The file is read by all but written by the first one, so it has to lie where all see it.
        """
        mark = 0 if stored is None else 1 + zlib.crc32(json.dumps(stored[1]).encode())
        seen = parallel.from_every_process(-1 if failure is not None else mark)
        if failure is None and -1 in seen:
            place = seen.index(-1)
            raise RuntimeError(
                f"process {place} cannot read the checkpoint {self.path}: its own error says why; "
                f"process {parallel.rank()} stops with it."
            )
        if failure is None and len(set(seen)) > 1:
            raise ValueError(
                f"the processes read different checkpoints under {self.path}: put the file where "
                "all of them see the same one, or delete it everywhere to start afresh."
            )

    def _read(self) -> State | None:
        if self.path is None or not self.path.exists():
            return None
        again = "delete it, or name another file, to start afresh."
        try:
            metadata, tensors = files.parse(files.read(self.path), "it")
            texts = files.verified(metadata, tensors, "it")
            header = parse_json(texts["curvatlas_checkpoint"], "its header", allow_nan=True)
            schema, mark, numbers = header["schema"], header["fingerprint"], header["numbers"]
            if not isinstance(mark, dict) or not isinstance(numbers, dict):
                raise TypeError("its header is not ours")
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path} is not a readable checkpoint ({error}): {self._way_back()}{again}"
            ) from error
        if schema != _SCHEMA or mark != self._mark:
            differing = sorted(
                k for k in {*mark, *self._mark} if mark.get(k) != self._mark.get(k)
            ) or ["schema"]
            what = ", ".join(differing)
            raise ValueError(f"{self.path} belongs to another estimate (other {what}): {again}")
        return self._with_vectors(tensors, numbers)

    def _with_vectors(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> State:
        """The state with the vectors that several processes have written in parts, whole."""
        if "step" not in numbers:
            return tensors, numbers
        numbers, size = dict(numbers), int(self._mark["shape"][1])
        parts = self._read_parts(int(numbers.pop("step")), numbers.pop("rows"), ((0, size),))
        return {**tensors, **parts}, numbers

    def _read_parts(
        self, step: int, vectors: Any, own: tuple[parallel.Range, ...]
    ) -> dict[str, Tensor]:
        """The entries ``own`` of the spread vectors, from the parts of however many processes.

        vectors: name → [axis of the entries, lengths of the other axes].
        """
        assert self.path is not None
        # Only a basis was spread at first, and its rows were counted.
        kept = {_ROWS: [1, vectors]} if isinstance(vectors, int) else dict(vectors)
        try:
            return _spread_vectors(self.path, step, kept, own)
        except _UNREADABLE as error:
            raise ValueError(
                f"a part of {self.path} is missing or damaged ({error}): bring all files "
                f"{self.path}.* back to one place; {self._way_back()}delete them to start afresh."
            ) from error

    def _way_back(self) -> str:
        assert self.path is not None
        older = previous(self.path)
        if not older.exists():
            return ""
        return f"move {older.name} in its place to go on from the state before it; or "

    def save(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, everywhere: bool = False
    ) -> bool:
        """Replace the file by this state; of several processes with the same state, one writes.

        Returns whether the state is on disk, as far as this process has to do with it.
        """
        if self.path is None or (parallel.rank() > 0 and not everywhere):
            return True
        start = time.monotonic()
        header = {"schema": _SCHEMA, "fingerprint": self._mark, "numbers": dict(numbers)}
        written = False
        try:
            metadata = {"curvatlas_checkpoint": json.dumps(header)}
            write = functools.partial(files.write, self.path, tensors, metadata, keep_previous=True)
            files.write_keeping_previous(self.path, write)
            written = True
        except OSError as error:
            self._report(error)
        self._written = time.monotonic()
        self._cost = self._written - start
        return written

    def _report(self, error: OSError) -> None:
        """A state that cannot be written costs the run nothing: it goes on without."""
        written = self.path is not None and self.path.exists()
        last = "the last one written stays valid" if written else "none was written yet"
        warnings.warn(
            f"cannot write the checkpoint {self.path} ({error.strerror or error}): free some space "
            f"or make the folder writable; the run goes on, and {last}.",
            stacklevel=3,
        )

    def due(self) -> bool:
        """Whether enough time has passed for a write to cost little."""
        elapsed = time.monotonic() - self._written
        return self.path is not None and elapsed * MAX_WRITE_SHARE >= self._cost


def checksum(tensor: Tensor, start: int = 0) -> int:
    """CRC-32 of the tensor's bytes, going on from that of the bytes before them."""
    return zlib.crc32(files.raw_bytes(tensor), start)


def generator(seed: int) -> torch.Generator:
    """Random numbers are drawn on the CPU, so that every device sees the same probes."""
    if not isinstance(seed, int | np.integer) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be a whole number of 64 bits, got {seed!r}.")
    return torch.Generator().manual_seed(int(seed))


_ROWS = "rows"
_SUM = "crc32"  # of a part, which is read piece by piece
_PIECE = 2**22  # numbers of a part that are read at a time
# RuntimeError: of a part that the first process removes while another one looks through them.
_UNREADABLE = (SafetensorError, OSError, ValueError, RuntimeError)
_ENTRIES = "entries"  # of the vectors, where a part holds the rows of many parameters


def parts_on_disk(path: Path) -> list[tuple[Path, int, tuple[parallel.Range, ...]]]:
    """(file, step, entries of the vectors) of every part of the checkpoint ``path``.

    A contiguous part says its entries by its name, the rows of many parameters by its header.
    """
    parts: list[tuple[Path, int, tuple[parallel.Range, ...]]] = []
    for file in sorted(path.parent.glob(f"{glob.escape(path.name)}.step*")):
        match = re.fullmatch(r"\.step(\d+)\.(\d+)(-|of)(\d+)", file.name[len(path.name) :])
        if match and match[3] == "-":
            parts.append((file, int(match[1]), ((int(match[2]), int(match[4])),)))
        elif match:
            parts.append((file, int(match[1]), _entries_of(file)))
    return parts


def _entries_of(part: Path) -> tuple[parallel.Range, ...]:
    """The entries that a part's header names; none where it cannot be read."""
    try:
        with safe_open(str(part), framework="pt") as opened:
            said = parse_json((opened.metadata() or {})[_ENTRIES], "its entries")
        return tuple((int(start), int(stop)) for start, stop in said)
    except (*_UNREADABLE, KeyError, TypeError):
        return ()


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


def _common(
    there: Sequence[parallel.Range], here: Sequence[parallel.Range]
) -> list[tuple[int, int, int]]:
    """(place there, place here, length) of the entries that two ascending lists have in common."""
    common: list[tuple[int, int, int]] = []
    theirs = mine = at = to = 0
    while theirs < len(there) and mine < len(here):
        (start, stop), (first, last) = there[theirs], here[mine]
        low, high = max(start, first), min(stop, last)
        if low < high:
            common.append((at + low - start, to + low - first, high - low))
        if stop <= last:
            theirs, at = theirs + 1, at + stop - start
        if last <= stop:
            mine, to = mine + 1, to + last - first
    return common


def _spread_vectors(
    path: Path, step: int, kept: Mapping[str, Sequence[int]], own: tuple[parallel.Range, ...]
) -> dict[str, Tensor]:
    """The entries ``own`` of every tensor in ``kept``, each with [axis, lengths of the others]."""
    vectors: dict[str, Tensor] = {}
    length = sum(stop - start for start, stop in own)
    covered = 0
    for file, at, entries in parts_on_disk(path):
        common = _common(entries, own)
        if at != step or not common:
            continue
        there = sum(stop - start for start, stop in entries)
        total = 0
        with safe_open(str(file), framework="pt") as opened:
            for name in sorted(kept):
                part, (axis, *others) = opened.get_slice(name), kept[name]
                if part.get_shape() != [*others[:axis], there, *others[axis:]]:
                    raise ValueError(f"{file} has {part.get_shape()}")
                for piece, first, entry in _pieces(part, axis):
                    total = checksum(piece, total)
                    if name not in vectors:
                        shape = [*others[:axis], length, *others[axis:]]
                        vectors[name] = torch.empty(shape, dtype=piece.dtype, device="cpu")
                    into = vectors[name][first : first + len(piece)] if axis else vectors[name]
                    _place(piece, into, axis, entry, common)
            expected = (opened.metadata() or {}).get(_SUM)
        if f"{total:08x}" != expected:
            raise ValueError(f"the bytes of {file.name} do not match their checksum")
        covered += sum(number for _, _, number in common)
    if covered != length and kept:
        raise ValueError(f"step {step} covers {covered} of {length} entries")
    return vectors


def _pieces(part: Any, axis: int) -> Iterator[tuple[Tensor, int, int]]:
    """(piece, its first row, its first entry): a part may be larger than this process's own.

    By rows where they are vectors (axis 1), else some entries of all vectors at a time.
    """
    shape = part.get_shape()
    step = 1 if axis else max(_PIECE // max(math.prod(shape[1:]), 1), 1)
    for start in range(0, max(shape[0], 1), step):
        yield part[start : start + step], start if axis else 0, 0 if axis else start


def _place(
    piece: Tensor, into: Tensor, axis: int, entry: int, common: Sequence[tuple[int, int, int]]
) -> None:
    """Copy the entries that a piece, which begins with ``entry``, has in common with ``into``."""
    end = entry + piece.shape[axis]
    for there, here, length in common:
        low, high = max(there, entry), min(there + length, end)
        if low < high:
            some = piece.narrow(axis, low - entry, high - low)
            into.narrow(axis, here + low - there, high - low).copy_(some)


class ShardedCheckpoint(Checkpoint):
    """``Checkpoint`` for states whose vectors are spread: every process writes its entries.

    axes: the vectors by name without a number behind, and the axis of their entries.
    """

    def __init__(
        self,
        path: Any,
        mark: Mapping[str, Any],
        shards: parallel.Shards,
        *,
        axes: Mapping[str, int] = Resumable.vector_axes,
    ) -> None:
        super().__init__(path, mark)
        self._shards, self._axes = shards, dict(axes)
        self._together = parallel.world_size() > 1
        self._step = 0  # of the last complete state

    def _axis(self, name: str) -> int | None:
        return self._axes.get(name.rstrip("0123456789"))

    def _with_vectors(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> State:
        if "step" not in numbers:  # written where every process held all entries
            mine = {
                name: self._shards.take(tensor.movedim(axis, 0)).movedim(0, axis).contiguous()
                for name, tensor in tensors.items()
                if (axis := self._axis(name)) is not None
            }
            return {**tensors, **mine}, numbers
        numbers = dict(numbers)
        self._step = int(numbers.pop("step"))
        parts = self._read_parts(self._step, numbers.pop("rows"), self._shards.own)
        return {**tensors, **parts}, numbers

    def due(self) -> bool:
        """Decided by the first process, so that all write the same step."""
        return bool(parallel.from_every_process(int(super().due()))[0])

    def save(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, everywhere: bool = False
    ) -> bool:
        # After a failure processes may be at different steps, or gone: the last step stands.
        if self.path is None or everywhere:
            return True
        step = max([self._step, *(written for _, written, _ in parts_on_disk(self.path))]) + 1
        step = int(parallel.largest_over_processes(step))
        axes = {name: axis for name in tensors if (axis := self._axis(name)) is not None}
        vectors = {name: tensors[name] for name in sorted(axes)}
        part = self.path.parent / f"{self.path.name}.step{step}.{self._part_name()}"
        written = False
        try:
            if self._shards.writes:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                total = functools.reduce(
                    lambda sum_, name: checksum(vectors[name], sum_), vectors, 0
                )
                header = {_SUM: f"{total:08x}", _ENTRIES: json.dumps(self._shards.own)}
                files.write(part, vectors, header)
            written = True
        except OSError as error:
            self._report(error)
        if parallel.everywhere(written):
            rest = {name: value for name, value in tensors.items() if name not in axes}
            others = {
                name: [axis, *(n for i, n in enumerate(tensors[name].shape) if i != axis)]
                for name, axis in axes.items()
            }
            numbers = {**numbers, "step": step, "rows": others}
            written = super().save(rest, numbers)
        # Without the first process's file the parts name nothing, and the last step's still do.
        if not parallel.everywhere(written):
            part.unlink(missing_ok=True)
            return False
        self._remove_all_but({step, self._step})
        self._step = step
        return True

    def _part_name(self) -> str:
        mine = self._shards
        if len(mine.own) == 1:
            return f"{mine.start}-{mine.stop}"
        return f"{mine.index}of{len(mine.ranges)}"

    def _remove_all_but(self, steps: set[int]) -> None:
        """The step just written and the one before it stay: the last state and the way back."""
        assert self.path is not None
        for file, step, entries in parts_on_disk(self.path):
            mine = entries == self._shards.own and self._shards.writes
            # Parts of another number of processes are nobody's: the first process removes them.
            if step not in steps and (mine or parallel.rank() == 0):
                file.unlink(missing_ok=True)
