"""Small models of every family the tests run on, in float64, with one batch each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.zoo.models import GPT, GPTConfig, ViT, ViTConfig

Case = tuple[nn.Module, Any, str]  # model, batch, loss
VOCABULARY = 17


def _tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape)


def _labelled(batch: int = 3, length: int = 6) -> dict[str, Tensor]:
    tokens = _tokens(batch, length)
    labels = tokens.clone()
    labels[-1, length // 2 :] = -100  # a padded end
    mask = torch.ones_like(tokens)
    mask[-1, length // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _zoo_gpt(**options: Any) -> Case:
    config = GPTConfig(
        vocabulary=VOCABULARY, context=6, d_model=8, n_heads=2, n_layers=2, d_ff=12, **options
    )
    targets = _tokens(3, 6)
    targets[1, 3:] = -100
    return GPT(config), (_tokens(3, 6), targets), "cross_entropy"


def _zoo_vit(**options: Any) -> Case:
    config = ViTConfig(d_model=8, n_heads=2, n_layers=2, d_ff=12, **options)
    size = config.image_size
    images = torch.randn(4, size, size, dtype=torch.float64)
    return ViT(config), (images, torch.randint(0, config.classes, (4,))), "cross_entropy"


class _Classifier(nn.Module):
    """A torch encoder with a linear head on its mean token."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.body(x)
        return self.head(hidden.mean(1))


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


def _encoder(norm_first: bool, activation: str) -> Case:
    layer = nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.1, activation=activation, norm_first=norm_first, batch_first=True
    )
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    return _Classifier(body, 8), (x, torch.randint(0, 3, (3,))), "cross_entropy"


def _multihead() -> Case:
    x, y = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    return _SelfAttention(), (x, y), "mse"


def _gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=8)
    return GPT2LMHeadModel(config), _labelled(), "cross_entropy"


def _llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=8,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config), _labelled(), "cross_entropy"


def _bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        vocab_size=VOCABULARY,
        max_position_embeddings=8,
        num_labels=3,
    )
    batch = _labelled()
    batch["labels"] = torch.randint(0, 3, (3,))
    return BertForSequenceClassification(config), batch, "cross_entropy"


# of BART and the families built like it
BART_SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def _hf_vit() -> Case:
    from transformers import ViTConfig as HFViTConfig, ViTForImageClassification

    config = HFViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=3,
    )
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    batch = {"pixel_values": images, "labels": torch.randint(0, 3, (3,))}
    return ViTForImageClassification(config), batch, "cross_entropy"


FAMILIES: dict[str, Callable[[], Case]] = {
    "zoo gpt pre-norm": lambda: _zoo_gpt(),
    "zoo gpt rms swiglu rope tied": lambda: _zoo_gpt(
        norm="rms", activation="swiglu", positions="rope", tied=True
    ),
    "zoo gpt post-norm relu": lambda: _zoo_gpt(norm_first=False, activation="relu"),
    "zoo vit pre-norm": lambda: _zoo_vit(norm_first=True),
    "zoo vit post-norm": lambda: _zoo_vit(norm_first=False),
    "torch encoder post-norm": lambda: _encoder(False, "relu"),
    "torch encoder pre-norm": lambda: _encoder(True, "gelu"),
    "torch multihead": _multihead,
    "hf gpt2": _gpt2,
    "hf llama": _llama,
    "hf bert": _bert,
    "hf vit": _hf_vit,
}


def make(name: str, *, seed: int = 0) -> Case:
    """The family's model (float64, evaluation mode), batch and loss."""
    torch.manual_seed(seed)
    model, batch, loss = FAMILIES[name]()
    return model.double().eval(), batch, loss
