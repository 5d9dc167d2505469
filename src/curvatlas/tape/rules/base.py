r"""What a rule is, and the kinds that most rules are.

For y = f(x₁, …) at its recorded arguments a rule gives, with K columns on a leading axis,

    push(ẋ)        ẏ = Σ ∂f/∂xᵢ ẋᵢ
    pull(ȳ)        x̄ᵢ = (∂f/∂xᵢ)ᵀ ȳ
    bend(ẋ)        Σⱼ ∂²⟨ȳ, f⟩/∂xᵢ∂xⱼ ẋⱼ     at the adjoint ȳ that was kept
    quadratic(ẋ)   Σᵢⱼ ẋᵢ ∂²⟨ȳ, f⟩/∂xᵢ∂xⱼ ẋⱼ   a number a column

so that the tangent of the adjoint is pull2 = pull(ȳ') + bend(ẋ). An absent tangent or adjoint is
``None`` and means zero; a rule may be called with some of them absent, never with all.

Kinds, each declared by one function of the call: ``linear`` (no bend), ``pointwise`` (f', f'' of
one or several arguments), ``Bilinear``, ``constant`` (derivative zero).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.record import Node, Ref, tree_map_refs

Values = Sequence[Tensor | None]  # one an input of the node
Change = Callable[[Tensor], Tensor]  # (K, …) → (K, …)


class Unruled(Exception):
    """A rule does not cover this form of a call: the default rule takes it."""


class Call:
    """A node at its recorded values.

    args: every argument of the operation in the order of its signature, those by name and those
    left out included;  x: the values that move, in the order of the inputs;  y: the first result
    that moves.
    """

    def __init__(self, node: Node, values: Sequence[Tensor]) -> None:
        self.node = node
        self._all = values
        self._places = {slot: i for i, slot in enumerate(node.inputs)}
        self._given = _in_order(node)
        self.x = [values[slot] for slot in node.inputs]
        self.args: tuple[Any, ...] = tree_map_refs(lambda ref: values[ref.slot], self._given)
        self.y = next(values[slot] for slot in node.outputs if slot is not None)

    def which(self, position: int) -> int | None:
        """The number of the input that stands at this place of the arguments, None: a constant."""
        return self.place_of(self._given[position])

    def place_of(self, argument: Any) -> int | None:
        """The number of the input that an argument is, None: a constant."""
        return self._places[argument.slot] if isinstance(argument, Ref) else None

    def places_in(self, position: int) -> list[int | None]:
        """The same for every element of a list of tensors."""
        return [self.place_of(argument) for argument in self._given[position]]

    def result(self, number: int) -> Tensor:
        """One of several results."""
        slot = self.node.outputs[number]
        if slot is not None:
            return self._all[slot]
        args, kwargs = self.node.with_values(self.x)
        again: Sequence[Tensor] = self.node.operation(*args, **kwargs)
        return again[number]  # indices do not move and are not kept by the record


def _in_order(node: Node) -> tuple[Any, ...]:
    """A node's arguments by position alone."""
    names, defaults = _signature(node.operation)
    if names is None:
        return tuple(node.args)
    rest = (
        node.kwargs.get(name, default)
        for name, default in zip(names[len(node.args) :], defaults[len(node.args) :], strict=True)
    )
    return (*node.args, *rest)


@functools.cache
def _signature(operation: Any) -> tuple[list[str] | None, list[Any]]:
    """Names and defaults of an operation's arguments."""
    if isinstance(operation, torch._ops.OpOverload):
        arguments = operation._schema.arguments
        return [a.name for a in arguments], [a.default_value for a in arguments]
    if operation in _SIGNATURES:
        parameters = inspect.signature(_SIGNATURES[operation]).parameters
        return list(parameters), [p.default for p in parameters.values()]
    return None, []


class Rule:
    """The base. bends: whether there is a second order; all_results: more than the first move."""

    bends = True
    all_results = False

    def __init__(self, call: Call) -> None:
        self.shapes = [tuple(x.shape) for x in call.x]
        self.shape = tuple(call.y.shape)
        self._passing: tuple[Values, Any] | None = None

    def shared(self, tangents: Values, make: Callable[[], Any]) -> Any:
        """What push makes of its tangents and pull2 needs of the same ones: made once for both."""
        passing, self._passing = self._passing, None
        if passing is not None and all(a is b for a, b in zip(passing[0], tangents, strict=True)):
            return passing[1]
        made = make()
        if any(t is not None for t in tangents):
            self._passing = tuple(tangents), made
        return made

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
        return [added(a, b) for a, b in zip(pulled, bent, strict=True)]

    def quadratic(self, tangents: Values) -> Tensor | None:
        if not self.bends:
            return None
        bent = self.bend(tangents, [t is not None for t in tangents])
        total: Tensor | None = None
        for b, t in zip(bent, tangents, strict=True):
            if b is not None and t is not None:
                total = added(total, dots(b, t))
        return total


Maker = Callable[[Call], Rule]
RULES: dict[Any, Maker] = {}
_SIGNATURES: dict[Any, Callable[..., None]] = {}


def rule(*operations: Any, signature: Callable[..., None] | None = None) -> Callable[[Any], Any]:
    """Register a maker of rules for operations; functions of Python state their signature."""

    def registered(maker: Any) -> Any:
        for operation in operations:
            RULES[operation] = maker
            if signature is not None:
                _SIGNATURES[operation] = signature
        return maker

    return registered


# --- shapes and sums ------------------------------------------------------------------------------


def from_end(dim: int, ndim: int) -> int:
    """A dimension as a negative number, which an axis of columns in front does not change."""
    return dim if dim < 0 else dim - max(ndim, 1)


def aligned(tangent: Tensor, ndim: int) -> Tensor:
    """(K, *shape) with axes of one behind K, so that it broadcasts against ``ndim`` axes."""
    missing = ndim - (tangent.ndim - 1)
    if missing <= 0:
        return tangent
    return tangent.reshape(tangent.shape[0], *(1,) * missing, *tangent.shape[1:])


def broadcast(values: Iterable[Any]) -> tuple[int, ...]:
    """The common shape of those that are tensors."""
    torch_: Any = torch  # not typed
    return tuple(torch_.broadcast_shapes(*(v.shape for v in values if isinstance(v, Tensor))))


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


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b, either of them absent."""
    return b if a is None else a if b is None else a + b


def dots(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ of every column: (K,)."""
    product = a * b
    return product if product.ndim == 1 else product.flatten(1).sum(1)


# --- linear ---------------------------------------------------------------------------------------


class Constant(Rule):
    """y does not change with x where it changes smoothly (rounding, signs, shapes)."""

    bends = False

    def push(self, tangents: Values) -> None:
        return None

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        return [None] * len(self.shapes)


class Linear(Rule):
    """y = Σᵢ Lᵢ xᵢ: ẏ = Σ Lᵢ ẋᵢ, x̄ᵢ = Lᵢᵀ ȳ.

    maps: (number of the input, Lᵢ, Lᵢᵀ), where an input stands at several places once for each.
    """

    bends = False

    def __init__(self, call: Call, maps: Sequence[tuple[int, Change, Change]]) -> None:
        super().__init__(call)
        self._maps = maps

    def push(self, tangents: Values) -> Tensor:
        total: Tensor | None = None
        for place, forward, _ in self._maps:
            tangent = tangents[place]
            if tangent is not None:
                total = added(total, forward(tangent))
        assert total is not None
        return total.expand(total.shape[0], *self.shape)

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        result: list[Tensor | None] = [None] * len(self.shapes)
        for place, _, backward in self._maps:
            if needs[place]:
                result[place] = added(result[place], backward(adjoint))
        return result


Part = tuple[Callable[[Call], Change], Callable[[Call], Change]]


def linear(
    *operations: Any,
    push: Callable[[Call], Change] | None = None,
    pull: Callable[[Call], Change] | None = None,
    parts: Mapping[int, Part] | None = None,
) -> None:
    """Declare linear operations: call → L and call → Lᵀ, of the first argument or of several.

    parts: position of the argument → the two. An argument that moves and is not named: no rule.
    """
    named = parts if parts is not None else {0: (push, pull)}

    def made(call: Call) -> Rule:
        maps = [
            (place, forward(call), backward(call))  # type: ignore[misc]
            for position, (forward, backward) in named.items()
            if (place := call.which(position)) is not None
        ]
        if len({place for place, *_ in maps}) < len(call.x):
            raise Unruled
        return Linear(call, maps)

    rule(*operations)(made)


def constant(*operations: Any) -> None:
    """Declare operations whose derivative is zero."""
    rule(*operations)(Constant)


# --- entry by entry -------------------------------------------------------------------------------

Firsts = Mapping[int, Any]  # position → ∂f/∂xᵢ
Seconds = Mapping[tuple[int, int], Callable[[], Any]]  # positions i ≤ j → () → ∂²f/∂xᵢ∂xⱼ


class Pointwise(Rule):
    """y = f(x₁, …) entry by entry, broadcast: ẏ = Σ fᵢ ẋᵢ, x̄ᵢ = ȳ fᵢ, bendᵢ = Σⱼ ȳ fᵢⱼ ẋⱼ.

    seconds: what is not named is zero; the functions are called once, when ȳ is known. Where
    ``share`` is given the result is the sum of all entries times that number (losses).
    """

    def __init__(
        self,
        call: Call,
        firsts: Firsts,
        seconds: Seconds,
        share: float | None = None,
    ) -> None:
        super().__init__(call)
        self._places = {i: place for i in firsts if (place := call.which(i)) is not None}
        if len(set(self._places.values())) < len(call.x):
            raise Unruled
        self._firsts: dict[int, Any] = {}
        for position, place in self._places.items():
            before = self._firsts.get(place)
            first = firsts[position]
            self._firsts[place] = first if before is None else before + first
        self._seconds = {
            (self._places[i], self._places[j], i != j): second
            for (i, j), second in seconds.items()
            if i in self._places and j in self._places
        }
        self.bends = bool(self._seconds)
        self._bends: dict[tuple[int, int], Any] = {}  # by places, symmetric
        self._share = share
        self._wide = self.shape if share is None else broadcast(call.args)

    def push(self, tangents: Values) -> Tensor:
        total: Tensor | None = None
        for place, first in self._firsts.items():
            tangent = tangents[place]
            if tangent is not None:
                tangent = aligned(tangent, len(self._wide))
                total = (
                    _times(tangent, first)
                    if total is None
                    else torch.addcmul(total, tangent, first)
                    if _is_tensor(first)
                    else torch.add(total, tangent, alpha=first)
                )
        assert total is not None
        columns = total.shape[0]
        if self._share is None:
            return total.expand(columns, *self.shape)
        total = total.expand(columns, *self._wide).reshape(columns, -1).sum(1) * self._share
        return total.reshape(columns, *self.shape)

    def _entries(self, adjoint: Tensor) -> Tensor:
        """ȳ of every entry."""
        if self._share is None:
            return adjoint
        return adjoint.reshape(-1, *(1,) * len(self._wide)) * self._share

    def _to(self, place: int, part: Tensor) -> Tensor:
        if self._share is not None:
            part = part.expand(part.shape[0], *self._wide)
        return summed_to(part, self.shapes[place])

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        adjoint = self._entries(adjoint)
        return [
            self._to(place, _times(adjoint, self._firsts[place])) if needed else None
            for place, needed in enumerate(needs)
        ]

    def keep(self, adjoint: Any) -> None:
        adjoint, self._bends = self._entries(adjoint.unsqueeze(0)).squeeze(0), {}
        for (i, j, mixed), second in self._seconds.items():
            bend = _times(adjoint, second())
            for pair in ((i, j), (j, i)) if mixed else ((i, j),):
                before = self._bends.get(pair)
                self._bends[pair] = bend if before is None else before + bend

    def bend(self, tangents: Values, needs: Sequence[bool]) -> Values:
        return self.pull2(None, tangents, needs)

    def pull2(self, adjoint: Any, tangents: Values, needs: Sequence[bool]) -> Values:
        moved = [None if t is None else aligned(t, len(self._wide)) for t in tangents]
        adjoint = None if adjoint is None else self._entries(adjoint)
        result: list[Tensor | None] = []
        for place, needed in enumerate(needs):
            total = None
            if needed:
                total = None if adjoint is None else _times(adjoint, self._firsts[place])
                for other, tangent in enumerate(moved):
                    bend = self._bends.get((place, other))
                    if bend is not None and tangent is not None:
                        total = (
                            tangent * bend if total is None else torch.addcmul(total, tangent, bend)
                        )
            result.append(None if total is None else self._to(place, total))
        return result

    def quadratic(self, tangents: Values) -> Tensor | None:
        """Σᵢⱼ ⟨ȳ fᵢⱼ, ẋᵢ ẋⱼ⟩."""
        total: Tensor | None = None
        for (i, j), bend in self._bends.items():
            first, second = tangents[i], tangents[j]
            if i <= j and first is not None and second is not None:
                n = len(self._wide)
                part = aligned(first, n) * bend
                term = dots(part.expand(-1, *self._wide), aligned(second, n))
                total = added(total, term if i == j else 2 * term)
        return total


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _times(a: Tensor, factor: Any) -> Tensor:
    result: Tensor = a if not _is_tensor(factor) and factor == 1 else a * factor
    return result


def pointwise(*operations: Any, slopes: Callable[[Call], tuple[Any, Any]]) -> None:
    """Declare functions of one entry: call → (f', a function giving f'' or None)."""

    def made(call: Call) -> Rule:
        first, second = slopes(call)
        return Pointwise(call, {0: first}, {} if second is None else {(0, 0): second})

    rule(*operations)(made)


def entrywise(
    *operations: Any,
    slopes: Callable[[Call], tuple[Firsts, Seconds]],
    share: Callable[[Call], float | None] = lambda call: None,
) -> None:
    """Declare functions of several entries: call → (fᵢ by position, functions giving fᵢⱼ)."""
    rule(*operations)(lambda call: Pointwise(call, *slopes(call), share(call)))


# --- bilinear -------------------------------------------------------------------------------------


class Bilinear(Rule):
    """y = α a ∘ b + β c: ẏ = α (ȧ ∘ b + a ∘ ḃ) + β ċ; a pull with the partner's tangent is a bend.

    times(a, b), pull_a(ȳ, b), pull_b(ȳ, a) get everything with a leading axis, of K or of one.
    A factor that is constant makes the rule linear.
    """

    def __init__(
        self,
        call: Call,
        a: int = 0,
        b: int = 1,
        c: int | None = None,
        *,
        alpha: float = 1,
        beta: float = 1,
    ) -> None:
        super().__init__(call)
        self._values = call.args[a].unsqueeze(0), call.args[b].unsqueeze(0)
        self._places = call.which(a), call.which(b)
        self._c = None if c is None else call.which(c)
        if len({p for p in (*self._places, self._c) if p is not None}) < len(call.x):
            raise Unruled
        self._alpha, self._beta = alpha, beta
        self.bends = None not in self._places
        self._adjoint: Tensor | None = None

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """a ∘ b."""
        raise TypeError(f"{type(self).__name__} has no product.")

    def pull_a(self, adjoint: Tensor, b: Tensor) -> Tensor:
        """ā of ȳ, of a's shape or one that was broadcast from it."""
        raise TypeError(f"{type(self).__name__} has no pull.")

    def pull_b(self, adjoint: Tensor, a: Tensor) -> Tensor:
        """b̄ of ȳ, of b's shape or one that was broadcast from it."""
        raise TypeError(f"{type(self).__name__} has no pull.")

    def push_c(self, c: Tensor) -> Tensor:
        """ċ where it is added."""
        return aligned(c, len(self.shape)).expand(c.shape[0], *self.shape)

    def pull_c(self, adjoint: Tensor) -> Tensor:
        """c̄ of ȳ."""
        assert self._c is not None
        return summed_to(adjoint, self.shapes[self._c])

    def _of(self, values: Values) -> list[Tensor | None]:
        return [None if place is None else values[place] for place in self._places]

    def push(self, tangents: Values) -> Tensor:
        a, b = self._of(tangents)
        total = None if a is None else self.times(a, self._values[1])
        if b is not None:
            part = self.times(self._values[0], b)
            total = part if total is None else total.add_(part)
        if total is not None:
            total = _times(total, self._alpha)
        c = None if self._c is None else tangents[self._c]
        if c is not None:
            wide = self.push_c(c)
            total = (
                _times(wide, self._beta)
                if total is None
                else torch.add(total, wide, alpha=self._beta)
            )
        assert total is not None
        return total

    def _both(
        self, adjoint: Tensor, a: Tensor | None, b: Tensor | None, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """x̄ of both factors with these values of the partners; None where a partner is absent."""
        result: list[Tensor | None] = [None] * len(self.shapes)
        for place, partner, pull in (
            (self._places[0], b, self.pull_a),
            (self._places[1], a, self.pull_b),
        ):
            if place is None or not needs[place] or partner is None:
                continue
            part = summed_to(pull(adjoint, partner), self.shapes[place])
            result[place] = added(result[place], part)  # twice for x ∘ x
        return result

    def pull(self, adjoint: Any, needs: Sequence[bool]) -> Values:
        a, b = self._values
        result = self._both(_times(adjoint, self._alpha), a, b, needs)
        if self._c is not None and needs[self._c]:
            result[self._c] = added(result[self._c], _times(self.pull_c(adjoint), self._beta))
        return result

    def keep(self, adjoint: Any) -> None:
        self._adjoint = _times(adjoint.unsqueeze(0), self._alpha)

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
        return 2 * dots(self.times(a, b), self._adjoint)
