r"""Petrov et al., Figs. 1, 6 and 12: one more sample, at the weights w* that training ends at.

    L_{k+1} − L_k = (ℓ_{k+1} − L_k) / (k + 1)      at any fixed weights, whatever the losses ℓ are

so that a slope of −1 is arithmetic: independent noise, and weights that were never trained, stand
beside w* in every picture. ∇L_k(w*) is a running mean as well: its noise falls like k^(−1/2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvatlas.analysis.landscape.convergence import Bins, matched_noise, moved
from curvatlas.figures.style import BLUE, GREEN, MUTED, ORANGE
from curvatlas.fits import Array, mean_reach
from curvatlas.operators.per_sample import pieces, sample_losses, weighted_losses
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Interval, Result
from curvatlas.studies.papers.exhibits import Ask, exhibit
from curvatlas.studies.papers.petrov_models import BATCH, SOURCE, setting_of, trained
from curvatlas.studies.papers.reproduction import (
    Finding,
    Mark,
    Panel,
    Reproduction,
    finding,
    near,
    tensor,
)

_ORDERS = 40  # random orders of the samples
_FEWEST = 16  # groups of samples that a curve takes
_PASSES = 20  # over 50,000 images: a million samples, as in the paper
_SMOOTHING = 0.98  # of the paper's moving average, inferred from the bend of its curve
_LAST_DECADE = 0.1  # of the samples: from there on the slope is fitted, as above 1e5 of 1e6
_SLOPE, _WITHIN = -1.01, 0.1
_ZERO = 0.1  # of the gradient before training
_OWN = "a model and data of yours"
_EVIDENCE = "as evidence about the Hessian"
_ITSELF = "the slope itself"


# --- Fig. 1 --------------------------------------------------------------------------------------

_FEW = 8  # samples of L_k: few, so that one more can be seen
_LINES = 8  # directions, each with a new sample
_REACH = 0.2  # of ‖w*‖, to both sides


@exhibit(
    "petrov-fig1",
    shows="a sketch of L_k and L_{k+1} near w*, here as they are along random directions",
    claim="the landscapes of k and k + 1 samples lie close together near w*, apart beyond it",
    source=f"{SOURCE}, Fig. 1",
    seconds=8,
    takes=("data",),
)
def figure_1(ask: Ask) -> Reproduction:
    """Both losses on lines through w*, and the gap at w* beside the gap at the ends of the line."""
    chosen = setting_of(ask, "mnist")
    one = trained(ask, "mnist", ask.seed, chosen.steps)
    problem = chosen.problem(one.after, _FEW + _LINES)
    generator = torch.Generator().manual_seed(ask.seed)
    places = torch.linspace(-_REACH, _REACH, 11, dtype=torch.float64)
    gaps, curves = [], []
    for line in track(range(_LINES), "lines"):
        losses = _along(problem, places, generator)  # (places, samples)
        before = losses[:, :_FEW].mean(1)
        after = (before * _FEW + losses[:, _FEW + line]) / (_FEW + 1)
        curves.append((before, after))
        size = (after - before).abs()
        gaps.append(float(size[len(places) // 2] / ((size[0] + size[-1]) / 2)))
    marks = [
        Mark(x=places, y=tensor(y), label=label, colour=colour, style="line")
        for y, label, colour in zip(curves[0], ("L_k", "L_{k+1}"), (BLUE, ORANGE), strict=True)
    ]
    told = "gap at w* over the gap at the ends of the line"
    return Reproduction(
        findings=(
            finding(told, *_factor(np.array(gaps)), paper="smaller near w*", accepted=(0.0, 1.0)),
        ),
        panels=(
            Panel(
                title=f"k = {_FEW}, one of {_LINES} directions",
                xlabel="distance from w* over ‖w*‖",
                ylabel="loss",
                marks=tuple(marks),
                dotted=(0.0,),
            ),
        ),
        setting=f"{chosen.told}, {one.accuracy:.0%} right after {chosen.steps} steps",
        smaller=chosen.smaller,
    )


def _along(problem: Problem, places: Tensor, generator: torch.Generator) -> Tensor:
    """ℓ_i at w* + t ‖w*‖ u for a random unit vector u: (places, samples)."""
    start = problem.parameters.detach()
    direction = torch.randn(len(start), generator=generator).to(start)
    step = direction / direction.norm() * start.norm()
    return torch.stack(
        [sample_losses(moved(problem, float(t), step), limit=_FEW + _LINES) for t in places]
    )


# --- Fig. 6 ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LossesAtWeights(Result):
    """ℓ_i of the training samples at the weights before and after training."""

    after: Tensor  # (n,)
    before: Tensor | None  # None: of a model of the user's
    setting: str
    smaller: tuple[str, ...]


def _losses(ask: Ask) -> LossesAtWeights:
    if ask.problem is not None:
        after = weighted_losses(ask.problem)[1]
        return LossesAtWeights(after=after, before=None, setting=_OWN, smaller=())
    chosen = setting_of(ask, "cifar")
    steps, limit = (250, chosen.data.train.size) if ask.full else (60, 8192)
    sizes = {} if ask.full or chosen.real else {"n_layers": 4, "d_model": 64, "d_ff": 256}
    one = trained(ask, "cifar", ask.seed, steps, **sizes)
    samples = chosen.data.train.take(limit)
    data = [tuple(batch) for batch in samples.batches(BATCH)]
    after, before = (
        weighted_losses(Problem(model, "cross_entropy", data))[1]
        for model in (one.after, one.before)
    )
    smaller = [*chosen.smaller, f"trained for {steps} steps of {BATCH}"]
    smaller += [] if ask.full else [f"{samples.size:,} images in each of the {_PASSES} passes"]
    smaller += ["4 blocks of width 64"] if sizes else []
    setting = f"{chosen.told}, {one.accuracy:.0%} right after {steps} steps"
    return LossesAtWeights(after=after, before=before, setting=setting, smaller=tuple(smaller))


@exhibit(
    "petrov-fig6",
    shows="|L(k+1) − L(k)| at w* against the number of samples",
    claim="it falls like 1/k: slope −1.01 above 1e5 samples, as Theorem 7 bounds it",
    source=f"{SOURCE}, Fig. 6",
    seconds=15,
    takes=("model", "data"),
)
def figure_6(ask: Ask) -> Reproduction:
    """A point a batch of 128 over 20 passes; beside w*: pure noise, and untrained weights."""
    found: LossesAtWeights = ask.step("losses", lambda: _losses(ask))
    values = {"at w*": found.after}
    draw = matched_noise(found.after, ask.seed + 1)
    if found.before is not None:
        values["at the start"] = found.before
    unit = min(BATCH, len(found.after) // _FEWEST)
    curves = {
        name: _passes(functools.partial(Tensor.clone, v), unit, ask.seed)
        for name, v in values.items()
    }
    curves["noise"] = _passes(draw, unit, ask.seed)
    findings, slopes = slope_findings(curves, unit)
    total = _PASSES * len(found.after)
    if total > 4e4:
        ours = curves["at w*"]
        bend = [_slope(*_between(ours.k * unit, row, 1e4, 4e4)) for row in ours.smooth]
        told = "slope between 1e4 and 4e4: a moving average forgetting its start"
        findings.append(near(told, *_mean(bend), paper=-2.2, within=0.5, where="the bend"))
    return Reproduction(
        findings=tuple(findings),
        panels=(_decay_panel(curves, unit, "|L(k+1) − L(k)|", slope=-1.0),),
        setting=found.setting,
        smaller=found.smaller,
        notes=(
            "at fixed weights L(k+1) − L(k) = (ℓ(k+1) − L(k))/(k + 1): independent noise has the "
            "slope too, so it says nothing about curvature",
            "CIFAR-100 was not to be had: CIFAR-10 is the nearest real thing",
        ),
        numbers={"slopes": slopes, "samples": total},
    )


@dataclass(frozen=True)
class Decay:
    """A quantity against k over random orders: bins (b,), rows (orders, b), moving averages."""

    k: Array
    rows: Array
    smooth: Array


def _passes(draw: Callable[[], Tensor], unit: int, seed: int) -> Decay:
    """|L_{k+1} − L_k| over batches of ``unit`` samples, pass after pass in a new order each."""
    generator = torch.Generator().manual_seed(seed)
    rows, smooth = [], []
    for _ in range(_ORDERS):
        values = draw()
        whole = len(values) // unit * unit
        orders = [torch.randperm(len(values), generator=generator)[:whole] for _ in range(_PASSES)]
        steps = running_steps(values[torch.cat(orders)].view(-1, unit).mean(1))
        bins = Bins(len(steps) + 1)
        rows.append(bins.mean(steps))
        smooth.append(bins.mean(_moving_average(steps)))
    return Decay(bins.centres, np.stack(rows), np.stack(smooth))


def running_steps(values: Tensor) -> Array:
    """|L_{k+1} − L_k| for k = 1 … n − 1 of values (n,)."""
    counts = torch.arange(1, len(values) + 1, dtype=torch.float64)
    running = values.double().cumsum(0) / counts
    steps: Array = (running[1:] - running[:-1]).abs().numpy()
    return steps


def _moving_average(steps: Array) -> Array:
    """s_t = 0.98 s_{t−1} + 0.02 d_t from s_0 = d_0."""
    from scipy.signal import lfilter

    share = 1 - _SMOOTHING
    smooth: Array = lfilter([share], [1, -_SMOOTHING], steps, zi=[_SMOOTHING * steps[0]])[0]
    return smooth


def slope_findings(curves: dict[str, Decay], unit: int) -> tuple[list[Finding], dict[str, Any]]:
    """The slope at w* beside the paper's, and whether it differs from that of the controls."""
    slopes = {}
    for name, curve in curves.items():
        start = curve.k[-1] * _LAST_DECADE
        slopes[name] = [_slope(*_between(curve.k, row, start, math.inf)) for row in curve.rows]
    start = curves["at w*"].k[-1] * _LAST_DECADE * unit
    told = f"slope of |L(k+1) − L(k)| at w* from k = {start:.2g} on"
    ours = _mean(slopes["at w*"])
    findings = [near(told, *ours, paper=_SLOPE, within=_WITHIN, where=_ITSELF)]
    apart: dict[str, list[float]] = {
        name: [a - b for a, b in zip(slopes["at w*"], of, strict=True)]
        for name, of in slopes.items()
        if name != "at w*"
    }
    for name, gaps in apart.items():
        middle, (low, high) = _mean(gaps)
        size = sorted((abs(low), abs(high)))
        size[0] = 0.0 if low <= 0 <= high else size[0]
        told = f"distance from the slope of {'pure noise' if name == 'noise' else 'no training'}"
        findings.append(
            finding(
                told,
                abs(middle),
                (size[0], size[1]),
                paper=f"its own slope, > {_WITHIN:g} from any control",
                accepted=(_WITHIN, math.inf),
                where=_EVIDENCE,
            )
        )
    return findings, {name: [*_mean(of)] for name, of in slopes.items()}


def _between(k: Array, row: Array, low: float, high: float) -> tuple[Array, Array]:
    chosen = (k >= low) & (k <= high) & (row > 0)
    return k[chosen], row[chosen]


def _slope(k: Array, row: Array) -> float:
    return float(np.polyfit(np.log(k), np.log(row), 1)[0]) if len(k) > 2 else math.nan


def _mean(values: list[float]) -> tuple[float, Interval]:
    """The mean over orders, and its 95 % interval."""
    middle, reach = float(np.mean(values)), mean_reach(values)
    return middle, (middle - reach, middle + reach)


def _decay_panel(curves: dict[str, Decay], unit: int, what: str, *, slope: float) -> Panel:
    """The moving average in blue, the controls behind, guides of the slope grey and dashed."""
    colours = dict(zip(("at w*", "noise", "at the start"), (BLUE, ORANGE, GREEN), strict=True))
    marks = []
    for name, curve in curves.items():
        x, colour = tensor(curve.k * unit), colours[name]
        smooth = curve.smooth.mean(0)
        marks.append(Mark(x=x, y=tensor(smooth), label=name, colour=colour, style="line"))
        raw = curve.rows.mean(0)
        marks.append(Mark(x=x, y=tensor(raw), colour=colour, style="points", faint=True))
    first = curves["at w*"]
    top = float(first.rows.mean(0)[-1] * (first.k[-1] ** -slope))
    for factor in (0.1, 1.0, 10.0):
        y = tensor(factor * top * first.k**slope)
        label = f"slope {slope:g}" if factor == 1 else ""
        marks.append(Mark(x=tensor(first.k * unit), y=y, label=label, colour=MUTED, style="dashed"))
    return Panel(
        title=what, xlabel="samples k", ylabel=what, xscale="log", yscale="log", marks=tuple(marks)
    )


# --- Fig. 12 --------------------------------------------------------------------------------------


@exhibit(
    "petrov-fig12",
    shows="the gradient ∇L_k(w*) against the number of samples: is Assumption 1 met?",
    claim="its validity rises with the samples: ∇L_k(w*) → 0",
    source=f"{SOURCE}, Fig. 12",
    seconds=10,
    takes=("model", "data"),
)
def figure_12(ask: Ask) -> Reproduction:
    """Norms of running means of gradients at w*, beside signs drawn at random for every sample."""
    gradients = ask.step("gradients", lambda: _gradients(ask))
    curves = {
        "at w*": _norms(gradients.rows, ask.seed, signs=False),
        "noise": _norms(gradients.rows, ask.seed, signs=True),
    }
    norms = curves["at w*"].rows
    falls = _factor(norms[:, -1] / norms[:, 0])
    slopes = {name: _mean([_slope(c.k, row) for row in c.rows]) for name, c in curves.items()}
    findings = [
        finding(
            f"‖∇L(w*)‖ of {gradients.samples:,} samples over that of {2 * gradients.unit}",
            *falls,
            paper="falls",
            accepted=(0.0, 0.9),
            where="falling with k",
        ),
    ]
    if gradients.before is not None:
        left = gradients.rows.norm(dim=1) / gradients.before
        findings.append(
            finding(
                f"‖∇L‖ of {gradients.unit} samples at w* over that before training",
                *_mean(left.tolist()),
                paper="0",
                accepted=(0.0, _ZERO),
                where="zero at every k",
            )
        )
    return Reproduction(
        findings=tuple(findings),
        panels=(_decay_panel(curves, gradients.unit, "‖∇L_k(w*)‖", slope=-0.5),),
        setting=gradients.setting,
        smaller=gradients.smaller,
        notes=(
            "the mean of independent gradients falls like k^(−1/2) until it reaches ∇L of all "
            "samples; Assumption 1 asks for zero at every k",
        ),
        numbers={"slopes": slopes},
    )


@dataclass(frozen=True, kw_only=True)
class GradientsAtWeights(Result):
    """Mean gradients of small groups of samples at w*."""

    rows: Tensor  # (groups, P)
    before: Tensor | None  # (groups,) norms before training; None: a model of the user's
    unit: int  # samples in a group
    samples: int
    setting: str
    smaller: tuple[str, ...]


def _gradients(ask: Ask) -> GradientsAtWeights:
    unit, limit = (BATCH, None) if ask.full else (8, 1024)
    smaller = [] if limit is None else [f"groups of {unit}, {limit:,} samples"]
    before = None
    if ask.problem is not None:
        rows, setting = _by_group(ask.problem, unit), _OWN
    else:
        chosen = setting_of(ask, "mnist")
        one = trained(ask, "mnist", ask.seed, chosen.steps)
        count = limit or chosen.data.train.size
        rows = _by_group(chosen.problem(one.after, count), unit)
        before = _by_group(chosen.problem(one.before, count), unit).norm(dim=1)
        setting = f"{chosen.told}, {one.accuracy:.0%} right after {chosen.steps} steps"
        smaller += chosen.smaller
    return GradientsAtWeights(
        rows=rows,
        before=before,
        unit=unit,
        samples=len(rows) * unit,
        setting=setting,
        smaller=tuple(smaller),
    )


def _by_group(problem: Problem, unit: int) -> Tensor:
    """∇L of every ``unit`` samples: (groups, P)."""
    rows = [
        problem.with_batches([piece]).gradient().cpu()
        for piece in track(pieces(problem, unit), "gradients")
        if piece.samples == unit
    ]
    if len(rows) < _FEWEST:
        raise ValueError(
            f"gradients against k need {_FEWEST} groups of {unit} samples, the data give "
            f"{len(rows)}: give more samples (--samples)."
        )
    return torch.stack(rows)


def _norms(gradients: Tensor, seed: int, *, signs: bool) -> Decay:
    """‖∇L_k‖ for k = 2, 3 … groups in random orders; signs: each group with a random sign.

    gradients: (groups, P). The signs leave the size of every gradient and take away their mean.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(gradients)
    counts = torch.arange(1, count + 1, dtype=torch.float64)
    bins = Bins(count)
    rows = []
    for _ in range(_ORDERS):
        drawn = gradients[torch.randperm(count, generator=generator)].double()
        if signs:
            drawn = drawn * (2.0 * torch.randint(2, (count, 1), generator=generator) - 1.0)
        norms = (drawn.cumsum(0) / counts[:, None]).norm(dim=1)
        rows.append(bins.mean(norms[1:].numpy()))
    return Decay(bins.centres, np.stack(rows), np.stack(rows))


def _factor(ratios: Array) -> tuple[float, Interval]:
    """The geometric mean of ratios over orders, and its 95 % interval."""
    middle, (low, high) = _mean(list(np.log(ratios)))
    return math.exp(middle), (math.exp(low), math.exp(high))
