"""CurvatureAwareOptimizer: a regular optimizer, true curvature, and steps that stay stable."""

from __future__ import annotations

import copy
import functools
import io
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.training.directions import (
    diagonal_size,
    kept_share,
    newton_schulz_gain,
    orthogonalised,
    spectral_size,
)
from curvatlas.training.optimizer import MAX_RATE, Control
from half_precision import plain_half_precision


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 3)).to(dtype)


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def take_steps(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step, next(model.parameters()).dtype)
        optimizer.zero_grad()
        value = F.cross_entropy(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# --- directions -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 8, 5), (2, 4, 9), (1, 6, 6)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, _, vt = torch.linalg.svd(matrices, full_matrices=False)
    found = orthogonalised(matrices)
    rotated = u.mT @ found @ vt.mT  # diagonal, its entries the new singular values
    values = rotated.diagonal(dim1=1, dim2=2)
    assert (rotated - torch.diag_embed(values)).abs().max() < 1e-8
    assert values.min() > 0.3
    assert values.max() < 1.3


@pytest.mark.parametrize("shape", [(3, 40, 8), (2, 8, 24), (2, 9, 7)])
def test_the_iterations_are_the_polynomial_of_the_singular_values(shape: tuple[int, ...]) -> None:
    """Also for tall and wide matrices, which are iterated by their Gram matrices alone."""
    generator = torch.Generator().manual_seed(2)
    u, _, vt = torch.linalg.svd(
        torch.randn(shape, dtype=torch.float64, generator=generator), full_matrices=False
    )
    values = torch.logspace(0, -6, u.shape[-1], dtype=torch.float64)
    relative = values / values.norm()
    wanted = u @ torch.diag(relative * newton_schulz_gain(relative)) @ vt
    matrices = u @ torch.diag(values) @ vt
    assert (orthogonalised(matrices) - wanted).abs().max() < 1e-8
    # Rounding of the Gram matrix: its small eigenvalues are then wrong, and q(G) = a all the same.
    assert (orthogonalised(matrices.float()) - wanted).abs().max() < 1e-3


def test_momentum_remembers_a_share_of_the_run_up_to_its_limit() -> None:
    assert [kept_share(0.95, t) for t in (25, 225, 10_000)] == pytest.approx([0.5, 0.9, 0.95])
    weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    optimizer = ca.CurvatureAwareOptimizer([weight], momentum=0.05)
    gradients = torch.randn(3, 4, 3, dtype=torch.float64)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    first, second, third = 1 - 1 / 1.04, 0.05, 0.05
    mean = (1 - first) * gradients[0]
    for keep, gradient in ((second, gradients[1]), (third, gradients[2])):
        mean = keep * mean + (1 - keep) * gradient
    assert torch.allclose(optimizer.state[weight]["momentum"], mean, rtol=1e-12)


def test_matrices_move_along_the_orthogonal_factor_and_vectors_along_the_sign() -> None:
    model = nn.Linear(5, 7).double()
    before = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer = ca.CurvatureAwareOptimizer(model.parameters(), 1e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(2)
    model.weight.grad = torch.randn(7, 5, dtype=torch.float64, generator=generator)
    model.bias.grad = torch.randn(7, dtype=torch.float64, generator=generator)
    optimizer.step()
    moved = before[0] - model.weight.detach()
    expected = orthogonalised(model.weight.grad[None])[0] * 2.2 * math.sqrt(7 / 5) * 1e-3
    assert torch.allclose(moved, expected, rtol=1e-9, atol=1e-14)
    assert torch.allclose(before[1] - model.bias.detach(), 1e-3 * model.bias.grad.sign(), rtol=1e-5)


def test_embeddings_and_the_head_of_a_known_model_are_diagonal() -> None:
    model = zoo.reference_gpt(vocabulary=11, context=8)
    optimizer = ca.CurvatureAwareOptimizer(model)
    tokens = torch.randint(0, 11, (4, 8))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    spectral = {n for n, p in model.named_parameters() if "square" not in optimizer.state[p]}
    assert spectral
    assert all(".attention." in name or ".ffn." in name for name in spectral)
    matrices = {n for n, p in model.blocks.named_parameters("blocks") if p.ndim == 2}
    assert spectral == matrices


# --- a regular optimizer ----------------------------------------------------------------------


def test_it_learns() -> None:
    model = network()
    losses = take_steps(model, ca.CurvatureAwareOptimizer(model), range(120))
    assert losses[-1] < 0.5 * losses[0]


def test_a_resumed_checkpoint_continues_bit_for_bit() -> None:
    straight = network()
    take_steps(straight, ca.CurvatureAwareOptimizer(straight, 8e-3), range(30))
    first = network()
    optimizer = ca.CurvatureAwareOptimizer(first, 8e-3)
    take_steps(first, optimizer, range(17))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    second = network()
    second.load_state_dict(kept["model"])
    resumed = ca.CurvatureAwareOptimizer(second, 1.0)
    resumed.load_state_dict(kept["optimizer"])
    take_steps(second, resumed, range(17, 30))
    assert torch.equal(weights(second), weights(straight))


def test_a_state_of_another_version_is_refused_in_one_line() -> None:
    model = network()
    optimizer = ca.CurvatureAwareOptimizer(model)
    take_steps(model, optimizer, range(2))
    state = optimizer.state_dict()
    for group in state["param_groups"]:  # as curvatlas 0.2 kept it
        del group["base_lr"], group["control"]["last_factor"]
    with pytest.raises(ValueError, match=r"^the state has no base_lr, last_factor: [^\n]+$"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())


def test_a_copy_of_the_optimizer_goes_its_own_way() -> None:
    model = network()
    optimizer = ca.CurvatureAwareOptimizer(model, 8e-3)
    take_steps(model, optimizer, range(5))
    both = copy.deepcopy((model, optimizer))
    take_steps(*both, range(5, 10))
    kept = weights(model).clone()
    take_steps(model, optimizer, range(5, 10))
    assert torch.equal(weights(model), weights(both[0]))
    assert not torch.equal(weights(model), kept)


def test_a_copy_treats_every_parameter_as_the_original_does() -> None:
    model = zoo.reference_gpt(vocabulary=11, context=8, d_model=64, n_layers=1)
    both = copy.deepcopy((model, ca.CurvatureAwareOptimizer(model)))
    tokens = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(0))
    for net, optimizer in ((model, ca.CurvatureAwareOptimizer(model)), both):
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
    assert torch.equal(weights(model), weights(both[0]))


def test_schedulers_set_the_rate() -> None:
    model = network()
    optimizer = ca.CurvatureAwareOptimizer(model, 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for expected in (1e-3, 5e-4, 2.5e-4):
        take_steps(model, optimizer, range(1))
        assert optimizer.learning_rates == [pytest.approx(expected)]
        scheduler.step()


def test_groups_have_their_own_rates_and_can_be_added_later() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = ca.CurvatureAwareOptimizer(groups, 1e-3)
    before = [p.detach().clone() for p in model.parameters()]
    take_steps(model, optimizer, range(3))
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed == [False, False, True, True, False, False]
    optimizer.add_param_group({"params": list(model[3].parameters()), "method": "diagonal"})
    take_steps(model, optimizer, range(3))
    assert not torch.equal(before[-1], model[3].bias)
    assert "square" in optimizer.state[model[3].weight]


@pytest.mark.parametrize("step_sizes", ["role", "block"])
def test_roles_and_blocks_have_a_limit_each(step_sizes: Any) -> None:
    model = zoo.reference_vit(d_model=8).double()
    optimizer = ca.CurvatureAwareOptimizer(model, 0.1, step_sizes=step_sizes, every=1)
    blocks = {group["block"]: group["params"] for group in optimizer.param_groups}
    wanted = {"query", "value", "down", "vectors"} if step_sizes == "role" else {"0.attention"}
    assert wanted <= blocks.keys()
    members = [id(p) for group in blocks.values() for p in group]
    assert sorted(members) == sorted(map(id, model.parameters()))
    x, y = zoo.digits().train.take(32).to(torch.float64)
    for _ in range(12):
        optimizer.step_with_curvature_adaptation(x, y)
    assert len(optimizer.limits) == len(blocks)
    assert len({round(limit, 9) for limit in optimizer.limits}) > 1
    with pytest.raises(ValueError, match="needs the model"):
        ca.CurvatureAwareOptimizer(model.parameters(), step_sizes=step_sizes)


def test_frozen_and_unused_parameters_stay_and_keep_their_state() -> None:
    model = network()
    optimizer = ca.CurvatureAwareOptimizer(model, 5e-3)
    take_steps(model, optimizer, range(4))
    kept, momentum = model[0].weight.detach().clone(), optimizer.state[model[0].weight]["momentum"]
    momentum = momentum.clone()
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    take_steps(model, optimizer, range(4))
    assert torch.equal(model[0].weight, kept)
    assert torch.equal(optimizer.state[model[0].weight]["momentum"], momentum)
    assert float(optimizer.state[model[0].weight]["step"]) == 4
    assert float(optimizer.state[model[3].weight]["step"]) == 8
    model[0].requires_grad_(True)
    take_steps(model, optimizer, range(4))
    assert not torch.equal(model[0].weight, kept)


def test_accumulated_gradients_equal_the_gradient_of_the_whole_batch() -> None:
    x, y = batch()
    results = []
    for parts in (1, 4):
        model = network()
        optimizer = ca.CurvatureAwareOptimizer(model, 5e-3)
        for _ in range(6):
            optimizer.zero_grad()
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(a), b) / parts).backward()
            optimizer.step()
        results.append(weights(model))
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_left_out_and_training_goes_on(bad: float) -> None:
    model = network()
    optimizer = ca.CurvatureAwareOptimizer(model, 5e-3)
    take_steps(model, optimizer, range(5))
    before = weights(model).clone()
    model[3].bias.grad = torch.full_like(model[3].bias, bad)
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert optimizer.skipped == 1
    losses = take_steps(model, optimizer, range(60))
    assert losses[-1] < losses[0]


def test_a_gradient_scaler_skips_overflow_and_unscales_the_rest() -> None:
    model = network(torch.float32)
    optimizer = ca.CurvatureAwareOptimizer(model, 5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    before = weights(model).clone()
    for step in range(3):
        x, y = batch(step, torch.float32)
        optimizer.zero_grad()
        with plain_half_precision():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = F.cross_entropy(model(x).float(), y)
            scaler.scale(value * (math.inf if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert float(optimizer.state[model[0].weight]["step"]) == 2
    assert torch.isfinite(weights(model)).all()
    assert not torch.equal(before, weights(model))


def test_half_precision_weights_keep_their_dtype() -> None:
    model = network(torch.bfloat16)
    with plain_half_precision():
        losses = take_steps(model, ca.CurvatureAwareOptimizer(model, 5e-3), range(60))
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_wrong_use_is_told_in_one_line() -> None:
    model = network()
    with pytest.raises(ValueError, match="base_lr must lie"):
        ca.CurvatureAwareOptimizer(model, -1.0)
    with pytest.raises(ValueError, match="method is one of"):
        ca.CurvatureAwareOptimizer([{"params": model.parameters(), "method": "newton"}])
    with pytest.raises(ValueError, match="has no parameters"):
        ca.CurvatureAwareOptimizer(nn.Tanh())
    with pytest.raises(ValueError, match="step_sizes is"):
        ca.CurvatureAwareOptimizer(model, step_sizes="each")  # type: ignore[arg-type]
    by_parameters = ca.CurvatureAwareOptimizer(model.parameters())
    with pytest.raises(ValueError, match="give it the model itself"):
        by_parameters.step_with_curvature_adaptation(*batch())
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse gradients"):
        ca.CurvatureAwareOptimizer(table.parameters()).step()


# --- curvature --------------------------------------------------------------------------------


class Quadratic(nn.Module):
    """Loss ½ θᵀAθ: the Hessian is A everywhere."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.ones(len(matrix), dtype=matrix.dtype))
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.theta @ self.matrix @ self.theta + 0.0 * x.sum()


def test_the_local_curvature_is_the_hessians() -> None:
    values = torch.tensor([9.0, 4.0, 1.0, 0.5], dtype=torch.float64)
    model = Quadratic(torch.diag(values))
    optimizer = ca.CurvatureAwareOptimizer(model, 1e-3, loss=lambda out, _: out)
    x, y = torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    early = optimizer.estimate_local_curvature(x, y)
    assert early.value == pytest.approx(9.0, rel=1e-6)
    assert early.interval[0] <= 9.0 <= early.interval[1] + 1e-9
    assert early.critical_rate == pytest.approx(2 / 9)
    assert early.along_direction is None
    step = optimizer.step_with_curvature_adaptation(x, y)
    assert float(step) == pytest.approx(float(0.5 * values.sum()))
    later = optimizer.estimate_local_curvature(x, y)
    direction = optimizer.state[model.theta]["direction"]
    assert later.along_direction == pytest.approx(float(direction @ (values * direction)))
    assert later.slope == pytest.approx(float((values * model.theta.detach()) @ direction))
    assert sum(later.role_along_direction.values()) == pytest.approx(later.along_direction)


def test_a_closure_measures_the_exact_curvature_along_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[float, float]] = []
    original = Control.measured

    def watched(self: Control, slope: float, curvature: float) -> None:
        seen.append((slope, curvature))
        original(self, slope, curvature)

    monkeypatch.setattr(Control, "measured", watched)
    values = torch.tensor([9.0, 4.0, 1.0, 0.5], dtype=torch.float64)
    model = Quadratic(torch.diag(values))
    optimizer = ca.CurvatureAwareOptimizer(model.parameters(), 1e-3)
    gradient = values * model.theta.detach()

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = model(torch.zeros(1))
        value.backward()
        return value

    before = model.theta.detach().clone()
    assert float(optimizer.step(closure).detach()) == pytest.approx(float(0.5 * values.sum()))
    step = model.theta.detach() - before
    ((slope, curvature),) = seen
    assert slope == pytest.approx(float(-gradient @ step))
    assert curvature == pytest.approx(float(step @ (values * step)))
    assert torch.allclose(model.theta.grad, gradient)  # as the step used it


def test_measuring_changes_neither_random_numbers_nor_buffers() -> None:
    results = []
    for every in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
        ).double()
        optimizer = ca.CurvatureAwareOptimizer(model, 1e-4, every=every)
        torch.manual_seed(7)
        for step in range(6):
            done = optimizer.step_with_curvature_adaptation(*batch(step))
            assert done.measured == bool(every)
        results.append((weights(model), model[1].running_mean.clone(), torch.rand(1)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_the_limit_shrinks_when_gradients_turn_back_and_grows_again() -> None:
    control = Control()
    for _ in range(10):
        control.follow(overlap=0.5)
        control.stepped(control.rate(1.0), slope=1.0)
    assert control.limit == MAX_RATE
    high = control.limit
    for _ in range(20):
        control.follow(overlap=-0.9)
        control.stepped(control.rate(1.0), slope=1.0)
    assert control.limit < 0.1 * high
    control.stepped(0.1, slope=1.0)
    control.limit = 1.0
    control.measured(slope=1.0, curvature=4.0)  # four times past the lowest point
    assert control.limit == pytest.approx(0.025)


@pytest.mark.parametrize("way", ["plain", "adaptation"])
def test_rates_from_the_largest_on_give_the_same_run_under_a_schedule(way: str) -> None:
    runs = []
    for base in (MAX_RATE, 0.1, 5.0):
        model = network()
        optimizer = ca.CurvatureAwareOptimizer(model, base)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        for step in range(20):
            if way == "plain":
                take_steps(model, optimizer, range(step, step + 1))
            else:
                optimizer.step_with_curvature_adaptation(*batch(step))
            scheduler.step()
        runs.append(weights(model))
        assert optimizer.learning_rates[0] < 0.01 * MAX_RATE  # the decay reached the steps
    # factors lr / base_lr of another base are rounded differently
    assert torch.allclose(runs[1], runs[0], rtol=0, atol=1e-9)
    assert torch.allclose(runs[2], runs[0], rtol=0, atol=1e-9)


def test_one_cycle_rises_to_the_rate_that_is_allowed() -> None:
    model = network()
    optimizer = ca.CurvatureAwareOptimizer(model, 0.02)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=20)
    used = []
    for step in range(20):
        take_steps(model, optimizer, range(step, step + 1))
        used += optimizer.learning_rates
        scheduler.step() if step < 19 else None
    assert used[0] == pytest.approx(0.02 / 25 * 0.5)  # half of it: rates above 0.01 are grown into
    assert max(used) == pytest.approx(0.02, rel=0.05)
    assert used[-1] < 1e-5


def test_a_run_without_a_rate_is_as_good_as_a_tuned_one() -> None:
    """Rates over a factor of thirty, and the default: within 3 % of the best of them."""
    data = zoo.digits()

    def train(rate: float | None) -> float:
        model = zoo.reference_vit(seed=0)
        options = {} if rate is None else {"base_lr": rate}
        optimizer = ca.CurvatureAwareOptimizer(model, **options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        generator = torch.Generator().manual_seed(0)
        for _ in range(60):
            chosen = torch.randint(0, data.train.size, (64,), generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(model(data.train.inputs[chosen]), data.train.targets[chosen]).backward()
            optimizer.step()
            scheduler.step()
        return zoo.evaluate(model, data.validation)[0]

    tried = {rate: train(rate) for rate in (0.0075, MAX_RATE, 0.1, 1.0)}
    best = min(tried.values())
    assert train(None) <= 1.03 * best
    assert all(loss <= 1.03 * best for rate, loss in tried.items() if rate >= MAX_RATE)
    assert tried[0.0075] > 1.1 * best  # a smaller rate is still the user's to choose


def test_sizes_of_directions_do_not_grow_with_the_model() -> None:
    for width in (16, 32, 128, 1024):
        # entries of every matrix of a block: the same part of 1/√width
        for shape in ((width, width), (4 * width, width), (width, 4 * width)):
            entries = spectral_size(*shape) / math.sqrt(max(shape))
            assert entries * math.sqrt(width) == pytest.approx(2.2)
    assert spectral_size(4, 768) == spectral_size(192, 768)  # adapters: as thin as four to one
    assert [diagonal_size(n) for n in (16, 32, 128)] == [1.0, 1.0, 0.25]


def test_a_wide_head_moves_less_and_tables_do_not() -> None:
    model = zoo.reference_gpt(vocabulary=11, context=8, d_model=64, n_layers=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    ca.CurvatureAwareOptimizer(model, 1e-3, weight_decay=0.0).step()
    moved = {n: (p.detach() - before[n]).abs().max() for n, p in model.named_parameters()}
    assert float(moved["head.weight"]) == pytest.approx(0.5e-3, rel=1e-2)
    assert float(moved["token_embedding.weight"]) == pytest.approx(1e-3, rel=1e-2)


def trained_loss(make: Any, way: str = "plain", steps: int = 120) -> float:
    """The reference ViT's loss on held-out digits after so many steps."""
    data, model = zoo.digits(), zoo.reference_vit(seed=0)
    optimizer = make(model)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(0, data.train.size, (64,), generator=generator)
        x, y = data.train.inputs[chosen], data.train.targets[chosen]

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(model(x), y)
            value.backward()
            return value

        if way == "adaptation":
            optimizer.step_with_curvature_adaptation(x, y)
        elif way == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return zoo.evaluate(model, data.validation)[0]


@functools.cache
def losses_of_others() -> tuple[float, float]:
    """Of AdamW and of SGD, at five times the largest rate at which each still learns."""
    return (
        trained_loss(lambda m: torch.optim.AdamW(m.parameters(), 0.3)),
        trained_loss(lambda m: torch.optim.SGD(m.parameters(), 1.5, momentum=0.9)),
    )


@pytest.mark.machine
@pytest.mark.parametrize("way", ["plain", "closure", "adaptation"])
def test_it_survives_rates_at_which_adamw_and_sgd_do_not_learn(way: str) -> None:
    """Five times the largest rate at which each of the two still learns (0.06 and 0.3 here)."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate in (0.3, 1.5):
            assert trained_loss(lambda m, r=rate: ca.CurvatureAwareOptimizer(m, r), way) < 1.2
    assert not min(losses_of_others()) < 0.8 * math.log(10)  # that of chance
