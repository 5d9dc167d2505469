r"""Sharpness as the largest rise of the loss near the weights, found by ascent and certified.

    SAM   max over ‖ε‖ ≤ ρ of L(w + ε) − L(w)                   (Foret et al. 2021)
    ASAM  the same over ‖ε ⊘ |w|‖ ≤ ρ: ε = |w| ⊙ u, ‖u‖ ≤ ρ      (Kwon et al. 2021, η = 0)

Both are the maximum of f(u) = L(w + t ⊙ u) on a ball, t = 1 or |w|. Projected gradient ascent with
the step lengths of Barzilai and Borwein starts at the global maximum of the quadratic model (a
trust-region problem, solved exactly in a Krylov space), along the gradient and at random points of
the sphere; the best of them are followed until they stand still. What is found is a lower bound of
the maximum. Its certificate: at a maximum on the sphere ∇f = μ u with μ ≥ 0, and the Hessian of f
minus μ is negative on the tangents of the sphere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvatlas.analysis.landscape.line import value_and_gradient
from curvatlas.linear_operator import DiagonalOperator, LinearOperator, Tags
from curvatlas.operators.curvature import Hessian
from curvatlas.problem import Problem
from curvatlas.progress import bar
from curvatlas.results import Result
from curvatlas.spectra.checkpoint import generator
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.trust_region import newton_step

_STILL = 1e-4  # ‖∇f − μu‖/‖∇f‖ at which an ascent stands still
_FIRST_LOOK = 15  # steps of every start before the best are chosen
_FOLLOWED = 3  # starts that are followed to the end
_ALIKE = 0.01  # starts within this share of the best found the same maximum


@dataclass(frozen=True, kw_only=True)
class Sharpness(Result):
    """max L(w + ε) − L(w) over a neighbourhood, with what certifies it as a maximum."""

    quantity: str  # "SAM" or "ASAM"
    value: float  # the largest rise found: a lower bound of the maximum
    radius: float  # ρ
    quadratic: float  # the global maximum of the quadratic model there
    stationarity: float  # ‖∇f − μu‖/‖∇f‖: zero at a maximum
    multiplier: float  # μ = u·∇f/ρ²: at least zero at a maximum on the sphere
    margin: float  # λmax of the tangential Hessian − μ, over |μ|: below zero at a strict maximum
    starts: int
    agreeing: int  # starts that ended within 1 % of the best
    gradients: int
    products: int
    direction: Tensor  # (P,) the maximiser ε

    @property
    def certified(self) -> bool:
        """Whether first and second order both say that this is a maximum of its neighbourhood."""
        return self.stationarity <= 1e-2 and self.multiplier >= 0 and self.margin <= 1e-3

    @property
    def converged(self) -> bool:
        return self.certified

    def __str__(self) -> str:
        state = "a certified local maximum" if self.certified else "NOT certified as a maximum"
        return (
            f"{self.quantity} sharpness {self.value:.6g} at ρ = {self.radius:g} (quadratic model "
            f"{self.quadratic:.4g}): {state}, stationary to {self.stationarity:.1e}, "
            f"{self.agreeing} of {self.starts} starts agree, {self.gradients} gradients"
        )


def sharpness_by_ascent(
    problem: Problem,
    *,
    radius: float,
    adaptive: bool = False,
    starts: int = 6,
    steps: int = 150,
    seed: int = 0,
) -> Sharpness:
    """SAM sharpness, or ASAM's with ``adaptive``, on all data of the problem.

    starts: random ones, beside the quadratic model's maximum and the gradient;  steps: gradients
    of each of the best.
    """
    if not radius > 0 or not math.isfinite(radius):
        raise ValueError(f"the radius of a sharpness is a positive number, got {radius!r}.")
    if starts < 0 or steps < 1:
        raise ValueError(f"need starts ≥ 0 and steps ≥ 1, got {starts} and {steps}.")
    problem.check()
    problem.require_one_process("sharpness by ascent")
    center = problem.parameters
    scale = center.abs() if adaptive else torch.ones_like(center)
    ball = _Ball(problem, center, scale, radius)
    base, slope = ball.at(torch.zeros_like(center))
    operator = Hessian(problem)
    diagonal = DiagonalOperator(scale)
    bent: LinearOperator = diagonal @ operator @ diagonal if adaptive else operator
    quadratic, points = 0.0, []
    if float(torch.linalg.vector_norm(slope)) > 0:
        step = newton_step(-bent, -slope, radius=radius, rtol=1e-3)
        quadratic = step.decrease
        points += [step.value, radius * slope / torch.linalg.vector_norm(slope)]
    random = generator(seed)
    for _ in range(starts):
        drawn = torch.randn(len(center), generator=random, dtype=torch.float64, device="cpu")
        drawn = drawn.to(center)
        points.append(radius * drawn / torch.linalg.vector_norm(drawn))
    if not points:  # a stationary point without random starts
        raise ValueError("the gradient is zero here: give starts ≥ 1 to climb from.")
    with bar("ascent", total=None) as progress:
        ends = [ball.climb(_State(u, *ball.at(u)), _FIRST_LOOK, progress.update) for u in points]
        ends.sort(key=lambda end: -end.value)
        best = [ball.climb(end, steps, progress.update) for end in ends[:_FOLLOWED]]
    ends = sorted([*best, *ends[_FOLLOWED:]], key=lambda end: -end.value)
    top = ends[0]
    multiplier = float(top.u @ top.gradient) / radius**2
    margin, products = _margin(problem, center + scale * top.u, scale, top.u, multiplier, seed)
    rise = top.value - base
    return Sharpness(
        quantity="ASAM" if adaptive else "SAM",
        value=rise,
        radius=radius,
        quadratic=quadratic,
        stationarity=ball.residual(top),
        multiplier=multiplier,
        margin=margin,
        starts=len(points),
        agreeing=sum(end.value - base >= (1 - _ALIKE) * rise for end in ends),
        gradients=ball.gradients,
        products=operator.products + products,
        direction=scale * top.u,
    )


@dataclass(frozen=True)
class _State:
    u: Tensor  # (P,) ‖u‖ ≤ ρ
    value: float
    gradient: Tensor  # (P,) of f


class _Ball:
    """f(u) = L(w + t ⊙ u) on ‖u‖ ≤ ρ."""

    def __init__(self, problem: Problem, center: Tensor, scale: Tensor, radius: float) -> None:
        self.problem, self.center, self.scale, self.radius = problem, center, scale, radius
        self.gradients = 0

    def at(self, u: Tensor) -> tuple[float, Tensor]:
        """f and ∇f = t ⊙ ∇L; a point where the loss is no number is as low as can be."""
        self.gradients += 1
        value, gradient = value_and_gradient(self.problem, self.center + self.scale * u)
        return (value if math.isfinite(value) else -math.inf), self.scale * gradient

    def inside(self, u: Tensor) -> Tensor:
        length = float(torch.linalg.vector_norm(u))
        return u * (self.radius / length) if length > self.radius else u

    def residual(self, state: _State) -> float:
        """‖∇f − μu‖/‖∇f‖ on the sphere, 1 for an interior point that still has a slope."""
        size = float(torch.linalg.vector_norm(state.gradient))
        if size == 0.0:
            return 0.0
        along = float(state.u @ state.gradient) / max(float(state.u @ state.u), 1e-300)
        outward = along > 0 and float(torch.linalg.vector_norm(state.u)) > 0.999 * self.radius
        rest = state.gradient - along * state.u if outward else state.gradient
        return float(torch.linalg.vector_norm(rest)) / size

    def climb(self, state: _State, steps: int, count: Callable[[int], object]) -> _State:
        """Projected gradient ascent that never goes down."""
        length = self.radius / max(float(torch.linalg.vector_norm(state.gradient)), 1e-300)
        for _ in range(steps):
            if self.residual(state) <= _STILL:
                break
            count(1)
            u = self.inside(state.u + length * state.gradient)
            moved = _State(u, *self.at(u))
            ahead = float(state.gradient @ (u - state.u))
            if not moved.value >= state.value + 1e-4 * ahead:
                length /= 4
                if length * float(torch.linalg.vector_norm(state.gradient)) < 1e-12 * self.radius:
                    break
                continue
            length = self._next(state, moved, length)
            state = moved
        return state

    def _next(self, before: _State, after: _State, length: float) -> float:
        """The step length of Barzilai and Borwein on the sphere.

        The curvature along the step s is that of f minus the multiplier (the sphere bends away):
        sᵀ(∇f' − ∇f)/sᵀs − μ, and its inverse, where it is negative, the length.
        """
        step = after.u - before.u
        square = float(step @ step)
        if square == 0.0:
            return length
        multiplier = float(after.u @ after.gradient) / self.radius**2
        bend = float(step @ (after.gradient - before.gradient)) / square - multiplier
        # u + a∇f is scaled back to the sphere by 1/(1 + aμ): in the tangent a step of a/(1 + aμ)
        wanted = 1 / -bend if bend < 0 else math.inf
        bound = 1e3 * self.radius / max(float(torch.linalg.vector_norm(after.gradient)), 1e-300)
        if multiplier > 0 and wanted * multiplier >= 1:
            return bound
        if multiplier > 0:
            wanted = wanted / (1 - wanted * multiplier)
        return min(wanted, bound)


class _Tangent(LinearOperator):
    """Q T H T Q on the tangents of a sphere at u, Q = I − uuᵀ/‖u‖²."""

    def __init__(self, operator: LinearOperator, scale: Tensor, u: Tensor) -> None:
        super().__init__(
            operator.shape, dtype=operator.dtype, device=operator.device, tags=Tags(symmetric=True)
        )
        self._operator, self._scale = operator, scale[:, None]
        self._normal = u / torch.linalg.vector_norm(u)

    def _columns(self, columns: Tensor) -> Tensor:
        image = self._scale * (self._operator @ (self._scale * self._flat(columns)))
        return self._flat(image)

    def _flat(self, columns: Tensor) -> Tensor:
        return columns - torch.outer(self._normal, self._normal @ columns)


def _margin(
    problem: Problem, weights: Tensor, scale: Tensor, u: Tensor, multiplier: float, seed: int
) -> tuple[float, int]:
    """(λmax of the tangential Hessian of f at the maximiser − μ)/|μ|, and the products."""
    moved = moved_to(problem, weights)
    operator = Hessian(moved)
    pairs = eigenpairs(
        _Tangent(operator, scale, u), k=1, which="largest", tol=1e-3, seed=seed, data_error=False
    )
    top = max(float(pairs.values[0]), 0.0)  # the normal direction itself has the value zero
    return (top - multiplier) / max(abs(multiplier), 1e-300), operator.products


def moved_to(problem: Problem, weights: Tensor) -> Problem:
    """The same problem for a copy of the model with the flat vector ``weights`` (P,)."""
    model = problem.copied_model()
    named = dict(model.named_parameters())
    layout = problem.layout
    with torch.no_grad():
        pieces = layout.split(weights)
        for name, piece in zip(layout.names, pieces, strict=True):
            named[name].copy_(piece.squeeze(0))
    return problem.with_model(model)
