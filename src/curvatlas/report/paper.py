"""Static figures of a run for papers: PNG and SVG, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from curvatlas.report.contents import PARTS, Contents, contents_of, stage_words
from curvatlas.report.figures import visualize_hessian_spectrum
from curvatlas.runs.loading import LoadedRun


def write_figures(run: LoadedRun, folder: Path) -> list[Path]:
    """Every figure of the run as PNG and SVG in ``folder``; returns the files."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("figures need: pip install 'curvatlas[figures]'.") from error
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    # the same numbers give the same file: no dates, no random identifiers
    with mpl.rc_context({"svg.hashsalt": "curvatlas", "svg.fonttype": "none"}):
        for name, figure in _figures(contents_of(run), run):
            for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
                path = folder / f"{name}{suffix}"
                figure.savefig(path, dpi=160, metadata=metadata)
                written.append(path)
    return written


def _figures(contents: Contents, run: LoadedRun) -> Iterator[tuple[str, Any]]:
    for stage in contents.stages("Eigenpairs", "SpectralDensity"):
        for part, symbol in PARTS.items():
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
