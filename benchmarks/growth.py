"""How the cost of one product grows: with tokens, parameters, columns and batches; with a figure.

    python benchmarks/growth.py [--quick] [--parts tokens parameters columns memory] [--draw]

Times are of the processor, the least of the rounds, in one process with one thread; every part runs
in a process of its own. The slopes are exponents: 1 is linear. A small cost that does not depend on
the size (calls) bends the line at its lower end, so the fit t = a + b · size stands beside the
exponent of the upper half. ``--draw`` makes the figure again from the kept numbers.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import curvatlas as ca
from curvatlas.zoo.models import GPT, GPTConfig
from harness.peak import peak_bytes, settled
from harness.results import RESULTS, keep, requirement
from harness.sizes import smollm2_shaped
from harness.timing import least_processor_seconds

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "figures" / "growth.png"
KINDS = {"H": ca.Hessian, "H_o": ca.GaussNewton}
SAMPLES = (1, 2, 4, 8, 16, 32)  # of 64 tokens
# (vocabulary, width, layers): 10 k to 32 M parameters; the last point is SmolLM2's shape
MODELS = ((64, 20, 2), (200, 48, 3), (1000, 128, 4), (1000, 256, 4), (2000, 320, 8), (2000, 576, 8))
COLUMNS = (1, 2, 4, 8, 16, 32)
BATCHES = (2, 4, 8, 16, 32, 64)
MEMORY_BUDGET = 60_000_000


def gpt_problem(
    vocabulary: int, width: int, layers: int, *, samples: int, length: int = 64, batches: int = 1
) -> ca.Problem:
    torch.manual_seed(0)
    config = GPTConfig(vocabulary=vocabulary, context=length, d_model=width, n_layers=layers)
    tokens = [torch.randint(0, vocabulary, (samples, length + 1)) for _ in range(batches)]
    data = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
    return ca.Problem(GPT(config).eval(), "cross_entropy", data)


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Least processor time of ``rounds`` calls, after one that builds the graph."""
    run()
    return least_processor_seconds(run, rounds)


def product_seconds(problem: ca.Problem, quantity: str, columns: int, rounds: int) -> float:
    operator = KINDS[quantity](problem, checks=False)
    right = torch.randn(problem.size, columns)
    right = right[:, 0].contiguous() if columns == 1 else right
    return seconds(lambda: operator @ right, rounds)


def by_tokens(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for samples in SAMPLES:
        problem = gpt_problem(1000, 128, 4, samples=samples)
        for quantity in KINDS:
            taken = product_seconds(problem, quantity, 1, rounds)
            rows.append({"size": 64 * samples, "quantity": quantity, "seconds": taken})
    return rows


def by_parameters(rounds: int, *, largest: bool = True) -> list[dict[str, Any]]:
    rows = []
    for sizes in MODELS:
        problem = gpt_problem(*sizes, samples=2)
        for quantity in KINDS:
            taken = product_seconds(problem, quantity, 1, max(1, rounds // 2))
            rows.append({"size": problem.size, "quantity": quantity, "seconds": taken})
    if largest and find_spec("transformers") is not None:
        torch.manual_seed(0)
        tokens = torch.randint(0, 49152, (2, 65))
        batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        problem = ca.Problem(smollm2_shaped(), "cross_entropy", batch)
        for quantity in KINDS:
            taken = product_seconds(problem, quantity, 1, 1)
            rows.append({"size": problem.size, "quantity": quantity, "seconds": taken})
    return rows


def by_columns(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for sizes, samples in (((64, 20, 2), 2), ((200, 48, 3), 2), ((1000, 128, 4), 2)):
        problem = gpt_problem(*sizes, samples=samples, length=32)
        for columns in COLUMNS:
            taken = product_seconds(problem, "H", columns, max(2, rounds // 2))
            rows.append({"size": columns, "parameters": problem.size, "seconds": taken})
    return rows


def by_batches() -> list[dict[str, Any]]:
    """Peak of a product over so many batches under one budget, a fresh process each."""
    return [
        {"size": count, "megabytes": round(_child("one memory", count) / 1e6, 1)}
        for count in BATCHES
    ]


def memory_of(batches: int) -> int:
    small = gpt_problem(20, 16, 1, samples=1, length=8)
    ca.Hessian(small) @ torch.randn(small.size)  # what torch loads is no part of a product
    problem = gpt_problem(200, 64, 3, samples=8, batches=batches)
    operator = ca.Hessian(problem, budget=MEMORY_BUDGET)
    vector = torch.randn(problem.size)
    before = settled()
    for _ in range(2):
        operator @ vector
    return peak_bytes() - before


def _child(part: str, argument: int) -> Any:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", part, str(argument)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"growth: {part} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


# --- fits ---------------------------------------------------------------------------------------


def exponent(
    rows: Sequence[dict[str, Any]], value: str = "seconds", *, upper: bool = True
) -> float:
    """Slope of log cost against log size; ``upper``: over the larger half of the sizes."""
    rows = sorted(rows, key=lambda row: row["size"])
    rows = rows[len(rows) // 2 - 1 :] if upper else rows
    sizes, costs = ([row[key] for row in rows] for key in ("size", value))
    return round(float(np.polyfit(np.log(sizes), np.log(costs), 1)[0]), 3)


def affine(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """a, b and R² of seconds = a + b · size."""
    sizes, costs = (np.array([row[key] for row in rows]) for key in ("size", "seconds"))
    slope, start = np.polyfit(sizes, costs, 1)
    left = costs - start - slope * sizes
    return (
        float(start),
        float(slope),
        1 - float((left**2).sum() / ((costs - costs.mean()) ** 2).sum()),
    )


def summary(found: dict[str, list[dict[str, Any]]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """(rows of the page, requirements)."""
    rows, lines = [], []
    for part in ("tokens", "parameters"):
        for quantity in KINDS if part in found else ():
            chosen = [row for row in found[part] if row["quantity"] == quantity]
            slope, (start, step, r2) = exponent(chosen), affine(chosen)
            each = f"{1e6 * step:.3g} µs" if step > 1e-6 else f"{1e9 * step:.3g} ns"
            rows.append({
                "cost": f"time of {quantity}·v", "in": part,
                "from": chosen[0]["size"], "to": chosen[-1]["size"], "exponent": slope,
                "exponent_of_all": exponent(chosen, upper=False),
                "fixed": f"{1e3 * start:.3g} ms", "each": each,
                "r_squared": round(r2, 4),
            })  # fmt: skip
            name = f"{quantity}·v in {part}: distance of the exponent from 1"
            lines.append(requirement(name, round(abs(slope - 1), 3), 0.15))
    for size in sorted({row["parameters"] for row in found.get("columns", [])}):
        chosen = [row for row in found["columns"] if row["parameters"] == size]
        slope = exponent(chosen, upper=False)
        rows.append({
            "cost": f"time of H·V, {size} parameters", "in": "columns", "from": 1,
            "to": chosen[-1]["size"], "exponent": slope, "exponent_of_all": slope,
        })  # fmt: skip
        name = f"exponent in columns, {size} parameters"
        lines.append(requirement(name, slope, 1.0))
    if "memory" in found:
        chosen = found["memory"]
        slope = exponent(chosen, "megabytes", upper=False)
        rows.append({
            "cost": f"peak memory of H·v, {chosen[0]['megabytes']} to {chosen[-1]['megabytes']} MB",
            "in": "batches", "from": chosen[0]["size"], "to": chosen[-1]["size"],
            "exponent": slope, "exponent_of_all": slope,
        })  # fmt: skip
        lines.append(requirement("exponent of memory in batches", slope, 0.05))
    return rows, lines


# --- the figure ---------------------------------------------------------------------------------


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    colours = {"H": "#1f5aa6", "H_o": "#c8641e"}
    for axis, part in zip(axes[0], ("tokens", "parameters"), strict=True):
        for quantity, colour in colours.items():
            chosen = [row for row in found[part] if row["quantity"] == quantity]
            sizes = np.array([row["size"] for row in chosen], dtype=float)
            costs = [1e3 * row["seconds"] for row in chosen]
            label = f"{quantity}·v, exponent {exponent(chosen):.2f}"
            axis.plot(sizes, costs, "o", color=colour, label=label)
            guide = costs[-1] * sizes / sizes[-1]
            axis.plot(sizes, guide, "--", color=colour, linewidth=1, alpha=0.6)
        axis.set(xscale="log", yscale="log", xlabel=part, ylabel="ms a product")
        axis.set_title(f"Time against {part} (dashed: exponent 1)", fontsize=10)
        axis.legend(frameon=False)
    axis = axes[1][0]
    shades = ["#9bbbe0", "#4f86c6", "#163f73"]
    for shade, size in zip(
        shades, sorted({r["parameters"] for r in found["columns"]}), strict=False
    ):
        chosen = [row for row in found["columns"] if row["parameters"] == size]
        sizes = np.array([row["size"] for row in chosen], dtype=float)
        costs = np.array([row["seconds"] for row in chosen]) / chosen[0]["seconds"]
        label = f"{size:,} parameters, exponent {exponent(chosen, upper=False):.2f}"
        axis.plot(sizes, costs, "o-", color=shade, label=label)
    axis.plot(COLUMNS, COLUMNS, "--", color="grey", linewidth=1, label="column by column")
    axis.set(xscale="log", yscale="log", xlabel="columns", ylabel="time, of one column's")
    axis.set_title("Time against columns", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    axis = axes[1][1]
    chosen = found["memory"]
    axis.plot([r["size"] for r in chosen], [r["megabytes"] for r in chosen], "o-", color="#1f5aa6")
    axis.axhline(MEMORY_BUDGET / 1e6, color="grey", linestyle="--", linewidth=1)
    axis.text(chosen[0]["size"], MEMORY_BUDGET / 1e6, "budget", va="bottom", color="grey")
    axis.set(
        xscale="log", xlabel="batches", ylabel="peak, MB", ylim=(0, 1.25 * MEMORY_BUDGET / 1e6)
    )
    axis.set_xscale("log", base=2)
    axis.set_xticks([r["size"] for r in chosen], [str(r["size"]) for r in chosen])
    axis.set_title("Memory against batches under one budget", fontsize=10)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


PARTS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "tokens": by_tokens,
    "parameters": by_parameters,
    "columns": by_columns,
}


def _keep(found: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    rows, lines = summary(found)
    keep("growth", {"requirements": lines, "rows": rows, "measured": found}, folder=folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="*", default=[*PARTS, "memory"])
    parser.add_argument("--quick", action="store_true", help="one part; nothing is kept")
    parser.add_argument("--draw", action="store_true", help="only the figure, from what was kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the numbers")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.child:
        part, argument = options.child
        done = memory_of(int(argument)) if part == "one memory" else PARTS[part](int(argument))
        print(json.dumps(done))
        return 0
    if options.quick:
        print(by_columns(2)[:6])
        return 0
    file = options.results / "growth.json"
    found: dict[str, Any] = {}
    if file.exists():  # parts that are not measured again stay as they were
        kept = json.loads(file.read_text(encoding="utf-8"))
        found = kept.get("measured", {})
    for part in () if options.draw else options.parts:
        found[part] = by_batches() if part == "memory" else _child(part, options.rounds)
        print(part, found[part], flush=True)
        _keep(found, options.results)
    if options.draw:
        _keep(found, options.results)  # the rows anew, from the same measurements
    if {*PARTS, "memory"} <= found.keys():
        draw(found, FIGURE)
        print(f"drew {FIGURE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
