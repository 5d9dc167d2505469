"""Rotary positions: an orthogonal map that only relative positions can see through."""

from __future__ import annotations

import pytest
import torch

from curvatlas.engines.tangent.attention import Rotation
from curvatlas.zoo.models import rotate
from oracles import relative_error
from reference_block import turn

_CPU = torch.device("cpu")


def _rotation(length: int, size: int, base: float = 100.0) -> Rotation:
    return Rotation.from_base(base, length=length, size=size, dtype=torch.float64, device=_CPU)


def test_the_rotation_is_that_of_the_zoo_and_of_complex_numbers() -> None:
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    got = _rotation(7, 6).apply(x)
    assert relative_error(got, rotate(x, 100.0)) <= 1e-14
    assert relative_error(got[1, 2], turn(x[1, 2], 100.0)) <= 1e-14


def test_the_adjoint_is_the_inverse_and_the_transpose() -> None:
    rotation = _rotation(5, 4)
    x, y = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(rotation.adjoint(rotation.apply(x)), x, rtol=1e-14, atol=1e-14)
    left, right = (rotation.apply(x) * y).sum(), (x * rotation.adjoint(y)).sum()
    torch.testing.assert_close(left, right, rtol=1e-13, atol=0)


def test_products_of_rotated_vectors_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 4, dtype=torch.float64)
    rotated = _rotation(9, 4)
    queries, keys = rotated.apply(q.expand(9, 4)), rotated.apply(k.expand(9, 4))
    products = queries @ keys.T
    for distance in range(9):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-12, atol=1e-12)


def test_odd_heads_and_bad_bases_are_refused() -> None:
    with pytest.raises(ValueError, match="head size 3 is odd"):
        _rotation(4, 3)
    with pytest.raises(ValueError, match="rope_base must be positive"):
        _rotation(4, 4, base=0.0)
