"""How often the reported 95 % intervals hold the truth: seeded trials on exact spectra.

    python benchmarks/coverage.py [--quick] [--trials 200] [--parts trace diagonal ...]

Every interval of ``curvatlas.spectra`` meets indefinite, degenerate, rank-deficient and
heavy-tailed spectra and that of a trained ViT, and three that no rule was chosen on, all with exact
truth and none of them used in the tests. A rate within 90-99 % is asked for. Intervals that are
certain rather than statistical (a residual, a pair of quadrature rules, an exact value) hold
always, bounds at least. A share of eigenvalues can be known to one eigenvalue, no better: such
cells are counted apart. Parts can be measured one at a time: what was kept of the others stays.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
from typing import Any

import torch
from torch import Tensor

from harness.chosen_spectra import chosen_spectra, held_out_spectra
from harness.coverage_trials import BOUNDS, CERTAIN, PARTS
from harness.results import RESULTS, keep, requirement

SHARES = ("negative", "clear")  # of the eigenvalues: whole numbers over n


def measure(part: str, name: str, values: Tensor, trials: int) -> dict[str, Any]:
    """One cell of the table."""
    words, make = PARTS[part]
    trial = make(values)
    found = [trial(10_000 + seed) for seed in range(trials)]
    width = statistics.median(w for _, w, _ in found)
    return {
        "part": part,
        "interval": words,
        "spectrum": name,
        "size": len(values),
        "trials": trials,
        "covered": round(statistics.fmean(covered for covered, _, _ in found), 4),
        "median_half_width": float(f"{width:.3g}"),
        "kind": _kind(part, all(exact for _, _, exact in found), width * len(values)),
    }


def _kind(part: str, exact: bool, eigenvalues: float) -> str:
    if exact:
        return "exact"
    if part in SHARES and eigenvalues <= 1.5:
        return "one eigenvalue"
    return "certain" if part in CERTAIN else "bound" if part in BOUNDS else "interval"


def requirements(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The contract's lines: too narrow, and too wide."""
    missed = {
        kind: 1 - min([row["covered"] for row in rows if row["kind"] == kind], default=1.0)
        for kind in ("interval", "bound", "one eigenvalue", "certain", "exact")
    }
    intervals = [row["covered"] for row in rows if row["kind"] == "interval"]
    wide = sum(covered > 0.99 for covered in intervals) / max(len(intervals), 1)
    return [
        requirement("95 % intervals: trials missed, in the worst cell", missed["interval"], 0.1),
        requirement("95 % intervals: share of cells that hold in over 99 %", wide, 0.0),
        requirement("95 % bounds: trials missed, in the worst cell", missed["bound"], 0.1),
        requirement("shares known to one eigenvalue: trials missed", missed["one eigenvalue"], 0.1),
        requirement("certain and exact intervals: trials missed",
                    max(missed["certain"], missed["exact"]), 0.0),
    ]  # fmt: skip


def kept() -> list[dict[str, Any]]:
    path = RESULTS / "coverage.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows: list[dict[str, Any]] = found.get("rows", [])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few trials, not kept")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--parts", nargs="*", default=list(PARTS))
    parser.add_argument("--spectra", nargs="*", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spectra = chosen_spectra() | held_out_spectra()
    rows = [] if options.quick else kept()
    for part in options.parts:
        for name in options.spectra or spectra:
            row = measure(part, name, spectra[name], 5 if options.quick else options.trials)
            print(row, flush=True)
            rows = [r for r in rows if (r["part"], r["spectrum"]) != (part, name)] + [row]
            if not options.quick:
                keep("coverage", {"rows": rows, "requirements": requirements(rows)})
    for line in requirements(rows):
        print(line)


if __name__ == "__main__":
    main()
