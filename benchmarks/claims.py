"""The sources' empirical claims, measured on real data over seeds.

python benchmarks/claims.py [--data digits fashion_mnist mnist] [--runs DIR] [--page]

Trains the papers' ViT (one post-norm block of width 16) with every seed and asks of each claim
whether its 95 % interval over seeds lies above its threshold, below it, or on both sides. About
two minutes a seed and data set; finished seeds are kept in --runs and are not measured again. Rows
of data sets that are not named stay as they were kept. MNIST and Fashion-MNIST are read from IDX
files, in /usr/share/datasets or in the folder that CURVATLAS_DATA names.
--page only writes the table of docs/case-studies/claims.md again from the kept numbers.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from curvatlas.studies.claims import examine_claims
from harness.results import RESULTS, keep

PAGE = Path(__file__).resolve().parent.parent / "docs" / "case-studies" / "claims.md"
BEGIN, END = "<!-- table: python benchmarks/claims.py --page -->", "<!-- end of the table -->"


def measure(names: list[str], folder: Path, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        report = examine_claims(name, seeds=tuple(range(seeds)), output=folder / name)
        print(report, flush=True)
        for claim in report.claims:
            low, high = claim.value.interval
            rows.append(
                {
                    "data": report.dataset,
                    "seeds": report.seeds,
                    "claim": claim.statement,
                    "measured": claim.figure,
                    "value": float(f"{claim.value.mean:.4g}"),
                    "low": float(f"{low:.4g}"),
                    "high": float(f"{high:.4g}"),
                    "threshold": claim.threshold,
                    "verdict": claim.verdict,
                    "source": claim.source,
                }
            )
        accuracy = report.accuracy
        rows.append(
            {
                "data": report.dataset,
                "seeds": report.seeds,
                "claim": "accuracy on held-out samples after training",
                "measured": "share",
                "value": round(accuracy.mean, 3),
                "low": round(accuracy.interval[0], 3),
                "high": round(accuracy.interval[1], 3),
            }
        )
    return rows


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kept rows, with those of the data sets measured now in place of their old ones."""
    path = RESULTS / "claims.json"
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    new = {row["data"] for row in rows}
    return [row for row in before if row["data"] not in new] + rows


def table(rows: list[dict[str, Any]]) -> str:
    """One line a claim, one column a data set."""
    sets = list(dict.fromkeys(row["data"] for row in rows))
    claims = list(dict.fromkeys((row["claim"], row["measured"]) for row in rows))
    found = {(row["data"], row["claim"]): row for row in rows}
    seeds = {row["data"]: row["seeds"] for row in rows}
    heads = [f"{name}, {seeds[name]} seeds" for name in sets]
    lines = ["| the claim | what was measured | " + " | ".join(heads) + " |"]
    lines.append("|---|---|" + "---|" * len(sets))
    for claim, measured in claims:
        cells = []
        for name in sets:
            row = found[name, claim]
            verdict = f"**{row['verdict']}**: " if "verdict" in row else ""
            cells.append(f"{verdict}{row['value']:.3g} [{row['low']:.3g}, {row['high']:.3g}]")
        above = found[sets[0], claim].get("threshold")
        figure = measured if above is None else f"{measured}, above {above:g}"
        lines.append(f"| {claim} | {figure} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_page() -> None:
    rows = json.loads((RESULTS / "claims.json").read_text(encoding="utf-8"))["rows"]
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(rows)}\n\n{END}{tail}", encoding="utf-8")
    print(f"wrote {PAGE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["digits", "fashion_mnist"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=None)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if not options.page:
        folder = options.runs or Path(tempfile.mkdtemp(prefix="claims-"))
        rows = measure(options.data, folder, options.seeds)
        print(keep("claims", {"rows": merged(rows)}))
    write_page()


if __name__ == "__main__":
    main()
