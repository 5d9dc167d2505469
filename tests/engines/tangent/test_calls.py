"""Layers called by their own model: the calls read, the blocks held to double backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvatlas as ca
import families
from curvatlas.engines.tangent.reading import _LAYERS, UnmappedModuleError, read_call, read_module
from curvatlas.zoo.models import GPT, GPTConfig
from layer_oracles import Seen, differences, layers_of_kind, prepared, seen_layers

TOLERANCE = 1e-11
LENGTH, WIDTH, TOKENS = 6, 8, 11
SIZES = {
    "hidden_size": WIDTH,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 12,
    "vocab_size": TOKENS,
    "max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def _twice_differentiable_attention() -> Iterator[None]:
    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH):
        yield


def assert_same(seen: Seen) -> None:
    """Output, and total, outer and functional products of 1 and 3 columns, against the layer."""
    for part, error in differences(seen).items():
        assert error <= (1e-12 if part == "output" else TOLERANCE), (part, error)


# ---- torch and the zoo ------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "both", "added", "by head"])
def test_encoder_layers_with_any_mask_are_read(mask: str, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(
        WIDTH, 2, 12, norm_first=batch_first, activation="gelu", batch_first=batch_first
    )
    model = prepared(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    options: dict[str, Tensor] = {}
    if mask in ("padding", "both", "by head"):
        options["src_key_padding_mask"] = torch.arange(LENGTH) > torch.tensor([[5], [3], [4]])
    if mask in ("causal", "both"):
        options["mask"] = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    if mask == "added":
        options["mask"] = torch.randn(LENGTH, LENGTH, dtype=torch.float64)
    if mask == "by head":
        options["mask"] = torch.randn(6, LENGTH, LENGTH, dtype=torch.float64)
    source = x if batch_first else x.transpose(0, 1)
    layers = seen_layers(model, lambda: model(source, **options), list(model.layers))
    assert len(layers) == 2
    for seen in layers:
        assert_same(seen)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding", "both", "added", "by head", "hinted"])
def test_decoder_layers_with_any_mask_of_their_memory_are_read(
    mask: str, batch_first: bool
) -> None:
    layer = prepared(
        nn.TransformerDecoderLayer(
            WIDTH, 2, 12, norm_first=batch_first, activation="gelu", batch_first=batch_first
        )
    )
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    memory = torch.randn(3, 4, WIDTH, dtype=torch.float64)
    options: dict[str, Any] = {}
    if mask in ("padding", "both", "by head"):
        options["memory_key_padding_mask"] = torch.arange(4) > torch.tensor([[3], [1], [2]])
    if mask == "both":
        options["tgt_key_padding_mask"] = torch.arange(LENGTH) > torch.tensor([[5], [3], [4]])
        options["tgt_mask"] = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    if mask == "added":
        options["memory_mask"] = torch.randn(LENGTH, 4, dtype=torch.float64)
    if mask == "by head":
        options["memory_mask"] = torch.randn(6, LENGTH, 4, dtype=torch.float64)
    if mask == "hinted":  # torch does not look at the masks
        options["tgt_mask"] = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        options["memory_mask"] = torch.zeros(LENGTH, 4, dtype=torch.bool)
        options |= {"tgt_is_causal": True, "memory_is_causal": True}
    given = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    (seen,) = seen_layers(layer, lambda: layer(*given, **options), [layer])
    assert_same(seen)
    part = seen.call.of_samples(slice(1, 3))
    assert part.memory is not None
    torch.testing.assert_close(part.memory, memory[1:])


def test_a_query_without_keys_mixes_nothing() -> None:
    model = prepared(nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True))
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask[0] = True
    (seen,) = seen_layers(model, lambda: model(x, src_mask=mask), [model])
    assert_same(seen)


def test_a_single_sample_may_come_without_its_axis() -> None:
    model = prepared(nn.TransformerEncoderLayer(WIDTH, 2, 12))
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    (seen,) = seen_layers(model, lambda: model(x), [model])
    assert seen.call.as_module(seen.call.x).shape == x.shape
    assert_same(seen)


@pytest.mark.parametrize(
    "options", [{}, {"positions": "rope", "norm": "rms", "activation": "swiglu", "n_kv_heads": 1}]
)
def test_blocks_of_the_zoo_are_read(options: dict[str, Any]) -> None:
    config = GPTConfig(vocabulary=TOKENS, context=16, d_model=WIDTH, n_heads=2, **options)
    model = prepared(GPT(config))
    tokens = torch.randint(0, TOKENS, (2, LENGTH))
    for seen in seen_layers(model, lambda: model(tokens), list(model.blocks)):
        assert_same(seen)


def test_the_mask_and_turns_of_some_samples_are_those_of_the_call() -> None:
    layer = prepared(nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True))
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    padding = torch.arange(LENGTH) > torch.tensor([[5], [3], [4]])
    (seen,) = seen_layers(layer, lambda: layer(x, src_key_padding_mask=padding), [layer])
    spec, pick = read_module(layer)
    weights = pick({name: leaf.detach() for name, leaf in layer.named_parameters()})
    everything = seen.call.linearise(spec, weights).output
    part = seen.call.of_samples(slice(1, 3)).linearise(spec, weights).output
    torch.testing.assert_close(part, everything[1:], rtol=1e-14, atol=1e-14)


# ---- Hugging Face ------------------------------------------------------------------------------


transformers = pytest.importorskip("transformers")


def _language(name: str, layer: str, **options: Any) -> Callable[[str], tuple[nn.Module, str]]:
    """A family's body: class prefix, its layers' class, its configuration."""

    def make(implementation: str) -> tuple[nn.Module, str]:
        sizes = {**SIZES, **options}
        config = getattr(transformers, f"{name}Config")(
            **{key: value for key, value in sizes.items() if value is not None}
        )
        body = getattr(transformers, f"{name}Model")
        config._attn_implementation = implementation if body._supports_sdpa else "eager"
        return body(config), layer

    return make


_NO_SIZES = dict.fromkeys(SIZES)
# their usual tokens lie outside of ours
_NO_PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_STABLE_LM = {
    "num_key_value_heads": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
_FALCON = {"ffn_hidden_size": 12, "num_kv_heads": 2, **_NO_PAD}
FAMILIES: dict[str, Callable[[str], tuple[nn.Module, str]]] = {
    "GPT-2": _language("GPT2", "GPT2Block", n_inner=12),
    "GPT-Neo": _language(
        "GPTNeo",
        "GPTNeoBlock",
        **_NO_SIZES
        | {
            "hidden_size": WIDTH,
            "num_heads": 2,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 3,
            "intermediate_size": 12,
            "vocab_size": TOKENS,
            "max_position_embeddings": 16,
        },
    ),
    "BERT": _language("Bert", "BertLayer"),
    "RoBERTa": _language("Roberta", "RobertaLayer"),
    "ELECTRA": _language("Electra", "ElectraLayer", embedding_size=4),
    "DistilBERT": _language(
        "DistilBert",
        "TransformerBlock",
        **_NO_SIZES
        | {"dim": WIDTH, "n_heads": 2, "n_layers": 2, "hidden_dim": 12, "vocab_size": TOKENS},
    ),
    "ALBERT": _language("Albert", "AlbertLayer", embedding_size=4),
    "OPT": _language(
        "OPT",
        "OPTDecoderLayer",
        intermediate_size=None,
        ffn_dim=12,
        activation_function="gelu",
        word_embed_proj_dim=WIDTH,
    ),
    "Llama": _language("Llama", "LlamaDecoderLayer", num_key_value_heads=1),
    "Llama, stretched": _language(
        "Llama",
        "LlamaDecoderLayer",
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    ),
    "Llama, YaRN": _language(
        "Llama",
        "LlamaDecoderLayer",
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
    ),
    "Mistral, window": _language(
        "Mistral", "MistralDecoderLayer", num_key_value_heads=1, sliding_window=3
    ),
    "Qwen2": _language("Qwen2", "Qwen2DecoderLayer", num_key_value_heads=1),
    "OLMo": _language("Olmo", "OlmoDecoderLayer", num_key_value_heads=1),
    "OLMo 2": _language("Olmo2", "Olmo2DecoderLayer", num_key_value_heads=1),
    "Qwen3": _language("Qwen3", "Qwen3DecoderLayer", num_key_value_heads=1, head_dim=6),
    "SmolLM3": _language(
        "SmolLM3", "SmolLM3DecoderLayer", num_key_value_heads=1, no_rope_layers=[1, 0], **_NO_PAD
    ),
    "Gemma": _language("Gemma", "GemmaDecoderLayer", num_key_value_heads=1, head_dim=6),
    "Gemma 2": _language(
        "Gemma2",
        "Gemma2DecoderLayer",
        num_key_value_heads=1,
        head_dim=6,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=2.0,
        sliding_window=3,
    ),
    "Gemma 3": _language(
        "Gemma3Text",
        "Gemma3DecoderLayer",
        num_key_value_heads=1,
        head_dim=6,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "Granite": _language(
        "Granite",
        "GraniteDecoderLayer",
        num_key_value_heads=1,
        attention_multiplier=0.3,
        residual_multiplier=0.7,
    ),
    "Phi": _language("Phi", "PhiDecoderLayer", qk_layernorm=True),
    "Phi-3": _language("Phi3", "Phi3DecoderLayer", num_key_value_heads=1, **_NO_PAD),
    "StarCoder2": _language("Starcoder2", "Starcoder2DecoderLayer", num_key_value_heads=1),
    "StableLM": _language("StableLm", "StableLmDecoderLayer", use_qkv_bias=True, **_STABLE_LM),
    "StableLM, side by side": _language(
        "StableLm",
        "StableLmDecoderLayer",
        use_parallel_residual=True,
        qk_layernorm=True,
        **_STABLE_LM,
    ),
    "Cohere": _language("Cohere", "CohereDecoderLayer", use_qk_norm=True, **_NO_PAD),
    "Cohere 2": _language(
        "Cohere2",
        "Cohere2DecoderLayer",
        num_key_value_heads=1,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
        **_NO_PAD,
    ),
    "GPT-NeoX": _language("GPTNeoX", "GPTNeoXLayer", **_NO_PAD),
    "GPT-NeoX, in turn": _language(
        "GPTNeoX", "GPTNeoXLayer", use_parallel_residual=False, attention_bias=False, **_NO_PAD
    ),
    "GPT-J": _language(
        "GPTJ",
        "GPTJBlock",
        **_NO_SIZES | {"n_embd": WIDTH, "n_head": 2, "n_layer": 2, "n_inner": 12, "rotary_dim": 2},
        **_NO_PAD,
    ),
    "Falcon": _language("Falcon", "FalconDecoderLayer", **_FALCON),
    "Falcon, ALiBi": _language("Falcon", "FalconDecoderLayer", alibi=True, bias=True, **_FALCON),
    "Falcon, in turn": _language(
        "Falcon",
        "FalconDecoderLayer",
        **_FALCON | {"parallel_attn": False, "multi_query": False, "alibi": True},
    ),
    "Falcon, two norms": _language(
        "Falcon",
        "FalconDecoderLayer",
        **_FALCON | {"new_decoder_architecture": True, "num_kv_heads": 1},
    ),
    "Falcon, new with one norm": _language(
        "Falcon",
        "FalconDecoderLayer",
        **_FALCON | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ),
    "BLOOM": _language("Bloom", "BloomBlock", **_NO_PAD),
    "MPT": _language(
        "Mpt",
        "MptBlock",
        **_NO_SIZES | {"d_model": WIDTH, "n_heads": 2, "n_layers": 2, "vocab_size": TOKENS},
        max_seq_len=16,
    ),
    "CLIP, text": _language("CLIPText", "CLIPEncoderLayer", **_NO_PAD),
    "SigLIP, text": _language("SiglipText", "SiglipEncoderLayer", **_NO_PAD),
    "ModernBERT": _language(
        "ModernBert",
        "ModernBertEncoderLayer",
        local_attention=4,
        layer_types=["sliding_attention", "full_attention"],
        norm_bias=True,
        mlp_bias=True,
        **_NO_PAD,
    ),
}


def _padded(side: str) -> dict[str, Tensor]:
    tokens = torch.randint(2, TOKENS, (2, LENGTH))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if side == "right":
        mask[1, 4:] = 0
    elif side == "left":
        mask[1, :2] = 0
    return {"input_ids": tokens, "attention_mask": mask} if side else {"input_ids": tokens}


@pytest.mark.huggingface
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_many_families_are_read_from_their_models_calls(name: str) -> None:
    for implementation, side in (("eager", "right"), ("sdpa", "")):
        model, kind = FAMILIES[name](implementation)
        prepared(model)
        batch = _padded(side)
        layers = seen_layers(model, lambda: model(**batch), layers_of_kind(model, kind))  # noqa: B023
        assert len(layers) == 2
        for seen in layers if implementation == "eager" else layers[1:]:
            assert_same(seen)


@pytest.mark.huggingface
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_on_the_left_is_read(implementation: str) -> None:
    model, kind = FAMILIES["Llama"](implementation)
    prepared(model)
    batch = _padded("left")
    for seen in seen_layers(model, lambda: model(**batch), layers_of_kind(model, kind)):
        assert_same(seen)


FURTHER_KIN = [
    "bert-generation",
    "data2vec-text",
    "ernie",
    "layoutlm",
    "markuplm",
    "rembert",
    "splinter",
    "xlm-roberta",
    "camembert",
    "cwm",
    "eurobert",
    "jais2",
    "seed_oss",
    "dpt",
    "ijepa",
    "yolos",
    "vit_mae",
    "vit_msn",
    "dinov2_with_registers",
    "idefics3_vision",
    "smolvlm_vision",
]


@pytest.mark.huggingface
@pytest.mark.parametrize("model_type", FURTHER_KIN)
def test_further_kin_of_these_families_are_read(model_type: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    from huggingface_models import tiny_config

    config = tiny_config(model_type)
    model = prepared(MODEL_MAPPING[type(config)](config))
    batch: dict[str, Tensor] = _padded("right")
    if hasattr(config, "patch_size"):
        batch = {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    kinds = {type(m).__name__ for m in model.modules()} & {
        name for row in _LAYERS for name in row.classes.split()
    }
    layers = layers_of_kind(model, *kinds)
    seen = seen_layers(model, lambda: model(**batch), layers)
    assert len(seen) == config.num_hidden_layers
    assert_same(seen[-1])


def _vision(name: str, layer: str, **options: Any) -> tuple[nn.Module, str]:
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1} | options
    kept = {key: SIZES[key] for key in list(SIZES)[:4]}
    config = getattr(transformers, f"{name}Config")(**kept, **sizes)
    return getattr(transformers, f"{name}Model")(config), layer


VISION = {
    "ViT": lambda: _vision("ViT", "ViTLayer"),
    "DeiT": lambda: _vision("DeiT", "DeiTLayer"),
    "DINOv2": lambda: _vision("Dinov2", "Dinov2Layer", mlp_ratio=2),
    "DINOv2, gated": lambda: _vision("Dinov2", "Dinov2Layer", mlp_ratio=1, use_swiglu_ffn=True),
    "CLIP": lambda: _vision("CLIPVision", "CLIPEncoderLayer"),
    "SigLIP": lambda: _vision("SiglipVision", "SiglipEncoderLayer"),
}


@pytest.mark.huggingface
@pytest.mark.parametrize("name", VISION)
def test_layers_of_vision_models_are_read(name: str) -> None:
    model, kind = VISION[name]()
    prepared(model)
    images = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    layers = seen_layers(model, lambda: model(pixel_values=images), layers_of_kind(model, kind))
    assert len(layers) == 2
    for seen in layers:
        assert_same(seen)


@pytest.mark.huggingface
@pytest.mark.parametrize("name", ["Bart", "MBart", "Marian", "Pegasus"])
def test_encoder_layers_of_the_kin_of_bart_are_read(name: str) -> None:
    sizes = families.BART_SIZES | ({"vocab_size": 60} if name == "Marian" else {})
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
    encoder = prepared(model).encoder  # type: ignore[union-attr]
    batch = _padded("right")
    for seen in seen_layers(model, lambda: encoder(**batch), list(encoder.layers)):
        assert_same(seen)


@pytest.mark.huggingface
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Bart", "MBart", "Marian", "Pegasus", "Blenderbot", "M2M100"])
def test_decoder_layers_of_the_kin_of_bart_are_read(name: str, implementation: str) -> None:
    sizes = families.BART_SIZES | ({"vocab_size": 60} if name == "Marian" else {})
    config = getattr(transformers, f"{name}Config")(**sizes)
    config._attn_implementation = implementation
    model = prepared(getattr(transformers, f"{name}Model")(config))
    batch = _padded("right")
    tokens = torch.randint(3, 17, (len(batch["input_ids"]), 3))
    layers = list(model.decoder.layers)  # type: ignore[union-attr]
    for options in (batch, {"input_ids": batch["input_ids"]}):  # without a mask too
        run = partial(model, **options, decoder_input_ids=tokens)
        for seen in seen_layers(model, run, layers):
            assert seen.call.memory is not None
            assert_same(seen)


@pytest.mark.huggingface
def test_decoder_layers_of_whisper_bert_and_gpt2_are_read() -> None:
    config = transformers.WhisperConfig(
        **families.BART_SIZES, num_mel_bins=4, max_source_positions=4, max_target_positions=8
    )
    whisper = prepared(transformers.WhisperModel(config))
    sound, tokens = torch.randn(2, 4, 8, dtype=torch.float64), torch.randint(3, 17, (2, 3))
    run = partial(whisper, sound, decoder_input_ids=tokens)
    for seen in seen_layers(whisper, run, list(whisper.decoder.layers)):  # type: ignore[union-attr]
        assert_same(seen)
    bert = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    gpt2 = transformers.GPT2Config(
        n_embd=SIZES["hidden_size"],
        n_head=2,
        n_layer=2,
        vocab_size=TOKENS,
        add_cross_attention=True,
        scale_attn_by_inverse_layer_idx=True,
    )
    memory = torch.randn(2, 5, SIZES["hidden_size"], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    tokens = torch.randint(0, TOKENS, (2, 3))
    for kind, config, path in (
        ("Bert", bert, "encoder.layer"),
        ("GPT2", gpt2, "h"),
    ):
        decoder = prepared(getattr(transformers, f"{kind}Model")(config))
        run = partial(decoder, tokens, encoder_hidden_states=memory, encoder_attention_mask=mask)
        layers = list(decoder.get_submodule(path).children())
        for seen in seen_layers(decoder, run, layers):
            assert seen.call.memory is not None
            assert_same(seen)


@pytest.mark.huggingface
def test_encoder_layers_of_whisper_are_read() -> None:
    config = transformers.WhisperConfig(
        **families.BART_SIZES, num_mel_bins=4, max_source_positions=4, max_target_positions=8
    )
    encoder = prepared(transformers.WhisperModel(config)).encoder  # type: ignore[union-attr]
    sound = torch.randn(2, 4, 8, dtype=torch.float64)
    for seen in seen_layers(encoder, lambda: encoder(sound), list(encoder.layers)):
        assert_same(seen)


@pytest.mark.huggingface
def test_arguments_that_would_change_the_result_are_refused_by_name() -> None:
    model, kind = FAMILIES["BERT"]("sdpa")
    layer = layers_of_kind(prepared(model), kind)[0]
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    for name, value in (
        ("encoder_hidden_states", x),
        ("head_mask", torch.ones(2)),
        ("cu_seq_lens_q", torch.tensor([0, 3])),
    ):
        with pytest.raises(UnmappedModuleError, match=f"{name} .Tensor.: its effect"):
            read_call(layer, (x,), {name: value})
    with pytest.raises(UnmappedModuleError, match=r"attention_mask of \(2, 6\)"):
        read_call(layer, (x, torch.ones(2, LENGTH)), {})
    with pytest.raises(UnmappedModuleError, match=r"attention_mask of .*int64"):
        read_call(layer, (x, torch.ones(2, 1, 1, LENGTH, dtype=torch.long)), {})
    with pytest.raises(UnmappedModuleError, match=r"floating tensor \(samples, tokens, 8\)"):
        read_call(layer, (x[0],), {})
    layer.attention.self.config._attn_implementation = "flex_attention"
    with pytest.raises(UnmappedModuleError, match="attends by flex_attention"):
        read_call(layer, (x,), {})


@pytest.mark.huggingface
def test_a_cache_that_holds_tokens_is_refused() -> None:
    model, kind = FAMILIES["Llama"]("sdpa")
    prepared(model)
    tokens = _padded("")["input_ids"]
    cache = model(tokens, use_cache=True).past_key_values
    with pytest.raises(UnmappedModuleError, match="past_key_values that hold 6 tokens"):
        seen_layers(
            model, lambda: model(tokens, past_key_values=cache), layers_of_kind(model, kind)
        )


@pytest.mark.huggingface
def test_a_layer_called_alone_without_a_mask_attends_as_its_kernel_does() -> None:
    for implementation, causal in (("sdpa", True), ("eager", False)):
        model, kind = FAMILIES["Mistral, window"](implementation)
        layer = layers_of_kind(prepared(model), kind)[0]
        x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
        angle = torch.rand(1, LENGTH, 2, dtype=torch.float64).repeat(1, 1, 2)
        tables = (angle.cos(), angle.sin())
        run = lambda: layer(x, position_embeddings=tables)  # noqa: E731, B023
        (seen,) = seen_layers(layer, run, [layer])
        assert (seen.call.mask is not None) == causal
        assert_same(seen)


@pytest.mark.huggingface
def test_a_known_layer_with_another_forward_inside_is_refused() -> None:
    model, kind = FAMILIES["Llama"]("sdpa")
    layers = layers_of_kind(model.eval(), kind)

    class Attention(type(layers[0].self_attn)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, weights = super().forward(*args, **kwargs)
            return 2 * out, weights

    layers[0].self_attn.__class__ = Attention
    own = layers[1].mlp.forward
    layers[1].mlp.forward = lambda x: 2 * own(x)
    for layer, part in ((layers[0], "self_attn"), (layers[1], "mlp")):
        with pytest.raises(UnmappedModuleError, match=f"{part} .* its library did not write"):
            read_module(layer)


@pytest.mark.huggingface
def test_layers_with_hooks_that_are_not_ours_are_refused() -> None:
    model, kind = FAMILIES["Llama"]("eager")
    layers = layers_of_kind(model.eval(), kind)
    model(torch.zeros(1, 3, dtype=torch.long), output_hidden_states=True, output_attentions=True)
    read_module(layers[0])  # the library's own hooks record outputs, and stay
    for part in ("self_attn", "mlp.down_proj"):
        handle = layers[0].get_submodule(part).register_forward_hook(lambda m, a, out: None)
        with pytest.raises(UnmappedModuleError, match=f"{part} .* forward hook"):
            read_module(layers[0])
        handle.remove()
    layers[0].register_full_backward_hook(lambda *_: None)  # no part of the loss
    read_module(layers[0])


# ---- whole models -------------------------------------------------------------------------------


def _labelled(side: str) -> dict[str, Tensor]:
    batch = _padded(side)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


@pytest.mark.huggingface
@pytest.mark.parametrize(
    "model_type",
    [
        "gptj",
        "gpt_neox",
        "falcon",
        "bloom",
        "mpt",
        "phi",
        "phi3",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "olmo2",
        "granite",
        "cohere",
        "smollm3",
        "starcoder2",
        "modernbert",
        "glm4",
    ],
)
def test_products_of_whole_models_of_these_families_are_those_of_autograd(model_type: str) -> None:
    from huggingface_models import tiny_model

    problem = ca.Problem(prepared(tiny_model(model_type)), None, [_labelled("right")])
    v = torch.randn(problem.size, 1, dtype=torch.float64)
    want = ca.Hessian(problem, engine="autograd") @ v
    got = ca.Hessian(problem, engine="tangent") @ v
    assert float((got - want).norm()) <= TOLERANCE * float(want.norm())


@pytest.mark.huggingface
def test_a_call_that_is_refused_leaves_the_product_to_autograd() -> None:
    from huggingface_models import tiny_model

    problem = ca.Problem(prepared(tiny_model("mpt")), None, [_labelled("left")])
    v = torch.randn(problem.size, dtype=torch.float64)
    got = ca.Hessian(problem) @ v
    torch.testing.assert_close(got, ca.Hessian(problem, engine="autograd") @ v)
    with pytest.raises(UnmappedModuleError, match=r"MptBlock .* nothing but padding"):
        ca.Hessian(problem, engine="tangent") @ v
