r"""Dense blocks from per-token tensors: matrix products written straight into the output.

A block Σ_i α_i[a] (M_i[r,c] α'_i[b] + K_i[r,b] δ'_i[c]) is assembled in one of two ways, tokens
always innermost so that every elementwise pass is contiguous:

* folded: the bracket is formed for a few r, c at a time (it stays in cache) and one product with
  α writes the rows of H in place, no temporary, no permutation. Both terms cost one product.
* paired: (M as rc × n) @ (α ⊗ α' as n × ab), then one strided copy. Used where a or b is 1, and for
  blocks on the diagonal, where r ≤ c halves the product, a ≤ b halves it again, and the mirror
  image is the same tile.

What is computed is one orientation of each pair of families; ``mirror`` fills the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvatlas.blocks.families import Family, Pair, Segment

# Numbers in one folded bracket: 1 MB of float64 stays in the second-level cache.
_FOLD = 1 << 17
# Tokens per activation up to which folding is the faster way (measured at widths 16 and 32).
_FOLD_TWO_TERMS = 5
_FOLD_ONE_TERM = 2
# Numbers in one paired product before it is copied into place.
_PAIR = 1 << 19
# A block on the diagonal is cut into this many strips: each skips what lies left of it.
_STRIPS = 4
# From this many tokens on, packing a ≤ b saves more arithmetic than unpacking costs.
_PACK_FROM = 64
# Rows and columns of one transposed tile: wide enough that its rows are whole pages of memory.
_TILE = 512


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


def prepare(pair: Pair, left: Tensor, right: Tensor) -> Operands:
    """Turn (n, …) tensors into token-last, contiguous ones."""
    n = left.shape[0]
    core = pair.core if pair.core.shape[0] == n else pair.core.expand(n, -1, -1)
    return Operands(
        core=_token_last(core),
        slope=None if pair.slope is None else _token_last(pair.slope.expand(n, -1, -1)),
        slope_start=pair.slope_start,
        diagonal=None if pair.slope_diagonal is None else _token_last(pair.slope_diagonal),
        diagonal_columns=pair.diagonal_columns,
        delta=None if pair.delta is None else _token_last(pair.delta),
        left=_token_last(left),
        right=_token_last(right),
    )


def _token_last(t: Tensor) -> Tensor:
    flat = t.reshape(t.shape[0], -1).t().contiguous()
    return flat.view(*t.shape[1:], t.shape[0])


def add_block(
    out: Tensor,
    f: Family,
    g: Family,
    operands: Operands,
    *,
    accumulate: bool,
    workspace: Workspace,
    rows: frozenset[str] | None = None,
    columns: frozenset[str] | None = None,
    origin: tuple[int, int] = (0, 0),
) -> None:
    """Write (or add) block (f, g) into ``out``; only the segments named in rows, columns."""
    if f.key == g.key:
        _add_symmetric(out, f, operands, accumulate, workspace, rows, columns, origin)
        return
    for right in g.segments:
        if columns is not None and right.name not in columns:
            continue
        for lefts in _same_core(f, rows):
            if _folds(lefts, right, operands):
                _fold(out, lefts, right, operands, accumulate, workspace, origin)
            else:
                for left in lefts:
                    _pair(out, left, right, operands, accumulate, workspace, origin)


def _folds(lefts: list[Segment], right: Segment, x: Operands) -> bool:
    """Whether folding beats pairing: the bracket costs n/|a| passes, a second product n."""
    widest = max(left.shape[1] for left in lefts)
    if widest == 1 or right.shape[1] == 1:
        return False
    limit = _FOLD_TWO_TERMS if x.slope is not None else _FOLD_ONE_TERM
    return x.left.shape[-1] <= limit * widest


def _same_core(f: Family, names: frozenset[str] | None) -> list[list[Segment]]:
    """Segments grouped by core range: those of one group share the bracket."""
    groups: dict[tuple[int, int], list[Segment]] = {}
    for segment in f.segments:
        if names is None or segment.name in names:
            groups.setdefault(segment.core, []).append(segment)
    return list(groups.values())


def _view(out: Tensor, segment: Segment, dim: int, origin: int) -> Tensor:
    """``out`` with the segment's stretch of axis ``dim`` as two axes (core, activation)."""
    part = out.narrow(dim, segment.start - origin, segment.size)
    r, a = segment.shape
    sizes = (a, r) if segment.activation_major else (r, a)
    split = part.view(*part.shape[:dim], *sizes, *part.shape[dim + 1 :])
    return split.transpose(dim, dim + 1) if segment.activation_major else split


def _put(target: Tensor, value: Tensor, accumulate: bool) -> None:
    if accumulate:
        target.add_(value)
    else:
        target.copy_(value)


# ---- folded --------------------------------------------------------------------------------


def _fold(
    out: Tensor,
    lefts: list[Segment],
    right: Segment,
    x: Operands,
    accumulate: bool,
    workspace: Workspace,
    origin: tuple[int, int],
) -> None:
    (c_first, c_last), (b_first, b_last) = right.core, right.activation
    r_first, r_last = lefts[0].core
    n = x.left.shape[-1]
    # Stretches of the right segment that are contiguous in memory: over its slow index.
    slow, fast = (b_last - b_first, c_last - c_first)
    if not right.activation_major:
        slow, fast = fast, slow
    step = max(1, min(slow, _FOLD // (fast * n)))
    group = max(1, min(r_last - r_first, _FOLD // (step * fast * n)))
    views = [_view(out, left, 0, origin[0]) for left in lefts]  # (r, a, P)
    actives = [x.left[s.activation[0] : s.activation[1]] for s in lefts]
    for low in range(0, slow, step):
        high = min(low + step, slow)
        if right.activation_major:
            c, b = (c_first, c_last), (b_first + low, b_first + high)
        else:
            c, b = (c_first + low, c_first + high), (b_first, b_last)
        start = right.start - origin[1] + low * fast
        width = (high - low) * fast
        for r in range(r_first, r_last, group):
            r_end = min(r + group, r_last)
            bracket = _bracket(x, (r, r_end), c, b, right.activation_major, workspace)
            for view, active in zip(views, actives, strict=True):
                target = view[r - r_first : r_end - r_first, :, start : start + width]
                torch.baddbmm(
                    target,
                    active.expand(r_end - r, *active.shape),
                    bracket.mT,
                    beta=1.0 if accumulate else 0.0,
                    out=target,
                )


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


# ---- paired --------------------------------------------------------------------------------


def _pair(
    out: Tensor,
    left: Segment,
    right: Segment,
    x: Operands,
    accumulate: bool,
    workspace: Workspace,
    origin: tuple[int, int],
) -> None:
    """(M as rc × n) @ (αα' as n × ab) and (αδ' as ac × n) @ (K as n × rb), copied into place."""
    view = _view(_view(out, right, 1, origin[1]), left, 0, origin[0])  # (r, a, c, b)
    active = x.left[slice(*left.activation)]
    inner = x.right[slice(*right.activation)]
    core = x.core[slice(*left.core), slice(*right.core)]
    _add_products(view, core, active, inner, right.activation_major, accumulate, workspace)
    if x.delta is None:
        return
    delta = x.delta[slice(*right.core)]
    if x.slope is not None:
        first = max(right.activation[0], x.slope_start)
        last = min(right.activation[1], x.slope_start + x.slope.shape[1])
        if first < last:
            slope = x.slope[slice(*left.core), first - x.slope_start : last - x.slope_start]
            part = view.narrow(3, first - right.activation[0], last - first)
            swapped = part.transpose(2, 3)  # c and b change places: K is indexed by b
            _add_products(
                swapped, slope, active, delta, not right.activation_major, True, workspace
            )
    if x.diagonal is not None:
        _pair_diagonal(view, left, right, x, active, delta)


def _add_products(
    view: Tensor,
    core: Tensor,
    active: Tensor,
    inner: Tensor,
    core_fastest: bool,
    accumulate: bool,
    workspace: Workspace,
) -> None:
    """view (r, a, c, b) ← Σ_i core[r, c] active[a] inner[b]; ``core_fastest``: c runs in memory."""
    (r, c, n), a, b = core.shape, len(active), len(inner)
    both = (active.unsqueeze(1) * inner).reshape(a * b, n)
    step = max(1, _PAIR // (c * a * b))
    for low in range(0, r, step):
        high = min(low + step, r)
        rows = core[low:high].reshape(-1, n)
        if core_fastest:
            product = _multiply(both, rows.mT, workspace).view(a, b, high - low, c)
            product = product.permute(2, 0, 3, 1)
        else:
            product = _multiply(rows, both.mT, workspace).view(high - low, c, a, b)
            product = product.transpose(1, 2)
        _put(view[low:high], product, accumulate)


def _pair_diagonal(
    view: Tensor, left: Segment, right: Segment, x: Operands, active: Tensor, delta: Tensor
) -> None:
    """The diagonal slope of a paired block: row r meets column first + r mod period."""
    assert x.diagonal is not None
    first, period = x.diagonal_columns
    r = torch.arange(*left.core, device=view.device)
    column = first + r % period - right.activation[0]
    low, high = right.activation[0] - first, right.activation[1] - first
    inside = (r % period >= low) & (r % period < high)
    if not bool(inside.any()):
        return
    local, column = (r - left.core[0])[inside], column[inside]
    scaled = x.diagonal[slice(*left.core)][inside].unsqueeze(1) * active  # (r', a, n)
    product = scaled @ delta.mT  # (r', a, c)
    # The advanced indices r and b are apart, so they come first: (r', a, c).
    view[local, :, :, column] += product


# ---- on the diagonal -----------------------------------------------------------------------


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
                _square(out, left, x, accumulate, workspace, origin)
            else:
                for p, q in asked:
                    _pair(out, p, q, x, accumulate, workspace, origin)


def _square(
    out: Tensor,
    segment: Segment,
    x: Operands,
    accumulate: bool,
    workspace: Workspace,
    origin: tuple[int, int],
) -> None:
    """One segment with itself, r ≤ c only, the tile and its mirror image written together."""
    view = _view(_view(out, segment, 1, origin[1]), segment, 0, origin[0])  # (r, a, c, b)
    active = x.left[slice(*segment.activation)]
    core = x.core[slice(*segment.core), slice(*segment.core)]
    r, a = segment.shape
    n = active.shape[-1]
    both, unpack = _products_of(active)
    step = max(1, min(-(-r // _STRIPS), _PAIR // (r * a * a)))
    for low in range(0, r, step):
        high = min(low + step, r)
        rest = r - low
        left = core[low:high, low:].reshape(-1, n)
        if segment.activation_major:
            # memory order is (a, r): let the core index run fastest in the product too
            product = _multiply(both, left.mT, workspace)
            product = _unpack(product, 0, unpack, workspace)
            tile = product.view(a, a, high - low, rest).permute(2, 0, 3, 1)  # (r, a, c, b)
        else:
            product = _multiply(left, both.mT, workspace)
            product = _unpack(product, 1, unpack, workspace)
            tile = product.view(high - low, rest, a, a).transpose(1, 2)  # (r, a, c, b)
        _put(view[low:high, :, low:], tile, accumulate)
        below = tile[:, :, high - low :]  # M and α αᵀ are symmetric: no transposition inside
        _put(view[high:, :, low:high], below.permute(2, 1, 0, 3), accumulate)


def _multiply(left: Tensor, right: Tensor, workspace: Workspace) -> Tensor:
    """left @ right in the workspace: a fresh temporary costs more in page faults than in flops."""
    rows, columns = left.shape[0], right.shape[1]
    out = workspace.take("product", rows * columns, left).view(rows, columns)
    return torch.mm(left, right, out=out)


def _unpack(product: Tensor, dim: int, place: Tensor | None, workspace: Workspace) -> Tensor:
    """Spread the packed pairs a ≤ b over all (a, b)."""
    if place is None:
        return product
    shape = list(product.shape)
    shape[dim] = len(place)
    out = workspace.take("unpacked", shape[0] * shape[1], product).view(shape)
    return torch.index_select(product, dim, place, out=out)


def _products_of(active: Tensor) -> tuple[Tensor, Tensor | None]:
    """α_a α_b as (pairs, n), and the map from a·b to pairs when only a ≤ b are kept."""
    a, n = active.shape
    if n < _PACK_FROM or a < 4:
        return (active.unsqueeze(1) * active).reshape(a * a, n), None
    upper = torch.triu_indices(a, a, device=active.device)
    place = torch.empty(a, a, dtype=torch.long, device=active.device)
    order = torch.arange(upper.shape[1], device=active.device)
    place[upper[0], upper[1]] = order
    place[upper[1], upper[0]] = order
    return active[upper[0]] * active[upper[1]], place.view(-1)


# ---- the other triangle --------------------------------------------------------------------


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
    padded = _TILE + 8
    height = min(_TILE, rows)
    buffer = workspace.take("tile", height * padded, source).view(height, padded)
    for i in range(0, rows, _TILE):
        i_end = min(i + _TILE, rows)
        for j in range(0, columns, _TILE):
            j_end = min(j + _TILE, columns)
            part = buffer[: i_end - i, : j_end - j]
            part.copy_(source[i:i_end, j:j_end])
            target[j:j_end, i:i_end].copy_(part.t())
