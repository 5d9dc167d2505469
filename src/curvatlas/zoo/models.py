"""The models the demo, the docs, the tests and the benchmarks share: GPT, ViT and MLP.

Written to be read and to be differentiated twice: attention is an explicit softmax, not a fused
kernel. Shapes in comments: B samples, L tokens, d width, H query heads, G key/value heads, s head
size, V vocabulary, n patches (L is n, or n + 1 with a class token).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["layer", "rms", "none"]
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
    attention_bias: bool | None = None  # of query, key, value and output; None: as ``bias``
    norm_bias: bool | None = None  # β of LayerNorm; None: as ``bias``
    softmax: bool = True  # False: linear attention
    attention_residual: bool = True  # False: X goes around the feed-forward part only
    output_projection: bool = True  # False: F = A V, the single head of the papers
    eps: float = 1e-5


def make_norm(config: BlockConfig) -> nn.Module:
    """LayerNorm (γ, β) or RMSNorm (γ) over the last axis, or nothing."""
    if config.norm == "layer":
        shift = config.bias if config.norm_bias is None else config.norm_bias
        return nn.LayerNorm(config.d_model, eps=config.eps, bias=shift)
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=config.eps)
    if config.norm == "none":
        return nn.Identity()
    raise ValueError(f"norm must be 'layer', 'rms' or 'none', got {config.norm!r}.")


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
        bias = config.bias if config.attention_bias is None else config.attention_bias
        self.query = nn.Linear(d, heads * self.head_size, bias=bias)
        self.key = nn.Linear(d, kv_heads * self.head_size, bias=bias)
        self.value = nn.Linear(d, kv_heads * self.head_size, bias=bias)
        self.output: nn.Module = nn.Identity()
        if config.output_projection:
            self.output = nn.Linear(d, d, bias=bias)

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
            names = ", ".join(_ACTIVATIONS)
            raise ValueError(f"unknown activation {config.activation!r}: choose from {names}.")
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
        self.norm_first, self.attention_residual = config.norm_first, config.attention_residual
        self.norm1 = make_norm(config)
        self.attention = Attention(config, causal=causal, rope_base=rope_base)
        self.norm2 = make_norm(config)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:  # (B, L, d) → (B, L, d)
        if self.norm_first:
            x = self._around(x, self.attention(self.norm1(x)))
            x = x + self.ffn(self.norm2(x))
            return x
        x = self.norm1(self._around(x, self.attention(x)))
        x = self.norm2(x + self.ffn(x))
        return x

    def _around(self, x: Tensor, attended: Tensor) -> Tensor:
        return x + attended if self.attention_residual else attended


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
    head_bias: bool = False
    answers: tuple[int, int] | None = None  # logits of these positions only: first, last + 1


class GPT(nn.Module):
    """Tokens (B, L) → next-token logits (B, L, V), or those of the positions ``answers``."""

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
        self.head = nn.Linear(d, config.vocabulary, bias=config.head_bias)
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
        if self.config.answers is not None:
            x = x[:, slice(*self.config.answers)]
        logits: Tensor = self.head(self.norm(x))  # (B, L, V)
        return logits


@dataclass(frozen=True, kw_only=True)
class ViTConfig(BlockConfig):
    """Sizes and choices; the defaults are one post-norm block of width 16 for 8 × 8 digits."""

    image_size: int = 8
    patch_size: int = 2
    channels: int = 1
    classes: int = 10
    patch_bias: bool = True
    positions: Literal["learned", "none"] = "learned"
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
        if config.positions not in ("learned", "none"):
            raise ValueError(f"positions must be 'learned' or 'none', got {config.positions!r}.")
        d = config.d_model
        patches = (config.image_size // config.patch_size) ** 2
        tokens = patches + (config.pooling == "class_token")
        pixels = config.channels * config.patch_size**2
        self.patch_embedding = nn.Linear(pixels, d, bias=config.patch_bias)
        if config.pooling == "class_token":
            self.class_token = nn.Parameter(0.02 * torch.randn(d))
        if config.positions == "learned":
            self.position_embedding = nn.Parameter(0.02 * torch.randn(tokens, d))
        self.blocks = nn.ModuleList(Block(config, causal=False) for _ in range(config.n_layers))
        # Post-norm blocks end with their own norm; pre-norm streams need one before the head.
        self.norm = make_norm(config) if config.norm_first else nn.Identity()
        self.head = nn.Linear(d, config.classes, bias=config.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embedding(self.patchify(images))  # (B, n, d)
        if self.config.pooling == "class_token":
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], dim=1)  # (B, n + 1, d)
        if self.config.positions == "learned":
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


# "identity" gives the linear network of the theory: its Hessian sees the data through Σ_XX alone.
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": nn.Identity(),
}


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Sizes and choices; inputs of any shape are flattened to ``inputs`` numbers."""

    inputs: int = 64
    outputs: int = 10
    width: int = 48
    n_layers: int = 2  # hidden layers
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "identity"] = "gelu"
    bias: bool = True

    def of_size(self, parameters: int) -> MLPConfig:
        """The same network with the width whose parameter count is nearest to ``parameters``."""
        width = 1  # the count grows with the width: walk up until it passes the target
        while replace(self, width=width + 1).parameters <= parameters:
            width += 1
        below, above = replace(self, width=width), replace(self, width=width + 1)
        return min(below, above, key=lambda config: abs(config.parameters - parameters))

    @property
    def parameters(self) -> int:
        sizes = [self.inputs, *[self.width] * self.n_layers, self.outputs]
        return sum((a + self.bias) * b for a, b in pairwise(sizes))


class MLP(nn.Module):
    """Inputs (B, ...) → outputs (B, outputs), through ``n_layers`` hidden layers."""

    def __init__(self, config: MLPConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or MLPConfig()
        if config.activation not in _FUNCTIONS:
            names = ", ".join(_FUNCTIONS)
            raise ValueError(f"unknown activation {config.activation!r}: choose from {names}.")
        sizes = [config.inputs, *[config.width] * config.n_layers]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=config.bias) for a, b in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], config.outputs, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)  # (B, inputs)
        for layer in self.layers:
            x = _FUNCTIONS[self.config.activation](layer(x))  # (B, width)
        outputs: Tensor = self.head(x)  # (B, outputs)
        return outputs


def reference_vit(*, seed: int = 0, **options: Any) -> ViT:
    """One post-norm block of width 16 on 8 × 8 digits, as in the paper; 3,786 parameters.

    ``options`` change fields of ``ViTConfig``; the same seed gives the same weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ViT(ViTConfig(**options))


def cifar_vit(*, seed: int = 0, **options: Any) -> ViT:
    """A pre-norm ViT of eight blocks of width 128 for 3 × 32 × 32 images; 1,613,796 parameters.

    Patches of 4 × 4, 4 heads, GELU and positions; ``petrov_vit("cifar")`` is the paper's own.
    """
    sizes = {"image_size": 32, "patch_size": 4, "channels": 3, "classes": 100}
    blocks = {"d_model": 128, "n_heads": 4, "n_layers": 8, "norm_first": True}
    return reference_vit(seed=seed, **{**sizes, **blocks, **options})


# Table 1 of Petrov et al. (ICLR 2026), and the images it is for.
_PETROV: dict[str, dict[str, Any]] = {
    "mnist": {"image_size": 28, "d_model": 16, "d_ff": 64},
    "cifar": {
        "image_size": 32,
        "channels": 3,
        "classes": 100,
        "d_model": 128,
        "d_ff": 512,
        "n_layers": 8,
    },
}


def petrov_vit(table: Literal["mnist", "cifar"] = "mnist", *, seed: int = 0, **options: Any) -> ViT:
    """The models of *Closing the Curvature Gap*: post-norm, ReLU, patches of 4 × 4, mean pooling.

    Linear maps have no biases and tokens no positions. In the order of the paper's heat maps, for
    MNIST: patches 256; query, key, value, output 256 each; γ and β 32; up and down 1,024 each;
    γ and β 32; head 160: 3,552 parameters. The number of heads is not in the paper: one, as in its
    theory. ``options`` change fields of ``ViTConfig`` (``classes=10`` for CIFAR-10).
    """
    if table not in _PETROV:
        raise ValueError(f"the paper's models are {' and '.join(_PETROV)}, got {table!r}.")
    printed: dict[str, Any] = {
        "patch_size": 4,
        "activation": "relu",
        "bias": False,
        "norm_bias": True,
        "patch_bias": False,
        "positions": "none",
        **_PETROV[table],
    }
    model = reference_vit(seed=seed, **{**printed, **options})
    for block in model.blocks:  # parameters in the order in which a token meets them
        for name in ("attention", "norm1", "ffn", "norm2"):
            block._modules[name] = block._modules.pop(name)
    return model


def reference_gpt(*, seed: int = 0, **options: Any) -> GPT:
    """Two pre-norm blocks of width 32 on bytes; 43,904 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(GPTConfig(**options))


def benchmark_gpt(*, seed: int = 0, **options: Any) -> GPT:
    """The 1.06 M-parameter GPT of the benchmarks: V 1000, d 128, 4 heads, 4 layers, context 64."""
    sizes = {"vocabulary": 1000, "context": 64, "d_model": 128, "n_heads": 4, "n_layers": 4}
    return reference_gpt(seed=seed, **{**sizes, **options})
