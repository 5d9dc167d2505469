"""What a closed form returns: the three parts of a Hessian with their blocks by name."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from curvatlas.layers.decomposition import DecomposedHessian
from curvatlas.linear_operator import (
    PARTS,
    LinearOperator,
    MatrixOperator,
    Part,
    Tags,
    require_part,
)
from curvatlas.results import Result, block_rows

_FIELDS = {"H": "total", "H_outer": "outer", "H_functional": "functional"}
_LETTERS = {
    "Q": "query_weight",
    "K": "key_weight",
    "V": "value_weight",
    "O": "output_weight",
    "W1": "up_weight",
    "W2": "down_weight",
    "gamma": "weight",
    "beta": "bias",
}


_SUBLAYERS = {
    **dict.fromkeys(("query", "key", "value", "output"), "attention"),
    **dict.fromkeys(("gate", "up", "down"), "ffn"),
    "norm1": "norm1",
    "norm2": "norm2",
}


@dataclass(frozen=True, kw_only=True)
class ZeroStructure(Result):
    """Blocks (a, b) that vanish whatever the weights are, for each part of the Hessian.

    Read off the maps of the block (``curvatlas.closed_form.zeros``), never off numbers.
    """

    zeros: dict[str, tuple[tuple[str, str], ...]]  # part → pairs, a not after b

    def is_zero(self, a: str, b: str, part: Part = "total") -> bool:
        """Whether block (a, b) of ``part`` is structurally zero."""
        pairs = self.zeros[part]
        return (a, b) in pairs or (b, a) in pairs

    def __str__(self) -> str:
        lines = []
        for part, pairs in self.zeros.items():
            listed = ", ".join(f"({a}, {b})" for a, b in pairs) or "none"
            lines.append(f"{part}: {listed}")
        return "structurally zero blocks\n  " + "\n  ".join(lines)


class BlockSizes(dict[str, int]):
    """Parameter → size, in flat order; ``sizes["attention"]`` adds up the article's sublayers."""

    def __missing__(self, name: str) -> int:
        sublayers = self.by_sublayer()
        if name in sublayers:
            return sublayers[name]
        raise KeyError(f"no {name!r}: there are {', '.join([*self, *sublayers])}.")

    def by_sublayer(self) -> dict[str, int]:
        """``attention``, ``norm1``, ``ffn``, ``norm2``, as far as there are any, in flat order."""
        sums: dict[str, int] = {}
        for name, size in self.items():
            sublayer = _sublayer(name)
            sums[sublayer] = sums.get(sublayer, 0) + size
        return sums


def _sublayer(name: str) -> str:
    """``attention``, ``ffn``, ``norm1`` or ``norm2``; ``norm`` for a normalisation alone."""
    stem = name.removesuffix("_weight").removesuffix("_bias")
    return _SUBLAYERS.get(stem, "norm" if stem in ("weight", "bias") else stem)


@dataclass(kw_only=True, eq=False)
class BlockHessian(Result, MatrixOperator, DecomposedHessian):
    """Hessian of a loss over the parameters ``names``, in the order of the flat vector.

    It is the operator of H (``ca.eigenpairs(result)``); ``outer`` and ``functional`` are those of
    its parts. ``H`` is there from the start, ``H_outer`` and ``H_functional`` are assembled when
    first asked for (from the weights of the time of the call). ``result["H"]``, ``result["QK"]``
    and ``result.block("query_weight", "key_bias", part="outer")`` read parts and blocks, and so
    does ``result.block("attention", "ffn")`` with whole sublayers (attention, norm, ffn);
    ``block_sizes`` goes by parameter, ``result["block_sizes"]`` by sublayer as in the article.
    """

    loss: float
    names: tuple[str, ...]
    block_sizes: dict[str, int]  # of every parameter; ["attention"] and the like are their sums
    structure: ZeroStructure
    attention: Tensor | None = None  # A (B, heads, L, L)
    parts: dict[str, Tensor] = field(default_factory=dict)
    _source: Callable[[Part], Tensor] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.block_sizes = BlockSizes(self.block_sizes)
        size = sum(self.block_sizes.values())
        # a file may hold no part, or matrices of another size: products will say so
        like, tags = next(iter(self.parts.values()), torch.empty(0)), Tags(symmetric=True)
        LinearOperator.__init__(self, (size, size), dtype=like.dtype, device=like.device, tags=tags)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__reduce_ex__(self, protocol)  # numbers alone: copied like any other result

    @property
    def matrix(self) -> Tensor:  # type: ignore[override]
        """The matrix this operator multiplies by: H."""
        return self.H

    def operator(self, part: Part = "total") -> LinearOperator:
        """H, H_o or H_f as an operator."""
        require_part(part)
        return self if part == "total" else MatrixOperator(self.part(part), tags=self.tags)

    @property
    def H(self) -> Tensor:
        """H = H_o + H_f (P, P)."""
        return self.part("total")

    @property
    def H_outer(self) -> Tensor:
        """H_o = Jᵀ Λ J (P, P)."""
        return self.part("outer")

    @property
    def H_functional(self) -> Tensor:
        """H_f = Σ_z δ_z ∂²Z_z (P, P)."""
        return self.part("functional")

    def part(self, part: Part) -> Tensor:
        """One of the three matrices."""
        require_part(part)
        if part not in self.parts:
            if self._source is None:
                raise KeyError(f"this result was saved without its {part} part.")
            self.parts[part] = self._source(part)
        return self.parts[part]

    def keys(self) -> tuple[str, ...]:
        """What ``result[...]`` knows by name, besides blocks such as ``"QK"``."""
        own = (*_FIELDS, "loss", "names", "block_sizes", "structure", "attention")
        return (*own, "hessian_estimates") if _LETTERS["Q"] in self.block_sizes else own

    @property
    def hessian_estimates(self) -> dict[str, float]:
        """The article's H_WQ, H_WK, H_WV (and H_WO): Frobenius norms of the exact diagonal blocks
        ∂²ℓ/∂W² of the attention weights; ``result["QQ"]`` is the block itself."""
        letters = [x for x in "QKVO" if _LETTERS[x] in self.block_sizes]
        return {f"H_W{x}": float(torch.linalg.norm(self.block(x, x))) for x in letters}

    def __getitem__(self, key: Any) -> Any:
        """``result["H_outer"]``, ``result["loss"]``, a block as ``result["QK"]``, or an operator of
        rows × columns, ``result["query", 3:7]``."""
        if not isinstance(key, str):
            return LinearOperator.__getitem__(self, key)
        if key == "block_sizes":
            return BlockSizes(self.block_sizes).by_sublayer()
        if key in _FIELDS:
            return self.part(cast(Part, _FIELDS[key]))
        if len(key) == 2 and set(key) <= set("QKVO"):
            return self.block(key[0], key[1])
        if key in self.keys():
            return getattr(self, key)
        raise KeyError(f"no entry {key!r}: use H, H_outer, H_functional, or a block such as 'QK'.")

    def offset(self, name: str) -> tuple[int, int]:
        """(start, size) of a parameter; "Q", "query" and "query_weight" mean the same."""
        full = _LETTERS.get(name, name)
        full = full if full in self.block_sizes else f"{full}_weight"
        if full not in self.block_sizes:
            known = ", ".join((*self.names, *self.sublayers))
            raise KeyError(f"no parameter {name!r} and no such sublayer: this Hessian has {known}.")
        start = 0
        for other in self.names:
            if other == full:
                break
            start += self.block_sizes[other]
        return start, self.block_sizes[full]

    @property
    def sublayers(self) -> tuple[str, ...]:
        """The rows of the article's 3 × 3 view: attention, norm, ffn, as far as there are any."""
        present = {_sublayer(name).rstrip("12") for name in self.names}
        known = tuple(name for name in ("attention", "norm", "ffn") if name in present)
        return known + tuple(sorted(present - set(known)))

    def indices(self, name: str) -> Tensor:
        """Places in the flat vector of a parameter, or of a sublayer: "attention", "ffn", "norm",
        "norm1", "norm2"."""
        if name in (*self.sublayers, "norm1", "norm2") and name not in self.block_sizes:
            members = [n for n in self.names if _sublayer(n) in (name, f"{name}1", f"{name}2")]
            if members:
                return torch.cat([self.indices(member) for member in members])
        start, size = self.offset(name)
        return torch.arange(start, start + size, device="cpu")

    def _places(self, selector: Any, *, axis: int) -> Tensor:
        if isinstance(selector, str):
            return self.indices(selector)
        if isinstance(selector, (list, tuple)) and all(isinstance(s, str) for s in selector):
            return torch.cat([self.indices(name) for name in selector])
        return super()._places(selector, axis=axis)

    def block(self, a: str, b: str, part: Part = "total") -> Tensor:
        """Block (a, b) of two parameters or sublayers (size of a, size of b), a view where both
        lie in one piece."""
        rows, columns = self.indices(a), self.indices(b)
        matrix = self.part(part)

        def whole(places: Tensor) -> bool:
            return int(places[-1] - places[0]) + 1 == len(places)

        if whole(rows) and whole(columns):
            return matrix[int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]
        return matrix[rows.to(matrix.device)][:, columns.to(matrix.device)]

    def diagonal(self, part: Part = "total") -> Tensor:
        """The diagonal (P,)."""
        return self.part(part).diagonal()

    def trace(self, part: Part = "total") -> dict[str, float]:
        """The trace of every diagonal block."""
        return {name: float(self.block(name, name, part).trace()) for name in self.names}

    def frobenius(self, part: Part = "total", *, by: str = "parameter") -> Tensor:
        """Frobenius norms of all blocks, names × names, or by="sublayer": sublayers × sublayers."""
        if by not in ("parameter", "sublayer"):
            raise ValueError(f"by is 'parameter' or 'sublayer', got {by!r}.")
        names = self.names if by == "parameter" else self.sublayers
        rows = [
            torch.stack([torch.linalg.norm(self.block(a, b, part)) for b in names]) for a in names
        ]
        return torch.stack(rows)

    def matvec(self, vector: Tensor, part: Part = "total") -> Tensor:
        """H v for v (P,) or columns (P, k)."""
        image: Tensor = self.operator(part) @ vector
        return image

    def to_dict(self) -> dict[str, Any]:
        return self._complete()._base_dict()

    def _base_dict(self) -> dict[str, Any]:
        plain = super().to_dict()
        plain.pop("_source", None)
        return plain

    def save(self, path: str | os.PathLike[str], *, keep_previous: bool = False) -> Path:
        """Write the result with all three parts to one file."""
        return Result.save(self._complete(), path, keep_previous=keep_previous)

    def _complete(self) -> BlockHessian:
        """A copy with every part computed and nothing left to compute."""
        if self._source is None:
            return self
        parts: dict[str, Tensor] = {part: self.part(part) for part in PARTS}
        return dataclasses.replace(self, parts=parts, _source=None)

    def _rows(self) -> list[dict[str, Any]]:
        """A row a pair of blocks: the norm and the largest entry of the whole H between them."""
        return block_rows(self.part("total"), self.names, tuple(self.block_sizes.values()))

    def __str__(self) -> str:
        size = sum(self.block_sizes.values())
        norms = {part: float(torch.linalg.norm(m)) for part, m in self.parts.items()}
        listed = ", ".join(f"‖{p}‖ = {n:.4g}" for p, n in norms.items())
        blocks = len(self.names)
        return f"Hessian of {size} parameters in {blocks} blocks, loss {self.loss:.6g}: {listed}"
