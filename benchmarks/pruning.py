"""Which weights can go: Optimal Brain Damage and Surgeon against magnitude on trained models.

    python benchmarks/pruning.py [vit gpt large] [--seeds 0,1,2] [--ways magnitude ...] [--quick]
                                 [--folder build/pruning] [--figure docs/figures/pruning.png]

A ViT on digits, a GPT on characters and one of 1.02 M parameters, trained with AdamW, three seeds.
50 to 90 % of the attention and feed-forward weights are removed, nothing is retrained, and the loss
is taken on validation samples that neither training nor the curvature has seen. All ways see the
same training samples, but for the exact diagonal of the small GPT: it costs a backward pass for
every character and symbol and sees the first ``exact_samples`` of them; an estimate from the same
few stands beside it. Estimated: 100 random probes, z ⊙ H_o z (``ca.prune`` itself estimates only
where the exact diagonal costs more than it may, so the estimate is made here and passed to it).
The Surgeon goes from each share to the next (``start=``); its seconds are processor time for the
step to that share. Every predicted rise is compared with the measured one on the same samples, and
it is counted how often the interval holds it. Then all weights are rounded by groups.

Trained weights and the numbers of every seed and way are kept in ``--folder``: a stopped run goes
on, and several may share the seeds. What is not there is computed; ``pruning.json`` has it all.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import curvatlas as ca
from curvatlas import zoo
from harness.results import RESULTS, keep, requirement

SEEDS = (0, 1, 2)
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
MAGNITUDE, ALIKE = "magnitude", "magnitude, alike in every part"
SURGEON, SURGEON_ALIKE = "OBS", "OBS, alike in every part"
EXACT, ESTIMATED = "OBD, exact diagonal", "OBD, estimated diagonal"
SAME = "OBD, estimated from the same few"
LOOKS = {
    MAGNITUDE: ("#999999", "s:"),
    ALIKE: ("#555555", "d:"),
    ESTIMATED: ("#E69F00", "^--"),
    SAME: ("#CC79A7", "x--"),
    EXACT: ("#D55E00", "v-"),
    SURGEON: ("#0072B2", "o-"),
    SURGEON_ALIKE: ("#56B4E9", "o--"),
}
ROUNDING = "rounding"


@dataclass(frozen=True)
class Case:
    """A model, its data, how it is trained, and how many samples the curvature sees."""

    name: str
    model: Callable[[int], nn.Module]
    data: zoo.Dataset
    training: dict[str, Any]
    samples: int
    exact_samples: int | None  # None: no diagonal
    batch: int = 512


def cases() -> dict[str, Callable[[], Case]]:
    def vit() -> Case:
        return Case(
            "ViT, digits",
            lambda seed: zoo.reference_vit(seed=seed),
            zoo.digits(),
            {"steps": 600, "lr": 1.6e-2},
            samples=512,
            exact_samples=512,
        )

    def gpt() -> Case:
        data = zoo.text(level="character", context=64)
        return Case(
            "GPT, characters",
            lambda seed: zoo.reference_gpt(seed=seed, vocabulary=data.classes),
            data,
            {"steps": 400, "lr": 8e-3},
            samples=128,
            exact_samples=8,
        )

    def large() -> Case:
        data = zoo.text(level="character", context=64, stride=16)
        return Case(
            "GPT, 1.02 M parameters",
            lambda seed: zoo.benchmark_gpt(seed=seed, vocabulary=data.classes, n_layers=5),
            data,
            {"steps": 400, "lr": 3e-3, "batch_size": 32, "weight_decay": 0.1},
            samples=128,
            exact_samples=None,
            batch=64,
        )

    return {"vit": vit, "gpt": gpt, "large": large}


def ways(case: Case) -> dict[str, tuple[int, dict[str, Any]]]:
    """Name → how many samples it sees, and the options of ``ca.prune``."""
    many = case.samples
    found: dict[str, tuple[int, dict[str, Any]]] = {
        MAGNITUDE: (many, {"method": "magnitude"}),
        ALIKE: (many, {"method": "magnitude", "layers": "uniform"}),
        SURGEON: (many, {"method": "obs", "samples": max(256, many)}),
        SURGEON_ALIKE: (many, {"method": "obs", "samples": max(256, many), "layers": "uniform"}),
    }
    if case.exact_samples is not None:
        few, estimate = case.exact_samples, {"method": "obd", "probes": 100}
        found[ESTIMATED] = (many, estimate)
        if few != many:
            found[SAME] = (few, estimate)
        found[EXACT] = (few, {"method": "obd", "exact_diagonal": True})
    return found


def trained(case: Case, key: str, seed: int, folder: Path, *, quick: bool) -> nn.Module:
    """The model of a seed, trained once."""
    model, path = case.model(seed), folder / f"{key}-{seed}.safetensors"
    if path.exists() and not quick:
        model.load_state_dict(load_file(path))
    else:
        steps = {"steps": 3} if quick else {}
        zoo.train(model, case.data, seed=seed, **{**case.training, **steps})
        if not quick:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({n: p.detach().contiguous() for n, p in model.named_parameters()}, path)
    return model.eval()


def batches(case: Case, samples: int) -> list[Any]:
    taken = zoo.Samples(*case.data.train.take(samples))
    return [tuple(part) for part in taken.batches(case.batch)]


def measure(
    key: str, case: Case, seed: int, chosen: list[str], folder: Path, *, quick: bool
) -> None:
    """Every way at every sparsity and the roundings of one seed, into the folder."""
    path = folder / f"{key}-{seed}.json"
    done = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not quick else {}
    model = trained(case, key, seed, folder, quick=quick)
    done.setdefault("unpruned", zoo.evaluate(model, case.data.validation)[0])

    def store() -> None:
        if not quick:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(done), encoding="utf-8")

    for name, (samples, options) in ways(case).items():
        if chosen and name not in chosen:
            continue
        if quick:
            samples, options = 4, {**options, **({"samples": 4} if "samples" in options else {})}
        rows = done.setdefault(name, {"samples": samples, "levels": []})["levels"]
        if len(rows) == len(SPARSITIES):
            continue
        last = folder / f"{key}-{seed}-{options.get('layers', 'curvature')}-last.safetensors"
        for row in _levels(model, case, samples, options, done=len(rows), last=last):
            rows.append(row)
            store()
        told = ", ".join(f"{row['validation']:.4f}" for row in done[name]["levels"])
        print(f"  {case.name}, seed {seed}, {name}: {told}", file=sys.stderr, flush=True)
        store()
    if ROUNDING not in done and (not chosen or ROUNDING in chosen):
        done[ROUNDING] = _roundings(model, case, quick=quick)
        store()


def _levels(
    model: nn.Module, case: Case, samples: int, options: dict[str, Any], *, done: int, last: Path
) -> Iterator[dict[str, Any]]:
    """Losses, predictions and processor seconds at each sparsity; the diagonal is taken once.

    done: sparsities of an earlier run; last: where the Surgeon's last step is kept.
    """
    data = batches(case, samples)
    known: dict[str, Any] = {}
    if "probes" in options:
        known["curvature"] = probed_diagonal(model, data, probes=options["probes"])
        options = {"method": "obd"}
    if options["method"] == "obs" and done:
        known["start"] = ca.load(last)
    for sparsity in SPARSITIES[done:]:
        began = time.process_time()
        pruning = ca.prune(model, "cross_entropy", data, sparsity=sparsity, **options, **known)
        seconds = time.process_time() - began
        if pruning.curvature:
            known["curvature"] = pruning.curvature
        if pruning.method == "obs":
            known["start"] = pruning
            last.parent.mkdir(parents=True, exist_ok=True)
            pruning.save(last)
        pruned = copy.deepcopy(model)
        pruning.apply(pruned)
        print(f"    {sparsity:.0%}: {pruning}, {seconds:.0f} s", file=sys.stderr, flush=True)
        yield {
            "validation": zoo.evaluate(pruned, case.data.validation)[0],
            "seconds": round(seconds, 1),
            "stages": pruning.stages,
            "part_sparsity": {k: round(v, 4) for k, v in pruning.part_sparsity.items()},
            **_prediction(pruning),
        }


def _prediction(change: Any) -> dict[str, Any]:
    low, high = change.predicted_interval
    return {
        "rise": change.rise,
        "predicted": change.predicted_rise,
        "interval": [low, high],
        "held": bool(low <= change.rise <= high),
        "in_quadratic_range": change.in_quadratic_range,
        "segment": change.segment.tolist(),
    }


def _roundings(model: nn.Module, case: Case, *, quick: bool) -> list[dict[str, Any]]:
    samples = 4 if quick else case.samples
    table = ca.quantization_table(
        model, "cross_entropy", batches(case, samples), samples=samples, bits=(8, 4, 3)
    )
    return [
        {
            "bits": row.bits,
            "group": row.group,
            "rounding": row.rounding,
            "bits_per_weight": row.bits_per_weight,
            **_prediction(row),
        }
        for row in table.rows
    ]


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


def _whole(seed: dict[str, Any], way: str) -> list[dict[str, Any]]:
    """The levels of a way that is finished, else none."""
    levels = seed.get(way, {}).get("levels", [])
    return levels if len(levels) == len(SPARSITIES) else []


def summary(case: Case, seeds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, a row a way."""
    rows = []
    for name in ways(case):
        runs = [_whole(seed, name) for seed in seeds.values() if _whole(seed, name)]
        if not runs:
            continue
        levels = list(zip(*runs, strict=True))
        rows.append(
            {
                "model": case.name,
                "way": name,
                "samples": next(iter(seeds.values()))[name]["samples"],
                "seeds": len(runs),
                # processor time of all five shares, of the slowest seed
                "seconds": max(sum(row["seconds"] for row in run) for run in runs),
                **{
                    f"{share:.0%}": round(statistics.mean(row["validation"] for row in level), 4)
                    for share, level in zip(SPARSITIES, levels, strict=True)
                },
            }
        )
    unpruned = statistics.mean(seed["unpruned"] for seed in seeds.values())
    return {"name": case.name, "unpruned": unpruned, "rows": rows, "seeds": seeds}


def requirements(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst loss over magnitude's of any seed and sparsity, times, what intervals miss."""
    lines, held = [], {True: [0, 0], False: [0, 0]}
    for result in found.values():
        for way in (SURGEON, SURGEON_ALIKE, EXACT, ESTIMATED):
            ratios = [
                seed[way]["levels"][at]["validation"]
                / min(seed[m]["levels"][at]["validation"] for m in (MAGNITUDE, ALIKE) if m in seed)
                for seed in result["seeds"].values()
                for at in range(len(_whole(seed, way)))
            ]
            if ratios:
                name = f"worst loss over that of magnitude at 50 to 90 %, {way}, {result['name']}"
                lines.append(requirement(name, round(max(ratios), 3), 1.0))
        for row in result["rows"]:
            if row["way"] == SURGEON:
                name = f"processor minutes for all five shares, {SURGEON}, {result['name']}"
                lines.append(requirement(name, round(row["seconds"] / 60, 2), 5.0))
        for seed in result["seeds"].values():
            changes = [row for way in ways_of(seed) for row in seed[way]["levels"]]
            for row in [*changes, *seed.get(ROUNDING, [])]:
                count = held[row["in_quadratic_range"]]
                count[0] += not row["held"]
                count[1] += 1
    for inside, (missed, total) in held.items():
        where = "inside" if inside else "said to be outside"
        share = round(missed / max(total, 1), 4)
        name = f"share of {total} rises {where} the quadratic range that the interval misses"
        lines.append(requirement(name, share, 0.05))
    return lines


def ways_of(seed: dict[str, Any]) -> list[str]:
    """The ways that a seed's numbers have."""
    return [name for name in LOOKS if name in seed]


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(found), 4.2), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    places = [100 * share for share in SPARSITIES]
    for axes, result in zip(panels, found.values(), strict=True):
        for way, (colour, style) in LOOKS.items():
            runs = [_whole(seed, way) for seed in result["seeds"].values() if _whole(seed, way)]
            if not runs:
                continue
            columns = [[row["validation"] for row in level] for level in zip(*runs, strict=True)]
            means = [statistics.mean(column) for column in columns]
            axes.plot(places, means, style, color=colour, label=way, markersize=5)
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.axhline(result["unpruned"], color="black", linewidth=0.8, label="unpruned")
        axes.set(yscale="log", xlabel="weights removed, %", ylabel="validation loss")
        axes.set_title(f"{result['name']}: mean and range of three seeds", fontsize=9)
        axes.legend(frameon=False, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = cases()
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(known))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="by commas")
    parser.add_argument("--ways", nargs="*", default=[], help="only these")
    parser.add_argument("--folder", type=Path, default=Path("build/pruning"))
    parser.add_argument("--quick", action="store_true", help="a few samples, nothing is kept")
    parser.add_argument("--figure", type=Path, help="where to draw the losses")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for key in options.models or known:
        case = known[key]()
        for seed in (0,) if options.quick else map(int, options.seeds.split(",")):
            measure(key, case, seed, options.ways, options.folder, quick=options.quick)
    if options.quick:
        return 0
    path = RESULTS / "pruning.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": {}}
    found: dict[str, dict[str, Any]] = {}
    for key, make in known.items():
        files = {str(seed): options.folder / f"{key}-{seed}.json" for seed in SEEDS}
        seeds = {
            s: json.loads(f.read_text(encoding="utf-8")) for s, f in files.items() if f.exists()
        }
        if seeds:
            found[key] = summary(make(), seeds)
    # Models that are not in the folder keep their last numbers.
    older = {key: result for key, result in before["models"].items() if key not in found}
    names = tuple(result["name"] for result in older.values())
    kept = [line for line in before.get("requirements", []) if line["name"].endswith(names)]
    models = {**older, **found}
    rows = [row for result in models.values() for row in result["rows"]]
    keep("pruning", {"requirements": requirements(found) + kept, "rows": rows, "models": models})
    if options.figure is not None:
        draw(found, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
