"""H, H_o and H_f from one product: 8 units instead of the 16 of three separate operators.

The graph of u ↦ Jᵀu, kept at u = δ = ∂ℓ/∂Z, is differentiated once with respect to the parameters
and u together: the first gives H_f v, the second J v. One more pass back gives H_o v = Jᵀ Λ J v,
and H v is the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvatlas.operators.curvature import CurvatureOperator
from curvatlas.operators.linearisation import Columns, Linearisation
from curvatlas.problem.output_curvature import differentiable_leaves, output_curvature

PARTS = ("total", "outer", "functional")


class AllPartsLinearisation(Linearisation):
    """Keeps the graphs of g(θ, u) = J(θ)ᵀu at u = δ and of the outputs."""

    def _build(self) -> None:
        outputs, rebuild = differentiable_leaves(self.outputs)
        self._require_path(any(z.requires_grad for z in outputs))
        slopes = self._fixed_slopes(outputs, rebuild)
        self._z = outputs
        # Where the slopes themselves depend on parameters (a chunked head), they stay in the graph.
        self._u = [s if s.requires_grad else s.detach().requires_grad_(True) for s in slopes]
        self._transposed = self._gradients(outputs, self._u)
        self._lambda = output_curvature(self._problem.loss, outputs, rebuild, self.batch.targets)

    def _roots(self) -> list[Tensor | None]:
        return [*self._transposed.values(), *self._z]

    def parts(
        self, columns: Columns, rows: Sequence[str]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """(H_o columns, H_f columns) restricted to ``rows``: (K, *shape) each, None for zero."""
        used = [n for n in columns if self._transposed[n] is not None]
        roots = [t for n in used if (t := self._transposed[n]) is not None]
        leaves = [self.leaves[n] for n in rows]
        both = self._pull(roots, [*leaves, *self._u], [columns[n] for n in used])
        functional, moved = both[: len(leaves)], both[len(leaves) :]
        count = next(iter(columns.values())).shape[0]
        tangents = [
            z.new_zeros(count, *z.shape) if t is None else t
            for t, z in zip(moved, self._z, strict=True)
        ]
        outer = self._pull(self._z, leaves, self._lambda(tangents))
        return outer, functional

    def product(self, columns: Columns, rows: Sequence[str]) -> list[Tensor | None]:
        outer, functional = self.parts(columns, rows)
        return [
            b if a is None else a if b is None else a + b
            for a, b in zip(outer, functional, strict=True)
        ]


class CurvatureParts(CurvatureOperator):
    """The Hessian as an operator whose ``parts`` gives H, H_o and H_f of the same columns."""

    linearisation = AllPartsLinearisation
    outer = "part"

    def parts(self, columns: Columns, rows: Sequence[str]) -> dict[str, Tensor]:
        """Part → (K, Σ sizes of rows), of columns given as parameter name → (K, *shape)."""
        self.products += next(iter(columns.values())).shape[0]
        outer, functional = self._batch_sums(
            columns, rows, lambda linear, some: linear.parts(some, rows), parts=2
        )
        return {"total": outer + functional, "outer": outer, "functional": functional}

    def flat_parts(self, columns: Tensor) -> dict[str, Tensor]:
        """Part → (P, K), of flat columns (P, K)."""
        layout = self.problem.layout
        given = dict(zip(layout.names, layout.split(columns), strict=True))
        return {part: rows.T for part, rows in self.parts(given, layout.names).items()}


def check_parts(chosen: Sequence[str] | str) -> tuple[str, ...]:
    """The parts asked for, in the usual order."""
    wanted = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    unknown = [part for part in wanted if part not in PARTS]
    if unknown or not wanted:
        raise ValueError(f"parts are {', '.join(map(repr, PARTS))}, got {wanted!r}.")
    return tuple(part for part in PARTS if part in wanted)


def combined(parts: Mapping[str, Tensor]) -> Tensor:
    """The parts stacked in the order of ``PARTS``."""
    return torch.stack([parts[part] for part in PARTS])
