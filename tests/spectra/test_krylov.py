"""Rows of a Krylov basis: random ones are the same over any number of processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvatlas.parallel import Shards
from curvatlas.spectra import vectors
from curvatlas.spectra.krylov import Rows


def drawn(size: int, start: int, stop: int, *, seed: int = 3) -> Tensor:
    shards = Shards(size, 0, (((start, stop),),))
    store = Rows(1, size, dtype=torch.float64, device=torch.device("cpu"), shards=shards)
    return store.random(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_parts_of_a_random_vector_are_those_of_the_whole_one(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "_STREAM", 8)  # parts end inside streams and at their ends
    size = 43
    store = Rows(1, size, dtype=torch.float64, device=torch.device("cpu"))
    everything = store.random(torch.Generator().manual_seed(3))
    length = -(-size // processes)
    parts = [drawn(size, r * length, min((r + 1) * length, size)) for r in range(processes)]
    assert torch.equal(torch.cat(parts), everything)


def test_a_part_costs_no_more_numbers_than_it_has_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_STREAM", 8)
    count = 0
    plain = vectors.np.random.Philox

    def counted(**options: object) -> object:
        nonlocal count
        count += 1
        return plain(**options)  # type: ignore[arg-type]

    monkeypatch.setattr(vectors.np.random, "Philox", counted)
    drawn(8000, 16, 30)
    assert count == 2


def test_random_vectors_are_normal_and_independent() -> None:
    store = Rows(1, 10**6, dtype=torch.float64, device=torch.device("cpu"))
    random = torch.Generator().manual_seed(0)
    first, second = store.random(random), store.random(random)
    for vector in (first, second):
        assert abs(float(vector.mean())) < 5e-3
        assert abs(float(vector.var()) - 1) < 1e-2
        assert abs(float(vector.pow(4).mean()) - 3) < 0.05
    assert abs(float((first * second).mean())) < 5e-3
    assert abs(float((first[: 2**16] * first[2**16 : 2**17]).mean())) < 2e-2  # two streams
