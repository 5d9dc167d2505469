"""The pictures of a page as files for papers: PNG and SVG."""

from __future__ import annotations

import re
from pathlib import Path

from curvatlas.report.layout import Page
from curvatlas.report.svg import laid_out

_NO_LETTERS = re.compile(r"[^a-z0-9]+")


def write_figures(page: Page, folder: Path) -> list[Path]:
    """Every picture of a page as PNG and SVG in ``folder``, named by its title; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    used: list[str] = []
    written = []
    for picture in page.every_picture():
        words = _NO_LETTERS.sub("-", picture.title.lower()).strip("-")[:60] or "picture"
        used.append(words)
        name = words if used.count(words) == 1 else f"{words}-{used.count(words)}"
        figure = picture.draw()
        with laid_out(figure):
            for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
                path = folder / f"{name}{suffix}"
                figure.savefig(path, dpi=160, metadata=metadata)
                written.append(path)
    return written
