"""Blocks are the same matrix however small the pieces are that they are written in."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from curvatlas.closed_form import assembly
from curvatlas.closed_form.assembly import Workspace
from curvatlas.closed_form.modules import TransformerBlockHessian
from curvatlas.linear_operator import Part

WAYS = {"small brackets": {"_FOLD": 64}, "small tiles": {"_TILE": 5}, "unpadded": {"PADDING": 0}}


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
def test_the_size_of_the_pieces_does_not_matter(
    way: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = usually_written(kind)
    block, x, y = made(kind)
    for name, value in WAYS[way].items():
        monkeypatch.setattr(assembly, name, value)
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
