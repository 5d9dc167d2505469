"""The table of families: a dozen of them again, and that its page shows what was kept."""

from __future__ import annotations

from typing import Any

import pytest

from script_loading import ROOT, load


@pytest.fixture(scope="module")
def script() -> Any:
    return load(ROOT / "scripts" / "family_table.py")


@pytest.mark.parametrize(
    "family",
    [
        "gpt2", "llama", "mixtral", "mamba", "t5", "deberta-v2", "bloom", "fnet", "vit",
        "beit", "clip", "wav2vec2", "xlnet",
    ],
)  # fmt: skip
def test_products_of_a_family_equal_double_backward(script: Any, family: str) -> None:
    row = script.compared(family)
    assert row.verdict == script.kept()[family].verdict, row
    assert row.verdict in ("exact", "refused"), row


def test_no_family_of_the_table_is_wrong_and_the_page_shows_it(script: Any) -> None:
    rows = script.kept()
    verdicts = [row.verdict for row in rows.values()]
    assert verdicts.count("exact") >= 260
    assert not {name for name, row in rows.items() if row.verdict in ("wrong", "broken")}
    assert script.PAGE.read_text(encoding="utf-8") == script.page(rows), (
        "run: python scripts/family_table.py --page"
    )
