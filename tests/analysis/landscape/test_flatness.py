"""Flatness against independent oracles: restarts of ascent, dense matrices, closed forms."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import curvatlas as ca
from curvatlas import zoo
from curvatlas.analysis.landscape import pac_bayes
from curvatlas.analysis.landscape.pac_bayes import _Bound, inverse_kl
from curvatlas.errors import ProblemError
from curvatlas.problem import Problem
from digit_problems import SAMPLES, vit_problem
from huggingface_models import tiny_model


@functools.cache
def _trained(seed: int, **options: Any) -> nn.Module:
    model = zoo.reference_vit(seed=seed, **{"d_model": 6, "patch_size": 4, "d_ff": 8, **options})
    zoo.train(model, zoo.digits(), steps=60, seed=seed)
    return model.double().eval()


def trained_vit(seed: int, count: int = 16, **options: Any) -> Problem:
    model = copy.deepcopy(_trained(seed, **options))
    return Problem(model, "cross_entropy", tuple(SAMPLES.take(count)))


# --- SAM and ASAM ---------------------------------------------------------------------------------


def restarted_ascent(problem: Problem, radius: float, *, adaptive: bool) -> float:
    """Projected gradient ascent from 50 points of the sphere at once, by ``vmap``."""
    (batch,) = problem.batches()
    names, layout = problem.parameter_names, problem.layout
    center = problem.parameters
    scale = center.abs() if adaptive else torch.ones_like(center)

    def loss(u: Tensor) -> Tensor:
        pieces = layout.split(center + scale * u)
        state = {n: p.squeeze(0) for n, p in zip(names, pieces, strict=True)}
        outputs = torch.func.functional_call(problem.model, state, (batch.inputs,))
        return nn.functional.cross_entropy(outputs, batch.targets)

    climb = torch.func.vmap(torch.func.grad_and_value(loss))
    generator = torch.Generator().manual_seed(11)
    u = torch.randn(50, problem.size, generator=generator, dtype=torch.float64)
    u *= radius / u.norm(dim=1, keepdim=True)
    for step in range(45):
        gradient, _ = climb(u)
        rate = 0.3 if step < 30 else 0.1
        u = u + rate * radius * gradient / gradient.norm(dim=1, keepdim=True)
        u *= (radius / u.norm(dim=1, keepdim=True)).clamp(max=1.0)
    return float(climb(u)[1].max()) - problem.value()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("adaptive", "radius"), [(False, 0.05), (False, 0.6), (True, 0.5)])
def test_sharpness_is_that_of_fifty_restarts(seed: int, adaptive: bool, radius: float) -> None:
    problem = trained_vit(seed)
    found = ca.sharpness_by_ascent(problem, radius=radius, adaptive=adaptive)
    assert found.value == pytest.approx(
        restarted_ascent(problem, radius, adaptive=adaptive), rel=0.01
    )
    assert found.certified, str(found)
    assert found.quantity == ("ASAM" if adaptive else "SAM")
    reached = torch.linalg.vector_norm(
        found.direction / problem.parameters.abs() if adaptive else found.direction
    )
    assert float(reached) <= radius * (1 + 1e-9)


class Quadratic(nn.Module):
    """L(θ) = ½ θᵀAθ + b·θ, whatever the data."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = torch.randn(size, size, generator=generator, dtype=torch.float64)
        self.register_buffer("matrix", draw + draw.T)  # indefinite
        self.register_buffer("slope", torch.randn(size, generator=generator, dtype=torch.float64))
        self.theta = nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        value = 0.5 * self.theta @ self.matrix @ self.theta + self.slope @ self.theta
        return value.expand(len(x))


def test_on_a_quadratic_the_ascent_finds_the_maximum_of_the_secular_equation() -> None:
    for seed in range(4):
        model = Quadratic(12, seed)
        ones = torch.ones(1, dtype=torch.float64)
        problem = Problem(model, lambda z, y: z.mean(), (ones, ones))
        found = ca.sharpness_by_ascent(problem, radius=0.7, steps=400)
        values, vectors = torch.linalg.eigh(model.matrix)
        gradient = vectors.T @ (model.matrix @ model.theta + model.slope).detach()
        top = float(values[-1])
        shift = brentq(
            lambda mu, g=gradient, v=values: float((g / (mu - v)).norm()) - 0.7,
            top + 1e-9, top + 1e3, xtol=1e-13,
        )  # fmt: skip
        u = gradient / (shift - values)
        maximum = float(gradient @ u + 0.5 * (values * u) @ u)
        assert found.value == pytest.approx(maximum, rel=1e-5)
        assert found.quadratic == pytest.approx(maximum, rel=1e-3)
        assert found.multiplier == pytest.approx(shift, rel=1e-2)
        assert found.certified


def test_a_few_steps_of_ascent_are_not_certified() -> None:
    found = ca.sharpness_by_ascent(trained_vit(0), radius=2.0, starts=1, steps=1)
    assert not found.certified
    assert "NOT certified" in str(found)


def test_a_sharpness_without_a_radius_is_refused() -> None:
    for radius in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="positive number"):
            ca.sharpness_by_ascent(vit_problem(4), radius=radius)


# --- the other measures ---------------------------------------------------------------------------


@pytest.mark.usefixtures("short_ascents")
def test_the_fisher_rao_norm_of_a_linear_model_is_the_spread_of_its_logits() -> None:
    model = nn.Linear(64, 10, bias=False, dtype=torch.float64)
    x, y = SAMPLES.take(40)
    found = ca.flatness(Problem(model, "cross_entropy", (x.flatten(1), y)), draws=2, products=40)
    logits = model(x.flatten(1)).detach()
    p = logits.softmax(-1)
    variance = (p * logits.square()).sum(-1) - (p * logits).sum(-1).square()
    assert found.fisher_rao == pytest.approx(float(variance.mean().sqrt()), rel=1e-10)


def test_relative_flatness_is_the_sum_over_pairs_of_neurons() -> None:
    problem = trained_vit(0, d_model=4)
    hessian = ca.Hessian(problem).dense()
    found = ca.relative_flatness(problem, rtol=0.05, max_products=400)
    inside = 0
    for piece in problem.anatomy.select(*found.values):
        out, width = piece.shape
        weight = piece.view(problem.parameters)
        block = hessian[piece.indices][:, piece.indices].reshape(out, width, out, width)
        exact = float(((weight @ weight.T) * torch.einsum("aibi->ab", block)).sum())
        low, high = found.intervals[piece.name]
        inside += low <= exact <= high
        assert found.values[piece.name] == pytest.approx(exact, abs=2.5 * (high - low))
    assert inside >= 0.8 * len(found.values)
    assert "embedding.position" not in found.values  # a table multiplies nothing


@pytest.mark.usefixtures("short_ascents")
def test_the_log_volume_is_that_of_the_eigenvalues() -> None:
    problem = trained_vit(0, d_model=4)
    found = ca.flatness(problem, damping=0.02, products=60, draws=2)
    values = torch.linalg.eigvalsh(ca.GaussNewton(problem).dense()).clamp_min(0)
    exact = -0.5 * float(torch.log1p(values / 0.02).sum())
    assert found.log_volume.interval[0] <= exact <= found.log_volume.interval[1]
    total = torch.linalg.eigvalsh(ca.Hessian(problem).dense())
    assert found.sharpness == pytest.approx(float(total[-1]), rel=1e-5)
    assert found.trace.interval[0] <= float(total.sum()) <= found.trace.interval[1]
    assert found.parameters == problem.size


@pytest.mark.usefixtures("short_ascents")
def test_flatness_takes_up_what_was_kept() -> None:
    problem = vit_problem(8)
    kept: dict[str, Any] = {}
    calls = []

    def keep(name: str, function: Callable[[], Any]) -> Any:
        if name not in kept:
            calls.append(name)
            kept[name] = function()
        return kept[name]

    first = ca.flatness(problem, draws=2, products=20, keep=keep)
    made = len(calls)
    assert made == 9
    second = ca.flatness(problem, draws=2, products=20, keep=keep)
    assert len(calls) == made
    assert second.measures == first.measures
    assert "SAM sharpness" in str(first)
    assert len(first.plot().axes) == 3


# --- PAC-Bayes ------------------------------------------------------------------------------------


def test_the_divergence_is_that_of_the_two_normal_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    apart, curvature = torch.rand(2, 30, generator=generator, dtype=torch.float64)
    bound = _Bound(distance=apart.square(), samples=50, kinds=2, draws=10, failure=0.05)
    found = bound.posterior(curvature, 7.0)
    ours = Normal(apart, found.deviations)
    prior = Normal(torch.zeros_like(apart), torch.full_like(apart, found.prior_scale))
    assert found.divergence == pytest.approx(float(kl_divergence(ours, prior).sum()), rel=1e-10)
    assert 10 * math.log(found.prior_scale**2) == pytest.approx(
        round(10 * math.log(found.prior_scale**2)), abs=1e-9
    )


def test_the_inverse_of_kl_is_its_upper_inverse() -> None:
    for share, cost in ((0.0, 0.1), (0.2, 0.05), (0.5, 1e-4), (0.9, 0.3)):
        p = inverse_kl(share, cost)
        q = np.clip([share], 1e-300, 1)[0]
        kl = share * math.log(q / p) + (1 - share) * math.log((1 - share) / (1 - p))
        assert p >= share
        assert kl == pytest.approx(cost, rel=1e-6)
    assert inverse_kl(0.3, 1e9) == 1.0


def _overfitted(trial: int) -> tuple[Problem, Tensor, tuple[Tensor, Tensor]]:
    """A small network trained on few digits; every second one learns labels drawn at random."""
    generator = torch.Generator().manual_seed(trial)
    order = torch.randperm(1437, generator=generator)
    count = (40, 120, 400)[trial % 3]
    inputs, targets = SAMPLES
    targets = targets if trial % 2 else targets[torch.randperm(1437, generator=generator)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial)
        model = zoo.MLP(zoo.MLPConfig(width=(4, 12)[trial % 2], n_layers=1)).double()
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    some, rest = order[:count], order[count:]
    zoo.train(model, (inputs[some], targets[some]), steps=60, lr=2e-2, seed=trial)
    problem = Problem(model.eval(), "cross_entropy", (inputs[some], targets[some]))
    return problem, start, (inputs[rest[:300]], targets[rest[:300]])


def test_the_bound_lies_above_the_measured_test_loss_in_fifty_trials() -> None:
    gaps = []
    for trial in range(50):
        problem, start, test = _overfitted(trial)
        entries = ca.diagonal(ca.GaussNewton(problem)).values
        tested = problem.with_data(test)
        for bound in ca.pac_bayes(problem, entries, prior=start, test=tested, draws=10):
            assert bound.test_loss is not None
            assert bound.test_error is not None
            assert bound.error_bound is not None
            assert bound.value >= bound.test_loss, (trial, str(bound))
            assert bound.error_bound >= bound.test_error, (trial, str(bound))
            assert bound.value >= tested.value(), (trial, str(bound))
        gaps.append(tested.value() - problem.value())
    assert max(gaps) > 1.0  # some of them did overfit


class Peeking(nn.Linear):
    """Looks at a weight, which cannot be mapped over draws of the weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) * (
            1.0 if float(self.weight.detach().sum()) > 1e9 else 2.0
        )


@pytest.mark.parametrize("peeks", [False, True])
def test_draws_side_by_side_give_the_bounds_of_one_after_the_other(
    peeks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = SAMPLES.take(12)
    torch.manual_seed(0)
    model = Peeking(64, 10).double() if peeks else copy.deepcopy(_trained(0, d_model=4))
    problem = Problem(model, "cross_entropy", [(x[:7], y[:7]), (x[7:], y[7:])])
    curvature = torch.ones(problem.size, dtype=torch.float64)
    together = ca.pac_bayes(problem, curvature, draws=7)
    monkeypatch.setattr(pac_bayes, "_ABREAST", 0)
    for one, other in zip(together, ca.pac_bayes(problem, curvature, draws=7), strict=True):
        for name in ("value", "loss", "error", "error_bound", "divergence"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9), name


def test_more_samples_and_the_diagonal_make_the_bound_tighter() -> None:
    values = {}
    x, y = SAMPLES
    model = zoo.MLP(zoo.MLPConfig(width=4, n_layers=1)).double()
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    zoo.train(model, (x, y), steps=100, lr=1e-2)
    for count in (100, 1400):
        problem = Problem(model.eval(), "cross_entropy", (x[:count], y[:count]))
        entries = ca.diagonal(ca.GaussNewton(problem)).values
        values[count] = ca.pac_bayes(problem, entries, prior=start, draws=100)
    assert all(a.value > b.value for a, b in zip(values[100], values[1400], strict=True))
    isotropic, diagonal = values[1400]
    assert diagonal.value < isotropic.value < isotropic.loss_bound


def test_targets_of_a_sequence_count_as_one_sample_and_ignored_ones_not_at_all() -> None:
    text = zoo.text(level="character", context=8)
    gpt = zoo.reference_gpt(vocabulary=text.classes, context=8, d_model=8, n_heads=2).double()
    inputs, targets = text.train.take(12)
    targets = targets.clone()
    targets[:, :3] = -100
    targets[0] = -100
    problem = Problem(gpt.eval(), "cross_entropy", (inputs, targets))
    bound, _ = ca.pac_bayes(problem, torch.full((problem.size,), 1e12), draws=2)
    assert bound.samples == 12
    with torch.no_grad():
        logits = gpt(inputs[1:])[:, 3:]
    single = nn.functional.cross_entropy(logits.flatten(0, 1), targets[1:, 3:].flatten())
    assert bound.loss == pytest.approx(float(single), rel=1e-3)  # the noise is next to nothing


@pytest.mark.usefixtures("short_ascents")
def test_a_loss_without_a_bound_leaves_the_bounds_out_and_says_so() -> None:
    model = nn.Linear(3, 2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 10, 3, generator=generator, dtype=torch.float64)
    problem = Problem(model, "mse", (x, y[:, :2]))
    with pytest.warns(UserWarning, match="loss_bound="):
        found = ca.flatness(problem, products=20)
    assert found.isotropic is None
    assert math.isnan(found.measures["pac_bayes_diagonal"])
    bounded = ca.flatness(problem, products=20, draws=4, loss_bound=8.0)
    assert bounded.diagonal is not None
    assert bounded.diagonal.error_bound is None
    assert bounded.diagonal.loss <= bounded.diagonal.value <= 8.0


# --- rescalings -----------------------------------------------------------------------------------

ALL = [(r, m) for r in ("query_key", "value_output") for m in ("uniform", "channels", "matrix")]
ALL += [(r, m) for r in ("norm_gain", "feed_forward") for m in ("uniform", "channels")]
LEFT = {"query_key"}  # only rows of the matrices change: any mode


@functools.cache
def _two_layers() -> Problem:
    return trained_vit(1, 6, norm_first=True, n_heads=2, activation="relu", n_layers=2)


def _measured(problem: Problem) -> dict[str, float]:
    steps: Any = {"starts": 0, "steps": 1}
    return {
        "loss": problem.value(),
        "fisher_rao": float(problem.parameters @ (ca.GaussNewton(problem) @ problem.parameters)),
        "asam": ca.sharpness_by_ascent(problem, radius=0.3, adaptive=True, **steps).value,
        "sam": ca.sharpness_by_ascent(problem, radius=0.1, **steps).value,
        "relative": ca.relative_flatness(problem, max_products=16).value,
    }


@functools.cache
def _before() -> dict[str, float]:
    return _measured(_two_layers())


@pytest.mark.usefixtures("short_ascents")
@pytest.mark.parametrize(("rescaling", "mode"), ALL)
def test_what_a_rescaling_leaves_alone_stays_to_eight_digits(rescaling: Any, mode: Any) -> None:
    problem = _two_layers()
    other = ca.rescaled(problem, rescaling, mode=mode)
    moved = float((other.parameters - problem.parameters).norm() / problem.parameters.norm())
    assert moved > 0.02
    before, after = _before(), _measured(other)
    same = {name: abs(after[name] - v) <= 1e-8 * abs(v) for name, v in before.items()}
    assert same == {
        "loss": True,
        "fisher_rao": True,  # under every linear rescaling
        "asam": mode != "matrix",  # under those of single weights
        "sam": False,
        "relative": mode == "uniform" or rescaling in LEFT,
    }


@pytest.mark.usefixtures("short_ascents")
def test_the_table_of_invariance_says_what_changes_and_what_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pac_bayes, "_SEARCH_DRAWS", 2)  # the bounds are no part of this
    problem = trained_vit(0, 12, d_model=4, norm_first=True)
    found = ca.rescaling_invariance(
        problem, rescalings=["value_output", "feed_forward"], modes=["channels"], products=24,
        draws=20,
    )  # fmt: skip
    assert found.rescalings == ("value_output, channels",)
    assert "no symmetry" in found.refused[0]  # GELU does not scale
    verdicts = {name: verdict for name, (verdict,) in found.verdicts.items()}
    for name in ("loss", "fisher_rao", "asam"):
        assert verdicts[name] == "invariant"
        assert found.invariant(name)
        assert max(found.change(name)) <= 1e-8
    for name in ("sharpness", "sam", "relative_flatness"):
        assert verdicts[name] in ("changes", "undecided")
    assert verdicts["sam"] == "changes"
    assert "invariant" in str(found)
    assert found.plot().axes


@pytest.mark.parametrize(
    ("family", "refused"),
    [
        ("gpt2", {"feed_forward"}), ("llama", set()), ("qwen3", {"query_key"}),
        ("gemma2", set()), ("bert", {"feed_forward"}),
    ],
)  # fmt: skip
def test_families_are_rescaled_where_their_function_allows_it(
    family: str, refused: set[str]
) -> None:
    model = tiny_model(family).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).double()
    tokens = torch.randint(1, 9, (3, 6), generator=generator)
    problem = Problem(model, None, {"input_ids": tokens, "labels": tokens})
    before = [p.detach().clone() for p in model.parameters()]
    for rescaling in ("query_key", "value_output", "norm_gain", "feed_forward"):
        if rescaling in refused:
            with pytest.raises(ProblemError, match="no symmetry of this model"):
                ca.rescaled(problem, rescaling)  # type: ignore[arg-type]
            continue
        other = ca.rescaled(problem, rescaling)  # type: ignore[arg-type]
        assert other.value() == pytest.approx(problem.value(), rel=1e-10)
        assert float((other.parameters - problem.parameters).norm()) > 0.1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_rescaling_that_cannot_be_is_refused_in_one_line() -> None:
    x, y = SAMPLES.take(4)
    mlp = Problem(zoo.MLP().double().eval(), "cross_entropy", (x, y))
    with pytest.raises(ProblemError, match="no query among the parameters that vary"):
        ca.rescaled(mlp, "query_key")
    with pytest.raises(ValueError, match="rescalings are query_key"):
        ca.rescaled(mlp, "heads")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="single channels"):
        ca.rescaled(vit_problem(4), "norm_gain", mode="matrix")
    single = Problem(zoo.reference_vit().eval(), "cross_entropy", (x.float(), y))
    with pytest.raises(ProblemError, match="float64"):
        ca.rescaling_invariance(single)
