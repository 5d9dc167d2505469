"""``ca.survey``: the main job in Python, with the numbers of ``curvatlas analyze``."""

from __future__ import annotations

import json
import math
import webbrowser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import curvatlas as ca
from cli_models import make_block_model, make_tokens
from curvatlas import cli, runs, surveying, zoo
from curvatlas.analysis.propagation.result import CurvatureFlow
from curvatlas.errors import NotSymmetricError
from curvatlas.results import same
from curvatlas.runs import Run

# steps that wait for others, and so may come after dearer ones
_WAITING = ("trace of H_f", "sharpness by layer", "map over pairs of roles")
_FEW: dict[str, Any] = {"eigenvalues": 2, "products": 40, "skip": ["map"]}


def _problem() -> ca.Problem:
    return ca.Problem(make_block_model().double().eval(), "cross_entropy", make_tokens())


def _numbers(run: runs.LoadedRun) -> dict[str, str]:
    """Everything stored but what is read from a clock, and the names the user gave."""
    told = ("seconds", "name", "data")

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: timeless(v) for k, v in value.items() if k not in told}
        return [timeless(v) for v in value] if isinstance(value, list) else value

    return {name: repr(timeless(r.to_dict())) for name, r in run.results.items()}


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> runs.LoadedRun:
    return ca.survey(_problem(), output=tmp_path_factory.mktemp("run") / "here", **_FEW)


def test_a_survey_stores_every_result_and_writes_a_page_that_opens(
    surveyed: runs.LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {f"{part}.{what}" for part in ("total", "outer", "functional")
             for what in ("eigenpairs", "trace", "density")}  # fmt: skip
    expected = {"subject", "propagation", "advice", *steps}
    assert set(surveyed.results) == {f"model.{name}" for name in expected}
    assert surveyed.status == "complete"
    assert "<h1>Curvature of" in surveyed.report.read_text(encoding="utf-8")
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    surveyed.open()
    assert opened == [surveyed.report.as_uri()]


def test_a_survey_measures_the_hessian(surveyed: runs.LoadedRun) -> None:
    dense = ca.Hessian(_problem()).dense()
    values = torch.linalg.eigvalsh(dense)
    pairs = surveyed["model.total.eigenpairs"]
    scale = float(values.abs().max())
    assert float(pairs["values"].max()) == pytest.approx(float(values[-1]), abs=1e-6 * scale)
    assert float(pairs["values"].min()) == pytest.approx(float(values[0]), abs=1e-6 * scale)
    low, high = surveyed["model.total.trace"]["interval"]
    assert low <= float(dense.trace()) <= high


def test_a_survey_gives_the_numbers_of_the_command(
    surveyed: runs.LoadedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["analyze", "cli_models:make_block_model", "cli_models:make_tokens", "--dtype",
                 "float64", "--eigenvalues", "2", "--products", "40", "--skip", "map",
                 "--output", str(tmp_path / "command"), "--quiet"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0, capsys.readouterr().err
    assert _numbers(surveyed) == _numbers(runs.load(tmp_path / "command"))


def test_the_same_call_resumes_a_survey_that_was_stopped(
    surveyed: runs.LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Run._store

    def store_and_stop(self: Run, *values: Any) -> None:
        store(self, *values)
        if len(self.manifest.steps) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_store", store_and_stop)
        with pytest.raises(KeyboardInterrupt):
            ca.survey(_problem(), output=tmp_path, **_FEW)
    assert runs.load(tmp_path).status == "interrupted"
    steps: list[object] = []
    resumed = ca.survey(_problem(), output=tmp_path, detail=steps.append, **_FEW)
    assert sum("read from the folder" in str(step) for step in steps) >= 4
    assert _numbers(resumed) == _numbers(surveyed)


def test_a_survey_out_of_time_returns_what_there_is(tmp_path: Path) -> None:
    run = ca.survey(_problem(), output=tmp_path, time=1e-9, **_FEW)
    assert run.status == "interrupted"
    assert run.report.is_file()


def test_stages_of_one_open_run_stand_side_by_side(tmp_path: Path) -> None:
    few: dict[str, Any] = {"eigenvalues": 1, "skip": ["map", "trace", "propagation", "density"]}
    said: list[object] = []
    with Run.create(tmp_path, options={}) as run:
        ca.survey(_problem(), output=run, stage="initial", say=said.append, **few)
        both = ca.survey(_problem(), output=run, stage="trained", **few)
    assert {name.split(".")[0] for name in both.results} == {"initial", "trained"}
    assert len(said) == 4  # the subject and the ends of three spectra
    with pytest.raises(FileNotFoundError, match="curvatlas report"):
        both.open()


def test_only_the_chosen_roles_are_surveyed(tmp_path: Path) -> None:
    few: dict[str, Any] = {"eigenvalues": 1, "skip": ["density", "trace"]}
    problem = _problem()
    run = ca.survey(problem, output=tmp_path, roles=["query"], **few)
    assert set(run.results) == {"model.subject", *(f"model.{part}.eigenpairs" for part in
                                                   ("total", "outer", "functional"))}  # fmt: skip
    block = problem.anatomy.select(role="query")
    truth = torch.linalg.eigvalsh(ca.Hessian(problem)[block, block].dense())
    top = float(run["model.total.eigenpairs"]["values"].max())
    assert top == pytest.approx(float(truth[-1]), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"skip": ["eigenpairs"]}, "skip is a list of trace, map, .* got 'eigenpairs'"),
        ({"skip": "map"}, "skip is a list"),
        ({"stage": "my run"}, "stage is one word"),
        ({"eigenvalues": 0}, "eigenvalues must be at least 1"),
        ({"products": 0}, "products must be at least 1"),
        ({"memory": "much"}, "cannot read 'much' as a size"),
        ({"time": "soon"}, "cannot read 'soon' as a time"),
        ({"time": -1.0}, "a time budget must be positive"),
        ({"roles": ["no such role"]}, "no such role"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_input_is_told_before_a_folder_is_made(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, KeyError), match=words):
        ca.survey(_problem(), output=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_model_is_no_problem(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="survey takes a Problem, got a Linear"):
        ca.survey(model, output=tmp_path / "run")


def test_a_folder_of_other_options_is_refused(surveyed: runs.LoadedRun) -> None:
    with pytest.raises(ValueError, match="seed differ"):
        ca.survey(_problem(), output=surveyed.path, seed=1, **_FEW)


def test_a_propagation_that_was_stopped_goes_on_with_the_group_it_was_at(
    surveyed: runs.LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    analyze = surveying.CurvaturePropagationAnalyzer.analyze_curvature_flow
    calls = 0

    def stopped(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return analyze(self, *args, **options)

    monkeypatch.setattr(surveying.CurvaturePropagationAnalyzer, "analyze_curvature_flow", stopped)
    with pytest.raises(KeyboardInterrupt):
        ca.survey(_problem(), output=tmp_path / "run", **_FEW)
    assert "This run is interrupted" in (tmp_path / "run" / "report.html").read_text("utf-8")
    run = ca.survey(_problem(), output=tmp_path / "run", **_FEW)
    whole = surveyed.result("model.propagation", CurvatureFlow)
    assert same(run["model.propagation"], whole)
    size = math.ceil(whole.samples / 8)
    assert calls - 3 == math.ceil(whole.samples / size) - 2


def test_dear_steps_come_last_and_each_says_how_many_there_are(tmp_path: Path) -> None:
    told: list[str] = []
    few: dict[str, Any] = {"eigenvalues": 2, "products": 100, "density_products": 40}
    told_of: dict[str, Any] = {
        "output": tmp_path / "run",
        "detail": lambda text: told.append(str(text)),
    }
    ca.survey(_problem(), **told_of, **few)
    steps = [text for text in told if text.startswith("step ")]
    assert [text.split(":")[0] for text in steps] == [f"step {i} of 13" for i in range(2, 14)]
    plan = ca.plan_survey(_problem(), **few)
    names = [step.name for step in plan.steps]
    assert [text.split(": ")[1].rsplit(", about", 1)[0] for text in steps] == names[1:]
    assert len(names) == 13  # the first is the subject, which the run counts too
    effort = {**few, "products_asked": 100}
    ordered = surveying._ordered(_problem(), tuple(surveying._SYMBOLS), skip=(), work={}, **effort)
    assert [step.words for step in ordered] == names[1:]
    free = [step.gradients for step in ordered[3:] if step.words not in _WAITING]
    assert free == sorted(free)
    assert plan.seconds == pytest.approx(sum(step.seconds for step in plan.steps))


def test_effort_that_is_given_is_the_budget_of_a_density() -> None:
    operator = ca.Hessian(_problem())
    assert ca.spectral_density(operator, probes=10, steps=100).products <= 10 * 100
    assert ca.trace(operator, rtol=1e-12).products <= 300 + operator.shape[0]


def test_the_page_says_which_engine_computed_and_why(tmp_path: Path) -> None:
    model, data = zoo.reference_vit(d_model=4), zoo.digits().train.take(8)
    problem = ca.Problem(model, "cross_entropy", data)
    skipped = ["trace", "map", "propagation", "density", "advice"]
    run = ca.survey(problem, output=tmp_path / "run", skip=skipped, eigenvalues=1)  # type: ignore[arg-type]
    engine = run["model.subject"].engine
    assert engine.startswith("tangent: 1 block (Block)")
    assert "written out by hand" in run.report.read_text(encoding="utf-8")


def _asymmetric(*names: str) -> Any:
    """``eigenpairs`` that fails on operators of these classes."""
    real = surveying.eigenpairs

    def failing(operator: Any, **options: Any) -> Any:
        if type(operator).__name__ in names:
            raise NotSymmetricError("the operator is not symmetric (relative 6.0e-02).")
        return real(operator, **options)

    return failing


def test_a_step_that_fails_does_not_cost_the_page_nor_the_other_steps(
    surveyed: runs.LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {**_FEW, "skip": ["map", "propagation", "trace"]}
    with monkeypatch.context() as patch:
        patch.setattr(surveying, "eigenpairs", _asymmetric("Hessian"))
        with pytest.warns(UserWarning, match=r"ends of the spectrum of H failed.*not symmetric"):
            run = ca.survey(_problem(), output=tmp_path, **few)
    assert run.status == "incomplete"
    assert set(run.failures) == {"model.total.eigenpairs", "model.advice"}
    assert "not symmetric (relative 6.0e-02)" in run.failures["model.total.eigenpairs"]
    assert "float64" not in run.failures["model.total.eigenpairs"]  # it is computed in it
    assert run.failures["model.advice"] == "it needs total.eigenpairs, which failed."
    assert "model.outer.eigenpairs" in run.results
    assert not run.failures.keys() & run.results.keys()
    page = run.report.read_text("utf-8")
    assert "This run is incomplete" in page
    assert "not symmetric (relative 6.0e-02)" in page
    # the same call tries it again, and the run is whole
    again = ca.survey(_problem(), output=tmp_path, **few)
    assert (again.status, again.failures) == ("complete", {})
    assert _numbers(again).items() <= _numbers(surveyed).items()
    assert {"model.total.eigenpairs", "model.advice"} <= set(again.results)


@pytest.mark.draws
def test_a_model_of_zeros_has_a_page_with_all_its_pictures(tmp_path: Path) -> None:
    problem = _problem()
    with torch.no_grad():
        for parameter in problem.model.parameters():
            parameter.zero_()
    run = ca.survey(problem, output=tmp_path, eigenvalues=1, products=8, skip=["density"])
    assert (run.status, run.failures) == ("complete", {})
    page = run.report.read_text("utf-8")
    assert "could not be drawn" not in page
    assert "not a number" not in page


def test_the_command_says_which_step_failed_and_ends_with_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(surveying, "eigenpairs", _asymmetric("FunctionalHessian"))
    arguments = ["analyze", "cli_models:make_block_model", "cli_models:make_tokens", "--products",
                 "20", "--skip", "map", "--skip", "propagation", "--skip", "density", "--output",
                 str(tmp_path / "run"), "--json"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 4
    answer, err = capsys.readouterr()
    assert "1 step failed, the page has the others. model.functional.eigenpairs" in err
    assert "In float64 (--dtype float64, model.double()) it may succeed." in err
    assert list(json.loads(answer)["failures"]) == ["model.functional.eigenpairs"]
    assert (tmp_path / "run" / "report.html").is_file()


def test_an_error_nobody_expects_ends_the_run_and_leaves_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(surveying, "trace", broken)
    with pytest.raises(KeyError, match="a mistake of ours"):
        ca.survey(_problem(), output=tmp_path, **_FEW)
    assert runs.load(tmp_path).status == "failed"
    assert "a mistake of ours" in (tmp_path / "report.html").read_text("utf-8")
