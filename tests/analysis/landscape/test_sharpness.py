"""The predicted change of λmax against what gradient descent does to it."""

from __future__ import annotations

import pytest
import torch

import curvatlas as ca
from curvatlas.zoo.models import reference_gpt, reference_vit


def _problem(kind: str) -> ca.Problem:
    torch.manual_seed(5)
    if kind == "vit":
        model = reference_vit(seed=1, d_model=8).double().eval()
        data = ca.zoo.digits().train
        return ca.Problem(model, "cross_entropy", [(data.inputs[:24].double(), data.targets[:24])])
    gpt = reference_gpt(seed=1, d_model=16, n_heads=2).double().eval()
    tokens = torch.randint(0, gpt.config.vocabulary, (3, 17))
    return ca.Problem(gpt, "cross_entropy", [(tokens[:, :-1], tokens[:, 1:])])


def _step(problem: ca.Problem, rate: float) -> None:
    gradient = problem.gradient()
    pieces = problem.layout.split(gradient.unsqueeze(-1))
    with torch.no_grad():
        for name, piece in zip(problem.layout.names, pieces, strict=True):
            problem.model.get_parameter(name).sub_(rate * piece[0])


@pytest.mark.parametrize(("kind", "rate"), [("vit", 1e-2), ("gpt", 2e-4)])
def test_five_gradient_steps_change_the_sharpness_as_predicted(kind: str, rate: float) -> None:
    problem = _problem(kind)
    drifts = []
    for _ in range(5):
        drifts.append(ca.sharpness_drift(problem))
        _step(problem, rate)
    last = ca.eigenpairs(ca.Hessian(problem), k=1, tol=1e-6, data_error=False).value
    values = [*(drift.value for drift in drifts), last]
    for before, after, drift in zip(values, values[1:], drifts, strict=False):
        assert (after - before) / rate == pytest.approx(drift.rate, rel=0.1)
    predicted = rate * sum(drift.rate for drift in drifts)
    assert values[-1] - values[0] == pytest.approx(predicted, rel=0.1)
    assert drifts[0].after(rate) == pytest.approx(values[1], rel=1e-3)


def test_the_rate_along_a_direction_is_the_derivative_of_the_dense_eigenvalue() -> None:
    problem = _problem("vit")
    direction = torch.randn(problem.size, dtype=torch.float64)
    direction /= direction.norm()
    drift = ca.sharpness_drift(problem, direction=direction, tol=1e-8)
    start = problem.parameters.clone()

    def largest(step: float) -> float:
        pieces = problem.layout.split((start + step * direction).unsqueeze(-1))
        with torch.no_grad():
            for name, piece in zip(problem.layout.names, pieces, strict=True):
                problem.model.get_parameter(name).copy_(piece[0])
        return ca.eigenpairs(ca.Hessian(problem), k=1, tol=1e-10, data_error=False).value

    slope = (largest(1e-4) - largest(-1e-4)) / 2e-4
    assert drift.rate == pytest.approx(slope, rel=1e-5)
    assert drift.multiplicity == 1
    assert drift.gap > 0


def test_impossible_steps_are_refused() -> None:
    drift = ca.sharpness_drift(_problem("vit"), tol=1e-3)
    with pytest.raises(ValueError, match="learning_rate must be positive"):
        drift.after(-0.1)
