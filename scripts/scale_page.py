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


def rates(result: Result) -> list[str]:
    """What was fitted."""
    found = {key: value for key, value in result["rates"].items() if value}
    names = {
        "operations_per_second": ("operations", 1e-9, "· 10⁹ a second"),
        "bytes_per_second": ("activations", 1e-9, "GB/s"),
        "weight_bytes_per_second": ("columns and products", 1e-9, "GB/s"),
        "seconds_per_call": ("a layer's calls, each unit", 1e6, "µs"),
        "link_bytes_per_second": ("the reduction", 1e-9, "GB/s"),
        "seconds_per_message": ("a message", 1e6, "µs"),
        "slowdown": ("each of two processes takes", 1.0, "times as long as one alone"),
    }
    rows = [
        (name, f"{scale * found[key]:.3g} {unit}")
        for key, (name, scale, unit) in names.items()
        if key in found
    ]
    fitted = [abs(row["ratio"] - 1) for row in result["rows"] if row["used_in_the_fit"]]
    said = f"On what it was fitted to it misses by {max(fitted):.0%} at most."
    return [*table(("rate", "fitted"), rows), "", said]


def unseen(result: Result) -> list[str]:
    """Predictions of configurations that were not used in the fit."""
    head = ("", "model", "product", "processes", "predicted", "measured", "miss")
    rows = [
        (
            row["what"],
            row["model"],
            row["quantity"],
            str(row["processes"]),
            f"{row['predicted']:.3g} {row['unit']}",
            f"{row['measured']:.3g} {row['unit']}",
            f"{row['ratio'] - 1:+.0%}",
        )
        for row in result["rows"]
        if not row["used_in_the_fit"]
    ]
    return table(head, rows)


def projections(result: Result) -> list[str]:
    """Sizes that nobody can measure here."""
    head = ("model", "devices", "one product", "of it reduction", "60 products", "memory each")
    rows = [
        (
            row["model"],
            str(row["devices"]),
            f"{row['seconds_a_product']:.3g} s",
            f"{row['of_it_reduction']:.0%}",
            f"{row['hours_for_60_products']:.2g} h",
            f"{row['gigabytes_a_device']:.0f} GB"
            + ("" if row["fits_in_80_gb"] else ", **too much**"),
        )
        for row in result["projections"]
    ]
    return table(head, rows)


def compiled(result: Result) -> list[str]:
    """What compiling a product gives, and what it takes."""
    head = ("model", "product", "kept graph", "compiled", "compiling", "pays after", "difference")
    rows = [
        (
            row["model"],
            row["quantity"],
            f"{row['kept_gradients']:.2f}",
            f"{row['compiled_gradients']:.2f}",
            f"{row['compile_seconds']:.0f} s",
            "never" if row["pays_after"] is None else f"{row['pays_after']:,} products",
            f"{row['difference']:.0e}",
        )
        for row in result["rows"]
    ]
    return table(head, rows)


TABLES: Tables = {
    "parallel": ("parallel", parallel),
    "growth": ("growth", growth),
    "rates": ("cost_model", rates),
    "unseen": ("cost_model", unseen),
    "projections": ("cost_model", projections),
    "compiled": ("compiled", compiled),
}


def filled(text: str, results: dict[str, Result]) -> str:
    """The page with every table between its marks."""
    return page_table.filled(text, TABLES, results, "scale_page.py")


def kept() -> dict[str, Result]:
    return page_table.kept(TABLES)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), kept()), encoding="utf-8")
    print(f"wrote the tables of {PAGE.relative_to(ROOT)}")
