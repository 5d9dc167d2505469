"""Writing ``.safetensors`` files with a checksum, and reading those that nobody vouches for.

The format is eight bytes of header length, a JSON header, and the tensors' bytes. Everything the
header declares is checked against the bytes that are there before a tensor is made, so a small file
cannot claim a huge shape; the tensors are views of the one buffer that was read, so a file that
changes later changes nothing. The checksum notices damage; it is no signature.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import math
import pkgutil
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvatlas.budget import available_bytes
from curvatlas.files import parse_json, read_bytes, replacing

CHECKSUM = "sha256"  # entry of the metadata
_HEADER_LIMIT = 64 * 2**20
_EMPTY_LIMIT = 10**6  # leading sizes of tensors without elements: tolist() makes that many lists
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
# Packages whose modules define results; a module that needs an absent extra is passed over.
_RESULT_PACKAGES = (
    "problem", "operators", "spectra", "blocks", "theory", "analysis", "training", "runs", "zoo",
)  # fmt: skip


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


def import_result_modules() -> None:
    """Import every module of the package that may define results (our own code only)."""
    for package_name in _RESULT_PACKAGES:
        with contextlib.suppress(ImportError):
            package = importlib.import_module(f"curvatlas.{package_name}")
            for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"{package.__name__}.{module.name}")


def wrongly_typed(cls: type, fields: dict[str, Any]) -> str | None:
    """The first field whose value does not fit its annotation; None when all do.

    Annotations that cannot be resolved at run time are not checked.
    """
    hints = _hints(cls)
    for name, value in fields.items():
        if name in hints and not _fits(value, hints[name]):
            return name
    return None


@functools.cache  # a file may hold thousands of results of one class
def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError):
        return {}


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, (str, typing.TypeVar)):
        return True
    if hint is None or hint is types.NoneType:
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is typing.Literal:
        return value in arguments
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin in (tuple, list):  # either may stand for the other: JSON knows only one of them
        if not isinstance(value, (tuple, list)):
            return False
        if origin is list or (len(arguments) == 2 and arguments[1] is Ellipsis):
            return all(_fits(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, arguments[1]) for v in value.values())
    if isinstance(origin, type):
        return isinstance(value, origin)
    return isinstance(value, hint) if isinstance(hint, type) else True
