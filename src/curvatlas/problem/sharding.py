r"""Weights that FSDP2 (``fully_shard``) spreads, used where they lie and gathered in pieces.

Every process of a mesh holds some rows of every parameter, a DTensor of placement Shard(0). Vectors
and products follow the same cut, so that P numbers take P / n in each of n processes:

    v_local = (rows of v_1, rows of v_2, …)        in the order of the flat vector.

A ``Station`` is a group of parameters that is needed whole at one place: a block, the embedding,
the head. Its weights and its piece of the vectors are gathered together just before and freed
after; its piece of the product is reduce-scattered.

Processes with other data take other ways through the model. They meet and say what they need next
(``Session``): one station, or a ``Walk`` along many of them, which needs no further meeting. All of
them join in what any of them needs, those that are through wait for the others, and where one fails
it goes on to the end of the walk with zeros; then all stop with its message.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from curvatlas import parallel
from curvatlas.errors import PeerError, is_wrong_input
from curvatlas.problem.kernels import unwatched
from curvatlas.problem.parameters import Layout


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 manages the module, told by name: importing FSDP takes seconds."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def class_name(model: nn.Module) -> str:
    """The name of a model's class, that which it had before ``fully_shard`` made one."""
    kind = type(model)
    return (kind.__bases__[-1] if is_fully_sharded(model) else kind).__name__


@dataclass(frozen=True)
class Piece:
    """Which entries of a parameter this process holds: ``start`` to ``stop`` of ``size``."""

    name: str
    shape: torch.Size
    size: int
    chunk: int  # entries of every process but the last ones, which may have fewer or none
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def of(self, index: int) -> slice:
        """The entries of process ``index``."""
        return slice(min(index * self.chunk, self.size), min((index + 1) * self.chunk, self.size))


class ShardedWeights:
    """The parameters of a model that FSDP2 spreads by rows over one mesh."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Any]) -> None:
        first = next(iter(parameters.values()))
        mesh = first.device_mesh
        self._model, self.parameters = model, dict(parameters)
        self.group = mesh.get_group(mesh.ndim - 1)
        self.replicas = mesh.get_group(0) if mesh.ndim == 2 else None
        self.replica: int = mesh.get_local_rank(0) if mesh.ndim == 2 else 0
        self.count: int = mesh.size(mesh.ndim - 1)
        self.index: int = mesh.get_local_rank(mesh.ndim - 1)
        self.dtype, self.device = first.dtype, first.to_local().device  # of what is gathered
        self.pieces = [self._piece(name, p, self.index) for name, p in self.parameters.items()]
        self._numbers = {name: number for number, name in enumerate(self.parameters)}
        self._managed = [module for module in model.modules() if is_fully_sharded(module)]
        self._stations: dict[int, Station] = {}
        self.routes: list[Route] = []  # the same in every process
        self.digests: dict[str, int] = {}
        self.squares: dict[str, float] = {}
        self.session: Session | None = None

    @staticmethod
    def of(model: nn.Module) -> ShardedWeights | None:
        """The weights of a model that is spread by rows over all processes; None: it is not."""
        managed: list[Any] = [module for module in model.modules() if is_fully_sharded(module)]
        for module in managed:
            module.reshard()
        named = dict(model.named_parameters())
        meshes = {getattr(parameter, "device_mesh", None) for parameter in named.values()}
        mesh = meshes.pop() if managed and len(meshes) == 1 else None
        if mesh is None or mesh.size() != parallel.world_size():
            return None
        dtypes = {parameter.dtype for parameter in named.values()}
        if len(dtypes) > 1 or not all(map(_by_rows, named.values())):
            return None
        return ShardedWeights(model, named)

    def _piece(self, name: str, parameter: Any, index: int) -> Piece:
        rows, size = max(parameter.shape[0], 1), parameter.numel()
        chunk = -(-rows // self.count) * (size // rows)
        start = min(index * chunk, size)
        return Piece(name, parameter.shape, size, chunk, start, min(start + chunk, size))

    def local(self, name: str) -> Tensor:
        """This process's entries of a parameter, flat."""
        with torch.no_grad():  # there a DTensor gives the tensor that it holds, and makes none
            value: Tensor = self.parameters[name].to_local()
        return value.detach().reshape(-1)

    def shards(self, layout: Layout) -> parallel.Shards:
        """Which entries of the flat vector every process holds."""
        places = zip(layout.names, layout.starts, strict=True)
        cut = [
            [
                (start + piece.start, start + piece.stop)
                for index in range(self.count)
                for piece in [self._piece(name, self.parameters[name], index)]
            ]
            for name, start in places
        ]
        ranges = tuple(
            tuple(r for r in (pieces[index] for pieces in cut) if r[0] < r[1])
            for index in range(self.count)
        )
        return parallel.Shards(
            layout.size, self.index, ranges, self.group, writes=self.replica == 0
        )

    def places(self, layout: Layout) -> dict[str, tuple[int, int]]:
        """Parameter → (start, length) of its entries among this process's part of a vector."""
        lengths = [self.pieces[self._numbers[name]].length for name in layout.names]
        starts = accumulate(lengths, initial=0)
        return dict(zip(layout.names, zip(starts, lengths, strict=False), strict=True))

    def look(self) -> None:
        """Sum up the values of every parameter over the processes, which do so together.

        digests: Σ_j w_j b_j mod 2⁶⁴ over the bits b_j of the entries, with weights w_j by their
        places, the same number however many processes share them. squares: Σ_j x_j².
        """
        sums = torch.zeros(len(self.pieces), dtype=torch.int64)
        squares = torch.zeros(len(self.pieces), dtype=torch.float64)
        for number, piece in enumerate(self.pieces):
            local = self.local(piece.name).cpu()
            squares[number] = torch.linalg.vector_norm(local, dtype=torch.float64).square()
            for start in range(0, len(local), _LOOKED_AT):
                values = local[start : start + _LOOKED_AT].contiguous()
                bits = values.view(_INTEGERS[values.element_size()]).to(torch.int64)
                places = torch.arange(len(values)) + (piece.start + start)
                sums[number] += (bits * ((places * _ODD) ^ (places >> 5) | 1)).sum()
        if self.count > 1:
            parallel.add_over_processes(sums, self.group)
            parallel.add_over_processes(squares, self.group)
        self.digests = dict(zip(self.parameters, sums.tolist(), strict=True))
        self.squares = dict(zip(self.parameters, squares.tolist(), strict=True))

    def reshard(self) -> None:
        """Free what FSDP2 has left gathered after a forward pass of its own."""
        module: Any
        for module in self._managed:
            if is_fully_sharded(module):
                module.reshard()

    def flat(self, tensors: Mapping[str, Any] | Sequence[Any], layout: Layout) -> Tensor:
        """This process's entries (P_local,) of one DTensor a parameter, spread as that is."""
        by_name: Mapping[str, Any] = layout.by_name(tensors)
        parts = []
        for name in layout.names:
            tensor, parameter = by_name[name], self.parameters[name]
            if tensor.shape != parameter.shape or tensor.placements != parameter.placements:
                raise ValueError(
                    f"the tensor of {name!r} has the shape {tuple(tensor.shape)} and placements "
                    f"{tensor.placements}, the parameter {tuple(parameter.shape)} and "
                    f"{parameter.placements}: spread it as the parameter."
                )
            parts.append(tensor.detach().to_local().reshape(-1))
        return torch.cat(parts)

    def shaped(self, flat: Tensor, layout: Layout) -> dict[str, Any]:
        """The inverse of ``flat``: one DTensor a parameter."""
        from torch.distributed.tensor import DTensor

        tensors: dict[str, Any] = {}
        for name, (start, length) in self.places(layout).items():
            parameter = self.parameters[name]
            tensors[name] = DTensor.from_local(
                flat[start : start + length].reshape(parameter.to_local().shape),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return tensors

    # --- gathering --------------------------------------------------------------------------------

    def key(self, names: Iterable[str]) -> int:
        """The bits of these parameters' numbers: what processes name a station by."""
        return sum(1 << self._numbers[name] for name in set(names))

    def station(self, key: int) -> Station:
        """The station of the parameters whose bits are set."""
        if key not in self._stations:
            chosen = [piece for number, piece in enumerate(self.pieces) if key >> number & 1]
            self._stations[key] = Station(self, chosen)
        return self._stations[key]

    @contextlib.contextmanager
    def present(
        self, names: Iterable[str], following: Iterable[str] = ()
    ) -> Iterator[dict[str, Tensor]]:
        """Some parameters, whole; ``following`` are on their way meanwhile."""
        key, coming = self.key(names), self.key(following)
        weights: dict[str, Tensor] = {}
        with self.joined() as session:
            if key:
                ticket = session.ahead.pop(key, None) or session.gather(key)
                if coming and coming not in session.ahead:
                    session.ahead[coming] = session.gather(coming)
                weights = ticket.wait()
            try:
                yield weights
            finally:
                weights.clear()

    @contextlib.contextmanager
    def joined(self) -> Iterator[Session]:
        """The session that is open, or one of its own: every process enters and leaves it."""
        if self.session is not None:
            yield self.session
            return
        session = self.session = Session(self)
        try:
            yield session
            session.drain()
        except Exception as error:
            session.fail(error)
            raise
        finally:
            self.session = None

    @contextlib.contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the model's parameters are ``values``."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        whole = {
            name: nn.Parameter(value, self.parameters[name].requires_grad)
            for name, value in values.items()
        }
        kept = [(part._parameters, dict(part._parameters)) for part in self._model.modules()]
        try:
            for held, own in kept:
                held.update({key: whole[names[id(p)]] for key, p in own.items() if p is not None})
            yield
        finally:
            for held, own in kept:
                held.update(own)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Inside, the modules have their own classes, and no hooks of FSDP2."""
        managed: list[Any] = [module for module in self._managed if is_fully_sharded(module)]
        kept = [
            (module, type(module), module._forward_pre_hooks.copy(), module._forward_hooks.copy())
            for module in managed
        ]
        try:
            for module, kind, _, _ in kept:
                module.reshard()
                module.__class__ = kind.__bases__[-1]
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    for number in [n for n, hook in hooks.items() if _is_torchs(hook)]:
                        del hooks[number]
            yield
        finally:
            for module, kind, before, after in kept:
                module.__class__ = kind
                for hooks, own in (
                    (module._forward_pre_hooks, before),
                    (module._forward_hooks, after),
                ):
                    hooks.clear()
                    hooks.update(own)


_ODD = 0x9E3779B97F4A7C1  # 2⁶⁰ over the golden ratio, odd
_LOOKED_AT = 2**20  # entries whose digest is formed at a time
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_torchs(hook: Any) -> bool:
    owner = getattr(hook, "__self__", hook)
    return str(getattr(owner, "__module__", "")).startswith(("torch.distributed", "torch._dynamo"))


def _by_rows(parameter: Any) -> bool:
    """Whether a DTensor is spread by FSDP, (Shard(0),), or by HSDP, (Replicate, Shard(0)).

    Tensor parallelism adds an axis behind these, or strides (``_StridedShard``).
    """
    placements = getattr(parameter, "placements", ())
    if not placements or len(placements) > 2 or not parameter.ndim:
        return False
    *replicated, last = placements
    by_rows = type(last).__name__ == "Shard" and last.dim == 0
    return by_rows and all(placement.is_replicate() for placement in replicated)


# --- what is gathered together ------------------------------------------------------------------


class Station:
    """Some parameters that are whole at one place for a while, one behind the other.

    The memory of their ``tangents`` is emptied and filled again without moving, as FSDP2 does with
    weights, so that views of it that a pass keeps are valid when it comes back.
    """

    def __init__(self, weights: ShardedWeights, pieces: Sequence[Piece]) -> None:
        self._weights, self.pieces = weights, pieces
        *starts, self.size = accumulate((piece.size for piece in pieces), initial=0)
        # Where each piece stands in what a process sends: all send as much.
        *places, self.width = accumulate((piece.chunk for piece in pieces), initial=0)
        self._placed = list(zip(pieces, starts, places, strict=True))
        self.tangents = torch.empty(0, dtype=weights.dtype, device=weights.device)  # (K, size)
        self._others = [index for index in range(weights.count) if index != weights.index]
        # Every parameter by a message of its own, from and into the places where it stays: a copy
        # and three buffers less than one message of all, which is faster where they are small.
        message = self.width * self.tangents.element_size() / max(len(pieces), 1)
        self.straight = (
            weights.count > 1
            and message > _LARGE_MESSAGE
            and parallel.exchanges(weights.group)
            and parallel.carrier(weights.device) == weights.device
        )

    def by_name(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows (K, size) by parameter: views (K, *shape)."""
        parts = torch.split(rows, [piece.size for piece in self.pieces], 1)
        return {
            piece.name: part.view(len(rows), *piece.shape)
            for piece, part in zip(self.pieces, parts, strict=True)
        }

    def pack(self, columns: Tensor | None, local: Mapping[str, tuple[int, int]]) -> Tensor:
        """(1 + K, width): this process's weights, and entries of the columns (K, P_local)."""
        rows = 1 if columns is None else 1 + len(columns)
        sent = torch.zeros(rows, self.width, dtype=self._weights.dtype, device=self._weights.device)
        for piece, _, place in self._placed:
            into = sent[:, place : place + piece.length]
            into[0] = self._weights.local(piece.name)
            if columns is not None and piece.name in local:
                start, length = local[piece.name]
                into[1:] = columns[:, start : start + length]
        return sent

    def unpack(self, received: Tensor) -> dict[str, Tensor]:
        """The weights, from (processes, 1 + K, width); the tangents go to their memory."""
        whole = received.new_empty(1, self.size)
        self._copy(received[:, :1], whole, out=False)
        count = received.shape[1] - 1
        if count:
            self._allocate(count)
            self._copy(received[:, 1:], self.tangents, out=False)
        return {name: value[0] for name, value in self.by_name(whole).items()}

    def _allocate(self, count: int) -> None:
        if self.tangents.shape != (count, self.size):
            self.tangents = self.tangents.new_empty(count, self.size)
        self.tangents.untyped_storage().resize_(count * self.size * self.tangents.element_size())

    def free(self) -> None:
        """Empty the memory of the tangents."""
        self.tangents.untyped_storage().resize_(0)

    def begin_straight(
        self, columns: Tensor | None, local: Mapping[str, tuple[int, int]]
    ) -> Ticket:
        """Begin to gather weights and columns, each parameter straight into its place."""
        weights = self._weights
        whole = self.tangents.new_empty(1, self.size)
        if columns is not None:
            self._allocate(len(columns))
        sent: list[tuple[int, Tensor]] = []
        received: list[tuple[int, Tensor]] = []
        for piece, start, _ in self._placed:
            rows = [(whole[0], weights.local(piece.name).to(weights.dtype))]
            if columns is not None and piece.name in local:
                first, length = local[piece.name]
                rows += zip(self.tangents, columns[:, first : first + length], strict=True)
            for row, own in rows:
                places = row[start : start + piece.size]
                places[piece.of(weights.index)] = own
                sent += [(other, own) for other in self._others]
                received += [(other, places[piece.of(other)]) for other in self._others]
        works = parallel.begin_exchange(sent, received, weights.group)
        return Ticket(self, whole, works, sent)

    def begin_straight_sum(self, rows: Tensor) -> tuple[Tensor, list[Any]]:
        """Begin to send rows (K, size) to where they are kept: (others, K, own entries) arrive."""
        lengths = [piece.length for piece in self.pieces]
        terms = rows.new_empty(len(self._others), sum(lengths), len(rows))
        sent: list[tuple[int, Tensor]] = []
        received: list[tuple[int, Tensor]] = []
        at = 0
        for piece, start, _ in self._placed:
            for other, into in zip(self._others, terms, strict=True):
                arriving = into[at : at + piece.length].view(len(rows), piece.length)
                for row, term in zip(rows, arriving, strict=True):
                    sent.append((other, row[start : start + piece.size][piece.of(other)]))
                    received.append((other, term))
            at += piece.length
        return terms, parallel.begin_exchange(sent, received, self._weights.group)

    def add_straight(
        self, rows: Tensor, terms: Tensor, product: Tensor, local: Mapping[str, tuple[int, int]]
    ) -> None:
        """Add this process's entries of rows (K, size) and what has come from others."""
        at = 0
        for piece, start, _ in self._placed:
            if piece.name in local:
                first, length = local[piece.name]
                total = product[:, first : first + length]
                total += rows[:, start + piece.start : start + piece.stop]
                for into in terms:
                    total += into[at : at + length].view(len(rows), length)
            at += piece.length

    def spread(self, rows: Tensor) -> Tensor:
        """(processes, K, width) of rows (K, size), to be summed and scattered."""
        sent = rows.new_zeros(self._weights.count, len(rows), self.width)
        self._copy(sent, rows, out=True)
        return sent

    def _copy(self, packed: Tensor, whole: Tensor, *, out: bool) -> None:
        for piece, start, place in self._placed:
            full = min(piece.size // piece.chunk, len(packed)) if piece.chunk else 0
            end = start + full * piece.chunk
            rest = start + piece.size - end
            pairs = []
            if full:
                here = whole[:, start:end].view(-1, full, piece.chunk).transpose(0, 1)
                pairs.append((here, packed[:full, :, place : place + piece.chunk]))
            if rest:
                pairs.append((whole[:, end : end + rest], packed[full, :, place : place + rest]))
            for here, there in pairs:
                there.copy_(here) if out else here.copy_(there)

    def add_scattered(
        self, part: Tensor, product: Tensor, local: Mapping[str, tuple[int, int]]
    ) -> None:
        """Add this process's (K, width) of a sum to the product (K, P_local)."""
        for piece, _, place in self._placed:
            if piece.name in local:
                start, length = local[piece.name]
                product[:, start : start + length] += part[:, place : place + length]


# --- meeting before every collective --------------------------------------------------------------

# What is needed first comes first: who is still reading the model is waited for with a walk.
_THROUGH, _FAILED, _TEACH, _GATHER, _WALK = range(5)
_BITS = 60  # of a station's key in one number
_LARGE_MESSAGE = 2**15  # bytes of a parameter that are sent by themselves

Route = tuple[tuple[int, bool], ...]  # (key of a station or 0, whether rows are summed there)
T = TypeVar("T")


@dataclass
class Ticket:
    """A gathering under way."""

    station: Station
    received: Tensor
    works: list[Any]
    sent: Any  # alive until it has gone

    @unwatched
    def wait(self) -> dict[str, Tensor]:
        """The weights, whole; the tangents are in the station's memory."""
        for work in self.works:
            work.wait()
        self.sent = None
        if self.station.straight:
            return {name: value[0] for name, value in self.station.by_name(self.received).items()}
        return self.station.unpack(self.received.to(self.station.tangents.device))


@dataclass
class Vectors:
    """The columns of a product and the product itself, this process's entries: (K, P_local)."""

    columns: Tensor
    product: Tensor
    local: Mapping[str, tuple[int, int]]  # parameter → (start, length)


class Walk:
    """Stations in a row with all processes; the next one is on its way while one computes.

    Every process makes the same calls in the same order, those that have nothing to compute with
    ``to_the_end``, which is also the way out of a walk that has failed here.
    """

    def __init__(self, session: Session, route: Route, count: int) -> None:
        self._session, self._route, self.count = session, route, count
        self._at, self._due = -1, False
        self._coming: Ticket | None = None
        self._weights: dict[str, Tensor] = {}
        self._begin(0)

    def _key(self, place: int) -> int:
        return self._route[place][0] if 0 <= place < len(self._route) else 0

    def _begin(self, place: int) -> None:
        """Begin to gather a station, unless its neighbour is the same one."""
        key = self._key(place)
        if key and key != self._key(place - 1):
            self._coming = self._session.begin(key, self.count)

    def arrive(self) -> tuple[Station | None, dict[str, Tensor]]:
        """The next station and its weights; its tangents are in its memory."""
        self._at += 1
        key, ticket, self._coming = self._key(self._at), self._coming, None
        self._due = self._route[self._at][1] and bool(key)
        if ticket is None and key and not self._weights:  # it could not be begun before
            self._begin(self._at)
            ticket, self._coming = self._coming, None
        try:
            self._begin(self._at + 1)
        finally:
            if ticket is not None:
                self._weights = ticket.wait()
        return (self._session.weights.station(key) if key else None), self._weights

    def add(self, rows: Tensor | None) -> None:
        """Begin to add rows (K, size) of all processes; None: zeros."""
        if self._due:
            self._due = False
            self._session.begin_sum(self._key(self._at), self.count, rows)

    def leave(self) -> None:
        """Free the station."""
        key = self._key(self._at)
        if key and key != self._key(self._at + 1):
            self._weights = {}
            self._session.weights.station(key).free()

    def to_the_end(self) -> None:
        """Take the rest of the way without computing."""
        while True:
            if self._at >= 0:
                self.add(None)
                self.leave()
            if self._at + 1 == len(self._route):
                return
            self.arrive()


@dataclass
class Session:
    """One stretch of work that all processes enter and leave together."""

    weights: ShardedWeights
    vectors: Vectors | None = None
    ahead: dict[int, Ticket] = field(default_factory=dict)  # gathered before they are asked for
    _over: bool = False
    _sums: list[tuple[Station, Tensor, list[Any], Tensor]] = field(default_factory=list)

    def gather(self, key: int) -> Ticket:
        """Begin to gather the weights of a station."""
        return self._served((_GATHER, 0, key), lambda: self.begin(key, 0))

    @contextlib.contextmanager
    def walk(self, route: Route, count: int) -> Iterator[Walk]:
        """A walk with ``count`` columns; where it fails here, its end is reached with zeros."""
        if route not in self.weights.routes:
            self._served((_TEACH, 0, 0), lambda: self._learn(route))
        number = self.weights.routes.index(route)
        here = self._served((_WALK, count, number), lambda: Walk(self, route, count))
        try:
            yield here
        except Exception:
            here.to_the_end()
            raise

    def drain(self) -> None:
        """Join in what others still need; then the sums are complete."""
        while (request := self._meet(_THROUGH, 0, 0)) is not None:
            self._join(request)
        self._over = True
        for ticket in self.ahead.values():
            ticket.wait()
        self._finish_sums()
        if self.vectors is not None and self.weights.replicas is not None:
            parallel.add_over_processes(self.vectors.product, self.weights.replicas)

    def fail(self, error: Exception) -> None:
        """Tell the others, unless they know."""
        if not self._over:
            self._meet(_FAILED, int(is_wrong_input(error)), 0, str(error))

    def _served(self, own: tuple[int, int, int], serve: Callable[[], T]) -> T:
        """Join in what others need before this, then begin it."""
        while (request := self._meet(*own)) != own:
            assert request is not None
            self._join(request)
        return serve()

    @unwatched
    def _meet(
        self, code: int, rows: int, key: int, message: str = ""
    ) -> tuple[int, int, int] | None:
        """What comes next, the same in every process; None: all are through."""
        if parallel.world_size() == 1:
            return None if code < _TEACH else (code, rows, key)
        words = -(-len(self.weights.pieces) // _BITS)
        table = torch.zeros(parallel.world_size(), 2 + words, dtype=torch.int64)
        mask = (1 << _BITS) - 1
        parts = [key >> (_BITS * word) & mask for word in range(words)]
        table[parallel.rank()] = torch.tensor([code, rows, *parts])
        said = [
            (int(code), int(count), sum(part << (_BITS * word) for word, part in enumerate(parts)))
            for code, count, *parts in parallel.add_over_processes(table).tolist()
        ]
        failed = [r for r, request in enumerate(said) if request[0] == _FAILED]
        if failed:
            self._over = True
            messages = parallel.texts(message)
            if code == _FAILED:
                return None
            raise PeerError(
                f"rank {failed[0]} failed, and rank {parallel.rank()} stops with it: "
                f"{messages[failed[0]]}",
                wrong_input=any(said[r][1] for r in failed),
            )
        return min((request for request in said if request[0] != _THROUGH), default=None)

    def _join(self, request: tuple[int, int, int]) -> None:
        """Take part in what others need."""
        code, count, key = request
        if code == _TEACH:
            self._learn(None)
        elif code == _GATHER:
            self.begin(key, count).wait()
        else:
            Walk(self, self.weights.routes[key], count).to_the_end()

    def _learn(self, route: Route | None) -> None:
        """Let every process know the way that some of them want to go."""
        for text in parallel.texts(json.dumps(route)):
            told = json.loads(text)
            if told is not None:
                way = tuple((int(key), bool(sums)) for key, sums in told)
                if way not in self.weights.routes:
                    self.weights.routes.append(way)

    @unwatched
    def begin(self, key: int, count: int) -> Ticket:
        """Begin to gather a station, with ``count`` columns; all processes do."""
        vectors, station = self.vectors, self.weights.station(key)
        columns = None if not count or vectors is None else vectors.columns
        local = {} if vectors is None else vectors.local
        if station.straight:
            return station.begin_straight(columns, local)
        sent = station.pack(columns, local)
        if self.weights.count == 1:
            return Ticket(station, sent.unsqueeze(0), [], sent)
        sent = sent.to(parallel.carrier(sent.device))
        received = sent.new_empty(self.weights.count, *sent.shape)
        work = parallel.begin_all_gather(received, sent, self.weights.group)
        return Ticket(station, received, [work], sent)

    @unwatched
    def begin_sum(self, key: int, count: int, rows: Tensor | None) -> None:
        """Begin to add rows (K, size) of all processes, each to its own entries of the product."""
        self._finish_sums()
        station, weights = self.weights.station(key), self.weights
        if rows is None:
            rows = torch.zeros(count, station.size, dtype=weights.dtype, device=weights.device)
        if station.straight:
            self._sums.append((station, *station.begin_straight_sum(rows), rows))
            return
        sent = station.spread(rows)
        if weights.count == 1:
            self._sums.append((station, sent, [], sent))
            return
        sent = sent.to(parallel.carrier(sent.device))
        terms, work = parallel.begin_reduce_scatter(sent, weights.group)
        self._sums.append((station, terms, [work], sent))

    @unwatched
    def _finish_sums(self) -> None:
        """Wait for the sums under way and keep this process's part of them."""
        for station, terms, works, sent in self._sums:
            for work in works:
                work.wait()
            if self.vectors is None:
                continue
            product, local = self.vectors.product, self.vectors.local
            if station.straight:
                station.add_straight(sent, terms, product, local)
            else:
                station.add_scattered(terms.sum(0).to(self.weights.device), product, local)
        self._sums.clear()
