"""The process's own peak of resident memory (Linux)."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path


def resident(field: str = "VmRSS") -> int:
    """Bytes from /proc/self/status: VmRSS now, VmHWM at most since ``settled``."""
    found = re.search(field + r":\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found.group(1)) * 1024


def settled() -> int:
    """What is resident after freed memory went back; the peak is counted from here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory must not hide what is allocated later
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak so far
    return resident()


def peak_bytes() -> int:
    return resident("VmHWM")
