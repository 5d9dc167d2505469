"""The table of the peers' cases, the tests and the page say the same."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from peers.cases import GROUPS
from peers.table import RIGHT, TESTED
from script_loading import load

ROOT = Path(__file__).resolve().parents[2]
PEERS = sorted({group.peer for group in GROUPS})


MODULES = [
    "curvlinops",
    "curvlinops_kfac",
    "hessian_eigenthings",
    "matfree",
    "pyhessian",
]


def test_every_group_has_its_test_and_every_test_its_group() -> None:
    for name in MODULES:
        importlib.import_module(f"peers.test_{name}")
    wanted = {(g.peer, g.name, RIGHT) for g in GROUPS if g.right}
    wanted |= {(g.peer, g.name, "refused") for g in GROUPS if g.refused}
    assert set(TESTED) == wanted


def test_names_are_not_used_twice() -> None:
    names = [(group.peer, group.name) for group in GROUPS]
    assert len(set(names)) == len(names)
    for group in GROUPS:
        assert len(group.cases) == len(group.right) + len(group.refused), group.name


@pytest.mark.parametrize("peer", PEERS)
def test_at_least_nine_of_ten_cases_are_right(peer: str) -> None:
    verdicts = [v for group in GROUPS if group.peer == peer for v in group.cases.values()]
    assert verdicts.count(RIGHT) >= 0.9 * len(verdicts)
    assert all(v == RIGHT or v.startswith("refused on purpose: ") for v in verdicts)


def test_the_page_is_written_from_the_table() -> None:
    page = load(ROOT / "scripts" / "peers_page.py").render()
    assert (ROOT / "docs" / "peers.md").read_text(encoding="utf-8") == page
