"""Readable reference models, small real data, and a plain training loop."""

from curvatlas.zoo.gpt import GPT, GPTConfig
from curvatlas.zoo.mlp import MLP, MLPConfig
from curvatlas.zoo.reference import benchmark_gpt, reference_gpt, reference_vit
from curvatlas.zoo.vit import ViT, ViTConfig

__all__ = [
    "GPT",
    "MLP",
    "GPTConfig",
    "MLPConfig",
    "ViT",
    "ViTConfig",
    "benchmark_gpt",
    "reference_gpt",
    "reference_vit",
]
