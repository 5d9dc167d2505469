"""Fill the measured parts of docs/how-to/training.md from the numbers in benchmarks/results.

python scripts/training_page.py
"""

from __future__ import annotations

import statistics
from pathlib import Path

import page_table
from page_table import Result, Tables, table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how-to" / "training.md"
FAULTS = {
    "rate": "rate rising to 3, 5 or 10 times",
    "no norm": "no normalisation, rate rising to 10 times",
    "no warm-up": "10 times the rate without warm-up",
    "batch": "one bad batch",
}


def alarms(result: Result) -> list[str]:
    """Healthy runs, then the faults one by one."""
    summary = result["summary"]
    most = summary["false_alarm_rate_interval"][1]
    false = sum(bool(row["alarms"]) for row in result["healthy"] if row["doubled_at"] is None)
    early = sum(row["early_alarms"] > 0 for row in result["faults"])
    told = (
        f"Of {summary['healthy_runs']} healthy runs {false} raised an alarm (at most {most:.0%} of "
        f"such runs, 95 %), and {early} of {len(result['faults'])} others before their fault. Of "
        f"{summary['divergences']} divergences {summary['warned_in_time']} were told at least ten "
        f"steps before the loss doubled. {_rules(summary)}"
    )
    rows = []
    for fault, name in FAULTS.items():
        runs = [row for row in result["faults"] if row["fault"] == fault]
        doubled = [row for row in runs if row["doubled_at"] is not None]
        warned = [row["lead"] for row in doubled if row["lead"] is not None and row["lead"] >= 10]
        lead = f"{statistics.median(warned):.0f} steps" if warned else ""
        rows.append((name, str(len(runs)), str(len(doubled)), str(len(warned)), lead))
    head = ("fault", "runs", "loss doubled", "told in time", "median lead")
    return [told, "", *table(head, rows)]


def _rules(summary: Result) -> str:
    if "how_the_rules_were_set" in summary:
        return str(summary["how_the_rules_were_set"])
    return "These numbers are of earlier rules, which were set on these very runs."


def following(result: Result) -> list[str]:
    """Products and processor time of cold starts, by how often is measured."""
    rows = []
    for quantity, spacing in sorted({(row["quantity"], row["spacing"]) for row in result["rows"]}):
        some = [r for r in result["rows"] if (r["quantity"], r["spacing"]) == (quantity, spacing)]
        for model in sorted({row["model"] for row in some}):
            ours = [row for row in some if row["model"] == model]
            followed = sum(row["products_followed"] for row in ours)
            cold = sum(row["products_cold"] for row in ours)
            seconds = statistics.mean(row["processor_time_of_cold"] for row in ours)
            every = "every step" if spacing == 1 else f"every {spacing} steps"
            cells = (f"{followed / cold:.2f}", f"{seconds:.2f}")
            rows.append(
                (quantity, model.replace("vit", "ViT").replace("gpt", "GPT"), every, *cells)
            )
    return table(("quantity", "model", "measured", "products", "processor time"), rows)


TABLES: Tables = {"alarms": ("alarms", alarms), "following": ("following", following)}


def filled(text: str) -> str:
    """The page with every measured part between its marks."""
    return page_table.filled(text, TABLES, page_table.kept(TABLES), "training_page.py")


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the measured parts of {PAGE.relative_to(ROOT)}")
