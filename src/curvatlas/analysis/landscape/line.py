r"""The loss along a straight line: φ(t) = L(θ + t d) and its derivatives.

φ' = g·d, φ'' = dᵀHd, φ''' = ∂³L[d, d, d], … : one reverse pass with respect to the scalar t per
order, so the k-th derivative is exact and costs about 2^k gradients; no P × P object, no
differences. Norms are written out (``problem/smooth_norms``): the fused ones are wrong from order
three on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvatlas import parallel
from curvatlas.errors import ProblemError
from curvatlas.precision import float64_device, in_float64
from curvatlas.problem import Batch, Problem
from curvatlas.problem.evaluation import check_finite_loss
from curvatlas.problem.smooth_norms import SmoothNorms

Displacement = Tensor | Sequence[Tensor] | Mapping[str, Tensor] | nn.Module


class Line:
    """φ(t) = L(θ + t d) over the problem's data, at the weights the model has now."""

    def __init__(self, problem: Problem, direction: Tensor) -> None:
        if direction.shape != (problem.size,):
            raise ProblemError(
                f"a displacement has one entry a parameter: expected ({problem.size},), "
                f"got {tuple(direction.shape)}."
            )
        problem.check()
        self.problem = problem
        self.direction = direction.detach().to(dtype=problem.dtype, device=problem.device)
        self._pieces = {
            name: piece.squeeze(0)
            for name, piece in zip(
                problem.parameter_names, problem.layout.split(self.direction), strict=True
            )
        }

    @property
    def length(self) -> float:
        """‖d‖."""
        return float(torch.linalg.vector_norm(self.direction))

    def values(self, points: Sequence[float]) -> list[float]:
        """φ at each point, forward passes only."""

        def one(batch: Batch, totals: Tensor) -> None:
            with torch.no_grad():
                for place, t in enumerate(points):
                    loss = self._loss(batch, torch.tensor(t, dtype=self.problem.dtype))
                    check_finite_loss(float(loss), batch.index)
                    totals[place] += batch.count * in_float64(loss)

        return self._sum(one, len(points))

    def values_by_batch(self, batches: Sequence[Batch], *, at: float = 1.0) -> list[float]:
        """The mean loss of every batch at t = ``at``, forward passes only; NaN stays NaN."""
        t = torch.tensor(at, dtype=self.problem.dtype)
        with self.problem.evaluating(), torch.no_grad():
            return [float(self._loss(batch, t)) for batch in batches]

    def derivatives(self, order: int = 3, *, at: float = 0.0) -> list[float]:
        """φ, φ', …, φ^(order) at t = ``at``."""

        def one(batch: Batch, totals: Tensor) -> None:
            t = torch.tensor(at, dtype=self.problem.dtype, device=self.problem.device)
            t.requires_grad_(True)
            current = self._loss(batch, t)
            check_finite_loss(float(current.detach()), batch.index)
            totals[0] += batch.count * in_float64(current.detach())
            for k in range(1, order + 1):
                if not current.requires_grad:
                    return  # a polynomial of lower degree: the rest is zero
                (slope,) = torch.autograd.grad(
                    current, t, create_graph=k < order, materialize_grads=True
                )
                current = slope
                totals[k] += batch.count * in_float64(current.detach())

        return self._sum(one, order + 1)

    def _loss(self, batch: Batch, t: Tensor) -> Tensor:
        leaves = self.problem.leaves()
        moved = {name: leaf.detach() + t * self._pieces[name] for name, leaf in leaves.items()}
        return self.problem.loss.value(self.problem.outputs(batch, moved), batch.targets)

    def _sum(self, one: Any, size: int) -> list[float]:
        problem = self.problem

        def fill(total: Tensor) -> None:
            with problem.evaluating(), SmoothNorms():
                for batch in problem.batches():
                    one(batch, total)

        total = parallel.summed(
            fill,
            [size],
            dtype=torch.float64,
            device=float64_device(problem.device),
            distributed=problem.distributed,
        )
        return [float(v) for v in (total / problem.normaliser).tolist()]


def value_and_gradient(
    problem: Problem, weights: Tensor, batches: Sequence[Batch] | None = None
) -> tuple[float, Tensor]:
    """L(w) and ∇L(w), (P,), over ``batches`` (default: all); the model's own weights stay."""
    layout = problem.layout
    pieces = dict(zip(layout.names, layout.split(weights), strict=True))
    chosen = problem.batches() if batches is None else batches
    total = torch.zeros(layout.size + 1, dtype=problem.dtype, device=problem.device)
    with problem.evaluating():
        for batch in chosen:
            leaves = {n: p.squeeze(0).detach().requires_grad_(True) for n, p in pieces.items()}
            loss = problem.loss.value(problem.outputs(batch, leaves), batch.targets)
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            total[:-1].add_(layout.join(grads, like=total), alpha=batch.count)
            total[-1] += batch.count * loss.detach()
    total /= problem.normaliser if batches is None else sum(batch.count for batch in batches)
    return float(total[-1]), total[:-1]


class Difference:
    """φ(t) = L_b(θ + t d) − L_a(θ + t d): two losses on one line (k and k + 1 samples, …)."""

    def __init__(self, before: Line, after: Line) -> None:
        self.before, self.after = before, after
        self.length = before.length

    def values(self, points: Sequence[float]) -> list[float]:
        pairs = zip(self.after.values(points), self.before.values(points), strict=True)
        return [b - a for b, a in pairs]

    def derivatives(self, order: int = 3, *, at: float = 0.0) -> list[float]:
        after, before = (line.derivatives(order, at=at) for line in (self.after, self.before))
        return [b - a for b, a in zip(after, before, strict=True)]


def third_by_differences(line: Line | Difference, step: float = 0.02) -> tuple[float, float]:
    """φ'''(0) from φ'' at ±h and ±h/2 (Richardson), and the error that the two steps show."""
    coarse, fine = (
        (line.derivatives(2, at=h)[2] - line.derivatives(2, at=-h)[2]) / (2 * h)
        for h in (step, step / 2)
    )
    value = (4 * fine - coarse) / 3
    return value, abs(value - fine)


def fourth_derivative_bound(
    line: Line | Difference, *, until: float = 1.0, points: int = 5
) -> float:
    """max |φ''''| on [0, until], read off at Chebyshev points.

    The interpolating polynomial's maximum plus its two last coefficients, which measure what the
    interpolation leaves out: an estimate for smooth networks, no bound across kinks of ReLU.
    """
    nodes = np.cos(np.pi * np.arange(points) / (points - 1))  # Lobatto: both ends belong to it
    values = [line.derivatives(4, at=float(until * (1 + x) / 2))[4] for x in nodes]
    coefficients = np.polynomial.chebyshev.chebfit(nodes, values, points - 1)
    fine = np.polynomial.chebyshev.chebval(np.linspace(-1, 1, 201), coefficients)
    return float(np.abs(fine).max() + np.abs(coefficients[-2:]).sum())


def flat_displacement(problem: Problem, displacement: Displacement) -> Tensor:
    """A displacement in any accepted form as a flat vector (P,).

    A flat tensor, one tensor a parameter (in order, or by name: others stay), or a module or
    state dict to move to with ``checkpoint=``.
    """
    layout = problem.layout
    like = problem.parameters
    if isinstance(displacement, Tensor):
        if displacement.ndim != 1 or displacement.numel() != layout.size:
            raise ProblemError(
                f"the displacement has shape {tuple(displacement.shape)}, the parameters are a "
                f"flat vector of {layout.size}."
            )
        return displacement.detach().to(like)
    if isinstance(displacement, Mapping):
        unknown = sorted(set(displacement) - set(layout.names))
        if unknown:
            raise ProblemError(f"the displacement names {unknown[0]!r}, which does not vary.")
        pieces: list[Tensor | None] = [displacement.get(name) for name in layout.names]
    elif isinstance(displacement, Sequence) and len(displacement) == len(layout.names):
        pieces = list(displacement)
    else:
        raise ProblemError(
            f"a displacement is a flat tensor, a mapping by name or {len(layout.names)} tensors, "
            f"got {type(displacement).__name__}."
        )
    for name, shape, piece in zip(layout.names, layout.shapes, pieces, strict=True):
        if piece is not None and piece.shape != shape:
            raise ProblemError(
                f"the displacement of {name!r} has shape {tuple(piece.shape)}, expected "
                f"{tuple(shape)}."
            )
    detached = [None if p is None else p.detach().to(like) for p in pieces]
    return layout.join(detached, like=like)


def towards(problem: Problem, checkpoint: nn.Module | Mapping[str, Tensor]) -> Tensor:
    """The displacement from the present weights to those of a checkpoint."""
    there: Mapping[str, Tensor] = (
        dict(checkpoint.named_parameters()) if isinstance(checkpoint, nn.Module) else checkpoint
    )
    missing = [name for name in problem.parameter_names if name not in there]
    if missing:
        raise ProblemError(f"the checkpoint has no {missing[0]!r}.")
    return flat_displacement(problem, {n: there[n] for n in problem.parameter_names}) - (
        problem.parameters
    )


def within(
    error_terms: tuple[float, float], change: tuple[float, float, float], accuracy: float
) -> float:
    r"""Largest t ≤ 1 up to which a Taylor polynomial's error stays below ``accuracy``.

    error E(t) = e₃ t³ + e₄ t⁴ must be at most accuracy · (|a t + b t² + c t³| − E(t)), because the
    true change is at least the predicted one minus the error. Checked on a fine grid from 0 on.
    """
    grid = np.linspace(0.0, 1.0, 2001)[1:]
    error = error_terms[0] * grid**3 + error_terms[1] * grid**4
    predicted = np.abs(change[0] * grid + change[1] * grid**2 + change[2] * grid**3)
    fails = np.flatnonzero(error > accuracy * (predicted - error))
    if not len(fails):
        return 1.0
    return 0.0 if fails[0] == 0 else float(grid[fails[0] - 1])
