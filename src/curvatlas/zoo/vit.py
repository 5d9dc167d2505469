"""A readable Vision Transformer.

Shapes in comments: B images, n patches, L tokens (n, or n + 1 with a class token), d width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from curvatlas.zoo.layers import Block, BlockConfig, make_norm


@dataclass(frozen=True, kw_only=True)
class ViTConfig(BlockConfig):
    """Sizes and choices; the defaults are one post-norm block of width 16 for 8 × 8 digits."""

    image_size: int = 8
    patch_size: int = 2
    channels: int = 1
    classes: int = 10
    pooling: Literal["class_token", "mean"] = "mean"


class ViT(nn.Module):
    """Images → class logits: patches, ``n_layers`` blocks, pooling, linear head."""

    def __init__(self, config: ViTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ViTConfig()
        if config.image_size % config.patch_size:
            raise ValueError(
                f"image_size={config.image_size} is no multiple of patch_size={config.patch_size}."
            )
        if config.pooling not in ("class_token", "mean"):
            raise ValueError(f"pooling must be 'class_token' or 'mean', got {config.pooling!r}.")
        d = config.d_model
        patches = (config.image_size // config.patch_size) ** 2
        tokens = patches + (config.pooling == "class_token")
        self.patch_embedding = nn.Linear(config.channels * config.patch_size**2, d)
        if config.pooling == "class_token":
            self.class_token = nn.Parameter(0.02 * torch.randn(d))
        self.position_embedding = nn.Parameter(0.02 * torch.randn(tokens, d))
        self.blocks = nn.ModuleList(Block(config, causal=False) for _ in range(config.n_layers))
        # Post-norm blocks end with their own norm; pre-norm streams need one before the head.
        self.norm = make_norm(config) if config.norm_first else nn.Identity()
        self.head = nn.Linear(d, config.classes, bias=config.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embedding(self.patchify(images))  # (B, n, d)
        if self.config.pooling == "class_token":
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], dim=1)  # (B, n + 1, d)
        x = x + self.position_embedding  # (B, L, d)
        for block in self.blocks:
            x = block(x)  # (B, L, d)
        x = self.norm(x)
        pooled = x[:, 0] if self.config.pooling == "class_token" else x.mean(1)  # (B, d)
        logits: Tensor = self.head(pooled)  # (B, classes)
        return logits

    def patchify(self, images: Tensor) -> Tensor:
        """(B, S, S) or (B, C, S, S) → (B, n, C·p·p): each patch's pixels in one row."""
        if images.ndim == 3:
            images = images.unsqueeze(1)  # (B, 1, S, S)
        size, channels, p = self.config.image_size, self.config.channels, self.config.patch_size
        if images.ndim != 4 or tuple(images.shape[1:]) != (channels, size, size):
            raise ValueError(
                f"expected images (B, {channels}, {size}, {size}), got {tuple(images.shape)}."
            )
        side = size // p
        x = images.reshape(-1, channels, side, p, side, p)
        return x.permute(0, 2, 4, 1, 3, 5).reshape(-1, side * side, channels * p * p)
