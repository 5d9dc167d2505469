"""Vectors of which every process has its own entries: the same numbers, in parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvatlas.parallel import Range, Shards
from curvatlas.spectra import vectors
from curvatlas.spectra.vectors import VectorSpace

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
