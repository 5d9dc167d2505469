r"""Columns of the outputs' curvature, pulled back to the outputs y of every layer.

For target i (a token with a label, a sample) with outputs Z_i and Σ_c f_ic f_icᵀ = Λ_i,

    g_icm = (∂Z_i/∂y_m)ᵀ f_ic           at every position m of every use of a parameter,

each column on its own: Σ_ic g_icm g_icmᵀ of columns that are pulled back together would hold cross
terms with the signs of a factorisation, which are arbitrary. Columns at targets that reach no
common position do go together, as their slopes lie at different places: samples always do unless
the model mixes them, tokens where the model has no attention. Which axes tell them apart is tried
out with slopes that are scaled place by place and must come back scaled in the same way. Where a
layer does not know its samples (positions that are looked up once for a whole batch) the samples
run one by one; where a model mixes its samples, every target of the batch is pulled back alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from curvatlas.operators.fisher import drawn_uniform
from curvatlas.operators.layer_uses import RecordedPass, Use, record
from curvatlas.precision import in_float64
from curvatlas.problem import Batch, Problem
from curvatlas.progress import track

_MOST_CLASSES = 512  # Λ^½ is taken exactly: one backward pass a column
_IN_FLIGHT_BYTES = 2**27  # slopes at the layers' outputs that exist at the same time
_MOST_AT_ONCE = 256  # columns in one backward pass
_POWERS = 32  # of two, that tell places apart

# An axis of a use's positions that follows an axis of the outputs: it is that axis ("whole"), or
# holds it as the outer ("major") or inner ("minor") part of a flattened one.
Split = tuple[int, Literal["whole", "major", "minor"]]


@dataclass(frozen=True, kw_only=True)
class ColumnChoice:
    """Which columns: of Λ, of targets drawn from the model, or of the observed targets."""

    kind: Literal["exact", "mc", "empirical"] = "exact"
    samples: int = 1  # draws of "mc"
    seed: int = 0
    per: Literal["target", "sample"] = "target"  # "sample": the targets of a sample in one column


@dataclass(frozen=True)
class _Arrangement:
    """Targets at different places of the outputs' ``axes`` reach different places of each use."""

    axes: tuple[int, ...]
    splits: tuple[tuple[Split, ...], ...]  # for every use, one an axis


@dataclass(frozen=True)
class SampleRun:
    """A forward pass with its positions by samples: S parts that do not meet, M positions each."""

    recorded: RecordedPass
    arrangement: _Arrangement
    target_axes: int  # trailing axes of the outputs that belong to one target
    columns: Iterator[Tensor]  # like the outputs: one column of every target
    per_sample: bool

    @property
    def uses(self) -> tuple[Use, ...]:
        """The uses of parameters in this pass."""
        return self.recorded.uses

    @property
    def samples(self) -> int:
        """S."""
        shape = self.recorded.outputs.shape
        return torch.Size([shape[axis] for axis in self.arrangement.axes]).numel()

    def inputs(self, number: int) -> Tensor:
        """a_m or n_m of a use, (S, M, in); the rows that an embedding reads, (S, M)."""
        use = self.uses[number]
        if use.kind == "embedding":
            return self._by_sample(use.read().unsqueeze(-1), number).squeeze(-1)
        return self._by_sample(use.read(), number)

    def with_one(self, number: int, key: tuple[str | None, str | None]) -> Tensor:
        """â_m (S, M, in [+ 1]) of a weight and a bias: the input for the first, 1 for the other."""
        weight, bias = key
        ones = self.recorded.outputs.detach().new_ones(*self.uses[number].grid, 1)
        parts = [] if weight is None else [self.inputs(number)]
        parts += [] if bias is None else [self._by_sample(ones, number)]
        return torch.cat(parts, -1)

    def slopes(self) -> Iterator[list[Tensor]]:
        """g_icm, K columns at a time: one (K, S, M, out) a use. Once only."""
        for seeds in self._seeds():
            pulled = self.recorded.pulled(seeds)
            yield [self._by_sample(slope, number) for number, slope in enumerate(pulled)]

    def _by_sample(self, tensor: Tensor, number: int) -> Tensor:
        """(*lead, *grid, d) → (*lead, S, M, d)."""
        grid, axes = self.uses[number].grid, self.arrangement.axes
        splits = self.arrangement.splits[number]
        way_of = {axis: (k, way) for k, (axis, way) in enumerate(splits)}
        opened: list[int] = []
        place_of: dict[int, int] = {}  # number of the outputs' axis → its place in ``opened``
        for axis, size in enumerate(grid):
            if axis not in way_of:
                opened.append(size)
                continue
            k, way = way_of[axis]
            count = self.recorded.outputs.shape[axes[k]]
            place_of[k] = len(opened) + (way == "minor")
            opened += [size // count, count] if way == "minor" else [count, size // count]
        lead = tensor.ndim - len(grid) - 1
        first = [place_of[k] for k in range(len(axes))]
        rest = [place for place in range(len(opened)) if place not in first]
        order = [*range(lead), *(lead + place for place in first + rest), lead + len(opened)]
        outer, width = tensor.shape[:lead], tensor.shape[-1]
        positions = torch.Size(opened).numel() // self.samples
        turned = tensor.reshape(*outer, *opened, width).permute(order)
        return turned.reshape(*outer, self.samples, positions, width)

    def _seeds(self) -> Iterator[Tensor]:
        """The columns, K at a time: (K, *outputs); those that are zero are left out."""
        outputs = self.recorded.outputs.detach()
        leading = outputs.ndim - self.target_axes
        apart = list(self.arrangement.axes)
        order = [*apart, *(axis for axis in range(outputs.ndim) if axis not in apart)]
        back = [0, *(1 + order.index(axis) for axis in range(outputs.ndim))]
        turned_shape = outputs.permute(order).shape
        targets = turned_shape[len(apart) : leading].numel()

        def single_columns() -> Iterator[tuple[Tensor, int | slice]]:
            for column in self.columns:
                turned = column.permute(order).reshape(self.samples, targets, -1)
                if self.per_sample:
                    yield turned, slice(None)
                    continue
                for target in (turned != 0).any(2).any(0).nonzero().flatten().tolist():
                    yield turned, target

        pending = single_columns()
        while some := list(islice(pending, self._columns_at_once())):
            seeds = outputs.new_zeros(len(some), *some[0][0].shape)
            for seed, (turned, target) in zip(seeds, some, strict=True):
                seed[:, target] = turned[:, target]
            yield seeds.reshape(len(some), *turned_shape).permute(back)

    def _columns_at_once(self) -> int:
        outputs = self.recorded.outputs
        numbers = 3 * outputs.numel() + 2 * sum(use.shape.numel() for use in self.uses)
        fitting = _IN_FLIGHT_BYTES // max(numbers * outputs.dtype.itemsize, 1)
        return max(1, min(fitting, _MOST_AT_ONCE))


class PulledColumns:
    """The passes over a problem's batches; ``unexplained`` names the parameters without a use.

    whole_samples: tell samples of the data apart, and not the tokens inside them.
    name: of the operator, for messages.
    """

    def __init__(
        self, problem: Problem, choice: ColumnChoice, *, whole_samples: bool, name: str
    ) -> None:
        self.problem, self.choice, self.name = problem, choice, name
        self.unexplained: set[str] = set()
        self._whole_samples = whole_samples or choice.per == "sample"

    def __iter__(self) -> Iterator[SampleRun]:
        for batch in track(self.problem.batches(), self.name):
            yield from self._runs(batch)

    def _runs(self, batch: Batch) -> Iterator[SampleRun]:
        recorded = record(self.problem, batch)
        self.unexplained.update(recorded.unexplained())
        if not recorded.uses:
            return
        _, target_axes = self.problem.loss.residual(recorded.outputs.detach(), batch.targets)
        leading = recorded.outputs.ndim - target_axes
        arrangement = _arrangement(recorded, leading, one_axis=self._whole_samples)
        if arrangement is not None:
            yield self._run(recorded, arrangement, target_axes)
            return
        parts = self._single_samples(recorded)
        if parts is not None:
            del recorded
            for part in parts:
                alone = record(self.problem, part)
                yield self._run(alone, _together(alone), target_axes)
            return
        if self._whole_samples:
            raise ValueError(
                f"approximation='reduce' and per='sample' need samples that the model keeps apart, "
                f"and those of batch {batch.index} meet in it: use approximation='expand' and "
                "per='target'."
            )
        yield self._run(recorded, _together(recorded), target_axes)

    def _run(
        self, recorded: RecordedPass, arrangement: _Arrangement, target_axes: int
    ) -> SampleRun:
        columns = _columns(self.problem, recorded, self.choice, target_axes, self.name)
        return SampleRun(recorded, arrangement, target_axes, columns, self.choice.per == "sample")

    def _single_samples(self, recorded: RecordedPass) -> list[Batch] | None:
        """The batch's samples one by one, if the model gives the same outputs for them alone."""
        problem, batch, outputs = self.problem, recorded.batch, recorded.outputs.detach()
        if not problem.loss.additive or outputs.ndim == 0 or outputs.shape[0] != batch.samples:
            return None
        allowed = 1e4 * torch.finfo(outputs.dtype).eps * float(outputs.abs().max())
        parts = []
        for place in range(batch.samples):
            part = batch.part(place, place + 1, problem.loss.count)
            if part.count == 0:
                continue
            try:
                with torch.no_grad():
                    alone = problem.outputs(part, {})
            except (RuntimeError, ValueError):
                return None
            expected = outputs[place : place + 1]
            if alone.shape != expected.shape or float((alone - expected).abs().max()) > allowed:
                return None
            parts.append(part)
        return parts


# --- what does not meet ---------------------------------------------------------------------------


def _together(recorded: RecordedPass) -> _Arrangement:
    """Nothing is told apart: every target is pulled back on its own."""
    return _Arrangement((), tuple(() for _ in recorded.uses))


def _arrangement(recorded: RecordedPass, leading: int, *, one_axis: bool) -> _Arrangement | None:
    """The axes of the outputs along which nothing meets; None where there are none."""
    sizes = recorded.outputs.shape[:leading]
    if all(size == 1 for size in sizes):
        return _together(recorded)
    axes: list[int] = []
    splits: list[list[Split]] = [[] for _ in recorded.uses]
    for axis, size in enumerate(sizes):
        along = _splits_along(recorded, axis) if size > 1 else None
        if along is None or not all(map(_fits_beside, splits, along)):
            continue
        axes.append(axis)
        for before, split in zip(splits, along, strict=True):
            before.append(split)
        if one_axis:
            break
    return _Arrangement(tuple(axes), tuple(map(tuple, splits))) if axes else None


def _fits_beside(before: list[Split], split: Split) -> bool:
    """Whether an axis of a use may be told apart besides those before: each its own whole axis."""
    return not before or all(
        way == "whole" and axis != split[0] for axis, way in [*before, (-1, split[1])]
    )


def _splits_along(recorded: RecordedPass, axis: int) -> list[Split] | None:
    """For every use the axis that follows the outputs' ``axis``; None where one has none.

    Slopes that are multiplied by a number for each place of the outputs' axis must come back
    multiplied by these at the places of the use's axis. The numbers are powers of two, so that
    this holds to the last digit, and one for each place, so that no two places cancel.
    """
    outputs = recorded.outputs.detach()
    size = outputs.shape[axis]
    generator = torch.Generator().manual_seed(0)
    noise = _noise(outputs, generator)
    plain = recorded.pulled(noise.unsqueeze(0))
    fitting = [list(_candidates(use.grid, axis, size)) for use in recorded.uses]
    for _ in range(2):  # places beyond the number of powers share them: drawn anew
        powers = (
            torch.randperm(max(size, _POWERS), generator=generator, device="cpu")[:size] % _POWERS
        )
        factors = torch.pow(2.0, powers - _POWERS // 2).to(outputs)
        shape = [size if a == axis else 1 for a in range(outputs.ndim)]
        scaled = recorded.pulled((noise * factors.view(shape)).unsqueeze(0))
        for number, (before, after) in enumerate(zip(plain, scaled, strict=True)):
            fitting[number] = [
                split for split in fitting[number] if _follows(before[0], after[0], split, factors)
            ]
            if not fitting[number]:
                return None
    return [splits[0] for splits in fitting]


def _candidates(grid: tuple[int, ...], axis: int, size: int) -> Iterator[Split]:
    """Axes that may follow the outputs' ``axis``, the same one first."""
    likely = sorted(range(len(grid)), key=lambda number: number != axis)
    for number in likely:
        if grid[number] == size:
            yield number, "whole"
    for number in likely:
        if grid[number] > size and grid[number] % size == 0:
            yield number, "major"
            yield number, "minor"


def _follows(before: Tensor, after: Tensor, split: Split, factors: Tensor) -> bool:
    """Whether slopes (*grid, out) are multiplied by ``factors`` along ``split``."""
    axis, way = split
    size, shape = len(factors), before.shape
    count = shape[axis] // size
    pieces = (count, size) if way == "minor" else (size, count)
    place = axis + (way == "minor")

    def by_place(slopes: Tensor) -> Tensor:
        opened = slopes.reshape(*shape[:axis], *pieces, *shape[axis + 1 :])
        return opened.movedim(place, 0).flatten(1)

    expected = by_place(before) * factors.unsqueeze(1)
    allowed = 16 * torch.finfo(before.dtype).eps * expected.abs().amax(1, keepdim=True)
    return bool(((by_place(after) - expected).abs() <= allowed).all())


# --- columns of the outputs' curvature ------------------------------------------------------------


def _columns(
    problem: Problem, recorded: RecordedPass, choice: ColumnChoice, target_axes: int, name: str
) -> Iterator[Tensor]:
    """f_c of all targets at once, shaped like the outputs, with the batch's share of the loss."""
    batch, loss = recorded.batch, problem.loss
    outputs = recorded.outputs.detach()
    share = batch.count / problem.normaliser
    if choice.kind == "exact":
        for column in _root_columns(problem, outputs, batch, target_axes, name):
            yield column * share**0.5
        return
    draws = choice.samples if choice.kind == "mc" else 1
    scale = (share / (draws * loss.target_count(outputs, batch.targets))) ** 0.5
    for draw in range(draws):
        if choice.kind == "mc":
            uniform = drawn_uniform(choice.seed, batch, draw)
            yield loss.sample_residual(outputs, batch.targets, uniform) * scale
        else:
            yield loss.residual(outputs, batch.targets)[0] * scale


def _root_columns(
    problem: Problem, outputs: Tensor, batch: Batch, target_axes: int, name: str
) -> Iterator[Tensor]:
    """Columns of Λ^½, each for all targets at once (Λ is block-diagonal over targets)."""
    loss = problem.loss
    product = loss.curvature(outputs, batch.targets)
    if product is None:
        raise ValueError(
            f"{name} knows no Λ for the loss {loss.name!r}: use kind='empirical' instead."
        )
    shape = outputs.shape[outputs.ndim - target_axes :]
    classes = shape.numel()
    if classes > _MOST_CLASSES:
        raise ValueError(
            f"{name} takes Λ^½ exactly and {classes} outputs a target are too many (at most "
            f"{_MOST_CLASSES}): use kind='mc' or 'empirical', or ca.GaussNewton with ca.solve."
        )
    units = torch.eye(classes, dtype=outputs.dtype, device=outputs.device).view(classes, *shape)
    roots: Tensor | None = None
    if loss.root_product(outputs, batch.targets, torch.zeros_like(outputs)) is None:
        rows = [product(unit.expand_as(outputs).clone()).reshape(-1, classes) for unit in units]
        blocks = in_float64(torch.stack(rows, -1))  # (targets, C, C)
        values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)
        roots = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).to(outputs.dtype)
    # The factor is used target by target: it must be all of Λ.
    probe = _noise(outputs, torch.Generator().manual_seed(0))
    last = tuple(range(-target_axes, 0))
    applied = torch.zeros_like(outputs)
    for place, unit in enumerate(units):
        if roots is None:
            column = loss.root_product(outputs, batch.targets, unit.expand_as(outputs).clone())
            assert column is not None
        else:
            column = roots[..., place].reshape(outputs.shape).to(outputs.device)
        inner = column * probe
        applied += column * (inner.sum(last, keepdim=True) if last else inner)
        yield column
    expected = product(probe.clone())
    eps = torch.finfo(outputs.dtype).eps
    if not float((applied - expected).norm()) <= 1e4 * eps * float(expected.norm()):
        raise ValueError(
            f"the curvature of the loss {loss.name!r} is not that of separate targets: {name} "
            "knows no factor of it. Use ca.GaussNewton with ca.solve instead."
        )


def _noise(like: Tensor, random: torch.Generator) -> Tensor:
    """Normal numbers, drawn on the CPU in float64: the same on every device."""
    return torch.randn(like.shape, generator=random, dtype=torch.float64, device="cpu").to(like)
