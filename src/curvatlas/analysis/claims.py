"""The sources' empirical claims, measured again on real data over seeds.

Every claim becomes one number whose sign or size decides it; its 95 % interval over seeds says
whether it holds, fails, or cannot be told. What differs from the papers is reported as found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from curvatlas.analysis.atlas import atlas
from curvatlas.analysis.atlas_result import Atlas
from curvatlas.analysis.comparisons import Spread, spread_of
from curvatlas.analysis.propagation_capture import capture
from curvatlas.analysis.propagation_dense import propagate
from curvatlas.analysis.propagation_local import Samples
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Result
from curvatlas.zoo import Dataset, ViT, ViTConfig, digits, fashion_mnist, mnist, train

ATTENTION = ("query", "key", "value", "output")
FEED_FORWARD = ("up", "down")


@dataclass(frozen=True, kw_only=True)
class Claim(Result):
    """One statement of a source and what was measured."""

    name: str
    statement: str
    source: str
    figure: str  # what the number is
    value: Spread
    threshold: float  # the claim says: above it
    verdict: str  # "holds", "fails" or "undecided"
    details: dict[str, Spread]

    def __str__(self) -> str:
        return f"{self.verdict:>9}  {self.statement} [{self.figure}: {self.value}]"


@dataclass(frozen=True, kw_only=True)
class ClaimReport(Result):
    """All claims on one data set."""

    dataset: str
    seeds: int
    accuracy: Spread  # on held-out samples after training
    claims: tuple[Claim, ...]

    def __getitem__(self, name: str) -> Claim:
        for claim in self.claims:
            if claim.name == name:
                return claim
        raise KeyError(f"there is no claim {name!r}; there are {[c.name for c in self.claims]}.")

    def __str__(self) -> str:
        head = f"{self.dataset}, {self.seeds} seeds, accuracy {self.accuracy}"
        return "\n".join([head, *(f"  {claim}" for claim in self.claims)])


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


def examine_claims(
    dataset: str | Dataset = "digits",
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    samples: int = 64,
    steps: int = 400,
    depths: Sequence[int] = (1, 2, 4),
    rtol: float = 0.08,
) -> ClaimReport:
    """Train the papers' ViT (one post-norm block of width 16) per seed and examine every claim."""
    data = load(dataset) if isinstance(dataset, str) else dataset
    batch = data.train.take(samples)

    def problem_of(model: ViT) -> Problem:
        return Problem(model, "cross_entropy", (batch.inputs, batch.targets))

    before: list[Atlas] = []
    after: list[Atlas] = []
    accuracy, slopes = [], []
    growth: dict[bool, list[float]] = {False: [], True: []}
    for seed in track(list(seeds), f"claims on {data.name}"):
        model = _model(data, seed)
        before.append(_atlas(problem_of(model), seed, rtol))
        slopes.append(norm_slope(problem_of(_model(data, seed).double()).with_data(
            (batch.inputs[:8].double(), batch.targets[:8]))))  # fmt: skip
        history = train(model, data, steps=steps, seed=seed)
        accuracy.append(history.validation_accuracy or float("nan"))
        after.append(_atlas(problem_of(model), seed, rtol))
        for norm_first, found in growth.items():
            norms = [
                _atlas(
                    problem_of(_model(data, seed, n_layers=n, norm_first=norm_first)), seed, rtol
                ).view("model")["model"]
                for n in depths
            ]
            found.append(float(np.polyfit(np.log(depths), np.log(norms), 1)[0]))
    claims = (
        *_dominance("initialisation", before),
        *_dominance("training", after),
        _grows(before, after),
        *_heterogeneity(before),
        _depth("post-norm", growth[False], depths),
        _depth("pre-norm", growth[True], depths),
        _norm_claim(slopes),
    )
    return ClaimReport(
        dataset=data.name, seeds=len(seeds), accuracy=spread_of(accuracy), claims=claims
    )


def _model(data: Dataset, seed: int, **options: Any) -> ViT:
    size = int(data.train.inputs.shape[-1])
    config: dict[str, Any] = {"image_size": size, "patch_size": size // 4, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ViT(ViTConfig(classes=data.classes, **config))


def _atlas(problem: Problem, seed: int, rtol: float) -> Atlas:
    return atlas(problem, method="sketch", rtol=rtol, seed=seed)


def _norms(found: Atlas, part: str = "total") -> dict[str, float]:
    own = found.view("role", part=part)
    return dict(zip(own.names, own.values.diagonal().tolist(), strict=True))


def _claim(
    name: str, statement: str, source: str, figure: str, values: Sequence[float], threshold: float,
    details: dict[str, Spread], *, ratio: bool = True,
) -> Claim:  # fmt: skip
    value = spread_of(values, ratio=ratio)
    low, high = value.interval
    verdict = "holds" if low > threshold else "fails" if high < threshold else "undecided"
    return Claim(
        name=name, statement=statement, source=source, figure=figure, value=value,
        threshold=threshold, verdict=verdict, details=details,
    )  # fmt: skip


def _dominance(when: str, atlases: Sequence[Atlas]) -> list[Claim]:
    """Petrov et al.: value- and key-related blocks dominate."""
    roles = [_norms(one) for one in atlases]
    details = {
        role: spread_of((r[role] for r in roles), ratio=True)
        for role in (*ATTENTION, *FEED_FORWARD)
        if role in roles[0]
    }
    source = "Petrov et al., entry heat maps"

    def ratio(top: str, bottom: Sequence[str]) -> list[float]:
        return [r[top] / max(r[b] for b in bottom if b in r) for r in roles]

    return [
        _claim(
            f"value dominates at {when}",
            f"the value block is the largest of attention at {when}", source,
            "‖H_VV‖ / largest other attention block",
            ratio("value", [r for r in ATTENTION if r != "value"]), 1.0, details,
        ),
        _claim(
            f"key above query at {when}", f"the key block exceeds the query block at {when}",
            source, "‖H_KK‖ / ‖H_QQ‖", ratio("key", ["query"]), 1.0, details,
        ),
        _claim(
            f"key above feed-forward at {when}",
            f"the key block exceeds the feed-forward blocks at {when}", source,
            "‖H_KK‖ / largest of up and down", ratio("key", FEED_FORWARD), 1.0, details,
        ),
        _claim(
            f"value above feed-forward at {when}",
            f"the value block exceeds the feed-forward blocks at {when}", source,
            "‖H_VV‖ / largest of up and down", ratio("value", FEED_FORWARD), 1.0, details,
        ),
    ]  # fmt: skip


def _grows(before: Sequence[Atlas], after: Sequence[Atlas]) -> Claim:
    ratios = [
        b.view("model")["model"] / a.view("model")["model"]
        for a, b in zip(before, after, strict=True)
    ]
    details = {
        role: spread_of(
            (_norms(b)[role] / _norms(a)[role] for a, b in zip(before, after, strict=True)),
            ratio=True,
        )
        for role in (*ATTENTION, *FEED_FORWARD)
    }
    return _claim(
        "norm grows in training", "Hessian magnitudes grow with training",
        "Petrov et al., heat maps after training", "‖H after‖_F / ‖H before‖_F", ratios, 1.0,
        details,
    )  # fmt: skip


def _heterogeneity(atlases: Sequence[Atlas]) -> list[Claim]:
    """Ormaniec et al.: blocks differ in what makes them up and in size."""
    shares: dict[str, list[float]] = {role: [] for role in ATTENTION}
    for one in atlases:
        outer, functional = _norms(one, "outer"), _norms(one, "functional")
        for role, found in shares.items():
            found.append(outer[role] ** 2 / (outer[role] ** 2 + functional[role] ** 2))
    details = {role: spread_of(values) for role, values in shares.items()}
    spread = [
        max(_norms(one)[r] for r in ("query", "key", "value"))
        / min(_norms(one)[r] for r in ("query", "key", "value"))
        for one in atlases
    ]
    source = "Ormaniec et al., Theorems 3.1 and 3.2"
    return [
        _claim(
            "value is Gauss-Newton, query is not",
            "the outer product makes up more of the value block than of the query block", source,
            "difference of ‖H_o‖² / (‖H_o‖² + ‖H_f‖²)",
            [v - q for v, q in zip(shares["value"], shares["query"], strict=True)], 0.0, details,
            ratio=False,
        ),
        _claim(
            "blocks are heterogeneous", "query, key and value blocks differ tenfold", source,
            "largest / smallest of ‖H_QQ‖, ‖H_KK‖, ‖H_VV‖", spread, 10.0, details,
        ),
    ]  # fmt: skip


def _depth(kind: str, slopes: Sequence[float], depths: Sequence[int]) -> Claim:
    return _claim(
        f"norm grows with depth, {kind}", f"‖H‖_F grows with the number of {kind} blocks",
        "the article and Ormaniec et al.", f"log-log slope over depths {tuple(depths)}", slopes,
        0.0, {}, ratio=False,
    )  # fmt: skip


def _norm_claim(slopes: Sequence[float]) -> Claim:
    """THEORY 3.2: ‖Ψ(δ)‖ ≤ √2 ‖δ‖ / (√d σ²), so created curvature falls like 1/variance."""
    return _claim(
        "norm curvature falls with the variance of a token",
        "what LayerNorm creates per slope falls like 1 / variance of the token",
        "LayerNorm closed form", "−(log-log slope) of ‖created‖/‖δ‖ against the variance",
        [-s for s in slopes], 0.5, {}, ratio=False,
    )  # fmt: skip


def norm_slope(problem: Problem) -> float:
    """Slope of log(‖created here‖ / ‖γδ‖) against log(variance) over tokens and norms."""
    batch = next(problem.batches())
    points: list[tuple[float, float]] = []
    with problem.evaluating():
        captured = capture(problem, batch)
        view = Samples(batch.samples)
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
