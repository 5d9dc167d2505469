r"""Where eigenvectors live: their mass by role, and over how many roles or entries they spread.

mass of role r in v:   m_r = Σ_{i ∈ r} v_i²,  Σ_r m_r = 1
participation ratio:   1 / Σ_r m_r²  (1: a single role; the number of roles: evenly spread)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvatlas.anatomy import Anatomy
from curvatlas.results import Result


@dataclass(frozen=True, kw_only=True)
class Participation(Result):
    """Mass of k eigenvectors in every group of parameters."""

    groups: tuple[str, ...]
    mass: Tensor  # (k, groups), rows sum to one
    ratio: Tensor  # (k,) over groups
    entries: Tensor  # (k,) over single entries, 1 / Σ v⁴

    def __str__(self) -> str:
        lines = []
        for i, row in enumerate(self.mass):
            top = row.argsort(descending=True)[:3].tolist()
            named = ", ".join(f"{self.groups[j]} {float(row[j]):.0%}" for j in top)
            lines.append(f"v{i + 1}: {float(self.ratio[i]):.2g} groups ({named})")
        return "\n".join(lines)


def participation(
    vectors: Tensor, anatomy: Anatomy, *, by: Literal["role", "sublayer", "layer", "slice"] = "role"
) -> Participation:
    """vectors: (n,) or (n, k) columns of the whole flat vector."""
    if by not in ("role", "sublayer", "layer", "slice"):
        raise ValueError(f'by must be "role", "sublayer", "layer" or "slice", got {by!r}.')
    columns = (vectors.unsqueeze(-1) if vectors.ndim == 1 else vectors).detach().cpu().double()
    if columns.shape[0] != anatomy.size:
        raise ValueError(f"vectors have {columns.shape[0]} rows, the anatomy {anatomy.size}.")
    squares = columns.pow(2)
    squares = squares / squares.sum(0)
    masses: dict[str, Tensor] = {}
    for piece in anatomy:
        key = piece.name if by == "slice" else str(getattr(piece, by))
        part = squares[torch.as_tensor(piece.indices, device="cpu")].sum(0)
        masses[key] = masses[key] + part if key in masses else part
    mass = torch.stack(list(masses.values()), 1)
    return Participation(
        groups=tuple(masses),
        mass=mass,
        ratio=1 / mass.pow(2).sum(1),
        entries=1 / squares.pow(2).sum(0),
    )
