"""Reading ``.safetensors`` files that nobody vouches for.

The format is eight bytes of header length, a JSON header, and the tensors' bytes. Everything the
header declares is checked against the bytes that are there before a tensor is made, so a small file
cannot claim a huge shape; the tensors are views of the one buffer that was read, so a file that
changes later changes nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import pkgutil
import types
import typing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvatlas.budget import available_bytes
from curvatlas.files import parse_json, read_bytes

_HEADER_LIMIT = 64 * 2**20
_EMPTY_LIMIT = 10**6  # leading size of a tensor without elements: tolist() makes that many lists
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
# Packages whose modules define results; a module that needs an absent extra is passed over.
_RESULT_PACKAGES = (
    "problem", "operators", "spectra", "blocks", "theory", "analysis", "training", "runs", "zoo",
)  # fmt: skip


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
    expected = 0
    try:
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, entry in entries:
            dtype, shape, (begin, end) = _entry(entry)
            if begin != expected or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError("its shape and its bytes disagree")
            if end > len(content) - start:
                raise ValueError("it ends beyond the file")
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
    if 0 in shape and math.prod(shape[: shape.index(0)]) > _EMPTY_LIMIT:
        raise ValueError("it has no elements and a huge shape")
    return _DTYPES[entry["dtype"]], tuple(shape), (offsets[0], offsets[1])


def _tensor(
    content: bytearray, dtype: torch.dtype, shape: tuple[int, ...], begin: int, size: int
) -> Tensor:
    if size == 0:
        return torch.empty(shape, dtype=dtype)
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
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError):
        return None
    for name, value in fields.items():
        if name in hints and not _fits(value, hints[name]):
            return name
    return None


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
    if isinstance(origin, type):
        return isinstance(value, origin)
    return isinstance(value, hint) if isinstance(hint, type) else True
