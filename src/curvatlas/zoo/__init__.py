"""Readable reference models, small real data, and a plain training loop."""

from curvatlas.zoo.addition import five_digit_addition, ormaniec_gpt
from curvatlas.zoo.block import Block
from curvatlas.zoo.datasets import Dataset, Samples, digits, fashion_mnist, mnist, text
from curvatlas.zoo.images import cifar10, cifar100, from_torch, idx, image_folder, images_on_disk
from curvatlas.zoo.models import (
    GPT,
    MLP,
    GPTConfig,
    MLPConfig,
    ViT,
    ViTConfig,
    benchmark_gpt,
    cifar_vit,
    petrov_vit,
    reference_gpt,
    reference_vit,
)
from curvatlas.zoo.training import TrainingHistory, evaluate, train

__all__ = [
    "GPT",
    "MLP",
    "Block",
    "Dataset",
    "GPTConfig",
    "MLPConfig",
    "Samples",
    "TrainingHistory",
    "ViT",
    "ViTConfig",
    "benchmark_gpt",
    "cifar10",
    "cifar100",
    "cifar_vit",
    "digits",
    "evaluate",
    "fashion_mnist",
    "five_digit_addition",
    "from_torch",
    "idx",
    "image_folder",
    "images_on_disk",
    "mnist",
    "ormaniec_gpt",
    "petrov_vit",
    "reference_gpt",
    "reference_vit",
    "text",
    "train",
]
