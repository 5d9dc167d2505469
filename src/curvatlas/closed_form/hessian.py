r"""The Hessian of one block at one batch: dense, single blocks, diagonal, norms, factor, products.

The Hessian is linear in the seeds at the output, so one chain gives all three parts: total =
H(Λ, δ), outer = H(Λ, 0), functional = H(0, δ) (derivations §2). A loss that couples tokens has no
token-wise Λ but a factor of low rank: then outer = V Vᵀ with V = Jᵀ φ (derivations §10).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvatlas.budget import available_bytes, default_budget, readable
from curvatlas.closed_form.assembly import (
    Workspace,
    add_blocks,
    fold,
    mirror_blocks,
    prepare,
    token_last,
    write_blocks,
)
from curvatlas.closed_form.blocks import Inputs, block_chain, parameter_offsets
from curvatlas.closed_form.chain import Chain, Leaf, Pair, Segment
from curvatlas.closed_form.maps import Keys
from curvatlas.layers.decomposition import DecomposedHessian
from curvatlas.layers.losses import Seeds
from curvatlas.layers.masks import attention_mask
from curvatlas.layers.norms import normalize
from curvatlas.layers.structure import BlockSpec, Weights
from curvatlas.linear_operator import LinearOperator, Part, Tags, require_part
from curvatlas.operators.plain import PlainHessian
from curvatlas.progress import track
from curvatlas.zoo.block import forward_pass


def _same_place(f: Leaf, g: Leaf) -> bool:
    """Two leaves of one parameter: heads that share a weight, the places of a front norm."""
    return f is not g and f.segments[0].start == g.segments[0].start


def add_diagonal(out: Tensor, f: Leaf, core: Tensor, squares: Tensor) -> None:
    """Add Σ_i M_i[r, r] α_i[a]² to ``out`` (P,), from ``core`` (n, r) and ``squares`` (n, a)."""
    for segment in f.segments:
        part = core[:, slice(*segment.core)].mT @ squares[:, slice(*segment.activation)]
        part = part.mT if segment.activation_major else part
        out[segment.rows] += part.reshape(-1)


def pulled_factor(phi: Tensor, size: int, chain: Chain) -> Tensor:
    """V = Jᵀφ (P, samples · R) with H_o = V Vᵀ (derivations §10), from φ (samples, R, L, d):
    Σ_i α_i ⊗ (adjoint of φ_i)."""
    samples, rank, length, _ = phi.shape
    out = phi.new_zeros(size, samples, rank)
    seeds = phi.transpose(1, 2).reshape(samples * length, rank, -1)  # (n, R, d)
    known: dict[int, Tensor] = {}
    for leaf in chain.leaves:
        adjoint = chain.adjoint(leaf.node, seeds, known)[..., : leaf.size]  # (n, R, core)
        adjoint = adjoint * leaf.alpha.unsqueeze(1) if leaf.gain else adjoint
        for segment in leaf.segments:
            active = leaf.activation[:, slice(*segment.activation)]
            alpha = active.reshape(samples, length, -1)
            core = adjoint[..., slice(*segment.core)].reshape(samples, length, -1)
            product = (alpha.mT @ core).view(samples, alpha.shape[-1], rank, -1)
            order = (1, 3, 0, 2) if segment.activation_major else (3, 1, 0, 2)
            out[segment.rows] += product.permute(order).reshape(-1, samples, rank)
    return out.view(size, -1)


class PairPart:
    """One pair cut down to two segments, with its activations.

        y_i = M_i (α'_i · V) + K_i (Vᵀ δ'_i),      (H_fg V)[r, a] = Σ_i y_i[r] α_i[a]

    costs n(|a||r| + |r||c| + …), far below a full product; the Frobenius norm needs only token ×
    token Gram matrices (derivations §12).
    """

    def __init__(
        self, pair: Pair, alpha: Tensor, beta: Tensor, left: Segment, right: Segment
    ) -> None:
        n = alpha.shape[0]
        rows, columns = slice(*left.core), slice(*right.core)
        self.left, self.right = left, right
        self.M = pair.core[:, rows, columns].expand(n, -1, -1)
        self.alpha = alpha[:, slice(*left.activation)]
        self.beta = beta[:, slice(*right.activation)]
        self.delta = None if pair.delta is None else pair.delta[:, columns]
        self.K: Tensor | None = None
        self.diagonal: Tensor | None = None
        low, high = right.activation
        if pair.slope is not None:
            first = max(low, pair.slope_start)
            last = min(high, pair.slope_start + pair.slope.shape[-1])
            if first < last:
                cut = pair.slope[:, rows, first - pair.slope_start : last - pair.slope_start]
                self.K = cut.expand(n, -1, -1)
                self.K_columns = slice(first - low, last - low)
        if pair.slope_diagonal is not None:
            place = torch.arange(*left.core, device=alpha.device) + pair.slope_start
            inside = (place >= low) & (place < high)
            # A row outside the segment keeps column 0 and weight 0: no shape depends on data.
            self.place = torch.where(inside, place - low, 0)
            self.diagonal = pair.slope_diagonal[:, rows] * inside

    @cached_property
    def _M_transposed(self) -> Tensor:
        return self.M.mT.contiguous()

    def _moved(self, u: Tensor) -> Tensor:
        """M u for rows u (n, k, c) → (n, r, k)."""
        if u.shape[1] == 1 and u.device.type == "cpu" and u.dtype in (torch.float32, torch.float64):
            # One vector a token: batched BLAS packs every matrix before use, this streams it
            # (2.7 against 4.0 ms for 256 matrices of 128 × 128).
            moved = np.einsum("nrc,nc->nr", self.M.numpy(), u[:, 0].numpy())
            return torch.from_numpy(moved).unsqueeze(-1)
        return (u @ self._M_transposed).mT

    def times(self, v: Tensor) -> Tensor:
        """H V for V (c, b, k) → (r, a, k)."""
        if v.shape[-1] == 1:  # plain products: einsum would permute and copy
            u = (self.beta @ v[..., 0].mT).unsqueeze(1)
        else:
            u = torch.einsum("nb,cbk->nkc", self.beta, v)
        y = self._moved(u)
        if self.delta is not None and (self.K is not None or self.diagonal is not None):
            t = torch.einsum("nc,cbk->nbk", self.delta, v)
            if self.K is not None:
                y = y + self.K @ t[:, self.K_columns]
            if self.diagonal is not None:
                y = y + self.diagonal.unsqueeze(-1) * t[:, self.place]
        if v.shape[-1] == 1:
            return (y[..., 0].mT @ self.alpha).unsqueeze(-1)
        return torch.einsum("nrk,na->rak", y, self.alpha)

    def transposed_times(self, v: Tensor) -> Tensor:
        """Hᵀ V for V (r, a, k) → (c, b, k)."""
        y = torch.einsum("na,rak->nrk", self.alpha, v)
        result = torch.einsum("nkc,nb->cbk", y.mT @ self.M, self.beta)
        if self.delta is not None and self.K is not None:
            back = torch.einsum("nc,nbk->cbk", self.delta, self.K.mT @ y)
            result[:, self.K_columns] += back
        if self.delta is not None and self.diagonal is not None:
            back = torch.einsum("nc,nrk->crk", self.delta, self.diagonal.unsqueeze(-1) * y)
            result.index_add_(1, self.place, back)
        return result

    def present(self) -> bool:
        """Whether anything of it differs from zero."""
        moved = self.delta is not None and bool(self.delta.any())
        slopes = [t for t in (self.K, self.diagonal) if t is not None and moved]
        return any(bool(t.any()) for t in (self.M, *slopes))

    def squared_norm(self, other: PairPart) -> Tensor:
        """The share of ‖H_fg‖² from tokens of this chunk with tokens of ``other``."""
        gram = (self.alpha @ other.alpha.mT) * 1.0
        M, N = self.M, other.M
        if M.mT.is_contiguous() and N.mT.is_contiguous():  # the same order of entries, no copy
            M, N = M.mT, N.mT
        inner = (M.flatten(1) @ N.flatten(1).mT) * (self.beta @ other.beta.mT)
        if self.delta is not None and other.delta is not None:
            deltas = self.delta @ other.delta.mT
            if self.K is not None and other.K is not None:
                inner = inner + (self.K.flatten(1) @ other.K.flatten(1).mT) * deltas
            if self.diagonal is not None and other.diagonal is not None:
                inner = inner + (self.diagonal @ other.diagonal.mT) * deltas
            if self.K is not None or self.diagonal is not None:
                crossed = self._cross(other)
                inner = inner + crossed + (crossed if other is self else other._cross(self)).mT
        return (gram * inner).sum()

    def _cross(self, other: PairPart) -> Tensor:
        """⟨M_i ⊗ α'_i, K_j ⊗ δ'_j⟩ (n, n'), a few core rows at a time."""
        assert other.delta is not None
        n, rows, _ = self.M.shape
        total = self.M.new_zeros(n, other.M.shape[0])
        step = max(1, (1 << 22) // max(1, total.numel()))
        for low in range(0, rows, step):
            part = slice(low, low + step)
            moved = self.M[:, part] @ other.delta.mT  # (n, r, n')
            if other.K is not None:
                along = other.K[:, part] @ self.beta[:, other.K_columns].mT  # (n', r, n)
                total += (moved * along.permute(2, 1, 0)).sum(1)
            if other.diagonal is not None:
                weighted = moved * self.beta[:, other.place[part]].unsqueeze(-1)
                total += (weighted * other.diagonal[:, part].mT).sum(1)
        return total


class BlockProduct(LinearOperator):
    """One block (a, b) as an operator, from its per-token tensors."""

    def __init__(
        self,
        chosen: list[tuple[PairPart, bool]],  # True: the block is its transpose
        source: BlockDerivatives,
        *,
        names: tuple[str, str],
        factor: Tensor | None,
    ) -> None:
        (self.row, rows), (self.column, columns) = (source.offsets[name] for name in names)
        tags = Tags(symmetric=names[0] == names[1])
        super().__init__((rows, columns), dtype=source.dtype, device=source.device, tags=tags)
        self.chosen, self.factor = chosen, factor

    def content(self) -> Any:
        return [self.chosen, self.factor]

    def _columns(self, columns: Tensor) -> Tensor:
        return self._product(columns, self.row, self.column, transposed=False)

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        return self._product(columns, self.column, self.row, transposed=True)

    def _product(self, columns: Tensor, row: int, column: int, *, transposed: bool) -> Tensor:
        out = columns.new_zeros(self.shape[1 if transposed else 0], columns.shape[1])
        for part, turned in self.chosen:
            flipped = turned != transposed
            source, target = (part.left, part.right) if flipped else (part.right, part.left)
            piece = _to_core_major(columns.narrow(0, source.start - column, source.size), source)
            moved = part.transposed_times(piece) if flipped else part.times(piece)
            out.narrow(0, target.start - row, target.size).add_(_to_flat(moved, target))
        if self.factor is not None:
            rows = self.factor.narrow(0, row, len(out))
            out += rows @ (self.factor.narrow(0, column, len(columns)).mT @ columns)
        return out


def _to_core_major(v: Tensor, segment: Segment) -> Tensor:
    """(size, k) in flat order → (core, activation, k)."""
    r, a = segment.shape
    if segment.activation_major:
        return v.reshape(a, r, -1).transpose(0, 1)
    return v.reshape(r, a, -1)


def _to_flat(v: Tensor, segment: Segment) -> Tensor:
    """(core, activation, k) → (size, k) in flat order."""
    return (v.transpose(0, 1) if segment.activation_major else v).reshape(segment.size, -1)


# Workspace beside the output: a sixteenth of it (measured: 8 % extra at P = 11264, no slower than
# an eighth), but never less than this.
_SMALLEST_BUDGET = 64 * 2**20
# Numbers in one tensor of the diagonal's tail: 8 MB of float64.
_DIAGONAL_NUMBERS = 1 << 20


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

    # ---- products ---------------------------------------------------------------------------

    def content(self) -> Any:
        seeds = [self.seeds.delta, self.seeds.product(torch.ones_like(self.seeds.delta))]
        return [self.spec, self.weights, self.x, self.attention, seeds]

    @cached_property
    def _whole(self) -> Chain:
        """The chain of all tokens, for products; of H_o it reads only first derivatives."""
        everything = slice(0, self.samples), slice(0, self.length)
        return self.chain(*everything, "functional")

    def _part_columns(self, columns: Tensor, part: Part) -> Tensor:
        numbers = self.samples * self.length * sum(node.width for node in self._whole.nodes)
        at_once = max(1, self.budget // (2 * numbers * self.dtype.itemsize))
        pieces = [self._product(piece, part) for piece in torch.split(columns, at_once, 1)]
        return torch.cat(pieces, 1)

    def _product(self, columns: Tensor, part: Part) -> Tensor:
        tangents = {}
        for leaf in self._whole.leaves:
            v = columns.new_zeros(leaf.size, leaf.activation.shape[1], columns.shape[1])
            for segment in leaf.segments:
                v[slice(*segment.core), slice(*segment.activation)] = _to_core_major(
                    columns[segment.rows], segment
                )
            tangents[leaf] = v

        def curvature(moved: Tensor) -> Tensor:  # (n, k, d)
            shape = (*self.seeds.delta.shape[:2], *moved.shape[1:])
            turned = self.seeds.product(moved.view(shape).permute(2, 0, 1, 3))
            return turned.permute(1, 2, 0, 3).reshape(moved.shape)

        rates = self._whole.product(
            tangents, None if part == "functional" else curvature, bent=part != "outer"
        )
        out = torch.zeros_like(columns)
        for leaf, rate in rates.items():
            for segment in leaf.segments:
                piece = rate[slice(*segment.core), slice(*segment.activation)]
                out[segment.rows] += _to_flat(piece, segment)
        return out

    def exact_diagonal(self, part: Part = "total") -> Tensor | None:
        return self.diagonal(part)

    # ---- pieces of the batch ----------------------------------------------------------------

    @cached_property
    def tied(self) -> frozenset[str]:
        """Parameters that act at more than one place: shared heads, a front norm."""
        spec = self.spec
        shared = ("key_weight", "key_bias", "value_weight", "value_bias")
        found = {n for n in shared if spec.kv_heads != spec.n_heads}
        if spec.norm_first and spec.residual:
            found |= {"norm1_weight", "norm1_bias"}
        return frozenset(found & set(self.names)) if "query_weight" in self.names else frozenset()

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

    def pieces(self, tokens: int | None = None) -> list[tuple[slice, slice]]:
        """The batch in pieces (samples, rows): whole samples where they fit, else rows of one."""
        samples, length = self.samples, self.length
        fit = tokens or self.tokens_at_once
        if fit >= length:
            # Equal pieces: a short last one would waste a pass over the output.
            count = -(-samples // (fit // length))
            step = -(-samples // count)
            return [
                (slice(i, min(i + step, samples)), slice(0, length))
                for i in range(0, samples, step)
            ]
        return [
            (slice(sample, sample + 1), slice(i, min(i + fit, length)))
            for sample in range(samples)
            for i in range(0, length, fit)
        ]

    def chain(self, samples: slice, rows: slice, part: Part) -> Chain:
        """The chain of one piece, with the seeds of one part at its output."""
        require_part(part)
        length = self.length
        lam = delta = None
        if part != "functional" and self.seeds.blocks is not None:
            # Pieces are whole samples or rows of one sample: contiguous either way.
            first = samples.start * length + rows.start
            lam = self.seeds.blocks(slice(first, (samples.stop - 1) * length + rows.stop))
        if part != "outer":
            delta = self.seeds.delta[samples, rows].flatten(0, 1)
        inputs = Inputs(x=self.x[samples, rows].flatten(0, 1))
        if "query_weight" in self.weights:
            bias, allowed = self._permission
            inputs = Inputs(
                x=inputs.x,
                rows=self._base[samples, rows].flatten(0, 1),
                front=self.spec.norm_first and self.spec.residual,
                keys=self._keys_of(samples),
                bias=self._rows_of(bias, samples, rows),
                allowed=self._rows_of(allowed, samples, rows),
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
        bias, allowed = attention_mask(
            self.spec,
            self.mask,
            samples=self.samples,
            length=self.length,
            dtype=self.dtype,
            device=self.device,
        )
        return bias, None if allowed is None else allowed.to(self.dtype)

    def _keys_of(self, samples: slice) -> Keys:
        if self._keys is None or self._keys[0] != samples:
            spec, weights = self.spec, self.weights
            hat = "key_bias" in weights or "value_bias" in weights
            hat = hat or (not spec.softmax and spec.norm_first and "norm1_bias" in weights)
            tokens, constant = self._base[samples], float(not spec.softmax)
            centred = tokens
            if spec.softmax and self.attention is not None:
                # Any fixed shift is exact; this one, the mean of what is attended to, removes what
                # cancels and never looks at padding.
                received = self.attention[samples].mean((1, 2)).unsqueeze(1)
                centred = tokens - received @ tokens
            if hat:
                tokens = torch.nn.functional.pad(tokens, (0, 1), value=1.0)
                centred = torch.nn.functional.pad(centred, (0, 1), value=constant)
            self._keys = samples, Keys(tokens, centred)
        return self._keys[1]

    def _rows_of(self, t: Tensor | None, samples: slice, rows: slice) -> Tensor | None:
        if t is None:
            return None
        full = t.expand(self.samples, -1, self.length, -1)
        return full[samples, :, rows]

    # ---- dense ------------------------------------------------------------------------------

    def dense(
        self,
        part: Part = "total",
        *,
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> Tensor:
        """The (P, P) matrix of one part, into ``out`` when given."""
        out, workspace = self._output(out), workspace or Workspace()
        coupled = self.seeds.couples_tokens
        if coupled and part == "outer":
            factor = self.outer_factor()
            return torch.mm(factor, factor.mT, out=out)
        if self.tied:
            out.zero_()
        for number, piece in enumerate(self.pieces()):
            chain = self.chain(*piece, "functional" if coupled else part)
            if self.tied:
                add_blocks(out, chain, workspace)
            else:
                write_blocks(out, chain, workspace, accumulate=number > 0)
        if not self.tied:
            mirror_blocks(out, chain.leaves, workspace)
        if coupled and part == "total":
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

    # ---- one block --------------------------------------------------------------------------

    def block(self, a: str, b: str, part: Part = "total") -> Tensor:
        """Block (a, b) alone, (size of a, size of b), without the rest."""
        (row, rows), (column, columns) = self.offset(a), self.offset(b)
        if self.seeds.couples_tokens and part != "functional":
            factor = self.outer_factor()
            outer = factor[row : row + rows] @ factor[column : column + columns].mT
            return outer if part == "outer" else outer + self.block(a, b, "functional")
        out = torch.zeros(rows, columns, dtype=self.dtype, device=self.device)
        workspace = Workspace()
        for piece in self.pieces():
            chain = self.chain(*piece, part)
            for f, g, flipped in pairs_of(chain, a, b):
                x = prepare(
                    chain.pair(f, g), token_last(f.activation), token_last(g.activation), workspace
                )
                left, right = f.segment(b if flipped else a), g.segment(a if flipped else b)
                assert left is not None
                assert right is not None
                cut = torch.empty(left.size, right.size, dtype=self.dtype, device=self.device)
                fold(cut, left, right, x, workspace, accumulate=False)
                place = slice(left.start - (column if flipped else row), None)
                other = slice(right.start - (row if flipped else column), None)
                target = out.mT if flipped else out
                target[place, other][: left.size, : right.size] += cut
        return out

    # ---- low rank ---------------------------------------------------------------------------

    @cached_property
    def _factor(self) -> Tensor:
        return pulled_factor(self._seed_factor(), self.size, self._whole)

    def _seed_factor(self) -> Tensor:
        """φ (B, R, L, d) with Λ = Σ_r φ_r φ_rᵀ."""
        if self.seeds.factor is None:
            raise ValueError(
                "this loss is token-wise and its outer part has no low-rank factor: "
                "use a pooled or class-token loss, or dense(part='outer')."
            )
        return self.seeds.factor()

    def outer_factor(self) -> Tensor:
        """V (P, samples · R) with H_o = V Vᵀ, for losses whose Λ has a factor (derivations §10)."""
        return self._factor

    # ---- diagonal, norms, products with one block -------------------------------------------

    def diagonal(self, part: Part = "total") -> Tensor:
        """The exact diagonal (P,); its sums over blocks are the exact traces."""
        out = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        coupled = self.seeds.couples_tokens
        spec = self.spec
        # Few tokens at a time: their (n, d, d_ff) tensors stay in cache and off fresh pages.
        numbers = spec.d_model * max(spec.d_model, (spec.d_ff or 1) * (1 + spec.gated))
        tokens = min(self.tokens_at_once, max(1, _DIAGONAL_NUMBERS // numbers))
        if not (coupled and part == "outer"):
            for piece in self.pieces(tokens):
                chain = self.chain(*piece, "functional" if coupled else part)
                for i, f in enumerate(chain.leaves):
                    core = chain.second_diagonal(f.node)[:, : f.size]
                    core = core * f.alpha.square() if f.gain else core
                    add_diagonal(out, f, core, f.activation.square())
                    for g in chain.leaves[
                        i + 1 :
                    ]:  # places of one parameter: twice their cross block's
                        if _same_place(f, g):
                            core = 2.0 * chain.pair(f, g).core.diagonal(dim1=1, dim2=2)
                            add_diagonal(out, f, core, f.activation * g.activation)
        if coupled and part != "functional":
            out += self.outer_factor().square().sum(1)
        return out

    def traces(self, part: Part = "total") -> dict[str, float]:
        """The exact trace of every diagonal block."""
        diagonal = self.diagonal(part)
        return {n: float(diagonal[s : s + size].sum()) for n, (s, size) in self.offsets.items()}

    def frobenius(self, part: Part = "total") -> Tensor:
        """Exact Frobenius norms of all blocks, a symmetric (names × names) matrix."""
        count = len(self.names)
        squares = torch.zeros(count, count, dtype=self.dtype, device=self.device)
        coupled = self.seeds.couples_tokens
        if not coupled:
            place = {name: i for i, name in enumerate(self.names)}
            pieces = self.pieces()
            for i, piece in enumerate(pieces):
                first = self.chain(*piece, part)
                for other in pieces[i:]:
                    second = first if other is piece else self.chain(*other, part)
                    self._add_squares(squares, place, first, second)
        for i, a in enumerate(self.names):
            for j, b in enumerate(self.names[i:], i):
                if coupled or a in self.tied or b in self.tied:
                    # Sums of two kinds of terms, or of several places of one parameter.
                    squares[i, j] = squares[j, i] = self.block(a, b, part).square().sum()
        return squares.clamp_min(0).sqrt()

    def _add_squares(
        self, squares: Tensor, place: dict[str, int], first: Chain, second: Chain
    ) -> None:
        weight = 1.0 if first is second else 2.0
        for i, f in enumerate(first.leaves):
            for j, g in enumerate(first.leaves[i:], i):
                if self.tied & {s.name for s in (*f.segments, *g.segments)}:
                    continue
                pairs = [first.pair(f, g)]
                others = second.leaves[i], second.leaves[j]
                pairs.append(pairs[0] if second is first else second.pair(*others))
                for left in f.segments:
                    for right in g.segments:
                        p = PairPart(pairs[0], f.activation, g.activation, left, right)
                        q = p
                        if second is not first:
                            alpha, beta = (leaf.activation for leaf in others)
                            q = PairPart(pairs[1], alpha, beta, left, right)
                        share = weight * p.squared_norm(q)
                        a, b = place[left.name], place[right.name]
                        squares[a, b] += share
                        if f is not g and a != b:
                            squares[b, a] += share
                        elif f is not g:
                            squares[a, b] += share  # (head h, head h') and its mirror image

    def block_product(self, a: str, b: str, part: Part = "total") -> LinearOperator:
        """The operator of block (a, b), its per-token tensors kept where they fit in memory: far
        cheaper than a full product."""
        self.offset(a), self.offset(b)  # raises on unknown names
        tokens = self.samples * self.length
        numbers = tokens * sum(f.size * g.size for f, g, _ in pairs_of(self._whole, a, b))
        if numbers * self.dtype.itemsize > default_budget(self.device):
            return super().block_product(a, b, part)
        coupled = self.seeds.couples_tokens and part != "functional"
        chosen: list[tuple[PairPart, bool]] = []
        if not (coupled and part == "outer"):
            for piece in self.pieces():
                chain = self.chain(*piece, "functional" if coupled else part)
                for f, g, flipped in pairs_of(chain, a, b):
                    left, right = f.segment(b if flipped else a), g.segment(a if flipped else b)
                    assert left is not None
                    assert right is not None
                    pair = PairPart(chain.pair(f, g), f.activation, g.activation, left, right)
                    chosen.append((pair, flipped))
        factor = self.outer_factor() if coupled else None
        return BlockProduct(chosen, self, names=(a, b), factor=factor)


def pairs_of(chain: Chain, a: str, b: str) -> Iterator[tuple[Leaf, Leaf, bool]]:
    """Leaves that hold a and b, in the order of the computation; True: b's comes first."""
    for i, f in enumerate(chain.leaves):
        for j, g in enumerate(chain.leaves):
            if f.segment(a) is not None and g.segment(b) is not None:
                yield (g, f, True) if i > j else (f, g, False)


_COLUMNS = 64


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

    def _strips(self, first: int, last: int, part: Part) -> Iterator[tuple[int, int, Tensor]]:
        """Columns [first, last) of the matrix, a few at a time: (start, stop, (P, k))."""
        for start in track(range(first, last, _COLUMNS), "Hessian columns"):
            stop = min(start + _COLUMNS, last)
            units = torch.zeros(self.size, stop - start, dtype=self.dtype, device=self.device)
            units[start:stop].fill_diagonal_(1.0)
            yield start, stop, self._part_columns(units, part)

    def dense(
        self,
        part: Part = "total",
        *,
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> Tensor:
        out = self._output(out)
        for start, stop, strip in self._strips(0, self.size, part):
            out[:, start:stop] = strip
        return out

    def block(self, a: str, b: str, part: Part = "total") -> Tensor:
        (row, rows), (column, columns) = self.offset(a), self.offset(b)
        strips = self._strips(column, column + columns, part)
        return torch.cat([strip[row : row + rows] for _, _, strip in strips], 1)

    def diagonal(self, part: Part = "total") -> Tensor:
        strips = self._strips(0, self.size, part)
        return torch.cat([strip[start:stop].diagonal() for start, stop, strip in strips])

    def frobenius(self, part: Part = "total") -> Tensor:
        count = len(self.names)
        squares = torch.zeros(count, count, dtype=self.dtype, device=self.device)
        for j, (start, size) in enumerate(self.offsets.values()):
            for _, _, strip in self._strips(start, start + size, part):
                for i, (row, rows) in enumerate(self.offsets.values()):
                    squares[i, j] += strip[row : row + rows].square().sum()
        return squares.sqrt()

    @cached_property
    def _factor(self) -> Tensor:
        phi = self._seed_factor()  # (B, R, L, d)
        samples, rank = phi.shape[:2]
        seeds = phi.new_zeros(samples, rank, *phi.shape[:1], *phi.shape[2:])
        index = torch.arange(samples, device=self.device)
        seeds[index, :, index] = phi
        return self._plain.adjoint(seeds.flatten(0, 1))

    def block_product(self, a: str, b: str, part: Part = "total") -> LinearOperator:
        return DecomposedHessian.block_product(self, a, b, part)  # by full products

    def exact_diagonal(self, part: Part = "total") -> Tensor | None:
        return None  # as dear as reading every column
