"""The race: training loss at equal processor time and at equal steps, everyone tuned alike.

    python benchmarks/optimizers.py [digits fashion gpt gpt-1m] [--notes FILE] [--only NAME]

Each contestant's rate and momentum are searched by factors of two until both neighbours of the
best are worse, on a tenth of the training samples kept apart for this and on seeds of their own.
The verdict is the mean validation loss of five other seeds. A step's cost is measured in turn with
AdamW's on one thread, products of curvature included, and everyone gets as many steps as AdamW's
time allows; beside it the same with AdamW's number of steps. CurvatureAwareOptimizer also runs with
all of its defaults over a grid of rates, on the five seeds: over which span does it stay within 3 %
of its own tuned loss? Every finished run is noted, so that a stopped race goes on where it was, and
parts of it (--only) may run side by side. Settings that are not named keep their last numbers.
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
    OURS,
    Losses,
    Notebook,
    Racer,
    Setting,
    Tuned,
    race,
    racers,
    settings,
    step_cost,
    tune,
)
from harness.results import RESULTS, keep, requirement

SEEDS = (0, 1, 2, 3, 4)
RATES = (1.6e-2, 3.2e-2, 6.4e-2, 0.2, 0.64)  # of ours, at the default settings
NEAR = 1.03  # of its own tuned loss
DIVERGED = 100.0  # a loss: guessing has 2.3 to 4.4
SPAN = 10.0  # in rate, over which ours must stay that near


class Race:
    """One setting's runs, by contestant; every number is in the notes as soon as it is known."""

    def __init__(self, setting: Setting, notes: Notebook, *, quick: bool, pairs: int) -> None:
        self.setting, self.notes = setting, notes
        self.horizon = 20 if quick else setting.steps
        self.rounds, self.most = (1, 2) if quick else (3 if setting.steps < 100 else 8, pairs)
        self.contestants = {racer.name: racer for racer in racers()}

    def run(self, racer: Racer, rate: float, momentum: float, **how: Any) -> Losses:
        key = f"{self.setting.name}: {racer.name} at {rate:g}, {momentum:g}, {how}"
        losses: Losses = self.notes.once(
            key, lambda: race(self.setting, racer, rate, momentum, **how)
        )
        return {samples: x if x < DIVERGED else math.inf for samples, x in losses.items()}

    def steps(self, racer: Racer) -> tuple[float, int]:
        """What a step costs over AdamW's, and how many fit into AdamW's time."""
        adamw = self.contestants["AdamW"]
        cost: float = 1.0
        if racer is not adamw:
            cost = self.notes.once(
                f"{self.setting.name}: cost of {racer.name}",
                lambda: step_cost(self.setting, adamw, racer, rounds=self.rounds),
            )
        return cost, max(2, round(self.horizon / cost))

    def tuned(self, racer: Racer, steps: int) -> Tuned:
        def loss(rate: float, momentum: float) -> float:
            return statistics.mean(
                self.run(racer, rate, momentum, steps=steps, seed=seed)["tuning"]
                for seed in self.setting.tuning_seeds
            )

        return tune(racer, loss, most=self.most)

    def finals(self, racer: Racer, rate: float, momentum: float, steps: int) -> list[float]:
        return [
            self.run(racer, rate, momentum, steps=steps, seed=seed)["validation"] for seed in SEEDS
        ]

    def row(self, racer: Racer) -> dict[str, Any]:
        """Cost, tuning, five seeds at equal time and five at equal steps."""
        cost, steps = self.steps(racer)
        best = self.tuned(racer, steps)
        timed = self.finals(racer, best.rate, best.momentum, steps)
        stepped = self.finals(racer, best.rate, best.momentum, self.horizon)
        return {
            "setting": self.setting.name,
            "optimizer": racer.name,
            "rate": best.rate,
            "momentum": best.momentum,
            "inside_the_grid": best.inside,
            "pairs_tried": len(best.tried),
            "step_cost": round(cost, 3),
            "steps": steps,
            **_summary(timed),
            "loss_at_equal_steps": _summary(stepped)["validation_loss"],
            "error_at_equal_steps": _summary(stepped)["standard_error"],
        }

    def insensitivity(self) -> list[dict[str, Any]]:
        """Ours with all of its defaults, over rates."""
        racer = self.contestants[OURS]
        _, steps = self.steps(racer)
        return [
            {
                "setting": self.setting.name,
                "rate": rate,
                **_summary(self.finals(racer, rate, racer.momentum, steps)),
            }
            for rate in RATES
        ]


def _summary(losses: list[float]) -> dict[str, Any]:
    mean = statistics.mean(losses)
    error = statistics.stdev(losses) / math.sqrt(len(losses)) if math.isfinite(mean) else math.inf
    return {
        "validation_loss": round(mean, 4) if math.isfinite(mean) else "diverged",
        "standard_error": round(error, 4) if math.isfinite(error) else "diverged",
        "seeds": ", ".join(f"{x:.4g}" if math.isfinite(x) else "diverged" for x in losses),
    }


def _loss(row: dict[str, Any], key: str = "validation_loss") -> float:
    return math.inf if row[key] == "diverged" else float(row[key])


def behind(rows: list[dict[str, Any]]) -> float:
    """How far ours is behind the first of a setting, in standard errors of the difference."""
    first = min(rows, key=_loss)
    ours = next(row for row in rows if row["optimizer"] == OURS)
    error = math.hypot(_loss(ours, "standard_error"), _loss(first, "standard_error"))
    return 0.0 if ours is first else (_loss(ours) - _loss(first)) / error


def span(rows: list[dict[str, Any]], tuned: float) -> float:
    """The largest ratio of two rates between which every rate tried is near the tuned loss."""
    best, low = 1.0, None
    for row in sorted(rows, key=lambda row: row["rate"]):
        if _loss(row) > NEAR * tuned:
            low = None
            continue
        low = row["rate"] if low is None else low
        best = max(best, row["rate"] / low)
    return best


def measure(race: Race) -> dict[str, Any]:
    """Everything of one setting."""
    rows = []
    for racer in race.contestants.values():
        rows.append(race.row(racer))
        _tell(rows[-1])
    rates = race.insensitivity()
    for row in rates:
        _tell(row)
    own = _loss(next(row for row in rows if row["optimizer"] == OURS))
    own = min(own, *map(_loss, rates))  # its own tuned loss, whichever search found it
    rows.sort(key=_loss)
    return {
        "rows": rows,
        "rates": rates,
        "behind_the_first": round(behind(rows), 2),
        "span_of_rates": round(span(rates, own), 2),
    }


def _tell(row: dict[str, Any]) -> None:
    print("  " + ", ".join(f"{key} {value}" for key, value in row.items()), file=sys.stderr)


def _requirements(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    lost = [name for name, result in found.items() if result["behind_the_first"] > 1]
    lines = [
        requirement(
            f"settings of {len(found)} on which ours is more than one standard error behind the "
            "first at equal time",
            len(lost),
            1,
        )
    ]
    for result in found.values():
        name = result["rows"][0]["setting"]
        short = round(SPAN / result["span_of_rates"], 3)
        lines.append(requirement(f"a factor of ten over ours within 3 %, {name}", short, 1.0))
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = settings()
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=", ".join(known))
    parser.add_argument("--quick", action="store_true", help="a few steps, nothing is kept")
    parser.add_argument("--notes", type=Path, help="file of finished runs, to go on where it was")
    parser.add_argument("--pairs", type=int, default=24, help="most pairs tried by a contestant")
    parser.add_argument("--only", action="append", help="run this contestant and note it")
    parser.add_argument("--costs", action="store_true", help="measure and note the costs only")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    path = RESULTS / "optimizers.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["settings"] if path.exists() else {}
    found: dict[str, dict[str, Any]] = {}
    if not options.quick:  # results of the race as it was before have no rates
        found = {name: result for name, result in kept.items() if "rates" in result}
    for name in options.settings or known:
        try:
            setting = known[name]()
        except FileNotFoundError as error:
            print(f"  {name} is left out: {error}", file=sys.stderr)
            continue
        started = Race(setting, Notebook(options.notes), quick=options.quick, pairs=options.pairs)
        if options.costs or options.only:
            for contestant in options.only or started.contestants:
                racer = started.contestants[contestant]
                cost, steps = started.steps(racer)
                print(f"  {name}: {contestant} costs {cost:.3f}, {steps} steps", file=sys.stderr)
                if not options.costs:
                    _tell(started.row(racer))
            continue
        found[name] = measure(started)
        if not options.quick:
            _keep(found)
    return 0


def _keep(found: dict[str, dict[str, Any]]) -> None:
    tables = {
        key: [row for result in found.values() for row in result[key]] for key in ("rows", "rates")
    }
    keep("optimizers", {"requirements": _requirements(found), **tables, "settings": found})


if __name__ == "__main__":
    sys.exit(main())
