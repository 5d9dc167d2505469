"""The benchmarks' harness, and that the page shows the numbers that were kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from script_loading import ROOT, load

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_page_shows_the_kept_results() -> None:
    page = load(ROOT / "scripts" / "benchmark_page.py")
    expected = page.render(page.kept(), page.purposes())
    assert page.PAGE.read_text(encoding="utf-8") == expected, (
        "run: python scripts/benchmark_page.py"
    )


def test_the_tables_of_the_scale_page_show_the_kept_results() -> None:
    page = load(ROOT / "scripts" / "scale_page.py")
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, page.kept()) == text, "run: python scripts/scale_page.py"


def test_the_page_about_training_shows_the_kept_results() -> None:
    page = load(ROOT / "scripts" / "training_page.py")
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text, "run: python scripts/training_page.py"


def test_every_kept_result_belongs_to_a_benchmark_and_names_no_machine() -> None:
    runner = load(BENCHMARKS / "run.py")
    known = runner.benchmarks()
    assert {"products", "memory"} <= known.keys()
    for path in (BENCHMARKS / "results").glob("*.json"):
        assert path.stem in known, path.name
        text = path.read_text(encoding="utf-8")
        assert "/home/" not in text
        assert "/work/" not in text
        assert json.loads(text).get("machine"), path.name


def test_ratios_are_taken_to_the_neighbouring_gradients(
    harness: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness import timing

    clock = iter([1.0, 4.0, 3.0, 6.0, 1.0])  # gradient, contestant, gradient, contestant, gradient

    def clocked(run: Any) -> tuple[float, float]:
        value = next(clock)
        return value, 2 * value

    monkeypatch.setattr(timing, "clocked", clocked)
    double = timing.Contestant("double", "test", "H", 1, lambda: None)
    four = timing.Contestant("four", "test", "H", 4, lambda: None)
    seconds = timing.interleave(lambda: None, [double, four], rounds=1, wide=1)
    assert double.wall == [4.0 / 2.0]  # the mean of 1 and 3
    assert four.wall == [6.0 / 4 / 2.0]  # a vector of four; the mean of 3 and 1
    assert double.processor == double.wall
    assert seconds == 2.0


def test_comparing_points_out_a_requirement_that_is_no_longer_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = load(BENCHMARKS / "run.py")
    for folder, measured in (("old", 2.0), ("new", 2.5)):
        (tmp_path / folder).mkdir()
        line = {"name": "cost", "measured": measured, "limit": 2.3, "met": measured <= 2.3}
        content = json.dumps({"requirements": [line]})
        (tmp_path / folder / "products.json").write_text(content, encoding="utf-8")
    assert runner.main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    assert "NO LONGER MET" in capsys.readouterr().out
    assert runner.main(["compare", str(tmp_path / "new"), str(tmp_path / "old")]) == 0


def test_an_unknown_benchmark_is_refused_by_name() -> None:
    assert load(BENCHMARKS / "run.py").main(["run", "no_such"]) == 2


def test_the_references_agree_with_ours_on_the_smallest_case(harness: None) -> None:
    from harness.cases import vit_small
    from harness.contestants import contestants, references

    case = vit_small().clone(torch.float64)
    columns = torch.randn(case.size, 2, dtype=torch.float64)
    exact = references(case, columns)
    ours = [entry for entry in contestants(case, columns) if entry.library == "curvatlas"]
    assert {(entry.quantity, entry.columns) for entry in ours} == {
        (quantity, count) for quantity in ("H", "H_o", "H_f") for count in (1, 2)
    }
    for entry in ours:
        got, want = entry.run(), exact[entry.quantity]
        want = want[:, 0] if entry.columns == 1 else want
        assert float((got - want).norm() / want.norm()) < 1e-11, entry.name


def test_a_memory_run_reports_a_peak_under_its_budget() -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from Linux's /proc")
    task = {"model": "GPT, vocabulary 8000", "operator": "GaussNewton", "columns": 1,
            "budget_mb": 150}  # fmt: skip
    command = [sys.executable, str(BENCHMARKS / "memory.py"), "--child", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert 5 < found["peak_mb"] < 150


def test_the_bench_command_reports_every_operator_alone_and_by_eight() -> None:
    from curvatlas.cli.machine import measure

    found = measure(layers=1, width=8, rounds=1, seed=0)
    kinds = {(row["operator"], row["columns"]) for row in found["products"]}
    names = ("Hessian", "GaussNewton", "FunctionalHessian")
    assert kinds == {(name, count) for name in names for count in (1, 8)}
    assert all(row["gradients"] > 0 for row in found["products"])
    # embedding and head, positions, four projections, feed-forward, three norms
    assert found["parameters"] == 16000 + 512 + 4 * 72 + (256 + 32 + 256 + 8) + 3 * 16


def test_tuning_goes_on_until_every_neighbour_is_worse_or_impossible(harness: None) -> None:
    from harness.racing import Racer, tune

    racer = Racer("any", lambda model, rate, momentum: None, 0.01)
    inner = tune(racer, lambda rate, momentum: (rate / 0.04 - 1) ** 2 + (momentum - 0.8) ** 2)
    assert (inner.rate, inner.momentum, inner.inside) == (0.04, 0.8, True)
    none = tune(racer, lambda rate, momentum: (rate / 0.02 - 1) ** 2 + momentum)
    assert (none.rate, none.momentum, none.inside) == (0.02, 0.0, True)
    short = tune(racer, lambda rate, momentum: -rate, most=4)
    assert not short.inside
