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
    "query_norm_weight",  # (d_k,), or (H·d_k,): gains of the queries' norm
    "query_norm_bias",
    "key_norm_weight",  # (d_k,), or (G·d_k,)
    "key_norm_bias",
    "output_norm_weight",  # (d,) of the norm behind the attention, before the residual sum
    "output_norm_bias",  # (d,)
    "down_norm_weight",  # (d,) of the norm behind the feed-forward part
    "down_norm_bias",  # (d,)
    "cross_query_weight",  # (H·d_k, d), cross attention only
    "cross_key_weight",  # (G·d_k, m), of the memory
    "cross_value_weight",  # (G·d_v, m)
    "cross_query_bias",
    "cross_key_bias",
    "cross_value_bias",
    "cross_output_weight",  # (d, H·d_v)
    "cross_output_bias",  # (d,)
    "cross_norm_weight",  # (d,) γ of the cross attention's norm
    "cross_norm_bias",  # (d,)
    "distance_weight",  # (B, H) terms of the logits, by the distance of query and key
)

MEMORY = "memory"  # what cross attention attends to, among the tangents and rates of weights


DISTANCE = "distance_weight"

Activation = Literal[
    "relu", "relu_squared", "gelu", "gelu_tanh", "gelu_bloom", "gelu_quick", "silu", "identity"
]
Norm = Literal["layer", "rms", "none"]
Span = Literal["head", "each head", "width"]  # what a norm of queries or keys goes over


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """Sizes and choices of one block.

    post-norm (``norm_first=False``): U = X + Att(X), Y = n1(U), S = Y + FFN(Y), Z = n2(S).
    pre-norm  (``norm_first=True``):  U = X + Att(n1(X)), Z = U + FFN(n2(U)).
    ``d_ff=None``: no feed-forward part; ``residual=False``: Z = Att(X), the bare attention layer.

    ``parallel`` (pre-norm): Z = X + Att(n1(X)) + FFN(n2(X)), or with ``one_norm`` FFN(n1(X)).
    ``output_norm`` (pre-norm): norms behind the sublayers, U = X + n_o(Att(·)),
    Z = U + n_d(FFN(·)); of kind "none" they are learned gains (LayerScale), and with
    ``norm="none"`` there are no others.
    ``residual_scale`` m (pre-norm): U = X + m Att(·), Z = U + m FFN(·).
    ``gain_offset`` o: every norm multiplies by o + weight (Gemma: 1).
    ``qk_norm``: q ← n_q(q), k ← n_k(k) before the rotation, over each ``qk_span``: "head", with the
    same gains for all; "each head", with its own gains; "width", over all heads together.
    ``softcap`` c: logits T ← c tanh(T/c) before mask and softmax.
    ``rotary_size`` r: only the first r coordinates of a head turn; ``rope_interleaved``: coordinate
    2p turns with 2p + 1 instead of p with p + r/2.
    ``memory_size`` m: a sublayer between the two attends to a memory M (n, L', m), an encoder's
    output that comes with each call. With U of the attention, V = U + Att(n_c(U), M), or post-norm
    V = n_c(U + Att(U, M)); no causal rule and no positions there.
    ``distances`` B: T_ij^h gets the learned term b[bucket(i, j), h] of a table b (B, H); which
    bucket a pair of positions is in comes with each call.
    """

    d_model: int
    n_heads: int = 1
    n_kv_heads: int | None = None  # None: as many as query heads
    d_k: int | None = None  # None: d_model / n_heads
    d_v: int | None = None  # None: d_model / n_heads
    d_ff: int | None = None
    norm: Norm = "layer"
    norm2: Norm | None = None  # kind of the feed-forward part's norm; None: as ``norm``
    norm_first: bool = False
    output_norm: Norm | None = None  # kind of the norms behind the sublayers; None: there are none
    parallel: bool = False
    one_norm: bool = False
    residual_scale: float = 1.0
    gain_offset: float = 0.0
    activation: Activation = "gelu"
    gated: bool = False
    eps: float = 1e-5
    eps2: float | None = None  # of the feed-forward part's norm; None: as ``eps``
    output_eps: float | None = None
    qk_norm: Norm | None = None
    qk_span: Span = "head"
    qk_eps: float | None = None
    causal: bool = False
    window: int | None = None  # causal only: keys a query sees, itself and those just before
    softmax: bool = True  # False: linear attention, A = T
    softcap: float | None = None
    scale: float | None = None  # None: 1/√d_k
    rope_base: float | None = None  # rotary position embedding (half-split pairs, Llama layout)
    rope_tables: bool = False  # rotary positions of a kind only the call's own tables can tell
    rope_interleaved: bool = False
    rotary_size: int | None = None  # None: the whole head
    call_mask: bool = False  # masks hold what only the call's own can tell: biases, windows
    residual: bool = True
    memory_size: int | None = None  # width of the memory that cross attention sees; None: has none
    distances: int | None = None  # rows of the table of learned terms; None: has none

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

    @property
    def special_forms(self) -> tuple[str, ...]:
        """What this block does that the matrix-free products have and the dense forms do not."""
        plain = BlockSpec(d_model=self.d_model)
        words = [w for name, w in _SPECIAL.items() if getattr(self, name) != getattr(plain, name)]
        rare = self.activation in ("gelu_bloom", "gelu_quick", "relu_squared")
        return (*words, *([f"has the activation {self.activation}"] if rare else []))


# option → what a block with it does
_SPECIAL = {
    "parallel": "runs attention and feed-forward side by side",
    "one_norm": "has one norm for both sublayers",
    "norm2": "mixes kinds of norms",
    "eps2": "has norms of different eps",
    "output_norm": "has norms or gains behind its sublayers",
    "residual_scale": "scales what its sublayers add",
    "gain_offset": "scales its norms by an offset + weight",
    "qk_norm": "normalises queries and keys",
    "softcap": "caps its logits",
    "rope_tables": "has rotary positions whose tables come with each call",
    "rope_interleaved": "turns neighbouring coordinates",
    "rotary_size": "turns a part of each head",
    "call_mask": "has biases or windows in the masks that come with each call",
    "memory_size": "attends to a memory that comes with each call",
    "distances": "adds learned terms to its logits in buckets that come with each call",
}


def require_plain(spec: BlockSpec, who: str) -> None:
    """Raise when ``who`` would need a formula it does not have."""
    if spec.special_forms:
        raise ValueError(
            f"{who} has no formula for a block that {' and '.join(spec.special_forms)}: use "
            "LinearisedBlock or ca.Hessian(problem)."
        )
