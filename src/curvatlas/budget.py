"""What work may use: memory, threads and time; what users write, and what the machine has."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside, as many as before outside; nested and interrupted use included.

    Tiny products gain at most a quarter from a second thread on a quiet machine and lose several
    times over on a busy one, where each product waits for the slower thread: with other work on
    two cores ``curvatlas verify`` took 285 s instead of 45 s, ``curvatlas demo`` more than 170 s
    instead of 43 s.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class TimeUp(KeyboardInterrupt):
    """The time budget is used up: ends a run as Ctrl-C does, resumable."""


class Clock:
    """A span of time that starts now; ``check`` raises ``TimeUp`` when it is over.

    span: seconds, or a text such as ``"90s"``, ``"1.5m"`` or ``"2h"``; None never ends.
    """

    def __init__(self, span: float | str | None) -> None:
        self.seconds = parse_time(span) if isinstance(span, str) else span
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"a time budget must be positive, got {span!r}.")
        self._started = time.monotonic()

    def check(self) -> None:
        """Raise ``TimeUp`` when the time is used up; of several processes by the first's clock."""
        if self.seconds is None:
            return
        from curvatlas import parallel

        if parallel.from_every_process(time.monotonic() - self._started > self.seconds)[0]:
            raise TimeUp(f"the time budget of {self.seconds:g} s is used up")


def parse_time(text: str) -> float:
    """``"90"``, ``"90s"``, ``"1.5m"`` or ``"2h"`` in seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(s|m|min|h|)\s*", text.lower())
    if match is None or not float(match[1]) > 0:
        raise ValueError(f"cannot read {text!r} as a time: write for example 90s, 5m or 1h.")
    return float(match[1]) * _SECONDS[match[2]]


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(budget: int | float | str) -> int:
    """``"2GB"``, ``"512MiB"`` or a number of bytes, as an integer."""
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?i?)b?\s*", budget.lower())
        if match is None:
            raise ValueError(f"cannot read {budget!r} as a size: write for example '2GB'.")
        number, unit = match.groups()
        budget = float(number) * {**_UNITS, **_BINARY}[unit]
    if not budget > 0:
        raise ValueError(f"a memory budget must be positive, got {budget!r}.")
    return int(budget)


def available_bytes(device: torch.device | None = None) -> int:
    """Memory this process can still be given without swapping (4 GB where it cannot be told).

    The machine's, and no more than its control group (a container) and its own limits (``ulimit
    -v``) leave. device: a CUDA device has memory of its own, what it has free and what PyTorch
    holds unused of it; others (CPU, Apple's MPS) share the machine's.
    """
    if device is not None and device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    left = [limit - used for limit, used in _group_limits()]
    return max(min([_machine("MemAvailable:"), *left, *_left_to_process(_mapped())]), 0)


def limit_bytes(device: torch.device | None = None) -> int:
    """Memory this process may use in all, whatever of it is taken now: what defaults are made of.

    A plan made of what is free would give other numbers on a busy day.
    """
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[1])
    limits = [limit for limit, _ in _group_limits()]
    # Code and libraries fill gigabytes of address space before anything is computed.
    limits += _left_to_process(_mapped_at_first())
    return min([_machine("MemTotal:"), *limits])


def default_budget(device: torch.device | None = None) -> int:
    """About a quarter of what the process may use: three operators and an estimate find room.

    Rounded down to 1 or 1.5 times a power of two, so that machines that differ by a little plan the
    same.
    """
    quarter = max(limit_bytes(device) // 4, 2**20)
    step = 1 << (quarter.bit_length() - 1)
    return step * 3 // 2 if quarter >= step * 3 // 2 else step


_SURVEY_BYTES = 2 * 10**9  # of a survey, unless the user says otherwise
_FIRST_USE_BYTES = 90 * 10**6  # measured: what libraries load and keep when they are first used
_SURVEY_VECTORS = 60  # that a survey needs room for, however large the model


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a survey divides its memory: one operator and one estimate are at work at a time.

    Made of what was asked for or of fixed numbers, never of what is free: bases and pieces of
    batches, and with them the last digits of the results, are the same on a busy machine.
    """

    total: int

    @property
    def graphs(self) -> int:
        """For what an operator keeps and what its products allocate."""
        return self._divided * 40 // 100

    @property
    def vectors(self) -> int:
        """For the vectors of an estimate; the rest is left to the allocator's gaps."""
        return self._divided * 42 // 100

    @property
    def _divided(self) -> int:
        return self.total - min(_FIRST_USE_BYTES, self.total // 3)


def memory_plan(asked: int | None, parameter_bytes: int) -> MemoryPlan:
    """The plan for what was asked; by default 2 GB, more for models that need more.

    The default stays below three quarters of what the process may use; less memory than that is
    free is said at once, not when it runs out.
    """
    from curvatlas import parallel

    total = asked
    if total is None:
        total = min(max(_SURVEY_BYTES, _SURVEY_VECTORS * parameter_bytes), limit_bytes() * 3 // 4)
        total = parallel.smallest_over_processes(total)
    if total > available_bytes():
        warnings.warn(
            f"{readable(total)} are planned and {readable(available_bytes())} are free: if memory "
            "runs out, start again with a smaller --memory.",
            stacklevel=2,
        )
    return MemoryPlan(total=total)


def _machine(entry: str) -> int:
    """A line of Linux's /proc/meminfo in bytes; half of the memory where there is none."""
    try:
        for line in (_PROC / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(entry):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError, AttributeError):
        return 4 * 10**9


def _group_limits() -> list[tuple[int, int]]:
    """(limit, used) of this process's control group and those around it, of either version."""
    try:
        lines = (_PROC / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    limits: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _GROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _GROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = root / path.lstrip("/")
        # In a container the path is often that of the host: its own group is then the root.
        groups = [inner, *inner.parents] if inner.is_dir() else [root]
        for group in groups[: groups.index(root) + 1] if root in groups else [root]:
            limits += _group_limit(group, *names)
    return limits


def _group_limit(group: Path, limit: str, usage: str, cached: str) -> list[tuple[int, int]]:
    try:
        most, used = (int((group / name).read_text(encoding="ascii")) for name in (limit, usage))
    except (OSError, ValueError):  # no such file, or "max"
        return []
    if most >= 2**60:
        return []
    try:
        entries = (group / "memory.stat").read_text(encoding="ascii").split()
        used -= int(entries[entries.index(cached) + 1])  # files that the kernel lets go first
    except (OSError, ValueError):
        pass
    return [(most, max(used, 0))]


def _left_to_process(used: tuple[int, int]) -> list[int]:
    """What ``ulimit`` leaves of address space and data beside what is used of them."""
    try:
        import resource
    except ImportError:  # Windows
        return []
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    pairs = zip(limits, used, strict=True)
    return [max(most - taken, 0) for most, taken in pairs if 0 <= most < 2**60]


def _mapped() -> tuple[int, int]:
    """Bytes of address space and of data."""
    try:
        pages = (_PROC / "self/statm").read_text(encoding="ascii").split()
        page = os.sysconf("SC_PAGE_SIZE")
        return int(pages[0]) * page, int(pages[5]) * page
    except (OSError, ValueError, IndexError, AttributeError):
        return 0, 0


@functools.cache
def _mapped_at_first() -> tuple[int, int]:
    """The same when it was first asked for: a plan must not depend on what came in between."""
    return _mapped()


LARGE_VECTOR = 2**24  # bytes of a model's vector from which on scraps of several are worth 10 ms


def give_back(vector_bytes: int = LARGE_VECTOR) -> None:
    """Return freed memory to the system, where the C library (glibc) would keep it in its gaps.

    Nothing is done beside the vectors of a small model: they leave less than the walk is worth.
    """
    if vector_bytes < LARGE_VECTOR:
        return
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@functools.cache
def _c_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None


_MAPPED = 2**20  # bytes from which on a result has a mapping of its own
_KEPT_RESULTS = 2**27  # bytes of mappings that wait for their next result


class ResultMemory:
    """Memory for the results of products, used again as soon as nobody holds the old result.

    A result that is allocated anew takes a page fault every 4 KB: 2.3 ms a column of a million
    float32 numbers, 0.7 ms in huge pages, nothing where the memory was there before. A tensor made
    of a mapping holds a reference to it, so that the count tells which ones are free; two are kept,
    for a caller who still has the last result when the next one comes.
    """

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []

    def empty(
        self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Uninitialised memory, as ``torch.empty``."""
        import torch

        size = math.prod(shape) * dtype.itemsize
        if size < _MAPPED or device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.frombuffer(self._mapping(size), dtype=dtype).view(shape)

    def _mapping(self, size: int) -> mmap.mmap:
        for place in range(len(self._mappings)):
            # the list and the call's own argument hold one reference each
            free = sys.getrefcount(self._mappings[place]) == 2
            if free and len(self._mappings[place]) == size:
                return self._mappings[place]
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._mappings = [*self._mappings[-1:], mapping]
        if sum(map(len, self._mappings)) > _KEPT_RESULTS:
            self._mappings = []
        return mapping


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory could not be had."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        words in text for words in ("can't allocate memory", "not enough memory", "out of memory")
    )


def readable(size: float) -> str:
    """``1.5 GB`` for 1.5e9."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
