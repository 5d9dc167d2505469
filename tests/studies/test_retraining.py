"""Minima of more and more samples: against closed forms, with controls, flags and resumption."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.studies.retraining import CURVES, _larger, scattered_curve

PENALTY = 0.05


class Line(nn.Module):
    """Ridge regression: the minimum has a closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def ridge() -> tuple[ca.Problem, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(90, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.5 * noise
    data = [(x[i : i + 40], y[i : i + 40]) for i in (0, 40, 80)]  # uneven batches
    return ca.Problem(Line(), "mse", data), x, y


def minimum(x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """min of mean (xw − y)² + μ‖w − 1‖²/2, by the normal equations."""
    gram = 2 * x.T @ x / len(x) + PENALTY * torch.eye(3, dtype=torch.float64)
    weights = torch.linalg.solve(gram, 2 * x.T @ y / len(x) + PENALTY)
    return loss(x, y, weights), weights


def loss(x: Tensor, y: Tensor, weights: Tensor) -> float:
    return float((x @ weights - y).square().mean() + PENALTY * (weights - 1).square().sum() / 2)


@functools.cache
def found() -> ca.RetrainedConvergence:
    return ca.retrained_convergence(
        ridge()[0],
        sizes=(10, 20, 40, 80),
        orders=5,
        steps=8,
        batch_size=8,
        penalty=PENALTY,
        tolerance=1e-5,
    )


def test_minima_and_their_changes_are_those_of_the_closed_form() -> None:
    _, x, y = ridge()
    orders = [
        torch.randperm(90, generator=generator)
        for generator in [torch.Generator().manual_seed(0)]
        for _ in range(5)
    ]
    for place, k in enumerate(found().sizes):
        levels, retrained, fixed = [], [], []
        for order in orders:
            few, more = order[:k], order[: k + 1]
            least, weights = minimum(x[few], y[few])
            levels.append(least)
            retrained.append(abs(minimum(x[more], y[more])[0] - least))
            fixed.append(abs(loss(x[more], y[more], weights) - least))
        for cell in found().cells:
            assert cell.converged == 1
            assert float(cell.loss.mean[place]) == pytest.approx(np.mean(levels), rel=1e-8)
            # a convex loss has one minimum: it does not matter how it is found
            for name in ("retrained", "followed"):
                mean = float(cell.curves[name].mean[place])
                assert mean == pytest.approx(np.mean(retrained), rel=1e-5)
            assert float(cell.curves["fixed"].mean[place]) == pytest.approx(
                np.mean(fixed), rel=1e-5
            )
            assert float(cell.curves["control"].mean[place]) < 1e-3 * np.mean(retrained)


def test_every_optimizer_has_every_schedule_and_a_convex_loss_falls_as_averages_do() -> None:
    cells = found().cells
    assert {(c.optimizer, c.schedule) for c in cells} == {
        (o, s) for o in ("sgd", "adam", "rmsprop") for s in ("cosine", "constant")
    }
    for cell in cells:
        law = cell.curves["retrained"].fit
        assert law is not None
        assert law.interval[0] < -1 < law.interval[1]
        assert cell.control_p_value < 1e-3
        assert "as averaging alone does" in cell.verdict
    assert found()["sgd", "cosine"] is cells[0]
    with pytest.raises(KeyError, match="there is no cell"):
        found()["lion", "cosine"]
    assert len(found().plot().axes) == 6
    assert "retrained" in str(found())


def test_a_run_that_is_no_minimum_is_flagged_and_left_out() -> None:
    stopped = ca.retrained_convergence(
        ridge()[0],
        optimizers=["sgd"],
        schedules=["constant"],
        sizes=(10, 20, 40, 80),
        orders=3,
        steps=2,
        polish=0,
        penalty=PENALTY,
    ).cells[0]
    assert stopped.converged < 0.5
    assert "NOT at a minimum" in str(stopped)
    assert stopped.left_out
    assert "too few" in stopped.verdict
    assert stopped.curves["retrained"].fit is None
    diverged = ca.retrained_convergence(
        ridge()[0],
        optimizers={"hot": lambda p: torch.optim.SGD(p, lr=1e30)},
        schedules=["constant"],
        sizes=(10, 20, 40, 80),
        orders=3,
        steps=20,
    ).cells[0]
    assert diverged.converged == 0
    assert len(diverged.left_out) == 4


def test_basins_of_a_network_make_the_control_as_large_as_the_change() -> None:
    torch.manual_seed(0)
    model = zoo.MLP(zoo.MLPConfig(inputs=4, outputs=2, width=6, n_layers=1)).double()
    x = torch.randn(40, 4, dtype=torch.float64)
    problem = ca.Problem(model, "cross_entropy", (x, (x[:, 0] * x[:, 1] > 0).long()))
    before = problem.parameters
    cell = ca.retrained_convergence(
        problem,
        optimizers=["adam"],
        schedules=["constant"],
        sizes=(12, 16, 22, 30),
        orders=3,
        steps=16,
        batch_size=4,
        rates={"adam": 0.05},
    ).cells[0]
    assert torch.equal(before, problem.parameters)
    assert cell.converged > 0.5
    control = cell.curves["control"].mean
    assert float(control.max()) > 0
    assert float(cell.gap.mean[0]) > 0  # samples that were not used are harder


@pytest.mark.draws
def test_it_resumes_point_by_point_and_the_page_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "optimizers": ["adam"],
        "schedules": ["cosine"],
        "sizes": (10, 20, 40, 80),
        "orders": 3,
        "steps": 5,
        "penalty": PENALTY,
        "output": tmp_path / "run",
    }
    from curvatlas.studies import retraining

    measure, calls = retraining._measured, []

    def stops(*arguments: Any) -> dict[str, float]:
        calls.append(arguments[2])
        if len(calls) == 8:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(retraining, "_measured", stops)
    with pytest.raises(KeyboardInterrupt):
        ca.retrained_convergence(ridge()[0], **options)
    first = ca.retrained_convergence(ridge()[0], **options)
    assert calls == [10] * 3 + [20] * 3 + [40] * 2 + [40] * 3 + [80] * 3
    again = ca.retrained_convergence(ridge()[0], **options)
    assert len(calls) == 14
    assert again.to_dict() == first.to_dict()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "The minimum, trained again" in page
    assert "adam, cosine" in page


def test_a_control_without_chance_is_no_comparison() -> None:
    changes = [torch.linspace(1.0, 2.0, 12)]
    assert _larger(changes, [torch.full((12,), 0.1)]) < 1e-3
    assert _larger(changes, [torch.full((12,), 9.0)]) > 0.99
    assert math.isnan(_larger(changes, [torch.zeros(12)]))
    assert math.isnan(_larger([], []))


def test_intervals_of_exponents_cover_the_true_one() -> None:
    random = np.random.default_rng(0)
    sizes = (16, 32, 64, 128, 256)
    hits = 0
    for _ in range(400):
        points = [(k, torch.from_numpy(np.abs(random.standard_normal(4)) * k**-1.0)) for k in sizes]
        law = scattered_curve("x", points).fit
        assert law is not None
        hits += law.interval[0] <= -1 <= law.interval[1]
    assert hits / 400 >= 0.92


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sizes": (20, 40, 80)}, "needs 4 or more numbers of samples"),
        ({"sizes": (5, 20, 40, 80)}, "from 10 to 88"),
        ({"sizes": (20, 40, 60, 89)}, "from 10 to 88"),
        ({"orders": 2}, "needs 3 or more, got 2"),
        ({"optimizers": ["lion"]}, "optimizers are sgd, adam"),
        ({"optimizers": []}, "got none"),
        ({"schedules": ["linear"]}, "schedules are cosine, constant"),
        ({"rates": {"sgd": -1.0}}, "positive number"),
        ({"steps": 0}, "at least 1"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_trained(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ca.retrained_convergence(ridge()[0], **options)
    assert len(CURVES) == 5
