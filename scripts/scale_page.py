"""Fill the tables of docs/scale.md from the numbers in benchmarks/results.

python scripts/scale_page.py
"""

from __future__ import annotations

from pathlib import Path

import page_table
from page_table import Result, Tables, table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scale.md"


def parallel(result: Result) -> list[str]:
    """Two processes against one."""
    head = ("product", "tokens", "by the clock", "by processor time", "difference")
    rows = [
        (
            f"{row['quantity']}·v",
            str(row["tokens"]),
            f"{row['times_the_products_per_second']:.2f} "
            f"({row['lower_quartile']:.2f}-{row['upper_quartile']:.2f})",
            f"{row['by_processor_time']:.2f}",
            f"{row['difference']:.0e}",
        )
        for row in result["rows"]
        if "tokens" in row
    ]
    (alone,) = (row for row in result["rows"] if row["quantity"] == "one reduction")
    took = alone["milliseconds_a_product"]
    said = f"One reduction of all {result['parameters']:,} entries takes {took} ms."
    return [*table(head, rows), "", said]


def growth(result: Result) -> list[str]:
    """Exponents of the cost in every size."""
    head = ("cost", "in", "range", "exponent", "t = a + b · size")
    rows = []
    for row in result["rows"]:
        line = ""
        if "fixed" in row:
            line = f"{row['fixed']} + {row['each']} each, R² {row['r_squared']:.3f}"
        sizes = f"{row['from']:,} to {row['to']:,}"
        rows.append((row["cost"], row["in"], sizes, f"{row['exponent']:.2f}", line))
    return table(head, rows)


def plan(result: Result) -> list[str]:
    """Plans against what was then measured."""
    head = ("model", "parameters", "", "planned", "measured", "miss")
    rows = []
    for row in result["rows"]:
        size = f"{row['planned_parameters'] / 1e6:.3g} M"
        times = [f"{row[key]:.3g} s" for key in ("planned_seconds", "seconds")]
        bytes_ = [f"{row[key] / 1e9:.3g} GB" for key in ("planned_memory", "memory")]
        rows.append((row["model"], size, "time", *times, f"{row['seconds_ratio'] - 1:+.0%}"))
        rows.append(("", "", "memory", *bytes_, f"{row['memory_ratio'] - 1:+.0%}"))
    return table(head, rows)


def projections(result: Result) -> list[str]:
    """Sizes that nobody can measure here."""
    head = ("model", "tokens a sample", "devices", "one product", "of it sending", "activations",
            "memory each")  # fmt: skip
    rows = [
        (
            row["model"],
            f"{row['length']:,}",
            str(row["devices"]),
            f"{row['seconds']:.3g} s",
            f"{row['of_it_sending']:.0%}",
            row["mode"],
            f"{row['gigabytes']:.0f} GB" + ("" if row["fits"] else ", **too much**"),
        )
        for row in result["projections"]
    ]
    return table(head, rows)


TABLES: Tables = {
    "parallel": ("parallel", parallel),
    "growth": ("growth", growth),
    "plan": ("plan", plan),
    "projections": ("plan", projections),
}


def filled(text: str, results: dict[str, Result]) -> str:
    """The page with every table between its marks."""
    return page_table.filled(text, TABLES, results, "scale_page.py")


def kept() -> dict[str, Result]:
    return page_table.kept(TABLES)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), kept()), encoding="utf-8")
    print(f"wrote the tables of {PAGE.relative_to(ROOT)}")
