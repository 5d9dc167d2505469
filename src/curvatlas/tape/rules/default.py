"""The rule of everything without one: autograd of that single operation, at its recorded arguments.

y = f(x) is computed once with x as leaves, and with it g(u) = Jᵀu, whose derivative by u is J. All
columns are one batched backward pass through one node; the second order is the backward pass of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.rules.base import Call, Rule, Values


class Default(Rule):
    """Autograd of one operation, or of another that is the same and can be differentiated twice."""

    all_results = True

    def __init__(self, call: Call, operation: Callable[..., Any] | None = None) -> None:
        super().__init__(call)
        node = call.node
        self._many, self._results = node.many, len(node.outputs)
        with torch.enable_grad():
            self._x = [x.detach().requires_grad_(True) for x in call.x]
            args, kwargs = node.with_values(self._x)
            result = (operation or node.operation)(*args, **kwargs)
            results = list(result) if node.many else [result]
            self._y = {
                number: results[number]
                for number, slot in enumerate(node.outputs)
                if slot is not None and results[number].requires_grad
            }
            self._u = [torch.zeros_like(y).requires_grad_(True) for y in self._y.values()]
            self._pulled = _gradients(list(self._y.values()), self._x, self._u, graph=True)
        self._bent: list[Tensor | None] = [None] * len(self._x)

    def push(self, tangents: Values) -> Any:
        moved = _columns(self._pulled, self._u, tangents)
        if not self._many:
            return moved[0] if moved else None
        by_number = dict(zip(self._y, moved, strict=True))
        return tuple(by_number.get(number) for number in range(self._results))

    def _adjoints(self, adjoint: Any) -> list[Tensor | None]:
        return [adjoint[number] if self._many else adjoint for number in self._y]

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return _columns(list(self._y.values()), self._x, self._adjoints(adjoint))

    def keep(self, adjoint: Any) -> None:
        with torch.enable_grad():
            self._bent = _gradients(
                list(self._y.values()), self._x, self._adjoints(adjoint), graph=True
            )

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        return _columns(self._bent, self._x, tangents)


def _gradients(
    roots: Sequence[Tensor | None],
    at: Sequence[Tensor],
    given: Values,
    *,
    graph: bool = False,
    batched: bool = False,
) -> list[Tensor | None]:
    """``torch.autograd.grad`` where roots and what is given for them may be absent."""
    there = [
        (r, g)
        for r, g in zip(roots, given, strict=True)
        if r is not None and g is not None and r.requires_grad
    ]
    if not there:
        return [None] * len(at)
    return list(
        torch.autograd.grad(
            [r for r, _ in there],
            at,
            [g for _, g in there],
            retain_graph=True,
            create_graph=graph,
            allow_unused=True,
            is_grads_batched=batched,
        )
    )


def _columns(
    roots: Sequence[Tensor | None], at: Sequence[Tensor], given: Values
) -> list[Tensor | None]:
    """The same for K columns."""
    count = next((len(g) for g in given if g is not None), 0)
    if not count:
        return [None] * len(at)
    if count > 1:
        try:
            return _gradients(roots, at, given, batched=True)
        except RuntimeError:
            pass  # a backward pass that cannot be batched: one column after another
    rows = [
        _gradients(roots, at, [None if g is None else g[k] for g in given]) for k in range(count)
    ]
    return [
        None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)
    ]
