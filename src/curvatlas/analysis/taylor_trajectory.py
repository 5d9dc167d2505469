r"""Gradient descent in the quadratic model, and beside it the real run.

All iterates lie in the Krylov space of H and g. With the Ritz pairs (λ_i, u_i) of an m-step Lanczos
run started at g, each mode evolves on its own,

    δ_i ← δ_i − η v_i,   v_i ← μ v_i + (g_i + λ_i δ_i),   L = L₀ + Σ_i (g_i δ_i + ½ λ_i δ_i²),

and by Gauss quadrature the loss is that of the full quadratic model, exactly for the first m steps.
The outliers of the top eigenspace are Ritz values of their own, the bulk is what remains.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from curvatlas.analysis.taylor_line import Array
from curvatlas.analysis.taylor_result import CriticalLearningRate, PredictedTrajectory
from curvatlas.operators.hessian import Hessian
from curvatlas.precision import float64_device, in_float64
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.krylov import KrylovBasis

_OVERFLOW = 1e12  # a run whose loss exceeds this has diverged


class Descent:
    """The loss and gradient of a problem at any weights, the model's own left untouched."""

    def __init__(self, problem: Problem) -> None:
        problem.check()
        problem.require_one_process("a trajectory of gradient descent")
        self.problem = problem
        self.start = problem.parameters

    def at(self, weights: Tensor) -> tuple[float, Tensor]:
        """L(w) and ∇L(w), (P,)."""
        problem, layout = self.problem, self.problem.layout
        pieces = {
            name: piece.squeeze(0)
            for name, piece in zip(layout.names, layout.split(weights), strict=True)
        }
        total = torch.zeros(layout.size + 1, dtype=problem.dtype, device=problem.device)
        with problem.evaluating():
            for batch in problem.batches():
                leaves = {n: p.detach().requires_grad_(True) for n, p in pieces.items()}
                loss = problem.loss.value(problem.outputs(batch, leaves), batch.targets)
                grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                total[:-1].add_(layout.join(grads, like=total), alpha=batch.count)
                total[-1] += batch.count * loss.detach()
        total /= problem.normaliser
        return float(total[-1]), total[:-1]

    def run(
        self, steps: int, rate: float, momentum: float = 0.0, *, what: str = "gradient descent"
    ) -> Tensor:
        """Losses (≤ steps + 1,) of full-batch gradient descent; ends early when it overflows."""
        weights, velocity = self.start.clone(), torch.zeros_like(self.start)
        losses: list[float] = []
        for _ in track(range(steps + 1), what, total=steps + 1):
            value, gradient = self.at(weights)
            if not math.isfinite(value) or value > _OVERFLOW:
                break
            losses.append(value)
            velocity = momentum * velocity + gradient
            weights = weights - rate * velocity
        return torch.tensor(losses, dtype=torch.float64)


def predict_trajectory(
    problem: Problem, n_steps: int, rate: float, *, momentum: float, modes: int, compare: bool
) -> PredictedTrajectory:
    """Loss of ``n_steps`` of gradient descent by the quadratic model at the present weights."""
    descent = Descent(problem)
    loss, gradient = descent.at(descent.start)
    size = min(modes, problem.size)
    operator = Hessian(problem)
    values, slopes = krylov_modes(operator, gradient, size)
    losses = _quadratic_losses(loss, values, slopes, n_steps, rate, momentum)
    top = float(values.max(initial=0.0))
    critical = 2 * (1 + momentum) / top if top > 0 else math.inf
    weights = slopes**2
    return PredictedTrajectory(
        losses=torch.from_numpy(losses),
        actual=descent.run(n_steps, rate, momentum) if compare else None,
        learning_rate=rate,
        momentum=momentum,
        eigenvalues=torch.from_numpy(values),
        weights=torch.from_numpy(weights),
        exact_steps=n_steps if len(values) < size else min(n_steps, len(values)),
        critical_learning_rate=critical,
        converges=rate < critical,
        top_share=float(weights[values > 0.1 * top].sum() / max(weights.sum(), 1e-300)),
        products=operator.products,
    )


def krylov_modes(operator: Hessian, gradient: Tensor, size: int) -> tuple[Array, Array]:
    """Ritz values (m,) of the Krylov space of the gradient, and the gradient's coordinates."""
    basis = KrylovBasis(operator, size + 1)
    norm = float(torch.linalg.vector_norm(gradient))
    if not basis.add(gradient):
        return np.zeros(1), np.zeros(1)
    for _ in track(range(size), "Lanczos from the gradient", total=size):
        if basis.expand() == 0.0:
            break
    ritz = basis.ritz()
    return ritz.values, norm * ritz.coordinates[0]


def _quadratic_losses(
    loss: float, values: Array, slopes: Array, steps: int, rate: float, momentum: float
) -> Array:
    position, velocity = np.zeros_like(values), np.zeros_like(values)
    losses = [loss]
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(steps):
            velocity = momentum * velocity + slopes + values * position
            position = position - rate * velocity
            losses.append(loss + float(slopes @ position + 0.5 * values @ position**2))
    found: Array = np.nan_to_num(np.array(losses), nan=np.inf)
    return found


def critical_rate(
    problem: Problem,
    *,
    momentum: float,
    ratios: tuple[float, ...],
    steps: int,
    seed: int,
) -> CriticalLearningRate:
    """2(1 + μ)/λmax and its check by training at ``ratios`` of it."""
    operator = Hessian(problem)
    found = eigenpairs(operator, k=1, which="largest", tol=1e-6, seed=seed)
    top = found.value
    if top <= 0:
        raise ValueError(
            f"the largest eigenvalue is {top:.3g}: the loss is nowhere convex here and no learning "
            "rate is critical."
        )
    factor = 2 * (1 + momentum)
    low, high = (float(bound[0]) for bound in found.interval)
    value = factor / top
    descent = Descent(problem)
    # deviations must be small against the third derivative and large against rounding: float64
    precise = descent if problem.dtype == torch.float64 else Descent(in_double(problem))
    top_vector = in_float64(found.vectors[:, 0])
    growth, losses = [], []
    for ratio in ratios:
        growth.append(
            _growth(precise.at, precise.start, top_vector, ratio * value, momentum, steps)
        )
        losses.append(descent.run(steps, ratio * value, momentum, what="near the critical rate"))
    return CriticalLearningRate(
        value=value,
        interval=(factor / high, factor / low if low > 0 else math.inf),
        sharpness=top,
        momentum=momentum,
        ratios=ratios,
        growth=tuple(growth),
        expected=tuple(_radius(ratio * value * top, momentum) for ratio in ratios),
        losses=tuple(losses),
        products=operator.products,
        converged=found.converged,
    )


def in_double(problem: Problem) -> Problem:
    """The same problem with a float64 copy of the model and of real-valued inputs."""
    model = copy.deepcopy(problem.model).to(float64_device(problem.device)).double()

    def widened(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = leaf.to(float64_device(leaf.device))
        return moved.double() if leaf.is_floating_point() else moved

    data = [
        (tree_map(widened, batch.inputs), tree_map(widened, batch.targets))
        for batch in problem.batches()
    ]
    return Problem(
        model,
        problem.loss,
        data,
        parameters=list(problem.parameter_names),
        distributed=problem.distributed,
    )


def _radius(step: float, momentum: float) -> float:
    """Spectral radius of heavy ball on a mode with ηλ = ``step``: [[1 + μ − ηλ, −μ], [1, 0]]."""
    matrix = np.array([[1 + momentum - step, -momentum], [1.0, 0.0]])
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def _growth(
    at: Callable[[Tensor], tuple[float, Tensor]], start: Tensor, direction: Tensor, rate: float,
    momentum: float, steps: int,
) -> float:  # fmt: skip
    """Growth a step of a small deviation along ``direction`` under training.

    Training runs on L(w) − ∇L(w₀)·w, whose stationary point is w₀ itself: what grows or shrinks is
    then curvature alone, also at weights that are not a minimum. Both signs of the deviation are
    run and subtracted, which removes the third derivative.
    """
    _, slope = at(start)
    unit = direction.to(start) / torch.linalg.vector_norm(direction)
    # the amplitude at which rounding of the gradient and the third derivative are both small
    size = torch.finfo(start.dtype).eps ** (1 / 3) * (1 + float(torch.linalg.vector_norm(start)))
    pair = [start + sign * size * unit for sign in (1.0, -1.0)]
    speed = [torch.zeros_like(start) for _ in pair]
    seen: list[float] = []
    for _ in range(steps):
        for side in range(2):
            speed[side] = momentum * speed[side] + at(pair[side])[1] - slope
            pair[side] = pair[side] - rate * speed[side]
        apart = (pair[0] - pair[1]) / (2 * size)
        along = float(apart @ unit)
        beside = float(torch.linalg.vector_norm(apart - along * unit))
        # negative curvature amplifies rounding by 1 + η|λmin| a step until it hides the mode
        if len(seen) >= 3 and beside > 0.1 * max(abs(along), seen[-1]):
            break
        seen.append(abs(along))
    amplitude, steps = np.array(seen), len(seen)
    if momentum == 0.0:
        return float(amplitude[-1] ** (1 / steps))
    # with momentum the first steps are a transient: compare the envelope of two later windows
    half = steps // 2
    early, late = amplitude[:half].max(), amplitude[half:].max()
    return float((late / early) ** (1 / max(half, 1)))
