"""The flat vector: parameters in ``named_parameters()`` order, each row-major."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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

    def flat(self, tensors: Sequence[Tensor] | Mapping[str, Tensor]) -> Tensor:
        """One tensor a parameter, in its shape or with a last axis K more → (P,) or (P, K)."""
        by_name = self._by_name(tensors)
        columns: set[int | None] = set()
        for name, shape in zip(self.names, self.shapes, strict=True):
            tensor = by_name[name]
            if not isinstance(tensor, Tensor):
                raise TypeError(f"parameter {name!r} needs a tensor, got {type(tensor).__name__}.")
            if tensor.shape == shape:
                columns.add(None)
            elif tensor.ndim and tensor.shape[:-1] == shape:
                columns.add(tensor.shape[-1])
            else:
                raise ValueError(
                    f"parameter {name!r} has the shape {tuple(shape)}, or {(*shape, 'K')} for K "
                    f"columns: got a tensor of shape {tuple(tensor.shape)}."
                )
        if len(columns) > 1:
            counts = ", ".join(sorted("none" if k is None else str(k) for k in columns))
            raise ValueError(f"the tensors have different numbers of columns ({counts}).")
        count = columns.pop()
        last = () if count is None else (count,)
        pieces = [
            by_name[name].reshape(size, *last)
            for name, size in zip(self.names, self.sizes, strict=True)
        ]
        return torch.cat(pieces)

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """The inverse of ``flat``: (P,) or (P, K) → one tensor a parameter."""
        pieces = torch.split(flat, list(self.sizes))
        return [p.reshape(*s, *p.shape[1:]) for p, s in zip(pieces, self.shapes, strict=True)]

    def _by_name(self, tensors: Sequence[Tensor] | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if isinstance(tensors, Mapping):
            missing = [name for name in self.names if name not in tensors]
            unknown = [str(name) for name in tensors if name not in self.names]
            if missing or unknown:
                parts = [f"missing {missing[:5]}"] * bool(missing)
                parts += [f"unknown {unknown[:5]}"] * bool(unknown)
                raise ValueError(f"one tensor for each varying parameter: {', '.join(parts)}.")
            return tensors
        if len(tensors) != len(self.names):
            raise ValueError(
                f"one tensor for each of {len(self.names)} varying parameters, got {len(tensors)}."
            )
        return dict(zip(self.names, tensors, strict=True))
