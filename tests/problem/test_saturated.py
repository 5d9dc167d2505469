"""Cross-entropy of models that are almost sure: curvature far below the rounding of the logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
import oracles

SURE = (5.0, 20.0, 30.0, 50.0, 100.0)  # how far the likeliest logit leads


def _second_derivative(logits: Tensor) -> Tensor:
    """diag π − π πᵀ (N, C, C), each entry to rounding of itself: 1 − π_c is a sum here."""
    p = torch.softmax(logits, -1)
    rest = p.unsqueeze(-2).expand(*p.shape, p.shape[-1]).clone()
    rest.diagonal(dim1=-2, dim2=-1).zero_()
    return torch.diag_embed(p * rest.sum(-1)) - _off_diagonal(p.unsqueeze(-1) * p.unsqueeze(-2))


def _off_diagonal(matrices: Tensor) -> Tensor:
    result = matrices.clone()
    result.diagonal(dim1=-2, dim2=-1).zero_()
    return result


def _linear(lead: float, dtype: torch.dtype, *, right: bool) -> tuple[ca.Problem, Tensor]:
    """A linear model that is sure of class 2, rightly or not, and its weight's Hessian."""
    torch.manual_seed(0)
    model = nn.Linear(4, 5).double()
    with torch.no_grad():
        model.bias[2] += lead
    x = torch.randn(6, 4, dtype=torch.float64)
    logits = model(x).detach()
    outer = _second_derivative(logits)
    inputs = torch.cat([x, torch.ones(6, 1, dtype=torch.float64)], 1)
    blocks = torch.einsum("nab,ni,nj->aibj", outer, inputs, inputs) / 6
    weight = blocks[:, :4, :, :4].reshape(20, 20)
    targets = torch.full((6,), 2 if right else 1)
    return ca.Problem(model.to(dtype), "cross_entropy", (x.to(dtype), targets)), weight


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lead", SURE)
@pytest.mark.parametrize("kind", [ca.Hessian, ca.GaussNewton])
def test_the_curvature_of_sure_models_is_right_to_its_own_rounding(
    kind: type, lead: float, dtype: torch.dtype, right: bool
) -> None:
    if lead >= 100 and dtype == torch.float32:
        pytest.skip("below the smallest number of float32")
    problem, want = _linear(lead, dtype, right=right)
    got = kind(problem)["weight"].dense().double()
    # the logits themselves are rounded to eps · lead, and exp takes that as a relative error
    assert oracles.relative_error(got, want) < 200 * lead * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [ca.Hessian, ca.GaussNewton, ca.FunctionalHessian])
def test_a_network_that_is_sure_of_every_sample_is_not_taken_for_a_wrong_one(
    kind: type, dtype: torch.dtype
) -> None:
    """In float32 a lead of 20 once failed the probe of symmetry."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    with torch.no_grad():
        model[2].bias[3] += 20
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.full((6,), 3)
    want = kind(ca.Problem(model, "cross_entropy", (x, y))).dense()
    got = kind(ca.Problem(model.to(dtype), "cross_entropy", (x.to(dtype), y))).dense().double()
    assert float(want.norm()) < 1e-6
    assert oracles.relative_error(got, want) < 1e4 * torch.finfo(dtype).eps


def test_the_parts_add_up_and_the_gradient_is_that_of_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    with torch.no_grad():
        model[2].bias[3] += 40
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([3, 3, -100, 3, 3, 3])
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.rand(5).double() + 0.5)):
        problem = ca.Problem(model, loss, (x, y))
        parts = ca.GaussNewton(problem).dense() + ca.FunctionalHessian(problem).dense()
        assert oracles.relative_error(ca.Hessian(problem).dense(), parts) < 1e-10
        logits = model(x)
        slopes = torch.softmax(logits, -1).detach()
        slopes[:, 3] = 0
        slopes[:, 3] = -slopes.sum(-1)  # minus the others, not π − 1
        slopes[2] = 0
        want = oracles.flat(
            torch.autograd.grad(logits, list(model.parameters()), slopes / 5),
            list(model.parameters()),
        )
        assert oracles.relative_error(problem.gradient(), want) < 1e-10
        assert problem.value() == pytest.approx(float(loss(model(x), y).detach()), rel=1e-6)


def test_one_sure_sample_among_others_changes_nothing() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 3, dtype=torch.float64)
    logits[0, 1] += 60
    leaf = logits.clone().requires_grad_()
    targets = torch.tensor([1, 0, 2, 1])
    problem = ca.Problem(
        lambda p, x: x @ p["z"],
        "cross_entropy",
        (torch.eye(4, dtype=torch.float64), targets),
        parameters={"z": logits},
    )
    want = oracles.hessian(nn.functional.cross_entropy(leaf, targets), [leaf])
    for kind in (ca.Hessian, ca.GaussNewton):
        assert oracles.relative_error(kind(problem).dense(), want) < 1e-13
