"""``curvatlas analyze`` started by torchrun: one run folder, one voice, one exit code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import curvatlas as ca
import forked
from cli_models import make_data, make_model
from curvatlas import runs
from distributed import commands
from distributed.test_data_parallel import free_port, start

pytestmark = pytest.mark.slow

Told = dict[str, list[dict[str, Any]]]  # case → exit code, out and err of rank 0 and rank 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have gone through all commands."""
    folder = tmp_path_factory.mktemp("commands")
    start(commands.every_case, folder, "")
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def codes(told: Told, case: str) -> list[int]:
    return [rank["code"] for rank in told[case]]


def test_two_processes_give_the_numbers_of_one(folder: Path, told: Told) -> None:
    assert codes(told, "analyze") == [0, 0]
    alone, shared = runs.load(folder / "alone"), runs.load(folder / "shared")
    assert shared.status == "complete"
    assert list(alone.results) == list(shared.results)
    assert alone.manifest.fingerprints == shared.manifest.fingerprints  # either can go on
    for name in ("loss", "gradient_norm", "targets", "batches"):
        one, two = alone["model.subject"][name], shared["model.subject"][name]
        assert abs(one - two) <= 1e-12 * abs(one), name
    for part in ("total", "outer", "functional"):
        one, two = (run[f"model.{part}.eigenpairs"]["values"] for run in (alone, shared))
        assert float((one - two).abs().max()) <= 1e-9 * float(one.abs().max())
    one, two = (run["model.propagation"] for run in (alone, shared))
    for first, second in zip(one.activations, two.activations, strict=True):
        assert first.norm == pytest.approx(second.norm, rel=1e-9)
    low, high = shared["model.total.trace"].interval
    truth = alone["model.total.trace"]
    assert low - truth.error <= truth.value <= high + truth.error


def test_only_the_first_process_prints_and_writes(folder: Path, told: Told) -> None:
    first, second = told["analyze"]
    assert first["out"].count("report:") == 1
    assert second["out"] == second["err"] == ""
    assert (folder / "shared" / "report.html").exists()


def test_stored_steps_are_told_to_the_other_processes(told: Told) -> None:
    """The same command again: nothing is computed, every rank has the results."""
    assert codes(told, "again") == [0, 0]
    assert told["again"][0]["err"].count("read from the folder") >= 5


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("no such model", 2, "cannot find the model 'nothing'"),
        ("a folder that is no run", 2, "holds files but no run"),
        ("another model on one rank", 2, "rank 1 has other weights than rank 0"),
        ("another command", 2, "atlas runs in one process: start it without torchrun"),
        ("no time left", 3, "the time budget of 0.001 s is used up"),
    ],
)
def test_every_rank_ends_with_one_line_and_the_same_code(
    told: Told, case: str, code: int, words: str
) -> None:
    assert codes(told, case) == [code, code]
    assert words in told[case][0]["err"]
    for rank in told[case]:
        assert rank["err"].startswith("curvatlas: ")
        assert rank["err"].count("\n") == 1
        assert "Traceback" not in rank["err"]


def test_a_failure_of_one_rank_gives_all_its_exit_code(told: Told) -> None:
    assert codes(told, "no data on one rank") == [2, 2]
    first, second = (rank["err"] for rank in told["no data on one rank"])
    assert "1 of 2 processes failed" in first
    assert "there is no second.pt" in second


def test_torchrun_itself_starts_it(tmp_path: Path) -> None:
    launcher = forked.Forked(
        "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port(),
        "-m", "curvatlas.cli",
        *commands.arguments("cli_models:make_model", "cli_models:make_data", tmp_path / "run"),
        *(f"--skip={part}" for part in ("map", "propagation", "density", "advice", "trace")),
        cwd=tmp_path, environment={"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    done = launcher.finished()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report:") == 1
    top = runs.load(tmp_path / "run")["model.total.eigenpairs"]
    batches = [(inputs.double(), targets) for inputs, targets in make_data()]
    problem = ca.Problem(make_model().double(), "cross_entropy", batches)
    want = torch.linalg.eigvalsh(ca.Hessian(problem).dense())[-1]
    assert float(top["values"].max() - want) == pytest.approx(0.0, abs=1e-12)
