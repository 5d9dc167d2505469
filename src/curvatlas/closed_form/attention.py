"""Self-attention whose Hessian is written out: every block of queries, keys, values, output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from curvatlas.closed_form.block import ClosedFormBlock, combine_masks
from curvatlas.closed_form.evaluation import evaluate
from curvatlas.engines.tangent.block import check_spec, weight_shapes
from curvatlas.engines.tangent.structure import WEIGHT_NAMES, BlockSpec
from curvatlas.results import Result


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
_LINEAR = {"query": "W_Q", "key": "W_K", "value": "W_V", "output": "out_proj"}


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
            self.add_module(_LINEAR[role], nn.Linear(columns, rows, bias=False, device="meta"))
        setattr(self.get_submodule(_LINEAR[role]), kind, parameter)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters by the names of the Hessian's blocks, in flat order."""
        named = {}
        for name in WEIGHT_NAMES:
            role, _, kind = name.rpartition("_")
            parameter = getattr(self._modules.get(_LINEAR.get(role, "")), kind, None)
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
        outputs = super().forward(x, mask=mask, key_padding_mask=key_padding_mask)
        if not return_attention:
            return outputs
        batched = x.unsqueeze(0) if x.ndim == 2 else x
        allowed = combine_masks(mask, key_padding_mask, batched)
        weights = evaluate(self.spec, self.weights, batched, allowed).attention
        return outputs, weights.squeeze(0) if x.ndim == 2 else weights

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
        A = evaluate(self.spec, weights, batched, allowed).attention
        M1 = A @ batched.unsqueeze(1)
        offsets = batched[:, None, None] - M1.unsqueeze(-2)  # (B, H, L, L, d)
        weighted = A.unsqueeze(-1) * offsets
        M2 = weighted.mT @ offsets
        M3 = torch.einsum("bhija,bhijc,bhije->bhiace", weighted, offsets, offsets)
        return AttentionMoments(M1=M1, M2=M2, M3=M3, attention=A)
