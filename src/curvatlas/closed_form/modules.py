r"""The modules whose Hessians are written out: blocks, attention, feed-forward parts, norms.

    block = TransformerBlockHessian(16, 64, n_heads=2).double()
    result = block.compute_block_hessian(x, target)         # x (L, d) or (B, L, d)
    result.H, result.H_outer, result.block("query_weight", "value_weight", part="functional")

The parameters stand in the order of ``WEIGHT_NAMES``; so do the rows of every Hessian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.autograd import functional
from torch.func import functional_call

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
from curvatlas.problem.evaluation import say_evaluation_mode
from curvatlas.results import Result
from curvatlas.zoo.block import Block, combine_masks, feed_forward, forward_pass, linear

M = TypeVar("M", bound="ClosedFormBlock")


class ClosedFormBlock(Block):
    """A block or attention layer with its weights as parameters and its derivatives closed."""

    @classmethod
    def from_module(cls: type[M], module: nn.Module) -> M:
        """Wrap an existing layer of torch or a model library, sharing its memory."""
        mapped = map_module(module)
        return cls.from_weights(mapped.spec, mapped.weights)

    @property
    def d_model(self) -> int:
        """The width of the stream."""
        return self.spec.d_model

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
        allowed, x = combine_masks(mask, key_padding_mask, x), x.detach()
        output, attention = forward_pass(self.spec, weights, x, allowed)
        seeds = seeds_at(output, target, loss)
        if not bool(torch.isfinite(seeds.value)):
            raise ValueError(
                f"the loss is {float(seeds.value)}: inputs or weights are not finite, no Hessian."
            )
        kind = BlockDerivatives if self.spec.rope_base is None else ColumnDerivatives
        limit = None if budget is None else parse_bytes(budget)
        return kind(self.spec, weights, x, seeds, attention=attention, mask=allowed, budget=limit)

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
    spec, names, length = derivatives.spec, derivatives.names, min(2, derivatives.length)
    return BlockHessian(
        loss=float(derivatives.seeds.value),
        names=names,
        block_sizes={name: size for name, (_, size) in derivatives.offsets.items()},
        structure=ZeroStructure(zeros=dict(structural_zeros(spec, names, length=length))),
        attention=derivatives.attention,
        parts={part: derivatives.dense(part, out=out, workspace=workspace)},
        _source=derivatives.dense,
    )


# ---- attention ----


@dataclass(frozen=True, kw_only=True)
class AttentionMoments(Result):
    """Central moments of the tokens under each row of A (derivations §4).

    M1_i = Σ_j A_ij x_j,  M2_i = Σ_j A_ij x̃x̃ᵀ,  M3_i = Σ_j A_ij x̃ ⊗ x̃ ⊗ x̃,  x̃ = x_j − M1_i.
    """

    M1: Tensor  # (B, heads, L, d)
    M2: Tensor  # (B, heads, L, d, d)
    M3: Tensor  # (B, heads, L, d, d, d)
    attention: Tensor  # A (B, heads, L, L)


# the article's name of each linear map
_ATTENTION_MAPS = {"query": "W_Q", "key": "W_K", "value": "W_V", "output": "out_proj"}


class SelfAttentionHessian(ClosedFormBlock):
    """Self-attention Z = Att(X) with its exact Hessian; ``W_Q``, ``W_K``, ``W_V`` and ``out_proj``
    are ``nn.Linear``.

    As in the article ``SelfAttentionHessian(d_model, n_heads)`` has an output projection, which
    alone has a bias. Without ``n_heads`` it is the papers' layer: one head of value size d_model,
    whose values are the output. ``output_projection`` and ``bias`` (of all four maps) choose.
    ``softmax=False``: A = QKᵀ/√d_k on the allowed positions (linear attention).

    For one head, MSE with c = 2/(L d) and s = 1/√d_k (derivations §4, compact form of §9):

        QQ = s² Σ_i x_i x_iᵀ ⊗ (Gᵀ Λ G + T_KK)_i,    VV = c M1ᵀ M1 ⊗ I,

    and so on; ``result["QK"]``, ``result.block("Q", "K", part="functional")``. By the article's
    name ``result["hessian_estimates"]["H_WQ"]`` is ‖QQ‖_F, a number.
    """

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
        causal: bool = False,
        softmax: bool = True,
        n_kv_heads: int | None = None,
        scale: float | None = None,
        rope_base: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        spec = BlockSpec(
            d_model=d_model,
            n_heads=1 if n_heads is None else n_heads,
            n_kv_heads=n_kv_heads,
            d_k=d_k,
            d_v=d_v,
            norm="none",
            causal=causal,
            softmax=softmax,
            scale=scale,
            rope_base=rope_base,
            residual=False,
        )
        check_spec(spec)
        if output_projection is None:
            output_projection = n_heads is not None or spec.value_size != d_model
        names = set(weight_shapes(spec))
        if not output_projection:
            names -= {"output_weight", "output_bias"}
        if not bias:
            keeps = "output_bias" if bias is None else ""
            names = {name for name in names if not name.endswith("_bias") or name == keeps}
        super().__init__(spec, frozenset(names), dropout=dropout)

    @property
    def n_heads(self) -> int:
        return self.spec.n_heads

    @property
    def d_k(self) -> int:
        return self.spec.key_size

    @property
    def d_v(self) -> int:
        return self.spec.value_size

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        role, _, kind = name.rpartition("_")
        if kind == "weight":  # comes before the bias
            rows, columns = parameter.shape
            self.add_module(
                _ATTENTION_MAPS[role], nn.Linear(columns, rows, bias=False, device="meta")
            )
        setattr(self.get_submodule(_ATTENTION_MAPS[role]), kind, parameter)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters by the names of the Hessian's blocks, in flat order."""
        named = {}
        for name in WEIGHT_NAMES:
            role, _, kind = name.rpartition("_")
            parameter = getattr(self._modules.get(_ATTENTION_MAPS.get(role, "")), kind, None)
            if parameter is not None:
                named[name] = parameter
        return named

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """In the order of the flat vector: the three weights before their biases."""
        place = {id(parameter): index for index, parameter in enumerate(self.weights.values())}
        named = list(super().named_parameters(*args, **kwargs))
        yield from sorted(named, key=lambda pair: place[id(pair[1])])

    @overload
    def forward(
        self,
        x: Tensor,
        return_attention: Literal[False] = False,
        *,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        return_attention: Literal[True],
        *,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...
    def forward(
        self,
        x: Tensor,
        return_attention: bool = False,
        *,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(L, d) or (B, L, d) → the same shape; with ``return_attention`` also A (B, heads, L, L).

        Masks as in ``ClosedFormBlock``. A of one sequence (L, d) is (heads, L, L).
        """
        outputs, weights = self.passed(x, mask, key_padding_mask)
        return (outputs, weights) if return_attention else outputs

    compute_attention_hessian = ClosedFormBlock.compute_hessian

    def moments(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> AttentionMoments:
        """First three central moments of the tokens x (L, d) or (B, L, d) under every row of A."""
        if not self.spec.softmax:
            raise ValueError(
                "moments need softmax attention: without it the rows of A are no weights."
            )
        batched = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach()
        weights = {name: p.detach() for name, p in self.weights.items()}
        allowed = combine_masks(mask, key_padding_mask, batched)
        _, A = forward_pass(self.spec, weights, batched, allowed)
        M1 = A @ batched.unsqueeze(1)
        offsets = batched[:, None, None] - M1.unsqueeze(-2)  # (B, H, L, L, d)
        weighted = A.unsqueeze(-1) * offsets
        M2 = weighted.mT @ offsets
        M3 = torch.einsum("bhija,bhijc,bhije->bhiace", weighted, offsets, offsets)
        return AttentionMoments(M1=M1, M2=M2, M3=M3, attention=A)


# ---- the feed-forward part ----


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


# block of the Hessian → the linear map, by the article's name
_FFN_MAPS = {"gate": "w_gate", "up": "w1", "down": "w2"}
_ACTIVATION_MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "silu": nn.SiLU,
    "identity": nn.Identity,
}


class FFNHessian(nn.Module):
    """y = x + W2 act(W1 x + b1) + b2 with exact derivatives; ``w1`` and ``w2`` are ``nn.Linear``.

    gated: y = x + W2 (act(W_g x) ⊙ W1 x), with a third map ``w_gate``. Derivatives are those in
    evaluation mode, without dropout; in train mode this is said once.
    """

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
        super().__init__()
        if activation not in _ACTIVATION_MODULES:
            known = ", ".join(_ACTIVATION_MODULES)
            raise ValueError(f"unknown activation {activation!r}: choose one of {known}.")
        if min(d_model, d_ff) < 1:
            raise ValueError(f"sizes must be positive, got d_model={d_model}, d_ff={d_ff}.")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}.")
        self.d_model, self.d_ff = d_model, d_ff
        self.spec = BlockSpec(
            d_model=d_model,
            d_ff=d_ff,
            norm="none",
            norm_first=True,
            activation=activation,
            gated=gated,
        )
        if gated:
            self.w_gate = nn.Linear(d_model, d_ff, bias=bias)
        self.w1 = nn.Linear(d_model, d_ff, bias=bias)
        self.w2 = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = _ACTIVATION_MODULES[activation]()
        self.dropout = nn.Dropout(dropout)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters by the names of the Hessian's blocks, in flat order."""
        roles = {linear: role for role, linear in _FFN_MAPS.items()}
        split = {name: name.split(".") for name, _ in self.named_parameters()}
        return {
            f"{roles[linear]}_{kind}": self.get_parameter(name)
            for name, (linear, kind) in split.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d), the residual x included."""
        if self.spec.gated:
            hidden = self.activation(self.w_gate(x)) * self.w1(x)
        else:
            hidden = self.activation(self.w1(x))
        y: Tensor = self.dropout(self.w2(hidden)) + x
        return y

    def _checked(self, x: Tensor) -> dict[str, Tensor]:
        """The weights at this time, that fit x (…, d)."""
        if self.training and self.dropout.p > 0:
            say_evaluation_mode(self, f"dropout of {self.dropout.p:g}")
        if x.shape[-1] != self.d_model:
            raise ValueError(f"x must end in {self.d_model}, got {tuple(x.shape)}.")
        weights = {name: p.detach().clone() for name, p in self.weights.items()}
        if x.dtype != weights["up_weight"].dtype:
            raise TypeError(
                f"the input is {x.dtype}, the weights {weights['up_weight'].dtype}: convert one."
            )
        return weights

    def compute_ffn_jacobians(self, x: Tensor) -> FeedForwardJacobians:
        """Jacobians with respect to both weight matrices at every token of x (…, d)."""
        weights = self._checked(x)
        tokens = x.detach()
        h = linear(tokens, weights, "up")
        gate = linear(tokens, weights, "gate") if self.spec.gated else None
        units = hidden_units(self.spec.activation, h, gate)
        W2, slope, value = weights["down_weight"], units.slope_up, units.value
        identity = torch.eye(self.d_model, dtype=x.dtype, device=x.device)

        def first_layer(slope: Tensor) -> Tensor:
            return (W2 * slope.unsqueeze(-2)).unsqueeze(-1) * tokens[..., None, None, :]

        slope_gate = units.slope_gate
        return FeedForwardJacobians(
            d_ffn_d_w1=first_layer(slope),
            d_ffn_d_w2=identity.unsqueeze(-1) * value[..., None, None, :],
            d_ffn_d_gate=None if slope_gate is None else first_layer(slope_gate),
            activation_derivative=slope,
            intermediate=h,
        )

    def derivatives(
        self,
        x: Tensor,
        target: Tensor | None = None,
        *,
        loss: str | OutputLoss = "mse",
        budget: int | None = None,
    ) -> BlockDerivatives:
        """The Hessian as an operator, with single blocks, exact diagonal and norms."""
        weights, x = self._checked(x), _three_axes(x.detach())
        if target is not None and target.is_floating_point():
            target = _three_axes(target)
        elif target is not None:
            target = target.reshape(x.shape[:2])
        output = x + feed_forward(self.spec, weights, x)
        seeds = seeds_at(output, target, loss)
        return BlockDerivatives(self.spec, weights, x, seeds, budget=budget)

    def compute_hessian(
        self,
        x: Tensor,
        target: Tensor | None = None,
        loss: str | OutputLoss = "mse",
        *,
        part: Part = "total",
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> BlockHessian:
        r"""The Hessian over gate, up and down weights and biases for x (…, d).

        W2W2 = Σ ĝĝᵀ ⊗ Λ,  W1W1 = Σ v̂v̂ᵀ ⊗ (D1 W2ᵀ Λ W2 D1 + ρ),  ρ = D2 ⊙ W2ᵀδ,
        W1W2 = Σ v̂ ĝ (D1 W2ᵀ Λ) + v̂ D1 δ                                          (derivations §9)

        Without a target the objective is ½‖y‖², summed over the features and averaged over the
        tokens.
        """
        derivatives = self.derivatives(x, target, loss=loss)
        return block_hessian(derivatives, part=part, out=out, workspace=workspace)

    def compute_hessian_wrt_w2(
        self, x: Tensor, target: Tensor | None = None, loss: str | OutputLoss = "mse"
    ) -> Tensor:
        """∂²ℓ/∂W2² (d·d_ff, d·d_ff) = Σ_i Λ_i ⊗ g_i g_iᵀ.

        y is linear in W2, so the Gauss-Newton form is the whole Hessian. Without a target the
        objective is that of ``compute_hessian``.
        """
        return self.derivatives(x, target, loss=loss).block("down_weight", "down_weight")


def _three_axes(t: Tensor) -> Tensor:
    """(…, d) → (B, L, d)."""
    if t.ndim == 3:
        return t
    return t.reshape(1, -1, t.shape[-1]) if t.ndim <= 2 else t.flatten(0, -3)


# ---- norms ----

N = TypeVar("N", bound="LayerNormHessian")


class LayerNormHessian(nn.Module):
    """y = γ ⊙ (x − μ)/√(var + ε) + β over the last axis, with its exact derivatives.

    ``norm="rms"`` is RMSNorm (no mean, no β). ``normalized_shape`` is the width d.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...] | list[int],
        eps: float = 1e-5,
        *,
        norm: Norm = "layer",
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(
                f"the closed form normalises over one axis of positive width, got {tuple(shape)}."
            )
        if norm not in ("layer", "rms"):
            raise ValueError(f"norm must be 'layer' or 'rms', got {norm!r}.")
        if eps < 0:
            raise ValueError(f"eps must not be negative, got {eps!r}.")
        self.normalized_shape, self.eps, self.norm = tuple(shape), float(eps), norm
        has_bias = elementwise_affine and norm == "layer"
        self.weight = nn.Parameter(torch.ones(shape[0])) if elementwise_affine else None
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
        norm_layer = cls.__new__(cls)
        LayerNormHessian.__init__(norm_layer, mapped.size, mapped.eps, norm=mapped.norm)
        norm_layer.weight = None if mapped.weight is None else nn.Parameter(mapped.weight)
        norm_layer.bias = None if mapped.bias is None else nn.Parameter(mapped.bias)
        return norm_layer

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        n, _ = normalize(x, eps=self.eps, norm=self.norm)
        y = n if self.weight is None else n * self.weight
        return y if self.bias is None else y + self.bias

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """n (…, d), 1/σ (…, 1) and γ (d,) of checked tokens."""
        d = self.normalized_shape[0]
        if x.ndim < 1 or x.shape[-1] != d:
            raise ValueError(f"x must end in {d}, got {tuple(x.shape)}.")
        if x.dtype not in COMPUTED:
            raise TypeError(
                f"x must be of a floating dtype, float32 or float64, got {x.dtype}: convert the "
                "layer and x."
            )
        if not bool(torch.isfinite(x).all()):
            raise ValueError("x holds NaN or infinity: no derivative is defined there.")
        gamma = torch.ones(d, dtype=x.dtype, device=x.device)
        if self.weight is not None:
            gamma = self.weight.detach()
            if gamma.dtype != x.dtype:
                raise TypeError(f"x is {x.dtype}, the weight {gamma.dtype}: convert one of them.")
            if gamma.device != x.device:
                raise ValueError(f"x is on {x.device}, the weight on {gamma.device}: move one.")
        n, inv_std = normalize(x.detach(), eps=self.eps, norm=self.norm)
        return n, inv_std, gamma

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
        self, x: Tensor, target: Tensor | None = None, loss: str | OutputLoss = "mse"
    ) -> Tensor:
        """∂²ℓ/∂γ² (d, d) of x (d,), (L, d) or (B, L, d); ``compute_hessian_wrt_parameters`` has β.

        Without a target the objective is ½‖y‖², summed over the features and averaged over the
        tokens: γγ = diag(mean n²).
        """
        return self.compute_hessian_wrt_parameters(x, target, loss).block("weight", "weight")

    def compute_hessian_wrt_parameters(
        self, x: Tensor, target: Tensor | None = None, loss: str | OutputLoss = "mse"
    ) -> BlockHessian:
        r"""The true Hessian over (γ, β):  γγ = Σ diag(n)Λ diag(n),  γβ = Σ diag(n)Λ,  ββ = ΣΛ.

        y is linear in γ and β, so the functional part is exactly zero and the outer part is the
        whole Hessian. x (d,), (L, d) or (B, L, d); ``result.block("weight", "bias")``. Without a
        target as ``compute_hessian_wrt_weight``.
        """
        if self.weight is None:
            raise ValueError("this norm has no weight: its parameter Hessian is empty.")
        n, _, gamma = self._statistics(x)
        y = n * gamma if self.bias is None else n * gamma + self.bias.detach()
        lead = (1,) * (3 - x.ndim)
        outputs = y.view(*lead, *y.shape)
        targets = None if target is None else target.view(*lead, *target.shape)
        seeds = seeds_at(outputs, targets, loss)
        tokens = n.reshape(-1, n.shape[-1])
        d = tokens.shape[-1]
        rows = [torch.diag_embed(tokens)]  # ∂y/∂γ = diag(n), ∂y/∂β = I
        if self.bias is not None:
            rows.append(torch.eye(d, dtype=n.dtype, device=n.device).expand(len(tokens), d, d))
        directions = torch.cat(rows, 1)  # (n, P, d)
        columns = directions.permute(1, 0, 2).reshape(-1, *outputs.shape)  # (P, B, L, d)
        moved = seeds.product(columns).reshape(columns.shape[0], -1)
        H = columns.reshape(columns.shape[0], -1) @ moved.mT
        names = ("weight",) if self.bias is None else ("weight", "bias")
        zero = tuple((a, b) for i, a in enumerate(names) for b in names[i:])
        return BlockHessian(
            loss=float(seeds.value),
            names=names,
            block_sizes=dict.fromkeys(names, d),
            structure=ZeroStructure(zeros={"total": (), "outer": (), "functional": zero}),
            parts={"total": H, "outer": H, "functional": torch.zeros_like(H)},
        )


class RMSNormHessian(LayerNormHessian):
    """``LayerNormHessian`` with norm="rms"."""

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...] | list[int],
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__(normalized_shape, eps, norm="rms", elementwise_affine=elementwise_affine)


@dataclass(frozen=True, kw_only=True)
class NormVerification(Result):
    """Largest relative errors of the closed forms against double backward."""

    jacobian: float
    hessian: float
    contraction: float
    weight_hessian: float
    tolerance: float
    passed: bool

    def __str__(self) -> str:
        word = "agrees" if self.passed else "DISAGREES"
        return (
            f"closed form {word} with double backward: Jacobian {self.jacobian:.1e}, Hessian "
            f"{self.hessian:.1e}, contraction {self.contraction:.1e}, weight Hessian "
            f"{self.weight_hessian:.1e} (relative; tolerance {self.tolerance:.1e})"
        )


def verify_layernorm_hessian(
    d_model: int = 8,
    length: int = 4,
    *,
    eps: float = 1e-5,
    norm: Norm = "layer",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> NormVerification:
    """Compare every closed form of a random norm with double backward at random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, device="cpu")

    layer = LayerNormHessian(d_model, eps, norm=norm).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(random(d_model))
    x, target, cotangent = random(length, d_model), random(length, d_model), random(length, d_model)
    names = [name for name, _ in layer.named_parameters()]

    def loss(*values: Tensor) -> Tensor:
        outputs: Tensor = functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return (outputs - target).square().mean()

    # reverse over reverse: torch.func.hessian is silently wrong through normalisations
    jacobian: Callable[..., Any] = functional.jacobian
    hessian: Callable[..., Any] = functional.hessian
    tensor = [jacobian(partial(jacobian, layer, create_graph=True), token) for token in x]
    contraction = [
        hessian(lambda t, v=v: (layer(t) * v).sum(), token)
        for token, v in zip(x, cotangent, strict=True)
    ]
    weight = [torch.cat(row, 1) for row in hessian(loss, tuple(layer.parameters()))]
    compared = (
        (layer.token_jacobians(x), torch.stack([jacobian(layer, token) for token in x])),
        (layer.compute_hessian(x), torch.stack(tensor)),
        (layer.compute_hessian(x, cotangent=cotangent), torch.stack(contraction)),
        (layer.compute_hessian_wrt_parameters(x, target).H, torch.cat(weight)),
    )
    errors = [float(torch.linalg.norm(a - b) / torch.linalg.norm(b)) for a, b in compared]
    tolerance = 200 * torch.finfo(dtype).eps
    return NormVerification(
        jacobian=errors[0],
        hessian=errors[1],
        contraction=errors[2],
        weight_hessian=errors[3],
        tolerance=tolerance,
        passed=max(errors) <= tolerance,
    )
