"""``shard=True``: every sample goes to one process, and all processes have as many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
import oracles
from curvatlas import parallel

SIZES = {
    "batches of one": [1] * 10,
    "smaller than the group": [2, 1, 3, 2, 2],
    "uneven": [7, 1, 4, 5],
    "one batch": [11],
    "fewer samples than processes": [1, 1],
}


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(sum(sizes), 3, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, 2, (sum(sizes),), generator=draw)
    return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    monkeypatch.setattr(parallel, "rank", lambda: rank)
    monkeypatch.setattr(parallel, "world_size", lambda: world)


def shares(
    problem: ca.Problem, world: int, monkeypatch: pytest.MonkeyPatch
) -> list[list[ca.problem.Batch]]:
    """Every rank's batches of the problem's data."""
    stream = problem._stream
    parts = []
    for rank in range(world):
        with monkeypatch.context() as patch:
            as_rank(patch, rank, world)
            parts.append(list(replace(stream, sharded=True)))
    return parts


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_every_sample_is_dealt_once_and_all_have_as_many(
    sizes: list[int], world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = batches(sizes)
    problem = ca.Problem(nn.Linear(3, 2).double(), "cross_entropy", data)
    parts = shares(problem, world, monkeypatch)
    dealt = [tuple(row.tolist()) for part in parts for b in part for row in b.inputs]
    assert sorted(dealt) == sorted(tuple(row.tolist()) for x, _ in data for row in x)
    counts = [sum(batch.samples for batch in part) for part in parts]
    assert max(counts) - min(counts) <= 1
    for part in parts:  # where a part lies in its batch: sampled targets depend on it
        for batch in part:
            inputs, targets = data[batch.index]
            place = slice(batch.offset, batch.offset + batch.samples)
            assert torch.equal(batch.inputs, inputs[place])
            assert torch.equal(batch.targets, targets[place])


def test_the_parts_of_all_ranks_add_up_to_the_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = batches(SIZES["smaller than the group"])
    problem = ca.Problem(model, "cross_entropy", data)
    parts = [problem.with_batches(part) for part in shares(problem, 3, monkeypatch)]
    total = sum(part.total_count / problem.total_count * ca.Hessian(part).dense() for part in parts)
    x, y = (torch.cat(tensors) for tensors in zip(*data, strict=True))
    want = oracles.hessian(F.cross_entropy(model(x), y), list(model.parameters()))
    assert oracles.relative_error(total, want) < 1e-12


class MeanOverBatch(nn.Linear):
    """The samples of a batch meet: it cannot be cut."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def test_batches_that_cannot_be_cut_go_to_the_processes_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = ca.Problem(MeanOverBatch(3, 2).double(), "cross_entropy", batches([3, 3, 3, 3, 3]))
    parts = shares(problem, 2, monkeypatch)
    assert [[batch.index for batch in part] for part in parts] == [[0, 2, 4], [1, 3]]
    assert all(len(batch.targets) == 3 for part in parts for batch in part)


def test_a_loss_that_is_no_sum_over_samples_gets_whole_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = batches([3, 3, 3, 3, 3])
    problem = ca.Problem(
        nn.Linear(3, 2).double(), lambda z, y: F.cross_entropy(z, y), data, count=len
    )
    parts = shares(problem, 2, monkeypatch)
    assert [[batch.index for batch in part] for part in parts] == [[0, 2, 4], [1, 3]]
    assert all(len(batch.targets) == 3 for part in parts for batch in part)
