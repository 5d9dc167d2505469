r"""The token-structured bound on ‖H‖₂ of a Transformer block, over all its parameters.

The parameters fall into entries: Q (all heads), K and V of each head, O, the feed-forward's first
and second layer (biases inside, as a constant input), and γ, β of the norms. Every pair of entries
has a bound b_ef from ``kronecker_norms``; the rows of γ and β, few as they are, are exact. Then

    λ_max(H) ≤ λ_max([b] with the upper ends on its diagonal),   λ_min(H) likewise,

which is Cauchy-Schwarz entry by entry. Nothing of size P² is formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.blocks.losses import Seeds
from curvatlas.blocks.structure import BlockSpec, Weights
from curvatlas.theory.kronecker_norms import SignedNorm, TwoTerms, plain_sum, symmetric_sum
from curvatlas.theory.reference import affine_norm, linear
from curvatlas.theory.token_entries import EntryBounds, append_norms, tie_groups
from curvatlas.theory.token_tensors import (
    Head,
    Tail,
    heads_at_tokens,
    tail_at_tokens,
    with_one,
)

Rows = Callable[[], Tensor]


@dataclass(frozen=True)
class Direction:
    """How an attention entry moves U at each token: J = α ⊗ L, α (N, a), L (N, d, r)."""

    name: str
    alpha: Tensor
    lift: Tensor
    head: int | None  # the head this entry belongs to, None: all heads


class _Table:
    """Collects bounds pair by pair."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.diagonal: dict[str, SignedNorm] = {}
        self.pairs: dict[tuple[str, str], Tensor] = {}

    def add(self, name: str, bound: SignedNorm) -> None:
        self.names.append(name)
        self.diagonal[name] = bound

    def pair(self, a: str, b: str, bound: Tensor) -> None:
        self.pairs[a, b] = bound

    def finish(self) -> EntryBounds:
        rows = []
        for a in self.names:
            row = []
            for b in self.names:
                if a == b:
                    row.append(torch.maximum(self.diagonal[a].high, self.diagonal[a].low))
                else:
                    row.append(self.pairs[a, b] if (a, b) in self.pairs else self.pairs[b, a])
            rows.append(torch.stack(row))
        return EntryBounds(
            tuple(self.names),
            torch.stack(rows),
            torch.stack([self.diagonal[n].high for n in self.names]),
            torch.stack([self.diagonal[n].low for n in self.names]),
        )


def entry_bounds(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    seeds: Seeds,
    *,
    mask: Tensor | None = None,
    norm_rows: Rows | None = None,
) -> EntryBounds:
    """All bounds of a block at inputs x (n, L, d) under a token-wise loss.

    ``norm_rows`` gives the Hessian's rows of γ and β (#norm, P), columns in ``WEIGHT_NAMES`` order.
    """
    if spec.rope_base is not None or not spec.softmax:
        raise ValueError(
            "the token-structured bound covers softmax attention without rotary embedding: "
            "use .exact or the data-free bound."
        )
    if seeds.blocks is None:
        raise ValueError(
            "the token-structured bound needs a loss that does not couple tokens: "
            "use token cross-entropy or mse."
        )
    d = x.shape[-1]
    lam = seeds.blocks(slice(None))
    delta = seeds.delta.reshape(-1, d)
    inside = affine_norm(x, weights, "norm1", spec) if spec.norm_first and spec.residual else x
    tail, heads, outputs = _evaluate(spec, weights, x, inside, delta, lam, mask)
    table = _Table()
    directions = _directions(spec, weights, inside, heads, outputs)
    _attention_pairs(table, spec, directions, heads, tail, outputs, weights)
    if tail.hidden is not None:
        _feed_forward_pairs(table, directions, tail)
    bounds = table.finish()
    if spec.kv_heads != spec.n_heads:
        bounds = tie_groups(bounds, spec)
    if norm_rows is not None:
        bounds = append_norms(bounds, norm_rows(), spec, weights)
    return bounds


def _evaluate(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    inside: Tensor,
    delta: Tensor,
    lam: Tensor,
    mask: Tensor | None,
) -> tuple[Tail, list[Head], Tensor]:
    # The heads' outputs do not depend on the adjoint, the tail's U does on them: two passes.
    _, outputs = heads_at_tokens(spec, weights, inside, torch.zeros_like(inside), mask)
    f = linear(outputs, weights, "output") if "output_weight" in weights else outputs
    u = f + x.reshape(f.shape) if spec.residual else f
    tail = tail_at_tokens(spec, weights, u, delta, lam)
    heads, _ = heads_at_tokens(spec, weights, inside, tail.adjoint_u.view_as(inside), mask)
    return tail, heads, outputs


def _directions(
    spec: BlockSpec, weights: Weights, inside: Tensor, heads: list[Head], outputs: Tensor
) -> list[Direction]:
    s, d = spec.logit_scale, inside.shape[-1]
    tokens = inside.reshape(-1, d)
    by_query = torch.cat([h.output_weight @ h.value_key for h in heads], -1)
    found = [Direction("Q", with_one(tokens, "query_bias" in weights), s * by_query, None)]
    for i, h in enumerate(heads):
        # The key bias has exactly zero rows: it is left out of the entry.
        found.append(Direction(f"K{i}", h.query, s * h.output_weight @ h.value_input, i))
    for i, h in enumerate(heads):
        found.append(Direction(f"V{i}", h.mean, h.output_weight.expand(len(tokens), -1, -1), i))
    if "output_weight" in weights:
        identity = torch.eye(d, dtype=inside.dtype, device=inside.device)
        o_hat = with_one(outputs, "output_bias" in weights)
        found.append(Direction("O", o_hat, identity.expand(len(tokens), -1, -1), None))
    return found


def _attention_pairs(
    table: _Table,
    spec: BlockSpec,
    directions: list[Direction],
    heads: list[Head],
    tail: Tail,
    outputs: Tensor,
    weights: Weights,
) -> None:
    s, lam = spec.logit_scale, tail.curvature_u
    d_k, d_v = spec.key_size, spec.value_size
    count = len(heads)
    rows = outputs.shape[0]

    def place(per_head: Tensor, head: int, size: int, dim: int) -> Tensor:
        """Zero-padded so that ``per_head`` stands at its head's slice of axis ``dim``."""
        before, after = head * size, (count - 1 - head) * size
        shape = list(per_head.shape)
        parts = []
        for extra in (before, after):
            shape[dim] = extra
            parts.append(per_head.new_zeros(shape))
        return torch.cat([parts[0], per_head, parts[1]], dim)

    for index, e in enumerate(directions):
        kind = e.name[0]
        middle = e.lift.mT @ lam @ e.lift
        if kind == "Q":
            extra = torch.zeros_like(middle)
            for i, h in enumerate(heads):
                extra = extra + place(place(h.third_kk, i, d_k, 1), i, d_k, 2)
            middle = middle + s**2 * extra
        elif kind == "K":
            assert e.head is not None
            middle = middle + s**2 * heads[e.head].third_xx
        table.add(e.name, symmetric_sum(e.alpha, middle))
        for f in directions[index + 1 :]:
            inner = e.lift.mT @ lam @ f.lift
            pair = kind + f.name[0]
            if pair == "QK":
                assert f.head is not None
                h = heads[f.head]
                inner = inner + s**2 * place(h.third_kx, f.head, d_k, 1)
                gamma = s * e.alpha.T @ h.pull
                bound = plain_sum(e.alpha, f.alpha, inner)
                bound = bound + torch.linalg.matrix_norm(gamma, 2)
            elif pair in ("KK", "VV"):
                bound = plain_sum(e.alpha, f.alpha, inner)
            elif pair in ("QV", "KV"):
                assert f.head is not None
                h = heads[f.head]
                cross = h.key_input if pair == "QV" else h.input_input  # (N, r of e, b of x)
                cross = s * cross.mT  # (N, b, r)
                if pair == "QV":
                    cross = place(cross, f.head, d_k, 2)
                elif e.head != f.head:
                    cross = torch.zeros_like(cross)
                extra_row = f.alpha.shape[1] - cross.shape[1]  # the value bias has no such term
                cross = torch.cat([cross, cross.new_zeros(rows, extra_row, cross.shape[2])], 1)
                bound = TwoTerms(e.alpha, f.alpha, inner, cross, h.adjoint).norm()
            else:  # QO, KO, VO: the rows of O come second
                bound = _with_output(e, f, inner, heads, tail, place, s, d_v)
            table.pair(e.name, f.name, bound)


def _with_output(
    e: Direction,
    o: Direction,
    inner: Tensor,
    heads: list[Head],
    tail: Tail,
    place: Callable[[Tensor, int, int, int], Tensor],
    s: float,
    d_v: int,
) -> Tensor:
    """Bound of a block (θ, O): Ô_c (LᵀΛ)_ro α + α K_cr R_o with K = s Ĝ, s P̂ or the identity."""
    kind = e.name[0]
    exact: Tensor | None = None
    if kind == "Q":
        # K[(h, o'), (h, p)] = s Ĝ^h: block diagonal over heads
        blocks = []
        for i, h in enumerate(heads):
            blocks.append(place(s * h.value_key, i, d_v, 1))
        cross = torch.cat(blocks, 2)
    elif kind == "K":
        assert e.head is not None
        cross = place(s * heads[e.head].value_input, e.head, d_v, 1)
    else:
        assert e.head is not None
        identity = torch.eye(d_v, dtype=inner.dtype, device=inner.device)
        cross = place(identity.expand(len(inner), -1, -1), e.head, d_v, 1)
        exact = torch.linalg.matrix_norm(e.alpha.T @ tail.adjoint_u, 2)
    extra = o.alpha.shape[1] - cross.shape[1]  # the output bias has no adjoint term
    cross = torch.cat([cross, cross.new_zeros(len(inner), extra, cross.shape[2])], 1)
    return TwoTerms(e.alpha, o.alpha, inner, cross, tail.adjoint_u, exact).norm()


def _feed_forward_pairs(table: _Table, directions: list[Direction], tail: Tail) -> None:
    assert tail.hidden is not None
    assert tail.hidden_input is not None
    assert tail.slope is not None
    assert tail.adjoint_h is not None
    assert tail.adjoint_s is not None
    assert tail.curvature_h is not None
    assert tail.curvature_s is not None
    assert tail.h_s is not None
    assert tail.u_h is not None
    assert tail.u_s is not None
    assert tail.v_by_u is not None
    v_hat, g_hat, slope = tail.hidden_input, tail.hidden, tail.slope
    d_ff, width = slope.shape[1], slope.shape[2]
    bias_v, bias_g = v_hat.shape[1] - tail.v_by_u.shape[1], g_hat.shape[1] - d_ff

    def pad(cross: Tensor, extra: int) -> Tensor:
        return torch.cat([cross, cross.new_zeros(cross.shape[0], extra, cross.shape[2])], 1)

    table.add("up", symmetric_sum(v_hat, tail.curvature_h))
    table.add("down", symmetric_sum(g_hat, tail.curvature_s))
    # Second term of (up, down): block diagonal over hidden units, so its norm is the largest one.
    diagonals = [
        torch.diagonal(slope[:, :, c : c + d_ff], dim1=1, dim2=2) for c in range(0, width, d_ff)
    ]
    units = torch.cat(
        [torch.einsum("nk,na,no->kao", f, v_hat, tail.adjoint_s) for f in diagonals], 1
    )
    exact = torch.linalg.matrix_norm(units, 2).amax()
    up_down = TwoTerms(v_hat, g_hat, tail.h_s, pad(slope, bias_g), tail.adjoint_s, exact)
    table.pair("up", "down", up_down.norm())
    assert tail.hidden_by_u is not None
    for e in directions:
        to_up = TwoTerms(
            e.alpha, v_hat, e.lift.mT @ tail.u_h, pad(tail.v_by_u @ e.lift, bias_v), tail.adjoint_h
        )
        to_down = TwoTerms(
            e.alpha,
            g_hat,
            e.lift.mT @ tail.u_s,
            pad(tail.hidden_by_u @ e.lift, bias_g),
            tail.adjoint_s,
        )
        table.pair(e.name, "up", to_up.norm())
        table.pair(e.name, "down", to_down.norm())
