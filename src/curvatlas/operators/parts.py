"""H, H_o and H_f from one product: 8 units instead of the 16 of three separate operators.

The graph of u ↦ Jᵀu, kept at u = δ = ∂ℓ/∂Z, is differentiated once with respect to the parameters
and u together: the first gives H_f v, the second J v. One more pass back gives H_o v = Jᵀ Λ J v,
and H v is the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvatlas import parallel
from curvatlas.errors import NonFiniteError
from curvatlas.operators.curvature import CurvatureOperator
from curvatlas.operators.linearisation import Columns, Linearisation
from curvatlas.problem.guards import check_finite_loss
from curvatlas.problem.losses import differentiable_leaves, output_curvature

PARTS = ("total", "outer", "functional")


class AllPartsLinearisation(Linearisation):
    """Keeps the graphs of g(θ, u) = J(θ)ᵀu at u = δ and of the outputs."""

    def _build(self) -> None:
        outputs, rebuild = differentiable_leaves(self.outputs)
        self._require_path(any(z.requires_grad for z in outputs))
        fixed = [z.detach().requires_grad_(True) for z in outputs]
        targets = self.batch.targets
        loss = self._problem.loss.value(rebuild(fixed), targets)
        check_finite_loss(float(loss.detach()), self.batch.index)
        slopes = torch.autograd.grad(loss, fixed, materialize_grads=True)
        self._z = outputs
        self._u = [slope.detach().requires_grad_(True) for slope in slopes]
        self._transposed = self._gradients(outputs, self._u)
        self._lambda = output_curvature(self._problem.loss, outputs, rebuild, targets)

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

    def parts(self, columns: Columns, rows: Sequence[str]) -> dict[str, Tensor]:
        """Part → (K, Σ sizes of rows), of columns given as parameter name → (K, *shape)."""
        problem = self.problem
        size_of = dict(zip(problem.layout.names, problem.layout.sizes, strict=True))
        sizes = [size_of[name] for name in rows]
        count = next(iter(columns.values())).shape[0]
        self.products += count
        outer = torch.zeros(count, sum(sizes), dtype=self.dtype, device=self.device)
        functional = torch.zeros_like(outer)
        with problem.evaluating():
            kept = self._kept_for({*columns, *rows})
            for weight, linear in kept:
                assert isinstance(linear, AllPartsLinearisation)
                step = min(linear.columns_at_once, kept.columns_that_fit())
                for start in range(0, count, step):
                    part = slice(start, min(start + step, count))
                    chunk = {name: column[part] for name, column in columns.items()}
                    pair = linear.parts(chunk, rows)
                    for total, pieces in zip((outer, functional), pair, strict=True):
                        _add(total[part], pieces, sizes, weight)
            self._after_first_pass(kept)
        if problem.distributed:
            outer = parallel.sum_over_ranks(outer)
            functional = parallel.sum_over_ranks(functional)
        outer.div_(problem.total_count)
        functional.div_(problem.total_count)
        total = outer + functional
        if self.device.type == "cpu" and not bool(torch.isfinite(total).all()):
            raise NonFiniteError(f"a product of {self!r} is not finite: {self._blame(columns)}.")
        return {"total": total, "outer": outer, "functional": functional}

    def flat_parts(self, columns: Tensor) -> dict[str, Tensor]:
        """Part → (P, K), of flat columns (P, K)."""
        layout = self.problem.layout
        given = dict(zip(layout.names, layout.split(columns), strict=True))
        return {part: rows.T for part, rows in self.parts(given, layout.names).items()}


def _add(
    total: Tensor, pieces: Sequence[Tensor | None], sizes: Sequence[int], weight: float
) -> None:
    start = 0
    for piece, size in zip(pieces, sizes, strict=True):
        if piece is not None:
            total[:, start : start + size].add_(piece.reshape(-1, size), alpha=weight)
        start += size


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
