"""One Transformer block as a plain forward pass: what the closed forms differentiate twice.

    block = Block(BlockSpec(d_model=16, d_ff=64, n_heads=2), {"query_weight", …})
    z = block(x)                                            # (L, d) or (B, L, d)

Norms and softmax are written out by hand in plain torch, so that double backward through the block
is an oracle (``F.layer_norm`` is silently wrong in some orders of differentiation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvatlas.layers.checks import check_block, check_spec, weight_shapes
from curvatlas.layers.masks import attention_mask
from curvatlas.layers.norms import normalize
from curvatlas.layers.structure import WEIGHT_NAMES, BlockSpec, Weights, require_plain
from curvatlas.zoo.models import rotate

Drop = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "identity": lambda z: z,
}


def forward_pass(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    mask: Tensor | None = None,
    *,
    drop: Drop = lambda t: t,
) -> tuple[Tensor, Tensor]:
    """Z (B, L, d) of the block at x (B, L, d), and A (B, H, L, L).

    ``mask`` as in ``layers.masks``. ``drop`` acts on A, on the hidden units and on both sublayers'
    outputs.
    """
    check_block(spec, weights, x)
    require_plain(spec, "the dense closed form")

    def norm(t: Tensor, name: str) -> Tensor:
        return normalised(spec, weights, t, name)

    if not spec.residual:
        return attend(spec, weights, x, mask, drop)
    if spec.norm_first:
        f, A = attend(spec, weights, norm(x, "norm1"), mask, drop)
        u = x + drop(f)
        if spec.d_ff is not None:
            u = u + drop(feed_forward(spec, weights, norm(u, "norm2"), drop))
        return u, A
    f, A = attend(spec, weights, x, mask, drop)
    y = norm(x + drop(f), "norm1")
    if spec.d_ff is not None:
        y = norm(y + drop(feed_forward(spec, weights, y, drop)), "norm2")
    return y, A


def attend(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    mask: Tensor | None,
    drop: Drop = lambda t: t,
) -> tuple[Tensor, Tensor]:
    """concat_h(A^h V^h) W_Oᵀ + b_O and A = softmax(s Q Kᵀ + mask), or s Q Kᵀ where allowed."""
    (samples, length, _), shared = x.shape, spec.n_heads // spec.kv_heads

    def heads(name: str, size: int) -> Tensor:
        return linear(x, weights, name).view(samples, length, -1, size).transpose(1, 2)

    q, k = heads("query", spec.key_size), heads("key", spec.key_size)
    v = heads("value", spec.value_size).repeat_interleave(shared, 1)
    if spec.rope_base is not None:
        if spec.key_size % 2:
            raise ValueError(
                f"rotary positions pair coordinates: head size {spec.key_size} is odd."
            )
        q, k = rotate(q, spec.rope_base), rotate(k, spec.rope_base)
    bias, allowed = attention_mask(
        spec, mask, samples=samples, length=length, dtype=x.dtype, device=x.device
    )
    logits = spec.logit_scale * q @ k.repeat_interleave(shared, 1).mT
    if spec.softmax:
        A = torch.softmax(logits if bias is None else logits + bias, -1)
    else:
        A = logits if allowed is None else logits * allowed
    mixed = (drop(A) @ v).transpose(1, 2).reshape(samples, length, -1)
    return linear(mixed, weights, "output") if "output_weight" in weights else mixed, A


def feed_forward(spec: BlockSpec, weights: Weights, v: Tensor, drop: Drop = lambda t: t) -> Tensor:
    """W2 act(W1 v + b1) + b2, or gated W2 (act(W_g v) ⊙ W_u v)."""
    act, up = ACTIVATIONS[spec.activation], linear(v, weights, "up")
    hidden = act(linear(v, weights, "gate")) * up if spec.gated else act(up)
    return linear(drop(hidden), weights, "down")


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    """W x + b."""
    return F.linear(x, weights[f"{name}_weight"], weights.get(f"{name}_bias"))


def normalised(spec: BlockSpec, weights: Weights, x: Tensor, name: str) -> Tensor:
    """γ ⊙ (x − μ)/√(var + ε) + β, without μ for RMSNorm."""
    x, _ = normalize(x, eps=spec.eps, norm=spec.norm)
    gamma, beta = weights.get(f"{name}_weight"), weights.get(f"{name}_bias")
    x = x if gamma is None else x * gamma
    return x if beta is None else x + beta


B = TypeVar("B", bound="Block")


class Block(nn.Module):
    """A block or attention layer of this spec; ``names``: the weights it has, all without it."""

    def __init__(
        self, spec: BlockSpec, names: Collection[str] | None = None, *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_spec(spec)
        require_plain(spec, "the dense closed form")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}.")
        self.spec, self.dropout = spec, nn.Dropout(dropout)
        self.d_model, self.d_ff, self.n_heads = spec.d_model, spec.d_ff, spec.n_heads
        self.d_k, self.d_v = spec.key_size, spec.value_size
        shapes = weight_shapes(spec)
        self._place_all(
            (name, nn.Parameter(torch.empty(shapes[name])))
            for name in WEIGHT_NAMES  # named_parameters() follows the order of registration
            if name in (shapes if names is None else names)
        )
        self.reset_parameters()

    def _place_all(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        for name, parameter in parameters:
            self._place(name, parameter)

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        """Keep a weight, the names in the order of ``WEIGHT_NAMES``."""
        self.register_parameter(name, parameter)

    def reset_parameters(self) -> None:
        """Uniform weights of variance 1/(3·inputs), zero biases, unit gains."""
        for name, parameter in self.weights.items():
            if name.startswith("norm"):
                nn.init.constant_(parameter, 1.0 if name.endswith("_weight") else 0.0)
            elif name.endswith("_weight"):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            else:
                nn.init.zeros_(parameter)

    @classmethod
    def from_weights(cls: type[B], spec: BlockSpec, weights: Weights) -> B:
        """A module of this spec that shares the given weights' memory."""
        block = cls.__new__(cls)
        Block.__init__(block, spec, ())
        block._place_all(
            (name, nn.Parameter(weights[name].detach())) for name in WEIGHT_NAMES if name in weights
        )
        return block.eval()

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters by the names of the Hessian's blocks, in flat order."""
        return dict(self.named_parameters())

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """The block itself: (L, d) or (B, L, d) → the same shape.

        ``mask``: boolean, True where attention is allowed, or floating and added to the logits.
        ``key_padding_mask`` (B, L): True marks keys to ignore, as in ``nn.MultiheadAttention``.
        """
        return self.passed(x, mask, key_padding_mask)[0]

    def passed(
        self, x: Tensor, mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Z as in ``forward`` and A (B, H, L, L), or (H, L, L) of one sequence."""
        batched = x.unsqueeze(0) if x.ndim == 2 else x
        allowed = combine_masks(mask, key_padding_mask, batched)
        z, A = forward_pass(self.spec, self.weights, batched, allowed, drop=self.dropout)
        return (z.squeeze(0), A.squeeze(0)) if x.ndim == 2 else (z, A)


def combine_masks(mask: Tensor | None, padding: Tensor | None, x: Tensor) -> Tensor | None:
    """Who may attend to whom from both kinds of mask, for x (B, L, d)."""
    if padding is None:
        return mask
    batch, length = x.shape[0], x.shape[1]
    if padding.ndim == 1:
        padding = padding.unsqueeze(0)
    if padding.dtype != torch.bool or tuple(padding.shape) != (batch, length):
        raise ValueError(
            f"key_padding_mask must be boolean ({batch}, {length}) with True for ignored keys, got "
            f"{padding.dtype} {tuple(padding.shape)}."
        )
    allowed = ~padding.unsqueeze(1)  # (B, 1, L)
    if mask is None:
        return allowed.expand(batch, length, length)
    if mask.dtype == torch.bool:
        if mask.ndim == 2 and tuple(mask.shape) == (batch, length) and batch != length:
            mask = mask.unsqueeze(1)
        return (mask & allowed).expand(batch, length, length)
    return (mask + torch.zeros_like(x[:, :1, :1]).masked_fill(~allowed, -torch.inf)).expand(
        batch, length, length
    )
