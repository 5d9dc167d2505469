r"""What products with a model will take here: measured on its first layers, drawn out to all.

    plan = ca.plan(problem)                        # seconds, memory, what makes it fit
    curvatlas plan SmolLM2-135M --tokens 512 --length 128

Time and memory of a product are linear in the number of layers: a model of the first two layers and
one of the first four, with the same embedding, head, tokens and runs of samples, tell both terms.
Their tensors are counted as they come and go, so that the memory is that of the operations, without
the allocator's gaps; their products are timed in turn. A model of up to four layers is its own
trial. Nothing is assumed of the machine, and nothing of the engine but that a layer is a layer.

Devices that are not at hand are counted instead (``cost_model``).
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from curvatlas.budget import (
    default_budget,
    give_back,
    limit_bytes,
    parse_bytes,
    readable,
)
from curvatlas.cost_model import Device, Task, TransformerShape
from curvatlas.engines.kept import kept_samples
from curvatlas.engines.tangent.model import (
    goes_by_blocks,
    read_model,
    run_length,
    tangent_numbers,
    token_shape,
)
from curvatlas.engines.tangent.reading import UnmappedModuleError, read_module
from curvatlas.engines.tangent.tape import MOST_CALLS
from curvatlas.files import in_memory
from curvatlas.operators.curvature import CurvatureOperator, GaussNewton, Hessian
from curvatlas.operators.engine import PAIR_SHARE
from curvatlas.problem import Problem
from curvatlas.problem.checkpointing import block_stacks, shortened
from curvatlas.results import Result

_SHORT, _LONG = 2, 4  # layers of the two trials
_ROUNDS = 4  # products timed of each
_RUNS = 2  # runs of samples in a trial: the first one writes the product, the others add to it
_CALLS = 160  # of torch, for a layer and a run of samples
_VECTORS = 3  # the vector, its product, and the product before that the caller still has
_TRIAL_VECTORS = 9  # of a trial's own size: weights, the checks' four and a product's three
# Resident bytes for a byte of tensors, with what the allocator cannot reuse: of products, and of
# the checks before them, where double backward frees tensors in between others that stay (measured
# 1.14 to 1.27 on Llama, GPT-NeoX and Gemma of 8 to 31 M parameters).
_GAPS, _GAPS_OF_CHECKS = 1.07, 1.2
KINDS: dict[str, type[CurvatureOperator]] = {"H": Hessian, "H_o": GaussNewton}


# --- a model that can be cut between two layers ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayeredModel:
    """A model by its number of layers; the whole one need not have weights."""

    name: str
    whole: nn.Module  # may be on the meta device
    size: int  # P, parameters that vary
    samples: int
    tokens: int  # of one sample
    of: Callable[[int, int], Problem]  # (layers, samples) → the problem of so many
    batch: int  # samples of the largest batch

    @property
    def depth(self) -> float:
        """Layers of a stack; of several, on average: each is cut to the same number."""
        lengths = [len(list(stack.children())) for stack in block_stacks(self.whole)]
        return sum(lengths) / len(lengths) if lengths else 1.0

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.itemsize for p in self.whole.parameters())

    @property
    def vector_bytes(self) -> int:
        """Of P numbers: half-precision weights are computed with in float32."""
        return self.size * max(4, *(p.itemsize for p in self.whole.parameters()))

    @property
    def trial_bytes(self) -> int:
        """About what the larger trial takes: of its weights, vectors and checks."""
        weights = sum(p.numel() for p in shortened(self.whole, _LONG).parameters())
        return _TRIAL_VECTORS * 4 * weights


def layered(problem: Problem, *, name: str | None = None) -> LayeredModel:
    """The model of a problem, cut by leaving layers out; weights are shared."""
    problem.require_one_process("planning", maker="plan")
    batches = list(problem.batches())
    sizes = [batch.samples for batch in batches] if problem.separable else [1]

    def of(layers: int, count: int) -> Problem:
        short = problem.with_fewer_blocks(layers)
        some = max(short.batches(), key=problem.units)
        if problem.separable and count < some.samples:
            some = some.part(0, count, problem.loss.count)
        return short.with_batches([some])

    return LayeredModel(
        name=name or type(problem.model).__name__,
        whole=problem.model,
        size=problem.size,
        samples=sum(sizes),
        batch=max(sizes),
        tokens=_tokens_of(problem),
        of=of,
    )


def _tokens_of(problem: Problem) -> int:
    """Tokens of a sample: those that enter the first layer, or its targets."""
    batch = next(problem.batches())
    with problem.evaluating(), contextlib.suppress(UnmappedModuleError):
        return token_shape(problem, read_model(problem.model), batch)[1]
    return max(int(batch.count) // max(problem.units(batch), 1), 1)


# --- what two trials tell -------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors made inside: those alive, and the most there were at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, tuple[Any, int]] = {}  # storage → (weak reference, bytes)
        self._bound = 0  # what is alive, with some that are not any more

    @property
    def now(self) -> int:
        """Bytes of the tensors that are alive."""
        self._alive = {k: (ref, n) for k, (ref, n) in self._alive.items() if not ref.expired()}
        self._bound = sum(size for _, size in self._alive.values())
        return self._bound

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if func.is_view:
            return result
        used = _tensors((args, kwargs))
        given = {_storage(part) for tensor in used for part in in_memory(tensor)}
        for tensor in (part for made in _tensors(result) for part in in_memory(made)):
            if _storage(tensor) not in given:
                self._note(tensor.untyped_storage())
        if self._bound > self.peak:
            self.peak = max(self.peak, self.now)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive and not self._alive[key][0].expired():
            return
        reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._alive[key] = (reference, storage.nbytes())
        self._bound += storage.nbytes()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those of an operation's arguments or results; pytree's walk takes as long as it does."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


@contextlib.contextmanager
def _counting(device: torch.device) -> Iterator[Callable[[], int]]:
    """Inside, the function gives the most bytes of tensors that were made since."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
        return
    with LiveBytes() as live:
        yield lambda: live.peak


class _Trial:
    """Products of one operator of a part of the model, timed in turn with those of another part."""

    def __init__(
        self,
        problem: Problem,
        kind: type[CurvatureOperator],
        *,
        options: Mapping[str, Any],
        checks: bool,
    ) -> None:
        self.problem, self._options = problem, options
        self._new = functools.partial(kind, problem, checks=checks)
        self._vector = torch.randn(problem.size, dtype=problem.dtype).to(problem.device)
        self._operator: CurvatureOperator | None = None
        self._later: list[float] = []
        self.preparing = 0  # bytes beside the weights while the engine is chosen and checked
        self.working = 0  # bytes beside weights and vectors while products are made
        self.held = 0  # of them what stays from product to product
        self.checking = 0.0  # seconds until the engine is chosen and checked
        self.first = 0.0  # seconds of the first product, for which samples are linearised

    def count(self) -> None:
        """What there is of tensors, at the most."""
        with _counting(self.problem.device) as peak:
            operator = self._made()
            self.preparing = peak()
        with _counting(self.problem.device) as peak:
            for _ in range(3 if self._options["record"] else 2):  # the third is on its own memory
                operator @ self._vector
            self.working = peak()
        self.held = operator.held_bytes
        operator.release()
        give_back()

    def time(self) -> None:
        """One product; before the first one the operator is made."""
        if self._operator is None:
            started = time.perf_counter()
            self._operator = self._made()
            self.checking = time.perf_counter() - started
            self.first = self._once(self._operator)
            if self._options["record"]:
                self._once(self._operator)
                self._once(self._operator)
        self._later.append(self._once(self._operator))

    @property
    def later(self) -> float:
        """Seconds of a product, when everything is there: other work only makes it longer."""
        return min(self._later)

    def _made(self) -> CurvatureOperator:
        operator = self._new()
        if operator.prepare().name == "tangent":
            operator.linearise_with(**self._options)
        return operator

    def _once(self, operator: CurvatureOperator) -> float:
        started = time.perf_counter()
        operator @ self._vector
        if self.problem.device.type == "cuda":
            torch.cuda.synchronize(self.problem.device)
        return time.perf_counter() - started


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of products with the whole model, all samples kept linearised."""

    engine: str
    seconds: float  # a later product
    linearising: float  # what the first one takes beside that
    checking: float  # seconds until the engine is chosen and checked
    preparing: float  # bytes beside the weights until the engine is chosen
    sample: float  # bytes that a sample keeps
    beside: float  # bytes that a product takes beside what is kept and vectors


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How the whole model would be worked on, so that a part of it is worked on alike."""

    run: int  # samples that go through together
    blocked: bool  # attention by blocks of queries
    record: bool  # products are written down


def _cost(model: LayeredModel, way: _Way, quantity: str, *, recompute: bool, count: bool) -> Cost:
    """The cost of an operator's products, by trials; ``count``: of memory too."""
    samples = min(model.batch, _RUNS * way.run)
    layers = [_SHORT, _LONG] if model.depth > _LONG else [_LONG]
    options = {
        "run_samples": way.run,
        "blocked": way.blocked,
        "record": way.record,
        "recompute": recompute,
    }
    trials = [
        _Trial(model.of(k, samples), KINDS[quantity], options=options, checks=count) for k in layers
    ]
    for trial in trials if count else ():
        trial.count()
    for _ in range(_ROUNDS):
        for trial in trials:
            trial.time()

    def whole(value: Callable[[_Trial], float]) -> float:
        """At all layers, from the values at two and at four."""
        low, high = value(trials[0]), value(trials[-1])
        deeper = max(model.depth - _LONG, 0) / (_LONG - _SHORT)
        return high + deeper * max(high - low, 0.0)

    share = model.samples / samples
    return Cost(
        engine=trials[-1].problem.engine.name,
        seconds=whole(lambda t: t.later) * share,
        linearising=whole(lambda t: max(t.first - t.later, 0.0)) * share,
        checking=whole(lambda t: t.checking),
        preparing=whole(lambda t: t.preparing),
        sample=whole(lambda t: t.held) / samples,
        beside=whole(lambda t: max(t.working - t.held, 0)),
    )


def _way_of(model: LayeredModel, budget: int) -> _Way:
    """As the engine decides for the whole model, from the sizes of its first layers."""
    problem = model.of(_SHORT, 1)
    try:
        with problem.evaluating():
            reading = read_model(problem.model)
            one, length, d = token_shape(problem, reading, next(problem.batches()))
    except UnmappedModuleError:
        return _Way(run=model.batch, blocked=False, record=False)
    deeper = max(model.depth / _SHORT, 1.0)
    room = int(budget / PAIR_SHARE / deeper)
    blocked = goes_by_blocks(reading.layers, length, problem.dtype.itemsize, room)
    numbers = tangent_numbers(reading.layers, one, length, d, blocked=blocked) / one
    tangents = model.batch * numbers * deeper * problem.dtype.itemsize
    weights = sum(p.numel() for p in model.whole.parameters()) * problem.dtype.itemsize
    run = run_length(model.batch, tangents, weights)
    calls = _CALLS * model.depth * math.ceil(model.batch / run)
    return _Way(run=run, blocked=blocked, record=calls < MOST_CALLS)


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlannedOption(Result):
    """One way of computing products, and what it takes of the machine or of each device."""

    name: str
    how: str  # what to write
    seconds: dict[str, float]  # quantity → one later product
    first_seconds: float | None  # until the first product with H is there; None: not known
    memory: int  # bytes beside the libraries, at the peak
    limit: int  # bytes there are
    devices: int = 1
    counted: bool = False  # not measured: from the operations and bytes of devices not at hand

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit


@dataclass(frozen=True, kw_only=True)
class Plan(Result):
    """What products with a model will take: ``curvatlas plan``."""

    model: str
    parameters: int
    samples: int
    tokens: int  # of a sample
    engine: str  # that would compute here; empty: nothing was tried here
    options: tuple[PlannedOption, ...]

    @property
    def best(self) -> PlannedOption | None:
        """The fastest option that fits."""
        fitting = (option for option in self.options if option.fits)
        return min(fitting, key=lambda option: option.seconds["H"], default=None)

    @property
    def value(self) -> float:
        """Seconds of a product with H in the best way; infinite where none fits."""
        return math.inf if self.best is None else self.best.seconds["H"]

    def __str__(self) -> str:
        size = _millions(self.parameters)
        wide = max(len(option.name) for option in self.options)
        head = [f"{word:>8}" for word in ("H·v", "H_o·v", "first", "memory")]
        lines = [
            f"{self.model}: {size} parameters, {self.samples} × {self.tokens} tokens.",
            f"  {'':<{wide}}  {'  '.join(head)}",
        ]
        for option in self.options:
            seconds = option.seconds["H"], option.seconds.get("H_o"), option.first_seconds
            cells = ["" if value is None else _span(value) for value in seconds]
            cells = [f"{cell:>8}" for cell in (*cells, readable(option.memory))]
            more = ("" if option.fits else "  too much") + ("  counted" if option.counted else "")
            lines.append(f"  {option.name:<{wide}}  {'  '.join(cells)}{more}")
        if self.best is None:
            lines.append("None of these fits: fewer or shorter samples, or more devices.")
        else:
            lines.append(f"Best: {self.best.name}: {self.best.how}")
        return "\n".join(lines)


def _span(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _millions(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def plan(
    problem: Problem | LayeredModel,
    *,
    memory: int | str | None = None,
    devices: Sequence[int] = (),
    device: Device | None = None,
    shape: TransformerShape | None = None,
) -> Plan:
    """Time and memory of products with H and H_o, and which option makes them fit.

    memory: bytes that the process may use (default: what the machine gives it). devices: numbers of
        devices like ``device`` over which weights and vectors are spread; their costs are counted
        from the model's ``shape`` (default: read off the model), not measured.
    """
    model = problem if isinstance(problem, LayeredModel) else layered(problem)
    if devices and device is None:
        raise ValueError("devices= needs device=, what one of them does in a second and holds.")
    limit = limit_bytes() if memory is None else parse_bytes(memory)
    here, engine = model.trial_bytes <= limit_bytes(), ""
    options: list[PlannedOption] = []
    if here:
        options, engine = _here(model, limit)
    elif device is None:
        raise ValueError(
            f"{model.name}: its first {_LONG} layers take about {readable(model.trial_bytes)}, "
            f"more than this machine's {readable(limit_bytes())}: give devices= (--devices) to "
            "have it counted for others."
        )
    if device is not None:
        found = shape or shape_of(model.whole)
        options += [_spread(model, found, device, count) for count in devices or (1,)]
    return Plan(
        model=model.name,
        parameters=model.size,
        samples=model.samples,
        tokens=model.tokens,
        engine=engine,
        options=tuple(options),
    )


@dataclass(frozen=True, kw_only=True)
class ProductCosts:
    """What a survey needs to know of products here, drawn out from trials."""

    seconds: Mapping[str, float]  # quantity → one later product
    memory: float  # bytes of what is kept and what a product takes beside it


def product_costs(problem: Problem, *, budget: int) -> ProductCosts:
    """Of H and H_o, with all samples kept linearised or some at a time, as the budget allows."""
    model = layered(problem)
    h, piece, _, seconds = _as_it_is(model, _way_of(model, budget), budget)
    return ProductCosts(seconds=seconds, memory=piece * h.sample + h.beside)


def _as_it_is(
    model: LayeredModel, way: _Way, budget: int
) -> tuple[Cost, int, bool, dict[str, float]]:
    """Of H, the samples linearised at a time, whether they stay, and seconds by quantity."""
    costs = {name: _cost(model, way, name, recompute=False, count=name == "H") for name in KINDS}
    piece, stays = _kept_here(model, costs["H"], budget)
    seconds = {n: c.seconds + (0.0 if stays else c.linearising) for n, c in costs.items()}
    return costs["H"], piece, stays, seconds


def _kept_here(model: LayeredModel, h: Cost, budget: int) -> tuple[int, bool]:
    """(samples that are linearised at a time, whether they stay)."""
    piece, stays = kept_samples(
        budget=budget,
        vector_bytes=model.vector_bytes,
        sample_bytes=h.sample,
        samples=model.samples,
        one_batch=model.batch == model.samples,
        transient=h.beside / max(h.sample * model.samples, 1.0),
    )
    return (model.samples if stays else piece), stays


def _here(model: LayeredModel, limit: int) -> tuple[list[PlannedOption], str]:
    """What the machine at hand can do, from trials on it."""
    budget = min(default_budget(), limit)
    vector, way = model.vector_bytes, _way_of(model, budget)
    kept, piece, stays, seconds = _as_it_is(model, way, budget)

    def option(
        words: tuple[str, str], h: Cost, samples: int, seconds: dict[str, float]
    ) -> PlannedOption:
        working = samples * h.sample + h.beside + _VECTORS * vector
        peak = max(_GAPS_OF_CHECKS * (h.preparing + vector), _GAPS * working)
        memory = int(model.weight_bytes + peak)
        name, how = words
        return PlannedOption(
            name=name,
            how=how,
            seconds=seconds,
            first_seconds=h.checking + h.linearising + h.seconds,
            memory=memory,
            limit=limit,
        )

    options = [option(_words(piece, stays), kept, piece, seconds)]
    if kept.engine == "tangent":  # autograd's own checkpoints are chosen when a Problem is made
        lean = _cost(model, way, "H", recompute=True, count=True)
        words = ("blocks computed anew", "Problem(…, checkpoint_activations=True)")
        options.append(option(words, lean, model.samples, {"H": lean.seconds}))
    return options, kept.engine


def _words(piece: int, stays: bool) -> tuple[str, str]:
    if stays:
        return "activations kept", "ca.Hessian(problem), as it is"
    return (
        f"{piece} samples at a time, linearised anew",
        "ca.Hessian(problem), as it is (a larger budget= keeps more)",
    )


def _spread(
    model: LayeredModel, shape: TransformerShape, device: Device, count: int
) -> PlannedOption:
    """Weights and vectors spread over ``count`` devices, counted."""

    def task(quantity: Any) -> Task:
        return Task(
            shape=shape,
            quantity=quantity,
            tokens=model.samples * model.tokens,
            length=model.tokens,
            devices=count,
        )

    lean = {name: replace(task(name), mode="recomputed") for name in ("H", "H_o")}
    ways = {name: device.best(own) or own for name, own in lean.items()}
    seconds = {name: device.seconds(way) for name, way in ways.items()}
    way = ways["H"]
    limit = 2**62 if math.isinf(device.memory) else int(device.memory)
    kept = {"kept": "kept", "passing": "linearised anew", "recomputed": "computed block by block"}
    return PlannedOption(
        name=f"spread over {count} devices, {kept[way.mode]}",
        how="torchrun with fully_shard on every block (docs/how-to/cluster.md), "
        f"{way.run} sample{'s' if way.run > 1 else ''} at a time",
        seconds=seconds,
        first_seconds=None,
        memory=int(way.memory_bytes),
        limit=limit,
        devices=count,
        counted=True,
    )


def shape_of(model: nn.Module) -> TransformerShape:
    """The sizes that decide the cost, of a model with or without weights."""
    stacks = block_stacks(model)
    try:
        spec, _ = read_module(next(iter(stacks[0].children())))
    except (UnmappedModuleError, IndexError) as error:
        raise ValueError(
            f"the sizes of {type(model).__name__} cannot be read ({error}): pass shape=."
        ) from error
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    vocabulary = max((table.num_embeddings for table in tables), default=1)
    wide = {id(p) for p in model.parameters() if p.ndim > 1 and p.shape[0] == vocabulary}
    return TransformerShape(
        layers=sum(len(list(stack.children())) for stack in stacks),
        width=spec.d_model,
        hidden=spec.d_ff or 0,
        heads=spec.n_heads,
        key_value_heads=spec.kv_heads,
        head_size=spec.key_size,
        vocabulary=vocabulary,
        gated=spec.gated,
        tied=len(wide) < 2,
    )
