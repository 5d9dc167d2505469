r"""The Jacobian J = ∂Z/∂θ of the model's outputs, and its transpose, through products alone.

Jᵀu is one backward pass. It is linear in u, so that differentiating uᵀ(Jᵀ)ᵀv with respect to u
gives J v without forward mode, which is not safe through LayerNorm (``linearisation.py``). Both are
exact; with Λ the loss's Hessian at the outputs, Jᵀ Λ J is the Gauss-Newton matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from curvatlas.budget import default_budget, parse_bytes
from curvatlas.engines.autograd.linearisation import Columns, OuterLinearisation
from curvatlas.errors import DifferentiationError, NonFiniteError, ProblemError
from curvatlas.linear_operator import LinearOperator
from curvatlas.problem import Batch, Problem
from curvatlas.problem.cross_entropy import differentiable_leaves
from curvatlas.problem.losses import Rebuild
from curvatlas.problem.objective import OwnLoss

_ADJOINT = {torch.float64: 1e-8, torch.float32: 1e-3}  # uᵀ(Jv) against (Jᵀu)ᵀv, relative


class Jacobian(LinearOperator):
    """J = ∂Z/∂θ (outputs × P); ``J.T`` is its transpose.

    The rows are the entries of the model's output, or of the part that the loss reads (logits),
    row-major, batch after batch in the data's order; those with an ignored target are rows like the
    others. ``output_shapes`` gives their shapes by batch.

    budget: memory for graphs that are kept between products, as bytes or "2GB".
    checks: compare the two products with each other on first use, and refuse randomness.
    """

    def __init__(
        self, problem: Problem, *, budget: int | str | None = None, checks: bool = True
    ) -> None:
        if problem.distributed:
            raise ProblemError(
                "the rows of a Jacobian lie on several processes: pass distributed=False to the "
                "Problem and take each process's own data."
            )
        if isinstance(problem.loss, OwnLoss):
            raise ProblemError(
                "the model's own loss does not say which of its outputs it reads: pass a loss to "
                "the Problem for the Jacobian of the outputs."
            )
        self.problem = problem
        self.budget = default_budget(problem.device) if budget is None else parse_bytes(budget)
        self.checks = checks
        self.output_shapes = [self._shapes(batch) for batch in self._batches()]
        self._rows = [sum(map(math.prod, shapes)) for shapes in self.output_shapes]
        super().__init__(
            (sum(self._rows), problem.size), dtype=problem.dtype, device=problem.device
        )
        self._kept: dict[int, _Linearised] = {}
        self._version: object = None

    def _batches(self) -> Iterator[Batch]:
        return self.problem.batches(ignored=True)

    def _shapes(self, batch: Batch) -> list[torch.Size]:
        problem = self.problem
        with problem.evaluating():
            outputs = problem.model_outputs(batch, problem.leaves())
        return [z.shape for z in differentiable_leaves(outputs)[0]]

    def _problem_on(self, axis: int) -> Problem | None:
        return self.problem if axis == 1 else None

    def _columns(self, columns: Tensor) -> Tensor:
        layout = self.problem.layout
        tangents = dict(zip(layout.names, layout.split(columns), strict=True))
        result = columns.new_empty(self.shape[0], columns.shape[1])

        def fill(linear: _Linearised, rows: slice, some: slice) -> None:
            chunk = {name: c[some].contiguous() for name, c in tangents.items()}
            pieces = [z.reshape(z.shape[0], -1) for z in linear.forward(chunk)]
            result[rows, some] = torch.cat(pieces, 1).T

        self._each(columns.shape[1], fill)
        return self._finite(result, columns)

    def _adjoint_columns(self, columns: Tensor) -> Tensor:
        layout = self.problem.layout
        result = columns.new_zeros(columns.shape[1], self.shape[1])

        def fill(linear: _Linearised, rows: slice, some: slice) -> None:
            pulled = linear.transposed(columns[rows, some].T)
            for start, size, piece in zip(layout.starts, layout.sizes, pulled, strict=True):
                if piece is not None:
                    result[some, start : start + size] += piece.reshape(-1, size)

        self._each(columns.shape[1], fill)
        return self._finite(result.T, columns)

    def _each(self, count: int, fill: Callable[[_Linearised, slice, slice], None]) -> None:
        """fill(linearisation, its rows, some of ``count`` columns) for every batch."""
        if self._version != (version := self.problem.weights_version()):
            self.release()
            if self.checks:
                self._check()
            self._version = version
        start, names = 0, self.problem.parameter_names
        with self.problem.evaluating():
            for place, batch in enumerate(self._batches()):
                linear = self._kept.get(place) or _Linearised(self.problem, batch, names)
                if self._may_keep(place, linear):
                    self._kept[place] = linear
                rows = slice(start, start + self._rows[place])
                at_once = max(1, self.budget // max(linear.held_bytes, 1))
                step = min(linear.columns_at_once, at_once)
                for first in range(0, count, step):
                    fill(linear, rows, slice(first, min(first + step, count)))
                start = rows.stop
                del linear

    def _may_keep(self, place: int, linear: _Linearised) -> bool:
        if place in self._kept or not self.problem.held:
            return False  # a stream may bring other batches in the next pass
        used = sum(other.held_bytes for other in self._kept.values())
        return used + 2 * linear.held_bytes <= self.budget

    def _check(self) -> None:
        """(Jv)ᵀu = vᵀ(Jᵀu) on the first batch: a wrong double backward breaks it."""
        self.problem.check()
        with self.problem.evaluating():
            names = self.problem.parameter_names
            linear = _Linearised(self.problem, next(self._batches()), names)
            generator = torch.Generator().manual_seed(0)
            v = torch.randn(1, self.shape[1], generator=generator, dtype=self.dtype, device="cpu")
            u = torch.randn(1, self._rows[0], generator=generator, dtype=self.dtype, device="cpu")
            v, u = v.to(self.device), u.to(self.device)
            layout = self.problem.layout
            moved = linear.forward(dict(zip(layout.names, layout.split(v.T), strict=True)))
            left = float(torch.cat([z.reshape(-1) for z in moved]) @ u[0])
            back = layout.join(linear.transposed(u), like=v)
        right = float(back @ v[0])
        scale = float(torch.linalg.vector_norm(back)) + abs(right)
        if scale > 0 and not abs(left - right) <= _ADJOINT[self.dtype] * scale:
            raise DifferentiationError(
                f"uᵀ(Jv) = {left:.6g} and (Jᵀu)ᵀv = {right:.6g} differ: an operation of the model "
                "has a wrong double backward; replace it, or pass checks=False."
            )

    def _finite(self, result: Tensor, columns: Tensor) -> Tensor:
        if not bool(torch.isfinite(result).all()):
            if not bool(torch.isfinite(columns).all()):
                raise NonFiniteError(f"the vector that {self!r} multiplies holds NaN or infinity.")
            raise NonFiniteError(f"a product of {self!r} is not finite: try float64.")
        return result

    def release(self) -> None:
        """Free the kept graphs; the next product builds them anew."""
        self._kept.clear()
        self._version = None


class _Linearised(OuterLinearisation):
    """The graphs of Z and of u ↦ Jᵀu on one batch, without a loss between them."""

    def _predicted(self, logit_room: int | None) -> Any:
        return self._problem.model_outputs(self.batch, self.leaves)

    def _output_product(self, rebuild: Rebuild) -> Callable[[list[Tensor]], list[Tensor]]:
        return lambda columns: columns

    def forward(self, columns: Columns) -> list[Tensor]:
        """J columns: parameter name → (K, *shape) gives (K, *outputs) a tensor of the outputs."""
        used = [n for n in columns if self._transposed[n] is not None]
        roots = [t for n in used if (t := self._transposed[n]) is not None]
        moved = self._pull(roots, self._u, [columns[n] for n in used])
        count = next(iter(columns.values())).shape[0]
        return [
            z.new_zeros(count, *z.shape) if t is None else t
            for t, z in zip(moved, self._z, strict=True)
        ]

    def transposed(self, cotangents: Tensor) -> list[Tensor | None]:
        """Jᵀ of cotangents (K, outputs): (K, *shape) a parameter, None for zero."""
        pieces = torch.split(cotangents, [z.numel() for z in self._z], dim=1)
        shaped = [c.reshape(-1, *z.shape) for c, z in zip(pieces, self._z, strict=True)]
        return self._pull(self._z, list(self._places.values()), shaped)
