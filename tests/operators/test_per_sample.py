"""Losses, gradients and curvatures of single samples, and diag H_o from them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
import families
import oracles
from curvatlas import zoo
from curvatlas.operators import per_sample
from curvatlas.operators.curvature import Hessian
from curvatlas.operators.per_sample import (
    _Sampler,
    count_samples,
    exact_outer_diagonal,
    pieces,
    sample_losses,
    sample_operations,
    sample_quantities,
    subset,
    target_factors,
)
from curvatlas.problem import CrossEntropy, MeanSquaredError, Problem
from digit_problems import SAMPLES, vit_problem
from oracles import product, with_hand_written_norms


def random_columns(problem: Problem, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(problem.size, count, generator=generator, dtype=torch.float64)


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


@pytest.mark.parametrize("norm_first", [False, True])
def test_per_sample_quantities_are_those_of_double_backward(norm_first: bool) -> None:
    problem = vit_problem(5, norm_first=norm_first)
    directions = random_columns(problem, 3)
    found = sample_quantities(problem, directions, chunk=2)
    model = with_hand_written_norms(copy.deepcopy(problem.model))
    parameters = list(model.parameters())
    for i in range(5):
        row = SAMPLES.inputs[i : i + 1], SAMPLES.targets[i : i + 1]
        loss = nn.functional.cross_entropy(model(row[0]), row[1])
        assert found.losses[i] == pytest.approx(loss.item(), rel=1e-13)
        bent = torch.stack(
            [
                product(nn.functional.cross_entropy(model(row[0]), row[1]), parameters, column)
                for column in directions.T
            ],
            dim=1,
        )
        want = directions.T @ bent
        assert (found.curvatures[i] - want).norm() <= 1e-12 * bent.norm() * directions.norm()
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
        assert torch.allclose(found.slopes[i], gradient @ directions, rtol=1e-11)
        assert found.gradient_norms[i] == pytest.approx(float(gradient.norm()), rel=1e-12)


def test_sample_by_sample_equals_side_by_side() -> None:
    problem = vit_problem(3)
    sampler = _Sampler(problem, random_columns(problem, 2), 3)
    batch = next(pieces(problem, 3))
    with problem.evaluating():
        together, alone = sampler._side_by_side(batch), sampler._one_by_one(batch)
    for a, b in zip(together, alone, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


def test_padded_tokens_weigh_their_valid_targets() -> None:
    model = zoo.reference_gpt(vocabulary=11, context=6, d_model=8, n_layers=1).double().eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (4, 6), generator=generator)
    targets = torch.randint(0, 11, (4, 6), generator=generator)
    targets[1, 3:] = -100
    targets[2, :] = -100  # a sample without a target is left out
    problem = Problem(model, "cross_entropy", (tokens, targets))
    directions = random_columns(problem, 2)
    found = sample_quantities(problem, directions)
    assert found.counts.tolist() == [6.0, 3.0, 6.0]
    mean = torch.einsum("i,iab->ab", found.counts / found.counts.sum(), found.curvatures)
    want = directions.T @ (Hessian(problem) @ directions)
    assert (mean - want).norm() <= 1e-11 * want.norm()
    total = (found.counts * found.losses).sum() / found.counts.sum()
    assert float(total) == pytest.approx(problem.value(), rel=1e-12)


def test_subset_and_losses_follow_the_order_of_the_data() -> None:
    problem = vit_problem(9)
    halves = problem.with_data([tuple(b) for b in SAMPLES.take(9).batches(4)])
    chosen = subset(halves, torch.tensor([7, 0, 5]))
    want = problem.with_data((SAMPLES.inputs[[0, 5, 7]], SAMPLES.targets[[0, 5, 7]])).value()
    assert chosen.value() == pytest.approx(want, rel=1e-13)
    losses = sample_losses(halves, limit=7)
    assert len(losses) == 7
    assert float(losses[[0, 5]].mean()) == pytest.approx(
        problem.with_data((SAMPLES.inputs[[0, 5]], SAMPLES.targets[[0, 5]])).value(), rel=1e-13
    )
    assert count_samples(halves) == 9


class LooksAtItsData(nn.Module):
    """Time-major, and branches on a value: ``vmap`` cannot run it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.table(tokens)
        if bool(tokens.max() > 10):
            raise ValueError("no such token")
        return self.head(torch.tanh(hidden + hidden.cumsum(0)))


def test_losses_of_a_model_that_vmap_cannot_run_come_of_passes_of_many_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(2)
    model = LooksAtItsData().double().eval()
    tokens, targets = torch.randint(0, 11, (2, 5, 12))  # (L, B)
    targets[2:, 3] = -100
    targets[:, 6] = -100  # a sample without a target is left out
    problem = Problem(model, "cross_entropy", (tokens, targets))
    want = [
        problem.with_data((tokens[:, i : i + 1], targets[:, i : i + 1])).value()
        for i in range(12)
        if i != 6
    ]
    sample_losses(problem, limit=12)  # finds the samples' axis
    for room, passes in ((2**26, 2), (5 * 5 * 11 * 8, 4)):  # one alone, then eleven or five each
        monkeypatch.setattr(per_sample, "_OUTPUT_BYTES", room)
        model.calls = 0
        losses = sample_losses(problem, limit=12)
        assert losses.tolist() == pytest.approx(want, rel=1e-13)
        # beside the problem's check of its batch, and an attempt under vmap
        assert model.calls <= passes + 3


def test_operations_of_a_sample_are_those_of_its_matrix_products() -> None:
    tokens, d, heads, wide = 5, 8, 2, 12
    layer = nn.TransformerEncoderLayer(d, heads, wide, dropout=0.0, batch_first=True).eval()
    x = torch.randn(3, tokens, d)
    linear = tokens * d * (4 * d + 2 * wide)  # query, key, value and output; up and down
    attention = 2 * tokens**2 * d  # scores and mixtures, over all heads
    assert sample_operations(ca.Problem(layer, "mse", (x, x))) == 2 * (linear + attention)
