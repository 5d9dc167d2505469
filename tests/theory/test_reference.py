"""The checks' own reference agrees with PyTorch's layers and with the tests' slower oracle."""

from __future__ import annotations

import pytest
import torch

import oracles
from curvatlas.closed_form.modules import TransformerBlockHessian
from curvatlas.theory import reference
from curvatlas.theory.reference import KINDS, draw_case


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_forward_pass_is_that_of_the_encoder_layer(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )
    layer = layer.double().eval()
    block = TransformerBlockHessian.from_module(layer)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    ours = reference.block_output(block.spec, block.weights, x)
    assert reference.relative_error(ours, layer(x)) < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_batched_rows_equal_the_loop_over_rows(kind: str) -> None:
    case = draw_case(torch.Generator().manual_seed(6), kind, small=True)
    weights = reference.tracked(case.weights)
    z = reference.block_output(case.spec, weights, case.x)
    value = reference.loss_of(case.loss, case.target)(z)
    params = list(weights.values())
    loop = oracles.hessian(value, params)
    assert reference.relative_error(reference.hessian(value, params), loop) < 1e-13


def test_outer_and_functional_parts_add_up() -> None:
    case = draw_case(torch.Generator().manual_seed(7), "post-norm", small=True)
    weights = reference.tracked(case.weights)
    z = reference.block_output(case.spec, weights, case.x)
    loss = reference.loss_of(case.loss, case.target)
    params = list(weights.values())
    total, outer, functional = reference.split_hessian(z, loss, params)
    leaf = z.detach().requires_grad_(True)
    (delta,) = torch.autograd.grad(loss(leaf), leaf)
    alone = reference.hessian((delta * z).sum(), params)  # of ⟨∂ℓ/∂Z, Z⟩, the first factor fixed
    assert float((functional - alone).norm()) < 1e-12 * float(total.norm())
    assert float((oracles.outer_hessian(z, loss, params) - outer).norm()) < 1e-12 * float(
        total.norm()
    )
