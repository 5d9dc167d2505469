r"""The one page where a block is written down: which maps in which order.

    x̂ = n1(x) pre-norm, or x          q = s W_Q x̂            θ = Ŵ_Kᵀ q       (each head)
    m̂ = ∇ψ(θ) = A x̂                   o = Ŵ_V m̂              U = W_O o + b_O + x
    v = γ n(U) + β                     h = W1 v + b1          g = act(h)
    S = W2 g + b2 + (v post-norm | U pre-norm)                Z = γ n(S) + β post-norm, or S

Attention is seen from one query row: the keys' tokens are fixed, and W_K is one more linear layer,
with input q. A hat appends the constant coordinate 1 that makes biases ordinary weights. In front
of a pre-norm block's attention γ and β move the keys' tokens too, x_j = γ n_j + β: seen from the
query row they act at three places, at x̂, at θ (θᵀx_j = (γ θ)ᵀn_j + const) and at m (m = γ m_n + β).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from curvatlas.closed_form.chain import (
    Bend,
    Chain,
    Diagonal,
    Linear,
    Map,
    Node,
    Scale,
    Segment,
)
from curvatlas.closed_form.maps import Keys, Moments, Normalise, activated
from curvatlas.layers.norms import normalize
from curvatlas.layers.structure import WEIGHT_NAMES, BlockSpec, Norm, Weights


def parameter_offsets(weights: Weights) -> dict[str, tuple[int, int]]:
    """name → (start, size) in the flat vector, in the order of ``WEIGHT_NAMES``."""
    offsets, start = {}, 0
    for name in WEIGHT_NAMES:
        if name in weights:
            offsets[name] = (start, weights[name].numel())
            start += weights[name].numel()
    return offsets


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the query rows of a chunk see: their own inputs (n, d) and their sample's keys."""

    x: Tensor  # (n, d), the block's inputs at the query rows
    rows: Tensor | None = None  # (n, d), the base tokens at the query rows: n1(x) pre-norm, or x
    front: bool = False  # whether a norm stands in front of attention
    keys: Keys | None = None  # base tokens
    bias: Tensor | None = None  # (b, H or 1, r, L) added to the logits
    allowed: Tensor | None = None  # (b, H or 1, r, L) of 0 and 1, read without softmax


class Writer:
    """Writes maps with their weights into a chain."""

    def __init__(self, spec: BlockSpec, weights: Weights) -> None:
        self.spec, self.weights, self.chain = spec, weights, Chain()
        self.offsets = parameter_offsets(weights)

    def segments(
        self,
        role: str,
        size: tuple[int, int],
        first: int = 0,
        *,
        turned: bool = False,
    ) -> list[Segment]:
        """Weight and bias of ``role`` with (outputs, inputs) = ``size`` from row ``first`` on.

        ``turned``: the rows of the weight are the activations, its columns the core (W_K).
        """
        rows, columns = size
        found = []
        start = self.offsets[f"{role}_weight"][0] + first * columns
        core, along = ((0, columns), (0, rows)) if turned else ((0, rows), (0, columns))
        found.append(
            Segment(
                name=f"{role}_weight",
                start=start,
                core=core,
                activation=along,
                activation_major=turned,
            )
        )
        if f"{role}_bias" in self.offsets:
            one = (columns, columns + 1)
            core, along = (one, (0, rows)) if turned else ((0, rows), one)
            found.append(
                Segment(
                    name=f"{role}_bias",
                    start=self.offsets[f"{role}_bias"][0] + first,
                    core=core,
                    activation=along,
                    activation_major=turned,
                )
            )
        return found

    def linear(
        self,
        role: str,
        x: Sequence[tuple[Node | None, Tensor]],
        *more: tuple[Node | None, Tensor],
        waist: bool = False,
    ) -> Node:
        """y = W x + b + Σ more, x of several nodes side by side."""
        W, b = self.weights[f"{role}_weight"], self.weights.get(f"{role}_bias")
        value = torch.cat([v for _, v in x], -1)
        y = torch.nn.functional.linear(value, W, b)
        sources: list[tuple[Node | None, Map]] = []
        inputs, start = [], 0
        for node, v in x:
            width = v.shape[-1]
            sources.append((node, Linear(W[:, start : start + width])))
            if node is not None:
                inputs.append((node, start))
            start += width
        for node, v in more:
            y = y + v
            sources.append((node, Scale()))
        made = self.chain.node(len(W), y, *sources, waist=waist)
        alpha = value if b is None else pad(value, (0, 1), value=1.0)
        self.chain.leaf(role, made, alpha, self.segments(role, (W.shape[0], W.shape[1])), *inputs)
        return made

    def norm(self, role: str, kind: Norm, x: Node) -> Node:
        """γ n(x) + β."""
        y = x
        if kind != "none":
            n, inv_std = normalize(x.value, eps=self.spec.eps, norm=kind)
            way = Normalise(n, inv_std, kind)
            y = self.chain.node(x.width, n, (x, way), bends=lambda delta: [(x, x, way.bend(delta))])
        gamma, beta = (self.weights.get(f"{role}_{end}") for end in ("weight", "bias"))
        if gamma is None and beta is None:
            return y
        value = y.value if gamma is None else y.value * gamma
        value = value if beta is None else value + beta
        slope = None if gamma is None else gamma.unsqueeze(0)
        made = self.chain.node(x.width, value, (y, Scale(slope)))
        self.gain_and_shift(role, made, y.value, (y, 0))
        return made

    def gain_and_shift(
        self, role: str, node: Node, value: Tensor, *inputs: tuple[Node, int]
    ) -> None:
        """The leaves γ ⊙ value + β at a node."""
        d = value.shape[-1]
        for end, alpha in (("weight", value), ("bias", torch.ones_like(value[:, :1]))):
            name = f"{role}_{end}"
            if name in self.offsets:
                place = Segment(
                    name=name, start=self.offsets[name][0], core=(0, d), activation=(0, 1)
                )
                live = inputs if end == "weight" else ()
                self.chain.leaf("norm", node, alpha, [place], *live, gain=True)

    def head(self, h: int, x: Node | None, inputs: Inputs, rows: Tensor) -> Node:
        """o of one head, from its query rows x̂ (n, d)."""
        spec, weights, chain = self.spec, self.weights, self.chain
        assert inputs.keys is not None
        group = h // (spec.n_heads // spec.kv_heads)
        dk, dv, d = spec.key_size, spec.value_size, spec.d_model
        width = inputs.keys.tokens.shape[-1]

        def cut(role: str, at: int, size: int, *, hat: bool) -> tuple[Tensor, Tensor | None]:
            part = slice(at * size, (at + 1) * size)
            W, b = weights[f"{role}_weight"][part], weights.get(f"{role}_bias")
            b = None if b is None else b[part]
            if hat and width > d:
                W = torch.cat([W, (W.new_zeros(size) if b is None else b).unsqueeze(-1)], 1)
            return W, b

        W_Q, b_Q = cut("query", h, dk, hat=False)
        (W_K, _), (W_V, b_V) = cut("key", group, dk, hat=True), cut("value", group, dv, hat=True)
        q = chain.node(dk, torch.nn.functional.linear(rows, W_Q, b_Q), (x, Linear(W_Q)))
        alpha = rows if b_Q is None else pad(rows, (0, 1), value=1.0)
        live = () if x is None else ((x, 0),)
        chain.leaf("query", q, alpha, self.segments("query", (dk, d), h * dk), *live, head=h)
        slope = q.value.new_full((1, dk), spec.logit_scale)
        scaled = chain.node(dk, q.value * slope, (q, Scale(slope, cheap=False)))
        theta = chain.node(width, scaled.value @ W_K, (scaled, Linear(W_K.mT)))
        places = self.segments("key", (dk, d), group * dk, turned=True)
        chain.leaf("key", theta, scaled.value, places, (scaled, 0), head=h)
        base = theta if x is None else self.towards_base(theta)
        b = len(inputs.keys.tokens)
        logits = base.value.view(b, -1, width) @ inputs.keys.tokens.mT
        allowed = None
        if spec.softmax:
            A = torch.softmax(logits if inputs.bias is None else logits + _of(inputs.bias, h), -1)
        else:
            allowed = torch.ones_like(logits)
            if inputs.allowed is not None:
                allowed = _of(inputs.allowed, h).expand_as(logits)
            A = logits * allowed
        way = Moments(A, inputs.keys, allowed)

        def bent(delta: Tensor) -> list[Bend]:
            return [(base, base, way.bend(delta))]

        m = chain.node(width, way.value, (base, way), bends=bent if spec.softmax else None)
        m = m if x is None else self.from_base(m)
        o = chain.node(dv, m.value @ W_V.mT, (m, Linear(W_V)))
        alpha = m.value if b_V is not None or width == d else m.value[:, :-1]
        chain.leaf("value", o, alpha, self.segments("value", (dv, d), group * dv), (m, 0), head=h)
        return o

    def towards_base(self, theta: Node, role: str = "norm1") -> Node:
        """θᵀx_j in base coordinates: (γ θ)ᵀ n_j + θᵀβ, the latter dead under softmax."""
        d, width = self.spec.d_model, theta.width
        gamma, beta = (self.weights.get(f"{role}_{end}") for end in ("weight", "bias"))
        tokens = theta.value[:, :d]
        sources: list[tuple[Node | None, Map]] = []
        if beta is None or self.spec.softmax:
            ones = tokens.new_ones(width - d)
            slope = torch.cat([tokens.new_ones(d) if gamma is None else gamma, ones]).unsqueeze(0)
            sources, value = [(theta, Scale(slope, cheap=False))], theta.value * slope
        else:
            G, port = self.base_change(gamma, beta), self.chain.node(d, torch.zeros_like(tokens))
            entry = torch.cat([tokens.new_zeros(d, d), tokens.new_ones(1, d)])
            sources, value = [(theta, Linear(G.mT)), (port, Linear(entry))], theta.value @ G
        phi = self.chain.node(width, value, *sources)
        for end, node in (("weight", phi), ("bias", None if beta is None else phi)):
            if f"{role}_{end}" not in self.offsets or (end == "bias" and self.spec.softmax):
                continue
            assert node is not None
            at = node if end == "weight" else port
            place = self.place(f"{role}_{end}", d)
            self.chain.leaf("norm", at, tokens, [place], (theta, 0), gain=True)
        return phi

    def from_base(self, m: Node, role: str = "norm1") -> Node:
        """m in input coordinates: γ m_n + β, times the row sum of A without softmax."""
        d, width = self.spec.d_model, m.width
        gamma, beta = (self.weights.get(f"{role}_{end}") for end in ("weight", "bias"))
        total, live = torch.ones_like(m.value[:, :1]), list[tuple[Node, int]]()
        if self.spec.softmax or beta is None:
            ones = m.value.new_ones(width - d)
            slope = torch.cat([m.value.new_ones(d) if gamma is None else gamma, ones]).unsqueeze(0)
            way: Map = Scale(slope, cheap=False)
            value = m.value * slope
            value = value if beta is None else value + pad(beta, (0, width - d))
        else:
            G = self.base_change(gamma, beta)
            way, value = Linear(G), m.value @ G.mT
            total, live = m.value[:, d:], [(m, -d)]
        made = self.chain.node(width, value, (m, way))
        ends = (("weight", m.value[:, :d], [(m, 0)]), ("bias", total, live))
        for end, alpha, moving in ends:
            if f"{role}_{end}" in self.offsets:
                place = self.place(f"{role}_{end}", d)
                self.chain.leaf("norm", made, alpha, [place], *moving, gain=True)
        return made

    def base_change(self, gamma: Tensor | None, beta: Tensor) -> Tensor:
        """G with x̂_j = G n̂_j."""
        G = torch.eye(len(beta) + 1, dtype=beta.dtype, device=beta.device)
        if gamma is not None:
            G[:-1, :-1] = torch.diag(gamma)
        G[:-1, -1] = beta
        return G

    def place(self, name: str, d: int) -> Segment:
        """A vector of d gains as one stretch."""
        return Segment(name=name, start=self.offsets[name][0], core=(0, d), activation=(0, 1))


def block_chain(spec: BlockSpec, weights: Weights, inputs: Inputs) -> Chain:
    """The chain of a block, an attention layer or a feed-forward part at some query rows."""
    writer = Writer(spec, weights)
    chain, x = writer.chain, inputs.x
    U: Node | None = None
    u = x
    if "query_weight" in weights:
        live: Node | None = None
        rows = x if inputs.rows is None else inputs.rows
        if inputs.front and any(f"norm1_{end}" in weights for end in ("weight", "bias")):
            gamma, beta = weights.get("norm1_weight"), weights.get("norm1_bias")
            value = rows if gamma is None else rows * gamma
            live = chain.node(spec.d_model, value if beta is None else value + beta)
            writer.gain_and_shift("norm1", live, rows)
            rows = live.value
        heads = [writer.head(h, live, inputs, rows) for h in range(spec.n_heads)]
        values = [(o, o.value) for o in heads]
        past = [(None, x)] if spec.residual else []
        if "output_weight" in weights:
            U = writer.linear("output", values, *past, waist=True)
        else:
            o, value = values[0]
            U = chain.node(o.width, value + x if past else value, (o, Scale()), waist=True)
        u = U.value
    S = U
    if spec.d_ff is not None:
        v, y = U, u
        if U is not None:
            v = writer.norm("norm2" if spec.norm_first else "norm1", spec.norm, U)
            y = v.value
        hidden = [writer.linear(r, [(v, y)]) for r in (["gate"] if spec.gated else []) + ["up"]]
        value, slopes, bends = activated(spec.activation, *hidden)
        ways = [(h, Scale(slope, cheap=False)) for h, slope in zip(hidden, slopes, strict=True)]

        def bent(delta: Tensor) -> list[Bend]:
            inner = zip(hidden, bends, strict=True)
            pairs = [(a, b, c) for a, row in inner for b, c in zip(hidden, row, strict=True)]
            return [(a, b, Diagonal(delta * c)) for a, b, c in pairs if c is not None]

        g = chain.node(spec.d_ff, value, *ways, bends=bent)
        around = [(U, u) if spec.norm_first else (v, y)] if spec.residual else []
        S = writer.linear("down", [(g, value)], *around, waist=True)
    assert S is not None
    if spec.residual and not spec.norm_first:
        writer.norm("norm1" if spec.d_ff is None else "norm2", spec.norm, S)
    return chain


def _of(t: Tensor, h: int) -> Tensor:
    """One head's slice of (b, H or 1, r, L)."""
    return t[:, h if t.shape[1] > 1 else 0]
