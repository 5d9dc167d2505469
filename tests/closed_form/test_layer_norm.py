"""LayerNormHessian and RMSNormHessian as modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvatlas.article import verify_layernorm_hessian
from curvatlas.closed_form.modules import LayerNormHessian, RMSNormHessian
from curvatlas.layers.losses import LinearHeadCrossEntropy
from oracles import hessian, jacobian


def random_norm(kind: type[LayerNormHessian], d: int, eps: float = 1e-5) -> LayerNormHessian:
    layer = kind(d, eps).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(d))
    return layer


@pytest.mark.parametrize("kind", [LayerNormHessian, RMSNormHessian])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_jacobian_and_hessian_of_every_token_include_gamma(
    kind: type[LayerNormHessian], shape: tuple[int, ...]
) -> None:
    layer = random_norm(kind, 5)
    x = torch.randn(shape, dtype=torch.float64)
    J, T = layer.token_jacobians(x), layer.compute_hessian(x)
    assert J.shape == (*shape, 5)
    assert T.shape == (*shape, 5, 5)
    c = torch.randn_like(x)
    psi = layer.compute_hessian(x, cotangent=c)
    for token, j, t, p, ct in zip(
        x.view(-1, 5), J.view(-1, 5, 5), T.view(-1, 5, 5, 5), psi.view(-1, 5, 5), c.view(-1, 5),
        strict=True,
    ):  # fmt: skip
        point = token.clone().requires_grad_(True)
        torch.testing.assert_close(j, jacobian(layer(point), [point]), rtol=1e-12, atol=1e-13)
        for a in range(5):
            want = hessian(layer(point)[a], [point])
            torch.testing.assert_close(t[a], want, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(p, torch.einsum("a,abc->bc", ct, t), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_the_jacobian_of_a_sample_is_one_matrix_over_all_its_tokens(shape: tuple[int, ...]) -> None:
    layer = random_norm(LayerNormHessian, 5)
    x = torch.randn(shape, dtype=torch.float64)
    samples = x.view(1, -1, 5) if x.ndim < 3 else x
    found = layer.compute_jacobian(x)
    for sample, matrix in zip(samples, found.view(len(samples), *found.shape[-2:]), strict=True):
        point = sample.clone().requires_grad_(True)
        want = jacobian(layer(point).reshape(-1), [point])
        torch.testing.assert_close(matrix, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", [LayerNormHessian, RMSNormHessian])
def test_parameter_hessian_is_the_true_one_for_mse_and_cross_entropy(
    kind: type[LayerNormHessian],
) -> None:
    layer = random_norm(kind, 5)
    x, y = torch.randn(2, 2, 3, 5, dtype=torch.float64).unbind()
    result = layer.compute_hessian_wrt_parameters(x, y)
    want = hessian((layer(x) - y).pow(2).mean(), list(layer.parameters()))
    torch.testing.assert_close(result.H, want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(result.block("gamma", "gamma"), want[:5, :5])
    assert float(result.H_functional.abs().max()) == 0.0
    head, t = torch.randn(3, 5, dtype=torch.float64), torch.randint(0, 3, (2, 3))
    result = layer.compute_hessian_wrt_parameters(x, t, loss=LinearHeadCrossEntropy(head))
    loss = nn.functional.cross_entropy((layer(x) @ head.T).flatten(0, 1), t.flatten())
    want = hessian(loss, list(layer.parameters()))
    torch.testing.assert_close(result.H, want, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("module", [nn.LayerNorm(6, eps=0.1), nn.RMSNorm(6, eps=0.2)])
def test_wrapped_norms_share_memory_and_agree(module: nn.Module) -> None:
    layer = LayerNormHessian.from_module(module)
    x = torch.randn(4, 6)
    torch.testing.assert_close(layer(x), module(x))
    with torch.no_grad():
        module.weight.mul_(2.0)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(layer(x), module(x))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_verification_passes_and_prints_its_errors(norm: str) -> None:
    report = verify_layernorm_hessian(norm=norm)  # type: ignore[arg-type]
    assert report.passed
    assert "agrees" in str(report)
    assert max(report.jacobian, report.hessian, report.weight_hessian) <= 1e-13


def test_bad_input_is_refused_with_the_reason() -> None:
    layer = LayerNormHessian(4)
    with pytest.raises(ValueError, match="end in 4"):
        layer.compute_jacobian(torch.zeros(3, 5))
    with pytest.raises(TypeError, match="convert"):
        layer.compute_jacobian(torch.zeros(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="NaN"):
        layer.compute_jacobian(torch.full((4,), torch.nan))
    with pytest.raises(ValueError, match="eps=0"):
        LayerNormHessian(4, 0.0).compute_jacobian(torch.ones(4))
    with pytest.raises(ValueError, match="one axis"):
        LayerNormHessian((2, 3))
