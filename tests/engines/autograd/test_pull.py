"""Vector-Jacobian products of several cotangents: in one pass, one by one, or where it must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from curvatlas.engines.graphs import pull


def parts() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    x, y = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in "xy")
    constant = torch.ones(2, dtype=torch.float64)
    roots = [torch.outer(x, x).sin(), constant, x.exp()]
    cotangents = [torch.randn(4, *root.shape, dtype=torch.float64) for root in roots]
    return roots, [x, y], cotangents


@pytest.mark.parametrize("together", [True, False, None])
def test_every_row_is_one_backward_pass(together: bool | None) -> None:
    roots, (x, y), cotangents = parts()
    rows, unused = pull(roots, [x, y], cotangents, together=together)
    assert unused is None
    assert rows is not None
    for k, row in enumerate(rows):
        value = sum((r * c[k]).sum() for r, c in zip(roots, cotangents, strict=True))
        (want,) = torch.autograd.grad(value, x, retain_graph=True)
        torch.testing.assert_close(row, want, rtol=1e-13, atol=1e-14)


def test_roots_without_a_graph_give_nothing() -> None:
    x = torch.ones(3, requires_grad=True)
    assert pull([torch.ones(2)], [x], [torch.ones(5, 2)]) == [None]


class Unbatched(torch.autograd.Function):
    """A backward pass that looks at its values, which a batched pass forbids."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad if float(grad.sum()) < 1e9 else grad


def test_an_operation_without_a_batching_rule_goes_one_by_one_or_says_so() -> None:
    x = torch.ones(3, requires_grad=True)
    root, cotangents = Unbatched.apply(x), torch.eye(3)
    (rows,) = pull([root], [x], [cotangents])
    assert rows is not None
    assert torch.equal(rows, 2 * cotangents)
    with pytest.raises(RuntimeError):
        pull([root], [x], [cotangents], together=True)
