"""Every Python block of the README and the docs runs, in order, page by page."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from script_loading import ROOT, load

_HOUSE = (
    ROOT / "src/curvatlas", ROOT / "src/curvatlas/engines", ROOT / "src/curvatlas/analysis",
)  # fmt: skip
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def in_a_fork(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of ``python -m module arguments`` without the start of an interpreter."""
    python, m, module, *arguments = words
    assert (python, m) == (sys.executable, "-m")
    return forked.Forked(module, *arguments, cwd=Path.cwd()).finished()


@pytest.mark.draws
@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as for a script in the current folder
    monkeypatch.setattr(subprocess, "run", in_a_fork)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    sys.modules.pop("mine", None)  # a page's own module


def test_the_readme_shows_the_two_commands_first() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("make demo") < text.index("make test") < text.index("## ")


def test_the_readme_shows_what_it_is_in_three_lines_and_the_picture_of_the_demo() -> None:
    _, first, picture, *_ = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")
    assert len(first.splitlines()) == 3
    (path,) = re.findall(r"!\[.+\]\((.+)\)", picture.replace("\n", " "))
    image = ROOT / path
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size < 200_000


def test_the_readmes_first_example_has_ten_lines() -> None:
    assert len([line for line in blocks(ROOT / "README.md")[0].splitlines() if line]) == 10


def test_the_readmes_table_shows_the_kept_measurements() -> None:
    script = load(ROOT / "scripts" / "benchmark_page.py")
    products = script.kept()["products"]
    text = script.README.read_text(encoding="utf-8")
    assert script.readme_table(products) in text, "run: python scripts/benchmark_page.py"
    case = next(c for c in products["cases"] if c["case"] == "GPT 1.06 M")
    told = {(r["name"], r["columns"]): f"{r['gradients']:.2f}" for r in case["rows"]}
    (ours,) = [line for line in text.splitlines() if line.startswith("| **curvatlas** |")]
    (theirs,) = [line for line in text.splitlines() if line.startswith("| hessian-eigenthings |")]
    assert ours.split(" | ")[1:5] == [
        told["curvatlas Hessian", 1], told["curvatlas Hessian", 8],
        told["curvatlas GaussNewton", 1], told["curvatlas GaussNewton", 8],
    ]  # fmt: skip
    assert theirs.split(" | ")[1:5] == [
        told["hessian-eigenthings HVP", 1], "–", told["hessian-eigenthings GGN", 1], "–",
    ]  # fmt: skip


def test_the_api_page_knows_every_public_name() -> None:
    import curvatlas

    text = load(ROOT / "scripts" / "api_page.py").render()
    headings = set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    public = {n for n in curvatlas.__all__ if not inspect.ismodule(getattr(curvatlas, n))}
    assert public <= headings
    assert " at 0x" not in text  # the same page every time


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_path_that_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([\w./]+(?:/|\.pyi?|\.json))`", text)
    assert len(paths) > 40
    for path in paths:
        places = [ROOT / path, *(folder / path for folder in _HOUSE)]
        assert any(place.exists() for place in places), f"CONTRIBUTING names {path}"
