"""Dense H, H_o and H_f of whole models against what JAX computed for the same weights."""

from __future__ import annotations

import pytest
import torch

import curvatlas as ca
import jax_fixtures
import oracles
from curvatlas import zoo


@pytest.mark.parametrize("name", jax_fixtures.names("gpt"))
def test_operators_agree_with_jax_under_padding(name: str) -> None:
    fixture = jax_fixtures.load(name)
    model = zoo.GPT(zoo.GPTConfig(**fixture.spec)).double().eval()
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), fixture.weights.values(), strict=True):
            parameter.copy_(weight)
    cut = len(fixture.inputs) // 2
    batches = [
        (fixture.inputs[part], fixture.targets[part]) for part in (slice(cut), slice(cut, None))
    ]
    problem = ca.Problem(model, "cross_entropy", batches)
    assert problem.value() == pytest.approx(fixture.value, rel=1e-12)
    assert oracles.relative_error(problem.gradient(), fixture.gradient) < 1e-12
    assert oracles.relative_error(ca.Hessian(problem).dense(), fixture.hessian) < 1e-12
    assert oracles.relative_error(ca.GaussNewton(problem).dense(), fixture.outer) < 1e-12
    assert oracles.relative_error(ca.FunctionalHessian(problem).dense(), fixture.functional) < 1e-12
