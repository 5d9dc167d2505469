"""Every call of the article as its reader types it, with the true quantity behind each key."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca


def double_backward(value: Tensor, parameters: list[Tensor]) -> Tensor:
    """The Hessian (P, P) of a scalar by plain reverse over reverse."""
    slopes = torch.autograd.grad(value, parameters, create_graph=True)
    flat = torch.cat([slope.reshape(-1) for slope in slopes])
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for entry in flat]
    return torch.stack([torch.cat([piece.reshape(-1) for piece in row]) for row in rows])


def half_squared_norm(y: Tensor) -> Tensor:
    """½‖y‖², summed over the features and averaged over the tokens."""
    return 0.5 * y.square().sum(-1).mean()


def assert_near(found: Tensor, expected: Tensor) -> None:
    found, expected = found.detach(), expected.detach()
    scale = float(torch.linalg.norm(expected))
    room = 1e3 * torch.finfo(expected.dtype).eps * scale
    assert float(torch.linalg.norm(found - expected)) <= room
    assert scale > 0


# --- closed forms ---------------------------------------------------------------------------------


def test_layer_norm_forward_and_jacobian() -> None:
    layer = ca.LayerNormHessian(6, eps=1e-5).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    assert_near(layer.forward(x), nn.functional.layer_norm(x, (6,)))
    jacobian = torch.autograd.functional.jacobian(layer, x[0, 0])
    assert_near(layer.compute_jacobian(x)[0, 0], jacobian)  # type: ignore[arg-type]


def test_layer_norm_weight_hessian_without_target_is_that_of_half_the_squared_norm() -> None:
    layer = ca.LayerNormHessian(6).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = double_backward(half_squared_norm(layer(x)), list(layer.parameters()))
    assert_near(layer.compute_hessian_wrt_weight(x).H, expected)
    with pytest.raises(ValueError, match=r"'cross_entropy' needs a target"):
        layer.compute_hessian_wrt_weight(x, loss="cross_entropy")


def test_verify_layernorm_hessian_runs_and_agrees() -> None:
    assert ca.verify_layernorm_hessian()["passed"]


def test_ffn_forward_with_dropout() -> None:
    layer = ca.FFNHessian(4, 8, dropout=0.1)
    assert layer.forward(torch.randn(3, 4)).shape == (3, 4)


def test_ffn_jacobians_by_their_keys() -> None:
    layer = ca.FFNHessian(4, 8, dropout=0.1).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="evaluation mode"):
        found = layer.compute_ffn_jacobians(x)
    layer.eval()
    weights = dict(layer.named_parameters())
    for key, name in (("d_ffn_d_w1", "up_weight"), ("d_ffn_d_w2", "down_weight")):
        rows = [torch.autograd.grad(layer(x)[0, o], weights[name])[0] for o in range(4)]
        assert_near(found[key][0], torch.stack(rows))
    hidden = x @ weights["up_weight"].T + weights["up_bias"]
    assert_near(found["intermediate"], nn.functional.gelu(hidden))
    step = 1e-6
    difference = (nn.functional.gelu(hidden + step) - nn.functional.gelu(hidden - step)) / 2 / step
    torch.testing.assert_close(found["activation_derivative"], difference, rtol=1e-8, atol=1e-9)


def test_ffn_hessian_wrt_w2() -> None:
    layer = ca.FFNHessian(4, 3, dropout=0.1).double().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    value = layer(x).sub(torch.randn_like(x)).square().mean()
    expected = double_backward(value, [layer.get_parameter("down_weight")])
    assert_near(layer.compute_hessian_wrt_w2(x), expected)


def article_block() -> tuple[ca.TransformerBlockHessian, Tensor]:
    torch.manual_seed(0)
    block = ca.TransformerBlockHessian(4, 6, 2, dropout=0.1).double()
    return block, torch.randn(2, 3, 4, dtype=torch.float64)


def test_block_forward() -> None:
    block, x = article_block()
    assert block.forward(x).shape == x.shape


def test_block_hessian_without_target_is_that_of_half_the_squared_norm() -> None:
    block, x = article_block()
    with pytest.warns(UserWarning, match="evaluation mode"):
        found = block.compute_block_hessian(x)
    assert block.training
    block.eval()
    assert_near(found["H"], double_backward(half_squared_norm(block(x)), list(block.parameters())))


def test_block_sizes_by_sublayer_add_up_to_the_hessian() -> None:
    block, x = article_block()
    found = block.eval().compute_block_hessian(x)
    sizes = found["block_sizes"]
    assert set(sizes) == {"attention", "norm1", "ffn", "norm2"}
    named = dict(block.named_parameters())
    assert sizes["norm1"] == sizes["norm2"] == 8
    assert sizes["ffn"] == sum(p.numel() for n, p in named.items() if n[:2] in ("up", "do"))
    assert sum(sizes.values()) == found["H"].shape[0]
    assert found.block_sizes["attention"] == sizes["attention"]


def test_block_structure_names_blocks_that_are_zero() -> None:
    block, x = article_block()
    found = block.eval().compute_block_hessian(x)
    assert found["structure"].is_zero("key_bias", "value_weight")
    assert float(found.block("key_bias", "value_weight").abs().max()) < 1e-15


def article_attention() -> tuple[ca.SelfAttentionHessian, Tensor, Tensor]:
    torch.manual_seed(1)
    layer = ca.SelfAttentionHessian(4, 2, d_k=2, d_v=2).double()
    x, target = torch.randn(2, 2, 3, 4, dtype=torch.float64).unbind()
    return layer, x, target


def test_attention_forward_returns_its_weights_when_asked() -> None:
    layer, x, _ = article_attention()
    outputs, weights = layer.forward(x, return_attention=True)
    assert torch.equal(outputs, layer(x))
    query, key = ((x @ w.T).unflatten(-1, (2, 2)).transpose(1, 2) for w in (layer.W_Q, layer.W_K))
    assert_near(weights, torch.softmax(query @ key.mT / math.sqrt(2), -1))


def test_attention_weights_by_name_are_the_parameters() -> None:
    layer, x, _ = article_attention()
    before = layer(x)
    with torch.no_grad():
        for weight in (layer.W_Q, layer.W_K, layer.W_V):
            assert isinstance(weight, nn.Parameter)
            weight.mul_(2.0)
    assert not torch.equal(layer(x), before)
    assert len(list(layer.parameters())) == 4


def test_attention_hessian_has_the_exact_blocks_as_its_estimates() -> None:
    layer, x, target = article_attention()
    found = layer.compute_attention_hessian(x, target)
    value = (layer(x) - target).square().mean()
    assert found["loss"] == pytest.approx(float(value), rel=1e-13)
    assert found["attention"].shape == (2, 2, 3, 3)
    for key, weight in (("H_WQ", layer.W_Q), ("H_WK", layer.W_K), ("H_WV", layer.W_V)):
        value = (layer(x) - target).square().mean()
        assert_near(found["hessian_estimates"][key], double_backward(value, [weight]))


# --- a small token Transformer as in the article's demo ------------------------------------------


class TokenTransformer(nn.Module):
    """``nn.Embedding``, learned positions, ``nn.TransformerEncoder`` with its dropout, a head."""

    def __init__(self, vocabulary: int = 7, width: int = 8, length: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(x) + self.positions))
        return logits


@pytest.fixture
def model() -> TokenTransformer:
    torch.manual_seed(0)
    return TokenTransformer().double()  # in train mode, as the article leaves it


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randint(0, 7, (2, 3, 4)).unbind()
    return x, y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        logits = model.eval()(x)
    value = nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
    model.train()
    return value


def test_a_model_in_train_mode_is_evaluated_without_dropout_said_once_and_put_back(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    analyzer = ca.TransformerHessianAnalyzer(model)
    with pytest.warns(UserWarning, match="train mode .*evaluation mode and put back"):
        first = analyzer.compute_hessian_eigenvalues(*batch, k=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = analyzer.compute_hessian_eigenvalues(*batch, k=2)
    assert all(module.training for module in model.modules())
    assert torch.equal(first.values, second.values)


def test_eigenvalues_are_twenty_and_read_like_a_tensor(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    found = ca.TransformerHessianAnalyzer(model).compute_hessian_eigenvalues(*batch)
    hessian = double_backward(loss_of(model, *batch), list(model.parameters()))
    expected = torch.linalg.eigvalsh(hessian).flip(0)[:20]
    assert len(found) == 20
    assert float((torch.stack(list(found)) - expected).abs().max()) <= 1e-3 * float(expected[0])
    assert float(found[0]) == float(found.max()) == found.value
    assert torch.equal(torch.sort(found).values, torch.sort(found.values).values)
    assert np.asarray(found).shape == (20,)


def test_full_hessian_by_its_keys_and_in_the_history(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    analyzer = ca.TransformerHessianAnalyzer(model)
    found = analyzer.analyze_full_hessian([batch, batch], n_batches=1)
    hessian = double_backward(loss_of(model, *batch), list(model.parameters()))
    exact = torch.linalg.eigvalsh(hessian)
    norm = float(exact.abs().max())
    assert found["mean_hessian_norm"] == pytest.approx(norm, rel=1e-3)
    assert found["top_eigenvalue"] == pytest.approx(float(exact[-1]), rel=1e-3)
    assert found["spectral_gap"] == pytest.approx(float(exact[-1] - exact[-2]), abs=2e-3 * norm)
    assert found["eigenvalue_mean"].shape == found["eigenvalue_std"].shape == (5,)
    assert len(found.values) == 1  # of the two batches
    history = analyzer.history
    assert history["hessian_norms"] == [found.mean_norm]
    condition = float(exact[-1] / exact.abs().mean())
    assert history["condition_numbers"][0] == pytest.approx(condition, rel=0.2)
    assert torch.equal(history["eigenvalue_spectra"][0], found.eigenpairs.values)
    assert history["layer_curvatures"] == []
    with pytest.raises(KeyError, match="it has hessian_norms"):
        history["norms"]


def test_all_batches_of_a_loader_are_analyzed_by_default(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=1)
    found = ca.TransformerHessianAnalyzer(model).analyze_full_hessian(dataloader=loader, k=2)
    assert found["eigenvalue_std"].shape == (2,)
    assert len(found.values) == 3
    assert bool((found["eigenvalue_std"] > 0).all())


def test_layer_wise_curvature_without_targets_has_a_row_a_module(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    x, _ = batch
    analyzer = ca.TransformerHessianAnalyzer(model)
    rows = analyzer.analyze_layer_wise_curvature(x)
    logits = model.eval()(x)
    model.train()
    named = {row["name"]: row for row in rows}
    assert named["head"]["output_norm"] == pytest.approx(float(logits.norm()), rel=1e-12)
    p = logits.detach().softmax(-1)
    curvature = (torch.diag_embed(p) - p[..., :, None] * p[..., None, :]) / x.numel()
    low, high = named["head"]["curvature_interval"]
    assert low <= float(curvature.norm()) <= high
    assert rows.target == "the model's own most likely classes"
    assert analyzer.history["layer_curvatures"] == [list(rows)]
