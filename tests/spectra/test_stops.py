"""A stop at any line of an estimate resumes to the same bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from spectra.stops import ESTIMATES, lost_or_wrong, operator, traced


@pytest.mark.parametrize("name", ESTIMATES)
def test_a_stop_at_any_line_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    count = traced(lambda: ESTIMATES[name](operator(), checkpoint=tmp_path / "all"), 10**9).seen
    draw = random.Random(0)
    lines = sorted(draw.sample(range(1, count), min(30, count - 1)))
    assert not lost_or_wrong(name, lines, tmp_path)
