"""What the assembly multiplies: scratch memory, and a pair's tensors with the tokens last."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvatlas.blocks.families import Pair

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
