"""Memory budgets: parse what users write, know what the machine has."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
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
    """Memory this machine can still give without swapping (4 GB where it cannot be told).

    device: a CUDA device has memory of its own, what it has free and what PyTorch holds unused of
    it; others (CPU, Apple's MPS) share the machine's.
    """
    if device is not None and device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError, AttributeError):
        return 4 * 10**9


def default_budget(device: torch.device | None = None) -> int:
    """A bit less than half of the device's available memory: a second operator finds room."""
    return max(available_bytes(device) * 9 // 20, 2**28)


def readable(size: float) -> str:
    """``1.5 GB`` for 1.5e9."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
