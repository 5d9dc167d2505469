r"""Losses as seeds: what a closed form needs to know of ℓ(Z), and nothing else.

The Hessian of a block is linear in the pair of seeds at its output Z (derivations §2):

    δ = ∂ℓ/∂Z   (the functional part)      and      Λ = ∂²ℓ/∂Z²   (the outer-product part).

To add a loss, write an object with ``seeds(outputs, targets) -> Seeds``:

    class HuberLoss(OutputLoss):
        def seeds(self, outputs, targets):
            ...
            return Seeds.from_blocks(value=..., delta=..., blocks=...)     # Λ_i for every token
            # or Seeds.from_factor(value=..., delta=..., factor=...)       # Λ = Σ_r φ_r φ_rᵀ

Outputs are (B, L, d). All seeds already contain the mean over samples or tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Value, δ and Λ of a loss at outputs Z (B, L, d).

    ``product``: Λ v for v of shape (…, B, L, d).
    ``blocks``: Λ_i (n, d, d) of a slice of the B·L flattened tokens; None when Λ couples tokens.
    ``factor``: φ (B, R, L, d) with Λ = Σ_r φ_r φ_rᵀ per sample, R small; None when Λ is token-wise
    and has no cheap factor.
    ``convex``: whether Λ is known to be positive semi-definite.
    ``overwrite``: ``product`` written over v, for a caller that needs v no more; None: only fresh.
    """

    value: Tensor  # ()
    delta: Tensor  # (B, L, d)
    product: Callable[[Tensor], Tensor]
    blocks: Callable[[slice], Tensor] | None
    factor: Callable[[], Tensor] | None = None
    convex: bool = False
    overwrite: Callable[[Tensor], Tensor] | None = None

    @property
    def couples_tokens(self) -> bool:
        """Whether Λ has entries between different tokens (pooled and class-token losses)."""
        return self.blocks is None

    @classmethod
    def from_blocks(cls, *, value: Tensor, delta: Tensor, blocks: Tensor) -> Seeds:
        """A token-wise loss from its Λ_i, ``blocks`` (B, L, d, d)."""
        flat = blocks.reshape(-1, *blocks.shape[-2:])
        return cls(
            value=value,
            delta=delta,
            product=lambda v: (blocks @ v.unsqueeze(-1)).squeeze(-1),
            blocks=lambda tokens: flat[tokens],
        )

    @classmethod
    def from_factor(cls, *, value: Tensor, delta: Tensor, factor: Tensor) -> Seeds:
        """A loss that couples tokens from the factor φ (B, R, L, d) of Λ."""

        def product(v: Tensor) -> Tensor:
            along = torch.einsum("brld,...bld->...br", factor, v)
            return torch.einsum("brld,...br->...bld", factor, along)

        return cls(
            value=value,
            delta=delta,
            product=product,
            blocks=None,
            factor=lambda: factor,
            convex=True,
        )


class OutputLoss:
    """A loss of the block's output; subclasses give ``seeds``."""

    def seeds(self, outputs: Tensor, targets: Tensor) -> Seeds:
        """Value, δ and Λ at ``outputs`` (B, L, d)."""
        raise TypeError(f"{type(self).__name__} does not define seeds(outputs, targets).")


class TokenSquaredError(OutputLoss):
    """ℓ = ‖Z − Y‖²/(L d), averaged over samples:  δ = 2(Z−Y)/(BLd),  Λ_i = 2/(BLd) I."""

    def seeds(self, outputs: Tensor, targets: Tensor) -> Seeds:
        if targets.shape != outputs.shape:
            raise ValueError(
                f"mse needs targets of the outputs' shape {tuple(outputs.shape)}, "
                f"got {tuple(targets.shape)}."
            )
        _check_same(outputs, targets)
        d, scale = outputs.shape[-1], 2.0 / outputs.numel()
        error = outputs - targets

        def blocks(tokens: slice) -> Tensor:
            count = len(range(*tokens.indices(outputs.numel() // d)))
            identity = torch.eye(d, dtype=outputs.dtype, device=outputs.device)
            return (scale * identity).expand(count, d, d)

        return Seeds(
            value=error.square().mean(),
            delta=scale * error,
            product=lambda v: scale * v,
            blocks=blocks,
            convex=True,
            overwrite=lambda v: v.mul_(scale),
        )


class TokenCrossEntropy(OutputLoss):
    """Cross-entropy of every token, mean over the valid ones, the outputs being the logits.

    δ_i = w_i(π_i − e_y),  Λ_i = w_i(diag π_i − π_iπ_iᵀ),  w_i = 1/(valid tokens), 0 if ignored.
    """

    def __init__(self, *, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def seeds(self, outputs: Tensor, targets: Tensor) -> Seeds:
        value, error, probabilities, weights = _cross_entropy(outputs, targets, self.ignore_index)

        def blocks(tokens: slice) -> Tensor:
            p, w = probabilities.flatten(0, -2)[tokens], weights.flatten()[tokens]
            return (torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)) * w[:, None, None]

        return Seeds(
            value=value,
            delta=error,
            product=lambda v: softmax_curvature(probabilities, weights, _dense_copy(v)),
            blocks=blocks,
            convex=True,
            overwrite=lambda v: softmax_curvature(probabilities, weights, v),
        )


class LinearHeadCrossEntropy(OutputLoss):
    """Token cross-entropy on logits = Z Wᵀ + b of a fixed linear head (a language-model head).

    δ = W^T(π − e_y) w,  Λ_i = w_i Wᵀ(diag π_i − π_iπ_iᵀ)W;  weight (C, d), bias (C,).
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100
    ) -> None:
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.ignore_index = ignore_index

    def seeds(self, outputs: Tensor, targets: Tensor) -> Seeds:
        head = self.weight
        _check_head(outputs, head)
        logits = F.linear(outputs, head, self.bias)
        value, error, probabilities, weights = _cross_entropy(logits, targets, self.ignore_index)

        def blocks(tokens: slice) -> Tensor:
            p, w = probabilities.flatten(0, -2)[tokens], weights.flatten()[tokens]
            mean = p @ head  # (n, d)
            weighted = (p * w.unsqueeze(-1)).unsqueeze(-1) * (head - mean.unsqueeze(-2))
            return weighted.mT @ head

        return Seeds(
            value=value,
            delta=error @ head,
            product=lambda v: softmax_curvature(probabilities, weights, v @ head.mT) @ head,
            blocks=blocks,
            convex=True,
        )


class PooledCrossEntropy(OutputLoss):
    """Cross-entropy of one label a sample on logits = W pool(Z) + b, mean over samples.

    ``pooling``: "mean" over tokens, the "first" (class) token, or the "last". Λ couples tokens but
    has rank ≤ C − 1 a sample:  φ_{c,i} = a_i Wᵀ(√π_c e_c − √π_c π)/√B, a the pooling weights.
    ``token_weights`` (B, L) replaces the pooling weights (padded batches); rows should sum to 1.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        pooling: Literal["mean", "first", "last"] = "mean",
        token_weights: Tensor | None = None,
    ) -> None:
        if pooling not in ("mean", "first", "last"):
            raise ValueError(f"unknown pooling {pooling!r}: choose mean, first or last.")
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.pooling = pooling
        self.token_weights = token_weights

    def seeds(self, outputs: Tensor, targets: Tensor) -> Seeds:
        _check_head(outputs, self.weight)
        pool = self._pooling_weights(outputs)  # (B, L)
        pooled = torch.einsum("bl,bld->bd", pool, outputs)
        logits = F.linear(pooled, self.weight, self.bias)
        value, error, probabilities, weights = _cross_entropy(logits, targets, None)
        root = probabilities.sqrt()
        # column c of diag √π − π √πᵀ, seen through the head: (B, C, d)
        mean = probabilities @ self.weight
        columns = root.unsqueeze(-1) * (self.weight - mean.unsqueeze(-2))
        columns = columns * weights.sqrt()[:, None, None]
        return Seeds.from_factor(
            value=value,
            delta=pool.unsqueeze(-1) * (error @ self.weight).unsqueeze(-2),
            factor=pool[:, None, :, None] * columns.unsqueeze(-2),
        )

    def _pooling_weights(self, outputs: Tensor) -> Tensor:
        batch, length, _ = outputs.shape
        if self.token_weights is not None:
            if self.token_weights.shape != (batch, length):
                raise ValueError(
                    f"token_weights must be ({batch}, {length}), "
                    f"got {tuple(self.token_weights.shape)}."
                )
            return self.token_weights.to(outputs)
        if self.pooling == "mean":
            return outputs.new_full((batch, length), 1.0 / length)
        pool = outputs.new_zeros(batch, length)
        pool[:, 0 if self.pooling == "first" else -1] = 1.0
        return pool


_BY_NAME: dict[str, Callable[[], OutputLoss]] = {
    "mse": TokenSquaredError,
    "cross_entropy": TokenCrossEntropy,
}


def resolve_loss(loss: str | OutputLoss) -> OutputLoss:
    """The loss named "mse" or "cross_entropy", or the ``OutputLoss`` itself."""
    if isinstance(loss, str):
        if loss not in _BY_NAME:
            raise ValueError(
                f"unknown loss {loss!r}: use {' or '.join(map(repr, _BY_NAME))}, or an OutputLoss "
                "object."
            )
        return _BY_NAME[loss]()
    if not isinstance(loss, OutputLoss):
        raise TypeError(
            "loss must be a name or a curvatlas.layers.losses.OutputLoss, "
            f"got {type(loss).__name__}."
        )
    return loss


def _cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value (), weighted error w(π − e_y), π and w of logits (…, C) and integer targets (…)."""
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy needs one class index for each of {tuple(logits.shape[:-1])}, "
            f"got targets of shape {tuple(targets.shape)}."
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise TypeError(f"cross_entropy needs integer targets, got {targets.dtype}.")
    if targets.device != logits.device:
        raise ValueError(f"targets are on {targets.device}, the block on {logits.device}.")
    classes = logits.shape[-1]
    valid = torch.ones_like(targets, dtype=torch.bool)
    if ignore_index is not None:
        valid = targets != ignore_index
    inside = (targets >= 0) & (targets < classes)
    if bool((valid & ~inside).any()):
        raise ValueError(f"a target lies outside 0 … {classes - 1}.")
    if not bool(valid.any()):
        raise ValueError("every target is ignored: the mean over no token is not defined.")
    weights = valid.to(logits.dtype) / valid.sum()
    labels = torch.where(valid, targets, 0).unsqueeze(-1)
    log_probabilities = torch.log_softmax(logits, -1)
    value = -(log_probabilities.gather(-1, labels).squeeze(-1) * weights).sum()
    probabilities = log_probabilities.exp()
    error = probabilities.scatter_add(-1, labels, torch.full_like(labels, -1, dtype=logits.dtype))
    return value, error * weights.unsqueeze(-1), probabilities, weights


def _dense_copy(v: Tensor) -> Tensor:
    return v.clone(memory_format=torch.contiguous_format)


_FUSED_CLASSES = 64  # fewer: torch's fused kernel is slower than the passes it saves


def softmax_curvature(probabilities: Tensor, weights: Tensor, v: Tensor) -> Tensor:
    """w (diag π − ππᵀ) v, written over v (…, *π.shape).

    π ⊙ (v − π·v) is what torch's softmax calls its backward pass: one pass over the logits instead
    of four (250 against 950 µs for 512 tokens and 1000 classes in float32).
    """
    if probabilities.shape[-1] < _FUSED_CLASSES or not v.is_cpu:
        along = (probabilities * v).sum(-1, keepdim=True)
        return v.sub_(along).mul_(probabilities).mul_(weights.unsqueeze(-1))
    for column in v.view(-1, *probabilities.shape):
        torch._softmax_backward_data(column, probabilities, -1, v.dtype, grad_input=column)
    return v.mul_(weights.unsqueeze(-1))


def _check_head(outputs: Tensor, weight: Tensor) -> None:
    if weight.ndim != 2 or weight.shape[1] != outputs.shape[-1]:
        raise ValueError(
            f"the head's weight must be (classes, {outputs.shape[-1]}), got {tuple(weight.shape)}."
        )
    _check_same(outputs, weight)


def _check_same(outputs: Tensor, other: Tensor) -> None:
    if other.dtype != outputs.dtype:
        raise TypeError(
            f"the block computes in {outputs.dtype}, the loss got {other.dtype}: "
            f"convert with .to({outputs.dtype})."
        )
    if other.device != outputs.device:
        raise ValueError(f"the block lives on {outputs.device}, the loss on {other.device}.")


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
