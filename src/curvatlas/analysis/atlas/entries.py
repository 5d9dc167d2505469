"""Entries of a Hessian in the order of the roles: what the papers draw as heat maps, histograms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvatlas.analysis.atlas.exact import OPERATORS
from curvatlas.analysis.atlas.result import AtlasBlock, blocks_of
from curvatlas.fits import Array
from curvatlas.linear_operator import PARTS
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Result, block_rows

_NEGLIGIBLE = 1e-30  # of the largest entry: below it an entry is no number but zero


@dataclass(frozen=True, kw_only=True)
class Entries(Result):
    """Rows and columns of H, H_o or H_f, block after block; all of them or some of every block."""

    matrix: Tensor  # (n, n)
    part: str  # "total", "outer" or "functional"
    names: tuple[str, ...]
    sizes: tuple[int, ...]  # rows of each block that are here
    whole: tuple[int, ...]  # rows that each block has

    def block(self, row: str, column: str | None = None) -> Tensor:
        """The entries between two blocks, or of one block's own."""
        rows, columns = self._reach(row), self._reach(row if column is None else column)
        return self.matrix[rows, columns]

    def only(self, *names: str) -> Entries:
        """These blocks alone, in this order: the papers' panel of self-attention."""
        kept = torch.cat([torch.arange(len(self.matrix))[self._reach(name)] for name in names])
        places = [self.names.index(name) for name in names]
        return Entries(
            matrix=self.matrix[kept][:, kept],
            part=self.part,
            names=tuple(names),
            sizes=tuple(self.sizes[place] for place in places),
            whole=tuple(self.whole[place] for place in places),
        )

    def level(self, row: str, column: str | None = None, *, eps: float = 0.0) -> float:
        """Mean of log10(|h| + ε) between two blocks, over what is not zero where ε is: how bright
        a block of the heat map is."""
        size = self.block(row, column).abs().double()
        if eps == 0:
            size = size[size > _NEGLIGIBLE * size.max()]
        return float((size + eps).log10().mean()) if size.numel() else -math.inf

    def norm(self, name: str) -> float:
        """‖H_bb‖_F of a diagonal block; its square is unbiased where only some rows are here."""
        block = self.block(name).double()
        size, whole = len(block), self.whole[self.names.index(name)]
        diagonal = float(block.diagonal().square().sum()) * whole / size
        beside = float(block.square().sum()) - float(block.diagonal().square().sum())
        pairs = whole * (whole - 1) / (size * (size - 1)) if size > 1 else 0.0
        return math.sqrt(diagonal + pairs * beside)

    def histogram(
        self, row: str, column: str | None = None, *, bins: int = 49, smallest: float = 1e-8
    ) -> tuple[Array, Array]:
        """Counts (bins,) of |h| between logarithmic edges (bins + 1,), from max(smallest, min)."""
        size = self.block(row, column).abs().double().flatten().numpy()
        positive = size[size > 0]
        if not positive.size:
            raise ValueError(f"every entry of {row} is zero: there is no histogram of it.")
        low, high = max(smallest, float(positive.min())), float(positive.max())
        low = min(low, high / 10)
        edges: Array = np.geomspace(low, high * (1 + 1e-12), bins + 1)
        return edges, np.histogram(np.clip(positive, low, None), edges)[0].astype(np.float64)

    def _reach(self, name: str) -> slice:
        if name not in self.names:
            raise KeyError(f"there is no block {name!r} here; there are {', '.join(self.names)}.")
        place = self.names.index(name)
        start = sum(self.sizes[:place])
        return slice(start, start + self.sizes[place])

    def _rows(self) -> list[dict[str, Any]]:
        """A row a pair of blocks: the norm and the largest entry between them."""
        return block_rows(self.matrix, self.names, self.sizes)

    def __str__(self) -> str:
        total = sum(self.whole)
        taken = "" if self.sizes == self.whole else f", {sum(self.sizes)} drawn at random"
        lines = [f"entries of {self.part} H, {len(self.names)} blocks of {total} parameters{taken}"]
        width = max(map(len, self.names))
        for name in self.names:
            lines.append(f"  {name:<{width}}  mean log10 |h| {self.level(name):.2f}")
        return "\n".join(lines)


def entries(
    problem: Problem,
    *,
    part: Literal["total", "outer", "functional"] = "total",
    blocks: Sequence[str] | None = None,
    most: int = 4096,
    biases: bool = True,
    seed: int = 0,
    budget: int | str | None = None,
) -> Entries:
    """Entries of H (or H_o, H_f) of any model, ordered role after role.

    blocks: these only: roles, names or globs (``["query", "blocks.0.*"]``); None: all.
    most: rows at most; of more parameters as many are drawn at random out of the blocks, so that
        levels, norms and histograms of a block stay unbiased.
    biases: False counts a bias with the weight of the same linear map.

    It takes a product a row, of the blocks that follow alone: H is symmetric.
    """
    if part not in PARTS:
        raise ValueError(f"parts are {', '.join(PARTS)}, got {part!r}.")
    if most < 1:
        raise ValueError(f"most is a number of rows, got {most}.")
    chosen = _chosen(problem, blocks, biases)
    places = _drawn([block.indices for block in chosen], most, seed)
    operator = OPERATORS[part](problem, budget=budget)
    sizes = [len(at) for at in places]
    matrix = torch.empty(sum(sizes), sum(sizes), dtype=operator.dtype)
    start = 0
    for place, columns in enumerate(track(places, "entries")):
        below = operator[torch.cat(places[place:]), columns].dense().cpu()
        stop = start + len(columns)
        matrix[start:, start:stop], matrix[start:stop, start:] = below, below.T
        start = stop
    return Entries(
        matrix=matrix,
        part=part,
        names=tuple(block.name for block in chosen),
        sizes=tuple(sizes),
        whole=tuple(block.size for block in chosen),
    )


def _chosen(
    problem: Problem, selectors: Sequence[str] | None, biases: bool
) -> tuple[AtlasBlock, ...]:
    every = blocks_of(problem.anatomy, biases=biases)
    if selectors is None:
        return every
    asked = [selectors] if isinstance(selectors, str) else selectors
    wanted = {piece.name for selector in asked for piece in problem.anatomy.select(selector)}
    return tuple(b for b in every if any(piece.name in wanted for piece in b.slices))


def _drawn(places: list[Tensor], most: int, seed: int) -> list[Tensor]:
    """All places, or ``most`` of them at random, in order: a quarter of the rows in equal parts to
    every block (a gain of 16 entries beside weights of a million), the rest by their sizes."""
    total = sum(len(at) for at in places)
    if total <= most:
        return places
    generator = torch.Generator().manual_seed(seed)
    equal = most // (4 * len(places))
    by_size = most - equal * len(places)
    counts = [max(1, min(len(at), equal + len(at) * by_size // total)) for at in places]
    return [
        at[torch.randperm(len(at), generator=generator)[:count].sort().values]
        for at, count in zip(places, counts, strict=True)
    ]
