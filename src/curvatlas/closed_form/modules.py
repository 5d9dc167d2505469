r"""The article's modules whose Hessians are written out: block, attention, feed-forward part, norm.

    block = TransformerBlockHessian(16, 64, n_heads=2).double()
    result = block.compute_block_hessian(x, target)         # x (L, d) or (B, L, d)
    result.H, result.H_outer, result.block("query_weight", "value_weight", part="functional")

The parameters stand in the order of ``WEIGHT_NAMES``; so do the rows of every Hessian. Without a
target the objective is the article's, ½‖Z‖² summed over the features and averaged over the tokens.
Derivatives are those without dropout, which is said once in train mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from curvatlas.budget import parse_bytes
from curvatlas.closed_form.assembly import Workspace
from curvatlas.closed_form.hessian import BlockDerivatives, ColumnDerivatives
from curvatlas.closed_form.result import BlockHessian, ZeroStructure
from curvatlas.closed_form.zeros import structural_zeros
from curvatlas.layers.activations import hidden_units
from curvatlas.layers.checks import check_spec, weight_shapes
from curvatlas.layers.losses import OutputLoss, seeds_at
from curvatlas.layers.norms import norm_hessian, norm_jacobian, norm_second, normalize
from curvatlas.layers.structure import WEIGHT_NAMES, Activation, BlockSpec, Norm
from curvatlas.linear_operator import Part, require_part
from curvatlas.operators.reading import map_module, map_norm
from curvatlas.precision import COMPUTED
from curvatlas.problem.evaluation import in_evaluation_mode, say_evaluation_mode
from curvatlas.results import Result
from curvatlas.zoo.block import (
    ACTIVATIONS,
    Block,
    combine_masks,
    feed_forward,
    linear,
)

M = TypeVar("M", bound="ClosedFormBlock")
N = TypeVar("N", bound="LayerNormHessian")
Loss = str | OutputLoss
Shape = int | tuple[int, ...] | list[int]


class ClosedFormBlock(Block):
    """A block, or a part of one, with its weights as parameters and its derivatives closed."""

    # The article's names: role of a weight → the nn.Linear that holds it and its bias.
    linear_maps: ClassVar[Mapping[str, str]] = {}

    def _build(self, spec: BlockSpec, dropout: float, absent: Mapping[str, bool]) -> None:
        """A block of ``spec``, without the weights whose pattern ``absent`` marks."""
        check_spec(spec)
        patterns = [pattern for pattern, marked in absent.items() if marked]
        names = [n for n in weight_shapes(spec) if not any(fnmatch(n, p) for p in patterns)]
        super().__init__(spec, names, dropout=dropout)

    @classmethod
    def from_module(cls: type[M], module: nn.Module) -> M:
        """Wrap an existing layer of torch or a model library, sharing its memory."""
        mapped = map_module(module)
        return cls.from_weights(mapped.spec, mapped.weights)

    def _path(self, name: str) -> tuple[str, str]:
        """The submodule ("" for this one) that holds a weight, and its name there."""
        role, _, kind = name.rpartition("_")
        return (self.linear_maps[role], kind) if role in self.linear_maps else ("", name)

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        module, kind = self._path(name)
        if self.linear_maps and not module:
            raise ValueError(f"{type(self).__name__} has no {name}: wrap a layer without it.")
        if kind == "weight":  # comes before the bias
            rows, columns = parameter.shape
            self.add_module(module, nn.Linear(columns, rows, bias=False, device="meta"))
        self.get_submodule(module).register_parameter(kind, parameter)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters by the names of the Hessian's blocks, in flat order."""
        named = dict(super().named_parameters())
        places = {name: ".".join(filter(None, self._path(name))) for name in WEIGHT_NAMES}
        return {name: named[place] for name, place in places.items() if place in named}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """In flat order: the weights of Q, K and V before their biases."""
        order = {id(parameter): index for index, parameter in enumerate(self.weights.values())}
        named = super().named_parameters(*args, **kwargs)
        yield from sorted(named, key=lambda pair: order.get(id(pair[1]), len(order)))

    def _now(self, x: Tensor) -> dict[str, Tensor]:
        """Copies of the weights, which fit x, for derivatives without dropout."""
        if self.training and self.dropout.p > 0:
            say_evaluation_mode(self, f"dropout of {self.dropout.p:g}")
        weights = {name: parameter.detach().clone() for name, parameter in self.weights.items()}
        _check_tokens(x, self.d_model, next(iter(weights.values())))
        return weights

    def derivatives(
        self,
        x: Tensor,
        target: Tensor | None = None,
        *,
        loss: Loss = "mse",
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        budget: int | float | str | None = None,
    ) -> BlockDerivatives:
        """The Hessian at x as an operator (``ca.eigenpairs(block.derivatives(x, y))``), with single
        blocks, exact diagonal, norms, traces, factor: nothing P × P unless asked for.

        ``budget`` bounds the memory of per-token tensors ("200MB"); the batch is split to fit.
        """
        weights, samples = self._now(x), _batched(x.detach(), x.ndim)
        if "query_weight" in weights and x.ndim not in (2, 3):
            raise ValueError(f"x must be (L, d) or (B, L, d), got {tuple(x.shape)}.")
        allowed = combine_masks(mask, key_padding_mask, samples)
        with in_evaluation_mode(self), torch.no_grad():
            output, A = self.passed(samples, allowed)
        seeds = seeds_at(output, None if target is None else _batched(target, x.ndim), loss)
        if not bool(torch.isfinite(seeds.value)):
            raise ValueError(
                f"the loss is {float(seeds.value)}: inputs or weights are not finite, no Hessian."
            )
        kind = BlockDerivatives if self.spec.rope_base is None else ColumnDerivatives
        room = None if budget is None else parse_bytes(budget)
        return kind(self.spec, weights, samples, seeds, attention=A, mask=allowed, budget=room)

    def compute_hessian(
        self,
        x: Tensor,
        target: Tensor | None = None,
        loss: Loss = "mse",
        *,
        part: Part = "total",
        out: Tensor | None = None,
        workspace: Workspace | None = None,
        **options: Any,
    ) -> BlockHessian:
        r"""The Hessian of the loss over all parameters, H = H_o + H_f; options of ``derivatives``.

        H_o = Jᵀ Λ J and H_f = Σ_z δ_z ∂²Z_z with δ = ∂ℓ/∂Z, Λ = ∂²ℓ/∂Z² at the output Z. ``part``
        is assembled at once (into ``out`` (P, P) when given, with the scratch memory of
        ``workspace``: reuse both and nothing is allocated), the others when first read.
        """
        require_part(part)
        found = self.derivatives(x, target, loss=loss, **options)
        zeros = structural_zeros(self.spec, found.names, length=min(2, found.length))
        return BlockHessian(
            loss=float(found.seeds.value),
            names=found.names,
            block_sizes={name: size for name, (_, size) in found.offsets.items()},
            structure=ZeroStructure(zeros=dict(zeros)),
            attention=found.attention,
            parts={part: found.dense(part, out=out, workspace=workspace)},
            _source=found.dense,
        )


def _batched(t: Tensor, axes: int) -> Tensor:
    """x of so many axes, or a target of it, with one axis in front of the tokens: (B, L, …)."""
    return t[(None,) * (3 - axes)] if axes < 3 else t.flatten(0, axes - 3)


class TransformerBlockHessian(ClosedFormBlock):
    """A Transformer block with its exact Hessian.

    By default post-norm, as in the papers' theorems; ``norm_first=True`` is the article's code,
    pre-norm: x + Att(norm1(x)), then x + FFN(norm2(x)).

    Options as in ``nn.TransformerEncoderLayer``; beyond it ``norm`` ("layer", "rms", "none"),
    ``affine=False`` (norms without γ, β), ``output_projection=False`` (one head of the block's
    width), and as ``form`` what ``BlockSpec`` names: ``causal``, ``gated`` feed-forward (SwiGLU
    with activation="silu"), ``n_kv_heads``, ``rope_base``, head sizes ``d_k`` and ``d_v``, ``eps``,
    ``scale``, ``softmax=False`` (linear attention).
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
        norm: Norm = "layer",
        affine: bool = True,
        output_projection: bool = True,
        **form: Any,
    ) -> None:
        form |= {"norm": norm, "norm_first": norm_first, "activation": activation}
        spec = BlockSpec(d_model=d_model, d_ff=d_ff, n_heads=n_heads, **form)
        absent = {
            "output_*": not output_projection,
            "norm*": not affine or norm == "none",
            "norm*_bias": norm == "rms",
            "*_bias": not bias,
        }
        self._build(spec, dropout, absent)

    compute_block_hessian = ClosedFormBlock.compute_hessian


@dataclass(frozen=True, kw_only=True)
class AttentionMoments(Result):
    """Central moments of the tokens under each row of A (derivations §4).

    M1_i = Σ_j A_ij x_j,  M2_i = Σ_j A_ij x̃x̃ᵀ,  M3_i = Σ_j A_ij x̃ ⊗ x̃ ⊗ x̃,  x̃ = x_j − M1_i.
    """

    M1: Tensor  # (B, heads, L, d)
    M2: Tensor  # (B, heads, L, d, d)
    M3: Tensor  # (B, heads, L, d, d, d)
    attention: Tensor  # A (B, heads, L, L)


class SelfAttentionHessian(ClosedFormBlock):
    """Self-attention Z = Att(X) with its exact Hessian, its weights in ``nn.Linear`` maps.

    As in the article ``SelfAttentionHessian(d_model, n_heads)`` has an output projection, which
    alone has a bias. Without ``n_heads`` it is the papers' layer: one head of value size d_model,
    whose values are the output. ``output_projection`` and ``bias`` (of all four maps) choose;
    ``form`` as of ``TransformerBlockHessian``.

    ``result["QK"]``, ``result.block("Q", "K", part="functional")`` are blocks (derivations §9);
    the article's ``result["hessian_estimates"]["H_WQ"]`` is ‖QQ‖_F, no square of a gradient.
    """

    linear_maps: ClassVar = {"query": "W_Q", "key": "W_K", "value": "W_V", "output": "out_proj"}
    W_Q: nn.Linear
    W_K: nn.Linear
    W_V: nn.Linear
    out_proj: nn.Linear

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        d_k: int | None = None,
        d_v: int | None = None,
        *,
        output_projection: bool | None = None,
        bias: bool | None = None,
        dropout: float = 0.0,
        **form: Any,
    ) -> None:
        form |= {"n_heads": 1 if n_heads is None else n_heads, "d_k": d_k, "d_v": d_v}
        spec = BlockSpec(d_model=d_model, norm="none", residual=False, **form)
        check_spec(spec)
        if output_projection is None:
            output_projection = n_heads is not None or spec.value_size != d_model
        unbiased = {"[!o]*_bias": not bias, "output_bias": bias is False}
        self._build(spec, dropout, {"output_*": not output_projection} | unbiased)

    def forward(self, x: Tensor, return_attention: bool = False, **masks: Any) -> Any:
        """(L, d) or (B, L, d) → the same shape; with ``return_attention`` also A (B, heads, L, L),
        (heads, L, L) of one sequence. ``mask`` and ``key_padding_mask`` as in ``Block``."""
        outputs, attention = self.passed(x, **masks)
        return (outputs, attention) if return_attention else outputs

    compute_attention_hessian = ClosedFormBlock.compute_hessian

    def moments(self, x: Tensor, **masks: Any) -> AttentionMoments:
        """First three central moments of the tokens x (L, d) or (B, L, d) under every row of A."""
        if not self.spec.softmax:
            raise ValueError(
                "moments need softmax attention: without it the rows of A are no weights."
            )
        x = _batched(x.detach(), x.ndim)
        with torch.no_grad():
            A = self.passed(x, **masks)[1]
        M1 = A @ x.unsqueeze(1)
        offsets = x[:, None, None] - M1.unsqueeze(-2)  # (B, H, L, L, d)
        weighted = A.unsqueeze(-1) * offsets
        M3 = torch.einsum("bhija,bhijc,bhije->bhiace", weighted, offsets, offsets)
        return AttentionMoments(M1=M1, M2=weighted.mT @ offsets, M3=M3, attention=A)


@dataclass(frozen=True, kw_only=True)
class FeedForwardJacobians(Result):
    """Jacobians of y = x + W2 g(h), h = W1 x + b1, at every token; indexable by field name.

    d_ffn_d_w1[…, o, k, a] = W2[o, k] (∂g_k/∂h_k) x_a,    d_ffn_d_w2[…, o, o', k] = δ_oo' g_k
    """

    d_ffn_d_w1: Tensor  # (…, d, d_ff, d), the up-projection
    d_ffn_d_w2: Tensor  # (…, d, d, d_ff)
    d_ffn_d_gate: Tensor | None  # (…, d, d_ff, d), gated only
    activation_derivative: Tensor  # ∂g/∂h of the up-projection (…, d_ff)
    intermediate: Tensor  # h, before the activation (…, d_ff)


class FFNHessian(ClosedFormBlock):
    r"""y = x + W2 act(W1 x + b1) + b2 with exact derivatives; ``w1`` and ``w2`` are ``nn.Linear``.

    gated: y = x + W2 (act(W_g x) ⊙ W1 x), with a third map ``w_gate``. x is (…, d). Its Hessian is
    W2W2 = Σ ĝĝᵀ ⊗ Λ,  W1W1 = Σ v̂v̂ᵀ ⊗ (D1 W2ᵀ Λ W2 D1 + ρ),  ρ = D2 ⊙ W2ᵀδ,
    W1W2 = Σ v̂ ĝ (D1 W2ᵀ Λ) + v̂ D1 δ (derivations §9).
    """

    linear_maps: ClassVar = {"gate": "w_gate", "up": "w1", "down": "w2"}
    w1: nn.Linear
    w2: nn.Linear

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        dropout: float = 0.0,
        activation: Activation = "gelu",
        *,
        bias: bool = True,
        gated: bool = False,
    ) -> None:
        form: dict[str, Any] = {"norm": "none", "norm_first": True, "activation": activation}
        spec = BlockSpec(d_model=d_model, d_ff=d_ff, gated=gated, **form)
        self._build(spec, dropout, {"[!gud]*": True, "*_bias": not bias})

    def reset_parameters(self) -> None:
        """As ``nn.Linear`` does, biases too."""
        for linear_map in self.children():
            if isinstance(linear_map, nn.Linear):
                linear_map.reset_parameters()

    @property
    def activation(self) -> Any:
        """What stands between the two maps."""
        return ACTIVATIONS[self.spec.activation]

    def passed(self, x: Tensor, mask: Any = None, key_padding_mask: Any = None) -> Any:
        """(…, d) → (…, d), the residual x included, dropout on what is added to it; and no A."""
        if mask is not None or key_padding_mask is not None:
            raise ValueError("a feed-forward part has no attention: it takes no mask.")
        added = feed_forward(self.spec, self.weights, x)
        return x + self.dropout(added), None

    def compute_ffn_jacobians(self, x: Tensor) -> FeedForwardJacobians:
        """Jacobians with respect to the weight matrices at every token of x (…, d)."""
        weights, x = self._now(x), x.detach()
        h = linear(x, weights, "up")
        gate = linear(x, weights, "gate") if self.spec.gated else None
        units = hidden_units(self.spec.activation, h, gate)
        identity = torch.eye(self.d_model, dtype=x.dtype, device=x.device)

        def first_layer(slope: Tensor) -> Tensor:
            return torch.einsum("ok,...k,...a->...oka", weights["down_weight"], slope, x)

        return FeedForwardJacobians(
            d_ffn_d_w1=first_layer(units.slope_up),
            d_ffn_d_w2=torch.einsum("op,...k->...opk", identity, units.value),
            d_ffn_d_gate=None if units.slope_gate is None else first_layer(units.slope_gate),
            activation_derivative=units.slope_up,
            intermediate=h,
        )

    def compute_hessian_wrt_w2(
        self, x: Tensor, target: Tensor | None = None, loss: Loss = "mse"
    ) -> Tensor:
        """∂²ℓ/∂W2² (d·d_ff, d·d_ff) = Σ_i Λ_i ⊗ g_i g_iᵀ, whole: y is linear in W2."""
        return self.derivatives(x, target, loss=loss).block("down_weight", "down_weight")


class LayerNormHessian(nn.Module):
    """y = γ ⊙ (x − μ)/√(var + ε) + β over the last axis, with its exact derivatives.

    ``norm="rms"`` is RMSNorm (no mean, no β). ``normalized_shape`` is the width d.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        norm: Norm = "layer",
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        if len(shape) != 1:
            raise ValueError(f"the closed form normalises over one axis, got {tuple(shape)}.")
        check_spec(BlockSpec(d_model=shape[0], norm=norm, eps=eps))
        self.normalized_shape, self.eps, self.norm = tuple(shape), float(eps), norm
        self.weight = nn.Parameter(torch.ones(shape[0])) if elementwise_affine else None
        has_bias = elementwise_affine and norm == "layer"
        self.bias = nn.Parameter(torch.zeros(shape[0])) if has_bias else None

    @classmethod
    def from_module(cls: type[N], module: nn.Module) -> N:
        """Wrap ``nn.LayerNorm``, ``nn.RMSNorm`` or a Llama-style RMSNorm, sharing its memory."""
        mapped = map_norm(module)
        if mapped.offset:
            raise TypeError(
                f"{type(module).__name__} multiplies by {mapped.offset:g} + weight: add it to the "
                "weight of an nn.RMSNorm and wrap that."
            )
        layer = cls.__new__(cls)
        LayerNormHessian.__init__(layer, mapped.size, mapped.eps, norm=mapped.norm)
        layer.weight = None if mapped.weight is None else nn.Parameter(mapped.weight)
        layer.bias = None if mapped.bias is None else nn.Parameter(mapped.bias)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        n, _ = normalize(x, eps=self.eps, norm=self.norm)
        y = n if self.weight is None else n * self.weight
        return y if self.bias is None else y + self.bias

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """n (…, d), 1/σ (…, 1) and γ (d,) of checked tokens."""
        weight = None if self.weight is None else self.weight.detach()
        _check_tokens(x, self.normalized_shape[0], weight)
        if not bool(torch.isfinite(x).all()):
            raise ValueError("x holds NaN or infinity: no derivative is defined there.")
        n, inv_std = normalize(x.detach(), eps=self.eps, norm=self.norm)
        return n, inv_std, x.new_ones(x.shape[-1]) if weight is None else weight

    def token_jacobians(self, x: Tensor) -> Tensor:
        r"""∂y/∂x of every token, J = diag(γ)(C − n nᵀ/d)/σ:  (…, d) → (…, d, d).

        Both terms of the P(X)·M(X) form, γ included; C = I − 11ᵀ/d (I for RMSNorm).
        """
        n, inv_std, gamma = self._statistics(x)
        return gamma.unsqueeze(-1) * norm_jacobian(n, inv_std, norm=self.norm)

    def compute_jacobian(self, x: Tensor) -> Tensor:
        """∂y/∂x as one matrix a sample:  (…, L, d) → (…, L·d, L·d), and (d,) → (d, d).

        Block-diagonal over the tokens; ``token_jacobians`` gives the blocks alone.
        """
        blocks = self.token_jacobians(x)
        if x.ndim == 1:
            return blocks
        *lead, length, d = x.shape
        matrix = blocks.new_zeros(*lead, length, d, length, d)
        matrix.diagonal(dim1=-4, dim2=-2).copy_(blocks.movedim(-3, -1))
        return matrix.reshape(*lead, length * d, length * d)

    def compute_hessian(self, x: Tensor, *, cotangent: Tensor | None = None) -> Tensor:
        r"""∂²y_a/∂x_b∂x_c of every token:  (…, d) → (…, d, d, d), or its contraction.

        −γ_a (J_ab n_c + J_ac n_b + J_bc n_a)/(dσ) with J without γ. With ``cotangent`` δ (…, d):
        Σ_a δ_a ∂²y_a = Ψ(γ ⊙ δ) (…, d, d), in O(d²) per token.
        """
        n, inv_std, gamma = self._statistics(x)
        if cotangent is None:
            return gamma[:, None, None] * norm_hessian(n, inv_std, norm=self.norm)
        if cotangent.shape != x.shape:
            raise ValueError(
                f"cotangent must have x's shape {tuple(x.shape)}, got {tuple(cotangent.shape)}."
            )
        return norm_second(n, inv_std, gamma * cotangent.detach(), norm=self.norm)

    def compute_hessian_wrt_weight(
        self, x: Tensor, target: Tensor | None = None, loss: Loss = "mse"
    ) -> Tensor:
        """∂²ℓ/∂γ² (d, d) at x (…, d), no identity matrix; without a target diag(mean n²)."""
        return self.compute_hessian_wrt_parameters(x, target, loss).block("weight", "weight")

    def compute_hessian_wrt_parameters(
        self, x: Tensor, target: Tensor | None = None, loss: Loss = "mse"
    ) -> BlockHessian:
        r"""The true Hessian over (γ, β):  γγ = Σ diag(n)Λ diag(n),  γβ = Σ diag(n)Λ,  ββ = ΣΛ.

        y is linear in γ and β, so the functional part is zero and the outer part is the whole.
        """
        if self.weight is None:
            raise ValueError("this norm has no weight: its parameter Hessian is empty.")
        n, _, gamma = self._statistics(x)
        n, y = (_batched(t, x.ndim) for t in (n, self(x).detach()))
        seeds = seeds_at(y, None if target is None else _batched(target, x.ndim), loss)
        slopes = [n] if self.bias is None else [n, torch.ones_like(n)]
        units = torch.diag(torch.ones_like(gamma))[:, None, None]  # (d, 1, 1, d)
        columns = torch.cat([units * slope for slope in slopes])  # ∂y/∂θ (P, B, L, d)
        H = columns.flatten(1) @ seeds.product(columns).flatten(1).mT
        names = ("weight", "bias")[: len(slopes)]
        zero = tuple((a, b) for i, a in enumerate(names) for b in names[i:])
        return BlockHessian(
            loss=float(seeds.value),
            names=names,
            block_sizes=dict.fromkeys(names, len(gamma)),
            structure=ZeroStructure(zeros={"total": (), "outer": (), "functional": zero}),
            parts={"total": H, "outer": H, "functional": torch.zeros_like(H)},
        )


class RMSNormHessian(LayerNormHessian):
    """``LayerNormHessian`` with norm="rms"."""

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **options: bool) -> None:
        super().__init__(normalized_shape, eps, norm="rms", **options)


def _check_tokens(x: Tensor, width: int, weight: Tensor | None) -> None:
    """Refuse tokens x (…, d) that do not fit a layer of this width and weight."""
    if x.ndim < 1 or x.shape[-1] != width:
        raise ValueError(f"x must end in {width}, got {tuple(x.shape)}.")
    if x.dtype not in COMPUTED:
        raise TypeError(f"x must be float32 or float64, got {x.dtype}: convert the layer and x.")
    if weight is not None and (x.dtype, x.device) != (weight.dtype, weight.device):
        both = f"x is {x.dtype} on {x.device}, the weight {weight.dtype} on {weight.device}"
        raise TypeError(f"{both}: convert one of them.")
