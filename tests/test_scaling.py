"""Scaling grids: real runs, resuming, fits, predictions with refusals, gradient noise."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import forked
from curvatlas import runs, zoo
from curvatlas.analysis.diagnostics import gradient_noise
from curvatlas.article import ScalingLawAnalyzer
from curvatlas.figures import plot_scaling_law_predictions
from curvatlas.fits import plane_power_law
from curvatlas.problem import Problem
from curvatlas.report import layout
from curvatlas.results import same
from curvatlas.scaling import (
    ScalingCell,
    TrainingLooks,
    compare_predictions,
    fit_grid,
)


def tiny_vit(width: int) -> nn.Module:
    return zoo.reference_vit(d_model=width, patch_size=4)


EFFORT = {"steps": 1, "curvature_samples": 8, "products": 8}


def fake_cell(
    n: int, d: int, loss: float, curvature: float, *, best_step: int = 1, **more: Any
) -> ScalingCell:
    both = (curvature, curvature)
    more = {"seed": 0, "steps": 1, **more}
    return ScalingCell(
        size=str(n), parameters=n, samples=d, best_step=best_step, training_loss=loss,
        validation_loss=loss, validation_interval=(0.9 * loss, 1.1 * loss),
        validation_accuracy=None, hessian_norm=curvature,
        hessian_norm_interval=both, smallest=-1.0, trace=curvature, trace_interval=both,
        effective_rank=5.0, effective_rank_interval=(5.0, 5.0), condition_number=10.0,
        condition_interval=(9.0, 11.0), negative_mass=0.1, noise_scale=5.0, critical_batch_size=5.0,
        critical_batch_interval=(4.0, 6.0), curvature_samples=10, products=1, seconds=0.0,
        **more,
    )  # fmt: skip


def known_grid(noise: float = 0.005, seed: int = 0) -> list[ScalingCell]:
    random = np.random.default_rng(seed)
    return [
        fake_cell(
            n,
            d,
            (0.2 + 20 * n**-0.5 + 10 * d**-0.5) * float(np.exp(noise * random.standard_normal())),
            3 * n**0.2 * d**-0.3 * float(np.exp(noise * random.standard_normal())),
        )
        for n in (1000, 3000, 10000, 30000)
        for d in (100, 300, 1000, 3000)
    ]


def analyzer_of(cells: list[ScalingCell]) -> ScalingLawAnalyzer:
    analyzer = ScalingLawAnalyzer(tiny_vit)
    analyzer.grid = fit_grid(cells)
    return analyzer


def test_hessian_norm_is_that_of_the_dense_hessian() -> None:
    from curvatlas.operators.curvature import Hessian

    model = tiny_vit(4).double().eval()
    data = tuple(zoo.digits().train.take(6).to(torch.float64))
    found = ScalingLawAnalyzer(tiny_vit).compute_hessian_norm(model, data)
    dense = Hessian(Problem(model, "cross_entropy", data)).dense()
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-3)
    again = ScalingLawAnalyzer(tiny_vit).compute_hessian_norm(model, *data)
    assert again.value == found.value


def test_grid_resumes_and_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    analyzer = ScalingLawAnalyzer(tiny_vit)
    whole = analyzer.train_grid([3, 4], [8], output=tmp_path / "a", **EFFORT)
    calls = 0

    def breaking(width: int) -> nn.Module:
        nonlocal calls
        calls += 1
        if calls == 7:  # the data (1), costs (2), fingerprints (2), then the second run
            raise KeyboardInterrupt
        return tiny_vit(width)

    broken = ScalingLawAnalyzer(breaking)
    with pytest.raises(KeyboardInterrupt):
        broken.train_grid([3, 4], [8], output=tmp_path / "b", **EFFORT)
    assert len(runs.load(tmp_path / "b").results) == 1
    resumed = ScalingLawAnalyzer(tiny_vit).train_grid([3, 4], [8], output=tmp_path / "b", **EFFORT)
    for a, b in zip(whole.cells, resumed.cells, strict=True):
        assert (a.validation_loss, a.hessian_norm, a.trace, a.critical_batch_size) == (
            b.validation_loss, b.hessian_norm, b.trace, b.critical_batch_size,
        )  # fmt: skip
    assert same(runs.load(tmp_path / "b").results["grid"], resumed)
    assert len(plot_scaling_law_predictions(whole).axes) == 2
    assert whole.plot().axes[0].get_xlabel() == "training samples D"
    assert whole.law is None  # two runs do not determine five parameters


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_is_resumed(tmp_path: Path) -> None:
    script = tmp_path / "grid.py"
    script.write_text(
        "from curvatlas import zoo\n"
        "from curvatlas.article import ScalingLawAnalyzer\n"
        "a = ScalingLawAnalyzer(lambda w: zoo.reference_vit(d_model=w, patch_size=4))\n"
        f"a.train_grid([3, 4], [8], output={str(tmp_path / 'run')!r}, "
        "steps=1, curvature_samples=8, products=8)\n"
    )
    results = tmp_path / "run" / "results"
    process = forked.Forked(script, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.running:
        if results.is_dir() and any(results.glob("cell*.json")):
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.finished()
    found = ScalingLawAnalyzer(tiny_vit).train_grid([3, 4], [8], output=tmp_path / "run", **EFFORT)
    assert len(found.cells) == 2
    assert runs.load(tmp_path / "run").status == "complete"


def test_laws_of_known_runs_are_found() -> None:
    grid = fit_grid(known_grid())
    assert grid.law is not None
    assert grid.law.alpha_interval[0] <= 0.5 <= grid.law.alpha_interval[1]
    assert grid.law.beta_interval[0] <= 0.5 <= grid.law.beta_interval[1]
    plane = grid.planes["hessian_norm"]
    assert plane.by_parameters == pytest.approx(0.2, abs=0.02)
    assert plane.samples_interval[0] <= -0.3 <= plane.samples_interval[1]


def test_dataset_size_for_a_target_loss_covers_the_truth() -> None:
    truth, hits = 700.0, 0
    target = 0.2 + 20 * 10000**-0.5 + 10 * truth**-0.5
    for seed in range(12):
        found = analyzer_of(known_grid(0.01, seed)).predict_optimal_dataset_size(
            10000, target=target
        )
        hits += found.interval[0] <= truth <= found.interval[1]
        assert found.value == pytest.approx(truth, rel=0.3)
    assert hits >= 9


def test_compute_optimal_size_balances_model_and_data() -> None:
    found = analyzer_of(known_grid(1e-4)).predict_optimal_dataset_size("3000")
    # α A/N^α = β B/D^β with α = β = 1/2: D = N (B/A)²
    assert found.value == pytest.approx(3000 * (10 / 20) ** 2, rel=0.1)
    assert found.target is None
    assert not found.extrapolated


def test_curvature_targets_use_their_own_law() -> None:
    analyzer = analyzer_of(known_grid(0.005))
    target = 3 * 3000**0.2 * 500**-0.3
    found = analyzer.predict_optimal_dataset_size(3000, target=target, quantity="hessian_norm")
    assert found.interval[0] <= 500 <= found.interval[1]
    with pytest.raises(ValueError, match="does not measurably depend"):
        analyzer.predict_optimal_dataset_size(3000, target=5.0, quantity="effective_rank")


def test_predictions_far_outside_the_runs_are_refused() -> None:
    analyzer = analyzer_of(known_grid())
    with pytest.raises(ValueError, match="more than 4 times outside"):
        analyzer.predict_optimal_dataset_size(10000, target=0.45)
    with pytest.raises(ValueError, match="the model size N"):
        analyzer.predict_optimal_dataset_size(10_000_000)
    with pytest.raises(ValueError, match="no amount of data"):
        analyzer.predict_optimal_dataset_size(3000, target=0.3)
    with pytest.raises(ValueError, match="no runs yet"):
        ScalingLawAnalyzer(tiny_vit).predict_optimal_dataset_size(100)


def test_models_that_get_worse_with_their_size_have_no_optimal_data_size() -> None:
    cells = [
        fake_cell(n, d, 1 + 1e-5 * n + 10 * d**-0.5, 1.0)
        for n in (1000, 3000, 10000) for d in (100, 300, 1000)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="does not fall with both sizes"):
        analyzer_of(cells).predict_optimal_dataset_size(3000)


def test_held_out_runs_are_predicted_better_by_the_law_than_by_no_model() -> None:
    found = compare_predictions(fit_grid(known_grid(1e-3)))
    assert len(found.actual) == 4
    assert found.errors["loss"] < 0.05
    assert found.errors["loss"] < found.errors["control"]
    assert "smallest by loss" in str(found)
    assert found.curvature in ("trace", "hessian_norm")  # which measure the second way used


def test_plane_intervals_cover() -> None:
    random = np.random.default_rng(0)
    n, d = (v.ravel() for v in np.meshgrid([1e3, 3e3, 1e4], [1e2, 3e2, 1e3, 3e3]))
    hits = 0
    for _ in range(200):
        y = 2 * n**0.3 * d**-0.6 * np.exp(0.1 * random.standard_normal(len(n)))
        low, high = plane_power_law(n, d, y).samples_interval
        hits += low <= -0.6 <= high
    assert 0.90 <= hits / 200 <= 0.99


def test_gradient_noise_of_a_linear_model_is_that_of_its_distribution() -> None:
    class Mean(nn.Module):
        """½‖θ − x‖²: gradients θ − x, Hessian the identity."""

        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.full((5,), 0.6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.theta - x

    x = torch.randn(400, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem = Problem(Mean(), "mse", (x, torch.zeros_like(x)))
    found = gradient_noise(problem, samples=400)
    want = 5 / (5 * 0.6**2)  # tr Σ / ‖G‖² with Σ = I
    assert found.simple_interval[0] <= want <= found.simple_interval[1]
    assert found.simple == pytest.approx(want, rel=0.25)
    assert found.value == pytest.approx(found.simple, rel=1e-6)  # H is a multiple of the identity


class Quadratic(nn.Module):
    """‖θᵖ − x‖² by "mse"; with p = 2 its Hessian is negative where x > 3θ²."""

    def __init__(self, theta: float, power: int = 1) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full((4,), theta, dtype=torch.float64))
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        return self.theta**self.power - x


def test_a_gradient_that_drowns_in_noise_gives_a_lower_bound() -> None:
    below = bounds = 0
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(24, 4, generator=generator, dtype=torch.float64)
        found = gradient_noise(Problem(Quadratic(0.05), "mse", (x, torch.zeros_like(x))))
        assert np.isfinite(found.value)
        if found.lower_bound:
            bounds += 1
            below += found.value <= 1 / 0.05**2  # tr Σ / ‖G‖² = 4 / (4 · 0.05²)
            assert found.interval == (found.value, float("inf"))
            assert "≥" in str(found)
    assert bounds >= 8
    assert below >= bounds - 1


def test_negative_curvature_along_the_gradients_leaves_the_outer_part() -> None:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    found = gradient_noise(Problem(Quadratic(0.5, 2), "mse", (x, torch.zeros_like(x))))
    assert found.curvature == "H_o"
    # H_o is a multiple of the identity: tr Σ / ‖G‖² with Σ = 1 and G = 0.25 − 5 up to a factor
    low, high = found.interval
    assert low <= 1 / (5 - 0.25) ** 2 <= high
    assert not found.lower_bound


def test_runs_that_did_not_train_are_named_and_left_out() -> None:
    cells = known_grid()
    wrong = [
        fake_cell(1000, 100, 50.0, 9.0, best_step=0, seed=1),
        fake_cell(1000, 300, float("nan"), 9.0, seed=1),
        fake_cell(3000, 100, 2.0, 9.0, seed=1, failure="the loss is nan at step 3"),
    ]
    grid, clean = fit_grid(cells + wrong), fit_grid(cells)
    assert grid.law is not None
    assert clean.law is not None
    assert grid.law.beta == clean.law.beta
    assert len(grid.trained) == 16
    told = "\n".join(grid.notes)
    assert "N = 1000, D = 100, seed 1 is left out: training never brought" in told
    assert "the validation loss is nan" in told
    assert "the loss is nan at step 3" in told
    assert compare_predictions(grid).errors == compare_predictions(clean).errors
    left = [row["left_out"] for row in grid.rows if row["left_out"]]
    assert len(left) == 3
    assert same(grid, grid)
    few = fit_grid([c for c in cells if c.samples < 1000])
    assert few.law is None
    assert any("3 model sizes, 3 data sizes" in note for note in few.notes)


def looks_of(curve: Any) -> TrainingLooks:
    steps = tuple(range(17))
    values = tuple(float(v) for v in curve(np.arange(17) / 16))
    return TrainingLooks(
        steps=steps, training_loss=values, validation_loss=values, sharpness=values
    )


@pytest.mark.parametrize("settles", [True, False])
def test_phases_of_training_are_judged_over_runs(settles: bool) -> None:
    random = np.random.default_rng(0)

    def curve(t: Any) -> Any:
        noise = np.exp(0.02 * random.standard_normal(len(t)))
        fall = np.where(t < 0.25, 8 * t, 2.0) if settles else 2 * t
        return np.exp(1 - fall) * noise

    cells = [
        fake_cell(1000, 100, 1.0, 1.0, seed=k, steps=16, looks=looks_of(curve)) for k in range(6)
    ]
    found = fit_grid(cells).phases["sharpness"]
    assert found.runs == 6
    if settles:
        assert found.verdict == "fast, then slow (settled at the end)"
        assert found.change == pytest.approx(0.25, abs=0.03)
        assert found.share_before > 0.9
        assert found.bent == 6
    else:
        assert not found.verdict.startswith("fast, then slow")
        assert found.bent <= 1


def test_double_descent_along_the_model_size_is_found_with_its_place() -> None:
    random = np.random.default_rng(0)

    def cells(peak: float) -> list[ScalingCell]:
        shape = {1000: 1.0, 3000: 0.8, 10000: 0.8 * peak, 30000: 0.6}
        return [
            fake_cell(
                n,
                d,
                loss,
                1.0,
                seed=k,
                final_validation_loss=loss * float(np.exp(0.02 * random.standard_normal())),
            )
            for n, loss in shape.items()
            for d in (100, 300)
            for k in range(3)
        ]

    found = fit_grid(cells(1.5)).descent
    assert found is not None
    assert {(line.along, line.at, line.top) for line in found.found} == {
        ("parameters", "D = 100", 10000.0), ("parameters", "D = 300", 10000.0),
    }  # fmt: skip
    assert found.found[0].rise_interval[0] <= 1.5 <= found.found[0].rise_interval[1]
    calm = fit_grid(cells(1.0)).descent
    assert calm is not None
    assert not calm.found
    single = fit_grid(known_grid()).descent
    assert single is not None
    assert "not tested" in str(single)


def test_compute_is_matched_and_curvature_says_which_samples_it_saw() -> None:
    factory = zoo.reference_vit
    analyzer = ScalingLawAnalyzer(
        lambda width, seed: factory(d_model=width, patch_size=4, seed=seed)
    )
    grid = analyzer.train_grid([3, 6], [24], seeds=2, steps=2, curvature_samples=8, products=8)
    small, large = grid[0], grid[2]
    assert large.steps == 2
    assert small.steps > 2
    rounding = 0.5 / (small.steps - 0.5)  # of the steps to a whole number
    assert small.operations == pytest.approx(large.operations, rel=rounding)
    assert grid[0].validation_loss != grid[1].validation_loss  # another seed
    for cell in grid:
        assert cell.curvature_samples == 8
        assert cell.trace_data_interval is not None
        assert cell.trace_data_interval[0] < cell.trace < cell.trace_data_interval[1]
        assert cell.hessian_norm_data_interval is not None
    everything = ScalingLawAnalyzer(tiny_vit).train_grid(
        [3], [12], steps=2, curvature_samples=None, products=8, match="steps"
    )[0]
    assert everything.curvature_samples == 12
    assert everything.trace_data_interval is None
    assert everything.steps == 2


def test_a_run_that_diverges_is_kept_and_the_others_go_on(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="same weights from every seed"):
        grid = ScalingLawAnalyzer(tiny_vit).train_grid(
            [3, 4], [8], lr=1e30, seeds=2, output=tmp_path / "run", **{**EFFORT, "steps": 3}
        )
    assert len(grid) == 4
    assert all("lower lr" in cell.failure for cell in grid)
    assert same(runs.load(tmp_path / "run").results["grid"], grid)
    with pytest.raises(ValueError, match="no run of the grid trained"):
        ScalingLawAnalyzer(tiny_vit).predict_optimal_dataset_size(100, target=1.0, grid=grid)


def test_wrong_factories_and_options_are_said_in_one_line() -> None:
    def fixed(width: int) -> nn.Module:
        return zoo.reference_vit(d_model=4, patch_size=4)

    def no_size() -> nn.Module:
        return zoo.reference_vit(d_model=4)

    for factory, options, words in (
        (tiny_vit, {"seeds": 1}, "at least 2 seeds, got 1"),
        (tiny_vit, {"match": "time"}, "match is 'compute' or 'steps'"),
        (fixed, {}, "it does not use the size"),
        (no_size, {}, "A factory takes the size"),
    ):
        with pytest.raises((ValueError, TypeError), match=words) as caught:
            ScalingLawAnalyzer(factory).train_grid([3, 4], [8, 16], **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_sizes_beyond_the_data_are_refused() -> None:
    with pytest.raises(ValueError, match="data sizes must lie"):
        ScalingLawAnalyzer(tiny_vit).train_grid([3], [10_000], **EFFORT)


@pytest.mark.draws
def test_the_command_runs_resumes_and_refuses_nonsense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    from curvatlas.cli import main

    arguments = [
        "scaling", "--widths", "3,4", "--sizes", "8", "--steps", "1", "--curvature-samples",
        "8", "--products", "8", "--output", str(tmp_path / "run"), "--json",
    ]  # fmt: skip
    answers = []
    for _ in range(2):  # the second finds everything done
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        answers.append(json.loads(capsys.readouterr().out))
        monkeypatch.setattr(layout, "drawn", lambda picture: None)  # the same ones again
    assert answers[0]["results"] == answers[1]["results"]
    assert len(answers[0]["results"]["grid"]["cells"]) == 2
    with pytest.raises(SystemExit) as ended:
        main(["scaling", "--widths", "wide"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


MINE = """
from transformers import GPT2Config, GPT2LMHeadModel

def make(width):
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=128, n_positions=8, n_embd=width, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    ))

def fixed():
    return make(4)
"""


def test_the_command_takes_a_hugging_face_factory_and_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    from curvatlas.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "words.txt").write_text("the whale and the white sea " * 30)
    (tmp_path / "empty.txt").write_text("")

    def call(*arguments: str) -> Any:
        effort = ("--steps", "1", "--curvature-samples", "4", "--products", "8", "--json")
        with pytest.raises(SystemExit) as ended:
            main(["scaling", *arguments, *effort, "--output", str(tmp_path / "run")])
        return ended.value.code, capsys.readouterr()

    model = ("--model", "mine.py:make")
    sizes = ("--widths", "4,8", "--sizes", "6")
    code, told = call(*model, "--data", "words.txt", *sizes, "--seeds", "2")
    assert code == 0, told.err
    grid = json.loads(told.out)["results"]["grid"]
    assert [(c["samples"], c["seed"]) for c in grid["cells"]] == [(6, 0), (6, 1)] * 2
    assert len({c["parameters"] for c in grid["cells"]}) == 2
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Which laws fit?" in page
    assert "no law of the loss" in page
    for wrong, words in (
        ((*model, *sizes), "give --data"),
        ((*model, "--data", "empty.txt", *sizes), "has 0 tokens"),
        ((*model, "--data", "words.txt", *sizes, "--seeds", "1"), "at least 2 seeds"),
        (("--model", "mine.py:fixed", "--data", "words.txt", *sizes), "A factory takes the size"),
        (("--model", "nothing", "--data", "words.txt", *sizes), "a function of the size"),
    ):
        code, told = call(*wrong)
        assert code == 2
        assert words in told.err
        assert told.err.strip().count("\n") == 0


def test_a_factory_that_makes_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="gave a NoneType, expected"):
        ScalingLawAnalyzer(lambda _: None).train_grid([4], [20], steps=1)  # type: ignore[arg-type,return-value]
