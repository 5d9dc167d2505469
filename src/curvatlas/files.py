"""Files that are either whole or absent, and reads that do not trust what they read.

A write goes to a temporary file beside the target, is flushed to the disk and then renamed over it:
whoever looks sees the old content or the new one, never half of either, also after a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTIAL_SUFFIX = ".partial"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path to write to; it replaces ``target`` when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}.", suffix=PARTIAL_SUFFIX
        )
        os.close(handle)
        temporary = Path(name)
        yield temporary
        # mkstemp makes the file private; a result is as readable as any other file of the user.
        temporary.chmod(0o666 & ~_umask())
        _flush(temporary)
        os.replace(temporary, target)
        _flush(target.parent)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        if _means_disk_full(error):
            raise OSError(
                errno.ENOSPC, f"no space left on the disk while writing {target.name}", str(target)
            ) from error
        raise


def write_bytes(target: Path, content: bytes) -> None:
    """Write ``content`` to ``target``, atomically."""
    with replacing(target) as temporary, open(temporary, "wb") as file:
        file.write(content)


def write_json(target: Path, value: Any) -> bytes:
    """Write ``value`` as readable JSON, atomically; returns the bytes written."""
    content = (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
    write_bytes(target, content)
    return content


def read_bytes(path: Path, *, limit: int, follow_links: bool = True) -> bytearray:
    """The content of a regular file of at most ``limit`` bytes; ValueError on anything else.

    Devices and pipes are refused before a byte is read: reading them could block for ever.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not follow_links:
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link: not followed.")
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be opened: {error.strerror or error}.") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file.")
        if status.st_size > limit:
            raise ValueError(f"{path} has {status.st_size:,} bytes, more than the {limit:,} read.")
        content = bytearray(status.st_size)
        count = file.readinto(content)
        if count != status.st_size or file.read(1):
            raise ValueError(f"{path} changed while it was read: try again.")
    return content


def parse_json(content: bytes | bytearray | str, where: str) -> Any:
    """JSON that is well-formed, not absurdly nested and without repeated keys; else ValueError."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be ours.") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError derive from it
        raise ValueError(f"{where} is not valid JSON: {error}.") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _flush(path: Path) -> None:
    # Without this a rename can reach the disk before the content it names.
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # directories cannot be opened on Windows, and need not be
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without fsync
            raise
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _means_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    # safetensors reports the system's error as text only
    return any(f"os error {number}" in str(error) for number in _FULL)
