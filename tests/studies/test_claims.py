"""The claims: verdicts follow from intervals, and the LayerNorm law is found where it must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import curvatlas as ca
from curvatlas.results import same
from curvatlas.studies.claims import claim, examine_claims, load, norm_slope
from curvatlas.zoo import digits, reference_vit


def test_a_verdict_follows_from_the_interval() -> None:
    def verdict(values: list[float]) -> str:
        return claim("", "", "", "", values, 1.0, {}).verdict

    assert verdict([1.9, 2.0, 2.1]) == "holds"
    assert verdict([0.5, 0.52, 0.48]) == "fails"
    assert verdict([0.5, 2.0]) == "undecided"


def test_layer_norm_creates_curvature_like_one_over_the_variance() -> None:
    batch = digits().train.take(3)
    model = reference_vit(seed=0, n_layers=2, d_model=8).double()
    problem = ca.Problem(model, "cross_entropy", (batch.inputs.double(), batch.targets))
    assert -1.3 < norm_slope(problem) < -0.7


@pytest.mark.slow
def test_every_claim_gets_a_verdict_on_digits_and_seeds_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"seeds": (0, 1), "samples": 2, "steps": 3, "depths": (1, 2), "rtol": 1.0}
    report = examine_claims(load("digits"), output=tmp_path / "run", **options)
    assert len(report.claims) == 16
    entries, norms = (
        report[f"value {what}above feed-forward at training"].value for what in ("entries ", "")
    )
    # blocks of 16 × 16 against 16 × 64 entries: the same ratio, four times larger an entry
    assert entries.values == pytest.approx([4 * v for v in norms.values], rel=1e-9)
    assert {claim.verdict for claim in report.claims} <= {"holds", "fails", "undecided"}
    assert report["norm grows in training"].value.mean > 0
    assert "digits, 2 seeds" in str(report)
    with pytest.raises(KeyError, match="there is no claim"):
        report["unknown"]
    monkeypatch.setattr("curvatlas.studies.claims._measure", None)  # nothing is measured again
    assert same(examine_claims("digits", output=tmp_path / "run", **options), report)


def test_one_seed_or_one_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 seeds, got 1"):
        examine_claims("digits", seeds=(0,))
    with pytest.raises(ValueError, match="2 different depths"):
        examine_claims("digits", depths=(2, 2))


def test_an_unknown_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="data sets are digits"):
        load("imagenet")
