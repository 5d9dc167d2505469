"""Second derivatives of one evaluated block: dense, single blocks, diagonal, norms, factor.

The Hessian is linear in the seeds at the output, so one routine gives all three parts: total =
H(Λ, δ), outer = H(Λ, 0), functional = H(0, δ) (derivations §2). A loss that couples tokens has no
token-wise Λ but a factor of low rank: then outer = V Vᵀ with V = Jᵀ φ (derivations §10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvatlas.budget import available_bytes, default_budget, readable
from curvatlas.closed_form.assembly import (
    Operands,
    Workspace,
    add_block,
    mirror,
    prepare,
    token_last,
)
from curvatlas.closed_form.evaluation import Evaluation
from curvatlas.closed_form.families import Family, Pair, Segment, build_families, parameter_offsets
from curvatlas.closed_form.terms import Terms
from curvatlas.engines.tangent.block import LinearisedBlock
from curvatlas.engines.tangent.decomposition import DecomposedHessian
from curvatlas.engines.tangent.losses import Seeds
from curvatlas.linear_operator import LinearOperator, Part, Tags, require_part

# Up to this many parameters a tile goes to both triangles while in cache; beyond, rows lie so far
# apart that its short columns cost a page each (measured at 2816 and 11264).
_NARROW = 5000


def dense_matrix(of: BlockDerivatives, part: Part, out: Tensor, workspace: Workspace) -> Tensor:
    """The (P, P) matrix of one part, written into ``out``."""
    if of.seeds.couples_tokens and part == "outer":
        factor = of.outer_factor()
        return torch.mm(factor, factor.mT, out=out)
    tied = of.evaluation.spec.kv_heads != of.evaluation.spec.n_heads
    if tied:
        out.zero_()
    source: Part = "functional" if of.seeds.couples_tokens else part
    # lazy: nothing is computed before a pair is asked for
    chunks = list(of.chunks(source, workspace=workspace))
    single = len(chunks) == 1 and not tied
    for number, terms in enumerate(chunks):
        chunks[number] = None  # type: ignore[call-overload]
        active = {f.key: token_last(terms.activation(f)) for f in of.families}
        for i, f in enumerate(of.families):
            for g in of.families[i:]:
                pair = terms.pair(f, g)
                operands = prepare(pair, active[f.key], active[g.key], workspace)
                if _same_place(f, g):
                    _add_tied(out, f, g, operands, workspace)
                    continue
                done = add_block(
                    out,
                    f,
                    g,
                    operands,
                    accumulate=tied or number > 0,
                    workspace=workspace,
                    both=single,
                    tiles=of.size <= _NARROW,
                )
                if not (done or tied) and number == len(chunks) - 1:
                    mirror(out, f, g, workspace)
    if tied:
        for i, f in enumerate(of.families):
            for g in of.families[i + 1 :]:
                if not _same_place(f, g):
                    mirror(out, f, g, workspace)
    if of.seeds.couples_tokens and part == "total":
        factor = of.outer_factor()
        out.addmm_(factor, factor.mT)
    return out


def _same_place(f: Family, g: Family) -> bool:
    """Two heads that share one weight (grouped-query attention)."""
    return f.key != g.key and f.segments[0].start == g.segments[0].start


def _add_tied(out: Tensor, f: Family, g: Family, operands: Operands, workspace: Workspace) -> None:
    """Two heads that share a weight: their cross block and its transpose add to one place."""
    for left in f.segments:
        for right in g.segments:
            cross = out.new_zeros(left.size, right.size)
            add_block(
                cross,
                f,
                g,
                operands,
                accumulate=True,
                workspace=workspace,
                only=(left.name, right.name),
                origin=(left.start, right.start),
            )
            out[left.rows, right.rows] += cross
            out[right.rows, left.rows] += cross.mT


def core_diagonal(terms: Terms, f: Family) -> Tensor:
    """M_i[r, r] of block (f, f) (n, core); of every M only its diagonal is formed, e.g. for the
    queries Σ_d (X Λ) ⊙ X + s² diag T_KK (derivations §12)."""
    tail = terms.tail
    if f.kind == "down":
        return tail.lam_S.diagonal(dim1=1, dim2=2)
    if f.kind == "final":
        assert tail.final is not None
        return _affine_twice(tail.final.n, tail.lam_Z, tail.final.has_gamma, tail.final.has_beta)
    if f.kind == "middle":
        assert tail.middle is not None
        return _affine_twice(
            tail.middle.n, tail.lam_vv, tail.middle.has_gamma, tail.middle.has_beta
        )
    if f.kind in ("gate", "up"):
        return tail.hidden_diagonal(f.kind == "gate")
    X = terms.direction(f)
    outer = ((X @ tail.lam_UU) * X).sum(-1)
    if not terms.functional or f.kind in ("value", "output"):
        return outer
    if f.kind == "front":
        return outer + terms.front.curvature().diagonal(dim1=1, dim2=2)
    adjoint, s = terms.adjoint(f.head), terms.head(f.head).s
    extra = adjoint.T_KK_diagonal() if f.kind == "query" else adjoint.T_diagonal()
    if extra is None:
        return outer
    return outer + s * s * extra[:, : outer.shape[-1]]


def _affine_twice(n: Tensor, lam: Tensor, gamma: bool, beta: bool) -> Tensor:
    diagonal = lam.diagonal(dim1=1, dim2=2)
    parts = [n.square() * diagonal] * gamma + [diagonal] * beta
    return torch.cat(parts, -1)


def add_diagonal(out: Tensor, f: Family, core: Tensor, squares: Tensor) -> None:
    """Add Σ_i M_i[r, r] α_i[a]² to ``out`` (P,), from ``core`` (n, r) and ``squares`` (n, a)."""
    for segment in f.segments:
        part = core[:, slice(*segment.core)].mT @ squares[:, slice(*segment.activation)]
        part = part.mT if segment.activation_major else part
        out[segment.rows] += part.reshape(-1)


def pulled_factor(phi: Tensor, families: tuple[Family, ...], size: int, terms: Terms) -> Tensor:
    """V = Jᵀφ (P, samples · R) with H_o = V Vᵀ (derivations §10), from φ (samples, R, L, d):
    Σ_i α_i ⊗ (adjoint of φ_i)."""
    samples, rank, length, _ = phi.shape
    out = phi.new_zeros(size, samples, rank)
    seeds = phi.transpose(1, 2).reshape(samples * length, rank, -1)  # (n, R, d)
    for f in families:
        adjoint = terms.pulled(f, seeds)  # (n, R, core)
        active = terms.activation(f)
        for segment in f.segments:
            alpha = active[:, slice(*segment.activation)].reshape(samples, length, -1)
            core = adjoint[..., slice(*segment.core)].reshape(samples, length, -1)
            product = (alpha.mT @ core).view(samples, alpha.shape[-1], rank, -1)
            order = (1, 3, 0, 2) if segment.activation_major else (3, 1, 0, 2)
            out[segment.rows] += product.permute(order).reshape(-1, samples, rank)
    return out.view(size, -1)


def diagonal_columns(pair: Pair, rows: range, device: torch.device) -> Tensor:
    """The activation column that each row's single entry of K stands in."""
    first, period = pair.diagonal_columns
    return first + torch.arange(rows.start, rows.stop, device=device) % period


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
            place = diagonal_columns(pair, range(*left.core), alpha.device)
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

    def squared_norm(self, other: PairPart) -> Tensor:
        """The share of ‖H_fg‖² from tokens of this chunk with tokens of ``other``."""
        gram = (self.alpha @ other.alpha.mT) * 1.0
        inner = (self.M.flatten(1) @ other.M.flatten(1).mT) * (self.beta @ other.beta.mT)
        if self.delta is not None and other.delta is not None:
            deltas = self.delta @ other.delta.mT
            if self.K is not None and other.K is not None:
                inner = inner + (self.K.flatten(1) @ other.K.flatten(1).mT) * deltas
            if self.diagonal is not None and other.diagonal is not None:
                inner = inner + (self.diagonal @ other.diagonal.mT) * deltas
            if self.K is not None or self.diagonal is not None:
                inner = inner + self._cross(other) + other._cross(self).mT
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

    Products run through hand-written tangent passes (``linearise`` evaluates the block for them
    when the first is asked for); dense tensors are built chunk by chunk.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        seeds: Seeds,
        linearise: Callable[[], LinearisedBlock],
        *,
        budget: int | None = None,
    ) -> None:
        self.evaluation, self.seeds, self.convex = evaluation, seeds, seeds.convex
        self.families = build_families(evaluation.spec, evaluation.weights)
        self.offsets = parameter_offsets(evaluation.weights)
        self.names = tuple(self.offsets)
        self.size = sum(size for _, size in self.offsets.values())
        like = evaluation.output
        super().__init__(
            (self.size, self.size),
            dtype=like.dtype,
            device=like.device,
            tags=Tags(symmetric=True),
        )
        self._linearise = linearise
        share = max(_SMALLEST_BUDGET, self.size**2 * like.element_size() // 16)
        self.budget = budget or min(share, default_budget(self.device))
        self._shared: dict[str, Tensor] = {}  # what chunks of one sample have in common

    # ---- products ---------------------------------------------------------------------------

    @cached_property
    def linearised(self) -> LinearisedBlock:
        """The block with the adjoints that products need."""
        block = self._linearise()
        block.gradient(self.seeds.delta)
        return block

    def content(self) -> Any:
        seeds = [self.seeds.delta, self.seeds.product(torch.ones_like(self.seeds.delta))]
        evaluation = self.evaluation
        return [evaluation.spec, evaluation.weights, evaluation.x, evaluation.attention, seeds]

    def _part_columns(self, columns: Tensor, part: Part) -> Tensor:
        k, weights = columns.shape[1], self.linearised.weights
        tangents = {
            name: columns[start : start + size].mT.reshape(k, *weights[name].shape)
            for name, (start, size) in self.offsets.items()
        }
        rates, _ = self.linearised.hvp(
            tangents, curvature=self.seeds.product, part=part, needs_input=False
        )
        return torch.cat([rates[name].reshape(k, -1) for name in self.names], 1).mT

    def exact_diagonal(self, part: Part = "total") -> Tensor | None:
        return self.diagonal(part)

    # ---- chunks -----------------------------------------------------------------------------

    @property
    def tokens_at_once(self) -> int:
        """How many tokens' tensors fit the budget."""
        spec = self.evaluation.spec
        d, dk = spec.d_model + 1, spec.key_size
        hidden = (spec.d_ff or 0) * (2 if spec.gated else 1)
        attention = spec.n_heads * (4 * d * d + 4 * d * dk) + 2 * self.evaluation.length
        numbers = attention + 14 * d * d + 6 * d * hidden + 2 * hidden * hidden
        if spec.norm_first:
            numbers += 12 * d * d
        return max(1, self.budget // (numbers * self.evaluation.output.element_size()))

    def chunks(
        self, part: Part, *, tokens: int | None = None, workspace: Workspace | None = None
    ) -> Iterator[Terms]:
        """The batch in pieces: whole samples where they fit, else rows of one sample.

        With a ``workspace`` one piece's tensors are gone when the next one's are asked for.
        """
        samples, length = self.evaluation.samples, self.evaluation.length
        fit = tokens or self.tokens_at_once
        if fit >= length:
            # Equal pieces: a short last one would waste a pass over the output.
            pieces = -(-samples // (fit // length))
            step = -(-samples // pieces)
            for start in range(0, samples, step):
                piece = slice(start, min(start + step, samples))
                yield self._terms(piece, slice(0, length), part, workspace)
            return
        for sample in range(samples):
            for start in range(0, length, fit):
                rows = slice(start, min(start + fit, length))
                yield self._terms(slice(sample, sample + 1), rows, part, workspace)

    def _terms(
        self, samples: slice, rows: slice, part: Part, workspace: Workspace | None = None
    ) -> Terms:
        require_part(part)
        length = self.evaluation.length
        lam = delta = None
        if part != "functional" and self.seeds.blocks is not None:
            # Chunks are whole samples or rows of one sample: contiguous either way.
            first = samples.start * length + rows.start
            lam = self.seeds.blocks(slice(first, (samples.stop - 1) * length + rows.stop))
        if part != "outer":
            delta = self.seeds.delta[samples, rows].flatten(0, 1)
        return Terms(self.evaluation, samples, rows, lam, delta, self._shared, workspace)

    # ---- dense ------------------------------------------------------------------------------

    def dense(
        self,
        part: Part = "total",
        *,
        out: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> Tensor:
        """The (P, P) matrix of one part, into ``out`` when given."""
        return dense_matrix(self, part, self._output(out), workspace or Workspace())

    def _output(self, out: Tensor | None) -> Tensor:
        shape = (self.size, self.size)
        if out is None:
            needed = self.size**2 * self.evaluation.output.element_size()
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
        for terms in self.chunks(part):
            for f, g, flipped in self._pairs_of(a, b):
                left, right = (token_last(terms.activation(h)) for h in (f, g))
                add_block(
                    out.mT if flipped else out,
                    f,
                    g,
                    prepare(terms.pair(f, g), left, right, workspace),
                    accumulate=True,
                    workspace=workspace,
                    only=(b, a) if flipped else (a, b),
                    origin=(column, row) if flipped else (row, column),
                )
        return out

    def _pairs_of(self, a: str, b: str) -> Iterator[tuple[Family, Family, bool]]:
        """Families that hold a and b, in the order of the computation; True: b's comes first."""
        for i, f in enumerate(self.families):
            for j, g in enumerate(self.families):
                if f.segment(a) is not None and g.segment(b) is not None:
                    yield (g, f, True) if i > j else (f, g, False)

    # ---- low rank ---------------------------------------------------------------------------

    @cached_property
    def _factor(self) -> Tensor:
        if self.seeds.factor is None:
            raise ValueError(
                "this loss is token-wise and its outer part has no low-rank factor: "
                "use a pooled or class-token loss, or dense(part='outer')."
            )
        # of the terms of the whole batch a factor reads only first derivatives
        batch = slice(0, self.evaluation.samples), slice(0, self.evaluation.length)
        terms = self._terms(*batch, "outer")
        return pulled_factor(self.seeds.factor(), self.families, self.size, terms)

    def outer_factor(self) -> Tensor:
        """V (P, samples · R) with H_o = V Vᵀ, for losses whose Λ has a factor (derivations §10)."""
        return self._factor

    # ---- diagonal, norms, products with one block -------------------------------------------

    def diagonal(self, part: Part = "total") -> Tensor:
        """The exact diagonal (P,); its sums over blocks are the exact traces."""
        out = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        coupled = self.seeds.couples_tokens
        spec = self.evaluation.spec
        # Few tokens at a time: their (n, d, d_ff) tensors stay in cache and off fresh pages.
        numbers = spec.d_model * max(spec.d_model, (spec.d_ff or 1) * (1 + spec.gated))
        tokens = min(self.tokens_at_once, max(1, _DIAGONAL_NUMBERS // numbers))
        if not (coupled and part == "outer"):
            for terms in self.chunks("functional" if coupled else part, tokens=tokens):
                for f in self.families:
                    add_diagonal(out, f, core_diagonal(terms, f), terms.activation(f).square())
                    for g in self.families:  # heads that share a weight: twice their cross block's
                        if f.head < g.head and _same_place(f, g):
                            core = 2.0 * terms.pair(f, g).core.diagonal(dim1=1, dim2=2)
                            add_diagonal(out, f, core, terms.activation(f) * terms.activation(g))
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
        spec = self.evaluation.spec
        if self.seeds.couples_tokens or spec.kv_heads != spec.n_heads:
            # Sums of two kinds of terms, or of several heads in one place: block by block.
            for i, a in enumerate(self.names):
                for j, b in enumerate(self.names[i:], i):
                    squares[i, j] = squares[j, i] = self.block(a, b, part).square().sum()
            return squares.sqrt()
        place = {name: i for i, name in enumerate(self.names)}
        for first in self.chunks(part):
            for second in self.chunks(part):
                if second.place < first.place:
                    continue
                once = first.place == second.place
                self._add_squares(squares, place, first, first if once else second)
        return squares.clamp_min(0).sqrt()

    def _add_squares(
        self, squares: Tensor, place: dict[str, int], first: Terms, second: Terms
    ) -> None:
        weight = 1.0 if first is second else 2.0
        for i, f in enumerate(self.families):
            for g in self.families[i:]:
                pairs = [first.pair(f, g)]
                pairs.append(pairs[0] if second is first else second.pair(f, g))
                for left in f.segments:
                    for right in g.segments:
                        p, q = (
                            PairPart(pair, t.activation(f), t.activation(g), left, right)
                            for pair, t in zip(pairs, (first, second), strict=True)
                        )
                        share = weight * p.squared_norm(q)
                        a, b = place[left.name], place[right.name]
                        squares[a, b] += share
                        if f.key != g.key and a != b:
                            squares[b, a] += share
                        elif f.key != g.key:
                            squares[a, b] += share  # (head h, head h') and its mirror image

    def block_product(self, a: str, b: str, part: Part = "total") -> LinearOperator:
        """The operator of block (a, b), its per-token tensors kept where they fit in memory: far
        cheaper than a full product."""
        self.offset(a), self.offset(b)  # raises on unknown names
        tokens = self.evaluation.samples * self.evaluation.length
        numbers = tokens * sum(f.size * g.size for f, g, _ in self._pairs_of(a, b))
        if numbers * self.dtype.itemsize > default_budget(self.device):
            return super().block_product(a, b, part)
        coupled = self.seeds.couples_tokens and part != "functional"
        chosen: list[tuple[PairPart, bool]] = []
        if not (coupled and part == "outer"):
            for terms in self.chunks("functional" if coupled else part):
                for f, g, flipped in self._pairs_of(a, b):
                    left, right = f.segment(b if flipped else a), g.segment(a if flipped else b)
                    assert left is not None
                    assert right is not None
                    alpha, beta = terms.activation(f), terms.activation(g)
                    pair = PairPart(terms.pair(f, g), alpha, beta, left, right)
                    chosen.append((pair, flipped))
        factor = self.outer_factor() if coupled else None
        return BlockProduct(chosen, self, names=(a, b), factor=factor)
