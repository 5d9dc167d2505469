"""A tiny, randomly initialised model of any Hugging Face family, by its model type."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, logging
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from curvatlas.anatomy import Anatomy, anatomy_of

logging.set_verbosity_error()

# What configurations call their sizes; a family is given those it has.
_SIZES: dict[str, int] = {
    "vocab_size": 19, "type_vocab_size": 2, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size",
                     "word_embed_proj_dim", "encoder_hidden_size", "projection_dim",
                     "attention_hidden_size"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "d_inner", "hidden_dim",
                     "encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers",
                     "num_encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads",
                     "encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_head", "d_kv", "rotary_dim", "state_size"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len",
                     "max_target_positions", "max_source_positions"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 2),
    "num_experts_per_tok": 1, "moe_intermediate_size": 12,
    "image_size": 8, "patch_size": 4, "num_channels": 3, "num_mel_bins": 8,
}  # fmt: skip

# Families whose sizes have other names, or must fit each other.
_SPECIAL: dict[str, dict[str, Any]] = {
    "swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2,
             "patch_size": 2},
    "swinv2": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2,
               "patch_size": 2},
    "falcon": {"ffn_hidden_size": 24},
    "mpt": {"expansion_ratio": 2},
}  # fmt: skip

_CLASSES = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)


def tiny_config(model_type: str, **options: Any) -> PretrainedConfig:
    """The family's configuration with every known size made small, nested ones too."""
    config: PretrainedConfig = CONFIG_MAPPING[model_type]()
    _shrink(config)
    for name, value in {**_SPECIAL.get(model_type, {}), **options}.items():
        setattr(config, name, value)
    return config


def _shrink(config: PretrainedConfig) -> None:
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            _shrink(part)
    for name, size in _SIZES.items():
        stored = config.attribute_map.get(name, name)
        attribute = getattr(type(config), stored, None)
        computed = isinstance(attribute, property) and attribute.fset is None
        if not computed and type(getattr(config, stored, None)) is int:
            with suppress(NotImplementedError):  # XLNet has no longest sequence
                setattr(config, stored, size)
    kinds = vars(config).get("layer_types")
    if kinds:
        config.layer_types = list(dict.fromkeys(kinds))[: config.num_hidden_layers]
        config.layer_types += config.layer_types[-1:] * (
            config.num_hidden_layers - len(config.layer_types)
        )


def tiny_model(
    model_type: str,
    *,
    seed: int = 0,
    head: str | None = None,
    attn: str | None = None,
    **options: Any,
) -> nn.Module:
    """The family's model with this head ("SEQUENCE_CLASSIFICATION"), or with its first one.

    attn: the attention's implementation, "eager" or "sdpa".
    """
    config = tiny_config(model_type, **options)
    if attn is not None:
        config._attn_implementation = attn
    names = _CLASSES if head is None else (f"MODEL_FOR_{head}_MAPPING",)
    mappings = [getattr(modeling_auto, name) for name in names]
    kinds = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    kind = kinds[0] if isinstance(kinds, tuple) else kinds
    torch.manual_seed(seed)
    model: nn.Module = kind(config)
    return model.eval()


@functools.cache
def tiny_anatomy(model_type: str) -> tuple[nn.Module, Anatomy]:
    """The family's model, which no test changes, and what its parameters are."""
    model = tiny_model(model_type)
    return model, anatomy_of(model)
