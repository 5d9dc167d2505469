"""The rule of everything without one: autograd of that single operation, at its recorded arguments.

y = f(x) is computed once with x as leaves, and with it g(u) = Jᵀu, whose derivative by u is J. Each
column is a backward pass through one node; the second order is double backward through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.rules.base import Call, Rule, Values


class Default(Rule):
    """Autograd of one operation."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        node = call.node
        self._slots = [place for place, slot in enumerate(node.outputs) if slot is not None]
        self._many = node.many
        with torch.enable_grad():
            self._x = [x.detach().requires_grad_(True) for x in call.x]
            args, kwargs = node.with_values(self._x)
            result = node.operation(*args, **kwargs)
            results = list(result) if node.many else [result]
            self._y = [results[place] for place in self._slots]
            self._results = len(results)
            moving = [y for y in self._y if y.requires_grad]
            self._u = [torch.zeros_like(y).requires_grad_(True) for y in moving]
            self._moving = moving
            self._pulled = (
                torch.autograd.grad(moving, self._x, self._u, create_graph=True, allow_unused=True)
                if moving
                else ()
            )
        self._bent: Sequence[Tensor | None] = ()

    def _packed(
        self, columns: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor]
    ) -> list[Any]:
        """Results of single columns, stacked; absent where all of them are."""
        packed: list[Any] = []
        for place, reference in enumerate(like):
            parts = [column[place] for column in columns]
            if all(part is None for part in parts):
                packed.append(None)
                continue
            packed.append(
                torch.stack([torch.zeros_like(reference) if p is None else p for p in parts])
            )
        return packed

    def push(self, tangents: Values) -> Any:
        count = next(t for t in tangents if t is not None).shape[0]
        used = [i for i, t in enumerate(tangents) if t is not None]
        roots = [(i, self._pulled[i]) for i in used if i < len(self._pulled)]
        roots = [(i, r) for i, r in roots if r is not None and r.requires_grad]
        columns: list[list[Tensor | None]] = []
        for k in range(count):
            if not roots:
                columns.append([None] * len(self._moving))
                continue
            given = [tangents[i][k] for i, _ in roots]  # type: ignore[index]
            columns.append(
                list(
                    torch.autograd.grad(
                        [r for _, r in roots], self._u, given, retain_graph=True, allow_unused=True
                    )
                )
            )
        moved = iter(self._packed(columns, self._moving))
        by_slot = [next(moved) if y.requires_grad else None for y in self._y]
        if not self._many:
            result = by_slot[0]
            if result is None:
                return self._y[0].new_zeros(count, *self._y[0].shape)
            return result
        full: list[Tensor | None] = [None] * self._results
        for place, value in zip(self._slots, by_slot, strict=True):
            full[place] = value
        return tuple(full)

    def _adjoints(self, adjoint: Any) -> list[Tensor | None]:
        given = [adjoint[place] for place in self._slots] if self._many else [adjoint]
        return [a for a, y in zip(given, self._y, strict=True) if y.requires_grad]

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        given = self._adjoints(adjoint)
        roots = [(y, a) for y, a in zip(self._moving, given, strict=True) if a is not None]
        if not roots:
            return [None] * len(self._x)
        columns = [
            list(
                torch.autograd.grad(
                    [y for y, _ in roots],
                    self._x,
                    [a[k] for _, a in roots],
                    retain_graph=True,
                    allow_unused=True,
                )
            )
            for k in range(len(roots[0][1]))
        ]
        return self._packed(columns, self._x)

    def keep(self, adjoint: Any) -> None:
        given = self._adjoints(adjoint if not self._many else list(adjoint))
        roots = [(y, a) for y, a in zip(self._moving, given, strict=True) if a is not None]
        if not roots:
            return
        with torch.enable_grad():
            self._bent = torch.autograd.grad(
                [y for y, _ in roots],
                self._x,
                [a for _, a in roots],
                create_graph=True,
                allow_unused=True,
            )

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        used = [
            (g, t)
            for g, t in zip(self._bent, tangents, strict=False)
            if t is not None and g is not None and g.requires_grad
        ]
        if not used:
            return [None] * len(self._x)
        count = used[0][1].shape[0]
        columns = [
            list(
                torch.autograd.grad(
                    [g for g, _ in used],
                    self._x,
                    [t[k] for _, t in used],
                    retain_graph=True,
                    allow_unused=True,
                )
            )
            for k in range(count)
        ]
        return self._packed(columns, self._x)
