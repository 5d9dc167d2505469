"""A run as the page reads it: results by stage, and the numbers of a stage with both errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from curvatlas.analysis.atlas.result import Atlas
from curvatlas.analysis.diagnostics import Advice
from curvatlas.analysis.propagation.result import CurvatureFlow
from curvatlas.report.words import (
    PARTS,
    listed,
    number,
    says_nothing,
    sign_unknown,
    stage_words,
    wider,
    with_interval,
)
from curvatlas.results import Interval, Result
from curvatlas.runs.subject import Subject
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.estimate import Estimate

R = TypeVar("R", bound=Result)
MEASURED = (Subject, Eigenpairs, SpectralDensity, Atlas, CurvatureFlow, Estimate)


@dataclass(frozen=True, kw_only=True)
class Measured(Result):
    """One number of one state; None where it was not measured."""

    value: float | None
    interval: Interval | None = None  # 95 %, of the measurement; None: exact
    data_interval: Interval | None = None  # 95 %, of the sampling of the data

    @property
    def widest(self) -> Interval | None:
        """The larger of both errors."""
        return wider(self.interval, self.data_interval)

    def __str__(self) -> str:
        return with_interval(self.value, self.widest)


_NOTHING = Measured(value=None)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What was measured at one state of the model."""

    name: str  # as the run stores it: initial, trained, model …
    label: str  # in words; empty where there is only one
    results: dict[str, Result]  # by step, without the stage

    def first(self, kind: type[R], part: str = "total", **fields: str) -> R | None:
        """The result of a class with these fields; of a part of the Hessian where the step's name
        says one."""
        for name, result in self.results.items():
            if isinstance(result, kind):
                said = next((word for word in name.split(".") if word in PARTS), "total")
                if said == part and all(result[key] == value for key, value in fields.items()):
                    return result
        return None

    @property
    def subject(self) -> Subject | None:
        return self.first(Subject)

    @property
    def ends(self) -> Eigenpairs | None:
        return self.first(Eigenpairs)

    @property
    def density(self) -> SpectralDensity | None:
        return self.first(SpectralDensity)

    @property
    def atlas(self) -> Atlas | None:
        return self.first(Atlas)

    @property
    def flow(self) -> CurvatureFlow | None:
        return self.first(CurvatureFlow)

    @property
    def advice(self) -> Advice | None:
        return self.first(Advice)

    # --- numbers ----------------------------------------------------------------------------------

    def largest(self, part: str = "total") -> Measured:
        """λmax of H, H_o or H_f."""
        return _end(self.first(Eigenpairs, part), last=False)

    def smallest(self) -> Measured:
        """λmin, where that end was searched."""
        return _end(self.ends, last=True)

    def trace(self, part: str = "total") -> Measured:
        """Of H, H_o or H_f."""
        estimate = self.first(Estimate, part, quantity="trace")
        if estimate is None:
            return _NOTHING
        interval = None if estimate.exact else estimate.interval
        return Measured(
            value=estimate.value, interval=interval, data_interval=estimate.data_interval
        )

    def norm(self, part: str = "total") -> Measured:
        """Frobenius norm of the whole matrix, from the map."""
        chosen = self.atlas.maps.get(f"model/frobenius/{part}") if self.atlas is not None else None
        if chosen is None:
            return _NOTHING
        value, *ends = (float(side[0, 0]) for side in (chosen.values, chosen.low, chosen.high))
        return Measured(value=value, interval=(ends[0], ends[1]))

    def missed_share(self) -> Measured:
        """‖H_f‖ / ‖H‖: how much of H Gauss-Newton leaves out."""
        whole, missed = self.norm(), self.norm("functional")
        if not whole.value or missed.value is None:
            return _NOTHING
        (low, high), (least, most) = whole.interval or (0.0, 0.0), missed.interval or (0.0, 0.0)
        interval = (least / high, most / low) if low > 0 and high > 0 else None
        return Measured(value=missed.value / whole.value, interval=interval)

    def outer_sharpness(self) -> Measured:
        """λmax(H_o) / λmax(H): how much of the sharpest direction Gauss-Newton sees."""
        top, outer = self.largest().value, self.largest("outer").value
        return Measured(value=outer / top) if top and top > 0 and outer is not None else _NOTHING

    def diagonal_share(self) -> Measured:
        """The share of ‖H‖² on diagonal blocks."""
        shares = {} if self.atlas is None else self.atlas.diagonal_share
        value, *ends = shares.get("block/total", (math.nan, math.nan, math.nan))
        return _NOTHING if math.isnan(value) else Measured(value=value, interval=(ends[0], ends[1]))

    def growth(self) -> Measured:
        """Curvature at the embedding over that at the last activation."""
        flow = self.flow
        if flow is None or len(flow.activations) < 2 or not math.isfinite(flow.amplification):
            return _NOTHING
        return _field(flow, "amplification")

    def within_roles(self) -> dict[str, Measured]:
        """The norms of the blocks of H on the diagonal, by role."""
        chosen = self.atlas.maps.get("role/frobenius/total") if self.atlas is not None else None
        if chosen is None:
            return {}
        sides = (chosen.values, chosen.low, chosen.high)
        rows = zip(*(side.double().diagonal().tolist() for side in sides), strict=True)
        return {
            name: Measured(value=value, interval=(low, high))
            for name, (value, low, high) in zip(chosen.names, rows, strict=True)
        }


def _end(pairs: Eigenpairs | None, *, last: bool) -> Measured:
    if pairs is None or pairs.which not in ("both", "smallest" if last else "largest"):
        return _NOTHING
    place = int(pairs.values.argmin() if last else pairs.values.argmax())
    both = [
        None if ends is None else (float(ends[0][place]), float(ends[1][place]))
        for ends in (pairs.interval, pairs.data_interval)
    ]
    return Measured(value=float(pairs.values[place]), interval=both[0], data_interval=both[1])


def _field(result: Result | None, key: str) -> Measured:
    if result is None:
        return _NOTHING
    return Measured(value=getattr(result, key), interval=getattr(result, f"{key}_interval", None))


HEADLINES: dict[str, Callable[[Stage], Measured]] = {
    "loss": lambda stage: _field(stage.subject, "loss"),
    "gradient norm": lambda stage: _field(stage.subject, "gradient_norm"),
    "λmax of H, the sharpest direction": Stage.largest,
    "λmin of H, the most negative": Stage.smallest,
    "tr H": Stage.trace,
    "tr H_o": lambda stage: stage.trace("outer"),
    "tr H_f": lambda stage: stage.trace("functional"),
    "‖H‖_F": Stage.norm,
    "‖H_f‖ / ‖H‖, what Gauss-Newton leaves out": Stage.missed_share,
    "share of ‖H‖² on diagonal blocks": Stage.diagonal_share,
    "share of negative eigenvalues": lambda stage: _field(stage.density, "negative_mass"),
    "effective rank of H": lambda stage: _field(stage.density, "effective_rank"),
    "curvature at the embedding over that at the last activation": Stage.growth,
}


def informative(name: str, measured: Measured) -> bool:
    """Whether a headline says anything: an interval over half of what is possible does not."""
    if measured.value is None:
        return False
    unknown = says_nothing if name.startswith("share of") else sign_unknown
    return not unknown(measured.value, measured.interval)


# --- the stages of a run --------------------------------------------------------------------------


def stages_of(results: dict[str, Result]) -> tuple[Stage, ...]:
    """The states of the model at which curvature was measured, in the order they were stored.

    The stage is the first word of a step's name when another word follows it.
    """
    groups: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        first, dot, rest = name.partition(".")
        staged = bool(dot) and first not in PARTS
        groups.setdefault(first if staged else "", {})[rest if staged else name] = result
    return tuple(
        Stage(name=name, label=stage_words(name), results=group)
        for name, group in groups.items()
        if any(isinstance(result, MEASURED) for result in group.values())
    )


def sentence(stages: Sequence[Stage]) -> str:
    """Model, data and the loss at each stage."""
    told = [(stage.label, stage.subject) for stage in stages]
    subjects = [(label, subject) for label, subject in told if subject is not None]
    if not subjects:
        return ""
    first = subjects[0][1]
    losses = [f"{number(s.loss, 4)} {label}".strip() for label, s in subjects]
    data = listed(list(dict.fromkeys(s.data for _, s in subjects)))
    return (
        f"{first.model} with {first.parameters:,} parameters, measured on {data}: "
        f"{first.loss_name.replace('_', '-')} loss {listed(losses)}."
    )
