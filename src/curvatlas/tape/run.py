r"""A record run forwards with tangents and backwards with adjoints, K columns at a time.

    H v = pull2 from the loss after push        6 units (a gradient is 3)
    H_o v: push to the outputs, Λ there, pull   4
    vᵀ H v = Σ_nodes quadratic(ẋ)               3, no backward pass

The adjoint ȳ at every node is computed once, when the tape is made.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvatlas.linear_operator import Part
from curvatlas.tape.record import Record
from curvatlas.tape.rules import rule_for
from curvatlas.tape.rules.base import Rule
from curvatlas.tape.rules.default import Default

Columns = Mapping[str, Tensor]  # parameter name → (K, *shape)
Bars = dict[int, Tensor]  # slot → (K, *shape)

_WAYS = 256  # that are remembered: a map of roles by roles comes back to each of its views


class _Step:
    """A node with its rule, and what of it is needed."""

    __slots__ = ("inputs", "many", "output", "outputs", "rule")

    def __init__(
        self, inputs: tuple[int, ...], outputs: tuple[int | None, ...], many: bool, rule: Rule
    ):
        self.inputs, self.outputs, self.many, self.rule = inputs, outputs, many, rule
        self.output = next(slot for slot in outputs if slot is not None)


_Needed = tuple[_Step, list[bool]]  # a step, and which of its inputs' adjoints are wanted


@dataclass(frozen=True, kw_only=True)
class _Way:
    """The steps of a product: forwards, backwards, the same of the model alone, and the loss."""

    forward: list[_Step]
    back: list[_Needed]
    head_forward: list[_Step]
    head_back: list[_Needed]
    tail: list[_Needed]


class Tape:
    """A record with its rules and its adjoints."""

    def __init__(self, record: Record) -> None:
        with torch.no_grad():
            self.leaves = dict(record.leaves)
            self.loss = record.loss
            self.value = record.values[record.loss]
            used = frozenset(slot for node in record.nodes for slot in node.inputs)
            rules = [rule_for(node, record.values, used) for node in record.nodes]
            self._steps = [
                _Step(node.inputs, node.outputs, node.many and rule.all_results, rule)
                for node, rule in zip(record.nodes, rules, strict=True)
            ]
            self.by_autograd = [
                node.name
                for node, rule in zip(record.nodes, rules, strict=True)
                if isinstance(rule, Default)
            ]
            self.boundary = record.boundary
            made = {s for step in self._steps[: self.boundary] for s in step.outputs}
            self.frontier = sorted(
                {s for step in self._steps[self.boundary :] for s in step.inputs if s in made}
            )
            itemsize = self.value.element_size()
            self.tangent_bytes = itemsize * sum(
                record.values[step.output].numel() for step in self._steps
            )
            self._ways: dict[tuple[tuple[str, ...], tuple[str, ...]], _Way] = {}
            self._first_order()

    def __str__(self) -> str:
        """How many operations there are, and which of them have no rule of their own."""
        counts = collections.Counter(self.by_autograd)
        told = ", ".join(f"{n} × {name}" if n > 1 else name for name, n in counts.items())
        total = f"{self.operations} operations"
        return f"{total}, {len(self.by_autograd)} by autograd ({told})" if told else total

    @property
    def operations(self) -> int:
        """How many were recorded on the way to the loss."""
        return len(self._steps)

    def _first_order(self) -> None:
        """The adjoints ȳ of every node, and the gradient."""
        bars: Bars = {self.loss: torch.ones_like(self.value).unsqueeze(0)}
        reached: set[Rule] = set()

        def keep(step: _Step, bar: Any) -> None:
            reached.add(step.rule)
            if step.rule.bends:
                step.rule.keep(
                    tuple(None if b is None else b.squeeze(0) for b in bar)
                    if isinstance(bar, tuple)
                    else bar.squeeze(0)
                )

        everything = [(step, [True] * len(step.inputs)) for step in self._steps]
        self._backward(everything, bars, keep=keep)
        for step in self._steps:
            if step.rule not in reached:
                step.rule.bends = False  # ȳ = 0
        self.gradient = {
            name: bars[slot].squeeze(0) for name, slot in self.leaves.items() if slot in bars
        }

    # --- which steps a product takes --------------------------------------------------------------

    def _forward_steps(self, names: Iterable[str]) -> list[_Step]:
        """The steps that tangents of these leaves reach, in their order."""
        moving = {self.leaves[name] for name in names}
        steps = []
        for step in self._steps:
            if any(slot in moving for slot in step.inputs):
                moving.update(slot for slot in step.outputs if slot is not None)
                steps.append(step)
        return steps

    def _way(self, columns: Iterable[str], rows: Iterable[str]) -> _Way:
        """The steps of a product with these columns, read off at these rows; found once."""
        key = (tuple(columns), tuple(rows))
        way = self._ways.get(key)
        if way is None:
            wanted = {self.leaves[name] for name in key[1]}
            for step in self._steps:
                if any(slot in wanted for slot in step.inputs):
                    wanted.update(slot for slot in step.outputs if slot is not None)
            needs = {step: [slot in wanted for slot in step.inputs] for step in self._steps}
            head, tail = set(self._steps[: self.boundary]), self._steps[self.boundary :]
            forward = self._forward_steps(key[0])
            back = [(step, needs[step]) for step in self._steps if any(needs[step])]
            after = {s for step in tail for s in step.outputs} | set(self.frontier)
            way = _Way(
                forward=forward,
                back=back,
                head_forward=[step for step in forward if step in head],
                head_back=[(step, needed) for step, needed in back if step in head],
                tail=[(step, [slot in after for slot in step.inputs]) for step in tail],
            )
            if len(self._ways) >= _WAYS:
                self._ways.clear()
            self._ways[key] = way
        return way

    # --- walks ------------------------------------------------------------------------------------

    def _push(self, steps: Iterable[_Step], dots: Bars) -> Bars:
        """Slot → its tangents, from those of some slots."""
        for step in steps:
            tangents = [dots.get(slot) for slot in step.inputs]
            if all(t is None for t in tangents):
                continue
            result = step.rule.push(tangents)
            if step.many:
                for slot, value in zip(step.outputs, result, strict=True):
                    if slot is not None and value is not None:
                        dots[slot] = value
            elif result is not None:
                dots[step.output] = result
        return dots

    def _columns(self, columns: Columns) -> Bars:
        return {self.leaves[name]: column for name, column in columns.items()}

    def _backward(
        self, steps: Sequence[_Needed], bars: Bars, dots: Bars | None = None, *, keep: Any = None
    ) -> Bars:
        """Adjoints pulled back to the leaves; with ``dots``, tangents, those that move."""
        for step, needs in reversed(steps):
            bar: Any
            if step.many:
                parts = tuple(None if s is None else bars.pop(s, None) for s in step.outputs)
                bar = None if all(p is None for p in parts) else parts
            else:
                bar = bars.pop(step.output, None)
            if keep is not None and bar is not None:
                keep(step, bar)
            if dots is not None and step.rule.bends:
                tangents = [dots.get(slot) for slot in step.inputs]
                if bar is None and all(t is None for t in tangents):
                    continue
                pulled = step.rule.pull2(bar, tangents, needs)
            elif bar is None:
                continue
            else:
                pulled = step.rule.pull(bar, needs)
            for slot, part, needed in zip(step.inputs, pulled, needs, strict=True):
                if part is not None and needed:
                    before = bars.get(slot)
                    bars[slot] = part if before is None else before + part
        return bars

    # --- products ---------------------------------------------------------------------------------

    def _rows(self, bars: Bars, rows: Sequence[str]) -> list[Tensor | None]:
        return [bars.get(self.leaves[name]) for name in rows]

    @torch.no_grad()
    def hessian(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        """H's columns at ``rows``."""
        way = self._way(columns, rows)
        dots = self._push(way.forward, self._columns(columns))
        return self._rows(self._backward(way.back, {}, dots), rows)

    def _outputs_moved(self, way: _Way, dots: Bars) -> Bars:
        """Λ ż at the outputs, of their tangents."""
        seeds = {slot: dots[slot] for slot in self.frontier if slot in dots}
        moved = self._push((step for step, _ in way.tail), seeds)
        bars = self._backward(way.tail, {}, moved)
        return {slot: bars[slot] for slot in self.frontier if slot in bars}

    @torch.no_grad()
    def outer(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        """H_o's columns at ``rows``."""
        way = self._way(columns, rows)
        dots = self._push(way.head_forward, self._columns(columns))
        return self._rows(self._backward(way.head_back, self._outputs_moved(way, dots)), rows)

    @torch.no_grad()
    def functional(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        """H_f's columns at ``rows``."""
        way = self._way(columns, rows)
        dots = self._push(way.head_forward, self._columns(columns))
        return self._rows(self._backward(way.head_back, {}, dots), rows)

    @torch.no_grad()
    def parts(
        self, columns: Columns, rows: Sequence[str]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """(H_o, H_f) of the same columns: one push for both."""
        way = self._way(columns, rows)
        dots = self._push(way.head_forward, self._columns(columns))
        outer = self._backward(way.head_back, self._outputs_moved(way, dots))
        functional = self._backward(way.head_back, {}, dots)
        return self._rows(outer, rows), self._rows(functional, rows)

    @torch.no_grad()
    def quadratic(self, columns: Columns, part: Part = "total") -> Tensor:
        """vᵀ A v of each column, from the forward pass alone: (K,).

        Of H_o = Jᵀ Λ J the second order of the loss alone counts, of H_f that of the model alone.
        """
        steps = self._forward_steps(columns)
        if part != "total":
            head = set(self._steps[: self.boundary])
            steps = [step for step in steps if step in head]
        dots = self._push(steps, self._columns(columns))
        if part == "outer":
            seeds = {slot: dots[slot] for slot in self.frontier if slot in dots}
            steps = self._steps[self.boundary :]
            dots = self._push(steps, seeds)
        total = self.value.new_zeros(next(iter(columns.values())).shape[0])
        for step in steps:
            tangents = [dots.get(slot) for slot in step.inputs]
            if step.rule.bends and any(t is not None for t in tangents):
                term = step.rule.quadratic(tangents)
                if term is not None:
                    total = total + term
        return total
