"""What a Transformer block is made of: one description shared by every closed form.

A block is a ``BlockSpec`` (sizes and choices) plus a mapping of weights. Weights are kept in
PyTorch's own (out, in) layout, so a wrapped ``nn.Linear`` is used as it is. The order of
``WEIGHT_NAMES`` is the order of ``nn.TransformerEncoderLayer.named_parameters()`` once its fused
``in_proj`` is read as query, key, value: the flat Hessian of a wrapped layer needs no permutation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Weights = Mapping[str, Tensor]

# name → shape in words; a weight that a block does not have is simply absent from its mapping
WEIGHT_NAMES: tuple[str, ...] = (
    "query_weight",  # (H·d_k, d)
    "key_weight",  # (G·d_k, d), G key/value heads (G = H unless grouped-query)
    "value_weight",  # (G·d_v, d)
    "query_bias",  # (H·d_k,)
    "key_bias",  # (G·d_k,)
    "value_bias",  # (G·d_v,)
    "output_weight",  # (d, H·d_v); absent: single head, d_v = d, F = A V
    "output_bias",  # (d,)
    "gate_weight",  # (d_ff, d), gated feed-forward only
    "gate_bias",  # (d_ff,)
    "up_weight",  # (d_ff, d)
    "up_bias",  # (d_ff,)
    "down_weight",  # (d, d_ff)
    "down_bias",  # (d,)
    "norm1_weight",  # (d,) γ of the attention's norm
    "norm1_bias",  # (d,) β, absent for RMSNorm
    "norm2_weight",  # (d,)
    "norm2_bias",  # (d,)
)

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "identity"]
Norm = Literal["layer", "rms", "none"]


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """Sizes and choices of one block.

    post-norm (``norm_first=False``): U = X + Att(X), Y = n1(U), S = Y + FFN(Y), Z = n2(S).
    pre-norm  (``norm_first=True``):  U = X + Att(n1(X)), Z = U + FFN(n2(U)).
    ``d_ff=None``: no feed-forward part; ``residual=False``: Z = Att(X), the bare attention layer.
    """

    d_model: int
    n_heads: int = 1
    n_kv_heads: int | None = None  # None: as many as query heads
    d_k: int | None = None  # None: d_model / n_heads
    d_v: int | None = None  # None: d_model / n_heads
    d_ff: int | None = None
    norm: Norm = "layer"
    norm_first: bool = False
    activation: Activation = "gelu"
    gated: bool = False
    eps: float = 1e-5
    causal: bool = False
    window: int | None = None  # causal only: keys a query sees, itself and those just before
    softmax: bool = True  # False: linear attention, A = T
    scale: float | None = None  # None: 1/√d_k
    rope_base: float | None = None  # rotary position embedding (half-split pairs, Llama layout)
    rope_tables: bool = False  # rotary positions of a kind only the call's own tables can tell
    residual: bool = True

    @property
    def key_size(self) -> int:
        return self.d_k if self.d_k is not None else self.d_model // self.n_heads

    @property
    def value_size(self) -> int:
        return self.d_v if self.d_v is not None else self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads if self.n_kv_heads is not None else self.n_heads

    @property
    def logit_scale(self) -> float:
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.key_size)
