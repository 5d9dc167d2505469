"""The full map of H, H_o and H_f for the 1 M GPT: what it costs and how good it is.

    python benchmarks/atlas.py [--quick] [--columns 10] [--reference 48]
    python benchmarks/atlas.py --engines     # only the time of the two engines, column by column

The cost is the processor time of ``ca.atlas`` divided by that of one H·v, timed in turns. The
errors compare a sample of columns with a reference from many independent probes: over all entries
that are not zero (above 1e-5 of the largest of their part), and over those that matter, above 1 %
of it. The embeddings, which are hardest, are always in the sample.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import time
from typing import Any
from unittest import mock

import numpy as np
import torch

import curvatlas as ca
from curvatlas.analysis.atlas.mapping import atlas
from curvatlas.analysis.atlas.sketch import Sketch
from curvatlas.operators.curvature import PARTS, CurvatureParts
from harness.cases import gpt_1m, gpt_100k
from harness.results import RESULTS, keep, requirement


def timed_atlas(problem: ca.Problem, products: int) -> tuple[Any, float]:
    """The map, and its processor time in products H·v on a kept graph.

    One H·v is timed after every column of the map, so that a machine that is slower for a while is
    slower for both.
    """
    operator = ca.Hessian(problem)
    vector = torch.randn(problem.size, dtype=problem.dtype)
    operator @ vector
    units: list[float] = []
    measure_column = Sketch._measure

    def and_one_product(sketch: Sketch, j: int, count: int) -> Any:
        found = measure_column(sketch, j, count)
        start = time.process_time()
        operator @ vector
        units.append(time.process_time() - start)
        return found

    start = time.process_time()
    with mock.patch.object(Sketch, "_measure", and_one_product):
        result = atlas(problem, method="sketch", rtol=0.05, worst=0.05, products=products)
    seconds = time.process_time() - start - sum(units)
    return result, seconds / statistics.mean(units)


def measure(case: Any, *, products: int, columns: int, reference: int) -> dict[str, Any]:
    problem = ca.Problem(case.model, "cross_entropy", (case.inputs, case.targets))
    result, cost = timed_atlas(problem, products)
    return {
        "case": case.name,
        "parameters": problem.size,
        "blocks": len(result.names),
        "products": result.products,
        "in_products_of_h": round(cost, 1),
        "estimated_rms_error": round(result.error, 4),
        **errors(problem, result, columns, reference),
    }


def errors(problem: ca.Problem, result: Any, columns: int, reference: int) -> dict[str, Any]:
    """Relative errors of the Frobenius norms in some columns, and how many intervals hold."""
    blocks = list(_blocks(problem))
    drawn = np.random.default_rng(0).choice(len(blocks), size=columns, replace=False)
    # The embeddings are always among them: they share most of the entries that are hard to know.
    hard = [j for j, block in enumerate(blocks) if block.sublayer == "embedding"]
    chosen = sorted({*hard, *drawn.tolist()})
    sketch = Sketch(CurvatureParts(problem), blocks, seed=12345)
    sketch.probe(range(len(blocks)), 2)  # so that the probes of the reference know where to look
    for j in chosen:
        sketch.groups[j].clear()
    sketch.probe([int(j) for j in chosen], reference)
    relative, inside, own, large = [], [], [], []
    for j in map(int, chosen):
        energy = sketch._column(j, np.eye(len(blocks)))
        for p, part in enumerate(PARTS):
            found = result.frobenius[part]
            want = np.sqrt(energy.value[p])
            known = want > 1e-5 * float(found.values.max())  # zeros have no relative error
            got = found.values[:, j].numpy()
            relative.append((got[known] - want[known]) / want[known])
            large.append(want[known] > 0.01 * float(found.values.max()))
            own.append(energy.relative_error()[p][known])
            low, high = found.low[:, j].numpy(), found.high[:, j].numpy()
            inside.append(((low <= want) & (want <= high))[known])
    all_errors, reference_error = np.concatenate(relative), np.concatenate(own)
    matter = all_errors[np.concatenate(large)]
    return {
        "compared_entries": int(all_errors.size),
        "rms_error": round(float(np.sqrt((all_errors**2).mean())), 4),
        "median_error": round(float(np.median(np.abs(all_errors))), 4),
        "error_of_95_percent": round(float(np.quantile(np.abs(all_errors), 0.95)), 4),
        "worst_error": round(float(np.abs(all_errors).max()), 4),
        "entries_that_matter": int(matter.size),
        "rms_error_of_those": round(float(np.sqrt((matter**2).mean())), 4),
        "error_of_95_percent_of_those": round(float(np.quantile(np.abs(matter), 0.95)), 4),
        "worst_error_of_those": round(float(np.abs(matter).max()), 4),
        "reference_rms_error": round(float(np.sqrt((reference_error**2).mean())), 4),
        "inside_interval": round(float(np.concatenate(inside).mean()), 4),
    }


def compare_engines(case: Any, *, probes: int, stride: int) -> dict[str, Any]:
    """Processor time of the map's columns by hand-written passes and by autograd, in turns.

    The map's other work (norms of pieces, means) is part of both; the first product's linearisation
    and checks, once a map, are not. Every ``stride``-th column, with as many probes as a map begins
    with.
    """
    sketches = {}
    for engine in ("autograd", "tangent"):
        model = case.clone()
        problem = ca.Problem(model.model, "cross_entropy", (model.inputs, model.targets))
        operator = CurvatureParts(problem, engine=engine)
        sketches[engine] = Sketch(operator, list(_blocks(problem)), seed=0)
    blocks = sketches["tangent"].blocks
    seconds = dict.fromkeys(sketches, 0.0)
    chosen = range(0, len(blocks), stride)
    for sketch in sketches.values():
        sketch._measure(0, probes)
    for j in chosen:
        for engine, sketch in sketches.items():
            start = time.process_time()
            sketch._measure(j, probes)
            seconds[engine] += time.process_time() - start
    return {
        "case": case.name,
        "columns": len(chosen),
        "products": probes * len(chosen),
        **{f"seconds_{engine}": round(value, 3) for engine, value in seconds.items()},
        "tangent_of_autograd": round(seconds["tangent"] / seconds["autograd"], 3),
    }


def _blocks(problem: ca.Problem) -> Any:
    from curvatlas.analysis.atlas.result import blocks_of

    return blocks_of(problem.anatomy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the 100 k GPT; nothing is kept")
    parser.add_argument("--products", type=int, default=406, help="of H, H_o and H_f together")
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--reference", type=int, default=48)
    parser.add_argument("--engines", action="store_true", help="only time the two engines")
    parser.add_argument("--stride", type=int, default=1, help="of the columns they are timed on")
    options = parser.parse_args()
    case = gpt_100k() if options.quick else gpt_1m()
    if options.engines:
        engines = compare_engines(case, probes=5, stride=options.stride)
        print(engines)
        if not options.quick:
            _keep({"engines": [engines]})
        return
    row = measure(
        case, products=options.products, columns=options.columns, reference=options.reference
    )
    print(row)
    if not options.quick:
        requirements = [
            requirement("full map in products of H", row["in_products_of_h"], 400),
            requirement("rms relative error of its entries", row["rms_error"], 0.05),
            requirement(
                "the same over entries above 1 % of the largest", row["rms_error_of_those"], 0.05
            ),
            requirement(
                "error that 95 % of those stay below", row["error_of_95_percent_of_those"], 0.05
            ),
            requirement("worst error of those", row["worst_error_of_those"], 0.05),
        ]
        _keep({"rows": [row], "requirements": requirements})


def _keep(measured: dict[str, Any]) -> None:
    """Replace what was measured now; the requirements follow."""
    path = RESULTS / "atlas.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    content = {k: known[k] for k in ("rows", "engines", "requirements") if k in known} | measured
    name = "time of the map's columns, hand-written passes of autograd"
    others = [line for line in content.get("requirements", []) if line["name"] != name]
    for row in content.get("engines", []):
        others.append(requirement(name, row["tangent_of_autograd"], 0.7))
    print(keep("atlas", {**content, "requirements": others}))


if __name__ == "__main__":
    main()
