"""The claims: verdicts follow from intervals, and the LayerNorm law is found where it must be."""

from __future__ import annotations

import pytest

import curvatlas as ca
from curvatlas.analysis.claims import _claim, examine_claims, load, norm_slope
from curvatlas.zoo import digits, reference_vit


def test_a_verdict_follows_from_the_interval() -> None:
    def verdict(values: list[float]) -> str:
        return _claim("", "", "", "", values, 1.0, {}).verdict

    assert verdict([1.9, 2.0, 2.1]) == "holds"
    assert verdict([0.5, 0.52, 0.48]) == "fails"
    assert verdict([0.5, 2.0]) == "undecided"


def test_layer_norm_creates_curvature_like_one_over_the_variance() -> None:
    batch = digits().train.take(3)
    model = reference_vit(seed=0, n_layers=2, d_model=8).double()
    problem = ca.Problem(model, "cross_entropy", (batch.inputs.double(), batch.targets))
    assert -1.3 < norm_slope(problem) < -0.7


@pytest.mark.slow
def test_every_claim_gets_a_verdict_on_digits() -> None:
    report = examine_claims(
        load("digits"), seeds=(0, 1), samples=2, steps=3, depths=(1, 2), rtol=1.0
    )
    assert len(report.claims) == 14
    assert {claim.verdict for claim in report.claims} <= {"holds", "fails", "undecided"}
    assert report["norm grows in training"].value.mean > 0
    assert "digits, 2 seeds" in str(report)
    with pytest.raises(KeyError, match="there is no claim"):
        report["unknown"]


def test_an_unknown_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="data sets are digits"):
        load("imagenet")
