from __future__ import annotations

import pytest
import torch
from torch import nn

import curvatlas as ca
from curvatlas.zoo.vit import ViT, ViTConfig


def linear_problem() -> ca.Problem:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    data = [
        (torch.randn(n, 5, dtype=torch.float64), torch.randn(n, 3, dtype=torch.float64))
        for n in (6, 4)
    ]
    return ca.Problem(model, "mse", data)


@pytest.fixture(scope="module")
def vit_problem() -> ca.Problem:
    torch.manual_seed(0)
    model = ViT(ViTConfig(d_model=8, d_ff=8)).double().eval()
    data = (torch.rand(5, 8, 8, dtype=torch.float64), torch.randint(0, 10, (5,)))
    return ca.Problem(model, "cross_entropy", data)


@pytest.mark.parametrize("kind", [ca.KFAC, ca.EKFAC])
def test_a_single_linear_layer_under_mse_is_exact(kind: type[ca.KFAC]) -> None:
    problem = linear_problem()
    exact = ca.GaussNewton(problem).dense()
    assert torch.allclose(kind(problem).dense(), exact, atol=1e-12 * float(exact.norm()))


def test_the_correction_comes_nearer_to_the_exact_blocks(vit_problem: ca.Problem) -> None:
    exact = ca.GaussNewton(vit_problem).dense()
    plain, corrected = ca.KFAC(vit_problem), ca.EKFAC(vit_problem)
    assert plain.covered == corrected.covered
    assert len(plain.covered) >= 4
    errors = {"kfac": 0.0, "ekfac": 0.0, "none": 0.0}
    a, b = plain.dense(), corrected.dense()
    for block in plain.blocks:
        places = torch.arange(len(exact))
        at = places[block.weight]
        if block.bias is not None:
            at = torch.cat([at, places[block.bias]])
        truth = exact[at][:, at]
        errors["none"] += float(truth.norm() ** 2)
        errors["kfac"] += float((a[at][:, at] - truth).norm() ** 2)
        errors["ekfac"] += float((b[at][:, at] - truth).norm() ** 2)
        # EKFAC's trace is the exact block's: a rotation does not change it
        assert float(b[at, at].sum()) == pytest.approx(float(truth.trace()), rel=1e-9)
    assert errors["ekfac"] < errors["kfac"]
    assert errors["ekfac"] < errors["none"]


@pytest.mark.parametrize("kind", [ca.KFAC, ca.EKFAC])
def test_inverse_trace_norm_and_diagonal_are_those_of_the_matrix(
    kind: type[ca.KFAC], vit_problem: ca.Problem
) -> None:
    op = kind(vit_problem)
    matrix = op.dense()
    n = len(matrix)
    assert torch.allclose(matrix, matrix.T, atol=1e-12)
    identity = torch.eye(n, dtype=torch.float64)
    inverse = op.inverse(0.1).dense()
    assert torch.allclose(inverse @ (matrix + 0.1 * identity), identity, atol=1e-9)
    assert ca.trace(op).exact
    assert ca.trace(op).value == pytest.approx(float(matrix.trace()), rel=1e-10)
    assert ca.frobenius_norm(op).value == pytest.approx(float(matrix.norm()), rel=1e-10)
    assert torch.allclose(ca.diagonal(op).values, matrix.diagonal(), atol=1e-12)


def test_damping_must_be_positive_and_linear_layers_must_exist() -> None:
    with pytest.raises(ValueError, match="damping"):
        ca.KFAC(linear_problem()).inverse(0.0)
    model = nn.LayerNorm(4).double()
    data = (torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"nn\.Linear"):
        ca.KFAC(ca.Problem(model, "mse", data))
