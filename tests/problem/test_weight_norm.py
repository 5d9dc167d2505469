"""Weight normalisation: PyTorch's second derivative of it is wrong, ours is held to differences."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from oracles import relative_error


class _Plain(nn.Module):
    """The same layer with w = g v / ‖v‖ written by hand."""

    def __init__(self, g: Tensor, v: Tensor, bias: Tensor, axes: list[int]) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias.clone())
        self.g, self.v, self.axes = nn.Parameter(g.clone()), nn.Parameter(v.clone()), axes

    def forward(self, x: Tensor) -> Tensor:
        weight = self.v * self.g / self.v.pow(2).sum(self.axes, keepdim=True).sqrt()
        return torch.tanh(nn.functional.linear(x, weight, self.bias))


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("older", [False, True])
def test_weight_normalised_layers_have_the_right_hessian(dim: int | None, older: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normalise = nn.utils.weight_norm if older else nn.utils.parametrizations.weight_norm
        layer = normalise(layer, dim=dim)  # type: ignore[operator]
    values = dict(layer.named_parameters())
    g, v = (values["weight_g"], values["weight_v"]) if older else (
        layer.parametrizations.weight.original0, layer.parametrizations.weight.original1,
    )  # fmt: skip
    axes = [0, 1] if dim is None else [1 - dim]
    hand = _Plain(g.detach(), v.detach(), layer.bias.detach(), axes)
    data = (torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,)))
    got = ca.Hessian(ca.Problem(nn.Sequential(layer, nn.Tanh()), "cross_entropy", data)).dense()
    want = ca.Hessian(ca.Problem(hand, "cross_entropy", data)).dense()
    assert [p.shape for p in layer.parameters()] == [p.shape for p in hand.parameters()]
    assert relative_error(got, want) < 1e-12


def test_the_fused_kernel_is_still_wrong() -> None:
    """When this fails PyTorch has been mended and the scope can go."""
    torch.manual_seed(0)
    g = torch.rand(3, 1, dtype=torch.float64)
    v = torch.randn(3, 4, dtype=torch.float64)

    def second(fused: bool) -> Tensor:
        def value(v: Tensor) -> Tensor:
            w = torch._weight_norm(v, g, 0) if fused else v * g / v.norm(dim=1, keepdim=True)
            return w.pow(3).sum()

        return torch.autograd.functional.hessian(value, v).flatten(2).flatten(0, 1)

    assert relative_error(second(True), second(False)) > 1e-2
