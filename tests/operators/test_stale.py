"""An operator answers for the weights of now, however they were changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
import oracles
from curvatlas.errors import NonFiniteError, ProblemError
from curvatlas.operators.curvature import CurvatureParts

INPUTS = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([0, 1, 1, 0, 1, 0])
# Uneven on purpose: with class weights the batches weigh differently.
BATCHES = [(INPUTS[:2], TARGETS[:2]), (INPUTS[2:], TARGETS[2:])]


class Network(nn.Module):
    """A frozen layer, batch statistics and a plain tensor beside the weights that vary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.temperature = torch.tensor(1.5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.frozen(x).sin())).tanh()
        return self.last(hidden) / self.temperature


def fused_step(model: Any, weights: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    F.cross_entropy(model(INPUTS), TARGETS).backward()
    optimizer.step()
    optimizer.zero_grad()


def write_to_data(model: Any, weights: Tensor) -> None:
    model.first.weight.data.mul_(2)


def write_one_entry(model: Any, weights: Tensor) -> None:
    model.last.bias.data[1] += 0.5


def swap_two_entries(model: Any, weights: Tensor) -> None:
    values = model.first.weight.data
    values[0, 0], values[3, 2] = values[3, 2].clone(), values[0, 0].clone()


def flip_signs(model: Any, weights: Tensor) -> None:
    model.last.weight.data.neg_()


def new_data(model: Any, weights: Tensor) -> None:
    model.first.weight.data = model.first.weight.data * 2


def assign_state(model: Any, weights: Tensor) -> None:
    state = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_parameter(model: Any, weights: Tensor) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach() * 2)


def replace_module(model: Any, weights: Tensor) -> None:
    layer = nn.Linear(3, 4).double()
    model.first = layer


def change_frozen(model: Any, weights: Tensor) -> None:
    model.frozen.weight.data.mul_(2)


def change_statistics(model: Any, weights: Tensor) -> None:
    model.norm.running_var.data.mul_(3)


def replace_buffer(model: Any, weights: Tensor) -> None:
    model.norm.running_mean = torch.full((4,), 0.3, dtype=torch.float64)


def change_plain_tensor(model: Any, weights: Tensor) -> None:
    model.temperature.data.mul_(2)


def replace_plain_tensor(model: Any, weights: Tensor) -> None:
    model.temperature = torch.tensor(0.5, dtype=torch.float64)


def change_class_weights(model: Any, weights: Tensor) -> None:
    weights.mul_(torch.tensor([3.0, 0.5], dtype=torch.float64))


WAYS = [
    fused_step, write_to_data, write_one_entry, swap_two_entries, flip_signs, new_data,
    assign_state, replace_parameter, replace_module, change_frozen, change_statistics,
    replace_buffer, change_plain_tensor, replace_plain_tensor, change_class_weights,
]  # fmt: skip


def parts_of(operator: CurvatureParts, columns: Tensor) -> Tensor:
    return torch.cat(list(operator.flat_parts(columns[:, None]).values())).squeeze(1)


OPERATORS: dict[str, Callable[[ca.Problem], Any]] = {
    "H": ca.Hessian,
    "H, nothing kept": lambda problem: ca.Hessian(problem, budget=1),
    "H_o": ca.GaussNewton,
    "H_f": ca.FunctionalHessian,
    "Fisher": ca.Fisher,
    "sampled Fisher": lambda problem: ca.Fisher(problem, kind="mc"),
    "empirical Fisher": lambda problem: ca.Fisher(problem, kind="empirical"),
    "view": lambda problem: ca.Hessian(problem)["last.*", "first.*"],
    "parts": CurvatureParts,
}


def made(change: Callable[[Any, Tensor], None] | None = None) -> tuple[Any, Tensor, ca.Problem]:
    model, weights = Network().double().eval(), torch.tensor([1.0, 2.0], dtype=torch.float64)
    if change is not None:
        change(model, weights)
    return model, weights, ca.Problem(model, nn.CrossEntropyLoss(weight=weights), BATCHES)


@functools.cache
def changed_before(count: int) -> ca.Problem:
    """A Problem of its own that has never seen the weights before the first ``count`` changes."""
    model, weights = Network().double().eval(), torch.tensor([1.0, 2.0], dtype=torch.float64)
    for change in WAYS[:count]:
        torch.manual_seed(3)  # for the ways that draw new weights
        change(model, weights)
    return ca.Problem(model, nn.CrossEntropyLoss(weight=weights), BATCHES)


def product(operator: Any) -> Tensor:
    size = operator.shape[1]
    vector = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if isinstance(operator, CurvatureParts):
        return parts_of(operator, vector)
    result: Tensor = operator @ vector
    return result


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.filterwarnings("ignore:the budget of")
def test_a_changed_model_is_noticed(kind: str) -> None:
    """One operator through all the changes, each against an operator that has seen none."""
    model, weights, problem = made()
    operator = OPERATORS[kind](problem)
    before = product(operator)
    for count, change in enumerate(WAYS, start=1):
        torch.manual_seed(3)  # for the ways that draw new weights
        change(model, weights)
        got = product(operator)
        want = product(OPERATORS[kind](changed_before(count)))  # which shares nothing with ours
        assert oracles.relative_error(got, want) < 1e-13, change.__name__
        if not (kind == "sampled Fisher" and change is change_class_weights):
            moved = oracles.relative_error(got, before)  # the change matters
            assert moved > 1e-6, change.__name__
        before = got


def test_the_problem_itself_follows_the_live_model() -> None:
    model, weights, problem = made()
    before = problem.value()
    for change in WAYS:
        change(model, weights)
        want = F.cross_entropy(model(INPUTS), TARGETS, weight=weights)
        assert problem.value() == pytest.approx(float(want.detach()), rel=1e-12), change
        varying = [p for p in model.parameters() if p.requires_grad]
        gradient = oracles.gradient(want, varying)
        assert oracles.relative_error(problem.gradient(), gradient) < 1e-12, change
        assert torch.equal(problem.parameters, torch.cat([p.flatten() for p in varying])), change
        model.zero_grad()
        assert problem.value() != before, change


def test_products_after_a_change_are_the_hessian_by_hand() -> None:
    model, weights, problem = made()
    operator = ca.Hessian(problem)
    for change in WAYS:
        operator @ torch.ones(problem.size, dtype=torch.float64)
        change(model, weights)
        loss = F.cross_entropy(model(INPUTS), TARGETS, weight=weights)
        want = oracles.hessian(loss, [p for p in model.parameters() if p.requires_grad])
        assert oracles.relative_error(operator.dense(), want) < 1e-12, change


def test_unchanged_values_keep_the_graphs() -> None:
    model, _, problem = made()
    operator = ca.Hessian(problem)
    product(operator)
    kept = operator._full
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())
    model.first.bias.data.add_(0.0)
    product(operator)
    assert operator._full is kept
    write_one_entry(model, torch.ones(2))
    product(operator)
    assert operator._full is not kept


def test_weights_that_are_changed_and_changed_back_give_the_same_product() -> None:
    """As in a line search: autograd refuses a graph whose tensors were written to."""
    model, _, problem = made()
    operator = ca.Hessian(problem)
    before = product(operator)
    with torch.no_grad():
        for factor in (2.0, 0.5):
            model.last.weight *= factor
    assert torch.equal(product(operator), before)


def test_what_a_forward_pass_leaves_in_the_model_does_not_rebuild_the_graphs() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros(()))
            self.last_output = torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last_output = self.inner(x).detach()
            return self.inner(x)

    problem = ca.Problem(Remembering().double(), "cross_entropy", BATCHES)
    operator = ca.Hessian(problem)
    product(operator)
    kept = operator._full
    assert kept is not None
    product(operator)
    assert operator._full is kept


def test_an_estimate_over_several_updates_is_that_of_the_last_weights() -> None:
    model, weights, problem = made()
    operator = ca.Hessian(problem)
    before = ca.eigenpairs(operator, k=1, which="largest").values
    for _ in range(3):
        fused_step(model, weights)
    loss = F.cross_entropy(model(INPUTS), TARGETS, weight=weights)
    matrix = oracles.hessian(loss, [p for p in model.parameters() if p.requires_grad])
    want = torch.linalg.eigvalsh(matrix)[-1]
    got = ca.eigenpairs(operator, k=1, which="largest").values
    assert float(got[0]) == pytest.approx(float(want), rel=1e-8)
    assert abs(float(before[0]) - float(want)) > 1e-3


def test_tensors_inside_a_callable_loss_are_followed() -> None:
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, weight=weights)

    model, *_ = made()
    problem = ca.Problem(model, loss, (INPUTS, TARGETS))
    operator = ca.GaussNewton(problem)
    operator @ torch.ones(problem.size, dtype=torch.float64)
    weights.data.mul_(torch.tensor([3.0, 0.5], dtype=torch.float64))
    want = ca.GaussNewton(ca.Problem(model, loss, (INPUTS, TARGETS))).dense()
    assert oracles.relative_error(operator.dense(), want) < 1e-13


def test_checks_run_again_after_a_change() -> None:
    model, _, problem = made()
    operator = ca.Hessian(problem)
    product(operator)
    model.first.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"first\.weight"):
        product(operator)


def test_other_parameters_than_before_are_refused() -> None:
    model, _, problem = made()
    operator = ca.Hessian(problem)
    product(operator)
    model.last = nn.Linear(4, 3).double()
    with pytest.raises(ProblemError, match=r"last\.weight.*\(2, 4\).*now \(3, 4\).*new Problem"):
        product(operator)
    model, _, problem = made()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ProblemError, match=r"extra\.bias, extra\.weight.*new Problem"):
        product(ca.Hessian(problem))
    model, _, problem = made()
    model.float()
    with pytest.raises(ProblemError, match=r"float64.*now.*float32.*new Problem"):
        product(ca.Hessian(problem))


def test_weights_that_are_no_longer_tied_are_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh())

    model = Tied().double()
    problem = ca.Problem(model, "cross_entropy", BATCHES)
    operator = ca.Hessian(problem)
    product(operator)
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(ProblemError, match=r"last\.weight.*tied otherwise.*new Problem"):
        product(operator)
