"""Flatness and generalisation: rank correlations over ViTs trained in many ways.

python benchmarks/generalisation.py [--data digits …] [--models 24] [--runs DIR] [--page]

Trains small ViTs that differ in width, depth, learning rate, batch size, weight decay and number of
samples, takes every measure of ``ca.flatness`` on the training data and ranks it against the gap,
test loss − training loss. About fifteen processor seconds a model; finished models are kept in
--runs and are not measured again: the same command goes on. The kept file holds the data sets of
this command and no others. ``curvatlas generalisation DATA`` is the same for any data and models.
Fashion-MNIST is read from IDX files, in /usr/share/datasets (Debian: dataset-fashion-mnist) or in
the folder that CURVATLAS_DATA names.
--page only writes the tables of docs/how-to/flatness.md again from the kept numbers.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from curvatlas.studies.generalisation import Generalisation, examine_generalisation
from harness.results import RESULTS, keep

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "how-to" / "flatness.md"
BEGIN = "<!-- table: python benchmarks/generalisation.py --page -->"
END = "<!-- end of the table -->"


def measure(names: list[str], folder: Path, models: int) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        found = examine_generalisation(name, models=models, output=folder / name)
        print(found, flush=True)
        found.plot().savefig(DOCS / "figures" / f"generalisation_{name}.png", dpi=110)
        rows += [told(found)]
    return rows


def told(found: Generalisation) -> dict[str, Any]:
    gaps = sorted(model.gap for model in found.models)
    return {
        "data": found.dataset,
        "models": len(found.models),
        "left_out": list(found.left_out),
        "gaps": [round(gap, 4) for gap in gaps],
        "correlations": [
            {
                "measure": row.measure,
                "tau": round(row.value, 3),
                "interval": [round(end, 3) for end in row.interval],
                "shuffled": [round(end, 3) for end in row.control],
                "p": float(f"{row.p_value:.2g}"),
            }
            for row in found.correlations
        ],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """One line a measure, one column a data set, the strongest of the first set on top."""
    measures = sorted(rows[0]["correlations"], key=lambda row: -abs(row["tau"]))
    heads = [f"{row['data']}, {row['models']} models" for row in rows]
    lines = ["| measure | " + " | ".join(heads) + " |", "|---|" + "---|" * len(rows)]
    for name in (row["measure"] for row in measures):
        cells = []
        for row in rows:
            found = next((c for c in row["correlations"] if c["measure"] == name), None)
            if found is None:
                cells.append("–")
                continue
            low, high = found["interval"]
            mark = "**" if low > 0 or high < 0 else ""
            cells.append(f"{mark}{found['tau']:+.2f}{mark} [{low:+.2f}, {high:+.2f}]")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    shuffled = [max(abs(end) for c in row["correlations"] for end in c["shuffled"]) for row in rows]
    cells = [f"within ± {width:.2f}" for width in shuffled]
    lines.append("| any of them, gaps shuffled | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_page() -> None:
    rows = json.loads((RESULTS / "generalisation.json").read_text(encoding="utf-8"))["rows"]
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(rows)}\n\n{END}{tail}", encoding="utf-8")
    print(f"wrote {PAGE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["digits", "fashion_mnist"])
    parser.add_argument("--models", type=int, default=24)
    parser.add_argument("--runs", type=Path, default=None)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if not options.page:
        folder = options.runs or Path(tempfile.mkdtemp(prefix="generalisation-"))
        rows = measure(options.data, folder, options.models)
        print(keep("generalisation", {"rows": rows}))
    write_page()


if __name__ == "__main__":
    main()
