"""What every command answers, each through the real entry point; ``landscape`` in full."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import curvatlas as ca
import oracles
from cli_models import make_model
from curvatlas import cli, runs
from curvatlas.cli import COMMANDS
from curvatlas.report import layout

_HERE = Path(__file__).resolve().parent.parent
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def curvatlas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Call:
    """Run the entry point in ``tmp_path``: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(_HERE))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["curvatlas", *arguments])
        before = signal.getsignal(signal.SIGTERM)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        signal.signal(signal.SIGTERM, before)
        out, err = capsys.readouterr()
        code = stopped.value.code
        assert isinstance(code, int)
        return code, out, err

    return call


def _one_line(err: str) -> str:
    (line,) = err.strip().splitlines()
    assert line.startswith("curvatlas: ")
    return line


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_takes_the_shared_options(
    curvatlas: Call, command: str
) -> None:
    code, out, err = curvatlas(command, "--help")
    assert (code, err) == (0, "")
    for option in ("--json", "--quiet", "--verbose", "--debug"):
        assert option in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_unknown_option_in_one_line(
    curvatlas: Call, command: str, tmp_path: Path
) -> None:
    code, out, err = curvatlas(command, "--no-such-option")
    assert (code, out) == (2, "")
    assert "--no-such-option" in _one_line(err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("landscape",), "MODEL"),
        (("landscape", "vit"), "DATA"),
        (("landscape", "vit", "nowhere.npz"), "nowhere.npz"),
        (("landscape", "nosuch", "digits"), "nosuch"),
        (("landscape", "vit", "digits", "--steps", "1"), "--steps"),
        (("landscape", "vit", "digits", "--orders", "2"), "--orders"),
        (("landscape", "vit", "digits", "--accuracy", "2"), "--accuracy"),
        (("landscape", "vit", "digits", "--time", "soon"), "soon"),
        (("landscape", "vit", "digits", "--weights", "gone.safetensors"), "gone.safetensors"),
        (("flatness", "vit", "digits", "--radius", "0"), "--radius"),
        (("flatness", "vit", "digits", "--adaptive-radius", "-1"), "--adaptive-radius"),
        (("flatness", "vit", "digits", "--test", "nowhere.npz"), "nowhere.npz"),
        (("flatness", "vit", "digits", "--prior", "gone.safetensors"), "gone.safetensors"),
        (("landscape", "vit", "digits", "--retrain", "--sizes", "10,20"), "4 or more numbers"),
        (("landscape", "vit", "digits", "--retrain", "--schedules", "steep"), "schedules are"),
        (("generalisation", "text"), "no classes"),
        (("generalisation", "nowhere"), "nowhere"),
        (("generalisation", "--models", "4"), "--models"),
        (("generalisation", "--sizes", "10,x"), "--sizes"),
        (("generalisation", "digits", "--sizes", "10,9999"), "asks for 9999"),
        (("generalisation", "digits", "--model", "vit"), "name a function"),
        (("atlas", "vit"), "DATA"),
        (("atlas", "vit", "nowhere.txt"), "nowhere.txt"),
        (("atlas", "no_such_module:f", "digits"), "no_such_module"),
        (("atlas", "vit", "digits", "--rtol", "0"), "--rtol"),
        (("atlas", "vit", "digits", "--memory", "much"), "much"),
        (("growth", "vit", "digits", "--scales", "1,2"), "3 or more scales"),
        (("growth", "vit", "digits", "--scales", "1,x"), "--scales"),
        (("growth", "vit", "digits", "--fit", "1"), "--fit"),
        (("growth", "vit", "digits", "--scale", "gate"), "gate"),
        (("paper", "petrov-thm33"), "petrov-thm3, petrov-thm"),
        (("paper", "petrov-thm3", "--model", "vit"), "--data"),
        (("paper", "petrov-thm3", "--model", "mlp", "--data", "digits"), "takes no --model"),
        (("paper", "petrov-thm3", "--data", "here"), "takes no --data"),
        (("sinks", "vit", "digits", "--levels", "1"), "--levels"),
        (("sinks", "vit", "digits", "--seeds", "1"), "at least 2 seeds"),
        (("gauss-newton", "vit", "digits", "--damping", "2"), "--damping"),
        (("gauss-newton", "gpt", "text", "--against-mlp", "--train-samples", "4"), "tokens"),
        (("gauss-newton", "vit", "digits", "--against-mlp", "--seeds", "1"), "at least 2 seeds"),
        (("scaling", "--widths", "4,x"), "--widths"),
        (("scaling", "--sizes", ""), "--sizes"),
        (("scaling", "--sizes", "100,99999"), "99999"),
        (("scaling", "--steps", "0"), "--steps"),
        (("verify", "no-such-theorem"), "no-such-theorem"),
        (("verify", "--seed", "one"), "--seed"),
        (("report", "gone"), "gone"),
        (("report", "gone", "--against", "too"), "gone"),
        (("bench", "--width", "7"), "--width"),
        (("bench", "--layers", "0"), "--layers"),
        (("doctor", "patient"), "patient"),
        (("demo", "--samples", "1"), "--samples"),
        (("demo", "--time", "later"), "later"),
        (("demo", "--quiet", "--verbose"), "exclude"),
    ],
)
def test_bad_arguments_and_missing_files_are_one_line_and_exit_code_2(
    curvatlas: Call, arguments: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    code, out, err = curvatlas(*arguments)
    assert (code, out) == (2, "")
    assert word in _one_line(err)
    assert list(tmp_path.iterdir()) == []  # nothing was written


def _samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return inputs, torch.arange(count) % 2


def _landscape(folder: Path, count: int, *more: str) -> tuple[str, ...]:
    inputs, targets = _samples(count)
    np.savez(folder / "data.npz", inputs=inputs.numpy(), targets=targets.numpy())
    model = ("cli_models:make_model", "data.npz", "--dtype", "float64")
    return ("landscape", *model, "--steps", "4", "--orders", "6", "--spectra", "2",
            "--output", "run", *more)  # fmt: skip


@pytest.mark.draws
@pytest.mark.slow
def test_landscape_tells_the_local_shape_of_the_loss(curvatlas: Call, tmp_path: Path) -> None:
    code, out, err = curvatlas(*_landscape(tmp_path, 24, "--json"))
    assert code == 0, err
    results = json.loads(out)["results"]
    model = make_model().double()
    inputs, targets = _samples(24)
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    parameters = list(model.parameters())
    hessian = oracles.hessian(loss, parameters)
    largest = float(torch.linalg.eigvalsh(hessian)[-1])
    assert results["landscape.rate"]["value"] == pytest.approx(2 / largest, rel=1e-6)

    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    step = -gradient / largest  # half the critical rate
    taylor = results["landscape.taylor"]
    assert taylor["constant"] == pytest.approx(loss.item(), rel=1e-9)
    assert taylor["linear"] == pytest.approx(float(gradient @ step), rel=1e-5)
    assert taylor["quadratic"] == pytest.approx(float(step @ hessian @ step) / 2, rel=1e-5)
    assert results["landscape.convergence"]["kind"] == "LandscapeConvergence"
    page = (tmp_path / "run/report.html").read_text("utf-8")
    for words in (
        "Where does gradient descent fail?", "Gradient descent, predicted and real",
        "How does it settle with samples?", "What is a step made of?",
    ):  # fmt: skip
        assert words in page


def test_landscape_says_what_it_leaves_out_with_few_samples(
    curvatlas: Call, tmp_path: Path
) -> None:
    code, out, err = curvatlas(*_landscape(tmp_path, 12))
    assert code == 0, err
    assert "report: " in out
    run = runs.load(tmp_path / "run")
    assert "landscape.convergence" not in run.results
    assert any("fewer than 20 samples" in warning for warning in run.warnings)


def test_landscape_stopped_by_its_time_budget_goes_on(curvatlas: Call, tmp_path: Path) -> None:
    arguments = _landscape(tmp_path, 12)
    code, _, err = curvatlas(*arguments, "--time", "0.000001")
    assert code == 3
    assert "Resume with: curvatlas landscape" in _one_line(err)
    assert curvatlas(*arguments)[0] == 0
    assert runs.load(tmp_path / "run").status == "complete"


def test_bench_tells_products_in_gradients(curvatlas: Call) -> None:
    code, out, _ = curvatlas("bench", "--layers", "1", "--width", "8", "--rounds", "1", "--json")
    assert code == 0
    rows = json.loads(out)["products"]
    names = ("Hessian", "GaussNewton", "FunctionalHessian")
    wanted = {(name, count) for name in names for count in (1, 8)}
    assert {(row["operator"], row["columns"]) for row in rows} == wanted
    assert all(row["gradients"] > 0 for row in rows)


def test_analyze_recommends_only_with_evidence(curvatlas: Call, tmp_path: Path) -> None:
    inputs, targets = _samples(24)
    np.savez(tmp_path / "data.npz", inputs=inputs.numpy(), targets=targets.numpy())
    command = ("analyze", "cli_models:make_model", "data.npz", "--json", "--dtype", "float64")
    code, out, err = curvatlas(*command, "--output", "run")
    assert code == 0, err
    advice = json.loads(out)["results"]["model.advice"]
    ends = json.loads(out)["results"]["model.total.eigenpairs"]["values"]
    assert advice["conditioning"]["largest"] == pytest.approx(ends[0], rel=1e-9)
    # Blind guessing has the loss log 10: an untrained model is not told to leave a saddle.
    assert advice["situation"]["trained"] is False
    assert not [r for r in advice["recommendations"] if r["topic"] == "negative curvature"]
    assert advice["ruled_out"] == []
    for one in advice["recommendations"]:
        assert one["evidence"]
        assert one["value"] > one["threshold"]
    page = (tmp_path / "run/report.html").read_text("utf-8")
    assert "not trained yet (loss" in page
    code, out, _ = curvatlas(*command, "--output", "short", "--skip", "advice")
    assert "model.advice" not in json.loads(out)["results"]


def _quick(data: Path, *more: str) -> tuple[str, ...]:
    """``analyze`` without its dearer parts."""
    skip = [word for part in ("map", "propagation", "density") for word in ("--skip", part)]
    return ("analyze", "cli_models:make_model", str(data), *skip, *more)


def _digits(tmp_path: Path) -> Path:
    inputs, targets = _samples(8)
    np.savez(tmp_path / "data.npz", inputs=inputs.numpy(), targets=targets.numpy())
    return tmp_path / "data.npz"


def test_a_run_says_how_many_of_the_samples_it_used_and_why(
    curvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _digits(tmp_path)  # eight samples
    monkeypatch.setattr("curvatlas.cli.inputs.affordable_samples", lambda *_, **__: 5)
    quick = _quick(data, "--skip", "trace")
    code, out, err = curvatlas(*quick, "--output", "run", "--held-out", str(data))
    assert code == 0, err
    why = "5 of 8 samples were used: about as many as keep a survey of this model to a minute"
    assert why in out
    assert why in (tmp_path / "run/report.html").read_text("utf-8")
    assert runs.load("run").options["held_out"] == str(data)
    code, out, err = curvatlas(*quick, "--output", "asked", "--samples", "6")
    assert code == 0, err
    assert "6 of 8 samples were used, as --samples says." in out
    code, out, err = curvatlas(*quick, "--output", "all", "--samples", "8")
    assert code == 0, err
    assert "were used" not in out


def test_a_run_out_of_memory_names_the_option_and_goes_on_with_it(
    curvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4473538025472 bytes. Error code 12"
        )

    data = _digits(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("curvatlas.surveying.trace", full)
        code, _, err = curvatlas(*_quick(data, "--output", "run"))
    assert code == 1
    assert "out of memory (asked for 4.47 TB at once)" in _one_line(err)
    assert "smaller --memory" in err
    before = runs.load("run").manifest
    assert before.status == "failed"
    assert before.options["effort"]["memory"] == 2 * 10**9

    code, _, err = curvatlas(
        *_quick(data, "--output", "run", "--memory", "300MB", "--products", "40")
    )
    assert code == 0, err
    after = runs.load("run")
    effort = after.manifest.options["effort"]
    assert (effort["memory"], effort["products"]) == (300 * 10**6, 40)
    assert any("resumed with memory 300000000 for 2000000000" in line for line in after.warnings)
    assert after.results["model.total.trace"].products <= 46  # and six for the data's scatter


def test_what_may_be_spent_does_not_decide_which_folder_is_meant(
    curvatlas: Call, tmp_path: Path
) -> None:
    data = _digits(tmp_path)
    code, _, err = curvatlas(*_quick(data, "--skip", "trace", "--products", "60"))
    assert code == 0, err
    code, _, err = curvatlas(*_quick(data, "--skip", "trace", "--memory", "1GB", "--time", "5m"))
    assert code == 0, err
    assert len(list((tmp_path / "curvatlas-runs").iterdir())) == 1


def test_a_finished_run_with_other_products_computes_anew_what_depends_on_them(
    curvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _digits(tmp_path)
    assert curvatlas(*_quick(data, "--output", "run"))[0] == 0
    before = runs.load("run")
    few = ("--products", "9")
    assert curvatlas(*_quick(data, "--output", "run", *few))[0] == 0
    assert curvatlas(*_quick(data, "--output", "fresh", *few))[0] == 0
    again, fresh = runs.load("run"), runs.load("fresh")
    assert list(again.results) == list(fresh.results)
    for name, result in fresh.results.items():
        assert again.results[name].to_dict() == result.to_dict(), name
    assert before.results["model.total.trace"].to_dict() != again["model.total.trace"].to_dict()
    # Only what depends on products: the subject is the stored one.
    entries = (run.manifest.steps["model.subject"] for run in (before, again))
    assert len({repr(entry) for entry in entries}) == 1
    told = "resumed with products 9 for 300 by default: 1 results were computed before, 6 are"
    assert [line for line in again.warnings if told in line]

    def refused(*arguments: object, **options: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("curvatlas.surveying.trace", refused)
    monkeypatch.setattr("curvatlas.surveying.eigenpairs", refused)
    assert curvatlas(*_quick(data, "--output", "run", *few, "--memory", "1GB"))[0] == 0
    code = curvatlas(*_quick(data, "--output", "run"))[0]
    assert code != 0, "the default is another effort than 9"
    assert runs.check("run").whole  # the old results went with their entries


def test_a_run_resumed_without_an_option_keeps_the_plan_of_its_manifest(
    curvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _digits(tmp_path)
    curvatlas(*_quick(data, "--output", "run", "--skip", "trace"))
    planned = runs.load("run").manifest.options["effort"]["memory"]
    monkeypatch.setattr("curvatlas.budget.limit_bytes", lambda device=None: 10**9)
    code, _, _ = curvatlas(*_quick(data, "--output", "run", "--skip", "trace"))
    assert code == 0
    assert runs.load("run").manifest.options["effort"]["memory"] == planned


@pytest.mark.draws
@pytest.mark.parametrize(
    ("command", "options", "section", "kind"),
    [
        ("growth", ("--scales", "0.1,0.2,0.4", "--roles", "query"), "growth", "Growth"),
        ("sinks", ("--levels", "0,2", "--probes", "3"), "sinks", "Sinks"),
        ("sinks", ("--levels", "0,2", "--probes", "3", "--seeds", "2"), "sinks", "SinkStudy"),
        ("gauss-newton", (), "gauss-newton", "GaussNewtonQuality"),
    ],
)
def test_the_papers_experiments_take_a_model_and_data_and_make_a_page(
    curvatlas: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    options: tuple[str, ...],
    section: str,
    kind: str,
) -> None:
    arguments = (command, "cli_models:make_block_model", "cli_models:make_tokens", *options,
                 "--output", "run", "--json")  # fmt: skip
    code, out, _ = curvatlas(*arguments)
    assert code == 0
    answer = json.loads(out)
    assert answer["status"] == "complete"
    assert kind in {result["kind"] for result in answer["results"].values()}
    assert f'id="{section}"' in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    monkeypatch.setattr(layout, "drawn", lambda picture: None)  # the same ones again
    assert curvatlas(*arguments)[1] == out  # read back, nothing computed again


@pytest.mark.draws
def test_flatness_measures_a_users_model_and_is_taken_up(
    curvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, targets = _samples(24)
    np.savez(tmp_path / "data.npz", inputs=inputs.numpy(), targets=targets.numpy())
    np.savez(tmp_path / "test.npz", inputs=1.1 * inputs.numpy(), targets=targets.numpy())
    command = ("flatness", "cli_models:make_model", "data.npz", "--test", "test.npz", "--dtype",
               "float64", "--draws", "4", "--output", "run", "--json")  # fmt: skip
    code, out, err = curvatlas(*command)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    found = answer["results"]["model.flatness"]
    assert found["kind"] == "Flatness"
    assert found["sam"]["value"] > 0
    assert found["diagonal"]["test_loss"] > 0
    model = make_model().double()
    test_loss = torch.nn.functional.cross_entropy(model(1.1 * inputs), targets)
    assert found["test_loss"] == pytest.approx(test_loss.item(), rel=1e-9)
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "Relative flatness by layer" in page
    assert "(SAM)" in page
    assert "a certified local maximum" in page
    monkeypatch.setattr(layout, "drawn", lambda picture: None)  # the same ones again
    code, again, _ = curvatlas(*command)
    assert code == 0
    assert json.loads(again)["results"]["model.flatness"] == found


@pytest.mark.usefixtures("short_ascents")
@pytest.mark.draws
@pytest.mark.slow
def test_flatness_shows_what_rescaling_changes(
    curvatlas: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One mode of two rescalings: each of the others is one more row, measured by the same call.
    usual = ca.rescaling_invariance.__kwdefaults__
    monkeypatch.setitem(usual, "modes", ("uniform",))
    monkeypatch.setitem(usual, "rescalings", usual["rescalings"][:2])
    tokens = torch.arange(24).reshape(6, 4) % 5
    np.savez(tmp_path / "data.npz", inputs=tokens.numpy(), targets=tokens.roll(1, 1).numpy())
    code, out, err = curvatlas(
        "flatness", "cli_models:make_block_model", "data.npz", "--dtype", "float64", "--draws",
        "2", "--products", "16", "--invariance", "--output", "run",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "invariant" in out
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "Which measures survive a rescaling?" in page
    assert "query_key, uniform" in page
    stored = runs.load(tmp_path / "run").results["model.invariance"]
    assert stored.invariant("fisher_rao")  # type: ignore[attr-defined]
    assert page.count('<section id="flatness"') == 1  # none of the rescaled copies
    code, _, err = curvatlas(
        "flatness", "cli_models:make_model", "data.npz", "--invariance", "--output", "other"
    )
    assert code in (1, 2)
    assert "float64" in err or "fails" in err
