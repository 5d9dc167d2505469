"""PyTorch's own layers and the zoo's, read as blocks."""

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
