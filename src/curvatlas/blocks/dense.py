"""The dense matrix of a block: every pair of families, chunk by chunk, into its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvatlas.blocks.assembly import add_block
from curvatlas.blocks.families import Family
from curvatlas.blocks.operands import Operands, Workspace, prepare, token_last
from curvatlas.blocks.products import Part
from curvatlas.blocks.symmetry import mirror

if TYPE_CHECKING:
    from curvatlas.blocks.derivatives import BlockDerivatives

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
    whole = len(chunks) == 1 and not tied
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
                    both=whole,
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
                rows=frozenset({left.name}),
                columns=frozenset({right.name}),
                origin=(left.start, right.start),
            )
            out[left.rows, right.rows] += cross
            out[right.rows, left.rows] += cross.mT
