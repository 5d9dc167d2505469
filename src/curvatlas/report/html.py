"""The report: one HTML page that works from disk, offline, with and without JavaScript.

The page carries its own style and script and asks the network for nothing; its content policy
forbids the browser to load or run anything else, whatever a name in the run may contain.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from curvatlas.files import write_bytes
from curvatlas.report.contents import Contents, Section, contents_of, subject_name
from curvatlas.report.markup import Markup, join, tag
from curvatlas.report.sections.atlas import atlas, propagation
from curvatlas.report.sections.experiments import growth
from curvatlas.report.sections.findings import findings, recommendations, verdicts
from curvatlas.report.sections.landscape import landscape, scaling
from curvatlas.report.sections.setting import cautions, others, reproduction, subject
from curvatlas.report.sections.spectrum import spectrum
from curvatlas.report.sections.training import dynamics, training
from curvatlas.runs.loading import LoadedRun, load

# in reading order; a section that the run has no data for gives None
SECTIONS: tuple[Callable[[Contents], Section | None], ...] = (
    subject,
    findings,
    spectrum,
    atlas,
    propagation,
    landscape,
    growth,
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
    write_bytes(target, render(contents_of(loaded)).encode("utf-8"))
    if figures:
        from curvatlas.report.paper import write_figures

        write_figures(loaded, target.parent / "figures")
    return target


def render(contents: Contents) -> str:
    """The whole page as text."""
    sections = [section for make in SECTIONS if (section := make(contents)) is not None]
    style, script = _asset("report.css"), _asset("report.js")
    title = f"Curvature of {subject_name(contents)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="generator", content=f"curvatlas {contents.manifest['version']}"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip to the findings", href="#findings", class_="skip"),
        _header(title, contents, sections),
        tag("main", [_section(section) for section in sections]),
        tag("footer", tag("p", f"Made by curvatlas {contents.manifest['version']}.")),
        tag("div", id="hover", role="status", aria_live="polite", hidden=True),
        Markup(f"<script>{script}</script>"),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _header(title: str, contents: Contents, sections: list[Section]) -> Markup:
    links = [
        tag("li", tag("a", section.title, href=f"#{section.identifier}")) for section in sections
    ]
    status = contents.manifest["status"]
    return tag(
        "header",
        tag("h1", title),
        tag("p", f"{contents.manifest['updated']} · {status}", class_="meta"),
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
