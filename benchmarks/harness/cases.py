"""The models and data the products are timed on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvatlas.zoo.models import GPT, GPTConfig, ViT, ViTConfig


@dataclass(frozen=True)
class Case:
    """A model in evaluation mode and one batch for it."""

    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def loss(self, outputs: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, -2), self.targets.flatten())

    def value(self) -> Tensor:
        return self.loss(self.model(self.inputs))

    def gradient(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.value(), self.parameters)

    def split(self, vector: Tensor) -> list[Tensor]:
        """(P,) → tensors shaped like the parameters."""
        pieces = torch.split(vector, [p.numel() for p in self.parameters])
        return [v.view_as(p) for v, p in zip(pieces, self.parameters, strict=True)]

    def split_columns(self, columns: Tensor) -> list[Tensor]:
        """(P, K) → tensors (K, *shape)."""
        pieces = torch.split(columns.T.contiguous(), [p.numel() for p in self.parameters], dim=1)
        return [v.reshape(-1, *p.shape) for v, p in zip(pieces, self.parameters, strict=True)]

    def clone(self, dtype: torch.dtype | None = None) -> Case:
        model = copy.deepcopy(self.model)
        inputs = self.inputs
        if dtype is not None:
            model = model.to(dtype)
            inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        return Case(self.name, model, inputs, self.targets)


def _gpt(name: str, *, samples: int, length: int, **sizes: int) -> Case:
    torch.manual_seed(0)
    config = GPTConfig(context=length, **sizes)  # type: ignore[arg-type]
    tokens = torch.randint(0, config.vocabulary, (samples, length + 1))
    return Case(name, GPT(config).eval(), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def gpt_1m() -> Case:
    """1.06 M parameters, the contract's model."""
    return _gpt("GPT 1.06 M", samples=8, length=64, vocabulary=1000, d_model=128, n_heads=4,
                n_layers=4)  # fmt: skip


def gpt_100k() -> Case:
    return _gpt("GPT 100 k", samples=8, length=32, vocabulary=256, d_model=48, n_heads=4,
                n_layers=3)  # fmt: skip


def gpt_12_layers() -> Case:
    return _gpt("GPT of 12 layers", samples=4, length=64, vocabulary=256, d_model=96, n_heads=4,
                n_layers=12)  # fmt: skip


def vit_small() -> Case:
    """One post-norm block of width 16 on 8 × 8 images; d_ff chosen for about 2.8 k parameters."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(d_ff=32)).eval()
    return Case("ViT 2.8 k", model, torch.rand(64, 8, 8), torch.randint(0, 10, (64,)))


CASES: dict[str, Callable[[], Case]] = {
    "gpt-1m": gpt_1m,
    "vit-2.8k": vit_small,
    "gpt-100k": gpt_100k,
}
