r"""The first paper's growth figures: block norms while the embeddings are drawn from N(0, σ²).

    y(σ) = ‖H_bb‖_F, the mean over models of √(mean of ‖H_bb z‖² over random signs z)

for the value block V and the query block Q, of H_o, H_f and H. Every model gives a slope of its
own; their mean and its Student interval stand beside the slope of the paper. By default the signs
and the embeddings of a model are the same at every σ, up to the factor σ: every point has the
paper's distribution, and a slope no noise from the draws (full: drawn anew, as in the paper).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from curvatlas.analysis.atlas.result import AtlasBlock, blocks_of
from curvatlas.figures.style import SERIES
from curvatlas.fits import mean_reach
from curvatlas.linear_operator import PARTS
from curvatlas.operators.curvature import CurvatureParts
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Interval, Result
from curvatlas.studies.growth import Growth, growth, pair_squares
from curvatlas.studies.papers.exhibits import Ask, exhibit
from curvatlas.studies.papers.reproduction import (
    REFUTED,
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
from curvatlas.zoo.addition import ANSWERS, VOCABULARY, redraw_embeddings

WIDTH, SAMPLES, FIRST_SEED = 128, 64, 1234
COLOURS = {"value": "#7570b3", "query": "#1b9e77"}
LETTERS = {"value": "V", "query": "Q", "key": "K"}
SYMBOLS = {"outer": "H_o", "functional": "H_f", "total": "H"}
SMALL = 0.1  # σ up to which theory speaks
_GUIDE = "#8c8c8c"
_CLOSE = 0.1  # slopes that count as the paper's
_FLAT = 0.2  # a slope that counts as none, beside one of −1.2
_TASK = "five-digit addition, one batch of 64, model of width 128"
_SOURCE = "Ormaniec et al., ICLR 2025"


@dataclass(frozen=True)
class Size:
    """How many models, probes and σ are measured: by default, and in the paper."""

    models: int
    probes: int
    points: int
    paper_points: int = 20

    def chosen(self, full: bool) -> tuple[int, int, int]:
        return (20, 20, self.paper_points) if full else (self.models, self.probes, self.points)

    def smaller(self, full: bool) -> tuple[str, ...]:
        if full:
            return ()
        return (
            f"{self.models} of 20 models",
            f"{self.probes} of 20 probes",
            f"{self.points} of {self.paper_points} values of σ",
            "one standard normal draw of the embeddings a model, times σ, not one a σ",
        )


@dataclass(frozen=True, kw_only=True)
class ModelNorms(Result):
    """Squared norms of the blocks of one model at every σ."""

    sigmas: tuple[float, ...]
    names: tuple[str, ...]
    squares: dict[str, Tensor]  # part → (σ, names, probes)

    def norms(self, part: str) -> Tensor:
        """‖·‖_F (σ, names)."""
        return self.squares[part].mean(2).sqrt()


@dataclass(frozen=True)
class Curves:
    """Norms of named blocks against σ, model by model."""

    sigmas: np.ndarray[Any, Any]
    norms: dict[tuple[str, str], np.ndarray[Any, Any]]  # (name, part) → (models, σ)

    def mean(self, name: str, part: str) -> np.ndarray[Any, Any]:
        return np.asarray(self.norms[name, part].mean(0))

    def error(self, name: str, part: str) -> np.ndarray[Any, Any]:
        """Standard error over models, as the paper's bars."""
        values = self.norms[name, part]
        return np.asarray(values.std(0, ddof=1) / math.sqrt(len(values)))

    def within(self, low: float, high: float) -> np.ndarray[Any, Any]:
        return np.asarray((self.sigmas >= low * (1 - 1e-9)) & (self.sigmas <= high * (1 + 1e-9)))

    def slope(self, name: str, part: str, low: float, high: float) -> tuple[float, Interval]:
        """Least squares on logarithms for σ in [low, high]: mean and 95 % interval over models."""
        inside = self.within(low, high)
        x = np.log(self.sigmas[inside])
        x = x - x.mean()
        with np.errstate(divide="ignore", invalid="ignore"):
            slopes = np.log(self.norms[name, part][:, inside]) @ x / (x @ x)
        return _mean(slopes)

    def at(self, name: str, part: str, sigma: float) -> tuple[float, Interval]:
        """The norm at the σ nearest to this one: geometric mean and 95 % interval over models.

        Where the softmax saturates a few models have norms far above the others.
        """
        return geometric(self.norms[name, part][:, int(np.abs(self.sigmas - sigma).argmin())])


def _mean(values: np.ndarray[Any, Any]) -> tuple[float, Interval]:
    """Mean and Student interval."""
    middle, reach = float(values.mean()), mean_reach(values)
    return middle, (middle - reach, middle + reach)


def geometric(values: Any) -> tuple[float, Interval]:
    """Geometric mean of positive numbers and its 95 % interval."""
    middle, (low, high) = _mean(np.log(values))
    return math.exp(middle), (math.exp(low), math.exp(high))


# --- measuring ------------------------------------------------------------------------------------


def measured(
    ask: Ask,
    name: str,
    make: Callable[[int], tuple[Problem, Callable[[float, int], None]]],
    chosen: Callable[[Sequence[AtlasBlock]], list[tuple[int, int]]],
    sigmas: np.ndarray[Any, Any],
    *,
    models: int,
    probes: int,
) -> Curves:
    """Norms of the chosen pairs of blocks over σ and models; a step of the run a model.

    make: seed → the problem, and what redraws its embeddings for a σ and a seed.
    """

    def one(seed: int) -> ModelNorms:
        problem, redraw = make(seed)
        blocks = blocks_of(problem.anatomy)
        pairs = chosen(blocks)
        operator = CurvatureParts(problem)
        found: list[dict[str, Tensor]] = []
        for place, sigma in enumerate(sigmas):
            redraw(float(sigma), 1000 * seed + (place if ask.full else 0))
            found.append(pair_squares(operator, blocks, pairs, probes=probes, seed=seed))
        names = [
            blocks[i].name if i == j else f"{blocks[i].name} × {blocks[j].name}" for i, j in pairs
        ]
        return ModelNorms(
            sigmas=tuple(map(float, sigmas)),
            names=tuple(names),
            squares={part: torch.stack([at[part] for at in found]) for part in PARTS},
        )

    seeds = range(FIRST_SEED + ask.seed, FIRST_SEED + ask.seed + models)
    every: list[ModelNorms] = [
        ask.step(f"{name}model{seed}", functools.partial(one, seed))
        for seed in track(seeds, "models", total=models)
    ]
    norms: dict[tuple[str, str], np.ndarray[Any, Any]] = {
        (block, part): np.stack([model.norms(part)[:, place].numpy() for model in every])
        for place, block in enumerate(every[0].names)
        for part in PARTS
    }
    return Curves(sigmas=np.asarray(sigmas), norms=norms)


def transformer(
    loss: Literal["cross_entropy", "squares"] = "cross_entropy",
    **options: Any,
) -> Callable[[int], tuple[Problem, Callable[[float, int], None]]]:
    """The paper's model on its task, anew for every seed.

    In float64: in the paper's float32 a saturated softmax (σ = 10) leaves a Hessian that is not
    symmetric, and three layers without softmax overflow.
    """

    def make(seed: int) -> tuple[Problem, Callable[[float, int], None]]:
        model = ormaniec_gpt(WIDTH, seed=seed, **options).double()
        if loss == "cross_entropy":
            batch, objective = five_digit_addition(SAMPLES, seed=FIRST_SEED), "cross_entropy"
            problem = Problem(model, objective, batch)
        else:
            batch = five_digit_addition(SAMPLES, seed=FIRST_SEED, target="one_hot")
            problem = Problem(model, sum_of_squares(), [one.to(torch.float64) for one in batch])
        return problem, lambda sigma, draw: redraw_embeddings(model, sigma, seed=draw)

    return make


def sum_of_squares() -> nn.Module:
    """The paper's squared error: not a mean."""
    return nn.MSELoss(reduction="sum")


def diagonal(*roles: str) -> Callable[[Sequence[AtlasBlock]], list[tuple[int, int]]]:
    """The diagonal blocks of these roles, layer by layer."""

    def chosen(blocks: Sequence[AtlasBlock]) -> list[tuple[int, int]]:
        return [(j, j) for j, block in enumerate(blocks) if block.role in roles]

    return chosen


# --- panels ---------------------------------------------------------------------------------------


def panels_of(
    curves: Curves,
    names: Mapping[str, Sequence[str]],
    *,
    guides: Mapping[tuple[str, str], float] | None = None,
    scale: Literal["log", "linear"] = "log",
    title: str = "",
) -> list[Panel]:
    """Rows V and Q, columns H_o, H_f and H; a shade a layer, the paper's slopes dashed.

    names: role → its blocks, layer by layer. guides: (role, part) → slope.
    """
    result = []
    for role, blocks in names.items():
        for part, symbol in SYMBOLS.items():
            marks: list[Mark] = []
            for layer, name in enumerate(blocks):
                mean, error = curves.mean(name, part), curves.error(name, part)
                if not (mean > 0).any():
                    continue
                marks.append(
                    Mark(
                        x=tensor(curves.sigmas),
                        y=tensor(mean),
                        low=tensor(mean - error).clamp_min(float(mean.min()) / 2),
                        high=tensor(mean + error),
                        colour=_shade(COLOURS[role], layer, len(blocks)),
                        label=f"layer {layer}" if len(blocks) > 1 else "",
                    )
                )
            slope = (guides or {}).get((role, part))
            if marks and slope is not None:
                marks.append(_guide(curves.sigmas, marks[0].y, slope))
            result.append(
                Panel(
                    title=f"{title}{LETTERS[role]}, {symbol}",
                    xlabel="σ of the embeddings",
                    ylabel="Frobenius norm of the block",
                    xscale=scale,
                    yscale=scale,
                    marks=tuple(marks),
                    dotted=(1.0,),
                    note="" if marks else "exactly 0",
                )
            )
    return result


def _guide(sigmas: np.ndarray[Any, Any], values: Tensor, slope: float) -> Mark:
    """c σ^e through the middle of the curve's first point, below it by a third."""
    guide = 0.5 * float(values[0]) * (sigmas / sigmas[0]) ** slope
    shown = guide <= 10 * float(values.max())
    return Mark(
        x=tensor(sigmas[shown]),
        y=tensor(guide[shown]),
        colour=_GUIDE,
        style="dashed",
        label=f"slope {slope:g}",
    )


def _shade(colour: str, place: int, count: int) -> str:
    """The colour of a layer, from dark to light."""
    share = 0.6 * place / max(count - 1, 1)
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)


def _layers(curves: Curves, *roles: str) -> dict[str, list[str]]:
    """Role → the names of its diagonal blocks, layer by layer."""
    names = dict.fromkeys(name for name, _ in curves.norms)
    return {role: [name for name in names if name.split(".")[-1] == role] for role in roles}


def _grid(low: float, high: float, points: int) -> np.ndarray[Any, Any]:
    return np.geomspace(low, high, points)


def _slopes(
    curves: Curves,
    expected: Mapping[tuple[str, str], float],
    low: float,
    high: float,
    where: str,
    within: float = _CLOSE,
) -> list[Finding]:
    """A finding a slope of (block, part)."""
    result = []
    for (name, part), slope in expected.items():
        value, interval = curves.slope(name, part, low, high)
        what = f"slope of {_letters(name)} {SYMBOLS[part]}"
        one = near(what, value, interval, paper=slope, within=within, where=where)
        if not curves.norms[name, part].any():  # what vanishes does not grow
            one = replace(one, verdict=REFUTED, told="exactly 0")
        result.append(one)
    return result


def _letters(name: str) -> str:
    """blocks.0.value × blocks.0.query → V × Q; the layer is said where there are more."""
    words = [part.split(".")[-1] for part in name.split(" × ")]
    layer = name.split(".")[1]
    letters = " × ".join(LETTERS.get(word, word) for word in words)
    return letters if layer == "0" else f"{letters} of layer {layer}"


def _zero(what: str, norms: np.ndarray[Any, Any]) -> Finding:
    largest = float(np.abs(norms).max())
    return finding(what, largest, paper="exactly 0", accepted=(0.0, 0.0))


def _values(
    curves: Curves, expected: Sequence[tuple[str, str, float, float]], where: str = ""
) -> list[Finding]:
    """(block, part, σ, the paper's norm) → a finding each, within a factor of 2."""
    result = []
    for name, part, sigma, paper in expected:
        value, interval = curves.at(name, part, sigma)
        what = f"norm of {_letters(name)} {SYMBOLS[part]} at σ = {sigma:g}"
        result.append(within_factor(what, value, interval, paper=paper, where=where))
    return result


# --- on a model of the user's ---------------------------------------------------------------------


def on_own_model(
    ask: Ask, problem: Problem, expected: Mapping[tuple[str, str], float], *, mixed: bool = False
) -> Reproduction:
    """The same law on the user's model: what enters its first block is scaled."""
    roles = list(dict.fromkeys(word for role, _ in expected for word in role.split(" × ")))
    result: Growth = growth(
        problem, roles=roles, mixed=mixed, seed=ask.seed, probes=20 if ask.full else 8
    )
    findings = []
    for (role, part), slope in expected.items():
        for name, own in zip(result.names, result.roles, strict=True):
            law = (
                result.law(name, part) if set(own.split(" × ")) == set(role.split(" × ")) else None
            )
            if law is not None:
                what = f"slope of {name} {SYMBOLS[part]}"
                findings.append(near(what, law.exponent, law.interval, paper=slope, within=_CLOSE))
    panels = [
        Panel(
            title=SYMBOLS[part],
            xlabel="scale of what enters the first block",
            ylabel="Frobenius norm of the block",
            xscale="log",
            yscale="log",
            marks=tuple(
                Mark(
                    x=tensor(result.scales),
                    y=result.norms[part][:, place],
                    low=result.low[part][:, place],
                    high=result.high[part][:, place],
                    label=name,
                    colour=COLOURS.get(result.roles[place], _GUIDE),
                )
                for place, name in enumerate(result.names)
                if bool((result.norms[part][:, place] > 0).any()) and place
            ),
        )
        for part in SYMBOLS
    ]
    name = type(problem.model).__name__
    return _result(
        findings, panels, 3, f"{name}, {problem.size} parameters, its embeddings scaled", ()
    )


def _result(
    findings: Sequence[Finding],
    panels: Sequence[Panel],
    columns: int,
    setting: str,
    smaller: Sequence[str],
    **numbers: Any,
) -> Reproduction:
    return Reproduction(
        id="",
        shows="",
        source="",
        claim="",
        findings=tuple(findings),
        panels=tuple(panels),
        columns=columns,
        setting=setting,
        smaller=tuple(smaller),
        numbers=numbers,
    )


# --- Figure 3 -------------------------------------------------------------------------------------

V, Q, K = (f"blocks.0.{role}" for role in ("value", "query", "key"))
_LAWS = {
    (V, "outer"): 1.98,
    (V, "total"): 1.98,
    (Q, "outer"): 5.98,
    (Q, "functional"): 4.97,
    (Q, "total"): 4.97,
}
_GUIDES = {
    ("value", "outer"): 2.0,
    ("value", "total"): 2.0,
    ("query", "outer"): 6.0,
    ("query", "functional"): 5.0,
    ("query", "total"): 5.0,
}
_OWN = {(role, part): slope for (role, part), slope in _GUIDES.items()}


@exhibit(
    "ormaniec-fig3a",
    shows="Norms of the value and query blocks against the scale of the embeddings, no norm",
    claim="for σ ≤ 0.1 V grows like σ² in H_o and H, Q like σ⁶ in H_o and σ⁵ in H_f and H; "
    "H_f(V, V) = 0",
    source=f"{_SOURCE}, Figure 3a",
    seconds=20,
    takes=("model",),
)
def figure_3a(ask: Ask) -> Reproduction:
    """Cross-entropy, one layer, softmax, no norm."""
    own = ask.attention("ormaniec-fig3a")
    if own is not None:
        return on_own_model(ask, own, _OWN)
    size = Size(models=10, probes=2, points=7)
    models, probes, points = size.chosen(ask.full)
    curves = measured(
        ask, "", transformer(), diagonal("value", "query"), _grid(0.01, 10, points),
        models=models, probes=probes,
    )  # fmt: skip
    findings = [
        *_slopes(curves, _LAWS, 0.01, SMALL, "σ ≤ 0.1"),
        _zero("largest norm of V H_f", curves.norms[V, "functional"]),
        *_values(
            curves,
            [
                (V, "total", 0.01, 3.8e-4),
                (V, "total", 10.0, 360.0),
                (Q, "total", 0.01, 7.3e-10),
                (Q, "total", 10.0, 1.3e5),
            ],
        ),
    ]
    panels = panels_of(curves, _layers(curves, "value", "query"), guides=_GUIDES)
    return _result(findings, panels, 3, f"{_TASK}, no norm, cross-entropy", size.smaller(ask.full))


_PRE_NORM = {
    (V, "outer"): -1.2,
    (V, "functional"): -1.3,
    (V, "total"): -1.2,
    (Q, "outer"): -1.2,
    (Q, "functional"): -0.7,
    (Q, "total"): -0.6,
}


@exhibit(
    "ormaniec-fig3b",
    shows="The same with pre-norm: norms of the value and query blocks against the embeddings",
    claim="regression over all σ: V −1.2, −1.3, −1.2 and Q −1.2, −0.7, −0.6 (H_o, H_f, H); flat "
    "below 0.1",
    source=f"{_SOURCE}, Figure 3b",
    seconds=45,
    takes=("model",),
)
def figure_3b(ask: Ask) -> Reproduction:
    """Two norms and a norm before the head, γ = 1, β = 0."""
    own = ask.attention("ormaniec-fig3b")
    if own is not None:
        expected = {(name.split(".")[-1], part): s for (name, part), s in _PRE_NORM.items()}
        return on_own_model(ask, own, expected)
    size = Size(models=12, probes=2, points=10)
    models, probes, points = size.chosen(ask.full)
    curves = measured(
        ask, "", transformer(norm=True), diagonal("value", "query"), _grid(0.01, 10, points),
        models=models, probes=probes,
    )  # fmt: skip
    flat = {(V, "total"): 0.0, (Q, "total"): 0.0}
    findings = [
        *_slopes(curves, _PRE_NORM, 0.01, 10, "all σ"),
        *_slopes(curves, flat, 0.01, 0.05, "σ < 0.1", within=_FLAT),
        *_values(
            curves,
            [
                (V, "total", 0.01, 17.0),
                (V, "total", 10.0, 5.9e-3),
                (Q, "total", 0.01, 3.8),
                (Q, "total", 10.0, 0.066),
            ],
        ),
    ]
    guides = {
        (role, part): _PRE_NORM[name, part]
        for role, name in (("value", V), ("query", Q))
        for part in SYMBOLS
    }
    panels = panels_of(curves, _layers(curves, "value", "query"), guides=guides)
    setting = f"{_TASK}, pre-norm and a norm before the head, cross-entropy"
    return _result(findings, panels, 3, setting, size.smaller(ask.full))


# --- depth, axes ----------------------------------------------------------------------------------


@exhibit(
    "ormaniec-depth",
    shows="Figure 3a for several layers, a shade a layer (Figures 5 to 7)",
    claim="for σ ≤ 0.1 in every layer V H ∝ σ², Q H_o ∝ σ⁶, Q H_f ∝ σ⁵; V H_f ∝ σ³, but 0 in the "
    "last layer; no law above 1",
    source=f"{_SOURCE}, appendix (2 to 5 layers)",
    seconds=35,
    takes=("model",),
)
def depth(ask: Ask) -> Reproduction:
    """Cross-entropy, softmax, no norm, 2 to 5 layers."""
    laws = {**_OWN, ("value", "functional"): 3.0}
    own = ask.attention("ormaniec-depth")
    if own is not None:
        return on_own_model(ask, own, laws)
    depths = (2, 3, 4, 5) if ask.full else (2, 3)
    size = Size(models=3, probes=2, points=4)
    models, probes, points = size.chosen(ask.full)
    grid = _grid(0.01, 10, 20) if ask.full else _grid(0.01, SMALL, points)
    findings: list[Finding] = []
    panels: list[Panel] = []
    for layers in depths:
        curves = measured(
            ask, f"depth{layers}.", transformer(n_layers=layers), diagonal("value", "query"), grid,
            models=models, probes=probes,
        )  # fmt: skip
        names = _layers(curves, "value", "query")
        last = names["value"][-1]
        expected = {
            (name, part): slope
            for (role, part), slope in laws.items()
            for name in names[role]
            if (name, part) != (last, "functional")
        }
        where = f"{layers} layers"
        findings += _slopes(curves, expected, 0.01, SMALL, where)
        zero = _zero(f"largest norm of {_letters(last)} H_f", curves.norms[last, "functional"])
        findings.append(replace(zero, where=where))
        panels += panels_of(curves, names, guides=laws, title=f"{layers} layers: ")
    smaller = size.smaller(ask.full)
    if smaller:
        smaller = (*smaller[:2], "σ ≤ 0.1 only", "2 and 3 of 2 to 5 layers", *smaller[3:])
    return _result(findings, panels, 3, f"{_TASK}, no norm, cross-entropy", smaller)


@exhibit(
    "ormaniec-linear-axes",
    shows="Figure 3a on linear axes, σ up to 10 and up to 1",
    claim="V H is 4.7 at σ = 1 and 360 at 10; Q H_o, H_f, H are 3.7, 7.8, 8.5 at 1, Q H is 1.3e5 "
    "at 10",
    source=f"{_SOURCE}, appendix (linear axes)",
    seconds=30,
)
def linear_axes(ask: Ask) -> Reproduction:
    """The same model as in Figure 3a at other σ."""
    size = Size(models=10, probes=2, points=4)
    models, probes, points = size.chosen(ask.full)
    panels: list[Panel] = []
    findings: list[Finding] = []
    expected = {
        10.0: [(V, "total", 10.0, 360.0), (Q, "total", 10.0, 1.3e5)],
        1.0: [
            (V, "total", 1.0, 4.7),
            (Q, "outer", 1.0, 3.7),
            (Q, "functional", 1.0, 7.8),
            (Q, "total", 1.0, 8.5),
        ],
    }
    for top, numbers in expected.items():
        curves = measured(
            ask, f"to{top:g}.", transformer(), diagonal("value", "query"),
            np.linspace(0.1, top, points), models=models, probes=probes,
        )  # fmt: skip
        findings += _values(curves, numbers)
        names = _layers(curves, "value", "query")
        panels += panels_of(curves, names, scale="linear", title=f"σ ≤ {top:g}: ")
    setting = f"{_TASK}, no norm, cross-entropy"
    return _result(findings, panels, 3, setting, size.smaller(ask.full))


# --- no softmax, and an MLP -----------------------------------------------------------------------


@exhibit(
    "ormaniec-no-softmax",
    shows="Block norms without softmax, 1 to 3 layers: the slope triples with every layer",
    claim="H_o ∝ σ⁶, σ¹⁸, σ⁵⁴ with 1, 2, 3 layers; H_f of the last layer is exactly 0, of the "
    "first of two σ⁹ and then σ¹⁸",
    source=f"{_SOURCE}, appendix (no softmax)",
    seconds=40,
)
def no_softmax(ask: Ask) -> Reproduction:
    """Squared error, the residual around attention off, σ from 0.1 to 1."""
    size = Size(models=3, probes=2, points=4)
    models, probes, points = size.chosen(ask.full)
    findings: list[Finding] = []
    panels: list[Panel] = []
    for layers in (1, 2, 3):
        make = transformer(
            "squares", n_layers=layers, softmax=False, attention_residual=False
        )  # fmt: skip
        curves = measured(
            ask, f"depth{layers}.", make, diagonal("value", "query"), _grid(0.1, 1, points),
            models=models, probes=probes,
        )  # fmt: skip
        names = _layers(curves, "value", "query")
        slope, where = 2.0 * 3**layers, f"{layers} layer{'s' if layers > 1 else ''}"
        outer = {(name, "outer"): slope for role in names.values() for name in role}
        findings += _slopes(curves, outer, 0.1, 1, where, within=_CLOSE * 3 ** (layers - 1))
        for role in names.values():
            zero = _zero(f"largest norm of {_letters(role[-1])} H_f",
                         curves.norms[role[-1], "functional"])  # fmt: skip
            findings.append(replace(zero, where=where))
        if layers == 2:
            first = {(role[0], "functional"): 9.0 for role in names.values()}
            findings += _slopes(curves, first, 0.1, 0.25, where, within=0.5)
        guides = {(role, "outer"): slope for role in names}
        panels += panels_of(curves, names, guides=guides, title=f"{where}: ")
    setting = "five-digit addition, one batch of 64, width 128, no softmax, squared error"
    return _result(findings, panels, 3, setting, size.smaller(ask.full))


def linear_mlp(layers: int) -> Callable[[int], tuple[Problem, Callable[[float, int], None]]]:
    """An embedding N(0, σ²) and bias-free linear layers of width 128, the last one to the classes.

    On the tokens at the positions of the answer, each of which it shall give back.
    """

    def make(seed: int) -> tuple[Problem, Callable[[float, int], None]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            sizes = [WIDTH] * layers
            ends = [*sizes[1:], VOCABULARY]
            linear = [nn.Linear(a, b, bias=False) for a, b in zip(sizes, ends, strict=True)]
        table = nn.Embedding(VOCABULARY, WIDTH)
        model = nn.Sequential(table, *linear).double()
        (batch,) = five_digit_addition(SAMPLES, seed=FIRST_SEED, target="one_hot")
        data = batch.inputs[:, slice(*ANSWERS)], batch.targets.double()
        roles = {f"{k + 1}.weight": "up" for k in range(layers)}
        problem = Problem(model, sum_of_squares(), [data], roles=roles)

        def redraw(sigma: float, draw: int) -> None:
            random = torch.Generator().manual_seed(draw)
            with torch.no_grad():
                table.weight.copy_(
                    sigma * torch.randn(table.weight.shape, generator=random, dtype=torch.float64)
                )

        return problem, redraw

    return make


@exhibit(
    "ormaniec-fig8",
    shows="A linear MLP: norms of its layers' blocks against the scale of the embeddings",
    claim="slope 2 in every layer at any depth from 1 to 5; at σ = 0.01 the norms are 11.9, 4.2, "
    "1.5, 0.49, 0.18",
    source=f"{_SOURCE}, Figure 8",
    seconds=10,
)
def figure_8(ask: Ask) -> Reproduction:
    """Squared error, PyTorch's initialisation."""
    size = Size(models=4, probes=4, points=4)
    models, probes, points = size.chosen(ask.full)
    findings: list[Finding] = []
    panels: list[Panel] = []
    for layers, paper in zip(range(1, 6), (11.9, 4.2, 1.5, 0.49, 0.18), strict=True):

        def linear(blocks: Sequence[AtlasBlock]) -> list[tuple[int, int]]:
            return [(j, j) for j, one in enumerate(blocks) if one.sublayer != "embedding"]

        curves = measured(
            ask, f"depth{layers}.", linear_mlp(layers), linear, _grid(0.01, 10, points),
            models=models, probes=probes,
        )  # fmt: skip
        names = list(dict.fromkeys(name for name, _ in curves.norms))
        where = f"{layers} layer{'s' if layers > 1 else ''}"
        for layer, name in enumerate(names):
            value, interval = curves.slope(name, "total", 0.01, 10)
            what = f"slope of H of layer {layer}"
            findings.append(near(what, value, interval, paper=2.0, within=0.02, where=where))
        value, interval = curves.at(names[0], "total", 0.01)
        what = "norm of H of layer 0 at σ = 0.01"
        findings.append(within_factor(what, value, interval, paper=paper, where=where))
        marks = [
            Mark(
                x=tensor(curves.sigmas),
                y=tensor(curves.mean(name, "total")),
                colour=_shade("#0050a0", layer, layers),
                label=f"layer {layer}",
            )
            for layer, name in enumerate(names)
        ]
        marks.append(_guide(curves.sigmas, marks[0].y, 2.0))
        panels.append(
            Panel(
                title=f"{where}, H",
                xlabel="σ of the embeddings",
                ylabel="Frobenius norm of the block",
                xscale="log",
                yscale="log",
                marks=tuple(marks),
                dotted=(1.0,),
            )
        )
    setting = "five-digit addition, one batch of 64, linear layers of width 128, squared error"
    return _result(findings, panels, 3, setting, size.smaller(ask.full))


# --- every block ----------------------------------------------------------------------------------

_BLOCKS = {
    ("query", "outer"): 6.0,
    ("key", "outer"): 6.0,
    ("value", "outer"): 2.0,
    ("query × key", "outer"): 6.0,
    ("query × value", "outer"): 4.0,
    ("key × value", "outer"): 4.0,
    ("query", "functional"): 5.0,
    ("key", "functional"): 5.0,
    ("query × key", "functional"): 3.0,
    ("query × value", "functional"): 3.0,
    ("key × value", "functional"): 3.0,
}


@exhibit(
    "ormaniec-growth-tables",
    shows="Growth of every block of query, key and value, the mixed ones too",
    claim="H_o: Q, K and Q × K like σ⁶, V with Q or K like σ⁴, V like σ²; H_f: Q and K like σ⁵, "
    "mixed blocks like σ³, V exactly 0",
    source=f"{_SOURCE}, growth tables",
    seconds=10,
    takes=("model",),
)
def growth_tables(ask: Ask) -> Reproduction:
    """The model of Figure 3a at σ ≤ 0.1."""
    own = ask.attention("ormaniec-growth-tables", ("query", "key", "value"))
    if own is not None:
        return on_own_model(ask, own, _BLOCKS, mixed=True)
    size = Size(models=4, probes=4, points=4)
    models, probes, points = size.chosen(ask.full)
    roles = ("query", "key", "value")

    def pairs(blocks: Sequence[AtlasBlock]) -> list[tuple[int, int]]:
        places = [j for j, block in enumerate(blocks) if block.role in roles]
        return [(i, j) for j in places for i in places if i <= j]

    curves = measured(
        ask, "", transformer(), pairs, _grid(0.01, SMALL, points), models=models, probes=probes
    )

    def name(words: str) -> str:
        return " × ".join(f"blocks.0.{word}" for word in words.split(" × "))

    expected = {(name(words), part): slope for (words, part), slope in _BLOCKS.items()}
    findings = _slopes(curves, expected, 0.01, SMALL, "")
    findings.append(_zero("largest norm of V H_f", curves.norms[V, "functional"]))
    panels = []
    for part in ("outer", "functional"):
        marks = [
            Mark(
                x=tensor(curves.sigmas),
                y=tensor(curves.mean(block, own_part)),
                label=_letters(block),
                colour=SERIES[place % len(SERIES)],
            )
            for place, (block, own_part) in enumerate(expected)
            if own_part == part
        ]
        panels.append(
            Panel(
                title=SYMBOLS[part],
                xlabel="σ of the embeddings",
                ylabel="Frobenius norm of the block",
                xscale="log",
                yscale="log",
                marks=tuple(marks),
            )
        )
    return _result(findings, panels, 2, f"{_TASK}, no norm, cross-entropy", size.smaller(ask.full))
