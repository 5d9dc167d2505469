"""The sources' empirical claims, measured again on real data over seeds.

Every claim becomes one number whose sign or size decides it; its 95 % interval over seeds says
whether it holds, fails, or cannot be told. What differs from the papers is reported as found.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from curvatlas.analysis.atlas import atlas
from curvatlas.analysis.atlas_result import Atlas
from curvatlas.analysis.claims_statements import (
    ClaimReport,
    dominance,
    growth_in_training,
    growth_with_depth,
    heterogeneity,
    norm_curvature,
)
from curvatlas.analysis.comparisons import spread_of
from curvatlas.analysis.propagation_capture import capture
from curvatlas.analysis.propagation_dense import propagate
from curvatlas.analysis.propagation_local import Samples
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Result
from curvatlas.runs import Run, fingerprints
from curvatlas.zoo import Dataset, ViT, ViTConfig, digits, fashion_mnist, mnist, train


def load(name: str) -> Dataset:
    """ "digits" (always there), "fashion_mnist" or "mnist" (where installed)."""
    loaders: dict[str, Callable[[], Dataset]] = {
        "digits": digits,
        "fashion_mnist": fashion_mnist,
        "mnist": mnist,
    }
    if name not in loaders:
        raise ValueError(f"data sets are {', '.join(loaders)}, got {name!r}.")
    return loaders[name]()


@dataclass(frozen=True, kw_only=True)
class SeedOfClaims(Result):
    """Everything that is measured with one seed."""

    before: Atlas
    after: Atlas
    accuracy: float
    slope: float  # of what LayerNorm creates against the variance of a token
    growth: tuple[float, float]  # log-log slopes of ‖H‖_F with depth: post-norm, pre-norm


def examine_claims(
    dataset: str | Dataset = "digits",
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    samples: int = 64,
    steps: int = 400,
    depths: Sequence[int] = (1, 2, 4),
    rtol: float = 0.08,
    output: str | os.PathLike[str] | None = None,
) -> ClaimReport:
    """Train the papers' ViT (one post-norm block of width 16) per seed and examine every claim.

    output: a run folder; each finished seed is stored, and the same call resumes it.
    """
    if len(seeds) < 2:
        raise ValueError(f"an interval over seeds needs at least 2 seeds, got {len(seeds)}.")
    if len(set(depths)) < 2 or min(depths) < 1:
        raise ValueError(f"growth with depth needs 2 different depths of 1 or more, got {depths}.")
    data = load(dataset) if isinstance(dataset, str) else dataset
    options = {
        "seeds": list(seeds), "samples": samples, "steps": steps, "depths": list(depths),
        "rtol": rtol,
    }  # fmt: skip

    def one(seed: int) -> SeedOfClaims:
        return _measure(data, seed, samples, steps, depths, rtol)

    chosen = track(list(seeds), f"claims on {data.name}")
    if output is None:
        return _report(data, [one(seed) for seed in chosen], depths)
    batches = [tuple(data.train), tuple(data.validation)]
    with Run.create(
        output,
        options=options,
        model_fingerprint=fingerprints.of_model(_model(data, 0)),
        data_fingerprint=fingerprints.of_data(batches),
    ) as run:
        found = [run.step(f"seed{seed}", functools.partial(one, seed)) for seed in chosen]
        return run.step("claims", lambda: _report(data, found, depths))


def _measure(
    data: Dataset, seed: int, samples: int, steps: int, depths: Sequence[int], rtol: float
) -> SeedOfClaims:
    batch = data.train.take(samples)

    def look(model: ViT) -> Atlas:
        problem = Problem(model, "cross_entropy", (batch.inputs, batch.targets))
        return atlas(problem, method="sketch", rtol=rtol, seed=seed)

    model = _model(data, seed)
    before = look(model)
    few = batch.inputs[:8].double(), batch.targets[:8]
    slope = norm_slope(Problem(_model(data, seed).double(), "cross_entropy", few))
    history = train(model, data, steps=steps, seed=seed)
    growth = []
    for norm_first in (False, True):
        norms = [
            look(_model(data, seed, n_layers=n, norm_first=norm_first)).view("model")["model"]
            for n in depths
        ]
        growth.append(float(np.polyfit(np.log(depths), np.log(norms), 1)[0]))
    return SeedOfClaims(
        before=before,
        after=look(model),
        accuracy=history.validation_accuracy or float("nan"),
        slope=slope,
        growth=(growth[0], growth[1]),
    )


def _report(data: Dataset, found: Sequence[SeedOfClaims], depths: Sequence[int]) -> ClaimReport:
    before, after = [one.before for one in found], [one.after for one in found]
    claims = (
        *dominance("initialisation", before),
        *dominance("training", after),
        growth_in_training(before, after),
        *heterogeneity(before),
        growth_with_depth("post-norm", [one.growth[0] for one in found], depths),
        growth_with_depth("pre-norm", [one.growth[1] for one in found], depths),
        norm_curvature([one.slope for one in found]),
    )
    return ClaimReport(
        dataset=data.name,
        seeds=len(found),
        accuracy=spread_of(one.accuracy for one in found),
        claims=claims,
    )


def _model(data: Dataset, seed: int, **options: Any) -> ViT:
    size = int(data.train.inputs.shape[-1])
    config: dict[str, Any] = {"image_size": size, "patch_size": size // 4, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ViT(ViTConfig(classes=data.classes, **config))


def norm_slope(problem: Problem) -> float:
    """Slope of log(‖created here‖ / ‖γδ‖) against log(variance) over tokens and norms."""
    batch = next(problem.batches())
    points: list[tuple[float, float]] = []
    with problem.evaluating():
        captured = capture(problem, batch)
        view = Samples(batch.length)
        for step in propagate(problem, batch, captured, view):
            if step.node.kind != "norm":
                continue
            parent, _, made = step.through[0]
            width = parent.tensor.shape[-1]
            tokens = made.shape[1] // width
            own = made.reshape(view.count, tokens, width, tokens, width).diagonal(dim1=1, dim2=3)
            created = own.pow(2).sum((1, 2)).sqrt()  # (samples, tokens)
            slope = step.slope.reshape(view.count, tokens, width).norm(dim=-1)
            variance = parent.tensor.detach().reshape(view.count, tokens, width)
            variance = variance.var(-1, unbiased=False)
            alive = (slope > 0) & (created > 0)
            x, y = variance[alive].log(), (created[alive] / slope[alive]).log()
            # Each norm has its own gain and level: centre before pooling.
            points += list(zip((x - x.mean()).tolist(), (y - y.mean()).tolist(), strict=True))
    array = np.array(points)
    deviation = float((array[:, 0] ** 2).sum())
    return float((array[:, 0] * array[:, 1]).sum() / deviation) if deviation > 0 else math.nan
