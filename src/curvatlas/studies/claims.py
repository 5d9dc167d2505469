"""The sources' empirical claims, measured again on real data over seeds.

Every claim becomes one number whose sign or size decides it; its 95 % interval over seeds says
whether it holds, fails, or cannot be told. What differs from the papers is reported as found. (The
theorems are judged exactly, seed by seed, in ``theory/statements.py``.)
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

from curvatlas.analysis.atlas.mapping import atlas
from curvatlas.analysis.atlas.result import Atlas
from curvatlas.analysis.propagation.capture import capture
from curvatlas.analysis.propagation.dense import propagate
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Result
from curvatlas.runs import Run, subject
from curvatlas.studies.comparisons import Spread, spread_of
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


def _norms(one: Atlas, part: str = "total") -> dict[str, float]:
    roles = one.view("role", part=part)
    return dict(zip(roles.names, roles.values.diagonal().tolist(), strict=True))


def _entry_sizes(one: Atlas) -> dict[str, float]:
    """Root mean square entry of every role's own block: what the papers' heat maps show."""
    roles = one.view("role")
    sizes: dict[str, int] = dict.fromkeys(roles.names, 0)
    for name, size in one.sizes.items():
        role = next((r for r in roles.names if name == r or name.endswith(f".{r}")), None)
        if role is not None:
            sizes[role] += size
    return {role: norm / sizes[role] for role, norm in _norms(one).items() if sizes[role]}


def claim(
    name: str,
    statement: str,
    source: str,
    figure: str,
    values: Sequence[float],
    threshold: float,
    details: dict[str, Spread],
    *,
    ratio: bool = True,
) -> Claim:
    """Judged by the interval of ``values`` over seeds: above, below or across the threshold."""
    value = spread_of(values, ratio=ratio)
    low, high = value.interval
    return Claim(
        name=name,
        statement=statement,
        source=source,
        figure=figure,
        value=value,
        threshold=threshold,
        verdict="holds" if low > threshold else "fails" if high < threshold else "undecided",
        details=details,
    )


def dominance(when: str, atlases: Sequence[Atlas]) -> list[Claim]:
    """Petrov et al.: value- and key-related blocks dominate."""
    roles = [_norms(one) for one in atlases]
    details = {
        role: spread_of((r[role] for r in roles), ratio=True)
        for role in (*ATTENTION, *FEED_FORWARD)
        if role in roles[0]
    }
    others = [role for role in ATTENTION if role != "value"]
    largest_other, widest = "largest other attention block", "largest of up and down"
    exceeds = "exceeds the feed-forward blocks"
    rows = (
        # role, those it is compared with, the claim's name and words, what it is divided by
        ("value", others, "dominates", "is the largest of attention", largest_other),
        ("key", ["query"], "above query", "exceeds the query block", "‖H_QQ‖"),
        ("key", FEED_FORWARD, "above feed-forward", exceeds, widest),
        ("value", FEED_FORWARD, "above feed-forward", exceeds, widest),
    )
    source = "Petrov et al., entry heat maps"
    claims = []
    for role, compared, name, words, under in rows:
        ratios = [r[role] / max(r[other] for other in compared if other in r) for r in roles]
        figure = f"‖H_{role[0].upper() * 2}‖ / {under}"
        told = (f"{role} {name} at {when}", f"the {role} block {words} at {when}", source, figure)
        claims.append(claim(*told, ratios, 1.0, details))
    sizes = [_entry_sizes(one) for one in atlases]
    return [
        *claims,
        claim(
            f"value entries above feed-forward at {when}",
            f"entries of the value block exceed those of the feed-forward blocks at {when}",
            source,
            "root mean square entry of H_VV / largest of up and down",
            [e["value"] / max(e[f] for f in FEED_FORWARD) for e in sizes],
            1.0,
            {},
        ),
    ]


def growth_in_training(before: Sequence[Atlas], after: Sequence[Atlas]) -> Claim:
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
    return claim(
        "norm grows in training",
        "Hessian magnitudes grow with training",
        "Petrov et al., heat maps after training",
        "‖H after‖_F / ‖H before‖_F",
        ratios,
        1.0,
        details,
    )


def heterogeneity(atlases: Sequence[Atlas]) -> list[Claim]:
    """Ormaniec et al.: blocks differ in what makes them up and in size."""
    shares: dict[str, list[float]] = {role: [] for role in ATTENTION}
    for one in atlases:
        outer, functional = _norms(one, "outer"), _norms(one, "functional")
        for role, of_role in shares.items():
            of_role.append(outer[role] ** 2 / (outer[role] ** 2 + functional[role] ** 2))
    details = {role: spread_of(values) for role, values in shares.items()}
    spread = [
        max(_norms(one)[r] for r in ("query", "key", "value"))
        / min(_norms(one)[r] for r in ("query", "key", "value"))
        for one in atlases
    ]
    source = "Ormaniec et al., Theorems 3.1 and 3.2"
    return [
        claim(
            "value is Gauss-Newton, query is not",
            "the outer product makes up more of the value block than of the query block",
            source,
            "difference of ‖H_o‖² / (‖H_o‖² + ‖H_f‖²)",
            [v - q for v, q in zip(shares["value"], shares["query"], strict=True)],
            0.0,
            details,
            ratio=False,
        ),
        claim(
            "blocks are heterogeneous",
            "query, key and value blocks differ tenfold",
            source,
            "largest / smallest of ‖H_QQ‖, ‖H_KK‖, ‖H_VV‖",
            spread,
            10.0,
            details,
        ),
    ]


def growth_with_depth(kind: str, slopes: Sequence[float], depths: Sequence[int]) -> Claim:
    return claim(
        f"norm grows with depth, {kind}",
        f"‖H‖_F grows with the number of {kind} blocks",
        "the article and Ormaniec et al.",
        f"log-log slope over depths {tuple(depths)}",
        slopes,
        0.0,
        {},
        ratio=False,
    )


def norm_curvature(slopes: Sequence[float]) -> Claim:
    """derivations §5: ‖Ψ(δ)‖ ≤ √2 ‖δ‖ / (√d σ²), so created curvature falls like 1/variance."""
    return claim(
        "norm curvature falls with the variance of a token",
        "what LayerNorm creates per slope falls like 1 / variance of the token",
        "LayerNorm closed form",
        "−(log-log slope) of ‖created‖/‖δ‖ against the variance",
        [-s for s in slopes],
        0.5,
        {},
        ratio=False,
    )


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
        "seeds": list(seeds),
        "samples": samples,
        "steps": steps,
        "depths": list(depths),
        "rtol": rtol,
    }

    def one(seed: int) -> SeedOfClaims:
        return _measure(data, seed, samples, steps, depths, rtol)

    chosen = track(list(seeds), f"claims on {data.name}")
    if output is None:
        return _report(data, [one(seed) for seed in chosen], depths)
    batches = [tuple(data.train), tuple(data.validation)]
    with Run.create(
        output,
        options=options,
        model_fingerprint=subject.of_model(_model(data, 0)),
        data_fingerprint=subject.of_data(batches),
    ) as run:
        measured = [run.step(f"seed{seed}", functools.partial(one, seed)) for seed in chosen]
        return run.step("claims", lambda: _report(data, measured, depths))


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


def _report(data: Dataset, measured: Sequence[SeedOfClaims], depths: Sequence[int]) -> ClaimReport:
    before, after = [one.before for one in measured], [one.after for one in measured]
    claims = (
        *dominance("initialisation", before),
        *dominance("training", after),
        growth_in_training(before, after),
        *heterogeneity(before),
        growth_with_depth("post-norm", [one.growth[0] for one in measured], depths),
        growth_with_depth("pre-norm", [one.growth[1] for one in measured], depths),
        norm_curvature([one.slope for one in measured]),
    )
    return ClaimReport(
        dataset=data.name,
        seeds=len(measured),
        accuracy=spread_of(one.accuracy for one in measured),
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
        samples = batch.length
        for step in propagate(problem, batch, captured, samples):
            if step.node.kind != "norm":
                continue
            parent, _, made = step.through[0]
            width = parent.tensor.shape[-1]
            tokens = made.shape[1] // width
            token_blocks = made.reshape(samples, tokens, width, tokens, width).diagonal(
                dim1=1, dim2=3
            )
            created = token_blocks.pow(2).sum((1, 2)).sqrt()  # (samples, tokens)
            slope = step.slope.reshape(samples, tokens, width).norm(dim=-1)
            variance = parent.tensor.detach().reshape(samples, tokens, width)
            variance = variance.var(-1, unbiased=False)
            alive = (slope > 0) & (created > 0)
            x, y = variance[alive].log(), (created[alive] / slope[alive]).log()
            # Each norm has its own gain and level: centre before pooling.
            points += list(zip((x - x.mean()).tolist(), (y - y.mean()).tolist(), strict=True))
    array = np.array(points)
    deviation = float((array[:, 0] ** 2).sum())
    return float((array[:, 0] * array[:, 1]).sum() / deviation) if deviation > 0 else math.nan
