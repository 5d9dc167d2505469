r"""Attention sinks: spectra and norms against how much attention the first token draws.

A bias b is added to the first token's logit in every head of every block, A = softmax(S + b e₁ᵀ),
at several strengths b; at each the norms of every role and the spectrum of the attention parameters
are measured. Theory (the scalar model of the talk, ``theory/checks/scalar_model.py``) says that a
sink stretches the spectrum: λmax grows beside the bulk. Here

    bulk = mean |λ| of the 90 % of the eigenvalues nearest to zero,

which moves by no more than W1 / 0.9 where the spectrum is known to a Wasserstein distance W1.
The model's own heads are compared as they are: each head's blocks against its sink mass.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvatlas.analysis.atlas.result import AtlasBlock, blocks_of
from curvatlas.analysis.propagation.capture import SOFTMAX, block_paths, called_module
from curvatlas.errors import ProblemError
from curvatlas.linear_operator import PARTS
from curvatlas.operators.curvature import Hessian
from curvatlas.precision import in_float64
from curvatlas.problem import Problem
from curvatlas.problem.evaluation import call
from curvatlas.progress import track
from curvatlas.results import Interval, Result
from curvatlas.runs import Run
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.studies.claims import Claim
from curvatlas.studies.comparisons import spread_of
from curvatlas.studies.growth import MODEL, BlockNorms, block_norms, on_a_copy
from curvatlas.surveying import Step, recorded

LEVELS = (0.0, 1.0, 2.0, 4.0, 8.0)
BULK = 0.9  # share of the eigenvalues, nearest to zero
FEWEST_HEADS = 4  # for a rank correlation with an interval
_EXACT_UP_TO = 2048  # attention parameters
_HEADED = ("query", "key", "value", "output")
_ENOUGH = 0.8  # share of the seeds in which the spectrum must be stretched


# --- a bias on the first token ------------------------------------------------------------------


class _Biased(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds ``bias`` to the first key's logit of the first attention softmax, and keeps its output.

    Below autograd: a softmax is differentiated by its output alone, and a constant in front of it
    changes nothing else, so that derivatives of every order are right.
    """

    def __init__(self, bias: float, keep: Callable[[Tensor], None] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bias, self._keep, self.calls = bias, keep, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket not in SOFTMAX or args[0].ndim < 3 or self.calls:
            return function(*args, **(kwargs or {}))
        self.calls += 1
        logits = args[0]
        if self._bias:
            logits = logits.clone()
            logits[..., 0] += self._bias
        result = function(logits, *args[1:], **(kwargs or {}))
        if self._keep is not None:
            self._keep(result.detach())
        return result


@contextlib.contextmanager
def biased(
    model: nn.Module,
    paths: dict[int, str],
    bias: float,
    keep: Callable[[int, Tensor], None] | None = None,
) -> Iterator[None]:
    """Inside, the blocks at ``paths`` (layer → path) attend with ``bias`` on the first token.

    keep: gets the layer and its attention weights (samples, heads, queries, keys) of every pass.
    """
    handles: list[Any] = []
    for layer, path in paths.items():
        block = called_module(model, path)
        modes: list[_Biased] = []

        def enter(*_: Any, layer: int = layer, modes: list[_Biased] = modes) -> None:
            modes.append(_Biased(bias, None if keep is None else functools.partial(keep, layer)))
            modes[-1].__enter__()  # type: ignore[no-untyped-call]

        def leave(*_: Any, modes: list[_Biased] = modes) -> None:
            modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        handles.append(block.register_forward_pre_hook(enter))
        handles.append(block.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sink_masses(problem: Problem, paths: dict[int, str]) -> Tensor:
    """Mean attention on the first token over all other queries, (layers, heads)."""
    total: dict[int, Tensor] = {}
    count = 0

    def keep(layer: int, weights: Tensor) -> None:
        if weights.ndim < 4:  # one head
            weights = weights.unsqueeze(-3)
        if weights.shape[-2] < 2 or weights.shape[-1] < 2:
            raise ProblemError("a sequence of one token has no other to look at: give longer ones.")
        mass = in_float64(weights[..., 1:, 0]).mean(-1).flatten(0, -2).sum(0)  # (heads,)
        total[layer] = mass if layer not in total else total[layer] + mass

    with problem.evaluating(), torch.no_grad(), biased(problem.model, paths, 0.0, keep):
        for batch in problem.batches():
            call(problem.model, problem.named_weights(), batch.inputs)
            count += batch.samples
    if len(total) < len(paths):
        missing = ", ".join(str(layer) for layer in paths if layer not in total)
        raise ProblemError(
            f"no softmax attention in layer {missing} of {type(problem.model).__name__}: sinks "
            "need it (linear attention has none)."
        )
    return torch.stack([total[layer] for layer in paths]).cpu() / count


# --- results ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SinkLevel(Result):
    """Masses, spectrum and norms at one strength of the sink."""

    bias: float  # on the first token's logits
    loss: float
    mass: Tensor  # (layers, heads): mean attention on the first token
    largest: float  # λmax of H over the attention parameters
    largest_interval: Interval
    smallest: float
    bulk: float  # mean |λ| of the 90 % of the eigenvalues nearest to zero
    bulk_interval: Interval
    density: SpectralDensity
    norms: dict[str, Tensor]  # part → (names, 3): Frobenius norm, low, high
    products: int

    @property
    def ratio(self) -> float:
        """λmax / bulk."""
        return self.largest / self.bulk if self.bulk > 0 else math.inf

    @property
    def ratio_interval(self) -> Interval:
        (low, high), (small, large) = self.largest_interval, self.bulk_interval
        return max(low, 0.0) / large if large > 0 else math.inf, (
            high / small if small > 0 else math.inf
        )


@dataclass(frozen=True, kw_only=True)
class SinkHead(Result):
    """One head of the model as it is."""

    layer: int
    head: int
    mass: float
    norms: dict[str, dict[str, float]]  # role → part → ‖H_hh‖_F


@dataclass(frozen=True, kw_only=True)
class Correlation(Result):
    """Spearman's rank correlation with its 95 % interval (Fisher's z)."""

    value: float
    interval: Interval
    points: int

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.interval[0]:+.2f}, {self.interval[1]:+.2f}]"


@dataclass(frozen=True, kw_only=True)
class Sinks(Result):
    """Spectra and norms against the strength of a sink, and the model's own heads by sink mass."""

    levels: tuple[SinkLevel, ...]
    names: tuple[str, ...]  # of the norms: "model", then every block of attention
    uniform: float  # the mass if every query looked at all it may see alike
    heads: tuple[SinkHead, ...]  # strongest sink first
    correlations: dict[str, dict[str, Correlation]]  # role → part → mass against norm
    products: int

    @property
    def ratios(self) -> tuple[float, ...]:
        """λmax / bulk at every level."""
        return tuple(level.ratio for level in self.levels)

    @property
    def verdict(self) -> str:
        """Whether λmax over bulk "rises" or "falls" at every step of the sink, or is "mixed"."""
        steps = np.diff(np.array(self.ratios))
        return "rises" if (steps > 0).all() else "falls" if (steps < 0).all() else "mixed"

    def _rows(self) -> list[dict[str, Any]]:
        """A row a level of the sink."""
        return [
            {
                "bias": level.bias,
                "loss": level.loss,
                "ratio": level.ratio,
                "ratio_low": level.ratio_interval[0],
                "ratio_high": level.ratio_interval[1],
                "largest": level.largest,
                "bulk": level.bulk,
            }
            for level in self.levels
        ]

    def __str__(self) -> str:
        lines = [f"{'bias':>6s} {'mass':>6s} {'loss':>8s} {'λmax':>10s} {'bulk':>10s}  λmax / bulk"]
        for level in self.levels:
            low, high = level.ratio_interval
            lines.append(
                f"{level.bias:6.3g} {float(level.mass.mean()):6.3f} {level.loss:8.4g} "
                f"{level.largest:10.4g} {level.bulk:10.3g}  {level.ratio:.4g} "
                f"[{low:.4g}, {high:.4g}]"
            )
        lines.append(
            f"λmax over bulk: {self.verdict} with the sink (uniform mass {self.uniform:.3f})"
        )
        for head in self.heads[:3]:
            lines.append(f"layer {head.layer} head {head.head}: mass {head.mass:.3f} as it is")
        for role, parts in self.correlations.items():
            told = ", ".join(f"{part} {value}" for part, value in parts.items())
            lines.append(f"rank correlation of mass and ‖{role}‖ over heads: {told}")
        return "\n".join(lines)


# --- the experiment -----------------------------------------------------------------------------


def sinks(
    problem: Problem,
    *,
    levels: Sequence[float] = LEVELS,
    heads: bool = True,
    products: int | None = None,
    probes: int = 16,
    seed: int = 0,
    budget: int | str | None = None,
    output: str | os.PathLike[str] | Run | None = None,
) -> Sinks:
    """Spectrum and norms of attention while the first token draws more of it; heads by sink mass.

    levels: what is added to the first token's logits, in every head; at least 2.
    heads: also compare the model's own heads, each head's blocks against its mass.
    products: for each spectrum (default: exact up to 2048 attention parameters, 300 beyond).
    probes: for each block's norm. The model itself is not changed.
    output: a run folder, or an open ``Run``: every finished level is stored, and the same call
        resumes it.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"sinks takes a Problem, got a {type(problem).__name__}.")
    problem.require_one_process("sinks")
    strengths = sorted({float(level) for level in levels})
    if len(strengths) < 2 or not all(math.isfinite(level) for level in strengths):
        raise ValueError(f"sinks compares 2 or more finite levels, got {list(levels)}.")
    if probes < 3:
        raise ValueError(f"an interval over probes needs 3 or more, got {probes}.")
    paths = attention_paths(problem)
    sink_masses(problem, paths)  # says so where there is no softmax, before anything is computed
    every = [b for b in blocks_of(problem.anatomy, biases=True) if b.sublayer == "attention"]
    single = [b for b in blocks_of(problem.anatomy, heads=True) if _head_of(b) is not None]
    options = {
        "command": "sinks",
        "levels": strengths,
        "heads": heads,
        "products": products,
        "probes": probes,
        "seed": seed,
    }

    def level(bias: float) -> SinkLevel:
        other = on_a_copy(problem)
        with biased(other.model, paths, bias):
            return _level(other, paths, bias, every, products, probes, seed, budget)

    def own_heads() -> BlockNorms:
        return block_norms(problem, single, 0.0, probes=probes, seed=seed, budget=budget)

    def work(step: Step) -> Sinks:
        measured = [
            step(f"sinks.level{number}", functools.partial(level, bias))
            for number, bias in enumerate(track(strengths, "sinks"))
        ]
        alone = step("sinks.heads", own_heads) if heads and single else None

        def together() -> Sinks:
            rows = _heads(single, alone, sink_masses(problem, paths), list(paths))
            return Sinks(
                levels=tuple(measured),
                names=(MODEL, *(block.name for block in every)),
                uniform=_uniform(problem, paths),
                heads=rows,
                correlations=_correlations(rows),
                products=sum(m.products for m in measured) + (alone.products if alone else 0),
            )

        result: Sinks = step("sinks", together)
        return result

    return recorded(problem, output, options, work)


def attention_paths(problem: Problem) -> dict[int, str]:
    """Layer → path of its block, for the blocks with attention."""
    layers = {p.layer for p in problem.anatomy if p.role == "query" and p.layer is not None}
    paths = {layer: path for layer, path in block_paths(problem.anatomy).items() if layer in layers}
    if not paths:
        raise ProblemError(
            f"{type(problem.model).__name__} has no attention that is known: sinks are of heads "
            "that look at the first token."
        )
    return paths


def _level(
    problem: Problem,
    paths: dict[int, str],
    bias: float,
    blocks: Sequence[AtlasBlock],
    products: int | None,
    probes: int,
    seed: int,
    budget: int | str | None,
) -> SinkLevel:
    measured = block_norms(problem, blocks, bias, probes=probes, seed=seed, budget=budget)
    view = Hessian(problem, budget=budget)[[piece for block in blocks for piece in block.slices]]
    most = view.shape[0] if view.shape[0] <= _EXACT_UP_TO else None
    density = spectral_density(view, max_products=products or most, seed=seed)
    if density.exact:
        top, bottom = float(density.nodes.max()), float(density.nodes.min())
        ends, spent = (top, top), 0
    else:
        pairs = eigenpairs(view, k=1, which="both", tol=1e-3, seed=seed)
        top, bottom = float(pairs.values[0]), float(pairs.values[-1])
        ends = (float(pairs.interval[0][0]), float(pairs.interval[1][0]))
        spent = pairs.products
    bulk = bulk_of(density)
    reach = 0.0 if density.exact else density.wasserstein_error / BULK
    return SinkLevel(
        bias=bias,
        loss=measured.loss,
        mass=sink_masses(problem, paths),  # the bias is on already
        largest=top,
        largest_interval=ends,
        smallest=bottom,
        bulk=bulk,
        bulk_interval=(max(bulk - reach, 0.0), bulk + reach),
        density=density,
        norms={part: torch.stack(ends, 1) for part, ends in measured.norms().items()},
        products=measured.products + density.products + spent,
    )


def bulk_of(density: SpectralDensity) -> float:
    """Mean |λ| of the 90 % of the eigenvalues nearest to zero."""
    sizes, order = density.nodes.abs().sort()
    shares = density.weights[order]
    before = shares.cumsum(0) - shares
    kept = (BULK - before).clamp_min(0).minimum(shares)
    return float((kept * sizes).sum() / BULK)


def _uniform(problem: Problem, paths: dict[int, str]) -> float:
    """The mean mass of the first layer if it looked at all it may see alike."""
    seen: list[float] = []

    def keep(_: int, weights: Tensor) -> None:
        visible = (weights > 0).sum(-1)[..., 1:]
        seen.append(float((1 / visible.clamp_min(1).double()).mean()))

    first = dict(list(paths.items())[:1])
    with problem.evaluating(), torch.no_grad(), biased(problem.model, first, 0.0, keep):
        for batch in problem.batches():
            call(problem.model, problem.named_weights(), batch.inputs)
    return float(np.mean(seen))


def _head_of(block: AtlasBlock) -> tuple[str, int] | None:
    """("query", 3) of "blocks.0.query.head3"; None for others, and for biases."""
    words = block.name.split(".")
    last = words[-1]
    if not (last.startswith("head") and last[4:].isdigit()) or words[-2] not in _HEADED:
        return None
    return words[-2], int(last[4:])


def _heads(
    blocks: Sequence[AtlasBlock], measured: BlockNorms | None, mass: Tensor, layers: list[int]
) -> tuple[SinkHead, ...]:
    """The heads, strongest sink first; keys and values that heads share count for each of them."""
    if measured is None:
        return ()
    norms = {part: ends[0][1:].tolist() for part, ends in measured.norms().items()}
    table: dict[tuple[int, str], list[dict[str, float]]] = {}
    for place, block in enumerate(blocks):
        found, layer = _head_of(block), block.slices[0].layer
        if found is not None and layer is not None:
            row = {str(part): float(norms[part][place]) for part in PARTS}
            table.setdefault((layer, found[0]), []).append(row)
    heads = []
    for number, layer in enumerate(layers):
        count = mass.shape[1]
        for head in range(count):
            own = {
                role: rows[head * len(rows) // count]
                for role in _HEADED
                if (rows := table.get((layer, role)))
            }
            heads.append(
                SinkHead(layer=layer, head=head, mass=float(mass[number, head]), norms=own)
            )
    return tuple(sorted(heads, key=lambda one: -one.mass))


def _correlations(heads: Sequence[SinkHead]) -> dict[str, dict[str, Correlation]]:
    """Of the mass and the norm of every role and part, over heads."""
    result: dict[str, dict[str, Correlation]] = {}
    if len(heads) < FEWEST_HEADS:
        return result
    for role in _HEADED:
        chosen = [head for head in heads if role in head.norms]
        for part in PARTS if len(chosen) >= FEWEST_HEADS else ():
            values = [head.norms[role][part] for head in chosen]
            if min(values) < max(values):
                masses = [head.mass for head in chosen]
                result.setdefault(role, {})[part] = rank_correlation(masses, values)
    return result


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """Spearman's ρ with Fisher's interval, its variance as Bonett and Wright give it."""
    rho, count = float(stats.spearmanr(x, y).statistic), len(x)
    if count < FEWEST_HEADS or not math.isfinite(rho):
        return Correlation(value=rho, interval=(-1.0, 1.0), points=count)
    z = math.atanh(max(min(rho, 1 - 1e-9), -1 + 1e-9))
    reach = 1.96 * math.sqrt((1 + rho**2 / 2) / (count - 3))
    return Correlation(
        value=rho, interval=(math.tanh(z - reach), math.tanh(z + reach)), points=count
    )


# --- over seeds ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SinkStudy(Result):
    """The same experiment on models of several seeds, and whether a sink stretches the spectrum."""

    seeds: tuple[int, ...]
    runs: tuple[Sinks, ...]
    claim: Claim

    @property
    def verdict(self) -> str:
        return self.claim.verdict

    def _rows(self) -> list[dict[str, Any]]:
        """A row a seed and level."""
        return [
            {"seed": seed, **row}
            for seed, run in zip(self.seeds, self.runs, strict=True)
            for row in run._rows()
        ]

    def __str__(self) -> str:
        rows = [
            f"seed {seed}: λmax / bulk {' → '.join(f'{r:.4g}' for r in run.ratios)}, {run.verdict}"
            for seed, run in zip(self.seeds, self.runs, strict=True)
        ]
        return "\n".join([*rows, str(self.claim)])


def sinks_over_seeds(
    make: Callable[[int], Problem],
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    output: str | os.PathLike[str] | Run | None = None,
    **options: Any,
) -> SinkStudy:
    """``sinks`` for the problem of every seed, with a verdict: does λmax over bulk rise?

    It holds where the ratio rises at every level in at least four of five seeds, fails where it
    does so in at most one of five, and is undecided between. options: those of ``sinks``.
    output: a run folder, or an open ``Run``: every finished seed is kept; the same call resumes it.
    """
    if len(seeds) < 2:
        raise ValueError(f"an interval over seeds needs at least 2 seeds, got {len(seeds)}.")

    def one(seed: int) -> Sinks:
        return sinks(make(seed), seed=seed, heads=False, **options)

    def work(step: Step) -> SinkStudy:
        chosen = track(list(seeds), "seeds")
        runs = tuple(step(f"seed{seed}.sinks", functools.partial(one, seed)) for seed in chosen)
        result: SinkStudy = step(
            "sinks.study", lambda: SinkStudy(seeds=tuple(seeds), runs=runs, claim=sink_claim(runs))
        )
        return result

    if output is None or isinstance(output, Run):
        return recorded({}, output, {}, work)
    told = {name: value for name, value in options.items() if name != "budget"}
    told = {"command": "sinks", "seeds": list(seeds), **told}
    return recorded(make(seeds[0]), output, told, work)


def sink_claim(runs: Sequence[Sinks]) -> Claim:
    """The talk's statement, judged by the seeds in which the ratio rises at every level."""
    rising = sum(run.verdict == "rises" for run in runs) / len(runs)
    levels = [level.bias for level in runs[0].levels]
    return Claim(
        name="sinks stretch the spectrum",
        statement=f"λmax over bulk rises with the sink (at every one of {len(levels)} levels in "
        f"{rising:.0%} of {len(runs)} seeds)",
        source="Ormaniec et al., talk; scalar attention model",
        figure=f"λmax/bulk at bias {levels[-1]:g} over that at {levels[0]:g}",
        value=spread_of((run.ratios[-1] / run.ratios[0] for run in runs), ratio=True),
        threshold=1.0,
        verdict="holds" if rising >= _ENOUGH else "fails" if rising <= 1 - _ENOUGH else "undecided",
        details={
            f"bias {level:g}": spread_of((run.ratios[i] for run in runs), ratio=True)
            for i, level in enumerate(levels)
        },
    )
