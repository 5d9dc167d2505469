"""A run as the page reads it: typed results by stage, model and data in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from curvatlas.analysis.atlas.result import Atlas
from curvatlas.analysis.diagnostics import Advice
from curvatlas.analysis.propagation.result import CurvatureFlow
from curvatlas.report.words import PARTS, listed, number, stage_words
from curvatlas.results import Result
from curvatlas.runs.subject import Subject
from curvatlas.spectra.density_result import SpectralDensity
from curvatlas.spectra.eigen_result import Eigenpairs
from curvatlas.spectra.estimate import Estimate

R = TypeVar("R", bound=Result)
MEASURED = (Subject, Eigenpairs, SpectralDensity, Atlas, CurvatureFlow, Estimate)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What was measured at one state of the model."""

    name: str  # as the run stores it: initial, trained, model …
    label: str  # in words; empty where there is only one
    results: dict[str, Result]  # by step, without the stage

    def first(self, kind: type[R], part: str = "total") -> R | None:
        """The result of a class; of a part of the Hessian where the step's name says one."""
        for name, result in self.results.items():
            if isinstance(result, kind):
                said = next((word for word in name.split(".") if word in PARTS), "total")
                if said == part:
                    return result
        return None

    def trace(self, part: str = "total") -> Estimate | None:
        """The estimate of a trace."""
        for name, result in self.results.items():
            if isinstance(result, Estimate) and result.quantity == "trace":
                said = next((word for word in name.split(".") if word in PARTS), "total")
                if said == part:
                    return result
        return None

    def density(self) -> SpectralDensity | None:
        return self.first(SpectralDensity)

    @property
    def subject(self) -> Subject | None:
        return self.first(Subject)

    @property
    def ends(self) -> Eigenpairs | None:
        return self.first(Eigenpairs)

    @property
    def atlas(self) -> Atlas | None:
        return self.first(Atlas)

    @property
    def flow(self) -> CurvatureFlow | None:
        return self.first(CurvatureFlow)

    @property
    def advice(self) -> Advice | None:
        return self.first(Advice)


def split(results: dict[str, Result]) -> dict[str, dict[str, Result]]:
    """Results by stage: the first word of a step's name when another word follows it."""
    groups: dict[str, dict[str, Result]] = {}
    for name, result in results.items():
        first, dot, rest = name.partition(".")
        staged = bool(dot) and first not in PARTS
        groups.setdefault(first if staged else "", {})[rest if staged else name] = result
    return groups


def stages_of(results: dict[str, Result]) -> tuple[Stage, ...]:
    """The states of the model at which curvature was measured, in the order they were stored."""
    return tuple(
        Stage(name=name, label=stage_words(name), results=group)
        for name, group in split(results).items()
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
    loss = first.loss_name.replace("_", "-")
    same = all(s.data == first.data for _, s in subjects)
    data = first.data if same else listed(list(dict.fromkeys(s.data for _, s in subjects)))
    return (
        f"{first.model} with {first.parameters:,} parameters, measured on {data}: "
        f"{loss} loss {listed(losses)}."
    )
