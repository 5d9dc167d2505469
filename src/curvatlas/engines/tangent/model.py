r"""Products with the Hessian of a whole model at one batch: stem, blocks and tail by hand.

    reading = read_model(model)                    # which layers are known blocks; no weights yet
    here = TangentLinearisation(problem, batch, names, reading=reading, part="total")
    here.product(columns, rows)                    # H, H_o or H_f times columns, by parameter

The model runs once as it is, and what its layers are called with is noted: masks, rotary tables,
the tokens that enter the first block. Every layer is then evaluated again by hand and kept
linearised; what lies before the first and behind the last block is recognised by its values, or
left to autograd (``stem``, ``tail``). Our outputs are held to the model's own on every batch.

Tangents run forward, adjoints and their tangents run back (derivations §11). A product starts at
the first part that moves and ends at the last one that is asked for. Models with an encoder and a
decoder are two such stacks (``encoder_decoder``).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.budget import ResultMemory, give_back, ran_out
from curvatlas.engines.graphs import graph_size
from curvatlas.engines.tangent.adapters import EffectiveWeight, effective_parameters
from curvatlas.engines.tangent.attention import with_joint_projections
from curvatlas.engines.tangent.block import Formed, LinearisedBlock
from curvatlas.engines.tangent.ends import ModuleCall, recognised_stem, recognised_tail, same_values
from curvatlas.engines.tangent.linear import Buffers, adjoining, as_rows, restart_numbers
from curvatlas.engines.tangent.reading import (
    BlockCall,
    Pick,
    UnmappedModuleError,
    is_known_layer,
    read_call,
    read_module,
)
from curvatlas.engines.tangent.recomputed import PassingBlock, RecomputedBlock
from curvatlas.engines.tangent.stem import AutogradStem, Slots, Stem
from curvatlas.engines.tangent.tail import AutogradTail, ReadoutTail, Tail
from curvatlas.engines.tangent.tape import Tapes
from curvatlas.errors import OutOfMemory
from curvatlas.files import in_memory
from curvatlas.layers.structure import DISTANCE, MEMORY, BlockSpec, Weights
from curvatlas.linear_operator import Part
from curvatlas.problem import Batch, Problem
from curvatlas.problem.batches import described
from curvatlas.problem.evaluation import listed
from curvatlas.problem.kernels import unwatched, warn_once
from curvatlas.problem.sharding import ShardedWeights

Columns = Mapping[str, Tensor]  # parameter name → (K, *shape)


# ---- which layers of a model are known ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Place:
    """Where a weight of ours stands in a parameter of the model: a view of it, or some entries."""

    parameter: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    entries: Tensor | None = None  # (size,) positions in the parameter, where it is no view

    def view(self, columns: Tensor) -> Tensor:
        """(K, *parameter) → (K, *shape): a view, or a copy of the entries."""
        count = columns.shape[0]
        if self.entries is not None:
            return columns.reshape(count, -1)[:, self.entries].view(count, *self.shape)
        return columns.as_strided(
            (count, *self.shape),
            (columns.stride(0), *self.strides),
            columns.storage_offset() + self.offset,
        )

    def add_to(self, slot: Tensor, rate: Tensor) -> None:
        """Add rates (K, *shape) to those of the parameter (K, *parameter)."""
        if self.entries is None:
            self.view(slot).add_(rate)
        else:
            slot.view(len(slot), -1).index_add_(1, self.entries, rate.flatten(1))


@dataclass(frozen=True, eq=False)
class KnownLayer:
    """A layer of the model that is read as a block."""

    path: str
    module: nn.Module
    spec: BlockSpec
    places: Mapping[str, Place]  # our weight → where it stands
    adapted: Mapping[str, EffectiveWeight]  # name without adapter → what it is made of

    @functools.cached_property
    def parameters(self) -> frozenset[str]:
        """The model's parameters in here."""
        plain = {place.parameter for place in self.places.values()} - self.adapted.keys()
        return frozenset(plain).union(*(weight.parameters for weight in self.adapted.values()))


@dataclass(frozen=True, eq=False)
class ModelReading:
    """The known layers of a model, and its parameters by every name they have."""

    model: nn.Module
    layers: tuple[KnownLayer, ...]
    aliases: Mapping[str, str]  # any name of a parameter → its first one
    paths: Mapping[nn.Module, str]
    plain_ends: bool  # whether what lies outside the layers may be recognised by its values

    @property
    def has_memory(self) -> bool:
        """Whether layers attend to the output of others: an encoder and a decoder."""
        return any(layer.spec.memory_size is not None for layer in self.layers)

    @property
    def block_parameters(self) -> frozenset[str]:
        return frozenset().union(*(layer.parameters for layer in self.layers))

    @functools.cached_property
    def end_parameters(self) -> frozenset[str]:
        """The parameters of the modules outside the layers."""
        inside = {part for layer in self.layers for part in layer.module.modules()}
        return frozenset(
            self.name(module, own)
            for module in self.paths
            if module not in inside
            for own, _ in module.named_parameters(recurse=False)
        )

    def name(self, module: nn.Module, parameter: str) -> str:
        """The first name of a module's own parameter."""
        path = self.paths[module]
        return self.aliases[f"{path}.{parameter}" if path else parameter]


def read_model(model: nn.Module) -> ModelReading:
    """Find the layers that can be written out by hand; raise UnmappedModuleError without any.

    Call it where the model is evaluated (``Problem.evaluating``): dropout has to be off.
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[name] = first.setdefault(id(parameter), name)
    layers: list[KnownLayer] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{layer.path}.") or not layer.path for layer in layers):
            continue
        if not is_known_layer(module):
            continue
        spec, pick = read_module(module)
        if spec.residual:  # bare attention is a part of layers that nobody described
            layers.append(_known_layer(path, module, spec, pick, aliases))
    if not layers:
        raise UnmappedModuleError(
            f"{type(model).__name__} has no layer that is written out by hand."
        )
    layers = _with_tables(layers)
    inside = {part for layer in layers for part in layer.module.modules()}
    modules = {module: path for path, module in model.named_modules()}
    hooked = any(module not in inside and _has_hooks(module) for module in modules)
    return ModelReading(model, tuple(layers), aliases, modules, plain_ends=not hooked)


def _with_tables(layers: Sequence[KnownLayer]) -> list[KnownLayer]:
    """The layers with the table of learned terms of their logits, which one keeps for several.

    A place of entries: what several layers have a share in is added to, never written.
    """
    complete: list[KnownLayer] = []
    tables: dict[str, Place] = {}  # by the stack that a layer is in
    for layer in layers:
        if layer.spec.distances is not None:
            stack = layer.path.rpartition(".")[0]
            if DISTANCE in layer.places:
                own, weight = layer.places[DISTANCE], next(layer.module.parameters())
                entries = torch.arange(math.prod(own.shape), device=weight.device)
                tables[stack] = replace(own, entries=entries)
            if stack not in tables:
                raise UnmappedModuleError(
                    f"{layer.path} adds learned terms to its logits whose table is not found."
                )
            layer = replace(layer, places={**layer.places, DISTANCE: tables[stack]})
        complete.append(layer)
    return complete


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody else's code runs around the module's forward."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not getattr(hook, "__module__", "").startswith("curvatlas.") for hook in hooks)


@unwatched
def _known_layer(
    path: str, module: nn.Module, spec: BlockSpec, pick: Pick, aliases: Mapping[str, str]
) -> KnownLayer:
    """Where ``pick`` takes each weight from: it is applied to position numbers."""
    prefix = f"{path}." if path else ""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    numbers, owner, adapted = {}, {}, {}
    for name, weight in effective_parameters(module).items():
        shape = shapes[weight.base or weight.terms[0].left]
        numbers[name] = torch.arange(math.prod(shape)).view(shape)
        first = f"{prefix}{name}"
        if weight.terms or weight.base != name:
            adapted[first] = weight.renamed(lambda own: aliases[f"{prefix}{own}"])
        else:
            first = aliases[first]
        owner[numbers[name].untyped_storage().data_ptr()] = first
    places: dict[str, Place] = {}
    for ours, picked in pick(numbers).items():
        entries: Tensor | None = None
        holder = owner.get(picked.untyped_storage().data_ptr(), "")
        if not holder:  # a copy: its numbers still tell, but not of which parameter
            entries = picked.reshape(-1)
            own = numbers[_owner_of_copy(path, numbers, pick, ours)]
            holder = owner[own.untyped_storage().data_ptr()]
        places[ours] = Place(
            holder, tuple(picked.shape), picked.stride(), int(picked.storage_offset()), entries
        )
    covered = sum(math.prod(place.shape) for place in places.values())
    if covered != sum(value.numel() for value in numbers.values()):
        taken = {place.parameter for place in places.values()}
        left = [name for name in owner.values() if name not in taken] or list(owner.values())
        raise UnmappedModuleError(f"{path} has parameters that no block has: {listed(left)}.")
    return KnownLayer(path, module, spec, places, adapted)


def _owner_of_copy(path: str, numbers: Mapping[str, Tensor], pick: Pick, ours: str) -> str:
    """The parameter whose numbers change a weight that ``pick`` copies."""
    marked = {name: torch.full_like(value, i) for i, (name, value) in enumerate(numbers.items())}
    owners = torch.unique(pick(marked)[ours])
    if len(owners) != 1:
        raise UnmappedModuleError(f"{path}: {ours} is made of several parameters.")
    return list(numbers)[int(owners)]


# ---- one run of the model as it is --------------------------------------------------------------


@dataclass(eq=False)
class LayerCall:
    """One call of a known layer: what came in and what went out, in the model's own axes."""

    layer: KnownLayer
    call: BlockCall
    given: Tensor
    arguments: tuple[Sequence[Any], Mapping[str, Any]]
    result: Any = None

    @property
    def hidden(self) -> Tensor:
        """The tokens that went out."""
        result = self.result[0] if isinstance(self.result, tuple | list) else self.result
        if not isinstance(result, Tensor):
            raise UnmappedModuleError(
                f"{self.layer.path} gives a {type(result).__name__}, not tokens."
            )
        return result


@dataclass(eq=False)
class Watch:
    """What the layers of a model are called with during one forward pass."""

    reading: ModelReading
    calls: list[LayerCall] = field(default_factory=list)
    others: list[tuple[int, ModuleCall]] = field(default_factory=list)  # with the layers before it
    refusal: UnmappedModuleError | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        # The last run counts: the model's head is searched by a run of its own.
        handles = [self.reading.model.register_forward_pre_hook(self._begin)]
        known = {layer.module: layer for layer in self.reading.layers}
        covered = {part for layer in known for part in layer.modules()}
        for module in self.reading.model.modules():
            if module in known:
                hook = functools.partial(self._before, known[module])
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
                handles.append(module.register_forward_hook(self._after))
        # One hook for all others: a head with hooks of its own would not be taken for a plain one.
        self._ends = {
            module
            for module in self.reading.model.modules()
            if module not in covered and not list(module.children())
        }
        handles.append(nn.modules.module.register_module_forward_hook(self._other))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.calls.clear()
        self.others.clear()
        self.refusal = None

    def _before(self, layer: KnownLayer, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.refusal is not None:
            return
        try:
            call = read_call(module, args, kwargs, spec=layer.spec)
        except UnmappedModuleError as error:
            self.refusal = error  # raised behind the model's own code, which may catch it
            return
        given = args[0] if args else next(iter(kwargs.values()))
        self.calls.append(LayerCall(layer, call, given, (args, kwargs)))

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        if self.refusal is None:
            self.calls[-1].result = result

    def _other(self, module: nn.Module, args: Any, result: Any) -> None:
        if module not in self._ends or not args:
            return
        if isinstance(args[0], Tensor) and isinstance(result, Tensor):
            self.others.append((len(self.calls), ModuleCall(module, args[0], result)))

    def others_at(self, place: int) -> list[ModuleCall]:
        """The calls of modules outside the layers, behind so many calls of layers."""
        return [call for where, call in self.others if where == place]

    @property
    def crossing(self) -> int:
        """How many calls there are before the first one that attends to a memory."""
        with_memory = (i for i, call in enumerate(self.calls) if call.call.memory is not None)
        return next(with_memory, len(self.calls))

    def check_chain(self) -> None:
        """Every layer is called in a way that is read, and takes what the one before it gives."""
        if self.refusal is not None:
            raise self.refusal
        if not self.calls:
            raise UnmappedModuleError("the model does not call the layers that are known.")
        called = {call.layer.path for call in self.calls}
        idle = [layer.path for layer in self.reading.layers if layer.path not in called]
        if idle:
            raise UnmappedModuleError(f"{listed(idle)} is not called on this batch.")
        crossing = self.crossing
        for place, (before, after) in enumerate(zip(self.calls, self.calls[1:], strict=False), 1):
            if before.call.time_major != after.call.time_major:
                raise UnmappedModuleError(f"{after.layer.path} has other axes than its neighbour.")
            if place == crossing:  # a decoder begins, with tokens of its own
                continue
            if not _same_tensor(before.hidden, after.given):
                raise UnmappedModuleError(
                    f"{after.layer.path} does not take what {before.layer.path} gives."
                )
        for call in self.calls[crossing + 1 :]:
            if not _same_tensor(self.calls[crossing].call.memory, call.call.memory):
                raise UnmappedModuleError(
                    f"{call.layer.path} does not attend to what "
                    f"{self.calls[crossing].layer.path} attends to."
                )


def _same_tensor(one: Any, two: Any) -> bool:
    if one is two:
        return True
    both = isinstance(one, Tensor) and isinstance(two, Tensor)
    return both and one.shape == two.shape and torch.equal(one, two)


class _Reached(Exception):
    """A block was reached, called with these arguments."""

    def __init__(self, layer: KnownLayer, args: Any, kwargs: Any) -> None:
        super().__init__("reached a block")
        self.layer, self.args, self.kwargs = layer, args, kwargs


def arguments_at(
    problem: Problem,
    layers: Sequence[KnownLayer],
    batch: Batch,
    leaves: Columns,
) -> tuple[KnownLayer, Sequence[Any], Mapping[str, Any]]:
    """The first of some layers to be called, and what it is given; the rest does not run."""

    def stop(layer: KnownLayer, _: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Reached(layer, args, kwargs)

    handles = [
        layer.module.register_forward_pre_hook(functools.partial(stop, layer), with_kwargs=True)
        for layer in layers
    ]
    try:
        problem.model_outputs(batch, leaves)
    except _Reached as reached:
        return reached.layer, reached.args, reached.kwargs
    finally:
        for handle in handles:
            handle.remove()
    raise UnmappedModuleError("the model does not call the layers that are known.")


def first_tokens(
    problem: Problem, layers: Sequence[KnownLayer], batch: Batch, leaves: Columns
) -> Tensor:
    """What the first of some layers is given, in the model's own axes; the rest does not run."""
    _, args, kwargs = arguments_at(problem, layers, batch, leaves)
    tokens: Tensor = args[0] if args else next(iter(kwargs.values()))
    return tokens


@contextlib.contextmanager
def _failures_refuse() -> Iterator[None]:
    """A model whose reading fails is one that is not understood: autograd can still compute."""
    try:
        yield
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if type(error).__module__.startswith("curvatlas") or ran_out(error):
            raise  # it says what is wrong
        raise UnmappedModuleError(
            f"reading the model failed ({type(error).__name__}: {error})"
        ) from error


def _warn_of_forgotten_rows(model: nn.Module) -> None:
    warn_once(
        model,
        "forgotten rows",
        "the loss reads tokens whose attention sees no key, such as padding on the left: the least "
        "number is added to all of their logits, which are lost in rounding, so autograd's "
        "gradient there is no derivative of the loss, and curvature is that of autograd's "
        "formulas. Ignore these targets (-100), or load the model with "
        "attn_implementation='sdpa'.",
    )


# ---- one batch, or some samples of it -----------------------------------------------------------


@dataclass
class Passed:
    """What the ways back of a product need of its way forward: of every stem and of every block."""

    stems: list[Any]
    blocks: list[Any] = field(default_factory=list)


class Chain:
    """Stem, blocks and tail at some samples of a batch, every stage linearised."""

    def __init__(
        self,
        problem: Problem,
        reading: ModelReading,
        batch: Batch,
        names: Sequence[str],
        *,
        share: float,
        space: Buffers,
        logit_room: int | None,
        inner: Buffers | None,
        blocked: bool,
        bends: bool,
        held: dict[str, Weights],
        passing: bool = False,
    ) -> None:
        self.blocked = blocked
        self._problem, self._reading, self._batch = problem, reading, batch
        self._in_place = problem.in_place  # as long as the linearisation lasts
        self._inner, self._kept_once = inner, passing  # workspace of blocks that are made anew
        self._names = tuple(name for name in names if name not in reading.block_parameters)
        self._logit_room, self.space, self.share = logit_room, space, share
        restart_numbers()  # chains that share a workspace share their stages' buffers in it
        watch = Watch(reading)
        with watch.watching(), torch.no_grad():
            outputs = problem.predictions(batch, {}, logit_room=logit_room)
        watch.check_chain()
        last = watch.calls[-1]
        self._axes = last.call
        self._results = {call.layer.path: call.result for call in watch.calls}
        self.layers: list[KnownLayer] = []
        self.blocks: list[LinearisedBlock | RecomputedBlock] = []
        self._held = held  # weights by layer, of all chains, where they are the model's own
        self._adapted: dict[str, EffectiveWeight] = {}
        self._deltas: dict[str, Tensor] = {}  # ∂ℓ/∂W of adapted weights
        with _failures_refuse():
            z = self._assemble(watch, frozenset(names))
            self.shape = z.shape  # (n, L, d)
            self.tail = self._tail(z, last, watch.others_at(len(watch.calls)), outputs, share)
        del self._results, watch
        self._forgotten: list[Tensor] = []  # truth values by attention layer
        if bends:
            self._record()
            if self._forgotten and bool(torch.stack(self._forgotten).any()):
                _warn_of_forgotten_rows(problem.model)
        else:  # H_o needs no adjoints
            for stem in self.stems:
                stem.record(torch.zeros_like(stem.output.reshape(1, -1, stem.output.shape[-1])))
            self._deltas = {name: self._no_slope(name) for name in self._adapted}

    # --- building -------------------------------------------------------------------------------

    @property
    def stems(self) -> Sequence[Stem | AutogradStem]:
        """Where the model's inputs come in."""
        return (self.stem,)

    def _assemble(self, watch: Watch, names: frozenset[str]) -> Tensor:
        """Stem and blocks of a run; the last block's output."""
        stem = self._stem(watch.calls[0], [watch.others_at(0)], self._reading.layers)
        self.stem, calls = self._moving(stem, watch.calls, names)
        self._adapt(calls)
        return self._linearise(calls, self.stem.output)

    def _moving(
        self, stem: Stem | AutogradStem, calls: Sequence[LayerCall], names: frozenset[str]
    ) -> tuple[Stem | AutogradStem, Sequence[LayerCall]]:
        """Stem and calls from the first one on that moves with the parameters followed.

        What lies below is a constant: a view of the last layer holds the last layer only.
        """
        if not stem.names.isdisjoint(names):
            return stem, calls
        moving = [i for i, call in enumerate(calls) if not call.layer.parameters.isdisjoint(names)]
        start = moving[0] if moving else len(calls) - 1
        if start:
            stem = Stem(calls[start].call.x.detach(), [])
        return stem, calls[start:]

    def _adapt(self, calls: Sequence[LayerCall]) -> None:
        """Note the adapted weights of all layers, and keep their factors."""
        for call in calls:
            self._adapted |= call.layer.adapted
        terms = [term for weight in self._adapted.values() for term in weight.terms]
        names = {name for t in terms for name in (t.left, t.right) if name is not None}
        with self._problem.present(names) as factors:
            self._values = dict(factors)

    def _linearise(self, calls: Sequence[LayerCall], z: Tensor) -> Tensor:
        """Every block at the output of the one before it, the first at z; the last one's output."""
        again: Formed | None = None
        for call in calls:
            turn = len(self.blocks) % 2
            self.layers.append(call.layer)
            try:
                with self._room_for(call.layer.path), self._weights(call.layer) as weights:
                    z, again = self._add_block(call, weights, z, again, turn=turn)
                    if not self._in_place:
                        self.blocks[-1].detach()
            except ValueError as error:
                raise UnmappedModuleError(f"{call.layer.path}: {error}") from error
        last = self.blocks[-1]
        if isinstance(last, LinearisedBlock):
            last.sublayers[-1].forget_output()  # the tail asks for it at once
        if not same_values(z, calls[-1].call.tokens(calls[-1].hidden)):
            raise UnmappedModuleError(
                f"written out by hand, {calls[-1].layer.path} gives other tokens than the model."
            )
        return z

    @contextlib.contextmanager
    def _weights(
        self, layer: KnownLayer, following: KnownLayer | None = None
    ) -> Iterator[Mapping[str, Tensor]]:
        """A layer's weights by our names as they multiply: adapted, projections side by side.

        There for as long as the scope lasts (``Problem.present``), or kept where they are the
        model's own. ``following``: the layer that comes next.
        """
        if layer.path in self._held:
            yield self._held[layer.path]
            return
        coming = () if following is None else following.parameters
        with self._problem.present(layer.parameters, following=coming) as values:
            weights = layer_weights(layer, values)
            if self._in_place:
                self._held[layer.path] = weights
            yield weights

    @contextlib.contextmanager
    def _block(self, index: int, following: int) -> Iterator[LinearisedBlock | RecomputedBlock]:
        """A block with its weights, while a pass goes through it; ``following`` is the next one."""
        block = self.blocks[index]
        if self._in_place:
            with self._room_for(self.layers[index].path):
                yield block
            return
        after = self.layers[following] if 0 <= following < len(self.layers) else None
        with (
            self._room_for(self.layers[index].path),
            self._weights(self.layers[index], after) as weights,
        ):
            block.attach(weights)
            try:
                yield block
            finally:
                block.detach()

    @contextlib.contextmanager
    def _room_for(self, place: str) -> Iterator[None]:
        """Where memory runs out inside, say in which part of the model, and what would help."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error) or isinstance(error, OutOfMemory):
                raise
            fewer = "a smaller budget= (--memory) cuts batches into fewer samples"
            if self._inner is None:
                fewer += (
                    ", checkpoint_activations=True keeps the activations of one block at a time"
                )
            raise OutOfMemory(
                f"memory ran out in {place} on {self._batch.samples} samples of "
                f"{described(self._batch.inputs)}: {fewer}, several processes (torchrun) share the "
                "data."
            ) from error

    @unwatched
    def _add_block(
        self, call: LayerCall, weights: Weights, z: Tensor, again: Formed | None, *, turn: int
    ) -> tuple[Tensor, Formed | None]:
        """Linearise one block at z; its output, and how to form that once more."""
        options = replace(call.call, x=z[:0])  # what the call brings beside its tokens

        def make(
            x: Tensor, weights: Weights, space: Buffers, again: Formed | None = None
        ) -> LinearisedBlock:
            here = replace(options, x=x)
            return here.linearise(
                call.layer.spec,
                weights,
                blocked=self.blocked,
                space=space,
                turn=turn,
                x_again=again,
            )

        if self._inner is not None:
            kind = PassingBlock if self._kept_once else RecomputedBlock
            held = kind(functools.partial(make, space=self._inner), z)
            held.attach(weights)
            self.blocks.append(held)
            return held.linearised().give_output(), None
        block = make(z, weights, self.space, again)
        if self.blocks and block.sublayers[0].normalizes_input:
            before = self.blocks[-1]
            assert isinstance(before, LinearisedBlock)
            before.sublayers[-1].forget_output()
        self.blocks.append(block)
        return block.give_output(), block.sublayers[-1].output_again

    def _stem(
        self,
        first: LayerCall,
        groups: Sequence[Sequence[ModuleCall]],
        layers: Sequence[KnownLayer],
        *,
        name: str = "stem",
    ) -> Stem | AutogradStem:
        """What leads to the first of some layers, by one of the groups of modules called before."""
        x = first.call.x.detach()
        for calls in groups if self._reading.plain_ends else ():
            moves = functools.partial(self._moves, layers)
            with self._end_weights() as weights:
                stem = recognised_stem(self._reading, weights, calls, x, moves=moves, name=name)
            if stem is not None:
                return stem
        leaves = self._problem.leaves(self._names)
        tokens = first.call.tokens(first_tokens(self._problem, layers, self._batch, leaves))
        if not tokens.requires_grad:
            return Stem(x, [])
        return AutogradStem(tokens, leaves)

    def _end_weights(self) -> contextlib.AbstractContextManager[dict[str, Tensor]]:
        """The weights outside the blocks."""
        return self._problem.present(self._reading.end_parameters)

    def _moves(self, layers: Sequence[KnownLayer], module: nn.Module) -> bool:
        """Whether what a module of the stem is given depends on parameters."""
        depends: list[bool] = []
        handle = module.register_forward_pre_hook(
            lambda _, args: depends.append(args[0].requires_grad)
        )
        try:
            leaves = self._problem.leaves(self._names)
            first_tokens(self._problem, layers, self._batch, leaves)
        finally:
            handle.remove()
        return any(depends)

    def _tail(
        self,
        z: Tensor,
        last: LayerCall,
        calls: Sequence[ModuleCall],
        outputs: Any,
        share: float,
    ) -> Tail:
        problem, batch = self._problem, self._batch
        if self._reading.plain_ends and not last.call.time_major:
            with self._end_weights() as weights:
                tail = recognised_tail(
                    self._reading,
                    weights,
                    calls,
                    z,
                    outputs,
                    loss=problem.loss,
                    targets=batch.targets,
                    share=share,
                )
            if tail is not None:
                if not problem.in_place:
                    tail.detach()
                return tail
        leaf = last.call.as_module(z).detach().requires_grad_(True)
        leaves = problem.leaves(self._names)
        with self._passing(leaf), torch.enable_grad():
            ours = problem.predictions(batch, leaves, logit_room=self._logit_room)
            if not same_values(ours, outputs):
                raise UnmappedModuleError(
                    "the outputs depend on more than what the last layer gives."
                )
            return AutogradTail(
                ours,
                leaf,
                leaves,
                tokens=self._tokens,
                axes=self._module_axes,
                loss=problem.loss,
                targets=batch.targets,
                share=share,
            )

    def _tokens(self, moved: Tensor) -> Tensor:
        """(K, *the model's axes) → (K, N, d)."""
        turned = moved.transpose(1, 2) if self._axes.time_major else moved
        return turned.reshape(len(moved), -1, moved.shape[-1])

    def _module_axes(self, tokens: Tensor) -> Tensor:
        """(K, N, d) → (K, *the model's axes)."""
        n, length, d = self.shape
        shaped = tokens.view(len(tokens), n, length, d)
        if not self._axes.batched:
            return shaped[:, 0]
        return shaped.transpose(1, 2) if self._axes.time_major else shaped

    @contextlib.contextmanager
    def _passing(self, z: Tensor) -> Iterator[None]:
        """Inside, every known layer gives z: the model computes its tail."""
        with self._giving(dict.fromkeys(self._reading.layers, z)):
            yield

    @contextlib.contextmanager
    def _giving(self, outputs: Mapping[KnownLayer, Tensor]) -> Iterator[None]:
        """Inside, these layers give these tokens, in the model's own axes, and compute nothing."""
        for layer, z in outputs.items():
            result = self._results[layer.path]
            given = (z, *result[1:]) if isinstance(result, tuple) else z
            layer.module.__dict__["forward"] = lambda *args, given=given, **kwargs: given
        try:
            yield
        finally:
            for layer in outputs:
                del layer.module.__dict__["forward"]

    def _record(self) -> None:
        """Keep the adjoints of one backward pass in every part."""
        rate = self.tail.delta
        for index in reversed(range(len(self.blocks))):
            rate = self._record_block(index, rate)
        self.stem.record(rate)

    @unwatched
    def _record_block(self, index: int, rate: Tensor, memory: Tensor | None = None) -> Tensor:
        """δ_x (1, N, d) of a block from δ of its output; δ of its memory is added to ``memory``."""
        layer = self.layers[index]
        # All or none: what is wanted decides which layers are taken together.
        wanted = list(layer.places) if layer.adapted else []
        if memory is not None:
            wanted.append(MEMORY)
        with self._block(index, index - 1) as block:
            slopes, delta_x = block.gradient(rate[0].view(block.shape), wanted=wanted)
            self._forgotten += block.reads_forgotten()
        if memory is not None:
            memory += slopes.pop(MEMORY)
        for ours, slope in slopes.items():
            if layer.places[ours].parameter in self._adapted:
                self._add_slope(layer.places[ours], slope)
        return delta_x.view(1, -1, delta_x.shape[-1])

    def _add_slope(self, place: Place, slope: Tensor) -> None:
        """Keep ∂ℓ/∂W of a part of an adapted weight."""
        if place.parameter not in self._deltas:
            self._deltas[place.parameter] = self._no_slope(place.parameter)
        place.add_to(self._deltas[place.parameter].unsqueeze(0), slope.unsqueeze(0))

    def _no_slope(self, name: str) -> Tensor:
        """Zeros of the shape of an adapted weight."""
        weight, problem = self._adapted[name], self._problem
        like = problem.all_parameters[weight.base or weight.terms[0].left]
        return torch.zeros(like.shape, dtype=problem.dtype, device=like.device)

    # --- products -------------------------------------------------------------------------------

    def names(self) -> frozenset[str]:
        """The parameters that reach the loss."""
        blocks = [layer.parameters for layer in self.layers]
        stems = [stem.names for stem in self.stems]
        return frozenset().union(self.tail.names, *stems, *blocks)

    @property
    def tangent_bytes(self) -> int:
        """About what a product needs for each of its columns."""
        numbers = tangent_numbers(self.layers, *self.shape, blocked=self.blocked)
        return numbers * self.tail.delta.element_size()

    @functools.cached_property
    def shared(self) -> bool:
        """Whether a parameter stands in several blocks and each would write its rate."""
        written = [
            name
            for layer in self.layers
            for name in {p.parameter for p in layer.places.values() if p.entries is None}
        ]
        return len(set(written)) < len(written)

    def products(self, columns: Columns, slots: Mapping[Part, Slots]) -> None:
        """Write or add H, H_o or H_f times ``columns``, or several of them, to their slots."""
        if not self._adapted:
            self._products(columns, slots)
            return
        moved = dict(columns)
        for name, weight in self._adapted.items():
            tangent = weight.tangent(self._values, columns)
            if tangent is not None:
                moved[name] = tangent.contiguous()
        inner = {part: self._with_adapted(own, columns) for part, own in slots.items()}
        self._products(moved, inner)
        for part, own in slots.items():
            curved = part != "outer"
            for name in inner[part].into.keys() - own.into.keys():
                rates = self._adapted[name].rates(
                    self._values,
                    inner[part].into[name],
                    delta=self._deltas[name] if curved else None,
                    dots=columns if curved else None,
                )
                own.add(rates)

    def _with_adapted(self, slots: Slots, columns: Columns) -> Slots:
        """The same slots and those of the adapted weights that the wanted parameters make up."""
        count = len(next(iter(columns.values())))
        into = dict(slots.into)
        for name, weight in self._adapted.items():
            if not slots.into.keys().isdisjoint(weight.parameters):
                delta = self._deltas[name]
                into[name] = delta.new_zeros(count, *delta.shape)
        return Slots(into, slots.accumulate, slots.written)

    def _products(self, columns: Columns, slots: Mapping[Part, Slots]) -> None:
        """One way forward, and a way back for every part."""
        moved, passed = self._forward(columns)
        flat = None if moved is None else moved.flatten(1, 2)
        # The outer part writes over the outputs' tangent, and blocks over what the tail keeps.
        order: list[Part] = sorted(slots, key=lambda part: part != "functional")
        rates: dict[Part, Tensor | None] = {}
        with self._with_tail() as tail:
            state: Any = tail.push(flat, columns, self.space)
            for part in order:
                rate = tail.pull(state, part, slots[part], self.space)
                rates[part] = rate if part == order[-1] or rate is None else rate.clone()
        for part in order:
            self._back(rates.pop(part), slots[part], passed, curved=part != "outer")

    def _forward(self, columns: Columns) -> tuple[Tensor | None, Passed]:
        """The last block's tangent (K, n, L, d), and what the ways back need of the inside."""
        moved, stem_state = self.stem.push(columns, self.space)
        passed = Passed([stem_state])
        moved = self._push_blocks(range(len(self.blocks)), columns, moved, passed)
        return moved, passed

    def _push_blocks(
        self,
        places: range,
        columns: Columns,
        moved: Tensor | None,
        passed: Passed,
        memory: Tensor | None = None,
    ) -> Tensor | None:
        """Through some blocks in a row, from the first one's input; ``memory``: its tangent."""
        again: Any = None
        count = len(next(iter(columns.values())))
        for index in places:
            dots = layer_views(self.layers[index], columns)
            if memory is not None:
                dots[MEMORY] = memory
            state: Any = None
            if moved is not None or dots:
                with self._block(index, index + 1) as block:
                    state = block.push_checked(dots, moved, count, again)
                moved, again = state.output, state.output_again
            passed.blocks.append(state)
        return moved

    def _back(self, rate: Tensor | None, slots: Slots, passed: Passed, *, curved: bool) -> None:
        """From Rδ of the last block's output to the rates; not ``curved``: of the outer part."""
        reaches_stem = not self.stem.names.isdisjoint(slots.into)
        places = range(len(self.blocks))
        rate = self._pull_blocks(places, rate, slots, passed, curved=curved, below=reaches_stem)
        if reaches_stem:
            self.stem.pull(rate, passed.stems[0] if curved else None, slots, self.space)

    def _pull_blocks(
        self,
        places: range,
        rate: Tensor | None,
        slots: Slots,
        passed: Passed,
        *,
        curved: bool,
        below: bool,
        memory: Tensor | None = None,
    ) -> Tensor | None:
        """Back through some blocks in a row to Rδ of the first one's input, if it is needed below.

        Only as far as rates are asked for; Rδ of the memory is added to ``memory``.
        """
        wanted = [not self.layers[i].parameters.isdisjoint(slots.into) for i in places]
        for place, index in reversed(list(enumerate(places))):
            # a decoder's blocks all have a share in the memory's
            needed = below or any(wanted[:place]) or (memory is not None and place > 0)
            if not (needed or wanted[place] or memory is not None):
                return None
            state = passed.blocks[index] if curved else None
            rate = self._pull_block(index, rate, state, slots, needs_input=needed, memory=memory)
        return rate

    @contextlib.contextmanager
    def _with_tail(self) -> Iterator[Tail]:
        """The tail with its weights, while a product goes through it."""
        if self._in_place or isinstance(self.tail, AutogradTail):
            with self._room_for("the head"):
                yield self.tail
            return
        with self._room_for("the head"), self._problem.present(self.tail.names) as weights:
            self.tail.attach(weights)
            try:
                yield self.tail
            finally:
                self.tail.detach()

    def _pull_block(
        self,
        index: int,
        rate: Tensor | None,
        state: Any,
        slots: Slots,
        *,
        needs_input: bool,
        memory: Tensor | None = None,
    ) -> Tensor | None:
        layer = self.layers[index]
        into: dict[str, Tensor] = {}
        copied: list[tuple[Place, Tensor]] = []
        for ours, place in layer.places.items():
            slot = slots.into.get(place.parameter)
            if slot is None:
                continue
            if place.entries is None:
                into[ours] = place.view(slot)
            else:
                into[ours] = slot.new_zeros(slot.shape[0], *place.shape)
                copied.append((place, into[ours]))
        targets = into if memory is None else {**into, MEMORY: memory}
        with self._block(index, index - 1) as block:
            shaped = None if rate is None else rate.view(rate.shape[0], *block.shape)
            _, back = block.pull(
                shaped,
                state,
                wanted=targets,
                needs_input=needs_input,
                into=targets,
                accumulate=slots.accumulate,
            )
        views = [layer.places[ours] for ours in into if layer.places[ours].entries is None]
        slots.written.update(place.parameter for place in views)
        for place, result in copied:
            place.add_to(slots.to_add(place.parameter), result)
        return None if back is None else back.flatten(1, 2)


@unwatched
def layer_weights(layer: KnownLayer, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer's weights by our names, from those of the model's parameters."""
    values |= {name: weight.value(values) for name, weight in layer.adapted.items()}
    own = {
        ours: place.view(values[place.parameter].unsqueeze(0))[0]
        for ours, place in layer.places.items()
    }
    return with_joint_projections(own)


def layer_views(layer: KnownLayer, columns: Columns) -> dict[str, Tensor]:
    """The tangents of a layer's weights among those of the model's parameters."""
    return {
        ours: place.view(columns[place.parameter])
        for ours, place in layer.places.items()
        if place.parameter in columns
    }


class TangentLinearisation:
    """One batch of a model, linearised by hand; the operator ``part`` of its mean loss.

    ``space`` is memory that the products of one operator share. ``recompute``: keep the inputs of
    blocks only, and linearise each anew when a product needs it. ``pair_room``: bytes that the
    matrices of queries by keys of one sample may take; beyond it attention goes by blocks of
    queries, as with ``blocked``. ``run_samples``: how many samples go through together (None: as
    many as ``runs_of`` finds). ``record``: write products down where that is possible: 2 to 11 % of
    their time, for a tenth of their memory.
    """

    def __init__(
        self,
        problem: Problem,
        batch: Batch,
        names: Sequence[str],
        *,
        reading: ModelReading,
        part: Part,
        space: Buffers,
        logit_room: int | None = None,
        recompute: bool = False,
        blocked: bool = False,
        pair_room: int | None = None,
        run_samples: int | None = None,
        record: bool = True,
    ) -> None:
        self.batch, self.part, self.dtype = batch, part, problem.dtype
        if problem.checkpoint_activations:  # by hand, not by autograd's checkpoints
            problem, recompute = copy.copy(problem), True
            problem.checkpoint_activations = False
        self._layout = problem.layout
        self._shapes = dict(zip(problem.layout.names, problem.layout.shapes, strict=True))
        self.chains: list[Chain] = []
        inner = Buffers(keep=True) if recompute else None
        held: dict[str, Weights] = {}
        shape = token_shape(problem, reading, batch)
        if pair_room is not None:
            itemsize = problem.dtype.itemsize
            blocked = blocked or goes_by_blocks(reading.layers, shape[1], itemsize, pair_room)
        make = _chain_of(reading)
        runs = runs_of(problem, reading, batch, shape, blocked=blocked, together=run_samples)
        for piece, share in runs:
            chain = make(
                problem,
                reading,
                piece,
                names,
                share=share,
                space=space,
                logit_room=logit_room,
                inner=inner,
                blocked=blocked,
                bends=part != "outer",
                held=held,
            )
            self.chains.append(chain)
            if len(runs) > 1:
                give_back()  # the next run's activations must not stand beside this one's scraps
        reached = frozenset().union(*(chain.names() for chain in self.chains))
        self.unused = frozenset(names) - reached
        own = problem.own_tensors()
        storages = (t.untyped_storage() for t in tensors_in(self.chains, without=own))
        kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
        ends = [end for chain in self.chains for end in (*chain.stems, chain.tail)]
        graphs = [end.graph() for end in ends if isinstance(end, AutogradStem | AutogradTail)]
        size = graph_size([root for roots in graphs for root in roots], excluding=own)
        self.held_bytes = sum(kept.values()) + size.bytes
        weights = (t.untyped_storage() for t in tensors_in(held, without=own))
        # Projections side by side: as many bytes for one sample as for many.
        self.weight_bytes = sum({w.data_ptr(): w.nbytes() for w in weights}.values())
        self.needs_scope = size.runs_python
        by_hand = all(isinstance(end, Stem | ReadoutTail) for end in ends)
        self._space, self._results = space, ResultMemory()
        # A tape repeats calls on fixed memory: weights that come and go have none.
        fixed = by_hand and not recompute and problem.in_place
        self._tapes = Tapes(space, own=own, record=record and fixed)
        per_column = max(chain.tangent_bytes for chain in self.chains)
        self.columns_at_once = max(1, min(64, _IN_FLIGHT // per_column))
        # Measured 1.1 times the tangents' own count; 0.37 of what one sample of SmolLM2 holds.
        self.transient = max(_LEAST_TRANSIENT, 1.2 * per_column / max(self.held_bytes, 1))

    @property
    def value(self) -> float:
        """The batch's mean loss."""
        return sum(chain.share * chain.tail.value for chain in self.chains)

    def product(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        """The operator times columns (K, *shape), restricted to ``rows``."""
        return self.part_product(columns, rows, self.part)

    def parts(
        self, columns: Columns, rows: Sequence[str]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """(H_o columns, H_f columns) restricted to ``rows``, of one way forward."""
        room = self._room(2, columns, rows)
        self.write(room, columns, rows)
        outer, functional = (self._rows(part, rows) for part in room)
        return list(outer.values()), list(functional.values())

    def write(self, out: Tensor, columns: Columns, rows: Sequence[str]) -> None:
        """The product at ``rows`` to ``out`` (1, K, Σ sizes), H_o and H_f to (2, K, Σ sizes)."""
        parts: tuple[Part, ...] = (self.part,) if len(out) == 1 else ("outer", "functional")
        with self._calling():
            if len(parts) == 1 and len(columns) == len(self._layout.names) == len(rows):
                columns = self._flat_columns(columns)
            rooms = {p: self._rows(room, rows) for p, room in zip(parts, out, strict=True)}
            self._fill(columns, rooms)

    def part_product(
        self, columns: Columns, rows: Sequence[str], part: Part
    ) -> list[Tensor | None]:
        """H, H_o or H_f times columns (K, *shape), restricted to ``rows``."""
        with self._calling():
            if len(columns) == len(self._layout.names) == len(rows):
                columns = self._flat_columns(columns)
            into = self._rows(self._room(1, columns, rows)[0], rows)
            self._fill(columns, {part: into})
        return list(into.values())

    def _flat_columns(self, columns: Columns) -> Columns:
        """The same columns of all parameters as views of flat rows.

        So that the bits are those of ``flat_product``: neighbours in memory are multiplied as one.
        """
        names = self._layout.names
        count = len(columns[names[0]])
        pieces = [columns[name].reshape(count, -1) for name in names]
        flat = adjoining([piece[0] for piece in pieces], 0) if count == 1 else None
        return self._views(torch.cat(pieces, 1) if flat is None else flat.unsqueeze(0))

    def _calling(self) -> contextlib.AbstractContextManager[Any]:
        """The scope of calls of torch by hand.

        The model's operations are replaced by a mode that is asked before every call of torch: a
        quarter of the time of a view of a 100 k GPT, and nothing by hand calls the model.
        """
        return contextlib.nullcontext() if self.needs_scope else torch._C.DisableTorchFunction()

    def _room(self, parts: int, columns: Columns, rows: Sequence[str]) -> Tensor:
        """Memory for products of several parts (parts, K, Σ sizes), side by side."""
        first = next(iter(columns.values()))
        return first.new_empty(parts, len(first), sum(math.prod(self._shapes[n]) for n in rows))

    def _rows(self, room: Tensor, rows: Sequence[str]) -> dict[str, Tensor]:
        """Memory (K, Σ sizes) as the rows' own (K, *shape)."""
        sizes = [math.prod(self._shapes[name]) for name in rows]
        pieces = zip(rows, torch.split(room, sizes, 1), strict=True)
        return {name: piece.view(len(room), *self._shapes[name]) for name, piece in pieces}

    def _fill(self, columns: Columns, into: Mapping[Part, Mapping[str, Tensor]]) -> None:
        for number, chain in enumerate(self.chains):
            slots = {part: Slots(room) for part, room in into.items()}
            if number == 0 and chain.shared:
                for own in slots.values():
                    own.finish()
            for own in slots.values():
                own.accumulate = number > 0 or chain.shared
            chain.products(columns, slots)
            if number == 0 and not chain.shared:
                for own in slots.values():
                    own.finish()

    def flat_product(self, columns: Tensor) -> Tensor:
        """The operator times flat columns (P, K), as rows (K, P)."""
        rows = as_rows(columns, self._space)
        total = self._results.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        self._tapes.run(self.part, self._fill_flat, rows, total)
        return total

    def _fill_flat(self, rows: Tensor, total: Tensor) -> None:
        self._fill(self._views(rows), {self.part: self._views(total)})

    def _views(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows (K, P) by parameter: views (K, *shape)."""
        layout, count = self._layout, len(rows)
        pieces = torch.split(rows, list(layout.sizes), dim=1)
        return {
            name: piece.view(count, *shape)
            for name, piece, shape in zip(layout.names, pieces, layout.shapes, strict=True)
        }


def _chain_of(reading: ModelReading) -> type[Chain]:
    """The kind of chain that a model is."""
    if not reading.has_memory:
        return Chain
    from curvatlas.engines.tangent.encoder_decoder import EncoderDecoderChain  # it extends Chain

    return EncoderDecoderChain


ONE_RUN_BYTES = 2**24  # of tangents: a batch below goes through in one run
RUN_SHARE = 0.5  # the same of the weights' own bytes: every run reads all weights twice
_LEAST_TRANSIENT = 0.2  # of what a linearisation holds
_IN_FLIGHT = 2**27  # bytes of tangents that several columns may take together


def pair_numbers(layers: Sequence[KnownLayer], length: int) -> int:
    """How many numbers the matrices of queries by keys of one sample are, over all blocks."""
    specs = [layer.spec for layer in layers]
    return sum(s.n_heads * (1 if s.memory_size is None else 2) for s in specs) * length**2


def goes_by_blocks(
    layers: Sequence[KnownLayer], length: int, itemsize: int, pair_room: int
) -> bool:
    """Whether A and its tangent of one sample take more than ``pair_room`` bytes.

    Learned terms of the logits have no blocks: such models are made anew block by block instead.
    """
    if any(layer.spec.distances is not None for layer in layers):
        return False
    return 2 * pair_numbers(layers, length) * itemsize > pair_room


def kept_pairs(layers: Sequence[KnownLayer], length: int) -> int:
    """How many of them a linearisation keeps of one sample: A, and D and w of short inputs."""
    spec = layers[0].spec
    short = length <= 2 * (spec.key_size + spec.value_size)
    return (3 if short else 1) * pair_numbers(layers, length)


def tangent_numbers(
    layers: Sequence[KnownLayer], samples: int, length: int, d: int, *, blocked: bool = False
) -> int:
    """How many numbers the tangents of one column are, from the first block to the last."""
    numbers = 0
    for spec in (layer.spec for layer in layers):
        heads = spec.n_heads * spec.value_size + 3 * spec.n_heads * spec.key_size
        heads *= 1 if spec.memory_size is None else 2
        numbers += heads + 2 * d + (spec.d_ff or 0) * (2 if spec.gated else 1)
    pairs = 0 if blocked else samples * pair_numbers(layers, length)
    return numbers * samples * length + pairs


def token_shape(problem: Problem, reading: ModelReading, batch: Batch) -> tuple[int, int, int]:
    """(n, L, d) of the tokens that enter the first block, whatever their order of axes.

    Of an encoder and a decoder, those of the one with more tokens.
    """
    deciding = [layer for layer in reading.layers if layer.spec.memory_size is not None]
    with torch.no_grad():
        layer, args, kwargs = arguments_at(problem, deciding or reading.layers, batch, {})
        tokens: Tensor = args[0] if args else next(iter(kwargs.values()))
        if deciding:
            memory = read_call(layer.module, args, kwargs, spec=layer.spec).memory
            tokens = tokens if memory is None or memory.numel() < tokens.numel() else memory
    d, samples = tokens.shape[-1], tokens.shape[0] if tokens.ndim > 2 else 1
    if problem.separable:
        samples = batch.samples
    return samples, tokens.numel() // (samples * d), d


def runs_of(
    problem: Problem,
    reading: ModelReading,
    batch: Batch,
    shape: tuple[int, int, int],
    *,
    blocked: bool = False,
    alone: float | None = None,
    at_once: float | None = None,
    together: int | None = None,
) -> list[tuple[Batch, float]]:
    """The batch in runs of samples that go through together, each with its share of the loss.

    Activations of all are kept side by side, the tangents of a product for one at a time: one run
    below ``alone`` bytes (None: ``ONE_RUN_BYTES``, or half of the weights' own), where smaller
    products would cost more than the memory is worth; two from there on (half the tangents for
    about 5 % of time); more where two would pass ``at_once``. ``together``: so many samples a run,
    whatever their size.
    """
    if batch.length < 2 or not problem.separable or batch.samples < 2:
        return [(batch, 1.0)]
    samples = batch.samples
    itemsize = problem.dtype.itemsize
    size = tangent_numbers(reading.layers, *shape, blocked=blocked) * itemsize
    # As they are computed with: half-precision ones give the float32 model's runs, and its bits.
    weights = sum(
        t.numel() * (itemsize if t.is_floating_point() else t.itemsize)
        for t in problem.own_tensors()
    )
    step = together or run_length(samples, size, weights, alone=alone, at_once=at_once)
    if step >= samples:
        return [(batch, 1.0)]
    pieces = [
        batch.part(start, min(start + step, samples), problem.loss.count)
        for start in range(0, samples, step)
    ]
    # What has no valid target has no share either.
    valid = [(piece, piece.count / batch.count) for piece in pieces if piece.count > 0]
    return valid or [(batch, 1.0)]


def run_length(
    samples: int,
    tangents: float,
    weights: float,
    *,
    alone: float | None = None,
    at_once: float | None = None,
) -> int:
    """How many of a batch's samples go through together, by the bytes of all their tangents."""
    if tangents < (max(ONE_RUN_BYTES, RUN_SHARE * weights) if alone is None else alone):
        return samples
    most = max(2**26, RUN_SHARE * weights) if at_once is None else at_once
    count = int(min(samples, max(2, -(-tangents // most))))
    return -(-samples // count)


_NOT_HELD = (
    nn.Module,
    Problem,
    Batch,
    Buffers,
    ShardedWeights,
    type,
)  # whose memory counts elsewhere


@unwatched
def tensors_in(*objects: Any, without: Sequence[Tensor] = ()) -> list[Tensor]:
    """Every tensor that objects hold, in attributes, containers and closures, graphs excluded."""
    outside = {tensor.untyped_storage().data_ptr() for tensor in without}
    seen: set[int] = set()
    stack: list[Any] = list(objects)
    tensors: list[Tensor] = []
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, _NOT_HELD):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            parts = in_memory(thing)
            tensors += [p for p in parts if p.untyped_storage().data_ptr() not in outside]
        elif isinstance(thing, Mapping):
            stack.extend(thing.values())
        elif isinstance(thing, list | tuple | set | frozenset):
            stack.extend(thing)
        elif isinstance(thing, functools.partial):
            stack += [thing.func, *thing.args, *thing.keywords.values()]
        elif hasattr(thing, "__closure__"):
            stack.extend(cell.cell_contents for cell in thing.__closure__ or ())
        elif hasattr(thing, "__self__"):
            stack.append(thing.__self__)
        elif type(thing).__module__.startswith("curvatlas."):
            stack.extend(vars(thing).values())
    return tensors
