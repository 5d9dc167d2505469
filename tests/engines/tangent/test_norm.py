"""The norms' Jacobian and second derivative, and the identities they obey."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvatlas.layers.norms import (
    norm_hessian,
    norm_jacobian,
    norm_jacobian_product,
    norm_second,
    normalize,
)
from oracles import hessian, jacobian, layer_norm, relative_error, rms_norm


def plain(norm: str, x: Tensor, eps: float) -> Tensor:
    return layer_norm(x, None, None, eps) if norm == "layer" else rms_norm(x, None, eps)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
@pytest.mark.parametrize("d", [2, 7])
def test_closed_forms_equal_double_backward(norm: str, eps: float, d: int) -> None:
    torch.manual_seed(d)
    x, delta, v = torch.randn(3, d, dtype=torch.float64).unbind()
    n, inv_std = normalize(x, eps=eps, norm=norm)  # type: ignore[arg-type]
    point = x.clone().requires_grad_(True)
    J = jacobian(plain(norm, point, eps), [point])
    H = hessian((plain(norm, point, eps) * delta).sum(), [point])
    tensor = torch.stack([hessian(plain(norm, point, eps)[a], [point]) for a in range(d)])
    kind = {"norm": norm}
    scale = 1e-13 * float(inv_std + inv_std**2)  # the sizes of J and Ψ before cancellation
    assert float((norm_jacobian(n, inv_std, **kind) - J).norm()) <= scale  # type: ignore[arg-type]
    assert float((norm_jacobian_product(n, inv_std, v, **kind) - J @ v).norm()) <= scale  # type: ignore[arg-type]
    assert float((norm_second(n, inv_std, delta, **kind) - H).norm()) <= scale  # type: ignore[arg-type]
    assert float((norm_hessian(n, inv_std, **kind) - tensor).norm()) <= scale  # type: ignore[arg-type]


def test_second_derivative_is_symmetric_in_all_three_indices() -> None:
    n, inv_std = normalize(torch.randn(4, 6, dtype=torch.float64), eps=0.1)
    T = norm_hessian(n, inv_std)
    for order in ((0, 2, 1, 3), (0, 3, 2, 1), (0, 1, 3, 2)):
        assert relative_error(T, T.permute(order)) <= 1e-14


def test_the_normalised_token_is_shortened_by_eps_and_nearly_in_the_kernel() -> None:
    x, eps = torch.randn(5, dtype=torch.float64), 0.2
    n, inv_std = normalize(x, eps=eps)
    variance = x.var(unbiased=False)
    torch.testing.assert_close(n.square().sum(), 5 * variance / (variance + eps))
    torch.testing.assert_close(norm_jacobian_product(n, inv_std, n), eps * inv_std**3 * n)


@pytest.mark.parametrize("constant", [0.1, 0.0, 1e6])
def test_a_token_without_variance_is_refused_when_eps_is_zero(constant: float) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    x[1] = constant
    with pytest.raises(ValueError, match=r"token \(1,\) has no variance and eps=0"):
        normalize(x, eps=0.0)
    n, inv_std = normalize(x, eps=1e-5)  # with eps the value and the Jacobian are defined
    assert float(n[1].abs().max()) <= 1e-6
    assert bool(torch.isfinite(norm_jacobian(n, inv_std)).all())


def test_contraction_obeys_its_bound_without_eps() -> None:
    x, delta = torch.randn(2, 50, 8, dtype=torch.float64).unbind()
    n, inv_std = normalize(x, eps=0.0)
    norms = torch.linalg.matrix_norm(norm_second(n, inv_std, delta), 2)
    bound = 2**0.5 * delta.norm(dim=-1) * inv_std.squeeze(-1) ** 2 / 8**0.5
    assert bool((norms <= bound * (1 + 1e-12)).all())
