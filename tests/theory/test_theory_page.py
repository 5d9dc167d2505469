"""The generated page says what the registry says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from curvatlas.theory.statements import all_statements

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("theory_page", ROOT / "scripts/theory_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    expected = script.render(all_statements(), script.kept())
    written = script.PAGE.read_text(encoding="utf-8")
    assert written == expected, "run: python scripts/theory_page.py"
    assert "not yet measured" not in written, "run: python scripts/theory_page.py --measure"


def test_every_section_the_code_refers_to_exists() -> None:
    page = (ROOT / "docs/theory/derivations.md").read_text(encoding="utf-8")
    sections = {int(number) for number in re.findall(r"^## (\d+)\. ", page, re.MULTILINE)}
    assert sections == set(range(1, len(sections) + 1))
    referred = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert "THEORY" not in text, path
        for listed in re.findall(r"derivations ((?:§\d+(?:, | and )?)+)", text):
            for number in re.findall(r"\d+", listed):
                referred[int(number)] = path
    missing = {number: str(path) for number, path in referred.items() if number not in sections}
    assert len(referred) > 10
    assert not missing
