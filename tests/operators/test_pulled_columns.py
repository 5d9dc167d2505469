from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.operators.pulled_columns import ColumnChoice, PulledColumns, SampleRun


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Positions(nn.Module):
    """Positions that are looked up once for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(torch.arange(x.shape[1]).unsqueeze(0))
        return self.head(x.cumsum(1).tanh())


class Mixing(nn.Module):
    """Samples that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        return self.head(y - y.mean(0))


class Graph(nn.Module):
    """Nodes of which most are alone: the first, the middle and the last are, a few others not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        edges = torch.eye(9)
        edges[1, 2] = edges[2, 1] = edges[6, 3] = 1
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.edges @ self.first(x)).tanh())


def time_major() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)
    return nn.Sequential(layer, nn.Linear(4, 2))


# model, shape of the inputs, parts that do not meet in each run
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[int]]] = {
    "samples": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), (5, 3), [5]),
    "tokens of their own": (lambda: nn.Linear(3, 2), (5, 4, 3), [20]),
    "time first": (time_major, (4, 3, 4), [3]),
    "time first, as many samples as steps": (time_major, (3, 3, 4), [3]),
    "shared positions": (Positions, (3, 4, 3), [1, 1, 1]),
    "samples that meet": (Mixing, (5, 3), [1]),
    "nodes of a graph": (Graph, (9, 3), [1]),
}


def problem_of(name: str) -> ca.Problem:
    torch.manual_seed(0)
    make, shape, _ = CASES[name]
    data = (randn(*shape), torch.randint(0, 2, shape[:-1]))
    return ca.Problem(make().double().eval(), "cross_entropy", data)


def gauss_newton_trace(problem: ca.Problem) -> float:
    """tr Σ_i J_iᵀ Λ_i J_i, one output of the whole batch at a time."""
    (batch,) = problem.batches()
    with problem.evaluating():
        leaves = problem.leaves()
        outputs = problem.outputs(batch, leaves)
        pi = outputs.detach().softmax(-1).reshape(-1, 2)
        total = 0.0
        for z, p in zip(outputs.reshape(-1, 2), pi, strict=True):
            rows = [
                torch.autograd.grad(
                    one, list(leaves.values()), retain_graph=True, materialize_grads=True
                )
                for one in z
            ]
            jacobian = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])
            lam = p.diag() - p[:, None] * p
            total += float((jacobian * (lam @ jacobian)).sum())
    return total / len(pi)


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_meet_is_pulled_back_together_and_the_trace_is_exact(name: str) -> None:
    problem = problem_of(name)
    passes = PulledColumns(problem, ColumnChoice(), whole_samples=False, name="KFAC")
    with problem.evaluating():
        assert [run.samples for run in passes] == CASES[name][2]
    trace = ca.EKFAC(problem).exact_trace()
    assert trace == pytest.approx(gauss_newton_trace(problem), rel=1e-12)


def test_reduce_needs_samples_that_do_not_meet() -> None:
    for options in ({"approximation": "reduce"}, {"kind": "empirical", "per": "sample"}):
        with pytest.raises(ValueError, match="those of batch 0 meet in it"):
            ca.KFAC(problem_of("samples that meet"), **options)  # type: ignore[arg-type]


def test_one_sample_at_a_time_draws_the_targets_of_the_whole_batch() -> None:
    problem = problem_of("shared positions")
    options = {"kind": "mc", "samples": 2, "seed": 3}
    trace = ca.EKFAC(problem, **options).exact_trace()  # type: ignore[arg-type]
    exact = float(ca.Fisher(problem, **options).dense().trace())  # type: ignore[arg-type]
    assert trace == pytest.approx(exact, rel=1e-12)


def test_few_columns_at_once_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("time first")
    expected = ca.EKFAC(problem).dense()
    monkeypatch.setattr(SampleRun, "_columns_at_once", lambda run: 3)
    assert float((ca.EKFAC(problem).dense() - expected).norm()) <= 1e-13 * float(expected.norm())
