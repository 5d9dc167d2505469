r"""Dense blocks from per-token tensors: matrix products written straight into the output.

A block Σ_i α_i[a] (M_i[r,c] α'_i[b] + K_i[r,b] δ'_i[c]) is assembled in one of two ways, tokens
always innermost so that every elementwise pass is contiguous:

* folded (``assembly_folded``): both terms in one product, written in place;
* paired (``assembly_paired``): a product a term and a copy, where tokens far outnumber activations.

Blocks on the diagonal, and the other triangle, are in ``symmetry``.
"""

from __future__ import annotations

from torch import Tensor

from curvatlas.blocks.assembly_folded import fold
from curvatlas.blocks.assembly_paired import pair
from curvatlas.blocks.families import Family, Segment
from curvatlas.blocks.operands import Operands, Workspace
from curvatlas.blocks.placement import Target
from curvatlas.blocks.symmetry import add_square

# Tokens per activation up to which folding is the faster way: two terms become one product; one
# term saves only the copy, and nothing where a copy is made anyway.
_FOLD_TWO_TERMS = 5
_FOLD_ONE_TERM = 2
_FOLD_SQUARE = 1


def add_block(
    out: Tensor,
    f: Family,
    g: Family,
    operands: Operands,
    *,
    accumulate: bool,
    workspace: Workspace,
    both: bool = False,
    tiles: bool = False,
    rows: frozenset[str] | None = None,
    columns: frozenset[str] | None = None,
    origin: tuple[int, int] = (0, 0),
) -> bool:
    """Write (or add) block (f, g) into ``out``; only the segments named in rows, columns.

    With ``both`` block (g, f) is wanted too: it is written here where that is cheaper than turning
    the block afterwards, and the answer says whether it was. ``tiles``: turn tile by tile.
    """
    if f.key == g.key:
        _add_symmetric(out, f, operands, accumulate, workspace, rows, columns, origin)
        return True
    if both and _folds_both_ways(f, g, operands):
        target = Target(out, f.segments[0], g.segments[0], origin, accumulate, False)
        fold([target], operands, workspace)
        turned = (origin[1], origin[0])
        target = Target(out, g.segments[0], f.segments[0], turned, accumulate, False)
        fold([target], _transposed(operands), workspace)
        if operands.diagonal is not None:
            _turned_diagonal(target, operands)
        return True
    tiles = both and tiles
    for right in g.segments:
        if columns is not None and right.name not in columns:
            continue
        for lefts in _same_core(f, rows):
            targets = [Target(out, left, right, origin, accumulate, tiles) for left in lefts]
            if _folds(lefts, right, operands, copied=tiles):
                fold(targets, operands, workspace)
            else:
                for target in targets:
                    pair(target, operands, workspace)
    return tiles


def _folds_both_ways(f: Family, g: Family, x: Operands) -> bool:
    """One term, two plain weights, few tokens: each triangle is a product of its own."""
    if len(f.segments) > 1 or len(g.segments) > 1 or x.slope is not None:
        return False
    narrow = min(f.segments[0].shape[1], g.segments[0].shape[1])
    return narrow > 1 and x.left.shape[-1] <= _FOLD_ONE_TERM * narrow


def _transposed(x: Operands) -> Operands:
    """The operands of block (g, f) where only the term with M is there."""
    return Operands(
        core=x.core.transpose(0, 1),
        slope=None,
        slope_start=0,
        diagonal=None,
        diagonal_columns=(0, 0),
        delta=None,
        left=x.right,
        right=x.left,
    )


def _turned_diagonal(target: Target, x: Operands) -> None:
    """The diagonal slope of block (f, g) in block (g, f): entries (c, first + r; r, a)."""
    assert x.diagonal is not None
    assert x.delta is not None
    first, period = x.diagonal_columns
    rows, width = x.diagonal.shape[0], target.left.shape[1]
    for start in range(0, rows, period):
        low, high = max(start, start - first), min(rows, start + period, start + width - first)
        if low < high:
            scaled = x.diagonal[low:high].unsqueeze(1) * x.left  # (r', a, n)
            product = scaled @ x.delta.mT  # (r', a, c)
            column = first + low - start
            part = target.upper[:, column : column + high - low, low:high]  # (c, b', r', a)
            part.diagonal(dim1=1, dim2=2).add_(product.permute(2, 1, 0))


def _folds(lefts: list[Segment], right: Segment, x: Operands, *, copied: bool) -> bool:
    """Whether folding beats pairing: the bracket costs n/|a| passes, a second product n."""
    widest = max(left.shape[1] for left in lefts)
    if widest == 1 or right.shape[1] == 1 or (copied and x.slope is None):
        return False
    limit = _FOLD_ONE_TERM if x.slope is None else _FOLD_TWO_TERMS
    return x.left.shape[-1] <= limit * widest


def _same_core(f: Family, names: frozenset[str] | None) -> list[list[Segment]]:
    """Segments grouped by core range: those of one group share the bracket."""
    groups: dict[tuple[int, int], list[Segment]] = {}
    for segment in f.segments:
        if names is None or segment.name in names:
            groups.setdefault(segment.core, []).append(segment)
    return list(groups.values())


def _add_symmetric(
    out: Tensor,
    f: Family,
    x: Operands,
    accumulate: bool,
    workspace: Workspace,
    rows: frozenset[str] | None,
    columns: frozenset[str] | None,
    origin: tuple[int, int],
) -> None:
    """Block (f, f): Σ_i α α'ᵀ ⊗ M_i, symmetric in both pairs of indices."""
    for i, left in enumerate(f.segments):
        for right in f.segments[i:]:
            ordered = [(left, right)] if left is right else [(left, right), (right, left)]
            asked = [
                (p, q)
                for p, q in ordered
                if (rows is None or p.name in rows) and (columns is None or q.name in columns)
            ]
            if not asked:
                continue
            if left is right and rows is None:
                a, n = left.shape[1], x.left.shape[-1]
                if a > 1 and n <= _FOLD_SQUARE * a:  # few tokens: symmetry saves no time
                    fold([Target(out, left, left, origin, accumulate, False)], x, workspace)
                else:
                    add_square(out, left, x, accumulate, workspace, origin)
            else:
                for p, q in asked:
                    pair(Target(out, p, q, origin, accumulate, False), x, workspace)
