"""Roles are what their names say: slices cover every parameter once and compute as named."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import Tensor, nn

from curvatlas import zoo
from curvatlas.anatomy import Anatomy, anatomy_of

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 20}  # fmt: skip
GROUPED = {**SIZES, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
           "vocab_size": 11}  # fmt: skip
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def build(family: str, **options: object) -> nn.Module:
    """A tiny Hugging Face model with random weights, biases and norms included."""
    t = transformers
    torch.manual_seed(0)
    model: nn.Module = {
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=11, n_positions=9, n_embd=12, n_layer=2, n_head=2, **TOKENS)),
        "llama": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**GROUPED, tie_word_embeddings=True, **TOKENS)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**GROUPED, **TOKENS)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**GROUPED, **TOKENS)),
        "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**GROUPED, **TOKENS)),
        "neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(vocab_size=11, **SIZES, **TOKENS)),
        "falcon": lambda: t.FalconForCausalLM(t.FalconConfig(
            vocab_size=11, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_kv_heads=2, new_decoder_architecture=True, bias=True, **TOKENS)),
        "falcon_multi_query": lambda: t.FalconForCausalLM(t.FalconConfig(
            vocab_size=11, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, bias=True,
            **TOKENS)),
        "opt": lambda: t.OPTForCausalLM(t.OPTConfig(
            vocab_size=11, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, ffn_dim=20,
            word_embed_proj_dim=12, max_position_embeddings=9, **TOKENS)),
        "bert": lambda: t.BertForMaskedLM(
            t.BertConfig(vocab_size=11, max_position_embeddings=9, **SIZES, pad_token_id=0)),
        "distilbert": lambda: t.DistilBertForSequenceClassification(t.DistilBertConfig(
            vocab_size=11, dim=12, n_layers=2, n_heads=2, hidden_dim=20, max_position_embeddings=9,
            pad_token_id=0)),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(image_size=8, patch_size=4, num_channels=1, **SIZES)),
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(
            vocab_size=11, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2)),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**GROUPED, num_local_experts=2, **TOKENS)),
        "modernbert": lambda: t.ModernBertForMaskedLM(
            t.ModernBertConfig(vocab_size=11, **SIZES, cls_token_id=0, sep_token_id=0, **TOKENS)),
        "encoder": lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(12, 2, 20, batch_first=True), 2, norm=nn.LayerNorm(12),
            enable_nested_tensor=False),
        "encoder_layer": lambda: nn.TransformerEncoderLayer(12, 2, 20, norm_first=True),
        "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 2, 20), 2),
        "transformer": lambda: nn.Transformer(12, 2, 1, 1, 20, batch_first=True),
        "multihead": lambda: nn.MultiheadAttention(12, 2),
        "multihead_unequal": lambda: nn.MultiheadAttention(12, 2, kdim=5, vdim=7, add_bias_kv=True),
        "zoo_vit": lambda: zoo.reference_vit(n_heads=2, pooling="class_token", norm_first=True),
        "zoo_gpt": lambda: zoo.reference_gpt(
            n_kv_heads=2, activation="swiglu", norm="rms", tied=True),
        "mlp": zoo.MLP,
        "sequential": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        "convolution": lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)),
    }[family]()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
    return model.double().eval()


FAMILIES = ["gpt2", "llama", "mistral", "qwen2", "phi3", "neox", "falcon", "falcon_multi_query",
            "opt", "bert", "distilbert", "vit", "t5", "mixtral", "modernbert", "encoder",
            "encoder_layer", "decoder", "transformer", "multihead", "multihead_unequal", "zoo_vit",
            "zoo_gpt", "mlp", "sequential", "convolution"]  # fmt: skip


def flat_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@functools.cache
def read(family: str) -> tuple[nn.Module, Anatomy]:
    """A model that no test changes, and what its parameters are."""
    model = build(family)
    return model, anatomy_of(model)


# --- covering ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_cover_every_entry_exactly_once(family):
    model, anatomy = read(family)
    positions = torch.cat([piece.indices for piece in anatomy])
    total = sum(p.numel() for p in model.parameters())
    assert anatomy.size == total
    assert torch.equal(positions.sort().values, torch.arange(total))
    assert len(set(anatomy.names)) == len(anatomy)
    assert {piece.sublayer for piece in anatomy} <= {
        "embedding", "attention", "norm", "ffn", "head", "other"
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_representation_of_a_slice_agrees_with_its_parameter(family):
    model, anatomy = read(family)
    flat, parameters = flat_of(model), dict(model.named_parameters())
    for piece in anatomy:
        by_index = flat[piece.indices].reshape(piece.shape)
        assert torch.equal(piece.view(flat), by_index)
        joined = torch.cat([flat[a:b] for a, b in piece.ranges]).reshape(piece.shape)
        assert torch.equal(joined, by_index)
        inside = parameters[piece.parameter].detach().reshape(-1)
        shifted = piece.indices - piece.start + piece.offset
        assert torch.equal(inside[shifted].reshape(piece.shape), by_index)


EXPECTED = {"query", "key", "value", "output", "gamma"}


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("gpt2", {"up", "down", "beta", "query_bias", "token_embedding", "position_embedding"}),
        ("llama", {"up", "gate", "down", "token_embedding"}),
        ("qwen2", {"up", "gate", "down", "query_bias", "head"}),
        ("phi3", {"up", "gate", "down", "head"}),
        ("neox", {"up", "down", "beta", "key_bias", "head"}),
        ("falcon", {"up", "down", "value_bias"}),
        ("opt", {"up", "down", "output_bias", "position_embedding"}),
        ("bert", {"up", "down", "beta", "type_embedding", "position_embedding"}),
        ("distilbert", {"up", "down", "up_bias", "head", "head_bias"}),
        ("vit", {"up", "down", "class_token", "patch_embedding", "patch_embedding_bias", "head"}),
        ("t5", {"up", "down", "cross_query", "cross_output", "relative_position"}),
        ("mixtral", {"up", "gate", "down", "router"}),
        ("modernbert", {"up", "gate", "down"}),
        ("encoder", {"up", "down", "query_bias", "beta"}),
        ("decoder", {"cross_query", "cross_key", "cross_value", "cross_output", "cross_key_bias"}),
        ("zoo_vit", {"up", "down", "class_token", "patch_embedding", "position_embedding"}),
        ("zoo_gpt", {"up", "gate", "down", "token_embedding", "position_embedding"}),
    ],
)
def test_families_show_their_roles_in_every_layer(family, extra):
    _, anatomy = read(family)
    assert set(anatomy.roles) >= EXPECTED | extra
    for layer in anatomy.layers:
        assert {piece.role for piece in anatomy.select(layer=layer)} >= EXPECTED
        assert {f"blocks.{layer}.query", f"blocks.{layer}.norm1.gamma"} <= set(anatomy.names)
    assert not [piece.name for piece in anatomy if piece.sublayer == "other"]


# --- meaning -------------------------------------------------------------------------------------


def captured(model: nn.Module, module: nn.Module, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What goes into and comes out of a module when the model runs."""
    seen: dict[str, Tensor] = {}

    def hook(module, args, kwargs, output):
        seen["x"] = args[0] if args else kwargs["hidden_states"]
        seen["y"] = output[0] if isinstance(output, tuple) else output

    handle = module.register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return seen["x"], seen["y"]


def attention_from_slices(
    anatomy: Anatomy, flat: Tensor, x: Tensor, *, layer: int, causal: bool
) -> Tensor:
    """Attention head by head, from the slices alone."""

    def matrices(role: str) -> list[Tensor]:
        pieces = anatomy.heads(f"blocks.{layer}.{role}")
        return [piece.view(flat).T if piece.transposed else piece.view(flat) for piece in pieces]

    def biases(role: str, like: list[Tensor]) -> list[Tensor]:
        if f"blocks.{layer}.{role}_bias" not in anatomy.names:
            return [torch.zeros(1, dtype=flat.dtype)] * len(like)
        return [piece.view(flat) for piece in anatomy.heads(f"blocks.{layer}.{role}_bias")]

    query, key, value, output = (matrices(r) for r in ("query", "key", "value", "output"))
    query_bias, key_bias, value_bias = (
        biases(r, m) for r, m in (("query", query), ("key", key), ("value", value))
    )
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    result = torch.zeros_like(x)
    assert len(query) == len(output)
    for h in range(len(query)):
        g = h * len(key) // len(query)  # the group's key and value
        q, k, v = x @ query[h].T + query_bias[h], x @ key[g].T + key_bias[g], x @ value[g].T
        logits = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if causal:
            logits = logits.masked_fill(future, -math.inf)
        result = result + logits.softmax(-1) @ (v + value_bias[g]) @ output[h].T
    if f"blocks.{layer}.output_bias" in anatomy.names:
        result = result + anatomy[f"blocks.{layer}.output_bias"][0].view(flat)
    return result


TEXT = torch.tensor([[1, 5, 2, 7, 3], [4, 4, 9, 10, 6]])
# All tokens at position 0: rotary embeddings do nothing, and plain attention is the reference.
FLAT_TEXT = {"input_ids": TEXT, "position_ids": torch.zeros_like(TEXT)}
IMAGES = {"pixel_values": torch.randn(2, 1, 8, 8, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("family", "module", "inputs", "causal"),
    [
        ("gpt2", "transformer.h.1.attn", {"input_ids": TEXT}, True),
        ("llama", "model.layers.1.self_attn", FLAT_TEXT, True),
        ("mistral", "model.layers.1.self_attn", FLAT_TEXT, True),
        ("qwen2", "model.layers.1.self_attn", FLAT_TEXT, True),
        ("phi3", "model.layers.1.self_attn", FLAT_TEXT, True),
        ("neox", "gpt_neox.layers.1.attention", FLAT_TEXT, True),
        ("falcon", "transformer.h.1.self_attention", FLAT_TEXT, True),
        ("falcon_multi_query", "transformer.h.1.self_attention", FLAT_TEXT, True),
        ("opt", "model.decoder.layers.1.self_attn", {"input_ids": TEXT}, True),
        ("distilbert", "distilbert.transformer.layer.1.attention", {"input_ids": TEXT}, False),
        ("vit", "vit.layers.1.attention", IMAGES, False),
        ("encoder", "layers.1.self_attn", {"src": torch.randn(2, 5, 12).double()}, False),
        ("zoo_vit", "blocks.0.attention", {"images": torch.randn(2, 8, 8).double()}, False),
    ],
)
def test_attention_rebuilt_from_head_slices_equals_the_model(family, module, inputs, causal):
    model = build(family)
    anatomy = anatomy_of(model)
    torch.backends.mha.set_fastpath_enabled(False)  # the fast path calls no hooks
    try:
        x, expected = captured(model, model.get_submodule(module), **inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    layer = anatomy.layers[-1]
    rebuilt = attention_from_slices(anatomy, flat_of(model), x, layer=layer, causal=causal)
    # Some implementations compute the softmax or rotary angles in float32.
    torch.testing.assert_close(rebuilt, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "module", "inputs"),
    [
        ("gpt2", "transformer.h.0.mlp", {"input_ids": TEXT}),
        ("llama", "model.layers.0.mlp", FLAT_TEXT),
        ("phi3", "model.layers.0.mlp", FLAT_TEXT),
        ("neox", "gpt_neox.layers.0.mlp", FLAT_TEXT),
        ("modernbert", "model.layers.0.mlp", {"input_ids": TEXT}),
        ("zoo_gpt", "blocks.0.ffn", {"tokens": TEXT}),
    ],
)
def test_feed_forward_rebuilt_from_slices_equals_the_model(family, module, inputs):
    model = build(family)
    anatomy, flat = anatomy_of(model), flat_of(model)
    x, expected = captured(model, model.get_submodule(module), **inputs)

    def linear(role: str, z: Tensor) -> Tensor:
        piece = anatomy[f"blocks.0.{role}"][0]
        matrix = piece.view(flat)
        z = z @ matrix if piece.transposed else z @ matrix.T
        if f"blocks.0.{role}_bias" in anatomy.names:
            z = z + anatomy[f"blocks.0.{role}_bias"][0].view(flat)
        return z

    names = {"gpt2": "gelu_new", "neox": "gelu", "modernbert": "gelu"}
    act = transformers.activations.ACT2FN[names.get(family, "silu")]
    gated = "blocks.0.gate" in anatomy.names
    hidden = act(linear("gate", x)) * linear("up", x) if gated else act(linear("up", x))
    torch.testing.assert_close(linear("down", hidden), expected, rtol=1e-10, atol=1e-10)


class FusedAttention(nn.Module):
    """A hand-written attention with one projection, whose layout its class name does not tell."""

    def __init__(self, layout: str, *, extra_argument: bool = False) -> None:
        super().__init__()
        self.num_heads, self.layout, self.extra_argument = 2, layout, extra_argument
        self.qkv = nn.Linear(12, 36)
        self.proj = nn.Linear(12, 12)

    def split(self, z: Tensor) -> tuple[Tensor, ...]:
        B, L, _ = z.shape
        if self.layout == "per_head":
            return z.reshape(B, L, 2, 18).transpose(1, 2).chunk(3, dim=-1)
        parts = z.reshape(B, L, 3, 2, 6).permute(2, 0, 3, 1, 4).unbind(0)
        order = {"stacked": (0, 1, 2), "key_first": (1, 0, 2), "value_first": (2, 1, 0)}
        return tuple(parts[i] for i in order[self.layout])

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        if self.extra_argument and not rest:
            raise TypeError("needs a mask")
        q, k, v = self.split(self.qkv(x))
        a = (q @ k.transpose(-2, -1) / math.sqrt(6)).softmax(-1)
        return self.proj((a @ v).transpose(1, 2).reshape(x.shape))


class FusedBlock(nn.Module):
    def __init__(self, layout: str, **options: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "attn": FusedAttention(layout, **options),
                "mlp": nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)),
            }) for _ in range(2)
        )  # fmt: skip


@pytest.mark.parametrize("layout", ["stacked", "per_head", "key_first", "value_first"])
def test_fused_layouts_are_found_by_experiment(layout):
    torch.manual_seed(0)
    model = FusedBlock(layout).double()
    anatomy = anatomy_of(model)
    assert not anatomy.notes
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    rebuilt = attention_from_slices(anatomy, flat_of(model), x, layer=1, causal=False)
    torch.testing.assert_close(rebuilt, model.blocks[1]["attn"](x), rtol=1e-12, atol=1e-12)


def test_a_fused_projection_that_cannot_be_tried_stays_in_one_piece_and_says_so():
    anatomy = anatomy_of(FusedBlock("stacked", extra_argument=True))
    assert anatomy["blocks.0.query_key_value"].size == 12 * 36
    assert not {"query", "key", "value"} & set(anatomy.roles)
    assert len(anatomy.notes) == 1
    assert "FusedAttention.qkv.weight stays in one piece" in anatomy.notes[0]
    assert anatomy.notes[0] in str(anatomy)


# --- structure -----------------------------------------------------------------------------------


def test_tied_parameters_count_once_and_answer_to_both_names():
    model = build("gpt2")
    anatomy = anatomy_of(model)
    (token,) = anatomy["lm_head.weight"]
    assert token.name == "embedding.token"
    assert token.parameter == "transformer.wte.weight"
    assert token.tied == ("lm_head.weight",)
    assert "head.weight" not in anatomy.names


def test_a_subset_of_parameters_has_its_own_positions_but_the_same_names():
    model = build("gpt2")
    chosen = ["transformer.h.1.attn.c_attn.weight", "transformer.h.1.ln_2.bias"]
    anatomy = anatomy_of(model, chosen)
    assert anatomy.names == (
        "blocks.1.query", "blocks.1.key", "blocks.1.value", "blocks.1.norm2.beta"
    )  # fmt: skip
    assert anatomy.size == 12 * 36 + 12
    assert anatomy["blocks.1.norm2.beta"].indices.tolist() == list(range(432, 444))
    assert anatomy["blocks.1.key"].indices[:13].tolist() == [*range(12, 24), 48]
    with pytest.raises(KeyError, match="no parameter"):
        anatomy_of(model, ["transformer.h.9.weight"])


def test_frozen_parameters_are_left_out_by_default():
    model = build("vit")
    for parameter in model.vit.layers[0].parameters():
        parameter.requires_grad_(False)
    anatomy = anatomy_of(model)
    assert anatomy.layers == (1,)
    assert anatomy.size == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_unknown_models_fall_back_to_their_parameter_names():
    model = build("sequential")
    anatomy = anatomy_of(model)
    assert anatomy.names == tuple(name for name, _ in model.named_parameters())
    assert set(anatomy.sublayers) == {"other"}


def test_norms_of_unknown_models_are_still_norms():
    anatomy = anatomy_of(build("convolution"))
    assert anatomy["1.weight"][0].role == "gamma"
    assert anatomy["1.bias"][0].role == "beta"


def test_layers_of_encoder_and_decoder_are_numbered_through():
    anatomy = anatomy_of(build("transformer"))
    assert anatomy.layers == (0, 1)
    (query,) = anatomy["blocks.1.query"]
    assert query.parameter == "decoder.layers.0.self_attn.in_proj_weight"
    (cross,) = anatomy["blocks.1.cross_query"]
    assert cross.parameter == "decoder.layers.0.multihead_attn.in_proj_weight"


def test_adapters_carry_the_role_of_what_they_adapt():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": nn.ModuleDict({
        "q_proj": nn.ModuleDict({
            "base_layer": nn.Linear(4, 4),
            "lora_A": nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)}),
            "lora_B": nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)}),
        }),
        "k_proj": nn.Linear(4, 4),
    })})])})  # fmt: skip
    names = anatomy_of(model).names
    assert {"blocks.0.query", "blocks.0.query_lora_a", "blocks.0.query_lora_b"} <= set(names)


def test_names_of_older_vision_transformers_are_read_too():
    attention = nn.ModuleDict({n: nn.Linear(4, 4) for n in ("query", "key", "value")})
    layer = nn.ModuleDict({
        "attention": nn.ModuleDict({
            "attention": attention, "output": nn.ModuleDict({"dense": nn.Linear(4, 4)})
        }),
        "intermediate": nn.ModuleDict({"dense": nn.Linear(4, 6)}),
        "output": nn.ModuleDict({"dense": nn.Linear(6, 4)}),
        "layernorm_before": nn.LayerNorm(4),
        "layernorm_after": nn.LayerNorm(4),
    })  # fmt: skip
    encoder = nn.ModuleDict({"layer": nn.ModuleList([layer])})
    anatomy = anatomy_of(nn.ModuleDict({"encoder": encoder}))
    found = {piece.parameter: piece.name for piece in anatomy}
    assert found["encoder.layer.0.attention.attention.key.weight"] == "blocks.0.key"
    assert found["encoder.layer.0.attention.output.dense.weight"] == "blocks.0.output"
    assert found["encoder.layer.0.intermediate.dense.weight"] == "blocks.0.up"
    assert found["encoder.layer.0.output.dense.bias"] == "blocks.0.down_bias"
    assert found["encoder.layer.0.layernorm_after.weight"] == "blocks.0.norm2.gamma"


def test_one_module_a_head_gives_numbered_slices_that_select_together():
    head = nn.ModuleDict({n: nn.Linear(8, 4, bias=False) for n in ("key", "query", "value")})
    sa = nn.ModuleDict(
        {"heads": nn.ModuleList([head, copy.deepcopy(head)]), "proj": nn.Linear(8, 8)}
    )
    ffwd = nn.ModuleDict({"net": nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))})
    block = nn.ModuleDict({"sa": sa, "ffwd": ffwd, "ln1": nn.LayerNorm(8)})
    anatomy = anatomy_of(nn.ModuleDict({"blocks": nn.ModuleList([block])}))
    assert anatomy["blocks.0.key"].names == ("blocks.0.key.0", "blocks.0.key.1")
    assert {"blocks.0.output", "blocks.0.up", "blocks.0.down", "blocks.0.norm1.gamma"} <= set(
        anatomy.names
    )


def test_a_large_model_costs_no_memory_for_its_positions():
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    anatomy = anatomy_of(model)
    assert anatomy.size == 134_515_008
    assert len(anatomy.heads("blocks.29.query")) == 9
    assert len(anatomy.heads("blocks.29.key")) == 3


# --- asking --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anatomy() -> Anatomy:
    return anatomy_of(build("gpt2"))


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("blocks.0.query", ["blocks.0.query"]),
        ("blocks.*.value", ["blocks.0.value", "blocks.1.value"]),
        ("blocks.1.norm2", ["blocks.1.norm2.gamma", "blocks.1.norm2.beta"]),
        ("embedding", ["embedding.token", "embedding.position"]),
        ("transformer.wpe.weight", ["embedding.position"]),
        ("transformer.h.0.attn.c_attn.bias",
         ["blocks.0.query_bias", "blocks.0.key_bias", "blocks.0.value_bias"]),
        ("transformer.ln_f", ["final_norm.gamma", "final_norm.beta"]),
        ("*.wp?.weight", ["embedding.position"]),
        (["blocks.1.up", "blocks.0.up", "blocks.*.up"], ["blocks.1.up", "blocks.0.up"]),
    ],
)  # fmt: skip
def test_selectors_find_names_parameters_beginnings_and_globs(anatomy, selector, names):
    assert list(anatomy[selector].names) == names


def test_keywords_filter_by_role_layer_and_sublayer(anatomy):
    assert anatomy.select(role="value", layer=1).names == ("blocks.1.value",)
    assert len(anatomy.select(layer=0)) == len(anatomy["blocks.0"]) == 16
    assert len(anatomy.select(sublayer="attention", layer=[0, 1])) == 16
    assert anatomy.select(role="key*", layer=0).names == ("blocks.0.key", "blocks.0.key_bias")
    assert anatomy.select("blocks.0", role=["up", "down"]).size == 2 * 12 * 48
    assert len(anatomy.select()) == len(anatomy)
    assert anatomy.sizes()["query"] == 2 * 144
    assert sum(anatomy.sizes().values()) == anatomy.size


def test_selections_keep_the_order_asked_for(anatomy):
    chosen = anatomy.select("blocks.1.key", "blocks.0.query")
    both = torch.cat([anatomy["blocks.1.key"].indices, anatomy["blocks.0.query"].indices])
    assert torch.equal(chosen.indices, both)
    assert anatomy.select(chosen).names == chosen.names
    assert sum(b - a for a, b in chosen.ranges) == chosen.size == 288


def test_unknown_selectors_name_what_is_near(anatomy):
    with pytest.raises(KeyError, match=r"blocks\.0\.query"):
        anatomy["blocks.0.qery"]
    with pytest.raises(KeyError, match="value"):
        anatomy.select(role="valeu")
    with pytest.raises(KeyError, match=r"layers are \[0, 1\]"):
        anatomy.select(layer=2)
    with pytest.raises(KeyError, match="no slice has all"):
        anatomy.select("blocks.0", layer=1)
    with pytest.raises(ValueError, match="does not divide into heads"):
        anatomy.heads("blocks.0.up")


@pytest.mark.parametrize("family", ["gpt2", "llama", "phi3", "neox", "falcon", "bert", "encoder"])
def test_heads_divide_their_slice_exactly(family):
    anatomy = anatomy_of(build(family))
    for piece in anatomy.select(role=["query", "key", "value", "output"]):
        heads = anatomy.heads(piece)
        assert len(heads) > 1
        assert torch.equal(heads.indices.sort().values, piece.indices.sort().values)


def test_the_table_lists_every_slice(anatomy):
    text = str(anatomy)
    assert all(name in text for name in anatomy.names)
    assert "36 slices, 4,032 entries" in text
