"""The documentation: no dead link, no dangling page, no page left out, built strictly."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="pyyaml comes with mkdocs")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages(part)]


def _nav() -> list[str]:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return _pages(config["nav"])


def test_every_page_of_the_navigation_exists_once() -> None:
    listed = _nav()
    assert len(listed) == len(set(listed))
    assert [page for page in listed if not (DOCS / page).is_file()] == []


def test_the_pages_a_reader_looks_for_are_there() -> None:
    wanted = {
        "index.md", "getting-started.md", "concepts.md", "how-to/hugging-face.md",
        "how-to/vit.md", "how-to/custom-model.md", "how-to/training.md", "how-to/pruning.md",
        "how-to/cluster.md", "how-to/read-the-report.md", "how-to/notebooks.md", "how-to/peft.md",
        "how-to/trackers.md", "glossary.md", "gallery.md", "api/training.md",
        "theory/statements.md", "benchmarks.md", "api.md", "faq.md",
    }  # fmt: skip
    assert wanted <= set(_nav())


WRITTEN = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(DOCS.rglob("*.md")),
]
_ASIDE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1\s*$|``.*?``|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)[^)]*\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)


def _links(page: Path) -> list[str]:
    text = _ASIDE.sub("", page.read_text(encoding="utf-8"))
    return [inline or by_name for inline, by_name in _LINK.findall(text)]


def _headings(page: Path) -> set[str]:
    """The anchors of a page: its headings as the site and code hosts make addresses of them."""
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    anchors = set(re.findall(r'(?:id|name)="([^"]+)"', text))
    anchors |= set(re.findall(r"\{[^}]*#([\w-]+)[^}]*\}", text))
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*$", text, flags=re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", html.unescape(heading).lower())
        anchors.add(re.sub(r"\s+", "-", words.strip()))
    return anchors


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in _links(page):
        assert ".example" not in link, f"{link} leads nowhere: name the file by its relative path"
        if re.match(r"\w+:", link):
            continue  # another host's
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in _headings(target), link


def test_links_are_found_and_headings_become_anchors(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One, two: `three`\n\n[a](b.md#c) `[no](x)` ![d](<e.png>)\n\n"
        "```\n# not this\n[nor](this)\n```\n\n[f]: g.md\n"
    )
    assert _links(page) == ["b.md#c", "e.png", "g.md"]
    assert _headings(page) == {"one-two-three"}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_strictly_and_asks_no_other_host(tmp_path: Path) -> None:
    # Without the sources of the API pages: they ask for nothing, and took a third of the time.
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert config.count("show_source: true") == 1
    words = ("build", "--strict", "--config-file", "-", "--site-dir", str(tmp_path / "site"))
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words],
        input=config.replace("show_source: true", "show_source: false"),
        cwd=ROOT, capture_output=True, text=True,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "search" / "search_index.js").is_file()  # found from disk
    for page in _nav():
        text = (tmp_path / "site" / page).with_suffix(".html").read_text(encoding="utf-8")
        for loading in ('src="http', "fonts.googleapis", 'rel="preconnect"'):
            assert loading not in text, (page, loading)
