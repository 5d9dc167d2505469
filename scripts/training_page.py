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
TOP_FIVE, ASKED = "top 5 of H", 0.35  # of what cold starts cost
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
    early = sum(row["early_alarms"] > 0 for row in result["faults"])
    others = summary["alarms_where_the_loss_did_not_double"]
    told = (
        f"Of {summary['healthy_runs']} healthy runs {summary['runs_with_a_false_alarm']} raised an "
        f"alarm (at most {most:.0%} of such runs, 95 %), and {early} of {len(result['faults'])} "
        "others before their fault. A healthy run is one whose loss never stands half above its "
        f"lowest; {summary['went_off_by_themselves']} of {len(result['healthy'])} without a fault "
        f"went off by themselves, and of the {others['runs']} whose loss did not double "
        f"{others['alarmed']} raised an alarm. Of {summary['divergences']} divergences "
        f"{summary['warned_in_time']} were told at least ten steps before the loss doubled. "
        f"{summary['how_the_rules_were_set']}"
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


def following(result: Result) -> list[str]:
    """Products and processor time of cold starts, by how often is measured; where it is enough."""
    rows = []
    held, missed = [], []  # settings in which the top five cost at most what is asked, and others
    for quantity, spacing in sorted({(row["quantity"], row["spacing"]) for row in result["rows"]}):
        some = [r for r in result["rows"] if (r["quantity"], r["spacing"]) == (quantity, spacing)]
        every = "every step" if spacing == 1 else f"every {spacing} steps"
        for model, optimizer in sorted({(row["model"], row["optimizer"]) for row in some}):
            ours = [r for r in some if (r["model"], r["optimizer"]) == (model, optimizer)]
            products = _products(ours)
            seconds = statistics.mean(row["processor_time_of_cold"] for row in ours)
            run = f"{model.replace('vit', 'ViT').replace('gpt', 'GPT')}, {optimizer}"
            rows.append((quantity, run, every, f"{products:.2f}", f"{seconds:.2f}"))
        if quantity == TOP_FIVE:
            (held if _products(some) <= ASKED else missed).append(
                f"{every} ({_products(some):.2f})"
            )
    told = (
        f"Over all runs following the five largest costs at most {ASKED} of the products where "
        f"they are measured {' or '.join(held) or 'never'}, and more where "
        f"{' or '.join(missed) or 'never'}."
    )
    head = ("quantity", "run", "measured", "products", "processor time")
    return [told, "", *table(head, rows)]


def _products(rows: list[Result]) -> float:
    """Products of following, of those of cold starts."""
    return sum(r["products_followed"] for r in rows) / sum(r["products_cold"] for r in rows)


TABLES: Tables = {"alarms": ("alarms", alarms), "following": ("following", following)}


def filled(text: str) -> str:
    """The page with every measured part between its marks."""
    return page_table.filled(text, TABLES, page_table.kept(TABLES), "training_page.py")


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the measured parts of {PAGE.relative_to(ROOT)}")
