"""What the map's own products cannot tell: exact spectral norms and negative mass of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from curvatlas.analysis.atlas_blocks import Block
from curvatlas.analysis.atlas_result import AtlasMap
from curvatlas.operators.curvature import CurvatureOperator
from curvatlas.operators.hessian import FunctionalHessian, GaussNewton, Hessian
from curvatlas.problem import Problem
from curvatlas.progress import track

_OPERATORS: dict[str, type[CurvatureOperator]] = {
    "total": Hessian,
    "outer": GaussNewton,
    "functional": FunctionalHessian,
}

_DENSITY_PRODUCTS = 60  # a block


def refined_spectral(
    maps: dict[str, AtlasMap],
    problem: Problem,
    blocks: Sequence[Block],
    which: str | Sequence[tuple[str, str]],
    *,
    seed: int,
    budget: int | str | None,
) -> None:
    """Replace brackets by converged spectral norms, for the diagonal or the named pairs."""
    import curvatlas as ca

    names = [block.name for block in blocks]
    if isinstance(which, str):
        if which != "diagonal":
            raise ValueError(f"spectral is 'bracket', 'diagonal' or pairs of names, got {which!r}.")
        pairs = [(name, name) for name in names]
    else:
        pairs = [(row, column) for row, column in which]
        unknown = {name for pair in pairs for name in pair} - set(names)
        if unknown:
            raise KeyError(f"no block is called {', '.join(sorted(unknown))}.")
    slices = {block.name: list(block.slices) for block in blocks}
    for part, kind in _OPERATORS.items():
        operator = kind(problem, budget=budget)
        found = maps[f"block/spectral/{part}"]
        for row, column in track(pairs, f"spectral norms ({part})"):
            estimate = ca.spectral_norm(operator[slices[row], slices[column]], seed=seed)
            i, j = found.place(row), found.place(column)
            for a, b in ((i, j), (j, i)):
                found.values[a, b] = estimate.value
                found.low[a, b], found.high[a, b] = estimate.interval


def negative_masses(
    problem: Problem, blocks: Sequence[Block], *, seed: int, budget: int | str | None
) -> dict[str, AtlasMap]:
    """Share of negative eigenvalues of every diagonal block, by stochastic Lanczos quadrature."""
    from curvatlas.spectra.density import spectral_density

    names = tuple(block.name for block in blocks)
    maps: dict[str, AtlasMap] = {}
    for part, kind in _OPERATORS.items():
        operator = kind(problem, budget=budget)
        values = torch.zeros(3, len(blocks), dtype=torch.float64)
        if not operator.tags.psd:  # a positive semidefinite matrix has none
            for j, block in enumerate(track(blocks, f"negative mass ({part})")):
                view = operator[list(block.slices), list(block.slices)]
                density = spectral_density(view, max_products=_DENSITY_PRODUCTS, seed=seed)
                values[:, j] = torch.tensor([density.negative_mass, *density.interval])
        maps[f"block/negative mass/{part}"] = AtlasMap(
            quantity="negative mass", part=part, view="block", names=names,
            values=values[0], low=values[1], high=values[2],
        )  # fmt: skip
    return maps
