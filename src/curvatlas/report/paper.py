"""Static figures of a run for papers: PNG and SVG, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from curvatlas.report.contents import PARTS, Contents, contents_of, stage_words
from curvatlas.report.figures import visualize_hessian_spectrum
from curvatlas.runs.loading import LoadedRun


def write_figures(
    run: LoadedRun, folder: Path, *, parts: Collection[str] = tuple(PARTS)
) -> list[Path]:
    """The figures of these parts of the Hessian as PNG and SVG in ``folder``; returns the files."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("figures need: pip install 'curvatlas[figures]'.") from error
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    # the same numbers give the same file: no dates, no random identifiers
    with mpl.rc_context({"svg.hashsalt": "curvatlas", "svg.fonttype": "none"}):
        for name, figure in _figures(contents_of(run), run, parts):
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out once for both formats: half the time
            for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
                path = folder / f"{name}{suffix}"
                figure.savefig(path, dpi=160, metadata=metadata)
                written.append(path)
    return written


def _figures(
    contents: Contents, run: LoadedRun, parts: Collection[str]
) -> Iterator[tuple[str, Any]]:
    for stage in contents.stages("Eigenpairs", "SpectralDensity"):
        for part, symbol in ((p, s) for p, s in PARTS.items() if p in parts):
            pieces = tuple(
                run[entry.name]
                for kind in ("SpectralDensity", "Eigenpairs")
                for entry in contents.of_kind(kind)
                if (entry.stage, entry.part) == (stage, part)
            )
            if pieces:
                title = f"{symbol} {stage_words(stage)}".strip()
                name = "-".join(word for word in ("spectrum", stage, part) if word)
                yield name, visualize_hessian_spectrum(pieces, title=title)
