r"""Blocks by pairing: one product a term, then a copy into place.

(M as rc × n) @ (α ⊗ α' as n × ab) plus (α ⊗ δ' as ac × n) @ (K as n × rb): the way where tokens far
outnumber activations, and where a or b is 1.
"""

from __future__ import annotations

from torch import Tensor

from curvatlas.blocks.families import Segment
from curvatlas.blocks.operands import Operands, Workspace, multiply, pairs_of
from curvatlas.blocks.placement import Target

# Numbers in one paired product before it is copied into place.
_PAIR = 1 << 20


def pair(target: Target, x: Operands, workspace: Workspace) -> None:
    """(M as rc × n) @ (αα' as n × ab) plus (αδ' as ac × n) @ (K as n × rb), copied into place."""
    left, right = target.left, target.right
    active = x.left[slice(*left.activation)]
    inner = x.right[slice(*right.activation)]
    core = x.core[slice(*left.core), slice(*right.core)]
    (r, c, n), a, b = core.shape, len(active), len(inner)
    both = pairs_of("both", active, inner, workspace)
    slope, where, mixed = _slope_of(x, left, right, active, workspace)
    step = max(1, _PAIR // (c * a * b))
    everything = slice(None)
    for low in range(0, r, step):
        high = min(low + step, r)
        rows = core[low:high].reshape(-1, n)
        # The index that is contiguous in ``out`` runs fastest in the product too.
        if right.activation_major:
            product = multiply("product", both, rows.mT, workspace)
            tile = product.view(a, b, high - low, c).permute(2, 0, 3, 1)  # (r, a, c, b)
        else:
            product = multiply("product", rows, both.mT, workspace)
            tile = product.view(high - low, c, a, b).transpose(1, 2)
        if slope is not None and mixed is not None:
            bent = slope[low:high].reshape(-1, n)
            if right.activation_major:
                second = multiply("second", bent, mixed.mT, workspace)
                moved = second.view(high - low, -1, a, c).permute(0, 2, 3, 1)
            else:
                second = multiply("second", mixed, bent.mT, workspace)
                moved = second.view(a, c, high - low, -1).permute(2, 0, 1, 3)
            tile[..., where].add_(moved)
        if x.diagonal is not None:
            _pair_diagonal(tile, (left.core[0] + low, left.core[0] + high), right, x, active)
        target.put(tile, slice(low, high), everything, everything)


def _slope_of(
    x: Operands, left: Segment, right: Segment, active: Tensor, workspace: Workspace
) -> tuple[Tensor | None, slice, Tensor | None]:
    """K (r, w, n) on the segments, its columns among the right activations, and α ⊗ δ' (ac, n)."""
    if x.delta is None or x.slope is None:
        return None, slice(0), None
    first = max(right.activation[0], x.slope_start)
    last = min(right.activation[1], x.slope_start + x.slope.shape[1])
    if first >= last:
        return None, slice(0), None
    slope = x.slope[slice(*left.core), first - x.slope_start : last - x.slope_start]
    delta = x.delta[slice(*right.core)]
    mixed = pairs_of("mixed", active, delta, workspace)
    return slope, slice(first - right.activation[0], last - right.activation[0]), mixed


def _pair_diagonal(
    tile: Tensor, rows: tuple[int, int], right: Segment, x: Operands, active: Tensor
) -> None:
    """The diagonal slope on a tile (r, a, c, b): row r meets column first + r mod period."""
    assert x.diagonal is not None
    assert x.delta is not None
    first, period = x.diagonal_columns
    delta = x.delta[slice(*right.core)]
    for start in range(rows[0] - rows[0] % period, rows[1], period):  # one run a period
        low = max(rows[0], start, start + right.activation[0] - first)
        high = min(rows[1], start + period, start + right.activation[1] - first)
        if low >= high:
            continue
        scaled = x.diagonal[low:high].unsqueeze(1) * active  # (r', a, n)
        product = scaled @ delta.mT  # (r', a, c)
        column = first + low - start - right.activation[0]
        part = tile[low - rows[0] : high - rows[0], ..., column : column + high - low]
        part.diagonal(dim1=0, dim2=3).add_(product.permute(1, 2, 0))
