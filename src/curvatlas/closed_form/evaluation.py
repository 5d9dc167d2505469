"""One forward pass of a block, keeping what the dense closed forms read.

Everything is cheap here (one forward pass); the expensive per-token tensors of ``moments`` and
``tail`` are built later for a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from curvatlas.engines.tangent.attention import Rotation
from curvatlas.engines.tangent.attention_core import attention_mask
from curvatlas.engines.tangent.block import check_block
from curvatlas.engines.tangent.feed_forward import HiddenUnits, hidden_units
from curvatlas.engines.tangent.losses import OutputLoss, Seeds, resolve_loss
from curvatlas.engines.tangent.norm import normalize
from curvatlas.engines.tangent.structure import WEIGHT_NAMES, BlockSpec, Weights, require_plain


class HalfSquaredNorm(OutputLoss):
    """ℓ = ½ Σ_i ‖z_i‖² / N over the N tokens: the objective of a closed form without a target.

    δ = Z/N and Λ_i = I/N. The article's: half the squared norm, summed over the features and
    averaged over the tokens.
    """

    def seeds(self, outputs: Tensor, targets: Tensor | None = None) -> Seeds:
        d = outputs.shape[-1]
        tokens = outputs.numel() // d
        identity = torch.eye(d, dtype=outputs.dtype, device=outputs.device) / tokens

        def blocks(some: slice) -> Tensor:
            return identity.expand(len(range(*some.indices(tokens))), d, d)

        return Seeds(
            value=0.5 * outputs.square().sum() / tokens,
            delta=outputs / tokens,
            product=lambda v: v / tokens,
            blocks=blocks,
            convex=True,
        )


def seeds_at(outputs: Tensor, target: Tensor | None, loss: str | OutputLoss) -> Seeds:
    """Value, δ and Λ of the loss at ``outputs`` (B, L, d); without a target ``HalfSquaredNorm``."""
    if target is not None:
        return resolve_loss(loss).seeds(outputs, target)
    if loss != "mse" and not isinstance(loss, HalfSquaredNorm):
        name = loss if isinstance(loss, str) else type(loss).__name__
        raise ValueError(
            f"loss={name!r} needs a target: without one the objective is ½‖y‖², summed over the "
            "features and averaged over the tokens."
        )
    return HalfSquaredNorm().seeds(outputs)


@dataclass(frozen=True, kw_only=True)
class NormState:
    """A normalised activation: n (B, L, d), 1/σ (B, L, 1), γ and β or None."""

    prefix: str  # "norm1" or "norm2"
    n: Tensor
    inv_std: Tensor
    gamma: Tensor | None
    beta: Tensor | None

    @property
    def value(self) -> Tensor:
        y = self.n if self.gamma is None else self.n * self.gamma
        return y if self.beta is None else y + self.beta


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A block at one batch x (B, L, d); the letters are those of derivations §7 and §8."""

    spec: BlockSpec
    weights: dict[str, Tensor]
    x: Tensor
    front: NormState | None  # pre-norm: the norm in front of attention
    attention_input: Tensor  # (B, L, d)
    query: Tensor  # (B, H, L, dk)
    attention: Tensor  # A (B, H, L, L)
    allowed: Tensor | None  # 0/1, (·, ·, L, L) broadcastable; read only without softmax
    mixed: Tensor  # concat_h(A^h V^h) (B, L, H·dv)
    middle: NormState | None  # the norm in front of the feed-forward part
    ffn_input: Tensor | None  # v (B, L, d)
    hidden: HiddenUnits | None  # (B, L, d_ff)
    final: NormState | None  # post-norm: the block's last norm (norm1 when there is no d_ff)
    output: Tensor  # Z (B, L, d)

    @property
    def samples(self) -> int:
        return self.x.shape[0]

    @property
    def length(self) -> int:
        return self.x.shape[1]


def evaluate(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    mask: Tensor | None = None,
    *,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Evaluation:
    """Run the block at x (B, L, d); ``mask`` as in ``LinearisedBlock``.

    Differentiable by autograd when the weights are, so it is also the modules' ``forward``.
    ``drop`` acts on A, on the hidden units and on both sublayers' outputs.
    """
    check_block(spec, weights, x)
    require_plain(spec, "the dense closed form")
    weights = {name: weights[name] for name in WEIGHT_NAMES if name in weights}
    drop = drop or _keep
    front = _norm(spec, weights, "norm1", x) if spec.norm_first and spec.residual else None
    y = x if front is None else front.value
    query, attention, allowed, mixed = _attend(spec, weights, y, mask, drop)
    u = mixed
    if "output_weight" in weights:
        u = F.linear(mixed, weights["output_weight"], weights.get("output_bias"))
    if spec.residual:
        u = drop(u) + x
    middle, ffn_input, hidden, final, z = None, None, None, None, u
    if spec.d_ff is not None:
        middle = _norm(spec, weights, "norm2" if spec.norm_first else "norm1", u)
        ffn_input = u if middle is None else middle.value
        hidden = _hidden(spec, weights, ffn_input)
        s = F.linear(drop(hidden.value), weights["down_weight"], weights.get("down_bias"))
        z = drop(s) + (u if spec.norm_first else ffn_input)
    if spec.residual and not spec.norm_first:
        final = _norm(spec, weights, "norm1" if spec.d_ff is None else "norm2", z)
        z = z if final is None else final.value
    return Evaluation(
        spec=spec,
        weights=weights,
        x=x,
        front=front,
        attention_input=y,
        query=query,
        attention=attention,
        allowed=allowed,
        mixed=mixed,
        middle=middle,
        ffn_input=ffn_input,
        hidden=hidden,
        final=final,
        output=z,
    )


def evaluate_feed_forward(spec: BlockSpec, weights: Weights, x: Tensor) -> Evaluation:
    """The feed-forward part alone, Z = FFN(x) for x (B, L, d): no residual, no norm, no attention.

    Its ``Evaluation`` has empty attention tensors; a spec with ``norm_first=True`` and norm "none"
    makes the tail start at x.
    """
    hidden = _hidden(spec, weights, x)
    output = F.linear(hidden.value, weights["down_weight"], weights.get("down_bias"))
    empty = x.new_zeros(0)
    return Evaluation(
        spec=spec,
        weights=dict(weights),
        x=x,
        front=None,
        attention_input=x,
        query=empty,
        attention=empty,
        allowed=None,
        mixed=empty,
        middle=None,
        ffn_input=x,
        hidden=hidden,
        final=None,
        output=output,
    )


def _norm(spec: BlockSpec, weights: dict[str, Tensor], prefix: str, x: Tensor) -> NormState | None:
    gamma, beta = weights.get(f"{prefix}_weight"), weights.get(f"{prefix}_bias")
    if spec.norm == "none" and gamma is None and beta is None:
        return None
    n, inv_std = normalize(x, eps=spec.eps, norm=spec.norm)
    return NormState(prefix=prefix, n=n, inv_std=inv_std, gamma=gamma, beta=beta)


def _attend(
    spec: BlockSpec,
    weights: dict[str, Tensor],
    y: Tensor,
    mask: Tensor | None,
    drop: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    batch, length, _ = y.shape
    shared = spec.n_heads // spec.kv_heads

    def heads(name: str, size: int, repeat: int) -> Tensor:
        flat = F.linear(y, weights[f"{name}_weight"], weights.get(f"{name}_bias"))
        split = flat.view(batch, length, -1, size).transpose(1, 2)
        return split.repeat_interleave(repeat, 1) if repeat > 1 else split

    query = heads("query", spec.key_size, 1)
    key = heads("key", spec.key_size, shared)
    value = heads("value", spec.value_size, shared)
    if spec.rope_base is not None:
        rotation = Rotation.from_base(
            spec.rope_base, length=length, size=spec.key_size, dtype=y.dtype, device=y.device
        )
        query, key = rotation.apply(query), rotation.apply(key)
    bias, allowed = attention_mask(
        spec, mask, samples=batch, length=length, dtype=y.dtype, device=y.device
    )
    logits = (query * spec.logit_scale) @ key.mT
    zero_one = None if allowed is None else allowed.to(y.dtype)
    if spec.softmax:
        attention = torch.softmax(logits if bias is None else logits + bias, -1)
    else:
        attention = logits if zero_one is None else logits * zero_one
    mixed = (drop(attention) @ value).transpose(1, 2).reshape(batch, length, -1)
    return query, attention, zero_one, mixed


def _hidden(spec: BlockSpec, weights: Weights, v: Tensor) -> HiddenUnits:
    up = F.linear(v, weights["up_weight"], weights.get("up_bias"))
    gate = None
    if spec.gated:
        gate = F.linear(v, weights["gate_weight"], weights.get("gate_bias"))
    return hidden_units(spec.activation, up, gate)


def _keep(t: Tensor) -> Tensor:
    return t
