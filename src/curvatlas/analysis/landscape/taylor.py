"""The Taylor framework: what value, slope, curvature and third order say about a loss, checked.

>>> found = taylor_expansion(problem, displacement)                                # doctest: +SKIP
>>> found.constant, found.linear, found.quadratic, found.cubic, found.remainder   # doctest: +SKIP
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.utils._pytree import tree_map

from curvatlas.analysis.landscape.horizon import QuadraticDescent
from curvatlas.analysis.landscape.line import (
    Difference,
    Displacement,
    Line,
    flat_displacement,
    fourth_derivative_bound,
    third_by_differences,
    value_and_gradient,
    within,
)
from curvatlas.analysis.landscape.taylor_result import (
    CriticalLearningRate,
    ObservedCurvature,
    PredictedTrajectory,
    TaylorExpansion,
    TrustRadius,
)
from curvatlas.operators.curvature import Hessian
from curvatlas.precision import float64_device, in_float64
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.spectra.eigenpairs import eigenpairs

_OVERFLOW = 1e12  # a run whose loss exceeds this has diverged
_NEGLIGIBLE = 1e-8  # directions below this share of the largest step carry only rounding


def observed_curvature(
    trajectory: Tensor | Sequence[float] | Sequence[Tensor] | Iterable[Mapping[str, Any]],
    learning_rate: float | None = None,
    *,
    gradients: Tensor | Sequence[Tensor] | None = None,
    momentum: float = 0.0,
) -> ObservedCurvature:
    """Curvature from losses (T,) or weights (T, P) seen in training, with an interval.

    No second derivative is computed. Rows of a log, mappings with ``loss``, are their losses.
    Losses need the learning rate; weights need it too (plain gradient descent with ``momentum``),
    or the ``gradients`` (T, P) at those weights.
    """
    stacked = _stacked(_losses_of(trajectory))
    if not bool(torch.isfinite(stacked).all()):
        raise ValueError("the trajectory holds NaN or infinite values: cut it before them.")
    if learning_rate is not None and not learning_rate > 0:
        raise ValueError(f"the learning rate must be positive, got {learning_rate!r}.")
    if stacked.ndim == 1:
        if learning_rate is None:
            raise ValueError(
                "losses alone give a rate: pass the learning_rate they were made with."
            )
        return _from_losses(stacked.numpy(), learning_rate)
    if gradients is not None:
        slopes = _stacked(gradients)
    elif learning_rate is None:
        raise ValueError("weights alone have no scale: pass gradients= or the learning_rate.")
    else:
        velocity = (stacked[:-1] - stacked[1:]) / learning_rate
        slopes = velocity.clone()
        slopes[1:] -= momentum * velocity[:-1]
    count = min(len(stacked), len(slopes))
    if count < 3:
        raise ValueError(f"a trajectory of {count} points shows no curvature: give at least 3.")
    return _from_weights(stacked[:count], slopes[:count], learning_rate)


def _losses_of(trajectory: Any) -> Any:
    """The losses of rows such as {"step": 3, "loss": 0.7}; any other trajectory as it is."""
    if isinstance(trajectory, Tensor):
        return trajectory
    rows = list(trajectory)
    if not rows or not isinstance(rows[0], Mapping):
        return rows
    absent = next((row for row in rows if "loss" not in row), None)
    if absent is not None:
        raise ValueError(f"every row of a trajectory needs 'loss', one has {sorted(absent)}.")
    return [float(row["loss"]) for row in rows]


def _stacked(values: Tensor | Sequence[float] | Sequence[Tensor]) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    if len(values) and isinstance(values[0], Tensor):
        rows = [torch.as_tensor(v).detach().cpu().double().reshape(-1) for v in values]
        stacked = torch.stack(rows)
        return stacked.squeeze(1) if stacked.shape[1] == 1 else stacked
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


def _from_weights(weights: Tensor, gradients: Tensor, rate: float | None) -> ObservedCurvature:
    r"""Steps S = w_{t+1} − w_t and changes Y = g_{t+1} − g_t: Y = H S in a quadratic landscape.

    In an orthonormal basis Q of the span of S, A = Qᵀ Y R⁺ is the projected Hessian: its symmetric
    part gives Ritz values, its antisymmetric part, zero for a quadratic, measures how much the
    landscape changed on the way and so the uncertainty.
    """
    steps = (weights[1:] - weights[:-1]).T  # (P, T − 1)
    changes = (gradients[1:] - gradients[:-1]).T
    directional = (steps * changes).sum(0) / (steps * steps).sum(0).clamp_min(1e-300)
    q, sizes, right = torch.linalg.svd(steps, full_matrices=False)
    keep = sizes > _NEGLIGIBLE * sizes[0]
    q, sizes, right = q[:, keep], sizes[keep], right[keep]
    action = q.T @ changes @ right.T / sizes  # (m, m), H in the basis q
    symmetric, skew = (action + action.T) / 2, (action - action.T) / 2
    values = torch.linalg.eigvalsh(symmetric).flip(0)
    noise = float(torch.linalg.matrix_norm(skew, 2))
    scale = float(torch.linalg.matrix_norm(symmetric, 2))
    top = float(values[0])
    rounding = 1e-12 * scale * float(sizes[0] / sizes[-1])
    half = 1.96 * noise + rounding
    return ObservedCurvature(
        value=top,
        interval=(top - half, top + half),
        values=values,
        steps=len(weights),
        source="weights",
        asymmetry=noise / max(scale, 1e-300),
        directional=directional,
        learning_rate=rate,
    )


def _from_losses(losses: np.ndarray, rate: float) -> ObservedCurvature:
    """The decrease Δ_t = L_t − L_{t+1} of a mode falls like (1 − ηλ)^{2t}.

    So the rate of the slowest mode still alive is λ = (1 − (Δ_{t+1}/Δ_t)^½)/η.
    """
    drops = losses[:-1] - losses[1:]
    floor = 1e-13 * np.abs(losses).max()
    alive = np.flatnonzero(drops <= floor)
    drops = drops[: alive[0]] if len(alive) else drops  # up to where rounding or noise takes over
    if len(drops) < 3:
        raise ValueError(
            "the losses do not fall for three steps in a row: a rate needs a decreasing start."
        )
    series = (1 - np.sqrt(drops[1:] / drops[:-1])) / rate
    tail = np.log(drops[len(drops) // 2 :]) if len(drops) >= 6 else np.log(drops)
    fit = stats.linregress(np.arange(len(tail)), tail)
    spread = (stats.t.ppf(0.975, len(tail) - 2) if len(tail) > 2 else 12.7) * fit.stderr
    value, *ends = (
        (1 - math.exp(slope / 2)) / rate
        for slope in (fit.slope, fit.slope + spread, fit.slope - spread)
    )
    return ObservedCurvature(
        value=value,
        interval=(min(ends), max(ends)),
        values=torch.from_numpy(series.copy()),
        steps=len(losses),
        source="losses",
        asymmetry=0.0,
        directional=torch.empty(0, dtype=torch.float64),
        learning_rate=rate,
    )


class Descent:
    """The loss and gradient of a problem at any weights, the model's own left untouched."""

    def __init__(self, problem: Problem) -> None:
        problem.check()
        problem.require_one_process("a trajectory of gradient descent")
        self.problem = problem
        self.start = problem.parameters

    def at(self, weights: Tensor) -> tuple[float, Tensor]:
        """L(w) and ∇L(w), (P,)."""
        return value_and_gradient(self.problem, weights)

    def run(
        self, steps: int, rate: float, momentum: float = 0.0, *, what: str = "gradient descent"
    ) -> tuple[Tensor, Tensor]:
        """Losses (≤ steps + 1,) of full-batch gradient descent, and ‖w_t − w_0‖ at each of them.

        Both end early where the loss overflows.
        """
        weights, velocity = self.start.clone(), torch.zeros_like(self.start)
        losses: list[float] = []
        distances: list[float] = []
        for _ in track(range(steps + 1), what, total=steps + 1):
            value, gradient = self.at(weights)
            if not math.isfinite(value) or value > _OVERFLOW:
                break
            losses.append(value)
            distances.append(float(torch.linalg.vector_norm(weights - self.start)))
            velocity = momentum * velocity + gradient
            weights = weights - rate * velocity
        return tuple(torch.tensor(t, dtype=torch.float64) for t in (losses, distances))  # type: ignore[return-value]


def predict_trajectory(
    problem: Problem,
    n_steps: int,
    rate: float,
    *,
    momentum: float = 0.0,
    modes: int = 64,
    compare: bool = True,
    tolerance: float = 0.1,
) -> PredictedTrajectory:
    """Loss of ``n_steps`` of gradient descent by the quadratic model at the present weights.

    By Gauss quadrature the loss in the Krylov space of the gradient is that of the full quadratic
    model, exactly for the first ``modes`` steps. The outliers of the top eigenspace are Ritz values
    of their own, the bulk what remains. compare: run gradient descent too, the model's own weights
    left as they are. ``horizon`` of the result is the number of steps for which the predicted
    change of the loss is within ``tolerance`` (relative) of the real one, judged without the real
    run: from the remainders of loss and gradient at some predicted points (``horizon.py``).
    """
    if n_steps < 1 or not rate > 0 or not 0 <= momentum < 1 or modes < 1:
        raise ValueError(
            f"need n_steps ≥ 1, learning_rate > 0, 0 ≤ momentum < 1 and modes ≥ 1, got "
            f"{n_steps}, {rate}, {momentum}, {modes}."
        )
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance lies between 0 and 1, got {tolerance!r}.")
    descent = Descent(problem)
    size = min(modes, problem.size)
    operator = Hessian(problem)
    model = QuadraticDescent(
        operator,
        descent.at,
        descent.start,
        size=size,
        steps=n_steps,
        rate=rate,
        momentum=momentum,
    )
    actual, moved = descent.run(n_steps, rate, momentum) if compare else (None, None)
    values = model.values
    top = float(values.max(initial=0.0))
    critical = 2 * (1 + momentum) / top if top > 0 else math.inf
    weights = model.slopes**2
    return PredictedTrajectory(
        losses=torch.from_numpy(model.losses),
        actual=actual,
        distances=torch.from_numpy(model.lengths),
        actual_distances=moved,
        learning_rate=rate,
        momentum=momentum,
        eigenvalues=torch.from_numpy(values),
        weights=torch.from_numpy(weights),
        exact_steps=n_steps if len(values) < size else min(n_steps, len(values)),
        critical_learning_rate=critical,
        converges=rate < critical,
        top_share=float(weights[values > 0.1 * top].sum() / max(weights.sum(), 1e-300)),
        products=operator.products,
        horizon=model.horizon(tolerance),
        tolerance=tolerance,
    )


def critical_rate(
    problem: Problem,
    *,
    momentum: float = 0.0,
    ratios: tuple[float, ...] = (0.95, 1.05),
    steps: int = 30,
    seed: int = 0,
) -> CriticalLearningRate:
    """2(1 + μ)/λmax, and training at ``ratios`` of it to see whether deviations grow."""
    operator = Hessian(problem)
    largest = eigenpairs(operator, k=1, which="largest", tol=1e-6, seed=seed)
    top = largest.value
    if top <= 0:
        raise ValueError(
            f"the largest eigenvalue is {top:.3g}: the loss is nowhere convex here and no learning "
            "rate is critical."
        )
    factor = 2 * (1 + momentum)
    low, high = (float(bound[0]) for bound in largest.interval)
    value = factor / top
    descent = Descent(problem)
    # deviations must be small against the third derivative and large against rounding: float64
    precise = descent if problem.dtype == torch.float64 else Descent(in_double(problem))
    top_vector = in_float64(largest.vectors[:, 0])
    growth, losses = [], []
    for ratio in ratios:
        growth.append(
            _growth(precise.at, precise.start, top_vector, ratio * value, momentum, steps)
        )
        run, _ = descent.run(steps, ratio * value, momentum, what="near the critical rate")
        losses.append(run)
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
        converged=largest.converged,
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
    at: Callable[[Tensor], tuple[float, Tensor]],
    start: Tensor,
    direction: Tensor,
    rate: float,
    momentum: float,
    steps: int,
) -> float:
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


def taylor_expansion(
    problem: Problem,
    displacement: Displacement,
    *,
    between: tuple[Problem, Problem] | None = None,
    accuracy: float = 0.01,
    bound_points: int = 5,
    check: bool = True,
) -> TaylorExpansion:
    r"""Terms of L(θ + d) = L + g·d + ½ dᵀHd + ⅙ ∂³L[d, d, d] + remainder.

    between: two losses of the same parameters; every term is then that of the second less the
        first.
    bound_points: points of the segment at which the fourth derivative is taken, for the remainder's
        bound and the radii; 0 leaves them out.
    check: compare the third derivative with differences of the second.
    """
    direction = flat_displacement(problem, displacement)
    line: Line | Difference = Line(problem, direction)
    if between is not None:
        line = Difference(*(Line(one, direction) for one in between))
    points = bound_points
    value, slope, second, third = line.derivatives(3)
    (actual,) = line.values([1.0])
    third_error = 0.0
    if check:
        third, third_error = _checked_third(line, third, scale=abs(second) + abs(third))
    linear, quadratic, cubic = slope, second / 2, third / 6
    bound = radius2 = radius3 = None
    if points:
        if points < 3:
            raise ValueError(f"bound_points must be 0 or at least 3, got {points}.")
        bound = fourth_derivative_bound(line, points=points) / 24
        change = (linear, quadratic, 0.0)
        radius2 = line.length * within((abs(cubic) + third_error / 6, bound), change, accuracy)
        change = (linear, quadratic, cubic)
        radius3 = line.length * within((third_error / 6, bound), change, accuracy)
    return TaylorExpansion(
        constant=value,
        linear=linear,
        quadratic=quadratic,
        cubic=cubic,
        cubic_error=third_error / 6,
        actual=actual,
        remainder=actual - (value + linear + quadratic + cubic),
        remainder_bound=bound,
        quadratic_remainder_bound=None if bound is None else bound + abs(cubic),
        displacement_norm=line.length,
        accuracy=accuracy,
        quadratic_radius=radius2,
        cubic_radius=radius3,
        compared=between is not None,
        gradient_norm=float(torch.linalg.vector_norm(problem.gradient())),
    )


def _checked_third(line: Line | Difference, third: float, *, scale: float) -> tuple[float, float]:
    """The exact third derivative, or differences with their error where the two disagree.

    An operation whose third backward is wrong (fused kernels nobody wrote for it) cannot be seen
    otherwise: both differentiate the same second derivative, only one through its backward.
    """
    different, error = third_by_differences(line)
    if abs(different - third) <= 10 * error + 1e-5 * scale:
        return third, 0.0
    warnings.warn(
        f"the third derivative along the displacement is {third:.6g} by backward passes but "
        f"{different:.6g} ± {error:.1g} by differences of the second: an operation of the model "
        "has a wrong third derivative; the differences are used.",
        stacklevel=4,
    )
    return different, error + 1e-5 * scale


def trust_radius(
    problem: Problem,
    direction: Displacement | None = None,
    *,
    accuracy: float = 0.01,
    order: int = 2,
) -> TrustRadius:
    """How far the order-2 (or 3) model predicts the change to ``accuracy`` (default: along −g)."""
    if order not in (2, 3):
        raise ValueError(f"order must be 2 or 3, got {order}.")
    towards = -problem.gradient() if direction is None else flat_displacement(problem, direction)
    norm = float(torch.linalg.vector_norm(towards))
    if norm == 0:
        raise ValueError("the direction is zero: give direction=.")
    line = Line(problem, towards / norm)
    _, slope, second, third, fourth = line.derivatives(4)
    # first guess: where the leading error term reaches accuracy × |linear term|
    lead = abs(third) / 6 if order == 2 else abs(fourth) / 24
    power = 2 if order == 2 else 3
    reach = (accuracy * max(abs(slope), 1e-300) / max(lead, 1e-300)) ** (1 / power)
    largest = 10 * (1 + float(torch.linalg.vector_norm(problem.parameters)))
    reach = min(4 * reach, largest)
    radius, limited = 0.0, True
    for _ in range(8):
        bound = fourth_derivative_bound(line, until=reach) / 24
        first = abs(third) / 6 * reach**3 if order == 2 else 0.0
        cubic = third / 6 * reach**3 if order == 3 else 0.0
        share = within(
            (first, bound * reach**4), (slope * reach, second / 2 * reach**2, cubic), accuracy
        )
        radius = share * reach
        limited = share < 1.0
        # the fourth derivative was taken over a longer segment than needed: look again at it
        if 0.5 <= share < 1.0 or (share == 1.0 and reach >= largest):
            break
        reach = min(largest, 2 * reach if share == 1.0 else max(1.5 * radius, reach / 8))
    worst, fails = _measured(line, (slope, second, third), radius, accuracy, order)
    return TrustRadius(
        radius=radius,
        accuracy=accuracy,
        order=order,
        limited=limited,
        worst_inside=worst,
        measured_radius=fails,
    )


def _measured(
    line: Line, terms: tuple[float, float, float], radius: float, accuracy: float, order: int
) -> tuple[float, float]:
    """Worst relative error inside the radius, and the first multiple of it where it is too large.

    Close to θ the change drowns in rounding, so points start at a tenth of the radius.
    """
    if radius == 0:
        return 0.0, 0.0
    points = [radius * share for share in (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)]
    start, *values = line.values([0.0, *points])
    slope, second, third = terms
    worst, fails = 0.0, points[-1]
    for t, value in zip(points, values, strict=True):
        predicted = slope * t + second * t**2 / 2 + (third * t**3 / 6 if order == 3 else 0.0)
        error = abs(predicted - (value - start)) / max(abs(value - start), 1e-300)
        if t <= radius:
            worst = max(worst, error)
        elif error > accuracy:
            fails = t
            break
    return worst, fails
