"""Closed forms are linear operators: estimators take them as they are and agree with the matrix."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas.closed_form import hessian as hessians
from curvatlas.closed_form.modules import FFNHessian, SelfAttentionHessian, TransformerBlockHessian
from curvatlas.engines.tangent.stack import BlockStack
from curvatlas.layers.losses import OutputLoss, PooledCrossEntropy, Seeds
from curvatlas.linear_operator import PARTS, LinearOperator, Part

EPS = torch.finfo(torch.float64).eps
Made = tuple[ca.LinearOperator, Callable[[Part], Tensor]]  # an operator and its dense parts


def _data(length: int = 3, d: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, length, d, generator=generator, dtype=torch.float64)
    return x, torch.randn(2, length, d, generator=generator, dtype=torch.float64)


def _block(**options: object) -> TransformerBlockHessian:
    torch.manual_seed(2)
    block = TransformerBlockHessian(4, 6, 2, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return block


def _stack() -> Made:
    x, y = _data()
    block = _block(norm_first=True)
    dense = block.derivatives(x, y).dense
    return BlockStack([(block.spec, block.weights)]).linearise(x, y), dense


def _derivatives() -> Made:
    x, y = _data()
    found = _block().derivatives(x, y)
    return found, found.dense


def _rotary() -> Made:
    x, y = _data()
    block = _block(rope_base=100.0)
    return block.derivatives(x, y), block.compute_block_hessian(x, y).part


def _result() -> Made:
    result = _block().compute_block_hessian(*_data())
    return result, result.part


def _feed_forward() -> Made:
    torch.manual_seed(3)
    found = FFNHessian(4, 6, gated=True, activation="silu").double().derivatives(*_data())
    return found, found.dense


MAKERS = [_stack, _derivatives, _rotary, _result, _feed_forward]


def _close(got: Tensor, want: Tensor, factor: float = 1e4) -> bool:
    return float((got - want).norm()) <= factor * EPS * float(want.norm())


@pytest.mark.parametrize("make", MAKERS)
def test_products_with_every_part_equal_the_dense_closed_form(make: Callable[[], Made]) -> None:
    hessian, dense = make()
    columns = torch.randn(hessian.shape[1], 3, dtype=torch.float64)
    operators = {"total": hessian, "outer": hessian.outer, "functional": hessian.functional}  # type: ignore[attr-defined]
    for part in PARTS:
        op, want = operators[part], dense(part)
        assert isinstance(op, LinearOperator)
        assert op.tags.symmetric
        assert _close(op @ columns, want @ columns)
        assert _close(op @ columns[:, 0], want @ columns[:, 0])
        assert _close(op.dense(), want)
        rows = [5, 0, 7]
        assert _close(op[rows, 2:9].dense(), want[rows][:, 2:9])


@pytest.mark.parametrize("make", MAKERS)
def test_estimators_take_closed_forms_as_they_are(make: Callable[[], Made]) -> None:
    hessian, dense = make()
    H = dense("total")
    values = torch.linalg.eigvalsh(H)
    norm = float(values.abs().max())
    pairs = ca.eigenpairs(hessian, k=2, which="both", tol=1e-10)
    ends = torch.cat([values[:2], values[-2:]])
    assert float((pairs.values.sort().values - ends).abs().max()) <= 1e-9 * norm
    assert abs(ca.spectral_norm(hessian, rtol=1e-8).value - norm) <= 1e-7 * norm
    assert abs(ca.trace(hessian, rtol=1e-6).value - float(H.trace())) <= 1e4 * EPS * float(
        values.abs().sum()
    )
    assert _close(ca.diagonal(hessian, rtol=1e-6).values, H.diagonal())
    frobenius = ca.frobenius_norm(hessian, rtol=1e-6)
    assert abs(frobenius.value - float(H.norm())) <= 1e4 * EPS * float(H.norm())
    density = ca.spectral_density(hessian)
    assert abs(float((density.nodes * density.weights).sum()) * len(H) - float(H.trace())) <= (
        0.2 * float(values.abs().sum())
    )
    b = torch.ones(len(H), dtype=torch.float64)
    x = ca.solve(hessian, b, damping=2 * norm, rtol=1e-10).value
    assert float((H @ x + 2 * norm * x - b).norm()) <= 1e-9 * float(b.norm())
    outer = torch.linalg.eigvalsh(dense("outer"))
    top = ca.eigenpairs(hessian.outer, k=1).values  # type: ignore[attr-defined]
    assert abs(float(top) - float(outer[-1])) <= 1e-4 * float(outer[-1])


def test_the_diagonal_and_trace_of_a_block_are_exact_and_take_no_product() -> None:
    found = _block().derivatives(*_data())
    for op in (found, found.outer, found.functional):
        assert ca.diagonal(op).products == 0
        assert ca.trace(op).products == 0
    assert _close(ca.diagonal(found.outer).values, found.dense("outer").diagonal())


@pytest.mark.parametrize("rope", [None, 100.0])
def test_one_block_is_an_operator_with_a_transpose(rope: float | None) -> None:
    found = _block(rope_base=rope).derivatives(*_data())
    for part in PARTS:
        want = found.block("query_weight", "down_weight", part)
        for op in (
            found.block_product("query_weight", "down_weight", part),
            found.operator(part)["query_weight", "down_weight"],
        ):
            assert isinstance(op, LinearOperator)
            assert _close(op.dense(), want)
            assert _close(op.T.dense(), want.T)
            singular = float(torch.linalg.matrix_norm(want, 2))
            assert abs(ca.spectral_norm(op, rtol=1e-8).value - singular) <= 1e-7 * singular
    square = found.block_product("value_weight", "value_weight")
    largest = torch.linalg.eigvalsh(found.block("value_weight", "value_weight"))[-1]
    assert abs(float(ca.eigenpairs(square, k=1).values) - float(largest)) <= 1e-4 * float(largest)


def test_an_outer_part_is_psd_only_under_a_loss_known_to_be_convex() -> None:
    class Saddle(OutputLoss):
        def seeds(self, outputs: Tensor, targets: Tensor) -> Seeds:
            signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=outputs.dtype)
            blocks = torch.diag(signs).expand(*outputs.shape, -1)
            delta = outputs * signs
            return Seeds.from_blocks(
                value=(0.5 * outputs * delta).sum(), delta=delta, blocks=blocks
            )

    x, y = _data()
    block = _block()
    stack = [(block.spec, block.weights)]
    head = torch.randn(3, 4, dtype=torch.float64)
    labels = torch.tensor([0, 2])
    assert not block.derivatives(x, y, loss=Saddle()).outer.tags.psd
    assert not BlockStack(stack, loss=Saddle()).linearise(x, y).outer.tags.psd
    for loss, target in (("mse", y), (PooledCrossEntropy(head), labels)):
        assert block.derivatives(x, target, loss=loss).outer.tags.psd
        hessian = BlockStack(stack, loss=loss).linearise(x, target)
        assert hessian.outer.tags.psd
        assert not hessian.functional.tags.psd
        assert not hessian.tags.psd


def test_names_choose_blocks_and_unknown_names_are_refused() -> None:
    attention = SelfAttentionHessian(4, 2).double()
    result = attention.compute_attention_hessian(*_data())
    block = result["query_weight", "K"]
    assert isinstance(block, LinearOperator)
    assert torch.equal(block.dense(), result["QK"])
    stack = BlockStack([(attention.spec, attention.weights)]).linearise(*_data())
    places = stack.offsets["blocks.0.key_weight"]
    assert stack["blocks.0.key_weight"].shape == (places[1], places[1])
    for op in (result, stack, attention.derivatives(*_data())):
        with pytest.raises(KeyError, match="no parameter 'nothing'"):
            op["nothing", "nothing"]


def test_a_checkpoint_of_one_closed_form_is_refused_for_another(tmp_path: object) -> None:
    x, y = _data()
    block = _block()

    def hessian(scale: float) -> tuple[LinearOperator, LinearOperator]:
        stack = BlockStack([(block.spec, block.weights)])
        return stack.linearise(scale * x, y), block.derivatives(scale * x, y)

    for number, (op, other) in enumerate(zip(hessian(1.0), hessian(2.0), strict=True)):
        path = f"{tmp_path}/{number}"
        first = ca.eigenpairs(op, k=1, tol=1e-8, max_products=12, checkpoint=path)
        again = ca.eigenpairs(op, k=1, tol=1e-8, max_products=12, checkpoint=path)
        assert torch.equal(first.values, again.values)
        with pytest.raises(ValueError, match="checkpoint"):
            ca.eigenpairs(other, k=1, tol=1e-8, max_products=12, checkpoint=path)


def test_a_dense_result_is_copied_and_compared_like_other_results() -> None:
    result = _block().compute_block_hessian(*_data())._complete()
    assert torch.equal(copy.deepcopy(result).H, result.H)


def test_a_block_whose_tensors_do_not_fit_is_multiplied_through_full_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = _block().derivatives(*_data())
    kept = found["up_weight", "query_weight"]
    monkeypatch.setattr(hessians, "default_budget", lambda device: 1000)
    lean = found["up_weight", "query_weight"]
    assert type(lean) is not type(kept)
    assert _close(lean.dense(), found.block("up_weight", "query_weight"))
    assert _close(kept.dense(), lean.dense())


def test_the_interval_of_an_exact_trace_knows_of_entries_that_cancel() -> None:
    entries = torch.tensor([1.0, -1.0, 1e-9], dtype=torch.float64)
    estimate = ca.trace(ca.DiagonalOperator(entries))
    low, high = estimate.interval
    assert high - low >= 2 * torch.finfo(torch.float64).eps
    assert low <= 1e-9 <= high
