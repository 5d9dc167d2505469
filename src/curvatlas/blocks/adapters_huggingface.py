"""Hugging Face layers of GPT-2, BERT, ViT and Llama, read as blocks.

Layers are recognised by class name, so that transformers is never imported here. Both the current
and the older attribute names of ViT are understood.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from curvatlas.blocks.adapters import (
    Pick,
    Picked,
    UnmappedModuleError,
    activation_name,
    shared_norm,
    take,
)
from curvatlas.blocks.structure import BlockSpec

_QKV = ("query", "key", "value")


def read_gpt2(module: Any) -> tuple[BlockSpec, Pick]:
    """``GPT2Block``: pre-norm, causal, fused ``Conv1D`` projections stored (in, out)."""
    _refuse_cross_attention(module)
    attention, config = module.attn, module.attn.config
    norm, eps = shared_norm(module.ln_1, module.ln_2)
    head_size = attention.embed_dim // attention.num_heads
    scale = head_size**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= float(attention.layer_idx + 1)
    spec = BlockSpec(
        d_model=attention.embed_dim,
        n_heads=attention.num_heads,
        d_ff=module.mlp.c_fc.weight.shape[1],
        norm=norm,
        eps=eps,
        norm_first=True,
        activation=activation_name(module.mlp.act),
        causal=True,
        scale=scale,
    )

    def pick(values: Mapping[str, Tensor]) -> Picked:
        picked: Picked = {}
        fused = values["attn.c_attn.weight"].T.chunk(3)
        biases = values["attn.c_attn.bias"].chunk(3)
        for name, weight, bias in zip(_QKV, fused, biases, strict=True):
            picked |= {f"{name}_weight": weight, f"{name}_bias": bias}
        for ours, theirs in (("output", "attn"), ("down", "mlp")):
            picked[f"{ours}_weight"] = values[f"{theirs}.c_proj.weight"].T
            picked[f"{ours}_bias"] = values[f"{theirs}.c_proj.bias"]
        picked |= {"up_weight": values["mlp.c_fc.weight"].T, "up_bias": values["mlp.c_fc.bias"]}
        return picked | take(values, "norm1", "ln_1") | take(values, "norm2", "ln_2")

    return spec, pick


def read_bert(module: Any) -> tuple[BlockSpec, Pick]:
    """``BertLayer``: post-norm, bidirectional unless it is a decoder."""
    _refuse_cross_attention(module)
    inner = module.attention.self
    kind = getattr(inner, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise UnmappedModuleError(
            f"BERT with {kind} positions adds learned terms to the logits: not in the closed form."
        )
    norm, eps = shared_norm(module.attention.output.LayerNorm, module.output.LayerNorm)
    spec = BlockSpec(
        d_model=inner.query.in_features,
        n_heads=inner.num_attention_heads,
        d_k=inner.attention_head_size,
        d_v=inner.attention_head_size,
        d_ff=module.intermediate.dense.out_features,
        norm=norm,
        eps=eps,
        activation=activation_name(module.intermediate.intermediate_act_fn),
        causal=bool(getattr(module, "is_decoder", False)),
    )

    def pick(values: Mapping[str, Tensor]) -> Picked:
        picked: Picked = {}
        for name in _QKV:
            picked |= take(values, name, f"attention.self.{name}")
        return {
            **picked,
            **take(values, "output", "attention.output.dense"),
            **take(values, "up", "intermediate.dense"),
            **take(values, "down", "output.dense"),
            **take(values, "norm1", "attention.output.LayerNorm"),
            **take(values, "norm2", "output.LayerNorm"),
        }

    return spec, pick


def read_vit(module: Any) -> tuple[BlockSpec, Pick]:
    """``ViTLayer``: pre-norm, bidirectional."""
    norm, eps = shared_norm(module.layernorm_before, module.layernorm_after)
    older = hasattr(module.attention, "attention")
    if older:
        inner = module.attention.attention
        query, heads = inner.query, inner.num_attention_heads
        up, activation = module.intermediate.dense, module.intermediate.intermediate_act_fn
        paths = {name: f"attention.attention.{name}" for name in _QKV}
        paths |= {"output": "attention.output.dense"}
        paths |= {"up": "intermediate.dense", "down": "output.dense"}
    else:
        query, heads = module.attention.q_proj, module.attention.num_attention_heads
        up, activation = module.mlp.fc1, module.mlp.activation_fn
        paths = {name: f"attention.{name[0]}_proj" for name in _QKV}
        paths |= {"output": "attention.o_proj", "up": "mlp.fc1", "down": "mlp.fc2"}
    spec = BlockSpec(
        d_model=query.in_features,
        n_heads=heads,
        d_k=query.out_features // heads,
        d_v=query.out_features // heads,
        d_ff=up.out_features,
        norm=norm,
        eps=eps,
        norm_first=True,
        activation=activation_name(activation),
    )
    paths |= {"norm1": "layernorm_before", "norm2": "layernorm_after"}
    return spec, lambda values: _pick_paths(values, paths)


def read_llama(module: Any) -> tuple[BlockSpec, Pick]:
    """``LlamaDecoderLayer`` and its twins: pre-RMSNorm, SwiGLU, RoPE, grouped queries, causal."""
    attention, config = module.self_attn, module.self_attn.config
    window = getattr(attention, "sliding_window", None) or getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        raise UnmappedModuleError(
            f"{type(module).__name__} attends within a sliding window of {window}: pass the window "
            "as a mask to a layer without one."
        )
    norm, eps = shared_norm(module.input_layernorm, module.post_attention_layernorm)
    size = int(attention.head_dim)
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    spec = BlockSpec(
        d_model=attention.q_proj.in_features,
        n_heads=heads,
        n_kv_heads=shared,
        d_k=size,
        d_v=size,
        d_ff=module.mlp.up_proj.out_features,
        norm=norm,
        eps=eps,
        norm_first=True,
        activation=activation_name(module.mlp.act_fn),
        gated=True,
        causal=True,
        rope_base=_rope_base(config),
    )
    paths = {name: f"self_attn.{name[0]}_proj" for name in (*_QKV, "output")}
    paths |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    paths |= {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    return spec, lambda values: _pick_paths(values, paths)


def _pick_paths(values: Mapping[str, Tensor], paths: Mapping[str, str]) -> Picked:
    picked: Picked = {}
    for ours, theirs in paths.items():
        picked |= take(values, ours, theirs)
    return picked


def _rope_base(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:  # before transformers 5
        scaling = getattr(config, "rope_scaling", None) or {}
        parameters = {"rope_theta": config.rope_theta, **scaling}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", 1.0) or 1.0
    if kind != "default" or partial != 1.0:
        raise UnmappedModuleError(
            f"rotary positions of type {kind!r} (partial factor {partial:g}) are not in the closed "
            "form: only the default type over the whole head is."
        )
    return float(parameters["rope_theta"])


def _refuse_cross_attention(module: Any) -> None:
    if hasattr(module, "crossattention"):
        raise UnmappedModuleError(
            f"{type(module).__name__} has cross attention: the closed form is for self-attention."
        )


def _is_named(*names: str) -> Callable[[nn.Module], bool]:
    return lambda module: (
        type(module).__name__ in names and type(module).__module__.startswith("transformers.")
    )


HUGGING_FACE: tuple[
    tuple[Callable[[nn.Module], bool], Callable[[Any], tuple[BlockSpec, Pick]]], ...
] = (
    (_is_named("GPT2Block"), read_gpt2),
    (_is_named("BertLayer"), read_bert),
    (_is_named("ViTLayer"), read_vit),
    (_is_named("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"), read_llama),
)
