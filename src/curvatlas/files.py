"""Files that are either complete or absent, and reads that do not trust what they read.

A write goes to a temporary file beside the target, is flushed to the disk and then renamed over it:
whoever looks sees the old content or the new one, never half of either, also after a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from curvatlas.budget import available_bytes

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
    # The name comes before the file, so that a stop at any moment finds what has to be removed.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        yield temporary
        _flush(temporary)
        if keep_previous and target.exists():
            with contextlib.suppress(OSError):
                previous(target).unlink(missing_ok=True)
                os.link(target, previous(target))
        os.replace(temporary, target)
        _flush(target.parent)
    except BaseException as error:
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


def write_keeping_previous(target: Path, write: Callable[[], object]) -> None:
    """``write`` with the state before it kept, where the disk has room for both."""
    try:
        write()
    except OSError as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        # A limit on the size of one file (EFBIG) is not lifted by removing another.
        if cause.errno not in (errno.ENOSPC, errno.EDQUOT) or not previous(target).exists():
            raise
        previous(target).unlink()  # room for the new state matters more than the way back
        write()


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
        # half of a surrogate pair can be neither printed nor written
        if re.search("\\\\u[dD]|[\ud800-\udfff]", text):
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


def _means_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    # safetensors reports the system's error as text only
    return any(f"os error {number}" in str(error) for number in _FULL)


# --- .safetensors files: eight bytes of header length, a JSON header, the tensors' bytes ----------
#
# Everything the header declares is checked against the bytes that are there before a tensor is
# made, so that a small file cannot claim a huge shape; the tensors are views of the one buffer that
# was read, so that a file that changes later changes nothing. The checksum is no signature.

CHECKSUM = "sha256"  # entry of the metadata
_HEADER_LIMIT = 64 * 2**20
_EMPTY_LIMIT = 10**6  # leading sizes of tensors without elements: tolist() makes that many lists
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def write(
    target: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    keep_previous: bool = False,
) -> None:
    """Replace ``target`` by these tensors and texts and their checksum, atomically.

    The bytes go to the disk straight from the tensors' memory: one that fills the memory has no
    room for a second copy.
    """
    names = {dtype: name for name, dtype in _DTYPES.items()}
    for name, tensor in tensors.items():
        if tensor.dtype not in names:
            raise TypeError(f"{name}: a tensor of {tensor.dtype} cannot be stored.")
    texts = {**metadata, CHECKSUM: checksum(metadata, tensors)}
    entries: dict[str, Any] = {"__metadata__": texts}
    # wide numbers first, so that every tensor is aligned without gaps
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    place = 0
    for name in order:
        end = place + tensors[name].numel() * tensors[name].element_size()
        entries[name] = {
            "dtype": names[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [place, end],
        }
        place = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with replacing(target, keep_previous=keep_previous) as temporary, open(temporary, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            file.write(raw_bytes(tensors[name]))


def checksum(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of every text, and of each tensor's name, dtype, shape and bytes, by name."""
    digest = hashlib.sha256()
    for name in sorted(texts):
        content = texts[name].encode()
        digest.update(json.dumps(["text", name, len(content)]).encode() + b"\n" + content)
    for name in sorted(tensors):
        tensor = tensors[name]
        described = ["tensor", name, str(tensor.dtype), list(tensor.shape)]
        digest.update(json.dumps(described).encode() + b"\n")
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def verified(metadata: dict[str, str], tensors: Mapping[str, Tensor], where: str) -> dict[str, str]:
    """The metadata without their checksum; ValueError when it is absent or does not hold."""
    texts = {name: text for name, text in metadata.items() if name != CHECKSUM}
    if CHECKSUM not in metadata:
        raise ValueError(f"{where} carries no checksum: it was edited or is not ours.")
    if metadata[CHECKSUM] != checksum(texts, tensors):
        raise ValueError(f"{where} does not match its checksum: it is damaged or was edited.")
    return texts


def in_memory(tensor: Tensor) -> list[Tensor]:
    """The tensor, or the numbers and indices that a sparse one keeps in place of a memory."""
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # an opaque one, which has no memory that can be read


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of the tensor's numbers in row-major order, without a copy where it is on a CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def read(path: Path, *, follow_links: bool = True) -> bytearray:
    """The bytes of the file, refused when they would not fit in memory."""
    return read_bytes(path, limit=available_bytes(), follow_links=follow_links)


def parse(content: bytearray, where: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file, or ValueError with the reason."""
    header, start = _header(content, where)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{where} has metadata that is not text.")
    tensors: dict[str, Tensor] = {}
    expected = rows_of_nothing = 0
    try:
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, entry in entries:
            dtype, shape, (begin, end) = _entry(entry)
            if begin != expected or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError("its shape and its bytes disagree")
            if end > len(content) - start:
                raise ValueError("it ends beyond the file")
            rows_of_nothing += math.prod(shape[: shape.index(0)]) if 0 in shape else 0
            if rows_of_nothing > _EMPTY_LIMIT:
                raise ValueError("it has no elements and a huge shape")
            tensors[name] = _tensor(content, dtype, shape, start + begin, end - begin)
            expected = end
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{where} declares a tensor that is not there: {error}.") from error
    if expected != len(content) - start:
        raise ValueError(f"{where} has {len(content) - start - expected} bytes nobody declared.")
    return metadata, tensors


def _header(content: bytearray, where: str) -> tuple[dict[str, Any], int]:
    if len(content) < 8:
        raise ValueError(f"{where} is not a readable safetensors file: it ends in the header.")
    length = int.from_bytes(content[:8], "little")
    if length > min(len(content) - 8, _HEADER_LIMIT):
        raise ValueError(f"{where} is not a readable safetensors file: no valid header length.")
    header = parse_json(content[8 : 8 + length], f"the header of {where}")
    if not isinstance(header, dict):
        raise ValueError(f"{where} is not a readable safetensors file: the header is no mapping.")
    return header, 8 + length


def _entry(entry: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("its fields are unknown")
    shape, offsets = entry["shape"], entry["data_offsets"]
    numbers = [*shape, *offsets]
    if len(offsets) != 2 or len(shape) > 16 or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("its sizes are no sizes")
    return _DTYPES[entry["dtype"]], tuple(shape), (offsets[0], offsets[1])


def _tensor(
    content: bytearray, dtype: torch.dtype, shape: tuple[int, ...], begin: int, size: int
) -> Tensor:
    if size == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(content, dtype=dtype, offset=begin, count=size // dtype.itemsize)
    # Processors may refuse or slow down unaligned numbers: such a tensor gets its own memory.
    return (flat if begin % dtype.itemsize == 0 else flat.clone()).reshape(shape)
