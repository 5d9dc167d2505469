"""One file that lets a killed estimate go on where it stopped, with the same bits.

A checkpoint is a safetensors file: the algorithm's tensors, and in the header its numbers and a
fingerprint (operator shape and dtype, options, seed). It is replaced atomically, so that a kill
leaves either the old or the new state, never half of one. Every tensor carries a checksum: a
flipped bit in a basis would resume to wrong numbers without a word. The state before the last one
stays as ``<name>.previous``, the way back when the last one is damaged. Reading executes nothing.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from curvatlas import parallel
from curvatlas.operators.base import LinearOperator

_SCHEMA = 1
_TOGETHER = "together"  # every process multiplies the same vectors: they resume from one state
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_SUMS = "crc32"
_PREVIOUS = ".previous"  # suffix of the state before the last one
_MOST_OF_THE_TIME = 0.1  # writing may take at most this share of the time since the last write

State = tuple[dict[str, Tensor], dict[str, Any]]


def fingerprint(op: LinearOperator, **options: Any) -> dict[str, Any]:
    """What must agree between the run that wrote a checkpoint and the run that reads it."""
    described = {
        "operator": type(op).__name__,
        "shape": list(op.shape),
        "dtype": str(op.dtype),
        _TOGETHER: parallel.sums_over_processes(op),
        **options,
    }
    content: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return content


class Checkpoint:
    """Reads and writes the state of one estimate; with ``path=None`` it does neither."""

    def __init__(self, path: str | os.PathLike[str] | None, mark: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self._mark = dict(mark)
        # Not part of what must agree: any number of processes may go on.
        self._together = bool(self._mark.pop(_TOGETHER, False))
        self._written = time.monotonic()
        self._cost = 0.0

    def load(self) -> State | None:
        """The stored (tensors, numbers), None without a file; ValueError on any other file."""
        found: State | None = None
        failure: Exception | None = None
        try:
            found = self._read()
        except Exception as error:
            failure = error
        if self._together:
            self._agree(found, failure)
        if failure is not None:
            raise failure
        return found

    def _agree(self, found: State | None, failure: Exception | None) -> None:
        """Stop where processes would go on from different states: their sums would be of nothing.

        The file is read by all but written by the first one, so it has to lie where all see it.
        """
        mark = 0 if found is None else 1 + zlib.crc32(json.dumps(found[1]).encode())
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
            tensors, metadata = read_tensors(self.path)
            header = json.loads(metadata["curvatlas_checkpoint"])
            schema, mark, numbers = header["schema"], header["fingerprint"], header["numbers"]
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path} is not a readable checkpoint ({error}): {self._way_back()}{again}"
            ) from error
        if schema != _SCHEMA or mark != self._mark:
            differing = sorted(
                k for k in {*mark, *self._mark} if mark.get(k) != self._mark.get(k)
            ) or ["schema"]
            what = ", ".join(differing)
            raise ValueError(f"{self.path} belongs to another estimate (other {what}): {again}")
        return tensors, numbers

    def _way_back(self) -> str:
        assert self.path is not None
        previous = self.path.with_name(self.path.name + _PREVIOUS)
        if not previous.exists():
            return ""
        return f"move {previous.name} in its place to go on from the state before it; or "

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
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(
                self.path, tensors, {"curvatlas_checkpoint": json.dumps(header)}, previous=True
            )
            written = True
        except OSError as error:
            self._report(error)
        self._written = time.monotonic()
        self._cost = self._written - start
        return written

    def _report(self, error: OSError) -> None:
        """A state that cannot be written costs the run nothing: it goes on without."""
        kept = (
            "the last one written stays valid"
            if self.path and self.path.exists()
            else ("none was written yet")
        )
        warnings.warn(
            f"cannot write the checkpoint {self.path} ({error.strerror or error}): free some space "
            f"or make the folder writable; the run goes on, and {kept}.",
            stacklevel=3,
        )

    def due(self) -> bool:
        """Whether enough time has passed for a write to cost little."""
        elapsed = time.monotonic() - self._written
        return self.path is not None and elapsed * _MOST_OF_THE_TIME >= self._cost

    @contextmanager
    def kept(self, state: Callable[[], State]) -> Iterator[None]:
        """Write the state when the body is interrupted (Ctrl-C, an error in a product)."""
        try:
            yield
        except BaseException:
            # A NaN in a product is an error of the operator: what was reached before stays valid.
            if self.path is not None:
                # Any process may be the only one left.
                self.save(*state(), everywhere=True)
            raise


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    previous: bool = False,
) -> None:
    """Replace ``path`` by a safetensors file, straight from the tensors' memory.

    The library's own writer copies every tensor first: a basis that fills the memory has no room
    for a second one. previous: what stood there stays as ``<name>.previous``.
    """
    sums = {name: f"{checksum(tensor):08x}" for name, tensor in tensors.items()}
    entries: dict[str, Any] = {"__metadata__": {**metadata, _SUMS: json.dumps(sums)}}
    place = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        kind = _DTYPES[tensor.dtype]
        entries[name] = {
            "dtype": kind, "shape": list(tensor.shape), "data_offsets": [place, place + size],
        }  # fmt: skip
        place += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    start = len(header).to_bytes(8, "little") + header
    older = path.with_name(path.name + _PREVIOUS)
    try:
        _write(path, start, tensors, keeping=older if previous else None)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (previous and older.exists()):
            raise
        older.unlink()  # room for the new state matters more than the way back behind the last
        _write(path, start, tensors, keeping=older)


def _write(
    path: Path, start: bytes, tensors: Mapping[str, Tensor], *, keeping: Path | None
) -> None:
    """A file of ``start`` and the tensors' bytes, put in place at once; the old one as keeping."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(start)
            for tensor in tensors.values():
                file.write(_raw(tensor))
            file.flush()
            os.fsync(file.fileno())
        if keeping is not None and path.exists():
            with suppress(OSError):  # a file system without hard links has no way back
                keeping.unlink(missing_ok=True)
                os.link(path, keeping)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file of ours; ValueError where a checksum does not hold."""
    with safe_open(str(path), framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, expected in checksums(metadata).items():
        if f"{checksum(tensors[name]):08x}" != expected:
            raise ValueError(f"the bytes of {name!r} do not match their checksum")
    return tensors, metadata


def _raw(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def checksum(tensor: Tensor, start: int = 0) -> int:
    """CRC-32 of the tensor's bytes, going on from that of the bytes before them."""
    return zlib.crc32(_raw(tensor), start)


def checksums(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Name → checksum as hexadecimal digits; files of an earlier version carry none."""
    found: dict[str, str] = json.loads((metadata or {}).get(_SUMS, "{}"))
    return found


@contextmanager
def undone(random: torch.Generator) -> Iterator[None]:
    """Take back the random numbers drawn in the body when it is interrupted.

    A state in which probes were drawn but not multiplied would resume with other probes.
    """
    before = random.get_state()
    try:
        yield
    except BaseException:
        random.set_state(before)
        raise


def generator(seed: int) -> torch.Generator:
    """Random numbers are drawn on the CPU, so that every device sees the same probes."""
    if not isinstance(seed, int | np.integer) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be a whole number of 64 bits, got {seed!r}.")
    return torch.Generator().manual_seed(int(seed))
