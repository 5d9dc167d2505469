"""Peak memory against the budget, and growth over 200 products, each in a process of its own.

    python benchmarks/memory.py [--quick]

The peak is the process's high-water mark during the products minus what was resident before them
(Linux: VmHWM, reset before). Graphs that do not fit are built anew, batches that do not fit are
cut.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.peak import peak_bytes, settled
from harness.results import RESULTS, keep, requirement

MB = 1_000_000
# name → (vocabulary, context, width, layers, samples a batch, batches)
MODELS = {
    "GPT 1.06 M": (1000, 64, 128, 4, 32, 2),
    "GPT, vocabulary 8000": (8000, 32, 32, 2, 16, 2),
}
BUDGETS_MB = (100, 400, 1000)
OPERATORS = ("Hessian", "GaussNewton", "FunctionalHessian")


def plan(*, quick: bool) -> list[dict[str, Any]]:
    """The runs: (model, operator, columns, budget)."""
    if quick:
        model = "GPT, vocabulary 8000"
        return [{"model": model, "operator": "GaussNewton", "columns": 1, "budget_mb": 100}]
    runs = [
        {"model": model, "operator": operator, "columns": 1, "budget_mb": budget}
        for model in MODELS
        for operator in OPERATORS
        for budget in BUDGETS_MB
    ]
    model = "GPT 1.06 M"
    runs += [
        {"model": model, "operator": "Hessian", "columns": 8, "budget_mb": b} for b in (400, 1000)
    ]
    return runs


def measure(run: dict[str, Any]) -> dict[str, Any]:
    """In this process: the peak of two passes, and how the data were cut and kept."""
    import torch

    import curvatlas as ca

    torch.set_num_threads(1)
    problem = _problem(*MODELS[run["model"]])
    operator = getattr(ca, run["operator"])(problem, budget=run["budget_mb"] * MB)
    right = torch.randn(problem.size, run["columns"])
    _warm_up(run["operator"])
    before = settled()
    for _ in range(2):
        operator @ right
    peak = peak_bytes() - before
    return {**run, "parameters": problem.size, "peak_mb": round(peak / MB, 1)}


def measure_growth(products: int) -> dict[str, Any]:
    """In this process: resident memory after ``products`` products minus after a tenth of them."""
    import torch

    import curvatlas as ca

    torch.set_num_threads(1)
    problem = _problem(100, 16, 32, 2, 4, 2)
    right, growth = torch.randn(problem.size), {}
    for name, budget in (("kept graphs", 10**9), ("graphs built anew", 4 * MB)):
        operator = ca.Hessian(problem, budget=budget)
        for turn in range(products):
            operator @ right
            if turn == products // 10:
                early = settled()
        growth[name] = round((settled() - early) / MB, 2)
    return {"products": products, "growth_mb": growth}


def _problem(
    vocabulary: int, context: int, width: int, layers: int, samples: int, batches: int
) -> Any:
    import torch

    import curvatlas as ca
    from curvatlas.zoo.models import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=vocabulary, context=context, d_model=width, n_layers=layers))
    tokens = [torch.randint(0, vocabulary, (samples, context + 1)) for _ in range(batches)]
    data = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
    return ca.Problem(model, "cross_entropy", data)


def _warm_up(operator: str) -> None:
    """What torch loads on first use is no part of a product's memory."""
    import torch

    import curvatlas as ca

    small = _problem(20, 8, 16, 1, 1, 1)
    getattr(ca, operator)(small) @ torch.randn(small.size)


def _child(task: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"memory: {task} failed: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one run; nothing is kept")
    parser.add_argument("--results", type=Path, help="folder to keep the numbers in")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        task = json.loads(options.child)
        print(json.dumps(measure_growth(**task) if "products" in task else measure(task)))
        return 0
    rows = []
    for run in plan(quick=options.quick):
        row = _child(run)
        rows.append(row)
        print(
            f"{row['model']:22s} {row['operator']:18s} ×{row['columns']}  budget "
            f"{row['budget_mb']:5d} MB  peak {row['peak_mb']:7.1f} MB",
            flush=True,
        )
    growth = _child({"products": 20 if options.quick else 200})
    print(f"growth over {growth['products']} products: {growth['growth_mb']} MB")
    share = max(row["peak_mb"] / row["budget_mb"] for row in rows)
    worst = max(growth["growth_mb"].values())
    lines = [
        requirement("largest peak, of the budget", round(share, 3), 1.0),
        requirement(f"growth over {growth['products']} products, MB", worst, 2.0),
    ]
    if options.results or not options.quick:
        content = {"requirements": lines, "rows": rows, "growth": growth}
        print(f"kept in {keep('memory', content, folder=options.results or RESULTS).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
