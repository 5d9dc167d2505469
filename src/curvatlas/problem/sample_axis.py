r"""Where the samples of a batch lie, found by trying: no shape tells it for certain.

Cutting a batch into samples is right only if the model treats them apart. Time-major inputs
(L, B, d) have time on their first axis; a shared (L, L) mask with L = B looks like a batch; samples
that meet in the model (a mean over the batch) may not be cut at all. So before the first cut every
way to lay the samples out that the shapes allow is tried on the model, the usual one first, until
one passes. With Z = f(x_1, …, x_n) in float64 where memory allows, and with weights moved a little
from where they are, so that no gate that happens to be closed hides anything:

    parts           f(x_1), f(x_n) and f(x_k, x_k+1) are the slices of Z,
    replacements    f(x_1, x_1, x_3, x_3, …) leaves Z_1, Z_3, … as they are (to rounding: the shapes
                    are the same) and gives Z_1 at the second place, and so for the even places,
    loss            c ∂ℓ/∂Z of all samples, at random Z, is made of c_i ∂ℓ/∂Z_i of the parts.

Whole tensors are compared and never sums, so that samples cannot cancel each other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvatlas.budget import default_budget
from curvatlas.errors import PeerError, ProblemError
from curvatlas.files import in_memory
from curvatlas.precision import has_float64, in_float64
from curvatlas.problem.batches import Batch, described
from curvatlas.problem.evaluation import call, evaluation
from curvatlas.problem.kernels import unwatched

if TYPE_CHECKING:
    from curvatlas.problem.problem import Problem

Axes = tuple[int | None, ...]

_LAYOUTS = 64  # that are tried at most
_MOVED = 0.1  # how far the weights are moved, of their size
_ROUNDINGS = 100  # between equal numbers from calls of equal shapes
_REPLACED = 16  # samples among which some are replaced by others
_NOISE = 4099  # random numbers that are repeated, a prime


@dataclass(frozen=True)
class SampleLayout:
    """The axis on which each tensor of a batch holds the samples; None: shared by all of them."""

    leaves: Axes  # of the tree (inputs, targets)
    outputs: Axes  # of the tree that the loss reads
    # Inputs that could as well be shared: they are the same for all samples of the batch it was
    # found on, such as a mask that masks nothing.
    uncertain: tuple[int, ...] = ()


class SampleAxes:
    """Finds the layout of a Problem's batches when one is about to be cut, once for each kind.

    problem: what is differentiated, without its data.
    batch_axis: the axis of the inputs on which the samples lie; None: found.
    room: bytes that the probe may use; the first samples of a batch stand for all where it is less.
    """

    def __init__(self, problem: Problem, batch_axis: int | None) -> None:
        self._problem, self.batch_axis = problem, batch_axis
        self._layouts: dict[Any, SampleLayout | None] = {}
        self._exceptions: dict[int, SampleLayout | None] = {}  # by number of the batch
        self.room: int | None = None

    def learn(self, other: SampleAxes) -> None:
        """Take over what was found for the same kind of model and the same loss."""
        self._layouts.update(other._layouts)

    def of(self, batch: Batch) -> SampleLayout | None:
        """The batch's layout; None where its samples cannot be told apart."""
        if not self._problem.loss.additive:
            return None
        leaves, spec = tree_flatten((batch.inputs, batch.targets))
        ranks = tuple(t.ndim if isinstance(t, Tensor) else None for t in leaves)
        kind: tuple[Any, ...] = (str(spec), ranks)
        if kind in self._layouts:
            layout = self._layouts[kind]
            if layout is None or _fits(leaves, layout):
                return layout
            if batch.index in self._exceptions:
                return self._exceptions[batch.index]
        probe = _Probe(self._problem, batch, self.batch_axis, self.room)
        if not probe.decides:
            return _single_sample(leaves)
        layout = probe.search()
        if layout is None and self.batch_axis is not None:
            raise ProblemError(
                f"batch_axis={self.batch_axis}: the samples of batch {batch.index} with inputs "
                f"{described(batch.inputs)} influence each other along that axis, or the targets "
                "do not follow them; leave batch_axis out to have the axis found."
            )
        previous = self._layouts.get(kind)
        if previous is None or previous.uncertain:
            self._layouts[kind] = layout
        else:
            self._exceptions[batch.index] = layout
        return layout


def _fits(leaves: Sequence[Any], layout: SampleLayout) -> bool:
    """Whether a batch can have this layout, and nothing in it asks for another look."""
    axes = layout.leaves
    lengths = {t.shape[a] for t, a in zip(leaves, axes, strict=True) if a is not None}
    return len(lengths) == 1 and all(
        _same_for_all(leaves[place], axes[place]) for place in layout.uncertain
    )


def _same_for_all(leaf: Tensor, axis: int | None) -> bool:
    return axis is None or bool((leaf == leaf.narrow(axis, 0, 1)).all())


def _single_sample(leaves: Sequence[Any]) -> SampleLayout:
    """One sample, which nothing can be cut from: its axis is the first one."""
    axes = tuple(
        0 if isinstance(t, Tensor) and t.ndim and t.shape[0] == 1 else None for t in leaves
    )
    return SampleLayout(axes, (0,))


def cut(leaves: Sequence[Any], axes: Axes, start: int, stop: int) -> list[Any]:
    """Samples start..stop of every tensor that has samples."""
    return [
        leaf if axis is None else leaf[(slice(None),) * axis + (slice(start, stop),)]
        for leaf, axis in zip(leaves, axes, strict=True)
    ]


def chosen(leaves: Sequence[Any], axes: Axes, samples: Tensor) -> list[Any]:
    """The samples numbered ``samples`` of every tensor that has samples."""
    return [
        leaf if axis is None else leaf.index_select(axis, samples.to(leaf.device))
        for leaf, axis in zip(leaves, axes, strict=True)
    ]


class _Probe:
    """Tries layouts on one batch."""

    def __init__(
        self, problem: Problem, batch: Batch, batch_axis: int | None, room: int | None
    ) -> None:
        self._problem, self._batch = problem, batch
        self._given, self._spec = tree_flatten((batch.inputs, batch.targets))
        self._leaves, self._dtype = self._given, problem.dtype
        self._inputs = len(tree_flatten(batch.inputs)[0])
        self._told = batch_axis is not None
        self._room = default_budget(problem.device) if room is None else room
        self._candidates = list(itertools.islice(self._by_shape(batch_axis), _LAYOUTS))
        self._values: dict[str, Tensor] = {}
        self._whole: list[Any] | None = None  # Z of all samples
        self._output_spec: Any = None
        self._finite = False  # whether the model has given any number

    @property
    def decides(self) -> bool:
        """Whether trying tells anything: not if the targets' first axis has room for one only."""
        targets = (t for t in self._leaves[self._inputs :] if getattr(t, "ndim", 0))
        return bool(self._candidates) and (self._told or next(targets).shape[0] > 1)

    def search(self) -> SampleLayout | None:
        """The first layout that passes.

        Where they fit, float64 copies of the weights are tried: rounding hides less. Where moved
        weights overflow, or the model takes no float64, they are tried as they are.
        """
        doubled = self._problem.sharded is not None  # one block of them at a time
        doubled = doubled or (
            8 * sum(t.numel() for t in self._problem.own_tensors()) <= self._room // 4
        )
        doubled = doubled and has_float64(self._problem.device)
        for dtype in dict.fromkeys([torch.float64, self._dtype] if doubled else [self._dtype]):
            self._set_precision(dtype)
            strict = dtype == torch.float64 and self._problem.keep_float64
            for distance in (_MOVED, 0.0):
                self._values, self._whole, self._finite = self._moved(distance), None, False
                model, computed = self._problem.model, self._problem.compute_dtype
                scope = evaluation(model, stay_double=strict, compute_dtype=computed)
                with self._problem.unwrapped(), scope, torch.no_grad():
                    for axes in self._candidates:
                        layout = self._passes(axes)
                        if layout is not None:
                            return self._with_doubts(layout)
                if self._finite:
                    return None
        return None

    def _set_precision(self, dtype: torch.dtype) -> None:
        self._precision = dtype
        self._loose = torch.finfo(dtype).eps ** 0.5
        self._tight = _ROUNDINGS * torch.finfo(dtype).eps
        self._leaves = [t.to(dtype) if _varies(t) else t for t in self._given]

    def _moved(self, distance: float) -> dict[str, Tensor]:
        """The parameters, those that vary moved at random by ``distance`` of their size.

        A weight of zero is moved as far as others: a gate that is closed at the start of training
        must not hide what stands behind it.
        """
        problem = self._problem
        self._distance = distance
        if problem.sharded is not None:
            return {}  # moved when they are gathered
        values = {
            name: t.detach().to(self._precision) if _varies(t) else t
            for name, t in problem.named_weights().items()
        }
        if not distance:
            return values
        squares = {n: float(in_float64(values[n]).square().sum()) for n in problem.parameter_names}
        own = {weight.data_ptr() for weight in problem.own_tensors()}
        total = sum(squares.values())
        for name, square in squares.items():
            value = values[name]
            into = None if value.data_ptr() in own else value  # a copy is moved where it is
            values[name] = self._away(value, square, total, out=into)
        return values

    def _away(
        self, value: Tensor, square: float, squares: float, *, out: Tensor | None = None
    ) -> Tensor:
        """A weight moved by noise of its own size; ``squares`` are summed over all weights."""
        typical = math.sqrt(squares / max(self._problem.size, 1)) or 1.0
        size = max(math.sqrt(square / max(value.numel(), 1)), typical)
        noise = self._noise.to(value).repeat(-(-value.numel() // _NOISE))[: value.numel()]
        return torch.add(value, noise.view(value.shape), alpha=self._distance * size, out=out)

    @functools.cached_property
    def _noise(self) -> Tensor:
        """Normal numbers, the same for every weight."""
        seeded = torch.Generator().manual_seed(0)
        return torch.randn(_NOISE, generator=seeded, dtype=torch.float64, device="cpu")

    def _changed(self, name: str, value: Tensor) -> Tensor:
        """A weight of a spread model as it is tried, when it is gathered."""
        assert self._problem.sharded is not None
        value = value.to(self._precision) if _varies(value) else value
        if not self._distance or name not in self._problem.parameter_names:
            return value
        squares = self._problem.sharded.squares
        return self._away(value, squares[name], sum(squares.values()))

    def _with_doubts(self, layout: SampleLayout) -> SampleLayout:
        """Notes inputs that pass uncut as well, being the same for all samples."""
        uncertain = []
        for place, axis in enumerate(layout.leaves[: self._inputs]):
            others = layout.leaves[:place] + layout.leaves[place + 1 : self._inputs]
            if axis is None or all(other is None for other in others):
                continue
            uncut = (*layout.leaves[:place], None, *layout.leaves[place + 1 :])
            if _same_for_all(self._leaves[place], axis) and self._passes(uncut) is not None:
                uncertain.append(place)
        return replace(layout, uncertain=tuple(uncertain))

    def _by_shape(self, batch_axis: int | None) -> Iterator[Axes]:
        """What the shapes allow, the likeliest first: targets along an axis, inputs as long."""
        places = range(self._inputs, len(self._leaves))
        first = next((i for i in places if getattr(self._leaves[i], "ndim", 0)), None)
        if first is None:
            return
        for axis, length in enumerate(self._leaves[first].shape):
            if length < 2:
                continue
            options: list[list[int | None]] = []
            for place, leaf in enumerate(self._leaves):
                shape = leaf.shape if isinstance(leaf, Tensor) else ()
                own = batch_axis if place < self._inputs else None
                fitting: list[int | None] = [
                    a
                    for a in range(len(shape))
                    if shape[a] == length and (own is None or a == own % len(shape))
                ]
                fitting.sort(key=lambda a: (a != axis, a))
                options.append([axis] if place == first else [*fitting, None])
            ranked = [[(rank, a) for rank, a in enumerate(some)] for some in options]
            ways = itertools.islice(itertools.product(*ranked), 64 * _LAYOUTS)
            for way in sorted(ways, key=lambda way: sum(rank for rank, _ in way)):
                axes = tuple(a for _, a in way)
                if any(a is not None for a in axes[: self._inputs]):
                    yield axes

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, leaves: list[Any]) -> list[Any]:
        """The tensors that the loss reads."""
        batch = self._as_batch(leaves)
        # New copies each time: a model may write to its buffers.
        buffers = {
            name: buffer.to(self._precision)
            for name, buffer in self._problem.model.named_buffers()
            if _varies(buffer) and buffer.dtype != self._precision
        }
        problem = self._problem
        scope = contextlib.nullcontext(self._values)
        if problem.sharded is not None:
            scope = problem.weights_for_call({}, self._changed)  # type: ignore[assignment]
        with scope as values:
            raw = call(problem.model, {**values, **buffers}, batch.inputs)
        tensors, self._output_spec = tree_flatten(self._problem.read(raw, batch))
        return tensors

    def _as_batch(self, leaves: list[Any]) -> Batch:
        inputs, targets = tree_unflatten(leaves, self._spec)
        return Batch(inputs=inputs, targets=targets, count=1.0, index=self._batch.index)

    def _of_block(self, axes: Axes, samples: int) -> list[Any]:
        if samples < self._length(axes):
            return self._call(cut(self._leaves, axes, 0, samples))
        if self._whole is None:
            self._whole = self._call(self._leaves)
        return self._whole

    def _length(self, axes: Axes) -> int:
        return next(
            int(t.shape[a]) for t, a in zip(self._leaves, axes, strict=True) if a is not None
        )

    def _block(self, axes: Axes) -> int:
        """How many samples one call may take, by what a single one saves for its gradient.

        A call without gradients holds less at a time. Where a single sample cannot be called on its
        own the layout is wrong, and finding that out takes no memory.
        """
        length = self._length(axes)
        if self._problem.sharded is not None:  # a graph would hold all weights
            return min(length, _REPLACED)
        if length <= 2:
            return 2
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            for part in in_memory(tensor):
                saved[part.data_ptr()] = part.numel() * part.element_size()
            return tensor  # a cache of the model's may hold this graph

        single = self._as_batch(cut(self._given, axes, 0, 1))
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept)
        with contextlib.suppress(Exception), torch.enable_grad(), hooks:
            outputs = tree_flatten(self._problem.outputs(single, self._problem.leaves()))[0]
            for z in outputs:
                if isinstance(z, Tensor):
                    saved[id(z)] = 6 * z.numel() * z.element_size()  # and what the loss makes of it
        weights = {t.data_ptr() for t in self._problem.own_tensors()}
        size = sum(size for place, size in saved.items() if place not in weights)
        size *= self._precision.itemsize // self._dtype.itemsize
        fitting = self._room // (3 * size) if size else length
        return max(2, min(length, int(fitting)))

    # --- tests ------------------------------------------------------------------------------------

    def _passes(self, axes: Axes) -> SampleLayout | None:
        try:
            samples = self._block(axes) if self._whole is None else self._length(axes)
            whole = self._of_block(axes, samples)
            numbers = [z for z in whole if _varies(z)]
            if not all(bool(z.isfinite().any()) and z.dtype == self._precision for z in numbers):
                return None
            self._finite = True
            layout = self._first_alone(axes, whole, samples)
            if layout is None:
                return None
            middle = (samples - 2) // 2
            parts = [(samples - 1, samples), *([(middle, middle + 2)] if samples > 2 else [])]
            if not all(self._part_agrees(layout, whole, *part) for part in parts):
                return None
            few = min(samples, _REPLACED)
            block = whole
            if few < samples:
                block = self._call(cut(self._leaves, axes, 0, few))
                if not self._equal(block, cut(whole, layout.outputs, 0, few), self._loose):
                    return None
            if not all(self._replacement_agrees(layout, block, few, kept) for kept in (0, 1)):
                return None
            return layout if self._loss_adds_up(layout, whole, samples) else None
        except PeerError:
            raise
        except Exception:  # whatever a model says to inputs that are cut the wrong way
            return None

    def _first_alone(self, axes: Axes, whole: list[Any], samples: int) -> SampleLayout | None:
        """Where the outputs' samples lie, if the first sample alone gives its slice of them."""
        alone = self._call(cut(self._leaves, axes, 0, 1))
        outputs = tuple(
            self._output_axis(z, part, samples) for z, part in zip(whole, alone, strict=True)
        )
        if all(axis is None for axis in outputs):
            return None
        layout = SampleLayout(axes, outputs)
        return layout if self._equal(alone, cut(whole, outputs, 0, 1), self._loose) else None

    def _output_axis(self, whole: Any, alone: Any, samples: int) -> int | None:
        if not isinstance(whole, Tensor) or whole.shape == alone.shape:
            return None
        for axis in range(whole.ndim):
            expected = (*whole.shape[:axis], 1, *whole.shape[axis + 1 :])
            if whole.shape[axis] == samples and alone.shape == expected:
                first = whole.narrow(axis, 0, 1)
                if self._equal([alone], [first], self._loose):
                    return axis
        raise ValueError("not a slice of the outputs")

    def _part_agrees(self, layout: SampleLayout, whole: list[Any], start: int, stop: int) -> bool:
        part = self._call(cut(self._leaves, layout.leaves, start, stop))
        return self._equal(part, cut(whole, layout.outputs, start, stop), self._loose)

    def _replacement_agrees(
        self, layout: SampleLayout, whole: list[Any], samples: int, kept: int
    ) -> bool:
        """Every second sample, from ``kept`` on, stands also in its neighbour's place."""
        numbers = torch.arange(samples)
        source = numbers - numbers % 2 + kept
        source = torch.where(source < samples, source, numbers)
        block = cut(self._leaves, layout.leaves, 0, samples)
        replaced = self._call(chosen(block, layout.leaves, source))
        stayed = numbers[source == numbers]
        same = self._equal(
            chosen(replaced, layout.outputs, stayed),
            chosen(whole, layout.outputs, stayed),
            self._tight,
        )
        return same and self._equal(replaced, chosen(whole, layout.outputs, source), self._loose)

    def _equal(self, some: list[Any], others: list[Any], tolerance: float) -> bool:
        return all(
            _close(a, b, tolerance)
            for a, b in zip(some, others, strict=True)
            if isinstance(a, Tensor) and isinstance(b, Tensor)
        )

    def _loss_adds_up(self, layout: SampleLayout, whole: list[Any], samples: int) -> bool:
        """Whether c ∂ℓ/∂Z of all samples, at random Z, is that of the parts side by side."""
        axes = layout.leaves[self._inputs :]
        targets = cut(self._leaves[self._inputs :], axes, 0, samples)
        generator = torch.Generator().manual_seed(1)
        # Smaller by random factors: probabilities stay such, and logarithms of them negative.
        outputs = [
            z
            * (
                1
                - 0.3
                * torch.rand(z.shape, generator=generator, dtype=z.dtype, device="cpu").to(z.device)
            )
            if _varies(z)
            else z
            for z in whole
        ]
        together = self._slopes(outputs, targets)
        if together is None:
            return False
        scale = max(float(t.abs().max()) for t in together if t is not None)
        for start, stop in itertools.pairwise(sorted({0, 1, samples - 1, samples})):
            part = cut(outputs, layout.outputs, start, stop)
            slopes = self._slopes(part, cut(targets, axes, start, stop))
            if slopes is None:  # no valid target
                slopes = [torch.zeros_like(z) if _varies(z) else None for z in part]
            expected = cut(together, layout.outputs, start, stop)
            for got, want in zip(slopes, expected, strict=True):
                if got is not None and not _close(got, want, self._loose, scale=scale):
                    return False
        return True

    def _slopes(self, outputs: list[Any], targets: list[Any]) -> list[Tensor | None] | None:
        """c ∂ℓ/∂Z for every tensor of the outputs; None without a valid target."""
        loss = self._problem.loss
        tree = tree_unflatten([*self._leaves[: self._inputs], *targets], self._spec)[1]
        count = loss.count(tree)
        if count <= 0:
            return None
        with torch.enable_grad():
            fresh = [z.detach().requires_grad_(True) if _varies(z) else z for z in outputs]
            value = loss.value(tree_unflatten(fresh, self._output_spec), tree)
            varying = [z for z in fresh if _varies(z)]
            slopes = iter(torch.autograd.grad(value, varying, materialize_grads=True))
        return [count * next(slopes) if _varies(z) else None for z in fresh]


def _varies(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point()


@unwatched
def _close(some: Tensor, others: Tensor, tolerance: float, *, scale: float | None = None) -> bool:
    """Equal to ``tolerance`` of the largest entry; NaN equals NaN."""
    if some.shape != others.shape:
        return False
    if not some.is_floating_point():
        return bool(torch.equal(some, others))
    if scale is None:
        scale = float(others.nan_to_num(0.0, 0.0, 0.0).abs().max()) if others.numel() else 0.0
    same = (some - others).abs() <= tolerance * scale
    return bool((same | (some == others) | (some.isnan() & others.isnan())).all())
