"""Following one product through the source opens few functions."""

from __future__ import annotations

from script_loading import ROOT, load


def test_a_second_product_runs_through_at_most_ten_functions() -> None:
    hops = load(ROOT / "scripts" / "hops.py")
    assert len(hops.counted()["second"]) <= 10
