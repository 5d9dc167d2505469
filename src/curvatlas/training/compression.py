r"""Which layers? What removing or rounding costs by layer, role and head, and bits for a size.

A change δ of some weights costs L(θ + δ) − L(θ), measured, beside gᵀδ + ½ δᵀHδ, predicted. Bits are
given out by ½ δᵀH_oδ, which is never negative: every part starts with the fewest, and the next bits
go where they save most a bit, along the lower convex hull of cost against size, until the size is
reached (the best allocation up to the last step).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvatlas.anatomy import Slice
from curvatlas.errors import ProblemError
from curvatlas.operators import GaussNewton, Hessian
from curvatlas.problem import Problem
from curvatlas.problem.evaluation import evaluated
from curvatlas.results import Result
from curvatlas.training.pruning import PRUNED_ROLES, Pruning, round_to, value_at

By = Literal["part", "layer", "role", "head"]
GROUPINGS: tuple[By, ...] = ("part", "layer", "role", "head")


@dataclass(frozen=True, kw_only=True)
class PartCost(Result):
    """A group of weights, how much of it changes, and what that does to the loss."""

    name: str  # "blocks.0.query", "blocks.0", "query", "blocks.0.query.head1"
    layer: int | None
    role: str | None
    weights: int
    bits: int | None  # None: pruned, not rounded
    changed: float  # share of the weights that is removed or not exactly representable
    predicted: float  # gᵀδ + ½ δᵀHδ for this group alone
    measured: float  # L(θ + δ) − L(θ) for this group alone


@dataclass(frozen=True, kw_only=True)
class CostTable(Result):
    """The cost of every group alone, and of all of them at once."""

    what: str  # "obd at 50 %", "rounding"
    by: str
    rows: tuple[PartCost, ...]
    loss: float
    predicted: float | None  # of all groups at once, where that is one change
    measured: float | None

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        bits = any(row.bits is not None for row in self.rows)
        lines = [
            f"{self.what}, by {self.by}; loss {self.loss:.5g}",
            f"{'':{width}s}{'  bits' if bits else ''}  {'weights':>9s}  {'changed':>7s}  "
            f"{'predicted':>10s}  {'measured':>10s}",
        ]
        for row in self.rows:
            bit = f"  {row.bits:4d}" if row.bits is not None else ""
            lines.append(
                f"{row.name:{width}s}{bit}  {row.weights:9,d}  {row.changed:7.1%}  "
                f"{row.predicted:+10.3g}  {row.measured:+10.3g}"
            )
        if self.predicted is not None and self.measured is not None:
            lines.append(
                f"all at once: predicted {self.predicted:+.3g}, measured {self.measured:+.3g}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class BitAllocation(Result):
    """Bits for every part of the weights within a size, and what they cost."""

    average: float  # bits a weight that were asked for
    used: float  # bits a weight that are used
    choices: tuple[int, ...]
    rows: tuple[PartCost, ...]  # predicted and measured of each part alone at its bits
    weights: int
    predicted: float  # gᵀδ + ½ δᵀHδ of all parts at once
    measured: float
    uniform_bits: int  # the most bits that all parts can have alike within the size
    uniform_measured: float
    loss: float
    rounded: dict[str, Tensor]  # parameter name → values after rounding

    def apply(self, model: nn.Module) -> None:
        """Write the rounded weights into the model."""
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self.rounded.items():
                named[name].copy_(value)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [
            f"{self.used:.2f} bits each (at most {self.average:g}) for {self.weights:,} weights: "
            f"loss {self.loss:.5g}, rise predicted {self.predicted:+.3g}, measured "
            f"{self.measured:+.3g}; {self.uniform_bits} bits for all {self.uniform_measured:+.3g}"
        ]
        lines += [
            f"  {row.name:{width}s}  {row.bits:2d} bits  {row.weights:9,d}  predicted "
            f"{row.predicted:+9.3g}  measured {row.measured:+9.3g}"
            for row in self.rows
        ]
        return "\n".join(lines)


# --- groups of weights ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    name: str
    layer: int | None
    role: str | None
    places: Tensor  # positions in the flat vector


def _pieces(problem: Problem, roles: Sequence[str]) -> list[Slice]:
    pieces = [piece for piece in problem.anatomy.slices if piece.role in roles]
    if not pieces:
        present = ", ".join(sorted(set(problem.anatomy.roles)))
        raise ProblemError(f"no parameter has one of the roles {tuple(roles)}: it has {present}.")
    return pieces


def _groups(problem: Problem, pieces: Sequence[Slice], by: str) -> list[_Group]:
    if by not in GROUPINGS:
        raise ValueError(f"by is one of {', '.join(GROUPINGS)}, got {by!r}.")
    if by == "head":
        parts = []
        for piece in pieces:
            try:
                parts += list(problem.anatomy.heads(piece))
            except ValueError:  # a feed-forward part, or an attention of unknown heads
                parts.append(piece)
        pieces = parts
    members: dict[str, list[Slice]] = {}
    for piece in pieces:
        outside = "outside the blocks"
        layer = outside if piece.layer is None else f"blocks.{piece.layer}"
        key = {"layer": layer, "role": piece.role}.get(by, piece.name)
        members.setdefault(key, []).append(piece)
    return [
        _Group(
            name,
            same[0].layer if by != "role" else None,
            same[0].role if by != "layer" else None,
            torch.cat([piece.indices for piece in same]).to(problem.device),
        )
        for name, same in members.items()
    ]


class _Costs:
    """Predicted and measured rise of the loss for changes of the weights."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.theta = problem, problem.parameters
        self.gradient, self.loss = problem.gradient(), problem.value()
        self.hessian = Hessian(problem)

    def of(self, delta: Tensor) -> tuple[float, float]:
        """(gᵀδ + ½ δᵀHδ, L(θ + δ) − L(θ))."""
        predicted = self.gradient @ delta + 0.5 * (delta @ (self.hessian @ delta))
        return float(predicted), value_at(self.problem, self.theta + delta) - self.loss

    def row(self, group: _Group, delta: Tensor, bits: int | None) -> PartCost:
        """The group's own part of a change, as a row of the table."""
        alone = torch.zeros_like(delta)
        alone[group.places] = delta[group.places]
        predicted, measured = self.of(alone)
        return PartCost(
            name=group.name,
            layer=group.layer,
            role=group.role,
            weights=len(group.places),
            bits=bits,
            changed=float((alone[group.places] != 0).to(torch.float32).mean()),
            predicted=predicted,
            measured=measured,
        )


def _rounding(pieces: Sequence[Slice], theta: Tensor, bits: int) -> Tensor:
    """δ that rounds the pieces to so many bits, one scale a row."""
    delta = torch.zeros_like(theta)
    for piece in pieces:
        weights = piece.view(theta)
        delta[piece.indices.to(theta.device)] = (round_to(weights, bits) - weights).reshape(-1)
    return delta


def _check_bits(bits: Sequence[int]) -> tuple[int, ...]:
    if not bits or any(bit < 2 for bit in bits):
        raise ValueError(f"at least 2 bits are needed for a sign and a step, got {tuple(bits)}.")
    return tuple(sorted(set(bits)))


# --- tables --------------------------------------------------------------------------------------


@evaluated
def pruning_costs(
    model: nn.Module, loss: Any, data: Any, pruning: Pruning, *, by: By = "part"
) -> CostTable:
    """What the removals of a pruning cost in every layer, role, head or part, each alone."""
    problem = Problem(model, loss, data, parameters=list(pruning.weights))
    pieces = _pieces(problem, tuple(pruning.role_sparsity))
    costs = _Costs(problem)
    new = torch.cat([pruning.weights[name].reshape(-1) for name in problem.layout.names])
    delta = new.to(costs.theta) - costs.theta
    rows = [costs.row(group, delta, None) for group in _groups(problem, pieces, by)]
    predicted, measured = costs.of(delta)
    return CostTable(
        what=f"{pruning.method} at {pruning.sparsity:.0%}",
        by=by,
        rows=tuple(rows),
        loss=costs.loss,
        predicted=predicted,
        measured=measured,
    )


@evaluated
def rounding_costs(
    model: nn.Module,
    loss: Any,
    data: Any,
    *,
    bits: Sequence[int] = (8, 4, 3),
    by: By = "part",
    roles: Sequence[str] = PRUNED_ROLES,
) -> CostTable:
    """What rounding every layer, role, head or part to each number of bits costs, each alone."""
    chosen = _check_bits(bits)
    problem = Problem(model, loss, data)
    pieces = _pieces(problem, roles)
    costs = _Costs(problem)
    groups = _groups(problem, pieces, by)
    deltas = {bit: _rounding(pieces, costs.theta, bit) for bit in chosen}
    rows = [costs.row(group, deltas[bit], bit) for group in groups for bit in reversed(chosen)]
    return CostTable(
        what="rounding", by=by, rows=tuple(rows), loss=costs.loss, predicted=None, measured=None
    )


# --- bits for a size -----------------------------------------------------------------------------


def give_out_bits(
    costs: Mapping[str, Mapping[int, float]], sizes: Mapping[str, int], average: float
) -> dict[str, int]:
    """Part → bits, so that Σ bits · size stays within average · Σ size and Σ cost is small.

    costs: part → bits → cost. Greedy along each part's lower convex hull: optimal for the sizes at
    which a step ends, at most one step away elsewhere.
    """
    chosen = {part: min(options) for part, options in costs.items()}
    room = average * sum(sizes.values()) - sum(chosen[p] * sizes[p] for p in chosen)
    if room < 0:
        fewest = max(chosen.values())
        raise ValueError(f"{average:g} bits a weight is less than the {fewest} bits offered.")
    while True:
        steps = []
        for part, options in costs.items():
            now = chosen[part]
            for bits in sorted(b for b in options if b > now):
                price = (bits - now) * sizes[part]
                saved = (options[now] - options[bits]) / price
                if price <= room and saved > 0:
                    steps.append((saved, -price, part, bits))
        if not steps:
            return chosen
        _, price, part, bits = max(steps)
        room += price
        chosen[part] = bits


@evaluated
def allocate_bits(
    model: nn.Module,
    loss: Any,
    data: Any,
    *,
    average: float = 4.0,
    bits: Sequence[int] = (2, 3, 4, 6, 8),
    roles: Sequence[str] = PRUNED_ROLES,
) -> BitAllocation:
    """Bits for every part (a role of a layer) so that the weights take ``average`` bits each.

    Cost of a part at so many bits: ½ δᵀH_oδ, one product each; the model is left as it is.
    """
    choices = _check_bits(bits)
    problem = Problem(model, loss, data)
    pieces = _pieces(problem, roles)
    costs = _Costs(problem)
    groups = _groups(problem, pieces, "part")
    deltas = {bit: _rounding(pieces, costs.theta, bit) for bit in choices}
    outer = GaussNewton(problem)
    table: dict[str, dict[int, float]] = {}
    for group in groups:
        columns = torch.zeros(
            len(costs.theta), len(choices), dtype=costs.theta.dtype, device=costs.theta.device
        )
        for place, bit in enumerate(choices):
            columns[group.places, place] = deltas[bit][group.places]
        curved = 0.5 * (columns * (outer @ columns)).sum(0)
        table[group.name] = dict(zip(choices, curved.clamp_min(0).tolist(), strict=True))
    sizes = {group.name: len(group.places) for group in groups}
    chosen = give_out_bits(table, sizes, average)
    delta = torch.zeros_like(costs.theta)
    for group in groups:
        delta[group.places] = deltas[chosen[group.name]][group.places]
    predicted, measured = costs.of(delta)
    weights = sum(sizes.values())
    uniform = max(bit for bit in choices if bit <= average)
    new = problem.layout.split((costs.theta + delta).unsqueeze(1))
    touched = {piece.parameter for piece in pieces}
    return BitAllocation(
        average=float(average),
        used=sum(chosen[name] * size for name, size in sizes.items()) / weights,
        choices=choices,
        rows=tuple(costs.row(group, delta, chosen[group.name]) for group in groups),
        weights=weights,
        predicted=predicted,
        measured=measured,
        uniform_bits=uniform,
        uniform_measured=value_at(problem, costs.theta + deltas[uniform]) - costs.loss,
        loss=costs.loss,
        rounded={
            name: piece.squeeze(0).clone()
            for name, piece in zip(problem.layout.names, new, strict=True)
            if name in touched
        },
    )
