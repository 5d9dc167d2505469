"""FFNHessian: Jacobians, blocks and parts against autodiff."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from batched_oracles import parts
from curvatlas.closed_form.modules import FFNHessian
from curvatlas.layers.activations import ACTIVATIONS


def random_ffn(**options: object) -> FFNHessian:
    layer = FFNHessian(4, 6, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.7)
    return layer


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_all_blocks_and_parts_equal_double_backward(
    activation: str, gated: bool, bias: bool
) -> None:
    torch.manual_seed(5)
    layer = random_ffn(activation=activation, gated=gated, bias=bias)
    x, y = torch.randn(2, 2, 3, 4, dtype=torch.float64).unbind()
    want = parts(layer(x), lambda z: (z - y).pow(2).mean(), list(layer.parameters()))
    result = layer.compute_hessian(x, y)
    assert result.names == tuple(layer.weights)
    for key, part in (("H", "total"), ("H_outer", "outer"), ("H_functional", "functional")):
        error = float((result[key] - want[part]).norm())
        assert error <= 1e-13 * float(want["total"].norm()), (part, activation)
    for a in result.names:
        for b in result.names:
            for part in ("total", "outer", "functional"):
                zero = float(result.block(a, b, part).abs().max()) == 0.0  # type: ignore[arg-type]
                assert zero == result.structure.is_zero(a, b, part), (a, b, part)  # type: ignore[arg-type]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_jacobians_equal_reverse_mode(gated: bool, lead: tuple[int, ...]) -> None:
    layer = random_ffn(activation="gelu", gated=gated)
    x = torch.randn(*lead, 4, dtype=torch.float64)
    found = layer.compute_ffn_jacobians(x)
    names = {"d_ffn_d_w1": "w1.weight", "d_ffn_d_w2": "w2.weight"}
    for key, name in (names | ({"d_ffn_d_gate": "w_gate.weight"} if gated else {})).items():
        want = jacrev(lambda w, n=name: functional_call(layer, {n: w}, (x,)))(
            layer.get_parameter(name)
        )
        torch.testing.assert_close(found[key], want.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found["intermediate"], layer.w1(x).detach())
    assert found["activation_derivative"].shape == (*lead, 6)


def test_w2_hessian_is_kronecker_and_without_a_target_half_the_squared_norms() -> None:
    layer = random_ffn()
    x, y = torch.randn(2, 5, 4, dtype=torch.float64).unbind()
    g = layer.activation(layer.w1(x)).detach()
    want = torch.kron(torch.eye(4, dtype=torch.float64), g.T @ g)
    torch.testing.assert_close(layer.compute_hessian_wrt_w2(x), want / len(x))
    torch.testing.assert_close(layer.compute_hessian_wrt_w2(x, y), want * 2 / y.numel())
    with pytest.raises(ValueError, match="'cross_entropy' needs a target"):
        layer.compute_hessian_wrt_w2(x, loss="cross_entropy")


def test_relu_at_exactly_zero_uses_the_slope_zero_and_no_nan() -> None:
    layer = FFNHessian(3, 2, activation="relu", bias=False).double()
    with torch.no_grad():
        layer.w1.weight.zero_()  # every pre-activation is exactly zero
    x, y = torch.randn(2, 4, 3, dtype=torch.float64).unbind()
    assert float(layer.compute_hessian(x, y).H.abs().max()) == 0.0


def test_in_train_mode_derivatives_are_those_without_dropout_and_this_is_said_once() -> None:
    layer = FFNHessian(3, 2, dropout=0.1)
    x, y = torch.randn(2, 4, 3).unbind()
    with pytest.warns(UserWarning, match=r"train mode \(dropout of 0\.1.*evaluation mode"):
        found = layer.compute_hessian(x, y).H
    assert layer.training
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(layer.compute_hessian(x, y).H, found)
    assert torch.equal(layer.eval().compute_hessian(x, y).H, found)


def test_fresh_weights_are_those_of_two_linear_layers() -> None:
    torch.manual_seed(3)
    found = [parameter.detach() for parameter in FFNHessian(4, 6).parameters()]
    torch.manual_seed(3)
    linear = [*nn.Linear(4, 6).parameters(), *nn.Linear(6, 4).parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, linear, strict=True))


def test_more_axes_are_more_tokens_of_one_batch() -> None:
    layer = random_ffn()
    x, y = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64).unbind()
    whole = layer.compute_hessian(x, y).H
    flat = layer.compute_hessian(x.flatten(0, 1), y.flatten(0, 1)).H
    assert torch.equal(whole, flat)
    one, target = x[0, 0, 0], y[0, 0, 0]
    want = parts(layer(one), lambda z: (z - target).pow(2).mean(), list(layer.parameters()))
    found = layer.compute_hessian(one, target).H
    torch.testing.assert_close(found, want["total"], rtol=1e-11, atol=1e-13)


def test_wrong_input_is_refused() -> None:
    layer = FFNHessian(3, 2)
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="it takes no mask"):
        layer.compute_hessian(x, mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="FFNHessian has no query_weight"):
        FFNHessian.from_module(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval())
    with pytest.raises(ValueError, match="end in 3"):
        layer.compute_ffn_jacobians(torch.zeros(4, 2))
    with pytest.raises(TypeError, match="convert"):
        layer.compute_ffn_jacobians(torch.zeros(4, 3, dtype=torch.float64))
