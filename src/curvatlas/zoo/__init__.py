"""Readable reference models, small real data, and a plain training loop."""

from curvatlas.zoo.datasets import Dataset, Samples, digits, fashion_mnist, mnist, text
from curvatlas.zoo.gpt import GPT, GPTConfig
from curvatlas.zoo.mlp import MLP, MLPConfig
from curvatlas.zoo.reference import benchmark_gpt, reference_gpt, reference_vit
from curvatlas.zoo.training import TrainingHistory, evaluate, train
from curvatlas.zoo.vit import ViT, ViTConfig

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
