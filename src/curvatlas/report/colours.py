"""Colours that survive colour blindness, dark screens and grey printers, and small pictures."""

from __future__ import annotations

import base64
import math
import struct
import zlib

from curvatlas.report.markup import Markup

# Samples of viridis and of a blue-white-orange scale, evenly spaced; in between linear.
_SEQUENTIAL = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30",
               "fde725")  # fmt: skip
_DIVERGING = ("053061", "2166ac", "4393c3", "92c5de", "f7f7f7", "f4a582", "d6604d", "b2182b",
              "67001f")  # fmt: skip
_MISSING = (150, 150, 150)

RGB = tuple[int, int, int]


def sequential(place: float) -> RGB:
    """0 → dark violet, 1 → yellow."""
    return _between(_SEQUENTIAL, place)


def diverging(place: float) -> RGB:
    """0 → blue, ½ → white, 1 → red."""
    return _between(_DIVERGING, place)


def missing() -> RGB:
    """Grey, for what was not computed."""
    return _MISSING


def png(pixels: list[list[RGB]]) -> Markup:
    """A picture of one pixel a cell as a data address (PNG, 8-bit RGB)."""
    height, width = len(pixels), len(pixels[0]) if pixels else 0
    raw = b"".join(b"\x00" + bytes(channel for p in row for channel in p) for row in pixels)

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    content += chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return Markup("data:image/png;base64," + base64.b64encode(content).decode())


def _between(samples: tuple[str, ...], place: float) -> RGB:
    if not math.isfinite(place):
        return _MISSING
    position = min(max(place, 0.0), 1.0) * (len(samples) - 1)
    index = min(int(position), len(samples) - 2)
    share = position - index
    one, two = bytes.fromhex(samples[index]), bytes.fromhex(samples[index + 1])
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(one, two, strict=True))
    return red, green, blue
