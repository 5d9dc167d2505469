"""The optimizer's own edge: λmax(P⁻¹H) against dense matrices, thresholds against iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.training.directions import orthogonalised
from curvatlas.training.metric import Preconditioned, critical, metric_of
from half_precision import plain_half_precision


def vit() -> nn.Module:
    return zoo.reference_vit(d_model=4, d_ff=4, seed=1).double()


def digits() -> tuple[Tensor, Tensor]:
    inputs, targets = zoo.digits().train.take(24)
    return inputs.double(), targets


def dense_hessian(model: nn.Module) -> Tensor:
    return ca.Hessian(ca.Problem(model.eval(), "cross_entropy", digits())).dense()


def largest(hessian: Tensor, inverse: Tensor) -> float:
    """λmax of diag(inverse) H by its dense symmetric twin."""
    root = inverse.sqrt()
    return float(torch.linalg.eigvalsh(root.unsqueeze(1) * hessian * root)[-1])


def flat(optimizer: Any, model: nn.Module, name: str) -> Tensor:
    return torch.cat([optimizer.state[p][name].reshape(-1) for p in model.parameters()])


def descend(model: nn.Module, optimizers: list[Any], steps: int) -> None:
    x, y = digits()
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def test_the_edge_of_adamw_is_the_dense_one_at_five_points_of_a_run() -> None:
    model, betas, eps, rate = vit(), (0.8, 0.95), 1e-6, 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, eps=eps)
    monitor = ca.Monitor(model, "cross_entropy", digits(), budget=1.0, optimizer=optimizer)
    for point in range(1, 6):
        descend(model, [optimizer], 6)
        snapshot, steps = monitor.measure(), 6 * point
        square = flat(optimizer, model, "exp_avg_sq") / (1 - betas[1] ** steps)
        inverse = 1 / ((1 - betas[0] ** steps) * (square.sqrt() + eps))
        want = largest(dense_hessian(model), inverse)
        assert snapshot.edge == pytest.approx(want, rel=1e-4)
        assert snapshot.edge_threshold == pytest.approx(2 * 1.8 / (0.2 * rate))
        assert snapshot.edge_ratio == pytest.approx(want * 0.2 * rate / 3.6, rel=1e-4)
        assert snapshot.metric == "AdamW"


def rmsprop(model: nn.Module) -> tuple[Any, Callable[[], Tensor], float]:
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, centered=True)

    def inverse() -> Tensor:
        mean = flat(optimizer, model, "grad_avg")
        return 1 / ((flat(optimizer, model, "square_avg") - mean**2).clamp_min(0).sqrt() + 1e-8)

    return optimizer, inverse, 2 * 1.5 / 1e-3


def adagrad(model: nn.Module) -> tuple[Any, Callable[[], Tensor], float]:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    return optimizer, lambda: 1 / (flat(optimizer, model, "sum").sqrt() + 1e-10), 2 / 1e-2


def momentum(model: nn.Module) -> tuple[Any, Callable[[], Tensor], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    size = sum(p.numel() for p in model.parameters())
    return optimizer, lambda: torch.ones(size, dtype=torch.float64), 2 * 1.9 / 0.05


@pytest.mark.parametrize("make", [rmsprop, adagrad, momentum])
def test_other_optimizers_have_their_own_edge(make: Callable[[nn.Module], Any]) -> None:
    model = vit()
    optimizer, inverse, threshold = make(model)
    descend(model, [optimizer], 8)
    monitor = ca.Monitor(model, "cross_entropy", digits(), budget=1.0, optimizer=optimizer)
    snapshot = monitor.measure()
    assert snapshot.edge == pytest.approx(largest(dense_hessian(model), inverse()), rel=1e-4)
    assert snapshot.edge_threshold == pytest.approx(threshold)


def test_the_metric_of_adafactor_turns_the_gradient_into_its_update() -> None:
    """Where a metric is not written down in the state, the update itself is the oracle."""
    model = vit()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2, weight_decay=0.0)
    descend(model, [optimizer], 4)
    before = [p.detach().clone() for p in model.parameters()]
    descend(model, [optimizer], 1)
    problem = ca.Problem(model, "cross_entropy", digits())
    metric = metric_of(problem, [optimizer], None)
    for old, p, piece in zip(before, model.parameters(), metric.pieces, strict=True):
        assert piece is not None
        assert p.grad is not None
        twice = piece.apply(piece.apply(p.grad[None], 1.0), 1.0)[0]
        relative_size = max(1e-3, float(old.norm()) / old.numel() ** 0.5)
        now = max(1e-3, float(p.detach().norm()) / p.numel() ** 0.5)  # the state is after the step
        moved = (old - p.detach()) * piece.threshold / 2
        torch.testing.assert_close(twice * relative_size / now, moved, rtol=1e-9, atol=1e-12)


def test_the_metric_of_muon_turns_momentum_into_its_update() -> None:
    model = vit()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(matrices, lr=0.01, momentum=0.9, nesterov=False, weight_decay=0.0)
    adamw = torch.optim.AdamW(others, lr=1e-3)
    with plain_half_precision():  # which torch orthogonalises in
        descend(model, [muon, adamw], 3)
        before = {id(p): p.detach().clone() for p in matrices}
        descend(model, [muon, adamw], 1)
    problem = ca.Problem(model, "cross_entropy", digits())
    metric = metric_of(problem, [muon, adamw], None)
    assert metric.name == "Muon + AdamW"
    assert metric.threshold is not None
    for p, piece in zip(model.parameters(), metric.pieces, strict=True):
        if p.ndim != 2:
            continue
        assert piece is not None
        momentum = muon.state[p]["momentum_buffer"][None]
        update = piece.apply(piece.apply(momentum, 1.0), 1.0)[0]
        torch.testing.assert_close(update, orthogonalised(momentum)[0], rtol=1e-8, atol=1e-10)
        moved = (before[id(p)] - p.detach()) * piece.threshold * (1 - 0.9) / (2 * 1.9)
        # in bfloat16 small singular values come out otherwise
        assert float((update * moved).sum() / update.norm() / moved.norm()) > 0.95
        assert float(update.norm() / moved.norm()) == pytest.approx(1, abs=0.1)
    snapshot = ca.Monitor(
        model, "cross_entropy", digits(), budget=1.0, optimizer=[muon, adamw]
    ).measure()
    operator = Preconditioned(ca.Hessian(problem), problem, metric, scale=1.0)
    want = float(torch.linalg.eigvalsh(operator.dense())[-1])
    assert snapshot.edge == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    ("mu", "averaged", "nesterov"),
    [(0.0, False, False), (0.9, False, False), (0.7, True, False), (0.9, False, True)],
)
def test_errors_shrink_below_the_threshold_and_grow_above_it(
    mu: float, averaged: bool, nesterov: bool
) -> None:
    rate = 0.1
    edge = critical(rate, mu, averaged=averaged, nesterov=nesterov)

    def grown(curvature: float) -> float:
        theta, velocity = 1.0, 0.0
        for _ in range(4000):
            gradient = curvature * theta
            share = (1 - mu) if averaged else 1.0
            velocity = mu * velocity + share * gradient
            ahead = share * gradient + mu * velocity if nesterov else velocity
            theta -= rate * ahead
            if not abs(theta) < 1e12:
                break
        return abs(theta)

    assert grown(0.99 * edge) < 1e-3
    assert grown(1.01 * edge) > 1e3


def test_groups_with_their_own_rates_are_weighed_by_them() -> None:
    model = vit()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:4], "lr": 0.1}, {"params": parameters[4:], "lr": 0.02}]
    optimizer = torch.optim.SGD(groups)
    monitor = ca.Monitor(model, "cross_entropy", digits(), budget=1.0, optimizer=optimizer)
    snapshot = monitor.measure()
    weights = torch.cat(
        [torch.full((p.numel(),), 1.0 if k < 4 else 0.2) for k, p in enumerate(parameters)]
    )
    assert snapshot.edge == pytest.approx(largest(dense_hessian(model), weights.double()), rel=1e-4)
    assert snapshot.edge_threshold == pytest.approx(20.0)


def test_parameters_that_the_optimizer_does_not_have_stand_still() -> None:
    model = vit()
    chosen = list(model.parameters())[4:]
    optimizer = torch.optim.SGD(chosen, lr=0.1)
    monitor = ca.Monitor(model, "cross_entropy", digits(), budget=1.0, optimizer=optimizer)
    weights = torch.cat(
        [torch.full((p.numel(),), float(k >= 4)) for k, p in enumerate(model.parameters())]
    )
    want = largest(dense_hessian(model), weights.double())
    assert monitor.measure().edge == pytest.approx(want, rel=1e-4)


def test_an_unknown_optimizer_has_the_plain_edge_and_history_and_page_say_so(
    tmp_path: Path,
) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = vit()
    odd = Odd(model.parameters(), lr=0.1, momentum=0.9)
    monitor = ca.Monitor(model, "cross_entropy", digits(), budget=1.0, optimizer=odd)
    snapshot = monitor.measure(step=0)
    monitor.measure(step=1)
    page = ca.training_page(monitor.history, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "the metric of Odd is not known" in page
    assert snapshot.metric == "plain (the metric of Odd is not known)"
    assert snapshot.edge == snapshot.sharpness
    assert snapshot.edge_threshold == pytest.approx(20.0)


def test_the_curvature_aware_optimizer_tells_that_it_limits_its_own_rate() -> None:
    for adapts in (True, False):
        model = vit()
        optimizer = ca.CurvatureAwareOptimizer(model, curvature_adaptation=adapts)
        monitor = ca.Monitor(model, "cross_entropy", digits(), budget=1.0, optimizer=optimizer)
        assert monitor.measure().rate_limited == adapts


def test_before_the_first_step_adam_has_the_plain_edge() -> None:
    model = vit()
    optimizer = torch.optim.Adam(model.parameters())
    monitor = ca.Monitor(model, "cross_entropy", digits(), budget=1.0, optimizer=optimizer)
    snapshot = monitor.measure()
    assert "no step" in snapshot.metric
    assert snapshot.edge == snapshot.sharpness


def test_a_key_bias_in_float32_does_not_pass_for_curvature() -> None:
    """Adam divides what has no gradient by theory by its ε: 1e8 times rounding."""
    model = zoo.reference_vit(d_model=4, d_ff=4, seed=1)
    x, y = digits()
    data = (x.float(), y)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(model(data[0]), y).backward()
        optimizer.step()
    monitor = ca.Monitor(model, "cross_entropy", data, budget=1.0, optimizer=optimizer)
    snapshot = monitor.measure()
    square = flat(optimizer, model, "exp_avg_sq").double() / (1 - 0.999**12)
    inverse = 1 / ((1 - 0.9**12) * (square.sqrt() + 1e-8))
    want = largest(dense_hessian(model.double()), inverse)
    assert float(inverse.max()) > 1e6  # the key's bias is there
    assert snapshot.edge == pytest.approx(want, rel=1e-3)


def test_rows_of_tokens_never_met_stand_still() -> None:
    table = nn.Embedding(5, 3)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(6, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        tokens = torch.tensor([[0, 1], [1, 2]])
        F.cross_entropy(model(tokens), torch.tensor([0, 1])).backward()
        optimizer.step()
    met, unmet = torch.tensor([[0, 1], [2, 1]]), torch.tensor([[0, 4], [3, 1]])
    targets = torch.tensor([1, 2])
    for tokens in (met, unmet):
        monitor = ca.Monitor(
            model, "cross_entropy", (tokens, targets), budget=1.0, optimizer=optimizer
        )
        snapshot = monitor.measure()
        assert snapshot.edge_ratio is not None
        assert 0 < snapshot.edge_ratio < 10
        assert math.isfinite(snapshot.edge_ratio)
