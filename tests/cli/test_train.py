"""``curvatlas train`` through its real entry point, and sessions that stop and go on."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import curvatlas as ca
import forked
from curvatlas import cli, runs, zoo
from curvatlas.cli.training_session import Session, TrainingCheckpoint, make_optimizer
from curvatlas.files import previous

_SMALL = ("--samples", "4", "--every", "15", "--batch-size", "8")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("resnet",), "resnet"),
        (("vit", "--optimizer", "newton"), "newton"),
        (("vit", "--steps", "0"), "--steps"),
        (("vit", "--lr", "-1"), "--lr"),
        (("vit", "--lr", "nan"), "--lr"),
        (("vit", "--budget", "2"), "--budget"),
        (("vit", "--every", "0"), "--every"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    word: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert word in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_run_resumes_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    options = ("train", "vit", "--steps", "60", *_SMALL, "--json")
    command = ("curvatlas.cli", *options, "--output")
    whole = forked.Forked(*command, "whole", cwd=tmp_path)
    stopped = forked.Forked(*command, "stopped", cwd=tmp_path)
    checkpoint = tmp_path / "stopped/checkpoints/training.safetensors"
    for _ in range(2400):
        if checkpoint.exists() or not stopped.running:
            break
        time.sleep(0.05)
    os.kill(stopped.pid, signal.SIGINT)
    ended = stopped.finished()
    assert ended.returncode == 130, ended.stderr
    assert "Resume with: curvatlas train" in ended.stderr
    resumed = forked.Forked(*command, "stopped", cwd=tmp_path)
    answers = []
    for process in (whole, resumed):
        ended = process.finished()
        assert ended.returncode == 0, ended.stderr
        answers.append(json.loads(ended.stdout))
    assert not checkpoint.exists()
    left, right = (runs.load(tmp_path / name).results for name in ("whole", "stopped"))
    for name, tensor in left["training"].tensors.items():
        assert torch.equal(tensor, right["training"].tensors[name]), name
    assert left["training"].history.losses == right["training"].history.losses
    for a, b in zip(left["dynamics"].snapshots, right["dynamics"].snapshots, strict=True):
        assert dataclasses.replace(a, seconds=0.0) == dataclasses.replace(b, seconds=0.0)
    page = Path(answers[1]["report"]).read_text()
    for words in ("Sharpest direction", "edge of stability", "Snapshots", "snapshots, "):
        assert words in page
    assert answers[0]["results"]["dynamics"]["snapshots"][0]["step"] == 0


def _session(
    path: Path | None, *, optimizer: str = "sgd", weights: int = 1, seed: int = 3
) -> Session:
    """Nine steps of the reference ViT, with a checkpoint every two."""
    data = zoo.digits()
    model = zoo.reference_vit(seed=weights)
    made = make_optimizer(optimizer, model, lr=0.01)
    monitor = ca.Monitor(
        model,
        "cross_entropy",
        tuple(data.train.take(2)),
        every=1000,
        budget=1.0,
        optimizer=made,
        density_products=4,
        max_products=8,
    )
    return Session(
        model,
        data,
        made,
        monitor,
        steps=9,
        batch_size=64,
        seed=seed,
        checkpoint=path,
        checkpoint_every=2,
    )


def _weights(session: Session) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in session.model.parameters()])


class Stop(Exception):
    pass


def _stop_at(step: int) -> Callable[[int, float], None]:
    def stop(now: int, loss: float) -> None:
        if now == step:
            raise Stop

    return stop


@pytest.mark.parametrize("name", ["curvature", "adamw", "sgd"])
def test_a_session_goes_on_from_its_saved_checkpoint_bit_for_bit(name: str, tmp_path: Path) -> None:
    straight = _session(None, optimizer=name)
    straight.run()
    path = tmp_path / "training.safetensors"
    first = _session(path, optimizer=name)
    first.monitor.skipped = 7
    with pytest.raises(Stop):
        first.run(_stop_at(7))
    assert TrainingCheckpoint.load(path).step == 6
    second = _session(path, optimizer=name)
    history = second.run()
    assert history.losses == tuple(straight.losses)
    assert torch.equal(_weights(second), _weights(straight))
    (ours,), (theirs,) = second.monitor.snapshots, straight.monitor.snapshots
    assert dataclasses.replace(ours, seconds=0.0) == dataclasses.replace(theirs, seconds=0.0)
    assert second.monitor.skipped == 7


def _stopped(path: Path) -> Path:
    """The checkpoint of a session that was stopped with states of steps 4 and 6 on disk."""
    with pytest.raises(Stop):
        _session(path).run(_stop_at(7))
    return path


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_damaged_training_checkpoint_gives_way_to_the_state_before_it(tmp_path: Path) -> None:
    path = _stopped(tmp_path / "training.safetensors")
    _flip(path)
    resumed = _session(path)
    with pytest.warns(
        UserWarning, match=r"checksum.*goes on from the state before it, after step 4"
    ):
        resumed.run()
    straight = _session(None)
    straight.run()
    assert torch.equal(_weights(resumed), _weights(straight))


def test_a_training_checkpoint_without_a_way_back_is_refused(tmp_path: Path) -> None:
    path = _stopped(tmp_path / "training.safetensors")
    _flip(path)
    _flip(previous(path))
    with pytest.raises(ValueError, match=r"checksum.*neither is the state before it.*delete"):
        _session(path).run()
    previous(path).unlink()
    with pytest.raises(ValueError, match=r"checksum.*no state before it.*delete"):
        _session(path).run()
    path.unlink()
    assert _session(path).run().steps == 9


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"weights": 2}, "model"), ({"seed": 4}, "seed"), ({"optimizer": "adamw"}, "optimizer")],
)
def test_a_checkpoint_of_another_training_is_refused(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    path = _stopped(tmp_path / "training.safetensors")
    other = _session(path, **changes)
    before = _weights(other).clone()
    with pytest.raises(ValueError, match=f"another training \\(other {word}\\)"):
        other.run()
    assert torch.equal(_weights(other), before)


def test_a_full_disk_costs_a_training_its_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    straight = _session(None)
    straight.run()
    session = _session(tmp_path / "training")
    monkeypatch.setattr("os.replace", refuse)
    with pytest.warns(UserWarning, match="cannot write the checkpoint"):
        session.run()
    assert torch.equal(_weights(session), _weights(straight))
    assert list(tmp_path.iterdir()) == []


def test_a_rate_that_is_far_too_large_ends_with_a_clear_error() -> None:
    model, data = zoo.reference_vit(), zoo.digits()
    optimizer = make_optimizer("sgd", model, lr=1e9)
    monitor = ca.Monitor(
        model, "cross_entropy", tuple(data.train.take(2)), every=1000, budget=1.0,
        density_products=4, max_products=8,
    )  # fmt: skip
    session = Session(model, data, optimizer, monitor, steps=20, batch_size=64)
    with pytest.raises(FloatingPointError, match="lower --lr"):
        session.run()
