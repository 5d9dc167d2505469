"""What ``analyze`` takes of memory, seen from outside the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from curvatlas import runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc"
    ),
]

# What the command imports on its way comes before the measurement: it is the import's own.
MEASURE = """
    import json, re, sys
    import matplotlib.figure, torch, torch.func
    import curvatlas.cli
    import curvatlas.cli.execution, curvatlas.cli.inputs, curvatlas.surveying
    import curvatlas.report.html, curvatlas.report.paper

    def resident(field):
        text = open("/proc/self/status").read()
        return int(re.search(field + r":\\s+(\\d+)", text).group(1)) * 1024

    before = resident("VmRSS")
    try:
        curvatlas.cli.main()
    except SystemExit as ended:
        code = ended.code
    print(json.dumps([code, before, resident("VmHWM")]))
"""


def _peak(folder: Path, *arguments: str) -> tuple[int, int]:
    """Bytes resident after the imports, and at most while ``analyze`` ran into ``folder``."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), "analyze", *arguments, "--output",
         str(folder), "--quiet"],
        capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
             "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    code, before, peak = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return before, peak


def test_a_survey_of_a_million_parameters_would_end_within_two_and_a_half_gigabytes(
    tmp_path: Path,
) -> None:
    # Of half as many, in half the time: the vectors that are held are as many, each half as long.
    # The densities would double the time and take less memory than the trace.
    before, peak = _peak(
        tmp_path / "run", "cli_models:make_wide_model", "cli_models:make_wide_samples",
        "--skip", "density",
    )  # fmt: skip
    run = runs.load(tmp_path / "run")
    assert run.status == "complete"
    parameters = run["model.subject"].parameters
    assert parameters >= 5 * 10**5
    assert before + (peak - before) * 10**6 / parameters <= 2.5e9, (before, peak)
    assert run["model.total.trace"].products > 0


def test_a_survey_asked_for_300_megabytes_takes_no_more_beside_its_imports(tmp_path: Path) -> None:
    # 300 products with 57 thousand parameters: without the option it is 430 MB.
    skipped = [word for part in ("density", "map") for word in ("--skip", part)]
    before, peak = _peak(
        tmp_path / "run", "cli_models:make_gpt", "cli_models:make_long_tokens", "--memory", "300MB",
        *skipped,
    )  # fmt: skip
    assert peak - before <= 300e6, (before, peak)
    assert runs.load(tmp_path / "run").status == "complete"
