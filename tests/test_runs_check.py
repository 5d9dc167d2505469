"""``runs.check`` and ``runs.repair``: what is wrong in a folder, and the run after the repair."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from curvatlas import archive, runs
from curvatlas.files import previous
from curvatlas.results import same
from run_samples import estimate, write_run


def _snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


def _flip(path: Path, place: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


def _assert_resumes_as_it_was(path: Path) -> None:
    """The same work on the repaired folder gives the run that a straight one gives."""
    write_run(path)
    assert runs.check(path).whole
    loaded = runs.load(path)
    assert loaded.status == "complete"
    assert same(loaded["hessian.trace"], estimate(0))
    assert same(loaded["hessian.eigenpairs"], estimate(10, nested=True))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_a_run_as_it_was_written_is_whole(run: Path) -> None:
    before = _snapshot(run)
    seen = runs.check(run)
    assert (seen.whole, seen.status, seen.results, seen.notes) == (True, "complete", 2, ())
    assert runs.repair(run).repaired == ()
    assert _snapshot(run) == before


def _one_fault(run: Path) -> runs.RunFault:
    before = _snapshot(run)
    (fault,) = runs.check(run).faults
    assert _snapshot(run) == before  # looking changes nothing
    return fault


@pytest.mark.parametrize("damage", [_flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_result_is_dropped_and_computed_again(
    run: Path, damage: Callable[[Path], Any]
) -> None:
    damage(run / "results/hessian.trace.safetensors")
    fault = _one_fault(run)
    assert fault.repairable
    assert fault.file == "results/hessian.trace.safetensors"
    seen = runs.repair(run)
    assert seen.whole
    assert len(seen.repaired) == 1
    loaded = runs.load(run)
    assert (loaded.status, list(loaded.results)) == ("interrupted", ["hessian.eigenpairs"])
    assert not list((run / "results").glob("hessian.trace*"))
    _assert_resumes_as_it_was(run)


@pytest.mark.parametrize("damage", [_flip, Path.unlink])
def test_a_damaged_copy_in_json_is_written_anew(run: Path, damage: Callable[[Path], Any]) -> None:
    before = (run / "results/hessian.trace.json").read_bytes()
    damage(run / "results/hessian.trace.json")
    with pytest.raises(ValueError, match="curvatlas check"):
        runs.load(run)
    assert _one_fault(run).file == "results/hessian.trace.json"
    seen = runs.repair(run)
    assert (seen.whole, seen.results, seen.status) == (True, 2, "complete")
    assert (run / "results/hessian.trace.json").read_bytes() == before


@pytest.mark.parametrize("damage", [_flip, Path.unlink])
def test_a_damaged_manifest_gives_way_to_the_one_before_it(
    run: Path, damage: Callable[[Path], Any]
) -> None:
    damage(run / "manifest.json")
    with pytest.raises(ValueError, match=r"manifest\.json"):
        runs.load(run)
    with pytest.raises(ValueError, match="curvatlas check"):
        write_run(run)
    assert "goes back" in _one_fault(run).remedy
    seen = runs.repair(run)
    assert seen.whole
    assert seen.results == 2
    _assert_resumes_as_it_was(run)


def test_without_any_manifest_to_go_back_to_nothing_is_changed(run: Path) -> None:
    for path in (run / "manifest.json", previous(run / "manifest.json")):
        _flip(path)
    before = _snapshot(run)
    seen = runs.repair(run)
    assert (seen.whole, seen.status) == (False, "unknown")
    assert not seen.faults[0].repairable
    assert "results.load" in seen.faults[0].remedy
    assert _snapshot(run) == {**before, ".lock": b""}


def test_what_is_no_run_or_too_new_is_not_judged(run: Path, tmp_path: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    empty = tmp_path / "empty"
    empty.mkdir()
    for act in (runs.check, runs.repair):
        with pytest.raises(ValueError, match="upgrade"):
            act(run)
        with pytest.raises(ValueError, match="is not a run"):
            act(empty)
        with pytest.raises(ValueError, match="does not exist"):
            act(tmp_path / "nowhere")
    assert list(empty.iterdir()) == []


def _litter(run: Path) -> list[str]:
    """What killed processes leave: halves of files, and checkpoints of steps that were done."""
    for name in ("checkpoints", "figures"):
        (run / name).mkdir(exist_ok=True)
    halves = [".manifest.json.a.partial", "results/.hessian.trace.json.b.partial",
              "checkpoints/tmpc.partial", "figures/.spectrum.svg.d.partial"]  # fmt: skip
    for name in halves:
        (run / name).write_text("half")
    done = [
        f"checkpoints/hessian.trace.safetensors{end}" for end in ("", ".previous", ".step3.0-9")
    ]
    for name in done:
        (run / name).write_text("state")
    return sorted([*halves, *done])


def test_left_overs_are_told_and_removed(run: Path) -> None:
    litter = _litter(run)
    estimate(5).save(run / "results" / "orphan")
    seen = runs.check(run)
    assert sorted(fault.file for fault in seen.faults) == sorted(
        [*litter, "results/orphan.safetensors"]
    )
    assert all(fault.repairable and "left over" in fault.fault for fault in seen.faults)
    assert runs.repair(run).whole
    _assert_resumes_as_it_was(run)


def test_left_overs_are_removed_when_a_run_starts_again(run: Path) -> None:
    litter = _litter(run)
    unfinished = run / "checkpoints/hessian.density.safetensors"
    estimate(7).save(unfinished)
    write_run(run)
    assert not [name for name in litter if (run / name).exists()]
    assert unfinished.exists()
    assert runs.check(run).whole


def test_a_damaged_checkpoint_goes_back_or_goes(run: Path) -> None:
    path = run / "checkpoints/hessian.density.safetensors"
    estimate(1).save(path, keep_previous=True)
    estimate(2).save(path, keep_previous=True)
    _flip(path)
    assert "goes back" in _one_fault(run).remedy
    assert runs.repair(run).whole
    assert same(type(estimate(1)).load(path), estimate(1))
    _flip(path)
    assert "begins the step again" in _one_fault(run).remedy
    assert runs.repair(run).whole
    assert not list(path.parent.iterdir())


def test_a_damaged_part_of_several_processes_takes_its_checkpoint_along(run: Path) -> None:
    path = run / "checkpoints/hessian.density.safetensors"
    estimate(1).save(path)
    for name in ("step1.0-5", "step1.5-9"):
        estimate(2).save(run / "part").rename(path.with_name(f"{path.name}.{name}"))
    assert runs.check(run).whole
    _flip(path.with_name(f"{path.name}.step1.5-9"))
    assert runs.repair(run).whole
    assert not list(path.parent.iterdir())


def _sharded(run: Path, *, steps: int) -> Path:
    """A checkpoint of two processes that have written ``steps`` states of vectors of 9 entries."""
    path = run / "checkpoints/hessian.density.safetensors"
    for step in range(1, steps + 1):
        for start, stop in ((0, 5), (5, 9)):
            part = path.with_name(f"{path.name}.step{step}.{start}-{stop}")
            archive.write(part, {"rows": torch.ones(step, stop - start)}, {})
        header = {
            "schema": 2,
            "fingerprint": {"shape": [9, 9]},
            "numbers": {"step": step, "rows": step},
        }
        text = {"curvatlas_checkpoint": json.dumps(header)}
        archive.write(path, {"x": torch.ones(step)}, text, keep_previous=True)
    return path


@pytest.mark.parametrize("lost", ["0-5", "5-9"])
def test_a_missing_part_of_several_processes_is_told(run: Path, lost: str) -> None:
    path = _sharded(run, steps=1)
    assert runs.check(run).whole
    path.with_name(f"{path.name}.step1.{lost}").unlink()
    fault = _one_fault(run)
    assert fault.file == "checkpoints/hessian.density.safetensors"
    assert fault.fault == f"no whole part of step 1 holds entries {lost.replace('-', ' to ')} of 9"
    assert "begins the step again" in fault.remedy
    assert runs.repair(run).whole
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("damaged", [False, True])
def test_a_lost_part_goes_back_to_the_state_before_it(run: Path, damaged: bool) -> None:
    path = _sharded(run, steps=2)
    assert runs.check(run).whole
    part = path.with_name(f"{path.name}.step2.5-9")
    if damaged:
        _flip(part)
    else:
        part.unlink()
    assert all("goes back" in fault.remedy for fault in runs.check(run).faults)
    assert runs.repair(run).whole
    assert sorted(file.name for file in path.parent.iterdir()) == [
        path.name,
        f"{path.name}.step1.0-5",
        f"{path.name}.step1.5-9",
    ]
    assert archive.parse(archive.read(path), "it")[1]["x"].shape == (1,)


def test_parts_without_a_state_are_left_over(run: Path) -> None:
    path = _sharded(run, steps=1)
    path.unlink()
    seen = runs.check(run)
    assert ["state is gone" in fault.fault for fault in seen.faults] == [True, True]
    assert runs.repair(run).whole
    assert not list(path.parent.iterdir())


def test_foreign_files_are_told_and_left_alone(run: Path) -> None:
    (run / "notes.txt").write_text("fine")
    (run / "results/notes.txt").write_text("not there")
    (run / "weights.pkl").write_text("")
    (run / "link").symlink_to(run / "notes.txt")
    seen = runs.repair(run)
    assert sorted(fault.file for fault in seen.faults) == [
        "link",
        "results/notes.txt",
        "weights.pkl",
    ]
    assert not any(fault.repairable for fault in seen.faults)
    assert seen.repaired == ()


def test_a_run_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    with runs.Run.create(tmp_path / "run", options={}) as run:
        run.step("a", lambda: estimate(1))
        (run.path / "results/.b.json.x.partial").write_text("being written")
        seen = runs.check(run.path)
        assert seen.whole
        assert "another process is writing" in seen.notes[0]
        with pytest.raises(ValueError, match="being written by another process"):
            runs.repair(run.path)
        assert (run.path / "results/.b.json.x.partial").exists()


def test_a_killed_run_is_whole_and_says_how_to_go_on(run: Path) -> None:
    opened = runs.Run.create(run, options={"seed": 0, "roles": ["query", "key"]},
                             model_fingerprint="m", data_fingerprint="d")  # fmt: skip
    opened._lock.release()  # as the system does when the process dies
    seen = runs.check(run)
    assert (seen.whole, seen.status) == (True, "running")
    assert "killed" in seen.notes[0]


@pytest.mark.parametrize("seed", range(40))
def test_after_any_damage_repair_and_resume_give_the_same_run(run: Path, seed: int) -> None:
    """One to three files are flipped, cut or removed at random, the manifest among them."""
    rng = random.Random(seed)
    _litter(run)
    files = [run / "manifest.json", *sorted((run / "results").glob("*[sn]"))]
    for path in rng.sample(files, rng.randrange(1, 4)):
        content = path.read_bytes()
        kind = rng.choice(["flip", "cut", "remove", "empty"])
        if kind == "remove":
            path.unlink()
        elif kind == "flip":
            _flip(path, rng.randrange(len(content)))
        else:
            path.write_bytes(content[: rng.randrange(len(content)) if kind == "cut" else 0])
    seen = runs.repair(run)
    assert seen.whole, seen
    _assert_resumes_as_it_was(run)


@pytest.mark.parametrize("call", ["replace", "unlink"])
@pytest.mark.parametrize("allowed", range(4))
def test_a_repair_that_is_killed_can_be_repeated(
    run: Path, monkeypatch: pytest.MonkeyPatch, call: str, allowed: int
) -> None:
    _litter(run)
    _flip(run / "results/hessian.trace.safetensors")
    _flip(run / "results/hessian.eigenpairs.json")
    _flip(run / "manifest.json")
    original = getattr(os, call)
    left = allowed

    def limited(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, limited)
        with pytest.raises(KeyboardInterrupt):
            runs.repair(run)
    assert runs.repair(run).whole
    _assert_resumes_as_it_was(run)


# --- the command ----------------------------------------------------------------------------------


def _command(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    from curvatlas import cli

    before = signal.getsignal(signal.SIGTERM)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", *map(str, arguments)])
    signal.signal(signal.SIGTERM, before)
    out, err = capsys.readouterr()
    code: Any = ended.value.code
    return code, out, err


def test_the_exit_code_says_whether_a_run_is_whole(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # a run's results may be of classes the command line does not know: these are the samples'
    assert "run_samples" in sys.modules
    code, out, _ = _command(run, capsys=capsys)
    assert (code, "2 results, whole" in out) == (0, True)
    _flip(run / "results/hessian.trace.safetensors")
    (run / "results/.x.json.a.partial").write_text("")
    code, out, _ = _command(run, capsys=capsys)
    assert code == 1
    assert "2 faults" in out
    assert out.count("--repair") == 2
    code, out, _ = _command(run, "--json", capsys=capsys)
    answer = json.loads(out)
    assert (code, answer["whole"], len(answer["faults"])) == (1, False, 2)
    code, out, _ = _command(run, "--repair", "--json", capsys=capsys)
    answer = json.loads(out)
    assert (code, answer["whole"], len(answer["repaired"]), answer["faults"]) == (0, True, 2, [])
    assert answer["status"] == "interrupted"


def test_what_is_no_run_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "nowhere", Path(__file__)):
        for option in ((), ("--repair",)):
            code, out, err = _command(path, *option, capsys=capsys)
            assert (code, out) == (2, "")
            assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
