"""The 4 × 4 grid of small ViTs: trained, killed half-way, resumed, fitted; the time it all takes.

python benchmarks/scaling.py [--output DIR] [--kill-after 6]

Runs examples/scaling_laws.py in a process of its own, kills it once so many runs are stored, and
starts it again. Times are of the processor; the figure goes to docs/figures/scaling.png.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from curvatlas import runs
from curvatlas.scaling import compare_predictions
from harness.results import keep, requirement

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "scaling_laws.py"
FIGURE = ROOT / "docs" / "figures" / "scaling.png"


def run_and_kill(output: Path, after: int) -> int:
    """Start the grid and kill it when ``after`` of its runs are stored; how many were."""
    process = subprocess.Popen([sys.executable, str(EXAMPLE), "--output", str(output)])
    stored: list[Path] = []
    while process.poll() is None and len(stored) < after:
        time.sleep(0.5)
        stored = list((output / "results").glob("cell*.json"))
    process.kill()
    process.wait()
    return len(stored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--kill-after", type=int, default=6)
    options = parser.parse_args()
    output = options.output or Path(tempfile.mkdtemp(prefix="scaling-")) / "grid"
    wall = time.perf_counter()
    stored = run_and_kill(output, options.kill_after) if options.kill_after else 0
    subprocess.run([sys.executable, str(EXAMPLE), "--output", str(output)], check=True)
    wall = time.perf_counter() - wall
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    grid: Any = runs.load(output).results["grid"]
    shutil.copy(output.with_name(output.name + ".png"), FIGURE)
    rows = [
        {
            "N": cell.parameters, "D": cell.samples,
            "validation_loss": round(cell.validation_loss, 4),
            "norm": float(f"{cell.hessian_norm:.4g}"), "trace": float(f"{cell.trace:.4g}"),
            "effective_rank": float(f"{cell.effective_rank:.3g}"),
            "seconds": round(cell.seconds, 1),
        }
        for cell in grid.cells
    ]  # fmt: skip
    fits = [
        {
            "quantity": name,
            "exponent_in_N": round(plane.by_parameters, 3),
            "from_to_in_N": " … ".join(f"{end:.2f}" for end in plane.parameters_interval),
            "exponent_in_D": round(plane.by_samples, 3),
            "from_to_in_D": " … ".join(f"{end:.2f}" for end in plane.samples_interval),
        }
        for name, plane in grid.planes.items()
    ]
    predicted = compare_predictions(grid)
    ways = [
        {"predicted_by": way, "mean_error": round(error, 4),
         "from_to": " … ".join(f"{max(end, 0):.3f}" for end in predicted.intervals[way])}
        for way, error in predicted.errors.items()
    ]  # fmt: skip
    minutes = (used.ru_utime + used.ru_stime) / 60
    print(
        keep(
            "scaling",
            {
                "law": str(grid.law),
                "killed_after": stored,
                "wall_seconds": round(wall),
                "rows": rows,
                "fits": fits,
                "predictions": ways,
                "requirements": [
                    requirement("processor minutes of the 4 × 4 grid, killed once", minutes, 15)
                ],
            },
        )
    )


if __name__ == "__main__":
    main()
