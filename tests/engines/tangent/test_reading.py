"""Existing modules read as blocks: their own double backward is the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvatlas.engines.tangent.head import Readout
from curvatlas.engines.tangent.reading import (
    UnmappedModuleError,
    activation_name,
    map_module,
    map_norm,
)
from curvatlas.engines.tangent.stack import BlockStack
from curvatlas.problem.evaluation import evaluation
from curvatlas.zoo.models import GPT, Attention, Block, BlockConfig, GPTConfig, ViT, ViTConfig
from oracles import flat, relative_error

TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def _twice_differentiable_attention() -> Iterator[None]:
    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _prepare(module: nn.Module) -> nn.Module:
    """Float64, eval, and no weight at its special initial value (biases 0, gains 1)."""
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module


def _product(loss: Tensor, leaves: list[Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and H v by reverse over reverse, in the module's flat order."""
    grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    gradient = flat(grads, leaves)
    row = torch.autograd.grad(gradient @ v, leaves, allow_unused=True)
    return gradient.detach(), flat(row, leaves)


def _assert_same_block(module: nn.Module, run: Callable[[Tensor], Tensor], length: int = 5) -> None:
    mapped = map_module(module)
    x = torch.randn(2, length, mapped.spec.d_model, dtype=torch.float64)
    target = torch.randn_like(x)
    leaves = list(module.parameters())
    v = torch.randn(sum(p.numel() for p in leaves), dtype=torch.float64)
    gradient, want = _product((run(x) - target).pow(2).mean(), leaves, v)
    here = BlockStack([(mapped.spec, mapped.weights)]).linearise(x, target)
    got = mapped.to_module_order(here @ mapped.from_module_order(v))
    assert relative_error(mapped.to_module_order(here.gradient), gradient) <= TOLERANCE
    assert relative_error(got, want) <= TOLERANCE
    assert torch.linalg.norm(want) > 0


@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention_is_read(bias: bool) -> None:
    module = _prepare(nn.MultiheadAttention(8, 2, bias=bias, batch_first=True))
    _assert_same_block(module, lambda x: module(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    "activation", ["relu", "gelu", F.silu, nn.GELU(approximate="tanh"), nn.Identity()]
)
@pytest.mark.parametrize("bias", [True, False])
def test_encoder_layers_are_read(norm_first: bool, activation: Any, bias: bool) -> None:
    layer = nn.TransformerEncoderLayer(
        8, 2, 12, norm_first=norm_first, activation=activation, batch_first=True, bias=bias
    )
    module = _prepare(layer)
    _assert_same_block(module, module)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "rms", "activation": "swiglu", "n_kv_heads": 1, "norm_first": True},
        {"activation": "geglu", "bias": False, "softmax": False},
        {"n_heads": 1, "output_projection": False, "activation": "relu"},
        {"activation": "reglu", "eps": 0.1},
    ],
)
@pytest.mark.parametrize(("causal", "rope"), [(False, None), (True, 100.0)])
def test_zoo_blocks_are_read(options: dict[str, Any], causal: bool, rope: float | None) -> None:
    config = BlockConfig(**{"d_model": 8, "n_heads": 2, "d_ff": 10, **options})
    module = _prepare(Block(config, causal=causal, rope_base=rope))
    _assert_same_block(module, module)
    attention = _prepare(Attention(config, causal=causal, rope_base=rope))
    _assert_same_block(attention, attention)


def _gpt2(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=8, n_head=2, n_layer=2, n_positions=16, vocab_size=11, **options
    )
    return _prepare(transformers.GPT2LMHeadModel(config))


def _bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=12,
        vocab_size=11,
    )
    return _prepare(transformers.BertModel(config))


def _vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=12,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    return _prepare(transformers.ViTForImageClassification(config))


def _llama(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 12,
        "vocab_size": 11,
        "max_position_embeddings": 32,
        "head_dim": 4,
    }
    return _prepare(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | options)))


def _rotary(length: int, size: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin (1, L, size) in float64: the library rounds its angles to float32."""
    half = torch.arange(0, size, 2, dtype=torch.float64) / size
    angle = torch.outer(torch.arange(length, dtype=torch.float64), base**-half)
    angle = torch.cat([angle, angle], dim=-1)[None]
    return angle.cos(), angle.sin()


def _causal(length: int) -> Tensor:
    mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)
    return mask[None, None]


@pytest.mark.huggingface
@pytest.mark.parametrize(
    "options",
    [{}, {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu", "n_inner": 9}],
)
def test_gpt2_blocks_are_read(options: dict[str, Any]) -> None:
    layer = _gpt2(**options).transformer.h[1]
    _assert_same_block(layer, lambda x: layer(x, attention_mask=_causal(x.shape[1])))


@pytest.mark.huggingface
def test_bert_layers_are_read() -> None:
    layer = _bert().encoder.layer[0]
    _assert_same_block(layer, lambda x: layer(x))


@pytest.mark.huggingface
def test_vit_layers_are_read() -> None:
    vit = _vit().vit
    layer = (vit.layers if hasattr(vit, "layers") else vit.encoder.layer)[0]
    _assert_same_block(layer, lambda x: layer(x))


@pytest.mark.huggingface
@pytest.mark.parametrize("attention_bias", [False, True])
def test_llama_layers_are_read(attention_bias: bool) -> None:
    layer = _llama(attention_bias=attention_bias, mlp_bias=attention_bias).model.layers[0]
    base = map_module(layer).spec.rope_base
    assert base is not None

    def run(x: Tensor) -> Tensor:
        rotary = _rotary(x.shape[1], 4, base)
        with evaluation(layer, stay_double=True):  # its norm would round to float32
            return layer(x, attention_mask=_causal(x.shape[1]), position_embeddings=rotary)

    _assert_same_block(layer, run)


def _assert_same_stack(
    module: nn.Module, run: Callable[[Tensor], Tensor], *, length: int, targets: Tensor | None
) -> BlockStack:
    """H v of the stack against the module's own, over the parameters the stack has."""
    loss = "mse" if targets is None else "cross_entropy"
    stack = BlockStack.from_module(module, loss=loss)
    assert stack.order is not None
    x = torch.randn(2, length, stack.specs[0].d_model, dtype=torch.float64)
    outputs = run(x)
    if targets is None:
        targets = torch.randn_like(outputs)
        value = (outputs - targets).pow(2).mean()
    else:
        value = F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    leaves = list(module.parameters())
    # a direction in the stack's own parameters: tied heads and embeddings stay fixed
    v = stack.order.to_module_order(torch.randn(stack.size, dtype=torch.float64))
    gradient, want = _product(value, leaves, v)
    here = stack.linearise(x, targets)
    got = here @ stack.order.from_module_order(v)
    assert relative_error(here.gradient, stack.order.from_module_order(gradient)) <= TOLERANCE
    assert relative_error(got, stack.order.from_module_order(want)) <= TOLERANCE
    return stack


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoders_are_read_with_their_final_norm(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, norm_first=norm_first, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    module = _prepare(encoder)
    _assert_same_stack(module, module, length=4, targets=None)


def test_zoo_gpt_is_read_with_its_head() -> None:
    config = GPTConfig(vocabulary=7, context=8, d_model=8, n_heads=2, positions="rope", norm="rms")
    module = _prepare(GPT(config))

    def run(x: Tensor) -> Tensor:
        for block in module.blocks:
            x = block(x)
        return module.head(module.norm(x))

    labels = torch.randint(7, (2, 5))
    stack = _assert_same_stack(module, run, length=5, targets=labels)
    assert "readout.head_weight" in stack.named_weights


def test_a_tied_head_is_used_but_is_no_parameter() -> None:
    module = _prepare(GPT(GPTConfig(vocabulary=7, context=8, d_model=8, n_heads=2, tied=True)))

    def run(x: Tensor) -> Tensor:
        for block in module.blocks:
            x = block(x)
        return F.linear(module.norm(x), module.head.weight.detach())

    labels = torch.randint(7, (2, 5))
    stack = _assert_same_stack(module, run, length=5, targets=labels)
    assert "readout.head_weight" not in stack.named_weights


@pytest.mark.parametrize("pooling", ["class_token", "mean"])
def test_zoo_vit_is_read_with_its_pooling(pooling: str) -> None:
    config = ViTConfig(d_model=8, n_heads=2, n_layers=2, classes=3, pooling=pooling)
    module = _prepare(ViT(config))

    def run(x: Tensor) -> Tensor:
        for block in module.blocks:
            x = block(x)
        x = module.norm(x)
        return module.head(x[:, 0] if pooling == "class_token" else x.mean(1))

    _assert_same_stack(module, run, length=5, targets=torch.tensor([0, 2]))


@pytest.mark.huggingface
def test_whole_hugging_face_bodies_are_read() -> None:
    gpt2 = _gpt2()

    def run_gpt2(x: Tensor) -> Tensor:
        for layer in gpt2.transformer.h:
            x = layer(x, attention_mask=_causal(x.shape[1]))
        return F.linear(gpt2.transformer.ln_f(x), gpt2.lm_head.weight.detach())

    _assert_same_stack(gpt2, run_gpt2, length=5, targets=torch.randint(11, (2, 5)))

    llama = _llama(tie_word_embeddings=False)

    def run_llama(x: Tensor) -> Tensor:
        rotary = _rotary(x.shape[1], 4, BlockStack.from_module(llama).specs[0].rope_base or 0.0)
        with evaluation(llama, stay_double=True):
            for layer in llama.model.layers:
                mask = _causal(x.shape[1])
                x = layer(x, attention_mask=mask, position_embeddings=rotary)
            return llama.lm_head(llama.model.norm(x))

    _assert_same_stack(llama, run_llama, length=5, targets=torch.randint(11, (2, 5)))

    vit = _vit()

    def run_vit(x: Tensor) -> Tensor:
        body = vit.vit
        for layer in body.layers if hasattr(body, "layers") else body.encoder.layer:
            x = layer(x)
        return vit.classifier(body.layernorm(x)[:, 0])

    _assert_same_stack(vit, run_vit, length=5, targets=torch.tensor([0, 2]))

    bert = _bert()

    def run_bert(x: Tensor) -> Tensor:
        for layer in bert.encoder.layer:
            x = layer(x)
        return x

    _assert_same_stack(bert, run_bert, length=5, targets=None)


@pytest.mark.huggingface
def test_a_whole_gpt2_forward_equals_its_stack_on_the_embeddings() -> None:
    gpt2 = _gpt2()
    tokens = torch.randint(11, (2, 6))
    embedded = gpt2.transformer.wte(tokens) + gpt2.transformer.wpe(torch.arange(6))
    want = gpt2(tokens).logits
    got = BlockStack.from_module(gpt2, loss="cross_entropy").forward(embedded)
    assert relative_error(got, want.detach()) <= TOLERANCE


def test_the_two_flat_orders_are_inverse_permutations() -> None:
    mapped = map_module(nn.TransformerEncoderLayer(8, 2, 12).eval())
    v = torch.randn(mapped.module_size, 3)
    assert torch.equal(mapped.to_module_order(mapped.from_module_order(v)), v)
    with pytest.raises(ValueError, match="expected"):
        mapped.to_module_order(v[:-1])


def test_mapped_weights_are_the_modules_own_memory() -> None:
    module = nn.TransformerEncoderLayer(8, 2, 12).eval()
    weights = map_module(module).weights
    with torch.no_grad():
        module.self_attn.in_proj_weight[0, 0] = 7.0
    assert weights["query_weight"][0, 0] == 7.0


@pytest.mark.parametrize(
    ("module", "norm", "eps"),
    [
        (nn.LayerNorm(4, eps=0.1), "layer", 0.1),
        (nn.LayerNorm(4, elementwise_affine=False), "layer", 1e-5),
        (nn.RMSNorm(4, eps=0.2), "rms", 0.2),
        (nn.RMSNorm(4).double(), "rms", torch.finfo(torch.float64).eps),
    ],
)
def test_norms_are_read(module: nn.Module, norm: str, eps: float) -> None:
    mapped = map_norm(module)
    assert (mapped.norm, mapped.size, mapped.eps) == (norm, 4, eps)
    assert (mapped.weight is None) == (module.weight is None)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.relu, "relu"),
        (nn.ReLU(), "relu"),
        (F.gelu, "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"),
        (lambda z: z, "identity"),
    ],
)
def test_activations_are_recognised_by_value(function: Any, name: str) -> None:
    assert activation_name(function) == name


def _mixed_eps() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12).eval()
    layer.norm2.eps = 0.5
    return layer


def _mixed_norms() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12).eval()
    layer.norm2 = nn.RMSNorm(8)  # type: ignore[assignment]
    return layer


def _extended() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12).eval()
    layer.extra = nn.Parameter(torch.zeros(3))
    return layer


class OwnForward(nn.TransformerEncoderLayer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: nn.Linear(3, 3), "no layer the closed forms know"),
        (lambda: nn.TransformerEncoderLayer(8, 2, 12).train(), "dropout of 0.1 is active"),
        (lambda: nn.MultiheadAttention(8, 2, dropout=0.5).train(), "dropout of 0.5 is active"),
        (lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4), "cross attention"),
        (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True), "extra token"),
        (lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True), "extra token"),
        (lambda: nn.TransformerEncoderLayer(8, 2, 12, activation=torch.tanh).eval(), "activation"),
        (_mixed_eps, "one kind and one eps"),
        (_mixed_norms, "mixes norms"),
        (_extended, "parameters the closed form does not: extra"),
        (lambda: OwnForward(8, 2, 12).eval(), "overrides the forward"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(
    module: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(UnmappedModuleError, match=reason) as caught:
        map_module(module())
    assert "\n" not in str(caught.value)


def test_norms_and_models_outside_the_list_are_refused() -> None:
    with pytest.raises(UnmappedModuleError, match="2 axes"):
        map_norm(nn.LayerNorm((3, 4)))
    with pytest.raises(UnmappedModuleError, match="no norm"):
        map_norm(nn.BatchNorm1d(3))
    with pytest.raises(UnmappedModuleError, match="as a stack"):
        BlockStack.from_module(nn.Sequential(nn.Linear(2, 2)))


def test_parametrised_layers_are_refused() -> None:
    layer = nn.MultiheadAttention(8, 2).eval()
    nn.utils.parametrize.register_parametrization(layer, "in_proj_weight", nn.Identity())
    with pytest.raises(UnmappedModuleError):
        map_module(layer)


@pytest.mark.huggingface
def test_hugging_face_variants_outside_the_closed_form_are_refused() -> None:
    stretched = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    llama = _llama(rope_parameters=stretched)
    with pytest.raises(UnmappedModuleError, match="rotary positions"):
        map_module(llama.model.layers[0])
    with pytest.raises(UnmappedModuleError, match="attends to a memory"):
        map_module(_gpt2(add_cross_attention=True).transformer.h[0])
    with pytest.raises(UnmappedModuleError, match="dropout"):
        map_module(_bert().train().encoder.layer[0])


def test_a_readout_without_head_may_be_asked_for() -> None:
    module = GPT(GPTConfig(vocabulary=7, context=8, d_model=8, n_heads=2)).eval()
    stack = BlockStack.from_module(module, head=False)
    assert isinstance(stack.readout, Readout)
    assert stack.readout.weight is None
    assert stack.readout.norm == "layer"
