"""One writer at a time in a run folder."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no flock: there the folder is not locked
    fcntl = None

LOCK_NAME = ".lock"


def is_locked(folder: Path) -> bool:
    """Whether another process is writing the folder; leaves no file behind."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


class FolderLock:
    """Held until ``release`` or the death of the process; the system frees it in both cases."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._descriptor: int | None = os.open(folder / LOCK_NAME, flags, 0o666)
        except OSError as error:
            raise ValueError(f"{folder} cannot be written: {error.strerror}.") from error
        if fcntl is not None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._descriptor)
                raise ValueError(
                    f"{folder} is being written by another process: wait for it or name another."
                ) from error

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
