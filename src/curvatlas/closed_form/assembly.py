r"""Dense blocks from per-token tensors, by one way of writing: ``fold``.

A block Σ_i α_i[a] (M_i[r, c] α'_i[b] + K_i[r, b] δ'_i[c]) is a product with α of the bracket
M α' + K δ', formed for a few rows at a time, small enough to stay in the cache, tokens innermost so
that every pass is contiguous. The product writes the rows of H in place: no temporary, no
permutation. The other triangle is the mirror image, tile by tile.

A tuned mix of ways of writing was here before. Interleaved with it, in process time, this one has
0.96 of its speed at P = 2,816 with 16 tokens, 0.97 and 0.91 at P = 11,264, but 0.82 at P = 2,816
with 128 tokens: there brackets take about 9 of 73 ms, many products of 16 × 16 matrices in the
chain 6, and the second halves of three symmetric blocks 7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvatlas.closed_form.chain import Diagonal, Pair, entries

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


def token_last(t: Tensor, out: Tensor | None = None) -> Tensor:
    """(n, …) → (…, n), tokens contiguous, into ``out`` (flat) when given."""
    if t.ndim == 3 and not t.is_contiguous() and t.mT.is_contiguous():
        return token_last(t.mT, out).transpose(0, 1)
    flat = t.reshape(t.shape[0], -1).t()
    if out is None:
        return flat.contiguous().view(*t.shape[1:], t.shape[0])
    return out.view(flat.shape).copy_(flat).view(*t.shape[1:], t.shape[0])


def fold(out: Tensor, pair: Pair, workspace: Workspace, *, accumulate: bool = False) -> Tensor:
    """Write (or add) the block of a pair into ``out`` (size of f, size of g), and give it back."""
    f, g, n = pair.f, pair.g, len(pair.f.alpha)

    def last(name: str, t: Tensor) -> Tensor:
        # Copies live in the workspace until the next pair: they stay in cache, and no page of fresh
        # memory is touched (which would cost more than the copy).
        t = t.expand(n, *t.shape[1:])
        return token_last(t, workspace.take(name, t.numel(), t))

    core, left, right = last("core", pair.core), last("left", f.alpha), last("right", g.alpha)
    slope = None if pair.slope is None else last("slope", entries(pair.slope))
    delta = None if pair.delta is None else last("delta", pair.delta)
    (r, a), (c, b) = f.shape, g.shape
    rows = out.view(a, r, -1).transpose(0, 1) if f.turned else out.view(r, a, -1)
    slow, fast = (b, c) if g.turned else (c, b)  # the order of columns in memory
    step = max(1, min(slow, _FOLD // (fast * n)))
    group = max(1, min(r, _FOLD // (step * fast * n)))
    for first in range(0, r, group):
        rs = slice(first, min(first + group, r))
        for low in range(0, slow, step):
            part = slice(low, min(low + step, slow))
            cs, bs = (slice(0, c), part) if g.turned else (part, slice(0, b))
            columns = part.stop - low, fast, n
            buffer = workspace.take("bracket", (rs.stop - first) * math.prod(columns), core)
            bracket = buffer.view(-1, *columns)
            bracket = bracket.transpose(1, 2) if g.turned else bracket  # (r, c, b, n)
            torch.mul(core[rs, cs].unsqueeze(2), right[bs], out=bracket)
            if slope is not None and delta is not None:
                _add_slope(bracket, slope, delta[cs], rs, bs, pair)
            place = rows[rs, :, low * fast : part.stop * fast]
            spread, brackets = left.expand(len(place), a, n), buffer.view(len(place), -1, n)
            torch.baddbmm(place, spread, brackets.mT, beta=float(accumulate), out=place)
    return out


def _add_slope(
    bracket: Tensor, slope: Tensor, delta: Tensor, rs: slice, bs: slice, pair: Pair
) -> None:
    """Add K (r, w, n) δ' (c, n) to the columns [start, start + w) of b that lie in ``bs``."""
    if isinstance(pair.slope, Diagonal):  # row r meets column start + r
        low, high = max(rs.start, bs.start - pair.start), min(rs.stop, bs.stop - pair.start)
        if low < high:
            shift = pair.start - bs.start
            met = bracket[low - rs.start : high - rs.start, :, low + shift : high + shift]
            met.diagonal(dim1=0, dim2=2).add_(delta.unsqueeze(-1) * slope[low:high].mT)
        return
    low, high = max(bs.start, pair.start), min(bs.stop, pair.start + slope.shape[1])
    if low < high:
        met = bracket[:, :, low - bs.start : high - bs.start]
        known = slope[rs, low - pair.start : high - pair.start]
        met.addcmul_(known.unsqueeze(1), delta.unsqueeze(1))


def mirror(source: Tensor, target: Tensor, workspace: Workspace) -> None:
    """Write ``source`` transposed into ``target``, through a small buffer: rows of H are a power of
    two apart, and reading a column of them directly throws every line out of the cache before it is
    used."""
    rows, columns = source.shape
    buffer = workspace.rows("tile", min(_TILE, rows), _TILE, source)
    for i in range(0, rows, _TILE):
        i_end = min(i + _TILE, rows)
        for j in range(0, columns, _TILE):
            j_end = min(j + _TILE, columns)
            part = buffer[: i_end - i, : j_end - j].copy_(source[i:i_end, j:j_end])
            target[j:j_end, i:i_end].copy_(part.mT)
