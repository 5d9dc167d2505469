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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from curvatlas import parallel
from curvatlas.budget import give_back
from curvatlas.engines.graphs import graph_size
from curvatlas.engines.tangent.block import Formed, LinearisedBlock
from curvatlas.engines.tangent.linear import Buffers, restart_numbers, squared_distance
from curvatlas.engines.tangent.model import (
    Chain,
    LayerCall,
    ModelReading,
    layer_views,
    layer_weights,
    pair_numbers,
    runs_of,
    tangent_numbers,
    tensors_in,
    token_shape,
)
from curvatlas.engines.tangent.reading import UnmappedModuleError
from curvatlas.engines.tangent.recomputed import RecomputedBlock
from curvatlas.engines.tangent.remainder import Remainder
from curvatlas.engines.tangent.stem import AutogradStem, Slots
from curvatlas.engines.tangent.tail import AutogradTail
from curvatlas.layers.structure import Weights
from curvatlas.linear_operator import Part
from curvatlas.problem import Batch, Problem
from curvatlas.problem.evaluation import called_with
from curvatlas.problem.kernels import unwatched
from curvatlas.problem.sharding import Route, Session, ShardedWeights, Station, Vectors, Walk

_PLANNED = 0.85  # of the budget; the rest is what the allocator cannot reuse
TRANSIENT = 1.2  # what a column takes on its way, in sizes of its tangents: measured 1.1
# What is there of the largest station: weights and tangents of it and of the next one, its rows,
# those that are being summed, and what comes of them.
STATIONS = 6.5
_IN_FLIGHT = 2**27  # bytes of tangents that several columns may take together


# What is there of the samples between two products: all of them linearised, or the inputs of their
# blocks, which are linearised again by a product: a run of samples at a time, or one block.
Mode = Literal["kept", "passing", "recomputed"]


class _Line:
    """A walk by the names of parameters."""

    def __init__(self, walk: Walk, vectors: Vectors) -> None:
        self._walk, self._vectors, self.count = walk, vectors, walk.count
        self._station: Station | None = None

    @contextlib.contextmanager
    def stop(self) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """The next stop: its weights, and its columns (K, *shape) of the parameters that vary."""
        self._station, weights = self._walk.arrive()
        columns: dict[str, Tensor] = {}
        if self._station is not None:
            columns = self._station.by_name(self._station.tangents)
        yield weights, {n: c for n, c in columns.items() if n in self._vectors.local}
        self._walk.leave()

    @contextlib.contextmanager
    def slots(self) -> Iterator[Slots]:
        """Where the rates of the present stop's parameters go; they are summed on the way out."""
        if self._station is None:
            yield Slots({})
            return
        rows = self._vectors.columns.new_empty(self.count, self._station.size)
        into = self._station.by_name(rows)
        slots = Slots({name: slot for name, slot in into.items() if name in self._vectors.local})
        yield slots
        slots.finish()
        self._walk.add(rows)


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

    def _route(self, local: Mapping[str, Any]) -> Route:
        """Stem and blocks, and from the tail back, where rows are summed."""
        stem = self._sharded.key(n for n in self.stem.names if n in local)
        blocks = [self._sharded.key(layer.parameters) for layer in self.layers]
        by_graph = isinstance(self.tail, AutogradTail)  # which holds its own weights
        tail = self._sharded.key(n for n in self.tail.names if n in local or not by_graph)
        up = [(key, False) for key in (stem, *blocks)]
        return (*up, *((key, True) for key in (tail, *reversed(blocks), stem)))

    def walk(self, session: Session, part: Part) -> None:
        """Add H, H_o or H_f times the session's columns to its product."""
        vectors = session.vectors
        assert vectors is not None
        with session.walk(self._route(vectors.local), len(vectors.columns)) as walk:
            self._go(_Line(walk, vectors), part)

    def _go(self, line: _Line, part: Part) -> None:
        space, curved = self.space, part != "outer"
        moved: Tensor | None = None
        stem_state: Any = None
        with self._room_for("the stem"), line.stop() as (_, columns):
            if columns:
                moved, stem_state = self.stem.push(columns, space)
        again: Any = None
        states: list[Any] = []
        restart_numbers()  # of blocks that are made anew
        for index, layer in enumerate(self.layers):
            with self._room_for(layer.path), line.stop() as (weights, columns):
                state = self._push_block(index, weights, columns, moved, line.count, again)
                if state is not None:
                    moved, again = state.output, state.output_again
                states.append(state)
        flat = None if moved is None else moved.flatten(1, 2)
        with (
            self._room_for("the head"),
            line.stop() as (weights, columns),
            line.slots() as slots,
        ):
            if isinstance(self.tail, AutogradTail):
                rate = self.tail.product(flat, columns, part, slots, space)
            else:
                self.tail.attach(weights)
                rate = self.tail.product(flat, columns, part, slots, space)
                self.tail.detach()
        for index in reversed(range(len(self.blocks))):
            state = states.pop() if curved else None
            with (
                self._room_for(self.layers[index].path),
                line.stop() as (weights, _),
                line.slots() as slots,
                self._with(layer_weights(self.layers[index], weights)),
            ):
                pull = unwatched(self._pull_block)
                rate = pull(index, rate, state, slots, needs_input=True)
        with self._room_for("the stem"), line.stop(), line.slots() as slots:
            if slots.into:
                self.stem.pull(rate, stem_state if curved else None, slots, space)

    @unwatched
    def _push_block(
        self,
        index: int,
        weights: dict[str, Tensor],
        columns: Mapping[str, Tensor],
        moved: Tensor | None,
        count: int,
        again: Any,
    ) -> Any:
        """The tangents inside a block, None: they are zero."""
        layer = self.layers[index]
        # Matrices come again on the way down. A gain's tangent is asked for before that: the block
        # after a post-norm forms its input's tangent from it once more.
        dots = {
            name: dot if dot.ndim > 2 else dot.clone()
            for name, dot in layer_views(layer, columns).items()
        }
        if moved is None and not dots:
            return None
        with self._with(layer_weights(layer, weights)), self._block(index, 0) as block:
            return block.push_checked(dots, moved, count, again)

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
            give_back()
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
        pushed, theirs = outputs[0], dict(pulled)
        del graph, outputs, pulled, leaves
        for name, value in bent.items():
            theirs[name] = theirs[name] + value if name in theirs else value
        del bent
        block = replace(call.call, x=z).linearise(layer.spec, weights)
        block.gradient(delta, wanted=())
        state = block.push_checked(layer_views(layer, dots), dots[_X], 1, None)
        ours = {name: torch.zeros_like(dot) for name, dot in dots.items()}
        rates, back = block.pull(rate, state, wanted=list(layer.places))
        for name, value in rates.items():
            layer.places[name].add_to(ours[layer.places[name].parameter], value)
        if back is not None:
            ours[_X] += back.view(ours[_X].shape)
        pairs = [(state.output, pushed), *((ours[name], theirs.get(name)) for name in ours)]
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
    budget: bytes for what is kept, the vectors of a product and what is gathered. All samples stay
    linearised; or some at a time on their way through a product, with the inputs of blocks kept; or
    block by block where one sample alone does not fit.
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
        _refuse_stacks(reading)
        assert problem.sharded is not None
        assert problem.shards is not None
        self._sharded = problem.sharded
        self._problem, self._names, self._reading = problem, tuple(names), reading
        self._bends, self._logit_room = bends, logit_room
        self._places = problem.sharded.places(problem.layout)
        itemsize = problem.dtype.itemsize
        local = problem.shards.length * itemsize
        # Gathering costs as much for few samples as for many, and their tangents take memory: up
        # to what a vector and a product take here together, a run is not cut.
        self._at_once = max(2**26, 2 * local)
        blocks = [layer.parameters for layer in reading.layers]
        self._largest = self._station_size(*blocks, reading.end_parameters)
        self._budget = _PLANNED * budget - 2 * local
        self._space, self._inner = Buffers(keep=True), Buffers(keep=True)
        self._kept: list[ShardedChain] = []
        self._complete = False  # whether all runs are kept
        self._widest = 0  # bytes of tangents that a column takes
        self._mode: Mode | None = "recomputed" if problem.checkpoint_activations else None
        self._run_units = 1  # samples that go through together, where not all are kept
        self._keeps_chains, self._blocked = True, False
        self._pair_room = pair_room
        self._held_ratio = 1.0  # what a sample keeps, in sizes of its tangents
        self.unused: frozenset[str] = frozenset(names)

    def _station_size(self, *stations: Iterable[str]) -> int:
        """Bytes of the largest of several sets of weights."""
        sizes = {piece.name: piece.size for piece in self._sharded.pieces}
        numbers = max(sum(sizes[name] for name in names) for names in stations)
        return numbers * self._problem.dtype.itemsize

    @property
    def _room(self) -> float:
        """Bytes of the budget for what is kept of samples and for their tangents."""
        return self._budget - STATIONS * self._largest

    def verified(self, sample: Batch) -> float:
        """The largest difference of a block by hand from double backward, on one sample."""
        units, tangents, _ = self._unit_bytes(sample)
        chain = self._chain(sample, 1.0, verify=True)
        self._held_ratio = _held_bytes(chain, self._problem) / (units * tangents)
        blocks = [layer.parameters for layer in chain.layers]
        self._largest = self._station_size(*blocks, chain.stem.names, chain.tail.names)
        difference = chain.difference
        del chain
        give_back()
        return difference

    def _unit_bytes(self, batch: Batch) -> tuple[int, float, float]:
        """(samples that a batch can be cut into, bytes of a column's tangents in one of them, and
        of the inputs of its blocks with their adjoints)."""
        problem, layers = self._problem, self._reading.layers
        samples, length, d = token_shape(problem, self._reading, batch)
        itemsize = problem.dtype.itemsize
        pairs = 2 * pair_numbers(layers, length) * itemsize
        self._blocked = self._blocked or pairs > self._pair_room
        numbers = tangent_numbers(layers, samples, length, d, blocked=self._blocked)
        units = samples if problem.separable else 1
        inputs = 2 * len(layers) * samples * length * d
        return units, numbers * itemsize / units, inputs * itemsize / units

    def _decide(self) -> None:
        """How much of the samples is kept, from what the probe has kept."""
        problem = self._problem
        batches = list(problem.batches()) if problem.held else [next(problem.batches())]
        sizes = [self._unit_bytes(batch) for batch in batches]
        everything = sum(units * tangents for units, tangents, _ in sizes)
        inputs = sum(units * kept for units, _, kept in sizes)
        largest = max(tangents for _, tangents, _ in sizes)
        held, room = self._held_ratio, self._room
        together = min(self._at_once, everything)
        if self._mode is None:
            self._mode = "kept"
            if not problem.held or held * everything + TRANSIENT * together > room:
                self._mode = "passing"
                per_sample = (held + TRANSIENT) * largest
                self._run_units = int((room - inputs) // per_sample)
                if self._run_units < 1:
                    self._mode, self._run_units = "recomputed", 1
        self._keeps_chains = problem.held and (self._mode == "kept" or inputs <= room)
        if self._mode == "passing":
            self._at_once = int(self._run_units * largest)

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
            inner=self._inner if self._mode in ("passing", "recomputed") else None,
            passing=self._mode == "passing",
            blocked=self._blocked,
            held={},
            bends=self._bends,
            verify=verify,
        )

    def _runs(self) -> Iterator[tuple[Batch, float]]:
        """Runs of samples, each with its share of the whole loss."""
        problem = self._problem
        for batch in problem.batches():
            for run, share in runs_of(
                problem,
                self._reading,
                batch,
                token_shape(problem, self._reading, batch),
                blocked=self._blocked,
                alone=self._at_once + 1,
                at_once=self._at_once,
            ):
                yield run, share * batch.count / problem.normaliser

    def _chains(self) -> Iterator[ShardedChain]:
        """Every run; all of them are kept, or none where they do not fit together."""
        if self._complete:
            yield from self._kept
            return
        self._kept.clear()
        if next(self._problem.batches(), None) is not None:
            self._decide()
        for run, share in self._runs():
            chain = self._chain(run, share)
            give_back()
            self.unused -= chain.names()
            self._widest = max(self._widest, chain.tangent_bytes)
            if self._keeps_chains:
                self._kept.append(chain)
            yield chain
            del chain  # before the next one is linearised
        self._complete = self._keeps_chains

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


def _refuse_stacks(reading: ModelReading) -> None:
    """Raise on models that are no single walk from block to block."""
    if reading.has_memory:
        raise UnmappedModuleError(
            "an encoder and a decoder whose weights are spread are left to autograd."
        )
    if any(layer.spec.distances is not None for layer in reading.layers):
        raise UnmappedModuleError(
            "learned terms of the logits, a table that several layers share, are left to autograd "
            "where weights are spread."
        )


def _held_bytes(chain: Chain, problem: Problem) -> int:
    """Memory that a chain keeps from product to product."""
    storages = (t.untyped_storage() for t in tensors_in(chain, without=problem.own_tensors()))
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    ends = [end for end in (chain.stem, chain.tail) if isinstance(end, AutogradStem | AutogradTail)]
    roots = [root for end in ends for root in end.graph()]
    return sum(kept.values()) + graph_size(roots, excluding=problem.own_tensors()).bytes
