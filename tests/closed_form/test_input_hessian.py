"""The Hessian with respect to a block's input against double backward at that activation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from curvatlas.closed_form.input_hessian import (
    input_hessian,
    loss_input_hessian,
    propagate_input_hessian,
)
from curvatlas.engines.tangent.head import Readout
from curvatlas.engines.tangent.losses import PooledCrossEntropy
from curvatlas.engines.tangent.stack import BlockStack
from curvatlas.engines.tangent.structure import BlockSpec
from curvatlas.results import Result, same
from oracles import hessian, jacobian, layer_norm, relative_error
from reference_block import (
    Case,
    attention,
    block,
    feed_forward,
    norm,
    random_case,
    random_weights,
)

TOLERANCE = 1e-12


def _seeded(case: Case, seed: int, *, dense: bool) -> tuple[Tensor, Tensor]:
    """A random δ (n, L, d) and symmetric S_out, dense or token-diagonal."""
    generator = torch.Generator().manual_seed(seed)
    n, length, d = case.x.shape
    shape = (n, length * d, length * d) if dense else (n, length, d, d)
    half = torch.randn(shape, generator=generator, dtype=torch.float64)
    delta = torch.randn(n, length, d, generator=generator, dtype=torch.float64)
    return delta, half + half.mT


def _dense(matrix: Tensor) -> Tensor:
    if matrix.ndim == 3:
        return matrix
    return torch.stack([torch.block_diag(*tokens) for tokens in matrix])


def _oracle(function: Callable[[Tensor], Tensor], x: Tensor, delta: Tensor, s_out: Tensor):
    """Passed on and created here of one sample: Jᵀ S J and ∂²(δ·f), by double backward."""
    leaf = x.detach().requires_grad_(True)
    slope = jacobian(function(leaf), [leaf])
    bend = hessian((delta * function(leaf)).sum(), [leaf])
    return slope.T @ s_out @ slope, bend


@pytest.mark.parametrize("start", range(0, 60, 10))
def test_the_input_hessian_equals_double_backward_for_any_mixture_of_options(start: int) -> None:
    for seed in range(start, start + 10):
        case = random_case(seed)
        delta, s_out = _seeded(case, seed, dense=seed % 2 == 0)
        got = input_hessian(
            case.spec, case.weights, case.x, delta=delta, curvature=s_out, mask=case.keys
        )
        weights = {k: v.detach() for k, v in case.weights.items()}
        for i in range(len(case.x)):
            keys = None if case.keys is None else case.keys[i : i + 1]

            def run(x: Tensor, keys: Tensor | None = keys) -> Tensor:
                return block(case.spec, weights, x[None], keys)[0]  # noqa: B023

            passed, created = _oracle(run, case.x[i], delta[i], _dense(s_out)[i])
            scale = torch.linalg.norm(passed) + torch.linalg.norm(created)
            pairs = {
                "passed_on": (got.passed_on[i], passed),
                "created_here": (got.created_here[i], created),
                "total": (got.total[i], passed + created),
            }
            for name, (left, right) in pairs.items():
                error = float(torch.linalg.norm(left - right) / scale)
                assert error <= TOLERANCE, (seed, name, error, case.spec)


def _whole_cases() -> list[int]:
    seeds = [s for s in range(200) if random_case(s).spec.d_ff and random_case(s).keys is None]
    return seeds[:12]


@pytest.mark.parametrize("seed", _whole_cases())
def test_every_sublayer_gives_its_own_step(seed: int) -> None:
    case = random_case(seed)
    spec = case.spec
    weights = {k: v.detach() for k, v in case.weights.items()}
    delta, s_out = _seeded(case, seed, dense=False)
    got = input_hessian(spec, weights, case.x, delta=delta, curvature=s_out)
    attended, fed = got.sublayers
    assert (attended.name, fed.name) == ("attention", "ffn")
    x = case.x[0].detach()
    keep = torch.ones(len(x), len(x), dtype=torch.float64)
    keep = keep.tril() if spec.causal else keep

    def first(u: Tensor) -> Tensor:
        if spec.norm_first:
            return u + attention(spec, norm(spec, u, weights, "norm1"), weights, keep)
        return norm(spec, u + attention(spec, u, weights, keep), weights, "norm1")

    def second(u: Tensor) -> Tensor:
        if spec.norm_first:
            return u + feed_forward(spec, norm(spec, u, weights, "norm2"), weights)
        return norm(spec, u + feed_forward(spec, u, weights), weights, "norm2")

    middle = first(x).detach().requires_grad_(True)
    passed, created = _oracle(second, middle, delta[0], _dense(s_out)[0])
    assert relative_error(_dense(fed.passed_on)[0], passed) <= TOLERANCE
    scale = torch.linalg.norm(passed) + torch.linalg.norm(created)
    assert torch.linalg.norm(_dense(fed.created_here)[0] - created) <= TOLERANCE * scale
    (pulled,) = torch.autograd.grad((delta[0] * second(middle)).sum(), middle)
    passed, created = _oracle(first, x, pulled, _dense(fed.total)[0])
    scale = torch.linalg.norm(passed) + torch.linalg.norm(created)
    assert torch.linalg.norm(_dense(attended.passed_on)[0] - passed) <= TOLERANCE * scale
    assert torch.linalg.norm(_dense(attended.created_here)[0] - created) <= TOLERANCE * scale
    for step in got.sublayers:
        whole = sum(_dense(t) for t in step.created_by.values())
        assert relative_error(whole, _dense(step.created_here)) <= TOLERANCE  # type: ignore[arg-type]
        whole = sum(_dense(t) for t in step.passed_by.values())
        assert relative_error(whole, _dense(step.passed_on)) <= TOLERANCE  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "pooled"])
def test_the_loss_gives_its_own_seeds(loss: str) -> None:
    case = random_case(3)
    weights = {k: v.detach() for k, v in case.weights.items()}
    n, length, d = case.x.shape
    head = torch.randn(3, d, dtype=torch.float64)
    z = block(case.spec, weights, case.x, case.keys)
    if loss == "mse":
        targets, given = torch.randn_like(z), "mse"
        value = (z - targets).pow(2).mean()
    elif loss == "cross_entropy":
        targets, given = torch.randint(d, (n, length)), "cross_entropy"
        value = torch.nn.functional.cross_entropy(z.flatten(0, 1), targets.flatten())
    else:
        targets, given = torch.randint(3, (n,)), PooledCrossEntropy(head)
        value = torch.nn.functional.cross_entropy(z.mean(1) @ head.T, targets)
    want = hessian(value, [case.x]).view(n, length * d, n, length * d)
    got = loss_input_hessian(
        case.spec, weights, case.x, targets.detach(), loss=given, mask=case.keys
    )
    for i in range(n):
        assert relative_error(got.total[i], want[i, :, i]) <= TOLERANCE
        assert relative_error(got.total[i], got.total[i].T) <= TOLERANCE


@pytest.mark.parametrize("pooling", [None, "mean", "first"])
@pytest.mark.parametrize("norm_kind", ["none", "layer"])
def test_curvature_is_propagated_through_a_stack(pooling: str | None, norm_kind: str) -> None:
    specs = [BlockSpec(d_model=4, n_heads=2, d_ff=5, norm_first=f) for f in (True, False, True)]
    weights = [
        {k: v.detach() for k, v in random_weights(spec, i, scale=0.4).items()}
        for i, spec in enumerate(specs)
    ]
    torch.manual_seed(0)
    x, head = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    targets = torch.randint(3, (2,) if pooling else (2, 3))
    readout = Readout(weight=head, pooling=pooling, norm=norm_kind, eps=0.1)  # type: ignore[arg-type]
    blocks = list(zip(specs, weights, strict=True))
    stack = BlockStack(blocks, loss="cross_entropy", readout=readout)
    got = propagate_input_hessian(stack, x, targets)

    def loss_from(index: int, z: Tensor) -> Tensor:
        for spec, w in blocks[index:]:
            z = block(spec, w, z)
        z = layer_norm(z, None, None, 0.1) if norm_kind == "layer" else z
        z = z.mean(1) if pooling == "mean" else z[:, 0] if pooling == "first" else z
        return torch.nn.functional.cross_entropy((z @ head.T).flatten(0, -2), targets.flatten())

    activation = x
    for index, (spec, w) in enumerate(blocks):
        leaf = activation.detach().requires_grad_(True)
        want = hessian(loss_from(index, leaf), [leaf]).view(2, 12, 2, 12)
        (slope,) = torch.autograd.grad(loss_from(index, leaf), leaf)
        assert relative_error(got[index].delta, slope) <= TOLERANCE
        for i in range(2):
            assert relative_error(got[index].total[i], want[i, :, i]) <= TOLERANCE
        activation = block(spec, w, activation)


def test_results_are_saved_and_loaded(tmp_path) -> None:
    case = random_case(3)
    delta, s_out = _seeded(case, 0, dense=False)
    got = input_hessian(
        case.spec, case.weights, case.x, delta=delta, curvature=s_out, mask=case.keys
    )
    assert same(Result.load(got.save(tmp_path / "input")), got)
    assert "created here" in str(got)


def test_seeds_of_the_wrong_shape_are_refused() -> None:
    case = random_case(3)
    delta, s_out = _seeded(case, 0, dense=False)
    with pytest.raises(ValueError, match="token-diagonal"):
        input_hessian(case.spec, case.weights, case.x, delta=delta, curvature=s_out[..., :1])
    with pytest.raises(ValueError, match="output's shape"):
        input_hessian(case.spec, case.weights, case.x, delta=delta[:, :0], curvature=s_out)
    with pytest.raises(TypeError, match="convert"):
        input_hessian(case.spec, case.weights, case.x, delta=delta, curvature=s_out.float())
