"""The Taylor framework against differences along lines, quadratic models and real training."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from curvatlas import zoo
from curvatlas.analysis.landscape.line import Line
from curvatlas.article import TaylorExpansionAnalyzer
from curvatlas.problem import Problem
from oracles import with_hand_written_norms

DIGITS = zoo.digits()


def small_vit(**options: object) -> nn.Module:
    model = zoo.reference_vit(**{"d_model": 8, **options}).double().eval()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += 0.1 * noise
    return model


def batch(count: int = 6, start: int = 0) -> tuple[Tensor, Tensor]:
    samples = DIGITS.train.to(torch.float64)
    return samples.inputs[start : start + count], samples.targets[start : start + count]


def direction_of(model: nn.Module, seed: int, norm: float) -> Tensor:
    size = sum(p.numel() for p in model.parameters())
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return norm * drawn / drawn.norm()


def terms_by_differences(
    model: nn.Module, data: tuple[Tensor, Tensor], direction: Tensor
) -> np.ndarray:
    """The first four Taylor terms from losses on the line, by a Chebyshev fit of degree 22."""
    names = [name for name, _ in model.named_parameters()]
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    reach = 0.5
    nodes = np.cos(np.pi * (np.arange(24) + 0.5) / 24)
    values = []
    for node in nodes:
        moved, at = start + float(node) * reach * direction, 0
        state = {}
        for name, parameter in model.named_parameters():
            state[name] = moved[at : at + parameter.numel()].reshape(parameter.shape)
            at += parameter.numel()
        with torch.no_grad():
            outputs = torch.func.functional_call(model, {n: state[n] for n in names}, (data[0],))
            values.append(float(nn.functional.cross_entropy(outputs, data[1])))
    fit = np.polynomial.chebyshev.Chebyshev.fit(nodes, values, 22)
    powers = fit.convert(kind=np.polynomial.Polynomial).coef[:4]
    return powers / reach ** np.arange(4)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_terms_agree_with_high_order_differences_along_the_line(
    norm_first: bool, norm: str
) -> None:
    model = small_vit(norm_first=norm_first, norm=norm, activation="gelu")
    d = direction_of(model, 3, 1.5)
    found = TaylorExpansionAnalyzer(model).compute_taylor_coefficients(
        *batch(), displacement=d, bound_points=0
    )
    want = terms_by_differences(model, batch(), d)
    got = np.array([found.constant, found.linear, found.quadratic, found.cubic])
    assert (np.abs(got - want) <= 1e-8 * np.abs(want)).all(), (got, want)  # term by term
    assert found.cubic_error == 0.0
    assert abs(found.cubic) > 1e-6  # a zero would pass for small terms otherwise


def test_third_and_fourth_derivatives_are_those_of_hand_written_norms() -> None:
    model = small_vit(norm_first=True, activation="swiglu")
    written = with_hand_written_norms(copy.deepcopy(model))
    d = direction_of(model, 5, 1.0)
    got = Line(Problem(model, "cross_entropy", batch()), d).derivatives(4)
    want = Line(Problem(written, "cross_entropy", batch()), d).derivatives(4)
    assert np.allclose(got, want, rtol=1e-11)


def test_difference_of_k_and_k_plus_one_samples_expands_term_by_term() -> None:
    model = small_vit()
    analyzer = TaylorExpansionAnalyzer(model)
    d = direction_of(model, 11, 0.3)
    k, more = batch(4), batch(5)
    both = analyzer.compute_taylor_coefficients(k, more, displacement=d, bound_points=3)
    alone = [
        analyzer.compute_taylor_coefficients(*data, displacement=d, bound_points=0)
        for data in (k, more)
    ]
    for term in ("constant", "linear", "quadratic", "cubic", "actual"):
        want = getattr(alone[1], term) - getattr(alone[0], term)
        assert getattr(both, term) == pytest.approx(want, abs=1e-12)
    assert abs(both.remainder) <= both.remainder_bound


def test_quadratic_loss_has_no_remainder_and_any_radius() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.ones(5, 1, dtype=torch.float64)
    d = torch.tensor([0.3, -2.0, 1.0], dtype=torch.float64)
    analyzer = TaylorExpansionAnalyzer(model, loss="mse")
    found = analyzer.compute_taylor_coefficients(x, y, displacement=d)
    hessian = 2 * x.T @ x / 5
    assert found.quadratic == pytest.approx(float(d @ hessian @ d) / 2, rel=1e-13)
    assert abs(found.cubic) < 1e-13
    assert abs(found.remainder) < 1e-13
    assert found.quadratic_holds


@pytest.mark.parametrize("seed", range(6))
def test_remainder_stays_within_its_bound(seed: int) -> None:
    model = small_vit(norm_first=bool(seed % 2))
    d = direction_of(model, seed, 0.2 * 2**seed)
    found = TaylorExpansionAnalyzer(model).compute_taylor_coefficients(*batch(), displacement=d)
    assert abs(found.remainder) <= found.remainder_bound
    assert found.remainder_bound <= 300 * abs(found.remainder) + 1e-12


def test_a_checkpoint_is_reached_by_its_own_displacement() -> None:
    model, there = small_vit(), small_vit(seed=3)
    found = TaylorExpansionAnalyzer(model).compute_taylor_coefficients(
        batch(), checkpoint=there, bound_points=0, check=False
    )
    assert found.actual == pytest.approx(Problem(there, "cross_entropy", batch()).value())


def test_a_wrong_third_derivative_is_noticed_and_replaced() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):  # type: ignore[no-untyped-def]
            return t.clone()

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            return g * 1.5

    class Cubic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.7, -0.4], dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return Second.apply(self.w).sum() * x

    class Second(torch.autograd.Function):  # w³, whose third derivative is 1.5 times too large
        @staticmethod
        def forward(ctx, w):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(w)
            return w**3

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            (w,) = ctx.saved_tensors
            return First.apply(w) * g

    class First(torch.autograd.Function):  # 3w²
        @staticmethod
        def forward(ctx, w):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(w)
            return 3 * w**2

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            (w,) = ctx.saved_tensors
            return 6 * Wrong.apply(w) * g

    x = torch.ones(1, 1, dtype=torch.float64)
    d = torch.tensor([0.5, 0.3], dtype=torch.float64)
    with pytest.warns(UserWarning, match="third derivative"):
        found = TaylorExpansionAnalyzer(
            Cubic(), loss=lambda z, y: z.sum()
        ).compute_taylor_coefficients(x, x, displacement=d, bound_points=0)
    assert found.cubic == pytest.approx(float((d**3).sum()), rel=1e-4)
    assert found.cubic_error > 0


@pytest.mark.slow
def test_predicted_change_of_every_sgd_step_is_within_one_percent_where_the_radius_says_so() -> (
    None
):
    model = zoo.reference_vit(d_model=8, patch_size=4, seed=1).double()
    samples = DIGITS.train.to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    claimed = 0
    for step in range(24):
        chosen = torch.randint(0, samples.size, (8,), generator=generator)
        data = samples.inputs[chosen], samples.targets[chosen]
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rate = 0.02 * 3.0 ** (step % 4)  # some steps short, some beyond the radius
        found = TaylorExpansionAnalyzer(model).compute_taylor_coefficients(
            *data, displacement=[-rate * g for g in grads], bound_points=3, check=False
        )
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), grads, strict=True):
                parameter -= rate * gradient
        after = nn.functional.cross_entropy(model(data[0]), data[1]).item()
        assert found.actual == pytest.approx(after, rel=1e-12)
        if found.quadratic_holds:
            claimed += 1
            change = after - loss.item()
            error = abs(found.predicted_change - change) / abs(change)
            assert error <= 0.01, (step, error)
    assert 8 <= claimed <= 23, claimed  # the radius is neither empty nor blind


def test_radius_is_honest_and_not_empty() -> None:
    model = small_vit()
    found = TaylorExpansionAnalyzer(model).radius(*batch(), accuracy=0.02)
    assert found.worst_inside <= 0.02
    assert 0 < found.radius < found.measured_radius <= 20 * found.radius
    cubic = TaylorExpansionAnalyzer(model).radius(*batch(), accuracy=0.02, order=3)
    assert cubic.worst_inside <= 0.02


class Quadratic(nn.Module):
    """½ θᵀAθ + bᵀθ as outputs: its Hessian is A."""

    def __init__(self, matrix: Tensor, slope: Tensor, start: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(start.clone())
        self.matrix, self.slope = matrix, slope

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 * self.theta @ self.matrix @ self.theta + self.slope @ self.theta)


def quadratic(size: int = 30, seed: int = 0) -> tuple[Quadratic, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    values = torch.cat([torch.tensor([9.0, 5.0]), torch.linspace(0.01, 1.0, size - 2)]).double()
    slope, start = torch.randn(2, size, generator=generator, dtype=torch.float64)
    return Quadratic(q @ torch.diag(values) @ q.T, slope, start), values


ONE = (torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_trajectory_prediction_is_exact_on_a_quadratic(momentum: float) -> None:
    model, _ = quadratic()
    analyzer = TaylorExpansionAnalyzer(model, loss=lambda z, y: z.mean())
    found = analyzer.predict_convergence_trajectory(25, 0.15, *ONE, momentum=momentum, modes=30)
    assert found.actual is not None
    assert torch.allclose(found.losses, found.actual, rtol=1e-9, atol=1e-9)
    theta = model.theta.detach().clone().requires_grad_(True)  # torch's own SGD as the oracle
    optimizer = torch.optim.SGD([theta], lr=0.15, momentum=momentum)
    for _ in range(25):
        optimizer.zero_grad()
        (0.5 * theta @ model.matrix @ theta + model.slope @ theta).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    final = 0.5 * theta @ model.matrix @ theta + model.slope @ theta
    assert float(found.losses[-1]) == pytest.approx(float(final.detach()), rel=1e-9)
    assert found.critical_learning_rate == pytest.approx(2 * (1 + momentum) / 9.0, rel=1e-6)


def test_few_modes_predict_early_steps_exactly() -> None:
    model, _ = quadratic(60)
    analyzer = TaylorExpansionAnalyzer(model, loss=lambda z, y: z.mean())
    found = analyzer.predict_convergence_trajectory(12, 0.2, *ONE, modes=6)
    assert found.exact_steps == 6
    assert found.actual is not None
    assert torch.allclose(found.losses[:7], found.actual[:7], rtol=1e-9, atol=1e-10)


def test_vit_trajectory_is_predicted_while_the_quadratic_model_holds() -> None:
    model = small_vit()
    before = [p.detach().clone() for p in model.parameters()]
    found = TaylorExpansionAnalyzer(model).predict_convergence_trajectory(5, 0.01, *batch())
    assert found.largest_relative_error is not None
    assert found.largest_relative_error < 0.05
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_training_just_below_and_above_confirms_the_critical_rate(momentum: float) -> None:
    found = TaylorExpansionAnalyzer(small_vit()).critical_learning_rate(
        *batch(), momentum=momentum, ratios=(0.9, 1.1), steps=24
    )
    assert found.confirmed, str(found)
    if momentum == 0.0:
        assert found.growth == pytest.approx(found.expected, rel=0.02)
        assert found.expected == pytest.approx((0.8, 1.2))


def test_critical_rate_of_a_float32_model_is_confirmed_too() -> None:
    x, y = batch()
    found = TaylorExpansionAnalyzer(small_vit().float()).critical_learning_rate(
        x.float(), y, ratios=(0.9, 1.1), steps=8
    )
    assert found.confirmed, str(found)
    assert found.growth == pytest.approx(found.expected, rel=0.02)


def test_hessian_from_weights_recovers_a_quadratic() -> None:
    model, values = quadratic(12)
    weights, rate = [model.theta.detach().clone()], 0.1
    for _ in range(30):
        w = weights[-1]
        weights.append(w - rate * (model.matrix @ w + model.slope))
    found = TaylorExpansionAnalyzer(model).estimate_hessian_from_trajectory(
        torch.stack(weights), rate
    )
    assert found.value == pytest.approx(float(values.max()), rel=1e-6)
    assert found.interval[0] <= float(values.max()) <= found.interval[1]


def test_hessian_from_a_vit_run_covers_the_true_curvature_of_its_span() -> None:
    model = small_vit()
    analyzer = TaylorExpansionAnalyzer(model)
    problem = Problem(model, "cross_entropy", batch())
    from curvatlas.analysis.landscape.taylor import Descent
    from curvatlas.operators.curvature import Hessian

    descent = Descent(problem)
    weights, gradients = [problem.parameters], []
    for _ in range(8):
        gradients.append(descent.at(weights[-1])[1])
        weights.append(weights[-1] - 0.02 * gradients[-1])
    found = analyzer.estimate_hessian_from_trajectory(
        torch.stack(weights[:-1]), gradients=torch.stack(gradients)
    )
    torch.nn.utils.vector_to_parameters(weights[4], model.parameters())
    steps = torch.stack([b - a for a, b in pairwise(weights[:8])]).T
    q = torch.linalg.svd(steps, full_matrices=False)[0][:, : len(found.values)]
    true = torch.linalg.eigvalsh(q.T @ (Hessian(problem) @ q))[-1]
    assert found.interval[0] <= float(true) <= found.interval[1]


def test_hessian_from_losses_recovers_the_rate_of_one_mode() -> None:
    curvature, rate = 1.7, 0.1
    w = 2.0 * (1 - rate * curvature) ** np.arange(40)
    found = TaylorExpansionAnalyzer(nn.Linear(1, 1)).estimate_hessian_from_trajectory(
        list(0.5 * curvature * w**2 + 3.0), rate
    )
    assert found.value == pytest.approx(curvature, rel=1e-4)
    assert found.interval[0] <= curvature + 1e-4
    assert found.interval[1] >= curvature - 1e-4


def test_methods_without_data_say_what_is_missing() -> None:
    with pytest.raises(ValueError, match="no data yet"):
        TaylorExpansionAnalyzer(small_vit()).predict_convergence_trajectory(3, 0.1)
    with pytest.raises(ValueError, match="displacement= or checkpoint="):
        TaylorExpansionAnalyzer(small_vit()).compute_taylor_coefficients(*batch())
    wrong = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="flat vector"):
        TaylorExpansionAnalyzer(small_vit()).compute_taylor_coefficients(
            *batch(), displacement=wrong
        )


def test_a_broken_trajectory_is_refused() -> None:
    analyzer = TaylorExpansionAnalyzer(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="NaN or infinite"):
        analyzer.estimate_hessian_from_trajectory([3.0, 2.0, float("nan"), 1.0], 0.1)
    with pytest.raises(ValueError, match="learning rate must be positive"):
        analyzer.estimate_hessian_from_trajectory([3.0, 2.0, 1.5, 1.2], -0.1)


def _reference(kind: str, seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    if kind == "gpt":
        text = zoo.text(level="character", context=16)
        gpt = zoo.reference_gpt(seed=seed, vocabulary=text.classes, context=16)
        return gpt.double().eval(), tuple(text.train.take(8))  # type: ignore[return-value]
    model = zoo.reference_vit(seed=seed)
    if kind == "trained vit":
        zoo.train(model, DIGITS, steps=60, seed=seed)
    return model.double().eval(), batch(24)


@pytest.mark.parametrize("kind", ["vit", "trained vit", "gpt"])
def test_within_its_horizon_a_prediction_is_within_its_tolerance(kind: str) -> None:
    reached = 0
    for seed, rate, momentum, tolerance in ((0, 0.03, 0.0, 0.1), (1, 0.02, 0.8, 0.05)):
        model, data = _reference(kind, seed)
        found = TaylorExpansionAnalyzer(model).predict_convergence_trajectory(
            24,
            rate / 10 if kind == "gpt" else rate,
            *data,
            momentum=momentum,
            modes=24,
            tolerance=tolerance,
        )
        assert found.relative_errors is not None
        assert found.horizon is not None
        assert bool((found.relative_errors[: found.horizon] <= tolerance).all()), str(found)
        assert found.measured_horizon is not None
        assert found.horizon <= found.measured_horizon
        reached += found.horizon
    assert reached >= 4  # a horizon of zero everywhere would be no news


def test_a_prediction_says_that_the_end_lies_beyond_its_horizon() -> None:
    model, data = _reference("vit", 0)
    rate = TaylorExpansionAnalyzer(model).critical_learning_rate(*data, steps=2).value / 10
    found = TaylorExpansionAnalyzer(model).predict_convergence_trajectory(60, rate, *data)
    assert found.actual is not None
    assert abs(float(found.losses[-1] - found.actual[-1])) > 0.3  # so far off is the last step
    assert found.horizon is not None
    assert 2 <= found.horizon < 30
    assert f"holds within 10% for {found.horizon} steps" in str(found)
    assert "no forecast beyond" in str(found)
    assert [row["holds"] for row in found].count(True) == found.horizon + 1
    alone = TaylorExpansionAnalyzer(model).predict_convergence_trajectory(
        60, rate, *data, compare=False
    )
    assert alone.horizon == found.horizon  # known without the real run
    labels = [line.get_label() for line in found.plot().axes[0].lines]
    assert "beyond its horizon (10%)" in labels


def test_on_a_quadratic_only_the_modes_left_out_end_the_horizon() -> None:
    model, _ = quadratic(60)
    analyzer = TaylorExpansionAnalyzer(model, loss=lambda z, y: z.mean())
    assert analyzer.predict_convergence_trajectory(40, 0.2, *ONE, modes=60).holds
    few = analyzer.predict_convergence_trajectory(40, 0.2, *ONE, modes=6, tolerance=0.01)
    assert few.horizon is not None
    assert few.measured_horizon is not None
    assert 6 <= few.horizon <= few.measured_horizon
