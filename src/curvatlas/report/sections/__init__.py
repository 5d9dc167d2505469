"""The sections of the page, in reading order; each appears when the run has its data."""

from __future__ import annotations

from collections.abc import Callable

from curvatlas.report.contents import Contents, Section
from curvatlas.report.sections.atlas import atlas
from curvatlas.report.sections.findings import findings, recommendations, verdicts
from curvatlas.report.sections.landscape import landscape, scaling
from curvatlas.report.sections.propagation import propagation
from curvatlas.report.sections.setting import cautions, others, reproduction, subject
from curvatlas.report.sections.spectrum import spectrum
from curvatlas.report.sections.training import dynamics, training

SECTIONS: tuple[Callable[[Contents], Section | None], ...] = (
    subject,
    findings,
    spectrum,
    atlas,
    propagation,
    landscape,
    training,
    dynamics,
    scaling,
    verdicts,
    recommendations,
    others,
    cautions,
    reproduction,
)
