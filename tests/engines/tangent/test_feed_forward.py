"""Activations and their derivatives against repeated backward passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from curvatlas.engines.tangent.block import LinearisedFeedForward
from curvatlas.layers.activations import (
    ACTIVATIONS,
    FAMILY_ACTIVATIONS,
    activation_derivatives,
    hidden_units,
)
from curvatlas.layers.structure import BlockSpec
from reference_block import activation

OF_FAMILIES = {
    "gelu_quick": lambda z: z * torch.sigmoid(1.702 * z),
    "relu_squared": lambda z: torch.relu(z).square(),
}


@pytest.mark.parametrize("name", [*ACTIVATIONS, *FAMILY_ACTIVATIONS])
def test_derivatives_up_to_the_third_equal_repeated_backward(name: str) -> None:
    z = torch.linspace(-6, 6, 97, dtype=torch.float64, requires_grad=True)
    values = activation_derivatives(name, z.detach(), order=3)  # type: ignore[arg-type]
    current = (OF_FAMILIES[name](z) if name in OF_FAMILIES else activation(name, z)) * 1.0
    for order, value in enumerate(values):
        torch.testing.assert_close(value, current.detach(), rtol=0, atol=1e-13)
        if order == 3:
            break
        if not current.requires_grad:
            current = torch.zeros_like(z)
            continue
        (current,) = torch.autograd.grad(
            current.sum(), z, create_graph=True, allow_unused=True, materialize_grads=True
        )


def test_relu_has_slope_zero_at_exactly_zero_as_in_torch() -> None:
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.relu(zero).sum(), zero)
    _, ours, bend = activation_derivatives("relu", zero.detach())
    assert torch.equal(ours, slope)
    assert float(bend.abs().max()) == 0.0


@pytest.mark.parametrize("name", [*ACTIVATIONS, *FAMILY_ACTIVATIONS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_absurdly_large_inputs_give_no_nan(name: str, dtype: torch.dtype) -> None:
    z = torch.tensor([-1e12, -50.0, 50.0, 1e12], dtype=dtype)
    for value in activation_derivatives(name, z, order=3):  # type: ignore[arg-type]
        assert bool(torch.isfinite(value).all())


def test_gated_units_carry_both_slopes_and_the_cross_bend() -> None:
    up, gate = torch.randn(2, 5, dtype=torch.float64).unbind()
    units = hidden_units("silu", up, gate)
    leaves = [up.clone().requires_grad_(True), gate.clone().requires_grad_(True)]
    g = activation("silu", leaves[1]) * leaves[0]
    slope_up, slope_gate = torch.autograd.grad(g.sum(), leaves, create_graph=True)
    bend_cross, bend_gate = torch.autograd.grad(slope_gate.sum(), leaves)
    for ours, theirs in (
        (units.value, g),
        (units.slope_up, slope_up),
        (units.slope_gate, slope_gate),
        (units.bend_gate, bend_gate),
        (units.bend_cross, bend_cross),
    ):
        assert ours is not None
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-13, atol=1e-14)


def test_unknown_names_and_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown activation"):
        activation_derivatives("swish", torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="order 3"):
        activation_derivatives("gelu", torch.zeros(1), order=4)


@pytest.mark.parametrize("name", ["gelu", "silu", "relu_squared", "relu"])
def test_hidden_units_whose_slope_vanishes_have_their_products(name: str) -> None:
    torch.manual_seed(0)
    spec = BlockSpec(d_model=3, n_heads=1, d_ff=5, activation=name)  # type: ignore[arg-type]
    x = torch.randn(1, 4, 3, dtype=torch.float64)
    shapes = {"up_weight": (5, 3), "up_bias": (5,), "down_weight": (3, 5), "down_bias": (3,)}
    weights = {
        k: torch.randn(v, dtype=torch.float64, requires_grad=True) for k, v in shapes.items()
    }
    with torch.no_grad():  # far in the tail, beyond underflow, and where GELU's slope is zero
        weights["up_weight"][1:4] = 0.0
        weights["up_bias"][1:4] = torch.tensor([-30.0, -60.0, -0.7517915246935645])
    hidden = F.linear(x, weights["up_weight"], weights["up_bias"])
    g = OF_FAMILIES[name](hidden) if name in OF_FAMILIES else activation(name, hidden)
    z = F.linear(g, weights["down_weight"], weights["down_bias"])
    delta = torch.randn_like(z)
    loss = (delta * z).sum() + 0.5 * (z - z.detach()).square().sum()
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    v = [torch.randn_like(w) for w in weights.values()]
    want = torch.autograd.grad(slopes, list(weights.values()), v)
    block = LinearisedFeedForward(spec, weights, x)
    block.gradient(delta)
    tangents = {k: t.unsqueeze(0) for k, t in zip(weights, v, strict=True)}
    rates, _ = block.hvp(tangents, curvature=lambda moved: moved)
    for key, expected in zip(weights, want, strict=True):
        torch.testing.assert_close(rates[key][0], expected, rtol=1e-12, atol=1e-12)
