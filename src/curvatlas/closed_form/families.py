r"""Every block of the Hessian as one sum over tokens.

A weight acts on a token through an outer product, so it has two index sets: its activation index
(what is multiplied, α) and its core index (where it acts). For weight families f before g in the
order of the computation every block of the Hessian is

    H_fg[(r, a), (c, b)] = Σ_i α_i[a] ( M_i[r, c] α'_i[b] + K_i[r, b] δ'_i[c] ),

r, c core indices, a, b activation indices: M the curvature between the two places, K the change
of g's activation along f, δ' the adjoint at g (derivations §9 row by row). One formula means one
routine for dense blocks, one for products, one for norms.

    family     core          α           δ
    front      γ, β coords   1           –        pre-norm, in front of attention
    query h    p             x̂           δ_q
    key h      b             q_p         s ν
    value h    o             m̂           τ
    output     o             Ô           R
    middle     γ, β coords   1           –        the norm in front of the feed-forward part
    gate, up   k             v̂           δ_h
    down       o             ĝ           δ_S
    final      γ, β coords   1           –        post-norm's last norm
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.engines.tangent.structure import WEIGHT_NAMES, BlockSpec, Weights


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The part of a family that is one stretch of one named parameter.

    Flat position of (core r, activation a): start + r·|a| + a, or start + a·|r| + r where
    ``activation_major``. ``core`` and ``activation`` are the family's index ranges it covers.
    """

    name: str
    start: int
    core: tuple[int, int]
    activation: tuple[int, int]
    activation_major: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(core size, activation size)."""
        return self.core[1] - self.core[0], self.activation[1] - self.activation[0]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A group of parameters with common core and activation index sets; ``head`` of q, k, v."""

    kind: str
    head: int
    segments: tuple[Segment, ...]

    @property
    def key(self) -> tuple[str, int]:
        return self.kind, self.head

    @property
    def size(self) -> int:
        """How many core indices the family has."""
        return max(segment.core[1] for segment in self.segments)

    def segment(self, name: str) -> Segment | None:
        """The stretch of the parameter ``name``, if the family has one."""
        return next((s for s in self.segments if s.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The per-token tensors of one block: M (n, r, c), and K with δ' where g's α depends on f.

    ``slope`` is K (n, r, w) on the activation columns [slope_start, slope_start + w);
    ``slope_diagonal`` (n, r) stands for K with one entry a row, at column diagonal_columns[r].
    """

    core: Tensor
    slope: Tensor | None = None
    slope_start: int = 0
    slope_diagonal: Tensor | None = None
    diagonal_columns: tuple[int, int] = (0, 0)  # rows r map to columns first + r (period second)
    delta: Tensor | None = None


def parameter_offsets(weights: Weights) -> dict[str, tuple[int, int]]:
    """name → (start, size) in the flat vector, in the order of ``WEIGHT_NAMES``."""
    offsets, start = {}, 0
    for name in WEIGHT_NAMES:
        if name in weights:
            offsets[name] = (start, weights[name].numel())
            start += weights[name].numel()
    return offsets


def build_families(spec: BlockSpec, weights: Weights) -> tuple[Family, ...]:
    """The families of a block in the order of its computation; no attention without its weights."""
    offsets = parameter_offsets(weights)
    families: list[Family] = []

    def norm(kind: str, prefix: str) -> None:
        segments, first = [], 0
        for name in (f"{prefix}_weight", f"{prefix}_bias"):
            if name in offsets:
                start, d = offsets[name]
                core = (first, first + d)
                segments.append(Segment(name=name, start=start, core=core, activation=(0, 1)))
                first += d
        if segments:
            families.append(Family(kind=kind, head=0, segments=tuple(segments)))

    def linear(kind: str, prefix: str, rows: tuple[int, int], head: int = 0) -> None:
        start, _ = offsets[f"{prefix}_weight"]
        width, count = weights[f"{prefix}_weight"].shape[1], rows[1] - rows[0]
        segments = [
            Segment(
                name=f"{prefix}_weight",
                start=start + rows[0] * width,
                core=(0, count),
                activation=(0, width),
            )
        ]
        if f"{prefix}_bias" in offsets:
            segments.append(
                Segment(
                    name=f"{prefix}_bias",
                    start=offsets[f"{prefix}_bias"][0] + rows[0],
                    core=(0, count),
                    activation=(width, width + 1),
                )
            )
        families.append(Family(kind=kind, head=head, segments=tuple(segments)))

    def key(head: int, first: int) -> None:
        d, size = spec.d_model, spec.key_size
        start = offsets["key_weight"][0] + first * d
        segments = [
            Segment(
                name="key_weight",
                start=start,
                core=(0, d),
                activation=(0, size),
                activation_major=True,
            )
        ]
        if "key_bias" in offsets:
            start = offsets["key_bias"][0] + first
            segments.append(
                Segment(
                    name="key_bias",
                    start=start,
                    core=(d, d + 1),
                    activation=(0, size),
                    activation_major=True,
                )
            )
        families.append(Family(kind="key", head=head, segments=tuple(segments)))

    dk, dv, shared = spec.key_size, spec.value_size, spec.n_heads // spec.kv_heads
    heads = range(spec.n_heads) if "query_weight" in weights else range(0)
    if spec.norm_first and spec.residual:
        norm("front", "norm1")
    for h in heads:
        linear("query", "query", (h * dk, (h + 1) * dk), h)
    for h in heads:
        key(h, h // shared * dk)
    for h in heads:
        linear("value", "value", (h // shared * dv, (h // shared + 1) * dv), h)
    if "output_weight" in weights:
        linear("output", "output", (0, spec.d_model))
    if spec.d_ff is not None:
        norm("middle", "norm2" if spec.norm_first else "norm1")
        if spec.gated:
            linear("gate", "gate", (0, spec.d_ff))
        linear("up", "up", (0, spec.d_ff))
        linear("down", "down", (0, spec.d_model))
    if spec.residual and not spec.norm_first:
        norm("final", "norm1" if spec.d_ff is None else "norm2")
    return tuple(families)


def with_one(t: Tensor, present: bool) -> Tensor:
    """Append the constant activation of a bias: (n, a) → (n, a + 1)."""
    return torch.nn.functional.pad(t, (0, 1), value=1.0) if present else t
