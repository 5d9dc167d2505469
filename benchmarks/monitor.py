"""What the training monitor costs, and that the weights are the same with it and without it.

    python benchmarks/monitor.py [--quick]

A GPT of 32 k parameters on characters, AdamW, one thread. Runs without the monitor and with it at
each budget take turns. Three readings: the share of a run's wall time that goes into the monitor,
which is what the budget limits; the same share of its processor time, which other work on the
machine changes less; and the whole run's processor time over that of the run without, which also
counts what the monitor leaves behind (cold caches).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import curvatlas as ca
from curvatlas import zoo
from harness.results import keep, requirement

BUDGETS = (0.05, 0.2)


@dataclass(frozen=True)
class Run:
    """One training run: its last weights, its processor time, the shares inside the monitor."""

    weights: Tensor
    seconds: float
    share: float  # of the processor time
    wall_share: float
    monitor: ca.Monitor | None


def train(steps: int, budget: float | None, *, samples: int) -> Run:
    """One run; without a budget no monitor."""
    data = zoo.text(level="character", context=64)
    model = zoo.reference_gpt(vocabulary=data.classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    inside, began = [0.0, 0.0], _clocks()
    monitor = None
    if budget is not None:
        monitor = ca.Monitor(
            model, "cross_entropy", tuple(data.train.take(samples)), every=10, budget=budget,
            optimizer=optimizer, max_products=12, density_products=6,
        )  # fmt: skip
        inside = _since(began)
    for _ in range(steps):
        chosen = torch.randint(0, data.train.size, (16,), generator=generator)
        optimizer.zero_grad()
        logits = model(data.train.inputs[chosen])
        F.cross_entropy(logits.flatten(0, 1), data.train.targets[chosen].flatten()).backward()
        optimizer.step()
        if monitor is not None:
            before = _clocks()
            monitor.step()
            inside = [a + b for a, b in zip(inside, _since(before), strict=True)]
    processor, wall = _since(began)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return Run(weights, processor, inside[0] / processor, inside[1] / wall, monitor)


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _since(before: tuple[float, float]) -> list[float]:
    return [now - then for now, then in zip(_clocks(), before, strict=True)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 steps, nothing is kept")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    steps, samples, rounds = (20, 2, 1) if options.quick else (2000, 2, 1)
    bare: list[Run] = []
    watched: dict[float, list[Run]] = {budget: [] for budget in BUDGETS}
    for _ in range(rounds):
        bare.append(train(steps, None, samples=samples))
        for budget, runs in watched.items():
            runs.append(train(steps, budget, samples=samples))
            print(
                f"  {budget:.0%}: {runs[-1].wall_share:.4f}, {runs[-1].share:.4f}", file=sys.stderr
            )
    rows, requirements = [], []
    for budget, runs in watched.items():
        monitors = [run.monitor for run in runs if run.monitor is not None]
        ratios = [run.seconds / without.seconds for run, without in zip(runs, bare, strict=True)]
        rows.append(
            {
                "budget": budget,
                "steps": steps,
                "rounds": rounds,
                "snapshots": ", ".join(str(len(monitor.snapshots)) for monitor in monitors),
                "skipped": ", ".join(str(monitor.skipped) for monitor in monitors),
                "products_a_snapshot": monitors[-1].snapshots[-1].products,
                "largest_share_of_wall_time": round(max(run.wall_share for run in runs), 4),
                "largest_share_of_processor_time": round(max(run.share for run in runs), 4),
                "time_over_a_run_without": round(statistics.median(ratios), 3),
                "same_weights_as_without": all(
                    torch.equal(run.weights, bare[0].weights) for run in runs
                ),
            }
        )
        print("  " + ", ".join(f"{k} {v}" for k, v in rows[-1].items()), file=sys.stderr)
        name = f"largest share of wall time at a budget of {budget:.0%}"
        requirements.append(requirement(name, rows[-1]["largest_share_of_wall_time"], budget))
    changed = sum(not row["same_weights_as_without"] for row in rows)
    requirements.append(requirement("budgets at which the monitor changed the weights", changed, 0))
    if not options.quick:
        keep("monitor", {"requirements": requirements, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
