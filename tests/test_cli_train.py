"""``curvatlas train`` through its real entry point, and sessions that stop and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import curvatlas as ca
from curvatlas import cli, runs, zoo
from curvatlas.training.session import Session, TrainingCheckpoint, make_optimizer

_SMALL = ("--samples", "4", "--every", "15", "--batch-size", "8")


def _start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "curvatlas.cli", *arguments], cwd=cwd, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=_hear_interrupts,
    )  # fmt: skip


def _hear_interrupts() -> None:
    """A shell starts background jobs, and so their children, deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
    whole = _start(*options, "--output", "whole", cwd=tmp_path)
    stopped = _start(*options, "--output", "stopped", cwd=tmp_path)
    checkpoint = tmp_path / "stopped/checkpoints/training.safetensors"
    for _ in range(2400):
        if checkpoint.exists() or stopped.poll() is not None:
            break
        time.sleep(0.05)
    stopped.send_signal(signal.SIGINT)
    _, err = stopped.communicate(timeout=300)
    assert stopped.returncode == 130, err
    assert "Resume with: curvatlas train" in err
    resumed = _start(*options, "--output", "stopped", cwd=tmp_path)
    answers = []
    for process in (whole, resumed):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        answers.append(json.loads(out))
    assert not checkpoint.exists()
    left, right = (runs.load(tmp_path / name).results for name in ("whole", "stopped"))
    for name, tensor in left["training"].tensors.items():
        assert torch.equal(tensor, right["training"].tensors[name]), name
    assert left["training"].history.losses == right["training"].history.losses
    for a, b in zip(left["dynamics"].snapshots, right["dynamics"].snapshots, strict=True):
        assert (a.step, a.sharpness, a.trace, a.drift) == (b.step, b.sharpness, b.trace, b.drift)
    page = Path(answers[1]["report"]).read_text()
    for words in ("Training dynamics", "Sharpness", "Role trace", "Training loss"):
        assert words in page
    assert answers[0]["results"]["dynamics"]["snapshots"][0]["step"] == 0


@pytest.mark.parametrize("name", ["curvature", "adamw", "sgd"])
def test_a_session_goes_on_from_its_saved_checkpoint_bit_for_bit(name: str, tmp_path: Path) -> None:
    data = zoo.digits()

    def session(path: Path | None) -> Session:
        model = zoo.reference_vit(seed=1)
        optimizer = make_optimizer(name, model, lr=0.01)
        monitor = ca.Monitor(
            model, "cross_entropy", tuple(data.train.take(2)), every=1000, budget=1.0,
            optimizer=optimizer, density_products=4, max_products=8,
        )  # fmt: skip
        return Session(
            model, data, optimizer, monitor, steps=9, batch_size=512, seed=3, checkpoint=path,
            checkpoint_every=4,
        )  # fmt: skip

    def weights(made: Session) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in made.model.parameters()])

    straight = session(None)
    straight.run()

    class Stop(Exception):
        pass

    def stop(step: int, loss: float) -> None:
        if step == 6:
            raise Stop

    path = tmp_path / "training.safetensors"
    first = session(path)
    with pytest.raises(Stop):
        first.run(stop)
    assert TrainingCheckpoint.load(path).step == 4
    second = session(path)
    history = second.run()
    assert history.losses == tuple(straight.losses)
    assert torch.equal(weights(second), weights(straight))
    assert len(second.monitor.snapshots) == 1  # taken at step 0, before the checkpoint


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
