"""Curvature module by module and role by role, against dense Hessians."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import curvatlas as ca
import oracles
from curvatlas.analysis.atlas.layerwise import (
    RoleTraces,
    module_wise_curvature,
    outer_role_traces,
    pooled_roles,
    role_shares,
    role_traces,
)
from curvatlas.errors import ProblemError
from curvatlas.zoo import MLP, MLPConfig
from curvatlas.zoo.models import GPT, GPTConfig


def test_a_full_basis_gives_the_exact_curvature_of_every_module() -> None:
    torch.manual_seed(0)
    model = MLP(MLPConfig(inputs=3, outputs=2, width=4, n_layers=2, activation="tanh")).double()
    x, y = torch.randn(3, 3, dtype=torch.float64), torch.tensor([0, 1, 1])
    found = module_wise_curvature(model, x, y, probes=24)
    for path, layer in (("layers.0", model.layers[0]), ("head", model.head)):
        truth = oracles.hessian(F.cross_entropy(model(x), y), list(layer.parameters()))
        entry = found[path].parameters
        assert entry is not None
        assert entry.norm == pytest.approx(float(torch.linalg.norm(truth)), rel=1e-10)
        assert entry.trace == pytest.approx(float(truth.trace()), rel=1e-9)
        slope = oracles.gradient(F.cross_entropy(model(x), y), list(layer.parameters()))
        assert found[path].gradient_norm == pytest.approx(float(slope.norm()), rel=1e-10)
    hidden = model.layers[0](x).detach().requires_grad_(True)
    value = F.cross_entropy(model.head(torch.tanh(model.layers[1](torch.tanh(hidden)))), y)
    truth = oracles.hessian(value, [hidden])
    output = found["layers.0"].activation
    assert output is not None
    assert output.norm == pytest.approx(float(torch.linalg.norm(truth)), rel=1e-10)
    assert output.trace == pytest.approx(float(truth.trace()), rel=1e-9)


def test_few_probes_give_intervals_that_hold_and_a_readable_table() -> None:
    torch.manual_seed(1)
    model = MLP(MLPConfig(inputs=6, outputs=3, width=8, n_layers=2)).double()
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 3, (5,))
    exact, found = (module_wise_curvature(model, x, y, probes=p) for p in (72, 6))
    held = []
    for a, b in zip(exact.modules, found.modules, strict=True):
        for truth, estimate in ((a.parameters, b.parameters), (a.activation, b.activation)):
            if truth is not None and estimate is not None:
                low, high = estimate.norm_interval
                held.append(low * (1 - 1e-9) <= truth.norm <= high * (1 + 1e-9))
    assert sum(held) >= len(held) - 1
    assert "layers.0" in str(found)
    with pytest.raises(KeyError, match="there is no module"):
        found["nowhere"]


def gpt_problem(loss: object = "cross_entropy") -> ca.Problem:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=7, context=4, d_model=4, n_heads=2, n_layers=2, d_ff=6)
    tokens, targets = torch.randint(0, 7, (2, 5, 4))
    targets[0, :2] = -100
    data = [(tokens[:3], targets[:3]), (tokens[3:], targets[3:])]
    return ca.Problem(GPT(config).double().eval(), loss, data)


@pytest.fixture(scope="module")
def problem() -> ca.Problem:
    return gpt_problem()


def truths(matrix: torch.Tensor, problem: ca.Problem) -> dict[str, float]:
    diagonal = matrix.diagonal()
    return {
        role: float(torch.cat([diagonal[s.indices] for s in slices]).sum())
        for role, slices in pooled_roles(problem).items()
    }


def covered(found: RoleTraces, want: dict[str, float]) -> int:
    """Roles whose interval, three times as wide, holds the truth.

    A normal estimate lies outside once in 200 million, Student's of 60 probes once in 6 million.
    """
    hits = 0
    for role, value in want.items():
        low, high = found.interval(role)
        middle, half = (low + high) / 2, (high - low) / 2
        hits += abs(value - middle) <= 3 * half + 1e-12
    return hits


def test_the_roles_are_all_parameters_each_once(problem: ca.Problem) -> None:
    every = torch.cat([s.indices for slices in pooled_roles(problem).values() for s in slices])
    assert torch.equal(every.sort().values, torch.arange(problem.size))


def test_backward_passes_give_the_outer_traces_of_all_roles(problem: ca.Problem) -> None:
    want = truths(ca.GaussNewton(problem).dense(), problem)
    found = outer_role_traces(problem, probes=80)
    assert covered(found, want) == len(want)
    for role, value in want.items():
        assert found.trace(role) == pytest.approx(value, rel=0.5), role
    assert found.whole().value == pytest.approx(sum(want.values()), rel=0.2)


def test_layers_taken_apart_are_the_roles_when_put_together(problem: ca.Problem) -> None:
    apart = outer_role_traces(problem, probes=3, layers=True)
    assert "blocks.1.key" in apart.roles
    pooled, roles = apart.pooled(), outer_role_traces(problem, probes=3)
    assert (pooled.roles, pooled.sizes) == (roles.roles, roles.sizes)
    torch.testing.assert_close(pooled.samples, roles.samples, rtol=1e-12, atol=0)


def test_the_outer_traces_of_mean_squares_too() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    inputs, targets = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    problem = ca.Problem(model.double(), "mse", (inputs, targets))
    want = float(ca.GaussNewton(problem).dense().trace())
    assert outer_role_traces(problem, probes=150).whole().value == pytest.approx(want, rel=0.25)


@pytest.mark.parametrize("deflated", [False, True])
def test_products_give_the_traces_of_all_roles(problem: ca.Problem, deflated: bool) -> None:
    op = ca.Hessian(problem)
    matrix = op.dense()
    vectors = torch.linalg.eigh(matrix).eigenvectors[:, -6:] if deflated else None
    found = role_traces(op, problem, probes=60, deflate=vectors)
    want = truths(matrix, problem)
    assert covered(found, want) == len(want)
    assert found.products == 60 + 6 * deflated


def test_taking_out_leading_eigenvectors_narrows_the_interval(problem: ca.Problem) -> None:
    op = ca.Hessian(problem)
    vectors = torch.linalg.eigh(op.dense()).eigenvectors[:, -12:]
    plain = role_traces(op, problem, probes=40).whole()
    less = role_traces(op, problem, probes=40, deflate=vectors).whole()
    assert less.interval[1] - less.interval[0] < 0.7 * (plain.interval[1] - plain.interval[0])


def test_probes_and_more_probes_are_put_together(problem: ca.Problem) -> None:
    op = ca.Hessian(problem)
    both = role_traces(op, problem, probes=2) + role_traces(op, problem, probes=2, first=2)
    four = role_traces(op, problem, probes=4)
    assert torch.equal(both.samples, four.samples)
    assert both.products == 4
    with pytest.raises(ValueError, match="different matrices"):
        both + outer_role_traces(problem, probes=2)


def test_a_single_probe_promises_nothing(problem: ca.Problem) -> None:
    found = role_traces(ca.Hessian(problem), problem, probes=1)
    assert found.interval("key") == (float("-inf"), float("inf"))
    assert not found.whole().converged


def test_a_loss_without_a_root_names_the_way_round() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean()

    with pytest.raises(ProblemError, match="by products"):
        outer_role_traces(gpt_problem(loss), probes=1)


def test_the_result_survives_its_file(problem: ca.Problem, tmp_path: Path) -> None:
    found = outer_role_traces(problem, probes=3)
    again = ca.load(found.save(tmp_path / "traces"))
    assert isinstance(again, RoleTraces)
    assert torch.equal(again.samples, found.samples)
    assert str(again) == str(found)


def test_shares_are_those_of_participation(problem: ca.Problem) -> None:
    vectors = torch.randn(problem.size, 2, dtype=torch.float64)
    found = role_shares(problem, vectors)
    places = torch.cat([s.indices for s in pooled_roles(problem)["query"]])
    want = vectors[places].square().sum(0) / vectors.square().sum(0)
    assert found.mass[:, found.groups.index("query")].tolist() == pytest.approx(
        want.tolist(), rel=1e-6
    )
