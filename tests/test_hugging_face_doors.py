"""Every public entry point takes Hugging Face models and batches, of six kinds, by one door."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_models import tiny_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding
from transformers.utils.generic import ModelOutput

import curvatlas as ca

KINDS = ("gpt2", "llama", "bert classification", "bert masked", "vit", "t5")
SAMPLES = 4
_HEADS = {"bert classification": "SEQUENCE_CLASSIFICATION", "bert masked": "MASKED_LM",
          "vit": "IMAGE_CLASSIFICATION"}  # fmt: skip


def model_of(kind: str, layers: int = 1) -> nn.Module:
    family = kind.split()[0]
    counts = dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers"), layers)
    return tiny_model(family, head=_HEADS.get(kind), decoder_start_token_id=0, **counts)


def batch_of(kind: str, samples: int = SAMPLES) -> dict[str, Tensor]:
    """A batch as a collator makes it: padding, an attention mask, ignored labels."""
    generator = torch.Generator().manual_seed(len(kind))
    if kind == "vit":
        images = torch.randn(samples, 3, 8, 8, generator=generator)
        return {"pixel_values": images, "labels": torch.arange(samples) % 3}
    tokens = torch.randint(3, 19, (samples, 5), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, 4] = tokens[0, 4] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    labels = tokens.masked_fill(mask == 0, -100)
    if kind == "bert classification":
        labels = torch.arange(samples) % 3
    elif kind == "bert masked":
        labels = labels.clone()
        labels[:, ::2] = -100
    return {**batch, "labels": labels}
