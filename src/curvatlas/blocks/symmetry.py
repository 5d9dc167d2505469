"""Blocks on the diagonal and the other triangle: what symmetry makes cheaper.

Block (f, f) is Σ_i ααᵀ ⊗ M_i, symmetric in both pairs of indices: r ≤ c halves the product, a ≤ b
halves it again, and the mirror image of a tile is the tile itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.blocks.families import Family, Segment
from curvatlas.blocks.operands import Operands, Workspace, multiply, pairs_of
from curvatlas.blocks.placement import put, segment_view

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
