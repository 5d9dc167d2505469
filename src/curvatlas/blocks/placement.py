"""Where blocks go: segments as axes of the output, tiles put into one or both triangles."""

from __future__ import annotations

from torch import Tensor

from curvatlas.blocks.families import Segment


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
