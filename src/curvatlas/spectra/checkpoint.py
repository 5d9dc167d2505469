"""One file that lets a killed estimate go on where it stopped, with the same bits.

A checkpoint is a safetensors file: the algorithm's tensors, and in the header its numbers and a
fingerprint (operator shape and dtype, options, seed). It is replaced atomically, so that a kill
leaves either the old or the new state, never half of one. Reading it executes nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from curvatlas import parallel
from curvatlas.operators.base import LinearOperator

_SCHEMA = 1
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_MOST_OF_THE_TIME = 0.1  # writing may take at most this share of the time since the last write

State = tuple[dict[str, Tensor], dict[str, Any]]


def fingerprint(op: LinearOperator, **options: Any) -> dict[str, Any]:
    """What must agree between the run that wrote a checkpoint and the run that reads it."""
    described = {
        "operator": type(op).__name__,
        "shape": list(op.shape),
        "dtype": str(op.dtype),
        **options,
    }
    content: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return content


class Checkpoint:
    """Reads and writes the state of one estimate; with ``path=None`` it does neither."""

    def __init__(self, path: str | os.PathLike[str] | None, mark: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self._mark = dict(mark)
        self._written = time.monotonic()
        self._cost = 0.0

    def load(self) -> State | None:
        """The stored (tensors, numbers), None without a file; ValueError on any other file."""
        if self.path is None or not self.path.exists():
            return None
        again = "delete it, or name another file, to start afresh."
        try:
            with safe_open(str(self.path), framework="pt") as file:
                header = json.loads((file.metadata() or {})["curvatlas_checkpoint"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            schema, mark, numbers = header["schema"], header["fingerprint"], header["numbers"]
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path} is not a readable checkpoint ({error}): {again}"
            ) from error
        if schema != _SCHEMA or mark != self._mark:
            differing = sorted(
                k for k in {*mark, *self._mark} if mark.get(k) != self._mark.get(k)
            ) or ["schema"]
            what = ", ".join(differing)
            raise ValueError(f"{self.path} belongs to another estimate (other {what}): {again}")
        return tensors, numbers

    def save(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, everywhere: bool = False
    ) -> None:
        """Replace the file by this state; of several processes with the same state, one writes."""
        if self.path is None or (parallel.rank() > 0 and not everywhere):
            return
        start = time.monotonic()
        header = {"schema": _SCHEMA, "fingerprint": self._mark, "numbers": dict(numbers)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(self.path, tensors, {"curvatlas_checkpoint": json.dumps(header)})
        except OSError as error:
            self._report(error)
        self._written = time.monotonic()
        self._cost = self._written - start

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


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Replace ``path`` by a safetensors file, straight from the tensors' memory.

    The library's own writer copies every tensor first: a basis that fills the memory has no room
    for a second one.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
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
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for tensor in tensors.values():
                raw = tensor.detach().cpu().contiguous().reshape(-1)
                if raw.numel():
                    file.write(raw.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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
    return torch.Generator().manual_seed(seed)
