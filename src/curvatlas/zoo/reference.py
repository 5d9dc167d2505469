"""The models the demo, the docs, the tests and the benchmarks share."""

from __future__ import annotations

from typing import Any

import torch

from curvatlas.zoo.gpt import GPT, GPTConfig
from curvatlas.zoo.vit import ViT, ViTConfig


def reference_vit(*, seed: int = 0, **options: Any) -> ViT:
    """One post-norm block of width 16 on 8 × 8 digits, as in the paper; 3,786 parameters.

    ``options`` change fields of ``ViTConfig``; the same seed gives the same weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ViT(ViTConfig(**options))


def reference_gpt(*, seed: int = 0, **options: Any) -> GPT:
    """Two pre-norm blocks of width 32 on bytes; 43,904 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(GPTConfig(**options))


def benchmark_gpt(*, seed: int = 0, **options: Any) -> GPT:
    """The 1.06 M-parameter GPT of the benchmarks: V 1000, d 128, 4 heads, 4 layers, context 64."""
    sizes = {"vocabulary": 1000, "context": 64, "d_model": 128, "n_heads": 4, "n_layers": 4}
    return reference_gpt(seed=seed, **{**sizes, **options})
