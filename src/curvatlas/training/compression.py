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
from curvatlas.operators import GaussNewton
from curvatlas.problem import Problem
from curvatlas.problem.evaluation import evaluated
from curvatlas.results import Result
from curvatlas.training.pruning import (
    PRUNED_ROLES,
    ChangedWeights,
    Changes,
    Pruning,
    check_bits,
    named_weights,
    places_of,
    pruning_problem,
    rounding_of,
    step_sizes,
)
from curvatlas.training.surgeon import BlockCurvature, in_blocks, rounded_in_turn

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


def _row(changes: Changes, group: _Group, delta: Tensor, bits: int | None) -> PartCost:
    """The group's own part of a change, as a row of the table."""
    alone = torch.zeros_like(delta)
    alone[group.places] = delta[group.places]
    return PartCost(
        name=group.name,
        layer=group.layer,
        role=group.role,
        weights=len(group.places),
        bits=bits,
        changed=float((alone[group.places] != 0).to(torch.float32).mean()),
        predicted=sum(changes.terms(alone)),
        measured=changes.rise(alone),
    )


# --- tables --------------------------------------------------------------------------------------


@evaluated
def pruning_costs(
    model: nn.Module, loss: Any, data: Any, pruning: Pruning, *, by: By = "part"
) -> CostTable:
    """What the removals of a pruning cost in every layer, role, head or part, each alone."""
    problem, pieces = pruning_problem(model, loss, data, tuple(pruning.role_sparsity))
    costs = Changes(problem)
    new = torch.cat([pruning.weights[name].reshape(-1) for name in problem.layout.names])
    delta = new.to(costs.theta) - costs.theta
    rows = [_row(costs, group, delta, None) for group in _groups(problem, pieces, by)]
    return CostTable(
        what=f"{pruning.method} at {pruning.sparsity:.0%}",
        by=by,
        rows=tuple(rows),
        loss=costs.loss,
        predicted=sum(costs.terms(delta)),
        measured=costs.rise(delta),
    )


@evaluated
def rounding_costs(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    bits: Sequence[int] = (8, 4, 3),
    group: int | None = None,
    by: By = "part",
    roles: Sequence[str] = PRUNED_ROLES,
) -> CostTable:
    """What rounding every layer, role, head or part to each number of bits costs, each alone.

    group: inputs of an output that share a scale; None: one scale a row.
    """
    chosen = check_bits(bits, group)
    problem, pieces = pruning_problem(model, loss, data, roles)
    costs = Changes(problem)
    deltas = {bit: rounding_of(pieces, costs.theta, bit, group) for bit in chosen}
    rows = [
        _row(costs, members, deltas[bit], bit)
        for members in _groups(problem, pieces, by)
        for bit in reversed(chosen)
    ]
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
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    average: float = 4.0,
    bits: Sequence[int] = (2, 3, 4, 6, 8),
    group: int | None = None,
    roles: Sequence[str] = PRUNED_ROLES,
) -> BitAllocation:
    """Bits for every part (a role of a layer) so that the weights take ``average`` bits each.

    Cost of a part at so many bits: ½ δᵀH_oδ, one product each; the model is left as it is. Scales
    (one a row, or a ``group`` of inputs) come on top of the bits.
    """
    choices = check_bits(bits, group)
    problem, pieces = pruning_problem(model, loss, data, roles)
    costs = Changes(problem)
    groups = _groups(problem, pieces, "part")
    deltas = {bit: rounding_of(pieces, costs.theta, bit, group) for bit in choices}
    outer = GaussNewton(problem)
    table: dict[str, dict[int, float]] = {}
    for members in groups:
        columns = torch.zeros(
            len(costs.theta), len(choices), dtype=costs.theta.dtype, device=costs.theta.device
        )
        for place, bit in enumerate(choices):
            columns[members.places, place] = deltas[bit][members.places]
        curved = 0.5 * (columns * (outer @ columns)).sum(0)
        table[members.name] = dict(zip(choices, curved.clamp_min(0).tolist(), strict=True))
    sizes = {members.name: len(members.places) for members in groups}
    chosen = give_out_bits(table, sizes, average)
    delta = torch.zeros_like(costs.theta)
    for members in groups:
        delta[members.places] = deltas[chosen[members.name]][members.places]
    weights = sum(sizes.values())
    uniform = max(bit for bit in choices if bit <= average)
    return BitAllocation(
        average=float(average),
        used=sum(chosen[name] * size for name, size in sizes.items()) / weights,
        choices=choices,
        rows=tuple(_row(costs, one, delta, chosen[one.name]) for one in groups),
        weights=weights,
        predicted=sum(costs.terms(delta)),
        measured=costs.rise(delta),
        uniform_bits=uniform,
        uniform_measured=costs.rise(deltas[uniform]),
        loss=costs.loss,
        rounded=named_weights(problem, costs.theta + delta),
    )


# --- rounding by groups, so that the weights that are still free take up the errors ---------------


@dataclass(frozen=True, kw_only=True)
class Quantization(ChangedWeights):
    """All chosen weights rounded: to so many bits, a scale a group, nearest or by curvature."""

    bits: int
    group: int | None  # inputs of an output that share a scale; None: all of them
    rounding: str  # "nearest", "curvature"
    bits_per_weight: float  # with a scale of 16 bits a group

    @property
    def name(self) -> str:
        """Such as "4 bits, groups of 64, curvature"."""
        groups = "a scale a row" if self.group is None else f"groups of {self.group}"
        return f"{self.bits} bits, {groups}, {self.rounding}"

    def __str__(self) -> str:
        return f"{self.name} ({self.bits_per_weight:.2f} bits a weight): {self._prediction()}"


@dataclass(frozen=True, kw_only=True)
class QuantizationTable(Result):
    """Rounding to several bits, by several groups, nearest and by curvature, side by side."""

    rows: tuple[Quantization, ...]  # without their weights
    weights: int
    loss: float

    def __str__(self) -> str:
        lines = [
            f"rounding {self.weights:,} weights; loss {self.loss:.5g}",
            f"{'':34s}  bits each   predicted  {'interval':>22s}    measured",
        ]
        for row in self.rows:
            low, high = row.predicted_interval
            held = "" if row.in_quadratic_range else "  outside the quadratic range"
            lines.append(
                f"{row.name:34s}  {row.bits_per_weight:9.2f}  {row.predicted_rise:+10.3g}  "
                f"{f'[{low:.3g}, {high:.3g}]':>22s}  {row.rise:+10.3g}{held}"
            )
        return "\n".join(lines)


Rounding = Literal["nearest", "curvature"]
_SCALE_BITS = 16


class _Rounder:
    """Rounds a problem's weights in every way, on one curvature."""

    def __init__(self, problem: Problem, pieces: Sequence[Slice], options: dict[str, Any]) -> None:
        self.changes = Changes(problem)
        self._pieces, self._options = pieces, options
        self._curvature: BlockCurvature | None = None

    def fields(self, bits: int, group: int | None, rounding: str) -> tuple[Tensor, dict[str, Any]]:
        """The new weights (P,), and all other fields of ``Quantization``."""
        theta, problem = self.changes.theta, self.changes.problem
        check_bits([bits], group)
        if rounding not in ("nearest", "curvature"):
            raise ValueError(f"rounding is 'nearest' or 'curvature', got {rounding!r}.")
        if rounding == "nearest":
            new = theta + rounding_of(self._pieces, theta, bits, group)
        else:
            new = self._in_turn(bits, group)
        matrices = [places_of(piece, problem.device) for piece in self._pieces]
        scales = sum(len(m) * -(-m.shape[1] // (group or m.shape[1])) for m in matrices)
        return new, {
            "bits": bits,
            "group": group,
            "rounding": rounding,
            "bits_per_weight": bits + _SCALE_BITS * scales / sum(m.numel() for m in matrices),
            **self.changes.fields(new),
        }

    def _in_turn(self, bits: int, group: int | None) -> Tensor:
        theta, problem = self.changes.theta, self.changes.problem
        matrices = [places_of(piece, problem.device) for piece in self._pieces]
        if self._curvature is None:
            flat = [places.reshape(-1) for places in matrices]
            size = min(self._options.pop("block_size"), max(map(len, flat)))
            self._curvature = BlockCurvature(problem, in_blocks(flat, size), **self._options)
        steps = torch.ones_like(theta)
        for places in matrices:
            steps[places] = step_sizes(theta[places], bits, group)
        curvature, new = self._curvature, theta.clone()
        weights, distances = curvature.gather(theta), curvature.gather(steps, padding=1.0)
        for some, inverse in curvature.passes():
            weights[some] = rounded_in_turn(
                weights[some], inverse, distances[some], 2 ** (bits - 1) - 1
            )
        new[curvature.blocks[curvature.valid]] = weights[curvature.valid]
        return new


@evaluated
def quantize(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    bits: int = 4,
    group: int | None = 64,
    rounding: Rounding = "curvature",
    roles: Sequence[str] = PRUNED_ROLES,
    samples: int = 512,
    block_size: int = 128,
    damping: float = 1e-2,
    seed: int = 0,
    memory: int | str | None = None,
) -> Quantization:
    """Round all weights of these roles to ``bits``; the model is left as it is.

    group: inputs of an output that share a scale; None: one scale a row (per channel).
    rounding: "nearest", or "curvature": weight after weight, and the weights of the same block of
        the Gauss-Newton matrix that are not rounded yet move to where the loss rises least (as
        ``prune`` with "obs"; samples, block_size, damping, seed and memory are as there).
    """
    problem, pieces = pruning_problem(model, loss, data, roles)
    options = {"samples": samples, "block_size": block_size, "damping": damping, "seed": seed}
    rounder = _Rounder(problem, pieces, {**options, "memory": memory})
    new, fields = rounder.fields(bits, group, rounding)
    return Quantization(weights=named_weights(problem, new), **fields)


@evaluated
def quantization_table(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    bits: Sequence[int] = (8, 4),
    groups: Sequence[int | None] = (32, 64, 128, None),
    roundings: Sequence[Rounding] = ("nearest", "curvature"),
    roles: Sequence[str] = PRUNED_ROLES,
    samples: int = 512,
    block_size: int = 128,
    damping: float = 1e-2,
    seed: int = 0,
    memory: int | str | None = None,
) -> QuantizationTable:
    """``quantize`` for every number of bits, group and way of rounding, on one curvature."""
    problem, pieces = pruning_problem(model, loss, data, roles)
    options = {"samples": samples, "block_size": block_size, "damping": damping, "seed": seed}
    rounder = _Rounder(problem, pieces, {**options, "memory": memory})
    rows = [
        Quantization(weights={}, **rounder.fields(bit, group, rounding)[1])
        for bit in reversed(check_bits(bits))
        for group in groups
        for rounding in roundings
    ]
    return QuantizationTable(
        rows=tuple(rows), weights=sum(piece.size for piece in pieces), loss=rounder.changes.loss
    )
