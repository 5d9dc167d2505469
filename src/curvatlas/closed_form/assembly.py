r"""Dense blocks from per-token tensors, by one way of writing: ``fold``.

A block Σ_i α_i[a] (M_i[r, c] α'_i[b] + K_i[r, b] δ'_i[c]) is a product with α of the bracket
M α' + K δ', formed for a few rows at a time, small enough to stay in the cache, tokens innermost so
that every pass is contiguous. The product writes the rows of H in place: no temporary, no
permutation. The other triangle is the mirror image, tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvatlas.closed_form.chain import Chain, Leaf, Pair, Segment

PADDING = 8  # numbers, one cache line of float64
# Numbers in one bracket: 2 MB of float64, cache-resident and few enough calls.
_FOLD = 1 << 18
# Rows and columns of one transposed tile: wide enough that its rows are whole pages of memory.
_TILE = 512


@dataclass
class Workspace:
    """Scratch memory of the assembly; pass the same one again and nothing is allocated."""

    buffers: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, size: int, like: Tensor) -> Tensor:
        """A flat buffer of ``size`` numbers, kept for the next call of the same name."""
        held = self.buffers.get(name)
        alike = held is not None and (held.dtype, held.device) == (like.dtype, like.device)
        if held is None or not alike or held.numel() < size:
            held = torch.empty(size, dtype=like.dtype, device=like.device)
            self.buffers[name] = held
        return held[:size]

    def rows(self, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
        """A (rows, columns) buffer whose rows do not lie a power of two apart.

        Tiles are read along columns when they are turned; at strides of 8 kB all entries of a
        column would compete for the same few cache lines.
        """
        padded = columns + PADDING
        return self.take(name, rows * padded, like).view(rows, padded)[:, :columns]

    @property
    def nbytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self.buffers.values())


@dataclass(frozen=True, kw_only=True)
class Operands:
    """A pair with its activations, tokens last: M (r, c, n), K (r, w, n), δ' (c, n), α (·, n)."""

    core: Tensor
    slope: Tensor | None
    diagonal: Tensor | None  # (r, n), the one entry a row of a diagonal K
    slope_start: int
    delta: Tensor | None
    left: Tensor  # α (a, n)
    right: Tensor  # α' (b, n)


def prepare(pair: Pair, left: Tensor, right: Tensor, workspace: Workspace) -> Operands:
    """Token-last operands of a pair; ``left`` and ``right`` are activations (·, n) already.

    The copies live in the workspace until the next pair: they stay in cache, and no page of fresh
    memory is touched (which would cost more than the copy).
    """
    n = left.shape[-1]

    def last(name: str, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        t = t if t.shape[0] == n else t.expand(n, *t.shape[1:])
        return token_last(t, workspace.take(name, t.numel(), t))

    core = last("core", pair.core)
    assert core is not None
    return Operands(
        core=core,
        slope=last("slope", pair.slope),
        diagonal=last("diagonal", pair.slope_diagonal),
        slope_start=pair.slope_start,
        delta=last("delta", pair.delta),
        left=left,
        right=right,
    )


def token_last(t: Tensor, out: Tensor | None = None) -> Tensor:
    """(n, …) → (…, n), tokens contiguous, into ``out`` (flat) when given."""
    if t.ndim == 3 and not t.is_contiguous() and t.mT.is_contiguous():
        return token_last(t.mT, out).transpose(0, 1)
    flat = t.reshape(t.shape[0], -1).t()
    if out is None:
        return flat.contiguous().view(*t.shape[1:], t.shape[0])
    return out.view(flat.shape).copy_(flat).view(*t.shape[1:], t.shape[0])


def fold(
    out: Tensor,
    left: Segment,
    right: Segment,
    x: Operands,
    workspace: Workspace,
    *,
    accumulate: bool,
) -> None:
    """Write (or add) the block of two segments into ``out`` (size of left, size of right)."""
    active = x.left[slice(*left.activation)]
    (a, n), (c, b) = active.shape, right.shape
    slow, fast = (b, c) if right.activation_major else (c, b)
    rows = (
        out.view(*left.shape[::-1], -1).transpose(0, 1)
        if left.activation_major
        else out.view(*left.shape, -1)
    )
    step = max(1, min(slow, _FOLD // (fast * n)))
    group = max(1, min(left.shape[0], _FOLD // (step * fast * n)))
    for low in range(0, slow, step):
        part = (low, min(low + step, slow))
        cs, bs = ((0, c), part) if right.activation_major else (part, (0, b))
        for r in range(0, left.shape[0], group):
            r_end = min(r + group, left.shape[0])
            bracket = _bracket(x, left, right, (r, r_end), cs, bs, workspace)
            place = rows[r:r_end, :, low * fast : part[1] * fast]
            spread = active.expand(r_end - r, a, n)
            torch.baddbmm(place, spread, bracket.mT, beta=float(accumulate), out=place)


def _bracket(
    x: Operands,
    left: Segment,
    right: Segment,
    r: tuple[int, int],
    c: tuple[int, int],
    b: tuple[int, int],
    workspace: Workspace,
) -> Tensor:
    """M α' + K δ' for ranges of r, c, b of the segments as (r, columns, n), columns in the order of
    memory."""
    r0, c0, b0 = left.core[0], right.core[0], right.activation[0]
    rs, cs, bs, n = r[1] - r[0], c[1] - c[0], b[1] - b[0], x.left.shape[-1]
    core = x.core[r0 + r[0] : r0 + r[1], c0 + c[0] : c0 + c[1]]
    active = x.right[b0 + b[0] : b0 + b[1]]
    # where the index of the activation and of the core sit
    b_axis, c_axis = (1, 2) if right.activation_major else (2, 1)
    shape = (rs, bs, cs, n) if right.activation_major else (rs, cs, bs, n)
    buffer = workspace.take("bracket", rs * bs * cs * n, x.core).view(shape)
    torch.mul(core.unsqueeze(b_axis), active.unsqueeze(c_axis - 1), out=buffer)
    if x.delta is None:
        return buffer.view(rs, cs * bs, n)
    delta = x.delta[c0 + c[0] : c0 + c[1]]
    start = x.slope_start - b0  # K's first column among those of the segment
    if x.slope is not None:
        low, high = max(b[0], start), min(b[1], start + x.slope.shape[1])
        if low < high:
            slope = x.slope[r0 + r[0] : r0 + r[1], low - start : high - start]
            part = buffer.narrow(b_axis, low - b[0], high - low)
            part.addcmul_(slope.unsqueeze(c_axis), delta.unsqueeze(b_axis - 1))
    if x.diagonal is not None:  # row r0 + r meets column slope_start + r0 + r
        shift = start + r0
        low, high = max(r[0], b[0] - shift), min(r[1], b[1] - shift)
        if low < high:
            columns = buffer[low - r[0] : high - r[0]].narrow(
                b_axis, low + shift - b[0], high - low
            )
            diagonal = columns.diagonal(dim1=0, dim2=b_axis)  # (c, n, rows)
            diagonal.add_(delta.unsqueeze(-1) * x.diagonal[r0 + low : r0 + high].mT)
    return buffer.view(rs, cs * bs, n)


def mirror(out: Tensor, left: Segment, right: Segment, workspace: Workspace) -> None:
    """Copy the block of two segments to its place in the other triangle, through a small buffer:
    rows of ``out`` are a power of two apart, and reading a column of them directly throws every
    line out of the cache before it is used."""
    source, target = out[left.rows, right.rows], out[right.rows, left.rows]
    rows, columns = source.shape
    buffer = workspace.rows("tile", min(_TILE, rows), _TILE, source)
    for i in range(0, rows, _TILE):
        i_end = min(i + _TILE, rows)
        for j in range(0, columns, _TILE):
            j_end = min(j + _TILE, columns)
            part = buffer[: i_end - i, : j_end - j]
            part.copy_(source[i:i_end, j:j_end])
            target[j:j_end, i:i_end].copy_(part.t())


def write_blocks(out: Tensor, chain: Chain, workspace: Workspace, *, accumulate: bool) -> None:
    """All blocks of one chain into ``out`` (P, P), each where the earlier leaf has its rows."""
    active = [token_last(leaf.activation) for leaf in chain.leaves]
    for i, f in enumerate(chain.leaves):
        for j, g in enumerate(chain.leaves[i:], i):
            x = prepare(chain.pair(f, g), active[i], active[j], workspace)
            for left in f.segments:
                for right in g.segments:
                    fold(
                        out[left.rows, right.rows], left, right, x, workspace, accumulate=accumulate
                    )


def add_blocks(out: Tensor, chain: Chain, workspace: Workspace) -> None:
    """The same added to both triangles, for parameters that act at several places."""
    active = [token_last(leaf.activation) for leaf in chain.leaves]
    for i, f in enumerate(chain.leaves):
        for j, g in enumerate(chain.leaves[i:], i):
            x = prepare(chain.pair(f, g), active[i], active[j], workspace)
            for left in f.segments:
                for right in g.segments:
                    block = workspace.take("block", left.size * right.size, out)
                    block = block.view(left.size, right.size)
                    fold(block, left, right, x, workspace, accumulate=False)
                    out[left.rows, right.rows] += block
                    if f is not g:
                        out[right.rows, left.rows] += block.mT


def mirror_blocks(out: Tensor, leaves: Sequence[Leaf], workspace: Workspace) -> None:
    """The other triangle from the one that ``write_blocks`` fills."""
    for i, f in enumerate(leaves):
        for g in leaves[i + 1 :]:
            for left in f.segments:
                for right in g.segments:
                    mirror(out, left, right, workspace)
