"""A readable GPT: decoder-only Transformer for next-token prediction.

Shapes in comments: B sequences, L tokens, d width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from curvatlas.zoo.layers import Block, BlockConfig, make_norm


@dataclass(frozen=True, kw_only=True)
class GPTConfig(BlockConfig):
    """Sizes and choices. The benchmarks' model of 1.06 M parameters is
    ``GPTConfig(vocabulary=1000, context=64, d_model=128, n_heads=4, n_layers=4)``."""

    vocabulary: int = 256
    context: int = 64
    n_layers: int = 2
    d_model: int = 32
    n_heads: int = 4
    norm_first: bool = True
    positions: Literal["learned", "rope", "none"] = "learned"
    rope_base: float = 10000.0  # used when positions="rope"
    tied: bool = False  # one matrix for the token embedding and the head


class GPT(nn.Module):
    """Tokens (B, L) → next-token logits (B, L, V)."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        if config.positions not in ("learned", "rope", "none"):
            raise ValueError(
                f"positions must be 'learned', 'rope' or 'none', got {config.positions!r}."
            )
        d = config.d_model
        self.token_embedding = nn.Embedding(config.vocabulary, d)
        if config.positions == "learned":
            self.position_embedding = nn.Parameter(0.02 * torch.randn(config.context, d))
        rope_base = config.rope_base if config.positions == "rope" else None
        self.blocks = nn.ModuleList(
            Block(config, causal=True, rope_base=rope_base) for _ in range(config.n_layers)
        )
        # Post-norm blocks end with their own norm; pre-norm streams need one before the head.
        self.norm = make_norm(config) if config.norm_first else nn.Identity()
        self.head = nn.Linear(d, config.vocabulary, bias=False)
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        if config.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[-1]
        if tokens.ndim != 2 or length > self.config.context:
            raise ValueError(
                f"expected tokens (B, L) with L ≤ {self.config.context}, got {tuple(tokens.shape)}."
            )
        x = self.token_embedding(tokens)  # (B, L, d)
        if self.config.positions == "learned":
            x = x + self.position_embedding[:length]
        for block in self.blocks:
            x = block(x)  # (B, L, d)
        logits: Tensor = self.head(self.norm(x))  # (B, L, V)
        return logits
