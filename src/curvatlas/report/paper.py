"""The pictures of a page as files for papers: PNG and SVG."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from curvatlas.report.layout import Page, Picture

_NO_LETTERS = re.compile(r"[^a-z0-9]+")


def write_figures(page: Page, folder: Path) -> list[Path]:
    """Every picture of a page as PNG and SVG in ``folder``, named by its title; the files."""
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
        for name, picture in _named(page):
            figure = picture.draw()
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


def _named(page: Page) -> Iterator[tuple[str, Picture]]:
    """Pictures with the names of their files: words of the title, a number where two are alike."""
    pictures = list(page.pictures)
    for section in page.sections:
        pictures += [section.picture] if section.picture is not None else []
        pictures += [picture for fold in section.folds for picture in fold.pictures]
    pictures += [picture for fold in page.folds for picture in fold.pictures]
    used: dict[str, int] = {}
    for picture in pictures:
        words = _NO_LETTERS.sub("-", picture.title.lower()).strip("-")[:60] or "picture"
        used[words] = used.get(words, 0) + 1
        yield (words if used[words] == 1 else f"{words}-{used[words]}"), picture
