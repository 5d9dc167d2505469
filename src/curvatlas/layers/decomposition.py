r"""A Hessian that also multiplies by each of its two parts, H = H_o + H_f, as an operator.

The object itself is the operator of H; ``.outer`` and ``.functional`` are those of the parts, so
that every estimator of ``curvatlas.spectra`` takes any of the three as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvatlas.linear_operator import LinearOperator, Part, Tags, require_part


class DecomposedHessian(LinearOperator):
    """H over named pieces of a flat vector; subclasses give ``_part_columns`` and ``offsets``.

    ``op["query_weight", "key_weight"]`` is the block of two pieces, as an operator.
    """

    offsets: dict[str, tuple[int, int]]  # name → (start, size), in flat order
    convex = False  # whether the loss is convex in the outputs, so that H_o is psd

    def _part_columns(self, columns: Tensor, part: Part) -> Tensor:
        """(P, K) → (P, K) by one of the three matrices."""
        raise TypeError(f"{type(self).__name__} defines no product.")

    def _columns(self, columns: Tensor) -> Tensor:
        return self._part_columns(columns, "total")

    def operator(self, part: Part = "total") -> LinearOperator:
        """The operator of H, H_o or H_f."""
        require_part(part)
        return self if part == "total" else HessianPart(self, part)

    @property
    def outer(self) -> LinearOperator:
        """H_o = Jᵀ Λ J."""
        return self.operator("outer")

    @property
    def functional(self) -> LinearOperator:
        """H_f = Σ_z δ_z ∂²Z_z."""
        return self.operator("functional")

    def product(self, v: Tensor, *, part: Part = "total") -> Tensor:
        """H v, H_o v or H_f v for v (P,) or columns (P, K)."""
        image: Tensor = self.operator(part) @ v
        return image

    def offset(self, name: str) -> tuple[int, int]:
        """(start, size) of a named piece."""
        if name not in self.offsets:
            raise KeyError(f"no parameter {name!r}: there are {', '.join(self.offsets)}.")
        return self.offsets[name]

    def block_product(self, a: str, b: str, part: Part = "total") -> LinearOperator:
        """The operator of block (a, b) of one part."""
        rows, columns = self._places(a, axis=0), self._places(b, axis=1)
        return self.operator(part)._submatrix(rows, columns)

    def __getitem__(self, key: Any) -> LinearOperator:
        if (names := _two_names(key)) is not None:
            return self.block_product(*names)
        return super().__getitem__(key)

    def _places(self, selector: Any, *, axis: int) -> Tensor:
        if isinstance(selector, str):
            start, size = self.offset(selector)
            return torch.arange(start, start + size)
        return super()._places(selector, axis=axis)

    # Read by ``ca.diagonal`` and ``ca.trace``; None: no closed form, they estimate.

    def exact_diagonal(self, part: Part = "total") -> Tensor | None:
        """The diagonal (P,) of one part where a closed form gives it."""
        return None


class HessianPart(LinearOperator):
    """H_o or H_f of a ``DecomposedHessian``."""

    def __init__(self, hessian: DecomposedHessian, part: Part) -> None:
        tags = Tags(symmetric=True, psd=part == "outer" and hessian.convex)
        super().__init__(hessian.shape, dtype=hessian.dtype, device=hessian.device, tags=tags)
        self.hessian, self.part = hessian, part

    def content(self) -> Any:
        return [self.part, self.hessian.content()]

    def _columns(self, columns: Tensor) -> Tensor:
        self.hessian.products += columns.shape[1]
        return self.hessian._part_columns(columns, self.part)

    def __getitem__(self, key: Any) -> LinearOperator:
        if (names := _two_names(key)) is not None:
            return self.hessian.block_product(*names, self.part)
        return super().__getitem__(key)

    def _places(self, selector: Any, *, axis: int) -> Tensor:
        return self.hessian._places(selector, axis=axis)

    def exact_diagonal(self) -> Tensor | None:
        return self.hessian.exact_diagonal(self.part)


def _two_names(key: Any) -> tuple[str, str] | None:
    """The two pieces that ``op["a", "b"]`` or ``op["a"]`` names, if it names them."""
    if isinstance(key, str):
        return key, key
    both = isinstance(key, tuple) and len(key) == 2 and all(isinstance(k, str) for k in key)
    return key if both else None
