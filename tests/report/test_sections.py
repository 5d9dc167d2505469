"""Sections that slot in by what a result holds: dynamics, scaling, recommendations, propagation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from curvatlas import runs, zoo
from curvatlas.analysis.propagation import CurvaturePropagationAnalyzer
from curvatlas.report import write_report
from curvatlas.results import Result


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
