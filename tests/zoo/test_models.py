"""The reference models compute what their docstrings say, whatever the options."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import curvatlas as ca
import oracles
from curvatlas import zoo


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def attention_by_hand(layer: nn.Module, x: Tensor, *, causal: bool, softmax: bool) -> Tensor:
    """One head and one query at a time."""
    size, group = layer.head_size, layer.n_heads // layer.n_kv_heads
    q, k, v = layer.query(x), layer.key(x), layer.value(x)
    mixed = torch.zeros_like(q)
    for sample, head, i in itertools.product(
        range(len(x)), range(layer.n_heads), range(x.shape[1])
    ):
        mine, shared = slice(head * size, (head + 1) * size), head // group
        theirs = slice(shared * size, (shared + 1) * size)
        stop = i + 1 if causal else x.shape[1]
        logits = k[sample, :stop, theirs] @ q[sample, i, mine] / math.sqrt(size)
        weights = torch.softmax(logits, 0) if softmax else logits
        mixed[sample, i, mine] = weights @ v[sample, :stop, theirs]
    return layer.output(mixed)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("n_kv_heads", [None, 2, 1])
def test_attention_equals_the_loop_over_heads_and_queries(causal, softmax, n_kv_heads):
    torch.manual_seed(0)
    options = {"d_model": 12, "n_heads": 4, "n_kv_heads": n_kv_heads, "softmax": softmax}
    if causal:
        model = zoo.GPT(zoo.GPTConfig(**options, positions="none"))
    else:
        model = zoo.ViT(zoo.ViTConfig(**options))
    layer = model.blocks[0].attention.double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    expected = attention_by_hand(layer, x, causal=causal, softmax=softmax)
    assert oracles.relative_error(layer(x).detach(), expected.detach()) < 1e-14


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu"])
def test_blocks_follow_the_equations_of_their_docstring(norm_first, norm, activation):
    model = zoo.reference_vit(norm_first=norm_first, norm=norm, activation=activation).double()
    block = model.blocks[0]
    for layer in (block.norm1, block.norm2):
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    x = torch.randn(2, 5, 16, dtype=torch.float64)

    def normalise(layer: nn.Module, z: Tensor) -> Tensor:
        if norm == "layer":
            return oracles.layer_norm(z, layer.weight, layer.bias, 1e-5)
        return oracles.rms_norm(z, layer.weight, 1e-5)

    def feed_forward(z: Tensor) -> Tensor:
        ffn = block.ffn
        h = ffn.gate(z) if hasattr(ffn, "gate") else ffn.up(z)
        f = {
            "relu": h.clamp(min=0),
            "gelu": h * 0.5 * (1 + torch.erf(h / math.sqrt(2))),
            "geglu": h * 0.5 * (1 + torch.erf(h / math.sqrt(2))),
            "gelu_tanh": 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))),
            "silu": h / (1 + torch.exp(-h)),
            "swiglu": h / (1 + torch.exp(-h)),
        }[activation]
        return ffn.down(f * ffn.up(z) if hasattr(ffn, "gate") else f)

    if norm_first:
        u = x + block.attention(normalise(block.norm1, x))
        expected = u + feed_forward(normalise(block.norm2, u))
    else:
        y = normalise(block.norm1, x + block.attention(x))
        expected = normalise(block.norm2, y + feed_forward(y))
    assert oracles.relative_error(block(x).detach(), expected.detach()) < 1e-14


def test_a_gpt_does_not_see_the_future():
    for positions in ("learned", "rope", "none"):
        model = zoo.reference_gpt(positions=positions)
        tokens = torch.randint(0, 256, (2, 12))
        changed = tokens.clone()
        changed[:, 7] = (changed[:, 7] + 1) % 256
        difference = (model(tokens) - model(changed)).abs().amax((0, 2))
        assert (difference[:7] == 0).all()
        assert (difference[7:] > 0).all()


def test_rotary_logits_depend_on_the_distance_of_tokens_only():
    layer = zoo.reference_gpt(positions="rope", bias=False).double().blocks[0].attention
    token = torch.randn(32, dtype=torch.float64)
    layer.causal, layer.softmax = False, False
    logits = layer.weights(token.expand(1, 6, 32))[0]  # (H, 6, 6): the same token six times
    for offset in range(-5, 6):
        band = logits.diagonal(offset, -2, -1)
        torch.testing.assert_close(band, band[:, :1].expand_as(band), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(logits[:, 0, 0], logits[:, 0, 1])


def test_patches_hold_the_pixels_of_their_square():
    model = zoo.ViT(zoo.ViTConfig(image_size=6, patch_size=3, channels=2))
    images = torch.randn(4, 2, 6, 6)
    patches = model.patchify(images)  # row after row: the third is second row, first column
    assert patches.shape == (4, 4, 18)
    assert torch.equal(patches[1, 2], images[1, :, 3:6, 0:3].reshape(-1))


def test_sizes_are_those_of_the_benchmarks_and_of_the_docstrings():
    assert count(zoo.benchmark_gpt()) == 1_057_536
    assert count(zoo.reference_vit()) == 3_786
    assert count(zoo.reference_gpt()) == 43_904
    assert count(zoo.reference_gpt()) - count(zoo.reference_gpt(tied=True)) == 256 * 32


def test_an_mlp_of_given_size_is_the_nearest_one():
    for target in (500, 3786, 50_000):
        config = zoo.MLPConfig(n_layers=3).of_size(target)
        assert count(zoo.MLP(config)) == config.parameters
        for width in (config.width - 1, config.width + 1):
            other = zoo.MLPConfig(n_layers=3, width=width)
            assert abs(config.parameters - target) <= abs(other.parameters - target)


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second, other = (zoo.reference_vit(seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert not torch.equal(first.head.weight, other.head.weight)


def test_models_copy_and_pickle():
    images = torch.randn(2, 8, 8)
    model = zoo.reference_vit(activation="gelu_tanh")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images), model(images))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zoo.reference_vit(d_model=10, n_heads=3), "must divide"),
        (lambda: zoo.reference_vit(n_heads=2, output_projection=False), "n_heads=1"),
        (lambda: zoo.reference_vit(patch_size=3), "no multiple"),
        (lambda: zoo.reference_vit(activation="sine"), "choose from"),
        (lambda: zoo.reference_vit(norm="batch"), "'layer', 'rms' or 'none'"),
        (lambda: zoo.reference_gpt(positions="sinus"), "'learned', 'rope' or 'none'"),
        (lambda: zoo.reference_gpt(d_model=12, positions="rope"), "odd"),
        (lambda: zoo.reference_gpt()(torch.zeros(1, 65, dtype=torch.long)), "L ≤ 64"),
        (lambda: zoo.reference_vit()(torch.zeros(1, 9, 9)), "expected images"),
        (lambda: zoo.MLP(zoo.MLPConfig(activation="sine")), "choose from"),
    ],
)
def test_wrong_options_say_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_paper_s_model_has_its_3552_parameters_in_the_order_of_its_heat_maps():
    model = zoo.petrov_vit("mnist", seed=3)
    norm = [16, 16]
    sizes = [256, *[256] * 4, *norm, 1024, 1024, *norm, 160]
    assert [p.numel() for p in model.parameters()] == sizes
    assert sum(sizes) == 3552
    anatomy = ca.anatomy_of(model)
    roles = [s.role for s in anatomy.slices]
    assert roles[1:5] == ["query", "key", "value", "output"]
    assert roles[5:11] == ["gamma", "beta", "up", "down", "gamma", "beta"]


@pytest.mark.parametrize("table", ["mnist", "cifar"])
def test_the_paper_s_models_are_table_1_post_norm_without_positions(table):
    model = zoo.petrov_vit(table).double()
    width, hidden, blocks = (16, 64, 1) if table == "mnist" else (128, 512, 8)
    assert model.patch_embedding.weight.shape == (width, 16 * (1 if table == "mnist" else 3))
    assert len(model.blocks) == blocks
    assert model.blocks[0].ffn.up.weight.shape == (hidden, width)
    shape = (2, 28, 28) if table == "mnist" else (2, 3, 32, 32)
    images = torch.randn(shape, dtype=torch.float64)
    patches = model.patchify(images)
    x = model.patch_embedding(patches[:, torch.randperm(patches.shape[1])])
    for block in model.blocks:
        for norm, layer in ((block.norm1, block.attention), (block.norm2, block.ffn)):
            x = oracles.layer_norm(x + layer(x), norm.weight, norm.bias, 1e-5)
    by_hand = model.head(x.mean(1))  # no positions: patches in any order
    assert oracles.relative_error(model(images).detach(), by_hand.detach()) < 1e-13
    v = torch.randn(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    problem = ca.Problem(model, "cross_entropy", (images, torch.tensor([1, 2])))
    plain = ca.Hessian(problem, engine="autograd") @ v
    assert oracles.relative_error(ca.Hessian(problem) @ v, plain) < 1e-12


def test_an_unknown_table_of_the_paper_is_refused():
    with pytest.raises(ValueError, match="mnist and cifar, got 'imagenet'"):
        zoo.petrov_vit("imagenet")
