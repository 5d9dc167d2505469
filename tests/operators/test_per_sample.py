"""diag H_o from single samples."""

from __future__ import annotations

import pytest
import torch

import curvatlas as ca
import families
import oracles
from curvatlas.operators.fisher import target_factors
from curvatlas.operators.per_sample import exact_outer_diagonal
from curvatlas.problem import CrossEntropy, MeanSquaredError


@pytest.mark.parametrize(
    "name", ["zoo vit pre-norm", "torch multihead", "zoo gpt pre-norm", "zoo gpt, ignored targets"]
)
def test_the_exact_diagonal_is_that_of_the_gauss_newton_matrix(name: str) -> None:
    model, batch, loss = families.make(name.split(",")[0] + " pre-norm" * ("," in name))
    if "," in name:
        inputs, targets = batch
        batch = inputs, targets.clone()
        batch[1][0, ::2] = -100
    problem = ca.Problem(model, loss, batch)
    want = ca.GaussNewton(problem).dense().diagonal()
    found = exact_outer_diagonal(problem)
    assert found is not None
    got, passes = found
    assert oracles.relative_error(got, want) < 1e3 * torch.finfo(torch.float64).eps
    assert passes > 0


def test_a_loss_that_cannot_be_split_is_left_to_others() -> None:
    model, batch, _ = families.make("zoo vit pre-norm")
    problem = ca.Problem(model, lambda z, y: torch.nn.functional.cross_entropy(z, y), batch)
    assert exact_outer_diagonal(problem) is None


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5)])
@pytest.mark.parametrize("loss", [CrossEntropy(), MeanSquaredError()])
def test_the_seeds_are_factors_of_the_curvature_at_the_outputs(
    shape: tuple[int, ...], loss: ca.problem.Loss
) -> None:
    torch.manual_seed(0)
    outputs = torch.randn(shape, dtype=torch.float64)
    targets: torch.Tensor = torch.randn_like(outputs)
    if isinstance(loss, CrossEntropy):
        targets = torch.randint(0, shape[-1], shape[:-1])
        targets.view(-1)[0] = -100
    factors = target_factors(loss, outputs, targets)
    product = loss.curvature(outputs, targets)
    assert factors is not None
    assert product is not None
    seeds = factors.seeds(factors.places)  # (q, *shape)
    direction = torch.randn_like(outputs)
    # Over the samples of a batch as well: a seed holds the columns of all of them.
    along = torch.einsum("qn...,n...->qn", seeds, direction)
    found = torch.einsum("qn,qn...->n...", along, seeds)
    torch.testing.assert_close(found, product(direction), rtol=1e-12, atol=1e-14)
