"""Layers with adapters: LoRA in every form that is read, other methods refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvatlas.engines.tangent.adapters import effective_parameters
from curvatlas.engines.tangent.reading import UnmappedModuleError, map_module, read_module
from layer_oracles import differences, layers_of_kind, prepared, seen_layers

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.huggingface,
    pytest.mark.filterwarnings("ignore:.*lora_bias=True"),
    pytest.mark.filterwarnings("ignore:.*[mM]erg"),
]
FAMILIES = {
    "GPT2": ("GPT2Block", ["c_attn", "c_proj", "c_fc"]),
    "Llama": ("LlamaDecoderLayer", ["q_proj", "v_proj", "down_proj", "gate_proj"]),
    "GPTNeoX": ("GPTNeoXLayer", ["query_key_value", "dense_4h_to_h"]),
    "Phi3": ("Phi3DecoderLayer", ["qkv_proj", "gate_up_proj", "o_proj"]),
    "Bert": ("BertLayer", ["query", "key", "output.dense"]),
}


@pytest.fixture(autouse=True)
def _twice_differentiable_attention() -> Iterator[None]:
    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _model(family: str) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=12,
        vocab_size=11,
        max_position_embeddings=16,
        pad_token_id=0,
        **({"n_inner": 12} if family == "GPT2" else {}),
    )
    model: nn.Module = getattr(transformers, f"{family}Model")(config)
    return model


def _adapted(family: str, **options: Any) -> nn.Module:
    config = peft.LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=FAMILIES[family][1],
        fan_in_fan_out=family == "GPT2",
        **options,
    )
    return peft.get_peft_model(_model(family), config)


def assert_same(model: nn.Module, family: str) -> list[nn.Module]:
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # the base is frozen
    tokens = torch.randint(0, 11, (2, 5))
    layers = layers_of_kind(model, FAMILIES[family][0])
    (seen,) = seen_layers(model, lambda: model(input_ids=tokens), layers)
    for part, error in differences(seen).items():
        assert error <= 1e-11, (part, error)
    return layers


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_lora_equal_double_backward_in_all_their_parameters(family: str) -> None:
    (layer,) = assert_same(prepared(_adapted(family)), family)
    terms = [weight.terms for weight in effective_parameters(layer).values()]
    assert sum(map(bool, terms)) >= len(FAMILIES[family][1])


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_biases_scales_and_several_adapters_at_once_are_read(family: str) -> None:
    model = _adapted(family, lora_bias=True, use_rslora=True, lora_dropout=0.1)
    other = peft.LoraConfig(
        r=3, target_modules=FAMILIES[family][1][:1], fan_in_fan_out=family == "GPT2"
    )
    model.add_adapter("other", other)
    model.base_model.set_adapter(["default", "other"])
    (layer,) = assert_same(prepared(model), family)
    assert max(len(weight.terms) for weight in effective_parameters(layer).values()) == 2


@pytest.mark.parametrize("state", ["merged", "off", "inactive"])
def test_adapters_that_do_not_act_have_no_term(state: str) -> None:
    model = prepared(_adapted("Llama"))
    if state == "merged":
        model.merge_adapter()
    elif state == "off":
        model.base_model.disable_adapter_layers()
    else:
        model.base_model.set_adapter([])
    (layer,) = assert_same(model, "Llama")
    assert not any(weight.terms for weight in effective_parameters(layer).values())


def test_other_methods_are_refused_by_name() -> None:
    targets = ["q_proj", "down_proj"]
    for config, reason in (
        (peft.LoraConfig(target_modules=targets, use_dora=True), "DoraLinearVariant"),
        (peft.LoHaConfig(target_modules=targets), "peft.tuners.loha"),
        (peft.IA3Config(target_modules=targets, feedforward_modules=targets[1:]), "tuners.ia3"),
    ):
        model = peft.get_peft_model(_model("Llama"), config).eval()
        (layer,) = layers_of_kind(model, "LlamaDecoderLayer")
        with pytest.raises(UnmappedModuleError, match=reason) as caught:
            read_module(layer)
        assert "q_proj" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_dense_form_of_an_adapted_layer_is_refused() -> None:
    (layer,) = layers_of_kind(_adapted("GPT2").eval(), "GPT2Block")
    with pytest.raises(UnmappedModuleError, match="adapted"):
        map_module(layer)
