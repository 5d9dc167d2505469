"""A slice: one role's piece of one parameter, and where it lies in the flat vector.

A piece of a fused parameter need not be contiguous (GPT-2 keeps query, key and value side by side
in columns). Every layout in use is ``count`` runs of ``length`` entries, ``stride`` apart, so four
integers describe a piece of any size; positions are written out only when asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import SupportsIndex, overload

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Entries of the flat vector that play one role."""

    name: str  # canonical: "blocks.0.query", "blocks.0.norm1.gamma", "embedding.token", …
    parameter: str  # the name in model.named_parameters()
    layer: int | None
    sublayer: str  # embedding, attention, mixer (Mamba, RWKV), norm, ffn, head, other
    role: str  # query, key, …, with "_bias" for biases
    shape: tuple[int, ...]  # of the piece, entries in the order of ``indices``
    start: int  # position of the first entry in the flat vector
    length: int  # entries of a run
    count: int = 1  # runs
    stride: int = 0  # distance between the starts of two runs
    offset: int = 0  # position of the first entry in its own parameter
    transposed: bool = False  # the matrix is stored (in, out), as Conv1D does
    head_size: int | None = None  # for query, key, value and output, where it is known
    tied: tuple[str, ...] = ()  # other names of the same parameter

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.length * self.count

    @property
    def contiguous(self) -> bool:
        return self.count == 1

    @property
    def ranges(self) -> Iterator[tuple[int, int]]:
        """Half-open ranges of the flat vector, in order."""
        for run in range(self.count):
            first = self.start + run * self.stride
            yield first, first + self.length

    @property
    def indices(self) -> Tensor:
        """Positions in the flat vector, (size,) int64; made anew at each call."""
        runs = self.start + self.stride * torch.arange(self.count, device="cpu")
        return (runs[:, None] + torch.arange(self.length, device="cpu")).reshape(-1)

    def view(self, flat: Tensor) -> Tensor:
        """The piece of a flat vector (P,), in ``shape``; shares memory where it is contiguous."""
        runs = flat.as_strided(
            (self.count, self.length),
            (self.stride * flat.stride(0), flat.stride(0)),
            flat.storage_offset() + self.start * flat.stride(0),
        )
        return runs.reshape(self.shape)

    def rows(self, first: int, last: int, *, name: str) -> Slice:
        """Rows first … last−1 of the piece seen as ``shape`` (entries, for a vector)."""
        width = math.prod(self.shape[1:])
        shape = (last - first, *self.shape[1:])
        if self.count == 1:
            return self._part(name, shape, first * width, (last - first) * width)
        per_run = self.length // width
        run, within = divmod(first, per_run)
        if within == 0 and (last - first) % per_run == 0:
            runs = (last - first) // per_run
            return self._part(name, shape, run * self.stride, self.length, runs)
        if (last - 1) // per_run != run:
            raise ValueError(f"rows {first} to {last} of {self.name} are no regular piece.")
        step = run * self.stride + within * width
        return self._part(name, shape, step, (last - first) * width)

    def columns(self, first: int, last: int, *, name: str) -> Slice:
        """Columns first … last−1 of a matrix piece."""
        height, width = self.shape
        if self.count not in (1, height):
            raise ValueError(f"columns of {self.name} are no regular piece.")
        stride = width if self.count == 1 else self.stride
        return self._part(name, (height, last - first), first, last - first, height, stride)

    def _part(
        self,
        name: str,
        shape: tuple[int, ...],
        step: int,
        length: int,
        count: int = 1,
        stride: int | None = None,
    ) -> Slice:
        return replace(
            self,
            name=name,
            shape=shape,
            start=self.start + step,
            offset=self.offset + step,
            length=length,
            count=count,
            stride=0 if count == 1 else self.stride if stride is None else stride,
        )

    def __str__(self) -> str:
        shape = " × ".join(map(str, self.shape))
        return f"{self.name} ({shape}) in {self.parameter}"


class Selection(tuple[Slice, ...]):
    """Some slices, in the order they were asked for; behaves like one piece of the vector."""

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self)

    @property
    def indices(self) -> Tensor:
        """Positions in the flat vector, slice after slice."""
        return torch.cat([piece.indices for piece in self])

    @property
    def ranges(self) -> Iterator[tuple[int, int]]:
        for piece in self:
            yield from piece.ranges

    @overload
    def __getitem__(self, index: SupportsIndex) -> Slice: ...
    @overload
    def __getitem__(self, index: slice) -> Selection: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Slice | Selection:
        if isinstance(index, slice):
            return Selection(super().__getitem__(index))
        return super().__getitem__(index)

    def __repr__(self) -> str:
        return f"Selection({', '.join(self.names)})"
