"""H, H_o, H_f and Fisher products against double backward, finite differences and dense algebra."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvatlas as ca
import families
import oracles

NAMES = list(families.FAMILIES)


@pytest.fixture(autouse=True)
def no_fast_path() -> Iterator[None]:
    """The encoder's fused path has no gradient; the oracle must not take it."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def reference_outputs(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits and targets, written apart from the package: shifted by hand for causal models."""
    with sdpa_kernel(SDPBackend.MATH):
        if not isinstance(batch, Mapping):
            return model(batch[0]), batch[1]
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        logits = model(**inputs).logits
    labels = batch["labels"]
    if labels.ndim == 2:
        return logits[:, :-1], labels[:, 1:]
    return logits, labels


def reference_loss(outputs: Tensor, targets: Tensor, loss: str) -> Tensor:
    if loss == "mse":
        return (outputs - targets).pow(2).mean()
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def hand_written(model: nn.Module) -> nn.Module:
    return oracles.with_hand_written_norms(copy.deepcopy(model))


@functools.cache
def problem_of(name: str) -> tuple[ca.Problem, Any, str]:
    """The problem of a family, its batch and loss; no test changes them."""
    model, batch, loss = families.make(name, seed=1)
    return ca.Problem(model, loss, batch), batch, loss


@functools.cache
def operator_of(name: str, kind: Any) -> ca.LinearOperator:
    operator: ca.LinearOperator = kind(problem_of(name)[0])
    return operator


@pytest.mark.parametrize("name", NAMES)
def test_hessian_products_equal_double_backward_through_hand_written_norms(name: str) -> None:
    model, batch, loss = families.make(name)
    problem = ca.Problem(model, loss, batch)
    vector = torch.randn(problem.size, dtype=torch.float64)
    oracle = hand_written(model)
    params = list(oracle.parameters())
    outputs, targets = reference_outputs(oracle, batch)
    value = reference_loss(outputs, targets, loss)
    assert problem.value() == pytest.approx(float(value.detach()), rel=1e-12)
    want = oracles.product(value, params, vector)
    assert oracles.relative_error(ca.Hessian(problem) @ vector, want) < 1e-10
    want_gradient = oracles.gradient(
        reference_loss(*reference_outputs(oracle, batch), loss), params
    )
    assert oracles.relative_error(problem.gradient(), want_gradient) < 1e-11


@pytest.mark.parametrize("name", NAMES)
def test_gauss_newton_and_functional_parts_are_right_and_add_up(name: str) -> None:
    problem, batch, loss = problem_of(name)
    vector = torch.randn(problem.size, dtype=torch.float64)
    oracle = hand_written(problem.model)
    outputs, targets = reference_outputs(oracle, batch)
    params = list(oracle.parameters())
    jac = oracles.jacobian(outputs, params)
    z = outputs.detach().requires_grad_(True)
    lam = oracles.hessian(reference_loss(z, targets, loss), [z])
    want_outer = jac.T @ (lam @ (jac @ vector))
    outer = operator_of(name, ca.GaussNewton) @ vector
    functional = operator_of(name, ca.FunctionalHessian) @ vector
    total = operator_of(name, ca.Hessian) @ vector
    assert oracles.relative_error(outer, want_outer) < 1e-10
    assert oracles.relative_error(outer + functional, total) < 1e-12
    assert oracles.relative_error(ca.Fisher(problem, kind="exact") @ vector, want_outer) < 1e-10
    # Per-target gradients for the empirical Fisher: one row of J per target, weighted.
    width = outputs.shape[-1]
    slope = torch.autograd.grad(reference_loss(z, targets, loss), z)[0].reshape(-1, width)
    rows = jac.reshape(-1, width, problem.size)
    valid = float((targets != -100).sum()) if loss == "cross_entropy" else slope.shape[0]
    per_target = torch.einsum("tw,twp->tp", slope * valid, rows)
    want_empirical = per_target.T @ (per_target @ vector) / valid
    empirical = ca.Fisher(problem, kind="empirical") @ vector
    assert oracles.relative_error(empirical, want_empirical) < 1e-10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [ca.Hessian, ca.GaussNewton, ca.FunctionalHessian])
def test_operators_are_symmetric(name: str, kind: Any) -> None:
    operator = operator_of(name, kind)
    u, v = torch.randn(2, operator.shape[0], dtype=torch.float64)
    hu, hv = (operator @ torch.stack([u, v], 1)).T
    assert abs(float(u @ hv - v @ hu)) <= 1e-12 * float(u.norm() * hv.norm())


@pytest.mark.parametrize("name", ["zoo gpt pre-norm", "torch encoder pre-norm", "hf gpt2"])
def test_hessian_products_equal_finite_differences_of_the_gradient(name: str) -> None:
    model, batch, loss = families.make(name, seed=3)
    problem = ca.Problem(model, loss, batch)
    vector = torch.randn(problem.size, dtype=torch.float64)
    vector /= vector.norm()
    params = list(model.parameters())

    def gradient_at(point: Tensor) -> Tensor:
        with torch.no_grad():
            nn.utils.vector_to_parameters(point, params)
        value = reference_loss(*reference_outputs(model, batch), loss)
        return oracles.gradient(value, params)

    got = ca.Hessian(problem) @ vector
    point = problem.parameters
    want = oracles.finite_difference_product(gradient_at, point, vector, step=4e-3)
    assert oracles.relative_error(got, want) < 1e-9


def test_columns_equal_single_products_in_both_ways_of_running_them() -> None:
    model, batch, loss = families.make("zoo gpt pre-norm")
    problem = ca.Problem(model, loss, batch)
    columns = torch.randn(problem.size, 5, dtype=torch.float64)
    for kind in (ca.Hessian, ca.GaussNewton, ca.FunctionalHessian):
        operator = kind(problem)
        single = torch.stack([operator @ c for c in columns.T], 1)
        _, linear = next(iter(operator._full))
        for at_once in (1, 2, 8):
            linear.columns_at_once = at_once
            assert oracles.relative_error(operator @ columns, single) < 1e-13, (kind, at_once)
        assert operator.products == 20


@pytest.mark.parametrize("norm_first", [True, False])
def test_vmapped_columns_are_right_through_affine_layer_norm(norm_first: bool) -> None:
    model, batch, loss = families.make(
        "torch encoder pre-norm" if norm_first else "torch encoder post-norm", seed=4
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter))
    problem = ca.Problem(model, loss, batch)
    oracle = hand_written(model)
    value = reference_loss(*reference_outputs(oracle, batch), loss)
    slope = oracles.gradient(value, list(oracle.parameters()), create_graph=True)
    columns = torch.randn(problem.size, 12, dtype=torch.float64)
    want = [
        oracles.flat(
            torch.autograd.grad(slope @ c, list(oracle.parameters()), retain_graph=True),
            list(oracle.parameters()),
        )
        for c in columns.T
    ]
    operator = ca.Hessian(problem)
    assert oracles.relative_error(operator @ columns, torch.stack(want, 1)) < 1e-12
    assert next(iter(operator._full))[1].columns_at_once > 1  # it did run vmapped


def test_torch_func_hessian_is_still_wrong_through_affine_layer_norm() -> None:
    """Not ours: the reason we do not use it. When this fails, the upstream bug is fixed."""
    torch.manual_seed(0)
    x = torch.randn(4, 5, dtype=torch.float64)
    mixing, (gamma, beta) = torch.randn(5, 5).double(), torch.randn(2, 5).double()

    def loss(point: Tensor, norm: Callable[..., Tensor]) -> Tensor:
        mixed = x @ point[:25].reshape(5, 5)
        return norm(mixed, point[25:30], point[30:]).sin().sum()

    point = torch.cat([mixing.reshape(-1), gamma, beta])
    built_in = torch.func.hessian(lambda p: loss(p, lambda z, g, b: F.layer_norm(z, (5,), g, b)))
    plain = point.clone().requires_grad_(True)
    want = oracles.hessian(loss(plain, lambda z, g, b: oracles.layer_norm(z, g, b, 1e-5)), [plain])
    assert oracles.relative_error(built_in(point), want) > 1e-3


def test_float64_llama_stays_float64_unless_told_to_follow_the_model() -> None:
    model, batch, loss = families.make("hf llama")
    vector = torch.randn(ca.Problem(model, loss, batch).size, dtype=torch.float64)
    outputs, targets = reference_outputs(model, batch)
    as_given = oracles.product(
        reference_loss(outputs, targets, loss), list(model.parameters()), vector
    )
    kept = ca.Hessian(ca.Problem(model, loss, batch)) @ vector
    followed = ca.Hessian(ca.Problem(model, loss, batch, keep_float64=False)) @ vector
    assert oracles.relative_error(followed, as_given) < 1e-12
    assert 1e-12 < oracles.relative_error(kept, as_given) < 1e-5


def test_monte_carlo_fisher_converges_to_the_exact_one() -> None:
    for name in ("zoo vit pre-norm", "torch multihead"):
        model, batch, loss = families.make(name)
        problem = ca.Problem(model, loss, batch)
        columns = torch.randn(problem.size, 20, dtype=torch.float64)
        exact = ca.Fisher(problem, kind="exact") @ columns
        errors = [
            oracles.relative_error(
                ca.Fisher(problem, kind="mc", samples=samples, seed=1) @ columns, exact
            )
            for samples in (8, 512)
        ]
        assert errors[1] < 0.25
        assert errors[1] < 0.4 * errors[0]  # 1/√64 = 1/8 expected


def test_float32_agrees_with_float64_to_its_own_precision() -> None:
    model, batch, loss = families.make("zoo gpt pre-norm")
    exact = ca.Problem(model, loss, batch)
    vector = torch.randn(exact.size, dtype=torch.float64)
    want = ca.Hessian(exact) @ vector
    single = ca.Problem(copy.deepcopy(model).float(), loss, batch)
    got = ca.Hessian(single) @ vector.float()
    assert got.dtype == torch.float32
    assert oracles.relative_error(got.double(), want) < 1e4 * torch.finfo(torch.float32).eps


def test_scipy_and_parameter_shaped_lists_give_the_same_product() -> None:
    model, batch, loss = families.make("zoo vit post-norm")
    problem = ca.Problem(model, loss, batch)
    operator = ca.Hessian(problem)
    vector = torch.randn(problem.size, dtype=torch.float64)
    want = operator @ vector
    scipy = operator.to_scipy()
    assert scipy.shape == operator.shape
    assert oracles.relative_error(torch.from_numpy(scipy @ vector.numpy()), want) < 1e-14
    shaped = [p.clone() for p in problem.layout.split(vector.unsqueeze(1))]
    listed = operator @ [p.squeeze(0) for p in shaped]
    assert [tuple(t.shape) for t in listed] == [tuple(p.shape) for p in model.parameters()]
    assert oracles.relative_error(torch.cat([t.reshape(-1) for t in listed]), want) < 1e-14


@pytest.mark.parametrize("operator", [ca.Hessian, ca.GaussNewton, ca.FunctionalHessian])
@pytest.mark.parametrize("columns", [1, 3])
def test_a_product_on_kept_graphs_has_the_bits_of_the_one_that_made_them(
    operator: type[ca.Hessian], columns: int
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        torch.nn.Linear(8, 5),
    )
    batches = [(torch.randn(n, 6, 8), torch.randn(n, 6, 5)) for n in (4, 2, 3)]
    op = operator(ca.Problem(model, "mse", batches))
    vectors = torch.randn(op.shape[1], columns)
    assert torch.equal(op @ vectors, op @ vectors)
