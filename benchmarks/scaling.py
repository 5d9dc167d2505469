"""Scaling laws of a grid of small GPTs, killed and resumed.

    python benchmarks/scaling.py [--output DIR] [--kill-after 6]

examples/scaling_laws.py --full, 4 × 4 GPTs × 3 seeds on characters, in a process of its own, killed
once so many runs are stored and started again; with --output a folder that holds some of its runs
it goes on with them. Times are of the processor, taken by the runs themselves; the figures go to
docs/figures.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import curvatlas as ca
from curvatlas import runs
from curvatlas.scaling import compare_predictions
from harness.results import keep, requirement

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "scaling_laws.py"
FIGURES = ROOT / "docs" / "figures"


def run_and_kill(output: Path, after: int) -> int:
    """Start the grid and kill it when ``after`` of its runs are stored; how many were."""
    process = subprocess.Popen([sys.executable, str(EXAMPLE), "--full", "--output", str(output)])
    stored: list[Path] = []
    while process.poll() is None and len(stored) < after:
        time.sleep(0.5)
        stored = list((output / "results").glob("cell*.json"))
    process.kill()
    process.wait()
    return len(stored)


def of_grid(grid: Any) -> dict[str, Any]:
    """What is kept of the runs: the rows, the laws, how they were predicted."""
    rows = [
        {
            "N": cell.parameters,
            "D": cell.samples,
            "seed": cell.seed,
            "steps": cell.steps,
            "validation_loss": round(cell.validation_loss, 4),
            "norm": float(f"{cell.hessian_norm:.4g}"),
            "trace": float(f"{cell.trace:.4g}"),
            "effective_rank": float(f"{cell.effective_rank:.3g}"),
            "critical_batch": ("≥ " if cell.critical_batch_is_bound else "")
            + f"{cell.critical_batch_size:.3g}",
            "left_out": cell.left_out,
            "processor_seconds": round(cell.processor_seconds, 1),
        }
        for cell in grid.cells
    ]
    fits = [
        {
            "quantity": name,
            "exponent_in_N": round(plane.by_parameters, 3),
            "from_to_in_N": " … ".join(f"{end:.2f}" for end in plane.parameters_interval),
            "exponent_in_D": round(plane.by_samples, 3),
            "from_to_in_D": " … ".join(f"{end:.2f}" for end in plane.samples_interval),
            "between_seeds": None if plane.seed_scatter is None else round(plane.seed_scatter, 4),
        }
        for name, plane in grid.planes.items()
    ]
    predicted = compare_predictions(grid)
    ways = [
        {
            "predicted_by": way,
            "mean_error": round(error, 4),
            "from_to": " … ".join(f"{max(end, 0):.3f}" for end in predicted.intervals[way]),
        }
        for way, error in predicted.errors.items()
    ]
    findings = [*(str(phases) for phases in grid.phases.values()), str(grid.descent), *grid.notes]
    return {
        "law": str(grid.law),
        "findings": findings,
        "rows": rows,
        "fits": fits,
        "predictions": ways,
    }


def keep_grid(output: Path, kill_after: int) -> Path:
    stored = run_and_kill(output, kill_after) if kill_after else 0
    subprocess.run([sys.executable, str(EXAMPLE), "--full", "--output", str(output)], check=True)
    grid: Any = runs.load(output).results["grid"]
    shutil.copy(output.with_name(output.name + ".png"), FIGURES / "scaling.png")
    ca.plot_scaling_law_predictions(grid, path=FIGURES / "scaling_predictions.png")
    minutes = sum(cell.processor_seconds for cell in grid.cells) / 60
    lines = [requirement("processor minutes of the 4 × 4 × 3 grid of GPTs", minutes, 12)]
    return keep("scaling", {"killed_after": stored, **of_grid(grid), "requirements": lines})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--kill-after", type=int, default=6)
    options = parser.parse_args()
    output = options.output or Path(tempfile.mkdtemp(prefix="scaling-")) / "grid"
    print(keep_grid(output, options.kill_after))


if __name__ == "__main__":
    main()
