"""Vectors of which every process has its own entries: the same numbers, in parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import curvatlas as ca
import oracles
from curvatlas.parallel import Range, Shards
from curvatlas.spectra import vectors
from curvatlas.spectra.vectors import VectorSpace
from spectra.spectrum_operators import DenseOperator

CPU = torch.device("cpu")


def space(size: int, shards: Shards | None = None) -> VectorSpace:
    return VectorSpace(size, dtype=torch.float64, device=CPU, shards=shards)


def parts(size: int) -> list[Shards]:
    """Three processes, each with rows here and there, as FSDP2 gives them; the last has few."""
    a, b, c = size // 5, size // 2, size - 3
    ranges: tuple[tuple[Range, ...], ...] = (
        ((0, a), (b, c)),
        ((a, b),),
        ((c, size),),
    )
    return [Shards(size, index, ranges) for index in range(3)]


def put_together(size: int, pieces: list[Tensor]) -> Tensor:
    whole = pieces[0].new_empty(size, pieces[0].shape[1])
    for shards, piece in zip(parts(size), pieces, strict=True):
        at = 0
        for start, stop in shards.own:
            whole[start:stop] = piece[at : at + stop - start]
            at += stop - start
    return whole


@pytest.mark.parametrize("size", [5, 16, 47, 1000, 4099])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["float64", "float32", "signs"])
def test_random_columns_are_those_of_one_process(
    size: int, count: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "_DRAWN", 64)  # many blocks, of which some are another's

    def draw(shards: Shards | None, random: torch.Generator) -> Tensor:
        if kind == "signs":
            return space(size, shards).signs(count, random)
        return space(size, shards).normal(count, random, precision=getattr(torch, kind))

    random = torch.Generator().manual_seed(3)
    if kind == "signs":
        want = 2.0 * torch.randint(0, 2, (size, count), generator=random, dtype=torch.int8) - 1
    else:
        want = torch.randn(size, count, generator=random, dtype=getattr(torch, kind))
    after = random.get_state()
    pieces = []
    for shards in (None, *parts(size)):
        random = torch.Generator().manual_seed(3)
        pieces.append(draw(shards, random))
        assert torch.equal(random.get_state(), after)  # the next draw agrees as well
    assert torch.equal(pieces[0], want.double())
    assert torch.equal(put_together(size, pieces[1:]), want.double())


def test_entries_of_a_whole_vector_are_found_in_its_parts() -> None:
    size = 50
    vector = torch.arange(size, dtype=torch.float64)
    indices = torch.tensor([49, 0, 9, 10, 11, 24, 25, 26, 46, 47, 3])
    seen = torch.zeros(len(indices), dtype=torch.int64)
    for shards in parts(size):
        here, places = space(size, shards).places(indices)
        assert torch.equal(shards.take(vector)[places], vector[indices[here]])
        seen += here
    assert torch.equal(seen, torch.ones_like(seen))  # by one process each


def test_parts_of_one_process_are_the_whole() -> None:
    draw = torch.Generator().manual_seed(0)
    factor = torch.randn(300, 300, generator=draw, dtype=torch.float64)
    b = torch.randn(300, 2, generator=draw, dtype=torch.float64)
    matrix = factor @ factor.T / 300

    def operator() -> DenseOperator:
        return DenseOperator(matrix, psd=True)

    whole = ca.solve(operator(), b, damping=0.5, rtol=1e-12).value
    part = ca.solve(operator(), b, damping=0.5, rtol=1e-12, shard=True).value
    want = torch.linalg.solve(matrix + 0.5 * torch.eye(300, dtype=torch.float64), b)
    for got in (whole, part):
        assert oracles.relative_error(got, want) < 1e-10
    diagonals = [ca.diagonal(operator(), rtol=0.5, shard=shard).values for shard in (None, True)]
    assert oracles.relative_error(diagonals[1], diagonals[0]) < 1e-12
    with pytest.raises(ValueError, match=r"this process's entries of b must be a tensor \(300,\)"):
        ca.solve(operator(), b[:-1], damping=0.5, shard=True)
