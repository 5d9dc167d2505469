"""Files that are either whole or absent, and reads that do not trust what they read.

A write goes to a temporary file beside the target, is flushed to the disk and then renamed over it:
whoever looks sees the old content or the new one, never half of either, also after a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

PARTIAL_SUFFIX = ".partial"
PREVIOUS_SUFFIX = ".previous"  # of the state before the last one
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# What JSON of ours stays below. Python makes up to 30 bytes of every byte of JSON ("[],[],…"):
# two million items are 160 MB at most.
NESTING_LIMIT = 100
ITEM_LIMIT = 2_000_000
_DIGIT_LIMIT = 64  # of a whole number: longer ones overflow where a float is made of them


@contextlib.contextmanager
def replacing(target: Path, *, keep_previous: bool = False) -> Iterator[Path]:
    """A temporary path to write to; it replaces ``target`` when the block ends well.

    keep_previous: what stood there stays as ``<name>.previous``, the way back from a damaged file
    (not on file systems without hard links).
    """
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
        if keep_previous and target.exists():
            with contextlib.suppress(OSError):
                previous(target).unlink(missing_ok=True)
                os.link(target, previous(target))
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


def remove_partial(target: Path) -> None:
    """Remove what an interrupted ``replacing`` has left; nobody else may be writing the target."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*{PARTIAL_SUFFIX}"):
        with contextlib.suppress(OSError):
            path.unlink()


def previous(target: Path) -> Path:
    """Where the state before the last one stands."""
    return target.with_name(target.name + PREVIOUS_SUFFIX)


def write_bytes(target: Path, content: bytes, *, keep_previous: bool = False) -> None:
    """Write ``content`` to ``target``, atomically."""
    with replacing(target, keep_previous=keep_previous) as temporary, open(temporary, "wb") as file:
        file.write(content)


def write_json(target: Path, value: Any, *, keep_previous: bool = False) -> bytes:
    """Write ``value`` as readable JSON, atomically; returns the bytes written."""
    content = (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
    write_bytes(target, content, keep_previous=keep_previous)
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
        try:
            content = bytearray(status.st_size)
        except MemoryError:  # a limit of the process below what the machine has
            raise ValueError(
                f"{path} has {status.st_size:,} bytes, which this process cannot hold."
            ) from None
        count = file.readinto(content)
        if count != status.st_size or file.read(1):
            raise ValueError(f"{path} changed while it was read: try again.")
    return content


def parse_json(
    content: bytes | bytearray | str,
    where: str,
    *,
    allow_nan: bool = False,
    items: int = ITEM_LIMIT,
) -> Any:
    """JSON as we write it, or ValueError: whoever reads a file of ours reads it through here.

    Refused: text that is not UTF-8 or not JSON, more than ``NESTING_LIMIT`` levels or ``items``
    values (both counted before anything is made of them), repeated keys, halves of surrogate
    pairs, whole numbers of more than 64 digits, and NaN or Infinity unless ``allow_nan``.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        _refuse_sizes(text, items)
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_int=_whole_number,
            parse_constant=None if allow_nan else _no_constant,
        )
        if re.search(
            "\\\\u[dD]|[\ud800-\udfff]", text
        ):  # half of a pair can be neither printed nor written
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be ours.") from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"{where} is not valid JSON: no valid text ({error.reason}).") from error
    except ValueError as error:  # JSONDecodeError derives from it
        raise ValueError(f"{where} is not valid JSON: {error}.") from error


def json_checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON mapping in canonical form, without its own ``checksum`` entry."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


_STEP = np.zeros(256, dtype=np.int8)  # what a byte of JSON outside strings does to the nesting
_STEP[[ord("["), ord("{")]] = 1
_STEP[[ord("]"), ord("}")]] = -1


def _refuse_sizes(text: str, items: int) -> None:
    """ValueError on too deep a nesting or too many values, from the punctuation alone."""
    # Each pattern is a plain run of characters: no text can make them slow.
    without_escapes = re.sub(r"\\.", "", text, flags=re.DOTALL)
    without_strings = re.sub(r'"[^"]*"?', "", without_escapes)
    marks = re.sub(r"[^][{},]+", "", without_strings).encode()
    if sum(map(marks.count, (b",", b"[", b"{"))) > items:
        raise ValueError(f"it holds more than {items:,} values: not ours")
    # int32: a sum of int8 would wrap around
    nesting = np.cumsum(_STEP[np.frombuffer(marks, dtype=np.uint8)], dtype=np.int32)
    if nesting.size and int(nesting.max()) > NESTING_LIMIT:
        raise ValueError(f"it is nested more than {NESTING_LIMIT} deep: not ours")


def _whole_number(digits: str) -> int:
    if len(digits) > _DIGIT_LIMIT:
        raise ValueError(f"a number of {len(digits)} digits is not ours")
    return int(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


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
