"""Following one product through the source opens few functions."""

from __future__ import annotations

import pytest

from script_loading import ROOT, load


@pytest.mark.parametrize("engine", ["autograd", "tangent"])
def test_a_second_product_runs_through_at_most_ten_functions(engine: str) -> None:
    hops = load(ROOT / "scripts" / "hops.py")
    second = hops.counted(engine)["second"]
    way = [function for function in second if not function.startswith(hops.PASSES)]
    assert len(way) <= 10
    assert (len(way) < len(second)) == (engine == "tangent")
