"""Whole models read as stacks: their blocks, final norm and head.

Embeddings stay outside: the stack's input is what enters the first block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.engines.tangent.head import Pooling, Readout
from curvatlas.engines.tangent.reading import (
    FlatOrder,
    Pick,
    Picked,
    UnmappedModuleError,
    activation_name,
    flat_numbers,
    map_norm,
    read_module,
    refuse_dropout,
    shared_norm,
    take,
)
from curvatlas.engines.tangent.structure import BlockSpec

# -------------------------------------------------------------------------------------------------
# PyTorch's own layers and the zoo's, read as blocks.
# -------------------------------------------------------------------------------------------------


_IN_PROJECTIONS = ("query", "key", "value")


def _same_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    if not isinstance(module, kind):
        return False
    if type(module).forward is not kind.forward:
        raise UnmappedModuleError(
            f"{type(module).__name__} overrides the forward of {kind.__name__}: "
            "its derivatives are not those of the layer it extends."
        )
    return True


def read_attention(module: Any) -> tuple[BlockSpec, Pick]:
    """``nn.MultiheadAttention`` as the bare attention layer Z = Att(X)."""
    _refuse_attention_extras(module)
    spec = BlockSpec(
        d_model=module.embed_dim,
        n_heads=module.num_heads,
        norm="none",
        residual=False,
    )
    return spec, lambda values: _pick_attention(values, "")


def read_encoder_layer(module: Any) -> tuple[BlockSpec, Pick]:
    """``nn.TransformerEncoderLayer``, both norm orders, any activation the closed form knows."""
    _refuse_attention_extras(module.self_attn)
    norm, eps = shared_norm(module.norm1, module.norm2)
    spec = BlockSpec(
        d_model=module.self_attn.embed_dim,
        n_heads=module.self_attn.num_heads,
        d_ff=module.linear1.out_features,
        norm=norm,
        eps=eps,
        norm_first=bool(module.norm_first),
        activation=activation_name(module.activation),
    )

    def pick(values: Mapping[str, Tensor]) -> Picked:
        return {
            **_pick_attention(values, "self_attn."),
            **take(values, "up", "linear1"),
            **take(values, "down", "linear2"),
            **take(values, "norm1", "norm1"),
            **take(values, "norm2", "norm2"),
        }

    return spec, pick


def read_zoo_block(module: Any) -> tuple[BlockSpec, Pick]:
    """A block of ``curvatlas.zoo``."""
    norm, eps = shared_norm(module.norm1, module.norm2)
    attention, feed_forward = module.attention, module.ffn
    spec = _zoo_spec(
        attention,
        d_ff=feed_forward.up.out_features,
        norm=norm,
        eps=eps,
        norm_first=bool(module.norm_first),
        activation=activation_name(feed_forward._function),
        gated=bool(feed_forward.gated),
    )

    def pick(values: Mapping[str, Tensor]) -> Picked:
        return {
            **_pick_zoo_attention(values, "attention."),
            **take(values, "gate", "ffn.gate"),
            **take(values, "up", "ffn.up"),
            **take(values, "down", "ffn.down"),
            **take(values, "norm1", "norm1"),
            **take(values, "norm2", "norm2"),
        }

    return spec, pick


def read_zoo_attention(module: Any) -> tuple[BlockSpec, Pick]:
    """The zoo's attention as the bare attention layer."""
    spec = _zoo_spec(module, norm="none", residual=False)
    return spec, lambda values: _pick_zoo_attention(values, "")


def _zoo_spec(attention: Any, **options: Any) -> BlockSpec:
    return BlockSpec(
        d_model=attention.query.in_features,
        n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads,
        d_k=attention.head_size,
        d_v=attention.head_size,
        causal=bool(attention.causal),
        softmax=bool(attention.softmax),
        rope_base=attention.rope_base,
        **options,
    )


def _pick_zoo_attention(values: Mapping[str, Tensor], prefix: str) -> Picked:
    names = ("query", "key", "value", "output")
    picked: Picked = {}
    for name in names:
        picked |= take(values, name, prefix + name)
    return picked


def _pick_attention(values: Mapping[str, Tensor], prefix: str) -> Picked:
    """[Q; K; V] stacked in ``in_proj``, heads in consecutive rows."""
    fused = values[f"{prefix}in_proj_weight"].chunk(3)
    picked = {f"{name}_weight": part for name, part in zip(_IN_PROJECTIONS, fused, strict=True)}
    bias = values.get(f"{prefix}in_proj_bias")
    if bias is not None:
        parts = zip(_IN_PROJECTIONS, bias.chunk(3), strict=True)
        picked |= {f"{name}_bias": part for name, part in parts}
    return picked | take(values, "output", f"{prefix}out_proj")


def _refuse_attention_extras(module: Any) -> None:
    if not module._qkv_same_embed_dim:
        raise UnmappedModuleError(
            f"MultiheadAttention with kdim={module.kdim}, vdim={module.vdim} is cross attention: "
            "the closed form is for self-attention."
        )
    if module.bias_k is not None or module.bias_v is not None:
        raise UnmappedModuleError("MultiheadAttention with add_bias_kv attends to an extra token.")
    if module.add_zero_attn:
        raise UnmappedModuleError(
            "MultiheadAttention with add_zero_attn attends to an extra token."
        )


def _is_zoo(name: str) -> Callable[[nn.Module], bool]:
    # By name: the zoo is a client of nothing here, and nothing here should import it.
    return lambda module: (
        type(module).__name__ == name and type(module).__module__.startswith("curvatlas.zoo")
    )


TORCH: tuple[tuple[Callable[[nn.Module], bool], Callable[[Any], tuple[BlockSpec, Pick]]], ...] = (
    (lambda module: _same_forward(module, nn.MultiheadAttention), read_attention),
    (lambda module: _same_forward(module, nn.TransformerEncoderLayer), read_encoder_layer),
    (_is_zoo("Block"), read_zoo_block),
    (_is_zoo("Attention"), read_zoo_attention),
)


# -------------------------------------------------------------------------------------------------
# Hugging Face layers read as blocks: GPT-2, GPT-Neo, OPT, BERT's kin, ViT, BART, Llama's kin.
#
# Layers are recognised by class name, so that transformers is never imported here. Both the
# current
# and the older attribute names of ViT are understood.
# -------------------------------------------------------------------------------------------------


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


def read_gpt_neo(module: Any) -> tuple[BlockSpec, Pick]:
    """``GPTNeoBlock``: pre-norm, causal, logits without a scale, every other layer in a window."""
    inner = module.attn.attention
    paths = {name: f"attn.attention.{name[0]}_proj" for name in _QKV}
    paths |= {"output": "attn.attention.out_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    paths |= {"norm1": "ln_1", "norm2": "ln_2"}
    local = inner.attention_type == "local"
    return _plain(
        module,
        paths,
        heads=inner.num_heads,
        activation=module.mlp.act,
        norm_first=True,
        causal=True,
        window=int(inner.config.window_size) if local else None,
        scale=1.0,
    )


def read_bert(module: Any) -> tuple[BlockSpec, Pick]:
    """``BertLayer`` and its twins: post-norm, bidirectional unless it is a decoder."""
    _refuse_cross_attention(module)
    inner = module.attention.self
    kind = getattr(inner, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise UnmappedModuleError(
            f"BERT with {kind} positions adds learned terms to the logits: not in the closed form."
        )
    paths = {name: f"attention.self.{name}" for name in _QKV}
    paths |= {"output": "attention.output.dense", "norm1": "attention.output.LayerNorm"}
    paths |= {"up": "intermediate.dense", "down": "output.dense", "norm2": "output.LayerNorm"}
    return _plain(
        module,
        paths,
        heads=inner.num_attention_heads,
        activation=module.intermediate.intermediate_act_fn,
        causal=bool(getattr(module, "is_decoder", False)),
    )


def read_distilbert(module: Any) -> tuple[BlockSpec, Pick]:
    """DistilBERT's ``TransformerBlock``: post-norm, bidirectional."""
    paths = {name: f"attention.{name[0]}_lin" for name in _QKV}
    paths |= {"output": "attention.out_lin", "norm1": "sa_layer_norm"}
    paths |= {"up": "ffn.lin1", "down": "ffn.lin2", "norm2": "output_layer_norm"}
    return _plain(module, paths, heads=module.attention.n_heads, activation=module.ffn.activation)


def read_albert(module: Any) -> tuple[BlockSpec, Pick]:
    """``AlbertLayer``: post-norm, bidirectional; the same weights may serve several depths."""
    paths = {name: f"attention.{name}" for name in _QKV}
    paths |= {"output": "attention.dense", "norm1": "attention.LayerNorm"}
    paths |= {"up": "ffn", "down": "ffn_output", "norm2": "full_layer_layer_norm"}
    heads = module.attention.num_attention_heads
    return _plain(module, paths, heads=heads, activation=module.activation)


def read_bart(module: Any) -> tuple[BlockSpec, Pick]:
    """OPT's decoder layers and the encoder layers of BART's kin, pre- or post-norm."""
    name = type(module).__name__
    paths = {name: f"self_attn.{name[0]}_proj" for name in _QKV}
    paths |= {"output": "self_attn.out_proj", "norm1": "self_attn_layer_norm"}
    paths |= {"up": "fc1", "down": "fc2", "norm2": "final_layer_norm"}
    first = name in ("MBartEncoderLayer", "PegasusEncoderLayer", "WhisperEncoderLayer")
    return _plain(
        module,
        paths,
        heads=module.self_attn.num_heads,
        activation=module.activation_fn,
        norm_first=bool(getattr(module, "do_layer_norm_before", first)),
        causal=name == "OPTDecoderLayer",
    )


def read_vit(module: Any) -> tuple[BlockSpec, Pick]:
    """``ViTLayer`` and its twins: pre-norm, bidirectional."""
    paths = {"norm1": "layernorm_before", "norm2": "layernorm_after"}
    if hasattr(module.attention, "attention"):  # before transformers 5
        heads = module.attention.attention.num_attention_heads
        activation = module.intermediate.intermediate_act_fn
        paths |= {name: f"attention.attention.{name}" for name in _QKV}
        paths |= {"output": "attention.output.dense"}
        paths |= {"up": "intermediate.dense", "down": "output.dense"}
    else:
        heads, activation = module.attention.num_attention_heads, module.mlp.activation_fn
        paths |= {name: f"attention.{name[0]}_proj" for name in _QKV}
        paths |= {"output": "attention.o_proj", "up": "mlp.fc1", "down": "mlp.fc2"}
    return _plain(module, paths, heads=heads, activation=activation, norm_first=True)


def read_llama(module: Any) -> tuple[BlockSpec, Pick]:
    """``LlamaDecoderLayer`` and its twins: pre-norm, gated, RoPE, grouped queries, causal."""
    attention, config = module.self_attn, module.self_attn.config
    if getattr(config, "clip_qkv", None) is not None:
        raise UnmappedModuleError(
            f"{type(module).__name__} clips queries, keys and values at {config.clip_qkv:g}: not "
            "in the closed form."
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
        window=_window(attention),
        rope_base=_rope_base(config),
    )
    paths = {name: f"self_attn.{name[0]}_proj" for name in (*_QKV, "output")}
    paths |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    paths |= {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    return spec, lambda values: _pick_paths(values, paths)


def _plain(
    module: nn.Module,
    paths: Mapping[str, str],
    *,
    heads: int,
    activation: Callable[[Tensor], Tensor],
    norm_first: bool = False,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[BlockSpec, Pick]:
    """A block of linear layers and two norms, each at its path within the layer."""
    query: Any = module.get_submodule(paths["query"])
    up: Any = module.get_submodule(paths["up"])
    norms = (module.get_submodule(paths[name]) for name in ("norm1", "norm2"))
    norm, eps = shared_norm(*norms)
    spec = BlockSpec(
        d_model=query.in_features,
        n_heads=heads,
        d_k=query.out_features // heads,
        d_v=query.out_features // heads,
        d_ff=up.out_features,
        norm=norm,
        eps=eps,
        norm_first=norm_first,
        activation=activation_name(activation),
        causal=causal,
        window=window,
        scale=scale,
    )
    return spec, lambda values: _pick_paths(values, paths)


def _pick_paths(values: Mapping[str, Tensor], paths: Mapping[str, str]) -> Picked:
    picked: Picked = {}
    for ours, theirs in paths.items():
        picked |= take(values, ours, theirs)
    return picked


def _window(attention: Any) -> int | None:
    """How many keys a query sees: the layer's own word, else the model's."""
    config = attention.config
    size = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return int(size) if size and getattr(config, "use_sliding_window", True) else None


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


def _is_named(*names: str, within: str = "") -> Callable[[nn.Module], bool]:
    home = f"transformers.{within}"
    return lambda module: (
        type(module).__name__ in names and type(module).__module__.startswith(home)
    )


BERT = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra")
_BART = ("OPTDecoder", "BartEncoder", "MarianEncoder", "MBartEncoder", "PegasusEncoder")
_VIT = ("ViT", "DeiT", "ViTMAE", "ViTMSN")
LLAMA = ("Llama", "Mistral", "Qwen2", "Olmo")

HUGGING_FACE: tuple[
    tuple[Callable[[nn.Module], bool], Callable[[Any], tuple[BlockSpec, Pick]]], ...
] = (
    (_is_named("GPT2Block"), read_gpt2),
    (_is_named("GPTNeoBlock"), read_gpt_neo),
    (_is_named(*(f"{name}Layer" for name in BERT)), read_bert),
    (_is_named("TransformerBlock", within="models.distilbert"), read_distilbert),
    (_is_named("AlbertLayer"), read_albert),
    (_is_named(*(f"{name}Layer" for name in (*_BART, "WhisperEncoder"))), read_bart),
    (_is_named(*(f"{name}Layer" for name in _VIT)), read_vit),
    (_is_named(*(f"{name}DecoderLayer" for name in LLAMA)), read_llama),
)

_PARALLEL = "runs attention and feed-forward side by side on the same input"
_RELATIVE = "adds learned terms of the distance to the logits"
_AGAINST = {
    "PhiDecoderLayer": _PARALLEL,
    "GPTJBlock": _PARALLEL,
    "GPTNeoXLayer": "rotates a part of each head, mostly with parallel sublayers",
    "FalconDecoderLayer": _PARALLEL,
    "BloomBlock": "adds a bias by distance (ALiBi) to the logits",
    "T5Block": _RELATIVE,
    "DebertaV2Layer": _RELATIVE,
    "GemmaDecoderLayer": "scales its norms by 1 + weight",
    "Gemma2DecoderLayer": "has norms on both sides of every sublayer",
    "Qwen3DecoderLayer": "normalises queries and keys",
    "MixtralDecoderLayer": "sends tokens to experts",
    "Dinov2Layer": "scales its sublayers' outputs by learned gains",
}


def reason_against(module: nn.Module) -> str | None:
    """Why a well-known layer is outside the closed forms, or None."""
    if not type(module).__module__.startswith("transformers."):
        return None
    return _AGAINST.get(type(module).__name__)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Where a model keeps its blocks, final norm and head."""

    blocks: str
    norm: str | None = None
    head: str | None = None
    pooling: Pooling | None = None


# class name → layouts to try, the current library's first
_LAYOUTS: dict[str, tuple[_Layout, ...]] = {
    "TransformerEncoder": (_Layout(blocks="layers", norm="norm"),),
    "GPT": (_Layout(blocks="blocks", norm="norm", head="head"),),
    "ViT": (_Layout(blocks="blocks", norm="norm", head="head", pooling="first"),),
    **dict.fromkeys(("GPT2Model", "GPTNeoModel"), (_Layout(blocks="h", norm="ln_f"),)),
    **dict.fromkeys(
        ("GPT2LMHeadModel", "GPTNeoForCausalLM"),
        (_Layout(blocks="transformer.h", norm="transformer.ln_f", head="lm_head"),),
    ),
    **dict.fromkeys((f"{name}Model" for name in LLAMA), (_Layout(blocks="layers", norm="norm"),)),
    **dict.fromkeys(
        (f"{name}ForCausalLM" for name in LLAMA),
        (_Layout(blocks="model.layers", norm="model.norm", head="lm_head"),),
    ),
    **dict.fromkeys((f"{name}Encoder" for name in BERT), (_Layout(blocks="layer"),)),
    **dict.fromkeys((f"{name}Model" for name in BERT), (_Layout(blocks="encoder.layer"),)),
    "DistilBertModel": (_Layout(blocks="transformer.layer"),),
    "ViTModel": (
        _Layout(blocks="layers", norm="layernorm"),
        _Layout(blocks="encoder.layer", norm="layernorm"),
    ),
    "ViTForImageClassification": (
        _Layout(blocks="vit.layers", norm="vit.layernorm", head="classifier", pooling="first"),
        _Layout(
            blocks="vit.encoder.layer", norm="vit.layernorm", head="classifier", pooling="first"
        ),
    ),
}
_HOMES = ("torch.nn.", "curvatlas.zoo", "transformers.")


@dataclass(frozen=True, kw_only=True, eq=False)
class MappedStack(FlatOrder):
    """A model read as a stack."""

    blocks: list[tuple[BlockSpec, Picked]]
    readout: Readout


def map_stack(module: nn.Module, *, head: bool = True) -> MappedStack:
    """Read a model as blocks, final norm and head; ``head=False`` leaves the head away."""
    layout = _layout(module)
    refuse_dropout(module)
    parameters = dict(module.named_parameters())
    values = {name: value.detach() for name, value in parameters.items()}
    numbers = flat_numbers(parameters)
    blocks: list[tuple[BlockSpec, Picked]] = []
    pieces: list[Tensor] = []
    for index, layer in enumerate(_children(module, layout.blocks)):
        spec, pick = read_module(layer)
        prefix = f"{layout.blocks}.{index}."
        blocks.append((spec, _within(values, prefix, pick)))
        pieces += _within(numbers, prefix, pick).values()
    options, names = _readout_options(module, layout, parameters, head=head)
    pieces += [numbers[name] for name in names]
    return MappedStack(
        blocks=blocks,
        readout=Readout(**options),  # type: ignore[arg-type]
        positions=torch.cat([piece.reshape(-1) for piece in pieces]),
        module_size=sum(parameter.numel() for parameter in parameters.values()),
    )


def _layout(module: nn.Module) -> _Layout:
    kind = type(module)
    if kind.__module__.startswith(_HOMES):
        for layout in _LAYOUTS.get(kind.__name__, ()):
            if _find(module, layout.blocks) is not None:
                return layout
    raise UnmappedModuleError(
        f"{kind.__name__} is no model the closed forms know as a stack: they read "
        f"{', '.join(_LAYOUTS)}; BlockStack takes a list of (spec, weights) for others."
    )


def _find(module: nn.Module, path: str) -> nn.Module | None:
    found: object = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None


def _children(module: nn.Module, path: str) -> list[nn.Module]:
    return list(_find(module, path).children())  # type: ignore[union-attr]


def _within(values: Mapping[str, Tensor], prefix: str, pick: Pick) -> Picked:
    inside = {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}
    return pick(inside)


def _readout_options(
    module: nn.Module, layout: _Layout, parameters: Mapping[str, Tensor], *, head: bool
) -> tuple[dict[str, object], list[str]]:
    """Keywords of ``Readout``, and the parameters' names in its flat order."""
    options: dict[str, object] = {}
    names: list[str] = []
    norm = None if layout.norm is None else _find(module, layout.norm)
    if norm is not None and not isinstance(norm, nn.Identity):
        mapped = map_norm(norm)
        options |= {"norm": mapped.norm, "eps": mapped.eps}
        options |= {"norm_weight": mapped.weight, "norm_bias": mapped.bias}
        names += [f"{layout.norm}.{name}" for name, _ in norm.named_parameters()]
    found = None if layout.head is None or not head else _find(module, layout.head)
    if found is None or isinstance(found, nn.Identity):
        return options, names
    if type(found) is not nn.Linear:
        raise UnmappedModuleError(
            f"the head {layout.head} is a {type(found).__name__}, not nn.Linear: pass head=False."
        )
    options |= {"weight": found.weight.detach(), "pooling": _pooling(module, layout)}
    options["bias"] = None if found.bias is None else found.bias.detach()
    own = [f"{layout.head}.{name}" for name, _ in found.named_parameters()]
    if all(name in parameters for name in own):
        names += own
    else:  # tied: the other use lies in the embedding, outside the stack
        options["frozen_head"] = True
    return options, names


def _pooling(module: nn.Module, layout: _Layout) -> Pooling | None:
    config = getattr(module, "config", None)
    if layout.pooling is not None and getattr(config, "pooling", None) == "mean":
        return "mean"
    return layout.pooling
