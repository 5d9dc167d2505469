"""TransformerBlockHessian: interface, batches, memory, wrapped layers and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import jax_fixtures
from batched_oracles import parts
from curvatlas.closed_form import hessian as hessians
from curvatlas.closed_form.assembly import Workspace
from curvatlas.closed_form.modules import TransformerBlockHessian
from curvatlas.closed_form.result import BlockHessian
from curvatlas.layers.losses import PooledCrossEntropy
from curvatlas.layers.structure import BlockSpec


def random_block(
    d: int = 4, d_ff: int = 6, heads: int = 2, **options: object
) -> TransformerBlockHessian:
    torch.manual_seed(7)
    block = TransformerBlockHessian(d, d_ff, heads, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return block


def batch(n: int = 2, length: int = 3, d: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, length, d, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, length, d, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("norm_first", [False, True])
def test_parameters_stand_in_the_order_of_the_hessian(norm_first: bool) -> None:
    block = random_block(norm_first=norm_first)
    x, y = batch()
    result = block.compute_block_hessian(x, y)
    assert result.names == tuple(name for name, _ in block.named_parameters())
    want = parts(block(x), lambda z: (z - y).pow(2).mean(), list(block.parameters()))
    for key, part in (("H", "total"), ("H_outer", "outer"), ("H_functional", "functional")):
        assert float((result[key] - want[part]).norm()) <= 1e-12 * float(want[part].norm())


@pytest.mark.parametrize("name", jax_fixtures.names("block"))
def test_jax_says_the_same(name: str) -> None:
    fixture = jax_fixtures.load(name)
    weights = dict(fixture.weights)
    loss: str | PooledCrossEntropy = fixture.loss
    if fixture.loss == "pooled":  # the fixture's last parameter is the head, fixed here
        loss = PooledCrossEntropy(weights.pop("head_weight"))
    block = TransformerBlockHessian.from_weights(BlockSpec(**fixture.spec), weights)
    found = block.derivatives(fixture.inputs, fixture.targets, loss=loss)
    size = found.size
    assert fixture.size - size in (0, 12)
    for part, want in (
        ("total", fixture.hessian),
        ("outer", fixture.outer),
        ("functional", fixture.functional),
    ):
        matrix = want[:size, :size]
        error = float((found.dense(part) - matrix).norm())  # type: ignore[arg-type]
        assert error <= 1e-12 * float(fixture.hessian.norm()), part


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"n_kv_heads": 1}])
def test_any_memory_budget_gives_the_same_matrix(options: dict[str, object]) -> None:
    block = random_block(**options)
    x, y = batch(3, 4)
    whole = block.compute_block_hessian(x, y).H
    for budget in ("1kB", "30kB", "100kB"):
        split = block.compute_block_hessian(x, y, budget=budget).H
        assert float((split - whole).norm()) <= 1e-13 * float(whole.norm()), budget


def test_a_batch_is_the_mean_of_its_samples() -> None:
    block = random_block()
    x, y = batch(3)
    whole = block.compute_block_hessian(x, y).H
    single = [block.compute_block_hessian(a, b).H for a, b in zip(x, y, strict=True)]
    assert float((whole - sum(single) / 3).norm()) <= 1e-13 * float(whole.norm())


def test_reused_buffers_give_the_same_numbers_and_no_new_memory() -> None:
    block = random_block()
    x, y = batch()
    fresh = block.compute_block_hessian(x, y).H
    out, workspace = torch.full_like(fresh, torch.nan), Workspace()
    result = block.compute_block_hessian(x, y, out=out, workspace=workspace)
    assert result.H.data_ptr() == out.data_ptr()
    assert torch.equal(result.H, fresh)
    held = workspace.nbytes
    block.compute_block_hessian(*batch(seed=1), out=out, workspace=workspace)
    block.compute_block_hessian(x, y, out=out, workspace=workspace)
    assert workspace.nbytes == held
    assert torch.equal(out, fresh)
    with pytest.raises(ValueError, match="out must be"):
        block.compute_block_hessian(x, y, out=out[1:])


def test_the_result_does_not_follow_later_weight_changes() -> None:
    block = random_block()
    x, y = batch()
    result = block.compute_block_hessian(x, y)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    total = result.H_outer + result.H_functional
    assert float((total - result.H).norm()) <= 1e-13 * float(result.H.norm())


def test_result_reads_blocks_saves_loads_and_draws(tmp_path: Path) -> None:
    block = random_block()
    result = block.compute_block_hessian(*batch())
    assert sum(result.block_sizes.values()) == result.H.shape[0]
    up = result.block("up_weight", "value_bias", part="outer")
    assert torch.equal(up, result.block("value_bias", "up_weight", part="outer").T)
    norms = result.frobenius()
    assert float(norms[0, 1]) == pytest.approx(float(result.block("Q", "K").norm()))
    assert sum(result.trace().values()) == pytest.approx(float(result.H.trace()))
    v = torch.randn(result.H.shape[0], dtype=torch.float64)
    torch.testing.assert_close(result.matvec(v), result.H @ v)
    torch.testing.assert_close(result.diagonal(), result.H.diagonal())
    loaded = BlockHessian.load(result.save(tmp_path / "hessian"))
    assert torch.equal(loaded.H_functional, result.H_functional)
    assert loaded.structure.is_zero("key_bias", "up_weight")
    assert "16 blocks" in str(result)
    assert result.plot().axes
    with pytest.raises(KeyError, match="no parameter 'gate'"):
        result.block("gate", "Q")
    with pytest.raises(KeyError, match="use H"):
        result["Hessian"]


@pytest.mark.parametrize("norm_first", [False, True])
def test_wrapped_encoder_layer_has_the_hessian_of_the_layer(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        4, 2, 6, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    ).double()
    block = TransformerBlockHessian.from_module(layer)
    x, y = batch()
    torch.testing.assert_close(block(x), layer.train()(x))
    result = block.compute_block_hessian(x, y)
    want = parts(block(x), lambda z: (z - y).pow(2).mean(), list(block.parameters()))["total"]
    assert float((result.H - want).norm()) <= 1e-12 * float(want.norm())


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_pooled_heads_give_a_factor_of_the_outer_part(pooling: str) -> None:
    block = random_block()
    x, _ = batch(3)
    head, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 4, 2])
    loss = PooledCrossEntropy(head, pooling=pooling)  # type: ignore[arg-type]
    found = block.derivatives(x, labels, loss=loss)
    V = found.outer_factor()
    outer = found.dense("outer")
    assert float((V @ V.T - outer).norm()) <= 1e-13 * float(outer.norm())
    assert V.shape[1] == 3 * 5
    assert int(torch.linalg.matrix_rank(outer)) <= 3 * (5 - 1)
    with pytest.raises(ValueError, match="no low-rank factor"):
        block.derivatives(x, x).outer_factor()


def test_in_train_mode_the_hessian_is_that_without_dropout_and_this_is_said() -> None:
    block = TransformerBlockHessian(4, 6, dropout=0.2).double()
    x, y = batch()
    with pytest.warns(UserWarning, match=r"train mode \(dropout of 0\.2.*evaluation mode"):
        found = block.compute_block_hessian(x, y).H
    assert not torch.equal(block(x), block(x))  # still in train mode
    block.eval()
    assert torch.equal(block(x), block(x))
    assert torch.equal(block.compute_block_hessian(x, y).H, found)


def test_bad_input_gets_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    block = random_block()
    x, y = batch()
    with pytest.raises(TypeError, match="convert"):
        block.compute_block_hessian(x.float(), y.float())
    with pytest.raises(TypeError, match="the loss got"):
        block.compute_block_hessian(x, y.float())
    with pytest.raises(ValueError, match="part must be one of"):
        block.compute_block_hessian(x, y, part="inner")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must divide"):
        TransformerBlockHessian(5, 6, 2)
    with pytest.raises(ValueError, match="positive"):
        TransformerBlockHessian(4, 0)
    with pytest.raises(KeyError, match="no parameter"):
        block.derivatives(x, y).block("query", "key_weight")
    monkeypatch.setattr(hessians, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match=r"takes .* kB and .*diagonal\(\)"):
        block.compute_block_hessian(x, y)


def test_a_constant_token_without_eps_is_refused() -> None:
    block = random_block(eps=0.0, norm_first=True)
    x, y = batch()
    x[0, 1] = 0.5
    with pytest.raises(ValueError, match="no variance and eps=0"):
        block.compute_block_hessian(x, y)
