r"""The token-structured bound on ‖H‖₂ of a Transformer block, over all its parameters.

The parameters fall into entries: Q (all heads), K and V of each head, O, the feed-forward's first
and second layer (biases inside, as a constant input), and γ, β of the norms. Every pair of entries
is a sum of Kronecker products over tokens, whose tensors come from the closed form
(``closed_form.chain``) and whose norm has a bound b_ef; the rows of γ and β, few as they are, are
exact. Then

    λ_max(H) ≤ λ_max([b] with the upper ends on its diagonal),   λ_min(H) likewise,

which is Cauchy-Schwarz entry by entry (derivations §13). Nothing of size P² is formed, and all is
differentiable, so that an adversary can climb the ratio true/bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from curvatlas.closed_form.chain import Chain, Diagonal, Leaf, Pair
from curvatlas.closed_form.hessian import BlockDerivatives
from curvatlas.layers.losses import OutputLoss, Seeds
from curvatlas.layers.structure import WEIGHT_NAMES, BlockSpec, Weights
from curvatlas.operators.plain import PlainHessian
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.theory import reference
from curvatlas.zoo.block import forward_pass

_DENSE_LIMIT = 1200  # parameters up to which the exact norm comes from all eigenvalues

# ---- norms of sums over tokens: each the smallest of several proven bounds -------------------


def top(matrix: Tensor) -> Tensor:
    """Largest eigenvalue of a symmetric matrix, not below zero."""
    largest: Tensor = torch.linalg.eigvalsh(matrix)[..., -1].clamp_min(0.0)
    return largest


def weighted_top(alpha: Tensor, weight: Tensor) -> Tensor:
    """λ_max(Σ_i w_i α_iα_iᵀ), alpha (N, a), w (…, N) ≥ 0 → (…)."""
    if alpha.shape[0] < alpha.shape[1]:  # the Gram matrix has the same spectrum and is smaller
        root = _root(weight)
        return top((alpha @ alpha.T) * root.unsqueeze(-2) * root.unsqueeze(-1))
    return top(alpha.T @ (alpha * weight.unsqueeze(-1)))


def _root(values: Tensor) -> Tensor:
    """√x with a finite derivative at 0 (the adversary differentiates through it)."""
    positive = values > 0
    return torch.where(positive, torch.where(positive, values, 1.0).sqrt(), 0.0 * values)


@dataclass(frozen=True)
class SignedNorm:
    """−low ≤ B ≤ high in the sense of quadratic forms, and a bound on ‖B‖_F."""

    high: Tensor
    low: Tensor
    frobenius: Tensor


def symmetric_sum(alpha: Tensor, middle: Tensor) -> SignedNorm:
    r"""Both ends of the spectrum of Σ_i α_iα_iᵀ ⊗ M_i, M_i symmetric.

    With M = M⁺ − M⁻:  Σ αα ᵀ⊗M⁺ ≤ ‖M_i⁺‖-weighted tokens ⊗ I, and ≤ I ⊗ Σ‖α_i‖²M_i⁺, and ≤ ‖B‖_F.

    alpha: (N, a), middle: (N, r, r)
    """
    values, vectors = torch.linalg.eigh(0.5 * (middle + middle.mT))
    size = alpha.pow(2).sum(1)
    frobenius = plain_frobenius(alpha, alpha, middle)
    ends = []
    for signed in (values, -values):
        part = signed.clamp_min(0.0)
        by_token = weighted_top(alpha, part.amax(1))
        summed = torch.einsum("nrk,nk,nsk->rs", vectors, part * size.unsqueeze(1), vectors)
        ends.append(torch.stack([by_token, top(summed), frobenius]).amin())
    return SignedNorm(ends[0], ends[1], frobenius)


def plain_sum(alpha: Tensor, beta: Tensor, middle: Tensor) -> Tensor:
    r"""‖Σ_i α_iβ_iᵀ ⊗ M_i‖ by Cauchy-Schwarz on M_i = (U√S)(V√S)ᵀ, weights w_i free:

    ≤ [ λ_max(Σ w αα ᵀ⊗USUᵀ) · λ_max(Σ w⁻¹ ββᵀ⊗VSVᵀ) ]^½, each side as in ``symmetric_sum``.

    alpha: (N, a), beta: (N, b), middle: (N, r, s)
    """
    u, s, vh = torch.linalg.svd(middle, full_matrices=False)
    a2, b2 = alpha.pow(2).sum(1), beta.pow(2).sum(1)
    left = (u * s.unsqueeze(1)) @ u.mT
    right = vh.mT @ (vh * s.unsqueeze(2))
    balance = ((b2 + 1e-300) / (a2 + 1e-300)).sqrt()
    w = torch.stack([torch.ones_like(balance), balance])  # two choices at once
    rows = torch.minimum(weighted_top(alpha, w * s[:, 0]), _summed_top(w * a2, left))
    columns = torch.minimum(weighted_top(beta, s[:, 0] / w), _summed_top(b2 / w, right))
    crossed = (_root(rows) * _root(columns)).amin()
    return torch.minimum(crossed, plain_frobenius(alpha, beta, middle))


def _summed_top(weight: Tensor, middle: Tensor) -> Tensor:
    """λ_max(Σ_i w_i M_i) for w (…, N), M (N, r, r)."""
    summed = weight @ middle.reshape(len(middle), -1)
    return top(summed.reshape(*weight.shape[:-1], *middle.shape[1:]))


def plain_frobenius(alpha: Tensor, beta: Tensor, middle: Tensor) -> Tensor:
    """‖Σ_i α_iβ_iᵀ ⊗ M_i‖_F from Gram matrices of the tokens (derivations §12), exact."""
    flat = middle.reshape(len(middle), -1)
    return _root(((alpha @ alpha.T) * (beta @ beta.T) * (flat @ flat.T)).sum())


@dataclass(frozen=True)
class TwoTerms:
    r"""Σ_i α_i ⊗ (a_i ⊗ N_i + K_i ⊗ b_i): entry (α, r; c, k) = α(a_c N_rk + K_cr b_k).

    alpha (N, ·) the factor both terms share, first (N, c), inner (N, r, k), cross (N, c, r),
    last (N, k). ``exact`` bounds the second term when it is known better than by its factors.
    """

    alpha: Tensor
    first: Tensor
    inner: Tensor
    cross: Tensor
    last: Tensor
    exact: Tensor | None = None

    def frobenius(self) -> Tensor:
        gram = self.alpha @ self.alpha.T
        one = plain_frobenius(self.alpha, self.first, self.inner) ** 2
        two = plain_frobenius(self.alpha, self.last, self.cross) ** 2
        met = torch.einsum("jcr,ic->ijr", self.cross, self.first)
        seen = torch.einsum("irk,jk->ijr", self.inner, self.last)
        both = (gram * (met * seen).sum(-1)).sum()
        return _root((one + two + 2.0 * both).clamp_min(0.0))

    def norm(self) -> Tensor:
        second = plain_sum(self.alpha, self.last, self.cross.mT)
        if self.exact is not None:
            second = torch.minimum(second, self.exact)
        return torch.minimum(
            self.frobenius(), plain_sum(self.alpha, self.first, self.inner) + second
        )


# ---- exact rows and norms ---------------------------------------------------------------------


def exact_norm(
    layers: Sequence[tuple[BlockSpec, Weights]],
    x: Tensor,
    target: Tensor,
    loss: OutputLoss,
    mask: Tensor | None = None,
) -> float:
    """‖H‖₂ from exact products: all eigenvalues when small, Lanczos to 1e-10 otherwise."""
    hessian = stack_hessian(layers, x, target, loss, mask)
    if hessian.shape[0] <= _DENSE_LIMIT:
        return float(reference.spectral_norm(hessian.dense()))
    pairs = eigenpairs(hessian, k=1, which="magnitude", tol=1e-10)
    if not pairs.converged:
        raise ArithmeticError(
            f"‖H‖₂ did not converge to 1e-10: |λ| = {float(pairs.values.abs().max()):.6g} has the "
            f"residual {float(pairs.residuals.max()):.1e} after {pairs.products} products."
        )
    return float(pairs.values.abs().max())


def stack_hessian(
    layers: Sequence[tuple[BlockSpec, Weights]],
    x: Tensor,
    target: Tensor,
    loss: OutputLoss,
    mask: Tensor | None = None,
    *,
    include_input: bool = False,
) -> PlainHessian:
    """The Hessian of a stack by double backward, its input's rows last if included."""
    weights = {f"blocks.{i}.{n}": w for i, (_, own) in enumerate(layers) for n, w in own.items()}

    def forward(tracked: Weights) -> Tensor:
        y = tracked.get("input", x)
        for i, (spec, own) in enumerate(layers):
            y = forward_pass(spec, {n: tracked[f"blocks.{i}.{n}"] for n in own}, y, mask)[0]
        return y

    inputs = {"input": x} if include_input else {}
    return PlainHessian(forward, weights | inputs, lambda z: loss.seeds(z, target))


def rows_by_products(
    spec: BlockSpec, weights: Weights, x: Tensor, seeds: Seeds, mask: Tensor | None = None
) -> Tensor:
    """Rows of γ and β (#norm, P), columns in ``WEIGHT_NAMES`` order, by one batched product."""
    found = _derivatives(spec, weights, x, seeds, mask)
    norms = [n for n in found.names if n.startswith("norm")]
    places = torch.cat([torch.arange(s, s + size) for s, size in map(found.offset, norms)])
    units = torch.zeros(found.size, len(places), dtype=x.dtype, device=x.device)
    units[places, torch.arange(len(places))] = 1.0
    rows: Tensor = (found @ units).mT
    return rows


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


# ---- bounds over entries of parameters -------------------------------------------------------


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
    corner_block = rows[:, columns["norms"]]
    values = torch.linalg.eigvalsh(0.5 * (corner_block + corner_block.T))
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


def _derivatives(
    spec: BlockSpec, weights: Weights, x: Tensor, seeds: Seeds, mask: Tensor | None
) -> BlockDerivatives:
    attention = forward_pass(spec, weights, x, mask)[1]
    return BlockDerivatives(spec, weights, x, seeds, attention=attention, mask=mask)


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
            parts = [
                places[p][rows].reshape(-1)
                for p in (f"{name}_weight", f"{name}_bias")
                if p in places
            ]
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


def entry_bounds(
    spec: BlockSpec,
    weights: Weights,
    x: Tensor,
    seeds: Seeds,
    *,
    mask: Tensor | None = None,
    norm_rows: Callable[[], Tensor] | None = None,
) -> EntryBounds:
    """All bounds of a block at inputs x (n, L, d) under a token-wise loss.

    ``norm_rows`` gives the Hessian's rows of γ and β instead of ``rows_by_products``.
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
    found = _derivatives(spec, weights, x, seeds, mask)
    terms = found.chain(slice(0, x.shape[0]), slice(0, x.shape[1]), "total")
    entries = _entries(terms.leaves)
    names = list(entries)
    diagonal = [_signed(terms, entries[name]) for name in names]
    high, low = (torch.stack([getattr(s, end) for s in diagonal]) for end in ("high", "low"))
    rows = [[torch.maximum(s.high, s.low) for s in diagonal] for _ in names]
    for i, a in enumerate(names):
        for j, b in enumerate(names[i + 1 :], i + 1):
            rows[i][j] = rows[j][i] = _pair_bound(terms, entries[a], entries[b])
    bounds = EntryBounds(tuple(names), torch.stack([torch.stack(row) for row in rows]), high, low)
    if spec.kv_heads != spec.n_heads:
        bounds = tie_groups(bounds, spec)
    if any(name.startswith("norm") for name in weights):
        rows_of = norm_rows or partial(rows_by_products, spec, weights, x, seeds, mask)
        bounds = append_norms(bounds, rows_of(), spec, weights)
    return bounds


def _entries(leaves: Sequence[Leaf]) -> dict[str, list[Leaf]]:
    """Weights that share their activations: queries of all heads, gate and up; no norms."""
    letters = {"query": "Q", "output": "O", "gate": "up", "up": "up", "down": "down"}
    entries: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        role, _, end = leaf.name.rpartition("_")
        if end == "weight" and not role.startswith("norm"):
            name = letters.get(role) or f"{role[0].upper()}{leaf.head}"
            entries.setdefault(name, []).append(leaf)
    return entries


def _activation(terms: Chain, leaf: Leaf) -> Tensor:
    """α of a weight, with the 1 of its bias (a key's is dead under softmax)."""
    bias = leaf.name.removesuffix("weight") + "bias"
    biased = any(other.name == bias for other in terms.leaves)
    return torch.nn.functional.pad(leaf.alpha, (0, 1), value=1.0) if biased else leaf.alpha


def _signed(terms: Chain, entry: list[Leaf]) -> SignedNorm:
    """Both ends of the diagonal block of an entry."""
    rows = []
    for i, f in enumerate(entry):
        left = [terms.pair(g, f).core.mT for g in entry[:i]]
        rows.append(torch.cat([*left, *(terms.pair(f, g).core for g in entry[i:])], 2))
    alpha = _activation(terms, entry[0])
    return symmetric_sum(alpha, torch.cat(rows, 1).expand(len(alpha), -1, -1))


def _pair_bound(terms: Chain, left: list[Leaf], right: list[Leaf]) -> Tensor:
    """The bound of block (left, right): one sum over tokens, or two where an adjoint enters."""
    alpha, beta = _activation(terms, left[0]), _activation(terms, right[0])
    pairs = [[terms.pair(f, g) for g in right] for f in left]
    core = torch.cat([torch.cat([p.core for p in row], 2) for row in pairs], 1)
    core = core.expand(len(alpha), -1, -1)
    if all(p.delta is None for row in pairs for p in row):
        return plain_sum(alpha, beta, core)
    delta = torch.cat([_first(row[k].delta for row in pairs) for k in range(len(right))], 1)
    kinds = (left[0].name, right[0].name)
    if kinds == ("query_weight", "key_weight"):  # the second term is Γ ⊗ I
        gamma: Tensor = torch.linalg.matrix_norm(alpha.T @ delta, 2)
        return plain_sum(alpha, beta, core) + gamma
    cross = torch.cat([_slope(row[0], beta) for row in pairs], 1).mT
    exact: Tensor | None = None
    if kinds == ("value_weight", "output_weight"):  # Σ α δᵀ ⊗ I
        exact = torch.linalg.matrix_norm(alpha.T @ delta, 2)
    elif kinds[1] == "down_weight" and kinds[0] in ("gate_weight", "up_weight"):
        # block diagonal over hidden units: its norm is the largest one
        slopes = [row[0].slope for row in pairs]
        values = [slope.values for slope in slopes if isinstance(slope, Diagonal)]
        units = [
            torch.einsum("nk,na,no->kao", v.expand(len(alpha), -1), alpha, delta) for v in values
        ]
        exact = torch.linalg.matrix_norm(torch.cat(units, 1), 2).amax()
    return TwoTerms(alpha, beta, core, cross, delta, exact).norm()


def _first(tensors: Iterable[Tensor | None]) -> Tensor:
    return next(t for t in tensors if t is not None)


def _slope(pair: Pair, beta: Tensor) -> Tensor:
    """K (N, core, activation) of a pair written out; zero where it has none."""
    if pair.slope is None:
        return beta.new_zeros(len(beta), pair.f.shape[0], beta.shape[1])
    K = pair.slope
    K = torch.diag_embed(K.values) if isinstance(K, Diagonal) else K
    after = beta.shape[1] - pair.start - K.shape[-1]
    return torch.nn.functional.pad(K, (pair.start, after)).expand(len(beta), -1, -1)


# ---- stacks ----------------------------------------------------------------------------------


def _no_curvature(like: Tensor, delta: Tensor) -> Seeds:
    """Seeds with Λ = 0 and the given δ (n, L, d): the functional part alone."""
    blocks = like.new_zeros(*like.shape, like.shape[-1])
    return Seeds.from_blocks(value=like.new_zeros(()), delta=delta, blocks=blocks)


def stack_token_bound(
    layers: Sequence[tuple[BlockSpec, Weights]],
    x: Tensor,
    target: Tensor,
    loss: OutputLoss,
    mask: Tensor | None,
) -> tuple[tuple[str, ...], Tensor, float, float, Seeds]:
    r"""Names of the blocks, matrix of block bounds, the bound, the exact norm, and the seeds.

    With h_b the output of block b, Λ_b = ∂²ℓ/∂h_b², δ_b = ∂ℓ/∂h_b, the stack's Hessian has

        H_bb = K_bᵀΛ_bK_b + Σ δ_b ∂²h_b/∂θ_b²         (K_b = ∂h_b/∂θ_b)
        H_ab = (∂h_{b−1}/∂θ_a)ᵀ ∂²ℓ/∂h_{b−1}∂θ_b          for a < b.

    Everything that passes through the N·d numbers of an h_b is exact: the off-diagonal blocks, and
    the outer part of the diagonal ones (inside a stack Λ_b couples tokens). The functional part of
    a diagonal block has its token-structured bound.
    """
    inputs = [x]
    for spec, weights in layers:
        inputs.append(forward_pass(spec, weights, inputs[-1], mask)[0])
    z = inputs[-1]
    jacobians = [
        _jacobians(spec, weights, y, mask)
        for (spec, weights), y in zip(layers, inputs[:-1], strict=True)
    ]
    seeds = loss.seeds(z, target)
    deltas = [seeds.delta]
    for _, step in reversed(jacobians):
        deltas.insert(0, (deltas[0].reshape(-1) @ step).view_as(x))
    count = len(layers)
    matrix = torch.zeros(count, count, dtype=torch.float64)
    curvatures, mixed = _input_curvature(layers, inputs, target, loss, mask)
    ends = torch.zeros(2, count, dtype=torch.float64)  # signed: highest, minus lowest
    for a, (spec, weights) in enumerate(layers):
        through = jacobians[a][0]  # ∂h_a/∂θ_a as (Nd, P_a)
        gram = through @ through.T
        functional = entry_bounds(
            spec, weights, inputs[a], _no_curvature(z, deltas[a + 1]), mask=mask
        )
        if a == count - 1:
            bounds = entry_bounds(spec, weights, inputs[a], seeds, mask=mask)
            ends[:, a] = torch.stack(bounds.ends())
        else:
            ends[:, a] = _sandwich(curvatures[a], gram) + torch.stack(functional.ends())
        for b in range(a + 1, count):
            if b > a + 1:  # ∂h_{b−1}/∂θ_a = (∂h_{b−1}/∂h_{b−2}) ∂h_{b−2}/∂θ_a
                step = jacobians[b - 1][1]
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
    values = torch.linalg.eigvalsh(0.5 * (inner + inner.T))
    return torch.stack([values[-1], -values[0]]).clamp_min(0.0)


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
        above = stack_hessian(layers[b:], inputs[b], target, loss, mask, include_input=True)
        size, total = inputs[b].numel(), above.shape[0]
        units = torch.zeros(total, size, dtype=inputs[b].dtype, device=inputs[b].device)
        units[total - size :] = torch.eye(size, dtype=units.dtype, device=units.device)
        rows = above @ units  # (P above + Nd, Nd)
        lam = rows[total - size :]
        curvatures[b - 1] = 0.5 * (lam + lam.T)
        size_b = sum(w.numel() for w in layers[b][1].values())
        part = rows[:size_b].T  # (Nd, P_b)
        mixed[b] = part @ part.T
    return curvatures, mixed


def _jacobians(
    spec: BlockSpec, weights: Weights, x: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """∂h/∂θ (Nd, P) and ∂h/∂x (Nd, Nd)."""
    tracked = reference.tracked({**weights, "input": x})
    y = tracked.pop("input")
    rows = reference.jacobian(forward_pass(spec, tracked, y, mask)[0], [*tracked.values(), y])
    return rows[:, : -x.numel()], rows[:, -x.numel() :]
