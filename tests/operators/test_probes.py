"""Hand-written autograd functions are compared with differences before a number is trusted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.errors import DifferentiationError


class Cut(torch.autograd.Function):
    """sin whose backward leaves no graph, as those of foreign kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        with torch.no_grad():
            return slope * ctx.saved_tensors[0].cos()


class Rectified(torch.autograd.Function):
    """A ReLU with a backward that can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * (ctx.saved_tensors[0] > 0)


class Network(nn.Module):
    """``function`` in a branch that adds ``share`` of its result to a larger one."""

    def __init__(self, function: Any, width: int, share: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, width), nn.Linear(3, width)
        self.last = nn.Linear(width, 2)
        self.function, self.share = function, share

    def forward(self, x: Tensor) -> Tensor:
        branch = self.share * self.function.apply(self.first(x))
        return self.last(torch.tanh(self.second(x)) + branch)


def product(function: Any, *, width: int, share: float, dtype: torch.dtype, seed: int) -> Tensor:
    torch.manual_seed(seed)
    model = Network(function, width, share).to(dtype)
    data = torch.randn(4, 3, dtype=dtype), torch.randint(0, 2, (4,))
    problem = ca.Problem(model, "cross_entropy", data)
    result: Tensor = ca.Hessian(problem) @ torch.randn(problem.size, dtype=dtype)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [1.0, 0.03])
def test_a_part_that_leaves_no_graph_is_named_however_small(
    dtype: torch.dtype, share: float
) -> None:
    for seed in range(3):
        with pytest.raises(DifferentiationError, match="CutBackward"):
            product(Cut, width=4, share=share, dtype=dtype, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kinks_of_a_custom_function_are_no_reason_to_refuse_it(dtype: torch.dtype) -> None:
    for seed in range(4):
        found = product(Rectified, width=256, share=1.0, dtype=dtype, seed=seed)
        assert bool(torch.isfinite(found).all())


def test_a_function_that_has_no_float64_is_compared_as_it_is() -> None:
    class Single(Rectified):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("this kernel takes float32 only.")
            ctx.save_for_backward(x)
            return x.clamp(min=0)

    class SingleCut(Single):
        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            return (slope * (ctx.saved_tensors[0] > 0)).detach()

    options: dict[str, Any] = {"width": 4, "share": 1.0, "dtype": torch.float32, "seed": 0}
    product(Single, **options)
    with pytest.raises(DifferentiationError, match=r"SingleCutBackward"):
        product(SingleCut, **options)
