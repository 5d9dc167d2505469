"""The page: complete, self-contained, escaped, light."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from curvatlas import runs
from curvatlas.report import write_report
from curvatlas.report.paper import MAIN, write_figures
from report_samples import write_sample_run
from run_samples import write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_run(tmp_path_factory.mktemp("sample") / "run")


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in ("meta", "input", "br", "hr", "img", "link"):
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name, f"</{name}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


def test_every_section_with_data_appears_in_order(sample: Path) -> None:
    page = _Page(write_report(sample).read_text("utf-8"))
    assert page.titles == [
        "What was analysed", "Findings", "Spectrum", "Atlas of curvature", "Training",
        "Theorems and claims", "Warnings", "How to reproduce",
    ]  # fmt: skip
    assert page.open == []


def test_a_run_of_unknown_results_still_gives_a_page(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path / "run")).read_text("utf-8")
    assert _Page(text).titles == ["Other results", "Warnings", "How to reproduce"]


def test_the_findings_carry_numbers_and_intervals(sample: Path) -> None:
    text = write_report(sample).read_text("utf-8")
    run = runs.load(sample)
    top = run["trained.total.eigenpairs"].values.max()  # type: ignore[attr-defined]
    assert f"λmax = {top:.5g}" in text
    assert "tr H = 50 [49, 51]" in text
    assert "curves downwards" in text
    assert "saddle" not in text  # nothing was tried that would tell one from a slope


def test_nothing_is_asked_of_the_network(sample: Path) -> None:
    page = _Page(write_report(sample).read_text("utf-8"))
    for name, attributes in page.elements:
        assert name not in ("link", "iframe", "object", "embed", "base"), name
        for key in ("src", "href", "action", "data", "srcset"):
            value = attributes.get(key)
            if value is not None:
                assert value.startswith(("#", "data:image/png;base64,")), (name, key, value)
    text = write_report(sample).read_text("utf-8")
    assert "@import" not in text
    assert not re.search(r"url\(", text)
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_the_content_policy_allows_our_script_only(sample: Path) -> None:
    text = write_report(sample).read_text("utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [
        a["content"] or "" for n, a in _Page(text).elements
        if n == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]  # fmt: skip
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run", name=HOSTILE, role=HOSTILE)
    text = write_report(run).read_text("utf-8")
    page = _Page(text)
    assert page.open == []
    assert sum(1 for name, a in page.elements if name == "script" and not a) == 1
    assert not any(name == "img" for name, _ in page.elements)
    assert not any(key.startswith("on") for _, a in page.elements for key in a)
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in text


def test_every_figure_says_in_words_what_it_shows(sample: Path) -> None:
    page = _Page(write_report(sample).read_text("utf-8"))
    figures = [a for name, a in page.elements if name == "figure"]
    pictures = [a for name, a in page.elements if name == "svg" and a.get("role") == "img"]
    assert len(figures) == len(pictures) >= 20
    assert all(len(a["aria-label"] or "") > 20 for a in pictures)
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in figures)


def test_identifiers_are_unique_and_links_lead_somewhere(sample: Path) -> None:
    page = _Page(write_report(sample).read_text("utf-8"))
    identifiers = [a["id"] for _, a in page.elements if a.get("id")]
    assert len(identifiers) == len(set(identifiers))
    for name, attributes in page.elements:
        if name == "a":
            assert (attributes["href"] or "")[1:] in identifiers
        if name == "label":
            assert attributes["for"] in identifiers


def test_twelve_layers_stay_below_five_megabytes(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run", layers=12)
    assert write_report(run).stat().st_size < 5_000_000


def test_the_same_run_gives_the_same_page(sample: Path, tmp_path: Path) -> None:
    one = write_report(sample, tmp_path / "a.html").read_bytes()
    assert one == write_report(sample, tmp_path / "b.html").read_bytes()


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run = runs.Run.create(tmp_path / "run", options={})
    run.close("interrupted", "KeyboardInterrupt")
    text = write_report(tmp_path / "run").read_text("utf-8")
    assert "This run is interrupted" in text


@pytest.mark.slow
def test_paper_figures_are_png_and_svg(sample: Path, tmp_path: Path) -> None:
    written = write_figures(runs.load(sample), tmp_path, parts=("functional",))
    names = [
        "map-initial", "map-trained", "overview", "spectrum-initial-functional",
        "spectrum-trained-functional",
    ]  # fmt: skip
    files = [f"{name}.{suffix}" for name in names for suffix in ("png", "svg")]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert sorted(path.name for path in written) == files
    assert (tmp_path / "overview.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "overview.svg").read_text("utf-8")
    assert "at initialisation" in drawn
    assert "after training" in drawn
    assert "λmax" in drawn


def test_only_the_kinds_of_figures_asked_for_are_drawn(sample: Path, tmp_path: Path) -> None:
    written = write_figures(runs.load(sample), tmp_path, kinds=MAIN)
    assert [path.name for path in written] == ["overview.png", "overview.svg"]
