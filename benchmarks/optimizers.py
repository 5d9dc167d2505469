"""Training against AdamW and second-order peers: loss at equal processor time, and wrong rates.

    python benchmarks/optimizers.py [digits gpt fashion] [--quick]

Every contestant tries six rates (factors of two) with one seed on the same processor time. The
best is the one with the lowest loss on a tenth of the training samples kept apart for this; the
verdict is the mean validation loss of five other seeds at that rate. A step's cost is measured
with the contestants in turn on one thread, and each gets as many steps as AdamW's time allows.
CurvatureAwareOptimizer also trains with a part of that time, at the same rate: the smallest part
with which it still reaches AdamW's loss is what counts. Settings that are not named keep their last
numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from harness.racing import (
    Losses,
    Notebook,
    Racer,
    Setting,
    race,
    racers,
    settings,
    step_costs,
)
from harness.results import RESULTS, keep, requirement

TUNING_SEED, SEEDS = 10, (0, 1, 2, 3, 4)
PARTS = (0.5, 0.65, 0.8)  # of AdamW's time
OURS = "CurvatureAwareOptimizer"
SGD = Racer("SGD", lambda m, lr: torch.optim.SGD(m.parameters(), lr, momentum=0.9), (0.1,))


def measure(setting: Setting, notes: Notebook, *, quick: bool) -> dict[str, Any]:
    """One setting: costs, tuning, five seeds, parts of the time, wrong rates."""
    contestants = racers()
    scale = 0.02 if quick else 1.0
    rounds = 1 if quick else 25
    costs = notes.once(
        f"{setting.name}: costs", lambda: step_costs(setting, contestants, rounds=rounds)
    )

    def run(racer: Racer, rate: float, *, steps: int, seed: int) -> Losses:
        return _noted(notes, setting, racer, rate, steps=steps, seed=seed, schedule=True)

    horizon = max(2, int(setting.steps * scale))
    rows, losses, best = [], {}, {}
    for racer in contestants:
        steps = max(2, int(horizon / costs[racer.name]))
        tried = {r: run(racer, r, steps=steps, seed=TUNING_SEED)["tuning"] for r in racer.rates}
        rate = min(tried, key=lambda r: tried[r])
        best[racer.name] = rate
        losses[racer.name] = [run(racer, rate, steps=steps, seed=s)["validation"] for s in SEEDS]
        rows.append(
            {
                "setting": setting.name,
                "optimizer": racer.name,
                "rate": rate,
                "rates_tried": f"{racer.rates[0]:g} … {racer.rates[-1]:g}",
                "inside_the_grid": racer.rates[0] < rate < racer.rates[-1],
                "step_cost": round(costs[racer.name], 3),
                "steps": steps,
                **_summary(losses[racer.name]),
            }
        )
        if steps != horizon:
            found = [run(racer, rate, steps=horizon, seed=s)["validation"] for s in SEEDS]
            rows[-1]["loss_at_equal_steps"] = _summary(found)["validation_loss"]
        within = [r for r, loss in tried.items() if loss <= 1.03 * tried[rate]]
        rows[-1]["rates_within_3_percent"] = f"{min(within):g} … {max(within):g}"
        _tell(rows[-1])
    ours = next(racer for racer in contestants if racer.name == OURS)
    target, parts, reached = statistics.mean(losses["AdamW"]), [], None
    for part in PARTS:
        steps = max(2, int(part * horizon / costs[OURS]))
        found = [run(ours, best[OURS], steps=steps, seed=s)["validation"] for s in SEEDS]
        parts.append(
            {
                "setting": setting.name,
                "part_of_adamw_time": part,
                "steps": steps,
                "adamw_loss": round(target, 4),
                **_summary(found),
            }
        )
        _tell(parts[-1])
        if reached is None and statistics.mean(found) <= target:
            reached = part
    if reached is None and statistics.mean(losses[OURS]) <= target:
        reached = 1.0
    wrong = _wrong_rates(setting, notes, ours, contestants[0], steps=max(2, int(150 * scale)))
    return {"rows": rows, "parts": parts, "wrong_rates": wrong, "reached": reached}


def _noted(notes: Notebook, setting: Setting, racer: Racer, rate: float, **how: Any) -> Losses:
    key = f"{setting.name}: {racer.name} at {rate:g}, {how}"
    losses: Losses = notes.once(key, lambda: race(setting, racer, rate, **how))
    return losses


def _wrong_rates(
    setting: Setting, notes: Notebook, ours: Racer, adamw: Racer, *, steps: int
) -> list[dict[str, Any]]:
    """Five times the largest constant rate with which AdamW and SGD still learn."""
    untrained = setting.losses(setting.model(SEEDS[0]))["validation"]

    def run(racer: Racer, rate: float, seed: int) -> float:
        how = {"steps": steps, "seed": seed, "schedule": False}
        return _noted(notes, setting, racer, rate, **how)["validation"]

    rows = []
    for racer, start in ((adamw, 8e-3), (SGD, 0.05)):
        rate, largest = start, None
        while largest is None or rate == 2 * largest:
            if not run(racer, rate, SEEDS[0]) < 0.8 * untrained:
                break
            largest, rate = rate, 2 * rate
        if largest is None:
            continue
        for other in (racer, ours):
            found = [run(other, 5 * largest, seed) for seed in SEEDS]
            rows.append(
                {
                    "setting": setting.name,
                    "rate": f"5 × {racer.name}'s largest, {5 * largest:g}",
                    "optimizer": other.name,
                    "untrained": round(untrained, 4),
                    **_summary(found),
                    "learns": bool(max(found) < 0.8 * untrained),
                }
            )
            _tell(rows[-1])
    return rows


def _summary(losses: list[float]) -> dict[str, Any]:
    told = [round(x, 4) if math.isfinite(x) else "diverged" for x in losses]
    mean = statistics.mean(losses)
    return {
        "validation_loss": round(mean, 4) if math.isfinite(mean) else "diverged",
        "seeds": ", ".join(str(x) for x in told),
    }


def _tell(row: dict[str, Any]) -> None:
    print("  " + ", ".join(f"{key} {value}" for key, value in row.items()), file=sys.stderr)


def _requirements(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for result in found.values():
        name = result["rows"][0]["setting"]
        lines.append(
            requirement(f"part of AdamW's time to its loss, {name}", result["reached"], 0.8)
        )
        loss = {row["optimizer"]: row["validation_loss"] for row in result["rows"]}
        peers = [v for k, v in loss.items() if k not in ("AdamW", OURS) and v != "diverged"]
        if peers:
            ratio = round(loss[OURS] / min(peers), 4)
            lines.append(requirement(f"loss over the best second-order peer's, {name}", ratio, 1.0))
        lost = [r for r in result["wrong_rates"] if r["optimizer"] == OURS and not r["learns"]]
        lines.append(requirement(f"wrong rates not survived, {name}", len(lost), 0))
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = settings()
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=", ".join(known))
    parser.add_argument("--quick", action="store_true", help="a few steps, nothing is kept")
    parser.add_argument("--notes", type=Path, help="file of finished runs, to go on where it was")
    options = parser.parse_args(argv)
    notes = Notebook(options.notes)
    torch.set_num_threads(1)
    path = RESULTS / "optimizers.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["settings"] if path.exists() else {}
    found: dict[str, dict[str, Any]] = {} if options.quick else dict(kept)
    for name in options.settings or known:
        try:
            setting = known[name]()
        except FileNotFoundError as error:
            print(f"  {name} is left out: {error}", file=sys.stderr)
            continue
        found[name] = measure(setting, notes, quick=options.quick)
        if not options.quick:
            _keep(found)
    return 0


def _keep(found: dict[str, dict[str, Any]]) -> None:
    tables = {
        key: [row for result in found.values() for row in result[key]]
        for key in ("rows", "parts", "wrong_rates")
    }
    keep("optimizers", {"requirements": _requirements(found), **tables, "settings": found})


if __name__ == "__main__":
    sys.exit(main())
