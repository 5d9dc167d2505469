"""Bounds hold block by block against double backward, and stay close to the truth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas.closed_form.modules import SelfAttentionHessian, TransformerBlockHessian
from curvatlas.layers.losses import PooledCrossEntropy, resolve_loss
from curvatlas.layers.structure import BlockSpec
from curvatlas.results import load
from curvatlas.theory import reference
from curvatlas.theory.attention_bounds import draft_theorem_1
from curvatlas.theory.papers.bounds import head_hessian
from curvatlas.theory.reference import KINDS, SingleHead, draw_case, head_as_block
from curvatlas.theory.token_bound import (
    entry_bounds,
    entry_columns,
    rows_by_backward,
    rows_by_products,
)
from theory_cases import stack_output, true_hessian

ROUNDING = 1 + 1e-9


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(12))
def test_every_pair_of_entries_is_bounded(seed: int) -> None:
    case = draw_case(generator(100 + seed), KINDS[seed % 3])
    hessian = true_hessian(case)
    seeds = resolve_loss(case.loss).seeds(
        reference.block_output(case.spec, case.weights, case.x), case.target
    )
    found = entry_bounds(case.spec, case.weights, case.x, seeds)
    columns = entry_columns(case.spec, case.weights)
    assert set(columns) == set(found.names)
    assert sum(len(c) for c in columns.values()) == len(hessian)  # all parameters are covered
    floor = 1e-14 * float(hessian.norm())
    for i, a in enumerate(found.names):
        for j, b in enumerate(found.names):
            true = float(torch.linalg.matrix_norm(hessian[columns[a]][:, columns[b]], 2))
            assert true <= float(found.matrix[i, j]) * ROUNDING + floor, (a, b, case.spec)
    high, low = found.ends()
    values = torch.linalg.eigvalsh(hessian)
    assert values[-1] <= high * ROUNDING + floor
    assert -values[0] <= low * ROUNDING + floor


def test_the_bound_stays_within_four_of_the_truth_and_two_in_the_median() -> None:
    for kind in KINDS:
        ratios = []
        for seed in range(11):
            case = draw_case(generator(900 + seed), kind)
            found = ca.theory.bounds((case.spec, case.weights), case.x, case.target, loss=case.loss)
            ratios.append(found.looseness["token_structured"])
        ratios.sort()
        assert ratios[0] >= 1 / ROUNDING
        assert ratios[5] <= 2.0
        assert ratios[-1] <= 4.0


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_users_block_gets_all_four_numbers(norm_first: bool) -> None:
    torch.manual_seed(0)
    block = TransformerBlockHessian(6, 10, n_heads=2, norm_first=norm_first).double().eval()
    x, y = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    found = ca.theory.bounds(block, x, y)
    truth = block.compute_block_hessian(x, y).H
    exact = float(reference.spectral_norm(truth))
    assert found.exact == pytest.approx(exact, rel=1e-9)
    assert found.exact <= found.token_structured * ROUNDING <= 4 * found.exact
    assert found.token_structured < found.data_free < found.printed
    assert {"input norm", "L", "d_k", "bound"} <= set(found.chain)
    assert "token-structured" in str(found)


def test_bare_attention_shows_the_printed_bound_as_invalid() -> None:
    torch.manual_seed(0)
    layer = SelfAttentionHessian(4, d_k=3).double()
    x, y = torch.randn(2, 5, 4, dtype=torch.float64)
    found = ca.theory.bounds(layer, x, y)
    assert "Theorem 1" in found.printed_source
    assert not found.printed_is_valid
    assert found.exact <= found.token_structured <= found.data_free


def test_single_precision_and_class_targets_need_no_preparation() -> None:
    torch.manual_seed(0)
    block = TransformerBlockHessian(4, 6, n_heads=2).eval()  # float32
    x, classes = torch.randn(2, 3, 4), torch.randint(4, (2, 3))
    found = ca.theory.bounds(block, x, classes)
    named = ca.theory.bounds(block.double(), x.double(), classes, loss="cross_entropy")
    assert found.exact == pytest.approx(named.exact, rel=1e-12)
    assert found.exact <= found.token_structured * ROUNDING


def test_one_token_has_no_query_and_key_curvature_and_is_bounded() -> None:
    torch.manual_seed(0)
    block = TransformerBlockHessian(4, 6, norm_first=True).double().eval()
    x, y = torch.randn(2, 3, 1, 4, dtype=torch.float64)
    found = ca.theory.bounds(block, x, y)
    assert float(found.token_matrix[0, 0]) == 0.0
    assert found.exact <= found.token_structured * ROUNDING <= 4 * found.exact


def test_the_draft_theorem_fails_at_a_point_that_fits_on_one_line() -> None:
    # found by gradient ascent (statement theorem-1-draft), rounded to three digits
    x, q, k, v, y = (
        torch.tensor(values, dtype=torch.float64)
        for values in (
            [[-1.607, 0.219], [-0.224, -1.614]],
            [[0.485], [0.361]],
            [[-0.41], [0.426]],
            [[0.383, 0.165], [-0.411, 0.081]],
            [[0.233, -0.18], [0.217, -0.196]],
        )
    )
    head = SingleHead(x, q, k, v, y)
    true = float(reference.spectral_norm(head_hessian(head)))
    found = ca.theory.bounds(head_as_block(head), x, y)
    assert found.exact == pytest.approx(true, rel=1e-10)
    assert true > 1.4 * max(float(line) for line in draft_theorem_1(head).values())
    assert true <= found.token_structured * ROUNDING <= found.data_free * ROUNDING


@pytest.mark.parametrize(
    "spec",
    [
        BlockSpec(d_model=4, n_heads=4, n_kv_heads=2, d_k=2, d_v=2, d_ff=6, norm_first=True),
        BlockSpec(d_model=4, d_k=2, d_v=4, d_ff=6, norm="none", norm_first=True),
        BlockSpec(d_model=4, d_k=2, d_v=4, residual=True),
        BlockSpec(d_model=4, d_k=2, d_v=4, residual=True, norm_first=True),
    ],
    ids=["grouped-query", "no norm", "attention and norm", "pre-norm attention"],
)
def test_less_usual_blocks_are_bounded_too(spec: BlockSpec) -> None:
    g = generator(3)
    weights = reference.draw_weights(spec, g, bias=True)
    x, y = torch.randn(2, 2, 4, 4, generator=g, dtype=torch.float64)
    found = ca.theory.bounds((spec, weights), x, y)
    tracked = reference.tracked(weights)
    value = reference.loss_of("mse", y)(reference.block_output(spec, tracked, x))
    exact = reference.spectral_norm(reference.hessian(value, list(tracked.values())))
    assert found.exact == pytest.approx(float(exact), rel=1e-9)
    assert found.exact <= found.token_structured * ROUNDING <= 6 * found.exact
    assert found.exact <= found.data_free


def test_padding_masks_are_respected() -> None:
    case = draw_case(generator(8), "attention")
    n, length, _ = case.x.shape
    mask = torch.ones(n, length, dtype=torch.bool)
    mask[:, -1] = False
    masked = ca.theory.bounds(
        (case.spec, case.weights), case.x, case.target, loss=case.loss, mask=mask
    )
    plain = ca.theory.bounds((case.spec, case.weights), case.x, case.target, loss=case.loss)
    assert masked.exact != pytest.approx(plain.exact, rel=1e-6)
    assert masked.exact <= masked.token_structured * ROUNDING


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_stack_is_bounded_over_all_its_parameters(norm_first: bool) -> None:
    g = generator(4)
    spec = BlockSpec(d_model=4, n_heads=2, d_ff=6, norm_first=norm_first)
    layers = [(spec, reference.draw_weights(spec, g, bias=True)) for _ in range(3)]
    x, y = torch.randn(2, 1, 4, 4, generator=g, dtype=torch.float64)
    found = ca.theory.bounds(layers, x, y)
    tracked = [(s, reference.tracked(w)) for s, w in layers]
    params = [p for _, w in tracked for p in w.values()]
    value = reference.loss_of("mse", y)(stack_output(tracked, x))
    exact = float(reference.spectral_norm(reference.hessian(value, params)))
    assert found.exact == pytest.approx(exact, rel=1e-9)
    assert exact <= found.token_structured * ROUNDING <= 6 * exact
    assert exact <= found.data_free
    assert len(found.token_names) == 3


def test_exact_rows_of_the_norms_agree_both_ways() -> None:
    case = draw_case(generator(17), "pre-norm")
    loss = resolve_loss(case.loss)
    weights = reference.tracked(case.weights)
    z = reference.block_output(case.spec, case.weights, case.x)
    closed = rows_by_products(case.spec, case.weights, case.x, loss.seeds(z, case.target))
    backward = rows_by_backward(case.spec, weights, case.x, loss, case.target)
    assert reference.relative_error(closed, backward) < 1e-12


def test_a_large_block_takes_lanczos_and_agrees_with_all_eigenvalues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = draw_case(generator(21), "post-norm")
    dense = ca.theory.bounds((case.spec, case.weights), case.x, case.target, loss=case.loss)
    monkeypatch.setattr("curvatlas.theory.token_bound._DENSE_LIMIT", 3)
    lanczos = ca.theory.bounds((case.spec, case.weights), case.x, case.target, loss=case.loss)
    assert lanczos.exact == pytest.approx(dense.exact, rel=1e-7)


def test_results_survive_a_round_trip_and_draw(tmp_path: object) -> None:
    case = draw_case(generator(2), "attention")
    found = ca.theory.bounds((case.spec, case.weights), case.x, case.target, loss=case.loss)
    again = load(found.save(f"{tmp_path}/bounds"))
    assert again.to_dict() == found.to_dict()
    assert len(found.plot().axes) >= 2


def _refused(match: str, **changes: object) -> None:
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, residual=False, **changes)  # type: ignore[arg-type]
    weights = reference.draw_weights(spec, generator(0))
    x, y = torch.randn(2, 1, 3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=match):
        ca.theory.bounds((spec, weights), x, y)


def test_what_is_not_covered_is_refused_with_the_reason() -> None:
    _refused("rotary", rope_base=10_000.0)
    _refused("softmax", softmax=False)
    spec = BlockSpec(d_model=4, d_k=2, d_v=4, residual=False)
    weights = reference.draw_weights(spec, generator(0))
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    head: Tensor = torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="couple tokens"):
        ca.theory.bounds((spec, weights), x, torch.tensor([0, 1]), loss=PooledCrossEntropy(head))
    with pytest.raises(ValueError, match=r"\(n, L, 4\)"):
        ca.theory.bounds((spec, weights), torch.randn(3, 5, dtype=torch.float64), x[0])
    with pytest.raises(ValueError, match="NaN"):
        ca.theory.bounds((spec, weights), x * float("nan"), x)
    with pytest.raises(TypeError, match="closed-form block"):
        ca.theory.bounds(object(), x, x)
