"""What the training monitor costs, and that the weights are the same with it and without it.

    python benchmarks/monitor.py [--quick]

A GPT of 32 k parameters on characters, AdamW, one thread. The share of the processor time that goes
into ``Monitor.step`` is measured inside one run, so that a busy machine cannot change it.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F

import curvatlas as ca
from curvatlas import zoo
from harness.results import keep, requirement

BUDGETS = (0.05, 0.2)


def train(steps: int, budget: float | None, *, samples: int) -> dict[str, Any]:
    """One run; without a budget no monitor."""
    data = zoo.text(level="character", context=64)
    model = zoo.reference_gpt(vocabulary=data.classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
    monitor = None
    if budget is not None:
        monitor = ca.Monitor(
            model, "cross_entropy", tuple(data.train.take(samples)), every=10, budget=budget,
            optimizer=optimizer, max_products=20, density_products=8,
        )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    inside, began = 0.0, time.process_time()
    for _ in range(steps):
        chosen = torch.randint(0, data.train.size, (16,), generator=generator)
        optimizer.zero_grad()
        logits = model(data.train.inputs[chosen])
        F.cross_entropy(logits.flatten(0, 1), data.train.targets[chosen].flatten()).backward()
        optimizer.step()
        if monitor is not None:
            before = time.process_time()
            monitor.step()
            inside += time.process_time() - before
    total = time.process_time() - began
    return {
        "weights": torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
        "share": inside / total,
        "monitor": monitor,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 steps, nothing is kept")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    steps, samples = (20, 2) if options.quick else (1500, 4)
    bare = train(steps, None, samples=samples)
    rows, requirements = [], []
    for budget in BUDGETS:
        run = train(steps, budget, samples=samples)
        monitor = run["monitor"]
        rows.append(
            {
                "budget": budget,
                "steps": steps,
                "snapshots": len(monitor.snapshots),
                "skipped": monitor.skipped,
                "share_of_processor_time": round(run["share"], 4),
                "products_a_snapshot": monitor.snapshots[-1].products,
                "same_weights_as_without": bool(torch.equal(run["weights"], bare["weights"])),
            }
        )
        print("  " + ", ".join(f"{k} {v}" for k, v in rows[-1].items()), file=sys.stderr)
        name = f"share of processor time at a budget of {budget:.0%}"
        requirements.append(requirement(name, rows[-1]["share_of_processor_time"], budget))
    changed = sum(not row["same_weights_as_without"] for row in rows)
    requirements.append(requirement("runs whose weights the monitor changed", changed, 0))
    if not options.quick:
        keep("monitor", {"requirements": requirements, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
