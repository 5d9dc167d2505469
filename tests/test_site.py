"""The documentation site: no dangling page, no page left out, built strictly."""

from __future__ import annotations

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
