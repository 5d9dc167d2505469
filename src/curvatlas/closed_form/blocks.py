r"""The one page where a block is written down: which maps in which order.

    x̂ = γ n1(x) + β pre-norm, or x     q = s (W_Q x̂ + b_Q)       θ = W_Kᵀ q        (each head)
    m = ∇ψ(θ) = A x̂                    o = W_V m + b_V            U = W_O o + b_O + x
    v = γ n(U) + β                      h = W1 v + b1              g = act(h), or act(h_gate) ⊙ h
    S = W2 g + b2 + (v post-norm | U pre-norm)                     Z = γ n(S) + β post-norm, or S

Attention is seen from one query row: the keys' tokens are fixed, and W_K is one more linear layer,
with input q. A gain multiplies as a gate does: γ is a node of its own, with y = x ⊙ γ + β. In front
of attention it multiplies the keys' tokens too, x_j = γ n_j + β, so seen from the query row it acts
at three places: at x̂, at θ (θᵀx_j = (γ θ)ᵀn_j + const) and at m (m = γ m_n + β).

A number added to a whole row of logits is dead under softmax. Without it a constant coordinate is
appended to the tokens (a hat): the row's constant then is θ̂'s last entry, its sum of A m̂'s last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from curvatlas.closed_form.chain import Bend, Bends, Chain, Diagonal, Leaf, Map, Node
from curvatlas.closed_form.maps import Attend, Keys, Normalise
from curvatlas.layers.activations import activation_derivatives
from curvatlas.layers.norms import normalize
from curvatlas.layers.structure import WEIGHT_NAMES, BlockSpec, Weights

ALL = slice(None)


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
    rows: Tensor  # (n, d), the base tokens there: n1(x) pre-norm, or x
    keys: Keys | None = None  # base tokens, with a hat (b, L, d + 1)
    bias: Tensor | None = None  # (b, H or 1, r, L) added to the logits
    allowed: Tensor | None = None  # (b, H or 1, r, L) of 0 and 1, read without softmax


def block_chain(spec: BlockSpec, weights: Weights, inputs: Inputs) -> Chain:
    """The chain of a block, an attention layer or a feed-forward part at some query rows."""
    write = Writer(spec, weights)
    x = u = write.chain.node(inputs.x, fixed=True)
    if inputs.keys is not None:
        base = write.chain.node(inputs.rows, fixed=True)
        front = write.front() if spec.norm_first and spec.residual else None
        x_hat = base if front is None else write.product(base, front.gain, front.shift)
        heads = [write.head(h, x_hat, front, inputs) for h in range(spec.n_heads)]
        u = write.linear("output", heads, *([x] if spec.residual else []), waist=True)
    s = u
    if spec.d_ff is not None:
        v = u if u is x else write.norm("norm2" if spec.norm_first else "norm1", u)
        if spec.gated:
            g = write.product(write.activated(write.linear("gate", [v])), write.linear("up", [v]))
        else:
            g = write.activated(write.linear("up", [v]))
        s = write.linear("down", [g], u if spec.norm_first else v, waist=True)
    if spec.residual and not spec.norm_first:
        write.norm("norm1" if spec.d_ff is None else "norm2", s)
    return write.chain


@dataclass(frozen=True, kw_only=True)
class Front:
    """γ and β of the norm in front of attention, whose keys they move too."""

    gain: Node | None
    shift: Node | None


class Writer:
    """Writes maps with their weights into a chain."""

    def __init__(self, spec: BlockSpec, weights: Weights) -> None:
        self.spec, self.weights, self.chain = spec, weights, Chain()
        self.offsets = parameter_offsets(weights)

    def leaf(
        self,
        name: str,
        node: Node,
        alpha: Tensor,
        *inputs: tuple[Node, slice],
        first: int = 0,
        columns: slice = ALL,
        turned: bool = False,
        head: int = 0,
    ) -> None:
        """Let ``name``, if the block has it, act at a node, from its row ``first`` on."""
        if name in self.offsets:
            core = len(range(*columns.indices(node.width)))
            leaf = Leaf(
                name=name,
                start=self.offsets[name][0] + first * (core if turned else alpha.shape[-1]),
                node=node,
                columns=columns,
                alpha=alpha,
                inputs=tuple((source, cut) for source, cut in inputs if not source.fixed),
                turned=turned,
                head=head,
            )
            self.chain.leaves.append(leaf)

    def map(
        self, role: str, first: int = 0, size: int | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Rows [first, first + size) of weight and bias, all without a size; None: it has none."""
        rows = slice(first, None if size is None else first + size)
        W, b = (self.weights.get(f"{role}_{end}") for end in ("weight", "bias"))
        return None if W is None else W[rows], None if b is None else b[rows]

    # ---- maps of any network ---------------------------------------------------------------

    def linear(
        self,
        role: str,
        x: Sequence[Node],
        *around: Node,
        first: int = 0,
        size: int | None = None,
        head: int = 0,
        waist: bool = False,
    ) -> Node:
        """y = W x + b + Σ around, of several nodes x side by side; x itself without W."""
        W, b = self.map(role, first, size)
        alpha = torch.cat([node.value for node in x], -1)
        y = alpha if W is None else linear(alpha, W, b)
        ways, start = [(node, _identity(node)) for node in around], 0
        for node in x:
            part = None if W is None else W[None, :, start : start + node.width]
            ways.append((node, _identity(node) if part is None else Map(part)))
            start += node.width
        for node in around:
            y = y + node.value
        made = self.chain.node(y, *ways, waist=waist)
        inputs = [(node, ALL) for node in x]
        self.leaf(f"{role}_weight", made, alpha, *inputs, first=first, head=head)
        self.leaf(f"{role}_bias", made, alpha.new_ones(len(alpha), 1), first=first, head=head)
        return made

    def activated(self, h: Node) -> Node:
        """g = act(h)."""
        g, slope, bend = activation_derivatives(self.spec.activation, h.value)
        straight = self.spec.activation in ("relu", "identity")

        def bends(delta: Tensor) -> Bends:
            return [(h, h, Bend(Diagonal(delta * bend)))]

        way = Map(Diagonal(slope))
        return self.chain.node(g, (h, way), bends=None if straight else bends)

    def product(self, x: Node, gain: Node | None, shift: Node | None = None) -> Node:
        """y = x ⊙ gain + shift: a norm's affine map, a gate."""
        if gain is None and shift is None:
            return x
        value, ways = x.value, [(x, _identity(x))]
        if gain is not None:
            value = x.value * gain.value
            ways = [(x, Map(Diagonal(gain.value))), (gain, Map(Diagonal(x.value)))]
        if shift is not None:
            value = value + shift.value
            ways.append((shift, _identity(shift)))

        def bends(delta: Tensor) -> Bends:
            assert gain is not None
            return [(a, b, Bend(Diagonal(delta))) for a, b in ((x, gain), (gain, x))]

        return self.chain.node(value, *ways, bends=bends if gain and not x.fixed else None)

    def vector(self, name: str) -> Node | None:
        """γ or β as a node (1, d), the same at every token."""
        if name not in self.weights:
            return None
        made = self.chain.node(self.weights[name].unsqueeze(0))
        tokens = self.chain.nodes[0].value
        self.leaf(name, made, torch.ones_like(tokens[:, :1]))
        return made

    def norm(self, role: str, x: Node) -> Node:
        """γ n(x) + β."""
        if self.spec.norm != "none":
            n, inv_std = normalize(x.value, eps=self.spec.eps, norm=self.spec.norm)
            way, base = Normalise(n, inv_std, self.spec.norm), x

            def bends(delta: Tensor) -> Bends:
                return [(base, base, way.bend(delta))]

            x = self.chain.node(n, (x, way), bends=bends)
        return self.product(x, self.vector(f"{role}_weight"), self.vector(f"{role}_bias"))

    # ---- attention -------------------------------------------------------------------------

    def front(self) -> Front:
        """γ and β of a pre-norm block's first norm."""
        return Front(gain=self.vector("norm1_weight"), shift=self.vector("norm1_bias"))

    def head(self, h: int, x: Node, front: Front | None, inputs: Inputs) -> Node:
        """o of one head, from its query rows x̂ (n, d)."""
        spec, keys, node = self.spec, inputs.keys, self.chain.node
        assert keys is not None
        dk, dv, d = spec.key_size, spec.value_size, spec.d_model
        hat = keys.tokens.shape[-1] > d
        tokens, constant = slice(0, d), slice(d, None)
        group = h // (spec.n_heads // spec.kv_heads)
        q = self.linear("query", [x], first=h * dk, size=dk, head=h)
        slope = q.value.new_full((1, dk), spec.logit_scale)
        q = node(q.value * slope, (q, Map(Diagonal(slope))))

        at: dict[str, Any] = {"first": group * dk, "head": h}
        W = self.hatted("key", group * dk, dk, hat=hat)
        theta = node(q.value @ W, (q, Map(W.mT[None])))
        self.leaf("key_weight", theta, q.value, (q, ALL), columns=tokens, turned=True, **at)
        if hat:
            self.leaf("key_bias", theta, q.value, (q, ALL), columns=constant, turned=True, **at)
        theta = theta if front is None else self.fronted(theta, front, hat, value=False)
        logits = theta.value.view(len(keys.tokens), -1, theta.width) @ keys.tokens.mT
        if spec.softmax:
            bias = 0.0 if inputs.bias is None else _of(inputs.bias, h)
            attend = Attend(torch.softmax(logits + bias, -1), keys)
        else:
            seen = inputs.allowed
            allowed = torch.ones_like(logits) if seen is None else _of(seen, h).expand_as(logits)
            attend = Attend(logits * allowed, keys, allowed)

        def bends(delta: Tensor) -> Bends:
            return [(theta, theta, attend.bend(delta))]

        m = node(attend.value, (theta, attend), bends=bends if spec.softmax else None)
        m = m if front is None else self.fronted(m, front, hat, value=True)
        if not hat:
            return self.linear("value", [m], first=group * dv, size=dv, head=h)
        at = {"first": group * dv, "head": h}
        W = self.hatted("value", group * dv, dv, hat=True)
        o = node(m.value @ W.mT, (m, Map(W[None])))
        self.leaf("value_weight", o, m.value[:, tokens], (m, tokens), **at)
        self.leaf("value_bias", o, m.value[:, constant], (m, constant), **at)
        return o

    def hatted(self, role: str, first: int, size: int, *, hat: bool) -> Tensor:
        """Rows of a weight, and with ``hat`` its bias as one more column."""
        W, b = self.map(role, first, size)
        assert W is not None
        if not hat:
            return W
        return torch.cat([W, (W.new_zeros(size) if b is None else b).unsqueeze(-1)], 1)

    def fronted(self, x: Node, front: Front, hat: bool, *, value: bool) -> Node:
        """E m̂ (``value``) or Eᵀθ̂ with E = [[diag γ, β], [0, 1]], the keys' map x̂_j = E n̂_j."""
        if not hat:  # θᵀβ is dead under softmax
            return self.product(x, front.gain, front.shift if value else None)
        gain, shift, d = front.gain, front.shift, self.spec.d_model
        square = torch.eye(d + 1, dtype=x.value.dtype, device=x.value.device)
        tokens = square[None, :, :d]
        if gain is not None:
            gain = self.chain.node(pad(gain.value, (0, 1), value=1.0), (gain, Map(tokens)))
        y = self.product(x, gain)
        if shift is None:
            return y

        # β adds β m_const to the tokens, or θᵀβ to the constant

        def spread(t: Tensor, *, over_tokens: bool) -> Tensor:
            """t_const on the diagonal, or the tokens' t in the last row: (n, d + 1, d)."""
            return t[:, d:, None] * tokens if over_tokens else t[:, None, :d] * square[:, d:]

        def bends(delta: Tensor) -> Bends:
            psi = spread(delta, over_tokens=not value)
            return [(x, shift, Bend(psi)), (shift, x, Bend(psi.mT))]

        shear = pad(shift.value.mT, (d, 0, 0, 1))  # E without its diagonal
        shear = shear if value else shear.mT
        way = Map(spread(x.value, over_tokens=value))
        sources = (y, _identity(y)), (x, Map(shear[None])), (shift, way)
        return self.chain.node(y.value + x.value @ shear.mT, *sources, bends=bends)


def _identity(x: Node) -> Map:
    return Map(Diagonal(torch.ones_like(x.value[:1])))


def _of(t: Tensor, h: int) -> Tensor:
    """One head's slice of (b, H or 1, r, L)."""
    return t[:, h if t.shape[1] > 1 else 0]
