r"""Blocks by folding: both terms of the bracket in one product.

M_i[r,c] α'_i[b] + K_i[r,b] δ'_i[c] is formed for a few r, c at a time, small enough to stay in the
cache, and one product with α writes the rows of H in place: no temporary, no permutation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.blocks.operands import Operands, Workspace
from curvatlas.blocks.placement import Target

# Numbers in one folded bracket: 2 MB of float64, cache-resident and few enough calls.
_FOLD = 1 << 18


def fold(targets: list[Target], x: Operands, workspace: Workspace) -> None:
    left, right = targets[0].left, targets[0].right
    (c_first, c_last), (b_first, b_last) = right.core, right.activation
    r_first, r_last = left.core
    n = x.left.shape[-1]
    # Stretches of the right segment that are contiguous in memory: over its slow index.
    slow, fast = (b_last - b_first, c_last - c_first)
    if not right.activation_major:
        slow, fast = fast, slow
    step = max(1, min(slow, _FOLD // (fast * n)))
    group = max(1, min(r_last - r_first, _FOLD // (step * fast * n)))
    for low in range(0, slow, step):
        part = slice(low, min(low + step, slow))
        if right.activation_major:
            c, b = (c_first, c_last), (b_first + part.start, b_first + part.stop)
        else:
            c, b = (c_first + part.start, c_first + part.stop), (b_first, b_last)
        for r in range(r_first, r_last, group):
            r_end = min(r + group, r_last)
            bracket = _bracket(x, (r, r_end), c, b, right.activation_major, workspace)
            rows = slice(r - r_first, r_end - r_first)
            for target in targets:
                active = x.left[slice(*target.left.activation)].expand(r_end - r, -1, n)
                _fold_into(target, active, bracket, rows, part, fast, workspace)


def _fold_into(
    target: Target,
    active: Tensor,
    bracket: Tensor,
    rows: slice,
    part: slice,
    fast: int,
    workspace: Workspace,
) -> None:
    """α @ bracket, straight into place or, where both triangles want it, through a tile."""
    width = (part.stop - part.start) * fast
    if target.lower is None:
        start = target.start + part.start * fast
        place = target.rows[rows, :, start : start + width]
        beta = 1.0 if target.accumulate else 0.0
        torch.baddbmm(place, active, bracket.mT, beta=beta, out=place)
        return
    count, a = active.shape[0], active.shape[1]
    tile = workspace.rows("product", count * a, width, bracket).view(count, a, width)
    torch.bmm(active, bracket.mT, out=tile)
    everything = slice(None)
    if target.right.activation_major:
        split = tile.view(count, a, -1, fast).transpose(2, 3)
        target.put(split, rows, everything, part)
    else:
        target.put(tile.view(count, a, -1, fast), rows, part, everything)


def _bracket(
    x: Operands,
    r: tuple[int, int],
    c: tuple[int, int],
    b: tuple[int, int],
    activation_major: bool,
    workspace: Workspace,
) -> Tensor:
    """M α' + K δ' for ranges of r, c, b as (r, columns, n), columns in the order of memory."""
    rs, cs, bs, n = r[1] - r[0], c[1] - c[0], b[1] - b[0], x.left.shape[-1]
    core, right = x.core[r[0] : r[1], c[0] : c[1]], x.right[b[0] : b[1]]
    shape = (rs, bs, cs, n) if activation_major else (rs, cs, bs, n)
    # c_axis, b_axis: where the index of the core and of the activation sit
    b_axis, c_axis = (1, 2) if activation_major else (2, 1)
    buffer = workspace.take("bracket", rs * bs * cs * n, x.core).view(shape)
    torch.mul(core.unsqueeze(b_axis), right.unsqueeze(c_axis - 1), out=buffer)
    if x.delta is not None:
        delta = x.delta[c[0] : c[1]].unsqueeze(b_axis - 1)  # (c, 1, n) or (1, c, n)
        if x.slope is not None:
            first = max(b[0], x.slope_start)
            last = min(b[1], x.slope_start + x.slope.shape[1])
            if first < last:
                slope = x.slope[r[0] : r[1], first - x.slope_start : last - x.slope_start]
                part = buffer.narrow(b_axis, first - b[0], last - first)
                part.addcmul_(slope.unsqueeze(c_axis), delta)
        if x.diagonal is not None:
            _add_diagonal(buffer, x, r, b, b_axis, delta.squeeze(b_axis - 1))
    return buffer.view(rs, cs * bs, n)


def _add_diagonal(
    buffer: Tensor,
    x: Operands,
    r: tuple[int, int],
    b: tuple[int, int],
    b_axis: int,
    delta: Tensor,
) -> None:
    """Add K δ' where row r has its one entry of K at column first + r mod period."""
    assert x.diagonal is not None
    first, period = x.diagonal_columns
    for start in range(r[0] - r[0] % period, r[1], period):  # one run of the diagonal a period
        low, high = max(r[0], start), min(r[1], start + period)
        low = max(low, start + b[0] - first)
        high = min(high, start + b[1] - first)
        if low >= high:
            continue
        rows = buffer[low - r[0] : high - r[0]]
        columns = rows.narrow(b_axis, first + low - start - b[0], high - low)
        diagonal = columns.diagonal(dim1=0, dim2=b_axis)  # (c, n, rows)
        diagonal.add_(delta.unsqueeze(-1) * x.diagonal[low:high].mT)
