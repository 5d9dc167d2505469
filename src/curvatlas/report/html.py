"""The report: one HTML page that works from disk, offline, with and without JavaScript.

The page carries its own style and script and asks the network for nothing; its content policy
forbids the browser to load or run anything else, whatever a name in the run may contain.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from curvatlas import __version__
from curvatlas.files import read_bytes, write_bytes
from curvatlas.report.contents import (
    LARGEST_TENSOR,
    Contents,
    Entry,
    Section,
    contents_of,
    subject_name,
)
from curvatlas.report.markup import Markup, join, tag
from curvatlas.report.sections.atlas import atlas, propagation
from curvatlas.report.sections.compression import compression
from curvatlas.report.sections.experiments import gauss_newton, growth, sinks
from curvatlas.report.sections.findings import findings, recommendations, verdicts
from curvatlas.report.sections.flatness import flatness, generalisation
from curvatlas.report.sections.landscape import landscape, scaling
from curvatlas.report.sections.setting import cautions, others, reproduction, subject
from curvatlas.report.sections.spectrum import spectrum
from curvatlas.report.sections.training import dynamics, training
from curvatlas.results import Result, brief
from curvatlas.runs.loading import LoadedRun, load
from curvatlas.training.snapshot import CurvatureHistory

# in reading order; a section that the run has no data for gives None
SECTIONS: tuple[Callable[[Contents], Section | None], ...] = (
    subject,
    findings,
    spectrum,
    atlas,
    propagation,
    landscape,
    growth,
    sinks,
    gauss_newton,
    flatness,
    generalisation,
    compression,
    training,
    dynamics,
    scaling,
    verdicts,
    recommendations,
    others,
    cautions,
    reproduction,
)


def write_report(
    run: LoadedRun | str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    figures: bool = False,
) -> Path:
    """Write the page of a run; returns where it is.

    ``output``: a file ending in .html, or a folder (default: the run's own), in which the page is
    called report.html. ``figures``: also PNG and SVG figures for papers, in ``figures/`` beside it.
    """
    loaded = run if isinstance(run, LoadedRun) else load(run)
    target = loaded.path if output is None else Path(output)
    if target.suffix.lower() not in (".html", ".htm"):
        target = target / "report.html"
    page = render(contents_of(loaded), picture=_picture(loaded.path))
    write_bytes(target, page.encode("utf-8"))
    if figures:
        from curvatlas.report.paper import write_figures

        write_figures(loaded, target.parent / "figures")
    return target


def training_page(history: CurvatureHistory, output: str | os.PathLike[str]) -> Path:
    """The page of a monitored training that has no run folder; returns where it is.

    One HTML file that works from disk: curves, events, and the maps with a slider. With maps at two
    steps or more it says whether early dominant blocks predict movement.
    """
    results: list[Result] = [history]
    with contextlib.suppress(ValueError):  # no maps, or too few blocks for a rank correlation
        results.append(history.early_blocks())
    entries = tuple(
        Entry(name=result.kind, content=brief(result, largest=LARGEST_TENSOR)) for result in results
    )
    section = dynamics(Contents(manifest={}, entries=entries))
    if section is None:
        raise ValueError("a page of training needs at least two snapshots.")
    page = page_of("Curvature over training", "", [section], {"version": __version__})
    target = Path(output)
    write_bytes(target, page.encode("utf-8"))
    return target


_PICTURE = Path("figures") / "overview.png"
_LARGEST_PICTURE = 4 * 2**20


def _picture(folder: Path) -> bytes | None:
    """The overview that was drawn for the run, where there is one."""
    try:
        content = bytes(read_bytes(folder / _PICTURE, limit=_LARGEST_PICTURE, follow_links=False))
    except (OSError, ValueError):
        return None
    return content if content.startswith(b"\x89PNG\r\n\x1a\n") else None


def _overview(picture: bytes) -> Section:
    address = Markup("data:image/png;base64," + base64.b64encode(picture).decode())
    caption = (
        "The spectrum of H, where its curvature lives and how it travels back through the "
        "sublayers; stages have the same colours here and in every chart below."
    )
    image = tag("img", src=address, alt=caption)
    body = tag("figure", image, tag("figcaption", caption), class_="picture")
    return Section("overview", "In one picture", body)


def render(contents: Contents, *, picture: bytes | None = None) -> str:
    """The whole page as text; ``picture``: a PNG that shows the run at a glance."""
    sections = [section for make in SECTIONS if (section := make(contents)) is not None]
    if picture is not None:
        after = [i for i, section in enumerate(sections) if section.identifier == "findings"]
        sections.insert(after[0] + 1 if after else 1, _overview(picture))
    title = f"Curvature of {subject_name(contents)}"
    manifest = contents.manifest
    return page_of(title, f"{manifest['updated']} · {manifest['status']}", sections, manifest)


def page_of(title: str, meta: str, sections: list[Section], manifest: dict[str, Any]) -> str:
    """One page of these sections, with its style, its script and links to every section."""
    style, script = _asset("report.css"), _asset("report.js")
    made = f"curvatlas {manifest['version']}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="generator", content=made),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip to the findings", href=f"#{_first_read(sections)}", class_="skip"),
        _header(title, meta, sections),
        tag("main", [_section(section) for section in sections]),
        tag("footer", tag("p", f"Made by {made}.")),
        tag("div", id="hover", role="status", aria_live="polite", hidden=True),
        Markup(f"<script>{script}</script>"),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _first_read(sections: list[Section]) -> str:
    """The section that says what was found; pages of one section begin with it."""
    names = [section.identifier for section in sections]
    return "findings" if "findings" in names or not names else names[0]


def _header(title: str, meta: str, sections: list[Section]) -> Markup:
    links = [
        tag("li", tag("a", section.title, href=f"#{section.identifier}")) for section in sections
    ]
    return tag(
        "header",
        tag("h1", title),
        tag("p", meta, class_="meta"),
        tag("nav", tag("ul", links), aria_label="Sections"),
    )


def _section(section: Section) -> Markup:
    heading = f"{section.identifier}-title"
    return tag(
        "section",
        tag("h2", section.title, id=heading),
        join(section.body),
        id=section.identifier,
        aria_labelledby=heading,
    )


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (files("curvatlas.report") / "assets" / name).read_text(encoding="utf-8")
