r"""A linear layer y = x Wᵀ + b with its tangent and the tangent of its adjoint (derivations §11).

Forward tangent, adjoint, and the tangent R of the adjoint, W in PyTorch's (out, in) layout:

    ẏ = ẋ Wᵀ + x Ẇᵀ + ḃ
    δ_x = δ_y W                 R δ_x = Rδ_y W + δ_y Ẇ
    ∂ℓ/∂W = δ_yᵀ x              R ∂ℓ/∂W = Rδ_yᵀ x + δ_yᵀ ẋ
    ∂ℓ/∂b = Σ_i δ_y             R ∂ℓ/∂b = Σ_i Rδ_y

Shapes: x (N, in), y and δ_y (N, out); everything with a dot or an R has a leading axis K of
directions. ``None`` stands for zero everywhere, and costs nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from curvatlas.problem.kernels import unwatched

_local = threading.local()


def restart_numbers() -> None:
    """Begin a new chain of stages in this thread."""
    _local.numbers = count()


def stage_number() -> str:
    """A name no other stage of its chain has, the prefix of its private buffers."""
    if not hasattr(_local, "numbers"):
        restart_numbers()
    return f"{next(_local.numbers)}."


def adjoining(parts: Sequence[Tensor], axis: int) -> Tensor | None:
    """Matrices or vectors that follow each other in memory as one; None when they do not.

    ``axis`` is their first axis, or the second behind an axis of directions.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    inner = first.shape[axis + 1 :]
    strides = (inner[0], 1) if inner else (1,)
    lead = first.stride()[:axis]
    storage, end, length = first.untyped_storage().data_ptr(), first.storage_offset(), 0
    for part in parts:
        if axis == 0 or part.shape[0] == 1:
            packed = part.is_contiguous()
        else:
            packed = part.stride() == (*lead, *strides)
        if not packed or part.storage_offset() != end or part.shape[axis + 1 :] != inner:
            return None
        if part.untyped_storage().data_ptr() != storage:
            return None
        end += part.shape[axis] * strides[0]
        length += part.shape[axis]
    return first.as_strided((*first.shape[:axis], length, *inner), (*lead, *strides))


class Buffers:
    """Memory by key that a sequence of products reuses; ``keep=False``: every buffer is fresh.

    A CPU allocation of a megabyte is a system call and hundreds of page faults: fresh outputs took
    40 % of the time. Keys starting with a stage's own number live from the forward pass to the
    backward pass; the others are scratch shared by all stages of a stack ("wide" by attention and
    feed-forward, which never run at the same time).
    """

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.generation = 0  # how often a buffer was replaced by a larger one
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, key: str, *shape: int, like: Tensor) -> Tensor:
        """An uninitialised tensor; the same memory while ``key`` asks for no more than before."""
        if not self.keep:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        view = self._views.get((key, shape))
        if view is None:
            view = self._grow(key, math.prod(shape), like).view(shape)
            self._views[key, shape] = view
        return view

    def _grow(self, key: str, size: int, like: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            # let the old memory go, with every view of it, before the new one comes
            self._views = {k: v for k, v in self._views.items() if k[0] != key}
            self._buffers.pop(key, None)
            buffer = None
            self.generation += 1
            buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:size]

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())


_TRANSPOSED = 2**14  # entries transposed at once: both sides of 8 float32 columns stay in the cache
_KEPT_ROWS = 2**26  # bytes of columns whose transposed copy is kept from product to product


def as_rows(columns: Tensor, space: Buffers) -> Tensor:
    """Columns (P, K) as rows (K, P): the same memory, or a copy, in kept memory unless large."""
    if columns.T.is_contiguous():
        return columns.T
    size, count = columns.shape
    if columns.numel() * columns.element_size() > _KEPT_ROWS:
        return columns.T.contiguous()
    rows = space.take("columns as rows", count, size, like=columns)
    for start in range(0, size, _TRANSPOSED):
        places = slice(start, start + _TRANSPOSED)
        rows[:, places].copy_(columns[places].T)
    return rows


@dataclass
class BackwardPass:
    """One backward pass: which rates to find, where to put them, whether to keep adjoints."""

    space: Buffers
    wanted: frozenset[str]
    into: Mapping[str, Tensor] = field(default_factory=dict)  # name → (K, *shape) to write to
    rates: dict[str, Tensor] = field(default_factory=dict)
    record: bool = False
    accumulate: bool = False  # add to what ``into`` holds instead of replacing it
    turn: int = 0  # alternates from block to block: a result must not overwrite what it came from

    def wants(self, names: Sequence[str]) -> bool:
        """Whether the weights of one layer are wanted."""
        return bool(names) and names[0] in self.wanted

    def sums(self, names: Sequence[str], sizes: Sequence[int], terms: Tensor) -> None:
        """The rates of biases or gains side by side: the sum of ``terms`` (K, N, d) over tokens."""
        room = None if self.accumulate else self.room(names)
        if room is None:
            self.give(names, sizes, terms.sum(1))
        else:
            torch.sum(terms, 1, out=room)

    def give(self, names: Sequence[str], sizes: Sequence[int], rate: Tensor) -> None:
        """Take the rates (K, Σ sizes, …) of weights that lie side by side."""
        pieces = [rate] if len(names) == 1 else torch.split(rate, list(sizes), 1)
        for name, piece in zip(names, pieces, strict=True):
            target = self.into.get(name)
            if target is None:
                self.rates[name] = piece
                continue
            target.add_(piece) if self.accumulate else target.copy_(piece)
            self.rates[name] = target

    def room(self, names: Sequence[str]) -> Tensor | None:
        """Where the rates of these weights may be written at once; None: ``give`` them after."""
        parts = [self.into[name] for name in names if name in self.into]
        joined = adjoining(parts, 1) if parts and len(parts) == len(names) else None
        if joined is not None:
            self.rates.update(zip(names, parts, strict=True))
        return joined


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """left + right where ``None`` is zero; written over ``left``."""
    if left is None:
        return right
    return left if right is None else left.add_(right)


class Linear:
    """A linear layer; its input x (N, in) comes with each call, ``delta`` is its output's adjoint.

    ``names`` are the prefixes of its weights, ``{name}_weight`` and ``{name}_bias``. Several names
    are layers of one input taken together, their outputs side by side: larger matrix products.
    """

    def __init__(self, names: Sequence[str], weights: Mapping[str, Tensor]) -> None:
        self.weight_names = tuple(f"{name}_weight" for name in names)
        self.bias_names = tuple(f"{name}_bias" for name in names if f"{name}_bias" in weights)
        self.sizes = tuple(weights[name].shape[0] for name in self.weight_names)
        self.bias: Tensor | None = None
        if self.bias_names:
            self.bias = _join([weights[name] for name in self.bias_names], 0)
        self.attach(weights)
        self.delta: Tensor | None = None  # (N, out)

    def attach(self, weights: Mapping[str, Tensor]) -> None:
        """Multiply with these weights from now on."""
        self.weight = _join([weights[name] for name in self.weight_names], 0)
        self._transposed = self.weight.T

    def detach(self) -> None:
        """Let go of the weights until ``attach`` brings them again: their shape is left."""
        self.weight = stand_in(self.weight)
        self._transposed = self.weight.T

    def value(self, x: Tensor) -> Tensor:
        """(N, out)."""
        if self.bias is None:
            return x @ self.weight.T
        return torch.addmm(self.bias, x, self.weight.T)

    def push(
        self, x: Tensor, x_dot: Tensor | None, dots: Mapping[str, Tensor], out: Tensor
    ) -> Tensor | None:
        """ẏ (K, N, out), written to ``out``; None when it is zero."""
        weight_dot, bias_dot = _tangent(self.weight_names, dots), _tangent(self.bias_names, dots)
        if x_dot is None and weight_dot is None and bias_dot is None:
            return None
        out.zero_() if bias_dot is None else out.copy_(bias_dot.unsqueeze(1))
        if x_dot is not None:
            add_product(out, x_dot, self._transposed)
        if weight_dot is not None:
            add_product(out, x, weight_dot.mT)
        return out

    def pull(
        self,
        rate: Tensor | None,
        dots: Mapping[str, Tensor],
        out: Tensor,
        *,
        accumulate: bool = False,
    ) -> bool:
        """Rδ_x (K, N, in) from Rδ_y ``rate``, written or added to ``out``; whether it now holds it.

        ``dots`` empty: the adjoint alone.
        """
        weight_dot = None if self.delta is None else _tangent(self.weight_names, dots)
        if rate is None and weight_dot is None:
            return accumulate
        if not accumulate:
            out.zero_()
        if rate is not None:
            add_product(out, rate, self.weight)
        if weight_dot is not None:
            assert self.delta is not None
            add_product(out, self.delta, weight_dot)
        return True

    def rates(
        self, rate: Tensor | None, x: Tensor, x_dot: Tensor | None, backward: BackwardPass
    ) -> None:
        """R ∂ℓ/∂W (K, out, in) and R ∂ℓ/∂b (K, out), those that are wanted and not zero."""
        if backward.record:
            assert rate is not None
            self.delta = rate[0]
        moved = x_dot if self.delta is not None else None
        if (rate is not None or moved is not None) and backward.wants(self.weight_names):
            self._weight_rate(rate, x, moved, backward)
        if rate is not None and backward.wants(self.bias_names):
            backward.sums(self.bias_names, self.sizes, rate)

    def _weight_rate(
        self, rate: Tensor | None, x: Tensor, moved: Tensor | None, backward: BackwardPass
    ) -> None:
        direction = rate if rate is not None else moved
        assert direction is not None
        shape = (direction.shape[0], *self.weight.shape)
        # A wide result is formed transposed and copied: in float64 the BLAS reaches 39 instead of
        # 24 GFlop/s there (512 × 128, inner 512).
        wide = x.dtype == torch.float64 and shape[0] == 1 and shape[1] > shape[2]
        room = None if wide else backward.room(self.weight_names)
        if room is not None:
            target = room
        elif wide:
            target = backward.space.take("linear.wide", shape[0], shape[2], shape[1], like=x).mT
        else:
            target = torch.empty(shape, dtype=x.dtype, device=x.device)
        if room is None or not backward.accumulate:
            target.zero_()
        if rate is not None:
            add_product(target, rate.mT, x)
        if moved is not None:
            assert self.delta is not None
            add_product(target, self.delta.T, moved)
        if room is None:
            # the next wide layer takes the same buffer, before the caller has read this rate
            given = all(name in backward.into for name in self.weight_names)
            copied = wide and not given and backward.space.keep
            backward.give(self.weight_names, self.sizes, target.clone() if copied else target)


@unwatched
def squared_distance(left: Tensor | None, right: Tensor | None) -> float:
    """‖left − right‖² of tensors with as many numbers, None being zero."""
    if left is None or right is None:
        gap = left if right is None else right
    else:
        gap = left - right.reshape(left.shape)
    return 0.0 if gap is None else float(gap.detach().square().sum())


def stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and place that holds a single number, NaN."""
    return torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def complete(names: Iterable[str], some: Container[str]) -> bool:
    """Whether all or none of ``names`` are given: what layers taken together need."""
    return len({name in some for name in names}) <= 1


def _tangent(names: Sequence[str], dots: Mapping[str, Tensor]) -> Tensor | None:
    parts = [dots[name] for name in names if name in dots]
    return _join(parts, 1) if parts else None


def _join(parts: Sequence[Tensor], axis: int) -> Tensor:
    """The parts along ``axis``; neighbours in memory, as in a flat vector, are not copied."""
    if len(parts) == 1:
        return parts[0]
    joined = adjoining(parts, axis)
    return torch.cat(list(parts), axis) if joined is None else joined


def add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out (K, a, b) += left right; a factor without the leading axis is common to all directions.

    Callers clear ``out`` first instead of asking for a product that overwrites: MKL is slower at
    that (57 against 44 µs for 256 × 48 × 144 in float32, 650 against 605 µs for 512 × 128 × 384).
    """
    if out.shape[0] == 1:
        left, right = left[0] if left.ndim == 3 else left, right[0] if right.ndim == 3 else right
        out[0].addmm_(left, right)
        return
    count = out.shape[0]
    left = left if left.ndim == 3 else left.expand(count, -1, -1)
    right = right if right.ndim == 3 else right.expand(count, -1, -1)
    out.baddbmm_(left, right)


def count_directions(moved: Tensor | None, dots: Mapping[str, Tensor]) -> int:
    """K, of tangents (K, ...) of the input or of the weights."""
    return moved.shape[0] if moved is not None else next(iter(dots.values())).shape[0]
