"""What the Taylor analysis returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from curvatlas.results import Interval, Result, Rows


@dataclass(frozen=True, kw_only=True)
class TaylorExpansion(Result):
    r"""L(θ + d) = constant + linear + quadratic + cubic + remainder, each a term of the sum.

    constant = L(θ), linear = g·d, quadratic = ½ dᵀHd, cubic = ⅙ ∂³L[d, d, d]. With two losses every
    term is that of the difference L_b − L_a.
    """

    constant: float
    linear: float
    quadratic: float
    cubic: float
    cubic_error: float  # 0 when exact; else what differences of two step lengths show
    actual: float  # the loss (or difference of losses) at θ + d
    remainder: float  # actual − (constant + linear + quadratic + cubic)
    remainder_bound: float | None  # max |φ''''|/24 on the segment; None when not asked for
    quadratic_remainder_bound: float | None  # |cubic| + the above
    displacement_norm: float
    accuracy: float  # that the radii refer to
    quadratic_radius: float | None  # ≤ displacement_norm; the quadratic model is within accuracy
    cubic_radius: float | None  # the same with the cubic term
    compared: bool  # a difference of two losses
    gradient_norm: float = float("nan")  # ‖∇L‖ of the first data set at θ

    also = ("delta_loss", "quadratic_coefficient")

    @property
    def delta_loss(self) -> float:
        """The difference of the two losses at θ; of one loss its true change, L(θ + d) − L(θ)."""
        return self.constant if self.compared else self.actual_change

    @property
    def quadratic_coefficient(self) -> float:
        """½ uᵀHu along the unit vector u of the displacement: of t² in L(θ + t u)."""
        square = self.displacement_norm**2
        return self.quadratic / square if square > 0 else 0.0

    @property
    def value(self) -> float:
        """The predicted loss (or difference) at θ + d, all terms."""
        return self.constant + self.linear + self.quadratic + self.cubic

    predicted = value

    @property
    def quadratic_prediction(self) -> float:
        """Without the cubic term."""
        return self.constant + self.linear + self.quadratic

    @property
    def interval(self) -> Interval | None:
        """Where the actual value lies by the remainder's bound."""
        if self.remainder_bound is None:
            return None
        half = self.remainder_bound + self.cubic_error
        return self.value - half, self.value + half

    @property
    def predicted_change(self) -> float:
        """Of the quadratic model, against θ."""
        return self.linear + self.quadratic

    @property
    def actual_change(self) -> float:
        return self.actual - self.constant

    @property
    def relative_error(self) -> float:
        """Of the quadratic model's change, against the actual one."""
        if self.actual_change == 0:
            return 0.0 if self.predicted_change == 0 else float("inf")
        return abs(self.predicted_change - self.actual_change) / abs(self.actual_change)

    @property
    def quadratic_holds(self) -> bool:
        """Whether the radius covers the whole displacement."""
        radius = self.quadratic_radius
        return radius is not None and radius >= self.displacement_norm * (1 - 1e-12)

    def __str__(self) -> str:
        what = "ΔL" if self.compared else "L"
        text = (
            f"{what}(θ + d) = {self.constant:.6g} {self.linear:+.4g} (linear) "
            f"{self.quadratic:+.4g} (quadratic) {self.cubic:+.4g} (cubic) = {self.value:.8g}; "
            f"actual {self.actual:.8g}, remainder {self.remainder:.2g}"
        )
        if self.remainder_bound is not None:
            text += f" (bound {self.remainder_bound:.2g})"
        if self.quadratic_radius is not None:
            text += (
                f"; quadratic model within {self.accuracy:.0%} up to ‖d‖ = "
                f"{self.quadratic_radius:.3g} of {self.displacement_norm:.3g}"
            )
        return text


@dataclass(frozen=True, kw_only=True)
class TrustRadius(Result):
    """How far along a direction a Taylor polynomial predicts the change of the loss."""

    radius: float  # from derivatives: θ's own and the fourth on the segment
    accuracy: float  # relative to the true change
    order: int
    limited: bool  # False: even the largest step tried was within accuracy
    worst_inside: float  # largest relative error measured at points inside the radius
    measured_radius: float  # first measured point beyond accuracy (or the end of the search)

    @property
    def value(self) -> float:
        return self.radius

    @property
    def interval(self) -> Interval:
        """From the derivatives' guarantee to the measured failure."""
        return self.radius, self.measured_radius

    def __str__(self) -> str:
        return (
            f"order-{self.order} model within {self.accuracy:.1%} for ‖d‖ ≤ {self.radius:.4g} "
            f"(worst measured inside {self.worst_inside:.2%}; fails at {self.measured_radius:.4g})"
        )


@dataclass(frozen=True, kw_only=True)
class PredictedTrajectory(Rows, Result):
    """Gradient descent in the quadratic model, in the eigenspaces the gradient meets."""

    losses: Tensor  # (n_steps + 1,) predicted
    actual: Tensor | None  # (≤ n_steps + 1,) of the real run; it ends where the loss overflows
    learning_rate: float
    momentum: float
    eigenvalues: Tensor  # (m,) Ritz values of H in the Krylov space of the gradient, ascending
    weights: Tensor  # (m,) squared gradient in each
    exact_steps: int  # so many steps are exact for the quadratic model
    critical_learning_rate: float
    converges: bool  # in the quadratic model, over its positive modes
    top_share: float  # of ‖g‖² in the modes above a tenth of λmax: the rest is the bulk
    products: int
    distances: Tensor | None = None  # (n_steps + 1,) ‖w_t − w_0‖ of the quadratic model
    actual_distances: Tensor | None = None  # of the real run
    horizon: int | None = None  # the prediction holds for so many steps; None in files of old runs
    tolerance: float = 0.1  # of the change of the loss, relative: what "holds" means

    also = ("measured_horizon", "holds")

    @property
    def values(self) -> Tensor:
        return self.losses

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """One mapping a step: ``step``, ``delta_w_norm`` (the real run's ‖w_t − w_0‖, nan beyond
        its end), ``delta_w_predicted`` (the quadratic model's), ``loss``, ``loss_predicted`` and
        ``holds``, whether the step lies within the horizon."""

        def at(series: Tensor | None, step: int) -> float:
            inside = series is not None and step < len(series)
            return float(series[step]) if series is not None and inside else float("nan")

        return tuple(
            {
                "step": step,
                "delta_w_norm": at(self.actual_distances, step),
                "delta_w_predicted": at(self.distances, step),
                "loss": at(self.actual, step),
                "loss_predicted": float(self.losses[step]),
                "holds": self.horizon is not None and step <= self.horizon,
            }
            for step in range(len(self.losses))
        )

    @property
    def holds(self) -> bool:
        """Whether the prediction holds for all of its steps."""
        return self.horizon is not None and self.horizon >= len(self.losses) - 1

    @property
    def relative_errors(self) -> Tensor | None:
        """Of the predicted change of the loss after 1, 2, … steps of the real run."""
        if self.actual is None:
            return None
        real = self.actual[1:] - self.actual[0]
        error = (self.losses[1 : len(self.actual)] - self.actual[1:]).abs()
        return error / real.abs().clamp_min(1e-300)

    @property
    def measured_horizon(self) -> int | None:
        """Steps of the real run before the prediction is first off by more than ``tolerance``."""
        errors = self.relative_errors
        if errors is None:
            return None
        fails = (errors > self.tolerance).nonzero()
        return int(fails[0]) if len(fails) else len(errors)

    @property
    def largest_relative_error(self) -> float | None:
        """Of the predicted change of the loss, over the steps of the real run."""
        errors = self.relative_errors
        return None if errors is None else float(errors.max())

    def _rows(self) -> list[dict[str, Any]]:
        """A row a step: the predicted loss, and the real one where it is known."""
        rows = [{"step": step, "predicted": loss} for step, loss in enumerate(self.losses.tolist())]
        real = [] if self.actual is None else self.actual.tolist()
        for row, loss in zip(rows, real, strict=False):
            row["actual"] = loss
        return rows

    def __str__(self) -> str:
        text = (
            f"gradient descent, η = {self.learning_rate:.4g}, momentum {self.momentum:g}: loss "
            f"{float(self.losses[0]):.5g} → {float(self.losses[-1]):.5g} in "
            f"{len(self.losses) - 1} steps ({self.exact_steps} of them exact for the quadratic "
            f"model); critical η {self.critical_learning_rate:.4g}; "
            f"{self.top_share:.0%} of ‖g‖² in the top eigenspace"
        )
        if self.horizon is not None and not self.holds:
            text += (
                f"; the prediction holds within {self.tolerance:.0%} for {self.horizon} steps (to "
                f"{float(self.losses[self.horizon]):.5g}) and is no forecast beyond"
            )
        elif self.holds:
            text += f"; it holds within {self.tolerance:.0%} for all of them"
        if self.actual is not None:
            text += f"; the real run reached {float(self.actual[-1]):.5g}"
        return text


@dataclass(frozen=True, kw_only=True)
class CriticalLearningRate(Result):
    """2/λmax (with momentum μ: 2(1 + μ)/λmax), and what training just below and above it does."""

    value: float
    interval: Interval  # from the certified interval of λmax
    sharpness: float  # λmax
    momentum: float
    ratios: tuple[float, ...]  # learning rates tried, over the critical one
    growth: tuple[float, ...]  # measured growth a step of a deviation along the top eigenvector
    expected: tuple[float, ...]  # what the quadratic model says
    losses: tuple[Tensor, ...]  # plain gradient descent at those rates
    products: int
    converged: bool

    @property
    def confirmed(self) -> bool:
        """Deviations shrink at every rate below and grow at every rate above."""
        return all((g > 1) == (r > 1) for r, g in zip(self.ratios, self.growth, strict=True))

    def _rows(self) -> list[dict[str, Any]]:
        """A row a rate that was tried."""
        columns = {"rate / critical": self.ratios, "growth a step": self.growth,
                   "predicted": self.expected}  # fmt: skip
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def __str__(self) -> str:
        tried = ", ".join(
            f"{r:.2f}×: ×{g:.3f} a step (expected ×{e:.3f})"
            for r, g, e in zip(self.ratios, self.growth, self.expected, strict=True)
        )
        low, high = self.interval
        state = "confirmed" if self.confirmed else "NOT confirmed"
        return (
            f"critical learning rate {self.value:.5g} [{low:.5g}, {high:.5g}], λmax = "
            f"{self.sharpness:.5g}; {state} by training: {tried}"
        )


@dataclass(frozen=True, kw_only=True)
class ObservedCurvature(Result):
    """Curvature read off a training trajectory."""

    value: float  # the largest curvature seen (weights), or the rate of the decay (losses)
    interval: Interval  # 95 %
    values: Tensor  # (m,) Ritz values in the space the trajectory spans, or a rate a step
    steps: int
    source: str  # "weights" or "losses"
    asymmetry: float  # ‖antisymmetric part‖/‖·‖ of the fitted matrix: how far from quadratic
    directional: Tensor  # (T − 1,) sᵀy/sᵀs, the mean curvature along each step ("weights")
    learning_rate: float | None = None

    also = ("avg_curvature", "convergence_rate")

    @property
    def avg_curvature(self) -> float:
        """Mean over the steps of the curvature seen: along each step, or of the loss's decay."""
        series = self.directional if len(self.directional) else self.values
        return float(series.mean())

    @property
    def convergence_rate(self) -> float | None:
        """η·value: the share of the deviation that a step removes; None without a rate."""
        return None if self.learning_rate is None else self.learning_rate * self.value

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"observed curvature {self.value:.5g} [{low:.5g}, {high:.5g}] from {self.source} of "
            f"{self.steps} steps"
        )
