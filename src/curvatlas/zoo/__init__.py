"""Readable reference models, small real data, and a plain training loop."""

from curvatlas.zoo.datasets import Dataset, Samples, digits, fashion_mnist, mnist, text
from curvatlas.zoo.models import (
    GPT,
    MLP,
    GPTConfig,
    MLPConfig,
    ViT,
    ViTConfig,
    benchmark_gpt,
    reference_gpt,
    reference_vit,
)
from curvatlas.zoo.training import TrainingHistory, evaluate, train

__all__ = [
    "GPT",
    "MLP",
    "Dataset",
    "GPTConfig",
    "MLPConfig",
    "Samples",
    "TrainingHistory",
    "ViT",
    "ViTConfig",
    "benchmark_gpt",
    "digits",
    "evaluate",
    "fashion_mnist",
    "mnist",
    "reference_gpt",
    "reference_vit",
    "text",
    "train",
]
