r"""Products of a model whose weights and vectors are spread over processes, station by station.

The passes of ``model.Chain`` need one block at a time. A walk goes from the stem through the blocks
to the tail and back; at every station its weights and its columns of the vectors are gathered, on
the way back its rows of the product are reduce-scattered, and the next station is on its way while
the present one is computed:

    up      gather W, V of block b      ẋ_b+1 = J_b (ẋ_b, V_b)           keep the tangents inside
    down    gather W, V of block b      (Rδ_b, R ∂ℓ/∂W_b) from Rδ_b+1     reduce-scatter the second

Each process walks once for every run of its own samples; who has fewer joins in the gathering of
the others (``problem.sharding``). A block by hand is held to double backward through its module on
one sample, since the whole model is in no place together.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvatlas import parallel
from curvatlas.engines.graphs import graph_size
from curvatlas.engines.kept import PLANNED
from curvatlas.engines.tangent.block import Formed, LinearisedBlock
from curvatlas.engines.tangent.linear import Buffers, squared_distance
from curvatlas.engines.tangent.model import (
    Chain,
    LayerCall,
    ModelReading,
    layer_views,
    layer_weights,
    pair_numbers,
    runs_of,
    tensors_in,
    token_shape,
)
from curvatlas.engines.tangent.reading import UnmappedModuleError
from curvatlas.engines.tangent.recomputed import RecomputedBlock
from curvatlas.engines.tangent.remainder import Remainder
from curvatlas.engines.tangent.stem import AutogradStem, Slots
from curvatlas.engines.tangent.structure import Weights
from curvatlas.engines.tangent.tail import AutogradTail
from curvatlas.linear_operator import Part
from curvatlas.problem import Batch, Problem
from curvatlas.problem.evaluation import called_with
from curvatlas.problem.sharding import Session, ShardedWeights, Ticket, Vectors

_BESIDE = 0.5  # tangents of a product, in sizes of what a run keeps: measured 0.4
_IN_FLIGHT = 2**27  # bytes of tangents that several columns may take together


@dataclass(frozen=True)
class _Stop:
    """A station on the way, by its key; 0: nothing has to be gathered."""

    key: int
    label: str


class _Line:
    """Stops in a row; the next one is gathered while the present one is computed."""

    def __init__(
        self,
        session: Session,
        stops: Sequence[_Stop],
        room_for: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        assert session.vectors is not None
        self._session, self._stops, self._room_for = session, stops, room_for
        self._vectors, self._at = session.vectors, 0
        self.count = len(session.vectors.columns)
        self._coming = self._begin(0)

    def _begin(self, place: int) -> Ticket | None:
        if place >= len(self._stops) or not self._stops[place].key:
            return None
        return self._session.gather(self._stops[place].key, self.count)

    @contextlib.contextmanager
    def stop(self) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """The next stop: its weights, and its columns (K, *shape) of the parameters that vary."""
        here, ticket = self._stops[self._at], self._coming
        with self._room_for(here.label):
            self._at += 1
            self._coming = self._begin(self._at)
            if ticket is None:
                yield {}, {}
                return
            weights, station = ticket.wait(), ticket.station
            del ticket
            columns = station.by_name(station.tangents)
            yield weights, {n: c for n, c in columns.items() if n in self._vectors.local}
            station.free()

    @contextlib.contextmanager
    def slots(self) -> Iterator[Slots]:
        """Where the rates of the present stop's parameters go; they are summed on the way out."""
        key = self._stops[self._at - 1].key
        if not key:
            yield Slots({})
            return
        station = self._session.weights.station(key)
        columns = self._vectors.columns
        rows = columns.new_empty(self.count, station.size)
        into = station.by_name(rows)
        slots = Slots({name: slot for name, slot in into.items() if name in self._vectors.local})
        yield slots
        slots.finish()
        self._session.reduce(key, rows)


class ShardedChain(Chain):
    """``Chain`` of a model whose weights are spread; ``verify``: hold every block to its module."""

    def __init__(
        self, problem: Problem, reading: ModelReading, *args: Any, verify: bool, **options: Any
    ) -> None:
        if any(layer.adapted for layer in reading.layers):
            raise UnmappedModuleError("adapters on weights that are spread are left to autograd.")
        assert problem.sharded is not None
        self._sharded: ShardedWeights = problem.sharded
        self._verify, self.difference = verify, 0.0
        self._arrived: Weights | None = None
        super().__init__(problem, reading, *args, **options)

    @contextlib.contextmanager
    def _block(self, index: int, following: int) -> Iterator[LinearisedBlock | RecomputedBlock]:
        if self._arrived is None:
            with super()._block(index, following) as block:
                yield block
            return
        block = self.blocks[index]
        block.attach(self._arrived)
        try:
            yield block
        finally:
            block.detach()

    def _stops(self, local: Mapping[str, Any]) -> list[_Stop]:
        """Stem, blocks and tail, and back."""
        stem = _Stop(self._sharded.key(n for n in self.stem.names if n in local), "the stem")
        blocks = [_Stop(self._sharded.key(s.parameters), s.path) for s in self.layers]
        by_graph = isinstance(self.tail, AutogradTail)  # which holds its own weights
        names = [n for n in self.tail.names if n in local or not by_graph]
        tail = _Stop(self._sharded.key(names), "the head")
        return [stem, *blocks, tail, *reversed(blocks), stem]

    def walk(self, session: Session, part: Part) -> None:
        """Add H, H_o or H_f times the session's columns to its product."""
        assert session.vectors is not None
        line = _Line(session, self._stops(session.vectors.local), self._room_for)
        space, curved = self.space, part != "outer"
        moved: Tensor | None = None
        stem_state: Any = None
        with line.stop() as (_, columns):
            if columns:
                moved, stem_state = self.stem.push(columns, space)
        again: Any = None
        states: list[Any] = []
        for index, layer in enumerate(self.layers):
            with line.stop() as (weights, columns):
                # Matrices come again on the way down. A gain's tangent is asked for before that:
                # the block after a post-norm forms its input's tangent from it once more.
                dots = {
                    name: dot if dot.ndim > 2 else dot.clone()
                    for name, dot in layer_views(layer, columns).items()
                }
                state: Any = None
                if moved is not None or dots:
                    with self._with(layer_weights(layer, weights)), self._block(index, 0) as block:
                        state = block.push_checked(dots, moved, line.count, again)
                    moved, again = state.output, state.output_again
                states.append(state)
        flat = None if moved is None else moved.flatten(1, 2)
        with line.stop() as (weights, columns), line.slots() as slots:
            if isinstance(self.tail, AutogradTail):
                rate = self.tail.product(flat, columns, part, slots, space)
            else:
                self.tail.attach(weights)
                rate = self.tail.product(flat, columns, part, slots, space)
                self.tail.detach()
        for index in reversed(range(len(self.blocks))):
            state = states.pop() if curved else None
            with (
                line.stop() as (weights, _),
                line.slots() as slots,
                self._with(layer_weights(self.layers[index], weights)),
            ):
                rate = self._pull_block(index, rate, state, slots, needs_input=True)
        with line.stop(), line.slots() as slots:
            if slots.into:
                self.stem.pull(rate, stem_state if curved else None, slots, space)

    @contextlib.contextmanager
    def _with(self, weights: Weights) -> Iterator[None]:
        """Inside, the block is computed with these weights."""
        self._arrived = weights
        try:
            yield
        finally:
            self._arrived = None

    # --- a block by hand against its module -------------------------------------------------------

    def _add_block(
        self, call: LayerCall, weights: Weights, z: Tensor, again: Formed | None, *, turn: int
    ) -> tuple[Tensor, Formed | None]:
        if self._verify:
            self.difference = max(self.difference, self._off(call, weights, z))
        return super()._add_block(call, weights, z, again, turn=turn)

    def _off(self, call: LayerCall, weights: Weights, z: Tensor) -> float:
        """How far products of the block by hand are from double backward through its module.

        ‖ours − theirs‖ / ‖theirs‖ of J v and of Jᵀu + Σ_y δ_y ∂²y v, at random v, u and δ.
        """
        layer, random = call.layer, torch.Generator().manual_seed(5)

        def draw(like: Tensor) -> Tensor:
            drawn = torch.randn(like.shape, generator=random, dtype=torch.float64, device="cpu")
            return drawn.to(like).unsqueeze(0)

        delta, rate = draw(z)[0], draw(z)
        with self._problem.present(layer.parameters) as values:
            leaves = {_X: z.detach().requires_grad_(True)}
            leaves |= {name: value.requires_grad_(True) for name, value in values.items()}
        dots = {name: draw(leaf.detach()) for name, leaf in leaves.items()}
        with torch.enable_grad():
            graph = Remainder([self._by_module(call, leaves)], leaves, [delta])
            outputs, bent = graph.push(dots, list(leaves), bends=True)
            pulled = graph.pull([rate], list(leaves))
        pushed = outputs[0]
        theirs = {name: torch.zeros_like(dot) for name, dot in dots.items()}
        for some in (bent, pulled):
            for name, value in some.items():
                theirs[name] += value
        del graph, outputs, bent, pulled, leaves
        block = replace(call.call, x=z).linearise(layer.spec, weights)
        block.gradient(delta, wanted=())
        state = block.push_checked(layer_views(layer, dots), dots[_X], 1, None)
        ours = {name: torch.zeros_like(dot) for name, dot in dots.items()}
        rates, back = block.pull(rate, state, wanted=list(layer.places))
        for name, value in rates.items():
            layer.places[name].add_to(ours[layer.places[name].parameter], value)
        if back is not None:
            ours[_X] += back.view(ours[_X].shape)
        pairs = [(state.output, pushed), *((ours[name], theirs[name]) for name in theirs)]
        off = sum(squared_distance(a, b) for a, b in pairs)
        scale = sum(squared_distance(None, b) for _, b in pairs)
        return math.sqrt(off / scale) if scale else math.sqrt(off)

    def _by_module(self, call: LayerCall, leaves: Mapping[str, Tensor]) -> Tensor:
        """What the layer's own module gives (n, L, d), of parameters and tokens ``leaves``."""
        layer, (args, kwargs) = call.layer, call.arguments
        tokens = call.call.as_module(leaves[_X])
        if args:
            args = (tokens, *args[1:])
        else:
            kwargs = {**kwargs, next(iter(kwargs)): tokens}
        prefix = f"{layer.path}." if layer.path else ""
        own = [name for name, _ in layer.module.named_parameters()]
        values = {name: leaves[self._reading.aliases[prefix + name]] for name in own}
        result = called_with(layer.module, values, args, kwargs)
        return call.call.tokens(result[0] if isinstance(result, tuple | list) else result)


_X = "the block's input"  # no parameter has a space in its name


class ShardedLinearisation:
    """The batches of a process, linearised where weights are spread; all processes make one.

    pair_room: bytes for what attention keeps of one sample; beyond, it goes by blocks of queries.
    budget: bytes for what is kept; runs of samples that do not fit are linearised anew in every
    product, and block by block where one run alone does not fit.
    """

    def __init__(
        self,
        problem: Problem,
        names: Sequence[str],
        *,
        reading: ModelReading,
        bends: bool,
        budget: int,
        logit_room: int | None,
        pair_room: int,
    ) -> None:
        assert problem.sharded is not None
        assert problem.shards is not None
        self._problem, self._names, self._reading = problem, tuple(names), reading
        self._bends, self._logit_room = bends, logit_room
        self._places = problem.sharded.places(problem.layout)
        local = problem.shards.length * problem.dtype.itemsize
        # Gathering costs as much for few samples as for many, and their tangents take memory: up
        # to what a vector and a product take here together, a run is not cut.
        self._at_once = max(2**26, 2 * local)
        self._room = PLANNED * budget - 4 * local
        self._space = Buffers(keep=True)
        self._kept: list[ShardedChain] = []
        self._complete = False  # whether all runs are kept
        self._widest = 0  # bytes of tangents that a column takes
        self._recompute, self._blocked = problem.checkpoint_activations, False
        self._pair_room = pair_room
        self.unused: frozenset[str] = frozenset(names)

    def verified(self, sample: Batch) -> float:
        """The largest difference of a block by hand from double backward, on one sample."""
        return self._chain(sample, 1.0, verify=True).difference

    def _chain(self, batch: Batch, share: float, *, verify: bool = False) -> ShardedChain:
        problem = self._problem
        if problem.checkpoint_activations:  # by hand, not by autograd's checkpoints
            problem = copy.copy(problem)
            problem.checkpoint_activations = False
        return ShardedChain(
            problem,
            self._reading,
            batch,
            self._names,
            share=share,
            space=self._space,
            logit_room=self._logit_room,
            recompute=self._recompute,
            blocked=self._blocked,
            held={},
            bends=self._bends,
            verify=verify,
        )

    def _runs(self) -> Iterator[tuple[Batch, float]]:
        """Runs of samples, each with its share of the whole loss."""
        problem, room = self._problem, self._at_once
        for batch in problem.batches():
            shape = token_shape(problem, self._reading, batch)
            pairs = 2 * pair_numbers(self._reading.layers, shape[1]) * problem.dtype.itemsize
            self._blocked = self._blocked or pairs > self._pair_room
            for run, share in runs_of(
                problem,
                self._reading,
                batch,
                shape,
                blocked=self._blocked,
                alone=room,
                at_once=room,
            ):
                yield run, share * batch.count / problem.normaliser

    def _chains(self) -> Iterator[ShardedChain]:
        """Every run, linearised; all of them are kept, or none where they do not fit together."""
        if self._complete:
            yield from self._kept
            return
        self._kept.clear()
        runs: Iterable[tuple[Batch, float]] = self._runs()
        count: float = math.inf
        if self._problem.held:
            runs = list(runs)
            count = len(runs)
        keep = True
        for run, share in runs:
            chain = self._chain(run, share)
            held = _held_bytes(chain, self._problem)
            if (1 + _BESIDE) * held > self._room and not self._recompute:
                self._recompute = True
                del chain
                chain = self._chain(run, share)
                held = _held_bytes(chain, self._problem)
            self.unused -= chain.names()
            self._widest = max(self._widest, chain.tangent_bytes)
            keep = keep and (count + _BESIDE) * held <= self._room
            if keep:
                self._kept.append(chain)
            else:
                self._kept.clear()
            yield chain
            del chain  # before the next one is linearised
        self._complete = keep

    def columns_at_once(self) -> int:
        """How many columns go through together, the same in every process."""
        own = _IN_FLIGHT // self._widest if self._widest else 64
        return parallel.smallest_over_processes(max(1, min(64, own)))

    def product(self, columns: Tensor, part: Part) -> Tensor:
        """This process's entries (K, P_local) of H, H_o or H_f times columns (K, P_local).

        Every process calls it with as many columns.
        """
        problem, step = self._problem, self.columns_at_once()
        total = torch.zeros_like(columns)
        for start in range(0, len(columns), step):
            some = slice(start, min(start + step, len(columns)))
            vectors = Vectors(columns[some], total[some], self._places)
            with problem.joined() as session:
                session.vectors = vectors
                with problem.evaluating():
                    for chain in self._chains():
                        chain.walk(session, part)
        return total


def _held_bytes(chain: Chain, problem: Problem) -> int:
    """Memory that a chain keeps from product to product."""
    storages = (t.untyped_storage() for t in tensors_in(chain, without=problem.own_tensors()))
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    ends = [end for end in (chain.stem, chain.tail) if isinstance(end, AutogradStem | AutogradTail)]
    roots = [root for end in ends for root in end.graph()]
    return sum(kept.values()) + graph_size(roots, excluding=problem.own_tensors()).bytes
