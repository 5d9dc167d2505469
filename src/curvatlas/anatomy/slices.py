"""Slices (one role's piece of one parameter, and its place) and the anatomy made of them.

A piece of a fused parameter need not be contiguous (GPT-2 keeps query, key and value side by side
in columns). Every layout in use is ``count`` runs of ``length`` entries, ``stride`` apart, so four
integers describe a piece of any size; positions are written out only when asked for.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
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

    def leading(self, place: int, name: str) -> Slice:
        """The entries at one place of the first axis, without that axis."""
        if self.count == 1:
            size = self.size // self.shape[0]
            return self._part(name, self.shape[1:], place * size, size)
        if self.count % self.shape[0]:
            raise ValueError(f"{self.name} is no regular piece along its first axis.")
        runs = self.count // self.shape[0]
        return self._part(name, self.shape[1:], place * runs * self.stride, self.length, runs)

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


Selector = str | Slice | Iterable["Selector"]


class Anatomy:
    """Who is who in the flat vector: slices that cover every entry exactly once."""

    def __init__(
        self,
        slices: Iterable[Slice],
        *,
        notes: Iterable[str] = (),
        assumptions: Iterable[str] = (),
    ) -> None:
        self.slices: tuple[Slice, ...] = tuple(slices)
        self.notes = tuple(notes)  # fused projections that stay in one piece, and why
        # roles concluded from what a map does, or left to a name that no trial confirms
        self.assumptions = tuple(assumptions)
        self.size = sum(piece.size for piece in self.slices)

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.slices)

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, selector: Selector) -> Selection:
        return self.select(selector)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self.slices)

    @property
    def roles(self) -> tuple[str, ...]:
        """Distinct roles, in order of first appearance."""
        return tuple(dict.fromkeys(piece.role for piece in self.slices))

    @property
    def sublayers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(piece.sublayer for piece in self.slices))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({piece.layer for piece in self.slices if piece.layer is not None}))

    def sizes(self) -> dict[str, int]:
        """Entries of each role."""
        totals = dict.fromkeys(self.roles, 0)
        for piece in self.slices:
            totals[piece.role] += piece.size
        return totals

    def select(
        self,
        *selectors: Selector,
        role: str | Collection[str] | None = None,
        layer: int | Collection[int] | None = None,
        sublayer: str | Collection[str] | None = None,
    ) -> Selection:
        """Slices that match any of ``selectors`` (none: all) and all of the keywords.

        A selector is a slice, a list of selectors, or a string, read as the first that fits of: a
        slice's name ("blocks.0.query"), a parameter's name, a layer or the beginning of a name
        ("blocks.0", "blocks.0.norm1"), a sublayer of all layers or of one ("attention",
        "blocks.0.ffn"), a role of all layers ("query"), the beginning of a parameter's name up to a
        dot (a module's path), a glob of either ("blocks.*.value").
        ``role`` and ``sublayer`` take globs too.
        """
        chosen = list(self.slices)
        if selectors:
            chosen = list(dict.fromkeys(piece for s in selectors for piece in self._resolve(s)))
        for attribute, wanted in (("role", role), ("sublayer", sublayer)):
            if wanted is not None:
                patterns = [wanted] if isinstance(wanted, str) else list(wanted)
                values = {str(getattr(piece, attribute)) for piece in self.slices}
                for pattern in patterns:
                    if not any(fnmatchcase(value, pattern) for value in values):
                        raise KeyError(unknown_name(f"{attribute}={pattern!r}", pattern, values))
                chosen = [
                    piece
                    for piece in chosen
                    if any(fnmatchcase(getattr(piece, attribute), p) for p in patterns)
                ]
        if layer is not None:
            layers = {layer} if isinstance(layer, int) else set(layer)
            if not layers <= set(self.layers):
                asked = sorted(layers - set(self.layers))
                raise KeyError(f"there is no layer {asked}: layers are {list(self.layers)}.")
            chosen = [piece for piece in chosen if piece.layer in layers]
        if not chosen:
            raise KeyError(f"no slice has all of role={role!r}, layer={layer!r}, {sublayer=}.")
        return Selection(chosen)

    def heads(self, piece: Slice | str) -> Selection:
        """One slice a head, of a query, key, value or output (bias or weight)."""
        if isinstance(piece, str):
            matches = self.select(piece)
            if len(matches) != 1:
                raise ValueError(f"{piece!r} is {len(matches)} slices, heads are cut from one.")
            piece = matches[0]
        kind = piece.role.removeprefix("cross_")
        # Heads divide the features that come out of query, key, value, and that go into output.
        along_rows = len(piece.shape) == 1 or (kind == "output") == piece.transposed
        cut = piece.rows if along_rows else piece.columns
        width = piece.shape[0] if along_rows else piece.shape[1]
        step = piece.head_size
        if step is None or kind not in _HEADED or width % step:
            raise ValueError(
                f"{piece.name} does not divide into heads: only query, key, value and output of an "
                "attention whose head size is known do."
            )
        return Selection(
            cut(h * step, (h + 1) * step, name=f"{piece.name}.head{h}")
            for h in range(width // step)
        )

    def experts(self, piece: Slice) -> Selection:
        """One slice an expert of a mixture: of the stacked weights (experts, out, in) or biases
        (experts, out) of a feed-forward part, or of a module of its own (``experts.3.up_proj``)."""
        if piece.sublayer == "ffn":
            stem = piece.name
            own = re.search(r"experts\.(?:\w*?_)?(\d+)\.", piece.parameter)
            if own:
                stem = re.sub(r"\.\d+$", "", stem)
                return Selection([replace(piece, name=f"{stem}.expert{own[1]}")])
            if len(piece.shape) == (2 if piece.role.endswith("_bias") else 3):
                return Selection(
                    piece.leading(e, f"{stem}.expert{e}") for e in range(piece.shape[0])
                )
        raise ValueError(f"{piece.name} is no part of a mixture of experts.")

    def _resolve(self, selector: Selector) -> list[Slice]:
        if isinstance(selector, Slice):
            return [selector]
        if not isinstance(selector, str):
            return [piece for item in selector for piece in self._resolve(item)]
        layer = re.fullmatch(r"blocks\.(\d+)(?:\.(\w+))?", selector)
        tests: tuple[Callable[[Slice], bool], ...] = (
            lambda piece: piece.name == selector,
            lambda piece: piece.parameter == selector or selector in piece.tied,
            lambda piece: layer is not None and layer[2] is None and piece.layer == int(layer[1]),
            lambda piece: piece.name.startswith(selector + "."),
            lambda piece: piece.sublayer == selector,
            lambda piece: (
                layer is not None
                and piece.layer == int(layer[1])
                and layer[2] in (piece.sublayer, piece.role)
            ),
            lambda piece: piece.role == selector,
            lambda piece: piece.parameter.startswith(selector + "."),
            lambda piece: fnmatchcase(piece.name, selector),
            lambda piece: fnmatchcase(piece.parameter, selector),
        )
        for test in tests:
            matches = [piece for piece in self.slices if test(piece)]
            if matches:
                return matches
        names = {*self.names, *(piece.parameter for piece in self.slices)}
        raise KeyError(unknown_name(f"slice {selector!r}", selector, names))

    def __str__(self) -> str:
        rows = [("name", "sublayer", "shape", "entries", "parameter")]
        for piece in self.slices:
            shape = " × ".join(map(str, piece.shape))
            tied = f" = {', '.join(piece.tied)}" if piece.tied else ""
            rows.append(
                (piece.name, piece.sublayer, shape, f"{piece.size:,}", piece.parameter + tied)
            )
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            f"{n:<{widths[0]}}  {s:<{widths[1]}}  {h:>{widths[2]}}  {e:>{widths[3]}}  {p}"
            for n, s, h, e, p in rows
        ]
        lines.append(f"{len(self.slices)} slices, {self.size:,} entries")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *(f"assumed: {text}" for text in self.assumptions)])

    def __repr__(self) -> str:
        return f"Anatomy({len(self.slices)} slices, {len(self.layers)} layers, {self.size} entries)"


_HEADED = {"query", "key", "value", "output", "query_bias", "key_bias", "value_bias"}


def unknown_name(what: str, text: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(text, sorted(names), n=5, cutoff=0.4)
    hint = f"near matches: {', '.join(near)}" if near else f"known: {', '.join(sorted(names)[:8])}"
    return f"there is no {what}; {hint}."
