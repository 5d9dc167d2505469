"""Facts about the machine that a timing needs beside it; no host names, no paths."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

LIBRARIES = ("torch", "curvatlas", "curvlinops-for-pytorch", "hessian-eigenthings", "pyhessian",
             "numpy", "scipy", "transformers")  # fmt: skip


def facts() -> dict[str, Any]:
    """Processor, cores, load, threads and library versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "libraries": {name: found for name in LIBRARIES if (found := _version(name))},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
