"""Ranks that hold, see or ask for something else are refused on every rank, in finite time.

One group of two processes goes through all cases (``disagreements.py``); each test reads what the
two ranks were told.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from distributed import disagreements
from distributed.test_data_parallel import free_port

pytestmark = pytest.mark.slow

Told = dict[str, list[str]]  # case → what rank 0 and rank 1 were told, "" without an error


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("told")
    group = mp.spawn(
        disagreements.every_case, args=(2, free_port(), str(folder)), nprocs=2, join=False
    )
    deadline = time.monotonic() + 300  # a rank that waits for the other one would never end
    try:
        while not group.join(timeout=5):
            assert time.monotonic() < deadline, "a rank is hanging"
    finally:
        for process in group.processes:
            process.kill()
    ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert list(ranks[0]) == list(ranks[1])
    return {case: [messages[case] for messages in ranks] for case in ranks[0]}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("two signs of one weight", "rank 1 has other weights than rank 0 (head.weight): load"),
        ("a buffer", "rank 1 has other buffers than rank 0 (scale): load"),
        ("label smoothing", "rank 1 has another loss than rank 0: pass"),
        ("class weights", "rank 1 has another loss than rank 0: pass"),
        ("a number in a closure", "rank 1 has another loss than rank 0: pass"),
        ("another function", "rank 1 has another loss than rank 0: pass"),
        ("parameters that vary", "rank 1 has other parameters that vary than rank 0: pass"),
        ("dtype", "rank 1 has parameters of another dtype than rank 0: convert"),
        ("number of layers", "rank 1 has another model than rank 0: build"),
        ("shard on one rank", "rank 1 has other options of the Problem than rank 0: pass"),
        ("a shuffling loader", "rank 1 has other data than rank 0: with shard=True"),
        ("one batch less", "rank 1 has other data than rank 0: with shard=True"),
        ("a stream shuffled later", "rank 1 has other data than rank 0: with shard=True"),
        ("weights changed later", "rank 1 has other weights than rank 0 (head.weight): load"),
        ("a gradient at other weights", "rank 1 has other weights than rank 0 (head.weight): load"),
        ("another vector", "rank 1 multiplies another vector than rank 0: every rank"),
        ("another unit vector", "rank 1 multiplies another vector than rank 0: every rank"),
        ("k", "rank 1 has k = 3 in eigenpairs and rank 0 has 2: pass the same on every rank."),
        ("k below one", "rank 1 has k = 0 in eigenpairs and rank 0 has 2"),
        ("seed", "rank 1 has seed = 1 in trace and rank 0 has 0"),
        ("seed of a sum of operators", "rank 1 has seed = 1 in trace and rank 0 has 0"),
        ("tolerance", "rank 1 has rtol = 0.2 in frobenius_norm and rank 0 has 0.1"),
        ("start vector", "rank 1 has start = Tensor"),
        ("right-hand side", "in solve and rank 0 has Tensor"),
        ("a checkpoint on one rank", "rank 1 has checkpoint = a file in spectral_density"),
        ("estimator", "rank 1 calls diagonal where rank 0 calls trace"),
        ("operator", "rank 1 has op = GaussNewton"),
    ],
)
def test_what_differs_is_said_on_every_rank(told: Told, case: str, words: str) -> None:
    for message in told[case]:
        assert words in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("NaN in the data of one rank", "NaN"),
        ("no data on one rank", "no data"),
        ("an unknown parameter on one rank", "nothing"),
        ("an unknown loss on one rank", "unknown loss 'nothing'"),
    ],
)
def test_a_failing_rank_says_why_and_the_other_stops_with_it(
    told: Told, case: str, words: str
) -> None:
    first, second = told[case]
    assert first == "1 of 2 processes failed: their own error says why; process 0 stops with them."
    assert words in second


@pytest.mark.parametrize(
    "case",
    [
        "the same everywhere",
        "own data without shard",
        "ranks and devices in a closure",
        "a loader shuffled alike",
        "weights changed alike",
        "weights changed back",
        "paths of one checkpoint",
    ],
)
def test_what_may_differ_is_accepted(told: Told, case: str) -> None:
    assert told[case] == ["", ""]
