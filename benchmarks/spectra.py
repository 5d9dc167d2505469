"""Eigenpairs, density and trace beside the peers: products, seconds and true errors.

    python benchmarks/spectra.py [--quick] [--parts vit-2.8k gpt-100k gpt-1m density trace]

One process, one thread, contestants in turn; processor time is kept beside wall time, which other
work on the machine disturbs. Eigenpairs: the five largest and the five smallest to a residual of
1e-4·λmax, residuals recomputed afterwards with the same reference operator for all.
hessian-eigenthings is given the smallest number of steps (in steps of 8) that reaches it, which its
user would not know. Density and trace have an exact truth on the trained ViT. Parts can be measured
one at a time: what was kept of the others stays.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import time
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

import curvatlas as ca
from curvatlas.zoo.datasets import digits
from curvatlas.zoo.models import ViT, ViTConfig
from curvatlas.zoo.training import train
from harness.cases import CASES, Case
from harness.eigensolvers import ENDS, TOLERANCE, eigen_contestants, problem_of
from harness.results import RESULTS, keep, requirement
from harness.spectral_estimates import PEERS, compare_density, compare_trace, structured_trace

EIGEN = ("vit-2.8k", "gpt-100k", "gpt-1m")
PARTS = ("eigenpairs", "over_seeds", "density", "trace", "structured_trace")


def trained_vit(seed: int = 0) -> Case:
    """The ViT of about 2.8 k parameters after 600 steps on the handwritten digits."""
    torch.manual_seed(seed)
    model, data = ViT(ViTConfig(d_ff=32)), digits()
    train(model, data, steps=600, seed=seed)
    return Case(
        "trained ViT 2.8 k", model.eval(), data.train.inputs[:128], data.train.targets[:128]
    )


def compare_eigenpairs(
    case: Case, part: str, *, rounds: int, without: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Products, seconds and true residuals of every contestant."""
    reference = ca.Hessian(problem_of(case.clone()))
    contestants = eigen_contestants(case, without)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    processor: dict[str, list[float]] = {name: [] for name in contestants}
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, run in contestants.items():
            start, busy = time.perf_counter(), time.process_time()
            values, vectors, products = run()
            seconds[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - busy)
            images = reference @ vectors.to(reference.dtype)
            residuals = (images - vectors * values.to(vectors.dtype)).norm(dim=0)
            rows[name] = {
                "part": part,
                "case": case.name,
                "parameters": case.size,
                "contestant": name,
                "products": products,
                "ends": 2 if len(values) == 2 * ENDS else 1,
                "worst_residual": float(residuals.max() / values.abs().max()),
                "values": [float(f"{v:.5g}") for v in values],
            }
            print(f"  {name}: {products} products, {processor[name][-1]:.2f} s", flush=True)
    for name, row in rows.items():
        for key, clock in (("seconds", seconds), ("processor_seconds", processor)):
            middle, ours = statistics.median(clock[name]), statistics.median(clock["curvatlas"])
            row |= {key: round(middle, 3), f"{key}_of_ours": round(middle / ours, 2)}
    return list(rows.values())


def products_over_seeds(models: tuple[int, ...], seeds: int) -> list[dict[str, Any]]:
    """Products of eigenpairs(k=5, both) over start vectors, on ViTs trained from other seeds."""
    rows = []
    for trained in models:
        operator = ca.Hessian(problem_of(trained_vit(trained)))
        found = [
            ca.eigenpairs(operator, k=ENDS, which="both", tol=TOLERANCE, seed=seed).products
            for seed in range(seeds)
        ]
        rows.append(
            {"trained_from_seed": trained, "seeds": seeds, "least": min(found),
             "median": statistics.median(found), "most": max(found)}
        )  # fmt: skip
    return rows


def requirements(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The contract's lines from what was measured."""
    lines = []
    for part in EIGEN:
        rows = [row for row in content.get("eigenpairs", []) if row["part"] == part]
        peers = [r for r in rows if r["contestant"] != "curvatlas" and r["ends"] == 2]
        if not peers:
            continue
        for key, words in (("processor_seconds", "processor time"), ("seconds", "wall time")):
            name = f"{rows[0]['case']}: {words} for both ends, of the fastest peer's"
            ratio = round(1 / min(peer[f"{key}_of_ours"] for peer in peers), 3)
            # With other work on the machine the wall clock measures that work.
            quiet = all(row["processor_seconds"] >= 0.8 * row["seconds"] for row in rows)
            limit = 0.36 if part == "gpt-1m" else 1.0
            lines.append(requirement(name, ratio if quiet or key != "seconds" else None, limit))
        if part == "vit-2.8k":
            name = "five largest and smallest of the trained ViT, products"
            lines.append(requirement(name, rows[0]["products"], 55))
            for row in content.get("over_seeds", []):
                model = row.get("trained_from_seed", 0)
                name = f"the same, most of {row['seeds']} seeds, ViT trained from seed {model}"
                lines.append(requirement(name, row["most"], 55))
    for row in content.get("density", []):
        best = min(row[peer] for peer in PEERS if peer in row)
        name = f"W1 of the density at {row['products']} products, of the best peer's nodes"
        lines.append(requirement(name, row["curvatlas"] / best, 1.0))
    for row in content.get("trace", []):
        name = f"trace of {row['matrix']}: rms error at {row['products']} products, of XTrace's"
        ratio = row["rms_error_curvatlas"] / row["rms_error_xtrace"]
        lines.append(requirement(name, ratio, 1.0))
        name = f"trace of {row['matrix']}: products to ± 1 % at 95 %, of XTrace's"
        ratio = row["products_for_1_percent_at_95"] / row["xtrace_products_for_1_percent_at_95"]
        lines.append(requirement(name, ratio, 1.0))
        name = f"trace of {row['matrix']}: products to ± 1 % at 95 % from products alone"
        lines.append(requirement(name, row["products_for_1_percent_at_95"], row["products"]))
    known = {row["matrix"]: row["products"] for row in content.get("trace", [])}
    for row in content.get("structured_trace", []):
        name = f"trace of {row['matrix']}: products to ± 1 % at 95 % with the samples' factors"
        lines.append(requirement(name, row["products"], known[row["matrix"]]))
    return lines


def kept() -> dict[str, Any]:
    """What earlier runs kept of the parts."""
    path = RESULTS / "spectra.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {k: found[k] for k in PARTS if k in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, few trials, not kept")
    parser.add_argument("--parts", nargs="*", default=[*EIGEN, "density", "trace"])
    parser.add_argument("--rounds", type=int, default=3, help="of the eigenpairs of small models")
    parser.add_argument("--without", nargs="*", default=[], help="peers that are left out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    content = {} if options.quick else kept()
    for name in (part for part in EIGEN if part in options.parts):
        case = trained_vit() if name == "vit-2.8k" else CASES[name]()
        rounds = 1 if options.quick or name == "gpt-1m" else options.rounds
        others = [row for row in content.get("eigenpairs", []) if row["part"] != name]
        content["eigenpairs"] = others + compare_eigenpairs(
            case, name, rounds=rounds, without=options.without
        )
        if name == "vit-2.8k":
            models, seeds = ((0,), 2) if options.quick else ((0, 1, 3), 6)
            content["over_seeds"] = products_over_seeds(models, seeds)
    if {"density", "trace"} & set(options.parts):
        exact = trained_vit().clone(torch.float64)
        spectra: dict[str, Tensor] = {}
        for name, kind in (("H", ca.Hessian), ("H_o", ca.GaussNewton)):
            matrix = kind(problem_of(exact)).dense()
            spectra[name] = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
        if "density" in options.parts:
            content["density"] = compare_density(spectra["H"], trials=2 if options.quick else 4)
        if "trace" in options.parts:
            trials = 5 if options.quick else 40
            truth = {name: float(values.sum()) for name, values in spectra.items()}
            content["structured_trace"] = structured_trace(
                problem_of(trained_vit()), truth, trials=trials // 2
            )
            content["trace"] = [
                {"matrix": name} | compare_trace(spectra[name], trials=trials, peer=peer)
                for name, peer in (("H", 63), ("H_o", 36))
            ]
    content["requirements"] = requirements(content)
    for line in content["requirements"]:
        print(line)
    print(json.dumps({k: v for k, v in content.items() if k != "requirements"}, indent=1))
    if not options.quick:
        print(keep("spectra", content))


if __name__ == "__main__":
    main()
