r"""The token-structured bound on ‖H‖₂ of a Transformer block, over all its parameters.

The parameters fall into entries: Q (all heads), K and V of each head, O, the feed-forward's first
and second layer (biases inside, as a constant input), and γ, β of the norms. Every pair of entries
has a bound b_ef from ``kronecker_norms``; the rows of γ and β, few as they are, are exact. Then

    λ_max(H) ≤ λ_max([b] with the upper ends on its diagonal),   λ_min(H) likewise,

which is Cauchy-Schwarz entry by entry. Nothing of size P² is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.engines.tangent.block import LinearisedBlock, linearise
from curvatlas.engines.tangent.losses import OutputLoss, Seeds
from curvatlas.engines.tangent.stack import BlockStack
from curvatlas.engines.tangent.structure import WEIGHT_NAMES, BlockSpec, Weights
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.theory import reference
from curvatlas.theory.reference import affine_norm, linear
from curvatlas.theory.token_tensors import (
    SignedNorm,
    TokenHead,
    TokenTail,
    TwoTerms,
    heads_at_tokens,
    plain_sum,
    symmetric_sum,
    tail_at_tokens,
    with_one,
)

# -------------------------------------------------------------------------------------------------
# The exact spectral norm of a block's or stack's Hessian, from closed-form products.
# -------------------------------------------------------------------------------------------------


_DENSE_LIMIT = 1200  # parameters up to which the norm comes from all eigenvalues


def exact_norm(
    layers: Sequence[tuple[BlockSpec, Weights]],
    x: Tensor,
    target: Tensor,
    loss: OutputLoss,
    mask: Tensor | None = None,
) -> float:
    """‖H‖₂ from closed-form products: all eigenvalues when small, Lanczos to 1e-10 otherwise."""
    hessian = BlockStack(list(layers), loss=loss).linearise(x, target, mask=mask)
    if hessian.shape[0] <= _DENSE_LIMIT:
        return float(reference.spectral_norm(hessian.dense()))
    pairs = eigenpairs(hessian, k=1, which="magnitude", tol=1e-10)
    if not pairs.converged:
        raise ArithmeticError(
            f"‖H‖₂ did not converge to 1e-10: |λ| = {float(pairs.values.abs().max()):.6g} has the "
            f"residual {float(pairs.residuals.max()):.1e} after {pairs.products} products."
        )
    return float(pairs.values.abs().max())


# -------------------------------------------------------------------------------------------------
# Rows of the Hessian that belong to γ and β: few enough to be had exactly.
#
# Two ways to the same numbers: hand-written products (no graph, what a user's call takes) and
# double
# backward with a graph kept (what the bound's adversary differentiates through).
# -------------------------------------------------------------------------------------------------


def has_norms(weights: Weights) -> bool:
    return any(name.startswith("norm") for name in weights)


def rows_by_products(
    spec: BlockSpec, weights: Weights, x: Tensor, seeds: Seeds, mask: Tensor | None = None
) -> Tensor:
    """(#norm, P) by one batched closed-form product over all γ and β; x (n, L, d)."""
    block = linearise(spec, weights, x, mask)
    block.gradient(seeds.delta)
    names = [n for n in block.names if n.startswith("norm")]
    total = sum(weights[n].numel() for n in names)
    tangents, start = {}, 0
    for name in names:
        size = weights[name].numel()
        tangent = weights[name].new_zeros(total, size)
        tangent[start : start + size] = torch.eye(size, dtype=tangent.dtype, device=tangent.device)
        tangents[name], start = tangent, start + size
    found, _ = block.hvp(tangents, curvature=seeds.product, needs_input=False)
    return torch.cat([found[n].reshape(total, -1) for n in block.names], 1)


def rows_by_backward(
    spec: BlockSpec, weights: Weights, x: Tensor, loss: OutputLoss, y: Tensor
) -> Tensor:
    """The same by double backward, itself differentiable; weights must record gradients."""
    names = [n for n in WEIGHT_NAMES if n in weights]
    params = [weights[n] for n in names]
    z = reference.block_output(spec, weights, x)
    value = loss.seeds(z, y).value
    norms = [p for n, p in zip(names, params, strict=True) if n.startswith("norm")]
    return reference.jacobian(reference.flat_gradient(value, norms, graph=True), params, graph=True)


# -------------------------------------------------------------------------------------------------
# Bounds over entries of parameters: how they combine, tie and meet the exact rows of the norms.
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryBounds:
    """Bounds over entries: matrix [b] (E, E) symmetric, its diagonal's two signed ends (E,)."""

    names: tuple[str, ...]
    matrix: Tensor
    high: Tensor
    low: Tensor

    def ends(self) -> tuple[Tensor, Tensor]:
        """(u, l) with −l ≤ H ≤ u: each the top of [b] with that end on the diagonal."""
        off = self.matrix - torch.diag(torch.diagonal(self.matrix))
        high, low = (
            torch.linalg.eigvalsh(off + torch.diag(end))[-1] for end in (self.high, self.low)
        )
        return high, low

    def norm(self) -> Tensor:
        """‖H‖ ≤ the larger of the two ends."""
        return torch.maximum(*self.ends())


def tie_groups(bounds: EntryBounds, spec: BlockSpec) -> EntryBounds:
    """Grouped-query heads share keys and values: H_tied = EᵀHE, bounds add up within a group."""
    ratio = spec.n_heads // spec.kv_heads
    names: list[str] = []
    for name in bounds.names:
        kind = name[0]
        tied = f"{kind}{int(name[1:]) // ratio}" if kind in "KV" and name[1:].isdigit() else name
        names.append(tied)
    kept = list(dict.fromkeys(names))
    fold = torch.zeros(len(kept), len(names), dtype=bounds.matrix.dtype)
    for column, name in enumerate(names):
        fold[kept.index(name), column] = 1.0
    fold = fold.to(bounds.matrix.device)
    off = bounds.matrix - torch.diag(torch.diagonal(bounds.matrix))
    ends = [
        torch.diagonal(fold @ (off + torch.diag(e)) @ fold.T) for e in (bounds.high, bounds.low)
    ]
    return EntryBounds(tuple(kept), fold @ bounds.matrix @ fold.T, ends[0], ends[1])


def append_norms(
    bounds: EntryBounds, rows: Tensor, spec: BlockSpec, weights: Weights
) -> EntryBounds:
    """Adds the entry of all γ and β with exact norms of its rows against every other entry."""
    columns = entry_columns(spec, weights)
    own = rows[:, columns["norms"]]
    values = torch.linalg.eigvalsh(0.5 * (own + own.T))
    cross = torch.stack(
        [torch.linalg.matrix_norm(rows[:, columns[name]], 2) for name in bounds.names]
    )
    ends = values[-1].clamp_min(0.0), (-values[0]).clamp_min(0.0)
    corner = torch.maximum(*ends).reshape(1, 1)
    matrix = torch.cat(
        [
            torch.cat([bounds.matrix, cross.unsqueeze(1)], 1),
            torch.cat([cross.unsqueeze(0), corner], 1),
        ]
    )
    return EntryBounds(
        (*bounds.names, "norms"),
        matrix,
        torch.cat([bounds.high, ends[0].reshape(1)]),
        torch.cat([bounds.low, ends[1].reshape(1)]),
    )


def entry_columns(spec: BlockSpec, weights: Weights) -> dict[str, Tensor]:
    """Flat positions of every entry's parameters, the weights in ``WEIGHT_NAMES`` order."""
    start, places = 0, {}
    for name in (n for n in WEIGHT_NAMES if n in weights):
        size = weights[name].numel()
        places[name] = torch.arange(start, start + size).reshape(weights[name].shape)
        start += size

    def take(*names: str) -> Tensor:
        return torch.cat([places[n].reshape(-1) for n in names if n in places])

    columns = {"Q": take("query_weight", "query_bias")}
    for kind, name, size in (("K", "key", spec.key_size), ("V", "value", spec.value_size)):
        for g in range(spec.kv_heads):
            rows = slice(g * size, (g + 1) * size)
            parts = [places[p][rows].reshape(-1) for p in (f"{name}_weight", f"{name}_bias")
                     if p in places]  # fmt: skip
            columns[f"{kind}{g}"] = torch.cat(parts)
    if "output_weight" in places:
        columns["O"] = take("output_weight", "output_bias")
    if "up_weight" in places:
        columns["up"] = take("gate_weight", "gate_bias", "up_weight", "up_bias")
        columns["down"] = take("down_weight", "down_bias")
    norms = [n for n in places if n.startswith("norm")]
    if norms:
        columns["norms"] = take(*norms)
    return columns


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
) -> tuple[TokenTail, list[TokenHead], Tensor]:
    # The heads' outputs do not depend on the adjoint, the tail's U does on them: two passes.
    _, outputs = heads_at_tokens(spec, weights, inside, torch.zeros_like(inside), mask)
    f = linear(outputs, weights, "output") if "output_weight" in weights else outputs
    u = f + x.reshape(f.shape) if spec.residual else f
    tail = tail_at_tokens(spec, weights, u, delta, lam)
    heads, _ = heads_at_tokens(spec, weights, inside, tail.adjoint_u.view_as(inside), mask)
    return tail, heads, outputs


def _directions(
    spec: BlockSpec, weights: Weights, inside: Tensor, heads: list[TokenHead], outputs: Tensor
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
    heads: list[TokenHead],
    tail: TokenTail,
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
    heads: list[TokenHead],
    tail: TokenTail,
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


def _feed_forward_pairs(table: _Table, directions: list[Direction], tail: TokenTail) -> None:
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


# -------------------------------------------------------------------------------------------------
# The token-structured bound for a stack of blocks.
#
# With h_b the output of block b, Λ_b = ∂²ℓ/∂h_b², δ_b = ∂ℓ/∂h_b, the stack's Hessian has
#
#     H_bb = K_bᵀΛ_bK_b + Σ δ_b ∂²h_b/∂θ_b²         (K_b = ∂h_b/∂θ_b)
#     H_ab = K_aᵀ … = (∂h_{b−1}/∂θ_a)ᵀ ∂²ℓ/∂h_{b−1}∂θ_b          for a < b.
#
# Everything that passes through the N·d numbers of an h_b is exact, from N·d products and matrices
# of
# N·d × N·d: the off-diagonal blocks, and the outer part of the diagonal ones (inside a stack Λ_b
# couples tokens). The functional part of a diagonal block has its token-structured bound.
# -------------------------------------------------------------------------------------------------


def _no_curvature(like: Tensor, delta: Tensor) -> Seeds:
    """Seeds with Λ = 0 and the given δ (n, L, d): the functional part alone."""
    blocks = like.new_zeros(*like.shape, like.shape[-1])
    return Seeds.from_blocks(value=like.new_zeros(()), delta=delta, blocks=blocks)


def _entry(
    spec: BlockSpec, weights: Weights, x: Tensor, seeds: Seeds, mask: Tensor | None
) -> EntryBounds:
    rows = (lambda: rows_by_products(spec, weights, x, seeds, mask)) if has_norms(weights) else None
    return entry_bounds(spec, weights, x, seeds, mask=mask, norm_rows=rows)


def stack_token_bound(
    layers: Sequence[tuple[BlockSpec, Weights]],
    x: Tensor,
    target: Tensor,
    loss: OutputLoss,
    mask: Tensor | None,
) -> tuple[tuple[str, ...], Tensor, float, float, Seeds]:
    """Names of the blocks, matrix of block bounds, the bound, the exact norm, and the seeds."""
    blocks, inputs, z = [], [], x
    for spec, weights in layers:
        inputs.append(z)
        blocks.append(linearise(spec, weights, z, mask))
        z = blocks[-1].output
    seeds = loss.seeds(z, target)
    deltas = [seeds.delta]
    for block in reversed(blocks):
        deltas.insert(0, block.gradient(deltas[0])[1])
    count, size = len(layers), x.numel()
    matrix = torch.zeros(count, count, dtype=torch.float64)
    curvatures, mixed = _input_curvature(layers, inputs, target, loss, mask)
    ends = torch.zeros(2, count, dtype=torch.float64)  # signed: highest, minus lowest
    for a, (spec, weights) in enumerate(layers):
        through = _jacobian_rows(blocks[a], size)  # ∂h_a/∂θ_a as (Nd, P_a)
        gram = through @ through.T
        functional = _entry(spec, weights, inputs[a], _no_curvature(z, deltas[a + 1]), mask)
        if a == count - 1:
            whole = _entry(spec, weights, inputs[a], seeds, mask)
            ends[:, a] = torch.stack(whole.ends())
        else:
            ends[:, a] = _sandwich(curvatures[a], gram) + torch.stack(functional.ends())
        for b in range(a + 1, count):
            if b > a + 1:  # ∂h_{b−1}/∂θ_a = (∂h_{b−1}/∂h_{b−2}) ∂h_{b−2}/∂θ_a
                step = _input_jacobian(blocks[b - 1], size)
                gram = step @ gram @ step.T
            matrix[a, b] = matrix[b, a] = _sandwich(mixed[b], gram)[0].sqrt()
    bound = max(float(torch.linalg.eigvalsh(matrix + torch.diag(e))[-1]) for e in ends)
    matrix = matrix + torch.diag(ends.amax(0))
    names = tuple(f"block {i}" for i in range(count))
    return names, matrix, bound, exact_norm(layers, x, target, loss, mask), seeds


def _sandwich(middle: Tensor, gram: Tensor) -> Tensor:
    """(highest, −lowest), not below 0, of the spectrum of KᵀMK from M and KKᵀ, both Nd × Nd."""
    values, vectors = torch.linalg.eigh(gram)
    root = vectors * values.clamp_min(0.0).sqrt()
    inner = root.T @ middle @ root
    found = torch.linalg.eigvalsh(0.5 * (inner + inner.T))
    return torch.stack([found[-1], -found[0]]).clamp_min(0.0)


def _input_curvature(
    layers: Sequence[tuple[BlockSpec, Weights]],
    inputs: Sequence[Tensor],
    target: Tensor,
    loss: OutputLoss,
    mask: Tensor | None,
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Λ_b (Nd, Nd) at every inner block's output, and MMᵀ for M = ∂²ℓ/∂h_{b−1}∂θ_b.

    Both from N·d products of the blocks above with the unit vectors of their input.
    """
    curvatures: dict[int, Tensor] = {}
    mixed: dict[int, Tensor] = {}
    for b in range(1, len(layers)):
        above = BlockStack(list(layers[b:]), loss=loss).linearise(
            inputs[b], target, mask=mask, include_input=True
        )
        size, total = inputs[b].numel(), above.shape[0]
        units = torch.zeros(total, size, dtype=inputs[b].dtype, device=inputs[b].device)
        units[total - size :] = torch.eye(size, dtype=units.dtype, device=units.device)
        rows = above @ units  # (P above + Nd, Nd)
        lam = rows[total - size :]
        curvatures[b - 1] = 0.5 * (lam + lam.T)
        own = sum(w.numel() for w in layers[b][1].values())
        part = rows[:own].T  # (Nd, P_b)
        mixed[b] = part @ part.T
    return curvatures, mixed


def _jacobian_rows(block: LinearisedBlock, size: int) -> Tensor:
    """∂h/∂θ (Nd, P) by Nd vector-Jacobian products."""
    output = block.output
    units = torch.eye(size, dtype=output.dtype, device=output.device).view(size, *output.shape)
    found, _ = block.vjp(units)
    return torch.cat([t.reshape(size, -1) for t in found.values()], 1)


def _input_jacobian(block: LinearisedBlock, size: int) -> Tensor:
    """∂h/∂x (Nd, Nd)."""
    output = block.output
    units = torch.eye(size, dtype=output.dtype, device=output.device).view(size, *output.shape)
    found: Tensor = block.vjp(units, wanted=())[1].reshape(size, -1)
    return found
