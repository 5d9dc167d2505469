"""Diagnostics of convergence: conditioning now, and over a stretch of training, with advice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.utils._pytree import tree_flatten

from curvatlas.analysis.conditioning import (
    EffectiveConditioning,
    conditioning_and_ends,
    heterogeneity,
    sharpest_pair,
)
from curvatlas.analysis.landscape.line import value_and_gradient
from curvatlas.analysis.propagation.capture import capture
from curvatlas.analysis.trial import Trial, along_negative_curvature, along_the_gradient
from curvatlas.errors import ProblemError
from curvatlas.fits import Array, line_slope
from curvatlas.linear_operator import LinearOperator
from curvatlas.operators.curvature import GaussNewton, Hessian
from curvatlas.operators.per_sample import sample_gradients, subset
from curvatlas.problem import Batch, Problem
from curvatlas.progress import track
from curvatlas.results import Interval, Number, Result
from curvatlas.spectra.eigen_result import Eigenpairs

LAYERS_DIFFER = 10.0  # ratio of layer sharpnesses from which one learning rate is a compromise
DOWNWARD = 0.1  # |λmin|/λmax from which negative curvature competes with positive
SPIKE = 5.0  # largest over median gradient norm
BATCH_FACTOR = 2.0  # batch sizes within this factor of the critical one are left alone


@dataclass(frozen=True, kw_only=True)
class GradientNoise(Result):
    """Noise scales in samples; lower bounds where the mean gradient drowns in the noise."""

    value: float  # critical batch size, by curvature
    interval: Interval  # 95 %, jackknife over samples; (bound, ∞) of a lower bound
    simple: float  # tr Σ / ‖G‖²
    simple_interval: Interval
    samples: int
    gradient_norm: float
    products: int
    lower_bound: bool = False  # ``value`` is one: these samples set no upper limit
    simple_lower_bound: bool = False
    # "H_o" where H is negative along the gradients, "I" where that is, too: the simple scale
    curvature: str = "H"

    def __str__(self) -> str:
        by = "" if self.curvature == "H" else f" (by {self.curvature})"
        critical = scale_text(self.value, self.interval, bound=self.lower_bound)
        simple = scale_text(self.simple, self.simple_interval, bound=self.simple_lower_bound)
        return (
            f"critical batch size {critical}{by}, simple noise scale {simple} samples, from "
            f"{self.samples} samples"
        )


def scale_text(value: float, interval: Interval, *, bound: bool) -> str:
    """A noise scale with its interval, or as the lower bound it is."""
    return f"≥ {value:.3g}" if bound else f"{value:.3g} [{interval[0]:.3g}, {interval[1]:.3g}]"


def gradient_noise(problem: Problem, *, samples: int = 48) -> GradientNoise:
    r"""Noise scale and critical batch size at the present weights: how large a batch is worth it.

    With per-sample gradients g_i of mean G and covariance Σ (McCandlish et al. 2018):

        simple noise scale  tr Σ / ‖G‖²,      critical batch size  tr(HΣ) / (GᵀHG).

    ‖G‖² and GᵀHG are estimated without the bias that the noise adds to the square of a mean. Where
    they cannot be told from zero, the scale is at least its 97.5 % lower limit, and said to be a
    bound. Where H is negative along the gradients its ratio is no batch size: H_o takes its place,
    which is not for a convex loss.
    """
    gradients = sample_gradients(problem, samples)  # (n, P)
    count = len(gradients)
    if count < 4:
        raise ValueError(f"gradient noise needs at least 4 samples, got {count}.")

    def through(operator: LinearOperator) -> Array:
        bent = (operator @ gradients.T.contiguous()).T  # (n, P)
        return np.asarray((gradients @ bent.T).cpu().double().numpy())  # g_i·H g_j

    hessian = Hessian(problem)
    spent = count
    simple = _ratio((gradients @ gradients.T).cpu().double().numpy())
    if simple is None:  # a Gram matrix of nothing
        raise ProblemError("the gradient of every sample is zero: there is no noise to compare.")
    critical, used = _ratio(through(hessian)), "H"
    if critical is None:
        with suppress(ProblemError):  # of a loss without an outer part
            critical, used = _ratio(through(GaussNewton(problem))), "H_o"
            spent += count
    if critical is None:
        critical, used = simple, "I"
    return GradientNoise(
        value=critical.value,
        interval=critical.interval,
        simple=simple.value,
        simple_interval=simple.interval,
        samples=count,
        gradient_norm=float(gradients.mean(0).norm()),
        products=spent,
        lower_bound=critical.bound,
        simple_lower_bound=simple.bound,
        curvature=used,
    )


@dataclass(frozen=True)
class _Scale:
    value: float
    interval: Interval
    bound: bool  # a lower one


def _ratio(products: Array) -> _Scale | None:
    """(tr of the covariance) / (square of the mean) from the matrix g_i·A g_j, with jackknife.

    None where A is negative along the gradients: neither the ratio nor a bound on it means a size.
    """
    count = len(products)
    total, trace = float(products.sum()), float(np.trace(products))
    rows, diagonal = products.sum(1), np.diag(products)
    square, noise = _from_sums(trace, total, count)
    squares, noises = _from_sums(trace - diagonal, total - 2 * rows + diagonal, count - 1)
    quantile = float(stats.t.ppf(0.975, count - 1))

    def reach(left_out: Array) -> float:
        return quantile * math.sqrt(
            (count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum())
        )

    if square > 0 and noise > 0 and (squares > 0).all() and (noises > 0).all():
        value, factor = noise / square, math.exp(reach(np.log(noises / squares)))
        return _Scale(value, (value / factor, value * factor), bound=False)
    # The sum over all pairs is the square of a length where A is positive: the limit is, too.
    highest = max(square + reach(squares), total / count**2)
    if not highest > 0 or not noise > 0 or not (noises > 0).all():
        return None
    bound = noise * math.exp(-reach(np.log(noises))) / highest
    return _Scale(bound, (bound, math.inf), bound=True)


def _from_sums(trace: Any, total: Any, count: int) -> tuple[Any, Any]:
    """‖G‖² or GᵀHG without bias, from pairs i ≠ j, and the trace of the covariance."""
    square = (total - trace) / (count * (count - 1))
    return square, trace / count - square


SGD = ("sgd", "gd", "momentum", "nesterov")
ADAPTIVE = (
    "adam",
    "adamw",
    "adamax",
    "nadam",
    "radam",
    "rmsprop",
    "adagrad",
    "adafactor",
    "lamb",
    "lion",
    "shampoo",
    "soap",
    "muon",
    "sophia",
)
TRAINED_BELOW = 0.9  # of the loss of a model that knows nothing: log of the number of classes


@dataclass(frozen=True, kw_only=True)
class Situation(Result):
    """What the model is trained with, and whether it has been: what advice depends on."""

    optimizer: str | None = None  # as the user names it, such as "adamw"
    learning_rate: float | None = None
    momentum: float = 0.0
    trained: bool | None = None  # None: cannot be told
    because: str = ""  # how it was told

    def checked(self) -> Situation:
        """Itself; raises where the user named no optimizer there is, or no rate."""
        if self.optimizer is not None and self.optimizer.lower() not in (*SGD, *ADAPTIVE):
            known = ", ".join((*SGD, *ADAPTIVE))
            raise ValueError(f"optimizer is one of {known}, got {self.optimizer!r}.")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"a learning rate is positive, got {self.learning_rate!r}.")
        return self

    @property
    def adaptive(self) -> bool | None:
        """Whether the optimizer scales every coordinate by itself; None where none was named."""
        return None if self.optimizer is None else self.optimizer.lower() in ADAPTIVE

    def at(self, problem: Problem, loss: float, *, trained: bool | None = None) -> Situation:
        """The same with what the loss says: a classifier that knows nothing has log(classes)."""
        if trained is not None:
            words = "the run trained it" if trained else "the run has not trained it yet"
            return replace(self, trained=trained, because=words)
        classes = _classes(problem)
        if classes is None:
            return self
        blind = math.log(classes)
        return replace(
            self,
            trained=loss < TRAINED_BELOW * blind,
            because=f"loss {loss:.3g} against log({classes}) = {blind:.3g} of blind guessing",
        )


def _classes(problem: Problem) -> int | None:
    """How many classes cross-entropy chooses from; None for other losses."""
    if problem.loss.name != "cross_entropy":
        return None
    batch = next(problem.batches())
    with problem.evaluating(), torch.no_grad():
        outputs = problem.outputs(batch.part(0, 1, problem.loss.count), {})
    tensors = [t for t in tree_flatten(outputs)[0] if isinstance(t, Tensor) and t.ndim > 1]
    return int(tensors[0].shape[-1]) if tensors and tensors[0].shape[-1] > 1 else None


@dataclass(frozen=True, kw_only=True)
class Recommendation(Result):
    """What to do, the measurement that says so, what it would change and how to check it."""

    action: str
    topic: str  # "learning rate", "adaptive optimizer", "clipping", …
    measure: str  # the name of the measured number
    value: float
    interval: Interval
    threshold: float
    strength: str  # "strong" or "weak"
    evidence: str  # one sentence with the numbers
    effect: str = ""  # what would change, by how much
    check: str = ""  # what to run to see whether it is so
    trial: Trial | None = None  # the steps that were taken before it was given

    @property
    def uncertainty(self) -> str:
        """The measured number with its interval beside the threshold, in words."""
        low, high = self.interval
        within = "" if low == high else f" [{low:.3g}, {high:.3g}]"
        return f"{self.measure} = {self.value:.3g}{within}; the rule speaks from {self.threshold:g}"

    def _derived(self) -> dict[str, Any]:
        return {"sentence": str(self)}

    def __str__(self) -> str:
        effect = f"; {self.effect}" if self.effect else ""
        return f"{self.action} ({self.strength} evidence: {self.evidence}{effect})"


@dataclass(frozen=True, kw_only=True)
class Advice(Result):
    """What the curvature at one point recommends, and the conditioning it is read from."""

    conditioning: EffectiveConditioning
    recommendations: tuple[Recommendation, ...]
    situation: Situation | None = None
    ruled_out: tuple[Trial, ...] = ()  # tried, not confirmed, and so not advised

    def __str__(self) -> str:
        return "\n".join([str(self.conditioning), *advice_lines(self)])


def advice_lines(advice: Advice | ConvergenceTrajectory) -> list[str]:
    """What is recommended, and what was tried and is not."""
    said = [f"→ {item}" for item in advice.recommendations] or ["→ nothing to recommend"]
    return [*said, *(f"not advised, {trial}" for trial in advice.ruled_out)]


def advise(
    looks: Sequence[EffectiveConditioning],
    problem: Problem,
    ends: Eigenpairs,
    *,
    held_out: Problem | None = None,
    situation: Situation | None = None,
    **measured: Any,
) -> tuple[tuple[Recommendation, ...], tuple[Trial, ...]]:
    """``recommend`` with what would change the loss tried first; and what was ruled out.

    ends: of the Hessian at the last look.  held_out: the same problem on data the model was not
    trained on: without, nothing that predicts a change of the loss is advised.
    """
    now = looks[-1]
    situation = situation or Situation(optimizer="sgd", learning_rate=now.learning_rate)
    gradient = problem.gradient()
    trials: list[Trial | None] = []
    if _bends_down(now, situation):
        trials.append(along_negative_curvature(problem, ends, gradient, held_out))
    higher = _higher_rate(now, situation)
    if higher is not None:
        rate = situation.learning_rate or 0.0
        curvature = now.alignment * now.largest
        rates = [rate * (higher / rate) ** share for share in (1 / 3, 2 / 3, 1)]
        trials.append(
            along_the_gradient(
                problem, gradient, curvature=curvature, rate=rate, rates=rates, held_out=held_out
            )
        )
    tried = [trial for trial in trials if trial is not None]
    recommendations = recommend(
        looks, problem=problem, situation=situation, trials=tried, **measured
    )
    given = [item.trial for item in recommendations]
    return recommendations, tuple(trial for trial in tried if trial not in given)


def recommend(
    looks: Sequence[EffectiveConditioning],
    *,
    gradient_norms: Sequence[float] = (),
    noise: GradientNoise | None = None,
    batch_size: int | None = None,
    problem: Problem | None = None,
    situation: Situation | None = None,
    trials: Sequence[Trial] = (),
) -> tuple[Recommendation, ...]:
    """Everything the measurements support; the last look is the present state.

    A rule compares one measured number, with its interval, to a threshold: "strong" evidence when
    the whole interval lies beyond it, "weak" when only the estimate does, else nothing.
    situation: what the model is trained with and whether it has been: nobody who uses Adam is told
    to use it, and an untrained model is not told of its negative curvature.
    problem: what was measured, to see where its norms stand.
    trials: steps that were taken (``advise`` takes them): what predicts a change of the loss is
    recommended where they confirm it, and never without.
    """
    now = looks[-1]
    situation = situation or Situation(optimizer="sgd", learning_rate=now.learning_rate)
    rules = [
        _learning_rate(now, situation),
        _room_for_rate(now, situation, trials),
        _adaptive(now, situation),
        _layer_wise(now, situation),
        _clipping(gradient_norms),
        _negative_curvature(now, situation, trials),
        _pre_norm(now, problem),
        _batch(noise, batch_size),
    ]
    return tuple(item for item in rules if item is not None)


def _judged(
    *, value: float, interval: Interval, threshold: float, **told: Any
) -> Recommendation | None:
    """A recommendation when the value exceeds the threshold, as strong as its interval allows."""
    if not value > threshold:
        return None
    strength = "strong" if interval[0] > threshold else "weak"
    return Recommendation(
        value=value, interval=interval, threshold=threshold, strength=strength, **told
    )


def _learning_rate(now: EffectiveConditioning, situation: Situation) -> Recommendation | None:
    """The edge of gradient descent, 2 (1 + μ)/η; of Adam's, λmax of H alone says nothing."""
    rate = situation.learning_rate or now.learning_rate
    if rate is None or situation.adaptive:
        return None
    edge = 2 * (1 + situation.momentum)
    value = rate * now.largest / edge
    low, high = (rate * bound / edge for bound in now.largest_interval)
    return _judged(
        action=f"lower the learning rate below {edge / now.largest:.3g}",
        topic="learning rate",
        measure="η·λmax/2" if not situation.momentum else "η·λmax/(2 + 2μ)",
        value=value,
        interval=(low, high),
        threshold=1.0,
        evidence=f"sharpness {Number(now.largest, *now.largest_interval)} exceeds {edge:g}/η = "
        f"{edge / rate:.4g}: beyond the edge of stability of the quadratic model",
        effect=f"in the quadratic model (no step was taken) a deviation along the sharpest "
        f"direction is multiplied by {abs(1 - rate * now.largest):.3g} a step at η = {rate:.3g}, "
        f"by 0 at {edge / 2 / now.largest:.3g}",
        check="'curvatlas landscape' runs gradient descent on both sides of the edge",
    )


_ROOM = 20.0  # of the edge, from which a higher rate is worth a thought


def _higher_rate(now: EffectiveConditioning, situation: Situation) -> float | None:
    """A quarter of the edge, for a trained model whose rate lies far below: worth a trial."""
    rate = situation.learning_rate
    if rate is None or situation.adaptive is not False or not situation.trained:
        return None
    edge = 2 * (1 + situation.momentum)
    if not edge > _ROOM * rate * max(now.largest, 1e-300):
        return None
    return edge / now.largest / 4 if now.largest > 0 else None


def _room_for_rate(
    now: EffectiveConditioning, situation: Situation, trials: Sequence[Trial]
) -> Recommendation | None:
    """A rate far below the edge: sharpness of a trained model will not grow much."""
    higher, rate = _higher_rate(now, situation), situation.learning_rate
    trial = _confirmed(trials, "one step of gradient descent")
    if higher is None or rate is None or trial is None:
        return None
    edge = 2 * (1 + situation.momentum) / rate
    low, high = (edge / max(bound, 1e-300) for bound in reversed(now.largest_interval))
    return _judged(
        action=f"try a higher learning rate, up to about {higher:.2g}",
        topic="learning rate",
        measure="edge over λmax",
        value=edge / max(now.largest, 1e-300),
        interval=(low, high),
        threshold=_ROOM,
        evidence=f"λmax {Number(now.largest, *now.largest_interval)} lies far below the edge "
        f"{edge:.4g} of η = {rate:.3g}",
        effect=f"measured on one step: {trial.steps}",
        check="train both for a few hundred steps and compare the loss at equal steps",
        trial=trial,
    )


def _confirmed(trials: Sequence[Trial], direction: str) -> Trial | None:
    """The trial of this direction, if the loss fell as predicted."""
    return next((t for t in trials if t.direction.startswith(direction) and t.confirmed), None)


def _adaptive(now: EffectiveConditioning, situation: Situation) -> Recommendation | None:
    """For plain gradient descent alone: adaptive optimizers scale layers by themselves."""
    pair = sharpest_pair(now.layers)
    if pair is None or situation.adaptive:
        return None
    top, low = pair
    ratio = Number(now.heterogeneity, *now.heterogeneity_interval)
    named = situation.optimizer is not None
    return _judged(
        action="use an adaptive optimizer (Adam, Shampoo)"
        if named
        else "train this with an adaptive optimizer (Adam, Shampoo), or with rates by layer; plain "
        "gradient descent will be slow",
        topic="adaptive optimizer",
        measure="largest over smallest sharpness of parts of like size",
        value=now.heterogeneity,
        interval=now.heterogeneity_interval,
        threshold=LAYERS_DIFFER,
        evidence=f"{top.name} is {ratio} times as sharp as {low.name}, of like size: one step size "
        "for both is unstable in one or slow in the other",
        effect=f"in the quadratic model (nothing was trained) {low.name} moves {ratio} times "
        f"slower than it could, with one rate that {top.name} bears",
        check="train with both for a few hundred steps and compare the loss at equal steps",
    )


def _layer_wise(now: EffectiveConditioning, situation: Situation) -> Recommendation | None:
    stack = [layer for layer in now.layers if layer.layer is not None and layer.sharpness > 0]
    pair = sharpest_pair(stack)
    if pair is None or situation.adaptive:
        return None
    top, low = pair
    ratio, interval = heterogeneity(stack)
    return _judged(
        action="use layer-wise learning rates, in proportion to 1/λmax of each layer",
        topic="layer-wise rates",
        measure="ratio of sharpnesses within the stack",
        value=ratio,
        interval=interval,
        threshold=LAYERS_DIFFER / 2,
        evidence=f"{top.name} has λmax {Number(top.sharpness, *top.interval)}, {low.name} "
        f"{Number(low.sharpness, *low.interval)}",
        effect=f"in the quadratic model (nothing was trained) {low.name} could take steps "
        f"{Number(ratio, *interval)} times as long as {top.name}",
        check="parameter groups with these rates for a few hundred steps, against one rate",
    )


def _clipping(norms: Sequence[float]) -> Recommendation | None:
    if len(norms) < 10:
        return None
    values = np.asarray(norms)
    middle = float(np.median(values))
    ratio = float(values.max() / max(middle, 1e-300))
    # order statistics of a binomial give the 95 % interval of the median
    half = 0.98 * np.sqrt(len(values))
    ordered = np.sort(values)
    places = np.clip([len(values) / 2 - half, len(values) / 2 + half], 0, len(values) - 1)
    low, high = (ordered[int(place)] for place in places)
    interval = float(values.max() / high), float(values.max() / max(low, 1e-300))
    return _judged(
        action=f"clip gradients at about {2 * middle:.3g}",
        topic="clipping",
        measure="largest over median gradient norm",
        value=ratio,
        interval=interval,
        threshold=SPIKE,
        evidence=f"the largest gradient of {len(values)} steps is {Number(ratio, *interval)} times "
        "the median",
    )


_VAGUE = 0.3  # width of an interval of a share beyond which the share is no evidence


def _bends_down(now: EffectiveConditioning, situation: Situation) -> bool:
    """Whether negative curvature is worth a trial: not at initialisation, where it is the rule."""
    return situation.trained is not False and now.indefiniteness > DOWNWARD


def _negative_curvature(
    now: EffectiveConditioning, situation: Situation, trials: Sequence[Trial]
) -> Recommendation | None:
    """Only where steps along it were taken, and lowered the loss by more than the gradient does."""
    trial = _confirmed(trials, "the most negative eigenvector")
    if not _bends_down(now, situation) or trial is None:
        return None
    low, high = (max(-bound, 0.0) / max(now.largest, 1e-300) for bound in now.smallest_interval)
    few, many = now.negative_mass_interval
    share = f" ({now.negative_mass:.0%} of all are negative)" if many - few < _VAGUE else ""
    return _judged(
        action="follow the negative curvature: a step along it lowers the loss more than one along "
        "the gradient (momentum or noise find it; clip the steps)",
        topic="negative curvature",
        measure="|λmin|/λmax",
        value=now.indefiniteness,
        interval=(min(low, high), max(low, high)),
        threshold=DOWNWARD,
        evidence=f"the most negative eigenvalue is {Number(now.smallest, *now.smallest_interval)} "
        f"against λmax {Number(now.largest, *now.largest_interval)}{share}; {trial.place}",
        effect=f"measured along it: {trial.steps}",
        check="ca.TaylorExpansionAnalyzer.compute_taylor_coefficients with the eigenvector as "
        "displacement",
        trial=trial,
    )


def _pre_norm(now: EffectiveConditioning, problem: Problem | None) -> Recommendation | None:
    """Only for post-norm stacks of three layers or more whose sharpness grows with depth."""
    stack = [layer for layer in now.layers if layer.layer is not None and layer.sharpness > 0]
    if problem is None or len(stack) < 3 or not is_post_norm(problem):
        return None
    depth = [float(layer.layer or 0) for layer in stack]
    slope, interval = line_slope(depth, [math.log(layer.sharpness) for layer in stack])
    if interval[0] <= 0:
        return None  # a slope of either sign is no evidence of growth
    grown = Number(math.exp(slope), math.exp(interval[0]), math.exp(interval[1]))
    return _judged(
        action="use pre-norm blocks",
        topic="pre-norm",
        measure="growth of log λmax a layer",
        value=slope,
        interval=interval,
        threshold=0.0,
        evidence=f"sharpness grows by × {grown} a layer over {len(stack)} post-norm layers",
    )


def _batch(noise: GradientNoise | None, batch_size: int | None) -> Recommendation | None:
    if noise is None or batch_size is None:
        return None
    low, high = noise.interval
    size = scale_text(noise.value, noise.interval, bound=noise.lower_bound)
    larger = _judged(
        action=f"use a larger batch, towards {noise.value:.3g}",
        topic="batch size",
        measure="critical batch size over batch size",
        value=noise.value / batch_size,
        interval=(low / batch_size, high / batch_size),
        threshold=BATCH_FACTOR,
        evidence=f"the critical batch size is {size}, the batch {batch_size}: noise dominates the "
        "steps",
    )
    if noise.lower_bound:  # nothing says that it is small
        return larger
    return larger or _judged(
        action=f"try a smaller batch, about {noise.value:.3g}: its steps would be little noisier",
        topic="batch size",
        measure="batch size over critical batch size",
        value=batch_size / noise.value,
        interval=(batch_size / high, batch_size / low if low > 0 else float("inf")),
        threshold=BATCH_FACTOR,
        evidence=f"the critical batch size is {size}, the batch {batch_size}",
    )


def is_post_norm(problem: Problem) -> bool:
    """Whether every block normalises the sum of its branch and the stream, as the last thing it
    does: seen in the computation of a batch."""
    batch = next(problem.batches(), None)
    if batch is None:
        return False
    try:
        with problem.evaluating():
            nodes = capture(problem, batch.part(0, 1, problem.loss.count)).nodes
    except (ProblemError, RuntimeError):
        return False  # nothing is recognised in it
    blocks = {node.layer for node in nodes if node.kind in ("attention", "ffn")} - {None}
    last = {node.layer: node for node in nodes if node.layer in blocks}
    return bool(last) and all(
        node.kind == "norm" and all(parent.kind == "residual" for parent in node.parents)
        for node in last.values()
    )


@dataclass(frozen=True, kw_only=True)
class Rate(Result):
    """Slope of a logarithm over steps, with its 95 % interval."""

    value: float
    interval: Interval
    points: int

    def __float__(self) -> float:
        return self.value

    def __format__(self, how: str) -> str:
        """As the number where a format is asked for: ``f"{rate:.4f}"``."""
        return format(self.value, how) if how else str(self)

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
    ruled_out: tuple[Trial, ...] = ()  # tried, not confirmed, and so not advised

    also = ("loss_decreased", "condition_number_trend", "final_condition")

    @property
    def value(self) -> float:
        return self.loss_reduction

    @property
    def loss_decreased(self) -> bool:
        """Whether the loss on all data is lower at the last look than at the first."""
        return self.loss_reduction > 0

    @property
    def condition_number_trend(self) -> Rate | None:
        """Slope of log κ over the steps, by the article's name."""
        return self.condition_trend

    @property
    def final_condition(self) -> float:
        """κ = λmax/mean|λ| of the true Hessian at the last look."""
        return self.looks[-1].condition_number

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
        return "\n".join([*lines, *advice_lines(self)])


def convergence_trajectory(
    problem: Problem,
    n_steps: int = 100,
    *,
    learning_rate: float = 0.05,
    momentum: float = 0.0,
    batch_size: int | None = None,
    looks: int = 4,
    products: int = 60,
    held_out: Any = None,
    seed: int = 0,
) -> ConvergenceTrajectory:
    """Train the problem's model for ``n_steps`` of SGD and look at the curvature on the way.

    batch_size: samples a step, drawn at random (default: all). looks: times the conditioning is
    measured on all the data, first and last step included. held_out: data that are not trained on:
    what would lower the loss is tried on them, too, before it is advised.
    """
    if n_steps < 2 or looks < 2 or not learning_rate > 0:
        raise ValueError("need n_steps ≥ 2, looks ≥ 2 and learning_rate > 0.")
    return _Trajectory(
        problem, n_steps, learning_rate, momentum, batch_size, looks, products, seed, held_out
    ).result()


class _Trajectory:
    def __init__(
        self,
        problem: Problem,
        steps: int,
        rate: float,
        momentum: float,
        batch: int | None,
        looks: int,
        products: int,
        seed: int,
        held_out: Any,
    ) -> None:
        self.held_out = None if held_out is None else problem.with_data(held_out)
        self.ends: Eigenpairs | None = None  # at the last look
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
            with suppress(ProblemError):  # every gradient is zero
                noise = gradient_noise(self.problem)
        first, last = self.looks[0].loss, self.looks[-1].loss
        kappas = [look.condition_number for look in self.looks]
        assert self.ends is not None
        recommendations, ruled_out = advise(
            self.looks,
            self.problem,
            self.ends,
            held_out=self.held_out,
            situation=Situation(optimizer="sgd", learning_rate=self.rate, momentum=self.momentum),
            gradient_norms=self.norms,
            noise=noise,
            batch_size=self.batch,
        )
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
            recommendations=recommendations,
            ruled_out=ruled_out,
        )

    def _train(self) -> bool:
        """Run the steps; returns whether the loss left the numbers."""
        problem = self.problem
        named = dict(problem.model.named_parameters())
        velocity = torch.zeros_like(problem.parameters)
        draw = self._draws()
        for step in track(range(self.steps + 1), "training", total=self.steps + 1):
            if step in self.at:
                options: Any = {"products": self.products, "layers": True, "seed": self.seed}
                look, self.ends = conditioning_and_ends(
                    self.problem, learning_rate=self.rate, **options
                )
                self.looks.append(look)
            if step == self.steps:
                return False
            value, gradient = value_and_gradient(problem, problem.parameters, next(draw))
            if not math.isfinite(value) or value > 1e8:
                return True
            self.losses.append(value)
            self.norms.append(float(gradient.norm()))
            velocity.mul_(self.momentum).add_(gradient)
            with torch.no_grad():
                pieces = problem.layout.split(velocity)
                for name, piece in zip(problem.parameter_names, pieces, strict=True):
                    named[name].sub_(piece.squeeze(0), alpha=self.rate)
        return False

    def _draws(self) -> Iterator[list[Batch]]:
        generator = torch.Generator().manual_seed(self.seed)
        everything = list(self.problem.batches())
        while True:
            if self.batch >= self.total or not self.problem.separable:
                yield everything
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
    slope, interval = line_slope(gx, gy)
    return Rate(value=slope, interval=interval, points=len(gx))
