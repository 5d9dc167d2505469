"""Which engine computes the products of an operator, decided on one sample before the first one.

The hand-written passes (``engines/tangent``) are faster and need less memory; autograd knows every
model. A model whose layers are recognised is not yet one whose derivatives are known: a product by
hand is held to double backward on the given weights, and every batch's outputs to the model's own.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from curvatlas import parallel
from curvatlas.engines.kept import PLANNED, Linearise
from curvatlas.engines.tangent.linear import Buffers, squared_distance
from curvatlas.engines.tangent.model import (
    ModelReading,
    TangentLinearisation,
    goes_by_blocks,
    kept_pairs,
    pair_numbers,
    read_model,
    tangent_numbers,
    token_shape,
)
from curvatlas.engines.tangent.reading import UnmappedModuleError
from curvatlas.engines.tangent.sharded import ShardedLinearisation
from curvatlas.errors import DifferentiationError
from curvatlas.linear_operator import Part
from curvatlas.problem import Batch, EngineChoice, Problem
from curvatlas.tape.linearised import TapeLinearisation

Engine = Literal["auto", "tangent", "tape", "autograd"]
PAIR_SHARE = 4  # what part of the budget matrices of queries by keys may take: 1 in so many
# Relative difference of two products of one sample that rounding explains, for one block.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 3e-5}
_OPERATIONS_OF_A_BLOCK = 16  # about as many round one after the other


def check_engine(engine: str) -> None:
    """Raise on an unknown name."""
    if engine not in get_args(Engine):
        raise ValueError(f"engine is 'auto', 'tangent', 'tape' or 'autograd', got {engine!r}.")


def by_autograd(problem: Problem, reason: str) -> None:
    """Note that autograd computes, and why."""
    problem.engine = EngineChoice("autograd", reason)


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """One sample that both engines multiply, and what double backward says of it."""

    sample: Batch
    columns: Mapping[str, Tensor]
    product: Sequence[Tensor | None]  # of the operator with the columns, by double backward
    length_ratio: float = 1.0  # tokens of a whole sample, in tokens of this one
    blocked: bool = False  # whether attention of a whole one goes by blocks of queries
    reading: ModelReading | None = None  # of the model, None: to be read


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """The hand-written engine and the memory it needs."""

    linearise: Linearise
    sample_bytes: int  # that a sample holds
    weight_bytes: int  # of copies of weights, however many samples there are
    transient: float  # what a product needs beside a linearisation, in sizes of that

    def anew(self) -> ByHand:
        """The same with a workspace of its own, which holds nothing yet."""
        assert isinstance(self.linearise, functools.partial)
        if self.linearise.func is not TangentLinearisation:
            return self
        return replace(self, linearise=functools.partial(self.linearise, space=Buffers(keep=True)))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The engine that an operator has chosen, and at which weights it was probed."""

    version: tuple[bytes, bytes] | None  # of the weights
    by_hand: ByHand | None  # None: autograd
    probe_bytes: int  # that autograd holds of the probe
    probe_samples: int

    def used(self) -> ByHand | None:
        """What computes, with memory of its own."""
        return None if self.by_hand is None else self.by_hand.anew()


def _at_full_length(ours: TangentLinearisation, probe: Probe, reading: ModelReading) -> int:
    """Bytes that the whole sample would hold, beside copies of weights."""
    held = ours.held_bytes - ours.weight_bytes
    if probe.length_ratio == 1:
        return held
    tokens = ours.chains[0].shape[1]
    pairs = [0, 0]
    if not probe.blocked:
        lengths = (tokens, round(tokens * probe.length_ratio))
        pairs = [kept_pairs(reading.layers, n) * ours.dtype.itemsize for n in lengths]
    return int((held - pairs[0]) * probe.length_ratio + pairs[1])


def probe_columns(problem: Problem, names: Sequence[str]) -> dict[str, Tensor]:
    """A normal column by parameter, all of them views of one vector: none has to be copied."""
    layout = problem.layout
    sizes = dict(zip(layout.names, zip(layout.sizes, layout.shapes, strict=True), strict=True))
    total = sum(sizes[name][0] for name in names)
    generator = torch.Generator(device="cpu").manual_seed(3)
    flat = torch.randn(total, generator=generator, dtype=problem.dtype, device="cpu")
    pieces = torch.split(flat.to(problem.device), [sizes[name][0] for name in names])
    return {n: p.view(1, *sizes[n][1]) for n, p in zip(names, pieces, strict=True)}


def tangent_engine(
    problem: Problem,
    probe: Probe,
    names: Sequence[str],
    *,
    engine: Engine,
    part: Part,
    logit_room: int,
    budget: int,
) -> ByHand | None:
    """The hand-written engine, where it understands the model and its product is right; else None.

    With ``engine="tangent"`` what is not understood raises; else the tape takes it. Where the
    matrices of queries by keys of one sample take more than a quarter of the budget, attention goes
    by blocks of queries; where the activations of one sample do not fit, blocks are made anew when
    a product needs them. Call it inside ``problem.evaluating``.
    """

    def differences() -> Iterator[tuple[float, Linearise, TangentLinearisation, ModelReading]]:
        """Of our product from the exact one; a second time with the model's ends by autograd."""
        reading = probe.reading or read_model(problem.model)
        for plain in dict.fromkeys((reading.plain_ends, False)):
            linearise = functools.partial(
                TangentLinearisation,
                reading=replace(reading, plain_ends=plain),
                part=part,
                space=Buffers(keep=True),
                logit_room=logit_room,
                pair_room=budget // PAIR_SHARE,
                blocked=probe.blocked,
            )
            ours = linearise(problem, probe.sample, names)
            if _at_full_length(ours, probe, reading) > PLANNED * budget / (1 + ours.transient):
                linearise = functools.partial(linearise, recompute=True)
                ours = linearise(problem, probe.sample, names)
            yield _difference(ours, probe, names, allowed(reading)), linearise, ours, reading

    def allowed(reading: ModelReading) -> float:
        return _ROUNDING[problem.dtype] * math.sqrt(len(reading.layers))

    if engine == "tape":
        return tape_engine(problem, probe, names, engine=engine, part=part)
    off, rounding = math.inf, 0.0
    try:
        for off, linearise, ours, reading in differences():
            rounding = allowed(reading)
            if off <= rounding:
                problem.engine = EngineChoice(
                    "tangent", _described(reading, off, f"a product of one sample{_short(probe)}")
                )
                return ByHand(
                    linearise=linearise,
                    sample_bytes=_at_full_length(ours, probe, reading),
                    weight_bytes=ours.weight_bytes,
                    transient=ours.transient,
                )
    except UnmappedModuleError as error:
        if engine == "tangent":
            raise
        reason = str(error).rstrip(".")
        return tape_engine(problem, probe, names, engine=engine, part=part, reason=reason)
    _differs(problem, "written out by hand", off, rounding, asked=engine == "tangent")
    return None


def tape_engine(
    problem: Problem,
    probe: Probe,
    names: Sequence[str],
    *,
    engine: Engine,
    part: Part,
    reason: str = "",
) -> ByHand | None:
    """The tape, where it can record the model and its product is right; else None: autograd.

    reason: why the model is not computed by hand.
    """
    linearise = functools.partial(TapeLinearisation, part=part)
    if problem.checkpoint_activations or not problem.in_place:
        what = "checkpointed activations" if problem.in_place else "weights that are not in place"
        if engine == "tape":
            raise UnmappedModuleError(f"the tape does not record {what}: use engine='autograd'.")
        by_autograd(problem, f"{reason}, and the tape does not record {what}")
        return None
    try:
        ours = linearise(problem, probe.sample, names)
        off = _difference(ours, probe, names, _ROUNDING[problem.dtype])
    except Exception as error:
        if engine == "tape" or isinstance(error, MemoryError):
            raise
        by_autograd(problem, f"{reason}, and on the tape: {error}".rstrip("."))
        return None
    blocks = max(1.0, ours.tape.operations / _OPERATIONS_OF_A_BLOCK)
    allowed = _ROUNDING[problem.dtype] * math.sqrt(blocks)
    if off <= allowed:
        problem.engine = EngineChoice(
            "tape",
            f"{ours.tape}; a product of one sample{_short(probe)} agrees with double backward to "
            f"{off:.0e}",
        )
        return ByHand(
            linearise=linearise,
            sample_bytes=int(ours.held_bytes * probe.length_ratio**2),
            weight_bytes=0,
            transient=ours.transient,
        )
    _differs(problem, "on the tape", off, allowed, asked=engine == "tape")
    return None


def _differs(problem: Problem, way: str, off: float, rounding: float, *, asked: bool) -> None:
    """Leave to autograd what is not double backward; raise where that engine was asked for."""
    reason = (
        f"products {way} differ from double backward by {off:.1e} on one sample, where rounding "
        f"explains {rounding:.0e}"
    )
    if asked:
        raise DifferentiationError(f"{reason}: use engine='autograd'.")
    warnings.warn(f"{reason}: autograd computes instead.", stacklevel=9)
    by_autograd(problem, reason)


def probe_batch(problem: Problem) -> Batch:
    """One sample with a valid target, or the first batch where batches cannot be cut."""
    first = next(problem.batches())
    if not problem.separable:
        return first
    for place in range(min(first.samples, 16)):
        piece = first.part(place, place + 1, problem.loss.count)
        if piece.count > 0:
            return piece
    return first


class SpreadProducts:
    """The hand-written engine where weights are spread over processes: each step by all of them."""

    def __init__(
        self, problem: Problem, part: Part, *, budget: int, logit_room: int, checks: bool
    ) -> None:
        self._problem, self._part, self._checks = problem, part, checks
        self._budget, self._logit_room = budget, logit_room
        self._linear: ShardedLinearisation | None = None
        self._version: object = None
        self._refusal: str | None = None
        self.unused_told = False

    def refusal(self) -> str | None:
        """Why the hand-written passes cannot be used, None: they can; looked at when weights move.

        Every block is held to double backward through its own module, on one sample of each
        process.
        """
        version = self._problem.weights_version()
        if not parallel.everywhere(version == self._version):
            self.release()
            self._version = version
            self._refusal = self._prepared()
        return self._refusal

    def release(self) -> None:
        """Forget what is kept."""
        self._linear, self._version = None, None

    def _prepared(self) -> str | None:
        problem, off, reason = self._problem, 0.0, ""
        sample = next(problem.batches(), None)
        reading: ModelReading | None = None
        with problem.joined():
            if self._checks:
                problem.check()  # before the evaluation, in which dropout is off
            try:
                with problem.evaluating():
                    reading = read_model(problem.model)
                    self._linear = ShardedLinearisation(
                        problem,
                        problem.parameter_names,
                        reading=reading,
                        bends=self._part != "outer",
                        budget=self._budget,
                        logit_room=self._logit_room,
                        pair_room=self._budget // PAIR_SHARE,
                    )
                    if sample is not None:
                        off = self._linear.verified(probe_batch(problem))
            except UnmappedModuleError as error:
                reason = str(error).rstrip(".")
        if reading is not None and not reason:
            allowed = _ROUNDING[problem.dtype]
            if not off <= allowed:
                reason = (
                    f"a block by hand differs from double backward by {off:.1e}, where rounding "
                    f"explains {allowed:.0e}"
                )
        reasons = [text for text in parallel.texts(reason) if text] if problem.spread else [reason]
        if any(reasons):
            self._linear = None
            return reasons[0]
        assert reading is not None
        problem.engine = EngineChoice(
            "tangent", f"{_described(reading, off, 'every block')}; weights stay spread"
        )
        return None

    def product(self, columns: Tensor, part: Part) -> Tensor:
        """This process's entries of H, H_o or H_f times columns: (K, P_local)."""
        assert self._linear is not None
        return self._linear.product(columns, part)

    def unused(self) -> frozenset[str]:
        """Parameters that no process's data reach, until it has been said."""
        if self._linear is None or self.unused_told:
            return frozenset()
        names = self._problem.parameter_names
        missing = torch.tensor([int(name in self._linear.unused) for name in names])
        ranks = parallel.world_size() if self._problem.spread else 1
        if ranks > 1:
            parallel.add_over_processes(missing)
        self.unused_told = True
        return frozenset(
            n for n, count in zip(names, missing.tolist(), strict=True) if count == ranks
        )


# --- a sample that double backward can hold -------------------------------------------------------

# A gradient's graph, kept for double backward, holds about 8 matrices of queries by keys for every
# head, and 4 times the numbers of a tangent.
_GRAPH_PAIRS, _GRAPH_TANGENTS = 8, 4
_SHORTEST = 16  # tokens that are left of a sample


@dataclass(frozen=True, kw_only=True)
class ShortSample:
    """A sample, or the first of its tokens."""

    sample: Batch
    length_ratio: float = 1.0  # tokens of the whole one, in tokens of this one
    blocked: bool = False  # whether attention of the whole one goes by blocks of queries
    reading: ModelReading | None = None  # of the model, None: it was not understood


def short_sample(problem: Problem, sample: Batch, names: Sequence[str], budget: int) -> ShortSample:
    """As many of a sample's tokens as double backward can hold within half of the budget.

    Beside the graph stand four vectors of the parameters ``names``. What a product of the short
    sample shows of the formulas holds for the long one too: they do not depend on the length, and
    at full length the outputs are compared with the model's own.
    """
    sizes = dict(zip(problem.layout.names, problem.layout.sizes, strict=True))
    itemsize = problem.dtype.itemsize
    room = budget // 2 - 4 * itemsize * sum(sizes[name] for name in names)
    blocked = False
    reading: ModelReading | None = None
    try:
        with problem.evaluating():
            reading = read_model(problem.model)
            layers = reading.layers
            _, length, d = token_shape(problem, reading, sample)
            pairs = functools.partial(pair_numbers, layers)
            blocked = goes_by_blocks(layers, length, itemsize, budget // PAIR_SHARE)

            def fits(tokens: int) -> bool:
                tangents = tangent_numbers(layers, 1, tokens, d, blocked=True)
                numbers = _GRAPH_PAIRS * pairs(tokens) + _GRAPH_TANGENTS * tangents
                return numbers * itemsize <= room

            tokens = length
            while tokens >= 2 * _SHORTEST and not fits(tokens):
                tokens //= 2
            if tokens == length:
                return ShortSample(sample=sample, blocked=blocked, reading=reading)
            for start in (0, length - tokens):
                short = sample.shortened(length, slice(start, start + tokens), problem.loss.count)
                if short is not None and short.count > 0:
                    with torch.no_grad():
                        problem.predictions(short, {})
                    return ShortSample(
                        sample=short,
                        length_ratio=length / tokens,
                        blocked=blocked,
                        reading=reading,
                    )
    except Exception:  # a model that takes no shorter input, or is not understood: as it is
        pass
    return ShortSample(sample=sample, blocked=blocked, reading=reading)


def _short(probe: Probe) -> str:
    return "" if probe.length_ratio == 1 else f" (1/{probe.length_ratio:g} of its tokens)"


def _described(reading: ModelReading, off: float, what: str) -> str:
    blocks = f"{len(reading.layers)} blocks" if len(reading.layers) > 1 else "1 block"
    names = {type(layer.module).__name__.removeprefix("FSDP") for layer in reading.layers}
    return (
        f"{blocks} ({', '.join(sorted(names))}) written out by hand; {what} agrees with double "
        f"backward to {off:.0e}"
    )


def _difference(
    ours: TangentLinearisation | TapeLinearisation,
    probe: Probe,
    names: Sequence[str],
    allowed: float,
) -> float:
    """‖ours v − exact v‖ over ‖H_o v‖ + ‖H_f v‖, which rounding is relative to.

    ‖H v‖ is no more than that: where the difference is within ``allowed`` of it, the two parts need
    no products of their own. One product at a time: each is a vector as large as the model.
    """
    got = ours.product(probe.columns, names)
    off = sum(squared_distance(a, b) for a, b in zip(got, probe.product, strict=True))
    squares = [sum(squared_distance(a, None) for a in got)]
    del got
    if ours.part != "outer" and not math.sqrt(off) <= allowed * math.sqrt(squares[0]):
        squares = []
        for part in ("outer", "functional"):
            term = ours.part_product(probe.columns, names, part)
            squares.append(sum(squared_distance(a, None) for a in term))
            del term
    scale = sum(math.sqrt(square) for square in squares)
    return math.sqrt(off) / scale if scale > 0 else math.sqrt(off)
