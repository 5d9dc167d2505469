"""Second derivatives of one evaluated block: dense, single blocks, diagonal, norms, factor.

The Hessian is linear in the seeds at the output (THEORY P2), so one routine gives all three parts:
total = H(Λ, δ), outer = H(Λ, 0), functional = H(0, δ). A loss that couples tokens has no token-wise
Λ but a factor of low rank: then outer = V Vᵀ with V = Jᵀ φ, and total = functional + outer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from curvatlas.blocks.assembly import add_block
from curvatlas.blocks.dense import dense_matrix
from curvatlas.blocks.diagonal import add_diagonal
from curvatlas.blocks.evaluation import Evaluation
from curvatlas.blocks.factor import pulled_factor
from curvatlas.blocks.families import Family, build_families, parameter_offsets
from curvatlas.blocks.losses import Seeds
from curvatlas.blocks.operands import Workspace, prepare, token_last
from curvatlas.blocks.products import PARTS, Part
from curvatlas.blocks.structured import BlockProduct, Chosen, PairPart
from curvatlas.blocks.terms import Terms
from curvatlas.budget import available_bytes, default_budget, readable

# Workspace beside the output: a sixteenth of it (measured: 8 % extra at P = 11264, no slower than
# an eighth), but never less than this.
_SMALLEST_BUDGET = 64 * 2**20
# Numbers in one tensor of the diagonal's tail: 8 MB of float64.
_DIAGONAL_NUMBERS = 1 << 20


class BlockDerivatives:
    """All dense quantities of one block at one batch; tensors are built chunk by chunk."""

    def __init__(self, evaluation: Evaluation, seeds: Seeds, *, budget: int | None = None) -> None:
        self.evaluation, self.seeds = evaluation, seeds
        self.families = build_families(evaluation.spec, evaluation.weights)
        self.offsets = parameter_offsets(evaluation.weights)
        self.names = tuple(self.offsets)
        self.size = sum(size for _, size in self.offsets.values())
        like = evaluation.output
        self.dtype, self.device = like.dtype, like.device
        share = max(_SMALLEST_BUDGET, self.size**2 * like.element_size() // 16)
        self.budget = budget or min(share, default_budget(self.device))
        self._shared: dict[str, Tensor] = {}  # what chunks of one sample have in common

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
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}.")
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
        self._check_names(a, b)
        (row, rows), (column, columns) = self.offsets[a], self.offsets[b]
        if self.seeds.couples_tokens and part != "functional":
            factor = self.outer_factor()
            outer = factor[row : row + rows] @ factor[column : column + columns].mT
            return outer if part == "outer" else outer + self.block(a, b, "functional")
        out = torch.zeros(rows, columns, dtype=self.dtype, device=self.device)
        workspace = Workspace()
        for terms in self.chunks(part):
            for f, g in self._pairs_of(a, b):
                flipped = self._order(f) > self._order(g)
                first, second = (g, f) if flipped else (f, g)
                left, right = (token_last(terms.activation(h)) for h in (first, second))
                operands = prepare(terms.pair(first, second), left, right, workspace)
                names = (frozenset({b}), frozenset({a})) if flipped else (
                    frozenset({a}), frozenset({b}),
                )  # fmt: skip
                add_block(
                    out.mT if flipped else out,
                    first,
                    second,
                    operands,
                    accumulate=True,
                    workspace=workspace,
                    rows=names[0],
                    columns=names[1],
                    origin=(column, row) if flipped else (row, column),
                )
        return out

    def _check_names(self, *names: str) -> None:
        for name in names:
            if name not in self.offsets:
                raise KeyError(f"no parameter {name!r}: the block has {', '.join(self.names)}.")

    def _pairs_of(self, a: str, b: str) -> list[tuple[Family, Family]]:
        return [(f, g) for f in self._holding(a) for g in self._holding(b)]

    def _holding(self, name: str) -> list[Family]:
        return [f for f in self.families if any(s.name == name for s in f.segments)]

    def _order(self, f: Family) -> int:
        return self.families.index(f)

    # ---- low rank ---------------------------------------------------------------------------

    @cached_property
    def _factor(self) -> Tensor:
        if self.seeds.factor is None:
            raise ValueError(
                "this loss is token-wise and its outer part has no low-rank factor: "
                "use a pooled or class-token loss, or dense(part='outer')."
            )
        return pulled_factor(self.seeds.factor(), self.families, self.size, self._everything())

    def _everything(self) -> Terms:
        """Terms of the whole batch; of them a factor reads only first derivatives."""
        whole = slice(0, self.evaluation.samples), slice(0, self.evaluation.length)
        return self._terms(*whole, "outer")

    def outer_factor(self) -> Tensor:
        """V (P, samples · R) with H_o = V Vᵀ, for losses whose Λ has a factor (THEORY §8)."""
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
                    self._add_diagonal(out, terms, f)
        if coupled and part != "functional":
            out += self.outer_factor().square().sum(1)
        return out

    def _add_diagonal(self, out: Tensor, terms: Terms, f: Family) -> None:
        add_diagonal(out, terms, f)
        for g in self.families:  # heads that share a weight: their cross block has a diagonal too
            if g.kind == f.kind and f.head < g.head and g.segments[0].start == f.segments[0].start:
                core = terms.pair(f, g).core.diagonal(dim1=1, dim2=2)
                both = terms.activation(f) * terms.activation(g)
                for segment in f.segments:
                    cut = core[:, slice(*segment.core)].mT @ both[:, slice(*segment.activation)]
                    cut = cut.mT if segment.activation_major else cut
                    out[segment.rows] += 2.0 * cut.reshape(-1)

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
                if (second.samples.start, second.rows.start) < (
                    first.samples.start, first.rows.start,
                ):  # fmt: skip
                    continue
                once = first.samples == second.samples and first.rows == second.rows
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

    def block_product(self, a: str, b: str, part: Part = "total") -> BlockProduct:
        """Products with block (a, b), its per-token tensors kept: far cheaper than a full one."""
        self._check_names(a, b)
        coupled = self.seeds.couples_tokens and part != "functional"
        chosen: list[Chosen] = []
        if not (coupled and part == "outer"):
            for terms in self.chunks("functional" if coupled else part):
                for f, g in self._pairs_of(a, b):
                    flipped = self._order(f) > self._order(g)
                    first, second, names = (g, f, (b, a)) if flipped else (f, g, (a, b))
                    left = next(s for s in first.segments if s.name == names[0])
                    right = next(s for s in second.segments if s.name == names[1])
                    alpha, beta = terms.activation(first), terms.activation(second)
                    pair = PairPart(terms.pair(first, second), alpha, beta, left, right)
                    chosen.append(Chosen(part=pair, flipped=flipped))
        return BlockProduct(
            chosen,
            rows=self.offsets[a],
            columns=self.offsets[b],
            factor=self.outer_factor() if coupled else None,
        )
