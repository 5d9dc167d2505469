"""Runs side by side: in order of time, every change with "real" or "within error"."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

import curvatlas as ca
from curvatlas import runs
from curvatlas.report.comparing import REAL, WITHIN, verdict
from curvatlas.report.reading import Measured
from curvatlas.runs.loading import LoadedRun
from report_samples import eigenpairs, subject, trace, write_sample_run


def _run(path: Path, *, value: float, half: float, data: str = "d", created: str = "") -> LoadedRun:
    estimate = dataclasses.replace(trace(value), interval=(value - half, value + half))
    with runs.Run.create(path, options={"value": value}, data_fingerprint=data) as run:
        run.step("model.subject", lambda: subject("net", "", 1))
        run.step("model.total.eigenpairs", lambda: eigenpairs(0, both=True))
        run.step("model.total.trace", lambda: estimate)
    loaded = runs.load(path)
    manifest = loaded.manifest.changed(created=created) if created else loaded.manifest
    return dataclasses.replace(loaded, manifest=manifest)


def test_states_stand_in_order_of_time_whatever_the_order_they_are_given_in(tmp_path: Path) -> None:
    late = _run(tmp_path / "late", value=9.0, half=0.1, created="2026-02-01T00:00:00+00:00")
    early = _run(tmp_path / "early", value=3.0, half=0.1, created="2026-01-01T00:00:00+00:00")
    for given in ([late, early], [early, late]):
        compared = ca.compare(given)
        assert compared.states == ("early", "late")
        (change,) = [change for change in compared.changes if change.name == "tr H"]
        assert (change.before.value, change.after.value) == (3.0, 9.0)
        assert change.size == pytest.approx(math.log(3))
    assert compared.options == {"value": ("3.0", "9.0")}


@pytest.mark.parametrize(
    ("half", "expected"), [(0.5, REAL), (0.7, REAL), (0.72, WITHIN), (5.0, WITHIN)]
)
def test_a_change_is_real_when_it_exceeds_both_intervals_together(
    half: float, expected: str
) -> None:
    before, after = (Measured(value=v, interval=(v - half, v + half)) for v in (3.0, 4.0))
    assert verdict(before, after, same_data=True) == expected  # √2 · 0.7 < 1 < √2 · 0.72


def test_other_data_make_a_change_real_only_beyond_the_scatter_of_samples() -> None:
    def measured(value: float, data: float | None) -> Measured:
        scatter = None if data is None else (value - data, value + data)
        return Measured(value=value, interval=(value, value), data_interval=scatter)

    for data, expected in ((None, "on other data"), (0.1, REAL), (2.0, WITHIN)):
        assert verdict(measured(3.0, data), measured(4.0, data), same_data=False) == expected


def test_one_run_with_two_stages_is_compared_with_itself(tmp_path: Path) -> None:
    path = write_sample_run(tmp_path / "run", layers=2)
    compared = ca.compare(path, output=tmp_path)
    assert compared.states == ("initial", "trained")
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert len(compared.largest) == 5
    for change in compared.largest:
        assert change.name in page
        assert change.verdict in (REAL, WITHIN)
    assert "Factor of change, initial → trained" in page


def test_a_single_state_is_refused_with_what_to_give(tmp_path: Path) -> None:
    alone = _run(tmp_path / "a", value=1.0, half=0.1)
    with pytest.raises(ValueError, match="needs two states: give two runs"):
        ca.compare([alone])


def test_the_largest_change_comes_first_and_a_change_of_sign_counts_more(tmp_path: Path) -> None:
    one = _run(tmp_path / "a", value=1.0, half=0.0)
    two: Any = _run(tmp_path / "b", value=-1.0, half=0.0)
    compared = ca.compare([one, two])
    assert compared.largest[0].name == "tr H"
    assert str(compared.largest[0]).endswith("1 → −1, real")
