"""Diagnostics of convergence: conditioning now, and over a stretch of training.

>>> diagnostics = ConvergenceDiagnostics(model)                                   # doctest: +SKIP
>>> print(diagnostics.compute_effective_conditioning(x, y))                       # doctest: +SKIP
>>> for advice in diagnostics.analyze_convergence_trajectory((x, y), 100).recommendations:
...     print(advice)                                                             # doctest: +SKIP
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from curvatlas.analysis.advice import Recommendation, recommend
from curvatlas.analysis.diagnostics_conditioning import (
    EffectiveConditioning,
    effective_conditioning,
)
from curvatlas.analysis.scaling_noise import GradientNoise, gradient_noise
from curvatlas.problem import Batch, Problem
from curvatlas.progress import track
from curvatlas.results import Result
from curvatlas.ticks import tidy_log_axes

Interval = tuple[float, float]
Loss = str | Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Rate(Result):
    """Slope of a logarithm over steps, with its 95 % interval."""

    value: float
    interval: Interval
    points: int

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:+.4g} a step [{low:+.4g}, {high:+.4g}]"


@dataclass(frozen=True, kw_only=True)
class ConvergenceTrajectory(Result):
    """A stretch of training with looks at its curvature."""

    learning_rate: float
    momentum: float
    batch_size: int
    losses: Tensor  # (n_steps,) of each step's batch
    gradient_norms: Tensor  # (n_steps,)
    look_steps: tuple[int, ...]
    looks: tuple[EffectiveConditioning, ...]  # on all the data
    loss_reduction: float  # 1 − last/first loss on all the data
    gradient_decay_rate: Rate  # of log ‖g‖
    loss_decay_rate: Rate  # of log loss
    condition_trend: Rate | None  # of log κ; None with fewer than three looks
    noise: GradientNoise | None
    diverged: bool
    recommendations: tuple[Recommendation, ...]

    @property
    def value(self) -> float:
        return self.loss_reduction

    @property
    def stability(self) -> tuple[float, ...]:
        """η λmax / (2 (1 + μ)) at each look: one is the edge of stability."""
        return tuple(
            self.learning_rate * look.largest / (2 * (1 + self.momentum)) for look in self.looks
        )

    def __str__(self) -> str:
        lines = [
            f"{len(self.losses)} steps at η = {self.learning_rate:g}: loss reduced by "
            f"{self.loss_reduction:.1%}" + (" before it diverged" if self.diverged else ""),
            f"log ‖g‖ {self.gradient_decay_rate}; log loss {self.loss_decay_rate}",
            "η·λmax/2 over training: " + " → ".join(f"{value:.3g}" for value in self.stability),
        ]
        if self.condition_trend is not None:
            lines.append(f"log condition number {self.condition_trend}")
        if self.noise is not None:
            lines.append(str(self.noise))
        lines += [f"→ {item}" for item in self.recommendations] or ["nothing to recommend"]
        return "\n".join(lines)

    def plot(self) -> Any:
        """Loss and gradient norm, sharpness against 2/η, conditioning."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 3.6), layout="constrained")
        a, b, c = figure.subplots(1, 3)
        a.plot(self.losses.tolist(), label="loss of the batch", color="#0072b2")
        a.plot(self.gradient_norms.tolist(), label="gradient norm", color="#d55e00", linewidth=0.8)
        a.set(xlabel="step", ylabel="loss, gradient norm (loss / parameter)", yscale="log")
        steps = list(self.look_steps)
        top = [look.largest for look in self.looks]
        error = [
            [max(v - k.largest_interval[0], 0) for v, k in zip(top, self.looks, strict=True)],
            [max(k.largest_interval[1] - v, 0) for v, k in zip(top, self.looks, strict=True)],
        ]
        b.errorbar(steps, top, yerr=error, fmt="o-", color="#0072b2", label="λmax (certified)")
        edge = 2 * (1 + self.momentum) / self.learning_rate
        b.axhline(edge, color="#d55e00", linestyle="--", label="edge of stability")
        b.set(xlabel="step", ylabel="sharpness (loss / parameter²)", yscale="log")
        kappa = [look.condition_number for look in self.looks]
        error = [
            [max(v - k.interval[0], 0) for v, k in zip(kappa, self.looks, strict=True)],
            [min(max(k.interval[1] - v, 0), 9 * v) for v, k in zip(kappa, self.looks, strict=True)],
        ]
        c.errorbar(steps, kappa, yerr=error, fmt="o-", color="#009e73", label="95 %")
        c.set(xlabel="step", ylabel="condition number λmax / mean |λ|", yscale="log")
        for axes in (a, b, c):
            axes.legend(fontsize=8)
        return tidy_log_axes(figure)


class ConvergenceDiagnostics:
    """Measures what decides whether and how fast a model trains; data go to the methods."""

    def __init__(self, model: nn.Module, *, loss: Loss = "cross_entropy") -> None:
        self.model = model
        self.loss = loss

    def compute_effective_conditioning(
        self,
        x: Any,
        y: Any = None,
        *,
        loss: Loss | None = None,
        learning_rate: float | None = None,
        products: int = 80,
        layers: bool = True,
        seed: int = 0,
    ) -> EffectiveConditioning:
        """Both ends of the spectrum, κ = λmax/mean|λ|, negative share, alignment, every layer."""
        problem = self._problem(self.model, x if y is None else (x, y), loss)
        return effective_conditioning(
            problem, learning_rate=learning_rate, products=products, layers=layers, seed=seed
        )

    def analyze_convergence_trajectory(
        self,
        data: Any,
        n_steps: int,
        *,
        learning_rate: float = 0.05,
        momentum: float = 0.0,
        batch_size: int | None = None,
        looks: int = 4,
        products: int = 60,
        loss: Loss | None = None,
        in_place: bool = False,
        seed: int = 0,
    ) -> ConvergenceTrajectory:
        """Train for ``n_steps`` of SGD (on a copy unless ``in_place``) and look at the curvature.

        batch_size: samples a step, drawn at random (default: all). looks: times the conditioning is
        measured on all the data, first and last step included.
        """
        if n_steps < 2 or looks < 2 or not learning_rate > 0:
            raise ValueError("need n_steps ≥ 2, looks ≥ 2 and learning_rate > 0.")
        model = self.model if in_place else copy.deepcopy(self.model)
        problem = self._problem(model, data, loss)
        return _Trajectory(
            problem, n_steps, learning_rate, momentum, batch_size, looks, products, seed
        ).result()

    def _problem(self, model: nn.Module, data: Any, loss: Loss | None) -> Problem:
        return Problem(model, self.loss if loss is None else loss, data)


class _Trajectory:
    def __init__(
        self, problem: Problem, steps: int, rate: float, momentum: float, batch: int | None,
        looks: int, products: int, seed: int,
    ) -> None:  # fmt: skip
        self.problem, self.steps, self.rate, self.momentum = problem, steps, rate, momentum
        self.products, self.seed = products, seed
        problem.require_one_process("a trajectory of gradient descent")
        self.total = sum(problem.units(b) for b in problem.batches())
        self.batch = min(batch or self.total, self.total)
        self.at = sorted({round(place) for place in np.linspace(0, steps, looks)})
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.looks: list[EffectiveConditioning] = []

    def result(self) -> ConvergenceTrajectory:
        diverged = self._train()
        noise = None
        if not diverged and self.total >= 8 and self.problem.separable:
            noise = gradient_noise(self.problem)
        first, last = self.looks[0].loss, self.looks[-1].loss
        kappas = [look.condition_number for look in self.looks]
        seen = self.at[: len(self.looks)]
        return ConvergenceTrajectory(
            learning_rate=self.rate,
            momentum=self.momentum,
            batch_size=self.batch,
            losses=torch.tensor(self.losses, dtype=torch.float64),
            gradient_norms=torch.tensor(self.norms, dtype=torch.float64),
            look_steps=tuple(seen),
            looks=tuple(self.looks),
            loss_reduction=1 - last / first if first else 0.0,
            gradient_decay_rate=_rate(range(len(self.norms)), self.norms),
            loss_decay_rate=_rate(range(len(self.losses)), self.losses),
            condition_trend=_rate(seen, kappas) if len(kappas) > 2 else None,
            noise=noise,
            diverged=diverged,
            recommendations=recommend(
                self.looks,
                gradient_norms=self.norms,
                noise=noise,
                batch_size=self.batch,
                model=self.problem.model,
            ),
        )

    def _train(self) -> bool:
        """Run the steps; returns whether the loss left the numbers."""
        named = dict(self.problem.model.named_parameters())
        weights = [named[name] for name in self.problem.parameter_names]
        velocity = [torch.zeros_like(w) for w in weights]
        draw = self._draws()
        for step in track(range(self.steps + 1), "training", total=self.steps + 1):
            if step in self.at:
                self._look()
            if step == self.steps:
                return False
            value, grads = self._gradient(next(draw))
            if not math.isfinite(value) or value > 1e8:
                return True
            self.losses.append(value)
            self.norms.append(math.sqrt(sum(float(g.pow(2).sum()) for g in grads)))
            with torch.no_grad():
                for w, v, g in zip(weights, velocity, grads, strict=True):
                    v.mul_(self.momentum).add_(g)
                    w.sub_(v, alpha=self.rate)
        return False

    def _look(self) -> None:
        self.looks.append(
            effective_conditioning(
                self.problem,
                learning_rate=self.rate,
                products=self.products,
                layers=True,
                seed=self.seed,
            )
        )

    def _gradient(self, batches: list[Batch]) -> tuple[float, list[Tensor]]:
        problem = self.problem
        total = sum(batch.count for batch in batches)
        value, sums = 0.0, [torch.zeros_like(p) for p in problem.leaves().values()]
        with problem.evaluating():
            for batch in batches:
                leaves = problem.leaves()
                loss = problem.loss.value(problem.outputs(batch, leaves), batch.targets)
                share = batch.count / total
                grads = torch.autograd.grad(
                    loss, list(leaves.values()), materialize_grads=True, allow_unused=True
                )
                value += share * float(loss.detach())
                for s, g in zip(sums, grads, strict=True):
                    s.add_(g, alpha=share)
        return value, sums

    def _draws(self) -> Iterator[list[Batch]]:
        from curvatlas.analysis.convergence_samples import subset

        generator = torch.Generator().manual_seed(self.seed)
        whole = list(self.problem.batches())
        while True:
            if self.batch >= self.total or not self.problem.separable:
                yield whole
                continue
            chosen = torch.randperm(self.total, generator=generator, device="cpu")[: self.batch]
            yield list(subset(self.problem, chosen).batches())


def _rate(steps: Any, values: Any) -> Rate:
    """Slope of log values over steps; neighbours are averaged into at most 12 groups.

    Steps of one run are not independent: without grouping the interval would be far too short.
    """
    x, y = np.asarray(list(steps), dtype=np.float64), np.asarray(list(values), dtype=np.float64)
    keep = np.isfinite(y) & (y > 0)
    x, y = x[keep], np.log(y[keep])
    if len(x) < 3:
        return Rate(value=float("nan"), interval=(float("-inf"), float("inf")), points=len(x))
    groups = np.array_split(np.arange(len(x)), min(12, len(x)))
    gx, gy = (np.array([v[g].mean() for g in groups]) for v in (x, y))
    fit = stats.linregress(gx, gy)
    half = float(stats.t.ppf(0.975, len(gx) - 2)) * float(fit.stderr)
    slope = float(fit.slope)
    return Rate(value=slope, interval=(slope - half, slope + half), points=len(gx))
