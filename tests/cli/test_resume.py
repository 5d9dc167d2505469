"""Every number a resumed command stores is the number an uninterrupted one stores."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from curvatlas import cli, runs
from curvatlas.runs import Run

_INPUTS = ("cli_models:make_block_model", "cli_models:make_tokens", "--dtype", "float64")


def _run(arguments: tuple[str, ...], output: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exit code."""
    monkeypatch.setattr(
        sys, "argv", ["curvatlas", *arguments, "--output", str(output), "--quiet", "--json"]
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    signal.signal(signal.SIGTERM, before)
    return ended.value.code


def _numbers(run: Path) -> dict[str, Any]:
    """Everything stored but what is read from a clock."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: timeless(v) for k, v in value.items() if k != "seconds"}
        return [timeless(v) for v in value] if isinstance(value, list) else value

    # as text: a NaN equals itself
    return {name: repr(timeless(r.to_dict())) for name, r in runs.load(run).results.items()}


@pytest.mark.parametrize(
    "arguments",
    [
        ("analyze", *_INPUTS, "--eigenvalues", "2", "--products", "16", "--skip", "map"),
        ("landscape", *_INPUTS, "--steps", "3"),
    ],
    ids=["analyze", "landscape"],
)
def test_a_command_stopped_after_each_step_stores_the_same_numbers(
    arguments: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _run(arguments, tmp_path / "straight", monkeypatch) == 0
    expected = _numbers(tmp_path / "straight")
    store = Run._store

    def store_and_stop(self: Run, *given: Any) -> None:
        store(self, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_store", store_and_stop)
        for _ in expected:
            assert _run(arguments, tmp_path / "stopped", monkeypatch) == 130
    assert _run(arguments, tmp_path / "stopped", monkeypatch) == 0
    stopped = _numbers(tmp_path / "stopped")
    assert list(stopped) == list(expected)
    for name, numbers in expected.items():
        assert stopped[name] == numbers, name
