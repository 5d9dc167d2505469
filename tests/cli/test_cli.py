"""The command line, through its real entry point: answers, exit codes, one clear line on errors."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import curvatlas
import forked
from cli_models import SLOW, make_data, make_model
from curvatlas import cli, runs
from curvatlas.cli.inputs import find_model
from curvatlas.results import same
from report_samples import trace
from run_samples import write_run

_HERE = Path(__file__).resolve().parent.parent
_ENVIRONMENT = {
    **os.environ, "PYTHONPATH": os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def _start(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "curvatlas.cli", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env=_ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_hear_interrupts,
    )  # fmt: skip


def _hear_interrupts() -> None:
    """A shell starts background jobs, and so their children, deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _curvatlas(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    process = _start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _one_line(finished: subprocess.CompletedProcess[str]) -> str:
    lines = finished.stderr.strip().splitlines()
    assert len(lines) == 1, finished.stderr
    assert lines[0].startswith("curvatlas: ")
    return lines[0]


def test_help_lists_the_commands_without_loading_torch(tmp_path: Path) -> None:
    finished = _curvatlas("--help", cwd=tmp_path)
    assert finished.returncode == 0
    for command in ("demo", "analyze", "report", "doctor"):
        assert command in finished.stdout
    code = "import sys, curvatlas.cli; print('torch' in sys.modules, 'numpy' in sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == ["False", "False"]


def test_the_installed_script_is_this_entry_point() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="curvatlas")
    assert script.value == "curvatlas.cli:main"


def test_the_shell_completes_commands(tmp_path: Path) -> None:
    asked = {"COMP_WORDS": "curvatlas an", "COMP_CWORD": "1"}
    finished = subprocess.run(
        [sys.executable, "-m", "curvatlas.cli"], cwd=tmp_path, capture_output=True, text=True,
        env={**_ENVIRONMENT, **asked, "_CURVATLAS_COMPLETE": "complete_bash"}, check=True,
    )  # fmt: skip
    assert finished.stdout.split() == ["analyze"]


def test_version(tmp_path: Path) -> None:
    assert _curvatlas("--version", cwd=tmp_path).stdout.strip() == (
        f"curvatlas {curvatlas.__version__}"
    )


def test_wrong_use_in_a_process_of_its_own_is_one_line_too(tmp_path: Path) -> None:
    finished = _curvatlas("nosuch", cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "No such command 'nosuch'" in _one_line(finished)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("nosuch",), "No such command 'nosuch'"),
        (("analyze",), "MODEL"),
        (("analyze", "vit"), "DATA"),
        (("analyze", "vit", "digits", "--samples", "0"), "--samples"),
        (("analyze", "vit", "digits", "--samples", "many"), "--samples"),
        (("analyze", "vit", "digits", "--loss", "hinge"), "hinge"),
        (("demo", "--steps", "0"), "--steps"),
        (("demo", "--seed", "-1"), "--seed"),
        (("demo", "extra"), "extra"),
        (("report",), "RUN"),
        (("report", "run", "--bogus"), "--bogus"),
        (("doctor", "--bogus"), "--bogus"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], word: str,
) -> None:  # fmt: skip
    finished = _in_process(list(arguments), tmp_path, capsys, monkeypatch)
    assert finished.returncode == 2
    assert word in _one_line(finished)
    assert finished.stdout == ""


def _write_inputs(folder: Path) -> None:
    (folder / "broken.npz").write_bytes(b"PK\x03\x04 not a zip")
    (folder / "weights.pkl").write_bytes(pickle.dumps({"a": 1}))
    np.savez(folder / "objects.npz", inputs=np.array([{}], dtype=object), targets=np.zeros(1))
    np.savez(folder / "names.npz", left=np.zeros(3), right=np.zeros(3))
    (folder / "binary.dat").write_bytes(bytes(range(256)))
    (folder / "short.txt").write_text("hello")
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text("{")
    (folder / "empty").mkdir()


@pytest.mark.parametrize(
    ("model", "data", "more", "word"),
    [
        ("nosuch", "digits", (), "nosuch"),
        ("vit", "nowhere.npz", (), "nowhere.npz"),
        ("no_such_module:f", "digits", (), "no_such_module"),
        ("cli_models:missing", "digits", (), "missing"),
        ("cli_models:not_a_model", "digits", (), "nn.Module"),
        ("huggingface", "digits", (), "huggingface"),
        ("zoo:resnet", "digits", (), "resnet"),
        ("empty", "digits", (), "config.json"),
        ("vit", "broken.npz", (), "broken.npz"),
        ("vit", "objects.npz", (), "objects.npz"),
        ("vit", "names.npz", (), "inputs and targets"),
        ("vit", "weights.pkl", (), "may carry code"),
        ("gpt", "binary.dat", (), "binary.dat"),
        ("gpt", "short.txt", (), "tokens"),
        ("vit", "digits", ("--time", "soon"), "soon"),
        ("vit", "digits", ("--memory", "lots"), "lots"),
        ("vit", "digits", ("--dtype", "float16"), "float16"),
        ("vit", "digits", ("--device", "warp:1"), "warp"),
        ("vit", "digits", ("--weights", "weights.pkl"), "safetensors"),
        ("vit", "digits", ("--roles", "nosuchrole"), "nosuchrole"),
        ("vit", "digits", ("--quiet", "--verbose"), "exclude"),
        ("vit", "digits", ("--output", "short.txt"), "short.txt"),
    ],
)
def test_unreadable_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    model: str, data: str, more: tuple[str, ...], word: str,
) -> None:  # fmt: skip
    _write_inputs(tmp_path)
    finished = _in_process(["analyze", model, data, *more], tmp_path, capsys, monkeypatch)
    assert finished.returncode == 2
    assert word in _one_line(finished)
    assert finished.stdout == ""
    assert not (tmp_path / "curvatlas-runs").exists()


def _in_process(
    arguments: list[str], cwd: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """The entry point itself, without paying for a new interpreter."""
    monkeypatch.chdir(cwd)
    monkeypatch.syspath_prepend(str(_HERE))
    monkeypatch.setattr(sys, "argv", ["curvatlas", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    signal.signal(signal.SIGTERM, before)
    captured = capsys.readouterr()
    code = exit_.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, captured.out, captured.err)


def test_analyze_measures_writes_and_answers(tmp_path: Path) -> None:
    finished = forked.Forked(
        "curvatlas.cli", "analyze", "cli_models:make_model", "cli_models:make_data", "--dtype",
        "float64", "--output", "run", "--json", cwd=tmp_path,
    ).finished()  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    assert answer["status"] == "complete"
    assert Path(answer["report"]).is_file()
    assert answer["findings"][0].endswith(".")
    assert (tmp_path / "run/tables/sharpness.csv").is_file()
    run = runs.load(tmp_path / "run")
    assert set(answer["results"]) == set(run.results)
    _check_numbers(answer["results"])


def _check_numbers(results: dict[str, Any]) -> None:
    """Against the dense Hessian by double backward."""
    import oracles

    model = make_model().double()
    inputs = torch.cat([x for x, _ in make_data()]).double()
    targets = torch.cat([y for _, y in make_data()])
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    truth = oracles.hessian(loss, list(model.parameters()))
    loss = loss.detach()
    spectrum = torch.linalg.eigvalsh(truth)
    values = results["model.total.eigenpairs"]["values"]
    assert values[0] == pytest.approx(float(spectrum[-1]), rel=1e-10)
    assert values[-1] == pytest.approx(float(spectrum[0]), rel=1e-10)
    trace = results["model.total.trace"]
    assert trace["interval"][0] - 1e-12 <= float(truth.trace()) <= trace["interval"][1] + 1e-12
    assert results["model.subject"]["loss"] == pytest.approx(float(loss), rel=1e-12)
    assert results["model.subject"]["parameters"] == truth.shape[0]
    parts = [results[f"model.{part}.trace"]["value"] for part in ("outer", "functional")]
    assert sum(parts) == pytest.approx(trace["value"], rel=1e-9)


def test_the_same_command_resumes_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["analyze", "cli_models:make_model", "cli_models:make_data", "--quiet"]
    first = _in_process(command, tmp_path, capsys, monkeypatch)
    assert first.returncode == 0, first.stderr
    (folder,) = (tmp_path / "curvatlas-runs").iterdir()
    before = runs.load(folder)
    again = _in_process(command, tmp_path, capsys, monkeypatch)
    assert again.stdout == first.stdout
    after = runs.load(folder)
    assert all(same(before[name], after[name]) for name in before.results)
    assert after.manifest.steps == before.manifest.steps  # nothing was computed again
    other = _in_process(
        [*command, "--seed", "5", "--output", str(folder)], tmp_path, capsys, monkeypatch
    )
    assert other.returncode == 2
    assert "seed" in _one_line(other)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_arrays_on_disk_give_the_same_numbers_as_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    inputs = torch.cat([x for x, _ in make_data()])
    targets = torch.cat([y for _, y in make_data()])
    if suffix == ".npz":
        np.savez(tmp_path / "data.npz", inputs=inputs.numpy(), targets=targets.numpy())
    else:
        save_file({"inputs": inputs, "targets": targets}, tmp_path / "data.safetensors")
    finished = _in_process(
        ["analyze", "cli_models:make_model", f"data{suffix}", "--json", "--dtype", "float64",
         "--batch-size", "5"],
        tmp_path, capsys, monkeypatch,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    _check_numbers(json.loads(finished.stdout)["results"])


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_tied_weights_are_read_from_either_of_their_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / "once.safetensors"
    save_file({name: torch.arange(6.0).reshape(3, 2)}, path)
    model: Any = find_model("cli_models:make_tied_model", weights=path).model
    assert torch.equal(model.head.weight, torch.arange(6.0).reshape(3, 2))
    assert model.embedding.weight is model.head.weight
    save_file({"other.weight": torch.ones(3, 2)}, path)
    with pytest.raises(ValueError, match=r"missing \['embedding.weight', 'head.weight'\]"):
        find_model("cli_models:make_tied_model", weights=path)


def test_weights_and_roles_can_be_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {name: 0 * p for name, p in make_model().state_dict().items()}
    save_file(weights, tmp_path / "zero.safetensors")
    finished = _in_process(
        ["analyze", "cli_models:make_model", "cli_models:make_data", "--json", "--weights",
         "zero.safetensors", "--roles", "second*"],
        tmp_path, capsys, monkeypatch,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    results = json.loads(finished.stdout)["results"]
    assert results["model.subject"]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    # with zero weights the hidden layer is zero: of "second" only the two biases curve
    assert results["model.total.eigenpairs"]["values"][0] == pytest.approx(0.5, rel=1e-5)
    assert results["model.total.trace"]["value"] == pytest.approx(0.5, rel=1e-5)


_SLOW = ["analyze", "cli_models:make_slow_model", "cli_models:make_data", "--output", "run"]


def _interrupted(cwd: Path, number: signal.Signals) -> str:
    """Start, send the signal once something is stored, and return the last line on stderr."""
    (cwd / SLOW).touch()
    process = forked.Forked("curvatlas.cli", *_SLOW, cwd=cwd)
    deadline = time.monotonic() + 120
    while not (cwd / "run/results/model.subject.json").exists():
        assert time.monotonic() < deadline
        assert process.running, process.finished()
        time.sleep(0.05)
    os.kill(process.pid, number)
    ended = process.finished(timeout=60)
    (cwd / SLOW).unlink()
    assert ended.returncode == 130, ended.stderr
    assert runs.load(cwd / "run").status == "interrupted"
    return ended.stderr.strip().splitlines()[-1]


def test_ctrl_c_leaves_a_run_that_the_told_command_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = _interrupted(tmp_path, signal.SIGINT)
    assert "Resume with: curvatlas analyze" in message
    told = message.split("Resume with: curvatlas ")[1].split()
    assert _in_process(told, tmp_path, capsys, monkeypatch).returncode == 0
    assert runs.load(tmp_path / "run").status == "complete"


def test_a_terminated_run_can_be_resumed_too(tmp_path: Path) -> None:
    assert "Resume with: curvatlas analyze" in _interrupted(tmp_path, signal.SIGTERM)


def test_a_used_up_time_budget_leaves_a_report_and_a_resumable_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / SLOW).touch()
    stopped = _in_process([*_SLOW, "--time", "0.5s"], tmp_path, capsys, monkeypatch)
    (tmp_path / SLOW).unlink()
    assert stopped.returncode == 3, stopped.stderr
    assert "time budget" in _one_line(stopped)
    assert (tmp_path / "run/report.html").is_file()
    assert _in_process(_SLOW, tmp_path, capsys, monkeypatch).returncode == 0
    assert runs.load(tmp_path / "run").status == "complete"


def test_debug_shows_the_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["analyze", "cli_models:broken", "digits"]
    plain = _in_process(command, tmp_path, capsys, monkeypatch)
    assert plain.returncode == 1
    assert "this factory always fails" in _one_line(plain)
    monkeypatch.setattr(sys, "argv", ["curvatlas", *command, "--debug"])
    with pytest.raises(RuntimeError, match="this factory always fails"):
        cli.main()


def test_report_writes_the_page_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    finished = _in_process(["report", "run", "--json"], tmp_path, capsys, monkeypatch)
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    assert Path(answer["report"]) == tmp_path / "run" / "report.html"
    elsewhere = _in_process(["report", "run", "-o", "page.html"], tmp_path, capsys, monkeypatch)
    assert elsewhere.returncode == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("damage", ["missing", "empty", "newer", "truncated"])
def test_report_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    run = tmp_path / "run"
    if damage != "missing":
        write_run(run)
        manifest = run / "manifest.json"
        text = manifest.read_text()
        changed = {"empty": "", "newer": re.sub(r'"schema": \d+', '"schema": 99', text),
                   "truncated": text[:100]}  # fmt: skip
        manifest.write_text(changed[damage])
    finished = _in_process(["report", "run"], tmp_path, capsys, monkeypatch)
    assert finished.returncode == 2
    _one_line(finished)
    assert not (run / "report.html").exists()


def test_report_compares_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate("ab"):
        with runs.Run.create(tmp_path / name, options={"seed": seed}) as run:
            run.step("model.total.trace", lambda seed=seed: trace(3.0 + 6.0 * seed))
    finished = _in_process(["report", "b", "--against", "a"], tmp_path, capsys, monkeypatch)
    assert finished.returncode == 0
    assert "option seed: 0 → 1" in finished.stdout
    assert "What changed?" in (tmp_path / "b" / "comparison.html").read_text(encoding="utf-8")


def test_doctor_finds_our_hessian_right_and_the_composed_one_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = _in_process(["doctor", "--json"], tmp_path, capsys, monkeypatch)
    findings = json.loads(finished.stdout)
    assert findings["layer_norm"]["curvatlas_error"] < 1e-13
    assert findings["layer_norm"]["torch_func_hessian_error"] > 1e-3
    assert findings["versions"]["torch"] == torch.__version__
    assert findings["kernels"]["math attention"] in ("on", "off")
    assert set(findings["guards"].values()) == {"works"}
    assert finished.returncode == 0


def test_atlas_maps_the_roles_exactly_for_a_small_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import oracles

    finished = _in_process(
        ["atlas", "cli_models:make_model", "cli_models:make_data", "--json", "--dtype", "float64",
         "--biases"],
        tmp_path, capsys, monkeypatch,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    maps = json.loads(finished.stdout)["results"]["model.atlas"]["maps"]
    model = make_model().double()
    inputs = torch.cat([x for x, _ in make_data()]).double()
    targets = torch.cat([y for _, y in make_data()])
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    truth = oracles.hessian(loss, list(model.parameters()))
    (whole,) = maps["model/frobenius/total"]["values"][0]
    assert whole == pytest.approx(float(truth.norm()), rel=1e-10)
    assert maps["block/frobenius/total"]["values"][0][0] == pytest.approx(
        float(truth[:12, :12].norm()), rel=1e-10
    )


def test_verify_lists_and_tests_statements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = _in_process(["verify", "--list", "--json"], tmp_path, capsys, monkeypatch)
    names = [row["name"] for row in json.loads(listed.stdout)]
    assert "softmax-jacobian-norm" in names
    finished = _in_process(
        ["verify", "softmax-jacobian-norm", "softmax-derivative", "--json", "--output", "run"],
        tmp_path, capsys, monkeypatch,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(finished.stdout)
    assert [row["name"] for row in rows] == ["softmax-jacobian-norm", "softmax-derivative"]
    assert all(row["source"] and row["figure"] for row in rows)
    assert rows[0]["verdict"] == "holds"
    assert "Theorems and claims: which hold?" in (tmp_path / "run/report.html").read_text()
    unknown = _in_process(["verify", "no-such-thing"], tmp_path, capsys, monkeypatch)
    assert unknown.returncode == 2
    assert "no-such-thing" in _one_line(unknown)


def test_verify_fails_when_a_statement_comes_out_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from curvatlas.theory.statements import find

    honest = find("softmax-jacobian-norm")
    wrong = dataclasses.replace(honest, verdict="false as printed")
    monkeypatch.setattr("curvatlas.theory.statements.find", lambda name: wrong)
    finished = _in_process(["verify", "softmax-jacobian-norm"], tmp_path, capsys, monkeypatch)
    assert finished.returncode == 1
    assert "differs from the recorded one" in finished.stdout
    assert list(tmp_path.iterdir()) == []  # without --output nothing is written
