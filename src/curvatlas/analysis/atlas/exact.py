"""Exact maps: from dense matrices, from a layer's closed form, and by Lanczos block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from curvatlas.analysis.atlas.result import (
    VIEWS,
    AtlasBlock,
    AtlasMap,
    atlas_map,
    groups_of,
)
from curvatlas.budget import available_bytes, readable
from curvatlas.closed_form.hessian import BlockDerivatives
from curvatlas.closed_form.modules import (
    ClosedFormBlock,
    SelfAttentionHessian,
    TransformerBlockHessian,
)
from curvatlas.engines.tangent.reading import MappedBlock, UnmappedModuleError, map_module
from curvatlas.linear_operator import PARTS
from curvatlas.operators.curvature import (
    CurvatureOperator,
    CurvatureParts,
    FunctionalHessian,
    GaussNewton,
    Hessian,
)
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.norms import spectral_norm

Maps = dict[str, AtlasMap]
Shares = dict[str, tuple[float, float, float]]

_COLUMNS = 256
_DECOMPOSED = 200  # above this side Lanczos finds the largest singular value faster


def dense_parts(operator: CurvatureParts) -> dict[str, Tensor]:
    """Part → (P, P), column block by column block."""
    size = operator.shape[0]
    needed = 4 * size**2 * operator.dtype.itemsize
    if needed > available_bytes():
        raise MemoryError(
            f"three dense {size} × {size} matrices take {readable(needed)} and only "
            f"{readable(available_bytes())} are free: use method='sketch'."
        )
    parts: dict[str, Tensor] = {
        part: torch.empty(size, size, dtype=operator.dtype, device=operator.device)
        for part in PARTS
    }
    for start in track(range(0, size, _COLUMNS), "dense atlas"):
        stop = min(start + _COLUMNS, size)
        columns = torch.zeros(size, stop - start, dtype=operator.dtype, device=operator.device)
        columns[start:stop].fill_diagonal_(1)
        for part, block in operator.flat_parts(columns).items():
            parts[part][:, start:stop] = block
    return parts


def maps_of_matrices(
    matrices: dict[str, Tensor], places: Sequence[Tensor], blocks: Sequence[AtlasBlock]
) -> tuple[Maps, Shares]:
    """Every map of every view, exact; the (P, P) parts hold each block's rows at its ``places``."""
    maps: Maps = {}
    shares: Shares = {}
    for part, matrix in matrices.items():
        indices = [at.to(matrix.device) for at in places]
        energy, trace = _energies(matrix, indices)
        # What lies ten units in the last place below the largest block is rounding, not curvature:
        # all that is known of it is that it is no larger.
        floor = (10 * torch.finfo(matrix.dtype).eps) ** 2 * energy.max()
        told = (energy > floor) | (energy == 0)
        most = torch.where(told, energy, floor)
        energy = torch.where(told, energy, torch.zeros_like(energy))
        for view in VIEWS:
            groups = groups_of(blocks, view)
            member = _members_of(groups, len(blocks))
            square = member @ energy @ member.T
            spectral = _spectral(matrix, indices, list(groups.values()))
            spectral = torch.where(square > 0, spectral, 0.0)
            norm = square.sqrt()
            above = torch.where(square > 0, 0.0, (member @ most @ member.T).sqrt())
            quantities = {
                "frobenius": (norm, norm, norm + above),
                "spectral": (spectral, spectral, spectral + above),
                "trace": (member @ trace,),
            }
            if view == "block":
                mass = _negative_mass(matrix, indices, float(floor) ** 0.5)
                quantities["negative mass"] = (mass,)
            _add_view(maps, shares, view, part, tuple(groups), square, quantities)
    return maps, shares


def _members_of(groups: Mapping[Any, Sequence[int]], blocks: int) -> Tensor:
    """(groups, blocks): 1 where a block belongs to a group."""
    member = torch.zeros(len(groups), blocks, dtype=torch.float64, device="cpu")
    for row, places in zip(member, groups.values(), strict=True):
        row[list(places)] = 1
    return member


def _add_view(
    maps: Maps,
    shares: Shares,
    view: str,
    part: str,
    names: tuple[str, ...],
    square: Tensor,
    quantities: Mapping[str, tuple[Tensor, ...]],
) -> None:
    """Quantity → values, or values with both ends; square: ‖H_ab‖_F² of the view's groups."""
    for quantity, ends in quantities.items():
        key = f"{view}/{quantity}/{part}"
        maps[key] = atlas_map(key, names, *ends)
    total = float(square.sum())
    share = float(square.diagonal().sum()) / total if total > 0 else float("nan")
    shares[f"{view}/{part}"] = (share, share, share)


def _energies(matrix: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """‖H_ij‖_F² (m, m) and tr H_ii (m,)."""
    count = len(indices)
    energy = torch.zeros(count, count, dtype=torch.float64, device="cpu")
    trace = torch.zeros(count, dtype=torch.float64, device="cpu")
    for a, rows in enumerate(indices):
        stripe = in_float64(matrix[rows])
        trace[a] = stripe[:, rows.to(stripe.device)].trace()
        for b in range(count):
            energy[a, b] = stripe[:, indices[b].to(stripe.device)].pow(2).sum()
    return (energy + energy.T) / 2, trace


def _spectral(matrix: Tensor, indices: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> Tensor:
    """Largest singular value of every pair of groups."""
    places = [torch.cat([indices[k] for k in group]) for group in groups]
    result = torch.zeros(len(places), len(places), dtype=torch.float64, device="cpu")
    for a, rows in enumerate(places):
        for b in range(a, len(places)):
            block = in_float64(matrix[rows][:, places[b]])
            result[a, b] = result[b, a] = largest_singular(block)
    return result


def _negative_mass(matrix: Tensor, indices: Sequence[Tensor], floor: float) -> Tensor:
    """Share of negative eigenvalues of every diagonal block, rounding (below ``floor``) apart."""
    result = torch.zeros(len(indices), dtype=torch.float64, device="cpu")
    for a, places in enumerate(indices):
        block = in_float64(matrix[places][:, places])
        values = torch.linalg.eigvalsh((block + block.T) / 2)
        rounding = len(values) * torch.finfo(matrix.dtype).eps * values.abs().max()
        result[a] = (values < -max(float(rounding), floor)).double().mean()
    return result


def largest_singular(block: Tensor) -> float:
    """‖block‖₂ to 1e-10: a decomposition of small blocks, Lanczos on large ones."""
    small = min(block.shape)
    if small <= _DECOMPOSED or float(block.abs().max()) == 0:
        return float(torch.linalg.matrix_norm(block, ord=2))
    array = block.cpu().numpy()
    start = np.random.default_rng(0).standard_normal(small)
    gram = LinearOperator(
        (small, small),
        matvec=(lambda v: array @ (array.T @ v))
        if array.shape[0] == small
        else (lambda v: array.T @ (array @ v)),
        dtype=array.dtype,
    )
    value = eigsh(gram, k=1, which="LA", v0=start, tol=1e-12, return_eigenvectors=False)
    return float(np.sqrt(value[0]))


# --- a recognised layer, beyond the size of dense products ----------------------------------------


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """The derivatives of the layer at the problem's data, and where its entries stand."""

    derivatives: BlockDerivatives
    mapped: MappedBlock

    def places(self, block: AtlasBlock) -> Tensor:
        """Positions of a block of the atlas in the closed form's flat order."""
        inverse = torch.empty_like(self.mapped.positions)
        inverse[self.mapped.positions] = torch.arange(len(inverse))
        return inverse[block.indices]


def closed_form(problem: Problem) -> ClosedForm:
    """The problem's closed form; UnmappedModuleError says why where there is none.

    For a model that is one layer which ``curvatlas.closed_form`` knows. Its loss, and one product
    of the operator (``closed_maps``), are compared first: a layer read wrongly is never used.
    """
    if problem.spread:
        raise UnmappedModuleError("the closed form reads all data in one process.")
    mapped = map_module(problem.model if problem.in_place else problem.copied_model())
    if mapped.module_size != problem.size or problem.loss.name not in ("mse", "cross_entropy"):
        raise UnmappedModuleError(
            "the closed form covers all parameters together, under mse or cross_entropy."
        )
    inputs, targets = _one_batch(problem)
    kind: type[ClosedFormBlock] = TransformerBlockHessian
    if mapped.spec.d_ff is None:
        kind = SelfAttentionHessian
    if getattr(_attention_of(problem.model), "batch_first", True) is False:
        inputs, targets = inputs.transpose(0, 1), targets.transpose(0, 1)
    layer = kind.from_weights(mapped.spec, mapped.weights)
    try:
        derivatives = layer.derivatives(inputs, targets, loss=problem.loss.name)
    except (ValueError, TypeError) as reason:
        raise UnmappedModuleError(f"the closed form does not read this data: {reason}") from reason
    value = problem.value()
    if abs(float(derivatives.seeds.value) - value) > _rounding(problem) * max(abs(value), 1e-30):
        raise UnmappedModuleError("the closed form's loss is not the problem's.")
    return ClosedForm(derivatives, mapped)


def _one_batch(problem: Problem) -> tuple[Tensor, Tensor]:
    pairs: list[tuple[Tensor, Tensor]] = []
    for batch in problem.batches():
        if not isinstance(batch.inputs, Tensor) or not isinstance(batch.targets, Tensor):
            raise UnmappedModuleError("the closed form reads batches of one input and one target.")
        pairs.append((batch.inputs, batch.targets))
    if len({(x.shape[1:], y.shape[1:]) for x, y in pairs}) != 1:
        raise UnmappedModuleError("the closed form reads batches of one shape.")
    if len(pairs) > 1 and getattr(_attention_of(problem.model), "batch_first", True) is False:
        raise UnmappedModuleError("the closed form reads one batch when tokens come first.")
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _attention_of(model: nn.Module) -> Any:
    return getattr(model, "self_attn", model)


def _rounding(problem: Problem) -> float:
    return 1e4 * torch.finfo(problem.dtype).eps


def closed_maps(
    form: ClosedForm, operator: CurvatureParts, blocks: Sequence[AtlasBlock], room: int
) -> tuple[Maps, Shares]:
    """Every map from the closed form: from the matrices where three fit ``room`` bytes.

    Beyond that the exact Frobenius norms and traces alone (derivations §12), with nothing P × P.
    """
    derivatives = form.derivatives
    size = derivatives.size
    if 4 * size**2 * operator.dtype.itemsize <= room:
        matrices: dict[str, Tensor] = {part: derivatives.dense(part) for part in PARTS}
        _agree(form, operator, matrices)
        return maps_of_matrices(matrices, [form.places(block) for block in blocks], blocks)
    members = _members(form, blocks)
    largest = max(block.size for block in blocks)
    if largest**2 * operator.dtype.itemsize > room:
        raise UnmappedModuleError("one block of the closed form is larger than the budget.")
    return _norm_maps(form, blocks, members)


def _agree(form: ClosedForm, operator: CurvatureParts, matrices: dict[str, Tensor]) -> None:
    """One product of the operator against the matrices: the closed form is of this very loss."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(
        form.derivatives.size, 1, generator=generator, dtype=torch.float64, device="cpu"
    )
    vector = vector.to(operator.device, operator.dtype)
    wanted = operator.flat_parts(vector)
    ours = form.mapped.from_module_order(vector)
    for part in PARTS:
        got = form.mapped.to_module_order(matrices[part] @ ours)
        scale = float(torch.linalg.norm(wanted["total"])) + float(torch.linalg.norm(wanted[part]))
        if float(torch.linalg.norm(got - wanted[part])) > _rounding(operator.problem) * scale:
            raise UnmappedModuleError(f"the closed form's {part} part is not the operator's.")


def _members(form: ClosedForm, blocks: Sequence[AtlasBlock]) -> list[list[int]]:
    """The closed form's weights that make up every block; refused where a weight is cut."""
    offsets = list(form.derivatives.offsets.values())
    members: list[list[int]] = []
    for block in blocks:
        places = set(form.places(block).tolist())
        weights = [k for k, (start, size) in enumerate(offsets) if start in places and size]
        if sum(offsets[k][1] for k in weights) != block.size or not all(
            start + size - 1 in places for start, size in (offsets[k] for k in weights)
        ):
            raise UnmappedModuleError(f"{block.name} is a part of a weight: no closed norm.")
        members.append(weights)
    return members


def _norm_maps(
    form: ClosedForm, blocks: Sequence[AtlasBlock], members: list[list[int]]
) -> tuple[Maps, Shares]:
    """Exact norms and traces; ‖A‖_F/√rank ≤ ‖A‖₂ ≤ ‖A‖_F brackets the spectral norms."""
    maps: Maps = {}
    shares: Shares = {}
    derivatives = form.derivatives
    gather = _members_of(dict(enumerate(members)), len(derivatives.names))
    for part in PARTS:
        energy = gather @ derivatives.frobenius(part).cpu().double().square() @ gather.T
        traces = torch.tensor(list(derivatives.traces(part).values()), dtype=torch.float64)
        trace = gather @ traces
        for view in VIEWS:
            groups = groups_of(blocks, view)
            join = _members_of(groups, len(blocks))
            sizes = join @ torch.tensor([float(block.size) for block in blocks]).double()
            square = join @ energy @ join.T
            norm = square.sqrt()
            low = norm / torch.minimum(sizes[:, None], sizes[None, :]).sqrt()
            quantities = {
                "frobenius": (norm,),
                "spectral": ((low * norm).sqrt(), low, norm),
                "trace": (join @ trace,),
            }
            _add_view(maps, shares, view, part, tuple(groups), square, quantities)
    return maps, shares


# --- spectral norms and negative mass of single blocks --------------------------------------------


OPERATORS: dict[str, type[CurvatureOperator]] = {
    "total": Hessian,
    "outer": GaussNewton,
    "functional": FunctionalHessian,
}

_DENSITY_PRODUCTS = 60  # a block


def refined_spectral(
    maps: dict[str, AtlasMap],
    problem: Problem,
    blocks: Sequence[AtlasBlock],
    which: str | Sequence[tuple[str, str]],
    *,
    seed: int,
    budget: int | str | None,
) -> int:
    """Replace brackets by converged spectral norms; returns the products it took.

    which: "refine" (every pair), "diagonal", or pairs of names.
    """
    pairs = spectral_pairs(blocks, which)
    slices = {block.name: list(block.slices) for block in blocks}
    products = 0
    for part, kind in OPERATORS.items():
        operator = kind(problem, budget=budget)
        key = f"block/spectral/{part}"
        bracket = maps[key]
        values, low, high = (t.clone() for t in (bracket.values, *bracket.interval))
        for row, column in track(pairs, f"spectral norms ({part})"):
            i, j = bracket.place(row), bracket.place(column)
            if float(low[i, j]) == 0:
                continue  # not told from rounding
            view = operator[slices[row], slices[column]]
            estimate = spectral_norm(view, rtol=_REFINED, seed=seed, data_error=False)
            products += estimate.products
            for a, b in ((i, j), (j, i)):
                values[a, b] = estimate.value
                low[a, b], high[a, b] = estimate.interval
        maps[key] = atlas_map(key, bracket.names, values, low, high)
    return products


_REFINED = 4e-3  # of a spectral norm: the interval lies within 1 % of the truth


def spectral_pairs(
    blocks: Sequence[AtlasBlock], which: str | Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The pairs of names whose spectral norms are refined; a wrong choice is refused."""
    names = [block.name for block in blocks]
    if isinstance(which, str):
        if which not in ("bracket", "diagonal", "refine"):
            raise ValueError(
                f"spectral is 'bracket', 'diagonal', 'refine' or pairs of names, got {which!r}."
            )
        if which == "refine":
            return [(a, b) for i, a in enumerate(names) for b in names[i:]]
        return [(name, name) for name in names] if which == "diagonal" else []
    pairs = [(row, column) for row, column in which]
    unknown = {name for pair in pairs for name in pair} - set(names)
    if unknown:
        raise KeyError(f"no block is called {', '.join(sorted(unknown))}.")
    return pairs


def negative_masses(
    problem: Problem, blocks: Sequence[AtlasBlock], *, seed: int, budget: int | str | None
) -> dict[str, AtlasMap]:
    """Share of negative eigenvalues of every diagonal block, by stochastic Lanczos quadrature."""
    names = tuple(block.name for block in blocks)
    maps: dict[str, AtlasMap] = {}
    for part, kind in OPERATORS.items():
        operator = kind(problem, budget=budget)
        values = torch.zeros(3, len(blocks), dtype=torch.float64)
        if not operator.tags.psd:  # a positive semidefinite matrix has none
            for j, block in enumerate(track(blocks, f"negative mass ({part})")):
                view = operator[list(block.slices), list(block.slices)]
                density = spectral_density(view, max_products=_DENSITY_PRODUCTS, seed=seed)
                values[:, j] = torch.tensor([density.negative_mass, *density.interval])
        key = f"block/negative mass/{part}"
        maps[key] = atlas_map(key, names, *values)
    return maps
