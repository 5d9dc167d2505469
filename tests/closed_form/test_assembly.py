"""Every way of writing a block gives the same matrix: folded, paired, packed, turned, in tiles."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from curvatlas.closed_form import assembly, derivatives, families
from curvatlas.closed_form.assembly import Workspace
from curvatlas.closed_form.block import TransformerBlockHessian
from curvatlas.linear_operator import Part

OWNERS = (assembly, derivatives, families)

WAYS = {
    "small folds": {"_FOLD": 64, "_FOLD_TWO_TERMS": 100, "_FOLD_ONE_TERM": 100},
    "folded squares": {"_FOLD": 200, "_FOLD_SQUARE": 100},
    "no folds": {"_FOLD_TWO_TERMS": 0, "_FOLD_ONE_TERM": 0, "_FOLD_SQUARE": 0},
    "small pairs": {"_FOLD_TWO_TERMS": 0, "_FOLD_ONE_TERM": 0, "_PAIR": 50},
    "packed squares": {"_FOLD_SQUARE": 0, "_PACK_FROM": 1, "_NUMBERS": 300},
    "unpacked squares": {"_FOLD_SQUARE": 0, "_PACK_FROM": 10**9, "_STRIPS": 1},
    "turned in tiles": {"_NARROW": 0, "_TILE": 5, "_FOLD_ONE_TERM": 0},
    "turned at once": {"_NARROW": 10**9, "_FOLD_TWO_TERMS": 0, "_FOLD_ONE_TERM": 0},
    "unpadded": {"PADDING": 0},
}


OPTIONS: dict[str, dict[str, Any]] = {
    "bare": {"bias": False, "affine": False, "output_projection": False, "n_heads": 1},
    "two heads": {"n_heads": 2},
    "gated": {"n_heads": 2, "norm_first": True, "gated": True, "activation": "silu"},
}


def made(kind: str) -> tuple[TransformerBlockHessian, Tensor, Tensor]:
    torch.manual_seed(2)
    block = TransformerBlockHessian(6, 9, **OPTIONS[kind]).double()
    x, y = torch.randn(2, 2, 5, 6, dtype=torch.float64).unbind()
    return block, x, y


@functools.cache
def usually_written(kind: str) -> dict[Part, Tensor]:
    block, x, y = made(kind)
    parts: tuple[Part, ...] = ("total", "outer")
    return {part: block.compute_block_hessian(x, y, part=part).part(part) for part in parts}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_every_way_of_writing_gives_the_same_matrix(
    way: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = usually_written(kind)
    block, x, y = made(kind)
    for name, value in WAYS[way].items():
        owners = [m for m in OWNERS if hasattr(m, name)]
        assert owners, name
        for owner in owners:
            monkeypatch.setattr(owner, name, value)
    for part, matrix in want.items():
        out = torch.full_like(matrix, torch.nan)
        result = block.compute_block_hessian(x, y, part=part, out=out, workspace=Workspace())
        assert float((result.part(part) - matrix).norm()) <= 1e-14 * float(matrix.norm())
        assert float((matrix - matrix.T).norm()) <= 1e-14 * float(matrix.norm())


def test_the_workspace_grows_once_and_follows_the_dtype() -> None:
    workspace = Workspace()
    like = torch.zeros(1, dtype=torch.float64)
    first = workspace.take("a", 10, like)
    assert workspace.take("a", 4, like).data_ptr() == first.data_ptr()
    assert workspace.take("a", 4, like.float()).dtype == torch.float32
    rows = workspace.rows("b", 3, 16, like)
    assert rows.shape == (3, 16)
    assert rows.stride(0) > 16
