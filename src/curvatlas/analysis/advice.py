"""Recommendations that carry their evidence, and none without it.

A rule compares one measured number, with its interval, to a threshold. When the whole interval lies
beyond the threshold the evidence is "strong"; when only the estimate does it is "weak"; otherwise
there is no recommendation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from torch import nn

from curvatlas.analysis.diagnostics_conditioning import EffectiveConditioning
from curvatlas.analysis.scaling_noise import GradientNoise
from curvatlas.results import Result

Interval = tuple[float, float]

LAYERS_DIFFER = 10.0  # ratio of layer sharpnesses from which one learning rate is a compromise
SADDLE = 0.1  # |λmin|/λmax from which negative curvature competes with positive
SPIKE = 5.0  # largest over median gradient norm
BATCH_FACTOR = 2.0  # batch sizes within this factor of the critical one are left alone


@dataclass(frozen=True, kw_only=True)
class Recommendation(Result):
    """What to do, and the measurement that says so."""

    action: str
    topic: str  # "learning rate", "adaptive optimizer", "clipping", …
    measure: str  # the name of the measured number
    value: float
    interval: Interval
    threshold: float
    strength: str  # "strong" or "weak"
    evidence: str  # one sentence with the numbers

    def __str__(self) -> str:
        return f"{self.action} ({self.strength} evidence: {self.evidence})"


@dataclass(frozen=True, kw_only=True)
class Advice(Result):
    """What the curvature at one point recommends, and the conditioning it is read from."""

    conditioning: EffectiveConditioning
    recommendations: tuple[Recommendation, ...]

    def __str__(self) -> str:
        said = [f"→ {item}" for item in self.recommendations] or ["→ nothing to recommend"]
        return "\n".join([str(self.conditioning), *said])


def recommend(
    looks: Sequence[EffectiveConditioning],
    *,
    gradient_norms: Sequence[float] = (),
    noise: GradientNoise | None = None,
    batch_size: int | None = None,
    model: nn.Module | None = None,
) -> tuple[Recommendation, ...]:
    """Everything the measurements support; the last look is the present state."""
    now = looks[-1]
    found = [
        _learning_rate(now),
        _adaptive(now),
        _layer_wise(now),
        _clipping(gradient_norms),
        _negative_curvature(now),
        _pre_norm(now, model),
        _batch(noise, batch_size),
    ]
    return tuple(item for item in found if item is not None)


def _judged(
    *, action: str, topic: str, measure: str, value: float, interval: Interval, threshold: float,
    evidence: str,
) -> Recommendation | None:  # fmt: skip
    """A recommendation when the value exceeds the threshold, as strong as its interval allows."""
    if not value > threshold:
        return None
    return Recommendation(
        action=action, topic=topic, measure=measure, value=value, interval=interval,
        threshold=threshold, strength="strong" if interval[0] > threshold else "weak",
        evidence=evidence,
    )  # fmt: skip


def _learning_rate(now: EffectiveConditioning) -> Recommendation | None:
    rate = now.learning_rate
    if rate is None:
        return None
    low, high = (rate * bound / 2 for bound in now.largest_interval)
    return _judged(
        action=f"lower the learning rate below {2 / now.largest:.3g}",
        topic="learning rate",
        measure="η·λmax/2",
        value=rate * now.largest / 2,
        interval=(low, high),
        threshold=1.0,
        evidence=f"sharpness {now.largest:.4g} exceeds 2/η = {2 / rate:.4g}: plain gradient "
        "descent leaves this point",
    )


def _adaptive(now: EffectiveConditioning) -> Recommendation | None:
    if not now.layers:
        return None
    order = sorted(now.layers, key=lambda layer: layer.sharpness)
    return _judged(
        action="use an adaptive optimizer (Adam, Shampoo)",
        topic="adaptive optimizer",
        measure="largest over smallest layer sharpness",
        value=now.heterogeneity,
        interval=now.heterogeneity_interval,
        threshold=LAYERS_DIFFER,
        evidence=f"{order[-1].name} is {now.heterogeneity:.3g} times as sharp as {order[0].name}: "
        "one step size for both is unstable in one or slow in the other",
    )


def _layer_wise(now: EffectiveConditioning) -> Recommendation | None:
    stack = [layer for layer in now.layers if layer.layer is not None and layer.sharpness > 0]
    if len(stack) < 2:
        return None
    top = max(stack, key=lambda layer: layer.sharpness)
    low = min(stack, key=lambda layer: layer.sharpness)
    return _judged(
        action="use layer-wise learning rates, in proportion to 1/λmax of each layer",
        topic="layer-wise rates",
        measure="ratio of sharpnesses within the stack",
        value=top.sharpness / low.sharpness,
        interval=(
            max(top.interval[0], 0.0) / low.interval[1],
            top.interval[1] / max(low.interval[0], 1e-300),
        ),
        threshold=LAYERS_DIFFER / 2,
        evidence=f"{top.name} has λmax {top.sharpness:.4g}, {low.name} {low.sharpness:.4g}",
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
    return _judged(
        action=f"clip gradients at about {2 * middle:.3g}",
        topic="clipping",
        measure="largest over median gradient norm",
        value=ratio,
        interval=(float(values.max() / high), float(values.max() / max(low, 1e-300))),
        threshold=SPIKE,
        evidence=f"the largest gradient of {len(values)} steps is {ratio:.3g} times the median",
    )


def _negative_curvature(now: EffectiveConditioning) -> Recommendation | None:
    low, high = (max(-bound, 0.0) / max(now.largest, 1e-300) for bound in now.smallest_interval)
    return _judged(
        action="use momentum or noise to leave the saddle, and clip the steps",
        topic="negative curvature",
        measure="|λmin|/λmax",
        value=now.indefiniteness,
        interval=(min(low, high), max(low, high)),
        threshold=SADDLE,
        evidence=f"the most negative eigenvalue is {now.smallest:.4g} against λmax "
        f"{now.largest:.4g} ({now.negative_mass:.0%} of all are negative)",
    )


def _pre_norm(now: EffectiveConditioning, model: nn.Module | None) -> Recommendation | None:
    """Only for post-norm stacks of three layers or more whose sharpness grows with depth."""
    stack = [layer for layer in now.layers if layer.layer is not None and layer.sharpness > 0]
    if model is None or len(stack) < 3 or not is_post_norm(model):
        return None
    depth = [float(layer.layer or 0) for layer in stack]
    fit = stats.linregress(depth, [float(np.log(layer.sharpness)) for layer in stack])
    half = float(stats.t.ppf(0.975, len(stack) - 2)) * float(fit.stderr)
    if fit.slope - half <= 0:
        return None  # a slope of either sign is no evidence of growth
    return _judged(
        action="use pre-norm blocks",
        topic="pre-norm",
        measure="growth of log λmax a layer",
        value=float(fit.slope),
        interval=(float(fit.slope - half), float(fit.slope + half)),
        threshold=0.0,
        evidence=f"sharpness grows by ×{float(np.exp(fit.slope)):.3g} a layer over {len(stack)} "
        "post-norm layers",
    )


def _batch(noise: GradientNoise | None, batch_size: int | None) -> Recommendation | None:
    if noise is None or batch_size is None or not np.isfinite(noise.value):
        return None
    low, high = noise.interval
    larger = _judged(
        action=f"use a larger batch, towards {noise.value:.3g}",
        topic="batch size",
        measure="critical batch size over batch size",
        value=noise.value / batch_size,
        interval=(low / batch_size, high / batch_size),
        threshold=BATCH_FACTOR,
        evidence=f"the critical batch size is {noise.value:.3g} [{low:.3g}, {high:.3g}], the batch "
        f"{batch_size}: steps are dominated by noise",
    )
    return larger or _judged(
        action=f"a smaller batch, about {noise.value:.3g}, learns as much a step",
        topic="batch size",
        measure="batch size over critical batch size",
        value=batch_size / noise.value,
        interval=(batch_size / high, batch_size / low if low > 0 else float("inf")),
        threshold=BATCH_FACTOR,
        evidence=f"the critical batch size is {noise.value:.3g} [{low:.3g}, {high:.3g}], the batch "
        f"{batch_size}",
    )


def is_post_norm(model: nn.Module) -> bool:
    """Whether blocks say of themselves that they normalise after the residual sum."""
    told = [bool(m.norm_first) for m in model.modules() if hasattr(m, "norm_first")]
    return bool(told) and not any(told)
