"""The first paper's pictures of entries: histograms of the value and query blocks, heat maps.

They show one model, ``ormaniec_gpt(16, seed=1234)``: of two orders of drawing its weights the one
with the modes and maxima that the paper reports. The paper's sums are not known: the intervals
are those over sums drawn anew, and say nothing of other models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from curvatlas.analysis.atlas.entries import Entries, entries
from curvatlas.figures.maps import cells
from curvatlas.fits import mean_reach
from curvatlas.problem import Problem
from curvatlas.results import Interval
from curvatlas.studies.papers.exhibits import Ask, exhibit
from curvatlas.studies.papers.ormaniec_growth import geometric
from curvatlas.studies.papers.reproduction import (
    Finding,
    Mark,
    Panel,
    Reproduction,
    finding,
    near,
    tensor,
    within_factor,
)
from curvatlas.zoo import five_digit_addition, ormaniec_gpt
from curvatlas.zoo.addition import inputs_first

WIDTH, FIRST_SEED = 16, 1234
BINS = {"value": 49, "query": 29}  # bars of the paper's histograms
EPS = 1e-6  # added to |h| in the paper's heat maps
COLOURS = {"value": "#7570b3", "query": "#1b9e77"}
LETTERS = {"query": "Q", "key": "K", "value": "V", "output": "O"}
_SOURCE = "Ormaniec et al., ICLR 2025"
_MODEL = "five-digit addition, model of width 16, cross-entropy"
_FACTOR_2 = math.log10(2)


def seeds(ask: Ask, count: int) -> range:
    """Of the sums."""
    return range(FIRST_SEED + ask.seed, FIRST_SEED + ask.seed + count)


def problem_of(seed: int, *, samples: int, batches: int, softmax: bool = True) -> Problem:
    """The paper's model on sums of this seed, in float64."""
    model = ormaniec_gpt(WIDTH, seed=FIRST_SEED, softmax=softmax).double()
    data = five_digit_addition(samples, seed=seed, batches=batches)
    return Problem(model, "cross_entropy", data)


@functools.lru_cache(maxsize=64)
def two_blocks(seed: int, *, softmax: bool = True) -> Entries:
    """H(V, V) and H(Q, Q) of the paper's model over 8 batches of 8."""
    problem = problem_of(seed, samples=8, batches=8, softmax=softmax)
    return entries(problem, blocks=["value", "query"])


def block(found: Entries, role: str) -> str:
    """The name of the first block of this role."""
    return next(name for name in found.names if name.split(".")[-1] == role)


def mode(found: Entries, role: str) -> float:
    """The middle of the fullest bar."""
    edges, counts = found.histogram(block(found, role), bins=BINS[role])
    fullest = int(counts.argmax())
    return float(np.sqrt(edges[fullest] * edges[fullest + 1]))


def largest(found: Entries, role: str) -> float:
    return float(found.block(block(found, role)).abs().max())


def _over(values: Sequence[float]) -> tuple[float, Interval | None]:
    """Of the draws; of a single one there is no interval."""
    return geometric(values) if len(values) > 1 else (values[0], None)


def bars(found: Entries, role: str, *, faint: bool = False, label: str = "") -> Mark:
    edges, counts = found.histogram(block(found, role), bins=BINS[role])
    return Mark(
        x=tensor(edges),
        y=tensor(counts),
        style="bars",
        colour=COLOURS[role],
        faint=faint,
        label=label,
    )


def _panel(role: str, *marks: Mark) -> Panel:
    letter = LETTERS[role]
    return Panel(
        title=f"H({letter}, {letter})",
        xlabel="absolute entry",
        ylabel="entries",
        xscale="log",
        marks=marks,
    )


# --- Figures 1a and 4 -----------------------------------------------------------------------------


@exhibit(
    "ormaniec-fig1a",
    shows="Histograms of the absolute entries of H(V, V) above those of H(Q, Q)",
    claim="modes 1.7e-5 (V) and 7.7e-7 (Q), maxima 2.3e-3 and 9.0e-6: Q lies 10 to 100 times below",
    source=f"{_SOURCE}, Figure 1a",
    seconds=8,
    takes=("model",),
)
def figure_1a(ask: Ask) -> Reproduction:
    """Exact blocks of 256 × 256."""
    own = ask.attention("ormaniec-fig1a")
    if own is not None:
        several = [entries(own, blocks=["value", "query"], most=1024, seed=ask.seed)]
    else:
        several = [two_blocks(seed) for seed in seeds(ask, 20 if ask.full else 6)]
    gaps = [mode(one, "value") / mode(one, "query") for one in several]
    value, interval = _over(gaps)
    findings = [
        finding("mode of V over mode of Q", value, interval, paper="10 to 100", accepted=(10, 100))
    ]
    if own is None:
        findings += _numbers(several, {"value": 1.7e-5, "query": 7.7e-7}, mode, "mode")
        findings += _numbers(several, {"value": 2.3e-3, "query": 9.0e-6}, largest, "maximum")
    return Reproduction(
        id="",
        shows="",
        source="",
        claim="",
        findings=tuple(findings),
        panels=tuple(_panel(role, bars(several[0], role)) for role in ("value", "query")),
        shared="x",
        setting=f"{_MODEL}, 8 batches of 8" if own is None else _own(own),
        notes=_seeds_told(len(several)),
    )


def _own(problem: Problem) -> str:
    return f"{type(problem.model).__name__}, {problem.size} parameters"


def _numbers(
    several: Sequence[Entries],
    paper: dict[str, float],
    read: Callable[[Entries, str], float],
    what: str,
) -> list[Finding]:
    result = []
    for role, expected in paper.items():
        value, interval = _over([read(one, role) for one in several])
        result.append(within_factor(f"{what} of {LETTERS[role]}", value, interval, paper=expected))
    return result


def _seeds_told(count: int) -> tuple[str, ...]:
    if count < 2:
        return ()
    return (
        f"intervals over {count} draws of the sums, the first one is shown",
        "the weights were chosen by the paper's numbers, of two orders of drawing them",
    )


@exhibit(
    "ormaniec-fig4",
    shows="The histograms of Figure 1a without softmax, those with softmax faint behind",
    claim="without softmax the mode of V stays at 1.7e-5, that of Q rises 40 times to 3.2e-5",
    source=f"{_SOURCE}, Figure 4",
    seconds=8,
)
def figure_4(ask: Ask) -> Reproduction:
    """The same weights with and without softmax."""
    chosen = seeds(ask, 20 if ask.full else 6)
    linear = [two_blocks(seed, softmax=False) for seed in chosen]
    softmax = [two_blocks(seed) for seed in chosen]
    pairs = list(zip(linear, softmax, strict=True))
    rise, reach = _over([mode(a, "query") / mode(b, "query") for a, b in pairs])
    above, above_reach = _over([mode(a, "query") / mode(a, "value") for a in linear])
    findings = [
        *_numbers(linear, {"value": 1.7e-5, "query": 3.2e-5}, mode, "mode"),
        finding("rise of the mode of Q", rise, reach, paper="× 40", accepted=(10, math.inf)),
        finding(
            "mode of Q over mode of V", above, above_reach, paper="1.9", accepted=(1, math.inf)
        ),
    ]
    panels = [
        _panel(
            role,
            bars(softmax[0], role, faint=True, label="softmax"),
            bars(linear[0], role, label="no softmax"),
        )
        for role in ("value", "query")
    ]
    return Reproduction(
        id="",
        shows="",
        source="",
        claim="",
        findings=tuple(findings),
        panels=tuple(panels),
        columns=2,
        shared="y",
        setting=f"{_MODEL}, 8 batches of 8, no softmax",
        notes=_seeds_told(len(linear)),
    )


# --- Figure 1b ------------------------------------------------------------------------------------

_ORDER = (
    ("embedding.token", "W_E"),
    ("embedding.position", "W_pos"),
    ("query", "Q"),
    ("key", "K"),
    ("value", "V"),
    ("output", "O"),
    ("up", "W_in"),
    ("up_bias", "b_in"),
    ("down", "W_out"),
    ("down_bias", "b_out"),
    ("head.weight", "W_U"),
    ("head.bias", "b_U"),
)
_LEVELS = {("query", "query"): -5.8, ("query", "key"): -5.7, ("value", "value"): -4.6,
           ("output", "output"): -4.5}  # fmt: skip
_ATTENTION = ("query", "key", "value", "output")


@exhibit(
    "ormaniec-fig1b",
    shows="Heat maps of the Hessian of the whole block and of self-attention",
    claim="log10 of the entries: QQ −5.8, QK −5.7, VV −4.6, OO −4.5; VV ≥ 10 × QQ and KK",
    source=f"{_SOURCE}, Figure 1b",
    seconds=8,
    takes=("model",),
)
def figure_1b(ask: Ask) -> Reproduction:
    """3,836 × 3,836 entries, log10(|h| + 1e-6) blurred over 5 × 5, one scale for both."""
    own = ask.attention("ormaniec-fig1b", _ATTENTION)
    if own is not None:
        maps = {"Transformer": (found := entries(own, seed=ask.seed))}
        names = [name for name in found.names if name.split(".")[-1] in _ATTENTION]
        maps["Self-Attention"] = found.only(*names)
        return _heat_maps(maps, _levels([found], {}), _own(own), 1)
    samples = 64
    chosen = seeds(ask, 20 if ask.full else 5)
    problem = problem_of(chosen[0], samples=samples, batches=1)
    whole = as_printed(entries(problem), problem)
    attention = whole.only(*(block(whole, role) for role in _ATTENTION))
    others = [
        entries(problem_of(seed, samples=samples, batches=1), blocks=_ATTENTION, most=512)
        for seed in chosen[1:]
    ]
    maps = {"Transformer Block": whole, "Self-Attention": attention}
    findings = _levels([attention, *others], _LEVELS)
    return _heat_maps(maps, findings, f"{_MODEL}, one batch of {samples}", len(chosen))


def as_printed(found: Entries, problem: Problem) -> Entries:
    """Blocks in the paper's order, the entries of a weight as those of x W, W (in, out)."""
    known = {piece.name: piece for piece in problem.anatomy.slices}
    starts = dict(zip(found.names, accumulate((0, *found.sizes)), strict=False))
    names = [
        name
        for wanted, _ in _ORDER
        for name in found.names
        if name == wanted or name.split(".")[-1] == wanted
    ]
    places = []
    for name in names:
        size = found.sizes[found.names.index(name)]
        weight = problem.named_weights()[known[name].parameter]
        inside = torch.arange(size)
        if weight.ndim == 2 and not name.startswith("embedding"):
            inside = inputs_first(weight)
        places.append(starts[name] + inside)
    order = torch.cat(places)
    sizes = tuple(len(one) for one in places)
    matrix = found.matrix[order][:, order]
    return Entries(matrix=matrix, part=found.part, names=tuple(names), sizes=sizes, whole=sizes)


def _levels(several: Sequence[Entries], paper: dict[tuple[str, str], float]) -> list[Finding]:
    """How bright blocks are, and whether V's is ten times brighter than those of Q and K."""
    result = []
    for (row, column), expected in paper.items():
        levels = [one.level(block(one, row), block(one, column), eps=EPS) for one in several]
        middle, reach = float(np.mean(levels)), mean_reach(levels)
        what = f"log10 of the entries of {LETTERS[row]}{LETTERS[column]}"
        interval = (middle - reach, middle + reach)
        result.append(near(what, middle, interval, paper=expected, within=_FACTOR_2))
    for role in ("query", "key"):
        ratios = [mean_size(one, "value") / mean_size(one, role) for one in several]
        value, span = _over(ratios)
        what = f"mean entry of VV over that of {LETTERS[role] * 2}"
        result.append(finding(what, value, span, paper="≥ 10", accepted=(10.0, math.inf)))
    return result


def mean_size(found: Entries, role: str) -> float:
    return float(found.block(block(found, role)).abs().mean())


def _heat_maps(
    maps: dict[str, Entries], findings: Sequence[Finding], setting: str, models: int
) -> Reproduction:
    short = dict(_ORDER)
    panels = []
    for title, one in maps.items():
        image, step = cells(one.matrix, eps=EPS, blur=True)
        panels.append(
            Panel(
                title=title,
                ylabel="log10(|entry| + 1e-6)",
                image=image.log10().float(),
                borders=tuple(round(end / step) for end in accumulate(one.sizes))[:-1],
                blocks=tuple(
                    short.get(n, short.get(n.split(".")[-1], n.split(".")[-1])) for n in one.names
                ),
            )
        )
    ends = [
        float(end(p.image)) for p in panels for end in (torch.min, torch.max) if p.image is not None
    ]
    limits = min(ends), max(ends)
    return Reproduction(
        id="",
        shows="",
        source="",
        claim="",
        findings=tuple(findings),
        panels=tuple(replace(panel, limits=limits) for panel in panels),
        columns=2,
        setting=setting,
        notes=_seeds_told(models),
    )
