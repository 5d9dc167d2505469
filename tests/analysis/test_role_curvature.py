"""Traces by role for models too large for a map: they add up, and their intervals cover."""

from __future__ import annotations

import pytest
import torch

import curvatlas as ca
from curvatlas.analysis.role_curvature import (
    merged,
    pooled_roles,
    role_curvature,
    role_shares,
    total_trace,
)
from curvatlas.operators.parts import CurvatureParts
from curvatlas.zoo.gpt import GPT, GPTConfig


@pytest.fixture(scope="module")
def problem() -> ca.Problem:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=7, context=4, d_model=4, n_heads=2, n_layers=2, d_ff=6)
    tokens, targets = torch.randint(0, 7, (2, 3, 4))
    return ca.Problem(GPT(config).double().eval(), "cross_entropy", (tokens, targets))


def test_the_roles_are_all_parameters_each_once(problem: ca.Problem) -> None:
    every = torch.cat([s.indices for slices in pooled_roles(problem).values() for s in slices])
    assert torch.equal(every.sort().values, torch.arange(problem.size))


def test_forms_and_norms_are_those_of_the_dense_block(problem: ca.Problem) -> None:
    role = "value"
    places = torch.cat([s.indices for s in pooled_roles(problem)[role]])
    dense = {"total": ca.Hessian(problem).dense(), "outer": ca.GaussNewton(problem).dense()}
    found = role_curvature(CurvatureParts(problem), role, probes=400)
    for part, matrix in dense.items():
        block = matrix[places][:, places]
        reach = 4 * found.error(part)
        assert abs(found.trace(part) - float(block.trace())) < reach, part
        assert found.frobenius(part) == pytest.approx(float(block.norm()), rel=0.25), part


def test_traces_add_up_to_the_whole_with_their_error(problem: ca.Problem) -> None:
    operator = CurvatureParts(problem)
    roles = [role_curvature(operator, role, probes=60) for role in pooled_roles(problem)]
    value, half = total_trace(roles, "outer")
    assert abs(value - float(ca.GaussNewton(problem).dense().trace())) < 2 * half


def test_two_and_two_more_probes_are_four(problem: ca.Problem) -> None:
    operator = CurvatureParts(problem)
    parts = [role_curvature(operator, "key", first=first) for first in (0, 2)]
    four = role_curvature(operator, "key", probes=4)
    assert merged(parts).forms["total"] == pytest.approx(four.forms["total"], rel=1e-12)


def test_shares_are_those_of_participation(problem: ca.Problem) -> None:
    vectors = torch.randn(problem.size, 2, dtype=torch.float64)
    found = role_shares(problem, vectors)
    places = torch.cat([s.indices for s in pooled_roles(problem)["query"]])
    want = vectors[places].square().sum(0) / vectors.square().sum(0)
    assert found.mass[:, found.groups.index("query")].tolist() == pytest.approx(
        want.tolist(), rel=1e-6
    )


def test_an_unknown_role_is_refused_with_the_known_ones(problem: ca.Problem) -> None:
    with pytest.raises(ValueError, match=r"the model has .*value"):
        role_curvature(CurvatureParts(problem), "values")
