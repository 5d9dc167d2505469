"""Figures of *Cracking the Hessian* made small."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import curvatlas as ca
from curvatlas import zoo
from curvatlas.studies.papers import cracking
from curvatlas.studies.papers.exhibits import Ask
from curvatlas.theory.scalar_attention import ScalarAttention, ScalarAttentionSpectrum


def test_outlier_pairs_sum_to_the_trace_and_a_dropped_coupling_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = cracking.outlier_pairs(Ask())
    assert right.verdict == "confirmed", right
    spectrum = ScalarAttention.spectrum

    def without_an_outlier(model: ScalarAttention) -> ScalarAttentionSpectrum:
        found = spectrum(model)
        return dataclasses.replace(found, outliers=found.outliers[1:])

    monkeypatch.setattr(ScalarAttention, "spectrum", without_an_outlier)
    assert cracking.outlier_pairs(Ask()).verdict == "refuted"


def test_gauss_newton_misses_nothing_of_a_convex_problem() -> None:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem = ca.Problem(
        torch.nn.Linear(3, 2).double(), "mse", (x, x[:, :2]), roles={"weight": "up", "bias": "x"}
    )
    assert cracking.missed(problem, 0) < 1e-6


def test_sinks_of_ones_own_model_are_measured_at_every_level() -> None:
    model = zoo.reference_gpt(
        vocabulary=16, context=6, d_model=4, n_heads=1, n_layers=1, attention_bias=False
    ).double()
    tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(0))
    problem = ca.Problem(model, "cross_entropy", (tokens, tokens.roll(-1, 1)))
    found = cracking.sink_spectra(Ask(problem=problem))
    assert len(found.findings) == 3
    assert len(found.panels[0].marks) == len(cracking.LEVELS)
    assert len(found.plot().axes) == 2
