"""Sections that slot in by what a result holds: dynamics, scaling, recommendations, propagation."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import curvatlas as ca
from curvatlas import runs, zoo
from curvatlas.analysis.landscape.taylor_result import (
    CriticalLearningRate,
    PredictedTrajectory,
    TrustRadius,
)
from curvatlas.analysis.propagation.analyzer import CurvaturePropagationAnalyzer
from curvatlas.report import write_report
from curvatlas.results import Result
from report_samples import eigenpairs


@dataclass(frozen=True, kw_only=True)
class SampleHistory(Result):
    history: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SampleGrid(Result):
    rows: tuple[dict[str, Any], ...]
    fits: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SampleAdvice(Result):
    recommendations: tuple[dict[str, Any], ...]


def _page(tmp_path: Path, **results: Result) -> str:
    with runs.Run.create(tmp_path / "run", options={}) as run:
        for name, result in results.items():
            run.step(name, lambda result=result: result)
    return write_report(tmp_path / "run").read_text("utf-8")


def test_records_over_steps_become_curves_with_intervals(tmp_path: Path) -> None:
    records = tuple(
        {"step": s, "sharpness": 2.0**s, "sharpness_interval": (2.0**s - 0.5, 2.0**s + 0.5),
         "note": "x"}
        for s in range(6)
    )  # fmt: skip
    page = _page(tmp_path, monitor=SampleHistory(
        history=records, events=({"step": 4, "what": "<edge of stability>"},),
    ))  # fmt: skip
    assert "Training dynamics" in page
    assert 'aria-label="Sharpness"' in page
    assert page.count('class="interval"') == 6
    assert "&lt;edge of stability&gt;" in page


def test_a_scaling_grid_is_drawn_against_both_sizes(tmp_path: Path) -> None:
    rows = tuple(
        {"parameters": n, "samples": d, "loss": 1.0 / n + 1.0 / d}
        for n in (10, 100) for d in (5, 50)
    )  # fmt: skip
    fits = {"loss": {"exponent": -0.5, "exponent_interval": (-0.6, -0.4)}}
    page = _page(tmp_path, grid=SampleGrid(rows=rows, fits=fits))
    assert "Loss against parameters" in page
    assert "Loss against samples" in page
    assert "−0.5 [−0.6, −0.4]" in page


def test_only_recommendations_with_evidence_are_shown(tmp_path: Path) -> None:
    page = _page(tmp_path, advice=SampleAdvice(recommendations=(
        {"advice": "use pre-norm", "evidence": "norm grows 3.1-fold a layer", "strength": "strong"},
        {"advice": "buy a larger machine", "evidence": ""},
    )))  # fmt: skip
    assert "Use pre-norm</strong> (strong evidence)" in page
    assert "norm grows 3.1-fold a layer" in page
    assert "buy a larger machine" not in page


def test_propagation_shows_both_terms_of_every_sublayer(tmp_path: Path) -> None:
    model = zoo.reference_vit(d_model=8, n_heads=2).eval()
    batch = zoo.digits().train.take(2)
    flow = CurvaturePropagationAnalyzer(model).analyze_curvature_flow(*batch)
    page = _page(tmp_path, flow=flow)
    assert "Curvature by sublayer" in page
    for entry in flow:
        for words in ("total", "passed on", "created here"):
            norm = entry.measures[words.replace(" ", "_")].norm
            assert norm == 0 or f"{entry.name}, {words}: " in page
    assert torch.isfinite(torch.tensor(flow.amplification))


def test_the_landscape_says_where_descent_fails_and_draws_prediction_and_truth(
    tmp_path: Path,
) -> None:
    rate = CriticalLearningRate(
        value=0.25, interval=(0.24, 0.26), sharpness=8.0, momentum=0.0, ratios=(0.95, 1.05),
        growth=(0.9, 1.1), expected=(0.9, 1.1), losses=(torch.ones(2), torch.ones(2)),
        products=9, converged=True,
    )  # fmt: skip
    radius = TrustRadius(
        radius=0.5, accuracy=0.01, order=2, limited=True, worst_inside=0.008, measured_radius=0.75
    )
    path = PredictedTrajectory(
        losses=torch.tensor([2.0, 1.0, 0.5]), actual=torch.tensor([2.0, 1.1, 0.7]),
        learning_rate=0.125, momentum=0.0, eigenvalues=torch.ones(1), weights=torch.ones(1),
        exact_steps=2, critical_learning_rate=0.25, converges=True, top_share=1.0, products=3,
        horizon=1, tolerance=0.2,
    )  # fmt: skip
    page = _page(tmp_path, rate=rate, radius=radius, path=path)
    assert "within 20% of the change of the loss for <strong>1</strong> of 2 steps" in page
    assert "is no forecast" in page
    assert "beyond its horizon" in page
    assert "0.25 [0.24, 0.26]</strong>. Training at 0.95, 1.05 times this rate confirms it." in page
    assert "within 1.0% for steps up to <strong>0.5</strong>; it was seen to fail at 0.75" in page
    assert 'aria-label="Gradient descent, predicted and real"' in page
    assert "Other results" not in page  # everything has a place of its own
    unconfirmed = dataclasses.replace(rate, growth=(1.2, 1.1))
    (tmp_path / "second").mkdir()
    assert "does NOT confirm it" in _page(tmp_path / "second", rate=unconfirmed)


@pytest.mark.parametrize(
    ("which", "outside", "words"),
    [
        ("both", (-1.0, 18.5), "complete above 18.5 and below -1 at 97.5 %"),
        # beyond the outermost of the list: nothing that a reader of the list need know
        ("both", (-11.0, 18.5), "complete above 18.5 at 97.5 %; lower end converged, not searched"),
        ("largest", (-math.inf, 18.5), "complete above 18.5 at 97.5 %</td>"),
        ("both", (-math.inf, math.inf), "one further out overlooked: at most 1.0%"),
    ],
)
def test_the_table_says_where_no_eigenvalue_is_missing(
    tmp_path: Path, which: str, outside: tuple[float, float], words: str
) -> None:
    found = dataclasses.replace(
        eigenpairs(0, both=which == "both"), which=which, complete_outside=outside
    )
    assert words in _page(tmp_path, **{"model.total.eigenpairs": found})
    assert words.removesuffix("</td>") in str(found)  # the terminal says the same


def test_a_map_of_zeros_alone_stands_beside_the_others(tmp_path: Path) -> None:
    class Parallel(torch.nn.Module):
        """Linear in its weights, so that H_f is zero for all pairs of roles."""

        def __init__(self) -> None:
            super().__init__()
            self.query, self.value = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.query(x) + self.value(x)

    batch = torch.randn(5, 3), torch.randn(5, 2)
    found = ca.atlas(ca.Problem(Parallel(), "mse", batch))
    assert not found.view("role", part="functional").value.any()
    page = _page(tmp_path, atlas=found)
    assert "Atlas of curvature" in page
