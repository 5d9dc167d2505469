"""Norm calculus majorises true first and second derivatives, group by group."""

from __future__ import annotations

import pytest
import torch

from curvatlas.layers.losses import resolve_loss
from curvatlas.theory import reference
from curvatlas.theory.norm_bounds import data_free_matrix
from curvatlas.theory.reference import KINDS, draw_case
from theory_cases import true_hessian


@pytest.mark.parametrize("seed", range(9))
def test_every_group_bound_dominates_its_block(seed: int) -> None:
    case = draw_case(torch.Generator().manual_seed(300 + seed), KINDS[seed % 3])
    z = reference.block_output(case.spec, case.weights, case.x)
    seeds = resolve_loss(case.loss).seeds(z, case.target)
    groups, matrix, chain = data_free_matrix([(case.spec, case.weights)], case.x, seeds, None)
    hessian = true_hessian(case)
    start, places = 0, {g: [] for g in groups}  # type: ignore[var-annotated]
    for name, weight in case.weights.items():
        group = name.rsplit("_", 1)[0].replace("gate", "up")
        places[group] += list(range(start, start + weight.numel()))
        start += weight.numel()
    for i, a in enumerate(groups):
        for j, b in enumerate(groups):
            true = float(torch.linalg.matrix_norm(hessian[places[a]][:, places[b]], 2))
            assert true <= float(matrix[i, j]) * (1 + 1e-9), (a, b, case.spec)
    assert chain["L"] == case.x.shape[1]


def test_the_bound_sees_the_weights() -> None:
    case = draw_case(torch.Generator().manual_seed(5), "attention")
    z = reference.block_output(case.spec, case.weights, case.x)
    seeds = resolve_loss(case.loss).seeds(z, case.target)
    grown = case.weights | {"value_weight": 10.0 * case.weights["value_weight"]}
    small = data_free_matrix([(case.spec, case.weights)], case.x, seeds, None)[1]
    large = data_free_matrix([(case.spec, grown)], case.x, seeds, None)[1]
    assert float(large.max()) > 5.0 * float(small.max())
