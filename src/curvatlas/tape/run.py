r"""A record run forwards with tangents and backwards with adjoints, K columns at a time.

    H v = pull2 from the loss after push        6 units (a gradient is 3)
    H_o v: push to the outputs, Λ there, pull   4
    vᵀ H v = Σ_nodes quadratic(ẋ)               3, no backward pass

The adjoint ȳ at every node is computed once, when the tape is made.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.record import Record
from curvatlas.tape.rules import rule_for
from curvatlas.tape.rules.base import Rule
from curvatlas.tape.rules.default import Default

Columns = Mapping[str, Tensor]  # parameter name → (K, *shape)
Bars = dict[int, Tensor]  # slot → (K, *shape)


class _Step:
    """A node with its rule, and what of it is needed."""

    __slots__ = ("inputs", "many", "output", "outputs", "rule")

    def __init__(
        self, inputs: tuple[int, ...], outputs: tuple[int | None, ...], many: bool, rule: Rule
    ):
        self.inputs, self.outputs, self.many, self.rule = inputs, outputs, many, rule
        self.output = next(slot for slot in outputs if slot is not None)


class Tape:
    """A record with its rules and its adjoints."""

    def __init__(self, record: Record) -> None:
        with torch.no_grad():
            self.leaves = dict(record.leaves)
            self.loss = record.loss
            self.value = record.values[record.loss]
            reached = self._reaching(record)
            used = frozenset(slot for node in record.nodes for slot in node.inputs)
            self._steps: list[_Step] = []
            self.boundary = 0
            for place, node in enumerate(record.nodes):
                if place == record.boundary:
                    self.boundary = len(self._steps)
                if not any(slot in reached for slot in node.outputs):
                    continue
                rule = rule_for(node, record.values, used)
                self._steps.append(_Step(node.inputs, node.outputs, rule.all_results, rule))
            if record.boundary >= len(record.nodes):
                self.boundary = len(self._steps)
            made = {s for step in self._steps[: self.boundary] for s in step.outputs}
            self.frontier = sorted(
                {s for step in self._steps[self.boundary :] for s in step.inputs if s in made}
            )
            itemsize = self.value.element_size()
            self.tangent_bytes = itemsize * sum(
                record.values[step.output].numel() for step in self._steps
            )
            self._shapes = {slot: value.shape for slot, value in enumerate(record.values)}
            self.by_autograd = [
                node.name
                for node in record.nodes
                if any(slot in reached for slot in node.outputs)
                and isinstance(self._rule_of(node.outputs), Default)
            ]
            self._first_order()

    def __str__(self) -> str:
        """How many operations there are, and which of them have no rule of their own."""
        counts = collections.Counter(self.by_autograd)
        told = ", ".join(f"{n} × {name}" if n > 1 else name for name, n in counts.items())
        total = f"{len(self._steps)} operations"
        return f"{total}, {len(self.by_autograd)} by autograd ({told})" if told else total

    @property
    def depth(self) -> int:
        """How many operations round one after the other, at most."""
        return max(1, len(self._steps) // 16)

    def _rule_of(self, outputs: tuple[int | None, ...]) -> Rule:
        return next(step.rule for step in self._steps if step.outputs == outputs)

    @staticmethod
    def _reaching(record: Record) -> set[int]:
        """Slots on a path to the loss."""
        reached = {record.loss}
        for node in reversed(record.nodes):
            if any(slot in reached for slot in node.outputs):
                reached.update(node.inputs)
        return reached

    def _first_order(self) -> None:
        """The adjoints ȳ of every node, and the gradient."""
        everything = set(range(len(self._shapes)))
        bars: Bars = {self.loss: torch.ones_like(self.value).unsqueeze(0)}

        kept: set[Rule] = set()

        def keep(step: _Step, bar: Any) -> None:
            kept.add(step.rule)
            if step.rule.bends:
                step.rule.keep(
                    tuple(None if b is None else b.squeeze(0) for b in bar)
                    if isinstance(bar, tuple)
                    else bar.squeeze(0)
                )

        self._backward(self._steps, bars, {}, everything, keep=keep, bend=False)
        for step in self._steps:
            if step.rule not in kept:
                step.rule.bends = False  # ȳ = 0
        self.gradient = {
            name: bars[slot].squeeze(0) for name, slot in self.leaves.items() if slot in bars
        }

    # --- walks ------------------------------------------------------------------------------------

    def push(
        self, columns: Columns, steps: Sequence[_Step] | None = None, seeds: Bars | None = None
    ) -> Bars:
        """Slot → its tangents, of leaves that move as the columns say."""
        dots: Bars = dict(seeds or {})
        dots.update({self.leaves[name]: column for name, column in columns.items()})
        for step in self._steps if steps is None else steps:
            tangents = [dots.get(slot) for slot in step.inputs]
            if all(t is None for t in tangents):
                continue
            result = step.rule.push(tangents)
            if step.many:
                for slot, value in zip(step.outputs, result, strict=True):
                    if slot is not None and value is not None:
                        dots[slot] = value
            else:
                dots[step.output] = result
        return dots

    def _backward(
        self,
        steps: Sequence[_Step],
        bars: Bars,
        dots: Bars,
        wanted: set[int],
        *,
        keep: Any = None,
        bend: bool = True,
    ) -> Bars:
        """Adjoints (second ones, with ``bend``) pulled back to the slots that are wanted."""
        for step in reversed(steps):
            needs = [slot in wanted for slot in step.inputs]
            if not any(needs):
                continue
            bar: Any
            if step.many:
                parts = tuple(None if s is None else bars.pop(s, None) for s in step.outputs)
                bar = None if all(p is None for p in parts) else parts
            else:
                bar = bars.pop(step.output, None)
            if keep is not None and bar is not None:
                keep(step, bar)
            if bend and step.rule.bends:
                tangents = [dots.get(slot) for slot in step.inputs]
                if bar is None and all(t is None for t in tangents):
                    continue
                parts_in = step.rule.pull2(bar, tangents, needs)
            elif bar is None:
                continue
            else:
                parts_in = step.rule.pull(bar, needs)
            for slot, part, needed in zip(step.inputs, parts_in, needs, strict=True):
                if part is None or not needed:
                    continue
                before = bars.get(slot)
                bars[slot] = part if before is None else before + part
        return bars

    def _wanted(self, rows: Sequence[str]) -> set[int]:
        """Slots that depend on some of these leaves."""
        wanted = {self.leaves[name] for name in rows}
        for step in self._steps:
            if any(slot in wanted for slot in step.inputs):
                wanted.update(slot for slot in step.outputs if slot is not None)
        return wanted

    # --- products ---------------------------------------------------------------------------------

    def _rows(self, bars: Bars, rows: Sequence[str]) -> list[Tensor | None]:
        return [bars.get(self.leaves[name]) for name in rows]

    @torch.no_grad()
    def hessian(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        """H's columns at ``rows``."""
        dots = self.push(columns)
        return self._rows(self._backward(self._steps, {}, dots, self._wanted(rows)), rows)

    def _outputs_moved(self, dots: Bars) -> Bars:
        """Λ ż at the outputs, of their tangents."""
        seeds = {slot: dots[slot] for slot in self.frontier if slot in dots}
        tail = self._steps[self.boundary :]
        moved = self.push({}, tail, seeds)
        bars = self._backward(tail, {}, moved, set(self.frontier) | self._after())
        return {slot: bars[slot] for slot in self.frontier if slot in bars}

    def _after(self) -> set[int]:
        return {s for step in self._steps[self.boundary :] for s in step.outputs if s is not None}

    @torch.no_grad()
    def outer(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        """H_o's columns at ``rows``."""
        head = self._steps[: self.boundary]
        seeds = self._outputs_moved(self.push(columns, head))
        return self._rows(self._backward(head, seeds, {}, self._wanted(rows), bend=False), rows)

    @torch.no_grad()
    def functional(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        """H_f's columns at ``rows``."""
        head = self._steps[: self.boundary]
        dots = self.push(columns, head)
        return self._rows(self._backward(head, {}, dots, self._wanted(rows)), rows)

    @torch.no_grad()
    def parts(
        self, columns: Columns, rows: Sequence[str]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """(H_o, H_f) of the same columns: one push for both."""
        head, wanted = self._steps[: self.boundary], self._wanted(rows)
        dots = self.push(columns, head)
        outer = self._backward(head, self._outputs_moved(dots), {}, wanted, bend=False)
        functional = self._backward(head, {}, dots, wanted)
        return self._rows(outer, rows), self._rows(functional, rows)

    @torch.no_grad()
    def quadratic(self, columns: Columns) -> Tensor:
        """vᵀHv of each column, from the forward pass alone: (K,)."""
        dots = self.push(columns)
        total = self.value.new_zeros(next(iter(columns.values())).shape[0])
        for step in self._steps:
            tangents = [dots.get(slot) for slot in step.inputs]
            if step.rule.bends and any(t is not None for t in tangents):
                term = step.rule.quadratic(tangents)
                if term is not None:
                    total = total + term
        return total
