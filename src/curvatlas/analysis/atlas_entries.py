"""Every entry of a small model's H, H_o or H_f, ordered by role, as the paper draws it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvatlas.analysis.atlas_blocks import blocks_of
from curvatlas.analysis.atlas_dense import dense_parts
from curvatlas.operators.parts import PARTS, CurvatureParts
from curvatlas.problem import Problem
from curvatlas.results import Result

_LARGEST = 8192


@dataclass(frozen=True, kw_only=True)
class Entries(Result):
    """Dense matrices in the order of the blocks."""

    total: Tensor  # (P, P)
    outer: Tensor
    functional: Tensor
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def block(self, row: str, column: str, part: str = "total") -> Tensor:
        """One block of one part."""
        starts = torch.tensor([0, *self.sizes]).cumsum(0).tolist()
        i, j = self.names.index(row), self.names.index(column)
        matrix: Tensor = getattr(self, part)
        return matrix[starts[i] : starts[i + 1], starts[j] : starts[j + 1]]

    def plot(self, part: str = "total", *, limits: tuple[float, float] | None = None) -> Any:
        """log10 |entry| with block separators; ``limits`` (decades) make several comparable."""
        from curvatlas.analysis.atlas_figures import entry_heat_map

        if part not in PARTS:
            raise ValueError(f"parts are {', '.join(PARTS)}, got {part!r}.")
        symbol = {"total": "H", "outer": "H$_o$", "functional": "H$_f$"}[part]
        return entry_heat_map(
            getattr(self, part), self.names, self.sizes, title=f"entries of {symbol}", limits=limits
        )


def entries(problem: Problem, *, biases: bool = True, budget: int | str | None = None) -> Entries:
    """The three dense matrices of a small model (P up to 8192), ordered role after role."""
    if problem.size > _LARGEST:
        raise ValueError(
            f"a picture of {problem.size} × {problem.size} entries shows nothing (the limit is "
            f"{_LARGEST}): choose parameters=, or use atlas()."
        )
    blocks = blocks_of(problem.anatomy, biases=biases)
    order = torch.cat([block.indices for block in blocks])
    dense = dense_parts(CurvatureParts(problem, budget=budget))
    ordered = {part: matrix.cpu()[order][:, order] for part, matrix in dense.items()}
    return Entries(
        **ordered,
        names=tuple(block.name for block in blocks),
        sizes=tuple(block.size for block in blocks),
    )
