"""One small demo (few steps, few samples), run by the real command and read by all tests."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from curvatlas import cli
from curvatlas.report import write_report
from report_samples import write_sample_run


@pytest.fixture(scope="session")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command for programs says."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    said = ""
    for command in (
        ["demo", "--steps", "60", "--samples", "10", "--output", str(folder), "--json"],
        ["compare", str(folder), "--quiet"],
    ):
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 0
        said = said or out.getvalue()
    told: dict[str, Any] = json.loads(said)
    return told


@pytest.fixture(scope="session")
def small_demo(answer: dict[str, Any]) -> Path:
    return Path(answer["report"]).parent


@pytest.fixture(scope="session")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 24 layers with 12 roles each: 288 blocks and the tokens'."""
    folder = tmp_path_factory.mktemp("large") / "run"
    return write_report(write_sample_run(folder, layers=24, roles=12))
