r"""From a model's inputs to its first block: x = norm(Σ_s source_s), every source linear in θ.

Token, position and type embeddings, class tokens and patch projections are sums of such sources:

    lookup      x_i += c E[index_i]                 R ∂ℓ/∂E[r] = c Σ_{i: index_i = r} Rδ_i
    projection  x_i += W p_i + b                    R ∂ℓ/∂W = Σ_i Rδ_i p_iᵀ

Their tangents are the same maps of the parameters' tangents. A stem of another form is left to
autograd (``AutogradStem``). Parameters go by their names in the model; tangents are (K, *shape).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from curvatlas.engines.tangent.linear import BackwardPass, Buffers, stand_in
from curvatlas.engines.tangent.norm import Normalization, NormTangent
from curvatlas.engines.tangent.remainder import Remainder
from curvatlas.layers.structure import Norm


@dataclass
class Slots:
    """Where the rates of the wanted parameters go: name → (K, *shape), written or added to."""

    into: Mapping[str, Tensor]
    accumulate: bool = False  # all of them hold something already
    written: set[str] = field(default_factory=set)

    def to_add(self, name: str) -> Tensor:
        """The slot of a parameter that is added to; zeros where nothing was written."""
        slot = self.into[name]
        if not (self.accumulate or name in self.written):
            slot.zero_()
            self.written.add(name)
        return slot

    def add(self, rates: Mapping[str, Tensor], *, alpha: float = 1.0) -> None:
        """Take rates (K, *shape) of some parameters."""
        for name, rate in rates.items():
            if name in self.into:
                self.to_add(name).add_(rate, alpha=alpha)

    def finish(self) -> None:
        """Whatever nothing was written to is zero."""
        for name in self.into:
            self.to_add(name)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lookup:
    """Rows of a table E (R, d), its parameter in any shape, added at the tokens of ``places``."""

    parameter: str
    table: Tensor  # (R, d)
    index: Tensor  # (n·L',) rows of every sample's tokens, or (L',) shared by the samples
    places: slice = field(default_factory=lambda: slice(None))
    scale: float = 1.0
    padding: int | None = None  # a row that is read and, as in autograd, never moves

    @property
    def names(self) -> tuple[str, ...]:
        return (self.parameter,)

    def add_value(self, x: Tensor) -> None:
        """x (n, L, d) += c E[index]."""
        rows = self.table[self.index]
        x[:, self.places].add_(self._shaped(rows, x[:, self.places]), alpha=self.scale)

    def without_values(self) -> Lookup:
        """The same for tangents, which need no value of the table."""
        return replace(self, table=stand_in(self.table))

    def push(self, dots: Mapping[str, Tensor], x_dot: Tensor) -> None:
        """The same of tangents: x_dot (K, n, L, d)."""
        moved = dots[self.parameter].reshape(len(x_dot), *self.table.shape)
        rows = moved.index_select(1, self.index)
        if self.padding is not None:
            rows[:, self.index == self.padding] = 0.0
        into = x_dot[:, :, self.places]
        into.add_(self._shaped(rows, into), alpha=self.scale)

    def pull(self, rate: Tensor, slots: Slots) -> None:
        """rate (K, n, L, d)."""
        if self.parameter not in slots.into:
            return
        slot = slots.to_add(self.parameter).view(len(rate), *self.table.shape)
        part = rate[:, :, self.places]
        if len(self.index) == part.shape[2]:
            part = part.sum(1)
        rows = part.reshape(len(rate), -1, part.shape[-1])
        if self.padding is not None:
            rows = rows.masked_fill((self.index == self.padding)[:, None], 0.0)
        slot.index_add_(1, self.index, rows, alpha=self.scale)

    def _shaped(self, rows: Tensor, like: Tensor) -> Tensor:
        """(…, n·L' or L', d) as it meets (…, n, L', d)."""
        if len(self.index) == like.shape[-2]:
            return rows.unsqueeze(-3)
        return rows.view(like.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """Patches p (n, L', in) through a linear map, at the tokens of ``places``."""

    weight: str
    bias: str | None
    matrix: Tensor  # (d, in), the parameter in any shape
    shift: Tensor | None  # (d,)
    patches: Tensor
    places: slice = field(default_factory=lambda: slice(None))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def add_value(self, x: Tensor) -> None:
        y = self.patches @ self.matrix.T
        x[:, self.places] += y if self.shift is None else y + self.shift

    def without_values(self) -> Projection:
        """The same for tangents, which need no value of the map."""
        shift = None if self.shift is None else stand_in(self.shift)
        return replace(self, matrix=stand_in(self.matrix), shift=shift)

    def push(self, dots: Mapping[str, Tensor], x_dot: Tensor) -> None:
        into, count = x_dot[:, :, self.places], len(x_dot)
        if self.weight in dots:
            moved = dots[self.weight].reshape(count, 1, *self.matrix.shape)
            into += self.patches @ moved.mT
        if self.bias is not None and self.bias in dots:
            into += dots[self.bias].view(count, 1, 1, -1)

    def pull(self, rate: Tensor, slots: Slots) -> None:
        part, count = rate[:, :, self.places], len(rate)
        if self.weight in slots.into:
            slot = slots.to_add(self.weight).view(count, *self.matrix.shape)
            rows = part.reshape(count, -1, part.shape[-1])
            patches = self.patches.reshape(1, -1, self.patches.shape[-1]).expand(count, -1, -1)
            slot.baddbmm_(rows.mT, patches)
        if self.bias is not None and self.bias in slots.into:
            slots.to_add(self.bias).add_(part.sum((1, 2)))


Source = Lookup | Projection


@dataclass(frozen=True, kw_only=True, eq=False)
class StemNorm:
    """A norm outside the blocks, behind a sum, its parameters by their names in the model."""

    norm: Norm
    eps: float
    parameters: Mapping[str, str]  # "{name}_weight", "{name}_bias" → parameter
    weights: Mapping[str, Tensor]


class Stem:
    """x = norm(base + Σ sources); ``base`` (n, L, d) is what depends on no parameter.

    ``name``: the prefix of its scratch, and of its norm's weights.
    """

    def __init__(
        self,
        base: Tensor,
        sources: Sequence[Source],
        norm: StemNorm | None = None,
        *,
        name: str = "stem",
    ) -> None:
        self._name = name
        x = base.clone() if sources else base
        for source in sources:
            source.add_value(x)
        self.sources, self._plan = tuple(source.without_values() for source in sources), norm
        self.shape = x.shape
        self.norm: Normalization | None = None
        if norm is not None:
            tokens = x.reshape(-1, x.shape[-1])
            self.norm = Normalization(name, norm.weights, tokens, norm=norm.norm, eps=norm.eps)
            x = self.norm.value(Buffers(keep=False)).view(x.shape)
        self.output = x  # (n, L, d)

    @property
    def names(self) -> frozenset[str]:
        """The parameters in here."""
        own = self._plan.parameters.values() if self._plan is not None else ()
        return frozenset(own).union(*(source.names for source in self.sources))

    def record(self, delta: Tensor) -> None:
        """Keep δ_x (1, N, d)."""
        if self.norm is not None:
            self.norm.pull(delta, None, BackwardPass(Buffers(keep=False), frozenset(), record=True))

    def push(
        self, dots: Mapping[str, Tensor], space: Buffers
    ) -> tuple[Tensor | None, NormTangent | None]:
        """ẋ (K, n, L, d), None: zero, and what ``pull`` needs."""
        count = _directions(dots, self.names)
        if count is None:
            return None, None
        moved: Tensor | None = None
        moving = [source for source in self.sources if not dots.keys().isdisjoint(source.names)]
        if moving:
            key = f"{self._name}.x"
            moved = space.take(key, count, *self.shape, like=self.output).zero_()
            for source in moving:
                source.push(dots, moved)
        if self.norm is None or self._plan is None:
            return moved, None
        own = {ours: dots[name] for ours, name in self._plan.parameters.items() if name in dots}
        flat = None if moved is None else moved.flatten(1, 2)
        result, state = self.norm.push(flat, own, space)
        return (None if result is None else result.view(count, *self.shape)), state

    def pull(
        self, rate: Tensor | None, state: NormTangent | None, slots: Slots, space: Buffers
    ) -> None:
        """Add the parameters' rates, from Rδ_x (K, N, d)."""
        if self.norm is not None and self._plan is not None:
            names = {ours: n for ours, n in self._plan.parameters.items() if n in slots.into}
            backward = BackwardPass(space, frozenset(names))
            rate = self.norm.pull(rate, state, backward)
            slots.add({names[ours]: value for ours, value in backward.rates.items()})
        if rate is not None:
            shaped = rate.view(-1, *self.shape)
            for source in self.sources:
                source.pull(shaped, slots)


class AutogradStem:
    """A stem of another form: its output x (n, L, d), in the graph of ``inputs`` (leaves)."""

    def __init__(self, x: Tensor, inputs: Mapping[str, Tensor]) -> None:
        self._x, self._inputs = x, inputs
        self.output, self.shape = x.detach(), x.shape
        self._remainder: Remainder | None = None
        self.names: frozenset[str] = frozenset(inputs)

    def record(self, delta: Tensor) -> None:
        """Keep the graph at δ_x (1, N, d)."""
        with torch.enable_grad():
            self._remainder = Remainder([self._x], self._inputs, [delta.view(self.shape)])
        self.names = self._remainder.names

    def graph(self) -> list[Tensor]:
        """What holds the kept graph."""
        return [] if self._remainder is None else self._remainder.roots()

    def push(
        self, dots: Mapping[str, Tensor], space: Buffers
    ) -> tuple[Tensor | None, Mapping[str, Tensor]]:
        assert self._remainder is not None
        own = {name: dot for name, dot in dots.items() if name in self.names}
        moved, bent = self._remainder.push(own, tuple(self.names), bends=True)
        return moved[0], bent

    def pull(
        self,
        rate: Tensor | None,
        state: Mapping[str, Tensor] | None,
        slots: Slots,
        space: Buffers,
    ) -> None:
        assert self._remainder is not None
        if state is not None:
            slots.add(state)
        if rate is not None:
            rows = [name for name in self.names if name in slots.into]
            slots.add(self._remainder.pull([rate.view(-1, *self.shape)], rows))


def _directions(dots: Mapping[str, Tensor], names: Iterable[str]) -> int | None:
    """K of the tangents of these parameters, None: none of them moves."""
    return next((len(dots[name]) for name in names if name in dots), None)
