"""The exact atlas of a small model, from the dense H, H_o and H_f."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from curvatlas.analysis.atlas_blocks import VIEWS, Block, groups_of
from curvatlas.analysis.atlas_result import AtlasMap
from curvatlas.budget import available_bytes, readable
from curvatlas.operators.parts import PARTS, CurvatureParts
from curvatlas.precision import in_float64
from curvatlas.progress import track

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
    parts = {
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


def dense_maps(
    operator: CurvatureParts, blocks: Sequence[Block]
) -> tuple[dict[str, AtlasMap], dict[str, tuple[float, float, float]]]:
    """Every map of every view, exact: intervals of zero width."""
    return maps_of_matrices(dense_parts(operator), [block.indices for block in blocks], blocks)


def maps_of_matrices(
    matrices: dict[str, Tensor], places: Sequence[Tensor], blocks: Sequence[Block]
) -> tuple[dict[str, AtlasMap], dict[str, tuple[float, float, float]]]:
    """The same from part → (P, P), whose rows of each block stand at its ``places``."""
    maps: dict[str, AtlasMap] = {}
    shares: dict[str, tuple[float, float, float]] = {}
    for part, matrix in matrices.items():
        indices = [at.to(matrix.device) for at in places]
        energy, trace = _energies(matrix, indices)
        # What lies ten units in the last place below the largest block is rounding, not curvature.
        floor = (10 * torch.finfo(matrix.dtype).eps) ** 2 * energy.max()
        energy = torch.where(energy > floor, energy, torch.zeros_like(energy))
        for view in VIEWS:
            groups = groups_of(blocks, view)
            member = torch.zeros(len(groups), len(blocks), dtype=torch.float64, device="cpu")
            for a, group in enumerate(groups.values()):
                member[a, group] = 1
            square = member @ energy @ member.T
            found = {
                "frobenius": square.sqrt(),
                "spectral": _spectral(matrix, [indices, list(groups.values())]),
                "trace": member @ trace,
            }
            if view == "block":
                found["negative mass"] = _negative_mass(matrix, indices, float(floor) ** 0.5)
            found["spectral"] = torch.where(square > 0, found["spectral"], 0.0)
            for quantity, values in found.items():
                maps[f"{view}/{quantity}/{part}"] = AtlasMap(
                    quantity=quantity, part=part, view=view, names=tuple(groups),
                    values=values, low=values.clone(), high=values.clone(),
                )  # fmt: skip
            whole = float(square.sum())
            share = float(square.diagonal().sum()) / whole if whole > 0 else float("nan")
            shares[f"{view}/{part}"] = (share, share, share)
    return maps, shares


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


def _spectral(matrix: Tensor, grouping: list[Any]) -> Tensor:
    """Largest singular value of every pair of groups."""
    indices, groups = grouping
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
