"""Operations that move numbers without changing them: linear, each with its transpose.

Dimensions are counted from the end, so that an axis of columns in front changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.record import aten
from curvatlas.tape.rules.base import Call, Rule, Unruled, Values, linear, rule, summed_to

Change = Callable[[Tensor], Tensor]


def from_end(dim: int, ndim: int) -> int:
    """A dimension as a negative number."""
    return dim if dim < 0 else dim - ndim


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _reshaped(shape: Sequence[int]) -> Change:
    return lambda t: t.reshape(t.shape[0], *shape)


def _to_result(call: Call) -> Change:
    return _reshaped(_shape(call.y))


def _to_source(call: Call) -> Change:
    return _reshaped(_shape(call.x[0]))


def _same(call: Call) -> Change:
    return lambda t: t


linear(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.view_as.default, aten.flatten.using_ints, aten.unflatten.int,
    push=_to_result, pull=_to_source,
)  # fmt: skip
linear(
    aten.clone.default, aten.alias.default, aten.contiguous.default, aten.lift_fresh.default,
    aten.positive.default, aten.lift_fresh_copy.default, aten.alias_copy.default,
    push=_same, pull=_same,
)  # fmt: skip


def _cast(call: Call) -> Change:
    dtype = call.y.dtype
    return lambda t: t.to(dtype)


def _cast_back(call: Call) -> Change:
    dtype = call.x[0].dtype
    return lambda t: t.to(dtype)


linear(aten._to_copy.default, push=_cast, pull=_cast_back)


def _expanded(call: Call) -> Change:
    shape, ndim = _shape(call.y), call.y.ndim

    def expand(t: Tensor) -> Tensor:
        return t.reshape(t.shape[0], *(1,) * (ndim - t.ndim + 1), *t.shape[1:]).expand(
            t.shape[0], *shape
        )

    return expand


def _summed(call: Call) -> Change:
    shape = _shape(call.x[0])
    return lambda t: summed_to(t, shape)


linear(aten.expand.default, push=_expanded, pull=_summed)


def _transposed(call: Call) -> Change:
    n = call.x[0].ndim
    if n < 2:
        return lambda t: t
    a, b = (call.args[1], call.args[2]) if len(call.args) > 2 else (0, 1)
    a, b = from_end(a, n), from_end(b, n)
    return lambda t: t.transpose(a, b)


linear(aten.transpose.int, aten.t.default, push=_transposed, pull=_transposed)


def _permuted(call: Call) -> Change:
    dims = [0, *(d % call.x[0].ndim + 1 for d in call.args[1])]
    return lambda t: t.permute(dims)


def _permuted_back(call: Call) -> Change:
    n = call.x[0].ndim
    dims = [d % n for d in call.args[1]]
    back = [0, *(dims.index(d) + 1 for d in range(n))]
    return lambda t: t.permute(back)


linear(aten.permute.default, push=_permuted, pull=_permuted_back)


# --- parts ----------------------------------------------------------------------------------------


def _placed(call: Call, put: Callable[[Tensor, Tensor], Any]) -> Change:
    """The transpose of taking a part: zeros of the source's shape with ȳ put into them."""
    shape = _shape(call.x[0])

    def back(t: Tensor) -> Tensor:
        zeros = t.new_zeros(t.shape[0], *shape)
        put(zeros, t)
        return zeros

    return back


def _select(call: Call) -> Change:
    dim, index = from_end(call.args[1], call.x[0].ndim), call.args[2]
    return lambda t: t.select(dim, index)


linear(
    aten.select.int,
    push=_select,
    pull=lambda call: _placed(call, lambda zeros, t: _select(call)(zeros).copy_(t)),
)


def _slice(call: Call) -> Change:
    n = call.x[0].ndim
    dim = from_end(call.get(1, 0), n)
    start, stop, step = call.get(2), call.get(3), call.get(4, 1)
    return lambda t: aten.slice.Tensor(t, dim, start, stop, step)


linear(
    aten.slice.Tensor,
    push=_slice,
    pull=lambda call: _placed(call, lambda zeros, t: _slice(call)(zeros).copy_(t)),
)


class Pieces(Rule):
    """split, chunk, unbind: several results, each a part of the source."""

    bends = False
    all_results = True

    def __init__(self, call: Call, dim: int, *, keeps_axis: bool, sizes: Sequence[int]) -> None:
        super().__init__(call)
        self._dim, self._keeps, self._sizes = dim, keeps_axis, list(sizes)

    def push(self, tangents: Values) -> Any:
        assert tangents[0] is not None
        if self._keeps:
            return torch.split(tangents[0], self._sizes, self._dim)
        return torch.unbind(tangents[0], self._dim)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        there = next(a for a in adjoint if a is not None)
        source = list(self.shapes[0])
        pieces = []
        for size, a in zip(self._sizes, adjoint, strict=True):
            if a is None:
                shape = list(source)
                shape[self._dim] = size
                a = there.new_zeros(()).expand(there.shape[0], *shape)
            elif not self._keeps:
                a = a.unsqueeze(self._dim)
            pieces.append(a)
        return [torch.cat(pieces, self._dim)]


@rule(
    aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default,
    aten.split.sizes, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
)  # fmt: skip
def _pieces(call: Call) -> Rule:
    operation, n = call.node.operation, call.x[0].ndim
    unbinds = operation is aten.unbind.int
    dim = from_end(call.get(1, 0) if unbinds else call.get(2, 0), n)
    values = [call.of(slot) for slot in call.node.outputs]
    sizes = [1 if unbinds else v.shape[dim] for v in values]
    return Pieces(call, dim, keeps_axis=not unbinds, sizes=sizes)


_pieces.all_results = True


class Joined(Rule):
    """cat and stack."""

    bends = False

    def __init__(self, call: Call, *, stacks: bool) -> None:
        super().__init__(call)
        parts = call.node.args[0]
        self._stacks = stacks
        self._dim = from_end(call.get(1, 0), call.y.ndim)
        self._places = [call.place_of(part) for part in parts]
        values = call.args[0]
        self._values = [tuple(v.shape) for v in values]
        if not stacks and any(len(s) != call.y.ndim for s in self._values):
            raise Unruled  # an empty part of one axis
        self._dtype = call.y.dtype

    def push(self, tangents: Values) -> Tensor:
        there = next(t for t in tangents if t is not None)
        parts = []
        for place, shape in zip(self._places, self._values, strict=True):
            tangent = None if place is None else tangents[place]
            if tangent is None:
                tangent = there.new_zeros(()).expand(there.shape[0], *shape)
            parts.append(tangent)
        return (torch.stack if self._stacks else torch.cat)(parts, self._dim)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        if self._stacks:
            pieces: Sequence[Tensor] = adjoint.unbind(self._dim)
        else:
            pieces = adjoint.split([s[self._dim] for s in self._values], self._dim)
        result: list[Tensor | None] = [None] * len(self.shapes)
        for place, piece in zip(self._places, pieces, strict=True):
            if place is not None and needs[place]:
                before = result[place]
                result[place] = piece if before is None else before + piece
        return result


rule(aten.cat.default)(lambda call: Joined(call, stacks=False))
rule(aten.stack.default)(lambda call: Joined(call, stacks=True))


# --- gathers --------------------------------------------------------------------------------------


def _embedded(call: Call) -> Change:
    indices = call.args[1]
    return lambda t: t[:, indices]


def _embedded_back(call: Call) -> Change:
    rows = call.args[1].reshape(-1)
    shape = _shape(call.x[0])

    def back(t: Tensor) -> Tensor:
        flat = t.reshape(t.shape[0], len(rows), *shape[1:])
        return t.new_zeros(t.shape[0], *shape).index_add_(1, rows, flat)

    return back


linear(aten.embedding.default, push=_embedded, pull=_embedded_back)


def _index_selected(call: Call) -> Change:
    dim, index = from_end(call.args[1], call.x[0].ndim), call.args[2]
    return lambda t: t.index_select(dim, index)


linear(
    aten.index_select.default,
    push=_index_selected,
    pull=lambda call: _placed(
        call,
        lambda zeros, t: zeros.index_add_(from_end(call.args[1], call.x[0].ndim), call.args[2], t),
    ),
)


def _gathered(call: Call) -> Change:
    dim, index = from_end(call.args[1], call.x[0].ndim), call.args[2]
    return lambda t: t.gather(dim, index.expand(t.shape[0], *index.shape))


linear(
    aten.gather.default,
    push=_gathered,
    pull=lambda call: _placed(
        call,
        lambda zeros, t: zeros.scatter_add_(
            from_end(call.args[1], call.x[0].ndim),
            call.args[2].expand(t.shape[0], *call.args[2].shape),
            t,
        ),
    ),
)


def _places_of(call: Call) -> tuple[Any, ...]:
    return (slice(None), *(slice(None) if i is None else i for i in call.args[1]))


def _indexed(call: Call) -> Change:
    """x[i, j]; index tensors that are not neighbours move their axes to the front."""
    given = [i is not None for i in call.args[1]]
    first, last = given.index(True), len(given) - given[::-1].index(True)
    places = _places_of(call)
    if all(given[first:last]):
        return lambda t: t[places]
    axes = max(i.ndim for i in call.args[1] if i is not None)
    return lambda t: t[places].movedim(axes, 0)


def _indexed_back(call: Call) -> Change:
    given = [i is not None for i in call.args[1]]
    first, last = given.index(True), len(given) - given[::-1].index(True)
    neighbours = all(given[first:last])
    axes = max(i.ndim for i in call.args[1] if i is not None)

    def put(zeros: Tensor, t: Tensor) -> None:
        indices = [None, *call.args[1]]
        aten.index_put_(zeros, indices, t if neighbours else t.movedim(0, axes), True)

    return _placed(call, put)


linear(aten.index.Tensor, push=_indexed, pull=_indexed_back)


# --- masks and sums -------------------------------------------------------------------------------


def _tri(call: Call) -> Change:
    operation = torch.tril if call.node.operation is aten.tril.default else torch.triu
    diagonal = call.get(1, 0)
    return lambda t: operation(t, diagonal)


linear(aten.tril.default, aten.triu.default, push=_tri, pull=_tri)


def _flipped(call: Call) -> Change:
    dims = [from_end(d, call.x[0].ndim) for d in call.args[1]]
    return lambda t: t.flip(dims)


linear(aten.flip.default, push=_flipped, pull=_flipped)


def _sum_axes(call: Call) -> list[int]:
    n = call.x[0].ndim
    dims = call.get(1)
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(-n, 0))
    return [from_end(d, n) for d in ([dims] if isinstance(dims, int) else dims)]


def _sum(call: Call) -> Change:
    axes, shape = _sum_axes(call), _shape(call.y)
    scale = _share(call)

    def push(t: Tensor) -> Tensor:
        total = t.sum(axes) if axes else t
        total = total.reshape(t.shape[0], *shape)
        return total if scale == 1 else total * scale

    return push


def _sum_back(call: Call) -> Change:
    shape, scale = _shape(call.x[0]), _share(call)
    kept = list(shape)
    for axis in _sum_axes(call):
        kept[axis] = 1

    def back(t: Tensor) -> Tensor:
        t = t if scale == 1 else t * scale
        return t.reshape(t.shape[0], *kept).expand(t.shape[0], *shape)

    return back


def _share(call: Call) -> float:
    if call.node.operation in (aten.mean.default, aten.mean.dim):
        return call.y.numel() / max(call.x[0].numel(), 1)
    return 1.0


linear(
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim,
    push=_sum, pull=_sum_back,
)  # fmt: skip


def _masked(call: Call) -> Change:
    """masked_fill: what is filled in is a constant."""
    if call.which(0) is None or (call.node.operation is aten.masked_fill.Tensor and call.which(2)):
        raise Unruled
    kept = ~call.args[1]
    return lambda t: t * kept


linear(aten.masked_fill.Scalar, aten.masked_fill.Tensor, push=_masked, pull=_masked)


class Where(Rule):
    """y = x₁ where the condition holds, else x₂."""

    bends = False

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        condition = call.args[0]
        self._masks = [m for m, p in ((condition, 1), (~condition, 2)) if call.which(p) is not None]
        self._order = [call.which(p) for p in (1, 2) if call.which(p) is not None]

    def push(self, tangents: Values) -> Tensor:
        total: Tensor | None = None
        for mask, place in zip(self._masks, self._order, strict=True):
            tangent = tangents[place]  # type: ignore[index]
            if tangent is None:
                continue
            wide = tangent.reshape(
                tangent.shape[0], *(1,) * (len(self.shape) - tangent.ndim + 1), *tangent.shape[1:]
            )
            part = torch.where(mask, wide, 0.0)
            total = part if total is None else total + part
        assert total is not None
        return total.expand(total.shape[0], *self.shape)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        result: list[Tensor | None] = [None] * len(self.shapes)
        for mask, place in zip(self._masks, self._order, strict=True):
            assert place is not None
            if needs[place]:
                part = summed_to(torch.where(mask, adjoint, 0.0), self.shapes[place])
                before = result[place]
                result[place] = part if before is None else before + part
        return result


rule(aten.where.self)(Where)
