"""The flat vector: parameters in ``named_parameters()`` order, each row-major."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Layout:
    """Where each parameter lies in the flat vector of length ``size``."""

    def __init__(self, names: Sequence[str], shapes: Sequence[torch.Size]) -> None:
        self.names = tuple(names)
        self.shapes = tuple(shapes)
        self.sizes = tuple(math.prod(shape) for shape in shapes)
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + size)
        self.starts = tuple(starts[:-1])
        self.size = starts[-1]

    def split(self, columns: Tensor) -> list[Tensor]:
        """(P, K) → one (K, *shape) tensor a parameter, a view where the strides allow it."""
        rows = columns.T if columns.ndim == 2 else columns.unsqueeze(0)  # (K, P)
        pieces = torch.split(rows, list(self.sizes), dim=1)
        return [p.reshape(-1, *s) for p, s in zip(pieces, self.shapes, strict=True)]

    def join(self, tensors: Sequence[Tensor | None], *, like: Tensor) -> Tensor:
        """One tensor a parameter (None: zero) → (P,)."""
        pieces = [
            like.new_zeros(size) if t is None else t.reshape(-1)
            for t, size in zip(tensors, self.sizes, strict=True)
        ]
        return torch.cat(pieces)
