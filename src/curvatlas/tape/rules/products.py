"""Matrix products: bilinear in their two factors, with a bias that only adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvatlas.tape.record import aten
from curvatlas.tape.rules.base import Bilinear, Call, Rule, Unruled, Values, rule, summed_to


class MatMul(Bilinear):
    """y = a b with at least two axes each, the others broadcast: ā = ȳ bᵀ, b̄ = aᵀ ȳ."""

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = _with_batch(a, b)
        return a @ b

    def pull_a(self, adjoint: Tensor, b: Tensor) -> Tensor:
        adjoint, b = _with_batch(adjoint, b)
        return adjoint @ b.transpose(-1, -2)

    def pull_b(self, adjoint: Tensor, a: Tensor) -> Tensor:
        a, adjoint = _with_batch(a, adjoint)
        return a.transpose(-1, -2) @ adjoint


def _with_batch(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Axes of one behind the columns, so that both have as many."""
    n = max(a.ndim, b.ndim)
    return (
        a.reshape(a.shape[0], *(1,) * (n - a.ndim), *a.shape[1:]),
        b.reshape(b.shape[0], *(1,) * (n - b.ndim), *b.shape[1:]),
    )


@rule(torch.matmul, aten.mm.default, aten.bmm.default, aten.matmul.default)
def _matmul(call: Call) -> Rule:
    if call.args[0].ndim < 2 or call.args[1].ndim < 2:
        raise Unruled
    return MatMul(call)


class Affine(Rule):
    """y = x Wᵀ + b, x (N, m), W (n, m): ẏ = ẋ Wᵀ + x Ẇᵀ + ḃ;  x̄ = ȳ W, W̄ = ȳᵀ x, b̄ = Σ ȳ."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._places = [call.which(i) for i in range(3)]
        x, w = call.args[0], call.args[1]
        if w.ndim != 2:
            raise Unruled
        self._x, self._w = x.reshape(-1, x.shape[-1]), w
        self._rows = len(self._x)
        self.bends = self._places[0] is not None and self._places[1] is not None
        self._adjoint: Any = None

    def _of(self, values: Values, i: int) -> Any:
        place = self._places[i]
        return None if place is None else values[place]

    def push(self, tangents: Values) -> Tensor:
        dx, dw, db = (self._of(tangents, i) for i in range(3))
        columns = next(t for t in tangents if t is not None).shape[0]
        total: Tensor | None = None
        if dx is not None:
            flat = dx.reshape(-1, self._w.shape[1])
            if db is not None and columns == 1:
                total = torch.addmm(db, flat, self._w.t())
                db = None
            else:
                total = flat @ self._w.t()
            total = total.view(columns, self._rows, -1)
        if dw is not None:
            if columns == 1:
                by_weight = dw[0].t()
                total = (
                    (self._x @ by_weight).unsqueeze(0)
                    if total is None
                    else total[0].addmm_(self._x, by_weight).unsqueeze(0)
                )
            else:
                x = self._x.unsqueeze(0).expand(columns, -1, -1)
                moved = dw.transpose(1, 2)
                total = torch.bmm(x, moved) if total is None else total.baddbmm_(x, moved)
        if db is not None:
            wide = db.unsqueeze(1)
            total = wide.expand(columns, self._rows, -1) if total is None else total.add_(wide)
        assert total is not None
        return total.reshape(columns, *self.shape)

    def keep(self, adjoint: Any) -> None:
        if self.bends:
            self._adjoint = adjoint.reshape(self._rows, -1)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return self.pull2(adjoint, [None] * len(self.shapes), needs)

    def pull2(self, adjoint: Any, tangents: Values, needs: Sequence[bool]) -> Values:
        dx = dw = None
        if self.bends and self._adjoint is not None:
            dx, dw = self._of(tangents, 0), self._of(tangents, 1)
        there = next(t for t in (adjoint, dx, dw) if t is not None)
        columns = there.shape[0]
        bar = None if adjoint is None else adjoint.reshape(columns, self._rows, -1)
        result: list[Tensor | None] = [None] * len(self.shapes)

        def give(i: int, part: Tensor | None) -> None:
            place = self._places[i]
            if place is not None and part is not None:
                part = part.reshape(columns, *self.shapes[place])
                before = result[place]
                result[place] = part if before is None else before + part

        if self._wanted(0, needs):
            part = None
            if bar is not None:
                part = (bar.reshape(-1, bar.shape[-1]) @ self._w).view(columns, self._rows, -1)
            if dw is not None:
                ours = self._adjoint
                if columns == 1:
                    moved = part[0].addmm_(ours, dw[0]) if part is not None else ours @ dw[0]
                    part = moved.unsqueeze(0)
                else:
                    wide = ours.unsqueeze(0).expand(columns, -1, -1)
                    part = part.baddbmm_(wide, dw) if part is not None else torch.bmm(wide, dw)
            give(0, part)
        if self._wanted(1, needs):
            part = None
            if bar is not None:
                part = torch.matmul(bar.transpose(1, 2), self._x)
            if dx is not None:
                flat = dx.reshape(columns, self._rows, -1)
                ours = self._adjoint.t()
                if columns == 1:
                    moved = part[0].addmm_(ours, flat[0]) if part is not None else ours @ flat[0]
                    part = moved.unsqueeze(0)
                else:
                    wide = ours.unsqueeze(0).expand(columns, -1, -1)
                    part = part.baddbmm_(wide, flat) if part is not None else torch.bmm(wide, flat)
            give(1, part)
        if self._wanted(2, needs) and bar is not None:
            give(2, bar.sum(1))
        return result

    def _wanted(self, i: int, needs: Sequence[bool]) -> bool:
        place = self._places[i]
        return place is not None and needs[place]

    def quadratic(self, tangents: Values) -> Tensor | None:
        """2 ⟨ȳ, ẋ Ẇᵀ⟩."""
        dx, dw = self._of(tangents, 0), self._of(tangents, 1)
        if not self.bends or dx is None or dw is None:
            return None
        columns = dx.shape[0]
        flat = dx.reshape(columns, self._rows, -1)
        if columns == 1:
            single: Tensor = 2 * torch.sum((self._adjoint @ dw[0]) * flat[0])
            return single.reshape(1)
        moved = torch.bmm(self._adjoint.unsqueeze(0).expand(columns, -1, -1), dw)
        columnwise: Tensor = 2 * (moved * flat).flatten(1).sum(1)
        return columnwise


rule(F.linear)(Affine)


class AddMM(Rule):
    """y = β c + α a b, of matrices or batches of them."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._alpha = call.kwargs.get("alpha", 1)
        self._beta = call.kwargs.get("beta", 1)
        self._c = call.which(0)
        self._product = _Shifted(call)
        self.bends = self._product.bends

    def push(self, tangents: Values) -> Tensor:
        total: Tensor | None = None
        if any(tangents[p] is not None for p in self._product.used):
            total = self._product.push(tangents) * self._alpha
        c = None if self._c is None else tangents[self._c]
        if c is not None:
            wide = c.reshape(c.shape[0], *(1,) * (len(self.shape) - c.ndim + 1), *c.shape[1:])
            wide = wide.expand(c.shape[0], *self.shape) * self._beta
            total = wide if total is None else total + wide
        assert total is not None
        return total

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        result = list(self._product.pull(adjoint * self._alpha, needs))
        if self._c is not None and needs[self._c]:
            part = summed_to(adjoint * self._beta, self.shapes[self._c])
            before = result[self._c]
            result[self._c] = part if before is None else before + part
        return result

    def keep(self, adjoint: Any) -> None:
        self._product.keep(adjoint * self._alpha)

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        if not any(tangents[p] is not None for p in self._product.used):
            return [None] * len(self.shapes)
        return self._product.bend(tangents, needs)


class _Shifted(MatMul):
    """The product of the second and third argument."""

    def __init__(self, call: Call) -> None:
        Rule.__init__(self, call)
        self._values = call.args[1].unsqueeze(0), call.args[2].unsqueeze(0)
        self._places = call.which(1), call.which(2)
        self.used = [p for p in self._places if p is not None]
        self.bends = None not in self._places
        self._adjoint = None


rule(aten.addmm.default, aten.baddbmm.default)(AddMM)
