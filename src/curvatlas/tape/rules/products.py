"""Matrix products and convolutions: bilinear in their two factors, with a bias that only adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvatlas.tape.record import aten
from curvatlas.tape.rules.base import Bilinear, Call, Rule, Unruled, Values, dots, rule

# --- matrices -------------------------------------------------------------------------------------


class MatMul(Bilinear):
    """y = a b, batches broadcast, vectors as rows or columns: ā = ȳ bᵀ, b̄ = aᵀ ȳ."""

    def __init__(self, call: Call, a: int = 0, b: int = 1, c: int | None = None, **factors: Any):
        super().__init__(call, a, b, c, **factors)
        self._row, self._column = (call.args[i].ndim == 1 for i in (a, b))

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        y = matmul(self._matrix_a(a), self._matrix_b(b))
        y = y.squeeze(-2) if self._row else y
        return y.squeeze(-1) if self._column else y

    def pull_a(self, adjoint: Tensor, b: Tensor) -> Tensor:
        part = matmul(self._wide(adjoint), self._matrix_b(b).transpose(-1, -2))
        return part.squeeze(-2) if self._row else part

    def pull_b(self, adjoint: Tensor, a: Tensor) -> Tensor:
        part = matmul(self._matrix_a(a).transpose(-1, -2), self._wide(adjoint))
        return part.squeeze(-1) if self._column else part

    def _matrix_a(self, a: Tensor) -> Tensor:
        return a.unsqueeze(-2) if self._row else a

    def _matrix_b(self, b: Tensor) -> Tensor:
        return b.unsqueeze(-1) if self._column else b

    def _wide(self, adjoint: Tensor) -> Tensor:
        adjoint = adjoint.unsqueeze(-1) if self._column else adjoint
        return adjoint.unsqueeze(-2) if self._row else adjoint


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """(K or 1, *batch, n, m) by (K or 1, *batch, m, p).

    Column by column where one factor is the same for all: torch would copy it for each of them.
    """
    columns = max(a.shape[0], b.shape[0])
    if columns == 1 or a.shape[0] == b.shape[0] or min(a.shape[0], b.shape[0]) == 0:
        n = max(a.ndim, b.ndim)
        if columns == 1:
            return (a[0] @ b[0]).unsqueeze(0)
        return _behind(a, n) @ _behind(b, n)
    if b.ndim == 3 and b.shape[0] == 1:
        return a @ b[0]
    batch = torch.broadcast_shapes(a.shape[1:-2], b.shape[1:-2])  # type: ignore[no-untyped-call]
    product = a.new_empty(columns, *batch, a.shape[-2], b.shape[-1])
    for k in range(columns):
        torch.matmul(a[k % len(a)], b[k % len(b)], out=product[k])
    return product


def _behind(t: Tensor, ndim: int) -> Tensor:
    """Axes of one behind the columns."""
    return t if t.ndim == ndim else t.reshape(len(t), *(1,) * (ndim - t.ndim), *t.shape[1:])


@rule(torch.matmul, signature=lambda input, other: None)
@rule(aten.bmm.default, aten.mv.default, aten.dot.default, aten.vdot.default)
def _matmul(call: Call) -> Rule:
    return MatMul(call)


@rule(aten.baddbmm.default, aten.addmv.default)
def _plus(call: Call) -> Rule:
    return MatMul(call, 1, 2, 0, beta=call.args[3], alpha=call.args[4])


class Outer(Bilinear):
    """y = β c + α a bᵀ of two vectors."""

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        return a.unsqueeze(2) * b.unsqueeze(1)

    def pull_a(self, adjoint: Tensor, b: Tensor) -> Tensor:
        return (adjoint @ b.unsqueeze(2)).squeeze(2)

    def pull_b(self, adjoint: Tensor, a: Tensor) -> Tensor:
        return (a.unsqueeze(1) @ adjoint).squeeze(1)


rule(aten.addr.default)(lambda call: Outer(call, 1, 2, 0, beta=call.args[3], alpha=call.args[4]))


class Affine(Rule):
    """y = x B + b, x (N, m), B (m, n) or its transpose W: ẏ = ẋ B + x Ḃ + ḃ;
    x̄ = ȳ Bᵀ, B̄ = xᵀ ȳ, b̄ = Σ ȳ.
    """

    def __init__(
        self, call: Call, places: Sequence[int | None], *, transposed: bool = False
    ) -> None:
        super().__init__(call)
        x, w = call.args[places[0] or 0], call.args[places[1] or 0]
        self._places = [None if p is None else call.which(p) for p in places]
        moving = [p for p in self._places if p is not None]
        if w.ndim != 2 or sorted(moving) != list(range(len(call.x))):
            raise Unruled
        self._transposed = transposed
        self._b = w.t() if transposed else w
        self._x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        self._width = self._b.shape[1]
        self.bends = self._places[0] is not None and self._places[1] is not None
        self._adjoint: Any = None

    def _of(self, values: Values) -> list[Any]:
        """Tangents of x, B and b: (K, N, m), (K, m, n), (K, n)."""
        dx, dw, db = (None if p is None else values[p] for p in self._places)
        dx = None if dx is None else dx.reshape(len(dx), *self._x.shape)
        return [dx, dw.transpose(1, 2) if dw is not None and self._transposed else dw, db]

    def push(self, tangents: Values) -> Tensor:
        dx, dw, db = self._of(tangents)
        total = None if dx is None else _joined(dx, self._b, bias=db)
        if dx is not None and len(dx) == 1:
            db = None  # added already
        if dw is not None:
            total = _shared(self._x, dw, total)
        if db is not None:
            wide = db.unsqueeze(1)
            total = wide.expand(len(db), len(self._x), -1) if total is None else total.add_(wide)
        assert total is not None
        return total.reshape(len(total), *self.shape)

    def keep(self, adjoint: Any) -> None:
        self._adjoint = adjoint.reshape(len(self._x), self._width)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return self.pull2(adjoint, [None] * len(self.shapes), needs)

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        return self.pull2(None, tangents, needs)

    def pull2(self, adjoint: Any, tangents: Values, needs: Sequence[bool]) -> Values:
        dx, dw, _ = self._of(tangents)
        to_x, to_w, to_b = (p is not None and needs[p] for p in self._places)
        bar = None
        if adjoint is not None:
            bar = adjoint.reshape(len(adjoint), len(self._x), self._width)
        parts: list[Tensor | None] = [None, None, None]
        if to_x:
            parts[0] = None if bar is None else _joined(bar, self._b.t())
            if dw is not None:
                parts[0] = _shared(self._adjoint, dw.transpose(1, 2), parts[0])
        if to_w:
            parts[1] = self._to_weight(bar, dx)
        if to_b and bar is not None:
            parts[2] = bar.sum(1)
        result: list[Tensor | None] = [None] * len(self.shapes)
        for place, part in zip(self._places, parts, strict=True):
            if place is not None and part is not None:
                result[place] = part.reshape(len(part), *self.shapes[place])
        return result

    def _to_weight(self, bar: Tensor | None, dx: Tensor | None) -> Tensor | None:
        """xᵀ ȳ' + ẋᵀ ȳ, or the transpose, as the weight is stored."""
        if self._transposed:
            part = None if bar is None else _by_shared(bar.transpose(1, 2), self._x)
            return part if dx is None else _shared(self._adjoint.t(), dx, part)
        part = None if bar is None else _shared(self._x.t(), bar)
        return part if dx is None else _by_shared(dx.transpose(1, 2), self._adjoint, part)

    def quadratic(self, tangents: Values) -> Tensor | None:
        """2 ⟨ȳ, ẋ Ḃ⟩."""
        dx, dw, _ = self._of(tangents)
        if not self.bends or dx is None or dw is None:
            return None
        return 2 * dots(_shared(self._adjoint, dw.transpose(1, 2)), dx)


def _joined(columns: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """(K, N, m) by a matrix (m, n) for all columns; ``bias`` is added where there is one column."""
    rows = columns.reshape(columns.shape[0] * columns.shape[1], right.shape[0])
    both = bias is not None and len(columns) == 1
    product = torch.addmm(bias, rows, right) if both else rows @ right  # type: ignore[arg-type]
    return product.view(*columns.shape[:2], right.shape[1])


def _shared(left: Tensor, columns: Tensor, into: Tensor | None = None) -> Tensor:
    """A matrix (n, m) for all columns by (K, m, p), added to ``into``, which is ours."""
    if len(columns) == 1:
        one = left @ columns[0] if into is None else into[0].addmm_(left, columns[0])
        return one.unsqueeze(0)
    wide = left.unsqueeze(0).expand(len(columns), -1, -1)
    return torch.bmm(wide, columns) if into is None else into.baddbmm_(wide, columns)


def _by_shared(columns: Tensor, right: Tensor, into: Tensor | None = None) -> Tensor:
    """(K, n, m) by a matrix (m, p) for all columns, added to ``into``, which is ours."""
    if len(columns) == 1:
        one = columns[0] @ right if into is None else into[0].addmm_(columns[0], right)
        return one.unsqueeze(0)
    wide = right.unsqueeze(0).expand(len(columns), -1, -1)
    return torch.bmm(columns, wide) if into is None else into.baddbmm_(columns, wide)


@rule(F.linear, signature=lambda input, weight, bias=None: None)
def _linear(call: Call) -> Rule:
    return Affine(call, (0, 1, 2), transposed=True)


@rule(aten.mm.default)
def _mm(call: Call) -> Rule:
    if call.which(0) == call.which(1):  # x x
        return MatMul(call)
    return Affine(call, (0, 1, None))


@rule(aten.addmm.default)
def _addmm(call: Call) -> Rule:
    c, _, w, beta, alpha = call.args
    apart = len({p for i in range(3) if (p := call.which(i)) is not None}) == len(call.x)
    if beta == alpha == 1 and c.shape == w.shape[1:] and apart:
        return Affine(call, (1, 2, 0))
    return MatMul(call, 1, 2, 0, beta=beta, alpha=alpha)


# --- convolutions ---------------------------------------------------------------------------------


class Convolution(Bilinear):
    """y = x * w + b, with strides, dilation, groups, transposed or not.

    ẋ joins the samples; ẇ and adjoints of w go column by column.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call, 0, 1, 2)
        self._options = call.args[
            3:
        ]  # stride, padding, dilation, transposed, output_padding, groups
        self._batched = call.args[0].ndim == call.args[1].ndim
        self._axes = call.args[1].ndim - 2

    def _joined(self, t: Tensor) -> Tensor:
        """(K, N, C, …) → (K N, C, …); without an axis of samples (K, C, …)."""
        return t.flatten(0, 1) if self._batched else t

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        if len(b) == 1:
            y = aten.convolution(self._joined(a), b[0], None, *self._options)
            return y.reshape(len(a), *self.shape)  # type: ignore[no-any-return]
        return torch.stack(
            [aten.convolution(a[k % len(a)], one, None, *self._options) for k, one in enumerate(b)]
        )

    def _backward(self, adjoint: Tensor, x: Tensor, w: Tensor, place: int) -> Tensor:
        mask = [place == 0, place == 1, False]
        result: Tensor = aten.convolution_backward(adjoint, x, w, None, *self._options, mask)[place]
        return result

    def pull_a(self, adjoint: Tensor, b: Tensor) -> Tensor:
        x = self._values[0]
        if len(b) == 1:
            like = x.expand(len(adjoint), *x.shape[1:])
            part = self._backward(self._joined(adjoint), self._joined(like), b[0], 0)
            return part.reshape(len(adjoint), *x.shape[1:])
        return torch.stack(
            [self._backward(adjoint[k % len(adjoint)], x[0], one, 0) for k, one in enumerate(b)]
        )

    def pull_b(self, adjoint: Tensor, a: Tensor) -> Tensor:
        w = self._values[1][0]
        return torch.stack(
            [
                self._backward(adjoint[k % len(adjoint)], a[k % len(a)], w, 1)
                for k in range(max(len(a), len(adjoint)))
            ]
        )

    def push_c(self, c: Tensor) -> Tensor:
        wide = c.reshape(len(c), *(1,) * self._batched, -1, *(1,) * self._axes)
        return wide.expand(len(c), *self.shape)

    def pull_c(self, adjoint: Tensor) -> Tensor:
        channel = adjoint.ndim - self._axes - 1
        return adjoint.sum([d for d in range(1, adjoint.ndim) if d != channel])


rule(aten.convolution.default)(Convolution)
