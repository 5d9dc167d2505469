"""Does flatness tell how well a model generalises? Rank correlations over many small models.

Models differ in width, depth, learning rate, batch size, weight decay and number of samples. For
each, the measures of ``ca.flatness`` on its training data stand beside the gap, test loss minus
training loss; Kendall's τ says whether they order the models alike. Its interval comes from drawing
models with replacement, the control from shuffling the gaps.

>>> found = examine_generalisation("digits", models=24, output="runs/gap")   # doctest: +SKIP
>>> print(found)                                                             # doctest: +SKIP
"""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn

from curvatlas.analysis.landscape.flatness import MEASURES, flatness
from curvatlas.fits import Array
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Interval, Result
from curvatlas.runs import Run, subject
from curvatlas.studies.claims import load
from curvatlas.surveying import Step, recorded
from curvatlas.zoo import Dataset, ViT, ViTConfig, evaluate, train

# what the models differ in; every level of an axis is used equally often
AXES: dict[str, tuple[float, ...]] = {
    "width": (8, 12, 16),
    "depth": (1, 2),
    "rate": (3e-3, 8e-3, 2e-2),
    "batch_size": (16, 64),
    "weight_decay": (0.0, 0.1, 1.0),
    "samples": (100, 220, 480),
}
# plain numbers beside which a measure of flatness has to be worth its cost
BASELINES = {
    "samples": "number of training samples",
    "train_loss": "training loss",
    "parameters": "number of parameters",
    "weight_norm": "norm of the weights",
    "distance": "distance from initialisation",
}
_TEST_SAMPLES = 1000
_RESAMPLES = 2000
_AT_ONCE = 2**21  # signs that exist at the same time
_FEWEST_MODELS = 5
MakeModel = Callable[..., nn.Module]  # of width= and depth=


@dataclass(frozen=True, kw_only=True)
class StudiedModel(Result):
    """One trained model: how it was made, what it reached, its measures."""

    options: dict[str, float]
    train_loss: float
    test_loss: float
    train_error: float
    test_error: float
    measures: dict[str, float]

    @property
    def gap(self) -> float:
        """Test loss − training loss."""
        return self.test_loss - self.train_loss


@dataclass(frozen=True, kw_only=True)
class MeasureCorrelation(Result):
    """Kendall's τ of a measure with the gap."""

    measure: str
    value: float
    interval: Interval  # 95 %, over models drawn with replacement
    control: Interval  # where 95 % of the values lie when the gaps are shuffled
    p_value: float  # of no association

    def __str__(self) -> str:
        (low, high), (first, last) = self.interval, self.control
        return (
            f"{self.measure:<34}{self.value:+.2f} [{low:+.2f}, {high:+.2f}], p = {self.p_value:.1e}"
            f", shuffled [{first:+.2f}, {last:+.2f}]"
        )


@dataclass(frozen=True, kw_only=True)
class Generalisation(Result):
    """Rank correlations of every measure with the generalisation gap."""

    dataset: str
    models: tuple[StudiedModel, ...]
    correlations: tuple[MeasureCorrelation, ...]
    left_out: tuple[str, ...]  # models that did not train, and why

    def _rows(self) -> list[dict[str, Any]]:
        """A row a measure."""
        return [row._one_row()[0] for row in self.correlations]

    def __str__(self) -> str:
        gaps = [model.gap for model in self.models]
        head = (
            f"{self.dataset}: {len(self.models)} models, gaps {min(gaps):.3g} to {max(gaps):.3g}; "
            "Kendall's τ with the gap [95 %]"
        )
        rows = sorted(self.correlations, key=lambda row: -abs(row.value))
        return "\n".join([head, *(f"  {row}" for row in rows), *self.left_out])


def rank_correlations(
    measures: Mapping[str, Sequence[float]], gaps: Sequence[float], *, seed: int = 0
) -> tuple[MeasureCorrelation, ...]:
    """Kendall's τ-b of each measure with the gaps, one number a model.

    Measures that are no number for some model are left out of the answer.
    """
    count = len(gaps)
    if count < _FEWEST_MODELS:
        raise ValueError(
            f"a rank correlation with an interval takes {_FEWEST_MODELS} models, got {count}."
        )
    target = np.asarray(gaps, dtype=np.float64)
    if not np.isfinite(target).all():
        raise ValueError("the gaps hold NaN or infinity: leave out models that did not train.")
    random = np.random.default_rng(seed)
    again = random.integers(count, size=(_RESAMPLES, count))
    shuffled = random.permuted(np.tile(np.arange(count), (_RESAMPLES, 1)), axis=1)
    rows = []
    for name, values in measures.items():
        x = np.asarray(values, dtype=np.float64)
        if x.shape != target.shape:
            raise ValueError(f"{name} has {len(x)} values for {count} models.")
        if not np.isfinite(x).all():
            continue
        whole = stats.kendalltau(x, target)
        drawn = _kendall(x[again], target[again])
        control = _kendall(np.broadcast_to(x, shuffled.shape), target[shuffled])
        rows.append(
            MeasureCorrelation(
                measure=name,
                value=float(whole.statistic) if math.isfinite(whole.statistic) else 0.0,
                interval=_middle(drawn),
                control=_middle(control),
                p_value=float(whole.pvalue) if math.isfinite(whole.pvalue) else 1.0,
            )
        )
    return tuple(rows)


def _kendall(x: Array, y: Array) -> Array:
    """τ-b of each row of (k, n) by the signs of differences; zero where a row is constant."""
    values = []
    for some in np.array_split(np.arange(len(x)), max(1, x.size * x.shape[1] // _AT_ONCE)):
        first, second = (np.sign(part[some, :, None] - part[some, None]) for part in (x, y))
        ties = np.sqrt(np.abs(first).sum((1, 2)) * np.abs(second).sum((1, 2)))
        values.append((first * second).sum((1, 2)) / np.maximum(ties, 1.0))
    return np.concatenate(values)


def _middle(values: Array) -> Interval:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def configurations(
    models: int, *, axes: Mapping[str, Sequence[float]] = AXES, seed: int = 0
) -> list[dict[str, float]]:
    """``models`` combinations of the axes, each level as often as the others (one apart)."""
    random = np.random.default_rng(seed)
    columns = {
        name: random.permutation([levels[i % len(levels)] for i in range(models)])
        for name, levels in axes.items()
    }
    return [{name: float(column[i]) for name, column in columns.items()} for i in range(models)]


def examine_generalisation(
    dataset: str | Dataset = "digits",
    *,
    make: MakeModel | None = None,
    axes: Mapping[str, Sequence[float]] | None = None,
    models: int = 24,
    steps: int = 300,
    products: int = 60,
    draws: int = 40,
    seed: int = 0,
    output: str | os.PathLike[str] | Run | None = None,
) -> Generalisation:
    """Train ``models`` models on parts of the data set and correlate every measure with the gap.

    dataset: "digits", "fashion_mnist", "mnist", or a ``zoo.Dataset`` with classes.
    make: ``make(width=…, depth=…)`` gives a model (default: a ViT for the data's images).
    axes: levels other than those of ``AXES``, by name.
    steps: of training, for each. products, draws: of ``ca.flatness``. output: a run folder, or an
    open ``Run``; each finished model is stored, and the same call resumes it.
    """
    if models < _FEWEST_MODELS:
        raise ValueError(f"a rank correlation takes {_FEWEST_MODELS} models, got {models}.")
    data = load(dataset) if isinstance(dataset, str) else dataset
    levels = levels_of(axes, data)
    chosen = configurations(models, axes=levels, seed=seed)
    making = make or functools.partial(_vit, data)

    def one(place: int) -> StudiedModel:
        return _studied(data, making, chosen[place], steps, products, draws, seed + place)

    def work(step: Step) -> Generalisation:
        places = track(range(models), f"models on {data.name}", total=models)
        studied = [step(f"model{place}", functools.partial(one, place)) for place in places]
        result: Generalisation = step("generalisation", lambda: _judged(data.name, studied, seed))
        return result

    options = {
        "command": "generalisation",
        "data": data.name,
        "axes": {name: list(some) for name, some in levels.items()},
        "models": models,
        "steps": steps,
        "products": products,
        "draws": draws,
        "seed": seed,
    }
    fingerprints = {
        "model_fingerprint": subject.of_model(_made(making, chosen[0], seed)),
        "data_fingerprint": subject.of_data([tuple(data.train), tuple(data.validation)]),
    }
    return recorded(fingerprints, output, options, work)


def levels_of(axes: Mapping[str, Sequence[float]] | None, data: Dataset) -> dict[str, list[float]]:
    """The levels of every axis, checked against the data."""
    unknown = sorted(set(axes or {}) - set(AXES))
    if unknown:
        raise ValueError(f"axes are {', '.join(AXES)}, got {', '.join(unknown)}.")
    levels = {name: [float(v) for v in (axes or {}).get(name, own)] for name, own in AXES.items()}
    for name, some in levels.items():
        least = 0.0 if name == "weight_decay" else 1e-300
        if not some or not all(least <= value < math.inf for value in some):
            raise ValueError(f"the levels of {name} are positive numbers, got {some}.")
    if max(levels["samples"]) > data.train.size:
        raise ValueError(
            f"{data.name} has {data.train.size} training samples and the study asks for "
            f"{max(levels['samples']):g}: give smaller levels of samples (--sizes)."
        )
    if data.classes < 2 or not data.validation.size:
        raise ValueError(f"{data.name} has no classes or no validation samples to judge by.")
    return levels


def _vit(data: Dataset, *, width: int, depth: int) -> ViT:
    """A ViT of 16 patches, or as near to it as the images' side allows."""
    shape = tuple(getattr(data.train.inputs, "shape", ()))
    if len(shape) not in (3, 4) or shape[-1] != shape[-2]:
        raise ValueError(
            f"{data.name} holds no square images: pass make= (--model), a function of width and "
            "depth that gives a model for it."
        )
    side = int(shape[-1])
    return ViT(
        ViTConfig(
            image_size=side,
            patch_size=next(p for p in range(max(side // 4, 1), 0, -1) if side % p == 0),
            channels=1 if len(shape) == 3 else int(shape[1]),
            classes=data.classes,
            d_model=width,
            n_layers=depth,
            d_ff=2 * width,
            norm_first=True,
        )
    )


def _made(make: MakeModel, options: Mapping[str, float], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(width=int(options["width"]), depth=int(options["depth"]))


def _studied(
    data: Dataset,
    make: MakeModel,
    options: Mapping[str, float],
    steps: int,
    products: int,
    draws: int,
    seed: int,
) -> StudiedModel:
    model = _made(make, options, seed)
    start = copy.deepcopy(model)
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(data.train.size, generator=random)[: int(options["samples"])]
    samples = (data.train.inputs[chosen], data.train.targets[chosen])
    train(
        model,
        samples,
        steps=steps,
        lr=options["rate"],
        batch_size=int(options["batch_size"]),
        weight_decay=options["weight_decay"],
        seed=seed,
    )
    model.eval()
    problem = Problem(model, "cross_entropy", samples)
    found = flatness(problem, prior=start, starts=1, products=products, draws=draws, seed=seed)
    _, train_accuracy = evaluate(model, samples)
    test_loss, test_accuracy = evaluate(model, data.validation.take(_TEST_SAMPLES))
    first = torch.cat([p.detach().reshape(-1) for p in start.parameters()])
    return StudiedModel(
        options=dict(options),
        train_loss=found.loss,
        test_loss=test_loss,
        train_error=1 - (train_accuracy or 0.0),
        test_error=1 - (test_accuracy or 0.0),
        measures={
            **found.measures,
            "train_loss": found.loss,
            "samples": options["samples"],
            "parameters": float(problem.size),
            "weight_norm": float(problem.parameters.norm()),
            "distance": float((problem.parameters - first).norm()),
        },
    )


def _judged(name: str, studied: Sequence[StudiedModel], seed: int) -> Generalisation:
    trained = [one for one in studied if math.isfinite(one.gap)]
    left_out = tuple(
        f"left out: {one.options}, whose loss is no number"
        for one in studied
        if not math.isfinite(one.gap)
    )
    words = {**MEASURES, **BASELINES}
    measures = {words[key]: [one.measures[key] for one in trained] for key in words}
    return Generalisation(
        dataset=name,
        models=tuple(trained),
        correlations=rank_correlations(measures, [one.gap for one in trained], seed=seed),
        left_out=left_out,
    )
