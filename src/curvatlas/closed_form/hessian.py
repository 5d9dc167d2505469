r"""The Hessian of one block at one batch: dense, single blocks, diagonal, norms, factor, products.

The Hessian is linear in the seeds at the output, so one chain gives all three parts: total =
H(Λ, δ), outer = H(Λ, 0), functional = H(0, δ) (derivations §2). A loss that couples tokens has no
token-wise Λ but a factor of low rank: then outer = V Vᵀ with V = Jᵀ φ (derivations §10).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import combinations, combinations_with_replacement
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from curvatlas.budget import available_bytes, default_budget, readable
from curvatlas.closed_form.assembly import Workspace, fold, mirror
from curvatlas.closed_form.blocks import Inputs, block_chain, parameter_offsets
from curvatlas.closed_form.chain import Chain, Diagonal, Leaf, Pair, entries
from curvatlas.closed_form.maps import Keys
from curvatlas.layers.decomposition import DecomposedHessian
from curvatlas.layers.losses import Seeds
from curvatlas.layers.masks import attention_mask
from curvatlas.layers.norms import normalize
from curvatlas.layers.structure import BlockSpec, Weights
from curvatlas.linear_operator import LinearOperator, Part, Tags, require_part
from curvatlas.operators.plain import PlainHessian
from curvatlas.zoo.block import forward_pass

# Workspace beside the output: a sixteenth of it (measured: 8 % extra at P = 11264, no slower than
# an eighth), but never less than this.
_SMALLEST_BUDGET = 64 * 2**20
# Numbers in one tensor of the diagonal's tail: 8 MB of float64.
_DIAGONAL_NUMBERS = 1 << 20
_CROSS_NUMBERS = 1 << 22  # in one tensor of a Gram matrix's cross terms


class BlockDerivatives(DecomposedHessian):
    """The Hessian of one block at one batch: an operator, and all its dense quantities.

    The batch goes through in pieces: each is a chain of its own, with the seeds of the part asked
    for at its output. Products run through the chain of all tokens, kept.
    """

    def __init__(
        self,
        spec: BlockSpec,
        weights: Weights,
        x: Tensor,
        seeds: Seeds,
        *,
        attention: Tensor | None = None,
        mask: Tensor | None = None,
        budget: int | None = None,
    ) -> None:
        self.spec, self.weights, self.x, self.mask = spec, dict(weights), x, mask
        self.attention, self.seeds, self.convex = attention, seeds, seeds.convex
        self.offsets = parameter_offsets(weights)
        self.names = tuple(self.offsets)
        self.size = sum(size for _, size in self.offsets.values())
        super().__init__(
            (self.size, self.size), dtype=x.dtype, device=x.device, tags=Tags(symmetric=True)
        )
        share = max(_SMALLEST_BUDGET, self.size**2 * x.element_size() // 16)
        self.budget = budget or min(share, default_budget(self.device))
        self.samples, self.length = x.shape[:2]
        self._keys: tuple[slice, Keys] | None = None

    def content(self) -> Any:
        seeds = [self.seeds.delta, self.seeds.product(torch.ones_like(self.seeds.delta))]
        return [self.spec, self.weights, self.x, self.attention, seeds]

    # ---- chains of pieces of the batch ------------------------------------------------------

    @property
    def tokens_at_once(self) -> int:
        """How many tokens' tensors fit the budget."""
        spec = self.spec
        d, dk = spec.d_model + 1, spec.key_size
        hidden = (spec.d_ff or 0) * (2 if spec.gated else 1)
        attention = spec.n_heads * (4 * d * d + 4 * d * dk) + 2 * self.length
        numbers = attention + 14 * d * d + 6 * d * hidden + 2 * hidden * hidden
        if spec.norm_first:
            numbers += 12 * d * d
        return max(1, self.budget // (numbers * self.dtype.itemsize))

    def pieces(self, tokens: int | None = None) -> Iterator[tuple[slice, slice]]:
        """The batch in pieces (samples, rows): whole samples where they fit, else rows of one."""
        samples, length, fit = self.samples, self.length, tokens or self.tokens_at_once
        # Equal pieces: a short last one would waste a pass over the output.
        count = -(-samples // max(1, fit // length))
        step, rows = -(-samples // count), min(fit, length)
        for i in range(0, samples, step):
            for j in range(0, length, rows):
                yield slice(i, min(i + step, samples)), slice(j, min(j + rows, length))

    def chains(self, part: Part, tokens: int | None = None) -> Iterator[Chain]:
        """The chains of all pieces; none of an outer part that is a factor."""
        require_part(part)
        if not (self.seeds.couples_tokens and part == "outer"):
            yield from (self.chain(*piece, part) for piece in self.pieces(tokens))

    def chain(self, samples: slice, rows: slice, part: Part) -> Chain:
        """The chain of one piece, with the seeds of one part at its output."""
        lam = delta = None
        if part != "functional" and self.seeds.blocks is not None:
            # Pieces are whole samples or rows of one sample: contiguous either way.
            first = samples.start * self.length + rows.start
            lam = self.seeds.blocks(slice(first, (samples.stop - 1) * self.length + rows.stop))
        if part != "outer":
            delta = self.seeds.delta[samples, rows].flatten(0, 1)

        def cut(t: Tensor | None) -> Tensor | None:
            return (
                None if t is None else t.expand(self.samples, -1, self.length, -1)[samples, :, rows]
            )

        bias, allowed = self._permission
        inputs = Inputs(
            x=self.x[samples, rows].flatten(0, 1),
            rows=self._base[samples, rows].flatten(0, 1),
            keys=self._keys_of(samples) if "query_weight" in self.weights else None,
            bias=cut(bias),
            allowed=cut(allowed),
        )
        return block_chain(self.spec, self.weights, inputs).seeded(lam, delta)

    @cached_property
    def _base(self) -> Tensor:
        """The tokens that attention mixes, in front of γ and β: n1(x) pre-norm, or x."""
        if not (self.spec.norm_first and self.spec.residual):
            return self.x
        return normalize(self.x, eps=self.spec.eps, norm=self.spec.norm)[0]

    @cached_property
    def _permission(self) -> tuple[Tensor | None, Tensor | None]:
        if "query_weight" not in self.weights:
            return None, None
        options: dict[str, Any] = {"samples": self.samples, "length": self.length}
        options |= {"dtype": self.dtype, "device": self.device}
        bias, allowed = attention_mask(self.spec, self.mask, **options)
        return bias, None if allowed is None else allowed.to(self.dtype)

    def _keys_of(self, samples: slice) -> Keys:
        if self._keys is None or self._keys[0] != samples:
            tokens = centred = self._base[samples]
            if self.spec.softmax and self.attention is not None:
                # Any fixed shift is exact; this one, the mean of what is attended to, removes what
                # cancels and never looks at padding.
                received = self.attention[samples].mean((1, 2)).unsqueeze(1)
                centred = tokens - received @ tokens
            elif not self.spec.softmax:
                tokens = centred = pad(tokens, (0, 1), value=1.0)  # the hat
            self._keys = samples, Keys(tokens, centred)
        return self._keys[1]

    @property
    def tied(self) -> set[str]:
        """Parameters that act at several places: heads that share keys and values."""
        shared = ("key_weight", "key_bias", "value_weight", "value_bias")
        return set(shared if self.spec.kv_heads != self.spec.n_heads else ()) & set(self.names)

    @cached_property
    def _whole(self) -> Chain:
        """The chain of all tokens, for products; of H_o it reads only first derivatives."""
        return self.chain(slice(0, self.samples), slice(0, self.length), "functional")

    # ---- products ---------------------------------------------------------------------------

    def _part_columns(self, columns: Tensor, part: Part) -> Tensor:
        def curvature(moved: Tensor) -> Tensor:  # (n, k, d)
            shape = (*self.seeds.delta.shape[:2], *moved.shape[1:])
            turned = self.seeds.product(moved.view(shape).permute(2, 0, 1, 3))
            return turned.permute(1, 2, 0, 3).reshape(moved.shape)

        numbers = self.samples * self.length * sum(node.width for node in self._whole.nodes)
        at_once = max(1, self.budget // (2 * numbers * self.dtype.itemsize))
        outer = None if part == "functional" else curvature
        pieces = torch.split(columns, at_once, 1)
        return torch.cat([self._whole.product(v, outer, bent=part != "outer") for v in pieces], 1)

    # ---- dense ------------------------------------------------------------------------------

    def dense(
        self,
        part: Part = "total",
        *,
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> Tensor:
        """The (P, P) matrix of one part, into ``out`` when given."""
        require_part(part)
        out, workspace = self._output(out), workspace or Workspace()
        coupled, tied = self.seeds.couples_tokens, self.tied
        if coupled and part == "outer":
            factor = self.outer_factor()
            return torch.mm(factor, factor.mT, out=out)
        if tied:
            out.zero_()
        for number, chain in enumerate(self.chains(part)):
            for pair in chain.pairs():
                if not tied:  # the rows of H are written in place
                    place = out[pair.f.rows, pair.g.rows]
                    fold(place, pair, workspace, accumulate=number > 0)
                    continue
                shape = pair.f.size, pair.g.size
                cut = workspace.take("block", math.prod(shape), out).view(shape)
                for f, g, piece in _both(pair, fold(cut, pair, workspace)):
                    out[f.rows, g.rows] += piece
        if not tied:
            for f, g in combinations(chain.leaves, 2):
                mirror(out[f.rows, g.rows], out[g.rows, f.rows], workspace)
            for name in set(self.names).difference(leaf.name for leaf in chain.leaves):  # dead
                start, size = self.offsets[name]
                out[start : start + size] = out[:, start : start + size] = 0.0
        if coupled and part != "functional":
            factor = self.outer_factor()
            out.addmm_(factor, factor.mT)
        return out

    def _output(self, out: Tensor | None) -> Tensor:
        shape = (self.size, self.size)
        if out is None:
            needed = self.size**2 * self.dtype.itemsize
            if self.device.type == "cpu" and needed > available_bytes():
                raise MemoryError(
                    f"the dense Hessian of {self.size} parameters takes {readable(needed)} and "
                    f"{readable(available_bytes())} are free: use diagonal(), frobenius(), "
                    "block(a, b) or products (matvec)."
                )
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        if tuple(out.shape) != shape or out.dtype != self.dtype or out.device != self.device:
            raise ValueError(
                f"out must be {shape} of {self.dtype} on {self.device}, "
                f"got {tuple(out.shape)} of {out.dtype} on {out.device}."
            )
        if not out.is_contiguous():
            raise ValueError("out must be contiguous: blocks are written in place.")
        return out

    # ---- one block, low rank ----------------------------------------------------------------

    def block(self, a: str, b: str, part: Part = "total") -> Tensor:
        """Block (a, b) alone, (size of a, size of b), without the rest."""
        require_part(part)
        (row, rows), (column, columns) = self.offset(a), self.offset(b)
        out = torch.zeros(rows, columns, dtype=self.dtype, device=self.device)
        workspace = Workspace()
        for pair in (pair for chain in self.chains(part) for pair in chain.pairs({a, b})):
            cut = out.new_empty(pair.f.size, pair.g.size)
            for f, g, piece in _both(pair, fold(cut, pair, workspace)):
                if (f.name, g.name) == (a, b):
                    i, j = f.start - row, g.start - column
                    out[i : i + f.size, j : j + g.size] += piece
        if self.seeds.couples_tokens and part != "functional":
            factor = self.outer_factor()
            out += factor[row : row + rows] @ factor[column : column + columns].mT
        return out

    def outer_factor(self) -> Tensor:
        """V (P, samples · R) with H_o = V Vᵀ, for losses whose Λ has a factor (derivations §10)."""
        if self.seeds.factor is None:
            raise ValueError(
                "this loss is token-wise and its outer part has no low-rank factor: "
                "use a pooled or class-token loss, or dense(part='outer')."
            )
        return self._factor

    @cached_property
    def _factor(self) -> Tensor:
        """V = Jᵀφ = Σ_i α_i ⊗ (adjoint of φ_i) from φ (samples, R, L, d), Λ = Σ_r φ_r φ_rᵀ."""
        assert self.seeds.factor is not None
        phi = self.seeds.factor()
        samples, rank, length, _ = phi.shape
        seeds = phi.transpose(1, 2).reshape(samples * length, rank, -1)  # (n, R, d)
        out, kept = phi.new_zeros(self.size, samples * rank), dict[int, Tensor]()
        for leaf in self._whole.leaves:
            adjoint = self._whole.adjoint(leaf.node, seeds, kept)[..., leaf.columns]
            core = adjoint.reshape(samples, length, rank, -1)
            alpha = leaf.alpha.reshape(samples, length, -1)
            leaf.add(out, torch.einsum("blkr,bla->rabk", core, alpha).flatten(2))
        return out

    def block_product(self, a: str, b: str, part: Part = "total") -> LinearOperator:
        """The operator of block (a, b), its per-token tensors kept where they fit in memory: far
        cheaper than a full product."""
        self.offset(a), self.offset(b)  # raises on unknown names
        pairs, budget = list[Pair](), default_budget(self.device) // self.dtype.itemsize
        for pair in (pair for chain in self.chains(part) for pair in chain.pairs({a, b})):
            budget -= pair.core.numel() + (0 if pair.slope is None else entries(pair.slope).numel())
            pairs.append(pair)
            if budget < 0:
                return super().block_product(a, b, part)
        return BlockProduct(pairs, self, a, b, low_rank=part != "functional")

    # ---- diagonal and norms -----------------------------------------------------------------

    def diagonal(self, part: Part = "total") -> Tensor:
        """The exact diagonal (P,); its sums over blocks are the exact traces."""
        require_part(part)
        out = torch.zeros(self.size, 1, dtype=self.dtype, device=self.device)
        spec = self.spec
        # Few tokens at a time: their (n, d, d_ff) tensors stay in cache and off fresh pages.
        numbers = spec.d_model * max(spec.d_model, (spec.d_ff or 1) * (1 + spec.gated))
        tokens = min(self.tokens_at_once, max(1, _DIAGONAL_NUMBERS // numbers))
        for chain in self.chains(part, tokens):
            for f in chain.leaves:
                core = chain.second_diagonal(f.node)[:, f.columns]
                f.add(out, _squares(core, f.alpha.square()))
            for f, g in combinations(chain.leaves, 2):
                if f.start == g.start:  # places of one parameter: twice their cross block's
                    core = 2.0 * chain.pair(f, g).core.diagonal(dim1=1, dim2=2)
                    f.add(out, _squares(core, f.alpha * g.alpha))
        if self.seeds.couples_tokens and part != "functional":
            out += self.outer_factor().square().sum(1, keepdim=True)
        return out.squeeze(1)

    def exact_diagonal(self, part: Part = "total") -> Tensor | None:
        return self.diagonal(part)

    def traces(self, part: Part = "total") -> dict[str, float]:
        """The exact trace of every diagonal block."""
        diagonal = self.diagonal(part)
        return {n: float(diagonal[s : s + size].sum()) for n, (s, size) in self.offsets.items()}

    def frobenius(self, part: Part = "total") -> Tensor:
        """Exact Frobenius norms of all blocks, a symmetric (names × names) matrix."""
        require_part(part)
        place = {name: i for i, name in enumerate(self.names)}
        squares = torch.zeros(len(place), len(place), dtype=self.dtype, device=self.device)
        # Sums of two kinds of terms, or of several places of one parameter, are written out.
        tied = set(self.names) if self.seeds.couples_tokens else self.tied
        pieces = [] if self.seeds.couples_tokens else list(self.pieces())
        for number, piece in enumerate(pieces):
            first = self.chain(*piece, part)
            for other in pieces[number:]:
                second = first if other is piece else self.chain(*other, part)
                for p, q in zip(first.pairs(), second.pairs(), strict=True):
                    i, j = place[p.f.name], place[p.g.name]
                    if not tied & {p.f.name, p.g.name}:
                        share = inner(p, p) if second is first else 2.0 * inner(p, q)
                        squares[i, j] += share
                        squares[j, i] += share if p.f is not p.g else 0.0
        for a, b in combinations_with_replacement(self.names, 2):
            if tied & {a, b}:
                square = self.block(a, b, part).square().sum()
                squares[place[a], place[b]] = squares[place[b], place[a]] = square
        return squares.clamp_min(0).sqrt()


class BlockProduct(LinearOperator):
    """One block (a, b) as an operator, from the pairs of its leaves."""

    def __init__(
        self, pairs: list[Pair], source: BlockDerivatives, a: str, b: str, *, low_rank: bool
    ) -> None:
        rows, columns = (slice(start, start + size) for start, size in map(source.offset, (a, b)))
        shape, tags = (source.offset(a)[1], source.offset(b)[1]), Tags(symmetric=a == b)
        super().__init__(shape, dtype=source.dtype, device=source.device, tags=tags)
        self.pairs, self.names, self.rows, self.columns = pairs, (a, b), rows, columns
        self.size, self.factor = source.size, None
        if low_rank and source.seeds.couples_tokens:
            self.factor = source.outer_factor()

    def content(self) -> Any:
        return [[(pair.core, pair.slope, pair.delta) for pair in self.pairs], self.factor]

    def _columns(self, columns: Tensor) -> Tensor:
        return self._product(columns, self.names, self.rows, self.columns)

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self._product(columns, self.names[::-1], self.columns, self.rows)

    def _product(self, v: Tensor, names: tuple[str, ...], rows: slice, columns: slice) -> Tensor:
        whole, out = v.new_zeros(2, self.size, v.shape[1]).unbind()
        whole[columns] = v
        for pair in self.pairs:
            f, g = pair.f, pair.g
            if (f.name, g.name) == names:
                f.add(out, pair.times(g.read(whole)))
            if f is not g and (g.name, f.name) == names:
                g.add(out, pair.transposed_times(f.read(whole)))
        if self.factor is not None:
            out[rows] += self.factor[rows] @ (self.factor[columns].mT @ v)
        return out[rows]


def _both(pair: Pair, block: Tensor) -> list[tuple[Leaf, Leaf, Tensor]]:
    """A pair's block and its mirror image, each with the leaves of its rows and columns."""
    f, g = pair.f, pair.g
    return [(f, g, block)] if f is g else [(f, g, block), (g, f, block.mT)]


def _squares(core: Tensor, alpha: Tensor) -> Tensor:
    """Σ_i core_i[r] α_i[a], (n or 1, r) and (n, a) → (r, a, 1)."""
    return (core.expand(len(alpha), -1).mT @ alpha).unsqueeze(-1)


def inner(p: Pair, q: Pair) -> Tensor:
    """The share of ‖H_fg‖² from tokens of p with tokens of q, by token × token Gram matrices:
    Σ_ij (α_i·α_j) ⟨M_i ⊗ α'_i + K_i ⊗ δ'_i, M_j ⊗ α'_j + K_j ⊗ δ'_j⟩ (derivations §12)."""
    M, N = (pair.core.expand(len(pair.f.alpha), -1, -1) for pair in (p, q))
    if M.mT.is_contiguous() and N.mT.is_contiguous():  # the same order of entries, no copy
        M, N = M.mT, N.mT
    gram = (M.flatten(1) @ N.flatten(1).mT) * (p.g.alpha @ q.g.alpha.mT)
    if p.slope is not None and q.slope is not None:
        assert p.delta is not None
        assert q.delta is not None
        K, L = entries(p.slope).flatten(1), entries(q.slope).flatten(1)
        crossed = _crossed(p, q)
        gram = gram + (K @ L.mT) * (p.delta @ q.delta.mT) + crossed
        gram = gram + (crossed if p is q else _crossed(q, p)).mT
    return ((p.f.alpha @ q.f.alpha.mT) * gram).sum()


def _crossed(p: Pair, q: Pair) -> Tensor:
    """⟨M_i ⊗ α'_i, K_j ⊗ δ'_j⟩ (n, n'), a few core rows at a time."""
    assert q.slope is not None
    assert q.delta is not None
    K, count = entries(q.slope), p.f.shape[0]
    beta = p.g.alpha[:, q.columns]
    result = beta.new_zeros(len(beta), len(q.delta))
    step = max(1, _CROSS_NUMBERS // max(1, result.numel()))
    for first in range(0, count, step):
        rows = slice(first, first + step)
        moved = p.core[:, rows] @ q.delta.mT  # (n, r, n')
        if isinstance(q.slope, Diagonal):
            result += (moved * beta[:, rows].unsqueeze(-1) * K[:, rows].mT).sum(1)
        else:
            result += (moved * (K[:, rows] @ beta.mT).permute(2, 1, 0)).sum(1)
    return result


class ColumnDerivatives(BlockDerivatives):
    """``BlockDerivatives`` by products with unit vectors, for blocks without a token-wise form.

    Rotary positions tie the key's direction to the pair (query, key) and not to the query alone, so
    the chain does not exist: as exact, at the cost of P products.
    """

    @cached_property
    def _plain(self) -> PlainHessian:
        def forward(weights: Weights) -> Tensor:
            return forward_pass(self.spec, weights, self.x, self.mask)[0]

        return PlainHessian(forward, self.weights, lambda _: self.seeds)

    def _part_columns(self, columns: Tensor, part: Part) -> Tensor:
        return self._plain._part_columns(columns, part)

    def dense(
        self,
        part: Part = "total",
        *,
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> Tensor:
        return self._output(out).copy_(self.operator(part)._dense())

    def block(self, a: str, b: str, part: Part = "total") -> Tensor:
        return self.block_product(a, b, part).dense()

    def block_product(self, a: str, b: str, part: Part = "total") -> LinearOperator:
        return DecomposedHessian.block_product(self, a, b, part)  # by full products

    def diagonal(self, part: Part = "total") -> Tensor:
        return torch.cat([self.block(name, name, part).diagonal() for name in self.names])

    def frobenius(self, part: Part = "total") -> Tensor:
        sizes = [size for _, size in self.offsets.values()]
        strips = (self.operator(part)[:, name].dense() for name in self.names)
        pieces = [torch.split(strip, sizes) for strip in strips]
        norms = [torch.stack([torch.linalg.norm(t) for t in strip]) for strip in pieces]
        return torch.stack(norms, 1)

    @cached_property
    def _factor(self) -> Tensor:
        assert self.seeds.factor is not None
        phi = self.seeds.factor()  # (B, R, L, d)
        samples, rank = phi.shape[:2]
        seeds = phi.new_zeros(samples, rank, samples, *phi.shape[2:])
        index = torch.arange(samples, device=self.device)
        seeds[index, :, index] = phi
        return self._plain.adjoint(seeds.flatten(0, 1))

    def exact_diagonal(self, part: Part = "total") -> Tensor | None:
        return None  # as dear as reading every column
