r"""What a rule is, and the kinds that most rules are.

For y = f(x₁, …) at its recorded arguments a rule gives, with K columns on a leading axis,

    push(ẋ)        ẏ = Σ ∂f/∂xᵢ ẋᵢ
    pull(ȳ)        x̄ᵢ = (∂f/∂xᵢ)ᵀ ȳ
    bend(ẋ)        Σⱼ ∂²⟨ȳ, f⟩/∂xᵢ∂xⱼ ẋⱼ     at the adjoint ȳ that was kept
    quadratic(ẋ)   Σᵢⱼ ẋᵢ ∂²⟨ȳ, f⟩/∂xᵢ∂xⱼ ẋⱼ   a number a column

so that the tangent of the adjoint is pull2 = pull(ȳ') + bend(ẋ). An absent tangent or adjoint is
``None`` and means zero; a rule may be called with some of them absent, never with all.
Kinds: ``Linear`` (no bend), ``Pointwise`` (f', f''), ``Bilinear``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.record import Node, Ref, tree_map_refs

Values = Sequence[Tensor | None]  # one an input of the node


class Call:
    """A node at its recorded values.

    args, kwargs: with values in place;  x: the values that move, in the order of the inputs;
    y: the result (the first of several).
    """

    def __init__(self, node: Node, values: Sequence[Tensor]) -> None:
        self.node = node
        self._all = values
        self.x = [values[slot] for slot in node.inputs]
        self.args, self.kwargs = tree_map_refs(
            lambda ref: values[ref.slot], (node.args, node.kwargs)
        )
        self._place = {slot: i for i, slot in enumerate(node.inputs)}
        self.y = next(values[slot] for slot in node.outputs if slot is not None)

    def which(self, position: int) -> int | None:
        """The number of the input that stands at this place of the arguments, None: a constant."""
        return self.place_of(self.node.args[position]) if position < len(self.node.args) else None

    def place_of(self, argument: Any) -> int | None:
        """The number of the input that an argument of the node is, None: a constant."""
        return self._place[argument.slot] if isinstance(argument, Ref) else None

    def of(self, slot: int | None) -> Tensor:
        """The value in a slot."""
        assert slot is not None
        return self._all[slot]

    def get(self, position: int, default: Any = None) -> Any:
        """The argument at a place, or its default."""
        return self.args[position] if position < len(self.args) else default


class Rule:
    """The base: every rule knows its call's shapes; ``bends``: whether there is a second order."""

    bends = True

    def __init__(self, call: Call) -> None:
        self.shapes = [tuple(x.shape) for x in call.x]
        self.shape = tuple(call.y.shape)

    def push(self, tangents: Values) -> Any:
        raise TypeError(f"{type(self).__name__} has no push.")

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        raise TypeError(f"{type(self).__name__} has no pull.")

    def keep(self, adjoint: Any) -> None:
        """Prepare the second order at ȳ: without the axis of columns."""

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        return [None] * len(self.shapes)

    def pull2(self, adjoint: Any, tangents: Values, needs: Sequence[bool]) -> Values:
        """The tangent of the adjoint; any of ``adjoint`` and all of ``tangents`` may be absent."""
        moved = any(t is not None for t in tangents)
        bent = self.bend(tangents, needs) if self.bends and moved else None
        if adjoint is None:
            return bent if bent is not None else [None] * len(self.shapes)
        pulled = self.pull(adjoint, needs)
        if bent is None:
            return pulled
        return [
            b if a is None else a if b is None else a + b for a, b in zip(pulled, bent, strict=True)
        ]

    def quadratic(self, tangents: Values) -> Tensor | None:
        if not self.bends:
            return None
        bent = self.bend(tangents, [t is not None for t in tangents])
        total: Tensor | None = None
        for b, t in zip(bent, tangents, strict=True):
            if b is not None and t is not None:
                term = (b * t).flatten(1).sum(1)
                total = term if total is None else total + term
        return total


Maker = Callable[[Call], Rule]
RULES: dict[Any, Maker] = {}


def rule(*operations: Any) -> Callable[[Any], Any]:
    """Register a maker of rules for operations."""

    def registered(maker: Any) -> Any:
        for operation in operations:
            RULES[operation] = maker
        return maker

    return registered


# --- shapes ---------------------------------------------------------------------------------------


def aligned(tangent: Tensor, ndim: int) -> Tensor:
    """(K, *shape) with axes of one behind K, so that it broadcasts against ``ndim`` axes."""
    missing = ndim - (tangent.ndim - 1)
    if missing <= 0:
        return tangent
    return tangent.reshape(tangent.shape[0], *(1,) * missing, *tangent.shape[1:])


def summed_to(adjoint: Tensor, shape: Sequence[int]) -> Tensor:
    """(K, *wide) summed back over what was broadcast from ``shape``."""
    wide = adjoint.shape[1:]
    if tuple(wide) == tuple(shape):
        return adjoint
    extra = len(wide) - len(shape)
    axes = list(range(1, 1 + extra))
    axes += [1 + extra + i for i, n in enumerate(shape) if n == 1 and wide[extra + i] != 1]
    summed = adjoint.sum(axes, keepdim=True) if axes else adjoint
    return summed.reshape(adjoint.shape[0], *shape)


# --- kinds ----------------------------------------------------------------------------------------


class Linear(Rule):
    """ẏ = f(ẋ), x̄ = fᵀ(ȳ); made by ``linear`` from two functions of (call, value)."""

    bends = False

    def __init__(self, call: Call, forward: Any, backward: Any) -> None:
        super().__init__(call)
        self._forward, self._backward = forward(call), backward(call)

    def push(self, tangents: Values) -> Tensor:
        result: Tensor = self._forward(tangents[0])
        return result

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return [self._backward(adjoint)]


def linear(*operations: Any, push: Any, pull: Any) -> None:
    """Declare linear operations of one moving argument: call → (function of (K, …) → (K, …))."""

    def made(call: Call) -> Rule:
        if len(call.x) != 1:
            raise Unruled
        return Linear(call, push, pull)

    rule(*operations)(made)


class Unruled(Exception):
    """A rule does not cover this form of a call: the default rule takes it."""


class Pointwise(Rule):
    """y = f(x) entry by entry: ẏ = f' ẋ, x̄ = f' ȳ, bend = (ȳ f'') ẋ; f'' None: it is zero."""

    def __init__(self, call: Call, slope: Tensor | float, second: Any) -> None:
        super().__init__(call)
        self._slope, self._second = slope, second
        self.bends = second is not None
        self._bend: Any = None

    def push(self, tangents: Values) -> Tensor:
        assert tangents[0] is not None
        return tangents[0] * self._slope

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return [adjoint * self._slope]

    def keep(self, adjoint: Any) -> None:
        if self._second is not None:
            self._bend = adjoint * self._second()

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        assert tangents[0] is not None
        return [tangents[0] * self._bend]

    def pull2(self, adjoint: Any, tangents: Values, needs: Sequence[bool]) -> Values:
        if adjoint is None or tangents[0] is None or self._bend is None:
            return super().pull2(adjoint, tangents, needs)
        return [torch.addcmul(adjoint * self._slope, tangents[0], self._bend)]


def pointwise(*operations: Any, slopes: Callable[[Call], tuple[Any, Any]]) -> None:
    """Declare functions of one entry: call → (f', a function giving f'' or None)."""

    def made(call: Call) -> Rule:
        if len(call.x) != 1 or call.x[0].shape != call.y.shape:
            raise Unruled
        slope, second = slopes(call)
        return Pointwise(call, slope, second)

    rule(*operations)(made)


class Bilinear(Rule):
    """y = a ∘ b: ẏ = ȧ ∘ b + a ∘ ḃ, and each pull with the partner's tangent is the other's bend.

    times(a, b), pull_a(ȳ, b), pull_b(ȳ, a) get everything with a leading axis, of K or of one.
    A factor that is constant makes the rule linear.
    """

    def __init__(self, call: Call, a: int = 0, b: int = 1) -> None:
        super().__init__(call)
        self._values = call.args[a].unsqueeze(0), call.args[b].unsqueeze(0)
        self._places = call.which(a), call.which(b)
        if sum(place is not None for place in self._places) < len(call.x):
            raise Unruled
        self.bends = None not in self._places
        self._adjoint: Tensor | None = None

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """a ∘ b."""
        raise TypeError(f"{type(self).__name__} has no product.")

    def pull_a(self, adjoint: Tensor, b: Tensor) -> Tensor:
        """ā of ȳ, of the shape that the walker sums to a's."""
        raise TypeError(f"{type(self).__name__} has no pull.")

    def pull_b(self, adjoint: Tensor, a: Tensor) -> Tensor:
        """b̄ of ȳ, of the shape that the walker sums to b's."""
        raise TypeError(f"{type(self).__name__} has no pull.")

    def _of(self, values: Values) -> list[Tensor | None]:
        return [None if place is None else values[place] for place in self._places]

    def push(self, tangents: Values) -> Tensor:
        a, b = self._of(tangents)
        first = None if a is None else self.times(a, self._values[1])
        second = None if b is None else self.times(self._values[0], b)
        if first is None or second is None:
            assert first is not None or second is not None
            return first if second is None else second  # type: ignore[return-value]
        return first.add_(second) if first.shape == second.shape else first + second

    def _both(
        self, adjoint: Tensor, a: Tensor | None, b: Tensor | None, needs: Sequence[bool]
    ) -> Values:
        """x̄ of both factors with these values of the partners; None where a partner is absent."""
        result: list[Tensor | None] = [None] * len(self.shapes)
        for place, partner, pull in (
            (self._places[0], b, self.pull_a),
            (self._places[1], a, self.pull_b),
        ):
            if place is None or not needs[place] or partner is None:
                continue
            part, before = summed_to(pull(adjoint, partner), self.shapes[place]), result[place]
            result[place] = part if before is None else before + part  # x ∘ x
        return result

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        a, b = self._values
        return self._both(adjoint, a, b, needs)

    def keep(self, adjoint: Any) -> None:
        if self.bends:
            self._adjoint = adjoint.unsqueeze(0)

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        assert self._adjoint is not None
        a, b = self._of(tangents)
        return self._both(self._adjoint, a, b, needs)

    def quadratic(self, tangents: Values) -> Tensor | None:
        """2 ⟨ȳ, ȧ ∘ ḃ⟩."""
        a, b = self._of(tangents)
        if not self.bends or a is None or b is None:
            return None
        assert self._adjoint is not None
        return 2 * (self.times(a, b) * self._adjoint).flatten(1).sum(1)
