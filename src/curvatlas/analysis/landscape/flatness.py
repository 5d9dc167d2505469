r"""How flat the loss is where training ended: every measure in use, and what each of them is worth.

    λmax, tr H, effective rank      of the Hessian
    SAM, ASAM                       largest rise within a radius (``ascent.py``)
    Fisher–Rao norm                 (wᵀ H_o w)^½                              (Liang et al. 2019)
    relative flatness of a layer    κ = Σ_{s,s'} ⟨w_s, w_s'⟩ tr H_{s,s'}      (Petzka et al. 2021)
    PAC-Bayes                       bounds with optimised noise (``pac_bayes.py``)
    log-volume                      −½ log det(I + H_o/λ): of the ellipsoid wᵀ(H_o + λI)w ≤ 1,
                                    against that of the ball λ‖w‖² ≤ 1

With the rows w_s of a weight matrix W (out, in), κ = E⟨WZ, H·WZ⟩ over random signs Z (in, in): one
product with H serves all layers at once.

>>> found = ca.flatness(problem)            # doctest: +SKIP
>>> found.sam.value, found.diagonal.value   # doctest: +SKIP
>>> print(ca.rescaling_invariance(problem)) # doctest: +SKIP
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from curvatlas.analysis.landscape.ascent import Sharpness, sharpness_by_ascent
from curvatlas.analysis.landscape.line import towards
from curvatlas.analysis.landscape.pac_bayes import PacBayes, pac_bayes
from curvatlas.analysis.landscape.rescaling import MODES, RESCALINGS, Mode, Rescaling, rescaled
from curvatlas.anatomy import Slice
from curvatlas.errors import ProblemError
from curvatlas.fits import mean_reach
from curvatlas.operators.curvature import GaussNewton, Hessian
from curvatlas.operators.per_sample import count_samples
from curvatlas.problem import Problem
from curvatlas.progress import track
from curvatlas.results import Interval, Number, Result
from curvatlas.spectra.checkpoint import generator
from curvatlas.spectra.density import spectral_density
from curvatlas.spectra.diagonal import diagonal
from curvatlas.spectra.eigenpairs import eigenpairs
from curvatlas.spectra.estimate import Estimate
from curvatlas.spectra.functions import trace_function
from curvatlas.spectra.trace import trace

R = TypeVar("R", bound=Result)
Keep = Callable[[str, Callable[[], Any]], Any]

_PROBES = 8  # random signs multiplied at once
_FEWEST_PROBES = 16

# what stands for each measure, in the order of the table
MEASURES = {
    "sharpness": "λmax of H",
    "trace": "tr H",
    "effective_rank": "effective rank of H",
    "sam": "SAM sharpness",
    "asam": "ASAM sharpness",
    "fisher_rao": "Fisher–Rao norm",
    "relative_flatness": "relative flatness, all layers",
    "pac_bayes_isotropic": "PAC-Bayes bound, isotropic noise",
    "pac_bayes_diagonal": "PAC-Bayes bound, diagonal noise",
    "log_volume": "log-volume",
}


@dataclass(frozen=True, kw_only=True)
class RelativeFlatness(Result):
    """κ of every weight matrix with its 95 % interval over the probes."""

    values: dict[str, float]
    intervals: dict[str, Interval]
    total: float  # over all of them
    interval: Interval  # of the total
    products: int
    converged: bool  # the total is known to rtol

    @property
    def value(self) -> float:
        return self.total

    def __str__(self) -> str:
        top = sorted(self.values, key=lambda name: -abs(self.values[name]))[:3]
        named = ", ".join(f"{n} {Number(self.values[n], *self.intervals[n])}" for n in top)
        return f"relative flatness {Number(self.total, *self.interval)}, most of it: {named}"


@dataclass(frozen=True, kw_only=True)
class Flatness(Result):
    """Measures of flatness at the present weights; ``measures`` has one number of each."""

    loss: float
    parameters: int
    samples: int
    sharpness: float  # λmax of H
    sharpness_interval: Interval
    trace: Estimate
    effective_rank: float
    effective_rank_interval: Interval
    sam: Sharpness
    asam: Sharpness
    fisher_rao: float
    relative_flatness: RelativeFlatness | None  # None without weight matrices
    isotropic: PacBayes | None  # None where the loss has no bound
    diagonal: PacBayes | None
    log_volume: Estimate
    damping: float  # λ of the log-volume
    test_loss: float | None = None  # of the model itself on test data

    @property
    def measures(self) -> dict[str, float]:
        """One number of each measure (``MEASURES`` names them); nan for what was left out."""

        def value(result: Any) -> float:
            return math.nan if result is None else float(result.value)

        return {
            "sharpness": self.sharpness,
            "trace": self.trace.value,
            "effective_rank": self.effective_rank,
            "sam": self.sam.value,
            "asam": self.asam.value,
            "fisher_rao": self.fisher_rao,
            "relative_flatness": value(self.relative_flatness),
            "pac_bayes_isotropic": value(self.isotropic),
            "pac_bayes_diagonal": value(self.diagonal),
            "log_volume": self.log_volume.value,
        }

    @property
    def intervals(self) -> dict[str, Interval]:
        """95 % intervals of the measures that are estimated."""
        known = {
            "sharpness": self.sharpness_interval,
            "trace": self.trace.interval,
            "effective_rank": self.effective_rank_interval,
            "log_volume": self.log_volume.interval,
        }
        if self.relative_flatness is not None:
            known["relative_flatness"] = self.relative_flatness.interval
        return known

    @property
    def generalisation_gap(self) -> float | None:
        """Loss on test data minus loss on these."""
        return None if self.test_loss is None else self.test_loss - self.loss

    def __str__(self) -> str:
        lines = [f"flatness of {self.parameters} parameters on {self.samples} samples:"]
        lines[0] += f" loss {self.loss:.5g}"
        if self.test_loss is not None:
            lines[0] += f", on test data {self.test_loss:.5g}"
        for name, value in self.measures.items():
            if math.isnan(value):
                continue
            shown = f"{value:.5g}"  # a sum over the data, a certified maximum or a bound
            if name in self.intervals:
                shown = str(Number(value, *self.intervals[name]))
            line = f"  {MEASURES[name]:<34}{shown:>20}"
            if name in ("sam", "asam"):
                one = self.sam if name == "sam" else self.asam
                line += f"  ρ = {one.radius:g}, {'' if one.certified else 'NOT '}certified"
            lines.append(line)
        return "\n".join(lines)


def flatness(
    problem: Problem,
    *,
    test: Any = None,
    prior: nn.Module | Mapping[str, Tensor] | None = None,
    radius: float = 0.05,
    adaptive_radius: float = 0.5,
    starts: int = 6,
    damping: float = 0.01,
    loss_bound: float | None = None,
    draws: int = 100,
    products: int = 150,
    rtol: float = 0.1,
    seed: int = 0,
    keep: Keep | None = None,
) -> Flatness:
    """Every measure of flatness on the data of the problem, which are taken as the training data.

    test: test data, as Problem takes them: the loss there, also with the noise of the bounds.
    prior: a model or state dict whose weights were fixed before the data were seen, such as those
    at initialisation: the mean of the PAC-Bayes prior (default: zero, gains of norms at one).
    radius, adaptive_radius: ρ of SAM and of ASAM; starts: random ones of their ascents. damping: λ
    of the log-volume. loss_bound: where the loss is cut off in the bounds (default 4 log C for C
    classes; other losses have no bound without it). draws: of the noise. products: most for an
    estimate. rtol: to be reached by it.
    keep: ``keep(name, function)`` calls the function or gives what it returned before: a run's
    ``step``, with which the same call resumes.
    """
    problem.require_one_process("flatness")
    problem.require_mean("flatness")
    if not damping > 0:
        raise ValueError(f"damping must be positive, got {damping!r}.")
    step: Keep = (lambda _, function: function()) if keep is None else keep
    tested = None if test is None else problem.with_data(test)
    hessian, outer = Hessian(problem), GaussNewton(problem)
    options: Any = {"seed": seed, "max_products": products}
    tol = max(1e-6, 100 * torch.finfo(problem.dtype).eps)
    top = step(
        "total.eigenpairs",
        lambda: eigenpairs(hessian, k=1, which="largest", tol=tol, seed=seed, data_error=False),
    )
    total = step("total.trace", lambda: trace(hessian, rtol=rtol, data_error=False, **options))
    density = step("total.density", lambda: spectral_density(hessian, **options))
    hessian.release()

    def sharpness(name: str, reach: float, adaptive: bool) -> Sharpness:
        found: Sharpness = step(
            name,
            lambda: sharpness_by_ascent(
                problem, radius=reach, adaptive=adaptive, starts=starts, seed=seed
            ),
        )
        return found

    sam = sharpness("sam", radius, False)
    asam = sharpness("asam", adaptive_radius, True)
    weights = problem.parameters
    matrices = [piece for piece in problem.anatomy if is_layer(piece)]
    relative = None
    if matrices:
        relative = step(
            "relative",
            lambda: relative_flatness(problem, rtol=rtol, max_products=products, seed=seed),
        )
    volume = step("volume", lambda: log_volume(outer, damping, rtol=rtol, **options))
    bounds = _bounds(problem, outer, tested, prior, loss_bound, draws, options, step)
    return Flatness(
        loss=problem.value(),
        parameters=problem.size,
        samples=count_samples(problem),
        sharpness=top.value,
        sharpness_interval=tuple(float(end[0]) for end in top.interval),  # type: ignore[arg-type]
        trace=total,
        effective_rank=density.effective_rank,
        effective_rank_interval=density.effective_rank_interval,
        sam=sam,
        asam=asam,
        fisher_rao=math.sqrt(max(float(weights @ (outer @ weights)), 0.0)),
        relative_flatness=relative,
        isotropic=bounds[0],
        diagonal=bounds[1],
        log_volume=volume,
        damping=damping,
        test_loss=None if tested is None else tested.value(),
    )


def _bounds(
    problem: Problem,
    outer: GaussNewton,
    tested: Problem | None,
    prior: nn.Module | Mapping[str, Tensor] | None,
    loss_bound: float | None,
    draws: int,
    options: dict[str, Any],
    step: Keep,
) -> tuple[PacBayes | None, PacBayes | None]:
    mean = None if prior is None else problem.parameters + towards(problem, prior)
    made: list[tuple[PacBayes, PacBayes]] = []

    def both() -> tuple[PacBayes, PacBayes]:
        if not made:
            entries = diagonal(outer, **options).values
            made.append(
                pac_bayes(
                    problem,
                    entries,
                    prior=mean,
                    test=tested,
                    loss_bound=loss_bound,
                    draws=draws,
                    seed=options["seed"],
                )
            )
        return made[0]

    try:
        return (
            step("bound.isotropic", lambda: both()[0]),
            step("bound.diagonal", lambda: both()[1]),
        )
    except ProblemError as error:
        warnings.warn(f"PAC-Bayes bounds were left out: {error}", stacklevel=3)
        return None, None


def log_volume(outer: GaussNewton, damping: float, **options: Any) -> Estimate:
    """−½ log det(I + H_o/λ) with its interval."""
    return trace_function(
        outer,
        lambda values: -0.5 * np.log1p(np.clip(values, 0.0, None) / damping),
        quantity="log-volume",
        **options,
    )


def is_layer(piece: Slice) -> bool:
    """A weight matrix that multiplies features: no table of embeddings, no bias, no gain."""
    if len(piece.shape) != 2:
        return False
    return piece.sublayer != "embedding" or piece.role.startswith("patch")


def relative_flatness(
    problem: Problem, *, rtol: float = 0.1, max_products: int = 150, seed: int = 0
) -> RelativeFlatness:
    """κ of every weight matrix, by random signs, until the total is known to ``rtol``."""
    matrices = [piece for piece in problem.anatomy if is_layer(piece)]
    if not matrices:
        raise ProblemError("no weight matrix among the parameters that vary: nothing to measure.")
    hessian, random = Hessian(problem), generator(seed)
    weights = problem.parameters
    rows: list[Tensor] = []  # (layers,) a probe
    converged = False
    while len(rows) + _PROBES <= max(max_products, _FEWEST_PROBES) and not converged:
        probes = torch.zeros(problem.size, _PROBES, dtype=problem.dtype, device=problem.device)
        for piece in matrices:
            probes[piece.indices.to(probes.device)] = _signed_rows(piece, weights, random)
        images = hessian @ probes
        rows += list(
            torch.stack(
                [(probes[p.indices] * images[p.indices]).sum(0) for p in matrices], dim=1
            ).double()
        )
        totals = torch.stack(rows).sum(1)
        reach = mean_reach(totals.tolist())
        converged = len(rows) >= _FEWEST_PROBES and reach <= rtol * abs(float(totals.mean()))
    table = torch.stack(rows)  # (probes, layers)
    values, intervals = {}, {}
    for piece, column in zip(matrices, table.T, strict=True):
        middle, width = float(column.mean()), mean_reach(column.tolist())
        values[piece.name], intervals[piece.name] = middle, (middle - width, middle + width)
    middle = float(totals.mean())
    return RelativeFlatness(
        values=values,
        intervals=intervals,
        total=middle,
        interval=(middle - reach, middle + reach),
        products=hessian.products,
        converged=converged,
    )


def _signed_rows(piece: Slice, weights: Tensor, random: torch.Generator) -> Tensor:
    """vec(W Z) for _PROBES random signs Z (in, in), in the order of the piece: (size, _PROBES)."""
    stored = piece.view(weights)
    matrix = stored.T if piece.transposed else stored  # (out, in)
    inputs = matrix.shape[1]
    signs = torch.randint(2, (_PROBES, inputs, inputs), generator=random, device="cpu")
    mixed = matrix @ (2 * signs - 1).to(weights)  # (probes, out, in)
    mixed = mixed.transpose(1, 2) if piece.transposed else mixed
    return mixed.reshape(_PROBES, -1).T


# --- what is left of them when the weights are written another way --------------------------------


@dataclass(frozen=True, kw_only=True)
class Invariance(Result):
    """Each measure before and after rescalings that leave the function as it is."""

    rescalings: tuple[str, ...]  # "query_key, uniform" …
    before: dict[str, float]  # measure → value
    after: dict[str, tuple[float, ...]]  # measure → value under each rescaling
    verdicts: dict[str, tuple[str, ...]]  # "invariant", "changes", or "undecided": within intervals
    tolerance: float
    factor: float
    refused: tuple[
        str, ...
    ]  # rescalings that are none of this model's symmetries; what is left out

    def change(self, measure: str) -> tuple[float, ...]:
        """|after − before| / |before| under each rescaling."""
        start = self.before[measure]
        return tuple(abs(value - start) / max(abs(start), 1e-300) for value in self.after[measure])

    def invariant(self, measure: str) -> bool:
        """Under every rescaling that was applied, to the tolerance."""
        return all(verdict == "invariant" for verdict in self.verdicts[measure])

    def _rows(self) -> list[dict[str, Any]]:
        """A row a measure and rescaling."""
        return [
            {"measure": name, "rescaling": how, "before": before, "after": after, "change": change}
            for name, before in self.before.items()
            for how, after, change in zip(
                self.rescalings, self.after[name], self.change(name), strict=True
            )
        ]

    def __str__(self) -> str:
        width = max(len(name) for name in self.rescalings) + 2
        lines = [
            f"{'relative change under':<34}" + "".join(f"{n:>{width}}" for n in self.rescalings)
        ]
        for name in self.before:
            cells = (
                "invariant" if verdict == "invariant" else f"{change:.2g} {verdict}"
                for change, verdict in zip(self.change(name), self.verdicts[name], strict=True)
            )
            row = "".join(f"{cell:>{width}}" for cell in cells)
            lines.append(f"{MEASURES.get(name, name):<34}{row}")
        return "\n".join([*lines, *self.refused])


def rescaling_invariance(
    problem: Problem,
    *,
    rescalings: Sequence[Rescaling] = RESCALINGS,
    modes: Sequence[Mode] = MODES,
    factor: float = 3.0,
    tolerance: float = 1e-8,
    seed: int = 0,
    keep: Keep | None = None,
    **options: Any,
) -> Invariance:
    """Measure everything, rescale a copy of the model, measure again.

    factor: of the rescaling (``rescaled``). tolerance: relative change up to which a measure is
    called invariant; one that moves by more, but within its intervals, is undecided. keep, options:
    of ``flatness``, with one random start unless said otherwise: the same for all copies. A
    rescaling that changes the outputs is no symmetry of the model: it is listed as refused, and
    where all are, so is the call.
    """
    step: Keep = (lambda _, function: function()) if keep is None else keep
    options = {"starts": 1, **options}
    if problem.dtype != torch.float64:
        raise ProblemError(
            f"invariance is a matter of the last digits, and the weights are {problem.dtype}: "
            "make the model and the data float64 (model.double(), --dtype float64)."
        )
    copies: dict[str, Problem] = {}
    notes = []
    for rescaling in rescalings:
        for mode in modes:
            if mode == "matrix" and rescaling in ("norm_gain", "feed_forward"):
                continue
            name = f"{rescaling}, {mode}"
            try:
                copies[name] = rescaled(problem, rescaling, mode=mode, factor=factor, seed=seed)
            except ProblemError as error:
                notes.append(f"{name}: {error}")
    if not copies:
        raise ProblemError(f"no rescaling leaves this model's outputs as they are: {notes[0]}")

    def measured(place: int, of: Problem) -> Flatness:
        found: Flatness = step(
            f"rescaled{place}.flatness", lambda: flatness(of, seed=seed, **options)
        )
        return found

    every = track(list(enumerate([problem, *copies.values()])), "rescaled copies")
    start, *rows = [measured(place, of) for place, of in every]
    before = {"loss": start.loss, **start.measures}
    for name, bound in (
        ("pac_bayes_isotropic", start.isotropic),
        ("pac_bayes_diagonal", start.diagonal),
    ):
        if bound is not None and bound.value >= 0.999 * bound.loss_bound:
            before.pop(name)
            notes.append(f"{MEASURES[name]}: trivial on so few samples, so that it cannot change.")
    before = {name: value for name, value in before.items() if not math.isnan(value)}
    after = {
        name: tuple({"loss": row.loss, **row.measures}[name] for row in rows) for name in before
    }

    def verdict(name: str, row: Flatness, value: float) -> str:
        if abs(value - before[name]) <= tolerance * abs(before[name]):
            return "invariant"
        if name not in start.intervals:
            return "changes"
        (low, high), (first, last) = start.intervals[name], row.intervals[name]
        return "undecided" if low <= last and first <= high else "changes"

    return Invariance(
        rescalings=tuple(copies),
        before=before,
        after=after,
        verdicts={
            name: tuple(verdict(name, r, v) for r, v in zip(rows, after[name], strict=True))
            for name in before
        },
        tolerance=tolerance,
        factor=factor,
        refused=tuple(notes),
    )
