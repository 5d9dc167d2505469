"""Static figures of a run for papers: PNG and SVG, drawn with matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from curvatlas.figures import visualize_hessian_spectrum, visualize_overview
from curvatlas.report.contents import PARTS, Contents, contents_of, stage_words, subject_name
from curvatlas.runs.loading import LoadedRun

# results that draw themselves → the first word of the file's name
_OWN_PLOTS = {
    "Atlas": "map",
    "CurvatureFlow": "propagation",
    "LandscapeConvergence": "convergence",
    "RetrainedConvergence": "retrained",
    "Generalisation": "generalisation",
    "Flatness": "flatness",
    "Invariance": "invariance",
    "ScalingGrid": "scaling",
    "Growth": "growth",
    "Sinks": "sinks",
    "SinkStudy": "sinks",
    "GaussNewtonQuality": "quality",
    "Pruning": "pruning",
    "QuantizationTable": "rounding",
}
# of rescaled copies, whose measures are in the picture of the invariance side by side
_COPY = re.compile(r"rescaled\d+\.")
# what a command draws by itself: one picture a run, since a figure takes about a second
MAIN = (
    "overview",
    "convergence",
    "retrained",
    "generalisation",
    "scaling",
    "growth",
    "sinks",
    "quality",
    "flatness",
    "invariance",
    "pruning",
    "rounding",
)


def write_figures(
    run: LoadedRun,
    folder: Path,
    *,
    parts: Collection[str] = tuple(PARTS),
    kinds: Collection[str] | None = None,
) -> list[Path]:
    """The figures of a run as PNG and SVG in ``folder``; returns the files.

    parts: of the Hessian, for the spectra. kinds: spectrum, map, propagation, or of MAIN (default:
    all that the run has).
    """
    import matplotlib as mpl

    written = []
    folder.mkdir(parents=True, exist_ok=True)
    style: dict[Any, Any] = {
        # the same numbers give the same file: no dates, no random identifiers
        "svg.hashsalt": "curvatlas",
        "svg.fonttype": "none",
        # what "no layout engine" means to matplotlib, whatever its user has set
        "figure.autolayout": False,
        "figure.constrained_layout.use": False,
    }
    with mpl.rc_context(style):
        for name, draw in _figures(contents_of(run), run, parts):
            if kinds is not None and name.split("-")[0] not in kinds:
                continue
            figure = draw()
            if (layout := figure.get_layout_engine()) is not None:
                layout.execute(figure)
            # Laid out once for both formats. While a figure has an engine, the name "none"
            # included, matplotlib draws twice to save once.
            figure.set_layout_engine(None)
            for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
                path = folder / f"{name}{suffix}"
                figure.savefig(path, dpi=160, metadata=metadata)
                written.append(path)
    return written


def _figures(
    contents: Contents, run: LoadedRun, parts: Collection[str]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, how to draw it): drawing is left to the caller, who may want only some."""
    if any(entry.part == "total" for entry in contents.of_kind("SpectralDensity")):
        yield "overview", partial(_overview, contents, run)
    for stage in contents.stages("Eigenpairs", "SpectralDensity"):
        for part in parts:
            if pieces := _pieces(contents, run, stage, part):
                title = f"{PARTS[part]} {stage_words(stage)}".strip()
                draw = partial(visualize_hessian_spectrum, pieces, title=title)
                yield _name("spectrum", stage, part), draw
    for kind, word in _OWN_PLOTS.items():
        for entry in contents.of_kind(kind):
            if _COPY.match(entry.name):
                continue
            result: Any = run[entry.name]
            yield _name(word, entry.stage), result.plot


def _overview(contents: Contents, run: LoadedRun) -> Any:
    def by_stage(kind: str) -> dict[str, Any]:
        found = [entry for entry in contents.of_kind(kind) if entry.part == "total"]
        return {stage_words(entry.stage) or "H": run[entry.name] for entry in found}

    atlases = by_stage("Atlas")
    words = list(atlases)[-1] if len(atlases) > 1 else ""
    return visualize_overview(
        densities=by_stage("SpectralDensity"),
        atlas=list(atlases.values())[-1] if atlases else None,
        atlas_words=words,
        flows=by_stage("CurvatureFlow"),
        title=subject_name(contents),
    )


def _pieces(contents: Contents, run: LoadedRun, stage: str, part: str) -> tuple[Any, ...]:
    """Density and eigenvalues of one part at one stage, as far as they are there."""
    return tuple(
        run[entry.name]
        for kind in ("SpectralDensity", "Eigenpairs")
        for entry in contents.of_kind(kind)
        if (entry.stage, entry.part) == (stage, part)
    )


def _name(*words: str) -> str:
    return "-".join(word for word in words if word)
