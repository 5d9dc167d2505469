"""Petrov et al., Figs. 3 to 5 and 7 to 11: entries and norms of the Hessian's blocks in training.

A block is as bright as the mean of log10(|h| + ε) over its entries. One model is drawn whole; the
models of the other seeds give the intervals, from rows drawn at random out of every block.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvatlas.analysis.atlas.entries import Entries, entries
from curvatlas.figures.maps import cells
from curvatlas.figures.style import BLUE, GREEN, ORANGE, SERIES
from curvatlas.fits import mean_reach
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Interval
from curvatlas.studies.papers.exhibits import Ask, exhibit
from curvatlas.studies.papers.petrov_models import (
    BATCH,
    SOURCE,
    setting_of,
    trained,
)
from curvatlas.studies.papers.reproduction import (
    Finding,
    Mark,
    Panel,
    Reproduction,
    finding,
    near,
    tensor,
)
from curvatlas.zoo import train

_APART = 0.2  # half the distance of two columns at one name
EPS = 1e-6  # added to every |entry|, as in the pictures of the papers
_ROWS = 480  # drawn out of all blocks, of the models that are not drawn whole
_QKV = ("query", "key", "value")
_AMONG, _ALL = "among Q, K, V", "among all blocks"
# The paper's blocks → ours. Its brightness was read off the pictures, ± 0.2.
_BLOCKS = {
    "patch": ("embedding.patch",),
    "query": ("blocks.0.query",),
    "key": ("blocks.0.key",),
    "value": ("blocks.0.value",),
    "norm 1": ("blocks.0.norm1.gamma", "blocks.0.norm1.beta"),
    "norm 2": ("blocks.0.norm2.gamma", "blocks.0.norm2.beta"),
    "head": ("head.weight",),
}
_AT_START = {
    "patch": -3.2, "query": -4.8, "key": -4.6, "value": -3.6, "norm 1": -2.7, "norm 2": -2.7,
    "head": -2.5,
}  # fmt: skip
_AFTER = {"patch": 0.4, "query": -1.1, "key": -0.6, "value": 0.4, "norm 1": 0.0}
# ×600 to 1e4 of every block but these, as factors
_GREW = {"norm 2": 1.3, "head": 0.4}


@dataclass(frozen=True)
class Looks:
    """One model before and after training: its entries and the norms of its parameters."""

    before: Entries
    after: Entries
    weights: tuple[dict[str, float], dict[str, float]]  # block → ‖W‖_F before, after
    accuracy: float


def looks(ask: Ask, seed: int, *, whole: bool) -> Looks:
    """Of the model of one seed; measured once in a process."""
    folder = None if ask.data is None else ask.data.resolve()
    return _looks(folder, seed, _samples(ask), whole)


@functools.lru_cache(maxsize=16)
def _looks(folder: Path | None, seed: int, samples: int, whole: bool) -> Looks:
    ask = Ask(data=folder)
    chosen = setting_of(ask, "mnist")
    one = trained(ask, "mnist", seed, chosen.steps)
    found, weights = [], []
    for model in (one.before, one.after):
        problem = chosen.problem(model, samples)
        found.append(entries(problem, most=4096 if whole else _ROWS, seed=seed))
        flat = problem.parameters.detach().double()
        weights.append(
            {piece.name: float(flat[piece.indices].norm()) for piece in problem.anatomy.slices}
        )
    return Looks(found[0], found[1], (weights[0], weights[1]), one.accuracy)


def _samples(ask: Ask) -> int:
    return BATCH if ask.full or ask.data is not None else 64


def _seeds(ask: Ask) -> range:
    return range(ask.seed, ask.seed + (10 if ask.full else 5))


def level(found: Entries, name: str) -> float:
    """Mean of log10(|h| + ε) over a block of the paper, its γ and β together."""
    names = [n for n in _BLOCKS.get(name, (name,)) if n in found.names]
    sizes = [found.whole[found.names.index(n)] ** 2 for n in names]
    levels = [found.level(n, eps=EPS) for n in names]
    return sum(s * v for s, v in zip(sizes, levels, strict=True)) / sum(sizes)


def _over(values: Sequence[float]) -> tuple[float, Interval]:
    """The mean over seeds, and its 95 % interval."""
    middle, reach = float(np.mean(values)), mean_reach(values)
    return middle, (middle - reach, middle + reach)


# --- Figs. 3 and 4 --------------------------------------------------------------------------------


@exhibit(
    "petrov-fig3",
    shows="entries of the Hessian at initialisation, whole and of self-attention",
    claim="value- and key-related blocks dominate; log10 |h|: VV −3.6, KK −4.6, QQ −4.8",
    source=f"{SOURCE}, Fig. 3",
    seconds=20,  # the next two read the same models
    takes=("model", "data"),
)
def figure_3(ask: Ask) -> Reproduction:
    """Two panels on one colour scale; who is brightest, and how bright beside the paper's."""
    if (problem := ask.attention("petrov-fig3", _QKV)) is not None:
        return _of_a_model(problem)
    several = [looks(ask, seed, whole=seed == ask.seed) for seed in _seeds(ask)]
    found = [one.before for one in several]
    return _heat_maps(ask, found, several, _AT_START, [], limits=(-6.0, -0.6))


@exhibit(
    "petrov-fig4",
    shows="the same after training",
    claim="every block grows, × 600 to 1e4; value dominates: VV +0.4, KK −0.6, QQ −1.1",
    source=f"{SOURCE}, Fig. 4",
    seconds=5,
    takes=("data",),
)
def figure_4(ask: Ask) -> Reproduction:
    """Fig. 3's panels after training on the paper's scale, and how every block grew."""
    several = [looks(ask, seed, whole=seed == ask.seed) for seed in _seeds(ask)]
    grew = {
        name: _over([level(one.after, name) - level(one.before, name) for one in several])
        for name in _BLOCKS
    }
    findings = [
        _factor(name, grew[name], paper="600 to 1e4", accepted=(600.0, 1e4), where="× 600 to 1e4")
        for name in _BLOCKS
        if name not in _GREW
    ]
    for name, factor in _GREW.items():
        near_it, where = (factor / 3, factor * 3), f"{name}'s own factor"
        findings.append(
            _factor(name, grew[name], paper=f"{factor:g}", accepted=near_it, where=where)
        )
    lowest = min(grew, key=lambda name: grew[name][0])
    findings.append(
        _factor(
            f"{lowest} (the least)",
            grew[lowest],
            paper="every block grows",
            accepted=(1.0, math.inf),
            where="growing at all",
        )
    )
    found = [one.after for one in several]
    return _heat_maps(ask, found, several, _AFTER, findings, limits=(-6.0, 2.0))


def _factor(
    name: str,
    decades: tuple[float, Interval],
    *,
    paper: str,
    accepted: Interval,
    where: str,
) -> Finding:
    middle, (low, high) = (decades[0], decades[1])
    told = f"growth of {name} in training"
    ends = (10.0**low, 10.0**high)
    return finding(told, 10.0**middle, ends, paper=paper, accepted=accepted, where=where)


def _heat_maps(
    ask: Ask,
    found: Sequence[Entries],
    several: Sequence[Looks],
    printed: Mapping[str, float],
    more: Sequence[Finding],
    *,
    limits: Interval,
) -> Reproduction:
    chosen = setting_of(ask, "mnist")
    levels = {name: [level(one, name) for one in found] for name in found[0].names}
    levels |= {name: [level(one, name) for one in found] for name in _BLOCKS}
    findings = [*_who_leads(levels), *more]
    for name, value in printed.items():
        told = f"mean log10 |h| of {name}"
        where = "brightness within a factor of 10"
        findings.append(near(told, *_over(levels[name]), paper=value, within=1.0, where=where))
    accuracy = np.mean([one.accuracy for one in several])
    smaller = [*chosen.smaller]
    smaller += [] if _samples(ask) == BATCH else [f"a batch of {_samples(ask)} instead of {BATCH}"]
    return Reproduction(
        findings=tuple(findings),
        panels=map_panels(found[0], limits),
        columns=2,
        setting=f"{chosen.told}, {len(found)} seeds, {chosen.steps} steps: {accuracy:.0%} right",
        smaller=tuple(smaller),
        notes=(
            "initialisation, optimizer, rate and number of steps are not in the paper: PyTorch's "
            "own initialisation, AdamW here",
        ),
        numbers={"levels": {name: _over(of) for name, of in levels.items()}},
    )


def _who_leads(levels: Mapping[str, Sequence[float]]) -> list[Finding]:
    """By how many decades VV is brighter than QQ and KK, and than every other diagonal block."""
    others = [n for n in levels if n.startswith(("blocks.", "embedding.", "head."))]
    others = [n for n in others if not n.endswith(_QKV)]
    rows = zip(*(levels[name] for name in _QKV), strict=True)
    among = [value - max(query, key) for query, key, value in rows]
    every = [
        value - max(levels[name][seed] for name in others)
        for seed, value in enumerate(levels["value"])
    ]
    return [
        _leads("VV brighter than QQ and KK, decades", among, _AMONG),
        _leads("VV brighter than every other block, decades", every, _ALL),
    ]


def _leads(what: str, values: Sequence[float], where: str) -> Finding:
    middle, ends = _over(values)
    interval = None if len(values) == 1 else ends
    return finding(
        what, middle, interval, paper="value dominates", accepted=(0.0, math.inf), where=where
    )


def map_panels(found: Entries, limits: Interval | None) -> tuple[Panel, ...]:
    """ "Hessian" and "Hessian (Self-Attention)": log10(|h| + ε), blurred over 5 × 5 entries."""
    attention = [name for name in found.names if name.endswith(_QKV)]
    panels = []
    for title, one in (
        ("Hessian", found),
        ("Hessian (Self-Attention)", found.only(*attention)),
    ):
        image, step = cells(one.matrix, eps=EPS, blur=True)
        borders = [round(end / step) for end in accumulate(one.sizes)][:-1]
        panels.append(
            Panel(
                title=title,
                ylabel="log10(|entry| + 1e-6)",
                image=image.log10().float(),
                limits=limits,
                borders=tuple(borders),
                blocks=tuple(_short(name) for name in one.names),
            )
        )
    if limits is None:
        low = min(float(p.image.min()) for p in panels if p.image is not None)
        high = max(float(p.image.max()) for p in panels if p.image is not None)
        return tuple(replace(panel, limits=(low, high)) for panel in panels)
    return tuple(panels)


def _short(name: str) -> str:
    return name.removeprefix("blocks.0.").removeprefix("embedding.").removesuffix(".weight")


def _of_a_model(problem: Problem) -> Reproduction:
    """The same panels of a model of the user's, at its present weights."""
    found = entries(problem)
    levels = {name: [found.level(name, eps=EPS)] for name in found.names}
    for role in _QKV:
        of_role = [v[0] for name, v in levels.items() if name.endswith(role)]
        levels[role] = [float(np.mean(of_role))]
    return Reproduction(
        findings=tuple(_who_leads(levels)),
        panels=map_panels(found, None),
        columns=2,
        setting="a model and data of yours, at its present weights",
        numbers={"levels": levels},
    )


# --- Fig. 5 ---------------------------------------------------------------------------------------


@exhibit(
    "petrov-fig5",
    shows="norms of parameter blocks, and of their Hessians",
    claim="keys and values highest, the others much smaller",
    source=f"{SOURCE}, Fig. 5",
    seconds=5,
    takes=("data",),
)
def figure_5(ask: Ask) -> Reproduction:
    """Bars of both norms at both stages; K and V against Q, W₁ and W₂."""
    chosen = setting_of(ask, "mnist")
    several = [looks(ask, seed, whole=seed == ask.seed) for seed in _seeds(ask)]
    names = several[0].before.names
    findings, panels = [], []
    for title, what, of in (
        ("‖W‖_F of the parameters", "W", _parameter_norm),
        ("‖H_WW‖_F of their Hessians", "H", _hessian_norm),
    ):
        marks = []
        for place, stage in enumerate(("at the start", "after training")):
            norms = {name: [of(one, place, name) for one in several] for name in names}
            findings += _dominance(f"norms of {what}", stage, norms)
            # ‖W‖ / √|W|, ‖H‖ / |W|: weights of different sizes side by side
            power = 0.5 if what == "W" else 1.0
            sizes = {
                name: [norm / size**power for norm in norms[name]]
                for name, size in zip(names, several[0].before.whole, strict=True)
            }
            findings += _dominance(f"root mean square entries of {what}", stage, sizes)
            x = torch.arange(len(names), dtype=torch.float64) + _APART * (2 * place - 1)
            look: dict[str, Any] = {"label": stage, "colour": (BLUE, ORANGE)[place]}
            marks.append(Mark(x=x, style="columns", **_geometric(list(norms.values())), **look))
        short = tuple(map(_short, names))
        panels.append(Panel(title=title, yscale="log", marks=tuple(marks), blocks=short))
    return Reproduction(
        findings=tuple(findings),
        panels=tuple(panels),
        columns=2,
        setting=f"{chosen.told}, {len(several)} seeds, {chosen.steps} steps",
        smaller=chosen.smaller,
        notes=("which norm and which stage is drawn is not in the paper: both stages, Frobenius",),
    )


def _geometric(rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Geometric means over seeds with their intervals; zero stays zero."""
    ends = []
    for values in rows:
        middle, (low, high) = _over(list(np.log(np.maximum(values, 1e-300))))
        alive = min(values) > 0
        ends.append([math.exp(end) if alive else 0.0 for end in (middle, low, high)])
    return dict(zip(("y", "low", "high"), tensor(ends).T, strict=True))


def _parameter_norm(one: Looks, stage: int, name: str) -> float:
    return one.weights[stage][name]


def _hessian_norm(one: Looks, stage: int, name: str) -> float:
    return (one.before, one.after)[stage].norm(name)


def _dominance(what: str, stage: str, norms: Mapping[str, Sequence[float]]) -> list[Finding]:
    """The smaller of K and V over the largest of Q, W₁, W₂, as a factor over seeds."""

    def of(role: str) -> Tensor:
        return torch.tensor(norms[f"blocks.0.{role}"], dtype=torch.float64)

    rest = torch.stack([of("query"), of("up"), of("down")]).max(0).values
    ratios = (torch.minimum(of("key"), of("value")) / rest).log()
    middle, (low, high) = _over(ratios.tolist())
    return [
        finding(
            "the smaller of K and V over the largest of Q, W₁, W₂",
            math.exp(middle),
            (math.exp(low), math.exp(high)),
            paper="others much smaller",
            accepted=(1.0, math.inf),
            where=f"{what} {stage}",
        )
    ]


# --- Figs. 7 to 11: the first 1000 steps ----------------------------------------------------------

_FIRST_STEPS = 1000
_SNAPSHOTS = (0, 1, 3, 10, 30, 100, 300, 600, 1000)
_FAMILIES = {
    "petrov-fig7": ("Queries", ("query",)),
    "petrov-fig8": ("Keys", ("key",)),
    "petrov-fig9": ("Values", ("value",)),
    "petrov-fig10": ("LayerNorm", ("norm1.gamma", "norm1.beta", "norm2.gamma", "norm2.beta")),
    "petrov-fig11": ("FeedForward", ("up", "down")),
}
_SHARES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Moment:
    """A family of blocks at one step."""

    weights: tuple[float, ...]  # quantiles of |w|
    norm: float
    curvature: tuple[float, ...]  # quantiles of |h|
    hessian: float  # root of the sum of the diagonal blocks' ‖H‖²


@functools.lru_cache(maxsize=16)
def _first_steps(folder: Path | None, seed: int, samples: int) -> dict[str, list[Moment]]:
    """Every family at every snapshot of the first 1000 steps."""
    chosen = setting_of(Ask(data=folder), "mnist")
    model: nn.Module = copy.deepcopy(chosen.model(seed))
    seen: dict[str, list[Moment]] = {name: [] for name in _FAMILIES}

    def look(step: int, loss: float = 0.0) -> None:
        if step not in _SNAPSHOTS:
            return
        problem = chosen.problem(copy.deepcopy(model), samples)  # type: ignore[arg-type]
        found = entries(problem, most=_ROWS, seed=seed)
        flat = problem.parameters.detach().double()
        at = {piece.name: flat[piece.indices] for piece in problem.anatomy.slices}
        for name, (_, roles) in _FAMILIES.items():
            blocks = [f"blocks.0.{role}" for role in roles]
            weights = torch.cat([at[block] for block in blocks])
            inside = torch.cat([found.block(block).flatten() for block in blocks]).double().abs()
            seen[name].append(
                Moment(
                    _quantiles(weights.abs()),
                    float(weights.norm()),
                    _quantiles(inside),
                    math.hypot(*(found.norm(block) for block in blocks)),
                )
            )

    how: dict[str, Any] = {"lr": 2e-3, "schedule": "constant", "batch_size": BATCH}
    train(model, chosen.data, steps=_FIRST_STEPS, seed=seed, on_step=look, **how)
    look(_FIRST_STEPS)
    return seen


def _quantiles(values: Tensor) -> tuple[float, ...]:
    return tuple(float(v) for v in np.quantile(values.numpy(), _SHARES))


def _over_steps(name: str, ask: Ask) -> Reproduction:
    folder = None if ask.data is None else ask.data.resolve()
    chosen, samples = setting_of(ask, "mnist"), BATCH if ask.full else 32
    seeds = range(ask.seed, ask.seed + (5 if ask.full else 3))
    runs = [_first_steps(folder, seed, samples)[name] for seed in track(seeds, name)]
    x = tensor([max(step, 0.5) for step in _SNAPSHOTS])
    told = _FAMILIES[name][0]

    def spread(which: str, label: str, colour: str) -> Mark:
        rows = [[getattr(run[k], which) for run in runs] for k in range(len(_SNAPSHOTS))]
        return Mark(x=x, label=label, colour=colour, **_geometric(rows))

    def quantiles(which: str) -> tuple[Mark, ...]:
        rows = np.array([getattr(moment, which) for moment in runs[0]])
        return tuple(
            Mark(x=x, y=tensor(rows[:, k]), label=f"{share:.0%}", colour=SERIES[k], style="line")
            for k, share in enumerate(_SHARES)
        )

    common: dict[str, Any] = {"xlabel": "step (0 at 0.5)", "xscale": "log", "yscale": "log"}
    both = (spread("norm", "‖W‖_F", GREEN), spread("hessian", "‖H_WW‖_F", BLUE))
    panels = (
        Panel(title=f"{told}: entries |w|", marks=quantiles("weights"), **common),
        Panel(title="norms, over seeds", marks=both, **common),
        Panel(title="entries |h| of its Hessian", marks=quantiles("curvature"), **common),
    )
    grew = [math.log(run[-1].hessian / run[0].hessian) for run in runs]
    middle, (low, high) = _over(grew)
    return Reproduction(
        findings=(
            finding(
                f"‖H‖ of {told} after {_FIRST_STEPS} steps over that before",
                math.exp(middle),
                (math.exp(low), math.exp(high)),
                paper="magnitudes grow with training",
                accepted=(1.0, math.inf),
            ),
        ),
        panels=panels,
        columns=3,
        setting=f"{chosen.told}, {len(runs)} seeds, entries of one",
        smaller=(*chosen.smaller, *(() if ask.full else (f"Hessians of {samples} samples",))),
        notes=("the panels of this figure were not seen: quantiles of entries, norms",),
    )


for _name, (_told, _) in _FAMILIES.items():
    exhibit(
        _name,
        shows=f"{_told}: entries, norms and Hessians over the first {_FIRST_STEPS} steps",
        claim="entries, norms and Hessians over training; magnitudes grow",
        source=f"{SOURCE}, Fig. {_name.removeprefix('petrov-fig')}",
        seconds=15 if _name == "petrov-fig7" else 2,  # one training for all five
        takes=("data",),
    )(functools.partial(_over_steps, _name))
