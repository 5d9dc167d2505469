r"""Transformer blocks whose Hessian is written out, as ``nn.Module``s.

    block = TransformerBlockHessian(16, 64, n_heads=2).double()
    result = block.compute_block_hessian(x, target)         # x (L, d) or (B, L, d)
    result.H, result.H_outer, result.block("query_weight", "value_weight", part="functional")

The parameters stand in the order of ``WEIGHT_NAMES``; so do the rows of every Hessian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvatlas.blocks.adapters import map_module
from curvatlas.blocks.columns import ColumnDerivatives
from curvatlas.blocks.derivatives import BlockDerivatives
from curvatlas.blocks.evaluation import evaluate
from curvatlas.blocks.losses import Loss, resolve_loss
from curvatlas.blocks.operands import Workspace
from curvatlas.blocks.products import PARTS, Part
from curvatlas.blocks.products_check import check_spec, weight_shapes
from curvatlas.blocks.result import BlockHessian, ZeroStructure
from curvatlas.blocks.structure import WEIGHT_NAMES, Activation, BlockSpec, Norm, Weights
from curvatlas.blocks.zeros import StructuralZeros
from curvatlas.budget import parse_bytes

M = TypeVar("M", bound="ClosedFormBlock")


class ClosedFormBlock(nn.Module):
    """A block or attention layer with its weights as parameters and its derivatives closed."""

    def __init__(self, spec: BlockSpec, names: frozenset[str], *, dropout: float = 0.0) -> None:
        super().__init__()
        check_spec(spec)
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}.")
        self.spec, self.dropout = spec, float(dropout)
        for name, shape in weight_shapes(spec).items():
            if name in names:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        # named_parameters() follows the order of registration, which is that of WEIGHT_NAMES
        self._order()
        self.reset_parameters()

    def _order(self) -> None:
        held = dict(self._parameters)
        self._parameters.clear()
        for name in WEIGHT_NAMES:
            if name in held:
                self._parameters[name] = held[name]

    def reset_parameters(self) -> None:
        """Uniform weights of variance 1/(3·inputs), zero biases, unit gains."""
        for name, parameter in self.named_parameters():
            if name.startswith("norm"):
                nn.init.constant_(parameter, 1.0 if name.endswith("_weight") else 0.0)
            elif name.endswith("_weight"):
                nn.init.kaiming_uniform_(parameter, a=5**0.5)
            else:
                nn.init.zeros_(parameter)

    @classmethod
    def from_weights(cls: type[M], spec: BlockSpec, weights: Weights) -> M:
        """A module of this spec that shares the given weights' memory."""
        block = cls.__new__(cls)
        ClosedFormBlock.__init__(block, spec, frozenset())
        for name in WEIGHT_NAMES:
            if name in weights:
                block.register_parameter(name, nn.Parameter(weights[name].detach()))
        return block.eval()

    @classmethod
    def from_module(cls: type[M], module: nn.Module) -> M:
        """Wrap an existing layer (see ``curvatlas.blocks.adapters``), sharing its memory."""
        mapped = map_module(module)
        return cls.from_weights(mapped.spec, mapped.weights)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters by name, in flat order."""
        return dict(self.named_parameters())

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """The block itself: (L, d) or (B, L, d) → the same shape.

        ``mask``: boolean, True where attention is allowed, or floating and added to the logits.
        ``key_padding_mask`` (B, L): True marks keys to ignore, as in ``nn.MultiheadAttention``.
        """
        batched = x.unsqueeze(0) if x.ndim == 2 else x
        allowed = combine_masks(mask, key_padding_mask, batched)
        drop: Callable[[Tensor], Tensor] | None = None
        if self.training and self.dropout > 0:
            drop = lambda t: F.dropout(t, self.dropout)  # noqa: E731
        output = evaluate(self.spec, self.weights, batched, allowed, drop=drop).output
        return output.squeeze(0) if x.ndim == 2 else output

    def derivatives(
        self,
        x: Tensor,
        target: Tensor,
        *,
        loss: str | Loss = "mse",
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        budget: int | float | str | None = None,
    ) -> BlockDerivatives:
        """Single blocks, exact diagonal, norms, traces, factor: nothing P × P unless asked for.

        ``budget`` bounds the memory of per-token tensors ("200MB"); the batch is split to fit.
        """
        self._refuse_dropout()
        if x.ndim not in (2, 3):
            raise ValueError(f"x must be (L, d) or (B, L, d), got {tuple(x.shape)}.")
        if x.ndim == 2:
            x, target = x.unsqueeze(0), target.unsqueeze(0)
        weights = {name: p.detach().clone() for name, p in self.weights.items()}
        allowed = combine_masks(mask, key_padding_mask, x)
        evaluation = evaluate(self.spec, weights, x.detach(), allowed)
        seeds = resolve_loss(loss).seeds(evaluation.output, target)
        if not bool(torch.isfinite(seeds.value)):
            raise ValueError(
                f"the loss is {float(seeds.value)}: inputs or weights are not finite, no Hessian."
            )
        limit = None if budget is None else parse_bytes(budget)
        found = BlockDerivatives(evaluation, seeds, budget=limit)
        if self.spec.rope_base is not None:
            return ColumnDerivatives.of(found, weights, allowed)
        return found

    def _refuse_dropout(self) -> None:
        if self.training and self.dropout > 0:
            raise ValueError(
                f"dropout of {self.dropout:g} is active: call .eval() first, the Hessian of a "
                "random loss is not defined."
            )


class TransformerBlockHessian(ClosedFormBlock):
    """A Transformer block with its exact Hessian.

    Options as in ``nn.TransformerEncoderLayer``; beyond it: ``norm`` ("layer", "rms", "none"),
    ``gated`` feed-forward (SwiGLU with activation="silu"), ``n_kv_heads``, ``rope_base``, head
    sizes ``d_k`` and ``d_v``, ``output_projection=False`` (one head of the block's width),
    ``affine=False`` (norms without γ, β), ``softmax=False`` (linear attention).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        n_heads: int = 1,
        dropout: float = 0.0,
        *,
        norm_first: bool = False,
        activation: Activation = "gelu",
        bias: bool = True,
        causal: bool = False,
        norm: Norm = "layer",
        gated: bool = False,
        affine: bool = True,
        output_projection: bool = True,
        n_kv_heads: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        eps: float = 1e-5,
        softmax: bool = True,
        scale: float | None = None,
        rope_base: float | None = None,
    ) -> None:
        spec = BlockSpec(
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            d_k=d_k,
            d_v=d_v,
            d_ff=d_ff,
            norm=norm,
            norm_first=norm_first,
            activation=activation,
            gated=gated,
            eps=eps,
            causal=causal,
            softmax=softmax,
            scale=scale,
            rope_base=rope_base,
        )
        check_spec(spec)
        names = set(weight_shapes(spec))
        if not output_projection:
            names -= {"output_weight", "output_bias"}
        if not affine or norm == "none":
            names -= {"norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias"}
        if not bias:
            names = {name for name in names if not name.endswith("_bias")}
        if norm == "rms":
            names -= {"norm1_bias", "norm2_bias"}
        super().__init__(spec, frozenset(names), dropout=dropout)

    def compute_block_hessian(
        self,
        x: Tensor,
        target: Tensor,
        loss: str | Loss = "mse",
        *,
        part: Part = "total",
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        budget: int | float | str | None = None,
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> BlockHessian:
        r"""The Hessian of the loss over all parameters, H = H_o + H_f.

        H_o = Jᵀ Λ J and H_f = Σ_z δ_z ∂²Z_z with δ = ∂ℓ/∂Z, Λ = ∂²ℓ/∂Z² at the output Z. ``part``
        is assembled at once (into ``out`` (P, P) when given, with the scratch memory of
        ``workspace``: reuse both and nothing is allocated), the others when first read.
        """
        found = self.derivatives(
            x, target, loss=loss, mask=mask, key_padding_mask=key_padding_mask, budget=budget
        )
        return block_hessian(found, part=part, out=out, workspace=workspace)


def block_hessian(
    derivatives: BlockDerivatives,
    *,
    part: Part,
    out: Tensor | None,
    workspace: Workspace | None,
) -> BlockHessian:
    """Assemble one part and wrap it with names, sizes and zero structure."""
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}.")
    evaluation = derivatives.evaluation
    zeros = StructuralZeros(evaluation.spec, derivatives.names, length=evaluation.length)
    return BlockHessian(
        loss=float(derivatives.seeds.value),
        names=derivatives.names,
        block_sizes={name: size for name, (_, size) in derivatives.offsets.items()},
        structure=ZeroStructure(zeros={p: zeros.pairs(p) for p in PARTS}),
        attention=evaluation.attention if evaluation.attention.numel() else None,
        parts={part: derivatives.dense(part, out=out, workspace=workspace)},
        _source=derivatives.dense,
    )


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
