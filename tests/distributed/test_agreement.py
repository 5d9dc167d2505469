"""Ranks that hold, see or ask for something else are refused on every rank, in finite time.

One group of two processes goes through all cases (``disagreements.py``); each test reads what the
two ranks were told.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import forked
from distributed import disagreements
from distributed.test_data_parallel import free_port

pytestmark = pytest.mark.slow

Told = dict[str, list[str]]  # case → what rank 0 and rank 1 were told, "" without an error


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("told")
    group = forked.ranks(disagreements.every_case, (2, free_port(), str(folder)), join=False)
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
        ("a column more", "rank 1 multiplies 2 columns and rank 0 1: every rank"),
        ("a column less", "rank 1 multiplies 2 columns and rank 0 3: every rank"),
        ("no columns", "rank 1 multiplies 0 columns and rank 0 1: every rank"),
        ("a column more of a view", "rank 1 multiplies 3 columns and rank 0 2: every rank"),
        ("a column more of two parts", "rank 1 multiplies 2 columns and rank 0 1: every rank"),
        ("a step's gradient", "rank 1 has gradient = Tensor"),
        ("memory for a row of the shorter shard only", "holds 12 vectors of 328 B: 2 eigenpairs"),
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
        "as many columns",
        "room of another size",
        "room of another size, sharded",
        "memory for uneven shards",
        "eigenvalues of uneven rooms",
        "outer diagonal",
        "layer-wise curvature of this process's data",
        "module-wise curvature",
    ],
)
def test_what_may_differ_is_accepted(told: Told, case: str) -> None:
    assert told[case] == ["", ""]


@pytest.mark.parametrize(
    ("case", "purpose", "maker"),
    [
        ("layer-wise curvature", "the curvature of every module", "TransformerHessianAnalyzer"),
        ("full Hessian", "the eigenvalues of every batch", "TransformerHessianAnalyzer"),
        ("attention curvature", "the attention curvature of every batch", "Problem"),
        ("trajectory", "a trajectory of gradient descent", "Problem"),
        ("descent", "a trajectory of gradient descent", "Problem"),
        ("role traces", "a trace by backward passes over the samples", "Problem"),
        ("number of samples", "a quantity by sample", "Problem"),
        ("pieces", "a quantity by sample", "Problem"),
        ("subset", "a choice of samples", "Problem"),
        ("landscape", "a choice of samples", "Problem"),
        ("sampled gradients", "a sketch of sampled gradients", "Problem"),
    ],
)
def test_what_needs_all_data_in_one_process_says_so_on_every_rank(
    told: Told, case: str, purpose: str, maker: str
) -> None:
    for message in told[case]:
        assert message.startswith(purpose)
        assert "needs all data in one process, and these are spread over 2" in message
        assert f"make the {maker} with distributed=False, or call it outside" in message
        assert "\n" not in message


def test_the_closed_form_of_spread_data_is_refused(told: Told) -> None:
    for message in told["closed form"]:
        assert "no closed form of this problem" in message
        assert "reads all data in one process" in message
