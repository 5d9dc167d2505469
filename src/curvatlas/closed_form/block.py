r"""Transformer blocks whose Hessian is written out, as ``nn.Module``s.

    block = TransformerBlockHessian(16, 64, n_heads=2).double()
    result = block.compute_block_hessian(x, target)         # x (L, d) or (B, L, d)
    result.H, result.H_outer, result.block("query_weight", "value_weight", part="functional")

The parameters stand in the order of ``WEIGHT_NAMES``; so do the rows of every Hessian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvatlas.budget import parse_bytes
from curvatlas.closed_form.assembly import Workspace
from curvatlas.closed_form.derivatives import BlockDerivatives
from curvatlas.closed_form.evaluation import evaluate, seeds_at
from curvatlas.closed_form.result import BlockHessian, ZeroStructure
from curvatlas.engines.tangent.block import LinearisedBlock, check_spec, weight_shapes
from curvatlas.engines.tangent.decomposition import DecomposedHessian
from curvatlas.engines.tangent.losses import OutputLoss
from curvatlas.engines.tangent.reading import map_module
from curvatlas.engines.tangent.structure import (
    WEIGHT_NAMES,
    Activation,
    BlockSpec,
    Norm,
    Weights,
    require_plain,
)
from curvatlas.linear_operator import PARTS, LinearOperator, Part, require_part
from curvatlas.problem.evaluation import say_evaluation_mode
from curvatlas.progress import track

_COLUMNS = 64


class ColumnDerivatives(BlockDerivatives):
    """``BlockDerivatives`` by products with unit vectors, for blocks without a token-wise form.

    Rotary positions tie the key's direction to the pair (query, key) and not to the query alone, so
    the sums over tokens of ``families`` do not exist: as exact, at the cost of P products.
    """

    def _strips(self, first: int, last: int, part: Part) -> Iterator[tuple[int, int, Tensor]]:
        """Columns [first, last) of the matrix, a few at a time: (start, stop, (P, k))."""
        for start in track(range(first, last, _COLUMNS), "Hessian columns"):
            stop = min(start + _COLUMNS, last)
            units = torch.zeros(self.size, stop - start, dtype=self.dtype, device=self.device)
            units[start:stop].fill_diagonal_(1.0)
            yield start, stop, self._part_columns(units, part)

    def dense(
        self,
        part: Part = "total",
        *,
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> Tensor:
        out = self._output(out)
        for start, stop, strip in self._strips(0, self.size, part):
            out[:, start:stop] = strip
        return out

    def block(self, a: str, b: str, part: Part = "total") -> Tensor:
        (row, rows), (column, columns) = self.offset(a), self.offset(b)
        strips = self._strips(column, column + columns, part)
        return torch.cat([strip[row : row + rows] for _, _, strip in strips], 1)

    def diagonal(self, part: Part = "total") -> Tensor:
        strips = self._strips(0, self.size, part)
        return torch.cat([strip[start:stop].diagonal() for start, stop, strip in strips])

    def frobenius(self, part: Part = "total") -> Tensor:
        count = len(self.names)
        squares = torch.zeros(count, count, dtype=self.dtype, device=self.device)
        for j, (start, size) in enumerate(self.offsets.values()):
            for _, _, strip in self._strips(start, start + size, part):
                for i, (row, rows) in enumerate(self.offsets.values()):
                    squares[i, j] += strip[row : row + rows].square().sum()
        return squares.sqrt()

    def outer_factor(self) -> Tensor:
        if self.seeds.factor is None:
            return super().outer_factor()  # raises with the reason
        phi = self.seeds.factor()  # (B, R, L, d)
        samples, rank = phi.shape[:2]
        seeds = torch.zeros(samples, rank, *phi.shape[:1], *phi.shape[2:], dtype=self.dtype)
        seeds = seeds.to(self.device)
        index = torch.arange(samples, device=self.device)
        seeds[index, :, index] = phi
        rates, _ = self.linearised.vjp(seeds.flatten(0, 1))
        return torch.cat([rates[name].flatten(1) for name in self.names], 1).mT

    def block_product(self, a: str, b: str, part: Part = "total") -> LinearOperator:
        return DecomposedHessian.block_product(self, a, b, part)  # by full products

    def exact_diagonal(self, part: Part = "total") -> Tensor | None:
        return None  # as dear as reading every column


_ATTENTION = ("front", "query", "key", "value", "output")
_ORDER = (*_ATTENTION, "middle", "gate", "up", "down", "final")
_BENT = ("gelu", "gelu_tanh", "silu")


class StructuralZeros:
    """Which blocks of H, H_o and H_f vanish for every value of the weights.

    Read off H_fg = Σ_i α_i (M_i α'_i + K_i δ'_i): a block is zero when both of its terms are. The
    outer part is zero exactly where a direction at the output is (key bias under softmax, queries
    and keys of one token). The functional part needs curvature between the two places: a norm
    behind them, a bent activation between them, attention itself, or a later weight that multiplies
    what the earlier one moves. No number is looked at.
    """

    def __init__(self, spec: BlockSpec, names: tuple[str, ...], *, length: int) -> None:
        self.spec, self.names, self.length = spec, names, length
        post = spec.residual and not spec.norm_first
        curved = spec.norm != "none"
        bent = spec.activation in _BENT
        fed = spec.d_ff is not None
        # Functional curvature at S, hidden, v, U (derivations §7 with Λ_Z = 0).
        self.at_S = post and curved
        self.at_hidden = {
            ("gate", "gate"): self.at_S or bent,
            ("gate", "up"): True,  # ∂²g/∂h_gate∂h_up = f', never identically zero
            ("up", "up"): self.at_S or (bent and not spec.gated),
        }
        self.hidden_v = self.at_S or bent or spec.gated
        self.at_v = self.hidden_v
        self.at_U = self.at_S or (fed and (self.at_v or curved))

    def is_zero(self, a: str, b: str, part: str = "total") -> bool:
        """Whether block (a, b) of ``part`` is zero whatever the weights are."""
        if self._dead(a) or self._dead(b):
            return True
        return part == "functional" and not self._functional(a, b)

    def pairs(self, part: str) -> tuple[tuple[str, str], ...]:
        """All structurally zero blocks (a, b), a not after b in the order of the names."""
        return tuple(
            (a, b)
            for i, a in enumerate(self.names)
            for b in self.names[i:]
            if self.is_zero(a, b, part)
        )

    def _dead(self, name: str) -> bool:
        """Parameters the output does not depend on at all."""
        if not self.spec.softmax:
            return False
        if self.length == 1 and name.startswith(("query_", "key_")):
            return True
        # A key bias adds the same number to a whole row of logits; turned by rotary positions it
        # differs from key to key and does count.
        return name == "key_bias" and self.spec.rope_base is None

    def _kind(self, name: str) -> str:
        role = name.removesuffix("_weight").removesuffix("_bias")
        if role == "norm1":
            if self.spec.norm_first:
                return "front"
            return "final" if self.spec.d_ff is None else "middle"
        if role == "norm2":
            return "middle" if self.spec.norm_first else "final"
        return role

    def _functional(self, a: str, b: str) -> bool:
        """Whether H_f(a, b) can be different from zero."""
        if _ORDER.index(self._kind(a)) > _ORDER.index(self._kind(b)):
            a, b = b, a
        f, g, weight = self._kind(a), self._kind(b), b.endswith("_weight")
        if g == "final":
            # β enters the output linearly and nothing follows it; γ multiplies what moves.
            return f != "final" and weight
        if f in _ATTENTION and g in _ATTENTION:
            return self._attention(f, g, a, b)
        if g == "middle":
            if f == "middle":
                return self.at_v
            return weight or self.at_v
        if g in ("gate", "up"):
            if f in ("gate", "up"):
                return self.at_hidden[(f, g)]
            return weight or self.hidden_v
        assert g == "down"
        if f == "down":
            return self.at_S
        return weight or self.at_S

    def _attention(self, f: str, g: str, a: str, b: str) -> bool:
        weight, softmax = b.endswith("_weight"), self.spec.softmax
        if g == "output":
            return self.at_U or (f != "output" and weight)
        if g == "value":
            # The row sum of A is constant under softmax: a value bias is not re-weighted.
            return self.at_U or (f != "value" and (weight or not softmax))
        if f == g and f != "front":
            return self.at_U or softmax  # without softmax the logits enter linearly
        return True


M = TypeVar("M", bound="ClosedFormBlock")


class ClosedFormBlock(nn.Module):
    """A block or attention layer with its weights as parameters and its derivatives closed."""

    def __init__(self, spec: BlockSpec, names: frozenset[str], *, dropout: float = 0.0) -> None:
        super().__init__()
        check_spec(spec)
        require_plain(spec, "the dense closed form")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}.")
        self.spec, self.dropout = spec, float(dropout)
        shapes = weight_shapes(spec)
        for name in WEIGHT_NAMES:  # named_parameters() follows the order of registration
            if name in names:
                self._place(name, nn.Parameter(torch.empty(shapes[name])))
        self.reset_parameters()

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        """Keep a weight, the names in the order of ``WEIGHT_NAMES``."""
        self.register_parameter(name, parameter)

    def reset_parameters(self) -> None:
        """Uniform weights of variance 1/(3·inputs), zero biases, unit gains."""
        for name, parameter in self.weights.items():
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
                block._place(name, nn.Parameter(weights[name].detach()))
        return block.eval()

    @classmethod
    def from_module(cls: type[M], module: nn.Module) -> M:
        """Wrap an existing layer (see ``engines.tangent.reading``), sharing its memory."""
        mapped = map_module(module)
        return cls.from_weights(mapped.spec, mapped.weights)

    @property
    def d_model(self) -> int:
        """The width of the stream."""
        return self.spec.d_model

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
        target: Tensor | None = None,
        *,
        loss: str | OutputLoss = "mse",
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        budget: int | float | str | None = None,
    ) -> BlockDerivatives:
        """The Hessian at x as an operator (``ca.eigenpairs(block.derivatives(x, y))``), with single
        blocks, exact diagonal, norms, traces, factor: nothing P × P unless asked for.

        Without a target the objective is ½‖Z‖², summed over the features and averaged over the
        tokens. Derivatives are those in evaluation mode, without dropout (said once in train mode).
        ``budget`` bounds the memory of per-token tensors ("200MB"); the batch is split to fit.
        """
        if self.training and self.dropout > 0:
            say_evaluation_mode(self, f"dropout of {self.dropout:g}")
        if x.ndim not in (2, 3):
            raise ValueError(f"x must be (L, d) or (B, L, d), got {tuple(x.shape)}.")
        if x.ndim == 2:
            x, target = x.unsqueeze(0), None if target is None else target.unsqueeze(0)
        weights = {name: p.detach().clone() for name, p in self.weights.items()}
        allowed = combine_masks(mask, key_padding_mask, x)
        evaluation = evaluate(self.spec, weights, x.detach(), allowed)
        seeds = seeds_at(evaluation.output, target, loss)
        if not bool(torch.isfinite(seeds.value)):
            raise ValueError(
                f"the loss is {float(seeds.value)}: inputs or weights are not finite, no Hessian."
            )
        limit = None if budget is None else parse_bytes(budget)
        linearise = partial(LinearisedBlock, self.spec, weights, x, allowed)
        kind = BlockDerivatives if self.spec.rope_base is None else ColumnDerivatives
        return kind(evaluation, seeds, linearise, budget=limit)

    def compute_hessian(
        self,
        x: Tensor,
        target: Tensor | None = None,
        loss: str | OutputLoss = "mse",
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

        Without a target the objective is the article's, ½‖Z‖² summed over the features and averaged
        over the tokens.
        """
        derivatives = self.derivatives(
            x, target, loss=loss, mask=mask, key_padding_mask=key_padding_mask, budget=budget
        )
        return block_hessian(derivatives, part=part, out=out, workspace=workspace)


class TransformerBlockHessian(ClosedFormBlock):
    """A Transformer block with its exact Hessian.

    By default post-norm, as in the papers' theorems; ``norm_first=True`` is the article's code,
    pre-norm: x + Att(norm1(x)), then x + FFN(norm2(x)).

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

    compute_block_hessian = ClosedFormBlock.compute_hessian


def block_hessian(
    derivatives: BlockDerivatives,
    *,
    part: Part,
    out: Tensor | None,
    workspace: Workspace | None,
) -> BlockHessian:
    """Assemble one part and wrap it with names, sizes and zero structure."""
    require_part(part)
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
