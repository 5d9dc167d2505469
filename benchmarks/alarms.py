"""Alarms of the monitor: how many in healthy runs, and how long before a loss doubles.

    python benchmarks/alarms.py [--quick] [--part 1/2] [--notes FILE]

Healthy runs: a ViT on digits and a GPT on characters, SGD with momentum, AdamW and Muon (AdamW for
what is no matrix), drawn batches, five schedules: warm-up over 20 steps and a constant rate, cosine
decay, warm-up over 80 steps, cosine with a restart, and a quarter of the rate that is doubled on
the way, a rise that does no harm.
Divergences, in full batches so that curvature and not the draw makes them: after 60 healthy steps,
with the rate rising to 3, 5 or 10 times over 100 steps, or with one batch of inputs ten times too
large and wrong labels; and from the first step, at 10 times the rate, without normalisation (the
rate rising over 100 steps) or without warm-up. A divergence is a loss on the monitor's samples (the
median of five steps, which a single spike does not move) twice its lowest so far; a run whose loss
never doubles is told and not counted. The monitor measures every five steps without a limit of time
and is told the training loss.

A run without a fault is healthy if its loss (that median) never stands half above its lowest so
far; one that goes off by itself is told and not counted, and the alarms of all runs whose loss did
not double are told as well.

The alarms are judged for the fourth time; every set of seeds was fixed before it was run, and after
it the rules were mended, on seeds other than those of the next. Seeds 100 to 105: three false
alarms in 30 runs, after which slow rises of the rate were left out. 200 to 205: two, after which a
rate that comes back to where it was became no news. 300 to 305: two, three runs of one seed that
alarmed before their fault, and 31 of 34 divergences told in time. One false alarm was a restart
whose curvature stood beyond the edge for one snapshot, the other a run that went from a loss of
1.60 to 2.79 by itself and did not come back, which the definition of a healthy run had not
foreseen. After that jumps of the loss are told from twice instead of 1.5 times on, and a loss that
stays up from 1.5 instead of 1.25 times on. The seeds here are 400 to 405.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvatlas as ca
from curvatlas import zoo
from curvatlas.anatomy import anatomy_of
from curvatlas.fits import share_interval
from curvatlas.training import Event
from harness.racing import Notebook
from harness.results import keep, requirement

MODELS, OPTIMIZERS = ("ViT", "GPT"), ("SGD", "AdamW", "Muon")
RATES = {"SGD": 0.1, "AdamW": 8e-3, "Muon": 0.02}
SCHEDULES = ("constant", "cosine", "long warm-up", "restart", "raised")
WARM_UP, LONG, HEALTHY, STEPS, RAMP, EVERY = 20, 80, 60, 180, 100, 5
LEAD = 10
WENT_OFF = 1.5  # times the lowest loss so far: such a run is not healthy


@dataclass(frozen=True)
class Case:
    """One run; fault: what is done to it, factor: how much of it."""

    model: str
    optimizer: str
    seed: int
    schedule: str = "constant"
    fault: str = "none"
    factor: float = 1.0

    @property
    def begins(self) -> int:
        """The step from which the fault acts."""
        return HEALTHY if self.fault in ("rate", "batch") else 0


def healthy() -> list[Case]:
    kinds = itertools.product(MODELS, OPTIMIZERS, SCHEDULES)
    return [Case(m, o, 400, schedule) for m, o, schedule in kinds]


def divergent() -> list[Case]:
    faults = [
        *(("rate", factor, seed) for factor in (10.0, 5.0, 3.0) for seed in (401, 402)),
        ("no norm", 10.0, 403),
        ("no warm-up", 10.0, 404),
        ("batch", 10.0, 405),
    ]
    pairs = list(itertools.product(MODELS, OPTIMIZERS))
    return [
        Case(m, o, seed, fault=fault, factor=factor)
        for fault, factor, seed in faults
        for m, o in pairs
    ]


@dataclass(frozen=True)
class Setting:
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    classes: int
    batch_size: int
    watched: int  # samples of the monitor


def setting(case: Case) -> Setting:
    sampled = case.fault == "none"
    if case.model == "ViT":
        digits = zoo.digits(seed=3)
        vit = zoo.reference_vit(seed=case.seed, norm_first=True)
        made = Setting(
            vit,
            *digits.train.take(512 if sampled else 64),
            digits.classes,
            64,
            48 if sampled else 64,
        )
    else:
        text = zoo.text(level="character", context=32)
        sizes = {"context": 32, "d_model": 16, "n_layers": 1, "n_heads": 2}
        gpt = zoo.reference_gpt(seed=case.seed, vocabulary=text.classes, **sizes)
        made = Setting(
            gpt, *text.train.take(48 if sampled else 12), text.classes, 12, 8 if sampled else 12
        )
    if case.fault == "no norm":
        for module in list(made.model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.LayerNorm):
                    setattr(module, name, nn.Identity())
    return made


def optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    rate = RATES[name]
    if name == "SGD":
        return [torch.optim.SGD(model.parameters(), rate, momentum=0.9)]
    if name == "AdamW":
        return [torch.optim.AdamW(model.parameters(), rate)]
    pieces = {piece.parameter: piece.sublayer for piece in anatomy_of(model).slices}
    matrices, others = [], []
    for label, parameter in model.named_parameters():
        inside = parameter.ndim == 2 and pieces.get(label) not in ("embedding", "head")
        (matrices if inside else others).append(parameter)
    return [torch.optim.Muon(matrices, rate), torch.optim.AdamW(others, RATES["AdamW"])]


def factor_at(case: Case, step: int, steps: int) -> float:
    """The rate's factor: warm-up, decay, and the fault."""
    if case.fault == "no warm-up":
        return case.factor
    factor = min(1.0, (step + 1) / (LONG if case.schedule == "long warm-up" else WARM_UP))
    if case.schedule in ("cosine", "restart"):
        period = steps if case.schedule == "cosine" else steps / 2
        factor *= 0.5 * (1 + math.cos(math.pi * (step % period) / period))
    if case.schedule == "raised":
        factor *= 0.25 * (1 + min(1.0, max(0.0, (step + 1 - HEALTHY) / RAMP)))
    if case.fault == "no norm":
        factor = case.factor * min(1.0, (step + 1) / (RAMP))
    if case.fault == "rate" and step >= HEALTHY:
        factor *= 1 + (case.factor - 1) * min(1.0, (step + 1 - HEALTHY) / RAMP)
    return factor


def batches(case: Case, made: Setting) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + case.seed)
    for step in itertools.count():
        chosen = torch.arange(made.batch_size)  # all of them in a divergence
        if len(made.inputs) > made.batch_size:
            chosen = torch.randint(0, len(made.inputs), (made.batch_size,), generator=generator)
        x, y = made.inputs[chosen], made.targets[chosen]
        wrong = torch.randint(0, made.classes, y.shape, generator=generator)
        if case.fault == "batch" and step == HEALTHY:
            x, y = (x * case.factor if x.is_floating_point() else x), wrong
        yield x, y


def run(case: Case, *, steps: int) -> tuple[list[float], ca.Monitor]:
    """Losses on the monitor's samples after every step, and the monitor."""
    made = setting(case)
    model, watched = made.model, (made.inputs[: made.watched], made.targets[: made.watched])
    movers = optimizers(case.optimizer, model)
    rates = [[group["lr"] for group in mover.param_groups] for mover in movers]
    monitor = ca.Monitor(
        model, "cross_entropy", watched, every=EVERY, budget=1.0, optimizer=movers, eigenvalues=1,
        density_products=2, probes=2,
    )  # fmt: skip
    since = max(0, case.begins - 8 * EVERY)
    losses = []
    for step, (x, y) in zip(range(steps), batches(case, made), strict=False):
        for mover, own in zip(movers, rates, strict=True):
            mover.zero_grad()
            for group, rate in zip(mover.param_groups, own, strict=True):
                group["lr"] = rate * factor_at(case, step, steps)
        value = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        value.backward()
        for mover in movers:
            mover.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(watched[0]).flatten(0, -2), watched[1].flatten())
        losses.append(float(loss))
        if step >= since:
            monitor.step(step=step, loss=value)
        at = doubled(losses, case.begins) if case.fault != "none" else None
        if not math.isfinite(losses[-1]) or (at is not None and step >= at + 2 * EVERY):
            break
    return losses, monitor


def doubled(losses: list[float], begins: int) -> int | None:
    """The first step after the fault with twice the lowest loss so far, medians of five."""
    lowest = math.inf
    for step in range(4, len(losses)):
        loss = statistics.median(losses[step - 4 : step + 1])
        if step > begins and not loss < 2 * lowest:
            return step
        lowest = min(lowest, loss)
    return None if math.isfinite(losses[-1]) else len(losses) - 1


def largest_rise(losses: list[float]) -> float:
    """The largest loss over the lowest one before it, medians of five."""
    lowest, largest = math.inf, 0.0
    for step in range(4, len(losses)):
        loss = statistics.median(losses[step - 4 : step + 1])
        largest = max(largest, loss / lowest)
        lowest = min(lowest, loss)
    return largest if math.isfinite(losses[-1]) else math.inf


def watch(case: Case, *, steps: int) -> dict[str, Any]:
    """What happened in one run, in plain numbers."""
    losses, monitor = run(case, steps=steps)
    return row(case, losses, monitor.snapshots, monitor.events)


def row(
    case: Case, losses: list[float], snapshots: list[ca.Snapshot], events: list[Event]
) -> dict[str, Any]:
    """One line of the tables."""
    alarms = [event for event in events if event.alarm]
    at = doubled(losses, case.begins)
    first = next((e for e in alarms if e.step >= case.begins), None)
    rise = largest_rise(losses)
    ratios = [s.edge_ratio for s in snapshots if s.step >= 10 and s.edge_ratio is not None]
    return {
        **asdict(case),
        "steps": len(losses),
        "lowest_loss": round(min(losses), 4),
        "last_loss": round(losses[-1], 4) if math.isfinite(losses[-1]) else "not finite",
        "largest_edge_ratio": round(max(ratios, default=math.nan), 2),
        "doubled_at": at,
        "largest_rise": round(rise, 2) if math.isfinite(rise) else "not finite",
        "first_alarm": None if first is None else f"{first.step}: {first.name}",
        "lead": None if first is None or at is None else at - first.step,
        "early_alarms": sum(e.step < case.begins for e in alarms),
        "alarms": ", ".join(f"{e.step}: {e.name}" for e in alarms),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, nothing is kept")
    parser.add_argument("--part", default="1/1", help="k/n: every n-th run only, nothing is kept")
    parser.add_argument("--notes", type=Path, help="file of finished runs, to go on where it was")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    notes = Notebook(options.notes)
    steps = 12 if options.quick else STEPS
    place, parts = (int(x) for x in options.part.split("/"))
    chosen = slice(place - 1, None, parts * (8 if options.quick else 1))

    def noted(case: Case, length: int) -> dict[str, Any]:
        line: dict[str, Any] = notes.once(str(case), lambda: watch(case, steps=length))
        print("  " + ", ".join(f"{k} {v}" for k, v in line.items()), file=sys.stderr, flush=True)
        return line

    calm = [noted(case, min(steps, 160)) for case in healthy()[chosen]]
    faults = [noted(case, steps) for case in divergent()[chosen]]
    if not options.quick and parts == 1:
        _keep(calm, faults)
    return 0


def _keep(calm: list[dict[str, Any]], faults: list[dict[str, Any]]) -> None:
    healthy_runs = [row for row in calm if _stayed(row)]
    not_doubled = [row for row in calm if row["doubled_at"] is None]
    counted = [row for row in faults if row["doubled_at"] is not None]
    false = sum(bool(row["alarms"]) for row in healthy_runs)
    early = sum(row["early_alarms"] > 0 for row in faults)
    warned = sum(row["lead"] is not None and row["lead"] >= LEAD for row in counted)
    kinds = sorted({event.split(": ")[1] for row in healthy_runs for event in _listed(row)})
    requirements = [
        requirement(f"false alarms in {len(healthy_runs)} healthy runs", false, 0),
        requirement(f"alarms before the fault in {len(faults)} runs", early, 0),
        requirement(
            f"share of {len(counted)} divergences without an alarm {LEAD} steps ahead",
            round(1 - warned / max(1, len(counted)), 3), 0.2,
        ),
    ]  # fmt: skip
    summary = {
        "healthy_runs": len(healthy_runs),
        "runs_with_a_false_alarm": false,
        "went_off_by_themselves": len(calm) - len(healthy_runs),
        "alarms_where_the_loss_did_not_double": {
            "runs": len(not_doubled),
            "alarmed": sum(bool(row["alarms"]) for row in not_doubled),
        },
        "false_alarms": {
            kind: sum(any(kind in event for event in _listed(row)) for row in healthy_runs)
            for kind in kinds
        },
        "false_alarm_rate_interval": _rounded(share_interval(false, len(healthy_runs))),
        "divergences": len(counted),
        "warned_in_time": warned,
        "warned_in_time_interval": _rounded(share_interval(warned, len(counted))),
        "faults_that_did_not_double": len(faults) - len(counted),
        "how_the_rules_were_set": "This is the fourth judgement, on seeds that nothing was set "
        "on. On the three sets before it 3, 2 and 2 of 30 runs without a fault raised an alarm, "
        "each time the rules were mended on seeds other than the next, and after the third a run "
        "whose loss rises by half by itself was no longer called healthy.",
        "and_alarmed": sum(bool(row["alarms"]) for row in faults if row["doubled_at"] is None),
    }
    keep(
        "alarms",
        {"requirements": requirements, "summary": summary, "healthy": calm, "faults": faults},
    )


def _stayed(row: dict[str, Any]) -> bool:
    """Whether the loss of a run never stood half above its lowest."""
    rise = row["largest_rise"]
    return not isinstance(rise, str) and rise < WENT_OFF


def _listed(row: dict[str, Any]) -> list[str]:
    return [event for event in row["alarms"].split(", ") if event]


def _rounded(interval: tuple[float, float]) -> list[float]:
    return [round(end, 3) for end in interval]


if __name__ == "__main__":
    sys.exit(main())
