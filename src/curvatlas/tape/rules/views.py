"""Shapes, parts, joins and sums: linear, each with its transpose.

Dimensions are counted from the end, so that an axis of columns in front changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.record import aten
from curvatlas.tape.rules.base import (
    Call,
    Change,
    Linear,
    Rule,
    Unruled,
    Values,
    added,
    aligned,
    constant,
    from_end,
    linear,
    rule,
    summed_to,
)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


# --- the same numbers in another shape ------------------------------------------------------------


def _reshaped(shape: Sequence[int]) -> Change:
    return lambda t: t.reshape(t.shape[0], *shape)


linear(
    aten.view.default,
    aten.view_copy.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.unsqueeze.default,
    aten.unsqueeze_copy.default,
    push=lambda call: _reshaped(_shape(call.y)),
    pull=lambda call: _reshaped(_shape(call.x[0])),
)


def _same(call: Call) -> Change:
    return lambda t: t


linear(
    aten.clone.default,
    aten.alias.default,
    aten.alias_copy.default,
    push=_same,
    pull=_same,
)


def _cast(to: Callable[[Call], Tensor]) -> Callable[[Call], Change]:
    def made(call: Call) -> Change:
        dtype = to(call).dtype
        return lambda t: t.to(dtype)

    return made


linear(
    aten._to_copy.default,
    push=_cast(lambda call: call.y),
    pull=_cast(lambda call: call.x[0]),
)


def widened(call: Call) -> Change:
    """t broadcast to the result."""
    shape = _shape(call.y)
    return lambda t: aligned(t, len(shape)).expand(t.shape[0], *shape)


def narrowed(position: int) -> Callable[[Call], Change]:
    """An adjoint summed over what was broadcast from an argument."""

    def made(call: Call) -> Change:
        shape = _shape(call.args[position])
        return lambda t: summed_to(t, shape)

    return made


linear(aten.expand.default, aten.expand_copy.default, push=widened, pull=narrowed(0))


def _transposed(call: Call) -> Change:
    n = call.x[0].ndim
    if n < 2:
        return lambda t: t
    a, b = (call.args[1], call.args[2]) if len(call.args) > 2 else (0, 1)
    a, b = from_end(a, n), from_end(b, n)
    return lambda t: t.transpose(a, b)


linear(
    aten.transpose.int,
    aten.transpose_copy.int,
    aten.t.default,
    aten.t_copy.default,
    push=_transposed,
    pull=_transposed,
)


def _permuted(call: Call) -> Change:
    dims = [0, *(d % call.x[0].ndim + 1 for d in call.args[1])]
    return lambda t: t.permute(dims)


def _permuted_back(call: Call) -> Change:
    n = call.x[0].ndim
    dims = [d % n for d in call.args[1]]
    back = [0, *(dims.index(d) + 1 for d in range(n))]
    return lambda t: t.permute(back)


linear(aten.permute.default, aten.permute_copy.default, push=_permuted, pull=_permuted_back)


def _turned(turns: int) -> Callable[[Call], Change]:
    def made(call: Call) -> Change:
        k, dims = turns * call.args[1], [from_end(d, call.x[0].ndim) for d in call.args[2]]
        return lambda t: t.rot90(k, [d % t.ndim for d in dims])

    return made


linear(aten.rot90.default, push=_turned(1), pull=_turned(-1))


def _flipped(call: Call) -> Change:
    dims = [from_end(d, call.x[0].ndim) for d in call.args[1]]
    return lambda t: t.flip(dims)


linear(aten.flip.default, push=_flipped, pull=_flipped)


def _rolled(sign: int) -> Callable[[Call], Change]:
    def made(call: Call) -> Change:
        shifts = [sign * shift for shift in call.args[1]]
        dims = [from_end(d, call.x[0].ndim) for d in call.args[2]]
        if not dims:
            return lambda t: t.reshape(len(t), -1).roll(shifts, [1]).reshape(t.shape)
        return lambda t: t.roll(shifts, dims)

    return made


linear(aten.roll.default, push=_rolled(1), pull=_rolled(-1))


def _repeated(call: Call) -> Change:
    repeats, n = call.args[1], len(call.args[1])
    return lambda t: aligned(t, n).repeat(1, *repeats)


def _repeated_back(call: Call) -> Change:
    shape, repeats = _shape(call.x[0]), call.args[1]
    ones = [1] * (len(repeats) - len(shape))
    folds = [n for pair in zip(repeats, [*ones, *shape], strict=True) for n in pair]
    axes = list(range(1, 2 * len(repeats) + 1, 2))
    return lambda t: (
        t.reshape(t.shape[0], *folds).sum(axes).reshape(t.shape[0], *shape) if axes else t
    )


linear(aten.repeat.default, push=_repeated, pull=_repeated_back)


# --- parts, and writing into parts ----------------------------------------------------------------

# An operation that takes a part of x, as what it takes of (K, *x); its transpose puts ȳ into zeros.
View = Callable[[Call, int], Change]


def _select(call: Call, at: int) -> Change:
    dim, index = from_end(call.args[at], call.args[0].ndim), call.args[at + 1]
    return lambda t: t.select(dim, index)


def _slice(call: Call, at: int) -> Change:
    dim = from_end(call.args[at], call.args[0].ndim)
    start, stop, step = call.args[at + 1 : at + 4]
    return lambda t: aten.slice.Tensor(t, dim, start, stop, step)


def _diagonal(call: Call, at: int) -> Change:
    offset, n = call.args[at], call.args[0].ndim
    first, second = (from_end(d, n) for d in call.args[at + 1 : at + 3])
    return lambda t: t.diagonal(offset, first, second)


def _narrow(call: Call, at: int) -> Change:
    dim = from_end(call.args[at], call.args[0].ndim)
    return lambda t: t.narrow(dim, call.args[at + 1], call.args[at + 2])


def put_into(shape: Sequence[int], put: Callable[[Tensor, Tensor], Any]) -> Change:
    """The transpose of taking a part: zeros of the source's shape with ȳ put into them."""

    def back(t: Tensor) -> Tensor:
        zeros = t.new_zeros(t.shape[0], *shape)
        put(zeros, t)
        return zeros

    return back


def _takes(*operations: Any, view: View) -> None:
    """Declare operations that take a part in which no entry stands twice."""
    linear(
        *operations,
        push=lambda call: view(call, 1),
        pull=lambda call: put_into(
            _shape(call.x[0]), lambda zeros, t: view(call, 1)(zeros).copy_(t)
        ),
    )


def _writes(operation: Any, view: View) -> None:
    """Declare y = x with another tensor written into a part of it."""

    def cleared(call: Call) -> Change:
        part = view(call, 2)

        def clear(t: Tensor) -> Tensor:
            t = t.clone()
            part(t).zero_()
            return t

        return clear

    linear(
        operation,
        parts={
            0: (cleared, cleared),
            1: (
                lambda call: put_into(
                    _shape(call.y), lambda zeros, t: view(call, 2)(zeros).copy_(t)
                ),
                lambda call: view(call, 2),
            ),
        },
    )


_takes(aten.select.int, aten.select_copy.int, view=_select)
_takes(aten.slice.Tensor, aten.slice_copy.Tensor, view=_slice)
_takes(aten.diagonal.default, aten.diagonal_copy.default, view=_diagonal)
_takes(aten.narrow_copy.default, view=_narrow)
_writes(aten.select_scatter.default, _select)
_writes(aten.slice_scatter.default, _slice)
_writes(aten.diagonal_scatter.default, _diagonal)


def _embedded_diagonal(call: Call) -> Change:
    offset, (first, second) = call.args[1], (from_end(d, call.y.ndim) for d in call.args[2:4])
    return lambda t: t.diag_embed(offset, first, second)


def _read_diagonal(call: Call) -> Change:
    offset, (first, second) = call.args[1], (from_end(d, call.y.ndim) for d in call.args[2:4])
    return lambda t: t.diagonal(offset, first, second)


linear(aten.diag_embed.default, push=_embedded_diagonal, pull=_read_diagonal)


def _windows(call: Call) -> Change:
    dim = from_end(call.args[1], call.x[0].ndim)
    return lambda t: t.unfold(dim % t.ndim, *call.args[2:4])


def _windows_back(call: Call) -> Change:
    dim, shape = from_end(call.args[1], call.x[0].ndim), list(call.x[0].shape)
    size, step = call.args[2:4]
    if not shape:
        return lambda t: t.reshape(t.shape[0])
    return lambda t: aten.unfold_backward(
        t, [t.shape[0], *shape], dim % (len(shape) + 1), size, step
    )


linear(aten.unfold.default, aten.unfold_copy.default, push=_windows, pull=_windows_back)


def _memory_places(call: Call, at: int) -> Tensor:
    """Of every entry of a strided view of x's memory, its place among x's entries."""
    x, (size, stride, offset) = call.args[0], call.args[at : at + 3]
    offset = x.storage_offset() if offset is None else offset
    reach = 1 + max(
        o + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        for o, sizes, strides in (
            (offset, size, stride),
            (x.storage_offset(), x.shape, x.stride()),
        )
    )
    memory = torch.full((reach,), -1, device=x.device)
    own = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    memory.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(own)
    places = memory.as_strided(size, stride, offset)
    if x.numel() and bool((places < 0).any()):
        raise Unruled  # beyond what x covers
    return places.reshape(-1)


def _strided(call: Call) -> Change:
    places, shape = _memory_places(call, 1), call.y.shape
    return lambda t: t.reshape(t.shape[0], -1)[:, places].reshape(t.shape[0], *shape)


def _strided_back(call: Call) -> Change:
    places = _memory_places(call, 1)
    return put_into(
        _shape(call.x[0]),
        lambda zeros, t: zeros.view(len(t), -1).index_add_(1, places, t.reshape(len(t), -1)),
    )


linear(aten.as_strided.default, aten.as_strided_copy.default, push=_strided, pull=_strided_back)


# --- several results, several sources -------------------------------------------------------------


class Pieces(Rule):
    """split, chunk, unbind: several results, each a part of the source."""

    bends, all_results = False, True

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        n = call.x[0].ndim
        self._unbinds = call.node.operation in (aten.unbind.int, aten.unbind_copy.int)
        self._dim = from_end(call.args[1 if self._unbinds else 2], n)
        results = [call.result(number) for number in range(len(call.node.outputs))]
        self._sizes = [1 if self._unbinds else y.shape[self._dim] for y in results]

    def push(self, tangents: Values) -> Any:
        assert tangents[0] is not None
        if self._unbinds:
            return torch.unbind(tangents[0], self._dim)
        return torch.split(tangents[0], self._sizes, self._dim)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        there = next(a for a in adjoint if a is not None)
        pieces = []
        for size, a in zip(self._sizes, adjoint, strict=True):
            if a is None:
                shape = list(self.shapes[0])
                shape[self._dim] = size
                a = there.new_zeros(()).expand(there.shape[0], *shape)
            elif self._unbinds:
                a = a.unsqueeze(self._dim)
            pieces.append(a)
        return [torch.cat(pieces, self._dim)]


rule(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unbind.int,
    aten.unbind_copy.int,
)(Pieces)


class Joined(Rule):
    """cat and stack."""

    bends = False

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._stacks = call.node.operation is aten.stack.default
        self._dim = from_end(call.args[1], call.y.ndim)
        # An empty tensor of one axis may stand beside others: it is nowhere in the result.
        present = [self._stacks or v.ndim == call.y.ndim for v in call.args[0]]
        self._places = [p for p, there in zip(call.places_in(0), present, strict=True) if there]
        self._values = [_shape(v) for v, there in zip(call.args[0], present, strict=True) if there]

    def push(self, tangents: Values) -> Tensor:
        there = next(t for t in tangents if t is not None)
        parts = [
            tangents[place]
            if place is not None and tangents[place] is not None
            else there.new_zeros(()).expand(there.shape[0], *shape)
            for place, shape in zip(self._places, self._values, strict=True)
        ]
        return (torch.stack if self._stacks else torch.cat)(parts, self._dim)  # type: ignore[arg-type]

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        if self._stacks:
            pieces: Sequence[Tensor] = adjoint.unbind(self._dim)
        else:
            pieces = adjoint.split([s[self._dim] for s in self._values], self._dim)
        result: list[Tensor | None] = [None] * len(self.shapes)
        for place, piece in zip(self._places, pieces, strict=True):
            if place is not None and needs[place]:
                result[place] = added(result[place], piece)
        return result


rule(aten.cat.default, aten.stack.default)(Joined)


# --- masks, sums of several tensors ---------------------------------------------------------------


def weighted(*operations: Any, weights: Callable[[Call], dict[int, Any]]) -> None:
    """Declare y = Σ wᵢ xᵢ with constant weights (numbers, masks), everything broadcast."""

    def made(call: Call) -> Rule:
        maps, n = [], call.y.ndim

        def scaled(weight: Any, shape: Sequence[int]) -> tuple[Change, Change]:
            if not isinstance(weight, Tensor) and weight == 1:
                return lambda t: aligned(t, n), lambda t: summed_to(t, shape)
            return lambda t: aligned(t, n) * weight, lambda t: summed_to(t * weight, shape)

        for position, weight in weights(call).items():
            place = call.which(position)
            if place is not None:
                maps.append((place, *scaled(weight, call.x[place].shape)))
        if len({place for place, *_ in maps}) < len(call.x):
            raise Unruled
        return Linear(call, maps)

    rule(*operations)(made)


weighted(aten.add.Tensor, aten.add.Scalar, weights=lambda c: {0: 1, 1: c.args[2]})
weighted(aten.sub.Tensor, aten.sub.Scalar, weights=lambda c: {0: 1, 1: -c.args[2]})
weighted(aten.rsub.Tensor, aten.rsub.Scalar, weights=lambda c: {0: -c.args[2], 1: 1})
weighted(aten.lerp.Scalar, weights=lambda c: {0: 1 - c.args[2], 1: c.args[2]})
weighted(aten.neg.default, weights=lambda c: {0: -1})


def _tri(call: Call) -> Change:
    keep = torch.tril if call.node.operation is aten.tril.default else torch.triu
    return lambda t: keep(t, call.args[1])


linear(aten.tril.default, aten.triu.default, push=_tri, pull=_tri)


def _chosen(position: int) -> Part:
    """Where a mask says so an argument, else zero: the argument's part of where, masked_fill."""

    def mask(call: Call) -> Tensor:
        where = call.node.operation is aten.where.self
        condition: Tensor = call.args[0 if where else 1]
        return condition if position == (1 if where else 2) else ~condition

    def push(call: Call) -> Change:
        chosen, n = mask(call), call.y.ndim
        return lambda t: torch.where(chosen, aligned(t, n), 0.0)

    def pull(call: Call) -> Change:
        chosen, shape = mask(call), _shape(call.args[position])
        return lambda t: summed_to(torch.where(chosen, t, 0.0), shape)

    return push, pull


Part = tuple[Callable[[Call], Change], Callable[[Call], Change]]
linear(aten.where.self, parts={1: _chosen(1), 2: _chosen(2)})
linear(aten.masked_fill.Scalar, aten.masked_fill.Tensor, parts={0: _chosen(0), 2: _chosen(2)})


# --- sums over axes -------------------------------------------------------------------------------


def axes_of(dims: Any, ndim: int) -> list[int]:
    """Dimensions from the end; all of them where none are named."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(-ndim, 0))
    return [from_end(d, ndim) for d in ([dims] if isinstance(dims, int) else dims)] if ndim else []


def _sum_axes(call: Call) -> list[int]:
    whole = call.node.operation in (aten.sum.default, aten.mean.default)
    return axes_of(None if whole else call.args[1], call.x[0].ndim)


def _share(call: Call) -> float:
    if call.node.operation in (aten.mean.default, aten.mean.dim):
        return call.y.numel() / max(call.x[0].numel(), 1)
    return 1.0


def _sum(call: Call) -> Change:
    axes, shape, share = _sum_axes(call), _shape(call.y), _share(call)

    def push(t: Tensor) -> Tensor:
        total = (t.sum(axes) if axes else t).reshape(t.shape[0], *shape)
        return total if share == 1 else total * share

    return push


def _sum_back(call: Call) -> Change:
    shape, share = _shape(call.x[0]), _share(call)
    kept = list(shape)
    for axis in _sum_axes(call):
        kept[axis] = 1

    def back(t: Tensor) -> Tensor:
        t = t if share == 1 else t * share
        return t.reshape(t.shape[0], *kept).expand(t.shape[0], *shape)

    return back


linear(
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    push=_sum,
    pull=_sum_back,
)


def _running(call: Call) -> Change:
    dim = from_end(call.args[1], call.x[0].ndim)
    if not call.x[0].ndim:
        return lambda t: t
    return lambda t: t.cumsum(dim)


def _running_back(call: Call) -> Change:
    dim = from_end(call.args[1], call.x[0].ndim)
    if not call.x[0].ndim:
        return lambda t: t
    return lambda t: t.flip(dim).cumsum(dim).flip(dim)


linear(aten.cumsum.default, push=_running, pull=_running_back)


# --- what does not move ---------------------------------------------------------------------------

constant(
    aten.floor.default,
    aten.ceil.default,
    aten.round.default,
    aten.round.decimals,
    aten.trunc.default,
    aten.sign.default,
    aten.sgn.default,
)
