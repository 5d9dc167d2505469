"""The page of the papers is what its script writes from the numbers that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from curvatlas.studies.papers.exhibits import all_exhibits
from script_loading import load

SCRIPT: Any = load(Path(__file__).resolve().parents[3] / "scripts" / "papers_page.py")


def test_the_page_is_that_of_the_kept_numbers_and_has_every_id() -> None:
    page = SCRIPT.PAGE.read_text(encoding="utf-8")
    assert page == SCRIPT.render(SCRIPT.load_kept()), "run python scripts/papers_page.py"
    missing = [name for name in all_exhibits() if name not in page]
    assert not missing


def test_what_was_measured_is_still_an_exhibit_and_every_picture_is_of_one() -> None:
    assert set(SCRIPT.load_kept()) <= set(all_exhibits())
    assert {path.stem for path in SCRIPT.FIGURES.glob("*.png")} <= set(all_exhibits())


def test_markup_in_a_claim_does_not_break_the_table() -> None:
    assert SCRIPT.text("|L_{k+1} − L_k| at w*") == r"\|L\_{k+1} − L\_k\| at w\*"
