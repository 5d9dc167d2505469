"""One run of a scaling grid: train a model of one size on one amount of data and look at it."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from curvatlas.fits import Array
from curvatlas.operators.curvature import Hessian
from curvatlas.operators.per_sample import sample_gradients, sample_losses
from curvatlas.problem import Problem
from curvatlas.results import Result
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.trace import trace
from curvatlas.zoo.datasets import Samples
from curvatlas.zoo.training import evaluate, train

# -------------------------------------------------------------------------------------------------
# Gradient noise: how large a batch is worth its cost.
#
# With per-sample gradients g_i of mean G and covariance Σ (McCandlish et al. 2018):
#
#     simple noise scale  tr Σ / ‖G‖²,      critical batch size  tr(HΣ) / (GᵀHG).
#
# ‖G‖² and GᵀHG are estimated without the bias that the noise adds to the square of a mean.
# -------------------------------------------------------------------------------------------------


Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class GradientNoise(Result):
    """Noise scales in samples; infinite where the mean gradient drowns in the noise."""

    value: float  # critical batch size, by curvature
    interval: Interval  # 95 %, jackknife over samples
    simple: float  # tr Σ / ‖G‖²
    simple_interval: Interval
    samples: int
    gradient_norm: float
    products: int

    def __str__(self) -> str:
        (a, b), (c, d) = self.interval, self.simple_interval
        return (
            f"critical batch size {self.value:.3g} [{a:.3g}, {b:.3g}], simple noise scale "
            f"{self.simple:.3g} [{c:.3g}, {d:.3g}] samples, from {self.samples} samples"
        )


def gradient_noise(problem: Problem, *, samples: int = 48) -> GradientNoise:
    """Noise scale and critical batch size at the present weights."""
    gradients = sample_gradients(problem, samples)  # (n, P)
    count = len(gradients)
    if count < 4:
        raise ValueError(f"gradient noise needs at least 4 samples, got {count}.")
    operator = Hessian(problem)
    bent = (operator @ gradients.T.contiguous()).T  # (n, P)
    plain = (gradients @ gradients.T).double().cpu().numpy()  # g_i·g_j
    curved = (gradients @ bent.T).double().cpu().numpy()  # g_i·H g_j
    simple, simple_interval = _ratio(plain)
    critical, interval = _ratio(curved)
    return GradientNoise(
        value=critical,
        interval=interval,
        simple=simple,
        simple_interval=simple_interval,
        samples=count,
        gradient_norm=float(gradients.mean(0).norm()),
        products=operator.products,
    )


def _ratio(products: Array) -> tuple[float, Interval]:
    """(tr of the covariance) / (square of the mean) from the matrix g_i·A g_j, with jackknife."""
    count = len(products)
    value = _from_sums(float(np.trace(products)), float(products.sum()), count)
    rows, diagonal = products.sum(1), np.diag(products)
    total, own = float(products.sum()), float(np.trace(products))
    left_out = np.array(
        [
            _from_sums(own - diagonal[i], total - 2 * rows[i] + diagonal[i], count - 1)
            for i in range(count)
        ]
    )
    if not math.isfinite(value) or not np.isfinite(left_out).all():
        return value, (0.0, math.inf)
    logs = np.log(left_out)
    error = math.sqrt((count - 1) / count * float(((logs - logs.mean()) ** 2).sum()))
    factor = math.exp(float(stats.t.ppf(0.975, count - 1)) * error)
    return value, (value / factor, value * factor)


def _from_sums(own: float, total: float, count: int) -> float:
    square = (total - own) / (count * (count - 1))  # unbiased ‖G‖² or GᵀHG: pairs i ≠ j
    noise = own / count - square
    return noise / square if square > 0 and noise > 0 else math.inf


_LOOKS = 20  # times the validation loss is looked at in training


@dataclass(frozen=True, kw_only=True)
class ScalingCell(Result):
    """Loss and curvature of one trained model, at the weights with the best validation loss."""

    size: str  # as given to the factory
    parameters: int
    samples: int
    seed: int
    steps: int
    best_step: int
    training_loss: float
    validation_loss: float  # on the half of the validation data that did not choose the weights
    validation_interval: Interval  # 95 %, over those samples
    validation_accuracy: float | None
    hessian_norm: float  # largest |λ| of the training loss
    hessian_norm_interval: Interval
    smallest: float  # λmin
    trace: float
    trace_interval: Interval
    effective_rank: float
    effective_rank_interval: Interval
    condition_number: float  # λmax over the mean |λ|
    condition_interval: Interval  # 95 %
    negative_mass: float
    noise_scale: float
    critical_batch_size: float
    critical_batch_interval: Interval
    curvature_samples: int
    products: int
    seconds: float

    @property
    def value(self) -> float:
        return self.validation_loss

    def __str__(self) -> str:
        return (
            f"N = {self.parameters}, D = {self.samples}: validation loss "
            f"{self.validation_loss:.4f} (training {self.training_loss:.4f}), ‖H‖ = "
            f"{self.hessian_norm:.4g}, trace {self.trace:.4g}, effective rank "
            f"{self.effective_rank:.3g}, critical batch {self.critical_batch_size:.3g} "
            f"({self.seconds:.0f} s)"
        )


def run_cell(
    make: Callable[[], nn.Module],
    training: Samples,
    validation: Samples,
    *,
    size: str,
    loss: Any,
    steps: int,
    lr: float,
    batch_size: int,
    curvature_samples: int,
    products: int,
    seed: int,
) -> ScalingCell:
    """Train, keep the best weights, measure curvature in float64 on the training loss."""
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
    half = validation.size // 2
    chooser = validation.take(half)
    judge = Samples(validation.inputs[half:], validation.targets[half:])
    best_step = train_best(
        model, training, chooser, loss=loss, steps=steps, lr=lr, batch_size=batch_size, seed=seed
    )
    train_loss, _ = evaluate(model, training, loss=loss)
    value, accuracy = evaluate(model, judge, loss=loss)
    model.double().eval()
    reach = _reach(model, judge.to(torch.float64), loss)
    some = training.take(curvature_samples).to(torch.float64)
    problem = Problem(model, loss, [tuple(batch) for batch in some.batches(64)])
    operator = Hessian(problem)
    ends = eigenpairs(operator, k=1, which="both", tol=1e-3, seed=seed)
    whole = trace(operator, rtol=0.05, seed=seed, max_products=2 * products)
    density = spectral_density(operator, max_products=products, seed=seed)
    noise = gradient_noise(problem, samples=96)
    top = float(ends.values[0])
    largest = int(ends.values.abs().argmax())  # ‖H‖ may be that of the most negative eigenvalue
    radius = float(ends.interval[1][largest] - ends.interval[0][largest]) / 2
    norm = abs(float(ends.values[largest]))
    mean = float((density.weights * density.nodes.abs()).sum())
    condition = top / max(mean, 1e-300)
    # λmax is certified; the mean |λ| is as uncertain as √(effective rank), with (Σ|λ|)² in it.
    conditions = [
        condition * math.sqrt(density.effective_rank / max(end, 1e-300))
        for end in density.effective_rank_interval
    ]
    return ScalingCell(
        size=size,
        parameters=problem.size,
        samples=training.size,
        seed=seed,
        steps=steps,
        best_step=best_step,
        training_loss=train_loss,
        validation_loss=value,
        validation_interval=(value - reach, value + reach),
        validation_accuracy=accuracy,
        hessian_norm=norm,
        hessian_norm_interval=(norm - radius, norm + radius),
        smallest=float(ends.values[-1]),
        trace=whole.value,
        trace_interval=whole.interval,
        effective_rank=density.effective_rank,
        effective_rank_interval=density.effective_rank_interval,
        condition_number=condition,
        condition_interval=(min(conditions), max(conditions)),
        negative_mass=density.negative_mass,
        noise_scale=noise.simple,
        critical_batch_size=noise.value,
        critical_batch_interval=noise.interval,
        curvature_samples=some.size,
        products=operator.products + noise.products,
        seconds=time.perf_counter() - started,
    )


def _reach(model: nn.Module, judge: Samples, loss: Any) -> float:
    """Half the 95 % interval of a mean loss over samples (normal)."""
    problem = Problem(model, loss, [tuple(batch) for batch in judge.batches(256)])
    losses = sample_losses(problem, limit=judge.size)
    return 1.96 * float(losses.std()) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0


def train_best(
    model: nn.Module,
    training: Samples,
    chooser: Samples,
    *,
    loss: Any,
    steps: int,
    lr: float,
    batch_size: int,
    seed: int,
) -> int:
    """Train in place and go back to the best weights seen; returns their step.

    Without this, small data sets are judged by how long they were overfitted.
    """
    best: tuple[float, int, dict[str, Tensor]] = (float("inf"), 0, {})
    every = max(1, steps // _LOOKS)

    def look(step: int, _: float = 0.0) -> None:
        nonlocal best
        if step % every and step != steps:
            return
        value, _accuracy = evaluate(model, chooser, loss=loss)
        if value < best[0]:
            best = (value, step, copy.deepcopy(model.state_dict()))

    train(
        model,
        (training.inputs, training.targets),
        steps=steps,
        lr=lr,
        batch_size=batch_size,
        seed=seed,
        loss=loss,
        on_step=look,
    )
    look(steps)
    model.load_state_dict(best[2])
    return best[1]
