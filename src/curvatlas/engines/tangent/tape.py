r"""A product written down: its calls on fixed memory, run again without the code around them.

Products of one kind at one point are the same calls of torch on the same memory (``Buffers``); only
the vectors that come in and go out differ. A tape is recorded during one product: views are made
once and kept, what allocates is given its place, and the pieces of the vectors are noted as places
to cut out of the next ones. Of 1500 calls of H·v on a GPT of four blocks, about 640 remain.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvatlas.engines.tangent.linear import Buffers

_FACTORIES = frozenset(("empty", "empty_like", "new_empty"))  # written to before it is read
_WRITING = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"))
# Calls that allocate their result, as functions that take its place.
_PLACED: dict[Any, Callable[..., Any]] = {
    torch.cat: torch.cat,
    torch.addcmul: torch.addcmul,
    torch.mm: torch.mm,
    Tensor.mul: torch.mul,
    Tensor.add: torch.add,
    Tensor.sub: torch.sub,
    Tensor.div: torch.div,
    Tensor.matmul: torch.matmul,
    Tensor.sum: torch.sum,
    Tensor.mean: torch.mean,
    Tensor.index_select: torch.index_select,
}


MOST_CALLS = 30_000  # of about two kilobytes each: where a product has more, Python is little


class UnrecordableError(Exception):
    """A product makes a call that a tape cannot make again."""


@dataclass(frozen=True)
class _Piece:
    """A view of vector ``number``; the offset counts from the vector's first entry."""

    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    cut: tuple[tuple[Any, Any], ...]  # arguments that are pieces of the vectors, or lists of them
    into: Tensor | None  # where the result of a call goes that allocates it

    def repeat(self, views: Sequence[Tensor]) -> None:
        args, kwargs = list(self.args), dict(self.kwargs)
        for place, index in self.cut:
            value = views[index] if isinstance(index, int) else [views[i] for i in index]
            if isinstance(place, str):
                kwargs[place] = value
            else:
                args[place] = value
        result = self.function(*args, **kwargs)
        if self.into is not None:
            self.into.copy_(result)


class Tape:
    """The calls of ``run(*vectors)``, to be made again on other vectors of the same layout.

    No vector may share its memory with anything else that ``run`` reads or writes.
    """

    def __init__(self, run: Callable[..., None], *vectors: Tensor) -> None:
        self.calls: list[_Call] = []
        self._pieces: dict[_Piece, int] = {}
        with _Listener(self, vectors):
            run(*vectors)

    def play(self, *vectors: Tensor) -> None:
        """The same as ``run(*vectors)``."""
        views = self.views(*vectors)
        for call in self.calls:
            if call.cut or call.into is not None:
                call.repeat(views)
            else:
                call.function(*call.args, **call.kwargs)

    def views(self, *vectors: Tensor) -> list[Tensor]:
        """The pieces of the vectors that calls take."""
        starts = [vector.storage_offset() for vector in vectors]
        return [
            vectors[p.number].as_strided(p.size, p.stride, starts[p.number] + p.offset)
            for p in self._pieces
        ]

    def piece(self, piece: _Piece) -> int:
        """The number of a view of one of the vectors."""
        return self._pieces.setdefault(piece, len(self._pieces))


class _Listener(TorchFunctionMode):
    """Writes to a tape what is called inside."""

    def __init__(self, tape: Tape, vectors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tape = tape
        self._vectors = {_memory(vector): i for i, vector in enumerate(vectors)}
        self._starts = [int(vector.storage_offset()) for vector in vectors]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _FACTORIES:
            return result
        into: Tensor | None = None
        if not _writes(name, kwargs):
            given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
            if all(_memory(tensor) in given for tensor in _tensors(result)):
                return result  # views, or no tensors
            if not isinstance(result, Tensor):
                raise UnrecordableError(name)
            into = result
        if into is not None and func in _PLACED:
            func, kwargs, into = _PLACED[func], {**kwargs, "out": into}, None
        cut = [
            (place, pieces)
            for place, value in (*enumerate(args), *kwargs.items())
            if (pieces := self._pieces(value)) is not None
        ]
        # the vectors themselves are not kept: only their places
        places = dict(cut)
        kept = tuple(None if i in places else value for i, value in enumerate(args))
        named = {key: None if key in places else value for key, value in kwargs.items()}
        self._tape.calls.append(_Call(func, kept, named, tuple(cut), into))
        if len(self._tape.calls) > MOST_CALLS:
            raise UnrecordableError(f"more than {MOST_CALLS} calls")
        return result

    def _pieces(self, value: Any) -> int | list[int] | None:
        """An argument as a view of the vectors, or a list of them; None: it is no such thing."""
        if isinstance(value, Tensor):
            number = self._vectors.get(_memory(value))
            if number is None:
                return None
            start = int(value.storage_offset()) - self._starts[number]
            piece = _Piece(number, tuple(value.shape), value.stride(), start)
            return self._tape.piece(piece)
        pieces = [self._pieces(tensor) for tensor in _tensors(value)]
        if all(piece is None for piece in pieces):
            return None
        if len(pieces) != len(value) or None in pieces:
            raise UnrecordableError("a list of pieces of the vectors and of other tensors")
        return pieces  # type: ignore[return-value]


class Tapes:
    """Products of several kinds at one point, on the memory ``space``: recorded the second time.

    The first time their memory grows to its size. Where it grows again, for more columns, a tape
    would keep the memory it was recorded on: all are dropped. ``own``: what products read beside
    the vector, and a caller could give as one (the weights).
    """

    def __init__(self, space: Buffers, *, own: Iterable[Tensor] = (), record: bool = True) -> None:
        self._record, self._own = record, {_memory(tensor) for tensor in own}
        self._space, self._generation = space, space.generation
        self._tapes: dict[Any, Tape | None] = {}  # None: run once, or not to be recorded
        self._plain: set[Any] = set()

    def run(
        self, kind: Hashable, product: Callable[[Tensor, Tensor], None], rows: Tensor, out: Tensor
    ) -> None:
        """``product(rows, out)``, which writes ``out`` (K, P) from ``rows`` (K, P)."""
        if not self._record:
            product(rows, out)
            return
        if self._space.generation != self._generation:
            self._generation = self._space.generation
            self._tapes.clear()
        key = (kind, rows.shape)
        tape = self._tapes.get(key)
        if tape is not None:
            tape.play(rows, out)
            return
        if key in self._tapes and key not in self._plain:
            try:
                vector = rows.clone() if _memory(rows) in self._own else rows
                self._tapes[key] = Tape(product, vector, out)
                return
            except UnrecordableError:
                self._plain.add(key)
        product(rows, out)
        if self._space.generation == self._generation:
            self._tapes.setdefault(key, None)


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes one of its arguments."""
    if name in _WRITING or "out" in kwargs or "grad_input" in kwargs:
        return True
    return name.endswith("_") and not name.endswith("__")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
