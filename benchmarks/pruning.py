"""Which weights can go: Optimal Brain Damage and Surgeon against magnitude on trained models.

    python benchmarks/pruning.py [vit gpt] [--quick] [--figure docs/figures/pruning.png]

A ViT on digits and a GPT on characters, trained with AdamW, three seeds. 50 to 90 % of the
attention and feed-forward weights are removed in one shot, nothing is retrained, and the loss is
taken on validation samples that neither training nor the curvature has seen. All ways see the same
training samples, but for the exact diagonal of the GPT: it costs a backward pass for every
character and symbol and sees the first ``exact_samples`` of them; an estimate from the same few
stands beside it. Estimated: 100 random probes, z ⊙ H_o z (``ca.prune`` itself estimates only where
the exact diagonal costs more than it may, so the estimate is made here and passed to it).
Models that are not named keep their last numbers.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import curvatlas as ca
from curvatlas import zoo
from harness.results import RESULTS, keep, requirement

SEEDS = (0, 1, 2)
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
MAGNITUDE, SURGEON = "magnitude", "OBS, blocks of 128"
EXACT, ESTIMATED = "OBD, exact diagonal", "OBD, estimated diagonal"
SAME = "OBD, estimated from the same few"
LOOKS = {
    MAGNITUDE: ("#999999", "s:"),
    ESTIMATED: ("#E69F00", "^--"),
    SAME: ("#CC79A7", "x--"),
    EXACT: ("#D55E00", "v-"),
    SURGEON: ("#0072B2", "o-"),
}


@dataclass(frozen=True)
class Case:
    """A model, its data, how it is trained, and how many samples the curvature sees."""

    name: str
    model: Callable[[int], nn.Module]
    data: zoo.Dataset
    steps: int
    rate: float
    samples: int
    exact_samples: int


def cases() -> dict[str, Callable[[], Case]]:
    def vit() -> Case:
        return Case("ViT, digits", lambda seed: zoo.reference_vit(seed=seed), zoo.digits(),
                    steps=600, rate=1.6e-2, samples=512, exact_samples=512)  # fmt: skip

    def gpt() -> Case:
        data = zoo.text(level="character", context=64)
        return Case("GPT, characters", lambda seed: zoo.reference_gpt(
            seed=seed, vocabulary=data.classes), data, steps=400, rate=8e-3, samples=128,
            exact_samples=8)  # fmt: skip

    return {"vit": vit, "gpt": gpt}


def ways(case: Case, *, quick: bool) -> dict[str, tuple[int, dict[str, Any]]]:
    """Name → how many samples it sees, and the options of ``ca.prune``."""
    few = 4 if quick else case.exact_samples
    many = 4 if quick else case.samples
    estimate = {"method": "obd", "probes": 8 if quick else 100}
    found: dict[str, tuple[int, dict[str, Any]]] = {
        MAGNITUDE: (many, {"method": "magnitude"}),
        ESTIMATED: (many, estimate),
        SAME: (few, estimate),
        EXACT: (few, {"method": "obd", "exact_diagonal": True}),
        SURGEON: (many, {"method": "obs", "samples": many}),
    }
    if few == many:
        del found[SAME]
    return found


def measure(case: Case, *, quick: bool) -> dict[str, Any]:
    """Validation losses of every way at every sparsity and seed."""
    losses: dict[str, list[list[float]]] = {}
    cost: dict[str, tuple[int, float]] = {}
    whole = []
    for seed in SEEDS[:1] if quick else SEEDS:
        model = case.model(seed)
        zoo.train(model, case.data, steps=3 if quick else case.steps, lr=case.rate, seed=seed)
        model.eval()
        whole.append(zoo.evaluate(model, case.data.validation)[0])
        for name, (samples, options) in ways(case, quick=quick).items():
            began = time.process_time()
            found, products = _losses(model, case, samples, options)
            cost[name] = products, time.process_time() - began
            losses.setdefault(name, []).append(found)
            told = ", ".join(f"{loss:.4f}" for loss in found)
            print(f"  {case.name}, seed {seed}, {name}: {told}", file=sys.stderr, flush=True)
    rows = [
        {
            "model": case.name,
            "way": name,
            "samples": ways(case, quick=quick)[name][0],
            "products_or_gradients": cost[name][0],
            "seconds": round(cost[name][1], 1),
            **{
                f"{share:.0%}": round(statistics.mean(run[at] for run in runs), 4)
                for at, share in enumerate(SPARSITIES)
            },
        }
        for name, runs in losses.items()
    ]
    return {"name": case.name, "unpruned": statistics.mean(whole), "rows": rows, "losses": losses}


def _losses(
    model: nn.Module, case: Case, samples: int, options: dict[str, Any]
) -> tuple[list[float], int]:
    """Validation loss at each sparsity; the diagonal is taken once."""
    batch = tuple(case.data.train.take(samples))
    found: list[float] = []
    curvature, products = None, 0
    if "probes" in options:
        products = options["probes"]
        curvature = probed_diagonal(model, batch, probes=products)
        options = {"method": "obd"}
    for sparsity in SPARSITIES:
        known = {} if curvature is None else {"curvature": curvature}
        pruning = ca.prune(model, "cross_entropy", batch, sparsity=sparsity, **options, **known)
        curvature, products = pruning.curvature or None, max(products, pruning.products)
        pruned = copy.deepcopy(model)
        pruning.apply(pruned)
        found.append(zoo.evaluate(pruned, case.data.validation)[0])
    return found, products


def probed_diagonal(model: nn.Module, batch: Any, *, probes: int) -> dict[str, torch.Tensor]:
    """Parameter name → mean of z ⊙ H_o z over random signs z, for what ``ca.prune`` removes."""
    names = list(ca.prune(model, "cross_entropy", batch, sparsity=0.5, method="magnitude").masks)
    problem = ca.Problem(model, "cross_entropy", batch, parameters=names)
    generator = torch.Generator().manual_seed(0)
    operator = ca.GaussNewton(problem)
    total = torch.zeros(problem.size, dtype=operator.dtype)
    for _ in range(0, probes, 4):
        signs = torch.randint(0, 2, (problem.size, 4), generator=generator)
        columns = (2.0 * signs - 1.0).to(operator.dtype)
        total += (columns * (operator @ columns)).sum(1)
    pieces = problem.layout.split((total / probes).clamp_min(0))
    return {n: p.squeeze(0) for n, p in zip(problem.layout.names, pieces, strict=True)}


def requirements(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean loss over that of magnitude, at the sparsity where it is the worst."""
    lines = []
    for result in found.values():
        rows = {row["way"]: row for row in result["rows"]}
        for way in (SURGEON, EXACT, ESTIMATED):
            ratios = [
                rows[way][f"{share:.0%}"] / rows[MAGNITUDE][f"{share:.0%}"] for share in SPARSITIES
            ]
            name = f"worst loss over that of magnitude at 50 to 90 %, {way}, {result['name']}"
            lines.append(requirement(name, round(max(ratios), 3), 1.0))
    return lines


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(found), 4.2), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    places = [100 * share for share in SPARSITIES]
    for axes, result in zip(panels, found.values(), strict=True):
        for way, runs in result["losses"].items():
            colour, style = LOOKS[way]
            columns = list(zip(*runs, strict=True))
            means = [statistics.mean(column) for column in columns]
            axes.plot(places, means, style, color=colour, label=way, markersize=5)
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.axhline(result["unpruned"], color="black", linewidth=0.8, label="unpruned")
        axes.set(yscale="log", xlabel="weights removed, %", ylabel="validation loss")
        axes.set_title(f"{result['name']}: mean and range of three seeds", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = cases()
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(known))
    parser.add_argument("--quick", action="store_true", help="a few samples, nothing is kept")
    parser.add_argument("--figure", type=Path, help="where to draw the losses")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    path = RESULTS / "pruning.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["models"] if path.exists() else {}
    found: dict[str, dict[str, Any]] = {} if options.quick else dict(kept)
    for name in options.models or known:
        found[name] = measure(known[name](), quick=options.quick)
        if not options.quick:
            rows = [row for result in found.values() for row in result["rows"]]
            keep("pruning", {"requirements": requirements(found), "rows": rows, "models": found})
    if options.figure is not None:
        draw(found, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
