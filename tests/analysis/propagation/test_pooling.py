"""Accounts of groups of samples, put together, are the account of all samples."""

from __future__ import annotations

import math

import pytest

from curvatlas.analysis.propagation.analyzer import CurvaturePropagationAnalyzer
from curvatlas.analysis.propagation.pooling import pooled_flow
from digit_problems import vit_problem


def test_groups_of_samples_together_are_the_account_of_all() -> None:
    problem = vit_problem(10)
    analyzer = CurvaturePropagationAnalyzer(problem.model, problem.loss)
    (batch,) = problem.batches()
    parts = [batch.part(a, b, problem.loss.count) for a, b in ((0, 2), (2, 5), (5, 10))]
    whole = analyzer.analyze_curvature_flow(batch.inputs, batch.targets)
    flows = [analyzer.analyze_curvature_flow(part.inputs, part.targets) for part in parts]
    pooled = pooled_flow(flows, [part.count / 10 for part in parts])
    assert (pooled.samples, len(pooled)) == (10, len(whole))
    assert pooled.loss == pytest.approx(whole.loss, rel=1e-12)
    for ours, truth in zip(
        [*pooled.sublayers, *pooled.activations],
        [*whole.sublayers, *whole.activations],
        strict=True,
    ):
        assert ours.name == truth.name
        for part, measure in truth.measures.items():
            assert ours.measures[part].norm == pytest.approx(measure.norm, rel=1e-9, abs=1e-15)
            assert ours.measures[part].trace == pytest.approx(measure.trace, rel=1e-9, abs=1e-13)
        assert ours.spectral_norm == pytest.approx(truth.spectral_norm, rel=1e-9)
        assert ours.gradient_scale == pytest.approx(truth.gradient_scale, rel=1e-9)
        assert ours.amplification == (
            None if truth.amplification is None else pytest.approx(truth.amplification, rel=1e-9)
        )
    low, high = pooled.amplification_interval or (math.nan, math.nan)
    assert low < pooled.amplification < high
