"""Reading and writing at indices, recorded ones included (sort, maxima, pooling): linear."""

from __future__ import annotations

from collections.abc import Callable
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
    aligned,
    broadcast,
    from_end,
    linear,
    rule,
    summed_to,
)
from curvatlas.tape.rules.views import axes_of, put_into, weighted, widened


def _columns(index: Tensor, t: Tensor) -> Tensor:
    """The same indices for every column."""
    return index.expand(t.shape[0], *index.shape)


# --- reading --------------------------------------------------------------------------------------


def _without_padding(call: Call) -> Change:
    """Zero where the row of ``padding_idx`` was read, which is held fixed."""
    padded = call.args[1] == (call.args[2] if len(call.args) > 2 else -1)
    if not bool(padded.any()):
        return lambda t: t
    return lambda t: t.masked_fill(padded.unsqueeze(-1), 0.0)


def _embedded(call: Call) -> Change:
    kept = _without_padding(call)
    return lambda t: kept(t[:, call.args[1]])


def _embedded_back(call: Call) -> Change:
    rows, shape, kept = call.args[1].reshape(-1), call.x[0].shape, _without_padding(call)
    return put_into(
        shape,
        lambda zeros, t: zeros.index_add_(1, rows, kept(t).reshape(len(t), len(rows), *shape[1:])),
    )


linear(aten.embedding.default, push=_embedded, pull=_embedded_back)


def _index_selected(call: Call) -> Change:
    dim, index = from_end(call.args[1], call.x[0].ndim), call.args[2]
    if not call.x[0].ndim:
        return lambda t: t
    return lambda t: t.index_select(dim, index)


def _index_selected_back(call: Call) -> Change:
    dim, index = from_end(call.args[1], call.x[0].ndim), call.args[2]
    if not call.x[0].ndim:
        return lambda t: t
    return put_into(call.x[0].shape, lambda zeros, t: zeros.index_add_(dim, index, t))


linear(aten.index_select.default, push=_index_selected, pull=_index_selected_back)


def _reads(dim: int, index: Tensor, source: Tensor, result: Tensor) -> tuple[Change, Change]:
    """y = x at indices along a dimension, and its transpose; a number is a row of one."""
    size, wide = source.shape or (1,), index.shape or (1,)
    index = index.reshape(wide)
    put = put_into(
        size, lambda zeros, t: zeros.scatter_add_(dim, _columns(index, t), t.view(len(t), *wide))
    )
    return (
        lambda t: (
            t.reshape(len(t), *size).gather(dim, _columns(index, t)).reshape(len(t), *result.shape)
        ),
        lambda t: put(t.reshape(len(t), *wide)).reshape(len(t), *source.shape),
    )


@rule(aten.gather.default)
def _gathered(call: Call) -> Rule:
    dim = from_end(call.args[1], call.x[0].ndim)
    return Linear(call, [(0, *_reads(dim, call.args[2], call.x[0], call.y))])


def _found(dim_at: int, keepdim_at: int | None) -> Callable[[Call], Rule]:
    """The rule of an operation whose second result says where along a dimension its first is."""

    def made(call: Call) -> Rule:
        dim, index, y = from_end(call.args[dim_at], call.x[0].ndim), call.result(1), call.y
        if keepdim_at is not None and call.x[0].ndim and not call.args[keepdim_at]:
            index, y = index.unsqueeze(dim), y.unsqueeze(dim)
        push, pull = _reads(dim, index, call.x[0], y)
        shape = call.y.shape
        return Linear(
            call,
            [
                (
                    0,
                    lambda t: push(t).reshape(len(t), *shape),
                    lambda t: pull(t.reshape(len(t), *y.shape)),
                )
            ],
        )

    return made


rule(aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default)(
    _found(1, 2)
)
rule(aten.sort.default, aten.cummax.default, aten.cummin.default)(_found(1, None))
rule(aten.sort.stable)(_found(2, None))
rule(aten.topk.default)(_found(2, None))
rule(aten.kthvalue.default)(_found(2, 3))


def _extreme(call: Call) -> Rule:
    """amax, amin and kin: the mean of the entries that reach it."""
    operation, n = call.node.operation, call.x[0].ndim
    named = operation in (aten.amax.default, aten.amin.default)
    axes = axes_of(call.args[1] if named else None, n)
    kept = list(call.x[0].shape)
    for axis in axes:
        kept[axis] = 1
    reached = call.x[0] == call.y.reshape(kept)
    weight = reached.to(call.y.dtype)
    if axes:
        weight = weight / weight.sum(axes, keepdim=True)
    shape = call.y.shape

    def push(t: Tensor) -> Tensor:
        return ((t * weight).sum(axes) if axes else t * weight).reshape(len(t), *shape)

    return Linear(call, [(0, push, lambda t: t.reshape(len(t), *kept) * weight)])


rule(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)(_extreme)


def _pooled(axes: int) -> Callable[[Call], Rule]:
    """Max pooling over the last axes, by the places of the maxima in a flat image."""

    def made(call: Call) -> Rule:
        source, result = call.x[0].flatten(-axes), call.y.flatten(-axes)
        push, pull = _reads(-1, call.result(1).flatten(-axes), source, result)
        shape, wide = call.x[0].shape, call.y.shape
        return Linear(
            call,
            [
                (
                    0,
                    lambda t: push(t.flatten(-axes)).reshape(len(t), *wide),
                    lambda t: pull(t.flatten(-axes)).reshape(len(t), *shape),
                )
            ],
        )

    return made


rule(
    aten.max_pool2d_with_indices.default,
    aten.adaptive_max_pool2d.default,
)(_pooled(2))
rule(
    aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool3d.default,
)(_pooled(3))


def _places(call: Call) -> tuple[tuple[Any, ...], Callable[[Tensor], Tensor], Callable[..., Any]]:
    """Indices behind the columns; how the result's axes come to stand, and back.

    Index tensors that are not neighbours move their axes to the front, before the columns.
    """
    indices: list[Tensor | None] = []
    for index in call.args[1]:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        indices += index.nonzero().unbind(1) if masks else (index,)
    given = [i is not None for i in indices]
    if not any(given):
        raise Unruled
    first, last = given.index(True), len(given) - given[::-1].index(True)
    places = (slice(None), *(slice(None) if i is None else i for i in indices))
    if all(given[first:last]):
        return places, lambda t: t, lambda t: t
    axes = len(broadcast(indices))
    return places, lambda t: t.movedim(axes, 0), lambda t: t.movedim(0, axes)


def _indexed(call: Call) -> Change:
    places, behind, _ = _places(call)
    return lambda t: behind(t[places])


def _as_indices(places: tuple[Any, ...]) -> Any:
    return [None if isinstance(p, slice) else p for p in places]


def _index_put_(t: Tensor, places: tuple[Any, ...], values: Tensor, accumulate: bool) -> Tensor:
    result: Tensor = aten.index_put_(t, _as_indices(places), values, accumulate)
    return result


def _indexed_by(call: Call) -> Change:
    places, _, before = _places(call)
    return put_into(call.x[0].shape, lambda zeros, t: _index_put_(zeros, places, before(t), True))


linear(aten.index.Tensor, push=_indexed, pull=_indexed_by)


# --- writing --------------------------------------------------------------------------------------


def _kept_but_written(call: Call) -> Change:
    """index_put on x: what is written over does not depend on it."""
    if call.args[3]:
        return lambda t: t
    places, *_ = _places(call)
    return lambda t: _index_put_(t.clone(), places, t.new_zeros(()), False)


def _written(call: Call) -> Change:
    places, _, before = _places(call)
    shape, accumulate = call.x[0].shape, call.args[3]
    into = call.args[0].shape
    taken = call.args[0][places[1:]].ndim
    del shape
    return put_into(
        into,
        lambda zeros, t: _index_put_(
            zeros,
            places,
            before(aligned(t, taken).expand(-1, *zeros[0][places[1:]].shape)),
            accumulate,
        ),
    )


def _read_where_written(call: Call) -> Change:
    places, behind, _ = _places(call)
    shape = call.args[2].shape
    return lambda t: summed_to(behind(t[places]), shape)


linear(
    aten.index_put.default,
    parts={
        0: (_kept_but_written, _kept_but_written),
        2: (_written, _read_where_written),
    },
)


def _scattered(call: Call) -> tuple[int, Tensor]:
    return from_end(call.args[1], call.args[0].ndim), call.args[2]


def _same(call: Call) -> Change:
    return lambda t: t


def _cleared(call: Call) -> Change:
    dim, index = _scattered(call)
    if not call.args[0].ndim:
        index = index.reshape(-1)
        return lambda t: t.unsqueeze(1).scatter(1, _columns(index, t), 0.0).squeeze(1)
    return lambda t: t.scatter(dim, _columns(index, t), 0.0)


def _spread(call: Call) -> Change:
    """A source written, or added, where the indices say."""
    dim, index = _scattered(call)
    adds = call.node.operation is aten.scatter_add.default
    shape, size = call.args[0].shape or (1,), index.shape or (1,)
    index = index.reshape(size)

    def put(zeros: Tensor, t: Tensor) -> Tensor:
        t = t.reshape(len(t), *(t.shape[1:] or (1,)))
        part = t[(slice(None), *(slice(n) for n in size))]
        write = zeros.scatter_add_ if adds else zeros.scatter_
        return write(dim, _columns(index, t), part)

    back, result = put_into(shape, put), call.y.shape
    return lambda t: back(t).reshape(len(t), *result)


def _spread_back(call: Call) -> Change:
    dim, index = _scattered(call)
    shape, size = call.args[0].shape or (1,), index.shape or (1,)
    index, source = index.reshape(size), call.args[3].shape

    def back(t: Tensor) -> Tensor:
        read = t.reshape(len(t), *shape).gather(dim, _columns(index, t))
        zeros = t.new_zeros(len(t), *(source or (1,)))
        zeros[(slice(None), *(slice(n) for n in size))] = read
        return zeros.reshape(len(t), *source)

    return back


linear(aten.scatter.value, parts={0: (_cleared, _cleared)})
linear(aten.scatter.src, parts={0: (_cleared, _cleared), 3: (_spread, _spread_back)})
linear(aten.scatter_add.default, parts={0: (_same, _same), 3: (_spread, _spread_back)})


def _without_rows(call: Call) -> Change:
    dim, index = _scattered(call)
    if not call.args[0].ndim:
        return lambda t: t.unsqueeze(1).index_fill(1, index, 0.0).squeeze(1)
    return lambda t: t.index_fill(dim, index, 0.0)


def _rows_put(call: Call) -> Change:
    dim, index = _scattered(call)
    adds = call.node.operation is aten.index_add.default
    alpha = call.args[4] if adds else 1
    shape, result = call.args[0].shape or (1,), call.y.shape

    def put(zeros: Tensor, t: Tensor) -> Tensor:
        t = t.reshape(len(t), *(t.shape[1:] or (1,)))
        if adds:
            return zeros.index_add_(dim, index.reshape(-1), t, alpha=alpha)
        return zeros.index_copy_(dim, index.reshape(-1), t)

    back = put_into(shape, put)
    return lambda t: back(t).reshape(len(t), *result)


def _rows_read(call: Call) -> Change:
    dim, index = _scattered(call)
    alpha = call.args[4] if call.node.operation is aten.index_add.default else 1
    shape, source = call.args[0].shape or (1,), call.args[3].shape
    return lambda t: (
        t.reshape(len(t), *shape).index_select(dim, index.reshape(-1)) * alpha
    ).reshape(len(t), *source)


linear(aten.index_fill.int_Scalar, parts={0: (_without_rows, _without_rows)})
linear(aten.index_add.default, parts={0: (_same, _same), 3: (_rows_put, _rows_read)})
linear(
    aten.index_copy.default, parts={0: (_without_rows, _without_rows), 3: (_rows_put, _rows_read)}
)


def _outside(call: Call) -> Change:
    mask, wide = call.args[1], widened(call)
    return lambda t: wide(t).masked_fill(mask, 0.0)


def _mask_places(call: Call) -> Tensor:
    """Places in the flat result that the source's first entries go to."""
    mask: Tensor = call.args[1].expand(call.y.shape)
    return mask.reshape(-1).nonzero().squeeze(1)


def _into_mask(call: Call) -> Change:
    places, shape = _mask_places(call), call.y.shape

    def push(t: Tensor) -> Tensor:
        flat = t.new_zeros(len(t), shape.numel())
        flat[:, places] = t.reshape(len(t), -1)[:, : len(places)]
        return flat.reshape(len(t), *shape)

    return push


def _out_of_mask(call: Call) -> Change:
    places, shape = _mask_places(call), call.args[2].shape

    def pull(t: Tensor) -> Tensor:
        flat = t.new_zeros(len(t), shape.numel())
        flat[:, : len(places)] = t.reshape(len(t), -1)[:, places]
        return flat.reshape(len(t), *shape)

    return pull


def _outside_back(call: Call) -> Change:
    mask, shape = call.args[1], call.args[0].shape
    return lambda t: summed_to(t.masked_fill(mask, 0.0), shape)


linear(
    aten.masked_scatter.default,
    parts={0: (_outside, _outside_back), 2: (_into_mask, _out_of_mask)},
)


# --- the larger and the smaller of two ------------------------------------------------------------


def _larger(call: Call, sign: int) -> dict[int, Any]:
    a, b = call.args[0], call.args[1]
    first = (a > b) if sign > 0 else (a < b)
    shared = ((a == b) * 0.5 + first).to(call.y.dtype)
    return {0: shared, 1: 1 - shared}


weighted(aten.maximum.default, weights=lambda c: _larger(c, 1))
weighted(aten.minimum.default, weights=lambda c: _larger(c, -1))
