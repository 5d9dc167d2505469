"""The pieces both reference Transformers are built of: norms, attention, feed-forward, block.

Written to be read and to be differentiated twice: attention is an explicit softmax, not a fused
kernel. Shapes in comments: B samples, L tokens, d width, H query heads, G key/value heads, s head
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["layer", "rms"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "reglu"]


def _gelu_tanh(x: Tensor) -> Tensor:  # a named function: models must pickle
    return F.gelu(x, approximate="tanh")


# name → (pointwise function, whether a second projection multiplies it)
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "relu": (F.relu, False),
    "gelu": (F.gelu, False),
    "gelu_tanh": (_gelu_tanh, False),
    "silu": (F.silu, False),
    "swiglu": (F.silu, True),
    "geglu": (F.gelu, True),
    "reglu": (F.relu, True),
}


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What every block reads from its model's configuration."""

    n_layers: int = 1
    d_model: int = 16
    n_heads: int = 1
    n_kv_heads: int | None = None  # fewer than n_heads: grouped-query attention
    d_ff: int | None = None  # None: 4 · d_model
    norm: Norm = "layer"
    norm_first: bool = False
    activation: Activation = "gelu"
    bias: bool = True
    softmax: bool = True  # False: linear attention
    output_projection: bool = True  # False: F = A V, the single head of the papers
    eps: float = 1e-5


def make_norm(config: BlockConfig) -> nn.Module:
    """LayerNorm (γ, β) or RMSNorm (γ) over the last axis."""
    if config.norm == "layer":
        return nn.LayerNorm(config.d_model, eps=config.eps, bias=config.bias)
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=config.eps)
    raise ValueError(f"norm must be 'layer' or 'rms', got {config.norm!r}.")


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary positions: coordinate p turns with coordinate p + s/2 by the angle i · base^(−2p/s).

    x: (B, heads, L, s) → the same shape
    """
    length, half = x.shape[-2], x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)  # (s/2,)
    position = torch.arange(length, dtype=x.dtype, device=x.device)
    angle = position[:, None] * frequency  # (L, s/2)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """F = concat_h(A^h V^h) W_Oᵀ with A = softmax(Q Kᵀ/√s), or A = Q Kᵀ/√s if not ``softmax``."""

    def __init__(
        self, config: BlockConfig, *, causal: bool, rope_base: float | None = None
    ) -> None:
        super().__init__()
        d, heads = config.d_model, config.n_heads
        kv_heads = config.n_kv_heads or heads
        if d % heads or heads % kv_heads:
            raise ValueError(
                f"d_model={d} must divide into n_heads={heads}, and n_heads into "
                f"n_kv_heads={kv_heads}."
            )
        if rope_base is not None and (d // heads) % 2:
            raise ValueError(f"rotary positions pair coordinates: head size {d // heads} is odd.")
        if not config.output_projection and heads > 1:
            raise ValueError(
                "output_projection=False needs n_heads=1: nothing would mix the heads."
            )
        self.n_heads, self.n_kv_heads, self.head_size = heads, kv_heads, d // heads
        self.causal, self.softmax, self.rope_base = causal, config.softmax, rope_base
        self.query = nn.Linear(d, heads * self.head_size, bias=config.bias)
        self.key = nn.Linear(d, kv_heads * self.head_size, bias=config.bias)
        self.value = nn.Linear(d, kv_heads * self.head_size, bias=config.bias)
        self.output: nn.Module = nn.Identity()
        if config.output_projection:
            self.output = nn.Linear(d, d, bias=config.bias)

    def weights(self, x: Tensor) -> Tensor:
        """The attention matrix A: (B, L, d) → (B, H, L, L), rows are queries."""
        q = self._split(self.query(x), self.n_heads)  # (B, H, L, s)
        k = self._split(self.key(x), self.n_kv_heads)  # (B, G, L, s)
        if self.rope_base is not None:
            q, k = rotate(q, self.rope_base), rotate(k, self.rope_base)
        k = k.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)  # (B, H, L, s)
        logits = q @ k.transpose(-2, -1) / math.sqrt(self.head_size)  # (B, H, L, L)
        if self.causal:
            length = x.shape[-2]
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            logits = logits.masked_fill(future, -math.inf if self.softmax else 0.0)
        return logits.softmax(-1) if self.softmax else logits

    def forward(self, x: Tensor) -> Tensor:
        v = self._split(self.value(x), self.n_kv_heads)  # (B, G, L, s)
        v = v.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)  # (B, H, L, s)
        mixed = self.weights(x) @ v  # (B, H, L, s)
        joined = mixed.transpose(1, 2).flatten(2)  # (B, L, H·s)
        result: Tensor = self.output(joined)
        return result

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_size).transpose(1, 2)  # (B, heads, L, s)


class FeedForward(nn.Module):
    """down(f(up x)), or down(f(gate x) ⊙ up x) for the gated activations (SwiGLU, GEGLU, ReGLU)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        if config.activation not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ValueError(f"unknown activation {config.activation!r}: choose from {known}.")
        self.activation = config.activation
        self._function, self.gated = _ACTIVATIONS[config.activation]
        d, hidden = config.d_model, config.d_ff or 4 * config.d_model
        self.up = nn.Linear(d, hidden, bias=config.bias)
        if self.gated:
            self.gate = nn.Linear(d, hidden, bias=config.bias)
        self.down = nn.Linear(hidden, d, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)  # (B, L, d_ff)
        hidden = self._function(self.gate(x)) * up if self.gated else self._function(up)
        result: Tensor = self.down(hidden)  # (B, L, d)
        return result


class Block(nn.Module):
    """One Transformer block.

    post-norm: Y = norm1(X + Att(X)),  Z = norm2(Y + FFN(Y))
    pre-norm:  U = X + Att(norm1(X)),  Z = U + FFN(norm2(U))
    """

    def __init__(
        self, config: BlockConfig, *, causal: bool, rope_base: float | None = None
    ) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.norm1 = make_norm(config)
        self.attention = Attention(config, causal=causal, rope_base=rope_base)
        self.norm2 = make_norm(config)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:  # (B, L, d) → (B, L, d)
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            x = x + self.ffn(self.norm2(x))
            return x
        x = self.norm1(x + self.attention(x))
        x = self.norm2(x + self.ffn(x))
        return x
