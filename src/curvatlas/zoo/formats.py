"""Readers for the file formats of MNIST's family, safe on files one does not trust."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np

_MAX_BYTES = 2**30  # far above MNIST (0.2 GB unpacked): stops a decompression bomb


def _read(path: str | os.PathLike[str]) -> bytes:
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content: bytes = file.read(_MAX_BYTES + 1)
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}.") from error
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{path} unpacks to more than {_MAX_BYTES} bytes: not one of these sets.")
    return content


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """An IDX file of bytes (two zeros, type 0x08, axes, sizes, data) as a uint8 array."""
    content = _read(path)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an IDX file of bytes: starts with {content[:4]!r}.")
    start = 4 + 4 * content[3]
    shape = tuple(np.frombuffer(content[4:start], dtype=">u4").astype(int).tolist())
    data = np.frombuffer(content[start:], dtype=np.uint8)
    if len(shape) != content[3] or data.size != int(np.prod(shape)):
        raise ValueError(f"{path} is cut short: shape {shape}, but {data.size} bytes of data.")
    return data.reshape(shape)
