r"""Trace and Frobenius norm of one role's diagonal block, for models too large for a whole map.

A role's block over all layers, H_rr, is met by probes that live in it alone:

    tr H_rr = E[uᵀ H_rr u],    ‖H_rr‖_F² = E‖H_rr u‖²,    Var[uᵀ H_rr u] = 2 ‖H_rr‖_F²    (u normal)

for H, H_o and H_f of the same products. The roles partition the parameters, so the traces add up to
those of the whole matrix, with errors that add in squares. Two vectors are held, whatever the size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from curvatlas.analysis.atlas_blocks import Block, blocks_of
from curvatlas.analysis.atlas_sketch import scatter
from curvatlas.anatomy import Slice
from curvatlas.operators.parts import PARTS, CurvatureParts
from curvatlas.problem import Problem
from curvatlas.progress import bar
from curvatlas.results import Result
from curvatlas.spectra.participation import Participation

_NORMAL = 1.96


@dataclass(frozen=True, kw_only=True)
class RoleCurvature(Result):
    """Quadratic forms and squared norms of every probe, for each of H, H_o and H_f."""

    role: str
    size: int  # parameters of the role over all layers
    forms: dict[str, tuple[float, ...]]  # part → uᵀ H_rr u of each probe
    squares: dict[str, tuple[float, ...]]  # part → ‖H_rr u‖² of each probe
    products: int

    def trace(self, part: str = "total") -> float:
        """tr H_rr."""
        return float(np.mean(self.forms[part]))

    def frobenius(self, part: str = "total") -> float:
        """‖H_rr‖_F."""
        return math.sqrt(float(np.mean(self.squares[part])))

    def error(self, part: str = "total") -> float:
        """Standard error of the trace."""
        squares = self.squares[part]
        return math.sqrt(2 * float(np.mean(squares)) / len(squares))

    def interval(self, part: str = "total") -> tuple[float, float]:
        """Of the trace, 95 %."""
        value, reach = self.trace(part), _NORMAL * self.error(part)
        return value - reach, value + reach

    def __str__(self) -> str:
        low, high = self.interval()
        return (
            f"{self.role} ({self.size} parameters): tr H {self.trace():.4g} [{low:.4g}, "
            f"{high:.4g}], tr H_o {self.trace('outer'):.4g}, ‖H‖_F {self.frobenius():.4g}, "
            f"‖H_f‖_F {self.frobenius('functional'):.4g}; {self.products} products"
        )


def pooled_roles(problem: Problem) -> dict[str, tuple[Slice, ...]]:
    """Role → its slices in every layer; together they are all parameters, each once."""
    groups: dict[str, list[Slice]] = {}
    for block in blocks_of(problem.anatomy, biases=False):
        groups.setdefault(block.role, []).extend(block.slices)
    return {role: tuple(slices) for role, slices in groups.items()}


def role_curvature(
    operator: CurvatureParts, role: str, *, probes: int = 2, first: int = 0, seed: int = 0
) -> RoleCurvature:
    """Probes ``first`` to ``first + probes`` of one role of ``pooled_roles``.

    Each probe depends on the seed, the role and its number alone: measuring two and then two more
    is the same as measuring four.
    """
    problem = operator.problem
    roles = pooled_roles(problem)
    if role not in roles:
        raise ValueError(f"no role {role!r}: the model has {', '.join(roles)}.")
    slices = roles[role]
    block = Block(name=role, role=role, layer="all", sublayer="all", slices=slices)
    names = [n for n in problem.parameter_names if n in {s.parameter for s in slices}]
    places = _places(problem, block, names)
    forms: dict[str, list[float]] = {part: [] for part in PARTS}
    squares: dict[str, list[float]] = {part: [] for part in PARTS}
    with bar(f"{role} probes", total=probes) as progress:
        for number in range(first, first + probes):
            key = seed * 1_000_003 + sum(role.encode()) * 1009 + number
            draw = torch.Generator().manual_seed(key)
            probe = torch.randn(block.size, generator=draw, dtype=torch.float32)
            probe = probe.to(device=operator.device, dtype=operator.dtype)
            columns = scatter(block, probe.unsqueeze(0), operator)
            found = operator.parts(columns, names)
            del columns
            for part in PARTS:
                image = found[part][0]
                image = image if places is None else image.index_select(0, places)
                forms[part].append(float(torch.dot(image, probe)))
                squares[part].append(float(torch.dot(image, image)))
            progress.update(1)
    return RoleCurvature(
        role=role,
        size=block.size,
        forms={part: tuple(values) for part, values in forms.items()},
        squares={part: tuple(values) for part, values in squares.items()},
        products=probes,
    )


def _places(problem: Problem, block: Block, names: Sequence[str]) -> torch.Tensor | None:
    """Where the role's entries lie among the parameters that contain them; None: all, in order."""
    layout = problem.layout
    starts, offset = {}, 0
    for name in names:
        k = layout.names.index(name)
        starts[name] = offset - layout.starts[k]
        offset += layout.sizes[k]
    ordered = [piece.parameter for piece in block.slices] == list(names)
    if ordered and block.size == offset:
        return None
    return torch.cat([piece.indices + starts[piece.parameter] for piece in block.slices])


def merged(parts: Sequence[RoleCurvature]) -> RoleCurvature:
    """Several measurements of one role as one."""
    first = parts[0]
    return RoleCurvature(
        role=first.role,
        size=first.size,
        forms={p: tuple(v for m in parts for v in m.forms[p]) for p in PARTS},
        squares={p: tuple(v for m in parts for v in m.squares[p]) for p in PARTS},
        products=sum(m.products for m in parts),
    )


def total_trace(roles: Sequence[RoleCurvature], part: str = "total") -> tuple[float, float]:
    """(trace of the whole matrix, half width of its 95 % interval) from all its roles."""
    value = sum(role.trace(part) for role in roles)
    return value, _NORMAL * sum(role.error(part) ** 2 for role in roles) ** 0.5


def role_shares(problem: Problem, vectors: torch.Tensor) -> Participation:
    """Mass of each column of ``vectors`` (n, k) in every role, one column at a time.

    ``spectra.participation`` for vectors that fill the memory, in any stored precision.
    """
    roles = pooled_roles(problem)
    mass = torch.zeros(vectors.shape[1], len(roles), dtype=torch.float64)
    fourth = torch.zeros(vectors.shape[1], dtype=torch.float64)
    for k in range(vectors.shape[1]):
        squares = vectors[:, k].float().square_()
        fourth[k] = squares.square().sum(dtype=torch.float64)
        for place, slices in enumerate(roles.values()):
            for piece in slices:
                mass[k, place] += squares[piece.indices].sum(dtype=torch.float64)
    whole = mass.sum(1, keepdim=True)
    mass /= whole
    return Participation(
        groups=tuple(roles),
        mass=mass,
        ratio=1 / mass.square().sum(1),
        entries=whole.squeeze(1).square() / fourth,
    )
