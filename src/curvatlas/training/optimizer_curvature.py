"""What the optimizer says about the curvature: at a batch, and of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas.operators import Hessian
from curvatlas.problem import Problem
from curvatlas.results import Result
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.training.measuring import leaving_no_trace

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class LocalCurvature(Result):
    """The Hessian of one batch at the present weights."""

    value: float  # λmax
    interval: Interval  # certain, from the residual
    loss: float
    critical_rate: float  # 2 / λmax: of plain gradient descent on this batch
    slope: float | None  # gᵀd along the optimizer's direction; None before its first step
    along_direction: float | None  # dᵀHd
    best_rate: float | None  # gᵀd / dᵀHd where dᵀHd > 0: the bottom of the parabola
    role_along_direction: dict[str, float]  # role → d_rᵀ(Hd)_r; they add up to dᵀHd
    products: int
    converged: bool

    def __str__(self) -> str:
        low, high = self.interval
        text = f"λmax {self.value:.4g} ± {(high - low) / 2:.1g}, 2/λmax {self.critical_rate:.3g}"
        if self.best_rate is not None:
            text += f", best rate along the direction {self.best_rate:.3g}"
        return text


@dataclass(frozen=True, kw_only=True)
class AdaptedStep(Result):
    """One step of ``step_with_curvature_adaptation``; ``float(step)`` is its loss."""

    loss: float  # before the step
    learning_rate: float  # that was used
    limit: float  # the measured limit of the rate after the step
    measured: bool  # whether this step measured a product
    skipped: bool  # whether it was left out because the gradient was not finite

    def __float__(self) -> float:
        return self.loss

    def __str__(self) -> str:
        done = "left out" if self.skipped else f"rate {self.learning_rate:.3g}"
        return f"loss {self.loss:.4g}, {done}, limit {self.limit:.3g}"


def local_curvature(
    model: nn.Module, loss: Any, x: Any, y: Any, directions: Mapping[Tensor, Tensor]
) -> LocalCurvature:
    """λmax by Lanczos and one product along ``directions`` (parameter → direction), exact."""
    with leaving_no_trace(model):
        problem = Problem(model, loss, (x, y))
        operator = Hessian(problem)
        top = eigenpairs(
            operator,
            k=1,
            which="largest",
            tol=1e-2,
            max_products=min(100, problem.size),
            data_error=False,
        )
        slope, along = None, None
        roles: dict[str, float] = {}
        if directions:
            named = dict(model.named_parameters())
            flat = torch.cat(
                [
                    directions.get(named[name], torch.zeros_like(named[name])).reshape(-1)
                    for name in problem.parameter_names
                ]
            ).to(operator.dtype)
            each = flat * (operator @ flat)
            slope, along = float(problem.gradient() @ flat), float(each.sum())
            for piece in problem.anatomy.slices:
                roles[piece.role] = roles.get(piece.role, 0.0) + float(piece.view(each).sum())
        value = float(top.values[0])
        best = slope / along if slope is not None and along is not None and along > 0 else None
        return LocalCurvature(
            value=value,
            interval=(float(top.interval[0][0]), float(top.interval[1][0])),
            loss=problem.value(),
            critical_rate=2.0 / value if value > 0 else float("inf"),
            slope=slope,
            along_direction=along,
            best_rate=best,
            role_along_direction=roles,
            products=operator.products,
            converged=bool(top.converged),
        )
