"""Rank correlations against scipy and simulated models, and a study of five small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import TensorDataset

from curvatlas import runs, zoo
from curvatlas.analysis.landscape import flatness as flatness_module, pac_bayes
from curvatlas.analysis.landscape.ascent import Sharpness, sharpness_by_ascent
from curvatlas.problem import Problem
from curvatlas.studies import generalisation
from curvatlas.studies.generalisation import (
    configurations,
    examine_generalisation,
    rank_correlations,
)
from spectra.spectrum_operators import most_misses


def test_correlations_are_scipys_and_the_control_is_about_zero() -> None:
    random = np.random.default_rng(0)
    gaps = random.normal(size=24)
    related, other = gaps + 0.3 * random.normal(size=24), random.normal(size=24)
    found = {
        row.measure: row
        for row in rank_correlations({"related": related, "other": other, "opposite": -gaps}, gaps)
    }
    for name, values in (("related", related), ("other", other)):
        expected = stats.kendalltau(values, gaps)
        assert found[name].value == pytest.approx(expected.statistic)
        assert found[name].p_value == pytest.approx(expected.pvalue)
        assert found[name].control[0] < 0 < found[name].control[1]
    assert found["related"].interval[0] > found["related"].control[1]
    assert found["opposite"].value == -1.0
    assert found["opposite"].interval == (-1.0, -1.0)


def test_intervals_hold_the_true_correlation() -> None:
    covered, rho = 0, 0.5
    true = 2 / np.pi * np.arcsin(rho)  # of a normal pair
    for trial in range(40):
        random = np.random.default_rng(trial)
        x = random.normal(size=28)
        y = rho * x + np.sqrt(1 - rho**2) * random.normal(size=28)
        (row,) = rank_correlations({"x": x}, y, seed=trial)
        covered += row.interval[0] <= true <= row.interval[1]
    assert covered >= 40 - most_misses(40)


def test_every_level_of_an_axis_is_used_equally_often() -> None:
    chosen = configurations(24, seed=3)
    for axis, levels in generalisation.AXES.items():
        counts = [sum(one[axis] == level for one in chosen) for level in levels]
        assert max(counts) - min(counts) <= 1, axis
    assert chosen != configurations(24, seed=4)


@pytest.mark.usefixtures("short_ascents")
def test_a_study_is_kept_model_by_model_and_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        generalisation,
        "AXES",
        {**generalisation.AXES, "width": (4,), "depth": (1,), "samples": (10, 14)},
    )

    # Six climbs of 150 steps a model and the search for the least bound would be most of the time,
    # and are tested elsewhere.
    def one_short_climb(problem: Problem, **options: Any) -> Sharpness:
        return sharpness_by_ascent(problem, **options | {"steps": 2, "starts": 0})

    monkeypatch.setattr(pac_bayes, "_SEARCH_DRAWS", 1)
    monkeypatch.setattr(flatness_module, "sharpness_by_ascent", one_short_climb)
    how = {"models": 5, "steps": 4, "products": 16, "draws": 2, "output": tmp_path / "study"}
    found = examine_generalisation("digits", **how)  # type: ignore[arg-type]
    assert len(found.models) == 5
    assert {row.measure for row in found.correlations} >= {"SAM sharpness", "training loss"}
    assert all(model.test_loss > 0 for model in found.models)
    stored = runs.load(tmp_path / "study")
    assert [n for n in stored.results if n.startswith("model")] == [f"model{i}" for i in range(5)]
    monkeypatch.setattr(generalisation, "_studied", None)  # nothing is computed again
    again = examine_generalisation("digits", **how)  # type: ignore[arg-type]
    assert [row.value for row in again.correlations] == [row.value for row in found.correlations]
    assert found.plot().axes
    assert "Kendall" in str(found)


def test_too_few_models_and_missing_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="takes 5 models, got 3"):
        rank_correlations({"x": [1, 2, 3]}, [1, 2, 3])
    with pytest.raises(ValueError, match="takes 5 models"):
        examine_generalisation("digits", models=2)
    with pytest.raises(ValueError, match="axes are width, depth"):
        examine_generalisation("digits", axes={"heads": (1,)})
    with pytest.raises(ValueError, match="the levels of rate are positive"):
        examine_generalisation("digits", axes={"rate": (0.1, -1.0)})
    with pytest.raises(ValueError, match=r"has 1437 training samples .* asks for 5000"):
        examine_generalisation("digits", axes={"samples": (10, 5000)})
    with pytest.raises(ValueError, match=r"no square images: pass make="):
        examine_generalisation(
            zoo.from_torch(TensorDataset(torch.ones(600, 3), torch.arange(600) % 2))
        )
    with pytest.raises(ValueError, match="NaN"):
        rank_correlations({"x": range(5)}, [1, 2, 3, 4, float("nan")])
    assert rank_correlations({"x": [1, 2, 3, 4, float("nan")]}, range(5)) == ()
