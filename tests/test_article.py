"""Every call of the article as its reader types it, with the true quantity behind each key."""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
from curvatlas.results import same
from curvatlas.zoo.models import ViT, ViTConfig
from oracles import hessian as double_backward


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


def test_layer_norm_forward_and_jacobian_of_every_sample() -> None:
    layer = ca.LayerNormHessian(6, eps=1e-5).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert_near(layer.forward(x), nn.functional.layer_norm(x, (6,)))
    found = layer.compute_jacobian(x)
    assert found.shape == (2, 3 * 6, 3 * 6)
    step = 1e-6
    for sample, matrix in zip(x.detach(), found, strict=True):
        for i in range(sample.numel()):
            moved = torch.zeros(sample.numel(), dtype=x.dtype).index_fill_(0, torch.tensor(i), step)
            moved = moved.view_as(sample)
            difference = (layer(sample + moved) - layer(sample - moved)).reshape(-1) / (2 * step)
            torch.testing.assert_close(matrix[:, i], difference.detach(), rtol=1e-8, atol=1e-9)


def test_layer_norm_weight_hessian_without_target_is_that_of_half_the_squared_norm() -> None:
    layer = ca.LayerNormHessian(6).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    found = layer.compute_hessian_wrt_weight(x)
    assert found.shape == (6, 6)
    assert_near(found, double_backward(half_squared_norm(layer(x)), [layer.weight]))  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"'cross_entropy' needs a target"):
        layer.compute_hessian_wrt_weight(x, loss="cross_entropy")


def test_verify_layernorm_hessian_runs_and_agrees() -> None:
    assert ca.verify_layernorm_hessian()["passed"]


def test_ffn_is_two_linear_maps_with_a_residual() -> None:
    layer = ca.FFNHessian(4, 8, dropout=0.5).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    assert isinstance(layer.w1, nn.Linear)
    assert isinstance(layer.w2, nn.Linear)
    assert len(list(layer.parameters())) == 4
    assert not torch.equal(layer(x), layer(x))  # dropout, in train mode
    layer.eval()
    assert_near(layer.forward(x), layer.dropout(layer.w2(layer.activation(layer.w1(x)))) + x)
    assert_near(layer.forward(x), x + layer.w2(nn.functional.gelu(layer.w1(x))))


def test_ffn_jacobians_by_their_keys() -> None:
    layer = ca.FFNHessian(4, 8, dropout=0.1).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="evaluation mode"):
        found = layer.compute_ffn_jacobians(x)
    layer.eval()
    for key, linear in (("d_ffn_d_w1", layer.w1), ("d_ffn_d_w2", layer.w2)):
        rows = [torch.autograd.grad(layer(x)[0, 0, o], linear.weight)[0] for o in range(4)]
        assert_near(found[key][0, 0], torch.stack(rows))
    hidden = layer.w1(x)
    assert_near(found["intermediate"], hidden)
    step = 1e-6
    difference = (nn.functional.gelu(hidden + step) - nn.functional.gelu(hidden - step)) / 2 / step
    torch.testing.assert_close(
        found["activation_derivative"], difference.detach(), rtol=1e-8, atol=1e-9
    )


def test_ffn_hessian_wrt_w2_has_the_objective_of_norm_and_block() -> None:
    layer = ca.FFNHessian(4, 3, dropout=0.1).double().eval()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    expected = double_backward(half_squared_norm(layer(x)), [layer.w2.weight])
    assert_near(layer.compute_hessian_wrt_w2(x), expected)
    target = torch.randn_like(x)
    expected = double_backward((layer(x) - target).square().mean(), [layer.w2.weight])
    assert_near(layer.compute_hessian_wrt_w2(x, target), expected)
    whole = double_backward(half_squared_norm(layer(x)), list(layer.parameters()))
    assert_near(layer.compute_hessian(x).H, whole)


def article_block() -> tuple[ca.TransformerBlockHessian, Tensor]:
    torch.manual_seed(0)
    block = ca.TransformerBlockHessian(4, 6, 2, dropout=0.1).double()
    return block, torch.randn(2, 3, 4, dtype=torch.float64)


def test_block_is_post_norm_as_in_the_theorems_and_pre_norm_when_asked() -> None:
    block, x = article_block()
    assert block.forward(x).shape == x.shape
    doc = str(ca.TransformerBlockHessian.__doc__)
    assert "By default post-norm" in doc
    layer = nn.TransformerEncoderLayer(4, 2, 6, 0.0, "gelu", batch_first=True, norm_first=True)
    wrapped = ca.TransformerBlockHessian.from_module(layer.double().eval())
    article = ca.TransformerBlockHessian(4, 6, 2, dropout=0.1, norm_first=True).double().eval()
    article.load_state_dict(wrapped.state_dict())
    assert_near(article(x), layer(x))
    found = article.compute_block_hessian(x)["H"]
    objective = half_squared_norm(article(x))
    assert_near(found, double_backward(objective, list(article.parameters())))


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
    query, key = (w(x).unflatten(-1, (2, 2)).transpose(1, 2) for w in (layer.W_Q, layer.W_K))
    assert_near(weights, torch.softmax(query @ key.mT / math.sqrt(2), -1))
    context = (weights @ layer.W_V(x).unflatten(-1, (2, 2)).transpose(1, 2)).transpose(1, 2)
    assert_near(outputs, layer.out_proj(context.flatten(2)))


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_weights_are_linear_maps_of_which_the_last_has_a_bias(heads: int) -> None:
    layer = ca.SelfAttentionHessian(4, heads)
    for linear in (layer.W_Q, layer.W_K, layer.W_V, layer.out_proj):
        assert isinstance(linear, nn.Linear)
        assert linear.weight.shape == (4, 4)
        assert (linear.bias is None) == (linear is not layer.out_proj)
    assert len(list(layer.parameters())) == 5


@pytest.mark.parametrize("bias", [None, True])
def test_attention_hessian_has_the_norms_of_its_exact_blocks_as_estimates(
    bias: bool | None,
) -> None:
    layer, x, target = article_attention()
    if bias:
        layer = ca.SelfAttentionHessian(4, 2, bias=True).double()
    found = layer.compute_attention_hessian(x, target)
    value = (layer(x) - target).square().mean()
    assert found["loss"] == pytest.approx(float(value), rel=1e-13)
    assert found["attention"].shape == (2, 2, 3, 3)
    assert_near(found.H, double_backward(value, list(layer.parameters())))
    for key, linear in (("H_WQ", layer.W_Q), ("H_WK", layer.W_K), ("H_WV", layer.W_V)):
        value = (layer(x) - target).square().mean()
        block = double_backward(value, [linear.weight])
        assert found["hessian_estimates"][key] == pytest.approx(float(block.norm()), rel=1e-10)
        assert_near(found[key[-1] * 2], block)


# --- a small token Transformer as in the article's demo ------------------------------------------


class TokenTransformer(nn.Module):
    """``nn.Embedding``, learned positions, ``nn.TransformerEncoder`` with its dropout, a head."""

    def __init__(
        self, vocabulary: int = 7, width: int = 8, length: int = 4, layers: int = 1
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(x) + self.positions))
        return logits


def article_model() -> TokenTransformer:
    torch.manual_seed(0)
    return TokenTransformer().double()  # in train mode, as the article leaves it


def article_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randint(0, 7, (2, 3, 4)).unbind()
    return x, y


@pytest.fixture
def model() -> TokenTransformer:
    return article_model()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return article_batch()


@functools.cache
def dense_hessian() -> Tensor:
    """Of the fixtures' model and batch, by reverse over reverse."""
    subject = article_model()
    return double_backward(loss_of(subject, *article_batch()), list(subject.parameters()))


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
    hessian = dense_hessian()
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
    hessian = dense_hessian()
    exact = torch.linalg.eigvalsh(hessian)
    norm = float(exact.abs().max())
    assert found["mean_hessian_norm"] == pytest.approx(norm, rel=1e-3)
    assert found["top_eigenvalue"] == pytest.approx(float(exact[-1]), rel=1e-3)
    assert found["spectral_gap"] == pytest.approx(float(exact[-1] - exact[-2]), abs=2e-3 * norm)
    top = exact.flip(0)[:10]
    assert found["eigenvalue_mean"] == pytest.approx(float(top.mean()), rel=1e-3)
    assert found["eigenvalue_std"] == pytest.approx(float(top.std()), rel=1e-3)
    for key in ("mean_hessian_norm", "eigenvalue_mean", "eigenvalue_std", "spectral_gap"):
        assert isinstance(found[key], float), key
    assert len(found.values) == 1  # of the two batches
    history = analyzer.history
    assert history["hessian_norms"] == list(found.norms)
    condition = float(exact[-1] / exact.abs().mean())
    assert history["condition_numbers"][0] == pytest.approx(condition, rel=0.2)
    assert torch.equal(history["eigenvalue_spectra"][0], found.eigenpairs.values)
    assert history["layer_curvatures"] == []
    history["hessian_norms"].append(1.0)  # as the article's code fills it
    assert analyzer.history["hessian_norms"][-1] == 1.0


def test_eigenvalues_of_batches_are_joined_like_tensors(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    analyzer = ca.TransformerHessianAnalyzer(model)
    together = [analyzer.compute_hessian_eigenvalues(*batch, k=10) for _ in range(2)]
    analyzer.history["hessian_norms"].append(together[0].max().item())
    joined = torch.cat(together)
    exact = torch.linalg.eigvalsh(dense_hessian()).flip(0)[:10]
    assert joined.mean().item() == pytest.approx(float(exact.mean()), rel=1e-3)
    assert joined.std().item() == pytest.approx(float(torch.cat([exact, exact]).std()), rel=1e-3)
    assert analyzer.history["hessian_norms"] == [pytest.approx(float(exact[0]), rel=1e-4)]
    assert together[0].cpu().numpy().shape == (10,)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_plain_model_is_analyzed_as_well(loss: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 2, dtype=torch.float64)
    model: nn.Module = nn.Linear(2, 2).double()  # fewer parameters than eigenvalues asked for
    y, value = x.flip(0), nn.functional.mse_loss
    if loss == "cross_entropy":
        model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        y, value = torch.randint(0, 3, (8,)), nn.functional.cross_entropy
    analyzer = ca.TransformerHessianAnalyzer(model, loss=loss)
    hessian = double_backward(value(model(x), y), list(model.parameters()))
    exact = torch.linalg.eigvalsh(hessian).flip(0)
    values = analyzer.compute_hessian_eigenvalues(x, y)
    room = 1e-3 * float(exact[0])
    assert float((values.values - exact[:20]).abs().max()) <= room
    found = analyzer.analyze_full_hessian([(x, y)])
    assert found["condition_number"] == pytest.approx(float(exact[0] / exact.abs().mean()))
    assert found["spectral_gap"] == pytest.approx(float(exact[0] - exact[1]), abs=room)
    rows = {row["name"]: row for row in analyzer.analyze_layer_wise_curvature(x)}
    assert rows[""]["output_norm"] == pytest.approx(float(model(x).norm()))


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
    slope = (p - nn.functional.one_hot(p.argmax(-1), 7)) / x.numel()
    assert named["head"]["curvature_proxy"] == pytest.approx(float(slope.norm()), rel=1e-9)
    assert rows.target == "the model's own most likely classes"
    assert analyzer.history["layer_curvatures"] == [list(rows)]


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    torch.manual_seed(0)
    return ViT(ViTConfig(d_model=8, d_ff=8)).double().eval()


def images(seed: int, count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    pixels = torch.rand(count, 8, 8, generator=random, dtype=torch.float64)
    return pixels, torch.randint(0, 10, (count,), generator=random)


@pytest.fixture(scope="module")
def dense(vit: nn.Module) -> torch.Tensor:
    """The Hessian on the first batch, by double backward."""
    x, y = images(0)
    return double_backward(nn.functional.cross_entropy(vit(x), y), list(vit.parameters()))


@pytest.fixture(scope="module")
def exact(vit: nn.Module) -> torch.Tensor:
    """Eigenvalues of the Hessian on two batches, by double backward of the mean loss."""
    (x1, y1), (x2, y2) = images(0), images(1, 4)
    loss = nn.functional.cross_entropy(vit(torch.cat([x1, x2])), torch.cat([y1, y2]))
    return torch.linalg.eigvalsh(double_backward(loss, list(vit.parameters()))).flip(0)


def test_uneven_batches_weigh_by_their_samples(vit: nn.Module, exact: torch.Tensor) -> None:
    analyzer = ca.TransformerHessianAnalyzer(vit)
    found = analyzer.analyze_full_hessian([images(0), images(1, 4)], k=3)
    want = torch.cat([exact[:3], exact[-3:]])
    got = found.eigenpairs
    assert bool(((got.values - want).abs() <= got.residuals).all())
    assert found.top_eigenvalue == pytest.approx(float(exact[0]), rel=1e-4)
    assert found.spectral_gap == pytest.approx(float(exact[0] - exact[1]), rel=1e-2)
    spectra = [
        torch.linalg.eigvalsh(
            double_backward(nn.functional.cross_entropy(vit(x), y), list(vit.parameters()))
        )
        for x, y in (images(0), images(1, 4))
    ]
    tops = torch.stack([values.flip(0)[:3] for values in spectra])
    assert found["eigenvalue_mean"] == pytest.approx(float(tops.mean()), rel=1e-3)
    assert found["eigenvalue_std"] == pytest.approx(float(tops.std()), rel=1e-3)
    norms = [float(values.abs().max()) for values in spectra]
    assert found["mean_hessian_norm"] == pytest.approx(sum(norms) / 2, rel=1e-3)
    assert analyzer.history["hessian_norms"] == pytest.approx(norms, rel=1e-3)
    assert [values.tolist() for values in analyzer.history["eigenvalue_spectra"]] == [
        found.eigenpairs.values.tolist()
    ]
    assert found.trace.value == pytest.approx(float(exact.sum()), rel=0.1)
    assert got.data_interval is not None
    assert found.trace.data_interval is not None
    assert sum(found.roles.values()) == pytest.approx(1.0)
    assert "batches" in str(found)


def test_layer_wise_curvature_is_that_of_the_diagonal_blocks(
    vit: nn.Module, dense: torch.Tensor
) -> None:
    x, y = images(0)
    analyzer = ca.TransformerHessianAnalyzer(vit)
    found = analyzer.analyze_layer_wise_curvature(x, y)
    anatomy = ca.Problem(vit, "cross_entropy", (x, y)).anatomy
    assert sum(entry.size for entry in found.layers) == len(dense)
    for entry in found.layers:
        indices = torch.cat(
            [
                torch.as_tensor(piece.indices)
                for piece in anatomy
                if (piece.layer, piece.sublayer) == (entry.layer, entry.sublayer)
            ]
        )
        block = dense[indices][:, indices]
        values = torch.linalg.eigvalsh(block)
        norm = float(values.abs().max())
        assert entry.top_eigenvalue == pytest.approx(float(values[-1]), abs=2e-3 * norm)
        assert entry.spectral_norm.value == pytest.approx(norm, rel=2e-3)
        assert entry.frobenius.value == pytest.approx(float(block.norm()), rel=0.25)
    assert found.plot().axes
    # the curvature of outputs too: that of the logits is the loss's own, known in closed form
    logits = vit(x).detach()
    p = logits.softmax(-1)
    curvature = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / len(x)
    low, high = found.activations[""].norm_interval
    assert low <= float(curvature.norm()) <= high
    assert set(found.activations) > {"", "head"}


def test_a_folder_makes_the_same_calls_resume(vit: nn.Module, tmp_path: Path) -> None:
    x, y = images(0)
    first = ca.TransformerHessianAnalyzer(vit, folder=tmp_path)
    second = ca.TransformerHessianAnalyzer(vit, folder=tmp_path)
    a = first.compute_hessian_eigenvalues(x, y, 3)
    assert list(tmp_path.iterdir())
    assert same(second.compute_hessian_eigenvalues(x, y, 3), a)
    whole = first.analyze_full_hessian([(x, y)], k=2)
    kept = [path.name for path in tmp_path.iterdir() if path.name.startswith("001-")]
    assert {name.rpartition("-")[2] for name in kept} >= {"pairs.safetensors", "trace.safetensors"}
    assert same(second.analyze_full_hessian([(x, y)], k=2), whole)


# --- attention, propagation ----------------------------------------------------------------------


def test_attention_curvature_has_a_row_a_batch(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    rows = ca.analyze_attention_curvature(model, [(x, y), (y, x)], device="cpu")
    assert [row["batch"] for row in rows] == [0, 1]
    parameter = model.encoder.layers[0].self_attn.in_proj_weight
    for row, pair in zip(rows, ((x, y), (y, x)), strict=True):
        assert row["loss"] == pytest.approx(float(loss_of(model, *pair)), rel=1e-12)
        exact = double_backward(loss_of(model, *pair), [parameter])
        third = exact.shape[0] // 3
        for place, key in enumerate(("h_WQ", "h_WK", "h_WV")):
            inside = slice(place * third, (place + 1) * third)
            assert row[key] == pytest.approx(float(exact[inside, inside].norm()), rel=1e-9)


def test_attention_alone_is_followed_over_batches_by_the_numbers_of_its_blocks() -> None:
    layer, x, target = article_attention()
    batches = [(x, target), (target, x)]
    typed = []
    for number, (inputs, outputs) in enumerate(batches):
        result = layer.compute_attention_hessian(inputs, outputs)
        estimates = result["hessian_estimates"]
        typed.append({"batch": number, "loss": result["loss"], "h_WV": estimates["H_WV"]})
    rows = ca.analyze_attention_curvature(layer, dataloader=batches)
    for row, expected, (inputs, outputs) in zip(rows, typed, batches, strict=True):
        value = (layer(inputs) - outputs).square().mean()
        exact = double_backward(value, [layer.W_V.weight])
        assert float(expected["h_WV"]) == pytest.approx(float(exact.norm()), rel=1e-10)
        assert float(row["h_WV"]) == pytest.approx(float(exact.norm()), rel=1e-9)
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert_near(row["H_WV"].dense(), exact)


def test_layer_curvature_is_that_of_the_attentions_input(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    x, _ = batch
    analyzer = ca.CurvaturePropagationAnalyzer(model)
    found = analyzer.compute_layer_curvature(x, layer_idx=0)
    assert found["layer"] == 0
    layer = model.eval().encoder.layers[0]
    stream = (model.embedding(x) + model.positions).detach()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        target = model(x).argmax(-1)

        def through_attention(entries: Tensor) -> Tensor:
            attended = layer.self_attn(entries, entries, entries, need_weights=False)[0]
            h = layer.norm1(stream + attended)
            out = layer.norm2(h + layer._ff_block(h))
            return nn.functional.cross_entropy(model.head(out).flatten(0, -2), target.flatten())

        leaf = stream.clone().requires_grad_()
        squares = 0.0
        slope = torch.autograd.grad(through_attention(leaf), leaf, create_graph=True)[0]
        for entry in slope.reshape(-1):
            row = torch.autograd.grad(entry, leaf, retain_graph=True)[0]
            squares += float(row.square().sum())
        attended = layer.self_attn(stream, stream, stream, need_weights=False)[0]
        h = layer.norm1(stream + attended)
        out = layer.norm2(h + layer._ff_block(h)).detach().requires_grad_()
        value = nn.functional.cross_entropy(model.head(out).flatten(0, -2), target.flatten())
        (at_output,) = torch.autograd.grad(value, out)
    model.train()
    assert found["attn_curvature"] == pytest.approx(math.sqrt(squares), rel=1e-9)
    assert found["gradient_scale"] == pytest.approx(float(at_output.norm()), rel=1e-9)
    scores = found["attention_scores"]
    assert scores.shape == (3, 2, 4, 4)
    torch.testing.assert_close(scores.sum(-1), torch.ones(3, 2, 4, dtype=scores.dtype))


def test_curvature_flow_has_the_attentions_curvature_in_the_entries_of_its_layer(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    x, _ = batch
    analyzer = ca.CurvaturePropagationAnalyzer(model)
    flow = analyzer.analyze_curvature_flow(x)
    alone = analyzer.compute_layer_curvature(x, 0)["attn_curvature"]
    rows = [entry for entry in flow if entry["layer"] == 0]
    assert rows
    assert all(row["attn_curvature"] == pytest.approx(alone, rel=1e-12) for row in rows)
    assert all(row["gradient_scale"] > 0 for row in rows)


@pytest.fixture(scope="module")
def deep() -> tuple[TokenTransformer, Tensor]:
    torch.manual_seed(2)
    model = TokenTransformer(layers=2).double().eval()
    return model, torch.randint(0, 7, (2, 4))


def test_hidden_states_that_enter_a_layer_have_the_curvature_of_the_models_input(
    deep: tuple[TokenTransformer, Tensor],
) -> None:
    model, x = deep
    analyzer = ca.CurvaturePropagationAnalyzer(model)
    flow = analyzer.analyze_curvature_flow(x)
    h = (model.embedding(x) + model.positions).detach()
    typed = []
    for index, layer in enumerate(model.encoder.layers):
        row = analyzer.compute_layer_curvature(h, index)
        expected = analyzer.compute_layer_curvature(x, index)
        for key in ("layer", "attn_curvature", "gradient_scale"):
            assert row[key] == pytest.approx(expected[key], rel=1e-9), key
        assert_near(row["attention_scores"], expected["attention_scores"])
        typed.append(row)
        h = layer(h).detach()
    analyzer.curvature_history.append(typed)  # as the article's own loop fills it
    rows = [[entry["attn_curvature"] for entry in run] for run in analyzer.curvature_history]
    assert rows[0] == pytest.approx(rows[1], rel=1e-9)
    assert rows[0] == pytest.approx([flow.activation(i)["attn_curvature"] for i in (0, 1)])
    again = analyzer.analyze_curvature_flow((model.embedding(x) + model.positions).detach())
    assert again.activation(1).norm == pytest.approx(flow.activation(1).norm, rel=1e-9)
    assert again.loss == pytest.approx(flow.loss, rel=1e-12)


def test_what_is_neither_an_input_nor_hidden_states_is_refused(
    deep: tuple[TokenTransformer, Tensor],
) -> None:
    model, _ = deep
    wrong = torch.randn(2, 4, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="neither as its input nor as the hidden states"):
        ca.CurvaturePropagationAnalyzer(model).compute_layer_curvature(wrong, 0)
    with pytest.raises(KeyError, match="no block 7"):
        ca.CurvaturePropagationAnalyzer(model).compute_layer_curvature(wrong, 7)


def test_the_analyzer_draws_its_flows(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    analyzer = ca.CurvaturePropagationAnalyzer(model)
    with pytest.raises(ValueError, match="nothing to draw yet"):
        analyzer.visualize_curvature_flow()
    analyzer.analyze_curvature_flow(batch[0])
    assert len(analyzer.visualize_curvature_flow().axes) >= 4


# --- diagnostics, Taylor -------------------------------------------------------------------------


def test_effective_conditioning_by_its_keys(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    found = ca.ConvergenceDiagnostics(model).compute_effective_conditioning(*batch)
    value = loss_of(model, *batch)
    slopes = torch.autograd.grad(value, list(model.parameters()))
    gradient = torch.cat([slope.reshape(-1) for slope in slopes])
    assert found["loss"] == pytest.approx(float(value), rel=1e-12)
    assert found["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-10)
    assert found["grad_mean"] == pytest.approx(float(gradient.mean()), rel=1e-8)
    assert found["grad_std"] == pytest.approx(float(gradient.std()), rel=1e-10)
    exact = torch.linalg.eigvalsh(dense_hessian())
    low, high = found.interval
    assert low <= float(exact[-1] / exact.abs().mean()) <= high
    assert low <= found["eff_condition_number"] <= high


def test_one_model_has_one_condition_number_whoever_is_asked(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    exact = torch.linalg.eigvalsh(dense_hessian())
    kappa = float(exact[-1] / exact.abs().mean())
    operator = ca.Hessian(ca.Problem(model.eval(), "cross_entropy", batch))
    answers = [
        ca.curvature_summary(operator),
        ca.TransformerHessianAnalyzer(model).analyze_full_hessian([batch]),
        ca.CurvatureAwareOptimizer(model).estimate_local_curvature(*batch),
        ca.ScalingLawAnalyzer(lambda _: model).compute_hessian_norm(model, batch),
    ]
    for found in answers:
        low, high = found["condition_interval"]
        assert low <= kappa <= high, type(found).__name__
        assert low <= found["condition_number"] <= high
        assert found["condition_number"] == pytest.approx(kappa, rel=0.5)


def test_convergence_trajectory_by_its_keys(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    diagnostics = ca.ConvergenceDiagnostics(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = diagnostics.analyze_convergence_trajectory([batch], n_steps=6)
    assert found["loss_decreased"] is True
    assert 0 < found["loss_reduction"] < 1
    slopes = torch.autograd.grad(loss_of(model, *batch), list(model.parameters()))
    norm = math.hypot(*(float(slope.norm()) for slope in slopes))
    assert diagnostics.grad_history[0] == pytest.approx(norm, rel=1e-10)
    assert float(found["gradient_decay_rate"]) == found.gradient_decay_rate.value
    assert found["condition_number_trend"].points >= 3
    assert found["final_condition"] > 1
    assert len(diagnostics.loss_history) == len(diagnostics.grad_history) == 6
    assert diagnostics.loss_history[0] == pytest.approx(float(loss_of(model, *batch)), rel=1e-12)
    assert diagnostics.curvature_history[-1] == found["final_condition"]
    typed = diagnostics.compute_effective_conditioning(*batch)  # the article's own loop
    diagnostics.loss_history.append(typed["loss"])
    diagnostics.grad_history.append(typed["grad_norm"])
    decay = np.polyfit(range(7), np.log(np.array(diagnostics.grad_history)), 1)[0]
    assert math.isfinite(decay)
    assert np.array(diagnostics.curvature_history).dtype == np.float64
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_trajectory_in_place_ends_with_the_condition_of_its_last_weights(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    before = float(loss_of(model, *batch))
    diagnostics = ca.ConvergenceDiagnostics(model)
    found = diagnostics.analyze_convergence_trajectory([batch], n_steps=4, looks=2, in_place=True)
    after = loss_of(model, *batch)
    assert found["loss_reduction"] == pytest.approx(1 - float(after) / before, rel=1e-9)
    exact = torch.linalg.eigvalsh(double_backward(after, list(model.parameters())))
    low, high = found.looks[-1].interval
    assert low <= float(exact[-1] / exact.abs().mean()) <= high
    assert low <= found["final_condition"] <= high


def test_taylor_coefficients_are_those_of_the_samples_that_are_added(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    analyzer = ca.TaylorExpansionAnalyzer(model)
    found = analyzer.compute_taylor_coefficients(x, y, x_train=[(y, x), (x, x)])
    gradient = ca.Problem(model.eval(), "cross_entropy", batch).gradient()
    assert found["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-10)
    step = -gradient / gradient.norm()
    before = ca.Problem(model, "cross_entropy", [(y, x), (x, x)])
    after = before.with_data([(y, x), (x, x), (x, y)])
    model.train()
    difference = ca.Hessian(after, checks=False) @ step - ca.Hessian(before, checks=False) @ step
    assert found["quadratic_coefficient"] == pytest.approx(float(step @ difference) / 2, rel=1e-8)
    losses = [float(loss_of(model, *pair)) for pair in ((y, x), (x, x), (x, y))]
    added = sum(losses) / 3 - sum(losses[:2]) / 2
    assert found["delta_loss"] == pytest.approx(added, rel=1e-10)


def test_taylor_coefficients_take_training_inputs_alone(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    analyzer = ca.TaylorExpansionAnalyzer(model)
    positional = analyzer.compute_taylor_coefficients(x, y, torch.cat([x, y]))
    named = analyzer.compute_taylor_coefficients(x, y, x_train=torch.cat([x, y]))
    assert positional["delta_loss"] == named["delta_loss"] != 0


def test_the_trajectory_is_predicted_in_rows(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    analyzer = ca.TaylorExpansionAnalyzer(model)
    analyzer.compute_taylor_coefficients(*batch, x_train=[batch], displacement=None)
    rows = analyzer.predict_convergence_trajectory(n_steps=4, learning_rate=0.01)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in list(rows)[1:]:
        assert row["delta_w_predicted"] == pytest.approx(row["delta_w_norm"], rel=0.05)
    gradient = ca.Problem(model.eval(), "cross_entropy", batch).gradient()
    assert rows[1]["delta_w_predicted"] == pytest.approx(0.01 * float(gradient.norm()), rel=1e-6)


def test_one_eigenvalue_predicts_a_trajectory_where_no_data_are_known() -> None:
    analyzer = ca.TaylorExpansionAnalyzer(nn.Linear(2, 2))
    assert analyzer.hessian_cache == {}
    with pytest.raises(AttributeError, match="no eigenvalue yet"):
        _ = analyzer.estimated_hessian_eigenvalue
    with pytest.raises(ValueError, match="no data yet"):
        analyzer.predict_convergence_trajectory(n_steps=3, learning_rate=0.1)
    analyzer.estimated_hessian_eigenvalue = 2.0
    rows = analyzer.predict_convergence_trajectory(n_steps=3, learning_rate=0.1)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["delta_w_norm"] for row in rows] == pytest.approx([1.0, 0.8, 0.64])
    assert [row["delta_w_predicted"] for row in rows] == pytest.approx([0.8, 0.64, 0.512])


def test_the_estimated_eigenvalue_is_that_of_the_hessian_on_the_data(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    analyzer = ca.TaylorExpansionAnalyzer(model.eval())
    analyzer.radius(*batch)
    exact = float(torch.linalg.eigvalsh(dense_hessian())[-1])
    for _ in range(2):
        assert analyzer.estimated_hessian_eigenvalue == pytest.approx(exact, rel=1e-5)
    assert len(analyzer.hessian_cache) == 1


def test_curvature_is_read_off_a_trajectory_of_mappings_or_numbers() -> None:
    analyzer = ca.TaylorExpansionAnalyzer(nn.Linear(2, 2))
    rate, curvature = 0.1, 2.0  # gradient descent on ½ λ w²: the loss falls by (1 − ηλ)² a step
    losses = [(1 - rate * curvature) ** (2 * step) for step in range(12)]
    rows = [{"step": step, "loss": value} for step, value in enumerate(losses)]
    found = analyzer.estimate_hessian_from_trajectory(rows, learning_rate=rate)
    again = analyzer.estimate_hessian_from_trajectory(loss_trajectory=losses, learning_rate=rate)
    assert found["avg_curvature"] == again["avg_curvature"] == pytest.approx(curvature, rel=1e-6)
    assert found["convergence_rate"] == pytest.approx(rate * curvature, rel=1e-6)
    assert analyzer.estimated_hessian_eigenvalue == found["avg_curvature"]


# --- scaling -------------------------------------------------------------------------------------


CHEAP = {"steps": 1, "curvature_samples": 8, "products": 8}


@pytest.fixture(scope="module")
def scaling() -> ca.ScalingLawAnalyzer:
    torch.manual_seed(0)
    analyzer = ca.ScalingLawAnalyzer(lambda width: TokenTransformer(width=width))
    x = torch.randint(0, 7, (50, 4))
    analyzer.dataloader = [(x, x.roll(1, 1))]
    return analyzer


def test_the_hessians_norm_by_its_keys(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    analyzer = ca.ScalingLawAnalyzer(lambda width: TokenTransformer(width=width))
    found = analyzer.compute_hessian_norm(model, dataloader=[batch], n_samples=100)
    exact = torch.linalg.eigvalsh(dense_hessian())
    assert found["top_eigenvalue"] == pytest.approx(float(exact[-1]), rel=1e-3)
    assert found["bottom_eigenvalue"] == pytest.approx(float(exact[0]), rel=1e-2)
    assert found.value == pytest.approx(float(exact.abs().max()), rel=1e-3)
    rank = float(exact.abs().sum() ** 2 / exact.square().sum())
    assert found["effective_rank"] == pytest.approx(rank, rel=0.3)
    low, high = found["effective_rank_interval"]
    assert low <= rank <= high
    row = {"n_params": 1, **found}  # as the article's own loop over sizes collects them
    assert row["top_eigenvalue"] == found["top_eigenvalue"]
    assert found["condition_number"] == pytest.approx(
        float(exact[-1] / exact.abs().mean()), rel=0.3
    )
    assert model.training


def test_only_some_samples_enter_the_hessians_norm(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    analyzer = ca.ScalingLawAnalyzer(lambda width: TokenTransformer(width=width))
    some = analyzer.compute_hessian_norm(model, batch, n_samples=2)
    first = analyzer.compute_hessian_norm(model, (batch[0][:2], batch[1][:2]))
    assert some.value == pytest.approx(first.value, rel=1e-10)
    with pytest.raises(ValueError, match="n_samples is at least 1"):
        analyzer.compute_hessian_norm(model, batch, n_samples=0)


def test_scaling_rows_are_a_data_frame_of_the_runs_on_the_dataloader(
    scaling: ca.ScalingLawAnalyzer,
) -> None:
    pandas = pytest.importorskip("pandas")
    frame = scaling.analyze_scaling_with_size([4], [8, 24], **CHEAP)
    assert isinstance(frame, pandas.DataFrame)
    size = sum(p.numel() for p in TokenTransformer(width=4).parameters())
    assert list(frame["n_params"]) == [size, size]
    assert list(frame["n_samples"]) == [8, 24]
    assert (frame["bottom_eigenvalue"] < frame["top_eigenvalue"]).all()
    assert (frame["condition_number"] > 1).all()
    assert (frame["effective_rank"] > 1).all()
    assert scaling.grid is not None
    assert scaling.grid[1]["n_samples"] == 24


def test_a_token_model_is_scaled_without_any_data() -> None:
    torch.manual_seed(0)
    analyzer = ca.ScalingLawAnalyzer(lambda width: TokenTransformer(width=width))
    with pytest.raises(ValueError, match="no runs yet: call analyze_scaling_with_size"):
        analyzer.predict_optimal_dataset_size(1000, 10.0)
    grid = analyzer.train_grid([4], [8], **{**CHEAP, "steps": 4})
    with pytest.raises(ValueError, match="takes 2 model sizes, 2 data sizes and 4 pairs"):
        analyzer.predict_optimal_dataset_size(grid[0]["n_params"], 1.0)
    assert math.log(7) * 0.5 < grid[0].validation_loss < math.log(7) * 2


def test_the_data_size_for_a_condition_number_follows_the_fitted_plane() -> None:
    from curvatlas.fits import plane_power_law
    from curvatlas.scaling import ScalingGrid

    sizes, samples = [100, 100, 400, 400, 900], [10, 80, 10, 80, 40]
    kappas = [3.0 * n**0.5 * d**-0.25 for n, d in zip(sizes, samples, strict=True)]
    cells = tuple(_cell(n, d, kappa) for n, d, kappa in zip(sizes, samples, kappas, strict=True))
    planes = {"condition_number": plane_power_law(sizes, samples, kappas)}
    analyzer = ca.ScalingLawAnalyzer(lambda width: TokenTransformer(width=width))
    analyzer.grid = ScalingGrid(cells=cells, law=None, planes=planes)
    wanted = 3.0 * 400**0.5 * 50**-0.25
    found = analyzer.predict_optimal_dataset_size(model_size=400, target_condition=wanted)
    assert found.value == pytest.approx(50, rel=1e-3)
    assert found.quantity == "condition_number"
    with pytest.raises(ValueError, match="target_condition alone"):
        analyzer.predict_optimal_dataset_size(400, wanted, target=0.1)


def _cell(parameters: int, samples: int, kappa: float) -> Any:
    from curvatlas.scaling import ScalingCell

    numbers = dict.fromkeys(
        ("training_loss", "validation_loss", "validation_accuracy", "hessian_norm", "smallest",
         "trace", "effective_rank", "negative_mass", "noise_scale", "critical_batch_size",
         "seconds"), 1.0,
    )  # fmt: skip
    ends = dict.fromkeys(
        ("validation_interval", "hessian_norm_interval", "trace_interval", "condition_interval",
         "effective_rank_interval", "critical_batch_interval"), (1.0, 1.0),
    )  # fmt: skip
    counts = dict.fromkeys(("seed", "steps", "best_step", "curvature_samples", "products"), 1)
    fields: dict[str, Any] = {**numbers, **ends, **counts}
    return ScalingCell(
        size="s", parameters=parameters, samples=samples, condition_number=kappa, **fields
    )


# --- the optimizer and the demo ------------------------------------------------------------------


def test_local_curvature_by_its_keys(model: TokenTransformer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer = ca.CurvatureAwareOptimizer(model, base_lr=1e-3, curvature_adaptation=True)
    found = optimizer.estimate_local_curvature(*batch)
    value = loss_of(model, *batch)
    slopes = torch.autograd.grad(value, list(model.parameters()))
    entries = torch.cat([slope.reshape(-1) for slope in slopes]).abs()
    assert found["loss"] == pytest.approx(float(value), rel=1e-12)
    assert found["max_gradient"] == pytest.approx(float(entries.max()), rel=1e-10)
    assert found["min_gradient"] == pytest.approx(float(entries.min()), abs=1e-15)
    assert found["condition_number"] > 1
    assert model.training


def test_the_optimizer_is_reached_and_set_as_in_the_article(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    adapted = ca.CurvatureAwareOptimizer(model, base_lr=1e-3)
    assert adapted.hessian_estimates == {}
    found = adapted.estimate_local_curvature(*batch)
    exact = torch.linalg.eigvalsh(dense_hessian())
    kappa = float(exact[-1] / exact.abs().mean())
    assert adapted.hessian_estimates["condition_number"] == found["condition_number"]
    assert found["condition_number"] == pytest.approx(kappa, rel=0.5)
    loss_of(model, *batch).backward()  # type: ignore[no-untyped-call]
    for group in adapted.optimizer.param_groups:
        group["lr"] = adapted.base_lr * min(1.0, found["condition_number"] ** -0.25)
    before = [p.detach().clone() for p in model.parameters()]
    adapted.optimizer.step()
    adapted.optimizer.zero_grad()
    assert not all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert adapted.hessian_estimates.copy()["loss"] == found["loss"]


def test_a_step_with_curvature_adaptation_moves_the_weights_and_gives_the_loss(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.encoder.layers[0].self_attn.dropout = 0.0
    optimizer = ca.CurvatureAwareOptimizer(model, base_lr=1e-3)
    before = float(loss_of(model, *batch))
    step = optimizer.step_with_curvature_adaptation(*batch)
    assert float(step) == step["loss"] == pytest.approx(before, rel=1e-12)
    assert float(loss_of(model, *batch)) < before
    assert f"{step:.4f}" == f"{before:.4f}"


def test_without_adaptation_the_rate_is_the_one_asked_for(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    kept = ca.CurvatureAwareOptimizer(model, 0.5, curvature_adaptation=False)
    assert kept.step_with_curvature_adaptation(*batch)["learning_rate"] == 0.5
    adapted = ca.CurvatureAwareOptimizer(model, 0.5)
    assert adapted.step_with_curvature_adaptation(*batch)["learning_rate"] < 0.5


def test_the_demo_trains_and_analyses_every_ten_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        analyzer, optimizer = ca.demo_hessian_analysis(steps=11)
    assert isinstance(optimizer, ca.CurvatureAwareOptimizer)
    history = analyzer.history
    for key in ("hessian_norms", "condition_numbers", "eigenvalue_spectra"):
        assert len(history[key]) == 2  # at steps 0 and 10
    assert all(norm > 0 for norm in history["hessian_norms"])
    assert analyzer.model.training
    assert max(group["steps"] for group in optimizer.param_groups) == 11
    assert "step 10:" in capsys.readouterr().out


def test_the_demo_as_typed_norms_are_those_of_double_backward(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    analyzer = ca.TransformerHessianAnalyzer(model)
    optimizer = ca.CurvatureAwareOptimizer(model)
    for step in range(3):
        if step % 2 == 0:
            results = analyzer.analyze_full_hessian([batch], n_batches=1)
            hessian = double_backward(loss_of(model, *batch), list(model.parameters()))
            exact = float(torch.linalg.eigvalsh(hessian).abs().max())
            assert results["mean_hessian_norm"] == pytest.approx(exact, rel=1e-3)
            assert f"{results['mean_hessian_norm']:.4f}"
        optimizer.step_with_curvature_adaptation(*batch)
    assert len(analyzer.history["hessian_norms"]) == 2


def test_the_demo_is_the_same_twice_and_leaves_the_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = (ca.demo_hessian_analysis(steps=1)[0] for _ in "ab")
    assert first.history["hessian_norms"] == second.history["hessian_norms"]
    assert torch.equal(torch.get_rng_state(), state)


# --- figures -------------------------------------------------------------------------------------


def test_the_spectrum_is_drawn_in_three_panels() -> None:
    values = torch.tensor([3.0, 1.0, -0.5])
    figure = ca.visualize_hessian_spectrum(values, title="a title")
    assert len(figure.axes) == 3
    assert "a title" in {figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)}


def test_the_spectrum_of_an_analysis_is_drawn(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    values = ca.TransformerHessianAnalyzer(model).compute_hessian_eigenvalues(*batch, k=4)
    assert len(ca.visualize_hessian_spectrum(values).axes) == 3


def test_a_curvature_history_of_mappings_is_drawn(
    model: TokenTransformer, batch: tuple[Tensor, Tensor]
) -> None:
    runs = [
        [
            {"layer": layer, "attn_curvature": 2.0**layer / run, "gradient_scale": 0.1}
            for layer in range(3)
        ]
        for run in (1, 2)
    ]
    figure = ca.visualize_curvature_flow(runs)
    bars = [patch.get_height() for patch in figure.axes[3].patches]
    assert bars == [0.5, 1.0, 2.0]
    alone = ca.visualize_curvature_flow(runs[0])
    assert [patch.get_height() for patch in alone.axes[3].patches] == [1.0, 2.0, 4.0]
    analyzer = ca.CurvaturePropagationAnalyzer(model)
    entries = [[analyzer.compute_layer_curvature(x, 0)] for x in batch]
    assert ca.visualize_curvature_flow(entries) is not None


def test_rows_of_modules_are_drawn_over_their_runs() -> None:
    torch.manual_seed(0)
    analyzer = ca.TransformerHessianAnalyzer(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    runs = [analyzer.analyze_layer_wise_curvature(x) for x in torch.randn(2, 5, 3)]
    heights = [row["curvature"] for row in runs[-1]]
    for drawn in (runs[-1], analyzer.history["layer_curvatures"]):
        figure = ca.visualize_curvature_flow(drawn)
        assert [patch.get_height() for patch in figure.axes[3].patches] == pytest.approx(heights)
    shown = np.asarray(figure.axes[1].images[0].get_array())
    assert shown[:, -1] == pytest.approx([row["output_norm"] for row in runs[-1]])
    assert all(row.get("curvature_proxy", 0) > 0 for row in runs[0])


def test_a_row_without_its_curvature_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match="row 0 has no 'gradient_scale': it has"):
        ca.visualize_curvature_flow([[{"layer": 0, "attn_curvature": 1.0}]])
    with pytest.raises(ValueError, match="a list of runs"):
        ca.visualize_curvature_flow([1.0, 2.0])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("norms", "data"),
    [([2.0, 4.0, 8.0], [10, 100, 1000]), ([2.0, 4.0, 8.0], [10, 100]),
     ([[2.0, 1.0], [4.0, 2.0], [8.0, 4.0]], [10, 100])],
)  # fmt: skip
def test_scaling_laws_are_drawn_from_three_lists(norms: Any, data: list[int]) -> None:
    figure = ca.plot_scaling_law_predictions([1e3, 1e4, 1e5], norms, data)
    left, right = figure.axes
    assert left.get_xlabel() == "parameters N"
    assert right.get_xlabel() == "samples D"
    assert any("0.30" in text.get_text() for text in left.get_legend().get_texts())
    again = ca.plot_scaling_law_predictions(
        model_sizes=[1e3, 1e4, 1e5], hessian_norms=norms, dataset_sizes=data
    )
    assert len(again.axes) == 2


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hessian_norms has shape \(2,\): expected \(3,\)"):
        ca.plot_scaling_law_predictions([1, 2, 3], [1.0, 2.0], [10, 20])
    with pytest.raises(ValueError, match="give all three"):
        ca.plot_scaling_law_predictions([1, 2, 3], [1.0, 2.0, 3.0])
