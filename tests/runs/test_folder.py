"""The run folder: written as work completes, resumed, compared."""

from __future__ import annotations

import errno
import json
import os
import signal
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import curvatlas
import forked
from curvatlas import runs
from curvatlas.results import same
from run_samples import SampleEstimate, estimate, write_run


def test_a_run_comes_back_as_it_was_written(tmp_path: Path) -> None:
    loaded = runs.load(write_run(tmp_path / "run"))
    assert loaded.status == "complete"
    assert loaded.options == {"seed": 0, "roles": ["query", "key"]}
    assert loaded.warnings == ("the key bias is exactly flat",)
    assert loaded.manifest.fingerprints == {"model": "m", "data": "d"}
    assert list(loaded.results) == ["hessian.trace", "hessian.eigenpairs"]
    assert same(loaded["hessian.eigenpairs"], estimate(10, nested=True))
    assert "hessian.trace" in str(loaded)


def test_the_manifest_carries_schema_version_and_status(tmp_path: Path) -> None:
    manifest = json.loads((write_run(tmp_path / "run") / "manifest.json").read_text())
    assert manifest["schema"] == 2
    assert manifest["version"] == curvatlas.__version__
    assert manifest["status"] == "complete"
    assert manifest["environment"]["torch"] == torch.__version__


def test_every_result_also_stands_as_plain_json(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert json.loads((run / "results/hessian.trace.json").read_text()) == estimate(0).to_dict()


def test_long_arrays_stay_out_of_the_json(tmp_path: Path) -> None:
    long = SampleEstimate(value=1.0, interval=(0.0, 2.0), values=torch.ones(5000, 2), notes={})
    with runs.Run.create(tmp_path / "run", options={}) as run:
        run.step("long", lambda: long)
    content = json.loads((tmp_path / "run/results/long.json").read_text())
    assert content["values"] == {"shape": [5000, 2], "dtype": "float32"}
    assert same(runs.load(tmp_path / "run")["long"], long)


def test_a_resumed_run_computes_only_what_is_missing(tmp_path: Path) -> None:
    calls: list[str] = []

    def compute(name: str, seed: int) -> SampleEstimate:
        calls.append(name)
        if name == "b" and calls.count("b") == 1:
            raise KeyboardInterrupt
        return estimate(seed)

    def work() -> list[Any]:
        with runs.Run.create(tmp_path / "run", options={"seed": 1}) as run:
            return [run.step(n, lambda n=n, i=i: compute(n, i)) for i, n in enumerate("abc")]

    with pytest.raises(KeyboardInterrupt):
        work()
    assert runs.load(tmp_path / "run").status == "interrupted"
    resumed = work()
    assert calls == ["a", "b", "b", "c"]
    assert all(same(result, estimate(i)) for i, result in enumerate(resumed))
    assert runs.load(tmp_path / "run").status == "complete"


def test_a_failure_is_noted_with_its_reason(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        runs.Run.create(tmp_path / "run", options={}) as run,
    ):
        run.step("a", lambda: estimate(1 // 0))
    manifest = runs.load(tmp_path / "run").manifest
    assert manifest.status == "failed"
    assert manifest.error is not None
    assert "ZeroDivisionError" in manifest.error


_KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from curvatlas import runs
    from run_samples import estimate
    with runs.Run.create(sys.argv[1], options={}) as run:
        run.step("first", lambda: estimate(1))
        if sys.argv[2] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        run.step("second", lambda: estimate(2))
    """
)


def test_a_killed_process_leaves_a_run_that_resumes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_KILLED)

    def start(mode: str) -> int:
        process = forked.Forked(script, tmp_path / "run", mode, cwd=tmp_path)
        return process.finished().returncode

    assert start("die") == -signal.SIGKILL
    assert runs.load(tmp_path / "run").status == "running"
    assert start("live") == 0
    loaded = runs.load(tmp_path / "run")
    assert loaded.status == "complete"
    assert same(loaded["first"], estimate(1))
    assert same(loaded["second"], estimate(2))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"options": {"seed": 5}}, "seed"),
        ({"model_fingerprint": "other"}, "model"),
        ({"data_fingerprint": "other"}, "data"),
        ({"resume": False}, "already holds a run"),
    ],
)
def test_a_folder_with_another_run_is_left_alone(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    path = write_run(tmp_path / "run")
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    options: dict[str, Any] = {
        "options": {"seed": 0, "roles": ["query", "key"]},
        "model_fingerprint": "m",
        "data_fingerprint": "d",
    }
    with pytest.raises(ValueError, match=word):
        runs.Run.create(path, **{**options, **changes})
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before
    runs.Run.create(path, **options).close()


def test_a_folder_with_foreign_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="no run"):
        runs.Run.create(tmp_path, options={})
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ValueError, match="is a file"):
        runs.Run.create(tmp_path / "thesis.tex", options={})


def test_two_writers_cannot_share_a_folder(tmp_path: Path) -> None:
    first = runs.Run.create(tmp_path / "run", options={})
    with pytest.raises(ValueError, match="another process"):
        runs.Run.create(tmp_path / "run", options={})
    first.close()
    runs.Run.create(tmp_path / "run", options={}).close()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "A", "a..b", "a b", "x" * 121, "ü"])
def test_names_that_could_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with (
        runs.Run.create(tmp_path / "run", options={}) as run,
        pytest.raises(ValueError, match="name a step"),
    ):
        run.step(name, lambda: estimate())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_a_step_must_give_a_result(tmp_path: Path) -> None:
    with (
        runs.Run.create(tmp_path / "run", options={}) as run,
        pytest.raises(TypeError, match="int"),
    ):
        run.step("a", lambda: 3)  # type: ignore[arg-type,return-value]


def test_options_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        runs.Run.create(tmp_path / "run", options={"model": object()})
    assert not (tmp_path / "run").exists()


def test_warnings_of_a_step_are_shown_and_kept(tmp_path: Path) -> None:
    def noisy() -> SampleEstimate:
        warnings.warn("did not converge", stacklevel=1)
        return estimate()

    with (
        pytest.warns(UserWarning, match="did not converge"),
        runs.Run.create(tmp_path / "run", options={}) as run,
    ):
        run.step("a", noisy)
    assert runs.load(tmp_path / "run").warnings == ("a: did not converge",)


@pytest.mark.parametrize("failing", ["replace", "fsync"])
@pytest.mark.parametrize("allowed", range(6))
def test_a_full_disk_loses_nothing_that_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, allowed: int
) -> None:
    """The disk fills after ``allowed`` more calls of the system while the second step is stored."""
    run = runs.Run.create(tmp_path / "run", options={"seed": 1})
    run.step("first", lambda: estimate(1))
    original = getattr(os, failing)
    left = allowed

    def limited(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= 1
        return original(*arguments, **options)

    monkeypatch.setattr(os, failing, limited)
    error: OSError | None = None
    try:
        with run:
            run.step("second", lambda: estimate(2))
    except OSError as raised:
        error = raised
    monkeypatch.undo()
    if isinstance(error, runs.RunWriteError):
        assert "the disk is full" in str(error)
        assert "resume" in str(error)
        assert same(error.result, estimate(2))
    elif error is not None:  # the step was stored, only closing the run was not
        assert error.errno == errno.ENOSPC
        assert "second" in runs.load(tmp_path / "run").results
    assert allowed > 3 or error is not None
    loaded = runs.load(tmp_path / "run")
    assert same(loaded["first"], estimate(1))
    assert not list((tmp_path / "run").rglob("*.partial"))
    with runs.Run.create(tmp_path / "run", options={"seed": 1}) as resumed:
        assert same(resumed.step("second", lambda: estimate(2)), estimate(2))
    assert runs.load(tmp_path / "run").status == "complete"


def test_a_checkpoint_lives_until_its_step_is_done(tmp_path: Path) -> None:
    with runs.Run.create(tmp_path / "run", options={}) as run:
        path = run.checkpoint_path("a")
        estimate(7).save(path)
        assert runs.load(tmp_path / "run").results == {}
        run.step("a", lambda: estimate(1))
        assert not path.exists()


def test_comparison_names_options_and_numbers_that_differ(tmp_path: Path) -> None:
    left, right = write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=1)
    comparison = runs.compare(left, right)
    assert comparison.same_model
    assert comparison.options == {"seed": (0, 1)}
    change = {c.name: c for c in comparison.changes}["hessian.trace:value"]
    assert change.left == estimate(0).value
    assert change.right == estimate(1).value
    assert change.relative == pytest.approx((change.right - change.left) / abs(change.left))
    low, high = estimate(0).interval, estimate(1).interval
    assert change.separated == (low[1] < high[0] or high[1] < low[0])
    assert "seed" in str(comparison)


def test_long_tensors_are_compared_by_their_norm(tmp_path: Path) -> None:
    def write(name: str, values: torch.Tensor) -> Path:
        result = SampleEstimate(
            value=1.0, interval=(0.0, 2.0), values=values, notes={"huge": [1e200] * 100}
        )
        with runs.Run.create(tmp_path / name, options={}) as run:
            run.step("a", lambda: result)
        return tmp_path / name

    values = torch.arange(600.0, dtype=torch.float64).reshape(200, 3)
    more = values.clone()
    more[0, 0], more[1, 1] = 700.0, float("nan")
    (change,) = runs.compare(write("one", values), write("two", more)).changes
    assert change.name == "a:‖values‖"
    assert change.left == pytest.approx(float(values.norm()), rel=1e-14)
    assert change.right == pytest.approx(float(more.nan_to_num(0.0).norm()), rel=1e-14)
    rows = runs.compare(write("wide", values.T.contiguous()), write("wider", more.T.contiguous()))
    assert [c.name for c in rows.changes] == ["a:‖values[0]‖", "a:‖values[1]‖"]


def test_a_run_compared_with_itself_shows_no_change(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    comparison = runs.compare(path, runs.load(path))
    assert comparison.changes == ()
    assert comparison.equal > 10


def test_disjoint_intervals_are_called_separated(tmp_path: Path) -> None:
    def write(name: str, value: float) -> Path:
        result = SampleEstimate(
            value=value, interval=(value - 1, value + 1), values=torch.ones(1), notes={}
        )
        with runs.Run.create(tmp_path / name, options={}) as run:
            run.step("a", lambda: result)
        return tmp_path / name

    near, far = write("near", 1.5), write("far", 4.0)
    assert runs.compare(write("one", 1.0), near).changes[0].separated is False
    assert runs.compare(near, far).changes[0].separated is True


def test_a_fingerprint_sees_every_weight_and_every_batch() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    before = runs.fingerprints.of_model(model)
    assert before == runs.fingerprints.of_model(model)
    with torch.no_grad():
        model.bias[1] = torch.nextafter(model.bias[1], torch.tensor(9.0))
    assert runs.fingerprints.of_model(model) != before
    batches = [(torch.ones(2, 3), torch.zeros(2)), {"input_ids": torch.ones(1, 2)}]
    assert runs.fingerprints.of_data(batches) == runs.fingerprints.of_data(list(batches))
    assert runs.fingerprints.of_data(batches) != runs.fingerprints.of_data(batches[::-1])
    assert runs.fingerprints.of_data(batches) != runs.fingerprints.of_data(batches[:1])


def test_a_run_resumed_by_another_version_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.Run.create(tmp_path / "run", options={}).close("interrupted")
    monkeypatch.setattr("curvatlas.runs.folder.__version__", "9.9.9")
    runs.Run.create(tmp_path / "run", options={}).close()
    (warning,) = runs.load(tmp_path / "run").warnings
    assert "9.9.9" in warning
