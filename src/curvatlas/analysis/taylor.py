"""The Taylor framework: what value, slope, curvature and third order say about a loss, checked.

>>> analyzer = TaylorExpansionAnalyzer(model)                                     # doctest: +SKIP
>>> found = analyzer.compute_taylor_coefficients(x, y, displacement=d)            # doctest: +SKIP
>>> found.constant, found.linear, found.quadratic, found.cubic, found.remainder   # doctest: +SKIP
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.analysis.taylor_line import (
    Difference,
    Displacement,
    Line,
    flat_displacement,
    fourth_derivative_bound,
    third_by_differences,
    towards,
    within,
)
from curvatlas.analysis.taylor_observed import observed_curvature
from curvatlas.analysis.taylor_result import (
    CriticalLearningRate,
    ObservedCurvature,
    PredictedTrajectory,
    TaylorExpansion,
    TrustRadius,
)
from curvatlas.analysis.taylor_trajectory import critical_rate, predict_trajectory
from curvatlas.problem import Loss, Problem
from curvatlas.problem.parameter_choice import Parameters

LossLike = str | Callable[[Any, Any], Tensor] | Loss


class TaylorExpansionAnalyzer:
    """Local models of a network's loss, each compared with the loss itself.

    Data go to the methods: a batch as ``(x, y)``, or anything ``Problem`` takes as one argument.
    Methods that are given none use the data of the last call.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: LossLike = "cross_entropy",
        parameters: Parameters | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.parameters = parameters
        self._problem: Problem | None = None

    @classmethod
    def from_problem(cls, problem: Problem) -> TaylorExpansionAnalyzer:
        """An analyzer whose methods use the problem's model, loss, data and parameters."""
        names = list(problem.parameter_names)
        analyzer = cls(problem.model, loss=problem.loss, parameters=names)
        analyzer._problem = problem
        return analyzer

    def compute_taylor_coefficients(
        self,
        x: Any = None,
        y: Any = None,
        other_x: Any = None,
        other_y: Any = None,
        *,
        displacement: Displacement | None = None,
        checkpoint: nn.Module | Mapping[str, Tensor] | None = None,
        loss: LossLike | None = None,
        accuracy: float = 0.01,
        bound_points: int = 5,
        check: bool = True,
    ) -> TaylorExpansion:
        r"""Terms of L(θ + d) = L + g·d + ½ dᵀHd + ⅙ ∂³L[d, d, d] + remainder.

        With a second data set (``other_x``, ``other_y``) every term is that of L_other − L: k + 1
        samples against k, or two data sets. ``checkpoint`` takes d from the present weights to
        those of another model or state dict. ``bound_points`` = 0 leaves out the remainder's bound
        and the radii, which take the fourth derivative at so many points of the segment; ``check``
        compares the third derivative with differences of the second.
        """
        first, second = _datasets(x, y, other_x, other_y)
        problem = self._problem_of(first, loss)
        if (displacement is None) == (checkpoint is None):
            raise ValueError(
                "give either displacement= or checkpoint=: where the loss is expanded."
            )
        direction = (
            flat_displacement(problem, displacement)
            if displacement is not None
            else towards(problem, checkpoint)  # type: ignore[arg-type]
        )
        line: Line | Difference = Line(problem, direction)
        if second is not None:
            line = Difference(Line(problem, direction), Line(problem.with_data(second), direction))
        return _expansion(line, accuracy, bound_points, check, compared=second is not None)

    def radius(
        self,
        x: Any = None,
        y: Any = None,
        *,
        direction: Displacement | None = None,
        accuracy: float = 0.01,
        order: int = 2,
        loss: LossLike | None = None,
    ) -> TrustRadius:
        """How far the order-2 (or 3) model predicts the change to ``accuracy`` (default: −g)."""
        if order not in (2, 3):
            raise ValueError(f"order must be 2 or 3, got {order}.")
        problem = self._problem_of(_datasets(x, y, None, None)[0], loss)
        towards_ = (
            -problem.gradient() if direction is None else flat_displacement(problem, direction)
        )
        norm = float(torch.linalg.vector_norm(towards_))
        if norm == 0:
            raise ValueError("the direction is zero: give direction=.")
        return _trust_radius(problem, towards_ / norm, accuracy, order)

    def predict_convergence_trajectory(
        self,
        n_steps: int,
        learning_rate: float,
        x: Any = None,
        y: Any = None,
        *,
        momentum: float = 0.0,
        modes: int = 64,
        compare: bool = True,
        loss: LossLike | None = None,
    ) -> PredictedTrajectory:
        """Full-batch gradient descent by the quadratic model, and (``compare``) the real run.

        δ ← (I − ηH) δ − ηg in the ``modes`` eigenspaces the gradient meets; the model's own weights
        are left as they are.
        """
        if n_steps < 1 or not learning_rate > 0 or not 0 <= momentum < 1 or modes < 1:
            raise ValueError(
                f"need n_steps ≥ 1, learning_rate > 0, 0 ≤ momentum < 1 and modes ≥ 1, got "
                f"{n_steps}, {learning_rate}, {momentum}, {modes}."
            )
        problem = self._problem_of(_datasets(x, y, None, None)[0], loss)
        return predict_trajectory(
            problem, n_steps, learning_rate, momentum=momentum, modes=modes, compare=compare
        )

    def critical_learning_rate(
        self,
        x: Any = None,
        y: Any = None,
        *,
        momentum: float = 0.0,
        ratios: tuple[float, ...] = (0.95, 1.05),
        steps: int = 30,
        seed: int = 0,
        loss: LossLike | None = None,
    ) -> CriticalLearningRate:
        """2(1 + μ)/λmax, and training at ``ratios`` of it to see whether deviations grow."""
        problem = self._problem_of(_datasets(x, y, None, None)[0], loss)
        return critical_rate(problem, momentum=momentum, ratios=ratios, steps=steps, seed=seed)

    def estimate_hessian_from_trajectory(
        self,
        trajectory: Tensor | Sequence[float] | Sequence[Tensor],
        learning_rate: float | None = None,
        *,
        gradients: Tensor | Sequence[Tensor] | None = None,
        momentum: float = 0.0,
    ) -> ObservedCurvature:
        """Curvature from losses (T,) or weights (T, P) seen in training, with an interval.

        Losses need the learning rate; weights need it too (plain gradient descent with
        ``momentum``), or the ``gradients`` (T, P) at those weights.
        """
        return observed_curvature(trajectory, learning_rate, gradients, momentum)

    def _problem_of(self, data: Any, loss: LossLike | None) -> Problem:
        if data is None:
            if self._problem is None:
                raise ValueError("no data yet: pass (x, y) or data to this call.")
            if loss is None:
                return self._problem
            data = self._problem.data
        chosen = self.loss if loss is None else loss
        self._problem = Problem(self.model, chosen, data, parameters=self.parameters)
        return self._problem


def _datasets(x: Any, y: Any, other_x: Any, other_y: Any) -> tuple[Any, Any]:
    """(data, other data) from whichever way they were passed; None where there is none."""
    if x is not None and y is not None and not isinstance(y, Tensor):
        if other_x is not None or other_y is not None:
            raise ValueError("two data sets were given and a third: pass x, y, other_x, other_y.")
        return x, y  # two data sets, one an argument
    return (x if y is None else (x, y)), (other_x if other_y is None else (other_x, other_y))


def _expansion(
    line: Line | Difference, accuracy: float, points: int, check: bool, *, compared: bool
) -> TaylorExpansion:
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
        compared=compared,
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


def _trust_radius(problem: Problem, unit: Tensor, accuracy: float, order: int) -> TrustRadius:
    line = Line(problem, unit)
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
        radius=radius, accuracy=accuracy, order=order, limited=limited, worst_inside=worst,
        measured_radius=fails,
    )  # fmt: skip


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
