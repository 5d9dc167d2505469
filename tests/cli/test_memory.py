"""What ``analyze`` takes of memory, seen from outside the process."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

import forked
from curvatlas import runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc"
    ),
]

# What a first survey loads of PyTorch's code stays, whatever the next one is of: the measurement
# begins after one of 26 parameters.
MEASURE = """
    import json, re, sys
    import curvatlas.cli

    def resident(field):
        text = open("/proc/self/status").read()
        return int(re.search(field + r":\\s+(\\d+)", text).group(1)) * 1024

    def ended(words):
        try:
            curvatlas.cli.main(words)
        except SystemExit as end:
            return end.code

    few = ["cli_models:make_model", "cli_models:make_data", "--skip", "density", "--quiet"]
    first = ended(["analyze", *few, "--output", "first"])
    before = resident("VmRSS")
    print(json.dumps([first or ended(sys.argv[1:]), before, resident("VmHWM")]))
"""


def _peak(folder: Path, *arguments: str) -> tuple[int, int]:
    """Bytes resident before, and at most while ``analyze`` ran into ``folder``.

    Linux begins the peak of a fork at what is resident then: what the server has imported.
    """
    script = folder.with_suffix(".py")
    script.write_text(textwrap.dedent(MEASURE), encoding="utf-8")
    words = (script, "analyze", *arguments, "--output", folder, "--quiet")
    done = forked.Forked(*words, cwd=folder.parent).finished(900)
    assert done.returncode == 0, done.stderr
    code, before, peak = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return before, peak


def test_a_survey_of_a_million_parameters_would_end_within_two_and_a_half_gigabytes(
    tmp_path: Path,
) -> None:
    # Of a quarter as many, in a quarter of the time: the vectors that are held are as many, each as
    # much shorter, and what does not grow with the parameters counts four times.
    # The densities would double the time and take less memory than the trace.
    before, peak = _peak(
        tmp_path / "run", "cli_models:make_wide_model", "cli_models:make_wide_samples",
        "--skip", "density",
    )  # fmt: skip
    run = runs.load(tmp_path / "run")
    assert run.status == "complete"
    parameters = run["model.subject"].parameters
    assert parameters >= 25 * 10**4
    assert before + (peak - before) * 10**6 / parameters <= 2.5e9, (before, peak)
    assert run["model.total.trace"].products > 0


def test_a_survey_asked_for_150_megabytes_takes_no_more_beside_its_imports(tmp_path: Path) -> None:
    # 300 products with a quarter of a million parameters: without the option it is 290 MB.
    skipped = [word for part in ("density", "map") for word in ("--skip", part)]
    before, peak = _peak(
        tmp_path / "run", "cli_models:make_wide_model", "cli_models:make_wide_samples",
        "--memory", "150MB", *skipped,
    )  # fmt: skip
    assert peak - before <= 150e6, (before, peak)
    assert runs.load(tmp_path / "run").status == "complete"
