r"""Dense blocks from per-token tensors: matrix products written straight into the output.

A block Σ_i α_i[a] (M_i[r,c] α'_i[b] + K_i[r,b] δ'_i[c]) is assembled in one of two ways, tokens
always innermost so that every elementwise pass is contiguous:

* ``fold``: both terms in one product, written in place;
* ``pair``: a product a term and a copy, where tokens far outnumber activations.

Block (f, f) is Σ_i ααᵀ ⊗ M_i, symmetric in both pairs of indices: r ≤ c halves the product, a ≤ b
halves it again, and the mirror image of a tile is the tile itself (``add_square``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvatlas.closed_form.families import Family, Pair, Segment

# ---- what the assembly multiplies --------------------------------------------------------------


PADDING = 8  # numbers, one cache line of float64


@dataclass
class Workspace:
    """Scratch memory of the assembly; pass the same one again and nothing is allocated."""

    buffers: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, size: int, like: Tensor) -> Tensor:
        """A flat buffer of ``size`` numbers, kept for the next call of the same name."""
        held = self.buffers.get(name)
        if (
            held is None
            or held.numel() < size
            or held.dtype != like.dtype
            or (held.device != like.device)
        ):
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
    slope_start: int
    diagonal: Tensor | None  # (r, n)
    diagonal_columns: tuple[int, int]
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
        slope_start=pair.slope_start,
        diagonal=last("diagonal", pair.slope_diagonal),
        diagonal_columns=pair.diagonal_columns,
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


def pairs_of(name: str, left: Tensor, right: Tensor, workspace: Workspace) -> Tensor:
    """All products left_a right_b, (a, n) and (b, n) → (a·b, n), in the workspace."""
    (a, n), b = left.shape, len(right)
    out = workspace.take(name, a * b * n, left).view(a, b, n)
    return torch.mul(left.unsqueeze(1), right, out=out).view(a * b, n)


def multiply(name: str, left: Tensor, right: Tensor, workspace: Workspace) -> Tensor:
    """left @ right in the workspace: a fresh temporary costs more in page faults than in flops."""
    rows, columns = left.shape[0], right.shape[1]
    return torch.mm(left, right, out=workspace.rows(name, rows, columns, left))


# ---- where blocks go ---------------------------------------------------------------------------


class Target:
    """Where a block of two segments goes: its place, and the transposed one with ``both``."""

    def __init__(
        self,
        out: Tensor,
        left: Segment,
        right: Segment,
        origin: tuple[int, int],
        accumulate: bool,
        both: bool,
    ) -> None:
        self.left, self.right, self.accumulate = left, right, accumulate
        self.rows = segment_view(out, left, 0, origin[0])  # (r, a, columns of out)
        self.start = right.start - origin[1]
        self.upper = segment_view(self.rows, right, 2, origin[1])  # (r, a, c, b)
        self.lower: Tensor | None = None
        if both:
            self.lower = segment_view(
                segment_view(out, left, 1, origin[0]), right, 0, origin[1]
            )  # (c, b, r, a)

    def put(self, tile: Tensor, r: slice, c: slice, b: slice) -> None:
        """Place a tile (r, a, c, b)."""
        put(self.upper[r, :, c, b], tile, self.accumulate)
        if self.lower is not None:
            put(self.lower[c, b, r], tile.permute(2, 3, 0, 1), self.accumulate)


def segment_view(out: Tensor, segment: Segment, dim: int, origin: int) -> Tensor:
    """``out`` with the segment's stretch of axis ``dim`` as two axes (core, activation)."""
    part = out.narrow(dim, segment.start - origin, segment.size)
    r, a = segment.shape
    sizes = (a, r) if segment.activation_major else (r, a)
    split = part.view(*part.shape[:dim], *sizes, *part.shape[dim + 1 :])
    return split.transpose(dim, dim + 1) if segment.activation_major else split


def put(target: Tensor, value: Tensor, accumulate: bool) -> None:
    if accumulate:
        target.add_(value)
    else:
        target.copy_(value)


# ---- blocks --------------------------------------------------------------------------------

# Numbers in one product before it is copied into place.
_NUMBERS = 1 << 20
# A block on the diagonal is cut into this many strips: each skips what lies left of it.
_STRIPS = 4
# From this many tokens on, packing a ≤ b saves more arithmetic than unpacking costs.
_PACK_FROM = 192
# Rows and columns of one transposed tile: wide enough that its rows are whole pages of memory.
_TILE = 512


def add_square(
    out: Tensor,
    segment: Segment,
    x: Operands,
    accumulate: bool,
    workspace: Workspace,
    origin: tuple[int, int],
) -> None:
    """One segment with itself, r ≤ c only, the tile and its mirror image written together."""
    view = segment_view(
        segment_view(out, segment, 1, origin[1]), segment, 0, origin[0]
    )  # (r, a, c, b)
    active = x.left[slice(*segment.activation)]
    core = x.core[slice(*segment.core), slice(*segment.core)]
    r, a = segment.shape
    n = active.shape[-1]
    both, unpack = _products_of(active, workspace)
    step = max(1, min(-(-r // _STRIPS), _NUMBERS // (r * a * a)))
    for low in range(0, r, step):
        high = min(low + step, r)
        rest = r - low
        left = core[low:high, low:].reshape(-1, n)
        if segment.activation_major:
            # memory order is (a, r): let the core index run fastest in the product too
            product = multiply("product", both, left.mT, workspace)
            product = _unpack(product, 0, unpack, workspace)
            tile = product.view(a, a, high - low, rest).permute(2, 0, 3, 1)  # (r, a, c, b)
        else:
            product = multiply("product", left, both.mT, workspace)
            product = _unpack(product, 1, unpack, workspace)
            tile = product.view(high - low, rest, a, a).transpose(1, 2)  # (r, a, c, b)
        put(view[low:high, :, low:], tile, accumulate)
        below = tile[:, :, high - low :]  # M and α αᵀ are symmetric: no transposition inside
        put(view[high:, :, low:high], below.permute(2, 1, 0, 3), accumulate)


def _products_of(active: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor | None]:
    """α_a α_b as (pairs, n), and the map from a·b to pairs when only a ≤ b are kept."""
    a, n = active.shape
    if n < _PACK_FROM or a < 4:
        return pairs_of("both", active, active, workspace), None
    upper = torch.triu_indices(a, a, device=active.device)
    place = torch.empty(a, a, dtype=torch.long, device=active.device)
    order = torch.arange(upper.shape[1], device=active.device)
    place[upper[0], upper[1]] = order
    place[upper[1], upper[0]] = order
    return active[upper[0]] * active[upper[1]], place.view(-1)


def _unpack(product: Tensor, dim: int, place: Tensor | None, workspace: Workspace) -> Tensor:
    """Spread the packed pairs a ≤ b over all (a, b)."""
    if place is None:
        return product
    shape = list(product.shape)
    shape[dim] = len(place)
    out = workspace.take("unpacked", shape[0] * shape[1], product).view(shape)
    return torch.index_select(product, dim, place, out=out)


def mirror(out: Tensor, f: Family, g: Family, workspace: Workspace) -> None:
    """Copy block (f, g) to (g, f) transposed, tile by tile."""
    for left in f.segments:
        for right in g.segments:
            source = out[left.rows, right.rows]
            target = out[right.rows, left.rows]
            _transpose(source, target, workspace)


def _transpose(source: Tensor, target: Tensor, workspace: Workspace) -> None:
    """target ← sourceᵀ through a small buffer: rows of ``out`` are a power of two apart, and
    reading a column of them directly throws every line out of the cache before it is used."""
    rows, columns = source.shape
    buffer = workspace.rows("tile", min(_TILE, rows), _TILE, source)
    for i in range(0, rows, _TILE):
        i_end = min(i + _TILE, rows)
        for j in range(0, columns, _TILE):
            j_end = min(j + _TILE, columns)
            part = buffer[: i_end - i, : j_end - j]
            part.copy_(source[i:i_end, j:j_end])
            target[j:j_end, i:i_end].copy_(part.t())


# Numbers in one folded bracket: 2 MB of float64, cache-resident and few enough calls.
_FOLD = 1 << 18


def fold(targets: list[Target], x: Operands, workspace: Workspace) -> None:
    """M α' + K δ' for a few r, c at a time, small enough to stay in the cache; one product with α
    writes the rows of H in place: no temporary, no permutation."""
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
    only: tuple[str, str] | None = None,
    origin: tuple[int, int] = (0, 0),
) -> bool:
    """Write (or add) block (f, g) into ``out``, or of it ``only`` (row, column) parameters.

    With ``both`` block (g, f) is wanted too: it is written here where that is cheaper than turning
    the block afterwards, and the answer says whether it was. ``tiles``: turn tile by tile.
    """
    if f.key == g.key:
        _add_symmetric(out, f, operands, accumulate, workspace, only, origin)
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
    row, column = only or (None, None)
    for right in g.segments:
        if column is not None and right.name != column:
            continue
        for lefts in _same_core(f, row):
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


def _same_core(f: Family, name: str | None) -> list[list[Segment]]:
    """Segments grouped by core range: those of one group share the bracket."""
    groups: dict[tuple[int, int], list[Segment]] = {}
    for segment in f.segments:
        if name is None or segment.name == name:
            groups.setdefault(segment.core, []).append(segment)
    return list(groups.values())


def _add_symmetric(
    out: Tensor,
    f: Family,
    x: Operands,
    accumulate: bool,
    workspace: Workspace,
    only: tuple[str, str] | None,
    origin: tuple[int, int],
) -> None:
    """Block (f, f): Σ_i α α'ᵀ ⊗ M_i, symmetric in both pairs of indices."""
    for i, left in enumerate(f.segments):
        for right in f.segments[i:]:
            ordered = [(left, right)] if left is right else [(left, right), (right, left)]
            asked = [(p, q) for p, q in ordered if only in (None, (p.name, q.name))]
            if left is right and only is None:
                a, n = left.shape[1], x.left.shape[-1]
                if a > 1 and n <= _FOLD_SQUARE * a:  # few tokens: symmetry saves no time
                    fold([Target(out, left, left, origin, accumulate, False)], x, workspace)
                else:
                    add_square(out, left, x, accumulate, workspace, origin)
            else:
                for p, q in asked:
                    pair(Target(out, p, q, origin, accumulate, False), x, workspace)
